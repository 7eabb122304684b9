"""The kernels on the CPU: the same translation units, built by g++ or clang++, run by threads.

    cumha.attention(q, k, v, path="naive", backend="emulate")      # NumPy arrays, slow and exact

``kernels_cu/emulate.hpp`` gives the sources what they use of CUDA, ``kernels_cu/emulate.cpp`` runs
each CUDA thread as a fiber and blocks over the CPU cores. Problem, plan, parameter struct and
launch geometry are those of a GPU, by default an H200; only loading and launching differ.

What is checked is a setting (`using`, or the environment variable in brackets):

checks : "all", "none" or "sanitizers" [CUMHA_EMULATE_CHECKS]
    "all": bounds, alignment, races, reads of unwritten shared memory, comparisons of variables
    without a value, divergence, look-ups outside their array. "none": divergence only, faster.
    "sanitizers": AddressSanitizer and UndefinedBehaviorSanitizer instead; their runtime must be
    loaded before Python (`preload`).
seed : int [CUMHA_EMULATE_SEED]
    Decides the order of blocks and threads.
workers : int [CUMHA_EMULATE_WORKERS]
    CPU threads; default one per core.
device : str [CUMHA_EMULATE_DEVICE]
    The GPU to plan for, a name of `Device.named`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cumha import sources
from cumha.cache import ENTRY_SUFFIX, read_entry, write_entry
from cumha.compile import KernelSpec, flatten, header_directories, translation_unit

Checks = Literal["all", "none", "sanitizers"]
CHECKS = ("all", "none", "sanitizers")

_COMMON = (
    "-std=c++17",
    "-fPIC",
    "-g",
    "-gdwarf-4",  # addr2line names the wrong file for some functions of a DWARF 5 unit
    "-ffp-contract=off",  # a product and a sum round apart, as NumPy's do
    "-fvisibility=hidden",
    "-Wno-unknown-pragmas",  # unroll
    "-Wno-attributes",
)
_SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_KERNEL_FLAGS: dict[str, tuple[str, ...]] = {
    "all": ("-O1", "-fsanitize=thread,alignment", "-DCUMHA_CHECKED"),  # emulate.cpp has the hooks
    "none": ("-O2",),
    "sanitizers": ("-O1", "-fno-omit-frame-pointer", *_SANITIZERS),
}
_RUNTIME_FLAGS: dict[str, tuple[str, ...]] = {
    "all": ("-O2", "-DCUMHA_CHECKED"),
    "none": ("-O2",),
    "sanitizers": ("-O1", "-fno-omit-frame-pointer", *_SANITIZERS),
}
_MESSAGE_BYTES = 4096
_MOST_PLACES = 8


class EmulationError(RuntimeError):
    """A kernel did what a GPU must not be asked to do.

    Attributes
    ----------
    places : tuple of str
        Where, as ``"kernels_cu/naive.cu:55 (dot)"``.
    """

    def __init__(self, message: str, places: Sequence[str]) -> None:
        self.places = tuple(places)
        where = "".join(f"\n  at {p}" for p in places)
        super().__init__(message + where)


@dataclass(frozen=True)
class Settings:
    """How kernels are emulated; see the module's text."""

    checks: Checks = "all"
    seed: int = 0
    workers: int = 0  # 0: one per core
    device: str = "h200"

    def __post_init__(self) -> None:
        if self.checks not in CHECKS:
            raise ValueError(f"checks is {self.checks!r}: use one of {', '.join(CHECKS)}")


def _from_environment() -> Settings:
    def read(name: str, default: Any) -> Any:
        return os.environ.get(f"CUMHA_EMULATE_{name.upper()}", default)

    def whole(name: str) -> int:
        text = read(name, "0")
        try:
            return int(text)
        except ValueError:
            variable = f"CUMHA_EMULATE_{name.upper()}"
            raise ValueError(f"{variable} must be a whole number, got {text!r}") from None

    return Settings(read("checks", "all"), whole("seed"), whole("workers"), read("device", "h200"))


_settings: ContextVar[Settings | None] = ContextVar("cumha_emulate_settings", default=None)


