"""The CPU path against the reference, and what it promises beyond right numbers."""

from __future__ import annotations

import dataclasses
import itertools
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumha import host, masks, reference
from cumha.problem import describe
from cumha.state import State, merge
from cumha.testing import expect
from cumha.testing.strategies import MaskSizes
from cumha.testing.strategies import masks as mask_strategy

NAN, INF = np.nan, np.inf
DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    mask: Any = None,
    key_lengths: Any = None,
    scale: float | None = None,
    tiles: tuple[int, int] | None = None,
    out: np.ndarray | None = None,
    **how: Any,
) -> tuple[np.ndarray, np.ndarray]:
    # What was in the outputs must not matter, and every element must be written.
    out = np.full((*q.shape[:3], v.shape[3]), NAN, q.dtype) if out is None else out
    lse = np.full(q.shape[:3], NAN, np.float32)
    problem, arrays = describe(
        q, k, v, mask=mask, key_lengths=key_lengths, scale=scale, out=out, lse=lse, return_lse=True
    )
    tile_q, tile_k = tiles or host.choose_tiles(problem)
    host.forward(problem, arrays, tile_q=tile_q, tile_k=tile_k, **how)
    return out, lse


def check(q: np.ndarray, k: np.ndarray, v: np.ndarray, **call: Any) -> None:
    """Compare a call with the reference."""
    asked = {n: call[n] for n in ("mask", "key_lengths", "scale") if n in call}
    expect(q, k, v, **asked).check(*attend(q, k, v, **call))


# -- hypothesis: whole problems -------------------------------------------------------------------


def contiguous(x: np.ndarray) -> np.ndarray:
    return x.copy()


def heads_inside(x: np.ndarray) -> np.ndarray:
    """A [batch, len, heads, dim] array, seen as [batch, heads, len, dim]."""
    return x.swapaxes(1, 2).copy().swapaxes(1, 2)


def transposed(x: np.ndarray) -> np.ndarray:
    """The head dimension is the slow one."""
    return x.swapaxes(2, 3).copy().swapaxes(2, 3)


def reversed_axes(x: np.ndarray) -> np.ndarray:
    return x[::-1, :, ::-1, ::-1].copy()[::-1, :, ::-1, ::-1]


def backward_keys(x: np.ndarray) -> np.ndarray:
    return x[:, :, ::-1].copy()[:, :, ::-1]


def sliced(x: np.ndarray) -> np.ndarray:
    """Every other element of a wider buffer, starting at an odd place."""
    wide = np.full((*x.shape[:2], x.shape[2] + 2, 2 * x.shape[3] + 3), NAN, x.dtype)
    view = wide[:, :, 1:-1, 3::2]
    view[...] = x
    return view


def broadcast(x: np.ndarray) -> np.ndarray:
    """Stride 0 over the batch: every entry has the first one's values."""
    return np.broadcast_to(x[:1].copy(), x.shape) if x.shape[0] else x


LAYOUTS: list[Callable[[np.ndarray], np.ndarray]] = [
    contiguous, heads_inside, transposed, reversed_axes, backward_keys, sliced, broadcast,
]  # fmt: skip


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[np.ndarray], dict[str, Any]]:
    """q, k, v with any layout, values and poison; mask, lengths and scale."""
    most = draw(st.sampled_from([1, 6, 14]))
    batch, heads_kv, group = (draw(st.integers(1, n)) for n in (3, 3, 3))
    len_q, len_k = draw(st.integers(1, most)), draw(st.integers(1, 2 * most))
    dim, dim_v = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    dtype = DTYPES[draw(st.sampled_from(list(DTYPES)))]
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([1.0, 0.0, 30.0]))
    arrays = [
        (factor * generator.standard_normal(shape)).astype(dtype)
        for factor, shape in (
            (spread, (batch, heads_kv * group, len_q, dim)),
            (1.0, (batch, heads_kv, len_k, dim)),
            (1.0, (batch, heads_kv, len_k, dim_v)),
        )
    ]
    for _ in range(draw(st.integers(0, 3))):
        specials = [NAN, -INF, INF] if spread < 30 else [NAN]
        x = arrays[draw(st.integers(0, 2))]
        x.flat[generator.integers(x.size)] = draw(st.sampled_from(specials))
    call: dict[str, Any] = {}
    if draw(st.booleans()):
        sizes = MaskSizes(batch, heads_kv * group, len_q, len_k)
        call["mask"] = draw(mask_strategy(sizes))
    if draw(st.booleans()):
        call["key_lengths"] = draw(st.lists(st.integers(0, len_k), min_size=batch, max_size=batch))
    call["scale"] = draw(st.sampled_from([None, 1.0, 0.125, -0.5]))
    arrays = [draw(st.sampled_from(LAYOUTS))(x) for x in arrays]
    return arrays, call


