"""The rules of walks 3 and 4, written once, over any calculus.

A *calculus* is a set of operations (add, min, lt, select, …) on values of some kind. Over Python
numbers (`Numbers`) the rules give the planner's answers; over text (`cumha.masks.cuda`) they give
the device's code.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from cumha.masks.expression import INT64, Expr

Pair: TypeAlias = tuple[Any, Any]  # smallest and largest value; booleans: (surely, possibly)


class Escape(Exception):
    """An interval end left 64-bit integers: nothing is known of that node."""


class Numbers:
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
        return cls.checked(-x)

    @staticmethod
    def checked(value: Any) -> Any:
        if isinstance(value, int) and not INT64[0] <= value <= INT64[1]:
            raise Escape
        return value

    @classmethod
    def add(cls, x: Any, y: Any) -> Any:
        return cls.checked(x + y)

    @classmethod
    def sub(cls, x: Any, y: Any) -> Any:
        return cls.checked(x - y)

    @classmethod
    def mul(cls, x: Any, y: Any) -> Any:
        return cls.checked(x * y)

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
    """Monotone in each operand while the divisor keeps its sign or value; else |x // y| <= |x|."""
    zero = E.const(0)
    a, b = E.floordiv(x[0], y[0]), E.floordiv(x[0], y[1])
    c, d = E.floordiv(x[1], y[0]), E.floordiv(x[1], y[1])
    steady = E.any(E.lt(zero, y[0]), E.lt(y[1], zero), E.eq(y[0], y[1]))
    widest = E.max(E.max(x[1], E.sub(zero, x[0])), zero)
    lo = E.select(steady, E.min(E.min(a, b), E.min(c, d)), E.sub(zero, widest))
    return lo, E.select(steady, E.max(E.max(a, b), E.max(c, d)), widest)


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


RULES: dict[str, Callable[..., Pair]] = {
    "add": _rule_add, "sub": _rule_sub, "mul": _rule_mul, "neg": _rule_neg,
    "min": _rule_min, "max": _rule_max, "floordiv": _rule_floordiv, "mod": _rule_mod,
    "lt": _rule_lt, "le": _rule_le, "eq": _rule_eq,
    "and": _rule_and, "or": _rule_or, "not": _rule_not, "xor": _rule_xor,
}  # fmt: skip


class Intervals:
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
            return RULES[node.op](self.E, kind, *args)
        except Escape:
            return self.E.const(INT64[0]), self.E.const(INT64[1])


class KeySolver:
    """Walk 4 over a calculus: solve a mask for ``k``.

    Pairs here are inclusive ends, None where open. A node is solved backwards: given the values it
    may take, which ``k`` can bring it there? Every answer contains the true one.
    """

    def __init__(self, intervals: Intervals, domain: Pair) -> None:
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
                x, y = node.args
                return self._compare(node.op, x, y, want)
            except Escape:
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
        form = Linear.of(Expr("sub", (x, y), "int"))
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
        if node.op in (
            "min",
            "max",
        ):  # min(x, y) >= lo needs x >= lo; max(x, y) <= hi needs x <= hi
            x = x if x.has_k else y
            return self._solve(x, lo, None) if node.op == "min" else self._solve(x, None, hi)
        return None, None

    def _solve_linear(self, node: Expr, lo: Any, hi: Any) -> Pair:
        """Both operands hold ``k``: solvable if the node is slope * k + rest."""
        form = Linear.of(node)
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
class Linear:
    """slope * k + the sum of signed terms without ``k``."""

    slope: int
    rest: tuple[tuple[int, Expr], ...]

    @staticmethod
    def of(node: Expr, sign: int = 1) -> Linear | None:
        if not node.has_k:
            return Linear(0, ((sign, node),))
        if node.op == "index":
            return Linear(sign, ())
        if node.op == "neg":
            return Linear.of(node.args[0], -sign)
        if node.op not in ("add", "sub"):
            return None
        x = Linear.of(node.args[0], sign)
        y = Linear.of(node.args[1], -sign if node.op == "sub" else sign)
        return None if x is None or y is None else Linear(x.slope + y.slope, x.rest + y.rest)