def settings() -> Settings:
    """Return the settings in force: of the innermost `using`, else the environment's."""
    return _settings.get() or _from_environment()


@contextlib.contextmanager
def using(**changes: Any) -> Iterator[Settings]:
    """Emulate with other settings inside a ``with`` block."""
    chosen = dataclasses.replace(settings(), **changes)
    token = _settings.set(chosen)
    try:
        yield chosen
    finally:
        _settings.reset(token)


# --- the host compiler and CUDA's headers ---------------------------------------------------------


@dataclass(frozen=True)
class HostCompiler:
    """A C++ compiler and the folders of the headers that the kernels include."""

    command: str
    version: str  # its first line
    includes: tuple[str, ...]
    unset_flags: tuple[str, ...]  # that show comparisons of unset variables; () if it has none


@functools.cache
def host_compiler() -> HostCompiler:
    """Find g++ or clang++ (or what CXX names), and CUDA's headers.

    Raises
    ------
    RuntimeError
        Something is missing; the message says what brings it.
    """
    if sys.platform != "linux":
        raise RuntimeError(f"kernels are emulated on Linux only, this is {sys.platform}")
    named = os.environ.get("CXX")
    command = next((c for c in (named, "g++", "clang++") if c and shutil.which(c)), None)
    if command is None:
        raise RuntimeError(
            "emulating kernels needs g++ or clang++ on PATH (or named by CXX): install one, "
            "for instance the package g++"
        )
    version = _output(command, "--version").partition("\n")[0]
    return HostCompiler(command, version, _includes(), _unset_flags(command, version))


