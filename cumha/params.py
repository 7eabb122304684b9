"""The kernels' one argument: the same fields in the same order as ``kernels_cu/params.cuh``.

Every field has 8 bytes (pointer, 64-bit integer or double), so there is no padding on either side.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from cumha.masks import MAX_ARRAY_NDIM, Expr

# name -> struct code ("Q" pointer, "q" integer, "d" double), or a count of integers for Strides
STRIDES = ("batch", "head", "row", "element")
CORE_FIELDS: dict[str, str] = {
    "q": "Q",
    "k": "Q",
    "v": "Q",
    "out": "Q",
    "lse": "Q",
    "state_o": "Q",
    "state_m": "Q",
    "state_l": "Q",
    "key_lengths": "Q",
    "q_stride": "4q",
    "k_stride": "4q",
    "v_stride": "4q",
    "out_stride": "4q",
    "lse_stride": "4q",
    "key_length_stride": "q",
    "batch": "q",
    "heads_q": "q",
    "heads_kv": "q",
    "len_q": "q",
    "len_k": "q",
    "key_offset": "q",
    "total_keys": "q",
    "scale": "d",
}
_CORE = struct.Struct("<" + "".join(CORE_FIELDS.values()))
_ARRAY = struct.Struct("<Q" + "q" * 2 * MAX_ARRAY_NDIM)
CORE_BYTES = _CORE.size


def params_bytes(mask: Expr | None) -> int:
    """Size of the whole struct for a mask's structure, in bytes."""
    numbers, arrays = (0, 0) if mask is None else (len(mask.numbers), len(mask.arrays))
    return CORE_BYTES + 8 * max(numbers, 1) + _ARRAY.size * max(arrays, 1)


def pack_core(fields: Mapping[str, Any]) -> bytes:
    """Pack ``Core``: one value per field, four integers for strides.

    Raises
    ------
    KeyError
        If a field is missing.
    """
    values: list[Any] = []
    for name, code in CORE_FIELDS.items():
        if code == "4q":
            values.extend(fields[name])
        else:
            values.append(fields[name])
    return _CORE.pack(*values)


def pack_mask(mask: Expr | None) -> bytes:
    """Pack ``MaskArgs``: the numbers and arrays of a mask in slot order."""
    numbers = () if mask is None else mask.numbers
    packed = [struct.pack("<d" if isinstance(x, float) else "<q", x) for x in numbers or (0,)]
    sources = () if mask is None else mask.arrays
    for source in sources:
        data = source.data
        spare = MAX_ARRAY_NDIM - data.ndim
        strides = [s // data.dtype.itemsize for s in data.strides]
        extents = (*data.shape, *(1,) * spare)
        packed.append(_ARRAY.pack(_address(data), *extents, *strides, *(0,) * spare))
    if not sources:
        packed.append(bytes(_ARRAY.size))
    return b"".join(packed)


def _address(data: Any) -> int:
    """Address of element 0: of a CuPy array on its device, of a NumPy array in host memory."""
    return int(data.ctypes.data if hasattr(data, "ctypes") else data.data.ptr)
