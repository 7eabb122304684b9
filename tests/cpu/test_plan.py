"""Plans on made-up devices: what is chosen, what is said about it, and what it depends on."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cumha
from cumha import UnsupportedError, masks
from cumha.device import Device
from cumha.masks import Expr
from cumha.paths import PATHS, Request
from cumha.plan import Choice, decide, explain, kernel_spec, visible_pairs
from cumha.problem import Problem, describe

H200 = Device.named("h200")
SMALL = Device(
    name="Made up",
    compute_capability=(7, 5),
    sm_count=2,
    shared_memory_optin=65536,
    shared_memory_per_sm=65536,
    max_threads_per_sm=512,
)


def zeros(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    """No memory: one element everywhere."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def described(
    batch: int = 2,
    heads: tuple[int, int] = (8, 2),
    len_q: int = 16,
    len_k: int = 64,
    dim: tuple[int, int] = (64, 64),
    dtype: Any = np.float16,
    **options: Any,
) -> tuple[Problem, Expr | None]:
    """A problem of GPU arrays that are not there."""
    q = zeros(batch, heads[0], len_q, dim[0], dtype=dtype)
    k = zeros(batch, heads[1], len_k, dim[0], dtype=dtype)
    problem, arrays = describe(q, k, zeros(*k.shape[:3], dim[1], dtype=dtype), **options)
    return dataclasses.replace(problem, library="cupy", device=0), arrays.mask


def chosen(device: Device = H200, **options: Any) -> Choice:
    return decide(described(**options)[0], Request(), device)


def spec_of(**options: Any) -> Any:
    problem, mask = described(**options)
    return kernel_spec(decide(problem, Request(), H200), problem, mask, arch="sm_90a")


def host_arrays(len_q: int = 6, len_k: int = 9, **options: Any) -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(len_q * 1000 + len_k)
    shapes = ((2, 4, len_q, 8), (2, 2, len_k, 8), (2, 2, len_k, 5))
    return tuple(generator.standard_normal(s).astype(np.float32) for s in shapes)


# --- the choice


@pytest.mark.parametrize(
    ("batch", "heads", "len_q", "grid"),
    [(1, 1, 1, 1), (1, 4, 1, 1), (1, 5, 1, 2), (2, 8, 16, 64), (0, 8, 16, 0), (3, 7000, 2, 10500)],
)
def test_naive_takes_four_rows_a_block(batch: int, heads: int, len_q: int, grid: int) -> None:
    choice = chosen(batch=batch, heads=(heads, heads), len_q=len_q)
    assert (choice.path, choice.backend) == ("naive", "cuda")
    assert (choice.grid, choice.threads, choice.tile_q) == (grid, 128, 4)
    assert choice.workspace_bytes == 0


def test_a_grid_never_passes_the_limit_of_cuda() -> None:
    choice = chosen(batch=2**20, heads=(2**10, 1), len_q=2**10)
    assert choice.grid == 2**31 - 1


def test_numpy_arrays_take_the_host_path() -> None:
    plan = cumha.plan(*host_arrays())
    assert (plan.path, plan.choice.backend, plan.choice.device) == ("host", "host", None)
    assert plan.choice.grid == 0
    assert plan.workspace_bytes == 0


def test_a_choice_is_a_frozen_value_and_repeats() -> None:
    problem, _ = described()
    again, _ = described()
    assert problem == again and hash(problem) == hash(again)
    decide.cache_clear()
    first = decide(problem, Request(), H200)
    decide.cache_clear()
    assert decide(again, Request(), H200) == first
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.grid = 1  # type: ignore[misc]
    assert "naive" in repr(first) and "H200" in repr(first)


def test_decisions_are_remembered_within_bounds() -> None:
    decide.cache_clear()
    problem, _ = described()
    for len_k in range(2000):
        decide(dataclasses.replace(problem, len_k=len_k, total_keys=len_k), Request(), H200)
    info = decide.cache_info()
    assert info.maxsize is not None and info.currsize == info.maxsize <= 4096
    assert decide(problem, Request(), H200) is decide(problem, Request(), H200)


