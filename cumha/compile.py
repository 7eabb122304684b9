"""From a kernel's specification to machine code: translation unit, NVRTC, disk cache, loading.

    KernelSpec -> translation_unit() -> TranslationUnit     pure: text and options, nothing is run
               -> build()            -> Binary              disk cache, else NVRTC; needs no GPU
               -> load()             -> LoadedKernel        on one device, once per process

All headers of ours are handed to NVRTC in memory, so everything that it reads is in the cache key:
our texts, the options, NVRTC's version, and the few headers of CUDA's own that kernels include.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cumha import sources
from cumha.cache import (
    ENTRY_SUFFIX,
    CacheInfo,
    cache_directory,
    cache_info,
    read_entry,
    write_entry,
)
from cumha.device import INSTALL_HINT, Device, architecture, import_cupy

__all__ = [
    "Binary",
    "CacheInfo",
    "CompileError",
    "KernelSpec",
    "LoadedKernel",
    "TranslationUnit",
    "build",
    "cache_directory",
    "cache_info",
    "cache_key",
    "compile_unit",
    "cuda_headers",
    "flatten",
    "header_directories",
    "is_built",
    "load",
    "loaded",
    "nvrtc_version",
    "supported_architectures",
    "target_architecture",
    "translation_unit",
]

MASK_HEADER = "mask_emitted.cuh"

#: CUDA's headers that a kernel may include, with what they include in turn; hashed into the key.
CUDA_HEADERS = ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp")

_BUILDS: Mapping[str, tuple[str, ...]] = {
    "release": (),
    "lineinfo": ("-lineinfo",),
    "debug": ("-G",),
}

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_PRAGMA_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once\b", re.MULTILINE)
_LINE = re.compile(r'^#line (\d+) "([^"]+)"')
_IF = re.compile(r"^[ \t]*#[ \t]*if")
_ENDIF = re.compile(r"^[ \t]*#[ \t]*endif")


class CompileError(RuntimeError):
    """NVRTC refused a kernel.

    The message opens with file, line and text of the first error, then gives NVRTC's version, the
    options and the whole log. Attributes: `location` ("kernels_cu/naive.cu:12"), `log`, `options`.
    """

    def __init__(self, unit: TranslationUnit, options: tuple[str, ...], log: str) -> None:
        found = re.search(r"^(.+?)\((\d+)\): (?:catastrophic )?error: (.*)$", log, re.MULTILINE)
        self.location = f"{found[1]}:{found[2]}" if found else unit.name
        self.log = log
        self.options = options
        major, minor = nvrtc_version()
        first = found[3] if found else log.strip().partition("\n")[0]
        super().__init__(
            f"{self.location}: {first}\n"
            f"NVRTC {major}.{minor} could not build {unit.entry} for {unit.arch}\n"
            f"options: {' '.join(options)}\n{log}"
        )


@dataclass(frozen=True)
class KernelSpec:
    """All that decides the machine code of one kernel.

    Attributes
    ----------
    path : str
        Name of the kernel path: the file is ``kernels_cu/<path>.cu``, the entry ``cumha_<path>``.
    arch : str
        ``"sm_90a"`` or ``"compute_90"``; see `cumha.device.architecture`.
    defines : tuple of (str, str)
        Macros that ``config.cuh`` reads, in order.
    mask_source : str
        Text of the generated header ``mask_emitted.cuh``.
    build : {"release", "lineinfo", "debug"}
        Plain, with source lines for profilers, or unoptimised for cuda-gdb.
    """

    path: str
    arch: str
    defines: tuple[tuple[str, str], ...] = ()
    mask_source: str = ""
    build: Literal["release", "lineinfo", "debug"] = "release"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(sm|compute)_\d+[af]?", self.arch):
            raise ValueError(f'arch is {self.arch!r}; it must look like "sm_90a" or "compute_90"')
        if self.build not in _BUILDS:
            raise ValueError(f"build is {self.build!r}; it must be one of {', '.join(_BUILDS)}")
        for name, value in self.defines:
            if not re.fullmatch(r"[A-Za-z_]\w*", name) or "\n" in value:
                raise ValueError(f"define {name!r} = {value!r} cannot be one #define line")


@dataclass(frozen=True)
class TranslationUnit:
    """What a compiler is given: nothing else decides the result.

    Attributes
    ----------
    name : str
        Name of the source, as messages show it: ``"kernels_cu/naive.cu"``.
    entry : str
        Symbol of the kernel.
    arch : str
        What it is built for.
    source : str
        Text of the source, the macros on top.
    headers : mapping of str to str
        Texts of our headers by the name in ``#include "name"``, sorted by name.
    options : tuple of str
        Options, without the folder of CUDA's headers.
    """

    name: str
    entry: str
    arch: str
    source: str
    headers: Mapping[str, str] = field(hash=False)
    options: tuple[str, ...]

    @property
    def kind(self) -> Literal["cubin", "ptx"]:
        """What the architecture asks for: machine code of one GPU, or PTX for later ones."""
        return "cubin" if self.arch.startswith("sm_") else "ptx"


@dataclass(frozen=True)
class Binary:
    """A compiled kernel.

    Attributes
    ----------
    image : bytes
        The cubin, or PTX text that ends with a NUL byte.
    kind : {"cubin", "ptx"}
        Which of the two.
    log : str
        What NVRTC and ptxas said.
    registers, spill_bytes, stack_bytes, shared_bytes : int or None
        Of the entry: registers per thread; stores plus loads of spilled registers (of all functions
        of the unit); stack frame per thread; static shared memory per block. None for PTX, whose
        registers the driver allots, and where the log has no such numbers.
    seconds : float
        Time that NVRTC took.
    cached : bool
        True if it came from the disk cache.
    """

    image: bytes = field(repr=False)
    kind: Literal["cubin", "ptx"]
    log: str = field(repr=False, compare=False)
    registers: int | None
    spill_bytes: int | None
    stack_bytes: int | None
    shared_bytes: int | None
    seconds: float = field(compare=False)
    cached: bool = field(compare=False, default=False)


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel that is loaded on a device: `function` is a ``cupy.cuda.Function``."""

    function: Any
    binary: Binary
    spec: KernelSpec
    device_index: int