def _unset_flags(command: str, version: str) -> tuple[str, ...]:
    """Fill unset variables with a pattern, and have a hook see what comparisons compare.

    g++ before 12 has no such pattern; clang++ folds comparisons with it before they are traced.
    """
    flags = ("-ftrivial-auto-var-init=pattern", "-fsanitize-coverage=trace-cmp")
    trial = [command, *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    done = subprocess.run(trial, capture_output=True, check=False, env=_tool_env())
    return () if done.returncode != 0 or "clang" in version else flags


def _output(*command: str) -> str:
    """What a tool prints; without the sanitizers' runtime, which slows tools down."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_tool_env())
    return done.stdout


def _tool_env() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}


def _includes() -> tuple[str, ...]:
    """Folders with cuda_fp16.h, crt/host_defines.h and nv/target; each from where it is found."""
    folders = [*header_directories(), *_bundled_cccl()]
    found = []
    for header, package in (
        ("cuda_fp16.h", "nvidia-cuda-runtime"),
        ("crt/host_defines.h", "nvidia-cuda-crt"),
        ("nv/target", "nvidia-cuda-cccl"),
    ):
        folder = next((f for f in folders if (f / header).is_file()), None)
        if folder is None:
            looked = ", ".join(map(str, folders)) or "nowhere"
            raise RuntimeError(
                f"CUDA's header {header} not found (looked in {looked}): it comes with the package "
                f'{package}; pip install "cumha[emulate]" brings all that emulation needs'
            )
        found.append(str(folder))
    return tuple(dict.fromkeys(found))


def _bundled_cccl() -> Iterator[Path]:
    """CuPy brings nv/target along."""
    import importlib.util

    spec = importlib.util.find_spec("cupy")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield Path(root) / "_core/include/cupy/_cccl/libcudacxx"


def preload() -> str:
    """Return the value of LD_PRELOAD that ``checks="sanitizers"`` needs: their runtimes' paths."""
    command = host_compiler().command
    libraries = ["libclang_rt.asan-x86_64.so"] if "clang" in command else ["libasan.so"]
    paths = []
    for name in libraries:
        paths.append(str(Path(_output(command, f"-print-file-name={name}").strip()).resolve()))
    return ":".join(paths)


# --- building and loading -------------------------------------------------------------------------


@dataclass(frozen=True)
class EmulatedKernel:
    """A kernel built for the CPU and loaded into this process."""

    name: str
    library: Any
    file: Path
    checks: str


_loaded: dict[tuple[KernelSpec, str], EmulatedKernel] = {}
_lock = threading.Lock()


def load(spec: KernelSpec) -> EmulatedKernel:
    """Return the kernel of a specification: from this process, the disk cache, or the compiler.

    Raises
    ------
    RuntimeError
        No compiler, no headers, or the compiler refused the kernel: then with its messages.
    """
    checks = settings().checks
    with _lock:
        if (spec, checks) not in _loaded:
            _loaded[spec, checks] = load_source(spec.path, unit_source(spec), checks, spec.build)
        return _loaded[spec, checks]


def unit_source(spec: KernelSpec) -> str:
    """The text that the host compiler gets: the GPU's unit between our header and an entry."""
    unit = translation_unit(spec)
    entry = (
        '\nextern "C" void cumha_emulate_entry(const void* params) {\n'
        f"  {unit.entry}(*static_cast<const cumha::Params*>(params));\n}}\n"
    )
    return f'#include "emulate.hpp"\n{flatten(unit)}{entry}'


def load_source(
    name: str, source: str, checks: str = "all", build: str = "release"
) -> EmulatedKernel:
    """Build (or take from the cache) and load a unit that begins with ``emulate.hpp``.

    The unit defines ``extern "C" void cumha_emulate_entry(const void* params)``.
    """
    if checks == "sanitizers" and "asan" not in os.environ.get("LD_PRELOAD", ""):
        raise RuntimeError(
            'checks="sanitizers" needs their runtime loaded first: start Python with '
            f"LD_PRELOAD={preload()} ASAN_OPTIONS=detect_leaks=0"
        )
    flags = _KERNEL_FLAGS[checks] + (host_compiler().unset_flags if checks == "all" else ())
    if build == "debug":
        flags = tuple("-O0" if f.startswith("-O") else f for f in flags)
    objects = {"kernel": source, "runtime": sources.read("emulate.cpp")}
    image = _cached(
        f"{name}-emulated",
        (source, *objects.values(), sources.read("emulate.hpp"), *flags),
        lambda folder: _build(name, source, flags, checks, folder),
    )
    file = _temporary() / f"{name}-{hashlib.sha256(image).hexdigest()[:16]}.so"
    if not file.exists():  # else it is mapped into this process
        file.write_bytes(image)
    library = ctypes.CDLL(str(file))
    library.cumha_emulate_run.restype = ctypes.c_int
    return EmulatedKernel(name, library, file, checks)


def _build(name: str, source: str, flags: tuple[str, ...], checks: str, folder: Path) -> bytes:
    runtime = _cached(
        "emulate-runtime",
        (sources.read("emulate.cpp"), sources.read("emulate.hpp"), *_RUNTIME_FLAGS[checks]),
        lambda f: _compile("emulate", sources.read("emulate.cpp"), _RUNTIME_FLAGS[checks], f),
    )
    (folder / "runtime.o").write_bytes(runtime)
    (folder / "kernel.o").write_bytes(_compile(name, source, flags, folder))
    library = folder / "kernel.so"
    sanitizers = _SANITIZERS if checks == "sanitizers" else ()
    objects = [str(folder / "kernel.o"), str(folder / "runtime.o")]
    _run(["-shared", "-pthread", "-Wl,-Bsymbolic", *sanitizers, *objects, "-o", str(library)])
    return library.read_bytes()


def _compile(name: str, source: str, flags: tuple[str, ...], folder: Path) -> bytes:
    file, result = folder / f"{name}.cpp", folder / f"{name}.o"
    file.write_text(source)
    includes = [f"-I{folder_}" for folder_ in (sources.root(), *host_compiler().includes)]
    _run([*_COMMON, *flags, *includes, "-c", str(file), "-o", str(result)])
    return result.read_bytes()


def _run(arguments: list[str]) -> None:
    """Call the compiler, from the folder above the sources so that debuggers find them."""
    command = [host_compiler().command, *arguments]
    folder = Path(str(sources.root())).parent
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, check=False, env=_tool_env()
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"{host_compiler().version} refused the kernel:\n{done.stderr}\n{' '.join(command)}"
        )


