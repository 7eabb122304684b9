"""Find the part of a call that goes wrong, by leaving parts out one after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cumha import api, masks
from cumha.errors import UnsupportedError
from cumha.testing.criterion import Mismatch, expect
from cumha.testing.transfer import to_host

_OUTPUTS = ("out", "lse", "workspace", "return_lse")
_SPLITS = ("splits", "split_by", "keys_per_split")
_MEANING = ("mask", "causal", "key_lengths", "scale", "layout")  # what the reference needs to know
_SIMPLER = (
    ("mask off", ("mask",)),
    ("key_lengths off", ("key_lengths",)),
    ("causal off", ("causal",)),
    ("splits = 1", _SPLITS),
)
_SUSPECTS = {
    "mask off": "the mask, its arrays and how they are looked up",
    "key_lengths off": "key_lengths",
    "causal off": "the causal test and where it is anchored",
    "splits = 1": "how the keys are split and the parts merged",
}


@dataclass(frozen=True)
class Stage:
    """One simplification of a call and how its result compares with the reference."""

    name: str
    mismatch: Mismatch | None = None
    skipped: str | None = None  # why it was not run

    @property
    def differs(self) -> bool:
        """Whether it was run and its result is wrong."""
        return self.mismatch is not None

    def __str__(self) -> str:
        if self.skipped:
            return f"{self.name:<18}not run: {self.skipped}"
        return f"{self.name:<18}{'DIFFERS' if self.differs else 'agrees'}"


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What `diagnose` found; print it."""

    stages: tuple[Stage, ...]

    @property
    def ok(self) -> bool:
        """Whether every stage that was run agrees with the reference."""
        return self.first is None

    @property
    def first(self) -> Stage | None:
        """The first stage, in the order walked, that differs from the reference."""
        return next((stage for stage in self.stages if stage.differs), None)

    @property
    def cause(self) -> str:
        """What to look at, in one sentence."""
        asked, *simpler = (stage for stage in self.stages if not stage.skipped)
        other = simpler.pop() if simpler and simpler[-1].name.startswith("path ") else None
        if not asked.differs:
            wrong = [stage.name for stage in self.stages if stage.differs]
            return (
                f"the call as asked agrees, but {', '.join(wrong)} does not"
                if wrong
                else "every stage agrees with the reference"
            )
        for stage in simpler:
            if not stage.differs:
                return f"it agrees with {stage.name}: look at {_SUSPECTS[stage.name]}"
        if other is not None and not other.differs:
            return f"it agrees on {other.name}: look at the path that was taken"
        return "it differs in every stage: look at layout, strides, heads, scale or the values"

    def __repr__(self) -> str:
        lines = [f"diagnosis: {self.cause}", *(f"  {stage}" for stage in self.stages)]
        if self.first is not None:
            lines.append(f"first that differs: {self.first.name}")
            lines += [f"  {line}" for line in str(self.first.mismatch).splitlines()]
        return "\n".join(lines)


def diagnose(
    q: Any, k: Any, v: Any, *, function: Callable[..., Any] | None = None, **options: Any
) -> Diagnosis:
    """Compare a call with the float64 reference, part by part, and say which part goes wrong.

    The stages leave out more and more, the last one takes the simplest path instead:

    1. as asked
    2. mask off
    3. key_lengths off, where there are any
    4. causal off
    5. splits = 1
    6. path "naive" (NumPy arrays: "host"), otherwise as asked

    Parameters
    ----------
    q, k, v : numpy.ndarray or cupy.ndarray
        As in `cumha.attention`. CuPy arrays, those of the mask too, are copied to the host
        for the reference.
    function : callable, optional
        What to examine instead of `cumha.attention`: takes the same arguments and, with
        ``return_lse=True``, returns (out, lse). The last stage takes cumha's own path in
        any case.
    **options
        Those of `cumha.attention`. ``out``, ``lse`` and ``workspace`` serve the first stage only.

    Returns
    -------
    Diagnosis
        ``first`` is the first stage that differs, with coordinates; ``cause`` says what to look at.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, RuntimeError
        If the call itself is refused.
    """
    examined = api.attention if function is None else function
    outputs = {n: options.pop(n) for n in _OUTPUTS if n in options}
    outputs["return_lse"] = True
    stages = [_run("as asked", examined, (q, k, v), {**options, **outputs})]
    reduced = dict(options)
    for name, left_out in _SIMPLER:
        given = [reduced.pop(n, None) for n in left_out]
        if all(x is None or x is False for x in given):
            stages.append(Stage(name, skipped="nothing to leave out"))
        else:
            stages.append(_attempt(name, examined, (q, k, v), {**reduced, "return_lse": True}))
    path = "host" if isinstance(q, np.ndarray) else "naive"
    kept = {n: x for n, x in options.items() if n not in (*_SPLITS, "backend")}
    kept.update(path=path, return_lse=True)
    stages.append(_attempt(f"path {path}", api.attention, (q, k, v), kept))
    return Diagnosis(tuple(stages))


def _run(
    name: str, function: Callable[..., Any], qkv: tuple[Any, Any, Any], options: dict[str, Any]
) -> Stage:
    out, lse = function(*qkv, **options)
    asked = {n: _on_host(x) for n, x in options.items() if n in _MEANING}
    expected = expect(*(to_host(x) for x in qkv), **asked)
    return Stage(name, expected.mismatch(to_host(out), to_host(lse)))


def _attempt(
    name: str, function: Callable[..., Any], qkv: tuple[Any, Any, Any], options: dict[str, Any]
) -> Stage:
    """A stage that need not run: a simpler call may be one that no path serves."""
    try:
        return _run(name, function, qkv, options)
    except UnsupportedError as error:
        return Stage(name, skipped=str(error).splitlines()[0])


def _on_host(option: Any) -> Any:
    if isinstance(option, masks.Expr):
        return masks.map_arrays(option, to_host)
    return to_host(option) if hasattr(option, "dtype") and hasattr(option, "strides") else option
