"""What does not fit is refused: the right type, and a message of what was given and needed."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumha
from cumha import masks

F = np.float32
CALLS: list[Callable[..., Any]] = [cumha.attention, cumha.plan, cumha.partial_attention]


def zeros(*shape: int, dtype: Any = F) -> np.ndarray:
    return np.zeros(shape, dtype)


def inputs(**shapes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v: batch 2, heads 4:2, len_q 3, len_k 5, head_dim 8, head_dim_v 6."""
    default = {"q": (2, 4, 3, 8), "k": (2, 2, 5, 8), "v": (2, 2, 5, 6)}
    q, k, v = (zeros(*{**default, **shapes}[name]) for name in "qkv")
    return q, k, v


def refused(error: type[Exception], match: str, *arrays: Any, **options: Any) -> None:
    """`attention` and `plan` refuse the call, and `partial_attention` if it has the options."""
    arrays = arrays or inputs()
    for call in CALLS[:2]:
        with pytest.raises(error, match=match):
            call(*arrays, **options)
    if not {"out", "lse", "return_lse"} & set(options):
        with pytest.raises(error, match=match):
            cumha.partial_attention(*arrays, **options)


def test_the_unspoilt_problem_is_taken() -> None:
    """Otherwise the tests below could fail for any reason."""
    for call in CALLS:
        call(*inputs())
    cumha.attention(*inputs(), out=zeros(2, 4, 3, 6), lse=zeros(2, 4, 3), return_lse=True)


