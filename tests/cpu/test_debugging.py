"""docs/debugging.md is right: its faulty kernels give its messages, gdb stops where it says.

Kernels are built and run on the CPU; skipped with a reason where there is no compiler, no gdb.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from cumha import emulate
from tests.macros import define_lines

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "debugging.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="needs a checkout of the repository")

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

TOP = f"""#include "emulate.hpp"
{define_lines()}#include "memory.cuh"
using namespace cumha;
struct Params {{ const float* in; float* out; long long which; }};
// addr2line mistakes the file of the very first function.
__attribute__((used)) static void first() {{}}
"""


def blocks() -> list[tuple[str, str]]:
    """Language and text of the page's fenced blocks."""
    return FENCE.findall(PAGE.read_text(encoding="utf-8")) if PAGE.is_file() else []


def faulty_kernels() -> dict[str, tuple[str, str]]:
    """Source and message of each faulty kernel, by its name: a block and the one after it."""
    found = {}
    for (language, source), (_, message) in zip(blocks(), blocks()[1:], strict=False):
        if language == "cpp":
            found[re.findall(r"void (\w+)\(", source)[0]] = (source, message.strip())
    return found


FAULTS = faulty_kernels()
UNDEFINED = {name for name, (_, message) in FAULTS.items() if "runtime error" in message}


def needs_compiler() -> None:
    try:
        emulate.host_compiler()
    except RuntimeError as error:
        pytest.skip(str(error))


@functools.cache
def built(checks: str) -> emulate.EmulatedKernel:
    """All kernels of the page in one source; the entry calls the one asked for."""
    text, cases = TOP, ""
    for i, fault in enumerate(FAULTS):
        text += f"void {fault}(const float* in, float* out);\n"
        cases += f"    case {i}: return {fault}(p.in, p.out);\n"
    text += 'extern "C" void cumha_emulate_entry(const void* params) {\n'
    text += "  const Params& p = *static_cast<const Params*>(params);\n"
    text += f"  switch (p.which) {{\n{cases}  }}\n}}\n"
    for source, _ in FAULTS.values():
        text += f'#line 1 "kernels_cu/example.cu"\n{source}'
    return emulate.load_source("debugging", text, checks)


def run_kernel(name: str) -> None:
    """Run a kernel of the page: 64 threads, 64 floats in and out."""
    given, out = np.zeros(64, np.float32), np.zeros(64, np.float32)
    at = [x.__array_interface__["data"][0] for x in (given, out)]
    memory = [emulate.Memory("in", at[0], at[0] + 256)]
    memory.append(emulate.Memory("out", at[1], at[1] + 256, writable=True))
    params = np.array([*at, list(FAULTS).index(name)], np.int64).tobytes()
    kernel = built(emulate.settings().checks)
    emulate.run(kernel, (1, 1, 1), (64, 1, 1), params, memory, 256)


def any_thread(message: str) -> str:
    """A message without what the order of threads decides."""
    return re.sub(r"(thread \(|lane )\d+", r"\1N", message)


@pytest.mark.parametrize("name", [n for n in FAULTS if n not in UNDEFINED])
def test_faults_give_the_messages_of_the_page(name: str) -> None:
    needs_compiler()
    if name == "unset" and not emulate.host_compiler().unset_flags:
        pytest.skip("needs g++ 12 or newer")
    with emulate.using(checks="all", seed=0, workers=1), pytest.raises(emulate.EmulationError) as e:
        run_kernel(name)
    assert any_thread(str(e.value)) == any_thread(FAULTS[name][1])


def test_every_check_of_the_page_has_a_fault() -> None:
    assert len(FAULTS) == 8
    assert len(UNDEFINED) == 1


# --- other processes ------------------------------------------------------------------------------


def run(command: list[str], folder: Path, **environment: str) -> str:
    """Both outputs of a command that finds cumha, and this test, in this checkout."""
    tests = Path(__file__).resolve().parent
    paths = [str(REPOSITORY), str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted(UNDEFINED))
def test_sanitizers_give_the_messages_of_the_page(name: str, tmp_path: Path) -> None:
    needs_compiler()
    library = emulate.preload()
    if not Path(library).is_file():
        pytest.skip(f"the compiler's AddressSanitizer is not installed: {library} is missing")
    said = run(
        [sys.executable, "-c", f"import test_debugging; test_debugging.run_kernel('{name}')"],
        tmp_path,
        LD_PRELOAD=library,
        ASAN_OPTIONS="detect_leaks=0",
        CUMHA_EMULATE_CHECKS="sanitizers",
    )
    assert FAULTS[name][1] in said


