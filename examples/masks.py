"""Masks as expressions: built in, composed, your own function, arrays; and which tiles they leave.

    python examples/masks.py [--gpu | --cpu]

The map of each mask has one sign per tile of 8 queries x 8 keys, as ``masks.tile_class`` finds it
without computing the mask:

    .  SKIP     no query sees any key: never loaded, never computed
    /  PARTIAL  the predicate runs for each pair
    #  FULL     every query sees every key: computed without a test

Right of each row of tiles stands its key range, as ``masks.key_range`` finds it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import array_library
import numpy as np

import cumha
from cumha import masks
from cumha.masks import Mask, TileClass

HEADS, LEN_Q, LEN_K, TILE = 2, 64, 64, 8
SIGNS = {TileClass.SKIP: ".", TileClass.PARTIAL: "/", TileClass.FULL: "#"}


def strided(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A mask of one's own: the 8 nearest keys, and before them every 16th.

    It is called once, with expressions; what it returns is compiled, not run per pair.
    """
    return (k <= q) & ((q - k < 8) | (k % 16 == 0))


def per_head(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Head 0 sees 4 keys back, head 1 sees 24."""
    return (k <= q) & (q - k < 4 + 20 * h)


def collection(xp: ModuleType) -> dict[str, Mask]:
    """Masks over arrays of `xp`, by what they show."""
    documents = xp.asarray(np.repeat([0, 1, 2], [24, 16, 24])[None])  # [batch, len]
    keep = xp.asarray((np.arange(LEN_K) < 44)[None])  # [batch, len_k]
    blocks = np.kron(np.eye(4, dtype=bool), np.ones((16, 16), dtype=bool))
    blocks[:, :16] = True
    same = masks.segments(documents, documents)
    ids = masks.array(documents)
    return {
        "causal()": masks.causal(),
        "window(15, 0): the query's own key and 15 before it": masks.window(15, 0),
        "causal() & segments(ids, ids): packed documents": masks.causal() & same,
        "the same as a function, ids = masks.array(...)": masks.where(
            lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (k <= q)
        ),
        "causal() | where(k < 12): a prefix that everybody sees": masks.causal()
        | masks.where(lambda b, h, q, k: k < 12),
        "causal() & key_padding(keep): 44 keys are real": masks.causal() & masks.key_padding(keep),
        "where(strided): a function": masks.where(strided),
        "where(per_head): head 0 and head 1 in one map": masks.where(per_head),
        "dense(blocks): a boolean array": masks.dense(xp.asarray(blocks)),
        "~window(-1, 7): what lies more than 7 ahead": ~masks.window(-1, 7),
    }


def draw(mask: Mask) -> None:
    """Print the tile map; check it against the whole mask."""
    sizes = {"len_q": LEN_Q, "len_k": LEN_K}
    whole = masks.materialize(mask, batch=1, heads_q=HEADS, **sizes)
    for q in range(0, LEN_Q, TILE):
        rows = {"b": 0, "h": (0, HEADS), "q": (q, q + TILE), **sizes}
        lo, hi = masks.key_range(mask, **rows)
        line = ""
        for k in range(0, LEN_K, TILE):
            found = masks.tile_class(mask, k=(k, k + TILE), **rows)
            tile = whole[0, :, q : q + TILE, k : k + TILE]
            assert found != TileClass.SKIP or not tile.any()
            assert found != TileClass.FULL or tile.all()
            line += SIGNS[found]
        seen = np.flatnonzero(whole[0, :, q : q + TILE].any(axis=(0, 1)))
        assert seen.size == 0 or (lo <= seen[0] and seen[-1] < hi)
        print(f"    {line}  keys {lo:2} to {hi - 1:2}" if lo < hi else f"    {line}  no key")


def main() -> None:
    xp = array_library.choose(__doc__.splitlines()[0])
    generator = np.random.default_rng(0)
    q, k, v = generator.standard_normal((3, 1, HEADS, LEN_Q, 16)).astype(np.float32)
    on_host, on_device = collection(np), collection(xp)
    for title, mask in on_host.items():
        print(f"\n{title}\n    {mask!r}")
        draw(mask)  # device arrays are never read by the host's walks: the map needs host arrays
        out = cumha.attention(*(xp.asarray(x) for x in (q, k, v)), mask=on_device[title])
        expected = cumha.reference.attention(q, k, v, mask=mask)
        np.testing.assert_allclose(array_library.to_numpy(out), expected, rtol=0, atol=2e-5)

    small, large = masks.window(15, 0), masks.window(31, 0)
    assert small.structure == large.structure
    print(
        f"\nwindow(15, 0) and window(31, 0) share one kernel: {small.numbers} and {large.numbers}"
    )


if __name__ == "__main__":
    main()