# --- ranks, shapes, heads


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"q": (4, 3, 8)}, r"q needs 4 axes \[batch, heads, len, dim\], got shape \(4, 3, 8\)"),
        ({"k": (2, 5, 8)}, r"k needs 4 axes.*\(2, 5, 8\)"),
        ({"v": (1, 2, 2, 5, 6)}, r"v needs 4 axes.*\(1, 2, 2, 5, 6\)"),
        ({"q": ()}, r"q needs 4 axes.*\(\)"),
        ({"q": (3, 4, 3, 8)}, r"same batch, got q \(3, 4, 3, 8\), k \(2, 2, 5, 8\)"),
        ({"v": (1, 2, 5, 6)}, r"same batch, got .*v \(1, 2, 5, 6\)"),
        ({"v": (2, 1, 5, 6)}, r"k and v need the same number of heads, got .*v \(2, 1, 5, 6\)"),
        ({"v": (2, 2, 4, 6)}, r"k and v need the same number of keys, got .*v \(2, 2, 4, 6\)"),
        ({"q": (2, 4, 3, 7)}, r"q and k need the same head_dim, got q \(2, 4, 3, 7\)"),
        ({"q": (2, 3, 3, 8)}, r"query heads must be a multiple of the KV heads, got 3 and 2"),
        ({"q": (2, 1, 3, 8)}, r"multiple of the KV heads, got 1 and 2"),
        ({"k": (2, 0, 5, 8), "v": (2, 0, 5, 6)}, r"multiple of the KV heads, got 4 and 0"),
        ({"q": (2, 4, 3, 0), "k": (2, 2, 5, 0)}, r"head_dim and head_dim_v must be at least 1"),
        ({"v": (2, 2, 5, 0)}, r"head_dim_v must be at least 1, got .*v \(2, 2, 5, 0\)"),
    ],
)
def test_shapes_and_heads(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    refused(ValueError, message, *inputs(**shapes))


def test_shapes_in_the_other_layout_are_named_as_given() -> None:
    q, k, v = (x.transpose(0, 2, 1, 3) for x in inputs(v=(2, 2, 4, 6)))
    axes = r"\[batch, len, heads, dim\]"
    refused(ValueError, rf"same number of keys.*as {axes}", q, k, v, layout="BLHD")
    refused(ValueError, rf"q needs 4 axes {axes}", q[0], k, v, layout="BLHD")


@pytest.mark.parametrize("name", ["head_dim", "head_dim_v"])
def test_a_head_above_the_limit_lists_each_path(name: str) -> None:
    shapes = {"q": (2, 4, 3, 513), "k": (2, 2, 5, 513)}
    arrays = inputs(**shapes) if name == "head_dim" else inputs(v=(2, 2, 5, 513))
    reason = f"{name} 513 is above its limit of 512"
    lower = f"{name} 513 is above its limit of 256"
    pattern = (
        rf"(?s)no path can run .*gemv: [^\n]*{lower}.*tiled: [^\n]*{lower}"
        rf".*naive: [^\n]*{reason}.*host: [^\n]*{reason}"
    )
    refused(cumha.UnsupportedError, pattern, *arrays)
    refused(NotImplementedError, pattern, *arrays)


# --- dtypes and kinds of arrays


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64", "object", ">f4", "S4"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_dtypes(name: str, dtype: str) -> None:
    arrays = dict(zip("qkv", inputs(), strict=True))
    arrays[name] = arrays[name].astype(dtype)
    shown = "bool" if dtype == "bool" else str(np.dtype(dtype))
    pattern = rf"{name} has dtype {shown.replace('|', '.')}: attention takes float16, .*native"
    refused(TypeError, pattern, *arrays.values())


@pytest.mark.parametrize(
    "dtype", [np.longdouble, ml_dtypes.float8_e4m3fn, ml_dtypes.int4], ids=lambda d: d.__name__
)
def test_dtypes_that_only_look_like_floats(dtype: Any) -> None:
    if np.dtype(dtype).itemsize == 8:
        pytest.skip("long double is double here")
    refused(TypeError, r"q has dtype .*attention takes", *(x.astype(dtype) for x in inputs()))


@pytest.mark.parametrize("other", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_mixed_dtypes(other: Any) -> None:
    q, k, v = inputs()
    name = np.dtype(other).name
    refused(TypeError, rf"one dtype, got .*k {name}.*\.astype", q, k.astype(other), v)


def test_lists_and_other_objects() -> None:
    q, k, v = inputs()
    match = r"q must be a NumPy or CuPy array, got a list \(use numpy\.asarray"
    refused(TypeError, match, [[1.0]], k, v)
    refused(TypeError, r"k must be a NumPy or CuPy array, got a tuple", q, (1.0,), v)
    refused(TypeError, r"v must be .* got builtins\.NoneType", q, k, None)
    refused(TypeError, r"q must be .* got builtins\.float", 1.0, k, v)
    refused(TypeError, r"k must be .*numpy\.float32", q, F(1), v)
    refused(TypeError, r"v must be .*memoryview.*numpy\.asarray", q, k, memoryview(v))


def test_masked_arrays() -> None:
    q, k, v = inputs()
    masked = np.ma.masked_array(k, mask=k == 0)
    refused(TypeError, r"k must be .*numpy\.ma\.MaskedArray.*filled.*boolean mask", q, masked, v)
    keep = np.ma.masked_array(np.ones((3, 5), bool))
    refused(TypeError, r"mask must be .*MaskedArray", mask=keep)
    with pytest.raises(TypeError, match=r"plain array, got numpy\.ma\.MaskedArray"):
        masks.array(keep)


# --- a made-up CuPy: arrays that say where they are, and whose memory must not be read


class FakeArray:
    """What the checks may ask of a CuPy array: metadata, and views of it."""

    def __init__(self, x: np.ndarray, device: int = 0, pointer: int | None = None) -> None:
        self._x = x
        self.device = types.SimpleNamespace(id=device)
        self.dtype, self.shape, self.strides = x.dtype, x.shape, x.strides
        self.ndim, self.size, self.itemsize = x.ndim, x.size, x.itemsize
        self.data = types.SimpleNamespace(ptr=x.ctypes.data if pointer is None else pointer)

    def transpose(self, *axes: int) -> FakeArray:
        return FakeArray(self._x.transpose(*axes), self.device.id, self.data.ptr)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands in for CuPy as far as `plan` asks it: arrays, and one H200 with index 0 or more."""
    from cumha.device import Device

    module = types.ModuleType("cupy")
    module.ndarray = FakeArray  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", module)
    h200 = Device.named("h200")
    monkeypatch.setattr("cumha.api.device_of", lambda problem, request: h200)
    return module


def on_device(device: int = 0) -> list[FakeArray]:
    return [FakeArray(x, device) for x in inputs()]


def planned(*arrays: Any, **options: Any) -> cumha.Plan:
    """Calls with device arrays are planned only: there is no device to run them on."""
    return cumha.plan(*arrays, **options)


@pytest.mark.usefixtures("cupy")
def test_the_made_up_cupy_is_taken() -> None:
    assert planned(*on_device()).path == "gemv"
    lengths = FakeArray(np.array([1, 2]))
    keep = FakeArray(np.ones((3, 5), bool))
    out = FakeArray(zeros(2, 4, 3, 6))
    assert planned(*on_device(), key_lengths=lengths, mask=keep, out=out).path == "gemv"


@pytest.mark.usefixtures("cupy")
def test_one_numpy_and_one_cupy() -> None:
    q, k, v = inputs()
    match = r"one library, got q is cupy, k is numpy, v is numpy: .*cupy\.asarray or \.get\(\)"
    refused(TypeError, match, FakeArray(q), k, v)
    refused(TypeError, r"q is numpy, k is numpy, v is cupy", q, k, FakeArray(v))
    companions = {
        "out": zeros(2, 4, 3, 6),
        "workspace": np.zeros(0, np.uint8),
        "mask": np.ones((3, 5), bool),
    }
    for name, x in companions.items():
        with pytest.raises(TypeError, match=rf"{name}.* is a numpy array.*cupy: use cupy\.asarray"):
            planned(*on_device(), **{name: x})
        with pytest.raises(TypeError, match=rf"{name}.* is a cupy array.*numpy: use x\.get\(\)"):
            planned(q, k, v, **{name: FakeArray(x)})
    with pytest.raises(TypeError, match=r"lse is a numpy array.*cupy\.asarray"):
        planned(*on_device(), return_lse=True, lse=zeros(2, 4, 3))
    with pytest.raises(TypeError, match=r"key_lengths is a cupy array.*x\.get\(\)"):
        planned(q, k, v, key_lengths=FakeArray(np.array([1, 2])))


@pytest.mark.usefixtures("cupy")
def test_different_devices() -> None:
    q, _, v = on_device()
    match = r"one device, got .*0, 3, 0"
    refused(ValueError, match, q, FakeArray(inputs()[1], 3), v)
    for name, x in (
        ("out", zeros(2, 4, 3, 6)),
        ("workspace", np.zeros(0, np.uint8)),
        ("key_lengths", np.array([1, 2])),
        ("mask", np.ones((3, 5), bool)),
    ):
        with pytest.raises(ValueError, match=rf"{name}.* is on device 1, q on 0"):
            planned(*on_device(), **{name: FakeArray(x, 1)})


@pytest.mark.usefixtures("cupy")
def test_device_arrays_of_byte_strides_that_hold_no_whole_elements() -> None:
    packed = np.zeros((2, 4, 3, 8), np.dtype([("x", F), ("tag", np.int8)]))["x"]
    _, k, v = on_device()
    match = r"q has byte strides .* no multiples of its item size 4"
    refused(ValueError, match, FakeArray(packed), k, v)


@pytest.mark.usefixtures("cupy")
def test_lengths_on_a_device_are_not_read_but_their_kind_is_checked() -> None:
    wrong = FakeArray(np.array([99, -1]))  # clamped by the kernel
    assert planned(*on_device(), key_lengths=wrong).problem.key_lengths == "int64"
    for dtype in ("float32", "uint8", "bool"):
        lengths = FakeArray(np.zeros(2, dtype))
        with pytest.raises(TypeError, match=rf"device must be int32 or int64, got {dtype}"):
            planned(*on_device(), key_lengths=lengths)
    with pytest.raises(ValueError, match=r"shape \[batch\] = \(2,\), got \(3,\)"):
        planned(*on_device(), key_lengths=FakeArray(np.zeros(3, np.int32)))


@pytest.mark.usefixtures("cupy")
def test_outputs_on_a_device_that_overlap() -> None:
    q, k, v = on_device()
    inside = FakeArray(zeros(2, 4, 3, 6), pointer=k.data.ptr + 16)
    with pytest.raises(ValueError, match="out shares memory with k"):
        planned(q, k, v, out=inside)


@pytest.mark.usefixtures("cupy")
def test_what_a_kernel_cannot_do_is_said() -> None:
    with pytest.raises(cumha.UnsupportedError, match=r"naive: splits: .*nothing to split"):
        planned(*on_device(), splits=2, path="naive")
    with pytest.raises(cumha.UnsupportedError, match=r"naive: keys_per_split: .*nothing to split"):
        planned(*on_device(), keys_per_split=64, path="naive")
    doubles = [FakeArray(x.astype(np.float64)) for x in inputs()]
    assert planned(*doubles).path == "naive"
    with pytest.raises(
        cumha.UnsupportedError, match=r"gemv: dtype float64.*\n.*tiled: dtype float64"
    ):
        planned(*doubles, splits=2)
    asked = ".*".join(f"{name}: [^\n]*'cuda', 'host'" for name in ("gemv", "tiled", "naive"))
    match = rf"(?s){asked}.*host: .*\.get\(\)"
    with pytest.raises(cumha.UnsupportedError, match=match):
        planned(*on_device(), backend="host")


# --- out, lse, workspace


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (zeros(2, 4, 3, 8), ValueError, r"out needs shape \(2, 4, 3, 6\), got \(2, 4, 3, 8\)"),
        (zeros(4, 3, 6), ValueError, r"out needs shape \(2, 4, 3, 6\), got \(4, 3, 6\)"),
        (zeros(2, 4, 3, 6, dtype=np.float64), TypeError, r"out needs dtype float32, got float64"),
        (zeros(2, 4, 3, 6, dtype=">f4"), TypeError, r"out needs dtype float32, got >f4"),
        ([[0.0]], TypeError, r"out must be a NumPy or CuPy array, got a list"),
        (np.ma.zeros((2, 4, 3, 6), F), TypeError, r"out must be .*MaskedArray"),
    ],
)
def test_out_of_a_wrong_kind(out: Any, error: type[Exception], message: str) -> None:
    refused(error, message, out=out)


def test_out_in_the_other_layout() -> None:
    q, k, v = (np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in inputs())
    match = r"out needs shape \(2, 3, 4, 6\), got \(2, 4, 3, 6\)"
    refused(ValueError, match, q, k, v, layout="BLHD", out=zeros(2, 4, 3, 6))


@pytest.mark.parametrize(
    ("lse", "error", "message"),
    [
        (zeros(2, 4, 5), ValueError, r"lse needs shape \(2, 4, 3\), got \(2, 4, 5\)"),
        (zeros(2, 4, 3, 1), ValueError, r"lse needs shape \(2, 4, 3\), got \(2, 4, 3, 1\)"),
        (zeros(2, 4, 3, dtype=np.float64), TypeError, r"lse needs dtype float32, got float64"),
        ([0.0], TypeError, r"lse must be a NumPy or CuPy array, got a list"),
    ],
)
def test_lse_of_a_wrong_kind(lse: Any, error: type[Exception], message: str) -> None:
    refused(error, message, lse=lse, return_lse=True)


def test_lse_without_return_lse() -> None:
    refused(ValueError, r"lse= was given but return_lse is False", lse=zeros(2, 4, 3))


def test_outputs_that_are_read_only() -> None:
    out, lse, workspace = zeros(2, 4, 3, 6), zeros(2, 4, 3), np.zeros(256, np.uint8)
    for x in (out, lse, workspace):
        x.flags.writeable = False
    refused(ValueError, "out is read-only", out=out)
    refused(ValueError, "lse is read-only", lse=lse, return_lse=True)
    refused(ValueError, "workspace is read-only", workspace=aligned(256, writeable=False))


def test_outputs_that_overlap() -> None:
    memory = zeros(1000)
    q, k, v = inputs()
    k = memory[:160].reshape(2, 2, 5, 8)
    out = memory[150:294].reshape(2, 4, 3, 6)
    refused(ValueError, "out shares memory with k", q, k, v, out=out)
    shared = {"out": memory[200:344].reshape(2, 4, 3, 6), "lse": memory[340:364].reshape(2, 4, 3)}
    refused(ValueError, "lse shares memory with out", q, k, v, return_lse=True, **shared)
    raw = aligned(1024)
    out = raw[: 2 * 4 * 3 * 6 * 4].view(F).reshape(2, 4, 3, 6)
    refused(ValueError, "workspace shares memory with out", out=out, workspace=raw)
    # Neighbours in one buffer are no overlap.
    cumha.attention(q, k, v, out=memory[160:304].reshape(2, 4, 3, 6))


def test_outputs_that_are_their_own_input() -> None:
    q, k, v = inputs(v=(2, 2, 5, 8))
    refused(ValueError, "out shares memory with q", q, k, v, out=q)


def test_outputs_whose_elements_share_memory() -> None:
    broadcast = np.lib.stride_tricks.as_strided(zeros(6), (2, 4, 3, 6), (0, 0, 0, 4))
    refused(ValueError, r"out has elements that share memory \(strides", out=broadcast)
    sliding = np.lib.stride_tricks.as_strided(zeros(99), (2, 4, 3, 6), (96, 24, 4, 4))
    refused(ValueError, r"out has elements that share memory", out=sliding)
    lse = np.lib.stride_tricks.as_strided(zeros(6), (2, 4, 3), (0, 0, 4))
    refused(ValueError, r"lse has elements that share memory", lse=lse, return_lse=True)


def aligned(size: int, *, past: int = 0, writeable: bool = True) -> np.ndarray:
    """Bytes that start `past` bytes after a multiple of 128."""
    memory = np.zeros(size + 256, np.uint8)
    start = -memory.ctypes.data % 128 + past
    found = memory[start : start + size]
    found.flags.writeable = writeable
    return found


def test_outputs_that_are_misaligned() -> None:
    raw = np.zeros(2 * 4 * 3 * 6 * 4 + 1, np.uint8)
    out = raw[1:].view(F).reshape(2, 4, 3, 6)
    refused(ValueError, r"out is not aligned to its item size of 4", out=out)
    raw = np.zeros(2 * 4 * 3 * 4 + 2, np.uint8)
    lse = raw[2:].view(F).reshape(2, 4, 3)
    refused(ValueError, r"lse is not aligned to its item size of 4", lse=lse, return_lse=True)
    packed = np.zeros((2, 4, 3, 6), np.dtype([("x", F), ("tag", np.int8)]))["x"]
    refused(ValueError, r"out is not aligned", out=packed)
    match = r"workspace must be aligned to 128 bytes, its address is 16 past"
    refused(ValueError, match, workspace=aligned(256, past=16))


@pytest.mark.parametrize(
    ("workspace", "error", "message"),
    [
        (aligned(256).view(F), TypeError, r"workspace must be a 1-d uint8 array, got float32"),
        (aligned(256).reshape(2, 128), TypeError, r"1-d uint8 array, got uint8 \(2, 128\)"),
        (aligned(256)[::2], ValueError, r"workspace must be contiguous, got strides \(2,\)"),
        (bytearray(256), TypeError, r"workspace must be .* got builtins\.bytearray"),
        (1024, TypeError, r"workspace must be .* got builtins\.int"),
    ],
)
def test_workspace_of_a_wrong_kind(workspace: Any, error: type[Exception], message: str) -> None:
    refused(error, message, workspace=workspace)


def test_workspace_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host path needs none: the check is met with a plan that says it does."""
    import dataclasses

    plan = cumha.plan(*inputs())
    hungry = dataclasses.replace(plan, choice=dataclasses.replace(plan.choice, workspace_bytes=512))
    with pytest.raises(ValueError, match=r"workspace has 256 bytes, the plan needs 512"):
        hungry.run(*inputs(), workspace=aligned(256))
    hungry.run(*inputs(), workspace=aligned(512))


# --- masks


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (np.ones((3, 5)), TypeError, r"needs dtype bool, got float64: True = attend.*not a mask"),
        (np.ones((3, 5), np.uint8), TypeError, r"needs dtype bool, got uint8"),
        (np.ones((3, 4), bool), ValueError, r"mask array of shape \(3, 4\).*len_q=3, len_k=5"),
        (np.ones((2, 5), bool), ValueError, r"mask array of shape \(2, 5\).*size or 1"),
        (np.ones((2, 2, 3, 5), bool), ValueError, r"mask array of shape .*heads_q=4"),
        (np.ones((1, 1, 1, 1, 5), bool), ValueError, r"shape \[batch, heads_q, len_q, len_k\]"),
        ([[True]], TypeError, r"mask must be .*boolean array, got a list"),
        (True, TypeError, r"mask must be .*builtins\.bool"),
        ("causal", TypeError, r"mask must be .*builtins\.str.*a boolean array"),
        (masks.causal, TypeError, r"mask must be .*use masks\.where\(function\)"),
        (lambda b, h, q, k: k <= q, TypeError, r"use masks\.where\(function\)"),
        (masks.array(np.ones((3, 5), bool)), TypeError, r"masks\.array.*use masks\.dense"),
        (masks.len_k - masks.len_q, TypeError, r"got the int \(len_k - len_q\)"),
        (masks.key_padding(np.ones((2, 4), bool)), ValueError, r"\(2, 4\).*batch=2, len_k=5"),
        (masks.key_padding(np.ones((3, 5), bool)), ValueError, r"\(3, 5\).*batch=2, len_k=5"),
        (
            masks.segments(np.zeros((2, 3), int), np.zeros((2, 3), int)),
            ValueError,
            r"\(2, 3\).*batch=2, len_k=5",
        ),
        (masks.dense(np.ones((0, 5), bool)), ValueError, r"\(0, 5\)"),
    ],
    ids=lambda x: "" if isinstance(x, (type, str)) else type(x).__name__,
)
def test_masks(mask: Any, error: type[Exception], message: str) -> None:
    refused(error, message, mask=mask)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((-2, 0), ValueError, r"window left must be -1 \(open\) or at least 0, got -2"),
        ((0, -2), ValueError, r"window right must be -1 .*got -2"),
        ((1.0, 0), TypeError, r"window left must be an integer, got 1\.0"),
        ((0, np.float32(2)), TypeError, r"window right must be an integer, got"),
        ((True, 0), TypeError, r"window left must be an integer, got True"),
        (("8", 0), TypeError, r"window left must be an integer, got '8'"),
        ((None, 0), TypeError, r"window left must be an integer, got None"),
        ((1, 1, "center"), ValueError, r"bottom_right.*top_left.*got 'center'"),
    ],
)
def test_windows(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        masks.window(*arguments)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda b, h, q, k: k <= q and q < 5, "& | ~"),
        (lambda b, h, q, k: min(k, q) < 5, "masks.minimum"),
        (lambda b, h, q, k: 0 <= k <= q, "chained"),
        (lambda b, h, q, k: k / 2 < q, "//"),
        (lambda b, h, q, k: np.arange(5) <= k, "masks.array"),
        (lambda b, h, q, k: None, "returned None"),
        (lambda b, h, q, k: q - k, "must return a boolean"),
    ],
)
def test_functions_that_leave_the_language(function: Any, message: str) -> None:
    """`test_masks_language` has the whole list."""
    with pytest.raises(TypeError) as error:
        masks.where(function)
    assert message in str(error.value)


