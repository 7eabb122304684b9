"""Plans on made-up devices: what is chosen, what is said about it, and what it depends on."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumha
from cumha import UnsupportedError, emulate, masks, tuning
from cumha.device import Device
from cumha.masks import Expr
from cumha.paths import PATHS, Request
from cumha.plan import (
    MERGE_SECONDS,
    Choice,
    Pace,
    choose_splits,
    decide,
    explain,
    kernel_spec,
    reduce_step,
    visible_pairs,
    workspace_bytes,
    workspace_parts,
)
from cumha.problem import Problem, describe
from cumha.tilings import TILED_SETTINGS, GemvTiling, TiledTiling, choose_tiled, tile_bytes
from cumha.tuning import Tuning

H200 = Device.named("h200")
T4 = Device.named("t4")
NAIVE = Request(path="naive")
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


def chosen(device: Device = H200, request: Request | None = None, **options: Any) -> Choice:
    return decide(described(**options)[0], request or Request(), device)


def spec_of(request: Request | None = None, **options: Any) -> Any:
    problem, mask = described(**options)
    choice = decide(problem, request or Request(), H200)
    return kernel_spec(choice, problem, mask, arch="sm_90a")


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
    choice = chosen(request=NAIVE, batch=batch, heads=(heads, heads), len_q=len_q)
    assert (choice.path, choice.backend) == ("naive", "cuda")
    assert (choice.grid, choice.threads, choice.tile_q) == (grid, 128, 4)
    assert choice.workspace_bytes == 0


def test_a_grid_of_naive_never_passes_the_limit_of_cuda() -> None:
    choice = chosen(request=NAIVE, batch=2**20, heads=(2**10, 1), len_q=2**10)
    assert choice.grid == 2**31 - 1


@pytest.mark.parametrize(
    ("len_q", "path"), [(0, "gemv"), (1, "gemv"), (4, "gemv"), (5, "tiled"), (4096, "tiled")]
)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("dim", [(1, 1), (64, 256), (256, 40), (256, 256)])
def test_few_rows_take_gemv_and_more_take_tiled(
    len_q: int, path: str, dtype: Any, dim: tuple[int, int]
) -> None:
    choice = chosen(len_q=len_q, dtype=dtype, dim=dim)
    assert (choice.path, choice.backend, choice.device) == (path, "cuda", H200)


@pytest.mark.parametrize("len_q", [1, 16])
@pytest.mark.parametrize(
    "change",
    [{"dtype": np.float64}, {"dim": (257, 64)}, {"dim": (64, 257)}, {"dim": (512, 512)}],
    ids=str,
)
def test_naive_takes_float64_and_large_heads(len_q: int, change: dict[str, Any]) -> None:
    choice = chosen(len_q=len_q, **change)
    assert choice.path == "naive"
    rejected = {name: "; ".join(why) for name, why in choice.rejected}
    reason = "dtype float64 is not one of" if "dtype" in change else "above its limit of 256"
    assert reason in rejected["gemv"] and reason in rejected["tiled"]


def test_gemv_steps_in_where_shared_memory_is_short() -> None:
    """A block of `tiled` for float32 heads of 256 needs more than a T4 has."""
    choice = chosen(device=T4, dtype=np.float32, dim=(256, 256))
    assert choice.path == "gemv"
    rejected = dict(choice.rejected)
    assert rejected["tiled"] == (
        "a block needs 84480 bytes of shared memory, the device has 65536",
    )
    assert chosen(device=T4, dtype=np.float32, dim=(128, 128)).path == "tiled"
    # 32 packed rows of one query per sequence, splits and all
    options: dict[str, Any] = {"heads": (32, 1), "len_q": 1, "dtype": np.float32, "batch": 1}
    options |= {"dim": (256, 256), "len_k": 4096}
    assert chosen(H200, **options).path == "tiled"
    assert chosen(T4, **options).path == "gemv"
    assert chosen(T4, Request(splits=4), **options).splits == 4
    # a setting that only `gemv` has is no reason for `naive` either
    few_slots = Request(tuning=Tuning(ring_slots=3))
    assert chosen(H200, few_slots, dim=(256, 256)).path == "gemv"


def test_paths_that_fit_say_why_others_are_faster() -> None:
    choice = chosen(H200, len_q=100)
    rejected = dict(choice.rejected)
    assert choice.path == "tiled"
    assert "are above 16 rows" in rejected["gemv"][0]
    assert "simple rather than fast" in rejected["naive"][0]
    choice = chosen(H200, Request(path="gemv"), len_q=100)
    assert choice.path == "gemv" and "gemv" not in dict(choice.rejected)
    assert dict(choice.rejected)["naive"] == ("path='gemv' was asked for",)


@pytest.mark.parametrize(
    ("device", "dtype", "dim", "len_q", "tile"),
    [
        (H200, np.float16, 128, 4096, (64, 64)),
        (H200, np.float16, 256, 4096, (32, 64)),  # 64 rows x 256 columns are too many registers
        (H200, np.float16, 128, 8, (32, 64)),  # 32 packed rows
        (H200, np.float16, 128, 9, (64, 64)),  # 36: they would not fit 32
        (H200, np.float16, 128, 1, (16, 64)),
        (H200, np.float32, 128, 4096, (64, 64)),
        (H200, np.float32, 256, 4096, (32, 64)),
        (T4, np.float16, 64, 4096, (64, 64)),
        (T4, np.float16, 128, 4096, (32, 64)),  # 64 rows would need 82944 bytes, a T4 has 65536
        (T4, np.float32, 64, 4096, (32, 64)),
        (T4, np.float16, 256, 4096, (16, 32)),  # 16 rows x 64 keys would need 87040
        (T4, np.float32, 128, 4096, (32, 32)),
        (T4, np.float32, 256, 4096, None),
    ],
)
def test_rows_of_tiled_by_registers_and_shared_memory(
    device: Device, dtype: Any, dim: int, len_q: int, tile: tuple[int, int] | None
) -> None:
    problem, _ = described(dtype=dtype, dim=(dim, dim), len_q=len_q)
    if tile is None:
        assert choose_tiled(problem, Tuning(), device) is None
        assert TiledTiling(16, 32, 16).shared_bytes(problem) > device.shared_memory_optin
        return
    rows, keys = tile
    assert choose_tiled(problem, Tuning(), device) == TiledTiling(rows, keys, 16, 2, 16)
    choice = decide(problem, Request(path="tiled"), device)
    assert (choice.tile_q, choice.tile_k, choice.threads) == (rows, keys, 128)
    assert choice.shared_bytes == TiledTiling(rows, keys, 16).shared_bytes(problem)
    assert choice.shared_bytes <= device.shared_memory_optin
    blocks = problem.batch * problem.heads_kv * -(-problem.group * len_q // rows)
    assert choice.grid == blocks * choice.splits


@pytest.mark.parametrize(
    ("dtype", "dim", "tiling", "size"),
    [
        # K and V slots of 64 keys, K padded by 16 bytes; q and weights of float
        (np.float16, (64, 64), TiledTiling(64, 64, 8), 64 * (72 + 64) * 2 + 64 * (64 + 64) * 4),
        (np.float16, (33, 33), TiledTiling(16, 64, 8), 64 * (48 + 64) * 2 + 16 * (40 + 64) * 4),
        (np.float32, (128, 1), TiledTiling(16, 64, 8), 64 * (132 + 8) * 4 + 16 * (128 + 64) * 4),
        # two slots of each
        (np.float16, (64, 32), TiledTiling(64, 96, 8, 4), 4 * 96 * (72 + 32) + 64 * (64 + 96) * 4),
        # one slot, for the larger of the two
        (np.float16, (64, 32), TiledTiling(32, 64, 8, 1), 64 * 72 * 2 + 32 * (64 + 64) * 4),
        (np.float32, (8, 65), TiledTiling(32, 64, 8, 1), 64 * 96 * 4 + 32 * (8 + 64) * 4),
        # without padding between K rows
        (np.float16, (64, 64), TiledTiling(64, 64, 8, 2, 0), 64 * 128 * 2 + 64 * (64 + 64) * 4),
        # 32 threads a row: V rows of 64, 128, 32 and 32 columns
        (np.float16, (64, 64), TiledTiling(4, 64, 32), 64 * (72 + 64) * 2 + 4 * (64 + 64) * 4),
        (np.float16, (64, 65), TiledTiling(4, 64, 32), 64 * (72 + 128) * 2 + 4 * (64 + 64) * 4),
        (np.float16, (64, 20), TiledTiling(4, 64, 32), 64 * (72 + 32) * 2 + 4 * (64 + 64) * 4),
        (np.float16, (64, 4), TiledTiling(8, 128, 32), 128 * (72 + 32) * 2 + 8 * (64 + 128) * 4),
    ],
    ids=str,
)
def test_shared_memory_of_tiled(
    dtype: Any, dim: tuple[int, int], tiling: TiledTiling, size: int
) -> None:
    problem, _ = described(dtype=dtype, dim=dim)
    assert tiling.shared_bytes(problem) == size


def test_two_blocks_of_float32_heads_of_128_share_a_multiprocessor() -> None:
    """With 1 KB that each block costs beside its own; a third one would need less than it is."""
    problem, _ = described(dtype=np.float32, dim=(128, 128), len_q=1000)
    need = decide(problem, Request(path="tiled"), H200).shared_bytes + 1024
    assert H200.shared_memory_per_sm // need == 2


@pytest.mark.parametrize(
    ("dim", "columns", "value_dim"),
    [(64, 8, 64), (65, 8, 96), (33, 8, 64), (16, 8, 16), (9, 8, 16), (8, 8, 8), (1, 8, 8),
     (128, 32, 128), (65, 32, 128), (64, 32, 64), (33, 32, 64), (32, 32, 32), (1, 32, 32),
     (129, 32, 256), (256, 32, 256)],
)  # fmt: skip
def test_threads_of_a_row_have_output_columns_to_compute(
    dim: int, columns: int, value_dim: int
) -> None:
    """Never half of them idle where each could have one."""
    problem, _ = described(dim=(64, dim))
    assert TiledTiling(64, 64, columns).value_dim(problem) == value_dim


@pytest.mark.parametrize(
    ("dim", "columns"),
    [(256, 16), (129, 8), (128, 16), (97, 16), (96, 8), (65, 8), (64, 16), (33, 16),
     (32, 8),  # 16 threads would have 2 neighbouring columns each, not 4
     (16, 8), (1, 8)],
)  # fmt: skip
def test_sixteen_threads_share_a_row_where_they_have_as_much_to_do(dim: int, columns: int) -> None:
    assert tuned(dim=(64, dim)).columns == columns


@pytest.mark.parametrize(
    ("dtype", "dim", "padding"),
    [(np.float16, 64, 16), (np.float16, 128, 16), (np.float16, 56, 0), (np.float16, 57, 16),
     (np.float16, 40, 0), (np.float16, 1, 0), (np.float32, 64, 16), (np.float32, 36, 0),
     (np.float32, 33, 0), (np.float32, 32, 16)],
)  # fmt: skip
def test_rows_of_k_are_an_odd_number_of_16_bytes_apart(dtype: Any, dim: int, padding: int) -> None:
    assert tuned(dim=(dim, 64), dtype=dtype).padding == padding
    units = -(-dim * np.dtype(dtype).itemsize // 16) + padding // 16
    assert units % 2 == 1


def tuned(device: Device = H200, settings: dict[str, int] | None = None, **options: Any) -> Choice:
    """A plan of `tiled` with settings by hand."""
    request = Request(path="tiled", tuning=Tuning(**(settings or {})))
    return decide(described(**options)[0], request, device)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (64, 64, 16, 2, 16)),
        ({"tile_keys": 96}, (64, 96, 16, 2, 16)),
        ({"tile_keys": 128, "ring_slots": 4, "padding": 0}, (64, 128, 16, 4, 0)),
        ({"block_rows": 16, "ring_slots": 1}, (16, 64, 16, 1, 16)),
        ({"columns": 8}, (64, 64, 8, 2, 16)),
        ({"columns": 32}, (4, 64, 32, 2, 16)),
        ({"columns": 32, "block_rows": 16}, (16, 64, 32, 2, 16)),
    ],
    ids=str,
)
def test_settings_of_tiled_are_taken_and_change_the_kernel(
    settings: dict[str, int], expected: tuple[int, ...]
) -> None:
    choice = tuned(settings=settings, batch=1, len_q=300, len_k=1000)
    assert TiledTiling(*expected).shared_bytes(described()[0]) == choice.shared_bytes
    found = (choice.tile_q, choice.tile_k, choice.columns, choice.ring_slots, choice.padding)
    assert found == expected
    assert choice.grid == 2 * -(-4 * 300 // expected[0]) * choice.splits
    problem, mask = described()
    defines = dict(kernel_spec(choice, problem, mask, arch="sm_90a").defines)
    names = ("BLOCK_ROWS", "TILE_KEYS", "COLUMNS", "RING_SLOTS", "PADDING")
    assert tuple(int(defines[f"CUMHA_{name}"]) for name in names) == expected


def test_splits_are_counted_in_the_tile_that_was_asked_for() -> None:
    for keys, tiles in ((64, 10), (96, 7), (128, 5)):
        request = Request(splits=100, tuning=Tuning(tile_keys=keys), path="tiled")
        assert decide(described(batch=1, len_k=640)[0], request, H200).splits == tiles


def test_fewer_rows_make_room_for_a_larger_tile() -> None:
    """float32 heads of 128: K and V of 64 keys are 67584 bytes, a row with 64 weights 800."""
    wide: dict[str, Any] = {"dtype": np.float32, "dim": (128, 128), "len_q": 1000}
    assert tuned(**wide, settings={"tile_keys": 128}).tile_q == 64
    assert tuned(**wide, settings={"tile_keys": 64, "ring_slots": 4}).tile_q == 64
    assert tuned(**wide, settings={"tile_keys": 96, "ring_slots": 4}).tile_q == 32
    assert tuned(T4, **wide, settings={"ring_slots": 1}).tile_q == 32


@pytest.mark.parametrize(
    ("device", "settings", "options", "reason"),
    [
        (T4, {"tile_keys": 128}, {"dim": (128, 128)},
         "a block needs 83968 bytes of shared memory, the device has 65536"),
        (H200, {"tile_keys": 128, "ring_slots": 4}, {"dim": (128, 128), "dtype": np.float32},
         "a block needs 282624 bytes of shared memory, the device has 232448"),
        (T4, {"block_rows": 64}, {"dim": (128, 128), "dtype": np.float32},
         "a block needs 74240 bytes of shared memory, the device has 65536"),
        (H200, {"block_rows": 64}, {"dim": (64, 256)},
         "block_rows=64 gives a thread 128 outputs of head_dim_v 256, its registers hold 64"),
        (H200, {"block_rows": 4}, {},
         "block_rows=4 is not one of 16, 32, 64 that go with columns=16"),
        (H200, {"block_rows": 64, "columns": 32}, {},
         "block_rows=64 is not one of 4, 8, 16 that go with columns=32"),
        (H200, {"block_rows": 48}, {}, "block_rows=48 is not one of its values 4, 8, 16, 32, 64"),
        (H200, {"tile_keys": 48}, {}, "tile_keys=48 is not one of its values 32, 64, 96, 128"),
        (H200, {"columns": 0}, {}, "columns=0 is not one of its values 8, 16, 32"),
        (H200, {"columns": 256}, {}, "columns=256 is not one of its values 8, 16, 32"),
        (H200, {"ring_slots": 3}, {}, "ring_slots=3 is not one of its values 1, 2, 4"),
        (H200, {"padding": 8}, {}, "padding=8 is not one of its values 0, 16"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_tiled_cannot_have_are_refused(
    device: Device, settings: dict[str, int], options: dict[str, Any], reason: str
) -> None:
    """By hand or not, all candidates of the planner: the reason is that of the smallest one."""
    with pytest.raises(UnsupportedError) as refused:
        tuned(device, settings, len_q=300, **options)
    (said,) = [x for x in str(refused.value).splitlines() if x.startswith("  tiled: ")]
    assert said == f"  tiled: {reason}"


@pytest.mark.parametrize("name", TILED_SETTINGS)
def test_settings_of_tiled_are_no_settings_of_naive(name: str) -> None:
    request = Request(path="naive", tuning=Tuning(**{name: TILED_SETTINGS[name][0]}))
    with pytest.raises(UnsupportedError, match=f"naive: it has no setting {name}"):
        decide(described()[0], request, H200)


def ids(dtype: Any) -> Any:
    return masks.segments(np.zeros((2, 16), dtype), np.zeros((2, 64), dtype))


KEEP = np.ones((2, 64), bool)


@pytest.mark.parametrize(
    ("mask", "size"),
    [
        (None, 0),
        (masks.causal(), 0),
        (masks.dense(np.ones((2, 8, 16, 64), bool)), 0),  # not in k alone
        (masks.dense(np.ones((2, 1, 1, 64), bool)), 1),
        (masks.key_padding(KEEP), 1),
        (ids(np.int8), 4),
        (ids(np.int64), 8),
        (masks.key_padding(KEEP) & ids(np.int16), 8),  # 4 + 1, as C++ aligns it
        (masks.where(lambda b, h, q, k: masks.array(np.zeros(9, np.float16))[k // 8] < 1.0), 8),
    ],
    ids=repr,
)
def test_tiled_stages_look_ups_in_keys_alone(mask: Any, size: int) -> None:
    problem, _ = described(mask=mask)
    plain, _ = described()
    choice = decide(problem, Request(path="tiled"), H200)
    assert choice.stage_mask == (size > 0)
    bare = decide(plain, Request(path="tiled"), H200)
    assert choice.shared_bytes == bare.shared_bytes + choice.tile_k * size
    for chosen_by_hand in (0, 1):
        request = Request(path="tiled", tuning=Tuning(stage_mask=chosen_by_hand))
        assert decide(problem, request, H200).stage_mask == chosen_by_hand


@pytest.mark.parametrize(
    ("heads", "len_q", "rows", "grid"),
    [
        ((8, 8), 1, 1, 16),  # batch 2 x 8 KV heads
        ((8, 4), 1, 2, 8),
        ((8, 2), 1, 4, 4),
        ((8, 1), 1, 4, 4),  # 8 packed rows: two blocks per KV head
        ((8, 2), 3, 4, 12),
        ((6, 2), 3, 4, 12),  # 9 packed rows: the third block has one
        ((8, 2), 0, 1, 0),
    ],
)
def test_gemv_packs_the_heads_of_a_group(
    heads: tuple[int, int], len_q: int, rows: int, grid: int
) -> None:
    choice = chosen(heads=heads, len_q=len_q, request=Request(splits=1), dim=(64, 40))
    assert (choice.path, choice.tile_q, choice.tile_k) == ("gemv", rows, 128)
    assert (choice.grid, choice.threads) == (grid, 256)
    assert choice.shared_bytes == 3 * 4 * (2 + 2) * 2 * 256  # 3 chunks, 4 steps, lanes of 4 values


@pytest.mark.parametrize(
    ("dtype", "dim", "vector", "rows", "size"),
    [
        (np.float16, (128, 128), 16, 4, 3 * 128 * 256),  # 16 lanes hold a key
        (np.float32, (128, 128), 16, 1, 3 * 128 * 256),  # 32 lanes
        (np.float32, (256, 256), 16, 1, 3 * 2 * 64 * 256),  # two vectors each: two steps
        (np.float32, (256, 130), 4, 1, 3 * 2 * (8 + 5) * 4 * 256),
        (np.float32, (256, 256), 4, 1, 3 * 2 * 64 * 256),
        (np.float16, (8, 8), 16, 4, 3 * 4 * 32 * 256),  # 4 lanes, as many as rows; 3 are idle
        (np.float16, (3, 1), 2, 1, 3 * 4 * 4 * 256),
        (np.float16, (1, 256), 2, 4, 3 * 4 * (1 + 8) * 2 * 256),
        (np.float32, (8, 256), 4, 4, 3 * 2 * (1 + 8) * 4 * 256),
    ],
)
def test_shared_memory_of_gemv(
    dtype: Any, dim: tuple[int, int], vector: int, rows: int, size: int
) -> None:
    problem, _ = described(dtype=dtype, dim=dim)
    problem = dataclasses.replace(problem, vector=vector)
    assert GemvTiling(rows, 3).shared_bytes(problem) == size
    merged = 8 * rows * (dim[1] + 2) * 4  # o, m and l of 8 warps, in the place of the ring
    assert GemvTiling(rows, 1).shared_bytes(problem) == max(size // 3, merged)


def test_the_ring_of_gemv_leaves_room_for_two_blocks() -> None:
    problem, _ = described(len_q=1, dim=(128, 128))
    problem = dataclasses.replace(problem, vector=16)

    def slots(name: str) -> int:
        device = Device.named(name)
        choice = decide(problem, Request(path="gemv"), device)
        room = device.shared_memory_per_sm
        assert choice.ring_slots == 1 or 2 * (choice.shared_bytes + 1024) <= room
        return choice.ring_slots

    assert [slots(name) for name in ("h200", "a100", "rtx4090", "t4")] == [3, 2, 1, 1]


def request_of(path: str, splits: int | None = None, **settings: int) -> Request:
    with tuning.using(**settings):
        return Request.checked(splits, "tiles", None, path, None)


def test_settings_of_gemv_by_hand() -> None:
    choice = chosen(
        request=request_of("gemv", 1, block_rows=1, ring_slots=4), len_q=1, dim=(128, 128)
    )
    assert (choice.tile_q, choice.ring_slots, choice.grid) == (1, 4, 16)
    problem, _ = described(len_q=1, dim=(128, 128))
    problem = dataclasses.replace(problem, vector=16)
    with pytest.raises(UnsupportedError, match="needs 131072 bytes of shared memory, the device"):
        decide(problem, request_of("gemv", ring_slots=4), Device.named("rtx4090"))


def test_a_setting_that_a_path_does_not_have_is_a_reason() -> None:
    with pytest.raises(UnsupportedError, match="gemv: it has no setting columns"):
        chosen(request=request_of("gemv", columns=8), len_q=1)
    with pytest.raises(UnsupportedError, match="block_rows=3 is not one of its values 1, 2, 4"):
        chosen(request=request_of("gemv", block_rows=3), len_q=1)


def test_settings_hold_inside_their_block_only() -> None:
    with tuning.using(block_rows=1), tuning.using(ring_slots=2):
        assert tuning.current().given() == {"block_rows": 1, "ring_slots": 2}
        assert Request.checked(None, "tiles", None, None, None).tuning == tuning.current()
    assert tuning.current() == tuning.UNTUNED
    for wrong in (-1, 1.0, True, "2"):
        with pytest.raises(ValueError, match="ring_slots must be a whole number"):
            tuning.Tuning(ring_slots=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ring"), tuning.using(ring=2):
        pass


def test_gemv_takes_many_rows_where_it_is_asked_for() -> None:
    choice = chosen(request=Request(path="gemv"), len_q=1000)
    assert choice.path == "gemv"
    assert choice.grid == 2 * 2 * 1000 * choice.splits
    with pytest.raises(UnsupportedError, match="dtype float64 is not one of"):
        chosen(request=Request(path="gemv"), dtype=np.float64)


# --- splits and their workspace

#: Of `gemv` with four rows, float16 heads of 64.
PACE = Pace(1, 128 * 2 * 64 * 2 / 40e9)


@pytest.mark.parametrize(
    ("request_", "len_k", "splits"),
    [
        (Request(), 4096, 8),  # 132 SMs over 16 row blocks, no second wave
        (Request(), 100_000, 8),
        (Request(), 640, 5),  # a tile each
        (Request(), 512, 1),  # merging would cost more than it saves
        (Request(), 0, 1),
        (Request(splits=1), 4096, 1),
        (Request(splits=5), 4096, 5),
        (Request(splits=1000), 4096, 32),  # clamped to the tiles
        (Request(splits=3), 129, 2),
        (Request(splits=3), 0, 1),
        (Request(keys_per_split=100), 4096, 41),
        (Request(keys_per_split=5000), 4096, 1),
        (Request(keys_per_split=100), 0, 1),
    ],
    ids=repr,
)
def test_how_many_splits(request_: Request, len_k: int, splits: int) -> None:
    problem, _ = described(batch=8, len_q=1, len_k=len_k)
    assert choose_splits(problem, request_, H200, 16, 128, PACE) == splits
    choice = decide(problem, request_, H200)
    assert (choice.path, choice.splits) == ("gemv", splits)
    assert choice.grid == 16 * splits
    assert choice.workspace_bytes == workspace_bytes(problem, splits)


def test_splits_by_themselves_need_a_device_and_idle_multiprocessors() -> None:
    problem, _ = described(len_q=1, len_k=100_000)
    assert choose_splits(problem, Request(), None, 16, 128, PACE) == 1
    assert choose_splits(problem, Request(), H200, 0, 128, PACE) == 1
    assert choose_splits(problem, Request(), H200, 66, 128, PACE) == 2
    assert choose_splits(problem, Request(), H200, 67, 128, PACE) == 1  # two each would not fit
    assert choose_splits(problem, Request(), H200, 67, 128, Pace(2, PACE.tile_seconds)) == 3
    assert choose_splits(problem, Request(), H200, 132 * 4, 128, PACE) == 1
    assert choose_splits(problem, Request(), SMALL, 1, 128, PACE) == 2
    assert choose_splits(problem, Request(), SMALL, 3, 128, PACE) == 1


def test_splits_save_more_than_merging_them_costs() -> None:
    """8 tiles, 4 row blocks: of 7 tiles' time a launch for merging and its traffic are spent."""
    problem, _ = described(len_q=1, len_k=1024)

    def splits(tile_seconds: float, bandwidth: float | None = H200.memory_bandwidth) -> int:
        device = dataclasses.replace(H200, memory_bandwidth=bandwidth)
        return choose_splits(problem, Request(), device, 4, 128, Pace(1, tile_seconds))

    assert MERGE_SECONDS == 3e-6
    assert splits(0.4e-6) == 1 and splits(0.45e-6) == 8
    assert splits(0.4e-6, None) == 1 and splits(0.43e-6, None) == 8
    # Where the blocks already read all that the memory gives, more of them take as long.
    saturated = 4 * tile_bytes(problem, 128) / 10e-6
    assert splits(10e-6, saturated) == 1
    assert splits(10e-6, 4 * saturated) == 8


