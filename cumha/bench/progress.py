"""A progress bar of one line on stderr."""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator, Iterable
from typing import TextIO

from cumha.bench.cases import Case

BAR = 24  # characters


def shown(cases: Iterable[Case], total: int, stream: TextIO | None) -> Generator[Case]:
    """Pass cases on and say on the stream which one runs; None says nothing."""
    started = time.monotonic()
    try:
        for done, case in enumerate(cases):
            if stream is not None:
                _rewrite(stream, _line(done, total, time.monotonic() - started, case.name))
            yield case
    finally:  # also where a case fails: its error then has a line of its own
        if stream is not None:
            _rewrite(stream, "")


def _line(done: int, total: int, seconds: float, name: str) -> str:
    full = BAR * done // max(total, 1)
    bar = "#" * full + "." * (BAR - full)
    left = f", {seconds / done * (total - done):.0f} s left" if done else ""
    return f"[{bar}] {done}/{total}{left}  {name}"


def _rewrite(stream: TextIO, text: str) -> None:
    """Replace the line that the cursor stands on."""
    width = shutil.get_terminal_size().columns - 1
    stream.write(f"\r{text[:width]:<{width}}\r{text[:width]}")
    stream.flush()