# --- lengths, scale, splits, names


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([3, -1], ValueError, r"key_lengths\[1\] = -1 is outside 0…5"),
        ([6, 3], ValueError, r"key_lengths\[0\] = 6 is outside 0…5"),
        (np.array([2**63], np.uint64).repeat(2), ValueError, r"= 9223372036854775808 is outside"),
        ([1.0, 2.0], TypeError, r"key_lengths must hold integers, got \[1\.0, 2\.0\]"),
        (np.array([1.0, 2.0]), TypeError, r"key_lengths must hold integers"),
        ([True, False], TypeError, r"key_lengths must hold integers, got \[True, False\]"),
        (np.array([True, False]), TypeError, r"key_lengths must hold integers"),
        (["1", "2"], TypeError, r"key_lengths must hold integers"),
        (np.ma.masked_array([1, 2]), TypeError, r"key_lengths must hold integers"),
        ([1, 2, 3], ValueError, r"shape \[batch\] = \(2,\), got \(3,\)"),
        ([[1, 2]], ValueError, r"shape \[batch\] = \(2,\), got \(1, 2\)"),
        (3, ValueError, r"shape \[batch\] = \(2,\), got \(\)"),
        ([], ValueError, r"shape \[batch\] = \(2,\), got \(0,\)"),
    ],
    ids=str,
)
def test_key_lengths(lengths: Any, error: type[Exception], message: str) -> None:
    refused(error, message, key_lengths=lengths)


