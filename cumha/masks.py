"""A mask is one expression over ``b, h, q, k, len_q, len_k``, numbers and array look-ups.

The tree is built by ordinary Python operators and read by four walks:

1. `evaluate` / `materialize`  the values, in NumPy: the definition that everything else must match
2. `cuda_source`: ``keep()``   the same values, as text for the kernels
3. `tile_class`                what a rectangle of rows x keys holds: SKIP, PARTIAL or FULL
4. `key_range`                 the keys that a block of rows can see at all

Walks 3 and 4 also exist on the device. The rules of each operation are written once (`_RULES`, `_Range`)
against a small *calculus*: run over Python numbers they give the planner's answers, run over text they
give the device's code.

Positions are those of the sequence: ``k`` counts from the sequence's first key also where a call holds a
slice of the keys, and ``len_k`` is the number of *valid* keys of that batch entry.
"""

from __future__ import annotations

import enum
import math
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from cumha.errors import UnsupportedError

MAX_NUMBERS = 16  # run-time numbers of one mask: they travel by value in the kernel's parameters
MAX_ARRAYS = 8
MAX_NODES = 256  # keeps every recursive walk far from Python's recursion limit
MAX_ARRAY_NDIM = 4
INDEX_NAMES = ("b", "h", "q", "k", "len_q", "len_k")
NARROW_LIMIT = 2**28  # indices and numbers below it keep the usual masks in 32-bit arithmetic

_INT64 = (-(2**63), 2**63 - 1)
_INT32 = (-(2**31), 2**31 - 1)
_SPELLING = (
    "a mask expression has no truth value while it is built: write & | ~ for `and` `or` `not`, "
    "(a <= b) & (b < c) for a chained comparison, masks.minimum/masks.maximum for min/max, and "
    "combine both outcomes, (c & x) | (~c & y), for `if`"
)


class TileClass(enum.IntEnum):
    """What a rectangle of rows x keys holds; the numbers are those of `mask.cuh`."""

    SKIP = 0  # no row sees any key
    PARTIAL = 1  # the predicate must run
    FULL = 2  # every row sees every key


# ---------------------------------------------------------------------------------------------------
# The tree
# ---------------------------------------------------------------------------------------------------


class Expr:
    """A node of a mask expression; a boolean one is a mask.

    Built by `causal`, `window`, … and by operators inside the function given to `where`; never by
    calling this class. ``+ - * // %``, comparisons and ``& | ~ ^`` work; ``//`` and ``%`` are floor
    division with NumPy's result for a zero divisor (0). Integers are 64-bit two's complement.

    Attributes
    ----------
    op : str
        Operation; ``args`` are its operands.
    kind : str
        ``"int"``, ``"float"`` or ``"bool"``.
    """

    __array_ufunc__ = None  # NumPy's operators hand over to the reflected ones below
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, op: str, args: tuple[Expr, ...], kind: str, value: Any = None) -> None:
        self.op = op
        self.args = args
        self.kind = kind
        self.value = value  # a number, a constant, an index name or an ArrayInput
        self.has_k: bool = value == "k" if op == "index" else any(a.has_k for a in args)

    def __bool__(self) -> bool:
        raise TypeError(_SPELLING)

    def __repr__(self) -> str:
        return _to_text(self)

    def __add__(self, other: Any) -> Expr:
        return _arithmetic("add", self, other)

    def __radd__(self, other: Any) -> Expr:
        return _arithmetic("add", other, self)

    def __sub__(self, other: Any) -> Expr:
        return _arithmetic("sub", self, other)

    def __rsub__(self, other: Any) -> Expr:
        return _arithmetic("sub", other, self)

    def __mul__(self, other: Any) -> Expr:
        return _arithmetic("mul", self, other)

    def __rmul__(self, other: Any) -> Expr:
        return _arithmetic("mul", other, self)

    def __floordiv__(self, other: Any) -> Expr:
        return _integer_division("floordiv", self, other)

    def __rfloordiv__(self, other: Any) -> Expr:
        return _integer_division("floordiv", other, self)

    def __mod__(self, other: Any) -> Expr:
        return _integer_division("mod", self, other)

    def __rmod__(self, other: Any) -> Expr:
        return _integer_division("mod", other, self)

    def __truediv__(self, other: Any) -> Expr:
        raise TypeError("mask expressions have no true division: use // (floor division)")

    __rtruediv__ = __truediv__

    def __neg__(self) -> Expr:
        return _arithmetic("neg", self)

    def __abs__(self) -> Expr:
        return maximum(self, -self)

    def __lt__(self, other: Any) -> Expr:
        return _comparison("lt", self, other)

    def __le__(self, other: Any) -> Expr:
        return _comparison("le", self, other)

    def __gt__(self, other: Any) -> Expr:
        return _comparison("lt", other, self)

    def __ge__(self, other: Any) -> Expr:
        return _comparison("le", other, self)

    def __eq__(self, other: Any) -> Expr:  # type: ignore[override]
        return _comparison("eq", self, other)

    def __ne__(self, other: Any) -> Expr:  # type: ignore[override]
        return ~_comparison("eq", self, other)

    def __and__(self, other: Any) -> Expr:
        return _logic("and", self, other)

    def __rand__(self, other: Any) -> Expr:
        return _logic("and", other, self)

    def __or__(self, other: Any) -> Expr:
        return _logic("or", self, other)

    def __ror__(self, other: Any) -> Expr:
        return _logic("or", other, self)

    def __xor__(self, other: Any) -> Expr:
        return _logic("xor", self, other)

    def __rxor__(self, other: Any) -> Expr:
        return _logic("xor", other, self)

    def __invert__(self) -> Expr:
        return _logic("not", self)

    @cached_property
    def _program(self) -> _Program:
        return _Program(self)

    @property
    def structure(self) -> str:
        """What changes the generated code: the tree without the values of numbers and arrays."""
        return self._program.structure

    @property
    def numbers(self) -> tuple[int | float, ...]:
        """The run-time numbers in slot order."""
        return self._program.numbers

    @property
    def arrays(self) -> tuple[ArrayInput, ...]:
        """The looked-up arrays in slot order."""
        return self._program.arrays


class ArrayInput:
    """An array inside a mask expression; index it with one expression per axis.

    It holds a reference, not a copy: values written into the array later count.
    """

    __array_ufunc__ = None

    def __init__(self, data: Any, axes: tuple[str, ...] | None = None) -> None:
        if not (hasattr(data, "dtype") and hasattr(data, "shape") and hasattr(data, "strides")):
            raise TypeError(f"a mask array must be a NumPy or CuPy array, got {type(data).__name__}")
        if isinstance(data, np.ma.MaskedArray):
            raise TypeError("a mask array must be a plain array, got numpy.ma.MaskedArray")
        if not 1 <= data.ndim <= MAX_ARRAY_NDIM:
            raise ValueError(
                f"a mask array needs 1 to {MAX_ARRAY_NDIM} axes, got shape {tuple(data.shape)}"
            )
        name = str(data.dtype)
        if name not in _ARRAY_TYPES or not data.dtype.isnative:
            raise TypeError(
                f"a mask array of dtype {data.dtype!s} is not supported: use one of "
                f"{', '.join(_ARRAY_TYPES)} in native byte order"
            )
        self.data = data
        self.dtype = name
        self.axes = axes  # what each axis must match in the problem; None: the user's own indices

    @property
    def kind(self) -> str:
        return _ARRAY_TYPES[self.dtype].kind

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def __getitem__(self, index: Any) -> Expr:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != len(self.shape):
            raise TypeError(
                f"a mask array of shape {self.shape} needs {len(self.shape)} indices, "
                f"got {len(index)}"
            )
        args = tuple(_lift(i) for i in index)
        for arg in args:
            if arg.kind != "int":
                raise TypeError(f"an array index must be an integer expression, got {arg!r}")
        return Expr("lookup", args, self.kind, self)

    def __repr__(self) -> str:
        return f"array<{self.dtype} {list(self.shape)}>"


