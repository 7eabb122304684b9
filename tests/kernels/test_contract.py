"""The contract for dense inputs, row by row: each test is named after the row it begins with.

Public reports beside some cases (project#number) say where such a fault was met: cases that broke
other kernels.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumha
from cumha import masks, testing
from cumha.testing import VIEWS, extreme_scores, key_index, normal, poisoned, qkv, view

DTYPES = ("float16", "bfloat16", "float32", "float64")
POISON = (np.nan, np.inf, -np.inf, 1e30)
NAN = np.nan


def bits(x: np.ndarray) -> bytes:
    return np.ascontiguousarray(x).tobytes()


def assert_empty_rows(out: np.ndarray, lse: np.ndarray, rows: Any = ...) -> None:
    """Exactly 0 and -inf in the given rows of [batch, heads, len]."""
    assert not out[rows].astype(np.float64).any()
    assert not np.isnan(out[rows].astype(np.float64)).any()
    assert (lse[rows] == -np.inf).all()


# -- layouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
@pytest.mark.parametrize("kind", VIEWS)
def test_layouts_views_give_the_answer_of_their_copy(
    runner: Any, kind: str, layout: str, dtype: str
) -> None:
    arrays = qkv(2, 4, 2, 9, 11, 16, dtype=dtype)
    if layout == "BLHD":
        arrays = tuple(x.swapaxes(1, 2) for x in arrays)
    views = [view(x, kind) for x in arrays]
    copies = [np.array(x, order="C") for x in views]
    wanted = runner.check(*copies, layout=layout)
    for chosen in ("qkv", "q", "k", "v"):  # pytorch#3230: only v was a view
        mixed = [x if n in chosen else y for n, x, y in zip("qkv", views, copies, strict=True)]
        if runner.sums_alike:
            got = runner.attention(*mixed, layout=layout)
            assert [bits(x) for x in got] == [bits(x) for x in wanted], chosen
        else:
            runner.check(*mixed, layout=layout)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layouts_fused_projections(runner: Any, dtype: str) -> None:
    """q, k and v as slices of one buffer [batch, len, heads, 3, dim]."""
    fused = normal(2, 7, 3, 3, 16, dtype=dtype)
    views = [fused[:, :, :, i].swapaxes(1, 2) for i in range(3)]
    got = runner.attention(*views, causal=True)
    wanted = runner.attention(*(x.copy() for x in views), causal=True)
    assert [bits(x) for x in got] == [bits(x) for x in wanted]


def test_layouts_strides_of_size_one_axes_mean_nothing(runner: Any) -> None:
    arrays = qkv(1, 1, 1, 1, 1, 16)
    got = runner.attention(*(view(x, "size_one") for x in arrays))
    assert bits(got[0]) == bits(arrays[2])
    arrays = qkv(1, 1, 1, 3, 5, 16)
    got = runner.attention(*(view(x, "size_one") for x in arrays))
    assert [bits(x) for x in got] == [bits(x) for x in runner.attention(*arrays)]


def test_layouts_BLHD_is_the_transposed_answer(runner: Any) -> None:
    q, k, v = qkv(2, 4, 2, 9, 11, 16, 16)
    out, lse = runner.attention(q, k, v)
    swapped = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    other, other_lse = runner.attention(*swapped, layout="BLHD")
    assert other.shape == (2, 9, 4, 16)
    assert bits(other.swapaxes(1, 2)) == bits(out)
    assert bits(other_lse) == bits(lse)


def test_layouts_inputs_are_not_changed(runner: Any) -> None:
    arrays = [runner.move(x) for x in qkv(dtype="float16")]
    before = [bits(testing.to_host(x)) for x in arrays]
    cumha.attention(*arrays, causal=True, **runner.how)
    assert [bits(testing.to_host(x)) for x in arrays] == before


# -- outputs in place -----------------------------------------------------------------------------

CANARY = 77.0


def _slots(shape: tuple[int, ...], dtype: Any, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """A buffer full of canaries and a view of the given shape in it."""
    wide = (*shape[:-2], shape[-2] + 2, 2 * shape[-1] + 5)
    if kind == "transposed":  # the last two axes change places
        buffer = np.full((*shape[:-2], shape[-1] + 2, shape[-2] + 1), CANARY).astype(dtype)
        return buffer, buffer[..., 1:-1, :-1].swapaxes(-1, -2)
    buffer = np.full(wide, CANARY).astype(dtype)
    if kind == "reversed":
        return buffer, buffer[..., 1:-1, 2 : 2 + shape[-1]][..., ::-1, ::-1]
    if kind == "every_other":
        return buffer, buffer[..., 1:-1, 3 : 3 + 2 * shape[-1] : 2]
    return buffer, buffer[..., 1:-1, 1 : 1 + shape[-1]]  # odd offset


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["odd_offset", "every_other", "reversed", "transposed"])
@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
def test_outputs_with_strides_are_filled_and_their_surroundings_kept(
    runner: Any, kind: str, layout: str, dtype: str
) -> None:
    q, k, v = qkv(2, 4, 2, 9, 11, 16, dtype=dtype)
    wanted, wanted_lse = runner.attention(q, k, v)
    if layout == "BLHD":
        q, k, v, wanted = (x.swapaxes(1, 2) for x in (q, k, v, wanted))
    out_buffer, out = _slots(wanted.shape, q.dtype, kind)
    lse_buffer, lse = _slots(wanted_lse.shape, np.float32, kind)
    out[...], lse[...] = NAN, NAN
    runner.attention(q, k, v, layout=layout, out=out, lse=lse)
    assert bits(out) == bits(wanted)
    assert bits(lse) == bits(wanted_lse)
    for buffer, inside in ((out_buffer, out), (lse_buffer, lse)):
        inside[...] = CANARY
        assert (buffer.astype(np.float64) == CANARY).all(), "memory around an output was written"


@pytest.mark.parametrize("splits", [None, 2, 3, 4])
@pytest.mark.parametrize("heads", [1, 5])
def test_outputs_of_odd_row_counts_are_not_overrun(
    runner: Any, splits: int | None, heads: int
) -> None:
    """flash-attention#1076: a merge that wrote whole tiles of rows."""
    if splits and not runner.splits:
        pytest.skip("this path has nothing to split")
    q, k, v = qkv(1, heads, 1, 1, 257, 32, dtype="bfloat16")
    out_buffer, out = _slots((1, heads, 1, 32), q.dtype, "odd_offset")
    lse_buffer, lse = _slots((1, heads, 1), np.float32, "odd_offset")
    runner.attention(q, k, v, out=out, lse=lse, splits=splits)
    testing.expect(q, k, v).check(out, lse)
    for buffer, inside in ((out_buffer, out), (lse_buffer, lse)):
        inside[...] = CANARY
        assert (buffer.astype(np.float64) == CANARY).all()


