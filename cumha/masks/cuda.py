"""Walks 2, 3 and 4 as CUDA text: the header ``mask_emitted.cuh`` of a kernel."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cumha.masks.expression import (
    ARRAY_TYPES,
    INT32,
    INT64,
    NAN,
    NARROW_LIMIT,
    Expr,
    Program,
    constant,
    to_text,
)
from cumha.masks.rules import RULES, Escape, Intervals, KeySolver, Numbers, Pair

_INFIX = {"add": "+", "sub": "-", "mul": "*"}
_TEMPORARY = re.compile(r"\bt\d+\b")


@dataclass(frozen=True)
class _Text:
    """A value in the emitted code; ``bounds`` are those of every value it can ever take."""

    text: str
    kind: str  # "int", "float" or "bool"
    bounds: tuple[Any, Any] = NAN

    @property
    def wide(self) -> bool:
        return not (INT32[0] <= self.bounds[0] and self.bounds[1] <= INT32[1])

    @property
    def known(self) -> bool:
        return self.kind != "float" and bool(self.bounds[0] == self.bounds[1])


class _Cuda:
    """The calculus over CUDA text: every operation appends one line and returns its name.

    Integer types follow from bounds: int while operands and result provably fit, else long long.
    Past 64 bits a *value* wraps as NumPy's does (``wraps=True``), an interval end is given up
    (`Escape`).
    """

    def __init__(self, *, wraps: bool) -> None:
        self.wraps = wraps
        self._made: dict[str, _Text] = {}
        self._types: list[str] = []

    def name(self, ctype: str, text: str, kind: str, bounds: tuple[Any, Any] = NAN) -> _Text:
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
        text = "(-9223372036854775807LL - 1)" if value == INT64[0] else str(value)
        suffix = "" if INT32[0] < value <= INT32[1] or value == INT64[0] else "LL"
        return _Text(f"{text}{suffix}", "int", (value, value))

    def real(self, x: _Text) -> _Text:
        return (
            x
            if x.kind == "float"
            else self.name("double", f"static_cast<double>({x.text})", "float")
        )

    def _arithmetic(self, op: str, *operands: _Text) -> _Text:
        if any(x.kind == "float" for x in operands):
            args = ", ".join(self.real(x).text for x in operands)
            return self.name("double", f"real_{op}({args})", "float")
        try:
            bounds = RULES[op](Numbers, "int", *(x.bounds for x in operands))
            Numbers.checked(bounds[0])
            Numbers.checked(bounds[1])
        except Escape:
            if not self.wraps:
                raise
            args = ", ".join(x.text for x in operands)
            return self.name("long long", f"wrap_{op}({args})", "int", INT64)
        if bounds[0] == bounds[1]:
            return self.const(bounds[0])
        narrow_result = not _Text("", "int", bounds).wide
        wide = not narrow_result or any(x.wide for x in operands)
        terms = [
            f"static_cast<long long>({x.text})" if wide and not x.wide else x.text for x in operands
        ]
        if op in _INFIX:
            text = f"{terms[0]} {_INFIX[op]} {terms[1]}"
        else:
            text = f"integer_{op}({', '.join(terms)})"
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
            surely, possibly = RULES[op](Numbers, "int", x.bounds, y.bounds)
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


def _value_type(node: Expr) -> tuple[str, int]:
    """C++ type of a look-up's values, and its size in bytes."""
    kind = ARRAY_TYPES[node.value.dtype]
    if kind.kind == "bool":
        return "bool", 1
    if kind.kind == "float":
        return "double", 8
    return ("long long", 8) if _Text("", "int", kind.bounds).wide else ("int", 4)


