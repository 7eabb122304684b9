"""``python -m cumha bench``: time calls on the GPU or the host, against ceilings of the same run.

A `Case` is measured by a `Session` with a `Clock`; the `Result` goes to the reports.

    cases      a measurement as plain data; the bytes and operations it must cost
    suites     the named lists of cases
    clock      how calls are timed: the interface, and the host's form; gpu: a GPU's
    measure    inputs, plan and times of a case; ceilings: what the machine reaches
    peers      other libraries on the same arrays
    command    a whole run; report, progress: what it shows
"""

from cumha.bench.cases import Case, Work, work_of
from cumha.bench.clock import Clock, HostClock, Sample, opened
from cumha.bench.command import Request, run
from cumha.bench.measure import Result, Session
from cumha.bench.suites import SUITES, Suite

__all__ = [
    "SUITES",
    "Case",
    "Clock",
    "HostClock",
    "Request",
    "Result",
    "Sample",
    "Session",
    "Suite",
    "Work",
    "opened",
    "run",
    "work_of",
]