Mask: TypeAlias = Expr


@dataclass(frozen=True)
class _ArrayType:
    kind: str
    cuda: str  # element type in device memory
    bounds: tuple[Any, Any]


_NAN = (math.nan, math.nan)
_TEMPORARY = re.compile(r"\bt\d+\b")
_ARRAY_TYPES: dict[str, _ArrayType] = {
    "bool": _ArrayType("bool", "bool", (False, True)),
    "int8": _ArrayType("int", "signed char", (-(2**7), 2**7 - 1)),
    "int16": _ArrayType("int", "short", (-(2**15), 2**15 - 1)),
    "int32": _ArrayType("int", "int", _INT32),
    "int64": _ArrayType("int", "long long", _INT64),
    "uint8": _ArrayType("int", "unsigned char", (0, 2**8 - 1)),
    "uint16": _ArrayType("int", "unsigned short", (0, 2**16 - 1)),
    "uint32": _ArrayType("int", "unsigned int", (0, 2**32 - 1)),
    "float16": _ArrayType("float", "__half", _NAN),
    "bfloat16": _ArrayType("float", "__nv_bfloat16", _NAN),
    "float32": _ArrayType("float", "float", _NAN),
    "float64": _ArrayType("float", "double", _NAN),
}


def _lift(x: Any) -> Expr:
    """An operand as a node: numbers become run-time parameters, booleans constants."""
    if isinstance(x, Expr):
        return x
    if isinstance(x, (bool, np.bool_)):
        return Expr("const", (), "bool", bool(x))
    if isinstance(x, (int, np.integer)):
        if not _INT64[0] <= int(x) <= _INT64[1]:
            raise ValueError(f"the number {x} in a mask does not fit 64-bit integers")
        return Expr("number", (), "int", int(x))
    if isinstance(x, (float, np.floating)):
        if math.isnan(x):
            raise ValueError("a number in a mask must not be NaN")
        return Expr("number", (), "float", float(x))
    if isinstance(x, ArrayInput):
        raise TypeError(f"{x!r} needs an index, one expression per axis, as in ids[b, k]")
    raise TypeError(
        f"{type(x).__name__} is not part of the mask language: use indices, numbers, booleans, "
        "and arrays through masks.array(x) or masks.dense(keep)"
    )


def _constant(value: int | bool) -> Expr:
    """A literal that is part of the structure, unlike a user's number."""
    return Expr("const", (), "bool" if isinstance(value, bool) else "int", value)


def _numeric(op: str, operands: tuple[Any, ...]) -> tuple[Expr, ...]:
    nodes = tuple(_lift(x) for x in operands)
    for node in nodes:
        if node.kind == "bool":
            raise TypeError(f"`{op}` needs numbers, got the boolean expression {node!r}: use & | ~ ^")
    return nodes


def _arithmetic(op: str, *operands: Any) -> Expr:
    nodes = _numeric(op, operands)
    kind = "float" if any(n.kind == "float" for n in nodes) else "int"
    return Expr(op, nodes, kind)


def _integer_division(op: str, left: Any, right: Any) -> Expr:
    nodes = _numeric(op, (left, right))
    sign = "//" if op == "floordiv" else "%"
    if any(n.kind != "int" for n in nodes):
        raise TypeError(f"{sign} in a mask needs integers, got {nodes[0]!r} {sign} {nodes[1]!r}")
    if nodes[1].op == "number" and nodes[1].value == 0:
        raise ValueError(f"division by zero in a mask: {nodes[0]!r} {sign} 0")
    return Expr(op, nodes, "int")


def _comparison(op: str, left: Any, right: Any) -> Expr:
    nodes = (_lift(left), _lift(right))
    kinds = {n.kind for n in nodes}
    if kinds == {"bool"} and op == "eq":
        return ~(nodes[0] ^ nodes[1])
    if "bool" in kinds:
        raise TypeError(f"cannot compare {nodes[0]!r} with {nodes[1]!r}: booleans compare by == and !=")
    return Expr(op, nodes, "bool")


def _logic(op: str, *operands: Any) -> Expr:
    nodes = tuple(_lift(x) for x in operands)
    for node in nodes:
        if node.kind != "bool":
            raise TypeError(f"& | ~ ^ combine boolean expressions, got the number {node!r}")
    return Expr(op, nodes, "bool")


_b, _h, _q, _k, len_q, len_k = (Expr("index", (), "int", name) for name in INDEX_NAMES)

_SYMBOLS = {
    "add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%",
    "lt": "<", "le": "<=", "eq": "==", "and": "&", "or": "|", "xor": "^",
}  # fmt: skip


def _to_text(node: Expr, slots: _Program | None = None) -> str:
    """The expression as Python would write it; with ``slots``, run-time values by their slot."""
    parts = [_to_text(a, slots) for a in node.args]
    inner = ", ".join(parts)
    if node.op in _SYMBOLS:
        return f"({parts[0]} {_SYMBOLS[node.op]} {parts[1]})"
    if node.op == "number" and slots is not None:
        return f"n{slots.number_slot[id(node)]}"
    if node.op in ("index", "number", "const"):
        return str(node.value)
    if node.op == "lookup":
        name = repr(node.value) if slots is None else f"a{slots.array_slot[id(node.value)]}"
        return f"{name}[{inner}]"
    if node.op in ("not", "neg"):
        return ("~" if node.op == "not" else "-") + inner
    return f"{node.op}({inner})"