@st.composite
def divisions(draw: st.DrawFn) -> dict[str, Any]:
    """How to compute: tiles, and possibly splits."""
    tiles = draw(st.one_of(st.none(), st.tuples(st.integers(1, 6), st.integers(1, 9))))
    how = draw(st.sampled_from(["whole", "tiles", "length", "keys"]))
    if how == "keys":
        return {"tiles": tiles, "keys_per_split": draw(st.integers(1, 9))}
    if how == "whole":
        return {"tiles": tiles}
    return {"tiles": tiles, "splits": draw(st.integers(1, 9)), "split_by": how}


@settings(max_examples=800)
@given(problems(), divisions())
def test_any_problem_equals_the_reference(
    problem: tuple[list[np.ndarray], dict[str, Any]], division: dict[str, Any]
) -> None:
    arrays, call = problem
    check(*arrays, **call, **division)


@settings(max_examples=300)
@given(problems(), st.lists(st.integers(0, 28), max_size=3), st.data())
def test_merged_partial_calls_equal_the_reference(
    problem: tuple[list[np.ndarray], dict[str, Any]], cuts: list[int], data: st.DataObject
) -> None:
    (q, k, v), call = problem
    total = k.shape[2]
    edges = [0, *sorted(min(cut, total) for cut in cuts), total]
    division = data.draw(divisions())
    tiles = division.pop("tiles") or (64, 64)
    division |= {"tile_q": tiles[0], "tile_k": tiles[1]}
    states = []
    for start, stop in itertools.pairwise(edges):
        facts, arrays = describe(
            q,
            k[:, :, start:stop],
            v[:, :, start:stop],
            store_state=True,
            key_offset=start,
            total_keys=total,
            **call,
        )
        states.append(host.partial(facts, arrays, **division))
    expect(q, k, v, **call).check(*merge(*states).finish())


