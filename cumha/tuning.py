"""What the planner decides about a kernel's build, taken over by hand: for measurements.

    with tuning.using(tile_keys=96, ring_slots=4):
        plan = cumha.plan(q, k, v, path="tiled")

Every setting gives the same answer; what differs is the time. A path that has no such setting, or
not that value of it, says so among the reasons for its rejection.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, repr=False)
class Tuning:
    """Settings of a kernel's build; None leaves one to the planner.

    Attributes
    ----------
    block_rows : int
        Packed query rows of a block: a KV head's query heads, times its queries.
    tile_keys : int
        Keys of a tile.
    columns : int
        Threads that share a query row.
    ring_slots : int
        Buffers in shared memory that tiles of K and V pass through.
    padding : int
        Bytes between the rows of a K tile in shared memory, against bank conflicts.
    stage_mask : int
        1: look-ups of the mask in ``k`` alone come from shared memory, 0: from global memory.
    """

    block_rows: int | None = None
    tile_keys: int | None = None
    columns: int | None = None
    ring_slots: int | None = None
    padding: int | None = None
    stage_mask: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.given().items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be a whole number from 0 on, got {value!r}")

    def __repr__(self) -> str:
        return f"Tuning({', '.join(f'{name}={x}' for name, x in self.given().items())})"

    def given(self) -> dict[str, int]:
        """The settings that are not left to the planner."""
        return {name: x for name, x in dataclasses.asdict(self).items() if x is not None}


UNTUNED = Tuning()
_current: contextvars.ContextVar[Tuning] = contextvars.ContextVar("tuning", default=UNTUNED)


def current() -> Tuning:
    """Return the settings of this thread or task."""
    return _current.get()


@contextlib.contextmanager
def using(**settings: int | None) -> Iterator[Tuning]:
    """Plan with these settings inside a ``with`` block; see `Tuning` for their names.

    Raises
    ------
    TypeError
        Unknown names.
    ValueError
        Values that are not whole numbers from 0 on.
    """
    token = _current.set(dataclasses.replace(_current.get(), **settings))
    try:
        yield _current.get()
    finally:
        _current.reset(token)
