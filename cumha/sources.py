"""The kernel sources, wherever cumha is installed: wheel, sdist, editable or a bare checkout."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    if sys.version_info >= (3, 11):
        from importlib.resources.abc import Traversable
    else:
        from importlib.abc import Traversable

SUFFIXES = (".cu", ".cuh")


def root() -> Traversable:
    """Return the folder of the kernel sources.

    An installed package holds it as ``cumha/kernels_cu``; in a checkout and in an editable
    install it stands beside the package.

    Raises
    ------
    RuntimeError
        Neither place has it: the installation is broken.
    """
    from importlib.resources import files

    inside = files("cumha").joinpath("kernels_cu")
    if inside.is_dir():
        return inside
    beside = Path(__file__).resolve().parent.parent / "kernels_cu"
    if beside.is_dir():
        return beside
    raise RuntimeError(
        f"kernel sources not found: neither {inside} nor {beside} is a folder; reinstall cumha"
    )


def names() -> tuple[str, ...]:
    """Return the sorted file names of the kernel sources, such as ``"naive.cu"``."""
    return tuple(sorted(f.name for f in root().iterdir() if f.name.endswith(SUFFIXES)))


def read(name: str) -> str:
    """Return the text of one kernel source.

    Raises
    ------
    FileNotFoundError
        No such file; the message lists those there are.
    """
    file = root().joinpath(name)
    if not file.is_file():
        known = ", ".join(names()) or "none"
        raise FileNotFoundError(f"no kernel source {name!r} in {root()}; there are: {known}")
    return file.read_text(encoding="utf-8")


def digest() -> str:
    """Return the SHA-256 of all kernel sources, names and texts, as hexadecimal digits."""
    total = hashlib.sha256()
    for name in names():
        text = read(name).encode()
        total.update(f"{name} {len(text)}\n".encode() + text)
    return total.hexdigest()