class _Program:
    """The nodes of an expression in evaluation order, with slots for numbers and arrays."""

    def __init__(self, root: Expr) -> None:
        self.nodes: list[Expr] = []
        self.position: dict[int, int] = {}
        stack: list[tuple[Expr, bool]] = [(root, False)]
        while stack:  # a depth-first order without recursion
            node, ready = stack.pop()
            if id(node) in self.position:
                continue
            if ready:
                self.position[id(node)] = len(self.nodes)
                self.nodes.append(node)
            else:
                stack.append((node, True))
                stack.extend((a, False) for a in reversed(node.args))
        if len(self.nodes) > MAX_NODES:
            raise UnsupportedError(
                f"the mask has {len(self.nodes)} nodes, at most {MAX_NODES} are supported: "
                "put large case distinctions into an array (masks.array) and look them up"
            )
        number_nodes = [n for n in self.nodes if n.op == "number"]
        self.number_slot = {id(n): i for i, n in enumerate(number_nodes)}
        self.numbers = tuple(n.value for n in number_nodes)
        self.array_slot: dict[int, int] = {}
        arrays: list[ArrayInput] = []
        for n in self.nodes:
            if n.op == "lookup" and id(n.value) not in self.array_slot:
                self.array_slot[id(n.value)] = len(arrays)
                arrays.append(n.value)
        self.arrays = tuple(arrays)
        self._check_slots()
        self.structure = ";".join(self._describe(n) for n in self.nodes)

    def _check_slots(self) -> None:
        for what, got, most, remedy in (
            ("numbers", len(self.numbers), MAX_NUMBERS, "put them into an array (masks.array)"),
            ("arrays", len(self.arrays), MAX_ARRAYS, "stack them into one array (masks.array)"),
        ):
            if got > most:
                raise UnsupportedError(
                    f"the mask uses {got} {what}, at most {most} are supported: {remedy}"
                )

    def _describe(self, node: Expr) -> str:
        args = ",".join(str(self.position[id(a)]) for a in node.args)
        if node.op == "number":
            narrow = node.kind == "int" and abs(node.value) <= NARROW_LIMIT
            kind = "int32" if narrow else "int64" if node.kind == "int" else "float64"
            return f"number:{self.number_slot[id(node)]}:{kind}"
        if node.op == "lookup":
            return f"lookup:{self.array_slot[id(node.value)]}:{node.value.dtype}({args})"
        if node.value is not None:
            return f"{node.op}:{node.value}"
        return f"{node.op}({args})"


# ---------------------------------------------------------------------------------------------------
# Built-in masks
# ---------------------------------------------------------------------------------------------------


def _position(align: str) -> Expr:
    """The key position that query ``q`` stands at."""
    if align == "bottom_right":
        return _q + (len_k - len_q)
    if align == "top_left":
        return _q
    raise ValueError(f'align must be "bottom_right" or "top_left", got {align!r}')


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
        Number of keys on each side, inclusive; -1 leaves that side open. A window of W tokens that end
        at the query is ``window(W - 1, 0)``.
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
    integers = tuple(n for n, t in _ARRAY_TYPES.items() if t.kind == "int")
    left = _problem_lookup("segments q_ids", q_ids, ("b", "q"), integers)
    return left == _problem_lookup("segments k_ids", k_ids, ("b", "k"), integers)


def where(function: Callable[[Expr, Expr, Expr, Expr], Any]) -> Mask:
    """Keep where a Python function of the indices says so.

    Parameters
    ----------
    function : callable
        Called once with the expressions ``b, h, q, k`` (batch entry, query head, query and key position);
        returns a boolean expression, as in ``masks.where(lambda b, h, q, k: (k <= q) & (q - k < 256))``.
        `len_q`, `len_k`, `minimum`, `maximum` and arrays made by `array` may be used inside.

    Raises
    ------
    TypeError
        If the function leaves the expression language or returns something that is not boolean.
    """
    if not callable(function):
        raise TypeError(f"masks.where needs a function of (b, h, q, k), got {type(function).__name__}")
    result = function(_b, _h, _q, _k)
    if result is None:
        raise TypeError("the function given to masks.where returned None: it must return the mask")
    node = _lift(result)
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
        bool, integer up to 64 bits (not uint64) or floating point, 1 to 4 axes; of the library and on the
        device of the attention inputs. Held by reference.
    """
    return x if isinstance(x, ArrayInput) else ArrayInput(x)


def minimum(x: Any, y: Any) -> Expr:
    """Elementwise minimum of two numeric expressions (NaN if either is NaN)."""
    return _arithmetic("min", x, y)


def maximum(x: Any, y: Any) -> Expr:
    """Elementwise maximum of two numeric expressions (NaN if either is NaN)."""
    return _arithmetic("max", x, y)


def _all(parts: Iterable[Expr]) -> Expr:
    result: Expr | None = None
    for part in parts:
        result = part if result is None else result & part
    return _constant(True) if result is None else result


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
            f"{name} needs shape [{', '.join(_AXIS_NAMES[a] for a in axes)}], "
            f"got {tuple(data.shape)}"
        )
    axes = axes[len(axes) - data.ndim :]
    index = {"b": _b, "h": _h, "q": _q, "k": _k}
    source = ArrayInput(data, axes)
    return source[tuple(_constant(0) if n == 1 else index[a] for a, n in zip(axes, data.shape, strict=True))]


_AXIS_NAMES = {"b": "batch", "h": "heads_q", "q": "len_q", "k": "len_k"}


def check_arrays(expr: Expr, *, batch: int, heads_q: int, len_q: int, len_k: int) -> None:
    """Raise ValueError where an array of the mask does not fit the problem.

    ``len_k`` is the length of the key axis that masks see (all keys of the sequence).
    """
    sizes = {"b": batch, "h": heads_q, "q": len_q, "k": len_k}
    empty = 0 in sizes.values()
    for source in expr.arrays:
        for axis, got in zip(source.axes or (), source.shape, strict=bool(source.axes)):
            if got not in (1, sizes[axis]):
                wanted = ", ".join(f"{_AXIS_NAMES[a]}={sizes[a]}" for a in source.axes or ())
                raise ValueError(
                    f"mask array of shape {source.shape} does not fit [{wanted}]: each axis must "
                    "have that size or 1"
                )
        if 0 in source.shape and not empty:
            raise ValueError(f"mask array of shape {source.shape} has no elements to look up")


def map_arrays(expr: Expr, function: Callable[[Any], Any]) -> Expr:
    """The same expression over ``function(data)`` for every looked-up array."""
    made: dict[int, Expr] = {}
    sources = {id(s): ArrayInput(function(s.data), s.axes) for s in expr.arrays}
    for node in expr._program.nodes:
        args = tuple(made[id(a)] for a in node.args)
        value = sources[id(node.value)] if node.op == "lookup" else node.value
        same = node.op != "lookup" and all(x is y for x, y in zip(args, node.args, strict=True))
        made[id(node)] = node if same else Expr(node.op, args, node.kind, value)
    return made[id(expr)]


# ---------------------------------------------------------------------------------------------------
# Walk 1: values in NumPy
# ---------------------------------------------------------------------------------------------------


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
        for node in expr._program.nodes:
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
                f"look-up {node!r}: index {int(i.min())}…{int(i.max())} leaves axis {axis} of size {n}"
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


# ---------------------------------------------------------------------------------------------------
# The rules of walks 3 and 4, over any calculus
# ---------------------------------------------------------------------------------------------------

Pair: TypeAlias = tuple[Any, Any]  # smallest and largest value; booleans: (surely, possibly)


class _Escape(Exception):
    """An interval end left 64-bit integers: nothing is known of that node."""


class _Numbers:
    """The calculus over Python numbers, exact for integers."""

    lt = staticmethod(operator.lt)
    le = staticmethod(operator.le)
    eq = staticmethod(operator.eq)
    finite = staticmethod(math.isfinite)
    real = staticmethod(float)

    @staticmethod
    def const(value: Any) -> Any:
        return value

    @classmethod
    def neg(cls, x: Any) -> Any:
        return cls._checked(-x)

    @staticmethod
    def _checked(value: Any) -> Any:
        if isinstance(value, int) and not _INT64[0] <= value <= _INT64[1]:
            raise _Escape
        return value

    @classmethod
    def add(cls, x: Any, y: Any) -> Any:
        return cls._checked(x + y)

    @classmethod
    def sub(cls, x: Any, y: Any) -> Any:
        return cls._checked(x - y)

    @classmethod
    def mul(cls, x: Any, y: Any) -> Any:
        return cls._checked(x * y)

    @staticmethod
    def floordiv(x: int, y: int) -> int:
        return x // y if y else 0

    @staticmethod
    def mod(x: int, y: int) -> int:
        return x % y if y else 0

    @staticmethod
    def min(x: Any, y: Any) -> Any:
        return x if x != x or x < y else y  # NaN wins, as in numpy.minimum

    @staticmethod
    def max(x: Any, y: Any) -> Any:
        return x if x != x or x > y else y

    @staticmethod
    def all(*terms: bool) -> bool:
        return all(terms)

    @staticmethod
    def any(*terms: bool) -> bool:
        return any(terms)

    @staticmethod
    def inv(x: bool) -> bool:
        return not x

    @staticmethod
    def select(c: bool, x: Any, y: Any) -> Any:
        return x if c else y


def _finite_or_nan(E: Any, kind: str, pair: Pair) -> Pair:
    """Infinite float ends may hide a NaN inside (0 * inf, inf - inf): then nothing is known."""
    if kind != "float":
        return pair
    known = E.all(E.finite(pair[0]), E.finite(pair[1]))
    nan = E.const(math.nan)
    return E.select(known, pair[0], nan), E.select(known, pair[1], nan)


def _rule_add(E: Any, kind: str, x: Pair, y: Pair) -> Pair:
    return _finite_or_nan(E, kind, (E.add(x[0], y[0]), E.add(x[1], y[1])))


def _rule_sub(E: Any, kind: str, x: Pair, y: Pair) -> Pair:
    return _finite_or_nan(E, kind, (E.sub(x[0], y[1]), E.sub(x[1], y[0])))


def _rule_mul(E: Any, kind: str, x: Pair, y: Pair) -> Pair:
    a, b = E.mul(x[0], y[0]), E.mul(x[0], y[1])
    c, d = E.mul(x[1], y[0]), E.mul(x[1], y[1])
    pair = E.min(E.min(a, b), E.min(c, d)), E.max(E.max(a, b), E.max(c, d))
    return _finite_or_nan(E, kind, pair)


def _rule_neg(E: Any, kind: str, x: Pair) -> Pair:
    return E.neg(x[1]), E.neg(x[0])


def _rule_min(E: Any, kind: str, x: Pair, y: Pair) -> Pair:
    return E.min(x[0], y[0]), E.min(x[1], y[1])


def _rule_max(E: Any, kind: str, x: Pair, y: Pair) -> Pair:
    return E.max(x[0], y[0]), E.max(x[1], y[1])


def _rule_floordiv(E: Any, kind: str, x: Pair, y: Pair) -> Pair:
    """Monotone in each operand while the divisor keeps its sign; else |x // y| <= |x|."""
    zero = E.const(0)
    a, b = E.floordiv(x[0], y[0]), E.floordiv(x[0], y[1])
    c, d = E.floordiv(x[1], y[0]), E.floordiv(x[1], y[1])
    signed = E.any(E.lt(zero, y[0]), E.lt(y[1], zero))
    widest = E.max(E.max(x[1], E.sub(zero, x[0])), zero)
    lo = E.select(signed, E.min(E.min(a, b), E.min(c, d)), E.sub(zero, widest))
    return lo, E.select(signed, E.max(E.max(a, b), E.max(c, d)), widest)


