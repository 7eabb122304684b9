"""The reference against facts that do not come from it: SciPy's softmax, and sums by hand."""

from __future__ import annotations

import inspect
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from scipy.special import logsumexp, softmax

import cumha
from cumha import masks, reference

NAN, INF = np.nan, np.inf


def normal(*shape: int, seed: int = 0, dtype: Any = np.float64) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def uniform_scores(len_q: int, len_k: int, **shape: int) -> tuple[np.ndarray, np.ndarray]:
    """q and k whose scores are all 0, so that each output is a plain mean."""
    batch, heads_q, heads_kv = (shape.get(n, 1) for n in ("batch", "heads_q", "heads_kv"))
    return np.zeros((batch, heads_q, len_q, 2)), normal(batch, heads_kv, len_k, 2)


def key_index(batch: int, heads_kv: int, len_k: int) -> np.ndarray:
    """Values that hold the number of their key."""
    return np.broadcast_to(np.arange(len_k, dtype=float)[:, None], (batch, heads_kv, len_k, 1))


# -- against SciPy --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_random_problems_against_scipy(seed: int) -> None:
    generator = np.random.default_rng(seed)
    batch, heads_kv, group, len_q, len_k, dim, dim_v = generator.integers(1, 9, 7)
    q, k, v = (
        generator.standard_normal((batch, heads, length, d))
        for heads, length, d in (
            (heads_kv * group, len_q, dim),
            (heads_kv, len_k, dim),
            (heads_kv, len_k, dim_v),
        )
    )
    keep = generator.random((batch, heads_kv * group, len_q, len_k)) < generator.choice([0.3, 0.9])
    scale = generator.choice([0.25, 1.0, 8.0])
    out, lse = reference.attention(q, k, v, mask=keep, scale=scale, return_lse=True)

    wide_k, wide_v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.where(keep, np.einsum("bhqd,bhkd->bhqk", q, wide_k) * scale, -INF)
    seen = keep.any(axis=-1)
    p = np.zeros_like(scores)
    p[seen] = softmax(scores[seen], axis=-1)
    np.testing.assert_allclose(out, np.einsum("bhqk,bhkd->bhqd", p, wide_v), rtol=0, atol=1e-13)
    np.testing.assert_allclose(lse[seen], logsumexp(scores[seen], axis=-1), rtol=1e-13, atol=1e-13)
    assert (out[~seen] == 0).all() and (lse[~seen] == -INF).all()


def test_default_scale_is_the_root_of_head_dim() -> None:
    q, k, v = normal(1, 2, 3, 16), normal(1, 2, 5, 16, seed=1), normal(1, 2, 5, 4, seed=2)
    np.testing.assert_array_equal(
        reference.attention(q, k, v), reference.attention(q, k, v, scale=0.25)
    )


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_low_precision_inputs_are_taken_exactly(dtype: Any) -> None:
    q, k, v = (normal(1, 1, 4, 8, seed=i, dtype=dtype) for i in range(3))
    out = reference.attention(q, k, v)
    assert out.dtype == np.float64
    np.testing.assert_array_equal(
        out, reference.attention(*(x.astype(np.float64) for x in (q, k, v)))
    )


# -- by hand --------------------------------------------------------------------------------------


def test_identity_matrices() -> None:
    """Q = K = V = 1 at len 4, scale ln 3: weights 3 on the diagonal and 1 elsewhere."""
    eye = np.eye(4)[None, None]
    out, lse = reference.attention(eye, eye, eye, scale=math.log(3.0), return_lse=True)
    np.testing.assert_allclose(out[0, 0], (np.ones((4, 4)) + 2 * np.eye(4)) / 6, rtol=1e-14)
    np.testing.assert_allclose(lse, math.log(6.0), rtol=1e-14)


def test_identity_matrices_causal() -> None:
    eye = np.eye(3)[None, None]
    out = reference.attention(eye, eye, eye, scale=math.log(2.0), causal=True)
    want = [[1, 0, 0], [1 / 3, 2 / 3, 0], [1 / 4, 1 / 4, 1 / 2]]
    np.testing.assert_allclose(out[0, 0], want, rtol=1e-14)