# --- the translation unit -------------------------------------------------------------------------


def translation_unit(spec: KernelSpec) -> TranslationUnit:
    """Write out source, headers and options of a kernel; reads the kernel sources, runs nothing.

    Raises
    ------
    FileNotFoundError
        There is no such path, or a source includes a header that is not there.
    """
    file = f"{spec.path}.cu"
    text = sources.read(file)
    defines = "".join(f"#define {name} {value}\n" for name, value in spec.defines)
    headers: dict[str, str] = {}
    _collect_headers(text, spec.mask_source, headers)
    return TranslationUnit(
        name=f"kernels_cu/{file}",
        entry=f"cumha_{spec.path}",
        arch=spec.arch,
        source=f'{defines}#line 1 "kernels_cu/{file}"\n{text}',
        headers=dict(sorted(headers.items())),
        options=(
            "--std=c++17",
            f"--gpu-architecture={spec.arch}",
            "--ftz=false",
            "--prec-div=true",
            "--prec-sqrt=true",
            "--fmad=true",
            "--ptxas-options=-v",
            *_BUILDS[spec.build],
        ),
    )


def _collect_headers(text: str, mask_source: str, headers: dict[str, str]) -> None:
    """Add every header that `text` can reach, marked with its name in the repository."""
    for name in _INCLUDE.findall(text):
        if name in headers:
            continue
        emitted = name == MASK_HEADER
        body = mask_source if emitted else sources.read(name)
        label = name if emitted else f"kernels_cu/{name}"
        headers[name] = f'#line 1 "{label}"\n{body}'
        _collect_headers(body, mask_source, headers)


def flatten(unit: TranslationUnit) -> str:
    """Return the unit as one text that plain nvcc builds, our headers inlined in place.

    The first line gives the command. ``#line`` marks keep the names and lines of the repository.
    """
    suffix = unit.kind
    stem = Path(unit.name).stem
    command = f"nvcc -{suffix} {' '.join(unit.options)} -o {stem}.{suffix} {stem}.cu"
    lines = _Flattener(unit.headers).expand(unit.source, unit.name, conditional=False)
    return "\n".join((f"// {command}", *lines))


