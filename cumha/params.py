"""The kernels' one argument: the same fields in the same order as ``kernels_cu/params.cuh``.

Every field has 8 bytes (pointer, 64-bit integer or double), so there is no padding on either side.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from cumha.masks import MAX_ARRAY_NDIM, Expr

# name -> struct code: "Q" pointer, "q" integer, "d" double, "4q" Strides
POINTERS = (
    "q", "k", "v", "out", "lse", "state_o", "state_m", "state_l", "split_o", "split_m",
    "split_l", "key_lengths",
)  # fmt: skip
CORE_FIELDS: dict[str, str] = {
    **dict.fromkeys(POINTERS, "Q"),
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
    "splits": "q",
    "keys_per_split": "q",
    "scale": "d",
}
_POINTERS = struct.Struct("<" + "Q" * len(POINTERS))
_REST = struct.Struct("<" + "".join(CORE_FIELDS.values())[len(POINTERS) :])
_ARRAY = struct.Struct("<Q" + "q" * 2 * MAX_ARRAY_NDIM)
_NO_MASK = bytes(8 + _ARRAY.size)  # one number and one array that nothing reads
CORE_BYTES = _POINTERS.size + _REST.size


def params_bytes(mask: Expr | None) -> int:
    """Size of the whole struct for a mask's structure, in bytes."""
    numbers, arrays = (0, 0) if mask is None else (len(mask.numbers), len(mask.arrays))
    return CORE_BYTES + 8 * max(numbers, 1) + _ARRAY.size * max(arrays, 1)


def pack_pointers(*addresses: int) -> bytes:
    """Pack the first part of ``Core``: the fields `POINTERS`, 0 for null."""
    return _POINTERS.pack(*addresses)


def pack_sizes(fields: Mapping[str, Any]) -> bytes:
    """Pack the rest of ``Core``: one value per field, four integers for strides.

    Raises
    ------
    KeyError
        If a field is missing.
    """
    values: list[Any] = []
    for name, code in CORE_FIELDS.items():
        if code == "4q":
            values.extend(fields[name])
        elif code != "Q":
            values.append(fields[name])
    return _REST.pack(*values)


def pack_mask(mask: Expr | None) -> bytes:
    """Pack ``MaskArgs``: the numbers and arrays of a mask in slot order."""
    if mask is None:
        return _NO_MASK
    numbers = mask.numbers or (0,)
    packed = [struct.pack("<d" if isinstance(x, float) else "<q", x) for x in numbers]
    for source in mask.arrays:
        data = source.data
        spare = MAX_ARRAY_NDIM - data.ndim
        strides = [s // data.dtype.itemsize for s in data.strides]
        extents = (*data.shape, *(1,) * spare)
        packed.append(_ARRAY.pack(_address(data), *extents, *strides, *(0,) * spare))
    if not mask.arrays:
        packed.append(bytes(_ARRAY.size))
    return b"".join(packed)


def _address(data: Any) -> int:
    """Address of element 0: of a CuPy array on its device, of a NumPy array in host memory."""
    return int(data.ctypes.data if hasattr(data, "ctypes") else data.data.ptr)