def test_one_key_returns_its_value() -> None:
    q, k, v = normal(2, 4, 3, 8), normal(2, 2, 1, 8, seed=1), normal(2, 2, 1, 5, seed=2)
    out, lse = reference.attention(q, k, v, scale=0.5, return_lse=True)
    np.testing.assert_array_equal(out, np.repeat(v, 2, axis=1).repeat(3, axis=2))
    np.testing.assert_allclose(lse[1, 3, 2], 0.5 * q[1, 3, 2] @ k[1, 1, 0], rtol=1e-14)


def test_grouped_heads_read_the_head_of_their_group() -> None:
    q, k = uniform_scores(1, 1, heads_q=6, heads_kv=2)
    v = np.array([10.0, 20.0]).reshape(1, 2, 1, 1)
    out = reference.attention(q, k, v)
    assert out.ravel().tolist() == [10, 10, 10, 20, 20, 20]


def test_huge_scores_do_not_overflow() -> None:
    """The raw product is 73728, beyond what half precision holds."""
    q = np.full((1, 1, 1, 128), 24, np.float16)
    k = np.full((1, 1, 8, 128), 23, np.float16)
    k[0, 0, 3] = 24
    v = normal(1, 1, 8, 128, seed=3, dtype=np.float16)
    out, lse = reference.attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(out[0, 0, 0], v[0, 0, 3], rtol=1e-12)
    assert lse.item() == pytest.approx(6516.696, abs=1e-3)


@pytest.mark.parametrize("level", [-1e5, -3.4e38, 1e5])
def test_the_level_of_the_scores_does_not_matter(level: float) -> None:
    """A common shift of all scores, however far, is not a mask."""
    q = np.full((1, 1, 2, 1), level)
    out, lse = reference.attention(
        q, np.ones((1, 1, 4, 1)), key_index(1, 1, 4), scale=1.0, return_lse=True
    )
    np.testing.assert_array_equal(out, 1.5)
    np.testing.assert_allclose(lse, level + math.log(4.0), rtol=1e-12)


# -- which keys are seen --------------------------------------------------------------------------


def test_causal_is_bottom_right() -> None:
    """3 queries, 5 keys: query i sees keys 0 … i + 2."""
    q, k = uniform_scores(3, 5)
    out, lse = reference.attention(q, k, key_index(1, 1, 5), causal=True, return_lse=True)
    np.testing.assert_allclose(out.ravel(), [1.0, 1.5, 2.0], rtol=1e-14)
    np.testing.assert_allclose(lse.ravel(), np.log([3, 4, 5]), rtol=1e-14)


def test_causal_with_more_queries_than_keys_leaves_the_first_rows_empty() -> None:
    q, k = uniform_scores(6, 3)
    out, lse = reference.attention(q, k, key_index(1, 1, 3), causal=True, return_lse=True)
    np.testing.assert_allclose(out.ravel(), [0, 0, 0, 0, 0.5, 1.0], rtol=1e-14)
    np.testing.assert_allclose(lse.ravel(), [-INF] * 3 + np.log([1, 2, 3]).tolist(), rtol=1e-14)


def test_causal_top_left() -> None:
    q, k = uniform_scores(3, 5)
    out = reference.attention(q, k, key_index(1, 1, 5), mask=masks.causal("top_left"))
    np.testing.assert_allclose(out.ravel(), [0.0, 0.5, 1.0], rtol=1e-14)


@pytest.mark.parametrize("lengths", [[5, 3, 0], (5, 3, 0), np.array([5, 3, 0], np.int32)])
def test_key_lengths_cut_the_keys(lengths: Any) -> None:
    q, k = uniform_scores(2, 5, batch=3)
    out, lse = reference.attention(q, k, key_index(3, 1, 5), key_lengths=lengths, return_lse=True)
    assert out[..., 0].tolist() == [[[2, 2]], [[1, 1]], [[0, 0]]]
    np.testing.assert_allclose(np.exp(lse[:, 0, 0]), [5, 3, 0], rtol=1e-14)


