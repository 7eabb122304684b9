"""The walk over a row block's tiles finds those that some row may see, and what each one is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cumha import masks, params
from cumha.masks import Expr, TileClass
from tests.emulation.conftest import Cases

TILE = 64
LEN_Q = 40
LEN_K = 71 * TILE + 9  # three batches of 32 tiles, the last one neither whole nor a whole tile
SOURCE = f"""
#include "split.cuh"
CASE(walk) {{
  const auto& args = *array<const cumha::MaskArgs>(p, 0);
  const auto* n = p.numbers;
  using cumha::Index;
  const cumha::Span queries{{Index(n[0]), Index(n[1])}}, keys{{Index(n[2]), Index(n[3])}};
  cumha::VisibleTiles<{TILE}> tiles(args, Index(n[4]), {{0, 1}}, queries, keys, {LEN_Q}, {LEN_K});
  int* to = array<int>(p, {{last}}) + 2 * {LEN_K} * (threadIdx.x / 32);
  auto found = cumha::TileClass::kSkip;
  Index tile = tiles.next(keys.lo, found);
  for (; tile < keys.hi; tile = tiles.next(tile + {TILE}, found)) {{
    if (threadIdx.x % 32 == 0) to[0] = int(tile), to[1] = int(found);
    to += 2;
  }}
}}
"""


def segments(rng: np.random.Generator) -> Expr:
    """Documents, from 1 to a few hundred keys; the queries are in three of them."""
    ids = np.repeat(np.arange(60), rng.integers(1, 300, 60))[None, :LEN_K].repeat(2, axis=0)
    return masks.segments(ids[:, 700 : 700 + 10 * LEN_Q : 10], ids)


def padding(rng: np.random.Generator) -> Expr:
    keep = np.ones((2, LEN_K), bool)
    keep[:, rng.integers(0, LEN_K, 30)] = False
    keep[0, 130 : 130 + 40 * TILE] = False
    keep[1, LEN_K - 1] = False
    return masks.key_padding(keep)


def floats(rng: np.random.Generator) -> Expr:
    """NaN says nothing; a table looked up twice, several keys per element; limits per query."""
    values = np.repeat(rng.standard_normal(LEN_K // 100 + 1), 4).astype(np.float32)
    values[7] = np.nan
    table, limits = masks.array(values), masks.array(rng.standard_normal((2, LEN_Q)))
    size, least = 25, -2.5
    return masks.where(
        lambda b, h, q, k: (table[k // size] < limits[b, q]) & (table[k // size] > least)
    )


def limits(rng: np.random.Generator) -> Expr:
    """No look-up at a key; of entry 1 a NaN, in one lane's share of the queries."""
    least = masks.array(rng.integers(0, LEN_K, (2, LEN_Q)).astype(np.float32))
    least.data[1, 20] = np.nan
    return masks.where(lambda b, h, q, k: k >= least[b, q])


def blocks(rng: np.random.Generator) -> Expr:
    """In both q and k: bounded where it is used."""
    keep = masks.array(rng.random((LEN_Q // 8 + 1, LEN_K // 32 + 1)) < 0.1)
    return masks.where(lambda b, h, q, k: keep[q // 8, k // 32])


CASES = {
    "none": lambda rng: masks.where(lambda b, h, q, k: True),
    "window": lambda rng: masks.window(1000, 90),
    "strips": lambda rng: masks.where(lambda b, h, q, k: (k // 128) % 3 == 0),
    "segments": segments,
    "causal_segments": lambda rng: masks.causal() & segments(rng),
    "padding": padding,
    "floats": floats,
    "limits": limits,
    "blocks": blocks,
}


def classes(mask: Expr, where: dict[str, Any], lo: int, hi: int) -> TileClass:
    """Of the keys [lo, hi): at once if nothing of the mask is looked up at a key, else by key."""
    if not any(n.op == "lookup" and n.has_k for n in mask.program.nodes):
        return masks.tile_class(mask, k=(lo, hi), **where)
    found = {masks.tile_class(mask, k=(j, j + 1), **where) for j in range(lo, hi)}
    return found.pop() if len(found) == 1 else TileClass.PARTIAL


@pytest.mark.parametrize("name", CASES)
def test_walk(name: str, compiler: str) -> None:
    rng = np.random.default_rng(list(CASES).index(name))
    mask = CASES[name](rng)
    arrays = {f"a{i}": source.data for i, source in enumerate(mask.arrays)}
    cases = Cases(
        "walk",
        SOURCE.replace("{last}", str(1 + len(arrays))),
        compiler,
        masks.cuda_source(mask),
        MASK_NUMBERS=len(mask.numbers),
        MASK_ARRAYS=len(mask.arrays),
        PARAMS_BYTES=params.params_bytes(mask),
    )
    met: set[TileClass] = set()
    args = np.frombuffer(params.pack_mask(mask), np.uint8)
    for b, q, k in (
        (0, (0, LEN_Q), (0, LEN_K)),
        (1, (5, 21), (37, LEN_K)),
        (1, (5, 6), (TILE, 33 * TILE)),
        (0, (LEN_Q - 1, LEN_Q), (3, 60)),
        (0, (0, 3), (9, 9)),
    ):
        out = np.full((2, LEN_K, 2), -1, np.int32)
        inputs = {"args": args, **arrays}
        cases.run("walk", *q, *k, b, inputs=inputs, outputs={"out": out}, block=(64,))
        where = {"b": b, "h": (0, 1), "q": q, "len_q": LEN_Q, "len_k": LEN_K}
        told = [(lo, classes(mask, where, lo, min(lo + TILE, k[1]))) for lo in range(*k, TILE)]
        wanted = [pair for pair in told if pair[1] is not TileClass.SKIP]
        for warp in out:
            np.testing.assert_array_equal(warp[: len(wanted)], np.reshape(wanted, (-1, 2)))
            assert (warp[len(wanted) :] == -1).all()
        met.update(c for _, c in told)
    assert len(met) == {"none": 1, "blocks": 2}.get(name, 3)  # the case can fail