class _Flattener:
    """Inlines headers; ``#pragma once`` becomes a guard macro, since one file has no "once".

    A header whose include no ``#if`` encloses is inlined once and for all. Inside an ``#if`` the
    compiler may skip its text, so it is inlined again where it is included next.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = headers
        self._done: set[str] = set()
        self._open: list[str] = []

    def expand(self, text: str, file: str, *, conditional: bool) -> Iterator[str]:
        number = depth = 0
        for line in text.split("\n"):
            number += 1
            depth += bool(_IF.match(line)) - bool(_ENDIF.match(line))
            if mark := _LINE.match(line):
                number, file = int(mark[1]) - 1, mark[2]
            include = _INCLUDE.match(line)
            if include:
                yield from self._inline(include[1], conditional=conditional or depth > 0)
                yield f'#line {number + 1} "{file}"'
            elif not _PRAGMA_ONCE.match(line):
                yield line
            else:
                yield ""

    def _inline(self, name: str, *, conditional: bool) -> Iterator[str]:
        text = self._headers[name]
        once = bool(_PRAGMA_ONCE.search(text))
        if name in self._open and not once:
            raise ValueError(f"{name} includes itself: {' -> '.join((*self._open, name))}")
        if name in self._open or name in self._done:
            return
        if once and not conditional:
            self._done.add(name)
        self._open.append(name)
        body = self.expand(text, name, conditional=conditional)
        if once:
            guard = "CUMHA_ONCE_" + re.sub(r"\W", "_", name).upper()
            yield from (f"#ifndef {guard}", f"#define {guard}", *body, "#endif")
        else:
            yield from body
        self._open.pop()


# --- NVRTC ----------------------------------------------------------------------------------------


@functools.cache
def _nvrtc() -> Any:
    """CuPy's binding of NVRTC, once its library is known to load."""
    nvrtc = import_cupy().cuda.nvrtc
    try:
        nvrtc.getVersion()
    except (RuntimeError, ImportError, OSError) as error:
        raise RuntimeError(
            f"NVRTC cannot be loaded ({error}); it comes with the package nvidia-cuda-nvrtc "
            f"(CUDA 12: nvidia-cuda-nvrtc-cu12) or a CUDA toolkit: {INSTALL_HINT}"
        ) from error
    return nvrtc


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Return NVRTC's version, (major, minor).

    Raises
    ------
    RuntimeError
        CuPy or NVRTC is missing.
    """
    major, minor = _nvrtc().getVersion()
    return int(major), int(minor)


@functools.cache
def supported_architectures() -> tuple[int, ...]:
    """Return what NVRTC builds for, ascending: 90 means compute capability 9.0.

    Raises
    ------
    RuntimeError
        CuPy or NVRTC is missing.
    """
    return tuple(sorted(_nvrtc().getSupportedArchs()))


@functools.cache
def target_architecture(device: Device) -> str:
    """Return what the installed NVRTC has to build for `device`: `cumha.device.architecture`."""
    return architecture(device.compute_capability, supported_architectures())


@dataclass(frozen=True)
class CudaHeaders:
    """CUDA's own headers: where they are, their ``CUDART_VERSION``, and a digest of their text."""

    directory: Path
    version: int
    digest: str