def test_causal_is_anchored_at_the_last_valid_key() -> None:
    """2 queries: with 4 valid keys they see 3 and 4 of them, with 1 valid key 0 and 1."""
    q, k = uniform_scores(2, 6, batch=2)
    _, lse = reference.attention(
        q, k, key_index(2, 1, 6), key_lengths=[4, 1], causal=True, return_lse=True
    )
    np.testing.assert_allclose(np.exp(lse[:, 0]), [[3, 4], [0, 1]], rtol=1e-14)


def test_causal_and_padding_keeps_the_buffer_as_anchor() -> None:
    q, k = uniform_scores(6, 6, batch=2)
    keep = np.ones((2, 6), bool)
    keep[1, :4] = False
    _, lse = reference.attention(
        q, k, key_index(2, 1, 6), mask=masks.key_padding(keep), causal=True, return_lse=True
    )
    want = [[1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 2]]
    np.testing.assert_allclose(np.exp(lse[:, 0]), want, rtol=1e-14)


def test_windows_are_inclusive_and_aligned() -> None:
    """2 queries at positions 3 and 4 of 5 keys, one key to the left and one to the right."""
    q, k = uniform_scores(2, 5)
    out = reference.attention(q, k, key_index(1, 1, 5), mask=masks.window(1, 1))
    np.testing.assert_allclose(out.ravel(), [3.0, 3.5], rtol=1e-14)
    out = reference.attention(q, k, key_index(1, 1, 5), mask=masks.window(1, -1, "top_left"))
    np.testing.assert_allclose(out.ravel(), [2.0, 2.0], rtol=1e-14)
    out = reference.attention(
        q, k, key_index(1, 1, 5), mask=masks.window(1, 0), key_lengths=[3], causal=True
    )
    np.testing.assert_allclose(out.ravel(), [0.5, 1.5], rtol=1e-14)


@pytest.mark.parametrize("shape", [(1, 1, 3, 4), (3, 4), (4,), (3, 1), (2, 1, 1, 4), (2, 1, 1)])
def test_boolean_arrays_broadcast(shape: tuple[int, ...]) -> None:
    keep = np.random.default_rng(len(shape)).random(shape) < 0.6
    q, k, v = normal(2, 2, 3, 4), normal(2, 2, 4, 4, seed=1), normal(2, 2, 4, 4, seed=2)
    full = np.ascontiguousarray(np.broadcast_to(keep, (2, 2, 3, 4)))
    got = reference.attention(q, k, v, mask=keep)
    np.testing.assert_array_equal(got, reference.attention(q, k, v, mask=masks.dense(full)))


def test_true_means_attend() -> None:
    q, k = uniform_scores(1, 4)
    keep = np.array([False, True, True, False])
    out, lse = reference.attention(q, k, key_index(1, 1, 4), mask=keep, return_lse=True)
    assert out.item() == 1.5
    assert lse.item() == pytest.approx(math.log(2.0))


# -- infinities and NaN ---------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["q", "k"])
def test_a_score_of_minus_inf_removes_the_key(where: str) -> None:
    """Whatever its cause; what lies in V there is not read. Rows without any key are empty."""
    q, k = np.ones((1, 1, 2, 1)), np.ones((1, 1, 3, 1))
    v = key_index(1, 1, 3).copy()
    if where == "k":
        k[0, 0, 1] = -INF
        v[0, 0, 1] = NAN
        out, lse = reference.attention(q, k, v, return_lse=True)
        assert out.ravel().tolist() == [1, 1]
        np.testing.assert_allclose(lse, 1 + math.log(2.0))
    else:
        q[0, 0, 0] = -INF
        out, lse = reference.attention(q, k, v, return_lse=True)
        assert out.ravel().tolist() == [0, 1]
        assert lse[0, 0, 0] == -INF


@pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e300])
def test_masked_slots_do_not_reach_the_output(poison: float) -> None:
    q, k, v = normal(2, 2, 4, 4), normal(2, 1, 5, 4, seed=1), normal(2, 1, 5, 4, seed=2)
    mask = masks.window(0, 0)
    clean = reference.attention(q, k, v, mask=mask, key_lengths=[5, 2], return_lse=True)
    for x in (k, v):
        x[0, :, 0] = poison  # outside the window of every row
        x[1, :, 2:] = poison  # beyond the valid keys
    got = reference.attention(q, k, v, mask=mask, key_lengths=[5, 2], return_lse=True)
    np.testing.assert_array_equal(got[0], clean[0])
    np.testing.assert_array_equal(got[1], clean[1])


def test_nan_in_a_visible_key_shows_only_in_the_rows_that_see_it() -> None:
    q, k, v = normal(1, 1, 4, 4), normal(1, 1, 4, 4, seed=1), normal(1, 1, 4, 3, seed=2)
    clean = reference.attention(q, k, v, causal=True)
    for name in ("k", "v"):
        bad_k, bad_v = k.copy(), v.copy()
        (bad_k if name == "k" else bad_v)[0, 0, 2, 1] = NAN
        out, lse = reference.attention(q, bad_k, bad_v, causal=True, return_lse=True)
        np.testing.assert_array_equal(out[0, 0, :2], clean[0, 0, :2])
        assert np.isnan(out[0, 0, 2:, 1]).all()
        assert np.isnan(out[0, 0, 2:, 0]).all() == (name == "k")
        assert np.isnan(lse[0, 0]).tolist() == [False, False, name == "k", name == "k"]


def test_an_infinite_value_shows_as_itself() -> None:
    q, k = uniform_scores(2, 2)
    v = key_index(1, 1, 2).copy()
    v[0, 0, 1] = -INF
    out = reference.attention(q, k, v, causal=True)
    assert out.ravel().tolist() == [0, -INF]


def test_a_score_of_plus_inf_is_nan() -> None:
    q, k, v = np.ones((1, 1, 1, 1)), np.full((1, 1, 2, 1), INF), key_index(1, 1, 2)
    out, lse = reference.attention(q, k, v, return_lse=True)
    assert np.isnan(out).all() and np.isnan(lse).all()


