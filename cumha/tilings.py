"""How the kernels' blocks are shaped: what `gemv` and `tiled` are built with, and what it takes.

Each kernel has a class whose values are its settings, as in `cumha.tuning.Tuning`, and a function
that gives the planner's choice for a problem, the caller's settings kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cumha.problem import Problem, element_size
from cumha.tuning import Tuning

if TYPE_CHECKING:
    from cumha.device import Device

Settings = Mapping[str, tuple[int, ...]]

WITHOUT_OPTIN = 48 * 1024  # bytes of shared memory that any block may have
RESERVED_SHARED = 1024  # bytes that a block costs beside its own


def _knows(tuning: Tuning, settings: Settings) -> bool:
    return all(value in settings.get(name, ()) for name, value in tuning.given().items())


def _too_large(need: int, device: Device | None) -> list[str]:
    have = WITHOUT_OPTIN if device is None else device.shared_memory_optin
    if need <= have:
        return []
    return [f"a block needs {need} bytes of shared memory, the device has {have}"]


def tile_bytes(problem: Problem, keys: int) -> int:
    """Bytes of K and V of a tile of keys."""
    return keys * (problem.head_dim + problem.head_dim_v) * element_size(problem.dtype)


# --- gemv -----------------------------------------------------------------------------------------

GEMV_THREADS = 256
GEMV_TILE = 128  # keys: what splits are counted in
GEMV_SLOTS = 3  # of the ring, where two blocks of a multiprocessor have room for it
GEMV_ROOM = 2  # blocks of a multiprocessor that the ring leaves room for
GEMV_FILL = 1  # blocks of a multiprocessor that splits add up to: one keeps its memory busy
GEMV_BANDWIDTH = {1: 59e9, 2: 59e9, 4: 40e9}  # bytes of K and V per second of a block, by its rows
GEMV_SETTINGS: Settings = {
    "block_rows": (1, 2, 4),  # more would need too many registers
    "ring_slots": (1, 2, 3, 4),
}


@dataclass(frozen=True)
class GemvTiling:
    """What `gemv` is built with."""

    block_rows: int
    ring_slots: int

    def shared_bytes(self, problem: Problem) -> int:
        """Shared memory of a block; the layout is at the top of kernels_cu/gemv.cu."""
        elements = problem.vector // element_size(problem.dtype)  # of a vector
        dims = (problem.head_dim, problem.head_dim_v)
        lanes = self.block_rows
        while lanes < 32 and lanes * elements < max(dims):
            lanes *= 2
        step = sum(-(-dim // (lanes * elements)) for dim in dims) * problem.vector
        chunk = step * (4 if step <= 32 else 2 if step <= 64 else 1)  # bytes per thread
        merged = GEMV_THREADS // 32 * self.block_rows * (problem.head_dim_v + 2) * 4
        return max(self.ring_slots * chunk * GEMV_THREADS, merged)

    def tile_seconds(self, problem: Problem) -> float:
        """About what a block on its own takes for a tile of keys."""
        return tile_bytes(problem, GEMV_TILE) / GEMV_BANDWIDTH[self.block_rows]

    def reasons(self, problem: Problem, device: Device | None) -> list[str]:
        """Why no block can be built like this; empty if one can."""
        return _too_large(self.shared_bytes(problem), device)


def choose_gemv(problem: Problem, tuning: Tuning, device: Device | None) -> GemvTiling:
    """As few rows as hold the packed ones, and a ring that leaves room for two blocks."""
    packed = problem.group * problem.len_q
    known = GEMV_SETTINGS["block_rows"]
    rows = tuning.block_rows or next((n for n in known if n >= packed), max(known))
    if tuning.ring_slots is not None:
        return GemvTiling(rows, tuning.ring_slots)
    room = WITHOUT_OPTIN if device is None else device.shared_memory_per_sm // GEMV_ROOM
    for slots in range(GEMV_SLOTS, 1, -1):
        tiling = GemvTiling(rows, slots)
        if tiling.shared_bytes(problem) + RESERVED_SHARED <= room:
            return tiling
    return GemvTiling(rows, 1)


def gemv_reasons(problem: Problem, tuning: Tuning, device: Device | None) -> list[str]:
    """Why `gemv` cannot be built for a problem; settings that it does not have are told apart."""
    if not _knows(tuning, GEMV_SETTINGS):
        return []
    return choose_gemv(problem, tuning, device).reasons(problem, device)


# --- tiled ----------------------------------------------------------------------------------------

TILED_THREADS = 128
TILED_OUTPUTS = 64  # output elements of a thread: with more its registers spill
# Block rows by threads per row, and keys of a tile, in the order in which the planner tries them.
TILED_ROWS = {8: (64, 32, 16), 16: (64, 32, 16), 32: (4, 8, 16)}
TILED_KEYS = (64, 32)
TILED_COLUMNS = (8, 16)  # threads per row that the planner chooses from
TILED_FILL = 2  # blocks of a multiprocessor that splits add up to
TILED_RATE = 130e9  # operations per second of a block
TILED_SETTINGS: Settings = {
    "block_rows": (4, 8, 16, 32, 64),
    "tile_keys": (32, 64, 96, 128),
    "columns": tuple(TILED_ROWS),
    "ring_slots": (1, 2, 4),
    "padding": (0, 16),
    "stage_mask": (0, 1),
}


@dataclass(frozen=True)
class TiledTiling:
    """What `tiled` is built with."""

    block_rows: int
    tile_keys: int
    columns: int
    ring_slots: int = 2
    padding: int = 16

    def value_dim(self, problem: Problem) -> int:
        """Output columns that the threads of a row compute."""
        return _output_groups(problem.head_dim_v, self.columns)[1]

    def shared_bytes(self, problem: Problem) -> int:
        """Shared memory of a block; the layout is at the top of kernels_cu/tiled.cu."""
        size = element_size(problem.dtype)
        key_dim = -(-problem.head_dim * size // 16) * 16 // size
        key = self.tile_keys * (key_dim * size + self.padding)
        value = self.tile_keys * self.value_dim(problem) * size
        ring = max(key, value) if self.ring_slots == 1 else self.ring_slots // 2 * (key + value)
        rows = self.block_rows * (key_dim + self.tile_keys) * 4
        return ring + rows + self.tile_keys * problem.staged_bytes

    def tile_seconds(self, problem: Problem) -> float:
        """About what a block on its own takes for a tile of keys."""
        pairs = self.block_rows * self.tile_keys
        return 2 * pairs * (problem.head_dim + problem.head_dim_v) / TILED_RATE

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
        return reasons + _too_large(self.shared_bytes(problem), device)


def _output_groups(head_dim_v: int, columns: int) -> tuple[int, int]:
    """Neighbouring output columns of a thread, and all of a row, as in kernels_cu/tiled.cu."""
    for group in (4, 2, 1):
        dim = -(-head_dim_v // (columns * group)) * columns * group
        if dim < 2 * head_dim_v or group == 1:
            break
    return group, dim


def _planned_columns(problem: Problem) -> int:
    """The larger number, whose threads read less, unless it leaves more unused.

    Nor if it makes groups narrower; the groups of 8 that some 2-byte types could have do not count.
    """
    fewer, more = TILED_COLUMNS
    group, dim = _output_groups(problem.head_dim_v, fewer)
    its_group, its_dim = _output_groups(problem.head_dim_v, more)
    return more if its_group >= group and its_dim <= dim else fewer


def _planned_padding(problem: Problem) -> int:
    """What makes a row of K an odd number of 16-byte units: then eight rows use all banks once."""
    units = -(-problem.head_dim * element_size(problem.dtype) // 16)
    return 16 if units % 2 == 0 else 0


def _tilings(problem: Problem, tuning: Tuning) -> list[TiledTiling]:
    """What the caller's settings leave to choose from, in the order in which to try them."""
    given = tuning.given()
    columns = given.get("columns", _planned_columns(problem))
    padding = given.get("padding", _planned_padding(problem))
    packed = problem.group * problem.len_q
    order = TILED_ROWS[columns]
    planned = [rows for rows in order if packed > rows // 2 or rows == min(order)]
    return [
        TiledTiling(rows, keys, columns, given.get("ring_slots", 2), padding)
        for keys in ([given["tile_keys"]] if "tile_keys" in given else TILED_KEYS)
        for rows in ([given["block_rows"]] if "block_rows" in given else planned)
    ]


def choose_tiled(problem: Problem, tuning: Tuning, device: Device | None) -> TiledTiling | None:
    """Return the first tiling that can be built, None if there is none."""
    tilings = _tilings(problem, tuning)
    return next((tiling for tiling in tilings if not tiling.reasons(problem, device)), None)


def tiled_reasons(problem: Problem, tuning: Tuning, device: Device | None) -> list[str]:
    """Why `tiled` cannot be built for a problem; settings that it does not have are told apart."""
    if not _knows(tuning, TILED_SETTINGS) or choose_tiled(problem, tuning, device) is not None:
        return []
    smallest = min(_tilings(problem, tuning), key=lambda t: t.shared_bytes(problem))
    return smallest.reasons(problem, device)