# -- dtypes and sizes -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("len_q", "len_k"), [(1, 100), (1, 5000), (7, 9), (130, 515), (600, 600), (257, 64)]
)
def test_chosen_tiles_at_real_sizes(dtype: str, len_q: int, len_k: int) -> None:
    q = normal(2, 6, len_q, 64, dtype=DTYPES[dtype])
    k, v = (normal(2, 2, len_k, 64, seed=i, dtype=DTYPES[dtype]) for i in (1, 2))
    check(q, k, v, mask=masks.causal())
    check(q, k, v, mask=masks.window(100, 3), key_lengths=[len_k, len_k // 2])


@pytest.mark.parametrize(("dim", "dim_v"), [(1, 1), (1, 512), (512, 1), (80, 96), (512, 512)])
def test_head_dims(dim: int, dim_v: int) -> None:
    q, k, v = normal(1, 4, 5, dim), normal(1, 2, 33, dim, seed=1), normal(1, 2, 33, dim_v, seed=2)
    check(q, k, v, tiles=(4, 8))


@pytest.mark.parametrize(
    ("batch", "heads_q", "heads_kv", "len_q", "len_k"),
    [(0, 2, 1, 3, 4), (2, 0, 1, 3, 4), (2, 0, 0, 3, 4), (2, 2, 1, 0, 4), (2, 2, 1, 3, 0)],
)
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["whole", "causal"])
@pytest.mark.parametrize(
    "division", [{}, {"splits": 3, "split_by": "length"}, {"keys_per_split": 2}]
)
def test_sizes_of_zero(
    batch: int, heads_q: int, heads_kv: int, len_q: int, len_k: int, mask: Any, division: Any
) -> None:
    q, k, v = (
        np.ones((batch, heads, length, 4), np.float32)
        for heads, length in ((heads_q, len_q), (heads_kv, len_k), (heads_kv, len_k))
    )
    out, lse = attend(q, k, v, mask=mask, **division)
    assert (out == 0).all() and (lse == -INF).all()
    problem, arrays = describe(q, k, v, mask=mask, store_state=True)
    state = host.partial(problem, arrays, tile_q=2, tile_k=2)
    assert state.o.shape == (batch, heads_q, len_q, 4) and (state.l == 0).all()


def test_more_entries_and_heads_than_16_bits() -> None:
    q, k, v = (normal(70_000, 1, 1, 1, seed=i) for i in range(3))
    np.testing.assert_array_equal(attend(q, k, v)[0], v)
    q, k, v = (x.reshape(1, 70_000, 1, 1) for x in (q, k, v))
    np.testing.assert_array_equal(attend(q, k, v)[0], v)


def test_lse_is_optional() -> None:
    q, k, v = normal(1, 2, 3, 4), normal(1, 2, 5, 4, seed=1), normal(1, 2, 5, 4, seed=2)
    problem, arrays = describe(q, k, v, out=np.empty((1, 2, 3, 4), np.float32))
    host.forward(problem, arrays, tile_q=2, tile_k=2)
    np.testing.assert_array_equal(arrays.out, attend(q, k, v, tiles=(2, 2))[0])


# -- strides --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("len_q", [1, 62])
def test_strides_give_the_bits_of_a_contiguous_copy(
    layout: Callable[[np.ndarray], np.ndarray], which: str, dtype: str, len_q: int
) -> None:
    plain = {
        "q": normal(2, 4, len_q, 48, dtype=DTYPES[dtype]),
        "k": normal(2, 2, 62, 48, seed=1, dtype=DTYPES[dtype]),
        "v": normal(2, 2, 62, 48, seed=2, dtype=DTYPES[dtype]),
    }
    views = {n: layout(x) if n in which else x for n, x in plain.items()}
    copies = {n: np.ascontiguousarray(x) for n, x in views.items()}
    got = attend(**views, mask=masks.causal())
    want = attend(**copies, mask=masks.causal())
    for x, y in zip(got, want, strict=True):
        assert x.tobytes() == y.tobytes()


def test_stride_zero_along_keys_and_dims() -> None:
    one = np.float32(0.5)
    q = np.broadcast_to(one, (2, 2, 3, 8))
    v = np.broadcast_to(np.arange(8, dtype=np.float32), (2, 1, 5, 8))
    check(q, np.broadcast_to(one, (2, 1, 5, 8)), v, tiles=(2, 2))


@pytest.mark.parametrize("layout", [heads_inside, transposed, reversed_axes, sliced])
def test_output_may_be_a_view(layout: Callable[[np.ndarray], np.ndarray]) -> None:
    q, k, v = normal(2, 4, 9, 8), normal(2, 2, 12, 8, seed=1), normal(2, 2, 12, 8, seed=2)
    out = layout(np.full((2, 4, 9, 8), NAN, np.float32))
    around = out.base if out.base is not None else out
    holes = int(np.isnan(around).sum()) - out.size
    want, _ = attend(q, k, v, tiles=(4, 5))
    got, _ = attend(q, k, v, tiles=(4, 5), out=out)
    assert got is out
    np.testing.assert_array_equal(got, want)
    assert np.isnan(around).sum() == holes  # nothing outside the view was written


def test_inputs_are_not_changed() -> None:
    q, k, v = (normal(1, 2, 20, 8, seed=i) for i in range(3))
    copies = [x.copy() for x in (q, k, v)]
    attend(q, k, v, mask=masks.causal(), scale=3.0)
    for x, copy in zip((q, k, v), copies, strict=True):
        np.testing.assert_array_equal(x, copy)


def test_read_only_inputs() -> None:
    arrays = [normal(1, 2, 20, 8, seed=i) for i in range(3)]
    for x in arrays:
        x.flags.writeable = False
    check(*arrays, mask=masks.causal())


# -- what must not reach the output ---------------------------------------------------------------

POISONS = [NAN, INF, -INF, 3e38]


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("tiles", [None, (4, 8), (64, 5)])
@pytest.mark.parametrize("division", [{}, {"splits": 3}, {"keys_per_split": 7}])
def test_unseen_slots_do_not_reach_the_output(
    poison: float, tiles: tuple[int, int] | None, division: dict[str, Any]
) -> None:
    """Beyond the lengths, behind the padding, outside the window: same bits whatever they hold."""
    q, k, v = normal(3, 4, 12, 8), normal(3, 2, 40, 8, seed=1), normal(3, 2, 40, 8, seed=2)
    keep = np.ones((3, 40), bool)
    keep[1, :9] = keep[2, 5:31:3] = False
    call: dict[str, Any] = {
        "mask": masks.window(20, 0) & masks.key_padding(keep),
        "key_lengths": [40, 33, 17],
        "tiles": tiles,
        **division,
    }
    clean = attend(q, k, v, **call)
    seen = masks.materialize(
        call["mask"], batch=3, heads_q=4, len_q=12, len_k=40, key_lengths=call["key_lengths"]
    ).any(axis=(1, 2))
    assert seen.any() and not seen.all()
    for x in (k, v):
        x.swapaxes(1, 2)[~seen] = poison
    poisoned = attend(q, k, v, **call)
    for x, y in zip(poisoned, clean, strict=True):
        assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("tiles", [None, (8, 8), (5, 3)])
def test_a_visible_slot_shows_only_in_the_rows_that_see_it(
    poison: float, tiles: tuple[int, int] | None
) -> None:
    """The other rows of the same tile keep every bit."""
    q, k, v = normal(1, 4, 24, 8), normal(1, 2, 24, 8, seed=1), normal(1, 2, 24, 8, seed=2)
    clean, clean_lse = attend(q, k, v, mask=masks.causal(), tiles=tiles)
    v[0, 1, 10, 3] = poison
    out, lse = attend(q, k, v, mask=masks.causal(), tiles=tiles)
    assert lse.tobytes() == clean_lse.tobytes()
    hit = np.zeros(out.shape, bool)
    hit[0, 2:, 10:, 3] = True
    np.testing.assert_array_equal(out[hit], poison)
    assert out[~hit].tobytes() == clean[~hit].tobytes()
    check(q, k, v, mask=masks.causal(), tiles=tiles)


@pytest.mark.parametrize("tiles", [None, (8, 8)])
def test_nan_in_a_visible_key_fills_the_rows_that_see_it(tiles: tuple[int, int] | None) -> None:
    q, k, v = normal(1, 2, 24, 8), normal(1, 1, 24, 8, seed=1), normal(1, 1, 24, 8, seed=2)
    k[0, 0, 10, 3] = NAN
    out, lse = attend(q, k, v, mask=masks.causal(), tiles=tiles)
    assert np.isnan(out[:, :, 10:]).all() and np.isnan(lse[:, :, 10:]).all()
    assert np.isfinite(out[:, :, :10]).all() and np.isfinite(lse[:, :, :10]).all()


@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["full tiles", "partial tiles"])
def test_a_key_removed_by_its_score_is_not_read(mask: Any) -> None:
    """A score of -inf removes the key whatever its cause, also in a tile that no mask touches."""
    q, k, v = np.abs(normal(1, 2, 6, 4)), normal(1, 2, 6, 4, seed=1), normal(1, 2, 6, 4, seed=2)
    k[0, 0, 2] = -INF
    v[0, 0, 2] = NAN
    k[0, 1] = -INF  # no key is left for head 1
    check(q, k, v, mask=mask)
    out, lse = attend(q, k, v, mask=mask)
    assert np.isfinite(out).all()
    assert (out[0, 1] == 0).all() and (lse[0, 1] == -INF).all()


