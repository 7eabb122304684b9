"""The masks that come with cumha: one-liners on the tree, and the door for the user's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from cumha.masks.expression import (
    ARRAY_TYPES,
    AXIS_NAMES,
    INDEX,
    ArrayInput,
    Expr,
    Mask,
    arithmetic,
    constant,
    lift,
)

_b, _h, _q, _k, len_q, len_k = INDEX.values()


def _position(align: str) -> Expr:
    """The key position that query ``q`` stands at."""
    if align == "bottom_right":
        return _q + (len_k - len_q)
    if align == "top_left":
        return _q
    raise ValueError(f'align must be "bottom_right" or "top_left", got {align!r}')


@functools.cache
def causal(align: str = "bottom_right") -> Mask:
    """Keep keys at or before the query's position.

    Parameters
    ----------
    align : {"bottom_right", "top_left"}
        Where the diagonal is anchored. ``"bottom_right"``: the last query sees the last valid key,
        ``k <= q + (len_k - len_q)``. ``"top_left"``: ``k <= q``.

    Returns
    -------
    Mask
        A boolean expression.
    """
    return _k <= _position(align)


def window(left: int, right: int, align: str = "bottom_right") -> Mask:
    """Keep ``left`` keys before and ``right`` keys after the query's position, itself included.

    Parameters
    ----------
    left, right : int
        Number of keys on each side, inclusive; -1 leaves that side open. A window of W tokens that
        end at the query is ``window(W - 1, 0)``.
    align : {"bottom_right", "top_left"}
        As in `causal`.

    Returns
    -------
    Mask
        A boolean expression; the sizes are run-time numbers.
    """
    for name, size in (("left", left), ("right", right)):
        if isinstance(size, (bool, np.bool_)) or not isinstance(size, (int, np.integer)):
            raise TypeError(f"window {name} must be an integer, got {size!r}")
        if size < -1:
            raise ValueError(f"window {name} must be -1 (open) or at least 0, got {size}")
    position = _position(align)
    sides = [_position(align) - left <= _k] if left >= 0 else []
    sides += [_k <= position + right] if right >= 0 else []
    return _all(sides)


def key_padding(keep: Any) -> Mask:
    """Keep key ``k`` of batch entry ``b`` where ``keep[b, k]``.

    Parameters
    ----------
    keep : numpy.ndarray or cupy.ndarray, bool, [batch or 1, len_k]
        True = the key may be attended to.
    """
    return _problem_lookup("key_padding", keep, ("b", "k"), ("bool",))


def dense(keep: Any) -> Mask:
    """Keep what a boolean array says, broadcast to [batch, heads_q, len_q, len_k].

    Parameters
    ----------
    keep : numpy.ndarray or cupy.ndarray, bool, up to 4 axes
        True = attend. Axes of size 1 and missing leading axes are broadcast.
    """
    if getattr(keep, "ndim", None) == 0:
        keep = keep.reshape(1)
    return _problem_lookup("dense", keep, ("b", "h", "q", "k"), ("bool",))


def segments(q_ids: Any, k_ids: Any) -> Mask:
    """Keep keys of the query's own segment (document): ``q_ids[b, q] == k_ids[b, k]``.

    Parameters
    ----------
    q_ids : numpy.ndarray or cupy.ndarray, integer, [batch or 1, len_q]
    k_ids : numpy.ndarray or cupy.ndarray, integer, [batch or 1, len_k]
    """
    integers = tuple(n for n, t in ARRAY_TYPES.items() if t.kind == "int")
    left = _problem_lookup("segments q_ids", q_ids, ("b", "q"), integers)
    return left == _problem_lookup("segments k_ids", k_ids, ("b", "k"), integers)


def where(function: Callable[[Expr, Expr, Expr, Expr], Any]) -> Mask:
    """Keep where a Python function of the indices says so.

    Parameters
    ----------
    function : callable
        Called once with the expressions ``b, h, q, k`` (batch entry, query head, query and key
        position); returns a boolean expression, as in
        ``masks.where(lambda b, h, q, k: (k <= q) & (q - k < 256))``. `len_q`, `len_k`, `minimum`,
        `maximum` and arrays made by `array` may be used inside.

    Raises
    ------
    TypeError
        If the function leaves the expression language or returns something that is not boolean.
    """
    if not callable(function):
        raise TypeError(
            f"masks.where needs a function of (b, h, q, k), got {type(function).__name__}"
        )
    result = function(_b, _h, _q, _k)
    if result is None:
        raise TypeError("the function given to masks.where returned None: it must return the mask")
    node = lift(result)
    if node.kind != "bool":
        raise TypeError(
            f"the function given to masks.where returned the {node.kind} expression {node!r}: "
            "it must return a boolean one, such as a comparison"
        )
    return node


def array(x: Any) -> ArrayInput:
    """Bring an array into a mask expression; index it with one expression per axis.

    Parameters
    ----------
    x : numpy.ndarray or cupy.ndarray
        bool, integer up to 64 bits (not uint64) or floating point, 1 to 4 axes; of the library and
        on the device of the attention inputs. Held by reference.
    """
    return x if isinstance(x, ArrayInput) else ArrayInput(x)


def minimum(x: Any, y: Any) -> Expr:
    """Elementwise minimum of two numeric expressions (NaN if either is NaN)."""
    return arithmetic("min", x, y)


def maximum(x: Any, y: Any) -> Expr:
    """Elementwise maximum of two numeric expressions (NaN if either is NaN)."""
    return arithmetic("max", x, y)


def _all(parts: Iterable[Expr]) -> Expr:
    result: Expr | None = None
    for part in parts:
        result = part if result is None else result & part
    return constant(True) if result is None else result


def _problem_lookup(name: str, data: Any, axes: tuple[str, ...], dtypes: tuple[str, ...]) -> Expr:
    """Look a problem-shaped array up; axes of size 1 are broadcast, missing leading axes too."""
    if isinstance(data, (list, tuple, bool, int, float)) or data is None:
        raise TypeError(f"{name} needs a NumPy or CuPy array, got {type(data).__name__}")
    dtype = str(getattr(data, "dtype", type(data).__name__))
    if dtype not in dtypes:
        hint = ": True = attend; an additive bias is not a mask" if dtypes == ("bool",) else ""
        raise TypeError(f"{name} needs dtype {' or '.join(dtypes)}, got {dtype}{hint}")
    if data.ndim > len(axes) or (len(axes) == 2 and data.ndim != 2):
        raise ValueError(
            f"{name} needs shape [{', '.join(AXIS_NAMES[a] for a in axes)}], "
            f"got {tuple(data.shape)}"
        )
    axes = axes[len(axes) - data.ndim :]
    source = ArrayInput(data, axes)
    index = (constant(0) if n == 1 else INDEX[a] for a, n in zip(axes, data.shape, strict=True))
    return source[tuple(index)]