# -- heads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "heads", [(1, 1), (6, 6), (6, 3), (6, 2), (6, 1), (7, 1), (12, 2), (33, 3)]
)
def test_heads_query_head_h_reads_head_h_over_group(runner: Any, heads: tuple[int, int]) -> None:
    heads_q, heads_kv = heads
    q, k, v = qkv(2, heads_q, heads_kv, 3, 5, 16)
    v[...] = np.arange(heads_kv)[:, None, None]
    out, _ = runner.check(q, k, v)
    wanted = np.arange(heads_q) // (heads_q // heads_kv)
    assert np.abs(out - wanted[:, None, None]).max() < 1e-5 * heads_kv
    # The scores too come from that head.
    k[...] = 0
    k[:, 0, :2] = 5
    runner.check(q, k, normal(*v.shape, seed=9))


def test_heads_groups_of_six_in_decode(runner: Any) -> None:
    """pytorch#151359: groups had to be powers of two."""
    runner.check(*qkv(1, 12, 2, 1, 4096, 16))


@pytest.mark.parametrize("heads", [(3, 2), (33, 2), (2, 3), (0, 3), (3, 0)])
def test_heads_that_do_not_divide_are_refused(runner: Any, heads: tuple[int, int]) -> None:
    if heads == (0, 3):
        out, lse = runner.attention(*qkv(2, 0, 3, 4, 4, 16))
        assert out.shape == (2, 0, 4, 16)
        assert lse.shape == (2, 0, 4)
        return
    with pytest.raises(ValueError, match=r"multiple.*got"):
        runner.attention(*qkv(2, *heads, 4, 4, 16))


# -- scale ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, 1.0, 0.0, -0.5, 1e-3, 3])
def test_scale(runner: Any, scale: float | None) -> None:
    runner.check(*qkv(2, 4, 2, 9, 11, 16), scale=scale)


def test_scale_default_is_the_root_of_the_callers_head_dim(runner: Any) -> None:
    q = np.full((1, 1, 1, 3), 2.0, np.float32)
    k = np.array([[0.0] * 3, [1.0] * 3], np.float32)[None, None]
    out, lse = runner.attention(q, k, testing.identity(2))
    score = 6 / math.sqrt(3)
    assert lse[0, 0, 0] == pytest.approx(math.log(1 + math.exp(score)), rel=1e-6)
    assert out[0, 0, 0, 1] == pytest.approx(1 / (1 + math.exp(-score)), rel=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scale_is_applied_in_float32(runner: Any, dtype: str) -> None:
    """300 / 3 is exact; 300 * (1/3 rounded to 16 bits) is not, nor is q * scale rounded."""
    q, k, v = qkv(1, 1, 1, 4, 6, 16, dtype=dtype)
    q[...], k[...] = 0, 0
    q[..., 0], k[..., 0] = 300, np.linspace(0.9, 1.0, 6)
    runner.check(q, k, v, scale=1 / 3)


# -- causal ---------------------------------------------------------------------------------------

LENGTHS = ((1, 1), (1, 9), (9, 1), (5, 9), (9, 5), (7, 7), (64, 65), (33, 32))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_causal_the_last_query_sees_the_last_key(runner: Any, lengths: tuple[int, int]) -> None:
    runner.check(*qkv(2, 4, 2, *lengths, 16), causal=True)
    runner.check(*qkv(2, 4, 2, *lengths, 16), mask=masks.causal("top_left"))


def test_causal_counts_by_hand(runner: Any) -> None:
    """Equal scores over v[j] = j give the mean index of the keys; two new tokens of twelve."""
    q, k = np.zeros((1, 2, 2, 32), np.float16), normal(1, 2, 12, 32, dtype="float16")
    out, lse = runner.attention(q, k, key_index(1, 2, 12, 32, "float16"), causal=True)
    assert (out[:, :, 0] == 5.0).all()
    assert (out[:, :, 1] == 5.5).all()
    assert np.allclose(lse, np.log([11, 12]), rtol=1e-6)
    for row in range(2):  # the same in two steps of one token
        one, _ = runner.attention(
            q[:, :, :1], k[:, :, : 11 + row], key_index(1, 2, 11 + row, 32, "float16"), causal=True
        )
        assert bits(one) == bits(out[:, :, row : row + 1])


def test_causal_with_twice_as_many_queries_as_keys(runner: Any) -> None:
    """flash-attention#1778: the first half of the rows sees nothing, and that is right."""
    q, k = np.zeros((1, 2, 256, 64), np.float16), normal(1, 2, 128, 64, dtype="float16")
    v = key_index(1, 2, 128, 64, "float16")
    out, lse = runner.check(q, k, v, causal=True)
    assert_empty_rows(out, lse, np.s_[:, :, :128])
    assert (out[0, 0, 128:, 0] == np.arange(128) / 2).all()


@pytest.mark.parametrize("lengths", [(11, 5, 1, 0), (4, 3, 2, 1)], ids=str)
def test_causal_is_anchored_at_the_length_of_each_entry(
    runner: Any, lengths: tuple[int, ...]
) -> None:
    q, k, v = qkv(4, 4, 2, 4, 11, 16)
    out, _ = runner.check(q, k, v, causal=True, key_lengths=np.array(lengths))
    for b, n in enumerate(lengths):
        cut = (q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n])
        alone, _ = runner.attention(*cut, causal=True)
        testing.assert_close(out[b : b + 1], alone.astype(np.float64), max_value=4)


def test_causal_and_padding_keeps_the_buffer_as_anchor(runner: Any) -> None:
    """`causal() & key_padding(…)`: the last query meets the last slot, valid or not."""
    q, k, v = qkv(2, 2, 2, 6, 6, 16, dtype="float16")
    keep = np.ones((2, 6), bool)
    keep[1, :4] = False  # transformers#32390: left padding
    out, lse = runner.check(q, k, v, causal=True, mask=masks.key_padding(keep))
    assert_empty_rows(out[1:], lse[1:], np.s_[:, :, :4])
    assert np.isfinite(out.astype(np.float64)).all()