@functools.cache
def cuda_headers() -> CudaHeaders:
    """Find the headers that fit NVRTC; looked for once per process.

    Raises
    ------
    RuntimeError
        There are none, or only those of another major version than NVRTC's.
    """
    major = nvrtc_version()[0]
    rejected = []
    for directory in header_directories():
        try:
            api = (directory / "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
            texts = [(directory / name).read_bytes() for name in CUDA_HEADERS]
        except OSError as error:
            rejected.append(f"{directory}: {error.strerror or error}")
            continue
        found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", api)
        version = int(found[1]) if found else 0
        if version // 1000 == major:
            return CudaHeaders(directory, version, hashlib.sha256(_framed(*texts)).hexdigest())
        rejected.append(f"{directory}: version {version // 1000}.{version % 1000 // 10}")
    seen = f" (seen: {'; '.join(rejected)})" if rejected else ""
    raise RuntimeError(
        f"CUDA headers (cuda_fp16.h) of version {major}.x, as NVRTC's, not found{seen}; they come "
        "with the package nvidia-cuda-runtime (CUDA 12: nvidia-cuda-runtime-cu12) or a CUDA "
        f"toolkit named by CUDA_PATH: {INSTALL_HINT}"
    )


def header_directories() -> Iterator[Path]:
    """Yield the folders where CUDA's headers may be, the likeliest first."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:  # not in every release that CuPy accepts
        pass
    else:
        found = find_nvidia_header_directory("cudart")
        if found:
            yield Path(found)
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "include"


def compile_unit(unit: TranslationUnit) -> Binary:
    """Compile with NVRTC; no cache, no GPU.

    Debug builds are compiled by a process of their own: after one, NVRTC (13.5) makes other code of
    every later unit of its process, with more registers and spills.

    Raises
    ------
    CompileError
        NVRTC refused the source or an option.
    RuntimeError
        CuPy, NVRTC or CUDA's headers are missing.
    """
    if set(_BUILDS["debug"]) <= set(unit.options) and sys.executable:
        return _compile_apart(unit)
    return _compile_here(unit)


_APART = """
import pickle, sys
from cumha import compile as compiler
unit = pickle.load(sys.stdin.buffer)
try:
    result = compiler._compile_here(unit)
except compiler.CompileError as error:
    result = (error.options, error.log)
pickle.dump(result, sys.stdout.buffer)
"""


def _compile_apart(unit: TranslationUnit) -> Binary:
    """As `compile_unit`, by another Python."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", _APART],
        input=pickle.dumps(unit), capture_output=True, check=False, env=environment,
    )  # fmt: skip
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise RuntimeError(f"a debug build in another process failed: {said}")
    result = pickle.loads(done.stdout)
    if isinstance(result, Binary):
        return result
    raise CompileError(unit, *result)


def _compile_here(unit: TranslationUnit) -> Binary:
    nvrtc = _nvrtc()
    options = (*unit.options, f"-I{cuda_headers().directory}")
    start = time.perf_counter()
    program = nvrtc.createProgram(
        unit.source,
        unit.name,
        [text.encode() for text in unit.headers.values()],
        [name.encode() for name in unit.headers],
    )
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program).strip("\0 \n")
            raise CompileError(unit, options, log or str(error)) from error
        log = nvrtc.getProgramLog(program).strip("\0 \n")
        image = nvrtc.getCUBIN(program) if unit.kind == "cubin" else nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    # CuPy strips the last byte as if it were a string's NUL. PTX has one; a cubin has none and ends
    # with a zero of its own: either way the byte is due.
    return _binary(image + b"\0", unit, log, time.perf_counter() - start)


def _binary(image: bytes, unit: TranslationUnit, log: str, seconds: float) -> Binary:
    """Read the resource numbers that ``--ptxas-options=-v`` put in the log."""
    # With -G other functions have sections of their own, each opened by its name.
    sections = re.split(r"(?=Compiling entry function '|Function properties for )", log)
    entry = "".join(s for s in sections if s.startswith(f"Function properties for {unit.entry}\n"))
    if not entry:
        return Binary(image, unit.kind, log, None, None, None, None, seconds)

    def number(pattern: str, text: str) -> int:
        return sum(int(n) for n in re.findall(pattern, text))

    return Binary(
        image,
        unit.kind,
        log,
        registers=number(r"Used (\d+) registers", entry),
        spill_bytes=number(r"(\d+) bytes spill (?:stores|loads)", log),
        stack_bytes=max(
            number(r"(\d+) bytes stack frame", entry),
            number(r"(\d+) bytes cumulative stack size", entry),
        ),
        shared_bytes=number(r"(\d+) bytes smem", entry),
        seconds=seconds,
    )


# --- cache and loading ----------------------------------------------------------------------------

_built: dict[str, Binary] = {}
_loaded: dict[tuple[KernelSpec, int], LoadedKernel] = {}
_locks: dict[object, threading.Lock] = {}


def _lock(name: object) -> threading.Lock:
    return _locks.setdefault(name, threading.Lock())