# --- requests


@pytest.mark.parametrize(
    ("request_", "shown"),
    [
        ({}, "1"),
        ({"splits": 1}, "1"),
        ({"splits": 4}, "up to 4, equal tiles"),
        ({"splits": 4, "split_by": "length"}, "up to 4, equal length"),
        ({"keys_per_split": 64}, "every 64 keys"),
    ],
)
def test_splits_on_the_host(request_: dict[str, Any], shown: str) -> None:
    plan = cumha.plan(*host_arrays(), **request_)
    assert plan.choice.splits == request_.get("splits", 1)
    assert plan.choice.keys_per_split == request_.get("keys_per_split")
    assert f"  splits      {shown}\n" in plan.explain()
    reference = cumha.reference.attention(*host_arrays())
    np.testing.assert_allclose(plan.run(*host_arrays()), reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"path": "host"}, {"backend": "host"}, {"path": "host", "backend": "host"}, {"splits": 1}],
    ids=str,
)
def test_requests_that_name_what_would_be_taken_anyway(options: dict[str, Any]) -> None:
    assert cumha.plan(*host_arrays(), **options).path == "host"


def test_requests_of_a_gpu_path() -> None:
    problem, _ = described()
    for request in (Request(path="naive"), Request(backend="cuda"), Request(splits=1)):
        assert decide(problem, request, H200).path == "naive"


@pytest.mark.parametrize(
    ("request_", "naive", "host"),
    [
        (Request(splits=2), "splits: one warp", "it takes NumPy arrays, got cupy"),
        (Request(keys_per_split=64), "keys_per_split: one warp", "it takes NumPy arrays"),
        (Request(path="host"), "path='host' was asked for", "move them with .get()"),
        (Request(backend="host"), "'host' was asked for", "it takes NumPy arrays"),
        (Request(backend="emulate"), "emulation takes NumPy arrays", "'emulate' was asked for"),
    ],
    ids=str,
)
def test_every_path_says_why_it_cannot(request_: Request, naive: str, host: str) -> None:
    problem, _ = described()
    with pytest.raises(UnsupportedError) as refused:
        decide(problem, request_, H200)
    first, *lines = str(refused.value).splitlines()
    assert first == f"no path can run {problem!r}:"
    assert [line.split(":")[0].strip() for line in lines] == [p.name for p in PATHS]
    for line, reason in zip(lines, (naive, host), strict=True):
        assert reason in line


def test_all_reasons_are_listed_not_only_the_first() -> None:
    problem, _ = described(dim=(600, 700))
    with pytest.raises(UnsupportedError) as refused:
        decide(problem, Request(splits=2), H200)
    text = str(refused.value)
    assert "head_dim 600 is above its limit of 512" in text
    assert "head_dim_v 700 is above its limit of 512" in text
    assert "nothing to split" in text


# --- explain


def test_explain_on_a_gpu() -> None:
    problem, mask = described(batch=1, heads=(32, 8), len_q=1, len_k=4096, dim=(128, 128))
    text = explain(decide(problem, Request(), H200), problem, mask)
    lines = text.splitlines()
    assert lines[0] == repr(problem)
    for part in (
        "  path        naive on NVIDIA H200 (sm_90, 132 SMs)",
        "  tile        4 query rows x 1 keys, 4 query heads per KV head",
        "  grid        8 blocks x 128 threads, at most 16 blocks per SM, 0.00 waves",
        "  splits      1",
        "  workspace   0 bytes",
        "  floor       3.5 us of memory traffic at 4.8 TB/s",
    ):
        assert part in lines
    assert "0.0671 GFLOP over 100% of the scores, 16.8 MB" in text  # 4 * 32 * 4096 * 128
    assert "not host    it takes NumPy arrays, got cupy" in text
    assert "none" in lines[1]


