"""Look-ups of the mask come from shared memory or from global memory: the same bits either way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cumha
from cumha import emulate, masks, testing, tuning
from tests.kernels.conftest import EMULATED, GPU, Runner

TILED = [p for p in (*GPU, *EMULATED) if p.id.startswith("tiled")]
LEN_Q, LEN_K, TILE = 9, 35 * 64 + 21, 64  # two batches of classes, the last tile not whole


@pytest.fixture(params=TILED)
def tiled(request: pytest.FixtureRequest, emulation: None) -> Runner:
    return Runner(*request.param)


def _segments(rng: np.random.Generator) -> Any:
    ids = np.sort(rng.integers(0, 9, (2, LEN_K)))
    return masks.segments(ids[:, 300 : 300 + 20 * LEN_Q : 20], ids)


def _padding(rng: np.random.Generator) -> Any:
    """Runs of tiles that are SKIP, single keys away from FULL, and the last key off."""
    keep = np.ones((2, LEN_K), bool)
    keep[0, 3 * TILE : 34 * TILE] = False
    keep[:, rng.integers(0, LEN_K, 9)] = False
    keep[1, -1] = False
    return masks.key_padding(keep)


def _several(rng: np.random.Generator) -> Any:
    """Fields of 8, 4 and 1 bytes, one of them twice; NaN; an index made of another look-up."""
    weight = masks.array(rng.standard_normal((2, LEN_K)).astype(np.float16))
    weight.data[0, 70] = np.nan
    kind = masks.array(rng.integers(0, 3, LEN_K, np.int32))
    table = masks.array(np.array([True, False, True]))
    return masks.where(
        lambda b, h, q, k: (
            table[kind[k]] & (weight[b, k] < 1.5) & ((kind[k] == h) | (weight[b, k] > 0.5))
        )
    )


MASKS: dict[str, Callable[[np.random.Generator], Any]] = {
    "segments": _segments,
    "padding": _padding,
    "several": _several,
}


@pytest.mark.parametrize("name", MASKS)
def test_staged_or_not_the_bits_are_the_same(tiled: Runner, name: str) -> None:
    rng = np.random.default_rng(list(MASKS).index(name))
    mask = MASKS[name](rng)
    q = testing.inputs.normal(2, 4, LEN_Q, 8, dtype=np.float32, seed=1)
    k = testing.inputs.normal(2, 2, LEN_K, 8, dtype=np.float32, seed=2)
    v = testing.inputs.normal(2, 2, LEN_K, 8, dtype=np.float32, seed=3)
    lengths = np.array([LEN_K, LEN_K - 100])
    given = {"mask": mask, "key_lengths": lengths, "splits": 1}
    plan = cumha.plan(*map(tiled.move, (q, k, v)), mask=tiled.move(mask), **tiled.how)
    assert plan.choice.stage_mask == 1
    staged = tiled.check(q, k, v, **given)
    with tuning.using(stage_mask=0):
        direct = tiled.check(q, k, v, **given)
    for x, y in zip(staged, direct, strict=True):
        np.testing.assert_array_equal(x, y)
    if tiled.emulated:
        with emulate.using(seed=5, workers=2):
            again = tiled.attention(q, k, v, **given)
        np.testing.assert_array_equal(again[0], staged[0])
