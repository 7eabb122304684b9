"""The tree that masks are made of, and the language in which users write it."""

from __future__ import annotations

import math
from collections.abc import Callable
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
AXIS_NAMES = {"b": "batch", "h": "heads_q", "q": "len_q", "k": "len_k"}
NARROW_LIMIT = 2**28  # indices and numbers below it keep the usual masks in 32-bit arithmetic

INT64 = (-(2**63), 2**63 - 1)
INT32 = (-(2**31), 2**31 - 1)
NAN = (math.nan, math.nan)
_SPELLING = (
    "a mask expression has no truth value while it is built: write & | ~ for `and` `or` `not`, "
    "(a <= b) & (b < c) for a chained comparison, masks.minimum/masks.maximum for min/max, and "
    "combine both outcomes, (c & x) | (~c & y), for `if`"
)


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
        return to_text(self)

    def __add__(self, other: Any) -> Expr:
        return arithmetic("add", self, other)

    def __radd__(self, other: Any) -> Expr:
        return arithmetic("add", other, self)

    def __sub__(self, other: Any) -> Expr:
        return arithmetic("sub", self, other)

    def __rsub__(self, other: Any) -> Expr:
        return arithmetic("sub", other, self)

    def __mul__(self, other: Any) -> Expr:
        return arithmetic("mul", self, other)

    def __rmul__(self, other: Any) -> Expr:
        return arithmetic("mul", other, self)

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
        return arithmetic("neg", self)

    def __abs__(self) -> Expr:
        return arithmetic("max", self, -self)

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
    def program(self) -> Program:
        return Program(self)

    @property
    def structure(self) -> str:
        """What changes the generated code: the tree without the values of numbers and arrays."""
        return self.program.structure

    @property
    def numbers(self) -> tuple[int | float, ...]:
        """The run-time numbers in slot order."""
        return self.program.numbers

    @property
    def arrays(self) -> tuple[ArrayInput, ...]:
        """The looked-up arrays in slot order."""
        return self.program.arrays


class ArrayInput:
    """An array inside a mask expression; index it with one expression per axis.

    It holds a reference, not a copy: values written into the array later count.
    """

    __array_ufunc__ = None

    def __init__(self, data: Any, axes: tuple[str, ...] | None = None) -> None:
        if not (hasattr(data, "dtype") and hasattr(data, "shape") and hasattr(data, "strides")):
            raise TypeError(
                f"a mask array must be a NumPy or CuPy array, got {type(data).__name__}"
            )
        if isinstance(data, np.ma.MaskedArray):
            raise TypeError("a mask array must be a plain array, got numpy.ma.MaskedArray")
        if not 1 <= data.ndim <= MAX_ARRAY_NDIM:
            raise ValueError(
                f"a mask array needs 1 to {MAX_ARRAY_NDIM} axes, got shape {tuple(data.shape)}"
            )
        name = str(data.dtype)
        if name not in ARRAY_TYPES or not data.dtype.isnative:
            raise TypeError(
                f"a mask array of dtype {data.dtype!s} is not supported: use one of "
                f"{', '.join(ARRAY_TYPES)} in native byte order"
            )
        on_device = not isinstance(data, np.ndarray)
        if on_device and any(s % data.dtype.itemsize for s in data.strides):
            raise ValueError(
                f"a mask array has byte strides {tuple(data.strides)} that are no multiples of its "
                f"item size {data.dtype.itemsize}: make a contiguous copy"
            )
        self.data = data
        self.dtype = name
        self.axes = axes  # what each axis must match in the problem; None: the user's own indices

    @property
    def kind(self) -> str:
        return ARRAY_TYPES[self.dtype].kind

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
        args = tuple(lift(i) for i in index)
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


