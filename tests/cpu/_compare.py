"""Is a result within the error of its dtype? The criterion of the CUDA cores and the host."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np


def largest_score(q: Any, k: Any, scale: float) -> float:
    """The largest finite |scale * q . k| over all heads, [batch, heads, len, dim] arrays."""
    if 0 in q.shape or 0 in k.shape:
        return 0.0
    q, k = q.astype(np.float64), k.astype(np.float64)
    group = q.shape[1] // k.shape[1]
    with np.errstate(all="ignore"):
        scores = q @ np.repeat(k, group, axis=1).swapaxes(2, 3) * scale
    return largest_finite(scores)


def largest_finite(x: Any) -> float:
    x = np.abs(x.astype(np.float64))
    return float(np.max(x, where=np.isfinite(x), initial=0.0))


def assert_close(
    got: np.ndarray, want: np.ndarray, *, dtype: Any, max_score: float, max_value: float
) -> None:
    """Compare a result with float64: NaN and infinities first, then the error.

    One rounding of the result's dtype, and what computing in float32 (float64 for float64) costs:
    the error of a score is its rounding, and it changes a weight by that much relative to itself.
    """
    dtype = np.dtype(dtype)
    assert got.dtype == dtype and got.shape == want.shape
    with np.errstate(over="ignore"):
        rounded = want.astype(dtype).astype(np.float64)
    got = got.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg="NaN")
    np.testing.assert_array_equal(
        np.where(np.isinf(got), got, 0), np.where(np.isinf(rounded), rounded, 0), err_msg="inf"
    )
    finite = np.isfinite(rounded)
    want = np.where(finite, want, 0)
    error = np.where(finite, np.abs(np.where(finite, got, 0) - want), 0)
    info = ml_dtypes.finfo(dtype)
    if dtype == np.float64:
        computing = 1e-13 + 8 * float(info.eps) * max_score * max_value
    else:
        computing = 1e-5 + 4 * float(np.finfo(np.float32).eps) * max_score * max_value
    allowed = computing + float(info.eps) * np.abs(want) + float(info.smallest_subnormal)
    if (error > allowed).any():
        at = tuple(map(int, np.unravel_index(np.argmax(error - allowed), error.shape)))
        raise AssertionError(f"{at}: got {got[at]}, want {want[at]}, allowed {allowed[at]}")