def test_explain_on_a_device_of_unknown_bandwidth() -> None:
    problem, mask = described()
    text = explain(decide(problem, Request(), SMALL), problem, mask)
    assert "Made up (sm_75, 2 SMs)" in text
    assert "64 blocks x 128 threads, at most 4 blocks per SM, 8.00 waves" in text
    assert "floor" not in text


def test_explain_on_the_host() -> None:
    plan = cumha.plan(*host_arrays(), causal=True, key_lengths=[9, 3])
    text = plan.explain()
    assert "path        host on the host, NumPy and BLAS" in text
    assert "(k <= (q + (len_k - len_q)))" in text
    assert "key_lengths" in text and "2 query heads per KV head" in text
    assert "not naive   it takes CuPy arrays, got numpy: move them with cupy.asarray" in text
    assert "grid" not in text and "floor" not in text
    assert "host" in repr(plan) and "len_k 9" in repr(plan)


@pytest.mark.parametrize("size", ["batch", "len_q", "len_k"])
def test_explain_of_an_empty_problem(size: str) -> None:
    problem, mask = described(**{size: 0}, causal=True)
    text = explain(decide(problem, Request(), H200), problem, mask)
    assert "0 GFLOP" in text


def test_explain_of_a_partial_call() -> None:
    problem, mask = described(store_state=True, key_offset=100, total_keys=400, causal=True)
    text = explain(decide(problem, Request(), H200), problem, mask)
    assert "keys 100… of 400" in text
    assert "100% of the scores" in text  # rows stand at 384…399, these keys before them
    options = {"store_state": True, "key_offset": 0, "total_keys": 400}
    before, mask = described(**options, mask=masks.window(4, 0))  # sees keys from 380 on
    assert visible_pairs(before, mask) == 0


@pytest.mark.parametrize(
    ("mask", "share"),
    [
        (None, 1.0),
        (masks.causal(), 0.53),
        (masks.window(63, 0), 0.12),
        (masks.window(63, 0) & masks.where(lambda b, h, q, k: k < 0), 0.0),
    ],
    ids=repr,
)
def test_the_visible_share_is_about_right(mask: Expr | None, share: float) -> None:
    """Of 1024 x 1024: ranges of whole blocks of 64 rows, hence a little above the exact share."""
    problem, expr = described(batch=1, heads=(2, 2), len_q=1024, len_k=1024, mask=mask)
    found = visible_pairs(problem, expr) / (problem.rows * 1024)
    assert found == pytest.approx(share, abs=0.02)


# --- kernels: by structure alone


@pytest.mark.parametrize(
    "change",
    [
        {"len_k": 65},
        {"len_q": 17},
        {"batch": 5},
        {"heads": (16, 16)},
        {"scale": 0.1},
        {"layout": "BHLD"},
        {"mask": masks.window(77, 3)},
    ],
    ids=str,
)
def test_lengths_counts_and_numbers_need_no_new_kernel(change: dict[str, Any]) -> None:
    options = {"mask": masks.window(5, 0)}
    assert spec_of(**{**options, **change}) == spec_of(**options)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": np.float32},
        {"dim": (128, 64)},
        {"dim": (64, 32)},
        {"return_lse": True},
        {"store_state": True},
        {"key_lengths": [3, 4]},
        {"mask": None},
        {"mask": masks.window(5, -1)},
        {"causal": True},
        {"len_k": 2**28 + 1},
    ],
    ids=str,
)
def test_structure_needs_a_kernel_of_its_own(change: dict[str, Any]) -> None:
    options = {"mask": masks.window(5, 0)}
    assert spec_of(**{**options, **change}) != spec_of(**options)


