"""Hypothesis strategies for masks and attention problems.

``masks(sizes)`` draws random mask expressions with the arrays they look up; ``problems()`` draws
whole calls. Failing examples shrink to few keys, simple masks and small numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cumha import masks as _masks
from cumha.masks import Expr
from cumha.problem import DTYPES
from cumha.testing import inputs
from cumha.testing.criterion import expression

__all__ = ["Call", "MaskSizes", "array_data", "mask_sizes", "masks", "problems", "visible"]


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


# -- whole calls ----------------------------------------------------------------------------------

FINITE_KINDS = ("normal", "zero", "wide")
_SMALL_DIMS = (1, 2, 3, 4, 8)
_DIMS = (*_SMALL_DIMS, 5, 7, 16, 31, 32, 33, 59, 64, 100, 128, 256, 300, 512)


@dataclass(frozen=True, repr=False)
class Call:
    """Arrays and options of one call of `cumha.attention`; NumPy, in the layout of the options."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    options: dict[str, Any]
    made: str  # how the arrays were made, for the report of a failing example

    def arguments(self) -> dict[str, Any]:
        """Every argument, by name: ``cumha.attention(**call.arguments())``."""
        return {"q": self.q, "k": self.k, "v": self.v, **self.options}

    def __repr__(self) -> str:
        shapes = ", ".join(f"{n} {list(getattr(self, n).shape)}" for n in "qkv")
        return f"Call({self.q.dtype}, {shapes}, {self.made}, {self.options})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis would print every element of the arrays


@dataclass(frozen=True)
class _Shape:
    batch: int
    heads_kv: int
    group: int
    len_q: int
    len_k: int
    head_dim: int
    head_dim_v: int

    @property
    def heads_q(self) -> int:
        return self.heads_kv * self.group

    def sizes(self) -> MaskSizes:
        """What masks are drawn for: at least 1 each, so that arrays have something to look up."""
        return MaskSizes(*(max(n, 1) for n in (self.batch, self.heads_q, self.len_q, self.len_k)))


@st.composite
def _shapes(draw: st.DrawFn, most_len: int, head_dims: Sequence[int] | None) -> _Shape:
    lengths = st.integers(1, most_len)
    dims = st.one_of(
        st.sampled_from(_SMALL_DIMS), st.sampled_from(_SMALL_DIMS), st.sampled_from(_DIMS)
    ) if head_dims is None else st.sampled_from(list(head_dims))  # fmt: skip
    sizes = {
        "batch": draw(st.integers(1, 3)),
        "heads_kv": draw(st.integers(1, 3)),
        "group": draw(st.sampled_from([1, 2, 3, 7])),
        "len_q": draw(lengths),
        "len_k": draw(lengths),
        "head_dim": draw(dims),
    }
    same = head_dims is not None or draw(st.booleans())
    sizes["head_dim_v"] = sizes["head_dim"] if same else draw(dims)
    empty = draw(st.sampled_from([None] * 12 + ["batch", "heads_kv", "len_q", "len_k"]))
    return _Shape(**{n: 0 if n == empty else size for n, size in sizes.items()})


@st.composite
def _any_mask(draw: st.DrawFn, sizes: MaskSizes) -> Any:
    """No mask, an expression or a boolean array with broadcast axes."""
    kind = draw(st.sampled_from(["none", "expression", "array"]))
    if kind == "none":
        return None
    if kind == "expression":
        return draw(masks(sizes))
    shape = [sizes.batch, sizes.heads_q, sizes.len_q, sizes.len_k]
    shape = [n if draw(st.booleans()) else 1 for n in shape][draw(st.integers(0, 3)) :]
    return draw(array_data(tuple(shape), "bool"))


