"""Hypothesis strategies for masks and attention problems.

``masks(sizes)`` draws random mask expressions with the arrays they look up; ``problems()`` draws whole calls.
Failing examples shrink to few keys, simple masks and small numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cumha import masks as _masks
from cumha.masks import Expr

__all__ = ["MaskSizes", "array_data", "mask_sizes", "masks"]


@dataclass(frozen=True)
class MaskSizes:
    """Extents a mask is drawn for: keys are those of the whole sequence."""

    batch: int
    heads_q: int
    len_q: int
    len_k: int


@st.composite
def mask_sizes(draw: st.DrawFn, most: int = 12) -> MaskSizes:
    """Small extents, each at least 1 and ``len_q``, ``len_k`` up to ``most``."""
    return MaskSizes(
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, most)),
        draw(st.integers(1, most)),
    )


@st.composite
def array_data(draw: st.DrawFn, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Array values for look-ups: runs of equal values, so that tiles can be all or nothing."""
    seed = draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)
    spread = draw(st.sampled_from([1, 2, 5]))
    coarse = tuple(-(-n // 3) for n in shape)
    values = generator.integers(-spread, spread + 1, coarse)
    for axis, n in enumerate(shape):
        values = np.repeat(values, 3, axis=axis).take(np.arange(n), axis=axis)
    if kind == "bool":
        return np.asarray(values > -spread // 2)
    if kind == "float":
        real = values.astype(draw(st.sampled_from(["float32", "float64", "float16"]))) / 2
        if draw(st.booleans()):
            real.flat[draw(st.integers(0, real.size - 1))] = draw(
                st.sampled_from([np.nan, np.inf, -np.inf])
            )
        return np.asarray(real)
    return values.astype(draw(st.sampled_from(["int8", "int32", "int64"])))


_AXES = {"b": "batch", "h": "heads_q", "q": "len_q", "k": "len_k"}


@st.composite
def masks(draw: st.DrawFn, sizes: MaskSizes, most_terms: int = 4) -> Expr:
    """A random boolean mask expression for ``sizes``, with its arrays."""
    index: dict[str, Expr] = {}

    def capture(b: Expr, h: Expr, q: Expr, k: Expr) -> bool:
        index.update(b=b, h=h, q=q, k=k)
        return True

    _masks.where(capture)
    index.update(len_q=_masks.len_q, len_k=_masks.len_k)
    arrays = 0

    def lookup(kind: str) -> Expr:
        nonlocal arrays
        arrays += 1
        axes = draw(st.sampled_from(["k", "q", "b", "bk", "bq", "qk", "hk", "bhqk"]))
        shape = tuple(getattr(sizes, _AXES[a]) for a in axes)
        data = draw(array_data(shape, kind))
        return _masks.array(data)[tuple(index[a] for a in axes)]

    def number(depth: int) -> Any:
        simple = st.sampled_from(["k", "q", "position", "index", "number"])
        choice = draw(simple if depth <= 0 else st.one_of(simple, st.just("op"), st.just("lookup")))
        if choice in ("k", "q"):
            return index[choice]
        if choice == "position":
            return index["q"] + (index["len_k"] - index["len_q"])
        if choice == "index":
            return index[draw(st.sampled_from(sorted(index)))]
        if choice == "number":
            return draw(st.integers(-4, 12))
        if choice == "lookup" and arrays < 3:
            return lookup(draw(st.sampled_from(["int", "float"])))
        return _operation(draw, lambda: number(depth - 1))

    def boolean(depth: int) -> Expr:
        choice = draw(st.sampled_from(["builtin", "compare", "compare", "logic", "not", "lookup"]))
        if choice == "lookup" and arrays < 3:
            return lookup("bool")
        if choice == "logic" and depth > 0:
            x, y = boolean(depth - 1), boolean(depth - 1)
            return draw(st.sampled_from([x & y, x | y, x ^ y]))
        if choice == "not" and depth > 0:
            return ~boolean(depth - 1)
        if choice == "builtin":
            align = draw(st.sampled_from(["bottom_right", "top_left"]))
            window = _masks.window(draw(st.integers(-1, 4)), draw(st.integers(-1, 4)), align=align)
            return draw(st.sampled_from([window, _masks.causal(align)]))
        return _comparison(draw, index["k"], number(2), number(2))

    result = boolean(most_terms)
    usable = len(result.numbers) <= _masks.MAX_NUMBERS
    return result if usable else _masks.causal()


def _operation(draw: st.DrawFn, operand: Callable[[], Any]) -> Any:
    op = draw(st.sampled_from(["+", "-", "*", "//", "%", "min", "max", "neg"]))
    x, y = operand(), operand()
    if op == "neg":
        return -x
    if op in ("min", "max"):
        return (_masks.minimum if op == "min" else _masks.maximum)(x, y)
    if op in ("//", "%"):
        real = any(isinstance(v, Expr) and v.kind == "float" for v in (x, y))
        if real or isinstance(x, int) or (isinstance(y, int) and y == 0):
            return x
        return x // y if op == "//" else x % y
    return {"+": lambda: x + y, "-": lambda: x - y, "*": lambda: x * y}[op]()


def _comparison(draw: st.DrawFn, k: Expr, x: Any, y: Any) -> Expr:
    if not isinstance(x, Expr) and not isinstance(y, Expr):
        x = k
    op = draw(st.sampled_from(["<", "<=", "==", "!=", ">", ">="]))
    table: dict[str, Callable[[], Any]] = {
        "<": lambda: x < y, "<=": lambda: x <= y, "==": lambda: x == y,
        "!=": lambda: x != y, ">": lambda: x > y, ">=": lambda: x >= y,
    }  # fmt: skip
    result = table[op]()
    assert isinstance(result, Expr)
    return result
