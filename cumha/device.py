"""What a GPU offers: the facts that planning and code generation decide from.

A `Device` is a plain value. `Device.current()` asks CuPy for one, `Device.named("h200")` gives one
without a GPU, and a test can make one by hand. Nothing here imports CuPy before it is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cumha.errors import UnsupportedError

#: Oldest GPU that the kernels are written for (Turing).
OLDEST_CAPABILITY = (7, 5)

#: From this capability on, each GPU generation has instructions of its own (wgmma, tcgen05) that
#: the compiler offers only under the architecture-specific name: sm_90a, sm_100a, sm_120a.
FIRST_SPECIFIC_CAPABILITY = (9, 0)

INSTALL_HINT = (
    'install cumha with the extra that fits the driver: pip install "cumha[cuda13]" '
    '(CUDA 13, driver 580 or newer) or "cumha[cuda12]" (CUDA 12)'
)


def import_cupy() -> Any:
    """Import CuPy, or say which extra brings it.

    Returns
    -------
    module
        ``cupy``.

    Raises
    ------
    RuntimeError
        CuPy is missing, or cannot be imported.
    """
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(f"CuPy cannot be imported ({error}); {INSTALL_HINT}") from error
    except OSError as error:
        # CuPy makes its own cache directory while it is imported.
        raise RuntimeError(
            f"CuPy cannot be imported ({error}); "
            "set CUPY_CACHE_DIR to a directory that can be written"
        ) from error
    return cupy


def cuda_version(number: int) -> str:
    """Version of a number as CUDA's interfaces give it: 13020 is 13.2."""
    return f"{number // 1000}.{number % 1000 // 10}"


@dataclass(frozen=True)
class Device:
    """One GPU, as the planner sees it.

    Attributes
    ----------
    name : str
        Name that the driver gives, for people only.
    compute_capability : tuple of int
        ``(major, minor)``.
    sm_count : int
        Streaming multiprocessors.
    shared_memory_optin : int
        Largest shared memory of one block, bytes.
    shared_memory_per_sm : int
        Shared memory of one multiprocessor, bytes.
    registers_per_sm : int
        32-bit registers of one multiprocessor.
    max_threads_per_sm : int
        Resident threads of one multiprocessor.
    l2_bytes : int
        Size of the L2 cache, bytes.
    memory_bandwidth : float or None
        Peak bandwidth of device memory, bytes per second; None where unknown.
    index : int
        CUDA device index.
    """

    name: str
    compute_capability: tuple[int, int]
    sm_count: int
    shared_memory_optin: int
    shared_memory_per_sm: int
    registers_per_sm: int = 65536
    max_threads_per_sm: int = 2048
    l2_bytes: int = 0
    memory_bandwidth: float | None = None
    index: int = 0

    @staticmethod
    def current() -> Device:
        """Return the current CUDA device of this thread.

        Raises
        ------
        RuntimeError
            CuPy is missing, or no GPU can be used.
        """
        cupy = import_cupy()
        try:
            index = int(cupy.cuda.runtime.getDevice())
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise _no_gpu(error) from error
        return Device.of(index)

    @staticmethod
    def of(index: int) -> Device:
        """Return the CUDA device `index`; asked once per process.

        Raises
        ------
        RuntimeError
            CuPy is missing, or there is no such GPU.
        """
        return _query(index)

    @staticmethod
    def named(name: str) -> Device:
        """Return a well-known GPU by name, for planning and tests without one.

        Parameters
        ----------
        name : str
            One of "t4", "a100", "rtx3090", "rtx4090", "h100", "h200", "b200", "rtx5090".

        Raises
        ------
        ValueError
            Unknown name; the message lists the known ones.
        """
        try:
            return NAMED[name.lower()]
        except KeyError:
            known = ", ".join(sorted(NAMED))
            raise ValueError(f"unknown device {name!r}; known are {known}") from None


@functools.cache
def _query(index: int) -> Device:
    cupy = import_cupy()
    runtime = cupy.cuda.runtime
    try:
        attributes = cupy.cuda.Device(index).attributes
        properties = runtime.getDeviceProperties(index)
    except runtime.CUDARuntimeError as error:
        raise _no_gpu(error, index) from error
    return Device(
        name=properties["name"].decode(),
        compute_capability=(properties["major"], properties["minor"]),  # not among `attributes`
        sm_count=attributes["MultiProcessorCount"],
        shared_memory_optin=attributes["MaxSharedMemoryPerBlockOptin"],
        shared_memory_per_sm=attributes["MaxSharedMemoryPerMultiprocessor"],
        registers_per_sm=attributes["MaxRegistersPerMultiprocessor"],
        max_threads_per_sm=attributes["MaxThreadsPerMultiProcessor"],
        l2_bytes=attributes["L2CacheSize"],
        memory_bandwidth=_bandwidth(attributes),
        index=index,
    )