def test_fixed_boundaries_count_from_the_first_key_of_the_sequence() -> None:
    options = {"store_state": True, "key_offset": 1000, "total_keys": 5000}
    problem, _ = described(len_q=1, len_k=200, **options)
    assert choose_splits(problem, Request(keys_per_split=100), H200, 4, 128, PACE) == 12


def test_splits_of_tiled_are_counted_in_its_tiles() -> None:
    choice = chosen(request=Request(splits=100), batch=1, len_k=640)
    assert (choice.path, choice.splits, choice.grid) == ("tiled", 10, 20)
    assert choice.workspace_bytes == workspace_bytes(described(batch=1)[0], 10)


@pytest.mark.parametrize(
    ("request_", "mode"),
    [
        (Request(splits=1), 0),
        (Request(splits=2), 1),
        (Request(splits=2, split_by="length"), 2),
        (Request(keys_per_split=64), 3),
        (Request(keys_per_split=4096), 0),  # one part: nothing to merge
    ],
    ids=repr,
)
@pytest.mark.parametrize("len_q", [1, 16])
def test_how_keys_are_divided_is_part_of_the_kernel(
    request_: Request, mode: int, len_q: int
) -> None:
    problem, mask = described(len_q=len_q, len_k=1024)
    choice = decide(problem, request_, H200)
    assert choice.split_mode == mode
    spec = kernel_spec(choice, problem, mask, arch="sm_90a")
    assert dict(spec.defines)["CUMHA_SPLIT_BY"] == str(mode)
    assert (reduce_step(choice, problem) is None) == (mode == 0)


