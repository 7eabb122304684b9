"""Move arrays between NumPy and CuPy as the views they are.

`cupy.asarray` makes a contiguous copy. `to_device` copies the memory that a view lies in and builds
the same view over it, so that strides (also negative and 0), offset and neighbours are the same on
the device.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray


def _bounds(x: Any, address: int) -> tuple[int, int]:
    """First and end address of the elements of a view whose element 0 stands at ``address``."""
    if x.size == 0:
        return address, address
    reach = [s * (n - 1) for s, n in zip(x.strides, x.shape, strict=True)]
    low = sum(r for r in reach if r < 0)
    high = sum(r for r in reach if r > 0)
    return address + low, address + high + x.dtype.itemsize


class _Memory:
    """Host memory as NumPy's array interface describes it; keeps its owner alive."""

    def __init__(self, address: int, nbytes: int, owner: Any, *, writeable: bool) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, not writeable),
        }


def host_memory(x: np.ndarray, *, writeable: bool = False) -> tuple[NDArray[np.uint8], int]:
    """The bytes of the array that owns a view's memory, and where in them its element 0 stands."""
    where = x.ctypes.data
    low, high = _bounds(x, where)
    base: Any = x.base
    while base is not None:  # between two arrays there may be others, such as as_strided's
        if isinstance(base, np.ndarray):
            first, end = _bounds(base, base.ctypes.data)
            if first <= low and high <= end:
                low, high = first, end
        base = getattr(base, "base", None)
    if low == high:
        return np.zeros(0, np.uint8), 0
    return np.asarray(_Memory(low, high - low, x, writeable=writeable)), where - low


def to_device(x: Any) -> Any:
    """The same view on the current GPU: its strides, its offset and the memory around it.

    Parameters
    ----------
    x : numpy.ndarray
        Of any dtype that CuPy knows, bfloat16 included.

    Returns
    -------
    cupy.ndarray
        In memory of its own, allocated from CuPy's pool. The arrays of a mask are moved with
        ``masks.map_arrays(mask, to_device)``.

    Raises
    ------
    TypeError
        Something else than a NumPy array.
    """
    if not isinstance(x, np.ndarray):
        raise TypeError(f"to_device takes a numpy.ndarray, got {type(x).__name__}")
    import cupy

    memory, offset = host_memory(x)
    block = cupy.empty(max(memory.size, 1), np.uint8)
    if memory.size:
        block.set(memory)
    return cupy.ndarray(x.shape, x.dtype, memptr=block.data + offset, strides=x.strides)


def read_back(device: Any, host: np.ndarray) -> None:
    """Copy what `to_device` made of ``host`` back into it, with the memory around it.

    Parameters
    ----------
    device : cupy.ndarray
        What ``to_device(host)`` returned.
    host : numpy.ndarray
        Writeable; its owner's whole memory is overwritten.
    """
    memory, offset = host_memory(host, writeable=True)
    if memory.size:
        memory[:] = _device_bytes(device, device.data.ptr - offset, memory.size)


def to_host(x: Any) -> Any:
    """A NumPy array with the values and the strides of a CuPy array; a NumPy array as it is.

    No kernel runs, so also dtypes that CuPy can only store are served.

    Raises
    ------
    TypeError
        Something else than an array of the two libraries.
    """
    if isinstance(x, np.ndarray):
        return x
    cupy = sys.modules.get("cupy")
    if cupy is None or not isinstance(x, cupy.ndarray):
        raise TypeError(f"to_host takes a NumPy or CuPy array, got {type(x).__name__}")
    low, high = _bounds(x, x.data.ptr)
    if low == high:
        return np.empty(x.shape, x.dtype)
    memory = _device_bytes(x, low, high - low)
    return np.ndarray(x.shape, x.dtype, memory.data, x.data.ptr - low, x.strides)


def _device_bytes(x: Any, address: int, nbytes: int) -> NDArray[np.uint8]:
    import cupy

    pointer = x.data + (address - x.data.ptr)
    with x.device:
        copied: NDArray[np.uint8] = cupy.ndarray((nbytes,), np.uint8, memptr=pointer).get()
    return copied