class _LookUps:
    """The look-ups that are read apart, each under a name; the rest is read where it is used.

    A look-up inside the index of one of them is not listed: it is read with that one.

    Attributes
    ----------
    staged : dict of str to Expr
        In ``k``, with neither ``h`` nor ``q``: one value per key serves all rows. Wide ones first.
    rows : dict of str to Expr
        Without ``k``: their bounds over a block's rows serve all keys.
    """

    def __init__(self, program: Program) -> None:
        same: dict[tuple[Any, ...], int] = {}  # equal subexpressions get one number
        number: dict[int, int] = {}
        of_row: dict[int, bool] = {}  # whether h or q is inside
        for node in program.nodes:
            value = node.value
            if node.op in ("number", "lookup"):
                value = program.number_slot.get(id(node), program.array_slot.get(id(value)))
            inner = (number[id(a)] for a in node.args)
            number[id(node)] = same.setdefault((node.op, value, *inner), len(same))
            of_row[id(node)] = value in ("h", "q") or any(of_row[id(a)] for a in node.args)
        keys: dict[int, Expr] = {}
        rows: dict[int, Expr] = {}
        pending, visited = [program.nodes[-1]], set()
        while pending:
            node = pending.pop()
            if id(node) in visited:
                continue
            visited.add(id(node))
            if node.op == "lookup" and not (node.has_k and of_row[id(node)]):
                (keys if node.has_k else rows).setdefault(number[id(node)], node)
            else:
                pending.extend(node.args)
        order = sorted(keys, key=lambda n: (-_value_type(keys[n])[1], n))
        named = {n: f"s{i}" for i, n in enumerate(order)}
        named |= {n: f"r{i}" for i, n in enumerate(sorted(rows))}
        self.staged = {named[n]: keys[n] for n in order}
        self.rows = {named[n]: rows[n] for n in sorted(rows)}
        self._names = {i: named[n] for i, n in number.items() if n in named}
        self.reads_keys = any(n.op == "lookup" and n.has_k for n in program.nodes)

    def name(self, node: Expr) -> str | None:
        """The name under which a look-up is read apart; None if it is not."""
        return self._names.get(id(node))

    @property
    def staged_bytes(self) -> int:
        """``sizeof(Mask::Staged)``, as fields go from wide to narrow; 0 without fields."""
        sizes = [_value_type(node)[1] for node in self.staged.values()]
        return -(-sum(sizes) // sizes[0]) * sizes[0] if sizes else 0


def staged_bytes(expr: Expr | None) -> int:
    """Bytes per key that a kernel needs to hold the look-ups in ``k`` alone; found once."""
    if expr is None or not expr.arrays:
        return 0
    if expr.program.staged_bytes is None:
        expr.program.staged_bytes = _LookUps(expr.program).staged_bytes
    return expr.program.staged_bytes


class _Emitter:
    """Leaves of the emitted code for one expression."""

    def __init__(self, expr: Expr, wide: bool) -> None:
        self.expr = expr
        self.program = expr.program
        self.limit = 2**40 if wide else NARROW_LIMIT
        self.look_ups = _LookUps(expr.program)

    def index(self, name: str, text: str | None = None) -> _Text:
        top = self.limit if name.startswith("len") else self.limit - 1
        return _Text(text or name, "int", (0, top))

    def number(self, E: _Cuda, node: Expr) -> _Text:
        place = f"args.numbers[{self.program.number_slot[id(node)]}]"
        if node.kind == "float":
            return E.name("double", f"{place}.f", "float")
        if abs(node.value) <= NARROW_LIMIT:
            return E.name(
                "int", f"static_cast<int>({place}.i)", "int", (-NARROW_LIMIT, NARROW_LIMIT)
            )
        return E.name("long long", f"{place}.i", "int", INT64)

    def _lookup_parts(self, node: Expr) -> tuple[str, str, _Text]:
        """Element and value types and array of a look-up as C++, its value's type, a sample."""
        kind = ARRAY_TYPES[node.value.dtype]
        ctype, _ = _value_type(node)
        slot = self.program.array_slot[id(node.value)]
        sample = _Text("", kind.kind, kind.bounds)
        return f"<{kind.cuda}, {ctype}>(args.arrays[{slot}]", ctype, sample

    def values(self, E: _Cuda, *, staged: bool) -> dict[int, _Text]:
        """Walk 2 of every node; ``staged``: look-ups in ``k`` alone come from ``at``."""
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
                name = self.look_ups.name(node)
                if staged and name in self.look_ups.staged:
                    made = replace(sample, text=f"at.{name}")
                else:
                    text = f"look_up{call}, {', '.join(a.text for a in args)})"
                    made = E.name(ctype, text, sample.kind, sample.bounds)
            else:
                made = getattr(E, node.op)(*args)
            values[id(node)] = made
        return values

    def leaf(
        self, E: _Cuda, *, k: Pair | None = None, bounded: bool = False
    ) -> Callable[[Expr, list[Pair]], Pair]:
        """Intervals of the leaves in a tile; ``h``, ``q`` and ``k`` are spans, the rest single.

        ``bounded``: look-ups that are read apart are given, those in ``k`` at a single key.
        """

        def leaf(node: Expr, index: list[Pair]) -> Pair:
            if node.op == "number":
                number = self.number(E, node)
                return number, number
            if node.op == "lookup":
                name = self.look_ups.name(node) if bounded else None
                if name is None:
                    return self._lookup_interval(E, node, index)
                *_, sample = self._lookup_parts(node)
                if name in self.look_ups.staged:
                    value = replace(sample, text=f"at.{name}")
                    return value, value
                return (
                    replace(sample, text=f"rows.{name}.lo"),
                    replace(sample, text=f"rows.{name}.hi"),
                )
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
        most = "kMostOfKey" if node.has_k else "kMostOfRows"
        text = f"look_up_bounds<{most}, {call.removeprefix('<')}, {spans})"
        found = E.name(f"Bounds<{ctype}>", text, "bounds")
        return (
            replace(sample, text=f"{found.text}.lo"),
            replace(sample, text=f"{found.text}.hi"),
        )

    def structs(self) -> str:
        """``Staged``, one value per look-up in ``k`` alone, and ``RowBounds``, bounds of rows."""
        text = ""
        for name, fields in (
            ("Staged", [f"{_value_type(n)[0]} {s}" for s, n in self.look_ups.staged.items()]),
            (
                "RowBounds",
                [f"Bounds<{_value_type(n)[0]}> {r}" for r, n in self.look_ups.rows.items()],
            ),
        ):
            body = "".join(f"    {field};\n" for field in fields)
            text += f"  struct {name} {{\n{body}  }};\n" if fields else f"  struct {name} {{}};\n"
        if self.look_ups.staged:
            text += '  static_assert(sizeof(Staged) == kStagedBytes, "cumha/masks/cuda.py");\n'
        return text

    def stage(self) -> str:
        E = _Cuda(wraps=True)
        values = self.values(E, staged=False)
        fields = ", ".join(values[id(n)].text for n in self.look_ups.staged.values())
        arguments = "Index b, Index k, Index len_q, Index len_k"
        return _function("Staged", "stage", arguments, E, f"Staged{{{fields}}}")

    def row_bounds(self) -> str:
        E = _Cuda(wraps=False)
        intervals = Intervals(E, self.expr, self.leaf(E))
        pairs = (intervals.of(n) for n in self.look_ups.rows.values())
        fields = ", ".join(f"{{{lo.text}, {hi.text}}}" for lo, hi in pairs)
        arguments = "Index b, Span h, Span q, Index len_q, Index len_k"
        return _function("RowBounds", "row_bounds", arguments, E, f"RowBounds{{{fields}}}")

    def each(self) -> str:
        fields = ", ".join(f"f(x.{name})" for name in self.look_ups.rows)
        return (
            "  template <class F>\n"
            "  static __device__ __forceinline__ RowBounds each(const RowBounds& x, const F& f) {\n"
            f"    return RowBounds{{{fields}}};\n  }}\n"
        )

    def keep(self) -> str:
        E = _Cuda(wraps=True)
        arguments = (
            "Index b, Index h, Index q, Index k, Index len_q, Index len_k,\n      const Staged& at"
        )
        value = self.values(E, staged=True)[id(self.expr)]
        return _function("bool", "keep", arguments, E, value.text)

    def tile_class(self) -> str:
        E = _Cuda(wraps=False)
        surely, possibly = Intervals(E, self.expr, self.leaf(E, bounded=True)).of(self.expr)
        return _function(
            "TileClass",
            "tile_class",
            "Index b, Span h, Span q, Span k, Index len_q, Index len_k,\n"
            "      const RowBounds& rows, const Staged& at",
            E,
            f"{surely.text} ? TileClass::kFull\n           : {possibly.text} ? TileClass::kPartial"
            " : TileClass::kSkip",
        )

    def key_range(self) -> str:
        E = _Cuda(wraps=False)
        len_k = self.index("len_k")
        last = E.sub(len_k, E.const(1))
        domain = (E.const(0), last)
        intervals = Intervals(E, self.expr, self.leaf(E, k=domain))
        lo, hi = KeySolver(intervals, domain).mask(self.expr)
        lo = E.const(0) if lo is None else E.max(lo, E.const(0))
        hi = len_k if hi is None else E.add(E.min(hi, last), E.const(1))  # hi + 1 may overflow
        return _function(
            "Span",
            "key_range",
            "Index b, Span h, Span q, Index len_q, Index len_k",
            E,
            f"clamped_span({lo.text}, {hi.text}, len_k)",
        )


def _function(kind: str, name: str, arguments: str, E: _Cuda, result: str) -> str:
    body = "\n".join(f"    {line}" for line in [*E.lines(result), f"return {result};"])
    head = f"  static __device__ __forceinline__ {kind} {name}(\n      const MaskArgs& args, "
    return f"{head}{arguments}) {{\n{body}\n  }}\n"


def cuda_source(expr: Expr | None, *, wide: bool = False) -> str:
    """Walks 2, 3 and 4 as the text of ``mask_emitted.cuh``.

    The text depends on ``expr.structure`` and ``wide`` alone. ``wide``: some index of the problem
    passes 2**28, so that index arithmetic starts in 64 bits.

    Returns
    -------
    str
        ``struct Mask``, whose parts ``kernels_cu/mask.cuh`` explains.
    """
    node = constant(True) if expr is None else expr
    emitter = _Emitter(node, wide)
    always = node.op == "const" and node.value
    constants = (
        f"  static constexpr bool kAlways = {str(always).lower()};  // no test needed\n"
        f"  static constexpr bool kReadsKeys = {str(emitter.look_ups.reads_keys).lower()};"
        "  // some look-up depends on k\n"
        f"  static constexpr int kStagedBytes = {emitter.look_ups.staged_bytes};"
        "  // of the look-ups in k alone, per key\n"
    )
    functions = (
        emitter.structs,
        emitter.stage,
        emitter.row_bounds,
        emitter.each,
        emitter.keep,
        emitter.tile_class,
        emitter.key_range,
    )
    parts = [function() for function in functions]
    return (
        f"// keep = {to_text(node, node.program)}\n#pragma once\n\nnamespace cumha {{\n\n"
        f"struct Mask {{\n{constants}\n{chr(10).join(parts)}}};\n\n}}  // namespace cumha\n"
    )
