"""One list of tests for every path that computes attention: the fixture ``runner`` calls it.

Tests hand NumPy arrays over and get NumPy arrays back. For a kernel path every array, those of the
mask too, is moved to the GPU as the view it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cumha
from cumha import masks, testing

PATHS = {"host": "numpy", "naive": "cupy"}  # path -> library of its arrays


class Runner:
    """Calls one path with NumPy arrays."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.library = PATHS[path]

    def move(self, x: Any) -> Any:
        """An array, or the arrays of a mask, where the path wants them; anything else as it is."""
        if self.library == "numpy":
            return x
        if isinstance(x, masks.Expr):
            return masks.map_arrays(x, testing.to_device)
        return testing.to_device(x) if isinstance(x, np.ndarray) else x

    def attention(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        *,
        out: np.ndarray | None = None,
        lse: np.ndarray | None = None,
        return_lse: bool = True,
        **options: Any,
    ) -> Any:
        """`cumha.attention`; given outputs are filled, with what the path did around them.

        Without them every other shape gets outputs full of NaN, the others are allocated where NaN
        has been.
        """
        shape = (*q.shape[:3], v.shape[3])
        if out is None and sum(shape) % 2:
            out = np.full(shape, np.nan).astype(q.dtype)
            heads, length = shape[1:3] if options.get("layout") != "BLHD" else shape[2:0:-1]
            lse = np.full((shape[0], heads, length), np.nan, np.float32) if return_lse else None
        elif out is None:
            self._dirty_pool(int(np.prod(shape)) * q.itemsize)
        given = {"out": out, "lse": lse}
        moved = {n: self.move(x) for n, x in given.items() if x is not None}
        options = {n: x if n == "key_lengths" else self.move(x) for n, x in options.items()}
        result = cumha.attention(
            *(self.move(x) for x in (q, k, v)),
            return_lse=return_lse,
            path=self.path,
            **{**options, **moved},
        )
        for name, got in zip(("out", "lse"), result if return_lse else (result,), strict=False):
            if name in moved:
                assert got is moved[name], f"{name}= was not what came back"
        if self.library == "cupy":
            for name, x in moved.items():
                testing.read_back(x, given[name])
        results = result if return_lse else (result,)
        named = zip(results, given.values(), strict=False)
        hosted = tuple(testing.to_host(x) if host is None else host for x, host in named)
        return hosted if return_lse else hosted[0]

    def partial(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> cumha.State:
        """`cumha.partial_attention`; the State stays where the path computes."""
        options = {n: x if n == "key_lengths" else self.move(x) for n, x in options.items()}
        return cumha.partial_attention(
            *(self.move(x) for x in (q, k, v)), path=self.path, **options
        )

    def check(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> Any:
        """Compare a call with the reference; returns (out, lse)."""
        out, lse = self.attention(q, k, v, **options)
        meaning = ("mask", "causal", "key_lengths", "scale", "layout")
        asked = {n: x for n, x in options.items() if n in meaning}
        testing.expect(q, k, v, **asked).check(out, lse)
        return out, lse

    def _dirty_pool(self, nbytes: int) -> None:
        """Leave NaN in the block that CuPy's pool hands out next."""
        if self.library == "cupy" and nbytes:
            import cupy

            block = cupy.empty(nbytes, np.uint8)
            block.data.memset_async(0xFF, nbytes, cupy.cuda.get_current_stream())


@pytest.fixture(
    params=[pytest.param(p, marks=pytest.mark.gpu if p != "host" else ()) for p in PATHS]
)
def runner(request: pytest.FixtureRequest) -> Runner:
    """The paths in turn; kernel paths need a GPU."""
    return Runner(request.param)


@pytest.fixture(params=[pytest.param(p, marks=pytest.mark.gpu) for p in PATHS if p != "host"])
def gpu(request: pytest.FixtureRequest) -> Runner:
    """The kernel paths in turn, for rows of the contract that only a device has."""
    return Runner(request.param)
