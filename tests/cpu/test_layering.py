"""Imports follow the arrows, and `import cumha` is quick, alone and safe before a fork."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cumha

PACKAGE = Path(cumha.__file__).parent
THIRD_PARTY = {"numpy", "ml_dtypes"}
LAZY = {"cupy", "cupyx", "cuda", "scipy", "hypothesis", "torch"}

#: What each module may import when it is imported itself; packages count as one module.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "masks": {"errors"},
    "state": set(),
    "sources": set(),
    "cache": set(),
    "device": {"errors"},
    "problem": {"masks"},
    "tuning": set(),
    "tilings": {"problem", "tuning"},
    "paths": {"problem", "tilings", "tuning"},
    "params": {"masks"},
    "host": {"masks", "problem", "state"},
    "reference": {"masks"},
    "compile": {"cache", "device", "sources"},
    "emulate": {"cache", "compile", "sources"},
    "plan": {"errors", "host", "masks", "params", "paths", "problem", "tilings"},
    "launch": {"host", "masks", "params", "plan", "problem", "state"},
    "api": {"paths", "plan", "problem", "state"},
}

#: What functions import when they are called, for modules that a NumPy user does not need, and what
#: only type checkers read.
LATE: dict[str, set[str]] = {
    "paths": {"device"},
    "tilings": {"device"},
    "plan": {"compile", "device", "emulate", "launch"},
    "launch": {"compile", "device", "emulate"},
}


def modules() -> dict[str, list[Path]]:
    """Files of each module below `cumha`, packages as one; without the package's own front."""
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if name != "__init__":
            found.setdefault(name, []).append(path)
    return found


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every module that a file imports, with its full name, and whether that is on import."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = ["cumha", *path.relative_to(PACKAGE).parts[:-1]]
    inside: set[ast.AST] = set()  # in functions, or for type checkers only
    for node in ast.walk(tree):
        late = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if late or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            inside.update(ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *base.split(".")])
            base = base.rstrip(".")
            names = [f"{base}.{a.name}" for a in node.names] if base == "cumha" else [base]
        else:
            continue
        yield from ((name, node not in inside) for name in names)


def within(name: str, on_import: bool) -> set[str]:
    """Modules of cumha that a module imports."""
    return {
        target.split(".")[1]
        for path in modules()[name]
        for target, at_once in imports(path)
        if at_once == on_import and target.startswith("cumha.")
    } - {name}


def test_every_module_has_its_place() -> None:
    free = {"__main__", "cli", "testing", "bench"}  # above the flow: they may use all of it
    assert set(ARROWS) == set(modules()) - free


@pytest.mark.parametrize("name", ARROWS)
def test_imports_follow_the_arrows(name: str) -> None:
    assert within(name, on_import=True) <= ARROWS[name]
    assert within(name, on_import=False) <= ARROWS[name] | LATE.get(name, set())


def test_the_arrows_make_no_circle() -> None:
    below: dict[str, set[str]] = {}

    def reach(name: str, seen: tuple[str, ...]) -> set[str]:
        assert name not in seen, " -> ".join((*seen, name))
        if name not in below:
            parts = [reach(n, (*seen, name)) for n in ARROWS[name]]
            below[name] = ARROWS[name].union(*parts)
        return below[name]

    for name in ARROWS:
        reach(name, ())
    # No stage looks back: describe, decide, build, launch; the reference stands beside them.
    assert not below["problem"] & {"plan", "compile", "launch", "host", "device"}
    assert not below["plan"] & {"compile", "launch"}
    assert not below["compile"] & {"problem", "plan", "launch", "masks"}
    assert below["reference"] == {"masks", "errors"}
    assert below["masks"] == {"errors"}


def test_nothing_optional_is_imported_at_module_level() -> None:
    for name, paths in modules().items():
        if name == "testing":
            continue
        for path in paths:
            at_once = {target.split(".")[0] for target, now in imports(path) if now}
            assert not at_once & LAZY, path
            foreign = at_once - set(sys.stdlib_module_names) - {"cumha"}
            assert foreign <= THIRD_PARTY, path


def test_only_users_of_hypothesis_import_it() -> None:
    """`cumha.testing` serves people who have no hypothesis; its strategies need it."""
    for path in modules()["testing"]:
        at_once = {target.split(".")[0] for target, now in imports(path) if now}
        allowed = {"hypothesis"} if path.name == "strategies.py" else set()
        assert at_once & LAZY <= allowed, path


def fresh(code: str) -> str:
    """Output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_fresh_import_brings_nothing_optional() -> None:
    names = fresh("import sys, cumha; print(*sorted({m.split('.')[0] for m in sys.modules}))")
    assert not set(names.split()) & (LAZY | {"pytest"})


def test_a_numpy_call_brings_nothing_optional() -> None:
    code = """
import sys, numpy as np, cumha
x = np.ones((1, 2, 3, 4), np.float32)
cumha.attention(x, x, x, causal=True, key_lengths=[2], return_lse=True)
cumha.plan(x, x, x, mask=cumha.masks.window(1, 1)).explain()
cumha.merge(cumha.partial_attention(x, x, x)).finish()
print(*sorted({m.split('.')[0] for m in sys.modules}), *(m for m in sys.modules if 'cumha' in m))
"""
    names = set(fresh(code).split())
    assert not names & LAZY
    assert not names & {"cumha.compile", "cumha.device", "cumha.cli", "cumha.bench"}


def test_only_named_modules_of_the_benchmark_reach_for_a_gpu_or_for_peers() -> None:
    """All else in it is tested without: it sees a clock and a peer by their interfaces."""
    found: dict[str, set[str]] = {}
    for path in modules()["bench"]:
        late = {target.split(".")[0] for target, now in imports(path) if not now}
        found[path.stem] = late & LAZY
    assert {name for name, used in found.items() if used} == {"peers", "command"}
    assert found["peers"] == found["command"] == {"torch"}
    users = {p.stem for p in modules()["bench"] for t, _ in imports(p) if t == "cumha.bench.gpu"}
    assert users == {"clock"}


def test_import_takes_little_time() -> None:
    """NumPy and ml_dtypes are imported first: their time is not cumha's."""
    code = (
        "import time, numpy, ml_dtypes\n"
        "start = time.perf_counter()\nimport cumha\nprint(time.perf_counter() - start)"
    )
    seconds = [float(fresh(code)) for _ in range(5)]
    assert min(seconds) < 0.2, seconds


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_it_works_after_a_fork() -> None:
    code = """
import os, numpy as np, cumha
x = np.ones((1, 2, 3, 4), np.float32)
before = cumha.attention(x, x, x, causal=True)
child = os.fork()
if child == 0:
    same = (cumha.attention(x, x, x, causal=True) == before).all()
    os._exit(0 if same else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert fresh(code) == "0"
