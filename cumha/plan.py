"""Decide how to run a problem: pure Python over a `Problem`, the caller's `Request` and a `Device`.

    decide(problem, request, device) -> Choice      the path and its geometry, with every refusal
    kernel_spec(choice, problem, mask) -> KernelSpec
    Plan                                            both, bound to options: run() and explain()

A decision is remembered by what it depends on, in a bounded cache: decode with a growing cache
makes a new plan per token, never a new kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cumha import host, masks, params
from cumha.errors import UnsupportedError
from cumha.masks import MAX_ARRAYS, MAX_NUMBERS, NARROW_LIMIT, Expr
from cumha.paths import PATHS, Request
from cumha.problem import (
    WORKSPACE_ALIGNMENT,
    Arrays,
    Problem,
    describe,
    element_size,
    first_difference,
)
from cumha.tilings import (
    GEMV_FILL,
    GEMV_THREADS,
    GEMV_TILE,
    TILED_FILL,
    TILED_THREADS,
    choose_gemv,
    choose_tiled,
    tile_bytes,
)

if TYPE_CHECKING:
    from cumha.compile import KernelSpec
    from cumha.device import Device

MAX_GRID = 2**31 - 1  # blocks along x
MERGE_SECONDS = 3e-6  # of a launch of split_reduce, beside its traffic
REDUCE_THREADS = 128  # one block per row
HOST_SPLIT_TILE = 64  # keys
NAIVE_THREADS = 128
NAIVE_ROWS = NAIVE_THREADS // 32  # one warp per row


@dataclass(frozen=True)
class Choice:
    """How a problem will run."""

    path: str
    backend: str
    device: Device | None
    tile_q: int  # query rows of a block
    tile_k: int  # keys of a tile; 1 where a path takes them one by one
    splits: int
    split_by: str
    keys_per_split: int | None
    grid: int  # blocks
    threads: int  # of a block
    shared_bytes: int  # dynamic shared memory of a block
    workspace_bytes: int
    rejected: tuple[tuple[str, tuple[str, ...]], ...] = field(repr=False)
    columns: int = 0  # these four as in `cumha.tuning.Tuning`; 0 where a path has no use for one
    ring_slots: int = 0
    padding: int = 0
    stage_mask: int = 0

    @property
    def split_mode(self) -> int:
        """How a kernel divides keys, a value of ``SplitBy`` in config.cuh; 0 without splits."""
        if self.splits == 1:
            return 0
        if self.keys_per_split is not None:
            return 3
        return 1 if self.split_by == "tiles" else 2


@functools.lru_cache(maxsize=1024)
def decide(problem: Problem, request: Request, device: Device | None) -> Choice:
    """Choose the path and its geometry.

    Parameters
    ----------
    device : Device or None
        The GPU of a CuPy problem, real or made by hand; None for NumPy arrays.

    Raises
    ------
    UnsupportedError
        If no path fits; each path's reasons are listed.
    """
    refusals = {path.name: path.rejects(problem, request, device) for path in PATHS}
    drawbacks = {path.name: path.drawback(problem) for path in PATHS}
    chosen = None
    for path in sorted(PATHS, key=lambda path: drawbacks[path.name] != ""):
        if refusals[path.name]:
            continue
        geometry = _GEOMETRY[path.name](problem, request, device)
        blocks = geometry["grid"]
        if geometry["splits"] > 1 and path.backend == "cuda":
            blocks = max(blocks, problem.rows)  # of split_reduce
        if blocks <= MAX_GRID:
            chosen = path, geometry
            break
        refusals[path.name] = [f"it would need {blocks} blocks, above {MAX_GRID}"]
    if chosen is None:
        listed = "\n".join(f"  {name}: {'; '.join(why)}" for name, why in refusals.items())
        raise UnsupportedError(f"no path can run {problem!r}:\n{listed}")
    path, geometry = chosen
    return Choice(
        path=path.name,
        backend="emulate" if request.backend == "emulate" else path.backend,
        device=device,
        split_by=request.split_by,
        keys_per_split=request.keys_per_split,
        rejected=tuple(
            (name, tuple(why) or (drawbacks[name],))
            for name, why in refusals.items()
            if name != path.name and (why or drawbacks[name])
        ),
        **geometry,
    )


def _host_geometry(problem: Problem, request: Request, device: Device | None) -> dict[str, int]:
    tile_q, tile_k = host.choose_tiles(problem)
    if request.wants_splits:  # small tiles, so that short inputs can be divided too
        tile_k = min(tile_k, HOST_SPLIT_TILE)
    return _geometry(tile_q, tile_k, splits=request.splits or 1)


def _naive_geometry(problem: Problem, request: Request, device: Device | None) -> dict[str, int]:
    grid = min(-(-problem.rows // NAIVE_ROWS), MAX_GRID)
    return _geometry(NAIVE_ROWS, 1, grid=grid, threads=NAIVE_THREADS)


def _gemv_geometry(problem: Problem, request: Request, device: Device | None) -> dict[str, int]:
    tiling = choose_gemv(problem, request.tuning, device)
    return _split_geometry(
        problem,
        request,
        device,
        (tiling.block_rows, GEMV_TILE),
        Pace(GEMV_FILL, tiling.tile_seconds(problem)),
        threads=GEMV_THREADS,
        shared_bytes=tiling.shared_bytes(problem),
        ring_slots=tiling.ring_slots,
    )


def _tiled_geometry(problem: Problem, request: Request, device: Device | None) -> dict[str, int]:
    tiling = choose_tiled(problem, request.tuning, device)
    assert tiling is not None  # else the path was rejected
    stage_mask = request.tuning.stage_mask
    return _split_geometry(
        problem,
        request,
        device,
        (tiling.block_rows, tiling.tile_keys),
        Pace(TILED_FILL, tiling.tile_seconds(problem)),
        threads=TILED_THREADS,
        shared_bytes=tiling.shared_bytes(problem),
        columns=tiling.columns,
        ring_slots=tiling.ring_slots,
        padding=tiling.padding,
        stage_mask=int(problem.staged_bytes > 0) if stage_mask is None else stage_mask,
    )


def _split_geometry(
    problem: Problem,
    request: Request,
    device: Device | None,
    tile: tuple[int, int],
    pace: Pace,
    **more: int,
) -> dict[str, int]:
    """Of blocks that take packed rows of a KV head and a split of the keys (split.cuh)."""
    rows, keys = tile
    blocks = problem.batch * problem.heads_kv * -(-problem.group * problem.len_q // rows)
    splits = choose_splits(problem, request, device, blocks, keys, pace)
    return _geometry(
        rows,
        keys,
        splits=splits,
        grid=blocks * splits,
        workspace_bytes=workspace_bytes(problem, splits),
        **more,
    )


_GEOMETRY: dict[str, Callable[[Problem, Request, Device | None], dict[str, int]]] = {
    "host": _host_geometry,
    "naive": _naive_geometry,
    "gemv": _gemv_geometry,
    "tiled": _tiled_geometry,
}


def _geometry(tile_q: int, tile_k: int, **more: int) -> dict[str, int]:
    empty = {"splits": 1, "grid": 0, "threads": 0, "shared_bytes": 0, "workspace_bytes": 0}
    return {"tile_q": tile_q, "tile_k": tile_k, **empty, **more}


@dataclass(frozen=True)
class Pace:
    """What the number of splits depends on beside sizes, as measured on an H200.

    Attributes
    ----------
    fill : int
        Blocks per multiprocessor that splits add up to.
    tile_seconds : float
        What a block on its own takes for a tile of keys.
    """

    fill: int
    tile_seconds: float


def choose_splits(
    problem: Problem, request: Request, device: Device | None, blocks: int, tile: int, pace: Pace
) -> int:
    """Into how many parts each row block's keys are divided.

    Parameters
    ----------
    blocks : int
        Blocks without splits.
    tile : int
        Keys that a split is counted in.
    """
    if request.keys_per_split is not None:
        return max(1, -(-(problem.key_offset + problem.len_k) // request.keys_per_split))
    tiles = max(1, -(-problem.len_k // tile))
    if request.splits is not None:
        return min(request.splits, tiles)
    if device is None or blocks == 0:
        return 1
    splits = max(1, min(device.sm_count * pace.fill // blocks, tiles))  # no second wave

    bandwidth = device.memory_bandwidth or math.inf

    def seconds(parts: int) -> float:
        together = tile_bytes(problem, tile) * blocks * parts / bandwidth
        return tiles / parts * max(pace.tile_seconds, together)

    traffic = 2 * workspace_bytes(problem, splits) / bandwidth
    return splits if seconds(1) - seconds(splits) > MERGE_SECONDS + traffic else 1


def workspace_parts(problem: Problem, splits: int) -> tuple[int, int, int, int]:
    """Byte offsets of o, m and l in the workspace, and its size; each part begins at 128 bytes."""

    def rounded(size: int) -> int:
        return -(-size // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT

    scalars = rounded(splits * problem.rows * 4)
    o = rounded(splits * problem.rows * problem.head_dim_v * 4)
    return 0, o, o + scalars, o + 2 * scalars


def workspace_bytes(problem: Problem, splits: int) -> int:
    """Bytes of the partial states of all splits; 0 without splits."""
    return workspace_parts(problem, splits)[3] if splits > 1 else 0


_ELEMENT_TYPES = {
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
    "float64": "double",
}
_MOST_SPECS = 4096
_specs: dict[tuple[Any, ...], KernelSpec] = {}


def kernel_spec(
    choice: Choice, problem: Problem, mask: Expr | None, *, arch: str, build: str = "release"
) -> KernelSpec:
    """The specification of the kernel for a choice: structure only, no lengths and no values.

    Parameters
    ----------
    mask : Expr or None
        The mask whose structure is ``problem.mask``.
    arch : str
        What to build for, as `cumha.compile.target_architecture` says.
    """
    key = (
        choice.path, arch, build, problem.dtype, problem.head_dim, problem.head_dim_v, problem.mask,
        problem.wide_index, problem.key_lengths, problem.store_state, problem.return_lse,
        problem.vector, problem.out_vector, choice.split_mode, choice.threads, choice.tile_q,
        choice.tile_k, choice.columns, choice.ring_slots, choice.padding, choice.stage_mask,
    )  # fmt: skip
    if key not in _specs:
        from cumha.compile import KernelSpec

        if len(_specs) >= _MOST_SPECS:
            _specs.clear()  # cheap to make again
        _specs[key] = KernelSpec(
            path=choice.path,
            arch=arch,
            defines=tuple(kernel_defines(choice, problem, mask).items()),
            mask_source=masks.cuda_source(mask, wide=problem.wide_index),
            build=build,  # type: ignore[arg-type]
        )
    return _specs[key]


@functools.lru_cache(maxsize=1024)
def reduce_step(choice: Choice, problem: Problem) -> tuple[Choice, Problem] | None:
    """What `split_reduce` is launched with after a choice with splits; None without.

    Only what that kernel depends on is left, so that few variants serve all.
    """
    if choice.split_mode == 0:
        return None
    wide = problem.rows > NARROW_LIMIT
    plain = dataclasses.replace(
        problem, mask=None, staged_bytes=0, key_lengths=None, head_dim=1, wide_index=wide, vector=4
    )
    step = dataclasses.replace(
        choice,
        path="split_reduce",
        tile_q=1,
        tile_k=0,
        splits=1,
        keys_per_split=None,
        grid=problem.rows,
        threads=REDUCE_THREADS,
        shared_bytes=REDUCE_THREADS // 32 * problem.head_dim_v * 4,
        columns=0,
        ring_slots=0,
        padding=0,
        stage_mask=0,
    )
    return step, plain


def kernel_defines(choice: Choice, problem: Problem, mask: Expr | None) -> Mapping[str, str]:
    """The macros that ``kernels_cu/config.cuh`` reads."""
    numbers, arrays = (0, 0) if mask is None else (len(mask.numbers), len(mask.arrays))
    assert numbers <= MAX_NUMBERS
    assert arrays <= MAX_ARRAYS
    bits = {None: 0, "int32": 32, "int64": 64}[problem.key_lengths]
    return {
        "CUMHA_ELEMENT": _ELEMENT_TYPES[problem.dtype],
        "CUMHA_HEAD_DIM": str(problem.head_dim),
        "CUMHA_HEAD_DIM_V": str(problem.head_dim_v),
        "CUMHA_WIDE_INDEX": str(int(problem.wide_index)),
        "CUMHA_KEY_LENGTH_BITS": str(bits),
        "CUMHA_STORE_STATE": str(int(problem.store_state)),
        "CUMHA_STORE_LSE": str(int(problem.return_lse and not problem.store_state)),
        "CUMHA_SPLIT_BY": str(choice.split_mode),
        "CUMHA_THREADS": str(choice.threads),
        "CUMHA_BLOCK_ROWS": str(choice.tile_q),
        "CUMHA_TILE_KEYS": str(choice.tile_k),
        "CUMHA_COLUMNS": str(choice.columns),
        "CUMHA_RING_SLOTS": str(choice.ring_slots),
        "CUMHA_PADDING": str(choice.padding),
        "CUMHA_STAGE_MASK": str(choice.stage_mask),
        "CUMHA_VECTOR_BYTES": str(problem.vector),
        "CUMHA_OUT_VECTOR_BYTES": str(problem.out_vector),
        "CUMHA_MASK_NUMBERS": str(numbers),
        "CUMHA_MASK_ARRAYS": str(arrays),
        "CUMHA_PARAMS_BYTES": str(params.params_bytes(mask)),
    }


def device_of(problem: Problem, request: Request) -> Device | None:
    """The GPU to plan for: where the arrays are, or the emulated one; None for the host path."""
    if problem.device is None and request.backend != "emulate":
        return None
    from cumha.device import Device

    if problem.device is not None:
        return Device.of(problem.device)
    from cumha.emulate import settings

    return Device.named(settings().device)


@dataclass(frozen=True, repr=False, eq=False)
class Plan:
    """A decided call that can be run again with other arrays; made by `cumha.plan`.

    It holds references to the arrays it was made with and last run with, so that a captured CUDA
    graph stays valid; they may be overwritten in place between replays.
    """

    problem: Problem
    choice: Choice
    arrays: Arrays
    options: Mapping[str, Any]
    _held: list[Any] = field(default_factory=list, compare=False)

    @property
    def path(self) -> str:
        """Name of the path that runs."""
        return self.choice.path

    @property
    def workspace_bytes(self) -> int:
        """Bytes that ``workspace=`` must have, aligned to 128; 0 if none is needed."""
        return self.choice.workspace_bytes

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        key_lengths: Any = None,
        mask: Any = None,
        out: Any = None,
        lse: Any = None,
        workspace: Any = None,
    ) -> Any:
        """Compute attention over new arrays of the planned structure.

        Parameters
        ----------
        q, k, v : numpy.ndarray or cupy.ndarray
            Shapes, strides, dtype, library and device as planned.
        key_lengths, mask : optional
            New values; left out, those given to `cumha.plan` are used again.
        out, lse, workspace : optional
            As in `cumha.attention`; left out, those given to `cumha.plan` are used again.

        Returns
        -------
        out or (out, lse)
            As planned.

        Raises
        ------
        ValueError
            If the structure differs from the planned one.
        """
        given = {"key_lengths": key_lengths, "mask": mask, "out": out, "lse": lse}
        given["workspace"] = workspace
        options = {**self.options, **{n: x for n, x in given.items() if x is not None}}
        problem, arrays = describe(q, k, v, **options)
        difference = first_difference(self.problem, problem)
        if difference is not None:
            raise ValueError(f"this plan is for {self.problem!r}: {difference}; make a new plan")
        return self.execute(arrays)

    def execute(self, arrays: Arrays | None = None) -> Any:
        """Run over described arrays, by default those that the plan was made with."""
        from cumha.launch import execute

        arrays = self.arrays if arrays is None else arrays
        result, used = execute(self.choice, self.problem, arrays)
        self._held[:] = [used]
        return result

    def explain(self) -> str:
        """What will run and why, as text for people."""
        return explain(self.choice, self.problem, self.arrays.mask)

    def __repr__(self) -> str:
        return f"Plan({self.choice.path} for {self.problem!r})"


def explain(choice: Choice, problem: Problem, mask: Expr | None) -> str:
    """Path, geometry, work, memory and the rejected paths of a choice."""
    group = f", {problem.group} query heads per KV head" if problem.group > 1 else ""
    lines = [
        repr(problem),
        f"  mask        {'none' if mask is None else repr(mask)}",
        f"  path        {choice.path} on {_where(choice)}",
        f"  tile        {choice.tile_q} query rows x {choice.tile_k} keys{group}",
    ]
    if choice.backend != "host":
        blocks = f"{choice.grid} blocks x {choice.threads} threads"
        lines.append(f"  grid        {blocks}{_waves(choice)}")
    lines += [
        f"  splits      {_splits(choice)}",
        f"  workspace   {choice.workspace_bytes} bytes",
        *_work(choice, problem, mask),
    ]
    lines += [f"  not {name:<8}{'; '.join(why)}" for name, why in choice.rejected]
    return "\n".join(lines)


def _where(choice: Choice) -> str:
    if choice.device is None:
        return "the host, NumPy and BLAS"
    major, minor = choice.device.compute_capability
    if choice.backend == "emulate":
        return f"the CPU, emulating {choice.device.name} (sm_{major}{minor})"
    return f"{choice.device.name} (sm_{major}{minor}, {choice.device.sm_count} SMs)"


def _waves(choice: Choice) -> str:
    """How often the device fills up, by threads alone; registers may allow fewer blocks."""
    if choice.device is None:
        return ""
    resident = choice.device.max_threads_per_sm // choice.threads
    waves = choice.grid / (resident * choice.device.sm_count)
    return f", at most {resident} blocks per SM, {waves:.2f} waves"


def _splits(choice: Choice) -> str:
    if choice.keys_per_split is not None:
        return f"every {choice.keys_per_split} keys"
    return "1" if choice.splits == 1 else f"up to {choice.splits}, equal {choice.split_by}"


def _work(choice: Choice, problem: Problem, mask: Expr | None) -> list[str]:
    """Bytes and operations that any path must spend, and their time at the device's rates."""
    size = element_size(problem.dtype)
    per_key = problem.batch * problem.heads_kv * (problem.head_dim + problem.head_dim_v) * size
    per_row = problem.rows * (problem.head_dim + problem.head_dim_v) * size
    moved = per_key * problem.len_k + per_row
    pairs = visible_pairs(problem, mask)
    operations = 2 * pairs * (problem.head_dim + problem.head_dim_v)
    share = pairs / max(problem.rows * problem.len_k, 1)
    lines = [
        f"  work        {operations / 1e9:.3g} GFLOP over {share:.0%} of the scores, "
        f"{moved / 1e6:.3g} MB to move at least"
    ]
    if choice.device is not None and choice.device.memory_bandwidth:
        floor = moved / choice.device.memory_bandwidth
        rate = choice.device.memory_bandwidth / 1e12
        lines.append(f"  floor       {floor * 1e6:.3g} us of memory traffic at {rate:.3g} TB/s")
    return lines


_ROW_BLOCK = 64
_MOST_SAMPLES = 256


def visible_pairs(problem: Problem, mask: Expr | None) -> int:
    """About how many (row, key) pairs the mask's key ranges leave, by a sample of row blocks."""
    if mask is None or problem.rows == 0 or problem.len_k == 0:
        return problem.rows * problem.len_k
    blocks = [(b, q) for b in range(problem.batch) for q in range(0, problem.len_q, _ROW_BLOCK)]
    blocks = blocks[:: max(1, len(blocks) // _MOST_SAMPLES)]
    first, end = problem.key_offset, problem.key_offset + problem.len_k
    keys = rows = 0
    for b, q in blocks:
        last = min(q + _ROW_BLOCK, problem.len_q)
        lo, hi = masks.key_range(
            mask,
            b=b,
            h=(0, problem.heads_q),
            q=(q, last),
            len_q=problem.len_q,
            len_k=problem.total_keys,
        )
        keys += (last - q) * max(0, min(hi, end) - max(lo, first))
        rows += last - q
    return round(problem.rows * keys / rows)