def test_rows_without_keys_are_exactly_zero() -> None:
    q, k, v = normal(1, 2, 256, 16), normal(1, 2, 128, 16, seed=1), normal(1, 2, 128, 16, seed=2)
    for tiles in (None, (32, 32), (7, 100)):
        out, lse = attend(q, k, v, mask=masks.causal(), tiles=tiles)
        assert (out[:, :, :128] == 0).all() and not np.signbit(out[:, :, :128]).any()
        assert (lse[:, :, :128] == -INF).all() and np.isfinite(lse[:, :, 128:]).all()


def test_an_unseen_first_tile_does_not_set_the_reference() -> None:
    """All scores about -200, the first tile masked for some rows: 0 must not become the maximum."""
    q = np.full((1, 14, 88, 64), 5, DTYPES["bfloat16"])
    k = (-5 + 0.05 * normal(1, 2, 448, 64)).astype(DTYPES["bfloat16"])
    v = normal(1, 2, 448, 64, seed=1, dtype=DTYPES["bfloat16"])
    mask = masks.causal() & masks.where(lambda b, h, q, k: (k >= 64) | (q % 2 == 0))
    check(q, k, v, mask=mask, tiles=(32, 64))


@pytest.mark.parametrize("level", [-1e5, 1e5])
def test_any_finite_range_of_scores(level: float) -> None:
    q, k = np.full((1, 1, 2, 1), level, np.float32), np.ones((1, 1, 9, 1), np.float32)
    v = np.arange(9, dtype=np.float32).reshape(1, 1, 9, 1)
    out, lse = attend(q, k, v, scale=1.0, tiles=(1, 2))
    np.testing.assert_allclose(out, 4.0, rtol=1e-6)
    np.testing.assert_allclose(lse, level + math.log(9.0), rtol=1e-6)


