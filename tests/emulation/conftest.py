"""Small kernels for the emulation's own tests: many cases in one source, one build for all."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from cumha import emulate, sources
from cumha.compile import TranslationUnit, flatten
from tests.macros import define_lines

COMPILERS = [command for command in ("g++", "clang++") if shutil.which(command)]
POINTERS, NUMBERS = 6, 6

TOP = f"""
#include "mma.cuh"
struct Params {{
  void* arrays[{POINTERS}];
  long long numbers[{NUMBERS}];
  long long which;
}};
template <class T>
__device__ __forceinline__ T* array(const Params& p, int i) {{
  return static_cast<T*>(p.arrays[i]);
}}
#define CASE(name) static void name(const Params& p)
"""


class Cases:
    """A source whose functions ``CASE(name) {…}`` run one at a time.

    Its first line counts as line 100 of ``kernels_cu/<name>.cu``. A comment ``//! tag`` names its
    line: `place` gives what a message says of it. ``mask`` is what ``mask_emitted.cuh`` holds, for
    sources that include it; ``defines`` are changes to the macros of `tests.macros`.
    """

    def __init__(
        self, name: str, text: str, compiler: str, mask: str = "", **defines: object
    ) -> None:
        self.name, self.text, self.compiler = name, text.lstrip("\n"), compiler
        self.mask, self.defines = mask, defines
        self.names = re.findall(r"^CASE\((\w+)\)", self.text, re.MULTILINE)
        self._lines: dict[str, int] = {}
        for number, line in enumerate(self.text.split("\n"), 100):
            for tag in re.findall(r"//! (\w+)", line):
                assert tag not in self._lines, f"two lines are tagged {tag}"
                self._lines[tag] = number
        self._kernels: dict[tuple[str, str], emulate.EmulatedKernel] = {}

    def place(self, tag: str) -> str:
        return f"kernels_cu/{self.name}.cu:{self._lines[tag]} "

    def source(self) -> str:
        calls = "".join(f"    case {i}: return {n}(p);\n" for i, n in enumerate(self.names))
        entry = (
            'extern "C" void cumha_emulate_entry(const void* params) {\n'
            "  const Params& p = *static_cast<const Params*>(params);\n"
            f"  switch (p.which) {{\n{calls}  }}\n}}\n"
        )
        top = define_lines(**self.defines) + TOP
        headers = {n: sources.read(n) for n in sources.names() if n.endswith(".cuh")}
        headers["mask_emitted.cuh"] = self.mask
        unit = TranslationUnit(
            name=f"kernels_cu/{self.name}.cu",
            entry="cumha_emulate_entry",
            arch="sm_90a",
            source=f'{top}#line 100 "kernels_cu/{self.name}.cu"\n{self.text}\n{entry}',
            headers={n: f'#line 1 "kernels_cu/{n}"\n{text}' for n, text in headers.items()},
            options=(),
        )
        return f'#include "emulate.hpp"\n{flatten(unit)}'

    def kernel(self, checks: str, build: str = "release") -> emulate.EmulatedKernel:
        if (checks, build) not in self._kernels:
            with compiling_with(self.compiler):
                built = emulate.load_source(self.name, self.source(), checks, build)
            self._kernels[checks, build] = built
        return self._kernels[checks, build]

    def run(
        self,
        case: str,
        *numbers: int,
        inputs: Mapping[str, np.ndarray] | None = None,
        outputs: Mapping[str, np.ndarray] | None = None,
        grid: tuple[int, ...] = (1,),
        block: tuple[int, ...] = (32,),
        shared_bytes: int = 0,
        build: str = "release",
    ) -> None:
        """Run a case under the settings in force; arrays are numbered inputs first."""
        memory, addresses = [], []
        for writable, group in ((False, inputs or {}), (True, outputs or {})):
            for name, x in group.items():
                lo = x.__array_interface__["data"][0]
                memory.append(emulate.Memory(name, lo, lo + x.nbytes, writable))
                addresses.append(lo)
        addresses += [0] * (POINTERS - len(addresses))
        given = [*numbers, *[0] * (NUMBERS - len(numbers))]
        which = self.names.index(case)
        params = struct.pack(f"{POINTERS}Q{NUMBERS}qq", *addresses, *given, which)
        kernel = self.kernel(emulate.settings().checks, build)
        emulate.run(kernel, _three(grid), _three(block), params, memory, shared_bytes)


def _three(sizes: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


@contextlib.contextmanager
def compiling_with(command: str) -> Iterator[None]:
    """Let cumha find this compiler, as the environment variable CXX does."""
    before = os.environ.get("CXX")
    os.environ["CXX"] = command
    emulate.host_compiler.cache_clear()
    try:
        yield
    finally:
        os.environ.pop("CXX")
        if before is not None:
            os.environ["CXX"] = before
        emulate.host_compiler.cache_clear()


@pytest.fixture(scope="session", params=COMPILERS or [None])
def compiler(request: pytest.FixtureRequest) -> str:
    """Every host compiler there is, in turn."""
    if request.param is None:
        pytest.skip("needs g++ or clang++")
    try:
        with compiling_with(request.param):
            emulate.host_compiler()
    except RuntimeError as error:
        pytest.skip(str(error))
    return str(request.param)


@pytest.fixture(scope="session")
def cases(compiler: str) -> Callable[[str, str], Cases]:
    """Return the `Cases` of a name and a text, built once per session and compiler."""
    return functools.cache(lambda name, text: Cases(name, text, compiler))


@pytest.fixture(scope="session")
def guarded() -> Callable[[np.ndarray], np.ndarray]:
    """Return an array's copy, aligned to 256 bytes, amid memory that belongs to no array."""

    def copy(x: Any) -> np.ndarray:
        x = np.ascontiguousarray(x)
        raw = np.zeros(x.nbytes + 3 * 256, np.uint8)
        start = 256 + -raw.__array_interface__["data"][0] % 256
        result = raw[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
        result[...] = x
        return result

    return copy
