"""One run of the command: its suites or its case, measured and reported."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

import cumha
from cumha import tuning
from cumha.bench import peers, progress, report
from cumha.bench.cases import Case
from cumha.bench.clock import Clock, opened
from cumha.bench.measure import PARTS, Peer, Result, Session
from cumha.bench.suites import SUITES, Suite


@dataclass(frozen=True)
class Request:
    """What to run.

    Attributes
    ----------
    command : str
        The command line, for the report.
    digest : str
        Of the kernels' sources.
    suites : tuple of str
        Names in `SUITES`.
    case : Case, optional
        Measured where no suite is named.
    path : str, optional
        The path of a suite's cases that name none.
    settings : dict
        For `cumha.tuning.using`, around everything; a case's own come on top.
    warmups, repeats : int, optional
        By default those of the suite, 10 and 100 for a case.
    parts : tuple of str, optional
        What to measure beside the kernel time, of `PARTS`; by default what the suite says.
    """

    command: str
    digest: str
    suites: tuple[str, ...] = ()
    case: Case | None = None
    path: str | None = None
    settings: dict[str, int] = field(default_factory=dict)
    host: bool = False
    warmups: int | None = None
    repeats: int | None = None
    parts: tuple[str, ...] | None = None
    peers: tuple[str, ...] = ()


def run(
    request: Request, bar: TextIO | None = None, partial: TextIO | None = None
) -> tuple[str, str]:
    """Measure, and return the report as Markdown and as JSON.

    Parameters
    ----------
    bar : text file, optional
        Where to show the progress.
    partial : text file, optional
        Gets each result at once, a line of JSON: what is left of a run that is stopped.

    Raises
    ------
    ValueError
        Unknown suites, parts or peers.
    RuntimeError
        No GPU, without ``host``.
    UnsupportedError, MemoryError
        If the single case cannot run; cases of suites are reported as refused.
    """
    chosen = _suites(request)
    with opened(host=request.host) as clock, tuning.using(**request.settings):
        measured = peers.named(list(request.peers), clock)
        header = _header(request, chosen, clock)
        tables: list[tuple[Suite, list[Result]]] = [(suite, []) for suite in chosen]
        for suite, results in tables:
            for result in _results(request, suite, clock, measured, bar):
                results.append(result)
                if partial is not None:
                    print(json.dumps(result.as_json(), default=str), file=partial, flush=True)
    text = report.markdown(
        header, [(f"{s.name}: {s.about}", s.table, results) for s, results in tables]
    )
    return text, report.as_json(header, [r for _, results in tables for r in results])


def _suites(request: Request) -> list[Suite]:
    if not request.suites:
        case = request.case
        assert case is not None
        return [Suite("case", "one call", lambda: iter([case]))]
    for name in request.suites:
        if name not in SUITES:
            raise ValueError(f"unknown suite {name!r}: use one of {', '.join(SUITES)}")
    return [SUITES[name] for name in request.suites]


def _results(
    request: Request,
    suite: Suite,
    clock: Clock,
    measured: dict[str, Peer],
    bar: TextIO | None,
) -> Iterator[Result]:
    warmups, repeats = _counts(request, suite)
    cases: dict[str, Case] = {}
    for case in suite.cases():  # a case that several are against comes once
        path = request.path if case.path is None else case.path
        cases.setdefault(case.name, dataclasses.replace(case, path=path))
    session = Session(
        clock, warmups=warmups, repeats=repeats, parts=_parts(request, suite), peers=measured,
        strict=not request.suites,
    )  # fmt: skip
    with contextlib.closing(progress.shown(cases.values(), len(cases), bar)) as shown:
        for case in shown:
            yield session.measure(case)


def _counts(request: Request, suite: Suite) -> tuple[int, int]:
    return (
        suite.warmups if request.warmups is None else request.warmups,
        suite.repeats if request.repeats is None else request.repeats,
    )


def _parts(request: Request, suite: Suite) -> tuple[str, ...]:
    if request.parts is None:
        return suite.parts
    for name in request.parts:
        if name not in PARTS:
            raise ValueError(f"unknown part {name!r}: use some of {', '.join(PARTS)}, or none")
    return request.parts


def _header(request: Request, chosen: list[Suite], clock: Clock) -> dict[str, Any]:
    counts = {suite.name: _counts(request, suite) for suite in chosen}
    facts = {
        **clock.facts(),
        "cumha": cumha.__version__,
        "digest": request.digest,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
    if "torch" in request.peers:
        import torch

        facts["torch"] = torch.__version__
    return {
        "command": request.command,
        "machine": facts,
        "method": _method(request, counts),
        "runs": {n: {"warmups": w, "repeats": r} for n, (w, r) in counts.items()},
        "settings": request.settings,
    }


def _method(request: Request, counts: dict[str, tuple[int, int]]) -> str:
    """How the numbers came about, in sentences."""
    repeats = ", ".join(sorted({f"{r} after {w} warm-ups" for w, r in counts.values()}))
    if request.host:
        return f"Medians of calls, {repeats}."
    return (
        f"Kernel time: median of replays of a CUDA graph of many launches, {repeats}; input sets "
        "in turn. Host call: an eager call, not awaited. End to end: from pinned host memory and "
        "back. Ceilings from this run."
    )