# -- sizes, layouts, outputs ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "heads_q", "heads_kv", "len_q", "len_k"),
    [(0, 2, 1, 3, 4), (2, 0, 1, 3, 4), (2, 0, 0, 3, 4), (2, 2, 1, 0, 4), (2, 2, 1, 3, 0)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_sizes_of_zero(
    batch: int, heads_q: int, heads_kv: int, len_q: int, len_k: int, causal: bool
) -> None:
    out, lse = reference.attention(
        np.ones((batch, heads_q, len_q, 4)),
        np.ones((batch, heads_kv, len_k, 4)),
        np.ones((batch, heads_kv, len_k, 5)),
        causal=causal,
        return_lse=True,
    )
    assert out.shape == (batch, heads_q, len_q, 5) and lse.shape == out.shape[:3]
    assert (out == 0).all() and (lse == -INF).all()


def test_the_other_layout() -> None:
    q, k, v = normal(2, 4, 3, 8), normal(2, 2, 5, 8, seed=1), normal(2, 2, 5, 6, seed=2)
    want, want_lse = reference.attention(q, k, v, causal=True, return_lse=True)
    turned = [x.swapaxes(1, 2) for x in (q, k, v)]
    out, lse = reference.attention(*turned, causal=True, layout="BLHD", return_lse=True)
    np.testing.assert_array_equal(out, want.swapaxes(1, 2))
    np.testing.assert_array_equal(lse, want_lse)


def test_given_outputs_are_filled() -> None:
    q, k, v = (normal(1, 2, 3, 4, seed=i) for i in range(3))
    want, want_lse = reference.attention(q, k, v, return_lse=True)
    out, lse = np.empty((1, 2, 3, 4), np.float16), np.empty((1, 2, 3), np.float32)
    got = reference.attention(q, k, v, out=out, lse=lse, return_lse=True)
    assert got[0] is out and got[1] is lse
    np.testing.assert_array_equal(out, want.astype(np.float16))
    np.testing.assert_array_equal(lse, want_lse.astype(np.float32))


def test_options_that_say_how_change_nothing() -> None:
    q, k, v = (normal(1, 2, 3, 4, seed=i) for i in range(3))
    got = reference.attention(q, k, v, splits=3, split_by="length", path="naive", backend="host")
    np.testing.assert_array_equal(got, reference.attention(q, k, v))
    got = reference.attention(q, k, v, keys_per_split=2, workspace=np.empty(4))
    np.testing.assert_array_equal(got, reference.attention(q, k, v))


def test_inputs_are_not_changed() -> None:
    q, k, v = (normal(1, 2, 3, 4, seed=i) for i in range(3))
    copies = [x.copy() for x in (q, k, v)]
    reference.attention(q, k, v, causal=True)
    for x, copy in zip((q, k, v), copies, strict=True):
        np.testing.assert_array_equal(x, copy)


def test_partial_sums_add_up_to_the_whole() -> None:
    """Two calls over keys 0 … 2 and 3 … 6, brought to one reference by hand."""
    q, k, v = normal(2, 4, 3, 4), normal(2, 2, 7, 4, seed=1), normal(2, 2, 7, 5, seed=2)
    same: dict[str, Any] = {
        "mask": masks.window(2, 0) | masks.where(lambda b, h, q, k: k % 4 == h),
        "key_lengths": [7, 4],
    }
    first = reference.partial_attention(q, k[:, :, :3], v[:, :, :3], total_keys=7, **same)
    second = reference.partial_attention(q, k[:, :, 3:], v[:, :, 3:], key_offset=3, **same)
    m = np.maximum(first[1], second[1])
    weights = [np.exp(part[1] - m) for part in (first, second)]
    o = first[0] * weights[0][..., None] + second[0] * weights[1][..., None]
    l = first[2] * weights[0] + second[2] * weights[1]  # noqa: E741
    out, lse = reference.attention(q, k, v, return_lse=True, **same)
    np.testing.assert_allclose(o / l[..., None], out, rtol=0, atol=1e-14)
    np.testing.assert_allclose(m + np.log(l), lse, rtol=0, atol=1e-14)


def test_the_signature_is_that_of_attention() -> None:
    def parameters(function: Any) -> list[Any]:
        signature = inspect.signature(function)
        return [(p.name, p.kind, p.default) for p in signature.parameters.values()]

    assert parameters(reference.attention) == parameters(cumha.attention)


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"q": [[1.0]]}, TypeError, "q is list"),
        ({"k": np.ones((2, 3, 4))}, ValueError, "k has shape"),
        ({"k": np.ones((1, 2, 5, 7))}, ValueError, "do not fit"),
        ({"v": np.ones((1, 2, 4, 8))}, ValueError, "do not fit"),
        ({"q": np.ones((1, 3, 3, 8))}, ValueError, "multiple of heads_kv"),
        ({"layout": "BHDL"}, ValueError, "'BHLD' or 'BLHD'"),
        ({"mask": np.ones((3, 5))}, TypeError, "bool"),
        (
            {"mask": masks.where(lambda b, h, q, k: masks.array(np.ones(3, bool))[k])},
            IndexError,
            "3",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    change: dict[str, Any], error: type[Exception], match: str
) -> None:
    call: dict[str, Any] = {
        "q": np.ones((1, 4, 3, 8)),
        "k": np.ones((1, 2, 5, 8)),
        "v": np.ones((1, 2, 5, 8)),
    }
    with pytest.raises(error, match=match):
        reference.attention(**(call | change))
