"""One list of tests for every path that computes attention: the fixture ``runner`` calls it.

Tests hand NumPy arrays over and get NumPy arrays back. For a kernel path on a GPU every array,
those of the mask too, is moved there as the view it is. The same kernel emulated on the CPU takes
the arrays as they are; it reports every access outside them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cumha
from cumha import emulate, masks, testing
from cumha.paths import MAX_HEAD_DIM, PATHS
from cumha.problem import DTYPES

KERNELS = ("naive", "gemv", "tiled")


class Runner:
    """Calls one path on one backend with NumPy arrays.

    Attributes
    ----------
    how : dict
        The arguments of `cumha.attention` that choose the path and the backend.
    library : str
        That of the arrays it takes, "numpy" or "cupy".
    """

    def __init__(self, path: str, backend: str) -> None:
        self.path = path
        self.emulated = backend == "emulate"
        self.library = "cupy" if backend == "cuda" else "numpy"
        self.how = {"path": path, "backend": backend}
        self.splits = path != "naive"  # whether it can divide keys
        self.sums_alike = path != "gemv"  # there the width of loads decides who sums what

    def skip_if_refused(self, q: np.ndarray, v: np.ndarray) -> None:
        """Some paths leave a dtype or the largest heads to another one, as their record says."""
        record = next(p for p in PATHS if p.name == self.path)
        if str(q.dtype) in DTYPES and str(q.dtype) not in record.dtypes:
            pytest.skip(f"{self.path} does not take {q.dtype}")
        if record.max_head_dim < max(q.shape[3], v.shape[3]) <= MAX_HEAD_DIM:
            pytest.skip(f"{self.path} takes heads up to {record.max_head_dim}")

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
        must_run: bool = False,
        **options: Any,
    ) -> Any:
        """`cumha.attention`; given outputs are filled, with what the path did around them.

        Without them every other shape gets outputs full of NaN, the others are allocated where NaN
        has been.
        """
        if not must_run and q.ndim == v.ndim == 4:
            self.skip_if_refused(q, v)
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
            **{**self.how, **options, **moved},
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
        self.skip_if_refused(q, v)
        options = {n: x if n == "key_lengths" else self.move(x) for n, x in options.items()}
        return cumha.partial_attention(*(self.move(x) for x in (q, k, v)), **self.how, **options)

    def with_device_lengths(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths: np.ndarray, **options: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse) for lengths that the host does not check.

        On a GPU they are an array there. Emulated they take the place of those that were checked,
        with their dtype and stride.
        """
        self.skip_if_refused(q, v)
        moved = [self.move(x) for x in (q, k, v)]
        options = {**self.how, **options, "return_lse": True}
        if self.library == "cupy":
            got = cumha.attention(*moved, key_lengths=self.move(lengths), **options)
        else:
            plan = cumha.plan(*moved, key_lengths=np.zeros(len(lengths), np.int64), **options)
            problem = dataclasses.replace(plan.problem, key_lengths=str(lengths.dtype))
            arrays = plan.arrays._replace(key_lengths=lengths)
            got = dataclasses.replace(plan, problem=problem).execute(arrays)
        return tuple(testing.to_host(x) for x in got)  # type: ignore[return-value]

    def reordered(self, seed: int) -> contextlib.AbstractContextManager[Any]:
        """Blocks and threads in another order, where something decides on it."""
        if not self.emulated:
            return contextlib.nullcontext()
        return emulate.using(seed=seed, workers=1 + seed % 3)

    def check(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> Any:
        """Compare a call with the reference; returns (out, lse)."""
        out, lse = self.attention(q, k, v, **options)
        meaning = ("mask", "causal", "key_lengths", "scale", "layout")
        asked = {n: x for n, x in options.items() if n in meaning}
        testing.expect(q, k, v, **asked).check(out, lse)
        return out, lse

    def _dirty_pool(self, nbytes: int) -> None:
        """Leave NaN in the block that the library hands out next."""
        if self.library == "numpy":
            np.full(nbytes, 0xFF, np.uint8)
        elif nbytes:
            import cupy

            block = cupy.empty(nbytes, np.uint8)
            block.data.memset_async(0xFF, nbytes, cupy.cuda.get_current_stream())


HOST = pytest.param(("host", "host"), id="host")
GPU = [pytest.param((p, "cuda"), id=p, marks=pytest.mark.gpu) for p in KERNELS]
EMULATED = [pytest.param((p, "emulate"), id=f"{p}-emulated") for p in KERNELS]


@pytest.fixture
def emulation() -> Iterator[None]:
    """Emulate kernels, in one thread where tests run in several processes already."""
    with _emulation():
        yield


@contextlib.contextmanager
def _emulation() -> Iterator[None]:
    try:
        emulate.host_compiler()
    except RuntimeError as error:
        pytest.skip(str(error))
    with emulate.using(workers=1 if "PYTEST_XDIST_WORKER" in os.environ else 0):
        yield


def _runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    path, backend = request.param
    with _emulation() if backend == "emulate" else contextlib.nullcontext():
        yield Runner(path, backend)


@pytest.fixture(params=[HOST, *GPU, *EMULATED])
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """The paths in turn; kernel paths need a GPU, or a C++ compiler where they are emulated."""
    yield from _runner(request)


@pytest.fixture(params=[*GPU, *EMULATED])
def kernel(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """The kernel paths in turn, for what the host path does in another way."""
    yield from _runner(request)


@pytest.fixture(params=GPU)
def gpu(request: pytest.FixtureRequest) -> Runner:
    """The kernel paths in turn, for rows of the contract that only a device has."""
    return Runner(*request.param)