def _rule_mod(E: Any, kind: str, x: Pair, y: Pair) -> Pair:
    """The result has the divisor's sign; inside one block of a fixed divisor it is monotone."""
    zero, one = E.const(0), E.const(1)
    lo = E.min(zero, E.add(y[0], one))
    hi = E.max(zero, E.sub(y[1], one))
    natural = E.all(E.le(zero, x[0]), E.lt(zero, y[0]))
    hi = E.select(natural, E.min(hi, x[1]), hi)
    same = E.all(E.eq(y[0], y[1]), E.eq(E.floordiv(x[0], y[0]), E.floordiv(x[1], y[0])))
    block = E.all(same, E.inv(E.eq(y[0], zero)))
    return E.select(block, E.mod(x[0], y[0]), lo), E.select(block, E.mod(x[1], y[0]), hi)


# Comparisons are phrased so that a NaN end (nothing known) gives (not surely, possibly).


def _rule_lt(E: Any, kind: str, x: Pair, y: Pair) -> Pair:
    return E.lt(x[1], y[0]), E.inv(E.le(y[1], x[0]))


def _rule_le(E: Any, kind: str, x: Pair, y: Pair) -> Pair:
    return E.le(x[1], y[0]), E.inv(E.lt(y[1], x[0]))


def _rule_eq(E: Any, kind: str, x: Pair, y: Pair) -> Pair:
    surely = E.all(E.le(x[1], y[0]), E.le(y[1], x[0]))
    return surely, E.inv(E.any(E.lt(x[1], y[0]), E.lt(y[1], x[0])))


def _rule_and(E: Any, kind: str, x: Pair, y: Pair) -> Pair:
    return E.all(x[0], y[0]), E.all(x[1], y[1])


def _rule_or(E: Any, kind: str, x: Pair, y: Pair) -> Pair:
    return E.any(x[0], y[0]), E.any(x[1], y[1])


def _rule_not(E: Any, kind: str, x: Pair) -> Pair:
    return E.inv(x[1]), E.inv(x[0])


def _rule_xor(E: Any, kind: str, x: Pair, y: Pair) -> Pair:
    surely = E.any(E.all(x[0], E.inv(y[1])), E.all(y[0], E.inv(x[1])))
    surely_not = E.any(E.all(x[0], y[0]), E.all(E.inv(x[1]), E.inv(y[1])))
    return surely, E.inv(surely_not)


_RULES: dict[str, Callable[..., Pair]] = {
    "add": _rule_add, "sub": _rule_sub, "mul": _rule_mul, "neg": _rule_neg,
    "min": _rule_min, "max": _rule_max, "floordiv": _rule_floordiv, "mod": _rule_mod,
    "lt": _rule_lt, "le": _rule_le, "eq": _rule_eq,
    "and": _rule_and, "or": _rule_or, "not": _rule_not, "xor": _rule_xor,
}  # fmt: skip


