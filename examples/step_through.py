"""One warp of a kernel, key by key: scores, running maximum, running sum, weights.

    python examples/step_through.py [--len {4,8}] [--row N]

The kernel is ``kernels_cu/naive.cu``, run on the CPU by ``backend="emulate"``: one warp walks over
the keys of one query row. Q = K = V = I, so a score is 1 where query and key are at the same
position and 0 elsewhere, and V = I shows the weights. What the warp holds after j keys is the
State of a partial call over the first j keys; a call over key j alone gives its score.

Needs g++ or clang++; ends with exit code 1 and says what is missing where there is none.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

import cumha
from cumha import emulate, reference

HEAD_DIM = 8


def check(got: np.ndarray, want: np.ndarray | float) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def over_keys(x: np.ndarray, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the emulated kernel holds after keys first ... last - 1: o [row, dim], m and l [row]."""
    keys = x[:, :, first:last]
    state = cumha.partial_attention(
        x, keys, keys, scale=1.0, key_offset=first, total_keys=x.shape[2],
        path="naive", backend="emulate",
    )  # fmt: skip
    return state.o[0, 0], state.m[0, 0], state.l[0, 0]


def walk(x: np.ndarray, row: int) -> np.ndarray:
    """Print the steps of one row, check those of all rows; returns o / l after the last key."""
    n = x.shape[2]
    eye = x[0, 0]
    o, m, total = np.zeros((n, HEAD_DIM)), np.full(n, -np.inf), np.zeros(n)
    print(f"{'key':>6}{'score':>7}{'max':>7}{'shrink':>8}{'weight':>8}{'sum':>8}   o, not divided")
    for j in range(n):
        _, score, one = over_keys(x, j, j + 1)
        o_new, m_new, sum_new = over_keys(x, 0, j + 1)

        check(score, eye @ eye[j])  # a single key is its own maximum, with weight 1
        check(one, 1.0)
        check(m_new, np.maximum(m, score))
        shrink, weight = np.exp(m - m_new), np.exp(score - m_new)  # shrink: e^-inf is 0 at key 0
        check(sum_new, total * shrink + weight)
        check(o_new, o * shrink[:, None] + weight[:, None] * eye[j])

        o, m, total = o_new, m_new, sum_new
        values = (score[row], m[row], shrink[row], weight[row], total[row])
        line = "{:7.3f}{:7.3f}{:8.3f}{:8.3f}{:8.3f}".format(*values)
        print(f"{j:6}{line}   " + " ".join(f"{w:.3f}" for w in o[row, :n]))
    return o / total[:, None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--len", type=int, choices=(4, 8), default=8, help="queries and keys")
    parser.add_argument("--row", type=int, help="the query row to print (default: the middle)")
    options = parser.parse_args()
    n, row = options.len, options.len // 2 if options.row is None else options.row
    if not 0 <= row < n:
        parser.error(f"--row {row}: there are rows 0 to {n - 1}")
    try:
        emulate.host_compiler()
    except RuntimeError as error:
        sys.exit(f"this example runs a kernel on the CPU: {error}")

    x = np.eye(n, HEAD_DIM, dtype=np.float32)[None, None]  # q, k and v: [batch, heads, len, dim]
    print(f"Q = K = V = I, {n} positions, head_dim {HEAD_DIM}, scale 1")
    print(f"query row {row}: block {row // 4}, warp {row % 4}\n")
    weights = walk(x, row)

    out, lse = cumha.attention(
        x, x, x, scale=1.0, return_lse=True, path="naive", backend="emulate"
    )  # fmt: skip
    want, want_lse = reference.attention(x, x, x, scale=1.0, return_lse=True)
    check(weights, want[0, 0])
    check(out, want)
    check(lse, want_lse)
    print("\n   out = o / sum      " + " ".join(f"{w:.3f}" for w in out[0, 0, row, :n]))
    print(f"   lse = max + ln sum {lse[0, 0, row]:.3f}")
    print("\nevery row, step and result as expected")


if __name__ == "__main__":
    main()
