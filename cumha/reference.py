"""The formula of attention in NumPy float64: what every other path is compared with.

For each query row ``i`` of each query head ``h`` of each batch entry ``b``, over the keys ``j``:

    s[j] = scale * sum_d q[b, h, i, d] * k[b, h // group, j, d]       group = heads_q // heads_kv
    keep[j] = mask(b, h, i, j) and s[j] != -inf
    m = max_{keep} s[j]      p[j] = e^(s[j] - m)      l = sum_{keep} p[j]
    out = sum_{keep} p[j] * v[b, h // group, j] / l            lse = m + ln l
    no key kept: out = 0, lse = -inf

Slow, and it builds the whole mask. Options that say how to compute are accepted and change nothing.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cumha import masks

_Float64 = NDArray[np.float64]


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    causal: bool = False,
    key_lengths: Any = None,
    scale: float | None = None,
    layout: str = "BHLD",
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
    splits: int | None = None,
    split_by: str = "tiles",
    keys_per_split: int | None = None,
    path: str | None = None,
    backend: str | None = None,
) -> Any:
    """Masked multi-head attention by its formula, in float64.

    Parameters
    ----------
    q : numpy.ndarray, float16|bfloat16|float32|float64, [batch, heads_q, len_q, head_dim]
        Queries. With ``layout="BLHD"`` the axes of all arrays are [batch, len, heads, dim].
    k : numpy.ndarray, as `q`, [batch, heads_kv, len_k, head_dim]
        Keys; `heads_q` is a multiple of `heads_kv`.
    v : numpy.ndarray, as `q`, [batch, heads_kv, len_k, head_dim_v]
        Values.
    mask : masks.Expr or bool ndarray, optional
        True = attend. An array must broadcast to [batch, heads_q, len_q, len_k].
    causal : bool, optional
        And-s bottom-right causal with `mask`: the last query sees the last valid key.
    key_lengths : sequence of int, [batch], optional
        Number of valid keys of each batch entry; None: all.
    scale : float, optional
        Factor on ``q . k``; default ``1 / sqrt(head_dim)``.
    layout : {"BHLD", "BLHD"}, optional
        Axis order of q, k, v and the output.
    return_lse : bool, optional
        Also return the log-sum-exp.
    out, lse : numpy.ndarray, optional
        Filled with the result, rounded to their dtype; `lse` is [batch, heads_q, len_q].
    workspace, splits, split_by, keys_per_split, path, backend
        Accepted as in `cumha.attention`; they do not change the result.

    Returns
    -------
    out : numpy.ndarray, float64, [batch, heads_q, len_q, head_dim_v], axes as `layout` says
        The given `out` where there was one. Exactly 0 in rows that keep no key.
    lse : numpy.ndarray, float64, [batch, heads_q, len_q]
        Natural logarithm; only with `return_lse`. -inf in rows that keep no key.

    Raises
    ------
    TypeError
        Something else than NumPy arrays.
    ValueError
        Shapes that do not fit, or an unknown layout.
    IndexError
        A look-up of the mask outside its array.
    """
    o, m, l = partial_attention(  # noqa: E741
        q, k, v, mask=mask, causal=causal, key_lengths=key_lengths, scale=scale, layout=layout
    )
    with np.errstate(all="ignore"):
        result = np.where(l[..., None] == 0, 0.0, o / l[..., None])
        log_sum = np.where(l == 0, -np.inf, m + np.log(l))
        if layout == "BLHD":
            result = np.ascontiguousarray(result.swapaxes(1, 2))
        if out is not None:
            out[...] = result
            result = out
        if lse is not None:
            lse[...] = log_sum
            log_sum = lse
    return (result, log_sum) if return_lse else result


def partial_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    key_offset: int = 0,
    total_keys: int | None = None,
    mask: Any = None,
    causal: bool = False,
    key_lengths: Any = None,
    scale: float | None = None,
    layout: str = "BHLD",
) -> tuple[_Float64, _Float64, _Float64]:
    """The unnormalised sums over the given keys, which stand at `key_offset` of `total_keys`.

    Parameters
    ----------
    q, k, v, mask, causal, key_lengths, scale, layout
        As in `attention`; masks and lengths count positions in the whole sequence.
    key_offset : int, optional
        Position of the first key given here.
    total_keys : int, optional
        Keys of the whole sequence; None: ``key_offset`` plus the keys given here.

    Returns
    -------
    o : numpy.ndarray, float64, [batch, heads_q, len_q, head_dim_v]
        ``sum e^(s - m) * v``, whatever `layout` says; 0 in rows that keep no key.
    m : numpy.ndarray, float64, [batch, heads_q, len_q]
        The largest kept score; -inf in rows that keep no key.
    l : numpy.ndarray, float64, [batch, heads_q, len_q]
        ``sum e^(s - m)``; 0 in rows that keep no key.
    """
    q, k, v = (_as_bhld(name, x, layout) for name, x in (("q", q), ("k", k), ("v", v)))
    batch, heads_q, len_q, head_dim = q.shape
    heads_kv, len_k = k.shape[1:3]
    _check_shapes(q, k, v)
    group = heads_q // max(heads_kv, 1)
    scale = 1 / math.sqrt(head_dim) if scale is None else float(scale)
    visible = masks.materialize(
        _mask_expr(mask, causal),
        batch=batch,
        heads_q=heads_q,
        len_q=len_q,
        len_k=len_k,
        key_lengths=None if key_lengths is None else np.asarray(key_lengths, np.int64),
        key_offset=key_offset,
        total_keys=total_keys,
    )
    o = np.zeros((batch, heads_q, len_q, v.shape[3]))
    m = np.full((batch, heads_q, len_q), -np.inf)
    l = np.zeros((batch, heads_q, len_q))  # noqa: E741
    for b in range(batch):
        for h in range(heads_q):
            o[b, h], m[b, h], l[b, h] = _one_head(
                q[b, h], k[b, h // group], v[b, h // group], visible[b, h], scale
            )
    return o, m, l


def _one_head(
    q: _Float64, k: _Float64, v: _Float64, visible: NDArray[np.bool_], scale: float
) -> tuple[_Float64, _Float64, _Float64]:
    with np.errstate(all="ignore"):
        scores = (q @ k.T) * scale
        keep = visible & (scores != -np.inf)
        m = np.max(scores, axis=1, where=keep, initial=-np.inf)
        p = np.where(keep, np.exp(scores - m[:, None]), 0.0)
        return _weighted_sum(p, keep, v), m, p.sum(axis=1)


def _weighted_sum(p: _Float64, keep: NDArray[np.bool_], v: _Float64) -> _Float64:
    used = keep.any(axis=0)
    if np.isfinite(v[used]).all():
        return p[:, used] @ v[used]
    # 0 * NaN is NaN: each row may touch only the values that it keeps.
    return np.stack([row[kept] @ v[kept] for row, kept in zip(p, keep, strict=True)])


def _mask_expr(mask: Any, causal: bool) -> Any:
    if isinstance(mask, np.ndarray):
        mask = masks.dense(mask)
    if not causal:
        return mask
    return masks.causal() if mask is None else masks.causal() & mask


def _as_bhld(name: str, x: Any, layout: str) -> _Float64:
    if layout not in ("BHLD", "BLHD"):
        raise ValueError(f"layout is {layout!r}; need 'BHLD' or 'BLHD'")
    if not isinstance(x, np.ndarray):
        raise TypeError(
            f"{name} is {type(x).__qualname__}; the reference needs a numpy.ndarray; try "
            "cupy.asnumpy(x) or numpy.asarray(x)"
        )
    if x.ndim != 4:
        raise ValueError(f"{name} has shape {x.shape}; need 4 axes in the order of {layout!r}")
    return (x if layout == "BHLD" else x.swapaxes(1, 2)).astype(np.float64)


def _check_shapes(q: _Float64, k: _Float64, v: _Float64) -> None:
    batch, heads_q, _, head_dim = q.shape
    heads_kv = k.shape[1]
    fits = k.shape[0] == batch and k.shape[3] == head_dim and v.shape[:3] == k.shape[:3]
    if not fits or (heads_q % heads_kv if heads_kv else heads_q):
        raise ValueError(
            f"q {q.shape}, k {k.shape}, v {v.shape} do not fit; need q [batch, heads_q, len_q, "
            "head_dim], k [batch, heads_kv, len_k, head_dim], v [batch, heads_kv, len_k, "
            "head_dim_v] with heads_q a multiple of heads_kv"
        )
