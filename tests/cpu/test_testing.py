"""The tools that other tests rely on must be able to fail, and must say why."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

import cumha
from cumha import masks, reference, testing
from cumha.testing import inputs, transfer
from cumha.testing.strategies import Call, problems, visible

NAN, INF = np.nan, np.inf
DTYPES = ("float16", "bfloat16", "float32", "float64")


def test_importing_it_imports_neither_hypothesis_nor_cupy() -> None:
    code = "import sys, cumha.testing; print({'hypothesis', 'cupy', 'scipy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# -- the criterion --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "half_ulp"),
    [("float16", 2.0**-11), (ml_dtypes.bfloat16, 2.0**-8), ("float32", 2.0**-24)],
    ids=str,
)
def test_a_result_may_be_off_by_half_a_unit_in_the_last_place(stored: Any, half_ulp: float) -> None:
    computing = 1e-13 + 4 * 2.0**-52  # as if computed in float64
    for value in (1.0, 1.5, -1.25):
        allowed = testing.allowed_error(value, stored=stored, dtype="float64")
        assert allowed == pytest.approx(half_ulp + computing, rel=1e-9)
    below = testing.allowed_error(0.75, stored=stored, dtype="float64")
    assert below == pytest.approx(half_ulp / 2 + computing, rel=1e-9)
    at_zero = testing.allowed_error(0.0, stored=stored, dtype="float64")
    smallest = float(ml_dtypes.finfo(stored).smallest_subnormal)
    assert at_zero <= smallest + computing + half_ulp * computing * 2


def test_scores_and_values_widen_what_computing_may_cost() -> None:
    eps = 2.0**-23
    for dtype, base in (("float32", 1e-5 + 4 * eps), ("float16", 1e-5), ("bfloat16", 1e-5)):
        dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        small = testing.allowed_error(0.0, stored="float64", dtype=dtype)
        assert small == pytest.approx(base, rel=1e-6)
    large = testing.allowed_error(
        np.zeros(3), stored="float64", dtype="float16", max_score=[1, 1e5, 1], max_value=[1, 1, 1e3]
    )
    assert large == pytest.approx([1e-5, 4 * eps * 1e5, 4 * eps * 1e3], rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_next_number_but_one_is_a_fault(dtype: str) -> None:
    expected = np.linspace(200, 250, 50)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    rounded = expected.astype(kind)
    assert testing.compare(rounded, expected) is None
    steps = {"float32": 2, "float64": 30}.get(dtype, 1)  # where computing may cost more than that
    wrong = rounded.copy()
    wrong[7] = rounded[7] + kind.type(128 * float(ml_dtypes.finfo(kind).eps) * steps)
    found = testing.compare(wrong, expected)
    assert found is not None
    assert found.counts == {"NaN": 0, "infinity": 0, "value": 1}
    assert found.worst[0].at == (7,)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_not_finite_must_stand_where_the_reference_has_it(value: float) -> None:
    expected = np.ones((1, 2, 3, 4))
    expected[0, 1, 2, 3] = value
    assert testing.compare(expected.astype(np.float32), expected) is None
    for wrong in {NAN, INF, -INF, 1.0} - {value}:
        actual = expected.astype(np.float32)
        actual[0, 1, 2, 3] = wrong
        if np.isnan(wrong) and np.isnan(value):
            continue
        found = testing.compare(actual, expected)
        assert found is not None
        assert found.kind == ("NaN" if np.isnan(wrong) or np.isnan(value) else "infinity")
        assert found.worst[0].at == (0, 1, 2, 3)
    assert testing.compare(np.full((1, 2, 3, 4), value, np.float32), np.ones((1, 2, 3, 4)))


def test_nan_is_reported_first_and_everything_is_counted() -> None:
    """A maximum over errors would have dropped the NaN and called the result right."""
    expected = np.zeros((2, 4, 96, 8))
    actual = expected.astype(np.float32)
    actual[1, 3, 64:] = 0.5
    actual[1, 3, 70, 2] = NAN
    actual[1, 3, 71, 2] = INF
    with pytest.raises(AssertionError) as caught:
        testing.assert_close(actual, expected)
    text = str(caught.value)
    assert "out: NaN where there should be none" in text
    assert "wrong    256 of 6144 elements (1 by NaN, 1 by infinity, 254 by value)" in text
    assert "[batch 1, head 3, query 70, dim 2] actual nan, expected 0" in text
    actual[~np.isfinite(actual)] = 0.5
    found = testing.compare(actual, expected)
    assert found is not None
    assert found.pattern == "only batch 1; only head 3; only query >= 64 (all there)"
    assert "error 0.5 of 1.05e-05 allowed" in str(found)


@pytest.mark.parametrize(
    ("index", "pattern"),
    [
        (np.s_[:], "everywhere (all there)"),
        (np.s_[:, 3], "only head 3 (all there)"),
        (np.s_[:, :, 20:], "only query >= 20 (all there)"),
        (np.s_[:, :, :5], "only query < 5 (all there)"),
        (np.s_[:, :, 5:9], "only query 5 to 8 (all there)"),
        (np.s_[..., 1::2], "only every 2. dim, 1 to 7 (all there)"),
        (np.s_[:, [0, 1, 3]], "only head 0, 1, 3 (all there)"),
        (np.s_[1, 2, 7, 4], "only batch 1; only head 2; only query 7; only dim 4 (all there)"),
        (
            np.s_[:, [0, 1], [0, 31]],
            "only head < 2; only query 0, 31 (32 of the 64 elements there)",
        ),
    ],
    ids=str,
)
def test_the_report_says_where(index: Any, pattern: str) -> None:
    actual = np.zeros((2, 4, 32, 8), np.float32)
    actual[index] = 1
    found = testing.compare(actual, np.zeros(actual.shape))
    assert found is not None
    assert found.pattern == pattern


def test_the_worst_come_first() -> None:
    actual = np.zeros((1, 1, 4, 4), np.float32)
    actual[0, 0, 1, 2], actual[0, 0, 3, 0] = 0.1, -0.3
    found = testing.compare(actual, np.zeros(actual.shape))
    assert found is not None
    assert [one.at for one in found.worst] == [(0, 0, 3, 0), (0, 0, 1, 2)]
    assert found.wrong == 2


def test_shapes_and_dtypes_must_match() -> None:
    with pytest.raises(AssertionError, match=r"shape \(2,\), expected \(3,\)"):
        testing.assert_close(np.zeros(2), np.zeros(3))
    q, k, v = inputs.qkv(dtype="float16")
    out, lse = cumha.attention(q, k, v, return_lse=True)
    expected = testing.expect(q, k, v)
    expected.check(out, lse)
    with pytest.raises(AssertionError, match="float32, expected float16"):
        expected.check(out.astype(np.float32), lse)
    with pytest.raises(AssertionError, match="float64, expected float32"):
        expected.check(out, lse.astype(np.float64))


def test_axes_are_named_in_both_layouts_and_for_the_lse() -> None:
    q, k, v = (x.swapaxes(1, 2) for x in inputs.qkv(1, 2, 2, 3, 4, 8))
    expected = testing.expect(q, k, v, layout="BLHD")
    out, lse = cumha.attention(q, k, v, layout="BLHD", return_lse=True)
    expected.check(out, lse)
    out[0, 2, 1, 5] += 1
    with pytest.raises(AssertionError, match="batch 0, query 2, head 1, dim 5"):
        expected.check(out)
    out[0, 2, 1, 5] -= 1
    lse[0, 1, 2] += 1
    with pytest.raises(AssertionError, match=r"lse: values differ[^$]*batch 0, head 1, query 2\]"):
        expected.check(out, lse)


def test_slots_that_a_row_does_not_see_do_not_widen_its_tolerance() -> None:
    q, k, v = inputs.qkv(1, 2, 1, 3, 4, 8)
    keep = np.array([[1, 1, 0, 0]] * 3, bool)
    plain = testing.expect(q, k, v, mask=keep)
    k[:, :, 2:], v[:, :, 2:] = 1e6, 1e6
    k[:, :, 3] = NAN
    other = testing.expect(q, k, v, mask=keep)
    np.testing.assert_array_equal(other.max_score, plain.max_score)
    np.testing.assert_array_equal(other.max_value, plain.max_value)
    np.testing.assert_array_equal(other.out, plain.out)
    sizes = np.abs(q[0, 0].astype(float)) @ np.abs(k[0, 0, :2].astype(float)).T
    assert np.allclose(plain.max_score[0, 0], sizes.max(axis=1) / np.sqrt(8))


def test_expect_takes_partial_calls() -> None:
    q, k, v = inputs.qkv(1, 2, 1, 3, 9, 8)
    part = (q, k[:, :, 4:7], v[:, :, 4:7])
    options: dict[str, Any] = {"causal": True, "key_offset": 4, "total_keys": 9}
    o, m, l = reference.partial_attention(*part, **options)  # noqa: E741
    expected = testing.expect(*part, **options)
    np.testing.assert_allclose(expected.out, o / l[..., None])
    np.testing.assert_allclose(expected.lse, m + np.log(l))


# -- inputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", testing.VIEWS)
def test_views_hold_the_values_in_other_memory(kind: str, dtype: str) -> None:
    x = inputs.normal(2, 3, 5, 7, dtype=dtype)
    made = testing.view(x, kind)
    assert made.dtype == x.dtype
    assert not np.shares_memory(made, x)
    want = np.broadcast_to(x[:1], x.shape) if kind == "broadcast" else x
    assert made.tobytes() == want.tobytes()
    signs = {"reversed": -1, "broadcast": 0}
    assert np.sign(made.strides[0]) == signs.get(kind, 1)
    assert made.flags.c_contiguous == (kind in ("contiguous", "size_one"))
    if kind == "odd_offset":
        assert made.strides[2] // x.itemsize % 2 == 1


def test_size_one_axes_get_meaningless_strides() -> None:
    made = testing.view(np.ones((1, 2, 1, 3), np.float32), "size_one")
    assert made.strides[0] == made.strides[2] == 4097 * 4


@pytest.mark.parametrize("value", [NAN, INF, 1e30])
def test_poison_goes_where_no_row_looks(value: float) -> None:
    _, k, v = inputs.qkv(2, 4, 2, 3, 5, 8, dtype="float16")
    keep = np.zeros((2, 4, 3, 5), bool)
    keep[0, 0, 0, 1] = keep[0, 3, 2, 4] = True
    bad_k, bad_v = testing.poisoned(k, v, keep, value)
    seen = np.zeros((2, 2, 5), bool)
    seen[0, 0, 1] = seen[0, 1, 4] = True
    for bad, good in ((bad_k, k), (bad_v, v)):
        assert (bad[seen] == good[seen]).all()
        hidden = bad[~seen].astype(np.float64)
        assert np.isnan(hidden).all() if np.isnan(value) else (hidden > 6e4).all()
    assert np.isfinite(k.astype(float)).all()


def test_identity_matrices_make_the_output_the_softmax() -> None:
    x = testing.identity(4)
    out = cumha.attention(x, x, x, scale=1.0)
    on, off = np.e / (np.e + 3), 1 / (np.e + 3)
    np.testing.assert_allclose(out[0, 0], np.where(np.eye(4), on, off), rtol=1e-6)


def test_key_index_makes_the_output_the_mean_index() -> None:
    v = testing.key_index(1, 2, 5, 3)
    q, k = np.zeros((1, 2, 5, 4), np.float32), inputs.normal(1, 2, 5, 4)
    out = cumha.attention(q, k, v, causal=True)
    np.testing.assert_allclose(out[0, 1, :, 2], [0, 0.5, 1, 1.5, 2], rtol=1e-6)


@pytest.mark.parametrize("kind", testing.EXTREMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_scores_are_what_they_are_called(kind: str, dtype: str) -> None:
    q, k = testing.extreme_scores(kind, 2, 9, 4, dtype=dtype, level=1e5)
    scores = (q.astype(np.float64) @ k.astype(np.float64).swapaxes(2, 3))[0, 0, 0]
    near = {"rel": 0.01}
    if kind in ("low", "high"):
        assert scores == pytest.approx([1e5 if kind == "high" else -1e5] * 9, **near)
    elif kind == "alternating":
        assert scores == pytest.approx([-1e5, 1e5] * 4 + [-1e5], **near)
    elif kind == "one_large":
        assert np.flatnonzero(scores).tolist() == [3]
    else:
        steps = np.diff(scores if kind == "rising" else -scores)
        assert (steps > 1e4).all()


# -- moving views ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", testing.VIEWS)
def test_the_owners_memory_holds_the_view_and_its_surroundings(kind: str) -> None:
    x = testing.view(inputs.normal(2, 3, 5, 7), kind)
    memory, offset = transfer.host_memory(x)
    rebuilt = np.ndarray(x.shape, x.dtype, memory.tobytes(), offset, x.strides)
    assert rebuilt.tobytes() == x.tobytes()
    if kind in ("sliced", "odd_offset"):
        assert memory.size > x.nbytes
        assert np.isnan(memory.view(np.float32)[0])


def test_the_owner_is_found_through_other_objects() -> None:
    buffer = np.arange(40, dtype=np.int16)
    window = np.lib.stride_tricks.as_strided(buffer[5:], (3, 4), (2, 4))[::-1]
    memory, offset = transfer.host_memory(window)
    assert memory.size == 80
    assert offset == 14
    memory, offset = transfer.host_memory(np.zeros((3, 0)))
    assert memory.size == offset == 0


def test_moving_refuses_what_is_no_array() -> None:
    x = np.ones(3)
    assert testing.to_host(x) is x
    with pytest.raises(TypeError, match="list"):
        testing.to_host([1.0])
    with pytest.raises(TypeError, match="list"):
        testing.to_device([1.0])


# -- the strategy of whole calls ------------------------------------------------------------------

QUICK = settings(
    max_examples=3000, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck), phases=[Phase.generate],
)  # fmt: skip


def _nan(x: np.ndarray) -> bool:
    return bool(np.isnan(x.astype(np.float64)).any())


FEATURES = {
    "no batch": lambda c: 0 in c.q.shape and c.q.shape[0] == 0,
    "no key": lambda c: c.k.shape[1 if c.options["layout"] == "BLHD" else 2] == 0 and c.q.size,
    "no query": lambda c: c.q.size == 0 and c.k.size,
    "one query": lambda c: c.q.shape[1 if c.options["layout"] == "BLHD" else 2] == 1,
    "groups": lambda c: c.q.shape[:3] != c.k.shape[:3] and max(c.q.shape[1:3]) == 7,
    "BLHD": lambda c: c.options["layout"] == "BLHD",
    "float64": lambda c: c.q.dtype == np.float64,
    "bfloat16": lambda c: c.q.dtype == ml_dtypes.bfloat16,
    "head_dim 512": lambda c: c.q.shape[3] == 512,
    "odd head_dim": lambda c: c.q.shape[3] == 33,
    "unequal head_dims": lambda c: c.q.shape[3] != c.v.shape[3],
    "an empty entry": lambda c: 0 in list(c.options.get("key_lengths", [1])),
    "lengths in int32": lambda c: getattr(c.options.get("key_lengths"), "dtype", "") == np.int32,
    "expression": lambda c: isinstance(c.options["mask"], masks.Expr),
    "array": lambda c: isinstance(c.options["mask"], np.ndarray) and c.options["mask"].ndim == 3,
    "causal and mask": lambda c: c.options["causal"] and c.options["mask"] is not None,
    "negative strides": lambda c: c.k.strides[3] < 0,
    "stride 0": lambda c: c.v.size and c.v.shape[0] > 1 and c.v.strides[0] == 0,
    "NaN": lambda c: _nan(c.v) and _nan(c.k),
    "no lse": lambda c: not c.options["return_lse"],
    "scale": lambda c: c.options["scale"] == 0.0,
}


@pytest.mark.parametrize("feature", FEATURES)
def test_problems_have(feature: str) -> None:
    assert FEATURES[feature](find(problems(), FEATURES[feature], settings=QUICK))


@settings(max_examples=100)
@given(problems(most_len=5))
def test_problems_are_correct_calls(call: Call) -> None:
    arguments = call.arguments()
    expected = testing.expect(**{n: x for n, x in arguments.items() if n != "return_lse"})
    result = cumha.attention(**arguments)
    expected.check(*result if arguments["return_lse"] else (result,))
    assert f"q {list(call.q.shape)}" in repr(call)


def test_problems_shrink_to_little() -> None:
    small = settings(max_examples=2000, derandomize=True, deadline=None, database=None)
    call = find(problems(), lambda c: c.v.size > 0 and c.options["causal"], settings=small)
    assert call.q.shape == call.k.shape == call.v.shape == (1, 1, 1, 1)
    assert call.options == {
        "mask": None, "causal": True, "scale": None, "layout": "BHLD", "return_lse": False,
    }  # fmt: skip
    assert "contiguous" in call.made


def test_problems_take_masks_and_sizes() -> None:
    from hypothesis import strategies as st

    strategy = problems(
        mask=lambda sizes: st.just(masks.causal()), head_dims=[5], dtypes=["float32"],
        key_lengths=True, causal=False, most_len=3, poison=False,
    )  # fmt: skip

    @settings(max_examples=50)
    @given(strategy)
    def check(call: Call) -> None:
        assert call.q.shape[3] == call.v.shape[3] == 5
        assert call.q.dtype == np.float32
        assert call.options["mask"].structure == masks.causal().structure
        assert "key_lengths" in call.options
        assert not call.options["causal"]
        swapped = call.options["layout"] == "BLHD"
        q, k = (x.swapaxes(1, 2) if swapped else x for x in (call.q, call.k))
        keep = visible(q.shape[1], q.shape[2], k, call.options)
        assert keep.shape == (*q.shape[:3], k.shape[2])
        assert max(keep.shape[2:]) <= 3

    check()


# -- diagnose -------------------------------------------------------------------------------------


def _faulty(fault: str) -> Any:
    """An attention function with one fault."""

    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        mask = options.get("mask")
        if fault == "mask" and mask is not None:
            options["mask"] = ~testing.expression(mask, False)
        if fault == "causal" and options.get("causal"):
            mine = masks.where(lambda b, h, q, k: k < q + (masks.len_k - masks.len_q))
            options.update(causal=False, mask=mine if mask is None else mine & mask)
        if fault == "key_lengths":
            options["key_lengths"] = None
        if fault == "heads":
            k, v = k[:, ::-1], v[:, ::-1]
        out, lse = cumha.attention(q, k, v, **options)
        if fault == "splits" and (options.get("splits") or 1) > 1:
            out[:, 3] *= 1.5
        if fault == "path" and options.get("path") != "host":
            out[0, 1, 2, 3] = NAN
        return out, lse

    return attend


@pytest.mark.parametrize(
    ("fault", "cause", "agrees"),
    [
        ("mask", "agrees with mask off: look at the mask", ["mask off", "causal off"]),
        ("key_lengths", "agrees with key_lengths off", ["key_lengths off", "causal off"]),
        ("causal", "agrees with causal off: look at the causal test", ["causal off"]),
        ("splits", "agrees with splits = 1", ["splits = 1"]),
        ("path", "agrees on path host: look at the path", []),
        ("none", "every stage agrees", ["as asked", "mask off", "causal off", "splits = 1"]),
    ],
)
def test_diagnose_finds_the_part(fault: str, cause: str, agrees: list[str]) -> None:
    q, k, v = inputs.qkv(2, 4, 2, 6, 9, 8)
    options: dict[str, Any] = {
        "mask": masks.window(3, 0), "causal": True, "key_lengths": [9, 4], "splits": 2,
    }  # fmt: skip
    found = testing.diagnose(q, k, v, function=_faulty(fault), **options)
    assert cause in found.cause
    names = [stage.name for stage in found.stages]
    assert names == [
        "as asked", "mask off", "key_lengths off", "causal off", "splits = 1", "path host",
    ]  # fmt: skip
    for stage in found.stages:
        if stage.name in agrees:
            assert not stage.differs, found
    assert found.ok == (fault == "none")
    assert (found.first is None) == found.ok
    if found.first is not None:
        assert found.first.name == "as asked"
        assert f"first that differs: {found.first.name}" in repr(found)
        assert "[batch " in repr(found)


def test_diagnose_points_at_what_every_stage_shares() -> None:
    found = testing.diagnose(*inputs.qkv(1, 4, 2, 6, 9, 8), function=_faulty("heads"), causal=True)
    assert not found.ok
    assert "agrees on path host" in found.cause
    assert "not run: nothing to leave out" in repr(found)


def test_diagnose_of_a_path_that_is_wrong_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    monkeypatch.setattr(importlib.import_module("cumha.api"), "attention", _faulty("heads"))
    found = testing.diagnose(*inputs.qkv(1, 4, 2, 6, 9, 8))
    assert "differs in every stage" in found.cause


def test_diagnose_keeps_given_outputs_to_the_call_as_asked() -> None:
    q, k, v = inputs.qkv(1, 2, 2, 3, 4, 8)
    out = np.full((1, 2, 3, 8), NAN, np.float32)
    assert testing.diagnose(q, k, v, mask=masks.window(0, 0), out=out).ok
    testing.expect(q, k, v, mask=masks.window(0, 0)).check(out)
    swapped = (x.swapaxes(1, 2) for x in (q, k, v))
    assert testing.diagnose(*swapped, layout="BLHD", scale=0.5).ok


def test_diagnose_passes_on_what_the_call_itself_refuses() -> None:
    q, k, v = inputs.qkv()
    with pytest.raises(ValueError, match="same head_dim"):
        testing.diagnose(q[..., 1:], k, v)
    with pytest.raises(cumha.UnsupportedError):
        testing.diagnose(q, k, v, path="naive")


def test_every_name_is_exported_and_documented() -> None:
    for name in testing.__all__:
        assert getattr(testing, name).__doc__
