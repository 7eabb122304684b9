"""A mask is one expression over ``b, h, q, k, len_q, len_k``, numbers and array look-ups.

The tree is built by ordinary Python operators and read by four walks:

1. `evaluate` / `materialize`  the values, in NumPy: the definition that everything else must match
2. `cuda_source`: ``keep()``   the same values, as text for the kernels
3. `tile_class`                what a rectangle of rows x keys holds: SKIP, PARTIAL or FULL
4. `key_range`                 the keys that a block of rows can see at all

Walks 3 and 4 also exist on the device. The rules of each operation are written once (`rules`) and
run over Python numbers for the planner and over text for the device's code.

    expression -> builtin            the tree; the masks built on it, and `where` for users' own
    values  rules -> tiles, cuda     walk 1; walks 3, 4 over Python numbers; walks 2, 3, 4 as text
    simplify                         decode needs no causal test

Positions are those of the sequence: ``k`` counts from the sequence's first key also where a call
holds a slice of the keys, and ``len_k`` is the number of *valid* keys of that batch entry.
"""

from cumha.masks.builtin import (
    array,
    causal,
    dense,
    key_padding,
    len_k,
    len_q,
    maximum,
    minimum,
    segments,
    where,
    window,
)
from cumha.masks.cuda import cuda_source, staged_bytes
from cumha.masks.expression import (
    MAX_ARRAY_NDIM,
    MAX_ARRAYS,
    MAX_NODES,
    MAX_NUMBERS,
    NARROW_LIMIT,
    ArrayInput,
    Expr,
    Mask,
    check_arrays,
    map_arrays,
)
from cumha.masks.simplify import specialise
from cumha.masks.tiles import TileClass, key_range, tile_class
from cumha.masks.values import evaluate, materialize

__all__ = [
    "MAX_ARRAYS",
    "MAX_ARRAY_NDIM",
    "MAX_NODES",
    "MAX_NUMBERS",
    "NARROW_LIMIT",
    "ArrayInput",
    "Expr",
    "Mask",
    "TileClass",
    "array",
    "causal",
    "check_arrays",
    "cuda_source",
    "dense",
    "evaluate",
    "key_padding",
    "key_range",
    "len_k",
    "len_q",
    "map_arrays",
    "materialize",
    "maximum",
    "minimum",
    "segments",
    "specialise",
    "staged_bytes",
    "tile_class",
    "where",
    "window",
]