class _Intervals:
    """Walk 3 over a calculus: the interval of every node of an expression.

    ``leaf(node, index_pairs)`` gives the pair of an index, number or look-up.
    """

    def __init__(self, E: Any, expr: Expr, leaf: Callable[[Expr, list[Pair]], Pair]) -> None:
        self.E = E
        self.leaf = leaf
        self.pairs: dict[int, Pair] = {}
        self.expr = expr

    def of(self, node: Expr) -> Pair:
        if id(node) not in self.pairs:
            args = [self.of(a) for a in node.args]
            self.pairs[id(node)] = self._pair(node, args)
        return self.pairs[id(node)]

    def _pair(self, node: Expr, args: list[Pair]) -> Pair:
        if node.op == "const":
            return self.E.const(node.value), self.E.const(node.value)
        if node.op in ("index", "number", "lookup"):
            return self.leaf(node, args)
        kind = "float" if any(a.kind == "float" for a in node.args) else node.kind
        if kind == "float":
            args = [(self.E.real(lo), self.E.real(hi)) for lo, hi in args]
        try:
            return _RULES[node.op](self.E, kind, *args)
        except _Escape:
            return self.E.const(_INT64[0]), self.E.const(_INT64[1])


class _Range:
    """Walk 4 over a calculus: solve a mask for ``k``.

    Pairs here are inclusive ends, None where open. A node is solved backwards: given the values it may
    take, which ``k`` can bring it there? Every answer contains the true one.
    """

    def __init__(self, intervals: _Intervals, domain: Pair) -> None:
        self.E = intervals.E
        self.of = intervals.of
        self.domain = domain  # first and last valid key: what "open" means once a number is needed

    def mask(self, node: Expr, want: bool = True) -> Pair:
        """Keys at which the boolean ``node`` can equal ``want``."""
        if not node.has_k:
            return self._keyless(node, want)
        if node.op == "not":
            return self.mask(node.args[0], not want)
        if node.op in ("and", "or"):
            parts = [self.mask(a, want) for a in node.args]
            return self._meet(*parts) if (node.op == "and") == want else self._hull(*parts)
        if node.op in ("lt", "le", "eq") and all(a.kind == "int" for a in node.args):
            try:
                return self._compare(node.op, *node.args, want)
            except _Escape:
                return None, None
        return None, None

    def _keyless(self, node: Expr, want: bool) -> Pair:
        """All keys or none, by what is known of a term without ``k``."""
        E, (surely, possibly) = self.E, self.of(node)
        none = E.inv(possibly) if want else surely
        first, last = self.domain
        lo = E.select(none, E.const(1), first)
        return lo, E.select(none, E.const(0), last)

    def _compare(self, op: str, x: Expr, y: Expr, want: bool) -> Pair:
        if op == "eq":
            if not want:
                return None, None
            return self._meet(self._at_most(x, y, None), self._at_most(y, x, None))
        if not want:  # ~(x < y) is y <= x; ~(x <= y) is y < x
            x, y, op = y, x, "le" if op == "lt" else "lt"
        return self._at_most(x, y, self.E.const(1) if op == "lt" else None)

    def _at_most(self, x: Expr, y: Expr, margin: Any) -> Pair:
        """Keys with ``x + margin <= y``."""
        E = self.E
        if not y.has_k:
            hi = self.of(y)[1]
            return self._solve(x, None, hi if margin is None else E.sub(hi, margin))
        if not x.has_k:
            lo = self.of(x)[0]
            return self._solve(y, lo if margin is None else E.add(lo, margin), None)
        form = _Linear.of(Expr("sub", (x, y), "int"))
        if form is None:
            return None, None
        hi = E.const(0) if margin is None else E.neg(margin)
        for sign, term in form.rest:  # slope * k + rest <= hi
            lo_term, hi_term = self.of(term)
            hi = E.sub(hi, lo_term) if sign > 0 else E.add(hi, hi_term)
        if form.slope == 0:
            return None, None
        slope = E.const(abs(form.slope))
        if form.slope > 0:
            return None, E.floordiv(hi, slope)
        return E.neg(E.floordiv(hi, slope)), None

    def _solve(self, node: Expr, lo: Any, hi: Any) -> Pair:
        """Keys at which the integer ``node`` can lie in [lo, hi]."""
        if node.op == "index":
            return lo, hi
        if node.op == "neg":
            return self._solve(node.args[0], self._neg(hi), self._neg(lo))
        if len(node.args) != 2 or node.op == "lookup" or all(a.has_k for a in node.args):
            return self._solve_linear(node, lo, hi)
        x, y = node.args
        if node.op == "add":
            if not x.has_k:
                x, y = y, x
            y_lo, y_hi = self.of(y)
            return self._solve(x, self._sub(lo, y_hi), self._sub(hi, y_lo))
        if node.op == "sub":
            if x.has_k:
                y_lo, y_hi = self.of(y)
                return self._solve(x, self._add(lo, y_lo), self._add(hi, y_hi))
            x_lo, x_hi = self.of(x)
            return self._solve(y, self._sub(x_lo, hi), self._sub(x_hi, lo))
        if node.op == "mul":
            return self._solve_mul(x if x.has_k else y, y if x.has_k else x, lo, hi)
        if node.op == "floordiv" and x.has_k:
            return self._solve_floordiv(x, y, lo, hi)
        if node.op in ("min", "max"):  # min(x, y) >= lo needs x >= lo; max(x, y) <= hi needs x <= hi
            x = x if x.has_k else y
            return self._solve(x, lo, None) if node.op == "min" else self._solve(x, None, hi)
        return None, None

    def _solve_linear(self, node: Expr, lo: Any, hi: Any) -> Pair:
        """Both operands hold ``k``: solvable if the node is slope * k + rest."""
        form = _Linear.of(node)
        if form is None or form.slope == 0:
            return None, None
        E = self.E
        for sign, term in form.rest:
            term_lo, term_hi = self.of(term)
            if sign < 0:
                term_lo, term_hi = E.neg(term_hi), E.neg(term_lo)
            lo, hi = self._sub(lo, term_hi), self._sub(hi, term_lo)
        if form.slope < 0:
            lo, hi = self._neg(hi), self._neg(lo)
        slope = E.const(abs(form.slope))
        lo = None if lo is None else E.neg(E.floordiv(E.neg(lo), slope))
        return lo, None if hi is None else E.floordiv(hi, slope)

    def _solve_mul(self, x: Expr, y: Expr, lo: Any, hi: Any) -> Pair:
        """x * y in [lo, hi], ``y`` free of k: by the sign of y, which is known at run time."""
        E, zero = self.E, self.E.const(0)
        y_lo, y_hi = self.of(y)

        def quotients(bound: Any, rounding: Callable[[Any, Any], Any], pick: Any) -> Any:
            if bound is None:
                return None
            return pick(rounding(bound, y_lo), rounding(bound, y_hi))

        def up(a: Any, d: Any) -> Any:
            return E.neg(E.floordiv(E.neg(a), d))

        down = E.floordiv
        positive = self._solve(x, quotients(lo, up, E.min), quotients(hi, down, E.max))
        negative = self._solve(x, quotients(hi, up, E.min), quotients(lo, down, E.max))
        first, last = self.domain
        otherwise = self._choose(E.lt(y_hi, zero), negative, (first, last))
        return self._choose(E.lt(zero, y_lo), positive, otherwise)

    def _solve_floordiv(self, x: Expr, y: Expr, lo: Any, hi: Any) -> Pair:
        """x // y in [lo, hi], ``y`` free of k and positive at run time."""
        E, zero, one = self.E, self.E.const(0), self.E.const(1)
        y_lo, y_hi = self.of(y)
        if lo is not None:
            lo = E.min(E.mul(lo, y_lo), E.mul(lo, y_hi))
        if hi is not None:
            hi = E.max(E.mul(hi, y_lo), E.mul(hi, y_hi))
            hi = E.add(hi, E.sub(y_hi, one))
        return self._choose(E.lt(zero, y_lo), self._solve(x, lo, hi), self.domain)

    def _choose(self, condition: Any, x: Pair, y: Pair) -> Pair:
        ends = []
        for end, a, b in zip(self.domain, x, y, strict=True):
            a, b = end if a is None else a, end if b is None else b
            ends.append(self.E.select(condition, a, b))
        return ends[0], ends[1]

    def _meet(self, x: Pair, y: Pair) -> Pair:
        E = self.E
        lo = y[0] if x[0] is None else x[0] if y[0] is None else E.max(x[0], y[0])
        hi = y[1] if x[1] is None else x[1] if y[1] is None else E.min(x[1], y[1])
        return lo, hi

    def _hull(self, x: Pair, y: Pair) -> Pair:
        """The smallest range over both; an empty one adds nothing."""
        E, (first, last) = self.E, self.domain

        def empty(pair: Pair) -> Any:
            return E.lt(last if pair[1] is None else pair[1], first if pair[0] is None else pair[0])

        lo = None if x[0] is None or y[0] is None else E.min(x[0], y[0])
        hi = None if x[1] is None or y[1] is None else E.max(x[1], y[1])
        return self._choose(empty(x), y, self._choose(empty(y), x, (lo, hi)))

    def _add(self, x: Any, y: Any) -> Any:
        return None if x is None else self.E.add(x, y)

    def _sub(self, x: Any, y: Any) -> Any:
        return None if x is None or y is None else self.E.sub(x, y)

    def _neg(self, x: Any) -> Any:
        return None if x is None else self.E.neg(x)


