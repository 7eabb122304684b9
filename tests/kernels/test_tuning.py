"""Settings by hand: every value gives the same answer, whatever lies at the edges of tiles.

A kernel is built per variant, so that variants are few: each value meets several of the others,
other head sizes and dtypes, and each way to divide keys. All calls of a variant run on its kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import cumha
from cumha import masks, testing, tuning
from cumha.device import Device
from cumha.problem import describe
from cumha.testing import normal, poisoned, qkv
from cumha.tilings import GEMV_SETTINGS, TILED_ROWS, TILED_SETTINGS, choose_tiled
from cumha.tuning import Tuning

HOW = [
    pytest.param(("tiled", "cuda"), id="tiled", marks=pytest.mark.gpu),
    pytest.param(("tiled", "emulate"), id="tiled-emulated"),
]
TILED = pytest.mark.parametrize("kernel", HOW, indirect=True)
GROUP = 2  # query heads of a KV head


class Variant(NamedTuple):
    """A build of `tiled`; ``dims`` are head_dim and head_dim_v."""

    settings: dict[str, int]
    dtype: str
    dims: tuple[int, int]
    split: dict[str, Any] = {}  # noqa: RUF012
    masked: bool = True

    def __str__(self) -> str:
        parts = [f"{name}={value}" for name, value in {**self.settings, **self.split}.items()]
        return "-".join([*parts, self.dtype, *map(str, self.dims)])


LENGTH = {"splits": 3, "split_by": "length"}
VARIANTS = (
    Variant({"tile_keys": 32, "block_rows": 16}, "float32", (64, 64)),
    Variant({"tile_keys": 96, "block_rows": 16}, "float16", (40, 72), {"splits": 3}),
    Variant({"tile_keys": 128}, "bfloat16", (64, 64), masked=False),
    Variant({"ring_slots": 1}, "float16", (33, 80)),  # V leaves its values past the head of K
    Variant({"ring_slots": 1, "block_rows": 32}, "float32", (64, 24), LENGTH),
    Variant({"ring_slots": 4}, "float16", (64, 64)),
    Variant({"ring_slots": 4}, "bfloat16", (20, 100), {"keys_per_split": 100}),
    Variant({"padding": 0, "block_rows": 64, "columns": 8}, "float32", (64, 64)),
    Variant({"columns": 32, "block_rows": 4}, "float16", (64, 64)),
    Variant(
        {"columns": 32, "block_rows": 8, "tile_keys": 96, "ring_slots": 4}, "float32", (33, 40)
    ),
    Variant(
        {"columns": 32, "block_rows": 16, "tile_keys": 128, "ring_slots": 1, "padding": 0},
        "bfloat16",
        (128, 65),
        masked=False,
    ),
    Variant({"columns": 16, "block_rows": 64, "padding": 0}, "float16", (64, 128)),
    Variant({"columns": 16, "block_rows": 32, "tile_keys": 32, "ring_slots": 4}, "float32", (8, 3)),
)
ALL = pytest.mark.parametrize("variant", VARIANTS, ids=str)


def test_every_value_of_every_setting_is_among_the_variants() -> None:
    built = []
    for variant in VARIANTS:
        problem, _ = describe(*qkv(1, GROUP, 1, 20, 20, *variant.dims, dtype=variant.dtype))
        tiling = choose_tiled(problem, Tuning(**variant.settings), Device.named("h200"))
        assert tiling is not None
        built.append(tiling)
    for name, values in TILED_SETTINGS.items():
        if name != "stage_mask":  # test_staging.py
            assert {getattr(tiling, name) for tiling in built} == set(values), name
    wanted = {(columns, rows) for columns, some in TILED_ROWS.items() for rows in some}
    assert {(tiling.columns, tiling.block_rows) for tiling in built} == wanted


def mask_of(variant: Variant, first: int, window: int) -> masks.Expr | None:
    """Causal over the first keys and the last ones: tiles between them are skipped."""
    if not variant.masked:
        return None
    begin = masks.where(lambda b, h, q, k: k < first)
    return masks.causal() & (begin | masks.window(window, -1))


def check(kernel: Any, variant: Variant, len_q: int, len_k: int, **options: Any) -> Any:
    arrays = qkv(1, GROUP, 1, len_q, len_k, *variant.dims, dtype=variant.dtype, seed=len_k)
    with tuning.using(**variant.settings):
        return kernel.check(*arrays, **variant.split, **options)


def check_lengths(
    kernel: Any, variant: Variant, some_len_q: tuple[int, ...], some_len_k: tuple[int, ...]
) -> None:
    for number, len_k in enumerate(some_len_k):
        mask = mask_of(variant, 3, len_k // 2)
        with kernel.reordered(number):
            len_q = some_len_q[number % len(some_len_q)]
            out, lse = check(kernel, variant, len_q, len_k, mask=mask)
        if len_k == 0:
            assert not out.astype(np.float32).any() and (lse == -np.inf).all()


@TILED
@ALL
def test_settings_at_tile_edges(kernel: Any, variant: Variant) -> None:
    """One tile and several, whole and not; more rows than keys leaves rows without any."""
    tile = variant.settings.get("tile_keys", 64)
    lengths = (0, 1, tile - 1, tile, tile + 1, 2 * tile + 1, 3 * tile, 4 * tile + 3)
    check_lengths(kernel, variant, (9, 37, 70), lengths)


@TILED
@ALL
def test_settings_with_tiles_to_skip(kernel: Any, variant: Variant) -> None:
    """Loads that run ahead pass over tiles that nobody sees."""
    tile = variant.settings.get("tile_keys", 64)
    for first, window in ((tile // 2, 5), (tile + 1, 2 * tile), (0, tile), (0, 0)):
        check(kernel, variant, 21, 6 * tile + 7, mask=mask_of(variant, first, window))


@TILED
@ALL
def test_settings_keep_what_nobody_sees_out(kernel: Any, variant: Variant) -> None:
    """NaN in slots of K and V that no row sees, and where half of the rows see it."""
    tile = variant.settings.get("tile_keys", 64)
    len_q, len_k = 40, 5 * tile + 9
    q, k, v = qkv(1, GROUP, 1, len_q, len_k, *variant.dims, dtype=variant.dtype)
    mask = mask_of(variant, tile // 2, tile)
    sizes = {"batch": 1, "heads_q": GROUP, "len_q": len_q, "len_k": len_k}
    keep = masks.materialize(mask, **sizes)
    bad_k, bad_v = poisoned(k, v, keep)
    late = len_k - len_q // 2  # only later rows see this key of a causal call
    bad_v[:, :, late] = np.nan
    with tuning.using(**variant.settings):
        out, _ = kernel.check(q, bad_k, bad_v, mask=mask, **variant.split)
    seen = keep[0, 0, :, late]
    assert seen.any() and (not variant.masked or not seen.all())
    assert (np.isnan(out.astype(np.float32)).all(-1) == seen).all()


@TILED
@pytest.mark.parametrize("variant", VARIANTS[3:6], ids=str)
def test_settings_with_a_score_of_minus_infinity(kernel: Any, variant: Variant) -> None:
    """It removes the key, in a tile that the mask leaves whole; its V may hold anything."""
    q = np.abs(normal(1, GROUP, 20, variant.dims[0], dtype=variant.dtype))
    _, k, v = qkv(1, GROUP, 1, 20, 200, *variant.dims, dtype=variant.dtype)
    k[:, :, 100] = -np.inf
    v[:, :, 100] = np.nan
    mask = mask_of(variant, 200, 0)
    with tuning.using(**variant.settings):
        out, _ = kernel.check(q, k, v, mask=mask, **variant.split)
    assert not np.isnan(out.astype(np.float32)).any()


@TILED
def test_settings_of_a_plan_stay_with_it(kernel: Any) -> None:
    """A plan made with settings runs with them later."""
    variant = VARIANTS[5]
    q, k, v = (kernel.move(x) for x in qkv(1, GROUP, 1, 9, 200, *variant.dims, dtype=variant.dtype))
    options = {**kernel.how, "return_lse": True, "mask": mask_of(variant, 3, 50)}
    with tuning.using(**variant.settings):
        plan = cumha.plan(q, k, v, **options)
        wanted = cumha.attention(q, k, v, **options)
    assert plan.choice.ring_slots == 4
    for got, want in zip(plan.run(q, k, v), wanted, strict=True):
        assert testing.to_host(got).tobytes() == testing.to_host(want).tobytes()
    assert cumha.plan(q, k, v, **options).choice.ring_slots == 2


# --- gemv

GEMV = pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(("gemv", "cuda"), id="gemv", marks=pytest.mark.gpu),
        pytest.param(("gemv", "emulate"), id="gemv-emulated"),
    ],
    indirect=True,
)
GEMV_VARIANTS = (
    Variant({"ring_slots": 1, "block_rows": 4}, "float16", (64, 64)),
    Variant({"ring_slots": 2, "block_rows": 2}, "float32", (40, 72), {"splits": 2}),
    Variant({"ring_slots": 3, "block_rows": 2}, "bfloat16", (128, 65), masked=False),
    Variant({"ring_slots": 4, "block_rows": 1}, "float16", (33, 24), LENGTH),
)


def test_every_value_of_gemv_is_among_the_variants() -> None:
    for name, values in GEMV_SETTINGS.items():
        assert {v.settings[name] for v in GEMV_VARIANTS} == set(values)


@GEMV
@pytest.mark.parametrize("variant", GEMV_VARIANTS, ids=str)
def test_settings_of_gemv_at_the_edges_of_chunks(kernel: Any, variant: Variant) -> None:
    """Fewer keys than warps, turns of the ring that are not whole, rows that fill no block."""
    check_lengths(kernel, variant, (1, 2, 3), (0, 1, 7, 33, 64, 65, 129, 260, 515))


@GEMV
@pytest.mark.parametrize("variant", GEMV_VARIANTS, ids=str)
def test_settings_of_gemv_keep_what_nobody_sees_out(kernel: Any, variant: Variant) -> None:
    q, k, v = qkv(1, GROUP, 1, 3, 300, *variant.dims, dtype=variant.dtype)
    keep = np.random.default_rng(5).random((1, 1, 3, 300)) < 0.3
    bad_k, bad_v = poisoned(k, v, keep)
    with tuning.using(**variant.settings):
        out, _ = kernel.check(q, bad_k, bad_v, mask=keep, **variant.split)
    assert not np.isnan(out.astype(np.float32)).any()