@pytest.mark.parametrize("splits", [2, 3, 17])
@pytest.mark.parametrize(
    ("batch", "len_q", "dim_v"), [(1, 1, 1), (2, 3, 40), (1, 1, 64), (5, 4, 33)]
)
def test_parts_of_the_workspace(splits: int, batch: int, len_q: int, dim_v: int) -> None:
    """o, m and l of every split, each from a multiple of 128 bytes, none over another."""
    problem, _ = described(batch=batch, len_q=len_q, dim=(64, dim_v))
    o, m, l, size = workspace_parts(problem, splits)  # noqa: E741
    states = splits * problem.rows
    assert o == 0 and all(part % 128 == 0 for part in (m, l, size))
    for begin, end, needed in ((o, m, states * dim_v), (m, l, states), (l, size, states)):
        assert needed * 4 <= end - begin < needed * 4 + 128
    assert workspace_bytes(problem, splits) == size
    assert workspace_bytes(problem, 1) == 0


def test_one_reduce_kernel_serves_all_masks_lengths_and_head_dims() -> None:
    def reduce_spec(request: Request, **options: Any) -> Any:
        problem, _ = described(**{"len_q": 1, "len_k": 1024, **options})
        step = reduce_step(decide(problem, request, H200), problem)
        assert step is not None
        assert (step[0].path, step[0].grid) == ("split_reduce", problem.rows)
        assert (step[0].threads, step[0].shared_bytes) == (128, 4 * problem.head_dim_v * 4)
        return kernel_spec(*step, None, arch="sm_90a")

    wanted = reduce_spec(Request(splits=2))
    assert dict(wanted.defines)["CUMHA_SPLIT_BY"] == "0"  # it writes the result
    for request, options in (
        (Request(splits=7), {}),
        (Request(splits=3, split_by="length"), {}),
        (Request(keys_per_split=64), {}),
        (Request(splits=2), {"mask": masks.window(5, 0)}),
        (Request(splits=2), {"mask": np.ones((1, 1024), bool), "key_lengths": [7, 9]}),
        (Request(splits=2), {"dim": (128, 64)}),
        (Request(splits=2), {"len_q": 4096, "heads": (8, 8), "batch": 1}),  # after tiled
        (Request(splits=2), {"len_k": 2**28 + 1}),
    ):
        assert reduce_spec(request, **options) is wanted
    for options in ({"dim": (64, 32)}, {"return_lse": True}, {"store_state": True}):
        assert reduce_spec(Request(splits=2), **options) != wanted
    assert reduce_spec(Request(splits=2), dtype=np.float32) != wanted


