"""Arrays that find faults: strided, poisoned, extreme, and simple enough to check by eye."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray


def _dtype(name: Any) -> np.dtype[Any]:
    made: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16 if str(name) == "bfloat16" else name)
    return made


def normal(*shape: int, dtype: Any = "float32", seed: int = 0, spread: float = 1.0) -> np.ndarray:
    """Random numbers of standard deviation ``spread``; the same for the same shape and seed."""
    generator = np.random.default_rng([seed, *shape])
    return np.asarray((generator.standard_normal(shape) * spread).astype(_dtype(dtype)))


def qkv(
    batch: int = 2,
    heads_q: int = 2,
    heads_kv: int = 2,
    len_q: int = 5,
    len_k: int = 7,
    head_dim: int = 16,
    head_dim_v: int | None = None,
    *,
    dtype: Any = "float32",
    seed: int = 0,
    spread: float = 1.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random q, k, v in layout "BHLD"; `spread` is the standard deviation of q and k."""
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    made = {"dtype": dtype}
    return (
        normal(batch, heads_q, len_q, head_dim, seed=3 * seed, spread=spread, **made),
        normal(batch, heads_kv, len_k, head_dim, seed=3 * seed + 1, spread=spread, **made),
        normal(batch, heads_kv, len_k, head_dim_v, seed=3 * seed + 2, **made),
    )


def identity(n: int, dtype: Any = "float32") -> np.ndarray:
    """The identity matrix as [1, 1, n, n]: as q, k and v it makes the output the softmax itself."""
    return np.eye(n).astype(_dtype(dtype))[None, None]


def key_index(batch: int, heads: int, length: int, dim: int, dtype: Any = "float32") -> np.ndarray:
    """Row j holds j: as v with equal scores, the output is the mean index of the visible keys."""
    rows = np.arange(length, dtype=np.float64)[:, None]
    return np.broadcast_to(rows, (batch, heads, length, dim)).astype(_dtype(dtype))


# -- views ----------------------------------------------------------------------------------------


def _contiguous(x: np.ndarray) -> np.ndarray:
    return np.array(x, order="C")


def _transposed(x: np.ndarray) -> np.ndarray:
    """Axes 1 and 2 change places: [batch, len, heads, dim] seen as [batch, heads, len, dim]."""
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


def _dim_first(x: np.ndarray) -> np.ndarray:
    """Neighbours along head_dim lie apart, those along the length side by side."""
    return np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3)


def _reversed(x: np.ndarray) -> np.ndarray:
    """Negative strides along every axis."""
    return np.array(x[::-1, ::-1, ::-1, ::-1], order="C")[::-1, ::-1, ::-1, ::-1]


def _junk(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.full(shape, np.nan).astype(dtype)


def _sliced(x: np.ndarray) -> np.ndarray:
    """Every other element of wider rows, with NaN between and around."""
    wide = _junk((*x.shape[:2], x.shape[2] + 2, 2 * x.shape[3] + 3), x.dtype)
    view = wide[:, :, 1:-1, 3::2]
    view[...] = x
    return view


def _odd_offset(x: np.ndarray) -> np.ndarray:
    """Rows that start one element past an aligned address, an odd number of elements apart."""
    width = x.shape[3] + 2 - x.shape[3] % 2 + 1
    view = _junk((*x.shape[:3], width), x.dtype)[..., 1 : 1 + x.shape[3]]
    view[...] = x
    return view


def _broadcast(x: np.ndarray) -> np.ndarray:
    """Stride 0 along the batch: every entry has the values of the first."""
    return np.broadcast_to(x[:1].copy(), x.shape) if x.shape[0] else _contiguous(x)


def _size_one(x: np.ndarray) -> np.ndarray:
    """Strides of axes with one element are large and odd multiples: they mean nothing."""
    x = np.array(x, order="C")
    strides = [s if n > 1 else 4097 * x.itemsize for n, s in zip(x.shape, x.strides, strict=True)]
    return np.lib.stride_tricks.as_strided(x, x.shape, strides)


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "contiguous": _contiguous,
    "transposed": _transposed,
    "dim_first": _dim_first,
    "reversed": _reversed,
    "sliced": _sliced,
    "odd_offset": _odd_offset,
    "broadcast": _broadcast,
    "size_one": _size_one,
}