def test_a_decode_step_needs_no_new_kernel() -> None:
    """One token more: another plan, the same kernel, object for object."""
    steps = {id(spec_of(len_q=1, len_k=n, causal=True)) for n in range(100, 200)}
    assert len(steps) == 1
    assert spec_of(len_q=1, len_k=100, causal=True) == spec_of(len_q=1, len_k=100)
    assert "k <= " not in spec_of(len_q=1, causal=True).mask_source


def test_the_state_of_a_partial_call_has_no_lse() -> None:
    defines = dict(spec_of(store_state=True, return_lse=True).defines)
    assert (defines["CUMHA_STORE_STATE"], defines["CUMHA_STORE_LSE"]) == ("1", "0")


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        ("float16", "__half"),
        ("bfloat16", "__nv_bfloat16"),
        ("float32", "float"),
        ("float64", "double"),
    ],
)
def test_defines(dtype: str, text: str) -> None:
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    keep = np.ones((2, 64), bool)
    spec = spec_of(
        dtype=kind, dim=(96, 40), mask=masks.key_padding(keep) & masks.window(1, 2), return_lse=True
    )
    assert dict(spec.defines) == {
        "CUMHA_ELEMENT": text,
        "CUMHA_HEAD_DIM": "96",
        "CUMHA_HEAD_DIM_V": "40",
        "CUMHA_WIDE_INDEX": "0",
        "CUMHA_KEY_LENGTH_BITS": "0",
        "CUMHA_STORE_STATE": "0",
        "CUMHA_STORE_LSE": "1",
        "CUMHA_MASK_NUMBERS": "2",
        "CUMHA_MASK_ARRAYS": "1",
        "CUMHA_PARAMS_BYTES": str(9 * 8 + 5 * 32 + 9 * 8 + 2 * 8 + 72),
    }
    assert spec.path == "naive" and spec.arch == "sm_90a" and spec.build == "release"


# --- running a plan again


def test_run_takes_new_arrays_lengths_and_mask_values() -> None:
    q, k, v = host_arrays()
    keep = np.arange(9)[None].repeat(2, 0) < 7
    plan = cumha.plan(
        q, k, v, mask=masks.window(3, 0) & masks.key_padding(keep), key_lengths=[9, 4],
        return_lse=True,
    )  # fmt: skip
    for left, lengths, few in ((3, [9, 4], 7), (1, [2, 9], 5), (8, [0, 1], 9)):
        mask = masks.window(left, 0) & masks.key_padding(np.arange(9)[None].repeat(2, 0) < few)
        arrays = [x[..., ::-1, :].copy() * left for x in (q, k, v)]
        out, lse = plan.run(*arrays, mask=mask, key_lengths=lengths)
        options = {"mask": mask, "key_lengths": lengths, "return_lse": True}
        wanted, wanted_lse = cumha.reference.attention(*arrays, **options)
        np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(lse, wanted_lse, rtol=1e-4, atol=1e-4)


