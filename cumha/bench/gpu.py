"""Timing on a GPU: CUDA graphs between events, a read kernel and a matrix product as ceilings.

The only module here that needs CuPy, imported when a clock is made.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from cumha.bench.clock import PATTERN, Call, Sample, replayed
from cumha.compile import nvrtc_version
from cumha.device import Device, cuda_version, import_cupy

MOST_LAUNCHES = 1024  # in a graph, unless there are more input sets
EAGER_CALLS = 20  # queued without waiting; far fewer than the queue holds
EAGER_ROUNDS = 10
EAGER_SECONDS = 1.0  # after which no more rounds begin: long kernels
END_TO_END_SECONDS = 3.0  # about what the end-to-end runs of one case may take
FEWEST_END_TO_END = 5
READ_THREADS = 512
READ_BLOCKS_PER_SM = 8

#: Streams both arrays once, 16 bytes at a load, four loads of a thread in flight. The sum goes
#: nowhere: the comparison only keeps the compiler from leaving the loads out.
READ_KERNEL = r"""
__device__ float sum_of(const float4* __restrict__ x, long long vectors)  // [vectors]
{
    const long long step = gridDim.x * static_cast<long long>(blockDim.x);
    long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    float sum = 0.0f;
    for (; i + 3 * step < vectors; i += 4 * step) {
        const float4 a = __ldcs(x + i);
        const float4 b = __ldcs(x + i + step);
        const float4 c = __ldcs(x + i + 2 * step);
        const float4 d = __ldcs(x + i + 3 * step);
        sum += (a.x + a.y + a.z + a.w) + (b.x + b.y + b.z + b.w);
        sum += (c.x + c.y + c.z + c.w) + (d.x + d.y + d.z + d.w);
    }
    for (; i < vectors; i += step) {
        const float4 a = __ldcs(x + i);
        sum += a.x + a.y + a.z + a.w;
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(512, 4) read_once(
    const float4* k, long long k_vectors, const float4* v, long long v_vectors, float* sink)
{
    const float sum = sum_of(k, k_vectors) + sum_of(v, v_vectors);
    if (sum == 12345.678f) *sink = sum;
}
"""


class GpuClock:
    """CuPy arrays on the current GPU; everything goes over one stream of its own.

    Use as a context manager: inside, that stream is the current one.

    Raises
    ------
    RuntimeError
        CuPy or a GPU is missing.
    """

    library = "cupy"

    def __init__(self) -> None:
        self.device = Device.current()
        self.l2_bytes = self.device.l2_bytes
        self.cupy = import_cupy()
        # A capture needs a stream of its own, and one that does not wait for the default stream.
        self.stream = self.cupy.cuda.Stream(non_blocking=True)
        self._pattern: dict[Any, Any] = {}
        self._drawn = 0
        self._reader: Any = None

    def __enter__(self) -> GpuClock:
        self.stream.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self.stream.synchronize()
        except self.cupy.cuda.runtime.CUDARuntimeError:
            pass  # each time was awaited when it was taken, and the case that failed says so
        finally:
            self.stream.__exit__(*error)

    def facts(self) -> dict[str, Any]:
        """GPU, driver, versions."""
        runtime = self.cupy.cuda.runtime
        bandwidth = self.device.memory_bandwidth
        return {
            "device": self.device.name,
            "sm_count": self.device.sm_count,
            "l2_bytes": self.l2_bytes,
            "data_sheet_bandwidth": bandwidth,
            "driver": driver_version(self.cupy),
            "cuda_runtime": cuda_version(runtime.runtimeGetVersion()),
            "nvrtc": ".".join(map(str, nvrtc_version())),
            "cupy": self.cupy.__version__,
            "numpy": np.__version__,
        }

    def free_bytes(self) -> int | None:
        """Free on the device, or kept by CuPy's pool without use."""
        pool = self.cupy.get_default_memory_pool()
        return int(self.cupy.cuda.runtime.memGetInfo()[0] + pool.free_bytes())

    def array(self, x: np.ndarray) -> Any:
        """A contiguous copy on the device; waits for it."""
        copied = self.cupy.asarray(x)
        self.stream.synchronize()
        return copied

    def random(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Normal numbers that repeat after `PATTERN` elements, copied on the device."""
        dtype = np.dtype(dtype)
        if dtype not in self._pattern:
            drawn = np.random.default_rng(0).standard_normal(PATTERN, dtype=np.float32)
            self._pattern[dtype] = self.array(drawn.astype(dtype).view(np.uint8))
        pattern = self._pattern[dtype]
        x = self.empty(shape, dtype)
        # Each array begins at another place of the pattern: keys are not values.
        begin = self._drawn * 4099 * dtype.itemsize % pattern.nbytes
        self._drawn += 1
        filled = 0
        while filled < x.nbytes:
            size = min(pattern.nbytes - begin, x.nbytes - filled)
            (x.data + filled).copy_from_device_async(pattern.data + begin, size, self.stream)
            filled, begin = filled + size, 0
        return x

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Uninitialised device memory from CuPy's pool."""
        return self.cupy.empty(shape, dtype)

    def _bytes(self, x: Any) -> Any:
        """A contiguous array's memory as bytes: copies then need no kernel for its dtype."""
        return self.cupy.ndarray((x.nbytes,), np.uint8, memptr=x.data)

    def release(self) -> None:
        """Return unused memory to the device."""
        self.stream.synchronize()
        self.cupy.get_default_memory_pool().free_all_blocks()
        self.cupy.get_default_pinned_memory_pool().free_all_blocks()

    def kernel(self, calls: Sequence[Call], warmups: int, repeats: int) -> Sample:
        """Time per launch in replays of one graph, the calls in turn."""
        for call in calls:  # builds and loads what a capture may not
            call()
        self.stream.synchronize()
        return replayed(
            lambda launches: self._captured(calls, launches).launch,
            self._timed, len(calls), MOST_LAUNCHES, warmups, repeats,
        )  # fmt: skip

    def _captured(self, calls: Sequence[Call], launches: int) -> Any:
        """A graph of so many calls; they must neither allocate nor compile."""
        self.stream.begin_capture()
        try:
            for i in range(launches):
                calls[i % len(calls)]()
        finally:
            graph = self.stream.end_capture()
        graph.upload(self.stream)
        return graph

    def _timed(self, run: Call, times: int) -> list[float]:
        """Seconds on the device of each run; they are queued one behind the other, then awaited."""
        cuda = self.cupy.cuda
        events = [(cuda.Event(), cuda.Event()) for _ in range(times)]
        for start, stop in events:
            start.record(self.stream)
            run()
            stop.record(self.stream)
        self.stream.synchronize()
        return [cuda.get_elapsed_time(*pair) * 1e-3 for pair in events]

    def eager(self, call: Call) -> Sample | None:
        """Host time of a call while the device lags behind."""
        seconds: list[float] = []
        begun = time.perf_counter()
        while len(seconds) < EAGER_ROUNDS and time.perf_counter() - begun < EAGER_SECONDS:
            start = time.perf_counter()
            for _ in range(EAGER_CALLS):
                call()
            seconds.append((time.perf_counter() - start) / EAGER_CALLS)
            self.stream.synchronize()
        return Sample.of(seconds)

    def end_to_end(
        self, inputs: Sequence[Any], out: Any, call: Call, repeats: int
    ) -> Sample | None:
        """Wall clock from arrays in pinned memory to the result in pinned memory."""
        pairs = [(self._bytes(x), self._pinned(x.nbytes)) for x in inputs]
        for device, host in pairs:
            device.get(out=host)
        result, copied = self._bytes(out), self._pinned(out.nbytes)

        def once() -> float:
            self.stream.synchronize()
            start = time.perf_counter()
            for device, host in pairs:
                device.set(host, stream=self.stream)
            call()
            result.get(stream=self.stream, out=copied, blocking=False)
            self.stream.synchronize()
            return time.perf_counter() - start

        once()
        fitting = int(END_TO_END_SECONDS / max(once(), 1e-9))
        return Sample.of([once() for _ in range(max(FEWEST_END_TO_END, min(repeats, fitting)))])

    def _pinned(self, size: int) -> np.ndarray:
        memory = self.cupy.cuda.alloc_pinned_memory(max(size, 1))  # rounded up, hence the shape
        return np.ndarray((size,), np.uint8, buffer=memory)

    def readers(self, sets: Sequence[tuple[Any, Any]], share: float) -> list[Call] | None:
        """Launches of the read kernel, one for each pair of arrays."""
        if self._reader is None:
            module = self.cupy.RawModule(code=READ_KERNEL, options=("--std=c++17",))
            self._reader = module.get_function("read_once")
        kernel, sink = self._reader, self.cupy.zeros(1, np.float32)
        grid = (READ_BLOCKS_PER_SM * self.device.sm_count,)

        def reader(k: Any, v: Any) -> Call:
            counts = [np.int64(int(x.nbytes * share) // 16) for x in (k, v)]
            arguments = (self._bytes(k), counts[0], self._bytes(v), counts[1], sink)
            return lambda: kernel(grid, (READ_THREADS,), arguments)

        return [reader(k, v) for k, v in sets]

    def matmul(self, size: int, warmups: int, repeats: int) -> Sample | None:
        """cuBLAS through CuPy, which uses TF32 only where the environment asks for it.

        Raises
        ------
        RuntimeError
            It does ask for it.
        """
        if os.environ.get("CUPY_TF32", "0") != "0":
            raise RuntimeError("CUPY_TF32 is set, so it would not be one in float32")
        x, y = (self.random((size, size), np.float32) for _ in range(2))
        out = self.empty((size, size), np.float32)

        # CuPy refuses to capture cuBLAS. One product takes so long that starting it does not count.
        def product() -> None:
            self.cupy.matmul(x, y, out=out)

        self._timed(product, max(warmups, 1))
        return Sample.of(self._timed(product, repeats))


def driver_version(cupy: Any) -> str:
    """The driver's version as nvidia-smi gives it, else the CUDA version that it supports."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.split()[0]
    return f"for CUDA {cuda_version(cupy.cuda.runtime.driverGetVersion())}"
