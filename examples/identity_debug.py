"""Inputs whose attention is known by heart: what to try first when numbers look wrong.

    python examples/identity_debug.py [--gpu | --cpu]

Each case is small enough to read (4 or 8 positions), has a known output, and finds its own kind of
mistake. Replace ``cumha.attention`` by the kernel that you are writing.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import array_library
import numpy as np

import cumha


def attend(xp: ModuleType, q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Attention over matrices [len, dim]: one batch entry and head, scale 1. Gives out, lse."""
    inputs = (xp.asarray(x, dtype=np.float32)[None, None] for x in (q, k, v))
    out, lse = cumha.attention(*inputs, scale=1.0, return_lse=True, **options)
    return array_library.to_numpy(out)[0, 0], array_library.to_numpy(lse)[0, 0]


def show(title: str, out: np.ndarray) -> None:
    print(f"\n{title}")
    for row in out:
        print("   " + " ".join(f"{x:6.3f}" for x in row))


def check(got: np.ndarray, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def identity(xp: ModuleType, n: int) -> None:
    """Q = K = V = I: scores are 1 on the diagonal, else 0, and V = I shows the weights."""
    eye = np.eye(n)
    out, lse = attend(xp, eye, eye, eye)
    total = np.e + n - 1
    show(f"Q = K = V = I, {n} positions: e / (e + {n - 1}) on the diagonal", out)
    check(out, (1 + (np.e - 1) * eye) / total)
    check(lse, np.full(n, np.log(total)))


def one_hot_keys(xp: ModuleType, n: int) -> None:
    """Query i matches one key by a wide margin, so the row is that key's value, to the last bit.

    I is its own transpose; a permutation is not: K read the wrong way round shows here.
    """
    order = np.roll(np.arange(n), 1)
    values = np.arange(n * n, dtype=np.float32).reshape(n, n)
    out, _ = attend(xp, 200 * np.eye(n), np.eye(n)[order], values)
    show(f"one-hot keys, key j holds 1 at {order}[j]: query i gets the value of its key", out)
    assert np.array_equal(out, values[np.argsort(order)])


def constant_values(xp: ModuleType, n: int) -> None:
    """Weights sum to 1: equal values come out as they are, whatever Q and K hold."""
    generator = np.random.default_rng(n)
    q, k = generator.standard_normal((2, n, n))
    out, _ = attend(xp, q, k, np.full((n, n), 3.0))
    show("random Q and K, V = 3 everywhere: 3", out)
    check(out, 3.0)


def causal_means(xp: ModuleType, n: int) -> None:
    """Q = 0 weighs all visible keys alike: row i of the result is the mask, divided by its sum."""
    out, lse = attend(xp, np.zeros((n, n)), np.eye(n), np.eye(n), causal=True)
    show("Q = 0, V = I, causal: row i is 1 / (i + 1) up to the diagonal", out)
    rows = np.arange(1, n + 1)
    check(out, np.tril(np.ones((n, n))) / rows[:, None])
    check(lse, np.log(rows))


def last_queries(xp: ModuleType, n: int) -> None:
    """Two queries on n keys: the last query sees the last key, also where the buffer is longer."""
    q = np.zeros((2, n))
    out, _ = attend(xp, q, np.eye(n), np.eye(n), causal=True)
    show(f"2 queries, {n} keys, causal: bottom-right, the first row misses one key", out)
    check(out, np.tril(np.ones((2, n)), n - 2) / [[n - 1], [n]])

    out, _ = attend(xp, q, np.eye(n), np.eye(n), causal=True, key_lengths=xp.asarray([n - 1]))
    show(f"the same with key_lengths = [{n - 1}]: everything moves one key to the left", out)
    check(out, np.tril(np.ones((2, n)), n - 3) / [[n - 2], [n - 1]])


def no_key(xp: ModuleType, n: int) -> None:
    """More queries than keys: the first rows stand before key 0. They are 0, not NaN."""
    out, lse = attend(xp, np.zeros((n, 2)), np.eye(2), np.ones((2, 2)), causal=True)
    show(f"{n} queries, 2 keys, causal: {n - 2} rows without a key", out)
    assert np.array_equal(out[: n - 2], np.zeros((n - 2, 2)))
    assert np.isneginf(lse[: n - 2]).all()
    check(out[n - 2 :], 1.0)


def main() -> None:
    xp = array_library.choose(__doc__.splitlines()[0])
    print(f"attention over {xp.__name__} arrays")
    for n in (4, 8):
        for case in (identity, one_hot_keys, constant_values, causal_means, last_queries, no_key):
            case(xp, n)
    print("\nall as expected")


if __name__ == "__main__":
    main()