def _framed(*parts: bytes) -> bytes:
    """Join parts so that no two different lists give the same bytes."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def cache_key(unit: TranslationUnit) -> str:
    """Return the key of what the unit compiles to here: SHA-256, as hexadecimal digits.

    Raises
    ------
    RuntimeError
        CuPy, NVRTC or CUDA's headers are missing: their versions belong to the key.
    """
    cuda = cuda_headers()
    parts = [
        unit.name,
        unit.entry,
        unit.source,
        str(len(unit.headers)),
        *(text for pair in unit.headers.items() for text in pair),
        *unit.options,
        f"NVRTC {nvrtc_version()}",
        f"headers {cuda.version} {cuda.digest}",
    ]
    return hashlib.sha256(_framed(*(part.encode() for part in parts))).hexdigest()


def _entry_name(unit: TranslationUnit, key: str) -> str:
    return f"{Path(unit.name).stem}-{unit.arch}-{key[:40]}{ENTRY_SUFFIX}"


def _read_binary(unit: TranslationUnit, key: str) -> Binary | None:
    entry = read_entry(_entry_name(unit, key))
    if entry is None or entry[0].get("key") != key:
        return None
    metadata, image = entry
    return Binary(image=image, cached=True, **metadata["binary"])


def _write_binary(spec: KernelSpec, unit: TranslationUnit, key: str, binary: Binary) -> None:
    metadata = {
        "key": key,
        "spec": repr(spec),
        "options": unit.options,
        "nvrtc": nvrtc_version(),
        "cuda_headers": cuda_headers().version,
        "binary": {
            "kind": binary.kind,
            "log": binary.log,
            "registers": binary.registers,
            "spill_bytes": binary.spill_bytes,
            "stack_bytes": binary.stack_bytes,
            "shared_bytes": binary.shared_bytes,
            "seconds": binary.seconds,
        },
    }
    write_entry(_entry_name(unit, key), metadata, binary.image)


def build(spec: KernelSpec) -> Binary:
    """Return the compiled kernel: from this process, the disk cache, or NVRTC. Needs no GPU.

    Raises
    ------
    CompileError
        NVRTC refused the kernel.
    FileNotFoundError
        There is no such path.
    RuntimeError
        CuPy, NVRTC or CUDA's headers are missing.
    """
    unit = translation_unit(spec)
    key = cache_key(unit)
    with _lock(key):
        binary = _built.get(key) or _read_binary(unit, key)
        if binary is None:
            binary = compile_unit(unit)
            _write_binary(spec, unit, key, binary)
        _built[key] = binary
        return binary


def is_built(spec: KernelSpec) -> bool:
    """Tell whether `build` would not have to compile."""
    unit = translation_unit(spec)
    key = cache_key(unit)
    return key in _built or _read_binary(unit, key) is not None


def load(spec: KernelSpec, device_index: int) -> LoadedKernel:
    """Return the kernel on a device: built if need be, loaded once per process and device.

    Loading allocates and must not happen while a stream is being captured; see `loaded`.

    Raises
    ------
    CompileError, FileNotFoundError
        As `build`.
    RuntimeError
        CuPy, NVRTC, CUDA's headers or the GPU are missing, or the driver refuses the code.
    """
    found = loaded(spec, device_index)
    if found is not None:
        return found
    with _lock((spec, device_index)):
        found = loaded(spec, device_index)
        if found is None:
            binary = build(spec)
            function = _load_function(binary, spec, device_index)
            found = LoadedKernel(function, binary, spec, device_index)
            _loaded[spec, device_index] = found
        return found


def loaded(spec: KernelSpec, device_index: int) -> LoadedKernel | None:
    """Return the kernel if `load` has loaded it on this device; one dictionary look-up."""
    return _loaded.get((spec, device_index))


def _load_function(binary: Binary, spec: KernelSpec, device_index: int) -> Any:
    cupy = import_cupy()
    try:
        with cupy.cuda.Device(device_index):
            module = cupy.cuda.Module()
            module.load(binary.image)
            return module.get_function(f"cumha_{spec.path}")
    except (cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError) as error:
        major, minor = nvrtc_version()
        raise RuntimeError(
            f"device {device_index} cannot load {spec.path} built for {spec.arch} by NVRTC "
            f"{major}.{minor} ({error}); the driver must be as new as NVRTC: {INSTALL_HINT}"
        ) from error