def view(x: np.ndarray, kind: str) -> np.ndarray:
    """An array with the values of ``x`` (4 axes) in memory arranged as ``kind`` says.

    Parameters
    ----------
    kind : str
        A key of `VIEWS`. ``"broadcast"`` repeats the first batch entry, so that values change.
    """
    return VIEWS[kind](x)


# -- values ---------------------------------------------------------------------------------------


def poisoned(
    k: np.ndarray, v: np.ndarray, keep: NDArray[np.bool_], value: float = np.nan
) -> tuple[np.ndarray, np.ndarray]:
    """Copies of k and v with ``value`` in every slot that no row sees.

    Parameters
    ----------
    k : numpy.ndarray, [batch, heads_kv, len_k, head_dim]
    v : numpy.ndarray, [batch, heads_kv, len_k, head_dim_v]
    keep : numpy.ndarray, bool, [batch, heads_q, len_q, len_k]
        Who sees whom, as `cumha.masks.materialize` says.
    value : float
        NaN, an infinity, or a number: it is clipped to what the dtype can store.

    Returns
    -------
    k, v : numpy.ndarray
        An output computed from them must be the one computed from the originals.
    """
    unseen = ~_seen(keep, k.shape[1])
    return tuple(_written(x, unseen, value) for x in (k, v))  # type: ignore[return-value]


def _seen(keep: NDArray[np.bool_], heads_kv: int) -> NDArray[np.bool_]:
    """[batch, heads_kv, len_k]: whether any row of the group sees the slot."""
    batch, heads_q, len_q, len_k = keep.shape
    group = heads_q // max(heads_kv, 1)
    return np.asarray(keep.reshape(batch, heads_kv, group, len_q, len_k).any(axis=(2, 3)))


def _written(x: np.ndarray, where: NDArray[np.bool_], value: float) -> np.ndarray:
    if np.isfinite(value):
        info: Any = ml_dtypes.finfo(x.dtype)  # type: ignore[no-untyped-call]
        largest = float(info.max)
        value = min(max(value, -largest), largest)
    x = x.copy()
    x[where] = value
    return x


EXTREMES = ("low", "high", "alternating", "one_large", "rising", "falling")


def extreme_scores(
    kind: str, len_q: int, len_k: int, head_dim: int, *, dtype: Any = "float32", level: float = 1e5
) -> tuple[np.ndarray, np.ndarray]:
    """q and k, [1, 1, len, head_dim], whose scores with ``scale=1.0`` are as ``kind`` says.

    Parameters
    ----------
    kind : str
        ``"low"``, ``"high"``: all about -level or +level. ``"alternating"``: -level and
        +level in turn. ``"one_large"``: one key at +level among keys at 0. ``"rising"``,
        ``"falling"``: from -level to +level or back, so that every key or none raises the
        running maximum.
    level : float
        Size of the scores; a product, so that also float16 can hold its factors.
    """
    steps = np.linspace(-1.0, 1.0, len_k) if len_k > 1 else np.ones(len_k)
    signs = {
        "low": -np.ones(len_k),
        "high": np.ones(len_k),
        "alternating": np.where(np.arange(len_k) % 2, 1.0, -1.0),
        "one_large": np.where(np.arange(len_k) == len_k // 3, 1.0, 0.0),
        "rising": steps,
        "falling": -steps,
    }[kind]
    root = float(np.sqrt(level))
    q = np.zeros((1, 1, len_q, head_dim))
    k = np.zeros((1, 1, len_k, head_dim))
    q[..., 0] = root
    k[..., 0] = signs * root
    return q.astype(_dtype(dtype)), k.astype(_dtype(dtype))
