"""Walk 1: the values of a mask in NumPy, the definition that every other walk must match."""

from __future__ import annotations

from typing import Any

import numpy as np

from cumha.masks.expression import INDEX_NAMES, Expr


class _Arrays:
    """The calculus over NumPy values: int64, float64 and bool."""

    add = staticmethod(np.add)
    sub = staticmethod(np.subtract)
    mul = staticmethod(np.multiply)
    floordiv = staticmethod(np.floor_divide)
    mod = staticmethod(np.mod)
    neg = staticmethod(np.negative)
    min = staticmethod(np.minimum)
    max = staticmethod(np.maximum)
    lt = staticmethod(np.less)
    le = staticmethod(np.less_equal)
    eq = staticmethod(np.equal)
    xor = staticmethod(np.logical_xor)


setattr(_Arrays, "and", staticmethod(np.logical_and))
setattr(_Arrays, "or", staticmethod(np.logical_or))
setattr(_Arrays, "not", staticmethod(np.logical_not))


def evaluate(expr: Expr, *, b: Any, h: Any, q: Any, k: Any, len_q: int, len_k: int) -> Any:
    """Walk 1: the mask's values.

    Parameters
    ----------
    b, h, q, k : int or numpy.ndarray, int64
        Indices that broadcast against each other.
    len_q, len_k : int or numpy.ndarray
        Lengths of those batch entries.

    Returns
    -------
    numpy.ndarray or numpy.bool_
        bool, the broadcast shape of the indices that occur in the expression.

    Raises
    ------
    IndexError
        If a look-up leaves its array.
    """
    environment = dict(zip(INDEX_NAMES, (b, h, q, k, len_q, len_k), strict=True))
    values: dict[int, Any] = {}
    with np.errstate(all="ignore"):  # integers wrap and x // 0 is 0 by definition
        for node in expr.program.nodes:
            args = [values[id(a)] for a in node.args]
            if node.op == "index":
                values[id(node)] = np.asarray(environment[node.value], dtype=np.int64)
            elif node.op in ("number", "const"):
                values[id(node)] = np.asarray(node.value)
            elif node.op == "lookup":
                values[id(node)] = _look_up(node, args)
            else:
                kinds = {a.kind for a in node.args}
                if kinds == {"int", "float"}:
                    args = [np.asarray(a, dtype=np.float64) for a in args]
                values[id(node)] = getattr(_Arrays, node.op)(*args)
    return values[id(expr)]


def _look_up(node: Expr, index: list[Any]) -> Any:
    data = node.value.data
    if not isinstance(data, np.ndarray):
        raise TypeError(f"{node.value!r} is on a device: copy it to NumPy for the host's walks")
    for axis, (i, n) in enumerate(zip(index, data.shape, strict=True)):
        if i.size and (i.min() < 0 or i.max() >= n):
            raise IndexError(
                f"look-up {node!r}: index {int(i.min())}…{int(i.max())} leaves axis {axis} of "
                f"size {n}"
            )
    values = data[tuple(index)]
    return np.asarray(values, dtype={"bool": bool, "int": np.int64, "float": np.float64}[node.kind])


def materialize(
    expr: Expr | None,
    *,
    batch: int,
    heads_q: int,
    len_q: int,
    len_k: int,
    key_lengths: Any = None,
    key_offset: int = 0,
    total_keys: int | None = None,
) -> np.ndarray:
    """Walk 1 over a whole problem: which keys each row sees.

    Parameters
    ----------
    len_k : int
        Keys of this call; key ``j`` stands at position ``key_offset + j`` of ``total_keys``.
    key_lengths : array of int, [batch], optional
        Valid keys of each entry's sequence; default ``total_keys``.

    Returns
    -------
    numpy.ndarray, bool, [batch, heads_q, len_q, len_k]
    """
    total = key_offset + len_k if total_keys is None else total_keys
    keep = np.zeros((batch, heads_q, len_q, len_k), dtype=bool)
    for b in range(batch):
        valid = total if key_lengths is None else int(key_lengths[b])
        n = min(max(valid - key_offset, 0), len_k)
        if expr is None or n == 0 or heads_q == 0 or len_q == 0:
            keep[b, :, :, :n] = expr is None
            continue
        keep[b, :, :, :n] = evaluate(
            expr,
            b=b,
            h=np.arange(heads_q)[:, None, None],
            q=np.arange(len_q)[:, None],
            k=key_offset + np.arange(n),
            len_q=len_q,
            len_k=valid,
        )
    return keep