@dataclass(frozen=True)
class _Linear:
    """slope * k + the sum of signed terms without ``k``."""

    slope: int
    rest: tuple[tuple[int, Expr], ...]

    @staticmethod
    def of(node: Expr, sign: int = 1) -> _Linear | None:
        if not node.has_k:
            return _Linear(0, ((sign, node),))
        if node.op == "index":
            return _Linear(sign, ())
        if node.op == "neg":
            return _Linear.of(node.args[0], -sign)
        if node.op not in ("add", "sub"):
            return None
        x = _Linear.of(node.args[0], sign)
        y = _Linear.of(node.args[1], -sign if node.op == "sub" else sign)
        return None if x is None or y is None else _Linear(x.slope + y.slope, x.rest + y.rest)


# ---------------------------------------------------------------------------------------------------
# Walks 3 and 4 in Python
# ---------------------------------------------------------------------------------------------------


def _host_leaf(environment: dict[str, Pair]) -> Callable[[Expr, list[Pair]], Pair]:
    def leaf(node: Expr, index: list[Pair]) -> Pair:
        if node.op == "index":
            return environment[node.value]
        if node.op == "number":
            return node.value, node.value
        return _lookup_bounds(node.value, index)

    return leaf


def _lookup_bounds(source: ArrayInput, index: list[Pair]) -> Pair:
    """Smallest and largest value over a box of indices; device memory is never read."""
    if not isinstance(source.data, np.ndarray) or 0 in source.shape:
        return _ARRAY_TYPES[source.dtype].bounds
    box = tuple(
        slice(min(max(lo, 0), n - 1), min(max(hi, 0), n - 1) + 1)
        for (lo, hi), n in zip(index, source.shape, strict=True)
    )
    values = source.data[box]
    if source.kind == "bool":
        return bool(values.all()), bool(values.any())
    if source.kind == "float":
        values = values.astype(np.float64)  # min and max of NumPy let a NaN win
        return float(values.min()), float(values.max())
    return int(values.min()), int(values.max())


Span: TypeAlias = tuple[int, int]  # half-open


def tile_class(
    expr: Expr, *, b: int, h: Span, q: Span, k: Span, len_q: int, len_k: int
) -> TileClass:
    """Walk 3: what the rectangle of rows h x q and keys k holds.

    ``h``, ``q``, ``k`` are half-open and not empty. Sound, not exact: PARTIAL may be answered for a tile
    that is empty or full.
    """
    pairs = (*((b, b), *((s[0], s[1] - 1) for s in (h, q, k))), (len_q, len_q), (len_k, len_k))
    environment = dict(zip(INDEX_NAMES, pairs, strict=True))
    surely, possibly = _Intervals(_Numbers, expr, _host_leaf(environment)).of(expr)
    return TileClass.FULL if surely else TileClass.PARTIAL if possibly else TileClass.SKIP


def key_range(expr: Expr, *, b: int, h: Span, q: Span, len_q: int, len_k: int) -> Span:
    """Walk 4: a half-open range [k_lo, k_hi) within [0, len_k) that holds every key the rows see.

    ``k_lo == k_hi`` means that they see none.
    """
    domain = (0, len_k - 1)
    pairs = ((b, b), (h[0], h[1] - 1), (q[0], q[1] - 1), domain, (len_q, len_q), (len_k, len_k))
    environment = dict(zip(INDEX_NAMES, pairs, strict=True))
    intervals = _Intervals(_Numbers, expr, _host_leaf(environment))
    lo, hi = _Range(intervals, domain).mask(expr)
    first = min(max(0, 0 if lo is None else lo), len_k)
    return first, max(first, min(len_k, len_k if hi is None else hi + 1))


def specialise(expr: Expr, *, len_q: int) -> Expr:
    """Drop what is always true for one query row: a bottom-right causal test in decode."""
    if len_q != 1:
        return expr
    made: dict[int, Expr] = {}
    for node in expr._program.nodes:
        args = tuple(made[id(a)] for a in node.args)
        made[id(node)] = _simplified(node, args)
    return made[id(expr)]


def _simplified(node: Expr, args: tuple[Expr, ...]) -> Expr:
    if node.op in ("lt", "le") and _always(node.op, *args):
        return _constant(True)
    if node.op in ("and", "or"):
        absorbing = node.op == "or"
        for x, y in (args, args[::-1]):
            if x.op == "const":
                return x if x.value is absorbing else y
    if node.op == "not" and args[0].op == "const":
        return _constant(not args[0].value)
    same = all(x is y for x, y in zip(args, node.args, strict=True))
    return node if same else Expr(node.op, args, node.kind, node.value)


def _always(op: str, x: Expr, y: Expr) -> bool:
    """Whether x < y or x <= y holds for every valid key of a call with q = 0 and len_q = 1."""
    terms: dict[str, int] = {"one": -1 if op == "lt" else 0}
    if not _collect(y, 1, terms) or not _collect(x, -1, terms):
        return False
    terms["one"] += terms.pop("len_q", 0)
    terms.pop("q", None)
    slope = terms.pop("k", 0)
    if slope < 0:  # worst at the last valid key
        terms["len_k"] = terms.get("len_k", 0) + slope
        terms["one"] -= slope
    last = terms.pop("len_k", 0)  # a key exists, so len_k >= 1
    return last >= 0 and terms.pop("one") + last >= 0 and not any(terms.values())


