"""Mask structures that kernels are built for, with random numbers and arrays inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from cumha import masks


class Sizes(Protocol):
    """Extents a mask is made for, each at least 1; keys are those of the whole sequence."""

    @property
    def batch(self) -> int: ...
    @property
    def heads_q(self) -> int: ...
    @property
    def len_q(self) -> int: ...
    @property
    def len_k(self) -> int: ...


Builder = Callable[[np.random.Generator, Sizes], Any]


def _window(rng: np.random.Generator, sizes: Sizes) -> Any:
    return masks.window(int(rng.integers(0, 6)), int(rng.integers(0, 6)))


def _padding(rng: np.random.Generator, sizes: Sizes) -> Any:
    keep = masks.array(rng.random((sizes.batch, sizes.len_k)) < 0.6)
    return masks.where(lambda b, h, q, k: keep[b, k])


def _dense(rng: np.random.Generator, sizes: Sizes) -> Any:
    shape = (sizes.batch, sizes.heads_q, sizes.len_q, sizes.len_k)
    keep = masks.array(np.asfortranarray(rng.random(shape) < 0.6))
    return masks.where(lambda b, h, q, k: keep[b, h, q, k])


def _segments(rng: np.random.Generator, sizes: Sizes) -> Any:
    q_ids = masks.array(np.sort(rng.integers(0, 4, (sizes.batch, sizes.len_q), np.int32)))
    k_ids = masks.array(np.sort(rng.integers(0, 4, (sizes.batch, sizes.len_k), np.int32)))
    return masks.where(lambda b, h, q, k: q_ids[b, q] == k_ids[b, k])


def _prefix(rng: np.random.Generator, sizes: Sizes) -> Any:
    lengths = masks.array(rng.integers(0, sizes.len_k + 1, sizes.batch))
    return masks.where(lambda b, h, q, k: k < lengths[b]) | masks.causal()


def _blocks(rng: np.random.Generator, sizes: Sizes) -> Any:
    keep = masks.array(rng.random((sizes.len_q, sizes.len_k)) < 0.6)
    size = int(rng.integers(1, 5))
    return masks.where(lambda b, h, q, k: keep[q // size, k // size])


def _floats(rng: np.random.Generator, sizes: Sizes) -> Any:
    values = rng.standard_normal((sizes.heads_q, sizes.len_k)).astype(np.float32)
    values.flat[rng.integers(values.size)] = np.nan
    table = masks.array(values)
    limit = float(rng.standard_normal())
    return masks.where(lambda b, h, q, k: table[h, k] < limit)


def _starts(rng: np.random.Generator, sizes: Sizes) -> Any:
    starts = masks.array(rng.integers(0, sizes.len_k, (sizes.batch, sizes.heads_q), np.int16))
    return masks.where(lambda b, h, q, k: k >= starts[b, h])


def _table(rng: np.random.Generator, sizes: Sizes) -> Any:
    table = masks.array(rng.integers(-4, 5, (sizes.len_q,), np.int8)[::-1])
    return masks.where(lambda b, h, q, k: abs(k - q - table[q]) <= 3)


def _narrow(rng: np.random.Generator, sizes: Sizes) -> Any:
    """Arithmetic on narrow integers: beyond the rows that are scanned the type bounds it."""
    table = masks.array(rng.integers(0, 2, (sizes.len_q, sizes.len_k), np.int8))
    ends = masks.array(rng.integers(0, sizes.len_k, (sizes.len_q,), np.uint8))
    return masks.where(lambda b, h, q, k: (table[q, k] + 5 > 5) | (k <= ends[q] + 1))


def _number(low: int, high: int, build: Callable[[int], Any]) -> Builder:
    return lambda rng, sizes: build(int(rng.integers(low, high)))


STRUCTURES: dict[str, Builder] = {
    "none": lambda rng, sizes: None,
    "causal": lambda rng, sizes: masks.causal(),
    "causal_top_left": lambda rng, sizes: masks.causal("top_left"),
    "window": _window,
    "window_open_left": _number(0, 5, lambda n: masks.window(-1, n)),
    "causal_window": lambda rng, sizes: masks.causal() & _window(rng, sizes),
    "not_window": lambda rng, sizes: ~_window(rng, sizes),
    "padding": _padding,
    "causal_padding": lambda rng, sizes: masks.causal() & _padding(rng, sizes),
    "dense": _dense,
    "segments": _segments,
    "causal_segments": lambda rng, sizes: masks.causal() & _segments(rng, sizes),
    "prefix": _prefix,
    "blocks": _blocks,
    "floats": _floats,
    "starts": _starts,
    "table": _table,
    "dilated": _number(1, 4, lambda n: masks.where(lambda b, h, q, k: (q - k) % n == 0)),
    "chunks": _number(1, 5, lambda n: masks.where(lambda b, h, q, k: q // n == k // n)),
    "heads": _number(
        1, 4, lambda n: masks.where(lambda b, h, q, k: (h % n == 0) | (k <= masks.minimum(q, 3)))
    ),
    "parity": lambda rng, sizes: masks.where(lambda b, h, q, k: (k % 2 == 0) ^ (q % 3 == 0)),
    "narrow": _narrow,
    "last_half": lambda rng, sizes: masks.where(lambda b, h, q, k: k >= masks.len_k // 2),
}