def _bandwidth(attributes: dict[str, int]) -> float | None:
    """Bytes per second from memory clock (kHz) and bus width (bits); two transfers per clock."""
    clock = attributes.get("MemoryClockRate", 0)
    width = attributes.get("GlobalMemoryBusWidth", 0)
    return clock * 1e3 * 2 * width / 8 if clock > 0 and width > 0 else None


def _no_gpu(error: Exception, index: int | None = None) -> RuntimeError:
    which = "no GPU" if index is None else f"GPU {index} not"
    return RuntimeError(
        f"{which} available: {error}; check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES, "
        f"and {INSTALL_HINT}; NumPy arrays need no GPU"
    )


def architecture(compute_capability: tuple[int, int], supported: Sequence[int]) -> str:
    """Name what NVRTC has to build for a GPU.

    Parameters
    ----------
    compute_capability : tuple of int
        ``(major, minor)`` of the GPU.
    supported : sequence of int
        What NVRTC builds for, as ``nvrtc.getSupportedArchs()`` gives it: ``90`` means 9.0.

    Returns
    -------
    str
        ``"sm_80"``, ``"sm_90a"``, ...: machine code for exactly this GPU. For a GPU that NVRTC does
        not know, ``"compute_XX"``: PTX of the newest one that it knows and that is not newer than
        the GPU; the plain one, since PTX of an architecture-specific target runs on no other GPU.

    Raises
    ------
    UnsupportedError
        The GPU is older than 7.5, or NVRTC builds for nothing that runs on it.
    """
    major, minor = compute_capability
    number = 10 * major + minor
    given = f"GPU of compute capability {major}.{minor}"
    builds = ", ".join(f"{n // 10}.{n % 10}" for n in sorted(supported)) or "nothing"
    oldest = 10 * OLDEST_CAPABILITY[0] + OLDEST_CAPABILITY[1]
    if number < oldest:
        raise UnsupportedError(f"{given}: cumha needs 7.5 or newer; this NVRTC builds for {builds}")
    if number in supported:
        suffix = "a" if compute_capability >= FIRST_SPECIFIC_CAPABILITY else ""
        return f"sm_{number}{suffix}"
    runnable = [n for n in supported if oldest <= n < number]
    if not runnable:
        raise UnsupportedError(
            f"{given}: this NVRTC builds for {builds}, none of which runs on it; "
            "try another CUDA version (extras cuda12, cuda13)"
        )
    return f"compute_{max(runnable)}"


_KIB, _MIB = 1024, 1024 * 1024

# Nominal figures of the data sheets; shared memory and thread limits from the CUDA C++ Programming
# Guide, table "Technical Specifications per Compute Capability".
NAMED = {
    "t4": Device(
        "Tesla T4", (7, 5), 40, 64 * _KIB, 64 * _KIB,
        max_threads_per_sm=1024, l2_bytes=4 * _MIB, memory_bandwidth=320e9,
    ),
    "a100": Device(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 * _KIB, 164 * _KIB,
        l2_bytes=40 * _MIB, memory_bandwidth=2039e9,
    ),
    "rtx3090": Device(
        "NVIDIA GeForce RTX 3090", (8, 6), 82, 99 * _KIB, 100 * _KIB,
        max_threads_per_sm=1536, l2_bytes=6 * _MIB, memory_bandwidth=936e9,
    ),
    "rtx4090": Device(
        "NVIDIA GeForce RTX 4090", (8, 9), 128, 99 * _KIB, 100 * _KIB,
        max_threads_per_sm=1536, l2_bytes=72 * _MIB, memory_bandwidth=1008e9,
    ),
    "h100": Device(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 227 * _KIB, 228 * _KIB,
        l2_bytes=50 * _MIB, memory_bandwidth=3352e9,
    ),
    "h200": Device(
        "NVIDIA H200", (9, 0), 132, 227 * _KIB, 228 * _KIB,
        l2_bytes=60 * _MIB, memory_bandwidth=4800e9,
    ),
    "b200": Device(
        "NVIDIA B200", (10, 0), 148, 227 * _KIB, 228 * _KIB,
        l2_bytes=126 * _MIB, memory_bandwidth=8000e9,
    ),
    "rtx5090": Device(
        "NVIDIA GeForce RTX 5090", (12, 0), 170, 99 * _KIB, 100 * _KIB,
        max_threads_per_sm=1536, l2_bytes=96 * _MIB, memory_bandwidth=1792e9,
    ),
}  # fmt: skip
