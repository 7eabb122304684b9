"""Leave out what the shape of a problem makes always true."""

from __future__ import annotations

from cumha.masks.expression import Expr, constant


def specialise(expr: Expr, *, len_q: int) -> Expr:
    """Drop what is always true for one query row: a bottom-right causal test in decode."""
    if len_q != 1:
        return expr
    program = expr.program
    if program.for_one_row is None:
        made: dict[int, Expr] = {}
        for node in program.nodes:
            args = tuple(made[id(a)] for a in node.args)
            made[id(node)] = _simplified(node, args)
        program.for_one_row = made[id(expr)]
    return program.for_one_row


def _simplified(node: Expr, args: tuple[Expr, ...]) -> Expr:
    if node.op in ("lt", "le") and _always(node.op, *args):
        return constant(True)
    if node.op in ("and", "or"):
        absorbing = node.op == "or"
        for x, y in (args, args[::-1]):
            if x.op == "const":
                return x if x.value is absorbing else y
    if node.op == "not" and args[0].op == "const":
        return constant(not args[0].value)
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