ARRAY_TYPES: dict[str, _ArrayType] = {
    "bool": _ArrayType("bool", "bool", (False, True)),
    "int8": _ArrayType("int", "signed char", (-(2**7), 2**7 - 1)),
    "int16": _ArrayType("int", "short", (-(2**15), 2**15 - 1)),
    "int32": _ArrayType("int", "int", INT32),
    "int64": _ArrayType("int", "long long", INT64),
    "uint8": _ArrayType("int", "unsigned char", (0, 2**8 - 1)),
    "uint16": _ArrayType("int", "unsigned short", (0, 2**16 - 1)),
    "uint32": _ArrayType("int", "unsigned int", (0, 2**32 - 1)),
    "float16": _ArrayType("float", "__half", NAN),
    "bfloat16": _ArrayType("float", "__nv_bfloat16", NAN),
    "float32": _ArrayType("float", "float", NAN),
    "float64": _ArrayType("float", "double", NAN),
}


def lift(x: Any) -> Expr:
    """An operand as a node: numbers become run-time parameters, booleans constants."""
    if isinstance(x, Expr):
        return x
    if isinstance(x, (bool, np.bool_)):
        return Expr("const", (), "bool", bool(x))
    if isinstance(x, (int, np.integer)):
        if not INT64[0] <= int(x) <= INT64[1]:
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


def constant(value: int | bool) -> Expr:
    """A literal that is part of the structure, unlike a user's number."""
    return Expr("const", (), "bool" if isinstance(value, bool) else "int", value)


def _numeric(op: str, operands: tuple[Any, ...]) -> tuple[Expr, ...]:
    nodes = tuple(lift(x) for x in operands)
    for node in nodes:
        if node.kind == "bool":
            raise TypeError(
                f"`{op}` needs numbers, got the boolean expression {node!r}: use & | ~ ^"
            )
    return nodes


def arithmetic(op: str, *operands: Any) -> Expr:
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
    nodes = (lift(left), lift(right))
    kinds = {n.kind for n in nodes}
    if kinds == {"bool"} and op == "eq":
        return ~(nodes[0] ^ nodes[1])
    if "bool" in kinds:
        raise TypeError(
            f"cannot compare {nodes[0]!r} with {nodes[1]!r}: booleans compare by == and !="
        )
    return Expr(op, nodes, "bool")


def _logic(op: str, *operands: Any) -> Expr:
    nodes = tuple(lift(x) for x in operands)
    for node in nodes:
        if node.kind != "bool":
            raise TypeError(f"& | ~ ^ combine boolean expressions, got the number {node!r}")
    return Expr(op, nodes, "bool")


INDEX = {name: Expr("index", (), "int", name) for name in INDEX_NAMES}

_SYMBOLS = {
    "add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%",
    "lt": "<", "le": "<=", "eq": "==", "and": "&", "or": "|", "xor": "^",
}  # fmt: skip


def to_text(node: Expr, slots: Program | None = None) -> str:
    """The expression as Python would write it; with ``slots``, run-time values by their slot."""
    parts = [to_text(a, slots) for a in node.args]
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


class Program:
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
        self.for_one_row: Expr | None = None  # made by `specialise`, once
        self.staged_bytes: int | None = None  # the same by `cumha.masks.staged_bytes`

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


def check_arrays(expr: Expr, *, batch: int, heads_q: int, len_q: int, len_k: int) -> None:
    """Raise ValueError where an array of the mask does not fit the problem.

    ``len_k`` is the length of the key axis that masks see (all keys of the sequence).
    """
    sizes = {"b": batch, "h": heads_q, "q": len_q, "k": len_k}
    empty = 0 in sizes.values()
    for source in expr.arrays:
        for axis, got in zip(source.axes or (), source.shape, strict=bool(source.axes)):
            if got not in (1, sizes[axis]):
                wanted = ", ".join(f"{AXIS_NAMES[a]}={sizes[a]}" for a in source.axes or ())
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
    for node in expr.program.nodes:
        args = tuple(made[id(a)] for a in node.args)
        value = sources[id(node.value)] if node.op == "lookup" else node.value
        same = node.op != "lookup" and all(x is y for x, y in zip(args, node.args, strict=True))
        made[id(node)] = node if same else Expr(node.op, args, node.kind, value)
    return made[id(expr)]