def test_run_uses_what_the_plan_was_given_where_nothing_is_new() -> None:
    q, k, v = host_arrays()
    out, lse = np.zeros((2, 4, 6, 5), np.float32), np.zeros((2, 4, 6), np.float32)
    plan = cumha.plan(
        q, k, v, causal=True, key_lengths=[9, 4], out=out, lse=lse, return_lse=True, scale=0.5
    )
    result = plan.run(q, k, v)
    assert result[0] is out and result[1] is lse
    other = np.empty_like(out)
    assert plan.run(q, k, v, out=other)[0] is other
    wanted = cumha.reference.attention(q, k, v, causal=True, key_lengths=[9, 4], scale=0.5)
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(other, out)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda q, k, v: (q, k[:, :, :8], v[:, :, :8]), {"key_lengths": [8, 4]}, "len_k is 8.* 9"),
        (lambda q, k, v: (q[:1], k[:1], v[:1]), {"key_lengths": [9]}, "batch is 1, planned for 2"),
        (lambda q, k, v: (q, k, v[..., :4]), {}, "head_dim_v is 4, planned for 5"),
        (lambda q, k, v: (q[:, :2], k, v), {}, "heads_q is 2, planned for 4"),
        (
            lambda q, k, v: [x.astype(np.float16) for x in (q, k, v)],
            {},
            "dtype is 'float16', planned for 'float32'",
        ),
        (lambda q, k, v: (q, k[:, :, ::-1], v), {}, r"k_strides is \(144, 72, -8, 1\), "),
        (lambda q, k, v: (q, k, v), {"mask": masks.window(2, -1)}, "mask is '.*', planned for '"),
        (lambda q, k, v: (q, k, v), {"mask": np.ones((6, 9), bool)}, "mask is '.*', planned for '"),
    ],
    ids=["len_k", "batch", "head_dim_v", "heads_q", "dtype", "strides", "mask", "array mask"],
)
def test_run_refuses_another_structure(
    change: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    q, k, v = host_arrays()
    plan = cumha.plan(q, k, v, mask=masks.window(2, 1), key_lengths=[9, 4])
    match = f"this plan is for Problem.*{message}.*; make a new plan"
    with pytest.raises(ValueError, match=match):
        plan.run(*change(q, k, v), **options)


def test_run_checks_values_as_the_first_call_did() -> None:
    q, k, v = host_arrays()
    plan = cumha.plan(q, k, v, key_lengths=[9, 4])
    with pytest.raises(ValueError, match=r"key_lengths\[0\] = 10 is outside"):
        plan.run(q, k, v, key_lengths=[10, 4])
    with pytest.raises(ValueError, match="out shares memory with q"):
        plan.run(q, k, v, out=q[..., :5])
    with pytest.raises(ValueError, match=r"key_lengths is .*, planned for None"):
        cumha.plan(q, k, v).run(q, k, v, key_lengths=[9, 4])


def test_run_needs_the_alignment_it_was_planned_for_or_a_better_one() -> None:
    q, k, v = host_arrays()

    def shifted(x: np.ndarray, past: int) -> np.ndarray:
        """A copy that starts `past` bytes after a multiple of 16."""
        memory = np.zeros(x.nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 16 + past
        found = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
        found[...] = x
        return found

    aligned = [shifted(x, 0) for x in (q, k, v)]
    loose = [aligned[0], shifted(k, 4), aligned[2]]
    wanted = cumha.plan(*loose).run(*aligned)
    with pytest.raises(ValueError, match="rows allow accesses of 4 bytes, planned for 16"):
        cumha.plan(*aligned).run(*loose)
    np.testing.assert_array_equal(wanted, cumha.attention(*aligned))


def test_a_plan_keeps_its_arrays() -> None:
    import gc
    import weakref

    q, k, v = host_arrays()
    plan = cumha.plan(q, k, v)
    new = [x.copy() for x in (q, k, v)]
    seen = [weakref.ref(x) for x in new]
    plan.run(*new)
    del new
    gc.collect()
    assert all(ref() is not None for ref in seen)
    plan.run(q, k, v)
    gc.collect()
    assert all(ref() is None for ref in seen)


# --- time


def test_planning_takes_little_time() -> None:
    """A decode step: a new length, hence a new plan. Best of many, the machine may be busy."""
    q = np.zeros((1, 32, 1, 128), np.float16)
    cache = np.zeros((1, 8, 600, 128), np.float16)
    seconds = []
    for n in range(100, 600):
        k = cache[:, :, :n]
        start = time.perf_counter()
        cumha.plan(q, k, k, causal=True)
        seconds.append(time.perf_counter() - start)
    assert sorted(seconds)[len(seconds) // 4] < 1e-3


def test_planning_imports_nothing_that_a_numpy_user_lacks() -> None:
    before = set(sys.modules)
    cumha.plan(*host_arrays(), causal=True).explain()
    assert not {"cupy", "scipy"} & (set(sys.modules) - before)