def _collect(node: Expr, sign: int, terms: dict[str, int]) -> bool:
    """Add ``sign * node`` to a sum of indices and literals; False where it is not one."""
    if node.op == "index":
        terms[node.value] = terms.get(node.value, 0) + sign
        return True
    if node.op == "const" and node.kind == "int":
        terms["one"] += sign * node.value
        return True
    if node.op == "neg":
        return _collect(node.args[0], -sign, terms)
    if node.op in ("add", "sub"):
        second = -sign if node.op == "sub" else sign
        return _collect(node.args[0], sign, terms) and _collect(node.args[1], second, terms)
    return False


# ---------------------------------------------------------------------------------------------------
# Walks 2, 3 and 4 as CUDA text
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Text:
    """A value in the emitted code; ``bounds`` are those of every value it can ever take."""

    text: str
    kind: str  # "int", "float" or "bool"
    bounds: tuple[Any, Any] = _NAN

    @property
    def wide(self) -> bool:
        return not (_INT32[0] <= self.bounds[0] and self.bounds[1] <= _INT32[1])

    @property
    def known(self) -> bool:
        return self.kind != "float" and bool(self.bounds[0] == self.bounds[1])


class _Cuda:
    """The calculus over CUDA text: every operation appends one line and returns its name.

    Integer types follow from bounds: int while operands and result provably fit, else long long. Past 64
    bits a *value* wraps as NumPy's does (``wraps=True``), an interval end is given up (`_Escape`).
    """

    _INFIX = {"add": "+", "sub": "-", "mul": "*"}

    def __init__(self, *, wraps: bool) -> None:
        self.wraps = wraps
        self._made: dict[str, _Text] = {}
        self._types: list[str] = []

    def name(self, ctype: str, text: str, kind: str, bounds: tuple[Any, Any] = _NAN) -> _Text:
        """Give a line's result a name, once per text."""
        if text not in self._made:
            self._made[text] = _Text(f"t{len(self._made)}", kind, bounds)
            self._types.append(ctype)
        return self._made[text]

    def lines(self, result: str) -> list[str]:
        """The lines that ``result`` needs, in order."""
        needed = set(_TEMPORARY.findall(result))
        kept: list[str] = []
        for ctype, (text, made) in zip(self._types[::-1], [*self._made.items()][::-1], strict=True):
            if made.text in needed:
                needed.update(_TEMPORARY.findall(text))
                kept.append(f"const {ctype} {made.text} = {text};")
        return kept[::-1]

    def const(self, value: Any) -> _Text:
        if isinstance(value, bool):
            return _Text("true" if value else "false", "bool", (value, value))
        if isinstance(value, float):
            return _Text("not_a_number()", "float")
        text = "(-9223372036854775807LL - 1)" if value == _INT64[0] else str(value)
        suffix = "" if _INT32[0] < value <= _INT32[1] or value == _INT64[0] else "LL"
        return _Text(f"{text}{suffix}", "int", (value, value))

    def real(self, x: _Text) -> _Text:
        return x if x.kind == "float" else self.name("double", f"static_cast<double>({x.text})", "float")

    def _arithmetic(self, op: str, *operands: _Text) -> _Text:
        if any(x.kind == "float" for x in operands):
            args = ", ".join(self.real(x).text for x in operands)
            return self.name("double", f"real_{op}({args})", "float")
        try:
            bounds = _RULES[op](_Numbers, "int", *(x.bounds for x in operands))
            _Numbers._checked(bounds[0])
            _Numbers._checked(bounds[1])
        except _Escape:
            if not self.wraps:
                raise
            args = ", ".join(x.text for x in operands)
            return self.name("long long", f"wrap_{op}({args})", "int", _INT64)
        if bounds[0] == bounds[1]:
            return self.const(bounds[0])
        narrow_result = not _Text("", "int", bounds).wide
        wide = not narrow_result or any(x.wide for x in operands)
        args = [f"static_cast<long long>({x.text})" if wide and not x.wide else x.text for x in operands]
        if op in self._INFIX:
            text = f"{args[0]} {self._INFIX[op]} {args[1]}"
        else:
            text = f"integer_{op}({', '.join(args)})"
        if narrow_result:
            return self.name("int", f"static_cast<int>({text})" if wide else text, "int", bounds)
        return self.name("long long", text, "int", bounds)

    def add(self, x: _Text, y: _Text) -> _Text:
        return self._arithmetic("add", x, y)

    def sub(self, x: _Text, y: _Text) -> _Text:
        return self._arithmetic("sub", x, y)

    def mul(self, x: _Text, y: _Text) -> _Text:
        return self._arithmetic("mul", x, y)

    def neg(self, x: _Text) -> _Text:
        return self._arithmetic("neg", x)

    def floordiv(self, x: _Text, y: _Text) -> _Text:
        return self._arithmetic("floordiv", x, y)

    def mod(self, x: _Text, y: _Text) -> _Text:
        return self._arithmetic("mod", x, y)

    def min(self, x: _Text, y: _Text) -> _Text:
        if x.kind == y.kind == "int":
            if x.bounds[1] <= y.bounds[0] or x == y:
                return x
            if y.bounds[1] <= x.bounds[0]:
                return y
        return self._arithmetic("min", x, y)

    def max(self, x: _Text, y: _Text) -> _Text:
        if x.kind == y.kind == "int":
            if x.bounds[0] >= y.bounds[1] or x == y:
                return x
            if y.bounds[0] >= x.bounds[1]:
                return y
        return self._arithmetic("max", x, y)

    def _compare(self, op: str, symbol: str, x: _Text, y: _Text) -> _Text:
        if x.kind == y.kind == "int":
            surely, possibly = _RULES[op](_Numbers, "int", x.bounds, y.bounds)
            if surely == possibly:
                return self.const(bool(surely))
        elif "float" in (x.kind, y.kind):
            x, y = self.real(x), self.real(y)
        return self.name("bool", f"{x.text} {symbol} {y.text}", "bool", (False, True))

    def lt(self, x: _Text, y: _Text) -> _Text:
        return self._compare("lt", "<", x, y)

    def le(self, x: _Text, y: _Text) -> _Text:
        return self._compare("le", "<=", x, y)

    def eq(self, x: _Text, y: _Text) -> _Text:
        return self._compare("eq", "==", x, y)

    def finite(self, x: _Text) -> _Text:
        return self.name("bool", f"is_finite({x.text})", "bool", (False, True))

    def _join(self, symbol: str, neutral: bool, terms: tuple[_Text, ...]) -> _Text:
        rest = [t for t in terms if not (t.known and t.bounds[0] is neutral)]
        for t in rest:
            if t.known:
                return t
        if len(rest) < 2:
            return rest[0] if rest else self.const(neutral)
        return self.name("bool", f" {symbol} ".join(t.text for t in rest), "bool", (False, True))

    def all(self, *terms: _Text) -> _Text:
        return self._join("&&", True, terms)

    def any(self, *terms: _Text) -> _Text:
        return self._join("||", False, terms)

    def inv(self, x: _Text) -> _Text:
        if x.known:
            return self.const(not x.bounds[0])
        return self.name("bool", f"!{x.text}", "bool", (False, True))

    def xor(self, x: _Text, y: _Text) -> _Text:
        return self.name("bool", f"{x.text} != {y.text}", "bool", (False, True))

    def select(self, c: _Text, x: _Text, y: _Text) -> _Text:
        if c.known or x == y:
            return x if c.known and c.bounds[0] else y
        if x.kind == "float":
            return self.name("double", f"{c.text} ? {x.text} : {y.text}", "float")
        bounds = (min(x.bounds[0], y.bounds[0]), max(x.bounds[1], y.bounds[1]))
        ctype = "bool" if x.kind == "bool" else "long long" if x.wide or y.wide else "int"
        return self.name(ctype, f"{c.text} ? {x.text} : {y.text}", x.kind, bounds)