def test_a_workspace_that_is_too_small_is_refused() -> None:
    generator = np.random.default_rng(3)
    q, k, v = (generator.standard_normal((1, 2, n, 8), np.float32) for n in (1, 300, 300))
    options: dict[str, Any] = {"splits": 3, "path": "gemv", "backend": "emulate"}
    plan = cumha.plan(q, k, v, **options)
    assert plan.choice.splits == 3 and plan.workspace_bytes == 256 + 128 + 128
    memory = np.zeros(1024, np.uint8)
    memory = memory[-memory.ctypes.data % 128 :]
    with pytest.raises(ValueError, match="workspace has 511 bytes, the plan needs 512"):
        plan.run(q, k, v, workspace=memory[:511])
    with pytest.raises(ValueError, match="workspace has 0 bytes, the plan needs 512"):
        cumha.attention(q, k, v, workspace=memory[:0], **options)
    try:
        emulate.host_compiler()
    except RuntimeError as error:
        pytest.skip(str(error))
    memory[:] = 0xFF  # NaN: what it held does not matter
    out = plan.run(q, k, v, workspace=memory[:512])
    np.testing.assert_allclose(out, cumha.reference.attention(q, k, v), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(out, plan.run(q, k, v))


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
    assert "tiled" in repr(first) and "H200" in repr(first)


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
    for name in ("gemv", "tiled", "naive"):
        for request in (Request(path=name), Request(path=name, backend="cuda")):
            assert decide(problem, request, H200).path == name
    for request in (Request(backend="cuda"), Request(splits=1), Request(splits=2)):
        assert decide(problem, request, H200).path == "tiled"


ELSE = "'naive' was asked for"
ASKED_NAIVE = {"gemv": ELSE, "tiled": ELSE, "host": ELSE}


@pytest.mark.parametrize(
    ("request_", "reasons"),
    [
        (Request(splits=2, path="naive"), {**ASKED_NAIVE, "naive": "splits: one warp"}),
        (
            Request(keys_per_split=64, path="naive"),
            {**ASKED_NAIVE, "naive": "keys_per_split: one warp"},
        ),
        (
            Request(path="host"),
            {
                **dict.fromkeys(("gemv", "tiled", "naive"), "path='host' was asked for"),
                "host": "it takes NumPy arrays, got cupy: move them with .get()",
            },
        ),
        (
            Request(backend="host"),
            {
                **dict.fromkeys(("gemv", "tiled", "naive"), "'host' was asked for"),
                "host": "it takes NumPy arrays, got cupy",
            },
        ),
        (
            Request(backend="emulate"),
            {
                **dict.fromkeys(("gemv", "tiled", "naive"), "emulation takes NumPy arrays"),
                "host": "'emulate' was asked for",
            },
        ),
    ],
    ids=str,
)
def test_every_path_says_why_it_cannot(request_: Request, reasons: dict[str, str]) -> None:
    problem, _ = described()
    with pytest.raises(UnsupportedError) as refused:
        decide(problem, request_, H200)
    first, *lines = str(refused.value).splitlines()
    assert first == f"no path can run {problem!r}:"
    said = dict(line.strip().split(": ", 1) for line in lines)
    assert list(said) == [p.name for p in PATHS] == sorted(reasons, key=list(said).index)
    for name, reason in reasons.items():
        assert reason in said[name]


def test_all_reasons_are_listed_not_only_the_first() -> None:
    problem, _ = described(dim=(600, 700), dtype=np.float64)
    with pytest.raises(UnsupportedError) as refused:
        decide(problem, Request(splits=2), H200)
    _, *lines = str(refused.value).splitlines()
    said = dict(line.strip().split(": ", 1) for line in lines)
    for name, limit in (("gemv", 256), ("tiled", 256), ("naive", 512), ("host", 512)):
        assert f"head_dim 600 is above its limit of {limit}" in said[name]
        assert f"head_dim_v 700 is above its limit of {limit}" in said[name]
    assert "dtype float64 is not one of float16, bfloat16, float32" in said["gemv"]
    assert "dtype float64 is not one of float16, bfloat16, float32" in said["tiled"]
    assert "nothing to split" in said["naive"]
    assert "it takes NumPy arrays" in said["host"]


# --- explain


def test_explain_on_a_gpu() -> None:
    problem, mask = described(batch=1, heads=(32, 8), len_q=1, len_k=4096, dim=(128, 128))
    text = explain(decide(problem, Request(), H200), problem, mask)
    lines = text.splitlines()
    assert lines[0] == repr(problem)
    for part in (
        "  path        gemv on NVIDIA H200 (sm_90, 132 SMs)",
        "  tile        4 query rows x 128 keys, 4 query heads per KV head",
        "  grid        128 blocks x 256 threads, at most 8 blocks per SM, 0.12 waves",
        "  splits      up to 16, equal tiles",
        "  workspace   266240 bytes",  # 16 splits x 32 rows x (128 + 2) floats
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
    assert "  path        tiled on " in text
    assert "4 blocks x 128 threads, at most 4 blocks per SM, 0.50 waves" in text
    assert "not gemv    4 query heads per KV head x len_q 16 are above 16 rows" in text
    assert "floor" not in text


def test_explain_on_the_host() -> None:
    plan = cumha.plan(*host_arrays(), causal=True, key_lengths=[9, 3])
    text = plan.explain()
    assert "path        host on the host, NumPy and BLAS" in text
    assert "(k <= (q + (len_k - len_q)))" in text
    assert "key_lengths" in text and "2 query heads per KV head" in text
    for name in ("gemv ", "tiled", "naive"):
        assert f"not {name}   it takes CuPy arrays, got numpy: move them with cupy.asarray" in text
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
        {"len_k": 63},
        {"len_q": 17},
        {"batch": 5},
        {"heads": (16, 4)},
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


def test_few_kernels_serve_all_numbers_of_rows() -> None:
    """Packed rows of a block are structure, in powers of two: `gemv` to 4, `tiled` from 32."""
    seen = {
        (spec.path, dict(spec.defines)["CUMHA_BLOCK_ROWS"])
        for group in (1, 2, 4, 8)
        for len_q in (1, 2, 4, 5, 9, 16, 1000)
        for spec in [spec_of(heads=(group, 1), len_q=len_q)]
    }
    gemv, tiled = ({rows for path, rows in seen if path == name} for name in ("gemv", "tiled"))
    assert gemv == {"1", "2", "4"} and tiled == {"32", "64"}
    naive = {spec_of(NAIVE, heads=(group, 1), len_q=n) for group in (1, 2, 8) for n in (1, 100)}
    assert len(naive) == 1


def test_a_decode_step_needs_no_new_kernel() -> None:
    """One token more: another plan, the same kernel, object for object."""
    steps = {id(spec_of(len_q=1, len_k=n, causal=True)) for n in range(100, 200)}
    assert len(steps) == 1
    assert spec_of(len_q=1, len_k=100, causal=True) == spec_of(len_q=1, len_k=100)
    assert "k <= " not in spec_of(len_q=1, causal=True).mask_source


def test_a_growing_cache_needs_one_kernel_more_once_it_is_split() -> None:
    found = [spec_of(batch=1, len_q=1, len_k=n, causal=True) for n in range(1, 5000, 7)]
    split = [dict(spec.defines)["CUMHA_SPLIT_BY"] for spec in found]
    assert split == sorted(split) and set(split) == {"0", "1"}
    assert len(set(found)) == 2


def test_the_state_of_a_partial_call_has_no_lse() -> None:
    defines = dict(spec_of(store_state=True, return_lse=True).defines)
    assert (defines["CUMHA_STORE_STATE"], defines["CUMHA_STORE_LSE"]) == ("1", "0")


UNUSED = {"COLUMNS": "0", "RING_SLOTS": "0", "PADDING": "0", "STAGE_MASK": "0"}
GEMV = {"SPLIT_BY": "0", "THREADS": "256", "BLOCK_ROWS": "4", "TILE_KEYS": "128", **UNUSED}
GEMV["RING_SLOTS"] = "3"
RING = {"COLUMNS": "16", "RING_SLOTS": "2", "PADDING": "16", "STAGE_MASK": "1"}
TILED = {"SPLIT_BY": "0", "THREADS": "128", "BLOCK_ROWS": "64", "TILE_KEYS": "64", **RING}
NAIVELY = {"SPLIT_BY": "0", "THREADS": "128", "BLOCK_ROWS": "4", "TILE_KEYS": "1", **UNUSED}


@pytest.mark.parametrize(
    ("dtype", "text", "path", "len_q", "tiling"),
    [
        ("float16", "__half", "tiled", 16, TILED),
        ("bfloat16", "__nv_bfloat16", "tiled", 16, TILED),
        ("float32", "float", "tiled", 16, TILED),
        ("float16", "__half", "gemv", 1, GEMV),
        ("float32", "float", "gemv", 1, GEMV),
        ("float64", "double", "naive", 16, NAIVELY),
        ("float64", "double", "naive", 1, NAIVELY),
    ],
)
def test_defines(dtype: str, text: str, path: str, len_q: int, tiling: dict[str, str]) -> None:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    mask = masks.key_padding(np.ones((2, 64), bool)) & masks.window(1, 2)
    problem, expr = described(dtype=kind, dim=(96, 40), len_q=len_q, mask=mask, return_lse=True)
    problem = dataclasses.replace(problem, vector=8, out_vector=16)
    spec = kernel_spec(decide(problem, Request(), H200), problem, expr, arch="sm_90a")
    assert dict(spec.defines) == {
        "CUMHA_ELEMENT": text,
        "CUMHA_HEAD_DIM": "96",
        "CUMHA_HEAD_DIM_V": "40",
        "CUMHA_WIDE_INDEX": "0",
        "CUMHA_KEY_LENGTH_BITS": "0",
        "CUMHA_STORE_STATE": "0",
        "CUMHA_STORE_LSE": "1",
        **{f"CUMHA_{name}": value for name, value in tiling.items()},
        "CUMHA_VECTOR_BYTES": "8",
        "CUMHA_OUT_VECTOR_BYTES": "16",
        "CUMHA_MASK_NUMBERS": "2",
        "CUMHA_MASK_ARRAYS": "1",
        "CUMHA_PARAMS_BYTES": str(12 * 8 + 5 * 32 + 11 * 8 + 2 * 8 + 72),
    }
    assert spec.path == path and spec.arch == "sm_90a" and spec.build == "release"


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
    q, k, _ = host_arrays()

    def shifted(x: np.ndarray, past: int) -> np.ndarray:
        """A copy that starts `past` bytes after a multiple of 16."""
        memory = np.zeros(x.nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 16 + past
        found = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
        found[...] = x
        return found

    aligned = [shifted(x, 0) for x in (q, k, k)]  # rows of 32 bytes
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
