"""The algebra of partial results: what merges to what, and the identity bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
import math
import subprocess
import sys
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp, softmax

from cumha.state import State, array_module, merge

SHAPE = (2, 3, 4, 5)  # batch, heads_q, len_q, head_dim_v
LIBRARIES = ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)]


def library(name: str) -> Any:
    return np if name == "numpy" else pytest.importorskip("cupy")


def to_numpy(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.get()


def state_of(scores: np.ndarray, values: np.ndarray, xp: Any = np, reference: Any = None) -> State:
    """The state over scores [rows, keys] and values [keys, dim] as batch 1, head 1."""
    m = scores.max(axis=1, initial=-np.inf) if reference is None else reference
    kept = scores != -np.inf
    with np.errstate(invalid="ignore"):
        p = np.where(kept, np.exp(scores - m[:, None]), 0)
    arrays = (p @ values, m, p.sum(axis=1))
    return State(*(xp.asarray(x[None, None]) for x in arrays))


def random_state(seed: int, dtype: Any = np.float32, xp: Any = np) -> State:
    generator = np.random.default_rng(seed)
    o = generator.standard_normal(SHAPE)
    m = generator.standard_normal(SHAPE[:3])
    l = generator.uniform(0.5, 4, SHAPE[:3])  # noqa: E741
    o[0, 0, 0, :2] = -0.0, 0.0
    return State(*(xp.asarray(x.astype(dtype)) for x in (o, m, l)))


def garbage_empty(xp: Any = np, dtype: Any = np.float32) -> State:
    """An empty state whose unread fields hold what could do the most harm."""
    o = np.resize(np.array([np.nan, np.inf, -np.inf, 3e38, -0.0], dtype), SHAPE)
    m = np.resize(np.array([np.nan, np.inf, -np.inf, 3e38, 7.0], dtype), SHAPE[:3])
    return State(xp.asarray(o), xp.asarray(m), xp.zeros(SHAPE[:3], dtype))


def bits(state: State) -> tuple[bytes, ...]:
    return tuple(to_numpy(x).tobytes() for x in (state.o, state.m, state.l))


# -- merge against an independent formula ---------------------------------------------------------


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 4),
    parts=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    spread=st.sampled_from([0.0, 1.0, 30.0, 1e5]),
    removed=st.sampled_from([0.0, 0.3, 0.9]),
)
def test_merged_parts_equal_the_whole(
    seed: int, rows: int, parts: list[int], spread: float, removed: float
) -> None:
    generator = np.random.default_rng(seed)
    keys = sum(parts)
    scores = spread * generator.standard_normal((rows, keys))
    scores[generator.random(scores.shape) < removed] = -np.inf
    values = generator.standard_normal((keys, 3))
    edges = np.cumsum([0, *parts])
    states = [state_of(scores[:, a:b], values[a:b]) for a, b in itertools.pairwise(edges)]
    out, lse = merge(*states).finish()

    seen = (scores > -np.inf).any(axis=1)
    want = np.zeros((rows, 3))
    want_lse = np.full(rows, -np.inf)
    if seen.any():
        want[seen] = softmax(scores[seen], axis=1) @ values
        want_lse[seen] = logsumexp(scores[seen], axis=1)
    np.testing.assert_allclose(out[0, 0], want, rtol=0, atol=1e-13)
    np.testing.assert_allclose(lse[0, 0], want_lse, rtol=1e-7, atol=1e-7)
    assert (out[0, 0][~seen] == 0).all()


@pytest.mark.parametrize("name", LIBRARIES)
def test_merge_by_hand(name: str) -> None:
    """Weights 1 and 3 on the values 8 and 0: out 2, lse ln 4, whatever the references are."""
    xp = library(name)
    ln3 = math.log(3.0)
    one = state_of(np.array([[0.0]]), np.array([[8.0]]), xp)
    three = state_of(np.array([[ln3]]), np.array([[0.0]]), xp)
    older = state_of(np.array([[0.0]]), np.array([[8.0]]), xp, reference=np.array([-2.0]))
    for first in (one, older):
        for states in ((first, three), (three, first)):
            merged = merge(*states)
            assert merged.m.item() == pytest.approx(ln3)
            out, lse = merged.finish()
            assert out.item() == pytest.approx(2.0)
            assert lse.item() == pytest.approx(math.log(4.0))


def test_unnormalised_sums_are_not_weighted_by_l_again() -> None:
    """Two parts of 1 and 3 equal scores: out is the mean of the four values."""
    values = np.array([[8.0], [0.0], [0.0], [4.0]])
    scores = np.zeros((1, 4))
    a, b = state_of(scores[:, :1], values[:1]), state_of(scores[:, 1:], values[1:])
    out, _ = merge(a, b).finish()
    assert out.item() == 3.0
    published = (a.o * a.l[..., None] + b.o * b.l[..., None]) / (a.l + b.l)[..., None]
    assert published.item() == 5.0


# -- the empty state ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", LIBRARIES)
def test_empty_is_the_identity_bit_for_bit(name: str, dtype: Any) -> None:
    xp = library(name)
    state = random_state(0, dtype, xp)
    plain = State.empty(*SHAPE, dtype=dtype, library=name)
    for empty in (plain, garbage_empty(xp, dtype)):
        assert bits(merge(empty, state)) == bits(state)
        assert bits(merge(state, empty)) == bits(state)
        assert bits(merge(empty, state, empty)) == bits(state)


@pytest.mark.parametrize("name", LIBRARIES)
def test_empty_rows_mix_with_others(name: str) -> None:
    xp = library(name)
    a, b, holes = random_state(1, xp=xp), random_state(2, xp=xp), garbage_empty(xp)
    a_empty = np.zeros(SHAPE[:3], bool)
    a_empty[0, :, ::2] = True
    b_empty = np.zeros(SHAPE[:3], bool)
    b_empty[:, 1] = True

    def with_holes(state: State, where: np.ndarray) -> State:
        w = xp.asarray(where)
        return State(
            xp.where(w[..., None], holes.o, state.o),
            xp.where(w, holes.m, state.m),
            xp.where(w, holes.l, state.l),
        )

    merged = merge(with_holes(a, a_empty), with_holes(b, b_empty))
    both = merge(a, b)
    for field, if_none in (("o", 0.0), ("m", -np.inf), ("l", 0.0)):
        got, of_a, of_b, of_both = (to_numpy(getattr(s, field)) for s in (merged, a, b, both))
        np.testing.assert_array_equal(got[~a_empty & ~b_empty], of_both[~a_empty & ~b_empty])
        np.testing.assert_array_equal(got[a_empty & ~b_empty], of_b[a_empty & ~b_empty])
        np.testing.assert_array_equal(got[~a_empty & b_empty], of_a[~a_empty & b_empty])
        assert (got[a_empty & b_empty] == if_none).all()


@pytest.mark.parametrize("name", LIBRARIES)
def test_two_empty_states_give_the_empty_state(name: str) -> None:
    xp = library(name)
    merged = merge(garbage_empty(xp), garbage_empty(xp))
    assert bits(merged) == bits(State.empty(*SHAPE, library=name))
    out, lse = merged.finish()
    assert (to_numpy(out) == 0).all() and (to_numpy(lse) == -np.inf).all()


def test_finish_never_reads_empty_rows() -> None:
    out, lse = garbage_empty().finish()
    assert (out == 0).all() and not np.signbit(out).any()
    assert (lse == -np.inf).all()


def test_a_reference_of_minus_inf_does_not_make_a_row_empty() -> None:
    """Only ``l`` counts: a NaN sum with an untouched reference still shows."""
    l = np.full((1, 1, 1), np.nan)  # noqa: E741
    nan = State(np.zeros((1, 1, 1, 1)), np.full((1, 1, 1), -np.inf), l)
    good = State(np.ones((1, 1, 1, 1)), np.zeros((1, 1, 1)), np.ones((1, 1, 1)))
    for states in ((nan, good), (good, nan)):
        out, lse = merge(*states).finish()
        assert np.isnan(out).all() and np.isnan(lse).all()


@pytest.mark.parametrize("field", ["o", "m", "l"])
@pytest.mark.parametrize("name", LIBRARIES)
def test_nan_propagates_and_stays_in_its_row(name: str, field: str) -> None:
    xp = library(name)
    poisoned = random_state(3, xp=xp)
    getattr(poisoned, field)[1, 2, 3] = np.nan
    for states in ((poisoned, random_state(4, xp=xp)), (random_state(4, xp=xp), poisoned)):
        out, lse = (to_numpy(x) for x in merge(*states).finish())
        assert np.isnan(out[1, 2, 3]).all()
        assert np.isnan(lse[1, 2, 3]) == (field != "o")
        assert np.isnan(out).sum() == SHAPE[3]


# -- merge as an operation ------------------------------------------------------------------------


def test_one_state_is_returned_as_it_is() -> None:
    state = random_state(5)
    assert merge(state) is state


def test_merge_is_a_left_fold_and_repeats_bit_for_bit() -> None:
    a, b, c = (random_state(i) for i in range(3))
    assert bits(merge(a, b, c)) == bits(merge(merge(a, b), c)) == bits(merge(a, b, c))
    other = merge(a, merge(b, c))
    np.testing.assert_allclose(other.o, merge(a, b, c).o, rtol=1e-5, atol=1e-6)


def test_merge_leaves_its_arguments_alone() -> None:
    a, b = random_state(6), random_state(7)
    before = bits(a), bits(b)
    merge(a, b)
    assert (bits(a), bits(b)) == before


def test_merge_keeps_precision_and_rounding_dtype() -> None:
    a = State.empty(*SHAPE, dtype="float16")
    assert a.o.dtype == np.float32
    merged = merge(a, dataclasses.replace(random_state(0), dtype="float16"))
    assert merged.dtype == np.float16 and merged.o.dtype == np.float32
    assert merge(random_state(0, np.float64), random_state(1, np.float64)).o.dtype == np.float64


def test_sizes_of_zero() -> None:
    for shape in ((0, 2, 3, 4), (1, 2, 0, 4), (1, 0, 3, 4)):
        state = State.empty(*shape)
        out, lse = merge(state, state).finish()
        assert out.shape == shape and lse.shape == shape[:3]


# -- finish ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_finish_rounds_once_to_the_dtype(dtype: str) -> None:
    state = dataclasses.replace(random_state(8, np.float64), dtype=dtype)
    out, lse = state.finish()
    assert out.dtype == state.dtype and lse.dtype == np.float32
    exact = state.o / state.l[..., None]
    np.testing.assert_array_equal(out, exact.astype(state.dtype))
    np.testing.assert_array_equal(lse, (state.m + np.log(state.l)).astype(np.float32))


def test_finish_overflows_to_inf_without_a_warning() -> None:
    state = State(
        np.full(SHAPE, 7e4, np.float32), np.zeros(SHAPE[:3], "f4"), np.ones(SHAPE[:3], "f4"), "f2"
    )
    assert (state.finish()[0] == np.inf).all()


def test_finish_in_the_other_layout() -> None:
    state = random_state(9)
    out, lse = state.finish("BLHD")
    want, want_lse = state.finish()
    assert out.shape == (2, 4, 3, 5) and out.flags.c_contiguous
    np.testing.assert_array_equal(out, want.swapaxes(1, 2))
    np.testing.assert_array_equal(lse, want_lse)
    with pytest.raises(ValueError, match="BHLD"):
        state.finish("BDLH")


# -- converters -----------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["e", 2])
@pytest.mark.parametrize("name", LIBRARIES)
def test_converters_are_inverse(name: str, base: Any) -> None:
    xp = library(name)
    state = random_state(10, np.float64, xp)
    o, lse = state.to_normalized(base=base)
    want_out, want_lse = (to_numpy(x) for x in state.finish())
    np.testing.assert_array_equal(to_numpy(o), want_out)
    unit = 1.0 if base == "e" else math.log(2.0)
    np.testing.assert_allclose(to_numpy(lse) * unit, want_lse, rtol=1e-6, atol=1e-6)
    out, lse = (to_numpy(x) for x in State.from_normalized(o, lse, base=base).finish())
    np.testing.assert_allclose(out, want_out, rtol=1e-14)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("first", "second", "want"),
    [
        ((0.0, -np.inf), (0.0, -np.inf), (0.0, -np.inf)),
        ((3.0, -2.0), (0.0, -np.inf), (3.0, -2.0)),
        ((np.nan, -np.inf), (3.0, -2.0), (3.0, -2.0)),
        ((1.0, -1e30), (2.0, -1e30), (1.5, -1e30)),
        ((1.0, 1e30), (2.0, -1e30), (1.0, 1e30)),
        ((1.0, 0.0), (2.0, math.log(3.0)), (1.75, math.log(4.0))),
    ],
)
def test_normalised_results_merge(
    first: tuple[float, float], second: tuple[float, float], want: tuple[float, float]
) -> None:
    for pair in ((first, second), (second, first)):
        states = [
            State.from_normalized(np.full((1, 1, 1, 2), o, "f4"), np.full((1, 1, 1), lse, "f4"))
            for o, lse in pair
        ]
        out, lse = merge(*states).finish()
        np.testing.assert_allclose(out.ravel(), [want[0]] * 2, rtol=1e-6)
        np.testing.assert_allclose(lse.ravel(), [want[1]], rtol=1e-6)


def test_the_wrong_base_shows() -> None:
    """A log-sum-exp in base 2 that is taken for a natural one gives other weights."""
    o = np.array([0.0, 1.0], "f4").reshape(2, 1, 1, 1, 1)
    lse = np.array([0.0, 4.0], "f4").reshape(2, 1, 1, 1)
    right, wrong = (
        merge(*(State.from_normalized(o[i], lse[i], base=base) for i in range(2))).finish()[0]
        for base in (2, "e")
    )
    assert right.item() == pytest.approx(16 / 17)
    assert wrong.item() == pytest.approx(math.e**4 / (1 + math.e**4))


def test_from_normalized_rounds_to_the_dtype_of_the_output() -> None:
    o = np.ones(SHAPE, ml_dtypes.bfloat16)
    state = State.from_normalized(o, np.zeros(SHAPE[:3], "f4"))
    assert state.o.dtype == np.float32 and state.finish()[0].dtype == ml_dtypes.bfloat16
    state = State.from_normalized(o, np.zeros(SHAPE[:3], "f4"), dtype="float32")
    assert state.finish()[0].dtype == np.float32


# -- errors and the rest --------------------------------------------------------------------------

ZEROS, ROWS = np.zeros(SHAPE, "f4"), np.zeros(SHAPE[:3], "f4")


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((ZEROS.tolist(), ROWS, ROWS), TypeError, "need a numpy.ndarray or a cupy.ndarray"),
        ((ZEROS, ROWS.astype("f8"), ROWS), TypeError, "all float32 or all float64"),
        ((ZEROS.astype("f2"), ROWS.astype("f2"), ROWS.astype("f2")), TypeError, "all float32"),
        ((ZEROS, ROWS[:1], ROWS), ValueError, r"m \(1, 3, 4\)"),
        ((ZEROS, ROWS, ROWS[..., None]), ValueError, "heads_q"),
        ((ZEROS[0], ROWS[0], ROWS[0]), ValueError, "need o"),
        ((ZEROS, ROWS, ROWS, "int32"), TypeError, "'bfloat16'"),
        ((ZEROS, ROWS, ROWS, "nonsense"), TypeError, "'nonsense'"),
    ],
)
def test_a_state_refuses_what_does_not_fit(
    arguments: tuple[Any, ...], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        State(*arguments)


@pytest.mark.parametrize(
    ("states", "error", "match"),
    [
        ((), ValueError, "at least one"),
        ((random_state(0), None), TypeError, "NoneType"),
        ((random_state(0), random_state(0, np.float64)), TypeError, "one dtype"),
        ((random_state(0), State.empty(*SHAPE, dtype="float16")), TypeError, "one dtype"),
        ((random_state(0), State.empty(1, 3, 4, 5)), ValueError, "batch=1"),
    ],
)
def test_merge_refuses_what_does_not_fit(
    states: tuple[Any, ...], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        merge(*states)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"o": ZEROS, "lse": ROWS[:1]}, ValueError, r"lse \(1, 3, 4\)"),
        ({"o": ZEROS.astype("i4"), "lse": ROWS}, TypeError, "int32"),
        ({"o": ZEROS, "lse": ROWS, "base": 10}, ValueError, "base is 10"),
        ({"o": ZEROS, "lse": ROWS.tolist()}, TypeError, "list"),
    ],
)
def test_from_normalized_refuses_what_does_not_fit(
    arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        State.from_normalized(**arguments)


def test_empty_refuses_what_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'torch'"):
        State.empty(*SHAPE, library="torch")
    with pytest.raises(TypeError, match="None"):
        State.empty(*SHAPE, dtype=None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match="import cupy first"):
        State.empty(*SHAPE, library="cupy")


def test_libraries_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for cupy: the check needs no GPU, and happens before anything is computed."""

    class Other:
        dtype = np.dtype(np.float32)

    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=Other, __name__="cupy"))
    assert array_module(Other()).__name__ == "cupy"
    with pytest.raises(TypeError, match="o from numpy, m from cupy, l from numpy"):
        State(ZEROS, Other(), ROWS)
    with pytest.raises(TypeError, match="o from numpy, lse from cupy"):
        State.from_normalized(ZEROS, Other())


def test_repr_is_short() -> None:
    text = repr(State.empty(1, 9, 512, 64, dtype="bfloat16"))
    assert text == (
        "State(numpy float32, batch=1, heads_q=9, len_q=512, head_dim_v=64, dtype=bfloat16)"
    )


def test_a_state_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        random_state(0).o = None  # type: ignore[misc]


def test_importing_it_does_not_import_cupy() -> None:
    code = "import sys, cumha.state; sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