def _cached(stem: str, inputs: tuple[str, ...], build: Any) -> bytes:
    """The disk cache's bytes for these inputs, else what ``build(folder)`` returns."""
    compiler = host_compiler()
    total = hashlib.sha256()
    for text in (*inputs, *_COMMON, compiler.version, *compiler.includes, str(sources.root())):
        total.update(f"{len(text)} ".encode() + text.encode())
    key = total.hexdigest()
    name = f"{stem}-{key[:40]}{ENTRY_SUFFIX}"
    entry = read_entry(name)
    if entry is not None and entry[0].get("key") == key:
        return entry[1]
    with tempfile.TemporaryDirectory(prefix="cumha-emulate-") as folder:
        image: bytes = build(Path(folder))
    write_entry(name, {"key": key, "compiler": compiler.version}, image)
    return image


@functools.cache
def _temporary() -> Path:
    """A folder of this process for the loaded libraries: debuggers and addr2line read them."""
    folder = tempfile.mkdtemp(prefix="cumha-emulate-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


# --- running --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """A range of memory that a launch hands to the kernel: [lo, hi) in bytes."""

    name: str
    lo: int
    hi: int
    writable: bool = False


class _Range(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("lo", ctypes.c_uint64),
        ("hi", ctypes.c_uint64),
        ("writable", ctypes.c_uint64),
    )


def run(
    kernel: EmulatedKernel,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    params: bytes,
    memory: Sequence[Memory],
    shared_bytes: int = 0,
) -> None:
    """Run a grid to its end.

    Parameters
    ----------
    grid, block : tuple of int
        Blocks, and threads of a block, along x, y and z.
    params : bytes
        The kernel's parameter struct.
    memory : sequence of Memory
        All that the kernel may touch beside shared memory.
    shared_bytes : int
        Dynamic shared memory of a block.

    Raises
    ------
    EmulationError
        A check failed.
    """
    chosen = settings()
    parameters = ctypes.create_string_buffer(params, len(params) + 1)
    start = ctypes.addressof(parameters)
    known = [*memory, Memory("params", start, start + len(params))]
    ranges = (_Range * len(known))(
        *(_Range(m.name.encode(), m.lo, m.hi, int(m.writable)) for m in known)
    )
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    places = (ctypes.c_uint64 * _MOST_PLACES)()
    count = ctypes.c_int(_MOST_PLACES)
    failed = kernel.library.cumha_emulate_run(
        parameters,
        (ctypes.c_uint * 6)(*grid, *block),
        ctypes.c_uint64(shared_bytes),
        ctypes.c_uint64(chosen.seed),
        ctypes.c_int(chosen.workers or os.cpu_count() or 1),
        ranges,
        ctypes.c_int(len(known)),
        message,
        ctypes.c_int(_MESSAGE_BYTES),
        places,
        ctypes.byref(count),
    )
    if failed:
        found = [_source_line(kernel.file, places[i]) for i in range(count.value)]
        raise EmulationError(message.value.decode(errors="replace"), found)


#: Files whose lines say little: the fault is in what calls them.
_WRAPPERS = ("emulate.hpp", "emulate.cpp", "memory.cuh", "mma.cuh", "reduce.cuh")


def _source_line(library: Path, offset: int) -> str:
    """File, line and function of a code address: the innermost frame outside the wrappers."""
    tool = shutil.which("addr2line")
    if tool is None:
        return f"{library.name}+{offset:#x} (addr2line, of the package binutils, names the line)"
    lines = _output(tool, "-e", str(library), "-f", "-C", "-i", hex(offset)).splitlines()
    frames = list(zip(lines[::2], lines[1::2], strict=False))
    outside = [(f, at) for f, at in frames if not any(w in at for w in _WRAPPERS)]
    for function, place in outside or frames:
        file, _, line = place.partition(":")
        if "kernels_cu/" in file:
            file = "kernels_cu/" + file.rpartition("kernels_cu/")[2]
        return f"{file}:{line.partition(' ')[0]} ({function})"
    return hex(offset)
