"""The CPU path: blocked attention over NumPy arrays, matrix products by BLAS.

    for each batch entry, group of KV heads, block of queries:        one _Block
        for each split, for each tile of keys that the block can see:
            S = (scale * Q) @ K^T          rows = the block's queries x the heads of each KV head
            masked scores become -inf      only in PARTIAL tiles; SKIP tiles are not touched
            (m, l, O) <- online softmax    m starts at -inf; a row is empty while l == 0
        merge the splits, divide, round once, store

float16, bfloat16 and float32 problems compute in float32, float64 problems in float64. Extra memory
is a few blocks of `_BLOCK_ELEMENTS` numbers, whatever the lengths are.

A NaN or an infinity in a V slot that a row does not see would reach it as ``0 * NaN``. Instead of
looking at V beforehand, each block looks at its sums: only where one is not finite, the block is
computed once more with products that leave the unseen values out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cumha import masks
from cumha.state import State, merge

if TYPE_CHECKING:
    from cumha.problem import Arrays, Problem

# Numbers in one block of scores or of converted keys: 1 MiB of float32 stays in the L2 cache.
_BLOCK_ELEMENTS = 2**18
_BLOCK_ROWS = 384  # heads of a group x queries: above it a causal block wastes more on its corner
_FEW_ROWS = 32  # up to here K @ Q^T is 1.2 to 4 times faster than Q @ K^T (OpenBLAS, measured)


def choose_tiles(problem: Problem) -> tuple[int, int]:
    """Return the (tile_q, tile_k) that suit `problem`: queries and keys of one block.

    They depend on the heads of a group and on len_q only, so that neither the batch nor the size of
    the key buffer changes the bits of a request.
    """
    group = max(problem.group, 1)
    tile_q = min(max(problem.len_q, 1), max(_BLOCK_ROWS // group, 1))
    return tile_q, min(max(_BLOCK_ELEMENTS // (tile_q * group), 64), 1024)


def forward(
    problem: Problem,
    arrays: Arrays,
    *,
    tile_q: int,
    tile_k: int,
    splits: int = 1,
    split_by: str = "tiles",
    keys_per_split: int | None = None,
) -> None:
    """Fill ``arrays.out`` and, where it is not None, ``arrays.lse``.

    Parameters
    ----------
    problem : Problem
        The checked request.
    arrays : Arrays
        NumPy views [batch, heads, len, dim] with any strides.
    tile_q, tile_k : int
        Largest number of queries and of keys in one block, at least 1.
    splits : int, optional
        Parts that the keys of a row block are divided into; clamped to its tiles.
    split_by : {"tiles", "length"}, optional
        Whether the parts hold equal numbers of tiles that the block sees, or of the entry's keys.
    keys_per_split : int, optional
        Fixes the boundaries at multiples from key 0 instead.
    """
    division = _Division(tile_k, splits, split_by, keys_per_split)
    with np.errstate(all="ignore"):
        for block in _blocks(problem, arrays, tile_q, division):
            out, lse = _block_state(problem, arrays, block, division).finish()
            arrays.out[block.rows] = out
            if arrays.lse is not None:
                arrays.lse[block.rows] = lse


def partial(
    problem: Problem,
    arrays: Arrays,
    *,
    tile_q: int,
    tile_k: int,
    splits: int = 1,
    split_by: str = "tiles",
    keys_per_split: int | None = None,
) -> State:
    """Return the State over the keys of this call; parameters as in `forward`.

    Key ``j`` of ``arrays.k`` stands at ``problem.key_offset + j`` of ``problem.total_keys``.
    """
    division = _Division(tile_k, splits, split_by, keys_per_split)
    state = State.empty(
        problem.batch, problem.heads_q, problem.len_q, problem.head_dim_v, dtype=problem.dtype
    )
    with np.errstate(all="ignore"):
        for block in _blocks(problem, arrays, tile_q, division):
            part = _block_state(problem, arrays, block, division)
            state.o[block.rows], state.m[block.rows], state.l[block.rows] = part.o, part.m, part.l
    return state


@dataclass(frozen=True)
class _Division:
    """How the keys of a row block fall into splits, and those into tiles."""

    tile_k: int
    splits: int = 1
    split_by: str = "tiles"
    keys_per_split: int | None = None

    def spans(self, lo: int, hi: int, first: int, last: int) -> list[tuple[int, int]]:
        """Return the key ranges of the splits.

        [lo, hi) are the positions that the block can see, [first, last) those that are valid.
        """
        if self.keys_per_split is not None:
            step = self.keys_per_split
            edges = [lo, *range(lo - lo % step + step, hi, step), hi]
        elif self.split_by == "length":
            keys = last - first
            splits = min(self.splits, -(-keys // self.tile_k))
            edges = [min(max(first + i * keys // splits, lo), hi) for i in range(splits + 1)]
        else:
            tiles = -(-(hi - lo) // self.tile_k)
            splits = min(self.splits, tiles)
            edges = [min(lo + i * tiles // splits * self.tile_k, hi) for i in range(splits + 1)]
        return [(a, b) for a, b in itertools.pairwise(edges) if a < b]

    def tiles(self, lo: int, hi: int) -> list[tuple[int, int]]:
        return [(k, min(k + self.tile_k, hi)) for k in range(lo, hi, self.tile_k)]


@dataclass(frozen=True)
class _Block:
    """Rows that are computed together: half-open ranges of entries, KV heads and queries."""

    entries: tuple[int, int]
    heads_kv: tuple[int, int]
    heads_q: tuple[int, int]
    queries: tuple[int, int]
    length: int  # valid keys of the sequence in these entries

    @property
    def rows(self) -> tuple[slice, slice, slice]:
        """Index of these rows in an array [batch, heads_q, len_q, …]."""
        return slice(*self.entries), slice(*self.heads_q), slice(*self.queries)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of entries, query heads and queries."""
        (b, b_end), (h, h_end), (q, q_end) = self.entries, self.heads_q, self.queries
        return b_end - b, h_end - h, q_end - q


