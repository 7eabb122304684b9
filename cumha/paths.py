"""The ways to compute attention, one record each, in the order in which the planner prefers them.

A path's name is its ``.cu`` file's stem, its kernel's entry, `Plan.path` and its tests' id.
``host`` has no kernel: it is the NumPy path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cumha import tuning
from cumha.problem import DTYPES, Problem, check_integer
from cumha.tuning import UNTUNED, Tuning

if TYPE_CHECKING:
    from cumha.device import Device

MAX_HEAD_DIM = 512
BACKENDS = ("cuda", "host", "emulate")
SPLIT_BY = ("tiles", "length")


@dataclass(frozen=True)
class Request:
    """What the caller overrides; None leaves the choice to the planner."""

    splits: int | None = None
    split_by: str = "tiles"
    keys_per_split: int | None = None
    path: str | None = None
    backend: str | None = None
    tuning: Tuning = UNTUNED

    @classmethod
    def checked(
        cls, splits: Any, split_by: Any, keys_per_split: Any, path: Any, backend: Any
    ) -> Request:
        """Check the overrides of `cumha.attention`.

        Raises
        ------
        TypeError, ValueError
            Unknown names, numbers below 1, or ``splits`` together with ``keys_per_split``.
        """
        if splits is not None and keys_per_split is not None:
            raise ValueError(
                f"got splits={splits!r} and keys_per_split={keys_per_split!r}: one of the two "
                "fixes the splits, leave the other out"
            )
        for name, value, known, optional in (
            ("split_by", split_by, SPLIT_BY, False),
            ("path", path, tuple(p.name for p in PATHS), True),
            ("backend", backend, BACKENDS, True),
        ):
            if optional and value is None:
                continue
            if not isinstance(value, str) or value not in known:
                names = ", ".join(repr(k) for k in known)
                raise ValueError(f"unknown {name} {value!r}: use one of {names}")
        splits = None if splits is None else check_integer("splits", splits, 1)
        if keys_per_split is not None:
            keys_per_split = check_integer("keys_per_split", keys_per_split, 1)
        return cls(splits, split_by, keys_per_split, path, backend, tuning.current())

    @property
    def wants_splits(self) -> bool:
        return self.keys_per_split is not None or (self.splits or 1) > 1


@dataclass(frozen=True)
class Path:
    """One way to compute attention."""

    name: str
    backend: str  # what it runs on: "cuda" or "host"
    dtypes: tuple[str, ...]
    max_head_dim: int
    limits: Callable[[Problem, Request, Device | None], list[str]]  # reasons of this path alone
    settings: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # and their values

    def rejects(self, problem: Problem, request: Request, device: Device | None) -> list[str]:
        """Every reason why this path cannot serve the call; empty if it can.

        Parameters
        ----------
        device : Device or None
            The GPU of a CuPy problem; None for NumPy arrays.
        """
        reasons = []
        if request.path not in (None, self.name):
            reasons.append(f"path={request.path!r} was asked for")
        reasons += self._backend_reasons(problem, request)
        if problem.dtype not in self.dtypes:
            reasons.append(f"dtype {problem.dtype} is not one of {', '.join(self.dtypes)}")
        for name, value in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if value > self.max_head_dim:
                reasons.append(f"{name} {value} is above its limit of {self.max_head_dim}")
        for name, chosen in request.tuning.given().items():
            values = self.settings.get(name)
            if values is None:
                reasons.append(f"it has no setting {name}")
            elif chosen not in values:
                listed = ", ".join(map(str, values))
                reasons.append(f"{name}={chosen} is not one of its values {listed}")
        return reasons + self.limits(problem, request, device)

    def _backend_reasons(self, problem: Problem, request: Request) -> list[str]:
        if request.backend == "emulate" and self.backend == "cuda":
            wrong = problem.library != "numpy"
            return (
                ["emulation takes NumPy arrays, got cupy: move them with .get()"] if wrong else []
            )
        needed = {"numpy": "host", "cupy": "cuda"}[problem.library]
        if request.backend not in (None, self.backend):
            return [f"it runs on backend {self.backend!r}, {request.backend!r} was asked for"]
        if needed != self.backend:
            wants = "CuPy" if self.backend == "cuda" else "NumPy"
            move = "cupy.asarray" if self.backend == "cuda" else ".get()"
            return [f"it takes {wants} arrays, got {problem.library}: move them with {move}"]
        return []


def _naive_limits(problem: Problem, request: Request, device: Device | None) -> list[str]:
    if request.wants_splits:
        asked = "keys_per_split" if request.keys_per_split is not None else "splits"
        return [f"{asked}: one warp walks over all keys of its row, it has nothing to split"]
    return []


GEMV_ROWS = 4  # query rows up to which gemv is taken; the articles' threshold, to be measured


def _gemv_limits(problem: Problem, request: Request, device: Device | None) -> list[str]:
    if request.path != "gemv" and problem.len_q > GEMV_ROWS:
        return [f"len_q {problem.len_q} is above {GEMV_ROWS}: each row would cost a pass over K"]
    rows = request.tuning.block_rows or max(GEMV_BLOCK_ROWS)
    need = gemv_shared_bytes(problem, rows, gemv_slots(problem, request, device, rows))
    limit = 48 * 1024 if device is None else device.shared_memory_optin
    if need > limit:
        return [f"a block needs {need} bytes of shared memory, the device has {limit}"]
    return []


GEMV_THREADS = 256
GEMV_BLOCK_ROWS = (1, 2, 4)  # packed rows of a block: more would need too many registers
GEMV_SLOTS = (3, 2, 1, 4)  # chunks of the ring, the default first
GEMV_BLOCKS_PER_SM = 2  # that the ring leaves shared memory for


def gemv_shared_bytes(problem: Problem, rows: int, slots: int) -> int:
    """Shared memory of a block of `gemv`; the layout is at the top of kernels_cu/gemv.cu."""
    elements = problem.vector // element_size(problem.dtype)  # of a vector
    lanes = rows
    while lanes < 32 and lanes * elements < max(problem.head_dim, problem.head_dim_v):
        lanes *= 2
    vectors = sum(-(-n // (lanes * elements)) for n in (problem.head_dim, problem.head_dim_v))
    step = vectors * problem.vector
    chunk = step * (4 if step <= 32 else 2 if step <= 64 else 1)  # bytes per thread
    merged = GEMV_THREADS // 32 * rows * (problem.head_dim_v + 2) * 4
    return max(slots * chunk * GEMV_THREADS, merged)


def gemv_slots(problem: Problem, request: Request, device: Device | None, rows: int) -> int:
    """Chunks of the ring: the default, or fewer where two blocks would not fit."""
    if request.tuning.ring_slots is not None:
        return request.tuning.ring_slots
    room = 48 * 1024 if device is None else device.shared_memory_per_sm // GEMV_BLOCKS_PER_SM
    for slots in range(GEMV_SLOTS[0], 1, -1):
        if gemv_shared_bytes(problem, rows, slots) + SHARED_RESERVED <= room:
            return slots
    return 1


SHARED_RESERVED = 1024  # bytes of shared memory that each block costs beside its own
TILED_THREADS = 128
TILED_OUTPUTS = 64  # output elements of a thread: with more its registers spill
# Block rows by threads per row, and keys of a tile, in the order in which the planner tries them.
TILED_ROWS = {8: (64, 32, 16), 16: (64, 32, 16), 32: (4, 8, 16)}
TILED_KEYS = (64, 96, 128)
TILED_SETTINGS = {
    "block_rows": (4, 8, 16, 32, 64),
    "tile_keys": (32, *TILED_KEYS),
    "columns": tuple(TILED_ROWS),
    "ring_slots": (1, 2, 4),
    "padding": (0, 16),
    "stage_mask": (0, 1),
}


@dataclass(frozen=True)
class Tiling:
    """The settings that `tiled` is built with, as in `cumha.tuning.Tuning`."""

    block_rows: int
    tile_keys: int
    columns: int = 8
    ring_slots: int = 2
    padding: int = 16

    def value_dim(self, problem: Problem) -> int:
        """Output columns that the threads of a row compute, as in kernels_cu/tiled.cu."""
        dims = [
            -(-problem.head_dim_v // (self.columns * group)) * self.columns * group
            for group in (4, 2, 1)
        ]
        return next((dim for dim in dims if dim < 2 * problem.head_dim_v), dims[-1])

    def shared_bytes(self, problem: Problem) -> int:
        """Shared memory of a block; the layout is at the top of kernels_cu/tiled.cu."""
        size = element_size(problem.dtype)
        key_dim = -(-problem.head_dim * size // 16) * 16 // size
        key, value = (
            self.tile_keys * (dim * size + self.padding)
            for dim in (key_dim, self.value_dim(problem))
        )
        ring = max(key, value) if self.ring_slots == 1 else self.ring_slots // 2 * (key + value)
        rows = self.block_rows * (key_dim + 4 + self.tile_keys + 4) * 4
        return ring + rows + self.tile_keys * problem.staged_bytes

    def reasons(self, problem: Problem, device: Device | None) -> list[str]:
        """Why no block can be built like this; empty if one can."""
        reasons = []
        rows = TILED_ROWS[self.columns]
        if self.block_rows not in rows:
            listed = ", ".join(map(str, sorted(rows)))
            reasons.append(
                f"block_rows={self.block_rows} is not one of {listed} that go with "
                f"columns={self.columns}"
            )
        outputs = self.block_rows * self.value_dim(problem) // TILED_THREADS
        if outputs > TILED_OUTPUTS:
            reasons.append(
                f"block_rows={self.block_rows} gives a thread {outputs} outputs of head_dim_v "
                f"{problem.head_dim_v}, its registers hold {TILED_OUTPUTS}"
            )
        need, have = self.shared_bytes(problem), _shared_memory(device)
        if need > have:
            reasons.append(f"a block needs {need} bytes of shared memory, the device has {have}")
        return reasons


def _shared_memory(device: Device | None) -> int:
    return 48 * 1024 if device is None else device.shared_memory_optin


def _tilings(problem: Problem, tuning: Tuning) -> list[Tiling]:
    """What the caller's settings leave to choose from, in the order in which to try them."""
    given = tuning.given()
    columns = given.get("columns", 8)
    packed = problem.group * problem.len_q
    order = TILED_ROWS[columns]
    planned = [rows for rows in order if packed > rows // 2 or rows == min(order)]
    return [
        Tiling(rows, keys, columns, given.get("ring_slots", 2), given.get("padding", 16))
        for keys in ([given["tile_keys"]] if "tile_keys" in given else TILED_KEYS)
        for rows in ([given["block_rows"]] if "block_rows" in given else planned)
    ]


def choose_tiling(problem: Problem, tuning: Tuning, device: Device | None) -> Tiling | None:
    """Return the first tiling that can be built, None if there is none."""
    tilings = _tilings(problem, tuning)
    return next((tiling for tiling in tilings if not tiling.reasons(problem, device)), None)


def _tiled_limits(problem: Problem, request: Request, device: Device | None) -> list[str]:
    given = request.tuning.given().items()
    if any(value not in TILED_SETTINGS.get(name, ()) for name, value in given):
        return []  # said already
    if choose_tiling(problem, request.tuning, device) is not None:
        return []
    smallest = min(_tilings(problem, request.tuning), key=lambda t: t.shared_bytes(problem))
    return smallest.reasons(problem, device)


def _no_limits(problem: Problem, request: Request, device: Device | None) -> list[str]:
    return []


PATHS = (
    Path(
        "gemv",
        "cuda",
        DTYPES[:3],
        256,
        _gemv_limits,
        {"block_rows": GEMV_BLOCK_ROWS, "ring_slots": GEMV_SLOTS},
    ),
    Path("tiled", "cuda", DTYPES[:3], 256, _tiled_limits, TILED_SETTINGS),
    Path("naive", "cuda", DTYPES, MAX_HEAD_DIM, _naive_limits),
    Path("host", "host", DTYPES, MAX_HEAD_DIM, _no_limits),
)


def element_size(dtype: str) -> int:
    """Bytes of one element of a problem's dtype."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