def test_ragged_key_lengths_are_refused_by_name() -> None:
    refused(TypeError, "key_lengths must hold integers", key_lengths=[[1], [2, 3]])


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (float("nan"), ValueError, r"scale must be finite, got nan"),
        (float("inf"), ValueError, r"scale must be finite, got inf"),
        (-np.inf, ValueError, r"scale must be finite, got -inf"),
        (np.float32("inf"), ValueError, r"scale must be finite, got inf"),
        (np.array(0.5), TypeError, r"scale must be a real number, got numpy\.ndarray"),
        (np.array([0.5]), TypeError, r"scale must be a real number, got numpy\.ndarray"),
        ([0.5], TypeError, r"scale must be a real number, got a list"),
        ("0.5", TypeError, r"scale must be a real number, got builtins\.str"),
        (True, TypeError, r"scale must be a real number, got builtins\.bool"),
        (1j, TypeError, r"scale must be a real number, got builtins\.complex"),
    ],
    ids=repr,
)
def test_scale(scale: Any, error: type[Exception], message: str) -> None:
    refused(error, message, scale=scale)


def test_scale_that_no_float_holds() -> None:
    refused(ValueError, r"scale must be finite", scale=10**400)


@pytest.mark.parametrize("name", ["splits", "keys_per_split"])
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, r"{name} must be at least 1, got 0"),
        (-3, ValueError, r"{name} must be at least 1, got -3"),
        (2.0, TypeError, r"{name} must be an integer, got 2\.0"),
        (True, TypeError, r"{name} must be an integer, got True"),
        ("2", TypeError, r"{name} must be an integer, got '2'"),
        (np.array(2), TypeError, r"{name} must be an integer, got array\(2\)"),
    ],
    ids=str,
)
def test_splits(name: str, value: Any, error: type[Exception], message: str) -> None:
    refused(error, message.format(name=name), **{name: value})


