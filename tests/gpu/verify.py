"""Run everything that needs a GPU and record it in docs/verified.json.

    python tests/gpu/verify.py [--output docs/verified.json] [--processes 8]

Runs the tests marked ``gpu``, in several processes as compiling takes most of the time, then the
small cases under compute-sanitizer's memcheck, racecheck, initcheck and synccheck, all four at
once. Writes the record only if all of it passed: digest of the kernel sources and of what emits
code, GPU, driver, NVRTC, date, counts. `python -m cumha doctor` compares it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cupy
import pytest

import cumha
from cumha import compile as compiler
from cumha.bench.gpu import driver_version
from cumha.cli import verified_digest

ROOT = Path(__file__).resolve().parents[2]
CASES = str(ROOT / "tests" / "gpu" / "sanitizer_cases.py")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
CLEAN = re.compile(r"SUMMARY: 0 (errors|hazards)")


class Counts:
    """A pytest plugin that counts outcomes."""

    def __init__(self) -> None:
        self.passed = self.failed = self.skipped = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed
        self.failed += report.failed
        self.skipped += report.skipped


def run_tests(arguments: list[str], processes: int) -> Counts:
    """Those that measure times come after the others, one at a time."""
    counts = Counts()
    for which, beside in (("gpu and not alone", processes), ("gpu and alone", 0)):
        options = ["-q", "-m", which, "-p", "no:cacheprovider", "-n", str(beside)]
        code = pytest.main([*options, *arguments], plugins=[counts])
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise SystemExit(f"{counts.failed} tests failed ({code!r}): nothing is recorded")
    return counts


def run_sanitizer(tool: str) -> str:
    """The tool's summary line; raises where it found something."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        raise SystemExit("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
    command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, CASES]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    summary = [line for line in done.stdout.splitlines() if "SUMMARY" in line]
    if done.returncode != 0 or not summary or not CLEAN.search(summary[-1]):
        print(done.stdout[-4000:], done.stderr[-2000:])
        raise SystemExit(f"{tool} found errors")
    return summary[-1].strip("= ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "verified.json")
    cores = os.cpu_count() or 1
    parser.add_argument("--processes", type=int, default=min(8, cores), help="that run tests")
    parser.add_argument("tests", nargs="*", help="passed on to pytest; default: all tests")
    options = parser.parse_args()
    started = time.monotonic()
    # The sanitizers' kernels are built meanwhile, once and not by each of the tools.
    with subprocess.Popen([sys.executable, CASES], cwd=ROOT) as cases:
        counts = run_tests(options.tests, options.processes)
    if cases.returncode != 0 or not counts.passed:
        raise SystemExit(f"{CASES} or no test passed: nothing is recorded")
    with ThreadPoolExecutor(len(TOOLS)) as pool:
        sanitizers = dict(zip(TOOLS, pool.map(run_sanitizer, TOOLS), strict=True))
    runtime = cupy.cuda.runtime
    record = {
        "digest": verified_digest(),
        "version": cumha.__version__,
        "gpu": runtime.getDeviceProperties(0)["name"].decode(),
        "driver": driver_version(cupy),
        "nvrtc": "{}.{}".format(*compiler.nvrtc_version()),
        "cupy": cupy.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "passed": counts.passed,
        "skipped": counts.skipped,
        "sanitizers": sanitizers,
        "seconds": round(time.monotonic() - started),
    }
    options.output.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