def _blocks(problem: Problem, arrays: Arrays, tile_q: int, division: _Division) -> Iterator[_Block]:
    lengths = None if arrays.key_lengths is None else arrays.key_lengths.tolist()
    group = problem.group
    if group == 0:
        return  # no query heads, nothing to compute
    keys = division.tile_k
    if division.keys_per_split is None:  # with it, the buffer's size must not change the blocks
        keys = max(min(keys, problem.len_k), 1)
    tallest = max(group * min(tile_q, problem.len_q), problem.head_dim, problem.head_dim_v, 1)
    heads = min(max(_BLOCK_ELEMENTS // (tallest * keys), 1), problem.heads_kv)
    # Entries share blocks only where nothing tells them apart: lengths and masks are per entry.
    alike = lengths is None and arrays.mask is None and heads == problem.heads_kv
    entries = max(_BLOCK_ELEMENTS // (tallest * keys * heads), 1) if alike else 1
    for b in range(0, problem.batch, entries):
        for h in range(0, problem.heads_kv, heads):
            h_end = min(h + heads, problem.heads_kv)
            for q in range(0, problem.len_q, tile_q):
                yield _Block(
                    (b, min(b + entries, problem.batch)),
                    (h, h_end),
                    (h * group, h_end * group),
                    (q, min(q + tile_q, problem.len_q)),
                    problem.total_keys if lengths is None else lengths[b],
                )


def _block_state(problem: Problem, arrays: Arrays, block: _Block, division: _Division) -> State:
    """Return the State of the block's rows over the keys of this call."""
    first, last = problem.key_offset, min(problem.key_offset + problem.len_k, block.length)
    lo, hi = _visible_keys(problem, arrays.mask, block)
    lo, hi = max(lo, first), min(hi, last)
    queries = None
    state = None
    for span in division.spans(lo, hi, first, last) if lo < hi else ():
        classed = (
            (tile, _tile_class(problem, arrays.mask, block, tile)) for tile in division.tiles(*span)
        )
        tiles = [(tile, found) for tile, found in classed if found != masks.TileClass.SKIP]
        if not tiles:
            continue
        queries = _scaled_queries(problem, arrays, block) if queries is None else queries
        split = _split_state(problem, arrays, block, queries, tiles)
        state = split if state is None else merge(state, split)
    if state is None:
        return State.empty(*block.shape, problem.head_dim_v, dtype=problem.dtype)
    return state


def _visible_keys(problem: Problem, mask: Any, block: _Block) -> tuple[int, int]:
    """Return the range of positions outside which no row of the block sees a key."""
    if mask is None or block.length == 0:
        return 0, block.length
    return masks.key_range(
        mask,
        b=block.entries[0],
        h=block.heads_q,
        q=block.queries,
        len_q=problem.len_q,
        len_k=block.length,
    )


def _tile_class(problem: Problem, mask: Any, block: _Block, tile: tuple[int, int]) -> Any:
    if mask is None:
        return masks.TileClass.FULL
    return masks.tile_class(
        mask,
        b=block.entries[0],
        h=block.heads_q,
        q=block.queries,
        k=tile,
        len_q=problem.len_q,
        len_k=block.length,
    )


def _scaled_queries(problem: Problem, arrays: Arrays, block: _Block) -> Any:
    """Return scale * q as [entries, heads_kv, rows, head_dim]: row = head of the group, query."""
    kind = np.dtype(problem.accumulator)
    queries = arrays.q[block.rows].astype(kind, order="C")
    queries *= kind.type(problem.scale)
    heads = block.heads_kv[1] - block.heads_kv[0]
    return queries.reshape(queries.shape[0], heads, -1, problem.head_dim)


def _split_state(
    problem: Problem, arrays: Arrays, block: _Block, queries: Any, tiles: list[Any]
) -> State:
    sums = _online_softmax(problem, arrays, block, queries, tiles, exact=False)
    if not np.isfinite(sums[0]).all():
        sums = _online_softmax(problem, arrays, block, queries, tiles, exact=True)
    o, m, l = sums  # noqa: E741
    shape = block.shape
    return State(
        o.reshape(*shape, problem.head_dim_v), m.reshape(shape), l.reshape(shape), problem.dtype
    )


def _online_softmax(
    problem: Problem, arrays: Arrays, block: _Block, queries: Any, tiles: list[Any], *, exact: bool
) -> tuple[Any, Any, Any]:
    """Return o [entries, heads_kv, rows, head_dim_v] and m, l [entries, heads_kv, rows, 1].

    With `exact`, values that are not finite reach only the rows that see them.
    """
    kind = queries.dtype.type
    o: Any = None
    m: Any = None
    l: Any = None  # noqa: E741
    special: Any = 0
    for tile, found in tiles:
        values = _key_tile(problem, arrays.v, block, tile)
        scores = _products(queries, _key_tile(problem, arrays.k, block, tile))
        if found == masks.TileClass.PARTIAL:
            _mask_scores(problem, arrays.mask, block, tile, scores)
        if exact:
            special = special + _special_sums(scores != -np.inf, values)
            values = np.where(np.isfinite(values), values, kind(0))
        m_new = scores.max(axis=-1, keepdims=True)
        if m is not None:
            np.maximum(m, m_new, out=m_new)
        # While a row has seen no key its reference is -inf, and -inf - -inf would be NaN.
        reference = np.where(m_new == -np.inf, kind(0), m_new)
        weights = np.exp(np.subtract(scores, reference, out=scores), out=scores)
        o_tile = weights @ values
        l_tile = weights.sum(axis=-1, keepdims=True)
        if m is None:
            o, l = o_tile, l_tile  # noqa: E741
        else:
            decay = np.exp(m - reference)
            o = np.add(np.multiply(o, decay, out=o), o_tile, out=o)
            l = l * decay + l_tile  # noqa: E741
        m = m_new
    return np.where(special == 0, o, o + special) if exact else o, m, l


def _products(queries: Any, keys: Any) -> Any:
    """Return queries @ keys^T, C-contiguous."""
    if queries.shape[-2] > _FEW_ROWS:
        return queries @ keys.swapaxes(-1, -2)
    # BLAS repacks its right operand, which should then be the small one.
    return (keys @ queries.swapaxes(-1, -2)).swapaxes(-1, -2).copy()


def _key_tile(problem: Problem, x: Any, block: _Block, tile: tuple[int, int]) -> Any:
    """Return keys or values [entries, heads_kv, keys, dim] of a tile, as BLAS can read them."""
    start, stop = (k - problem.key_offset for k in tile)
    part = x[slice(*block.entries), slice(*block.heads_kv), start:stop]
    kind = np.dtype(problem.accumulator)
    row, element = part.strides[-2:]
    if part.dtype == kind and element == kind.itemsize and row >= part.shape[-1] * element:
        return part
    # Also for transposed storage: BLAS would take other code for it, which gives other bits.
    return part.astype(kind, order="C")


def _mask_scores(
    problem: Problem, mask: Any, block: _Block, tile: tuple[int, int], scores: Any
) -> None:
    """Write -inf to the scores that the mask removes."""
    heads = block.heads_kv[1] - block.heads_kv[0]
    queries = block.queries[1] - block.queries[0]
    keep = masks.evaluate(
        mask,
        b=block.entries[0],
        h=np.arange(*block.heads_q).reshape(heads, -1, 1, 1),
        q=np.arange(*block.queries)[:, None],
        k=np.arange(*tile),
        len_q=problem.len_q,
        len_k=block.length,
    )
    rows = scores.reshape(heads, -1, queries, scores.shape[-1])
    np.copyto(rows, -np.inf, where=np.logical_not(keep))


def _special_sums(seen: Any, values: Any) -> Any:
    """Return the sum of the infinities and NaNs among the values that each row has seen, else 0."""
    kind = values.dtype
    seen = seen.astype(kind)
    special = np.zeros((*seen.shape[:-1], values.shape[-1]), kind)
    for what, where in (
        (np.nan, np.isnan(values)),
        (np.inf, values == np.inf),
        (-np.inf, values == -np.inf),
    ):
        special[seen @ where.astype(kind) > 0] += what
    return special