def test_both_kinds_of_splits() -> None:
    match = r"splits=2 and keys_per_split=64.*leave the other out"
    refused(ValueError, match, splits=2, keys_per_split=64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "BHDL"}, r"unknown layout 'BHDL': use one of BHLD, BLHD"),
        ({"layout": "bhld"}, r"unknown layout 'bhld'"),
        ({"layout": None}, r"unknown layout None"),
        ({"path": "fast"}, r"unknown path 'fast': use one of 'gemv', 'tiled', 'naive', 'host'"),
        ({"path": 1}, r"unknown path 1: use one of"),
        ({"backend": "gpu"}, r"unknown backend 'gpu': use one of 'cuda', 'host', 'emulate'"),
        ({"split_by": "rows"}, r"unknown split_by 'rows': use one of 'tiles', 'length'"),
        ({"split_by": None}, r"unknown split_by None"),
    ],
    ids=str,
)
def test_unknown_names(options: dict[str, Any], message: str) -> None:
    refused(ValueError, message, **options)


@pytest.mark.parametrize("layout", [["BHLD"], np.array(["BHLD", "BLHD"])], ids=["list", "array"])
def test_a_layout_that_is_no_name(layout: Any) -> None:
    refused(ValueError, "unknown layout", layout=layout)


@pytest.mark.parametrize("name", ["dropout", "is_causal", "attn_mask", "stream"])
def test_unknown_options(name: str) -> None:
    refused(TypeError, rf"unexpected keyword argument '{name}'", **{name: 1})