def test_causal_is_and_ed_with_the_mask(runner: Any) -> None:
    q, k, v = qkv(2, 4, 2, 6, 8, 16)
    keep = np.random.default_rng(1).random((6, 8)) < 0.5
    out, lse = runner.check(q, k, v, causal=True, mask=keep)
    lower = np.tril(np.ones((6, 8), bool), 2)
    same = runner.attention(q, k, v, mask=keep & lower)
    assert [bits(x) for x in same] == [bits(x) for x in (out, lse)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("valid", [1, 255, 256, 257, 300])
def test_causal_or_not_keys_past_the_length_get_no_weight(
    runner: Any, valid: int, causal: bool
) -> None:
    """A tail that was tested on the causal path only."""
    q, k = np.zeros((1, 4, 1, 64), "float16"), normal(1, 4, 300, 64, dtype="float16")
    v = np.ones((1, 4, 300, 64), "float16")
    out, lse = runner.attention(q, k, v, causal=causal, key_lengths=[valid])
    assert (out == 1).all()
    assert np.allclose(lse, math.log(valid), rtol=1e-6)


WINDOWS = ((0, 0), (2, 0), (0, 2), (8, 0), (3, 5), (-1, 0), (0, -1), (-1, -1), (1000, 1000))


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_causal_windows_are_inclusive(runner: Any, window: tuple[int, int], align: str) -> None:
    q, k, v = qkv(1, 2, 2, 11, 14, 16)
    runner.check(q, k, v, mask=masks.window(*window, align=align))


def test_causal_windows_by_hand(runner: Any) -> None:
    """window(2, 0) sees three keys; without causal, (8, 0) must not see the future (jax#39576)."""
    q, k = np.zeros((1, 1, 64, 16), np.float32), normal(1, 1, 64, 16)
    v = key_index(1, 1, 64, 16)
    out, lse = runner.attention(q, k, v, mask=masks.window(8, 0))
    assert out[0, 0, 20, 0] == pytest.approx(16.0, rel=1e-6)
    assert out[0, 0, 3, 0] == pytest.approx(1.5, rel=1e-6)
    assert lse[0, 0, 20] == pytest.approx(math.log(9), rel=1e-6)
    out, _ = runner.attention(q[:, :, :8], k[:, :, :8], v[:, :, :8], mask=masks.window(2, 0))
    assert out[0, 0, 5, 0] == pytest.approx(4.0, rel=1e-6)
    assert out[0, 0, 0, 0] == 0
    q, k, v = qkv(1, 2, 2, 70, 70, 16)
    out, lse = runner.attention(q, k, v, mask=masks.window(0, 0))  # only the diagonal
    assert bits(out) == bits(v)
    assert np.allclose(lse, (q.astype(float) * k).sum(-1) / 4, atol=1e-5)


@pytest.mark.parametrize("splits", [None, 4])
def test_causal_windows_that_leave_whole_blocks_out(runner: Any, splits: int | None) -> None:
    """vllm#4405: a block before the window must not turn a row into NaN."""
    if splits and not runner.splits:
        pytest.skip("this path has nothing to split")
    arrays = qkv(1, 2, 2, 300, 300, 16, dtype="float16")
    runner.check(*arrays, causal=True, mask=masks.window(16, 0), splits=splits)


# -- polarity -------------------------------------------------------------------------------------


def test_polarity_true_means_attend(runner: Any) -> None:
    q, k, v = qkv(1, 1, 1, 8, 8, 8)
    keep = np.ones((8, 8), bool)
    keep[:4, 4:] = False
    keep[4:] = False  # pytorch#103963: rows that are False throughout
    out, lse = runner.check(q, k, v, mask=keep)
    assert_empty_rows(out, lse, np.s_[:, :, 4:])
    only = np.eye(8, dtype=bool)
    out, _ = runner.attention(q, k, v, mask=only)
    assert bits(out) == bits(v)


SHAPES = (
    (),
    (1,),
    (7,),
    (5, 1),
    (5, 7),
    (1, 1, 7),
    (4, 1, 1),
    (4, 5, 7),
    (2, 1, 1, 7),
    (2, 4, 5, 7),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_polarity_boolean_arrays_broadcast(runner: Any, shape: tuple[int, ...]) -> None:
    keep = np.random.default_rng(len(shape)).random(shape) < 0.6
    runner.check(*qkv(2, 4, 2, 5, 7, 16), mask=np.asarray(keep))


@pytest.mark.parametrize("kind", ["slice", "fortran", "reversed", "broadcast", "row_of_44"])
def test_polarity_boolean_arrays_have_any_strides(runner: Any, kind: str) -> None:
    keep = np.random.default_rng(3).random((16, 43)) < 0.5
    wide = np.ones((16, 48 if kind == "slice" else 44), bool)
    wide[:, :43] = keep
    made = {
        "slice": wide[:, :43],
        "row_of_44": wide[:, :43],
        "fortran": np.asfortranarray(keep),
        "reversed": keep[::-1, ::-1].copy()[::-1, ::-1],
        "broadcast": np.broadcast_to(keep[:, :1], keep.shape),
    }[kind]
    q, k, v = qkv(1, 2, 2, 16, 43, 16)
    out, lse = runner.check(q, k, v, mask=made)
    same = runner.attention(q, k, v, mask=np.array(made, order="C"))
    assert [bits(x) for x in same] == [bits(x) for x in (out, lse)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_polarity_a_score_of_minus_inf_removes_the_key(runner: Any, dtype: str) -> None:
    q, k, v = qkv(1, 2, 1, 3, 6, 16, dtype=dtype)
    q[..., 0] = 1
    k[:, :, (1, 4), 0] = -np.inf
    v[:, :, (1, 4)] = NAN  # a removed key's value is never read
    out, lse = runner.check(q, k, v)
    others = [0, 2, 3, 5]
    wanted, wanted_lse = runner.attention(q, k[:, :, others], v[:, :, others])
    testing.assert_close(out, wanted.astype(np.float64), max_value=4)
    testing.assert_close(lse, wanted_lse.astype(np.float64), max_score=8)
    q[..., 0], k[..., 0] = 1, -np.inf
    assert_empty_rows(*runner.attention(q, k, v))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_below_the_normal_numbers_count(runner: Any, dtype: str) -> None:
    """e^-88 is a denormal float32; times 1e38 it is 0.6. Nothing is flushed to zero."""
    q = np.zeros((1, 2, 20, 8), np.float32)
    k = np.zeros((1, 2, 150, 8), np.float32)
    v = np.zeros((1, 2, 150, 8), np.float32)
    q[..., 0] = 1
    k[..., 1:, 0] = -88
    v[..., 0, :] = 0.01
    v[..., 5, :] = 1e38
    stored = normal(1, dtype=dtype).dtype
    out, _ = runner.check(*(x.astype(stored) for x in (q, k, v)), scale=1.0)
    assert (out.astype(np.float32) > 0.6).all()


def test_polarity_minus_inf_is_sticky(runner: Any) -> None:
    """A mask that keeps the key does not bring it back, nor does a second factor of any size."""
    q, k, v = qkv(1, 1, 1, 2, 4, 16)
    q[...] = 1
    k[0, 0, 2, 3], k[0, 0, 2, 7] = -np.inf, 3e38
    out, lse = runner.check(q, k, v, mask=np.ones((2, 4), bool))
    others = [0, 1, 3]
    wanted, wanted_lse = runner.attention(q, k[:, :, others], v[:, :, others])
    testing.assert_close(out, wanted.astype(np.float64), max_value=4)
    testing.assert_close(lse, wanted_lse.astype(np.float64), max_score=8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("size", [1e30, 2e38, 3.3e38])
def test_polarity_a_most_negative_finite_score_is_a_score(
    runner: Any, size: float, dtype: str
) -> None:
    """pytorch#110213: equal scores near -finfo.max give the mean of v, not 0 and not NaN."""
    q, k, v = qkv(1, 1, 1, 3, 3, 16, dtype=dtype)
    q[...], k[...] = 0, 0
    q[..., 0], k[..., 0] = 1, -size
    out, lse = runner.check(q, k, v, scale=1.0)
    assert np.isfinite(lse).all()
    mean = v.astype(np.float64).mean(axis=2, keepdims=True)
    testing.assert_close(out, np.broadcast_to(mean, out.shape), max_value=4)


# -- a row with no key ----------------------------------------------------------------------------


CAUSES = ("mask", "key_lengths", "causal", "padding")


@pytest.mark.parametrize(
    ("cause", "dtype"),
    [
        *itertools.product(CAUSES, ("float16", "float32")),
        *itertools.product(("len_k",), DTYPES),
    ],
)
def test_no_key_gives_exactly_zero_and_minus_inf(runner: Any, cause: str, dtype: str) -> None:
    len_q, len_k = (9, 4) if cause == "causal" else (3, 0 if cause == "len_k" else 5)
    q, k, v = qkv(2, 4, 2, len_q, len_k, 16, dtype=dtype)
    k[...], v[...] = NAN, NAN
    options: dict[str, Any] = {
        "mask": {"mask": np.zeros((3, 5), bool)},
        "key_lengths": {"key_lengths": [0, 0]},
        "len_k": {},
        "causal": {"causal": True},
        "padding": {"mask": masks.key_padding(np.zeros((2, 5), bool))},
    }[cause]
    out, lse = runner.check(q, k, v, **options)
    assert_empty_rows(out, lse, np.s_[:, :, : 5 if cause == "causal" else len_q])
    assert np.isnan(out.astype(np.float64)).any() == (cause == "causal")


def test_no_key_in_some_entries(runner: Any) -> None:
    q, k, v = qkv(3, 4, 2, 1, 5, 16, dtype="float16")
    out, lse = runner.check(q, k, v, key_lengths=[0, 5, 0])
    assert_empty_rows(out, lse, np.s_[[0, 2]])
    assert np.isfinite(lse[1]).all()


def test_no_key_in_some_rows_and_heads(runner: Any) -> None:
    keep = np.random.default_rng(0).random((2, 4, 7, 9)) < 0.5
    keep[0, 1] = False
    keep[1, :, 3] = False
    out, lse = runner.check(*qkv(2, 4, 2, 7, 9, 16), mask=keep)
    assert_empty_rows(out, lse, np.s_[0, 1])
    assert_empty_rows(out, lse, np.s_[1, :, 3])


def test_no_key_in_whole_splits(runner: Any) -> None:
    """A split that a row cannot see at all must not disturb the others."""
    options = {"splits": 5} if runner.splits else {}
    q, k, v = qkv(1, 2, 2, 3, 700, 16)
    keep = np.zeros((3, 700), bool)
    keep[0, 690:], keep[1, :2] = True, True
    out, lse = runner.check(q, k, v, mask=keep, **options)
    assert_empty_rows(out, lse, np.s_[:, :, 2])


# -- masked slots ---------------------------------------------------------------------------------

HIDING: dict[str, dict[str, Any]] = {
    "mask": {"mask": np.random.default_rng(5).random((2, 1, 1, 23)) < 0.5},
    "padding": {"mask": masks.key_padding(np.arange(23) < np.array([[20], [4]]))},
    "key_lengths": {"key_lengths": [11, 3]},
    "causal": {"mask": masks.causal("top_left")},
    "window": {"mask": masks.window(2, 1)},
    "lengths_and_causal": {"key_lengths": [20, 3], "causal": True},
}


def visible(heads_q: int, len_q: int, k: np.ndarray, **options: Any) -> np.ndarray:
    return masks.materialize(
        testing.expression(options.get("mask"), options.get("causal", False)),
        batch=k.shape[0],
        heads_q=heads_q,
        len_q=len_q,
        len_k=k.shape[2],
        key_lengths=options.get("key_lengths"),
    )


@pytest.mark.parametrize("value", POISON, ids=str)
@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_masked_slots_never_reach_the_output(
    runner: Any, hiding: str, value: float, dtype: str
) -> None:
    """flash-attention#1745: scores were masked, but P @ V multiplied 0 by NaN."""
    options = HIDING[hiding]
    q, k, v = qkv(2, 4, 2, 3, 23, 16, dtype=dtype)
    keep = visible(4, 3, k, **options)
    assert not keep.all()
    clean = runner.check(q, k, v, **options)
    bad_k, bad_v = poisoned(k, v, keep, value)
    for one in ((bad_k, bad_v), (bad_k, v), (k, bad_v)):
        dirty = runner.attention(q, *one, **options)
        assert [bits(x) for x in dirty] == [bits(x) for x in clean]


@pytest.mark.parametrize("value", [NAN, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("where", ["k", "v", "v_in_one_dim"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_masked_slots_show_in_the_rows_that_see_them_and_no_others(
    runner: Any, where: str, value: float, dtype: str
) -> None:
    q, k, v = qkv(2, 4, 2, 9, 9, 16, dtype=dtype)
    clean, _ = runner.attention(q, k, v, causal=True)
    place = np.s_[1, 1, 4, 3] if where == "v_in_one_dim" else np.s_[1, 1, 4]
    (k if where == "k" else v)[place] = value
    out, lse = runner.check(q, k, v, causal=True)
    assert bits(out[:, :, :4]) == bits(clean[:, :, :4])
    assert bits(out[0]) == bits(clean[0])
    assert bits(out[1, :2]) == bits(clean[1, :2])
    if where == "v_in_one_dim":
        assert bits(np.delete(out, 3, axis=3)) == bits(np.delete(clean, 3, axis=3))
    if where != "k":
        wanted = np.full_like(out[1, 2:, 4:, 3].astype(np.float64), value)
        np.testing.assert_array_equal(out[1, 2:, 4:, 3].astype(np.float64), wanted)
        assert np.isfinite(lse).all()


def test_masked_slots_a_visible_nan_reaches_every_row_that_sees_it(runner: Any) -> None:
    q, k, v = qkv(1, 1, 1, 4, 4, 16)
    v[:, :, 1] = NAN
    out, lse = runner.check(q, k, v)
    assert np.isnan(out).all()
    assert np.isfinite(lse).all()
    q, k, v = qkv(1, 1, 1, 4, 4, 16)
    q[:, :, 2] = NAN
    out, lse = runner.check(q, k, v)
    assert np.isnan(out[:, :, 2]).all()
    assert np.isnan(lse[:, :, 2]).all()
    assert np.isfinite(np.delete(out, 2, axis=2)).all()


def test_masked_slots_lengths_hold_whatever_lies_behind(runner: Any) -> None:
    """jax#23349: lengths were accepted and had no effect."""
    q, k, v = qkv(8, 4, 4, 12, 128, 16, dtype="bfloat16")
    lengths = np.array([24, 125, 53, 28, 77, 96, 13, 114])
    v[np.broadcast_to((np.arange(128) >= lengths[:, None])[:, None], v.shape[:3])] = 1000
    runner.check(q, k, v, key_lengths=lengths)
    # vllm-omni#5865: more queries than keys lost rows to the keys' lengths
    q, k, v = (
        np.zeros((2, 2, 64, 16), "float16"),
        k[:2, :2, :24],
        np.ones((2, 2, 24, 16), "float16"),
    )
    out, _ = runner.attention(q, k.astype("float16"), v, key_lengths=[24, 10])
    assert (out == 1).all()


@pytest.mark.parametrize("kind", ["list", "int8", "uint16", "int32", "uint32", "int64", "column"])
def test_masked_slots_lengths_of_any_integer_type(runner: Any, kind: str) -> None:
    """A length array of int64 that was read as int32 gave zeros for the second entry."""
    lengths: Any = [20, 33]
    if kind == "column":
        lengths = np.array([[20, -1, 7], [33, -1, 7]])[:, 0]
    elif kind != "list":
        lengths = np.array(lengths, kind)
    runner.check(*qkv(2, 4, 2, 1, 33, 16), key_lengths=lengths)


# -- softmax range --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", testing.EXTREMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_any_finite_range_of_scores(runner: Any, kind: str, dtype: str) -> None:
    q, k = extreme_scores(kind, 3, 70, 16, dtype=dtype)
    v = normal(1, 1, 70, 16, dtype=dtype)
    for splits in (None, 3) if runner.splits else (None,):
        out, lse = runner.check(q, k, v, scale=1.0, splits=splits)
        assert np.isfinite(lse).all()
        if kind in ("one_large", "rising", "falling"):
            winner = {"one_large": 23, "rising": 69, "falling": 0}[kind]
            assert bits(out) == bits(np.broadcast_to(v[:, :, winner : winner + 1], out.shape))


def test_softmax_raw_products_beyond_float16(runner: Any) -> None:
    """Qwen3#910: products past 65504 became infinite in float16."""
    q = np.full((1, 1, 1, 128), 24, np.float16)
    k = np.full((1, 1, 8, 128), 23, np.float16)
    k[0, 0, 3] = 24
    v = normal(1, 1, 8, 128, dtype="float16")
    out, lse = runner.check(q, k, v)
    assert bits(out) == bits(v[:, :, 3:4])
    assert lse[0, 0, 0] == pytest.approx(6516.696, abs=4 * 2.0**-23 * 6516.7)


def test_softmax_all_scores_far_below_zero_under_causal(runner: Any) -> None:
    """flash-attention#2082: a maximum reset to 0 after a masked block swallowed scores of -200."""
    q = np.full((1, 14, 88, 64), 5, ml_dtypes.bfloat16)
    k = (-5 + 0.05 * normal(1, 2, 448, 64)).astype(ml_dtypes.bfloat16)
    out, lse = runner.check(q, k, normal(1, 2, 448, 64, dtype="bfloat16"), causal=True)
    assert (lse < -100).all()
    assert (out.astype(np.float64) != 0).any(axis=-1).all()


def test_softmax_does_not_depend_on_the_level(runner: Any) -> None:
    q, k, v = qkv(1, 1, 1, 4, 40, 16, dtype="float64")
    q[..., 0] = 1
    want, want_lse = runner.attention(q, k, v, scale=1.0)
    for level in (-3e4, 3e4):
        moved = k.copy()
        moved[..., 0] += level
        out, lse = runner.attention(q, moved, v, scale=1.0)
        assert np.abs(out - want).max() < 1e-9
        assert np.allclose(lse - level, want_lse, atol=4e-3)  # float32 at 3e4


# -- accumulation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1.0, 60000.0, 2.0**-24])
def test_accumulate_4096_equal_weights_in_float16(runner: Any, value: float) -> None:
    """Sums in float16 overflow (or stop growing) long before 4096 keys; the answer is the value."""
    q, k = np.zeros((1, 1, 2, 64), np.float16), normal(1, 1, 4096, 64, dtype="float16")
    v = np.full((1, 1, 4096, 64), value, np.float16)
    out, lse = runner.attention(q, k, v)
    assert (out == np.float16(value)).all()
    assert np.allclose(lse, math.log(4096), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_accumulate_rounds_once(runner: Any, dtype: str) -> None:
    """Two values in turn, their mean just beside a tie: a sum in 16 bits lands elsewhere."""
    q, k, v = qkv(1, 1, 1, 1, 1024, 16, dtype=dtype)
    q[...] = 0
    v[:, :, ::2] = 1.0
    eps = float(ml_dtypes.finfo(v.dtype).eps)
    v[:, :, 1::2] = 1.0 + eps
    v[:, :, -1] = 1.0 + 2 * eps  # the mean is 1 + eps / 2 + eps / 1024; the tie would go to 1
    out, _ = runner.check(q, k, v)
    assert (out.astype(np.float64) == 1.0 + eps).all()


def test_accumulate_float64_in_float64(runner: Any) -> None:
    q, k, v = qkv(1, 2, 1, 5, 300, 64, dtype="float64")
    want, want_lse = cumha.reference.attention(q, k, v, causal=True, return_lse=True)
    out, lse = runner.attention(q, k, v, causal=True)
    assert np.abs(out - want).max() < 1e-12
    assert np.abs(lse - want_lse).max() < 1e-6
    assert lse.dtype == np.float32


# -- LSE ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [1, 7, 100])
def test_lse_is_the_natural_logarithm_in_float32(runner: Any, keys: int, dtype: str) -> None:
    """pytorch#181645: a logarithm to base 2, or one multiplied by ln 2 twice."""
    q, k, v = qkv(2, 4, 2, 3, keys, 16, dtype=dtype)
    q[...] = 0
    _, lse = runner.attention(q, k, v)
    assert lse.shape == (2, 4, 3)
    assert lse.dtype == np.float32
    assert np.allclose(lse, math.log(keys), rtol=3e-7, atol=1e-7)


def test_lse_asked_for_or_not_gives_the_same_output(runner: Any) -> None:
    arrays = qkv(2, 4, 2, 9, 11, 16)
    out, _ = runner.attention(*arrays)
    assert bits(runner.attention(*arrays, return_lse=False)) == bits(out)


def test_lse_has_the_same_axes_in_both_layouts(runner: Any) -> None:
    q, k, v = (x.swapaxes(1, 2) for x in qkv(2, 4, 2, 9, 11, 16))
    _, lse = runner.check(q, k, v, layout="BLHD", causal=True)
    assert lse.shape == (2, 4, 9)


# -- State and partial calls ----------------------------------------------------------------------

EDGES = ((0, 29), (0, 7, 29), (0, 7, 7, 12, 29), (0, 0, 1, 28, 29, 29))
PARTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "lengths": {"causal": True, "key_lengths": [29, 9]},
    "empty": {"key_lengths": [3, 0]},
    "mask": {"mask": masks.window(6, 2) | masks.key_padding(np.arange(58).reshape(2, 29) % 5 == 0)},
}


def merged(runner: Any, edges: tuple[int, ...], arrays: Any, **options: Any) -> cumha.State:
    q, k, v = arrays
    states = [
        runner.partial(
            q, k[:, :, i:j], v[:, :, i:j], key_offset=i, total_keys=k.shape[2], **options
        )
        for i, j in itertools.pairwise(edges)
    ]
    return cumha.merge(*states)


@pytest.mark.parametrize("edges", EDGES, ids=str)
@pytest.mark.parametrize("options", PARTS)
def test_state_parts_merge_to_the_whole(runner: Any, options: str, edges: tuple[int, ...]) -> None:
    arrays = qkv(2, 4, 2, 5, 29, 16)
    state = merged(runner, edges, arrays, **PARTS[options])
    out, lse = (testing.to_host(x) for x in state.finish())
    testing.expect(*arrays, **PARTS[options]).check(out, lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_state_is_unnormalised_in_the_accumulators_dtype(runner: Any, dtype: str) -> None:
    arrays = qkv(2, 4, 2, 5, 12, 16, dtype=dtype)
    state = runner.partial(*arrays, causal=True)
    wide = np.float64 if dtype == "float64" else np.float32
    o, m, l = (testing.to_host(x) for x in (state.o, state.m, state.l))  # noqa: E741
    assert o.dtype == m.dtype == l.dtype == wide
    assert o.shape == (2, 4, 5, 16)
    assert m.shape == l.shape == (2, 4, 5)
    assert (l > 0).all()
    ref_o, ref_m, ref_l = cumha.reference.partial_attention(*arrays, causal=True)
    shift = np.exp(m - ref_m)  # whatever reference was subtracted
    assert np.allclose(l * shift, ref_l, rtol=2e-6)
    assert np.allclose(o * shift[..., None], ref_o, rtol=1e-5, atol=1e-5)
    out, lse = (testing.to_host(x) for x in state.finish())
    testing.expect(*arrays, causal=True).check(out, lse)


def test_state_has_its_own_axes_whatever_the_layout(runner: Any) -> None:
    q, k, v = qkv(2, 4, 2, 5, 12, 16)
    plain = runner.partial(q, k, v)
    swapped = runner.partial(*(x.swapaxes(1, 2) for x in (q, k, v)), layout="BLHD")
    assert bits(testing.to_host(swapped.o)) == bits(testing.to_host(plain.o))
    out, _ = swapped.finish("BLHD")
    testing.expect(q, k, v).check(testing.to_host(out).swapaxes(1, 2))


def test_state_of_no_key_is_empty_and_the_identity(runner: Any) -> None:
    q, k, v = qkv(2, 4, 2, 5, 12, 16)
    k_bad, v_bad = np.full_like(k, NAN), np.full_like(v, NAN)
    empty = runner.partial(q, k_bad, v_bad, key_offset=3, total_keys=20, key_lengths=[3, 0])
    assert not testing.to_host(empty.l).any()
    out, lse = (testing.to_host(x) for x in empty.finish())
    assert_empty_rows(out, lse)
    state = runner.partial(q, k, v)
    for both in (cumha.merge(empty, state), cumha.merge(state, empty)):
        for name in ("o", "m", "l"):
            got, want = (testing.to_host(getattr(s, name)) for s in (both, state))
            assert bits(got) == bits(want), name


def test_state_merges_by_hand(runner: Any) -> None:
    """flashinfer#4051: (-inf) - (-inf) where both are empty, 0 * NaN where one is."""
    cases = (
        ((0.0, -np.inf), (0.0, -np.inf), (0.0, -np.inf)),
        ((3.0, -2.0), (0.0, -np.inf), (3.0, -2.0)),
        ((NAN, -np.inf), (3.0, -2.0), (3.0, -2.0)),
        ((1.0, -1e30), (2.0, -1e30), (1.5, -1e30)),
    )
    for *parts, (value, log_sum) in cases:
        states = [
            cumha.State.from_normalized(
                runner.move(np.full((1, 1, 1, 4), o, np.float32)),
                runner.move(np.full((1, 1, 1), lse, np.float32)),
            )
            for o, lse in parts
        ]
        out, lse = (testing.to_host(x) for x in cumha.merge(*states).finish())
        assert (out == value).all()
        assert (lse == np.float32(log_sum)).all()


def test_state_chunks_without_and_with_causal(runner: Any) -> None:
    """sglang#40903: a long prefix and a causal chunk, merged in the wrong base."""
    q, k, v = qkv(1, 4, 4, 8, 1032, 64, dtype="bfloat16")
    prefix = runner.partial(q, k[:, :, :1024], v[:, :, :1024])
    chunk = runner.partial(q, k[:, :, 1024:], v[:, :, 1024:], causal=True)
    out, lse = (testing.to_host(x) for x in cumha.merge(prefix, chunk).finish())
    testing.expect(q, k, v, causal=True).check(out, lse)


def test_state_masks_see_true_positions(runner: Any) -> None:
    """Where a call starts changes what its keys may be seen by."""
    q, k, v = qkv(1, 2, 2, 6, 4, 16)
    for key_offset in (0, 2, 5):
        options = {"causal": True, "key_offset": key_offset, "total_keys": 9}
        out, lse = (testing.to_host(x) for x in runner.partial(q, k, v, **options).finish())
        testing.expect(q, k, v, **options).check(out, lse)


# -- workspace and determinism --------------------------------------------------------------------


def test_workspace_contents_never_matter(runner: Any) -> None:
    q, k, v = qkv(2, 4, 2, 9, 40, 16)
    plan = cumha.plan(*(runner.move(x) for x in (q, k, v)), causal=True, **runner.how)
    buffer = np.zeros(plan.workspace_bytes + 256, np.uint8)
    start = -buffer.ctypes.data % 128
    results = []
    for fill in (0, 0xFF, 0x7F):
        buffer[:] = fill
        workspace = buffer[start : start + plan.workspace_bytes + 128]
        if runner.library == "cupy":
            workspace = buffer[: plan.workspace_bytes + 128]  # device memory is aligned by itself
        results.append(runner.attention(q, k, v, causal=True, workspace=workspace))
    testing.expect(q, k, v, causal=True).check(*results[0])
    for other in results[1:]:
        assert [bits(x) for x in other] == [bits(x) for x in results[0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_determinism_same_call_same_bits(runner: Any, dtype: str) -> None:
    lengths = (9, 37) if runner.emulated else (33, 257)
    arrays = qkv(3, 6, 2, *lengths, 16, dtype=dtype)
    options = {"splits": 3} if runner.splits else {}
    first = runner.attention(*arrays, causal=True, **options)
    for seed in range(1, 5):
        with runner.reordered(seed):
            again = runner.attention(*arrays, causal=True, **options)
        assert [bits(x) for x in again] == [bits(x) for x in first]


@pytest.mark.parametrize("options", [{"keys_per_split": 256}, {}], ids=str)
def test_determinism_a_row_does_not_depend_on_its_batch(
    runner: Any, options: dict[str, int]
) -> None:
    """vllm#53257: stable from run to run, yet other bits alone than in a batch."""
    if runner.splits != bool(options):
        pytest.skip("keys_per_split makes this promise where a path can split, and only there")
    q, k, v = qkv(4, 8, 2, 1, 600, 64, dtype="bfloat16")
    lengths = np.array([64, 300, 512, 600])
    out, lse = runner.check(q, k, v, key_lengths=lengths, **options)
    for b in range(4):
        cut = (x[b : b + 1] for x in (q, k, v))
        alone = runner.attention(*cut, key_lengths=lengths[b : b + 1], **options)
        assert bits(alone[0]) == bits(out[b : b + 1])
        assert bits(alone[1]) == bits(lse[b : b + 1])


# -- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", ["batch", "heads", "len_q", "len_k"])
@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
def test_sizes_of_zero(runner: Any, empty: str, layout: str) -> None:
    sizes = {"batch": 2, "heads": 4, "len_q": 3, "len_k": 5, empty: 0}
    q, k, v = qkv(
        sizes["batch"], sizes["heads"], sizes["heads"] // 2, sizes["len_q"], sizes["len_k"], 16
    )
    if layout == "BLHD":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    out, lse = runner.check(q, k, v, layout=layout)
    assert out.shape == q.shape
    assert lse.shape == (sizes["batch"], sizes["heads"], sizes["len_q"])
    if empty == "len_k":
        assert_empty_rows(out, lse)


def test_sizes_of_an_empty_batch(runner: Any) -> None:
    out, lse = runner.attention(*qkv(0, 10, 10, 3952, 16, 64, dtype="float16"))
    assert out.shape == (0, 10, 3952, 64)
    assert lse.shape == (0, 10, 3952)


@pytest.mark.parametrize("sizes", [(65537, 1), (1, 65537), (32769, 2)], ids=str)
def test_sizes_of_batch_and_heads_above_65535(runner: Any, sizes: tuple[int, int]) -> None:
    """No grid axis may run out; every entry has its own answer: the mean of its two values."""
    if runner.emulated and runner.path != "naive":
        pytest.skip("a block per entry: 65537 emulated blocks take minutes; the GPU runs them")
    batch, heads = sizes
    q, k = np.zeros((batch, heads, 1, 8), np.float32), np.ones((batch, heads, 2, 8), np.float32)
    v = np.zeros((batch, heads, 2, 8), np.float32)
    index = np.arange(batch * heads, dtype=np.float32).reshape(batch, heads)
    v[:, :, 0], v[:, :, 1] = index[..., None] * 2, 2.0
    out, lse = runner.attention(q, k, v)
    assert (out == (index + 1)[..., None, None]).all()
    assert np.allclose(lse, math.log(2), rtol=1e-6)


SIZES = (1, 2, 13, 16, 31, 32, 33, 63, 65, 127, 129, 137)


@pytest.mark.parametrize("length", SIZES)
def test_sizes_around_tile_edges(runner: Any, length: int) -> None:
    for len_q, len_k in {(length, length), (length, 65), (65, length), (1, length)}:
        runner.check(*qkv(1, 2, 2, len_q, len_k, 16, dtype="float16"), causal=True)


@pytest.mark.parametrize("length", [12289, 16385, 65537, 131073])
def test_sizes_of_long_keys_in_decode(runner: Any, length: int) -> None:
    runner.check(*qkv(1, 2, 1, 1, length, 32, dtype="float16"))


@pytest.mark.parametrize("splits", [1, 2, 3, 16, 128, 1000])
def test_sizes_any_number_of_splits(runner: Any, splits: int) -> None:
    """flash-attention#1647: values changed with the number of splits."""
    if splits > 1 and not runner.splits:
        pytest.skip("this path has nothing to split")
    runner.check(*qkv(1, 8, 4, 1, 4096, 32, dtype="bfloat16"), splits=splits)


HEAD_DIMS = (
    1, 2, 3, 8, 16, 20, 31, 32, 33, 59, 64, 65, 72, 100, 111, 120, 128, 160, 256, 257, 300, 320,
    512,
)  # fmt: skip
UNEQUAL = ((1, 512), (512, 1), (64, 128), (192, 128), (33, 7), (8, 40))


@pytest.mark.parametrize("dims", [*((d, d) for d in HEAD_DIMS), *UNEQUAL], ids=str)
def test_sizes_of_heads(runner: Any, dims: tuple[int, int]) -> None:
    dtype = DTYPES[sum(dims) % 3]
    q, k, v = qkv(1, 4, 2, 7, 29, *dims, dtype=dtype)
    out, _ = runner.check(q, k, v)
    assert out.shape == (1, 4, 7, dims[1])
    runner.check(q[:, :, :1], k, v)


# -- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(runner: Any, dtype: str) -> None:
    out, _ = runner.check(*qkv(2, 4, 2, 9, 70, 16, dtype=dtype))
    assert str(out.dtype) == dtype


@pytest.mark.parametrize("odd", range(3))
def test_dtypes_do_not_mix(runner: Any, odd: int) -> None:
    arrays = list(qkv())
    arrays[odd] = arrays[odd].astype(np.float16)
    with pytest.raises(TypeError, match=r"one dtype.*astype"):
        runner.attention(*arrays)


@pytest.mark.parametrize("dtype", ["uint16", "int32", "bool", "complex64"])
def test_dtypes_that_are_no_attention_inputs(runner: Any, dtype: str) -> None:
    """bfloat16 stored as uint16 must not be read as integers."""
    with pytest.raises(TypeError, match=dtype):
        cumha.attention(*(runner.move(x.astype(dtype)) for x in qkv()), **runner.how)


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [(513, 16), (16, 513), (1024, 1024)], ids=str)
def test_errors_every_path_gives_its_reason(runner: Any, dims: tuple[int, int]) -> None:
    with pytest.raises(cumha.UnsupportedError) as caught:
        runner.attention(*qkv(1, 1, 1, 2, 3, *dims), must_run=True)
    text = str(caught.value)
    assert f"{max(dims)} is above its limit of 512" in text
    assert "naive:" in text
    assert "host:" in text


def test_errors_of_a_path_for_the_other_backend(runner: Any) -> None:
    q, k, v = (runner.move(x) for x in qkv())
    other = "naive" if runner.path == "host" else "host"
    backend = "emulate" if runner.emulated else None
    with pytest.raises(cumha.UnsupportedError) as caught:
        cumha.attention(q, k, v, path=other, backend=backend)
    text = str(caught.value)
    assert f"path='{other}' was asked for" in text
    assert ("'emulate' was asked for" if runner.emulated else f"got {runner.library}") in text
    if runner.library == "cupy":
        with pytest.raises(cumha.UnsupportedError, match="emulation takes NumPy arrays"):
            cumha.attention(q, k, v, backend="emulate")


@pytest.mark.parametrize("options", [{"splits": 2}, {"keys_per_split": 4}], ids=str)
def test_errors_of_splits_where_nothing_can_be_split(runner: Any, options: dict[str, int]) -> None:
    if runner.splits:
        runner.check(*qkv(), **options)
        return
    with pytest.raises(cumha.UnsupportedError, match=f"{next(iter(options))}.*nothing to split"):
        runner.attention(*qkv(), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": (1, 1, 6, 8)}, r"same number of keys.*\(1, 1, 5, 8\).*\(1, 1, 6, 8\)"),
        ({"k": (1, 1, 5, 9)}, "same head_dim"),
        ({"k": (2, 1, 5, 8)}, "same batch"),
        ({"v": (1, 2, 5, 8)}, "same number of heads"),
        ({"q": (1, 3, 8)}, "4 axes"),
    ],
    ids=str,
)
def test_errors_of_shapes_come_before_any_launch(
    runner: Any, change: dict[str, tuple[int, ...]], message: str
) -> None:
    shapes = {"q": (1, 1, 3, 8), "k": (1, 1, 5, 8), "v": (1, 1, 5, 8), **change}
    arrays = (runner.move(normal(*shape)) for shape in shapes.values())
    with pytest.raises(ValueError, match=message):
        cumha.attention(*arrays, **runner.how)


def test_errors_of_outputs(runner: Any) -> None:
    q, k, v = (runner.move(x) for x in qkv(2, 2, 2, 5, 7, 16))
    wrong = {
        "dtype": runner.move(normal(2, 2, 5, 16, dtype="float16")),
        "shape": runner.move(normal(2, 2, 5, 17)),
        "share": q,
    }
    for message, out in wrong.items():
        with pytest.raises((TypeError, ValueError), match=message):
            cumha.attention(q, k, v, out=out, **runner.how)
    with pytest.raises(ValueError, match="return_lse"):
        cumha.attention(q, k, v, lse=runner.move(normal(2, 2, 5)), **runner.how)


@pytest.mark.parametrize("dtype", [np.int8, np.uint32])
def test_mask_arithmetic_on_narrow_integers(runner: Any, dtype: Any) -> None:
    """More rows than a look-up is scanned over: its type's bounds must not overflow sums."""
    q, k, v = qkv(1, 80, 1, 2, 128, 16, 16, dtype=np.float32)
    ends = masks.array(np.random.default_rng(3).integers(0, 90, 200).astype(dtype))
    sums = masks.where(lambda b, h, q, k: k <= ends[(h * 37 + q) % 200] + 1)
    runner.check(q, k, v, mask=sums)