def _values(shape: tuple[int, ...], kind: str, dtype: Any, seed: int) -> np.ndarray:
    spread = {"normal": 1.0, "zero": 0.0, "wide": 12.0}[kind]
    return inputs.normal(*shape, dtype=dtype, seed=seed, spread=spread)


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    mask: Callable[[MaskSizes], st.SearchStrategy[Any]] | None = None,
    most_len: int = 12,
    head_dims: Sequence[int] | None = None,
    dtypes: Sequence[str] = DTYPES,
    key_lengths: bool | None = None,
    causal: bool | None = None,
    poison: bool = True,
) -> Call:
    """Whole calls: shapes with 0 and 1, head groups, dtypes, layouts, strides, masks and values.

    Examples shrink towards one key, dtype float16, contiguous normal values and no options.

    Parameters
    ----------
    mask : callable, optional
        Makes the strategy of the mask from a `MaskSizes`; default: none, random trees or
        boolean arrays.
    most_len : int
        Largest len_q and len_k.
    head_dims : sequence of int, optional
        Draw head_dim from these, and head_dim_v equal to it; default: 1 to 512, mostly
        small, often unequal.
    dtypes : sequence of str
        Draw the dtype from these.
    key_lengths, causal : bool, optional
        Whether calls have lengths and are causal; default: some do, some are.
    poison : bool
        Whether slots that no row sees may hold NaN, infinities or huge numbers, and any slot a
        NaN or, of k, an infinity.
    """
    shape = draw(_shapes(most_len, head_dims))
    dtype = draw(st.sampled_from(list(dtypes)))
    options = _options(draw, shape, mask or _any_mask, key_lengths, causal)
    seed = draw(st.integers(0, 2**16))
    kinds = [draw(st.sampled_from(FINITE_KINDS)) for _ in "qkv"]
    views = [draw(st.sampled_from(list(inputs.VIEWS))) for _ in "qkv"]
    q, k, v = (
        _values((shape.batch, heads, length, dim), kind, dtype, 3 * seed + i)
        for i, (heads, length, dim, kind) in enumerate(
            (
                (shape.heads_q, shape.len_q, shape.head_dim, kinds[0]),
                (shape.heads_kv, shape.len_k, shape.head_dim, kinds[1]),
                (shape.heads_kv, shape.len_k, shape.head_dim_v, kinds[2]),
            )
        )
    )
    made = f"seed {seed}, values {kinds}, views {views}"
    if poison and k.size:
        k, v, note = _with_poison(draw, k, v, shape, options, "broadcast" in views[1:])
        made += note
    swap = options["layout"] == "BLHD"
    arrays = (x.swapaxes(1, 2) if swap else x for x in (q, k, v))
    q, k, v = (inputs.view(x, kind) for x, kind in zip(arrays, views, strict=True))
    return Call(q, k, v, options, made)


def _options(
    draw: st.DrawFn,
    shape: _Shape,
    mask: Callable[[MaskSizes], st.SearchStrategy[Any]],
    key_lengths: bool | None,
    causal: bool | None,
) -> dict[str, Any]:
    options: dict[str, Any] = {
        "mask": draw(mask(shape.sizes())),
        "causal": draw(st.booleans()) if causal is None else causal,
        "scale": draw(st.sampled_from([None, None, 1.0, 0.0, 0.125, -0.5])),
        "layout": draw(st.sampled_from(["BHLD", "BLHD"])),
        "return_lse": draw(st.booleans()),
    }
    if draw(st.booleans()) if key_lengths is None else key_lengths:
        lengths = draw(
            st.lists(st.integers(0, shape.len_k), min_size=shape.batch, max_size=shape.batch)
        )
        kind = draw(st.sampled_from(["list", "int32", "int64"]))
        options["key_lengths"] = lengths if kind == "list" else np.array(lengths, kind)
    return options


def _with_poison(
    draw: st.DrawFn,
    k: np.ndarray,
    v: np.ndarray,
    shape: _Shape,
    options: dict[str, Any],
    one_entry: bool,
) -> tuple[np.ndarray, np.ndarray, str]:
    """NaN, infinities, huge numbers where no row looks; sometimes one wherever it falls."""
    hidden = draw(st.sampled_from([None, np.nan, np.inf, -np.inf, 1e30]))
    keep = visible(shape.heads_q, shape.len_q, k, options)
    if one_entry:  # the first entry's slots are those of all
        keep = np.broadcast_to(keep.any(axis=0, keepdims=True), keep.shape)
    if hidden is not None:
        k, v = inputs.poisoned(k, v, keep, hidden)
    note = f", unseen slots {hidden}"
    shown = draw(st.sampled_from([None, None, None, "k", "v"]))
    if shown is not None:
        target = (k if shown == "k" else v).copy()
        # An infinite value of v times a weight that underflows is NaN or not as precision has it.
        value = draw(st.sampled_from([np.nan, -np.inf, np.inf])) if shown == "k" else np.nan
        target.flat[draw(st.integers(0, target.size - 1))] = value
        k, v = (target, v) if shown == "k" else (k, target)
        note += f", {value} somewhere in {shown}"
    return k, v, note


def visible(heads_q: int, len_q: int, k: np.ndarray, options: Mapping[str, Any]) -> np.ndarray:
    """Who sees whom in a call: bool [batch, heads_q, len_q, len_k], for k in layout "BHLD"."""
    return _masks.materialize(
        expression(options.get("mask"), options.get("causal", False)),
        batch=k.shape[0],
        heads_q=heads_q,
        len_q=len_q,
        len_k=k.shape[2],
        key_lengths=options.get("key_lengths"),
    )
