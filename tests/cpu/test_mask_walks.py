"""The walks of a mask agree: SKIP keeps nothing, FULL keeps all, the range holds every kept key."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumha import masks
from cumha.masks import Expr, TileClass
from cumha.testing.strategies import MaskSizes, mask_sizes
from cumha.testing.strategies import masks as mask_strategy


def spans(draw, n):
    lo = draw(st.integers(0, n - 1))
    return lo, draw(st.integers(lo + 1, n))


@st.composite
def tiles(draw):
    sizes = draw(mask_sizes())
    mask = draw(mask_strategy(sizes))
    b = draw(st.integers(0, sizes.batch - 1))
    valid = draw(st.integers(1, sizes.len_k))
    return sizes, mask, b, valid, *(spans(draw, n) for n in (sizes.heads_q, sizes.len_q, valid))


def kept(mask: Expr, sizes: MaskSizes, b: int, valid: int) -> np.ndarray:
    lengths = [valid if i == b else 0 for i in range(sizes.batch)]
    full = masks.materialize(
        mask,
        batch=sizes.batch,
        heads_q=sizes.heads_q,
        len_q=sizes.len_q,
        len_k=sizes.len_k,
        key_lengths=lengths,
    )
    return full[b]


@settings(max_examples=1500)
@given(tiles())
def test_tile_class_is_sound(tile):
    sizes, mask, b, valid, h, q, k = tile
    inside = kept(mask, sizes, b, valid)[h[0] : h[1], q[0] : q[1], k[0] : k[1]]
    found = masks.tile_class(mask, b=b, h=h, q=q, k=k, len_q=sizes.len_q, len_k=valid)
    if found is TileClass.SKIP:
        assert not inside.any()
    if found is TileClass.FULL:
        assert inside.all()


@settings(max_examples=1500)
@given(tiles())
def test_key_range_holds_every_kept_key(tile):
    sizes, mask, b, valid, h, q, _ = tile
    inside = kept(mask, sizes, b, valid)[h[0] : h[1], q[0] : q[1]].any(axis=(0, 1))
    lo, hi = masks.key_range(mask, b=b, h=h, q=q, len_q=sizes.len_q, len_k=valid)
    assert 0 <= lo <= hi <= valid
    outside = np.delete(np.arange(sizes.len_k), np.arange(lo, hi))
    assert not inside[outside].any()


@settings(max_examples=500)
@given(tiles())
def test_one_cell_is_decided(tile):
    """A tile of one cell is never PARTIAL, but for NaN look-ups."""
    sizes, mask, b, valid, h, q, k = tile
    cell = {"h": (h[0], h[0] + 1), "q": (q[0], q[0] + 1), "k": (k[0], k[0] + 1)}
    found = masks.tile_class(mask, b=b, len_q=sizes.len_q, len_k=valid, **cell)
    if all(a.kind != "float" for a in mask.arrays):
        wanted = kept(mask, sizes, b, valid)[h[0], q[0], k[0]]
        assert found is (TileClass.FULL if wanted else TileClass.SKIP)


def test_a_division_by_zero_is_decided():
    """It gives 0, whatever is divided."""
    cell = {"b": 0, "h": (0, 1), "q": (0, 8), "k": (0, 1), "len_q": 8, "len_k": 4}
    for compare, wanted in (
        (lambda b, h, q, k: (q - 3) // k == k, TileClass.FULL),
        (lambda b, h, q, k: (q - 3) // k < k, TileClass.SKIP),
        (lambda b, h, q, k: (q - 3) % k == k, TileClass.FULL),
    ):
        assert masks.tile_class(masks.where(compare), **cell) is wanted


@settings(max_examples=500)
@given(tiles())
def test_specialised_decode_keeps_the_same_keys(tile):
    sizes, mask, b, valid, *_ = tile
    if sizes.len_q == 1:
        simple = masks.specialise(mask, len_q=1)
        np.testing.assert_array_equal(kept(simple, sizes, b, valid), kept(mask, sizes, b, valid))


@pytest.mark.parametrize(
    ("mask", "b", "q", "wanted"),
    [
        (masks.causal(), 0, (4, 8), (0, 16)),
        (masks.causal(), 0, (0, 4), (0, 12)),
        (masks.causal("top_left"), 0, (0, 4), (0, 4)),
        (masks.window(2, 1), 0, (0, 4), (6, 13)),
        (masks.window(2, -1), 0, (0, 4), (6, 16)),
        (~masks.causal(), 0, (0, 4), (9, 16)),
        (masks.where(lambda b, h, q, k: k + k <= q), 0, (0, 4), (0, 2)),
        (masks.where(lambda b, h, q, k: q - k < 3), 0, (6, 8), (4, 16)),
        (masks.where(lambda b, h, q, k: k // 4 == q // 4), 0, (4, 8), (4, 8)),
        (masks.where(lambda b, h, q, k: 3 * k <= q), 0, (6, 8), (0, 3)),
        (masks.where(lambda b, h, q, k: -2 * k >= -q), 0, (6, 8), (0, 4)),
        (masks.where(lambda b, h, q, k: (k == 3) | (k == 7)), 0, (0, 8), (3, 8)),
        (masks.where(lambda b, h, q, k: (k >= 3) & (b == 1)), 0, (0, 8), "none"),
        (masks.where(lambda b, h, q, k: (k < 3) | ((k > 9) & (b == 1))), 0, (0, 8), (0, 3)),
        (masks.where(lambda b, h, q, k: k < masks.minimum(q, 5) + 1), 0, (0, 8), (0, 6)),
    ],
    ids=repr,
)
def test_ranges_that_must_be_tight(mask, b, q, wanted):
    lo, hi = masks.key_range(mask, b=b, h=(0, 1), q=q, len_q=8, len_k=16)
    assert ((lo, hi) if lo < hi else "none") == wanted


def test_most_empty_and_full_tiles_are_found():
    """The class is useful, not just sound: built-in masks at tile size 4 are classified exactly."""
    ids = np.repeat(np.arange(6), [3, 5, 8, 4, 4, 8])[None]
    keep = (np.arange(32) < 20)[None]
    for mask in (
        masks.causal(),
        masks.window(5, 2),
        masks.causal() & masks.window(7, -1),
        masks.segments(ids, ids),
        masks.key_padding(keep),
        masks.causal() & masks.segments(ids, ids) & masks.key_padding(keep),
    ):
        matrix = masks.materialize(mask, batch=1, heads_q=1, len_q=32, len_k=32)[0, 0]
        for q in range(0, 32, 4):
            for k in range(0, 32, 4):
                tile = matrix[q : q + 4, k : k + 4]
                found = masks.tile_class(
                    mask, b=0, h=(0, 1), q=(q, q + 4), k=(k, k + 4), len_q=32, len_k=32
                )
                exact = TileClass.FULL if tile.all() else TileClass(int(tile.any()))
                assert found is exact, (mask, q, k)
