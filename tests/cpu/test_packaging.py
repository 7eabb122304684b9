"""However cumha is installed, it finds its kernels: wheel, sdist, editable, bare checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path
from types import SimpleNamespace

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    not (REPOSITORY / "pyproject.toml").is_file(), reason="needs a checkout of the repository"
)

DESCRIBE = """
import sys
{setup}
from cumha import sources
import cumha
print(cumha.__file__)
print(sources.root())
print(sources.digest())
print(" ".join(sources.names()))
"""


def describe(setup: str, cwd: Path, **variables: str) -> SimpleNamespace:
    """Ask a fresh interpreter what `cumha.sources` finds; `setup` makes cumha importable there."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBE.format(setup=setup)],
        cwd=cwd,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    package, root, digest, names = done.stdout.splitlines()
    return SimpleNamespace(package=Path(package), root=Path(root), digest=digest, names=names)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git would hold of the package; builds leave their traces there."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, copy / name)
    for name in ("cumha", "kernels_cu"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, copy / name, ignore=ignore)
    return copy


@pytest.fixture(scope="module")
def expected(checkout: Path) -> SimpleNamespace:
    """What the bare checkout says; every other way has to give the same texts."""
    found = describe("", checkout)
    files = sorted(f.name for f in (checkout / "kernels_cu").iterdir())
    assert found.names.split() == [f for f in files if f.endswith((".cu", ".cuh"))]
    assert found.names, "no kernels at all"
    return found


@pytest.fixture(scope="module")
def backend(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Run one hook of the build backend in a tree: what pip does, without the network."""
    pytest.importorskip("setuptools", minversion="77", reason="the build needs setuptools 77")

    def run(hook: str, tree: Path = checkout) -> Path:
        out = tmp_path_factory.mktemp(hook)
        code = f"from setuptools import build_meta; build_meta.{hook}({str(out)!r})"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        (built,) = out.iterdir()
        return built

    return run


@pytest.fixture(scope="module")
def wheel(backend: Callable[..., Path]) -> Path:
    return backend("build_wheel")


@pytest.fixture(scope="module")
def sdist(backend: Callable[..., Path]) -> Path:
    return backend("build_sdist")


def pip_install(wheel: Path, target: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", target, wheel], check=True, timeout=120)
    return target


def on_path(folder: Path) -> str:
    """Put a folder before all others, and drop what an editable install of the tests' own added."""
    return (
        "sys.meta_path[:] = [f for f in sys.meta_path if '__editable__' not in repr(f)]\n"
        "for name in [m for m in sys.modules if '__editable__' in m]: del sys.modules[name]\n"
        f"sys.path[:] = [{str(folder)!r}, *(p for p in sys.path if p)]"
    )


def test_a_bare_checkout_finds_them_beside_the_package(
    checkout: Path, expected: SimpleNamespace
) -> None:
    assert expected.package == checkout / "cumha" / "__init__.py"
    assert expected.root == checkout / "kernels_cu"


def test_a_wheel_holds_all_kernels_inside_the_package(
    wheel: Path, expected: SimpleNamespace
) -> None:
    listed = zipfile.ZipFile(wheel).namelist()
    kernels = [name.rpartition("/")[2] for name in listed if name.startswith("cumha/kernels_cu/")]
    assert sorted(kernels) == sorted([*expected.names.split(), "emulate.cpp", "emulate.hpp"])
    tops = {name.split("/")[0] for name in listed}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"cumha"}
    assert "cumha/py.typed" in listed
    assert any(name.endswith("/LICENSE") for name in listed)


def test_a_wheel_holds_every_module(wheel: Path, checkout: Path) -> None:
    modules = {str(m.relative_to(checkout)) for m in (checkout / "cumha").rglob("*.py")}
    listed = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    assert listed == {name.replace(os.sep, "/") for name in modules}


def test_a_wheel_finds_them_when_installed(
    wheel: Path, expected: SimpleNamespace, tmp_path: Path
) -> None:
    site = pip_install(wheel, tmp_path / "site")
    found = describe(on_path(site), tmp_path)
    assert found.root == site / "cumha" / "kernels_cu"
    assert (found.digest, found.names) == (expected.digest, expected.names)
    assert not (site / "kernels_cu").exists()


def test_a_wheel_finds_them_unpacked_by_nobody(
    wheel: Path, expected: SimpleNamespace, tmp_path: Path
) -> None:
    found = describe(on_path(wheel), tmp_path)
    assert found.digest == expected.digest
    assert wheel in found.package.parents


def test_an_sdist_gives_the_same_wheel(
    sdist: Path,
    wheel: Path,
    expected: SimpleNamespace,
    backend: Callable[..., Path],
    tmp_path: Path,
) -> None:
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(tmp_path, filter="data")
        else:
            archive.extractall(tmp_path)
    (tree,) = tmp_path.iterdir()
    assert describe("", tree).digest == expected.digest
    rebuilt = backend("build_wheel", tree)
    assert sorted(zipfile.ZipFile(rebuilt).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())
    assert describe(on_path(rebuilt), tmp_path).digest == expected.digest


def test_an_editable_install_reads_the_checkout(
    checkout: Path, expected: SimpleNamespace, backend: Callable[..., Path], tmp_path: Path
) -> None:
    site = pip_install(backend("build_editable"), tmp_path / "site")
    found = describe(on_path(site) + f"\nimport site; site.addsitedir({str(site)!r})", tmp_path)
    assert found.package == checkout / "cumha" / "__init__.py"
    assert found.root == checkout / "kernels_cu"
    assert found.digest == expected.digest


def test_the_base_install_needs_only_numpy_and_ml_dtypes(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(archive.read(name).decode())
    needed = metadata.get_all("Requires-Dist") or []
    base = [line for line in needed if "extra ==" not in line]
    assert [line.split(">")[0] for line in base] == ["numpy", "ml_dtypes"]
    extras = metadata.get_all("Provides-Extra") or []
    assert {"cuda12", "cuda13", "examples", "test"} <= set(extras)
    assert not any("[ctk]" in line for line in needed)


def test_missing_kernels_are_reported_with_both_places(checkout: Path, tmp_path: Path) -> None:
    shutil.copytree(checkout / "cumha", tmp_path / "cumha")
    code = "from cumha import sources; sources.root()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    message = done.stderr.splitlines()[-1]
    assert message.startswith("RuntimeError: kernel sources not found")
    assert str(tmp_path / "cumha" / "kernels_cu") in message
    assert str(tmp_path / "kernels_cu") in message
