"""Results as Markdown tables and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from cumha.bench.clock import Sample
from cumha.bench.measure import Result

Rows = Sequence[Result]
Cell = Callable[[Result], str]


def markdown(header: dict[str, Any], tables: Iterable[tuple[str, str, Rows]]) -> str:
    """The whole report: what ran where, then a table for each (title, kind, results)."""
    parts = [heading(header)]
    for title, kind, results in tables:
        parts += [f"### {title}", TABLES[kind](results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def as_json(header: dict[str, Any], results: Rows) -> str:
    """Everything that was measured; seconds and bytes, not rounded."""
    document = {**header, "results": [r.as_json() for r in results]}
    return json.dumps(document, indent=2, default=str) + "\n"


def heading(header: dict[str, Any]) -> str:
    """Command, machine, versions, date, and how times were taken."""
    facts = header["machine"]
    where = [str(facts["device"])]
    for name, text in (
        ("cores", "{} cores"),
        ("blas", "{}"),
        ("driver", "driver {}"),
        ("nvrtc", "NVRTC {}"),
        ("cupy", "CuPy {}"),
        ("numpy", "NumPy {}"),
        ("torch", "torch {}"),
    ):
        if facts.get(name):
            where.append(text.format(facts[name]))
    what = f"cumha {facts['cumha']}, sources {facts['digest'][:12]}, {facts['date']}"
    return f"To repeat: `{header['command']}`\n\n{', '.join(where)}; {what}.\n\n{header['method']}"


# --- one row per case -----------------------------------------------------------------------------


def cases_table(results: Rows) -> str:
    """All numbers of each case; columns that are empty for every case are left out."""
    by_name = {r.case.name: r for r in results}
    columns: list[tuple[str, Cell]] = [
        ("case", lambda r: r.case.name),
        ("batch, heads, len_q, len_k, dim", lambda r: r.case.shape_text()),
        ("dtype", lambda r: r.case.dtype),
        ("mask", lambda r: _unless(r.case.mask_text(), "none")),
        ("settings", lambda r: _unless(r.case.settings_text(), "the plan's choice")),
        ("plan", _plan),
        ("inputs", lambda r: r.inputs),
        ("kernel us", lambda r: _kernel(r)),
        ("5 % to 95 %", lambda r: _spread(r)),
        ("GB/s", lambda r: _number(r.bytes_per_second, 1e-9)),
        ("TFLOP/s", lambda r: _number(r.operations_per_second, 1e-12)),
        ("read GB/s", lambda r: _number(r.ceilings.read, 1e-9)),
        ("matmul TFLOP/s", lambda r: _number(r.ceilings.matmul, 1e-12) or r.ceilings.note),
        ("of the ceiling", lambda r: "" if r.of_ceiling is None else f"{r.of_ceiling:.0%}"),
        ("host call us", lambda r: _median(r.eager)),
        ("end to end us", lambda r: _median(r.end_to_end)),
        ("time over that of", lambda r: _against(r, by_name)),
        *_peer_columns(results),
    ]
    return _table(columns, results)


def _plan(r: Result) -> str:
    if not r.plan:
        return ""
    path, splits = r.plan["path"], r.plan["splits"]
    return f"{path}, {splits} splits" if splits > 1 else f"{path}"


def _median(sample: Sample | None) -> str:
    return "" if sample is None else _number(sample.median, 1e6)


def _kernel(r: Result) -> str:
    refused = f"refused: {r.refused}" if r.refused else ""  # or something after the kernel failed
    return "; ".join(filter(None, (_number(r.seconds, 1e6), refused)))


def _spread(r: Result) -> str:
    if r.kernel is None:
        return ""
    return f"{_number(r.kernel.low, 1e6)} to {_number(r.kernel.high, 1e6)}"


def _against(r: Result, by_name: dict[str, Result]) -> str:
    other = by_name.get(r.case.against or "")
    quotient = ratio(r, other)
    return "" if quotient is None or other is None else f"{other.case.name}: {quotient:.3g}"


def ratio(r: Result, other: Result | None) -> float | None:
    """Time of a case over that of another one."""
    if other is None or not r.seconds or not other.seconds:
        return None
    return r.seconds / other.seconds


def _peer_columns(results: Rows) -> list[tuple[str, Cell]]:
    """For each backend of a peer its time, and the time here over it."""
    found = {
        (peer, name) for r in results for peer, backends in r.peers.items() for name in backends
    }

    def column(peer: str, name: str) -> Cell:
        def cell(r: Result) -> str:
            got = r.peers.get(peer, {}).get(name)
            if not isinstance(got, dict):
                return "" if got is None else "refused"
            over = "" if not r.seconds else f" ({r.seconds / got['median']:.2f})"
            return _number(got["median"], 1e6) + over

        return cell

    return [
        (f"{peer} {name} us (time here over it)", column(peer, name))
        for peer, name in sorted(found)
    ]


# --- splits ---------------------------------------------------------------------------------------


def splits_table(results: Rows) -> str:
    """For each shape the plan's number of splits and the best one.

    The best of many measurements is fast by luck too: the plan's number has two to choose from, its
    own and the one where it is forced.
    """
    forced: dict[str, list[Result]] = {}
    for r in results:
        if r.case.against is not None and r.seconds:
            forced.setdefault(r.case.against, []).append(r)
    lines, quotients = [], []
    for r in results:
        if r.case.against is not None:
            continue
        others = sorted(forced.get(r.case.name, []), key=lambda x: x.seconds or 0.0)
        best = others[0] if others else None
        same = [r, *(x for x in others if x.plan["splits"] == r.plan.get("splits"))]
        planned = min(same, key=lambda x: x.seconds or math.inf)
        quotient = ratio(planned, best)
        cells = [
            f"{r.plan.get('path', '')}", f"{r.case.batch}",
            f"{r.case.heads_q}:{r.case.heads_kv}", f"{r.case.len_q}", f"{r.case.len_k}",
            f"{r.plan.get('splits', '')}", _kernel(planned),
            "" if best is None else f"{best.plan['splits']}",
            "" if best is None else _kernel(best),
            "" if quotient is None else f"{quotient:.3f}",
        ]  # fmt: skip
        lines.append(cells)
        quotients += [] if quotient is None else [quotient]
    titles = ["path", "batch", "heads", "len_q", "len_k"]
    titles += ["plan's splits", "us", "best splits", "us", "plan / best"]
    text = _lines(titles, lines)
    if quotients:
        above = sum(x > 1.05 for x in quotients)
        text += f"\n\nplan / best: at most {max(quotients):.3f}; above 1.05 in {above} of "
        text += f"{len(quotients)}."
    return text


# --- claims ---------------------------------------------------------------------------------------


def claims_table(results: Rows) -> str:
    """For each pair of settings both times, and A over B: above 1 means that B is faster."""
    by_name = {r.case.name: r for r in results}
    lines = []
    for b in results:
        a = by_name.get(b.case.against or "")
        if a is None:
            continue
        quotient = ratio(a, b)
        lines.append([
            b.case.claim, b.case.shape_text(), b.case.dtype, b.case.mask_text(),
            a.case.settings_text(), b.case.settings_text(), _kernel(a), _kernel(b),
            "" if quotient is None else f"{quotient:.3f}",
        ])  # fmt: skip
    titles = ["claim", "batch, heads, len_q, len_k, dim", "dtype", "mask", "A", "B", "A us", "B us"]
    return _lines([*titles, "A / B"], lines)


TABLES: dict[str, Callable[[Rows], str]] = {
    "cases": cases_table,
    "splits": splits_table,
    "claims": claims_table,
}


# --- text -----------------------------------------------------------------------------------------


def _unless(text: str, usual: str) -> str:
    return "" if text == usual else text


def _number(value: float | None, factor: float) -> str:
    """Three significant digits, without an exponent."""
    if value is None:
        return ""
    scaled = value * factor
    if scaled >= 100:
        return f"{scaled:.0f}"
    return np.format_float_positional(scaled, 3, unique=False, fractional=False, trim="k")


def _table(columns: list[tuple[str, Cell]], results: Rows) -> str:
    cells = [[cell(r) for _, cell in columns] for r in results]
    kept = [i for i in range(len(columns)) if any(row[i] for row in cells)]
    return _lines([columns[i][0] for i in kept], [[row[i] for i in kept] for row in cells])


def _lines(titles: list[str], rows: list[list[str]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [titles, ["---"] * len(titles), *escaped]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