# -- splits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [1, 2, 3, 16, 129, 1000])
@pytest.mark.parametrize("split_by", ["tiles", "length"])
def test_every_number_of_splits(splits: int, split_by: str) -> None:
    q, k, v = normal(2, 4, 3, 32), normal(2, 2, 257, 32, seed=1), normal(2, 2, 257, 32, seed=2)
    for call in ({}, {"key_lengths": [257, 40]}, {"mask": masks.causal()}):
        check(q, k, v, splits=splits, split_by=split_by, tiles=(2, 16), **call)


def spans(
    lo: int, hi: int, last: int, tile_k: int, first: int = 0, **how: Any
) -> list[tuple[int, int]]:
    return host._Division(tile_k, **how).spans(lo, hi, first, last)


def test_splits_divide_the_visible_tiles() -> None:
    assert spans(0, 128, 128, 32, splits=2) == [(0, 64), (64, 128)]
    assert spans(40, 128, 128, 32, splits=2) == [(40, 72), (72, 128)]
    assert spans(0, 100, 100, 32, splits=3) == [(0, 32), (32, 64), (64, 100)]
    assert spans(0, 100, 100, 32, splits=99) == [(0, 32), (32, 64), (64, 96), (96, 100)]


def test_splits_by_length_divide_all_keys() -> None:
    assert spans(0, 100, 100, 10, splits=3, split_by="length") == [(0, 33), (33, 66), (66, 100)]
    assert spans(40, 60, 100, 10, splits=3, split_by="length") == [(40, 60)]
    assert spans(0, 100, 100, 60, splits=3, split_by="length") == [(0, 50), (50, 100)]
    assert spans(90, 100, 100, 2, first=90, splits=2, split_by="length") == [(90, 95), (95, 100)]