def test_options_by_position() -> None:
    for call in CALLS:
        with pytest.raises(TypeError, match="positional"):
            call(*inputs(), None)


@pytest.mark.parametrize("flag", ["causal", "return_lse"])
@pytest.mark.parametrize("value", [1, None, "yes", np.ones(3, bool)], ids=repr)
def test_flags(flag: str, value: Any) -> None:
    if flag == "return_lse":
        with pytest.raises(TypeError, match=r"return_lse must be True or False, got"):
            cumha.attention(*inputs(), return_lse=value)
    else:
        refused(TypeError, r"causal must be True or False, got", causal=value)


def test_a_backend_that_numpy_arrays_cannot_take() -> None:
    match = r"(?s)naive: .*host: it runs on backend 'host'"
    refused(cumha.UnsupportedError, match, backend="cuda")


def test_a_path_that_numpy_arrays_cannot_take() -> None:
    refused(cumha.UnsupportedError, r"naive: it takes CuPy arrays.*cupy\.asarray", path="naive")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"key_offset": -1}, ValueError, r"key_offset must be at least 0, got -1"),
        ({"key_offset": 1.0}, TypeError, r"key_offset must be an integer, got 1\.0"),
        ({"total_keys": 4}, ValueError, r"keys 0…5 of this call pass total_keys 4"),
        ({"key_offset": 3, "total_keys": 7}, ValueError, r"keys 3…8 .*key_offset \+ len_k <="),
        ({"total_keys": "5"}, TypeError, r"total_keys must be an integer"),
        ({"key_offset": 5, "key_lengths": [11, 0]}, ValueError, r"= 11 is outside 0…10"),
        ({"key_offset": 5, "mask": np.ones((3, 5), bool)}, ValueError, r"\(3, 5\).*len_k=10"),
    ],
    ids=str,
)
def test_slices(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cumha.partial_attention(*inputs(), **options)


# --- CuPy or NVRTC missing


def test_without_cupy_numpy_works_and_kernels_say_what_is_missing() -> None:
    code = """
import sys
sys.modules["cupy"] = None      # an import of it fails
import numpy as np, cumha
from cumha import compile, device
x = np.ones((1, 1, 2, 4), np.float32)
assert (cumha.attention(x, x, x) == 1).all()
for call in (device.Device.current, compile.nvrtc_version, compile.supported_architectures,
             lambda: compile.build(compile.KernelSpec("naive", "sm_80"))):
    try:
        call()
    except RuntimeError as error:
        assert "CuPy cannot be imported" in str(error), error
        assert "cumha[cuda13]" in str(error) and "cumha[cuda12]" in str(error), error
    else:
        raise SystemExit(f"{call} did not fail")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_without_nvrtc_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from cumha import compile

    def missing() -> None:
        raise RuntimeError("libnvrtc.so.13 not found")

    nvrtc = types.SimpleNamespace(getVersion=missing)
    fake = types.SimpleNamespace(cuda=types.SimpleNamespace(nvrtc=nvrtc))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    with pytest.raises(RuntimeError, match=r"libnvrtc\.so\.13.*nvidia-cuda-nvrtc.*cumha\[cuda13\]"):
        compile._nvrtc.__wrapped__()
