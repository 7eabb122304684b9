"""Split-KV by hand: 128 keys in 2 splits, two partial results, one merge.

    python examples/split_kv.py [--gpu | --cpu]

A partial result is a State (o, m, l) per row: m the score that was subtracted, l the sum of
e^(score - m), o the sum of e^(score - m) * v, not divided by anything.
"""

from __future__ import annotations

from typing import Any

import array_library
import numpy as np

import cumha
from cumha import masks

BATCH, HEADS_Q, HEADS_KV, LEN_Q, LEN_K, DIM = 2, 4, 2, 3, 128, 32
HALF = LEN_K // 2


def merged_by_hand(first: cumha.State, second: cumha.State, xp: Any) -> tuple[Any, Any]:
    """The merge, written out; returns out and lse. Every row must have a key in both states."""
    m = xp.maximum(first.m, second.m)
    w1, w2 = xp.exp(first.m - m), xp.exp(second.m - m)
    l = first.l * w1 + second.l * w2  # noqa: E741
    o = first.o * w1[..., None] + second.o * w2[..., None]
    return o / l[..., None], m + xp.log(l)


def merged_as_published(first: cumha.State, second: cumha.State, xp: Any) -> Any:
    """The merge as some articles print it: each o multiplied by its l once more.

    That is right for normalised outputs, o / l. With unnormalised ones each sum of weights counts
    twice.
    """
    m = xp.maximum(first.m, second.m)
    w1, w2 = first.l * xp.exp(first.m - m), second.l * xp.exp(second.m - m)
    o = first.o * w1[..., None] + second.o * w2[..., None]
    return o / (w1 + w2)[..., None]


def largest_difference(x: Any, y: Any) -> float:
    return float(abs(x - y).max())


def main() -> None:
    xp = array_library.choose(__doc__.splitlines()[0])
    generator = np.random.default_rng(0)

    def normal(heads: int, length: int) -> Any:
        shape = (BATCH, heads, length, DIM)
        return xp.asarray(generator.standard_normal(shape), dtype=np.float32)

    q, k, v = normal(HEADS_Q, LEN_Q), normal(HEADS_KV, LEN_K), normal(HEADS_KV, LEN_K)
    whole, whole_lse = cumha.attention(q, k, v, causal=True, return_lse=True)

    # Each part holds half of the keys. key_offset and total_keys tell the mask where they stand.
    parts = [
        cumha.partial_attention(
            q, k[:, :, a:b], v[:, :, a:b], causal=True, key_offset=a, total_keys=LEN_K
        )
        for a, b in ((0, HALF), (HALF, LEN_K))
    ]
    for part in parts:
        print(part)

    out, lse = merged_by_hand(*parts, xp)
    print(f"by hand       differs from one call by {largest_difference(out, whole):.1e}")
    assert largest_difference(out, whole) < 1e-5
    assert largest_difference(lse, whole_lse) < 1e-5

    out, lse = cumha.merge(*parts).finish()
    print(f"cumha.merge   differs from one call by {largest_difference(out, whole):.1e}")
    assert largest_difference(out, whole) < 1e-5
    assert largest_difference(lse, whole_lse) < 1e-5

    wrong = merged_as_published(*parts, xp)
    print(f"with o * l    differs from one call by {largest_difference(wrong, whole):.1e}: wrong")
    assert largest_difference(wrong, whole) > 0.1

    # The same formula is right once o is normalised; State.from_normalized takes such results.
    normalised = [cumha.State.from_normalized(*part.to_normalized()) for part in parts]
    assert largest_difference(cumha.merge(*normalised).finish()[0], whole) < 1e-5

    # A window of 17 keys lies in the second half: the first state is empty, and changes nothing.
    near = masks.window(16, 0)
    empty, full = (
        cumha.partial_attention(
            q, k[:, :, a:b], v[:, :, a:b], mask=near, key_offset=a, total_keys=LEN_K
        )
        for a, b in ((0, HALF), (HALF, LEN_K))
    )
    assert not empty.l.any()
    assert bool((cumha.merge(empty, full).o == full.o).all())
    print("an empty part leaves the other one as it is, bit for bit")

    if xp is np:  # on the host one call can be told to split
        split = cumha.attention(q, k, v, causal=True, keys_per_split=HALF)
        print(f"one split call differs from a whole one by {largest_difference(split, whole):.1e}")
        assert largest_difference(split, whole) < 1e-5


if __name__ == "__main__":
    main()