def test_keys_per_split_counts_from_key_0() -> None:
    assert spans(0, 100, 100, 32, keys_per_split=40) == [(0, 40), (40, 80), (80, 100)]
    assert spans(50, 80, 100, 32, keys_per_split=40) == [(50, 80)]
    assert spans(50, 90, 100, 32, keys_per_split=40) == [(50, 80), (80, 90)]
    assert spans(80, 81, 100, 32, keys_per_split=40) == [(80, 81)]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("len_q", [1, 5])
def test_keys_per_split_makes_a_request_independent_of_its_neighbours(
    dtype: str, dim: int, len_q: int
) -> None:
    """Alone in a small buffer, or in a batch in a large one: same bits."""
    lengths = [37, 300, 5, 0, 129]
    q = normal(5, 8, len_q, dim, dtype=DTYPES[dtype])
    k, v = (normal(5, 4, 300, dim, seed=i, dtype=DTYPES[dtype]) for i in (1, 2))
    by_head = masks.causal() & masks.where(lambda b, h, q, k: (h < 3) | (k > 20))
    for how in ({"keys_per_split": 64}, {"keys_per_split": 50, "mask": by_head}):
        together = attend(q, k, v, key_lengths=lengths, **how)
        for b, n in enumerate(lengths):
            one = slice(b, b + 1)
            alone = attend(q[one], k[one, :, :n].copy(), v[one, :, :n].copy(), **how)
            for x, y in zip(alone, together, strict=True):
                assert x.tobytes() == y[one].tobytes()


@pytest.mark.parametrize("how", [{}, {"splits": 4}, {"keys_per_split": 100}])
def test_the_same_call_gives_the_same_bits(how: dict[str, Any]) -> None:
    q, k, v = normal(2, 8, 70, 64), normal(2, 4, 700, 64, seed=1), normal(2, 4, 700, 64, seed=2)
    first = attend(q, k, v, mask=masks.causal(), **how)
    for _ in range(3):
        again = attend(q, k, v, mask=masks.causal(), **how)
        assert all(x.tobytes() == y.tobytes() for x, y in zip(first, again, strict=True))


# -- partial calls --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_partial_gives_unnormalised_sums(dtype: str) -> None:
    q, k, v = (normal(1, 2, 6, 8, seed=i, dtype=DTYPES[dtype]) for i in range(3))
    problem, arrays = describe(q, k, v, causal=True, store_state=True)
    state = host.partial(problem, arrays, tile_q=4, tile_k=3)
    assert isinstance(state, State) and state.dtype == DTYPES[dtype]
    assert state.o.dtype == (np.float64 if dtype == "float64" else np.float32)
    o, m, l = reference.partial_attention(q, k, v, causal=True)  # noqa: E741
    np.testing.assert_allclose(state.m, m, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.l, l, rtol=1e-5)
    np.testing.assert_allclose(state.o, o, rtol=1e-4, atol=1e-5)


def test_a_prefix_that_all_queries_see_needs_its_true_position() -> None:
    """3 new tokens behind 8 cached ones; causal is anchored at the 11th key in both calls."""
    q, k, v = normal(1, 2, 3, 8), normal(1, 2, 11, 8, seed=1), normal(1, 2, 11, 8, seed=2)
    states = []
    for start, stop in ((0, 8), (8, 11)):
        problem, arrays = describe(
            q,
            k[:, :, start:stop],
            v[:, :, start:stop],
            causal=True,
            store_state=True,
            key_offset=start,
            total_keys=11,
        )
        states.append(host.partial(problem, arrays, tile_q=2, tile_k=4))
    want, want_lse = reference.attention(q, k, v, causal=True, return_lse=True)
    out, lse = merge(*states).finish()
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=1e-6)


