"""Walks 3 and 4 in Python: what a tile holds, and which keys a block of rows can see."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from cumha.masks.expression import ARRAY_TYPES, INDEX_NAMES, ArrayInput, Expr
from cumha.masks.rules import Intervals, KeySolver, Numbers, Pair


class TileClass(enum.IntEnum):
    """What a rectangle of rows x keys holds; the numbers are those of `mask.cuh`."""

    SKIP = 0  # no row sees any key
    PARTIAL = 1  # the predicate must run
    FULL = 2  # every row sees every key


def _host_leaf(environment: dict[str, Pair]) -> Callable[[Expr, list[Pair]], Pair]:
    def leaf(node: Expr, index: list[Pair]) -> Pair:
        if node.op == "index":
            return environment[node.value]
        if node.op == "number":
            return node.value, node.value
        return _lookup_bounds(node.value, index)

    return leaf


def _lookup_bounds(source: ArrayInput, index: list[Pair]) -> Pair:
    """Smallest and largest value over a box of indices; device memory is never read."""
    if not isinstance(source.data, np.ndarray) or 0 in source.shape:
        return ARRAY_TYPES[source.dtype].bounds
    box = tuple(
        slice(min(max(lo, 0), n - 1), min(max(hi, 0), n - 1) + 1)
        for (lo, hi), n in zip(index, source.shape, strict=True)
    )
    values = source.data[box]
    if source.kind == "bool":
        return bool(values.all()), bool(values.any())
    if source.kind == "float":
        values = values.astype(np.float64)  # min and max of NumPy let a NaN win
        return float(values.min()), float(values.max())
    return int(values.min()), int(values.max())


Span: TypeAlias = tuple[int, int]  # half-open


def tile_class(
    expr: Expr, *, b: int, h: Span, q: Span, k: Span, len_q: int, len_k: int
) -> TileClass:
    """Walk 3: what the rectangle of rows h x q and keys k holds.

    ``h``, ``q``, ``k`` are half-open and not empty. Sound, not exact: PARTIAL may be answered for a
    tile that is empty or full.
    """
    pairs = (*((b, b), *((s[0], s[1] - 1) for s in (h, q, k))), (len_q, len_q), (len_k, len_k))
    environment = dict(zip(INDEX_NAMES, pairs, strict=True))
    surely, possibly = Intervals(Numbers, expr, _host_leaf(environment)).of(expr)
    return TileClass.FULL if surely else TileClass.PARTIAL if possibly else TileClass.SKIP


def key_range(expr: Expr, *, b: int, h: Span, q: Span, len_q: int, len_k: int) -> Span:
    """Walk 4: a half-open range [k_lo, k_hi) within [0, len_k) that holds every key the rows see.

    ``k_lo == k_hi`` means that they see none.
    """
    domain = (0, len_k - 1)
    pairs = ((b, b), (h[0], h[1] - 1), (q[0], q[1] - 1), domain, (len_q, len_q), (len_k, len_k))
    environment = dict(zip(INDEX_NAMES, pairs, strict=True))
    intervals = Intervals(Numbers, expr, _host_leaf(environment))
    lo, hi = KeySolver(intervals, domain).mask(expr)
    first = min(max(0, 0 if lo is None else lo), len_k)
    return first, max(first, min(len_k, len_k if hi is None else hi + 1))