def gdb() -> str:
    """Path of a gdb that may debug; skips where there is none."""
    found = shutil.which("gdb")
    if found is None:
        pytest.skip("needs gdb on PATH")
    tried = subprocess.run(
        [found, "-nx", "-batch", "-ex", "run", "--args", sys.executable, "-c", ""],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "exited normally" not in tried.stdout:
        pytest.skip(f"gdb cannot run programs here: {tried.stderr.strip()[-200:]}")
    return found


def call_script() -> str:
    """The page's call.py: its first Python block, without the settings."""
    text = next(text for language, text in blocks() if language == "python")
    lines = [line for line in text.splitlines() if not line.startswith("with ")]
    return "\n".join(line.strip() for line in lines)


def under_gdb(tmp_path: Path, commands: str, settings: Mapping[str, str]) -> str:
    (tmp_path / "call.py").write_text(call_script(), encoding="utf-8")
    (tmp_path / "commands").write_text(
        f"set pagination off\nset debuginfod enabled off\n{commands}", encoding="utf-8"
    )
    command = [gdb(), "-nx", "-q", "-batch", "-x", "commands", "--args", sys.executable, "call.py"]
    return run(command, tmp_path, CUMHA_BUILD="debug", CUMHA_EMULATE_WORKERS="1", **settings)


def line_after_weigh() -> int:
    """The line of naive.cu at which score, weight and state of a key are all there."""
    source = (REPOSITORY / "kernels_cu" / "naive.cu").read_text(encoding="utf-8")
    return next(n for n, text in enumerate(source.splitlines(), 1) if "add_value(state, w" in text)


def test_gdb_stops_in_the_chosen_thread(tmp_path: Path) -> None:
    needs_compiler()
    at = next(i for i, (language, _) in enumerate(blocks()) if language == "gdb")
    commands, want = blocks()[at][1], blocks()[at + 1][1]
    line = line_after_weigh()
    assert f"break naive.cu:{line} if" in commands

    said = under_gdb(tmp_path, commands, {"CUMHA_EMULATE_CHECKS": "none"})
    assert f"kernels_cu/naive.cu:{line}" in said
    assert want.strip() in said, said


def test_gdb_prints_what_each_lane_holds(tmp_path: Path) -> None:
    """The table's breakpoint with commands; the checked build works under gdb too."""
    needs_compiler()
    said = under_gdb(
        tmp_path,
        "set breakpoint pending on\n"
        f"break naive.cu:{line_after_weigh()} if row.q == 2\n"
        "commands\nsilent\n"
        'printf "lane %d key %d %.1f\\n", cumha_emulate::lane(), k, score\n'
        "continue\nend\nrun\n",
        {"CUMHA_EMULATE_CHECKS": "all"},
    )
    found = set(re.findall(r"^lane (\d+) key (\d) ([\d.]+)$", said, re.MULTILINE))
    want = {(str(lane), str(k), f"{float(k == 2)}") for lane in range(32) for k in range(3)}
    assert found == want, said


# --- hypothesis -----------------------------------------------------------------------------------

FAILING = """
import cumha
from cumha import emulate, testing
from hypothesis import given, settings, strategies as st
{imports}
{replay}
@settings(print_blob=True, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 40))
def test_length(n):
    print("tried", n)
    q, k, v = (testing.normal(1, 1, length, 8, seed=length) for length in (1, n, n))
    cumha.attention(q, k, v, path="naive", backend="emulate")
    assert n < 17
"""


def test_a_failing_example_is_replayed(tmp_path: Path) -> None:
    needs_compiler()
    test = tmp_path / "test_length.py"
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", str(test)]
    test.write_text(FAILING.format(imports="", replay=""), encoding="utf-8")
    said = run(command, tmp_path)
    # pytest repeats the message in its summary where the variable CI is set: one or two lines.
    found = re.findall(r"temporarily adding (@reproduce_failure\(.*\)) as a decorator", said)
    (replay,) = set(found)

    imports = "from hypothesis import reproduce_failure"
    test.write_text(FAILING.format(imports=imports, replay=replay), encoding="utf-8")
    said = run(command, tmp_path)
    assert set(re.findall(r"tried (\d+)", said)) == {"17"}
    assert re.search(r"^1 failed in", said, re.MULTILINE)