# -- tiles ----------------------------------------------------------------------------------------


def test_unseen_tiles_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of 16 in tiles of 16: only the diagonal is computed, and it builds no mask."""
    ids = np.repeat(np.arange(8), 16)[None]
    q, k, v = normal(1, 1, 128, 8), normal(1, 1, 128, 8, seed=1), normal(1, 1, 128, 8, seed=2)
    products, predicates = [], []
    real = host._products
    monkeypatch.setattr(host, "_products", lambda *a: products.append(a) or real(*a))
    monkeypatch.setattr(host, "_mask_scores", lambda *a: predicates.append(a))
    attend(q, k, v, mask=masks.segments(ids, ids), tiles=(16, 16))
    assert len(products) == 8 and not predicates


def test_full_tiles_build_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal over 64 x 64 in tiles of 16: 10 tiles are seen, 4 of them hold the diagonal.

    The key range of each row block leaves only those to be classified.
    """
    q, k, v = (normal(1, 1, 64, 8, seed=i) for i in range(3))
    classes, products, predicates = [], [], []
    real, real_mask, real_class = host._products, host._mask_scores, host._tile_class
    monkeypatch.setattr(host, "_tile_class", lambda *a: classes.append(a) or real_class(*a))
    monkeypatch.setattr(host, "_products", lambda *a: products.append(a) or real(*a))
    monkeypatch.setattr(host, "_mask_scores", lambda *a: predicates.append(a) or real_mask(*a))
    attend(q, k, v, mask=masks.causal(), tiles=(16, 16))
    assert len(classes) == len(products) == 10 and len(predicates) == 4


def test_chosen_tiles_do_not_depend_on_the_batch_or_the_buffer() -> None:
    q, k = np.zeros((1, 8, 300, 16), np.float32), np.zeros((1, 2, 100, 16), np.float32)
    base, _ = describe(q, k, k)
    for change in ({"batch": 64}, {"len_k": 100_000, "total_keys": 100_000}):
        assert host.choose_tiles(dataclasses.replace(base, **change)) == host.choose_tiles(base)


def peak_bytes(call: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_stays_bounded_at_32k_by_32k() -> None:
    """The matrix would be 4 GiB; the window keeps the work small. Checked at some rows."""
    n = 32768
    q, k, v = (normal(1, 1, n, 16, seed=i, dtype=np.float16) for i in range(3))
    mask = masks.causal() & masks.window(500, 0)
    results: list[Any] = []
    peak = peak_bytes(lambda: results.extend(attend(q, k, v, mask=mask)))
    assert peak < 32 * 2**20
    for row in (0, 499, 500, 20_000, n - 1):
        keys = slice(max(row - 500, 0), row + 1)
        want = reference.attention(q[:, :, [row]], k[:, :, keys], v[:, :, keys])
        np.testing.assert_allclose(results[0][:, :, [row]], want, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("how", [{}, {"splits": 64}, {"keys_per_split": 16}])
def test_memory_stays_bounded_without_a_mask(how: dict[str, Any]) -> None:
    """Half converted key by key, many heads, many splits: still a few blocks."""
    q = normal(1, 32, 16, 64, dtype=np.float16)
    k, v = (normal(1, 32, 4096, 64, seed=i, dtype=np.float16) for i in (1, 2))
    assert peak_bytes(lambda: attend(q, k, v, **how)) < 16 * 2**20


def test_memory_stays_bounded_over_many_entries() -> None:
    q = normal(4096, 4, 1, 16)
    k = np.broadcast_to(normal(1, 4, 256, 16), (4096, 4, 256, 16))
    assert peak_bytes(lambda: attend(q, k, k)) < 8 * 2**20