setattr(_Cuda, "and", _Cuda.all)
setattr(_Cuda, "or", _Cuda.any)
setattr(_Cuda, "not", _Cuda.inv)


class _Emitter:
    """Leaves of the emitted code for one expression."""

    def __init__(self, expr: Expr, wide: bool) -> None:
        self.expr = expr
        self.program = expr._program
        self.limit = 2**40 if wide else NARROW_LIMIT

    def index(self, name: str, text: str | None = None) -> _Text:
        top = self.limit if name.startswith("len") else self.limit - 1
        return _Text(text or name, "int", (0, top))

    def number(self, E: _Cuda, node: Expr) -> _Text:
        place = f"args.numbers[{self.program.number_slot[id(node)]}]"
        if node.kind == "float":
            return E.name("double", f"{place}.f", "float")
        if abs(node.value) <= NARROW_LIMIT:
            return E.name("int", f"static_cast<int>({place}.i)", "int", (-NARROW_LIMIT, NARROW_LIMIT))
        return E.name("long long", f"{place}.i", "int", _INT64)

    def _lookup_parts(self, node: Expr) -> tuple[str, str, _Text]:
        """Template arguments and array of a look-up, its C++ result type, a sample value."""
        kind = _ARRAY_TYPES[node.value.dtype]
        sample = _Text("", kind.kind, kind.bounds)
        if kind.kind == "int":
            ctype = "long long" if sample.wide else "int"
        else:
            ctype = "bool" if kind.kind == "bool" else "double"
        slot = self.program.array_slot[id(node.value)]
        return f"<{kind.cuda}, {ctype}>(args.arrays[{slot}]", ctype, sample

    def value(self, E: _Cuda) -> _Text:
        """Walk 2."""
        values: dict[int, _Text] = {}
        for node in self.program.nodes:
            args = [values[id(a)] for a in node.args]
            if node.op == "index":
                made = self.index(node.value)
            elif node.op == "number":
                made = self.number(E, node)
            elif node.op == "const":
                made = E.const(node.value)
            elif node.op == "lookup":
                call, ctype, sample = self._lookup_parts(node)
                text = f"look_up{call}, {', '.join(a.text for a in args)})"
                made = E.name(ctype, text, sample.kind, sample.bounds)
            else:
                made = getattr(E, node.op)(*args)
            values[id(node)] = made
        return values[id(self.expr)]

    def leaf(self, E: _Cuda, k: Pair | None) -> Callable[[Expr, list[Pair]], Pair]:
        """Intervals of the leaves in a tile; ``h``, ``q`` and ``k`` are spans, the rest single."""

        def leaf(node: Expr, index: list[Pair]) -> Pair:
            if node.op == "number":
                number = self.number(E, node)
                return number, number
            if node.op == "lookup":
                return self._lookup_interval(E, node, index)
            name = node.value
            if name == "k" and k is not None:
                return k
            if name in ("h", "q", "k"):
                last = _Text(f"{name}.hi", "int", (1, self.limit))
                return self.index(name, f"{name}.lo"), E.sub(last, E.const(1))
            return self.index(name), self.index(name)

        return leaf

    def _lookup_interval(self, E: _Cuda, node: Expr, index: list[Pair]) -> Pair:
        call, ctype, sample = self._lookup_parts(node)
        spans = ", ".join(f"Ends{{{lo.text}, {hi.text}}}" for lo, hi in index)
        found = E.name(f"Bounds<{ctype}>", f"look_up_bounds{call}, {spans})", "bounds")
        return (
            _Text(f"{found.text}.lo", sample.kind, sample.bounds),
            _Text(f"{found.text}.hi", sample.kind, sample.bounds),
        )


def _function(head: str, E: _Cuda, result: str) -> str:
    body = "\n".join(f"    {line}" for line in [*E.lines(result), f"return {result};"])
    return f"  static __device__ __forceinline__ {head} {{\n{body}\n  }}\n"


def cuda_source(expr: Expr | None, *, wide: bool = False) -> str:
    """Walks 2, 3 and 4 as the text of ``mask_emitted.cuh``.

    The text depends on ``expr.structure`` and ``wide`` alone. ``wide``: some index of the problem passes
    2**28, so that index arithmetic starts in 64 bits.

    Returns
    -------
    str
        ``struct Mask`` with ``keep``, ``tile_class`` and ``key_range``; see ``kernels_cu/mask.cuh``.
    """
    node = _constant(True) if expr is None else expr
    emitter = _Emitter(node, wide)

    E = _Cuda(wraps=True)
    keep = _function(
        "bool keep(const MaskArgs& args, Index b, Index h, Index q, Index k, Index len_q,\n"
        "                                          Index len_k)",
        E,
        emitter.value(E).text,
    )

    E = _Cuda(wraps=False)
    surely, possibly = _Intervals(E, node, emitter.leaf(E, None)).of(node)
    tile = _function(
        "TileClass tile_class(const MaskArgs& args, Index b, Span h, Span q, Span k,\n"
        "                                                     Index len_q, Index len_k)",
        E,
        f"{surely.text} ? TileClass::kFull\n           : {possibly.text} ? TileClass::kPartial"
        " : TileClass::kSkip",
    )

    E = _Cuda(wraps=False)
    last = E.sub(emitter.index("len_k"), E.const(1))
    domain = (E.const(0), last)
    lo, hi = _Range(_Intervals(E, node, emitter.leaf(E, domain)), domain).mask(node)
    lo = E.const(0) if lo is None else E.max(lo, E.const(0))
    hi = emitter.index("len_k") if hi is None else E.min(E.add(hi, E.const(1)), emitter.index("len_k"))
    keys = _function(
        "Span key_range(const MaskArgs& args, Index b, Span h, Span q, Index len_q,\n"
        "                                               Index len_k)",
        E,
        f"clamped_span({lo.text}, {hi.text}, len_k)",
    )
    formula = _to_text(node, node._program)
    always = "true" if node.op == "const" and node.value else "false"
    return (
        f"// keep = {formula}\n#pragma once\n\nnamespace cumha {{\n\nstruct Mask {{\n"
        f"  static constexpr bool kAlways = {always};  // no test needed\n\n"
        f"{keep}\n{tile}\n{keys}}};\n\n}}  // namespace cumha\n"
    )
