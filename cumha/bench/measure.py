"""Measure cases one after the other: inputs, plan, times, ceilings.

A `Session` keeps the inputs of the last case and every ceiling, so that cases over the same arrays
are measured over the same arrays and against the same ceiling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

import cumha
from cumha import masks, tuning
from cumha.bench import ceilings
from cumha.bench.cases import Case, Work, work_of
from cumha.bench.clock import Call, Clock, Sample
from cumha.launch import aligned_bytes

ROTATED_CACHES = 4  # the input sets together exceed the L2 cache so many times
MOST_SETS = 512
MEMORY_SHARE = 0.5  # of the free memory that input sets may take
MOST_PINNED = 8e9  # bytes of host memory for the end-to-end time

#: What can be measured beside the kernel time.
PARTS = ("ceilings", "eager", "end_to_end")

Peer = Callable[[Case, "Inputs", int, int], dict[str, Any]]


@dataclass
class Inputs:
    """Input sets of one shape: (q, k, v, out) each, taken in turn."""

    key: tuple[Any, ...]
    sets: list[tuple[Any, Any, Any, Any]]
    set_bytes: int
    enough: bool  # to exceed the cache as `ROTATED_CACHES` says

    @property
    def text(self) -> str:
        """How many sets of which size."""
        text = f"{len(self.sets)} x {self.set_bytes / 1e6:.3g} MB"
        return text if self.enough else f"{text}, below {ROTATED_CACHES} x L2"


@dataclass
class Result:
    """What was measured of a case; ``refused`` says why nothing was."""

    case: Case
    work: Work | None = None
    refused: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    inputs: str = ""
    kernel: Sample | None = None
    eager: Sample | None = None
    end_to_end: Sample | None = None
    ceilings: ceilings.Ceilings = field(default_factory=ceilings.Ceilings)
    peers: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float | None:
        """The median kernel time."""
        return None if self.kernel is None else self.kernel.median

    @property
    def bytes_per_second(self) -> float | None:
        return None if self.kernel is None or self.work is None else self._rate(self.work.bytes)

    @property
    def operations_per_second(self) -> float | None:
        if self.kernel is None or self.work is None:
            return None
        return self._rate(self.work.operations)

    def _rate(self, amount: int) -> float:
        assert self.kernel is not None
        return amount / max(self.kernel.median, 1e-12)

    @property
    def of_ceiling(self) -> float | None:
        """The larger floor over the kernel time: 1 leaves nothing to gain."""
        floor = None if self.work is None else self.ceilings.floor(self.work)
        return None if floor is None or not self.seconds else floor / self.seconds

    def as_json(self) -> dict[str, Any]:
        """All numbers, for ``--json``; times in seconds."""
        case = {n: x for n, x in vars(self.case).items() if n != "mask"}
        return {
            "case": {**case, "mask": self.case.mask_text(), "settings": dict(self.case.settings)},
            "refused": self.refused or None,
            "plan": self.plan,
            "inputs": self.inputs,
            "work": None if self.work is None else asdict(self.work),
            **{
                name: None if sample is None else asdict(sample)
                for name in ("kernel", "eager", "end_to_end")
                for sample in [getattr(self, name)]
            },
            "bytes_per_second": self.bytes_per_second,
            "operations_per_second": self.operations_per_second,
            "ceilings": asdict(self.ceilings),
            "of_ceiling": self.of_ceiling,
            "peers": self.peers,
        }


class Session:
    """Measures cases with one clock.

    Parameters
    ----------
    parts : sequence of str
        Which of `PARTS` to measure beside the kernel time.
    peers : dict
        Functions that time another library on a case's inputs, by the library's name.
    strict : bool
        Raise where a case is refused, instead of recording why.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        warmups: int,
        repeats: int,
        parts: Sequence[str] = PARTS,
        peers: dict[str, Peer] | None = None,
        strict: bool = False,
    ) -> None:
        self.clock, self.warmups, self.repeats = clock, warmups, repeats
        self.parts, self.peers, self.strict = parts, peers or {}, strict
        self._inputs: Inputs | None = None
        self._ceilings = ceilings.Store(clock, warmups, repeats)

    def measure(self, case: Case) -> Result:
        """Measure one case.

        Raises
        ------
        RuntimeError, MemoryError
            If it cannot run, UnsupportedError and CompileError among them; only where the session
            is strict.
        """
        result = Result(case)
        try:
            with tuning.using(**dict(case.settings)):
                self._measure(case, result)
        except (RuntimeError, MemoryError) as error:  # a refusal, the compiler's or CUDA's
            if self.strict:
                raise
            result.refused = reason(error, case)
        return result

    def _measure(self, case: Case, result: Result) -> None:
        result.work = work = work_of(case)
        inputs = self._inputs_of(case, work)
        plans, options = self._plans(case, inputs)
        choice = plans[0].choice
        result.plan = {
            "path": choice.path, "splits": choice.splits, "split_by": choice.split_by,
            "tile_q": choice.tile_q, "tile_k": choice.tile_k, "grid": choice.grid,
            "threads": choice.threads, "shared_bytes": choice.shared_bytes,
            "workspace_bytes": choice.workspace_bytes, "columns": choice.columns,
            "ring_slots": choice.ring_slots, "padding": choice.padding,
            "stage_mask": choice.stage_mask,
        }  # fmt: skip
        result.inputs = inputs.text
        if case.splits is not None and choice.splits != case.splits:
            result.refused = f"clamped to {choice.splits} splits"
            return
        clock = self.clock
        result.kernel = clock.kernel([p.execute for p in plans], self.warmups, self.repeats)
        call = self._public_call(inputs, options)
        if "eager" in self.parts:
            result.eager = clock.eager(call)
        if "end_to_end" in self.parts and inputs.set_bytes <= MOST_PINNED:
            q, k, v, out = inputs.sets[0]
            result.end_to_end = clock.end_to_end((q, k, v), out, call, self.repeats)
        if "ceilings" in self.parts:
            result.ceilings = self._ceilings.of(case, work, inputs.key, inputs.sets)
        for name, peer in self.peers.items():
            result.peers[name] = peer(case, inputs, self.warmups, self.repeats)

    def _inputs_of(self, case: Case, work: Work) -> Inputs:
        count, enough = self._set_count(case, work)
        key = (*case.shapes.values(), case.dtype, count)
        if self._inputs is None or self._inputs.key != key:
            self._inputs = None  # before the next ones take memory
            self._ceilings.forget_arrays()
            self.clock.release()
            clock, dtype, shapes = self.clock, case.numpy_dtype, case.shapes
            sets = [
                (
                    *(clock.random(shapes[name], dtype) for name in ("q", "k", "v")),
                    clock.empty(shapes["out"], dtype),
                )
                for _ in range(count)
            ]
            self._inputs = Inputs(key, sets, case.array_bytes, enough)
        return self._inputs

    def _set_count(self, case: Case, work: Work) -> tuple[int, bool]:
        """Input sets until what is read of them exceeds the cache, and whether memory allows it."""
        read = max(min(work.bytes, case.array_bytes), 1)
        wanted = max(1, -(-ROTATED_CACHES * self.clock.l2_bytes // read))
        free = self.clock.free_bytes()
        if free is None:
            return min(wanted, MOST_SETS), wanted <= MOST_SETS
        held = 0 if self._inputs is None else len(self._inputs.sets) * self._inputs.set_bytes
        if case.array_bytes > free + held:
            raise MemoryError(
                f"one set of inputs takes {case.array_bytes / 1e9:.3g} GB, "
                f"{(free + held) / 1e9:.3g} GB are free"
            )
        fitting = int((free + held) * MEMORY_SHARE) // max(case.array_bytes, 1)
        count = max(1, min(wanted, fitting, MOST_SETS))
        return count, count == wanted

    def _plans(self, case: Case, inputs: Inputs) -> tuple[list[Any], dict[str, Any]]:
        """A plan for each input set, all with the same workspace, and the call's options."""
        clock = self.clock
        mask = None if case.mask is None else masks.map_arrays(case.mask, clock.array)
        options: dict[str, Any] = {
            "mask": mask, "causal": case.causal, "layout": case.layout, "path": case.path,
            "return_lse": case.return_lse, "splits": case.splits, "split_by": case.split_by,
            "keys_per_split": case.keys_per_split,
        }  # fmt: skip
        if case.key_lengths is not None:
            lengths = np.full(case.batch, case.key_lengths, case.length_dtype)
            options["key_lengths"] = clock.array(lengths)
        if case.return_lse:
            rows = (case.batch, case.heads_q, case.len_q)
            options["lse"] = clock.empty(rows, np.dtype(np.float32))
        q, k, v, out = inputs.sets[0]
        needed = cumha.plan(q, k, v, out=out, **options).workspace_bytes
        if needed:
            options["workspace"] = aligned_bytes(q, needed)
        plans = [cumha.plan(q, k, v, out=out, **options) for q, k, v, out in inputs.sets]
        return plans, options

    def _public_call(self, inputs: Inputs, options: dict[str, Any]) -> Call:
        q, k, v, out = inputs.sets[0]
        return lambda: cumha.attention(q, k, v, out=out, **options)


def reason(error: BaseException, case: Case) -> str:
    """One line; of a list of paths, only that of the path that was asked for."""
    lines = str(error).splitlines() or [type(error).__name__]
    for line in lines[1:]:
        name, _, why = line.strip().partition(": ")
        if name == case.path:
            return why
    return "; ".join(line.strip() for line in lines)
