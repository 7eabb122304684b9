"""How calls are timed: the interface, its form for the host, and the statistics of a sample.

`cumha.bench.gpu.GpuClock` is the form for a GPU. Everything else in this package is written against
the interface, so that it runs and is tested without a GPU.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Call = Callable[[], Any]

#: Array elements drawn at random; larger arrays repeat them.
PATTERN = 2**22


REPLAY_SECONDS = 1e-3  # what a replay should take at least, so that starting it does not count
ENOUGH = 0.8  # of that
CLOCKS_SECONDS = 0.02  # of launches before anything is measured: an idle GPU lowers its clocks
KERNEL_SECONDS = 10.0  # about what the timed replays of one case may take
FEWEST_REPEATS = 5


@dataclass(frozen=True)
class Sample:
    """Seconds of one call: the median, and what 5 and 95 of 100 stay below."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(seconds: Sequence[float]) -> Sample:
        """Summarise at least one time."""
        low, high = np.percentile(seconds, [5, 95])
        return Sample(statistics.median(seconds), float(low), float(high), len(seconds))


def replayed(
    capture: Callable[[int], Call],
    timed: Callable[[Call, int], list[float]],
    sets: int,
    most: int,
    warmups: int,
    repeats: int,
) -> Sample:
    """Time of a launch in replays of one graph.

    Parameters
    ----------
    capture : callable
        Makes a graph of so many launches, the input sets in turn; gives what replays it.
    timed : callable
        Seconds of each of so many runs.
    sets : int
        Input sets; the graph holds each equally often.
    most : int
        Launches of a graph, unless there are more sets.
    """
    launches, replay = sets, capture(sets)
    begun = time.perf_counter()
    while time.perf_counter() - begun < CLOCKS_SECONDS:
        timed(replay, 3)
    took = max(min(timed(replay, 3)), 1e-9)
    while launches < most and took < ENOUGH * REPLAY_SECONDS:
        wanted = min(launches * REPLAY_SECONDS / took, most)
        launches = sets * math.ceil(wanted / sets)
        replay = capture(launches)
        took = max(min(timed(replay, 3)), 1e-9)
    fitting = int(KERNEL_SECONDS / took)
    timed(replay, min(warmups, fitting))
    repeats = max(FEWEST_REPEATS, min(repeats, fitting))
    return Sample.of([s / launches for s in timed(replay, repeats)])


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class Clock(Protocol):
    """Where the arrays of a case live and how its calls are timed; all times in seconds."""

    library: str  # "numpy" or "cupy"
    l2_bytes: int  # of the cache that input sets are rotated past; 0: they are not

    def facts(self) -> dict[str, Any]:
        """What the machine is, for reports."""

    def free_bytes(self) -> int | None:
        """Memory that arrays may take; None where that is not known."""

    def array(self, x: np.ndarray) -> Any:
        """A copy where the kernels run."""

    def random(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Normal numbers; they repeat after `PATTERN` elements."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Uninitialised memory."""

    def release(self) -> None:
        """Give back memory that is no longer used."""

    def kernel(self, calls: Sequence[Call], warmups: int, repeats: int) -> Sample:
        """Time per call on the device, the calls taken in turn."""

    def eager(self, call: Call) -> Sample | None:
        """Time that the host spends on one call, not awaited; None where that means nothing."""

    def end_to_end(
        self, inputs: Sequence[Any], out: Any, call: Call, repeats: int
    ) -> Sample | None:
        """Copies of the inputs to the device, the call, and the copy of ``out`` back."""

    def readers(self, sets: Sequence[tuple[Any, Any]], share: float) -> list[Call] | None:
        """Calls that only read this share of each pair of arrays; None where there are none."""

    def matmul(self, size: int, warmups: int, repeats: int) -> Sample | None:
        """Time of a float32 product of square matrices, no TF32; None where there is none."""


class HostClock:
    """NumPy arrays on the host, `time.perf_counter` around each call."""

    library = "numpy"
    l2_bytes = 0

    def __init__(self) -> None:
        self._generator = np.random.default_rng(0)

    def facts(self) -> dict[str, Any]:
        """Processor, cores, NumPy and its BLAS."""
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        return {
            "device": processor(),
            "cores": usable_cores(),
            "numpy": np.__version__,
            "blas": f"{blas.get('name')} {blas.get('version')}",
        }

    def free_bytes(self) -> int | None:
        """Not asked for."""
        return None

    def array(self, x: np.ndarray) -> Any:
        """The array itself."""
        return x

    def random(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Normal numbers that repeat after `PATTERN` elements."""
        size = int(np.prod(shape))
        pattern = self._generator.standard_normal(min(size, PATTERN), dtype=np.float32)
        return np.resize(pattern.astype(dtype), shape)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Uninitialised memory."""
        return np.empty(shape, dtype)

    def release(self) -> None:
        """Nothing is kept."""

    def kernel(self, calls: Sequence[Call], warmups: int, repeats: int) -> Sample:
        """One measurement per call; there is nothing asynchronous to wait for."""
        for i in range(max(warmups, 1)):
            calls[i % len(calls)]()
        seconds = []
        for i in range(repeats):
            start = time.perf_counter()
            calls[i % len(calls)]()
            seconds.append(time.perf_counter() - start)
        return Sample.of(seconds)

    def eager(self, call: Call) -> Sample | None:
        """A host call is its own kernel."""
        return None

    def end_to_end(
        self, inputs: Sequence[Any], out: Any, call: Call, repeats: int
    ) -> Sample | None:
        """There is nothing to copy."""
        return None

    def readers(self, sets: Sequence[tuple[Any, Any]], share: float) -> list[Call] | None:
        """No ceiling is measured on the host."""
        return None

    def matmul(self, size: int, warmups: int, repeats: int) -> Sample | None:
        """No ceiling is measured on the host."""
        return None


def processor() -> str:
    """The processor's name, as well as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def opened(*, host: bool) -> Iterator[Clock]:
    """Make a clock for a ``with`` block; on a GPU its stream is the current one inside.

    Raises
    ------
    RuntimeError
        CuPy or a GPU is missing.
    """
    if host:
        yield HostClock()
        return
    from cumha.bench.gpu import GpuClock

    try:
        clock = GpuClock()
    except RuntimeError as error:
        raise RuntimeError(f"{error}; for the host path give --host") from error
    with clock:
        yield clock
