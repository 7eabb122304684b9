"""The command line: ``python -m cumha doctor | explain | compile | emit | bench``.

    doctor    what is installed, what is missing, which package brings it
    explain   how a call of given shapes would run
    compile   fill the disk cache for given shapes; needs no GPU
    emit      write a kernel's translation unit, for plain nvcc
    bench     time calls, against what the machine reaches in the same run

Results go to stdout. A user's error is one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib
import itertools
import json
import os
import platform
import re
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

import cumha
from cumha import compile as compiler
from cumha import masks, sources, tuning
from cumha.compile import CompileError, KernelSpec
from cumha.device import INSTALL_HINT, NAMED, Device, architecture, cuda_version, import_cupy
from cumha.errors import UnsupportedError
from cumha.paths import PATHS, SPLIT_BY, Request
from cumha.plan import decide, explain, kernel_spec, reduce_step
from cumha.problem import DTYPES, LAYOUTS, Problem, dense_vector_bytes, describe

PROGRAM = "python -m cumha"

#: The modules whose text decides what the kernels compute, beside the kernels themselves.
EMITTING_MODULES = ("masks", "plan", "tilings", "params", "compile", "launch")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    arguments : sequence of str, optional
        Command and options; default those of the process.

    Returns
    -------
    int
        Exit code: 0 done; 1 `doctor` found that kernels cannot run; 2 an error, told on stderr.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(arguments)
    options.arguments = arguments
    try:
        return int(options.run(options))
    except CompileError as error:
        print(f"{PROGRAM} {options.command}: {error}", file=sys.stderr)
    except (TypeError, ValueError, ArithmeticError, RuntimeError, OSError, MemoryError) as error:
        print(f"{PROGRAM} {options.command}: {_one_line(error)}", file=sys.stderr)
    return 2


def _one_line(error: BaseException) -> str:
    first, *rest = str(error).splitlines() or [type(error).__name__]
    return " ".join((first, "; ".join(line.strip() for line in rest))).strip()


# --- options --------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """argparse, but an error is one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM, description="Look at, compile and check masked multi-head attention."
    )
    parser.add_argument("--version", action="version", version=f"cumha {cumha.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, run, text in (
        ("doctor", _doctor, "say what is installed, what is missing and which package brings it"),
        ("explain", _explain, "say how a call of given shapes would run, without arrays"),
        ("compile", _compile, "fill the disk cache for given shapes; needs no GPU"),
        ("emit", _emit, "write a kernel's translation unit to a file that plain nvcc builds"),
        ("bench", _bench, "time a call, or a named suite of them, on the GPU or the host"),
    ):
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.set_defaults(run=run)
        if name != "doctor":
            _add_target(command, name)
            _add_sizes(command, several="+" if name == "compile" else None)
            _add_masks(command)
            _add_options(command, name)
        if name == "bench":
            _add_bench(command)
    return parser


def _add_target(command: argparse.ArgumentParser, name: str) -> None:
    group = command.add_argument_group("where", "default: the current GPU")
    if name == "bench":
        group.add_argument("--host", action="store_true", help="NumPy arrays, on the host")
        return
    choice = group.add_mutually_exclusive_group()
    choice.add_argument(
        "--device", metavar="NAME", help=f"a known GPU, present or not: {', '.join(sorted(NAMED))}"
    )
    if name == "explain":
        choice.add_argument("--host", action="store_true", help="NumPy arrays, on the host")
        return
    choice.add_argument(
        "--arch",
        nargs="+" if name == "compile" else None,
        help="architecture, such as sm_90a, or compute_90 for PTX",
    )
    group.add_argument(
        "--build",
        choices=("release", "lineinfo", "debug"),
        default=os.environ.get("CUMHA_BUILD", "release"),
        help="plain, with source lines, or for cuda-gdb (default: CUMHA_BUILD, else release)",
    )


def _add_sizes(command: argparse.ArgumentParser, several: str | None) -> None:
    """The flags for sizes; with `several`, those that change the kernel take several values."""
    group = command.add_argument_group("sizes", "defaults: one decode step of a common model")

    def number(flag: str, default: int | None, text: str, nargs: str | None = None) -> None:
        given: Any = [default] if nargs else default
        text = text if default is None else f"{text} (default {default})"
        group.add_argument(flag, type=int, metavar="N", nargs=nargs, default=given, help=text)

    number("--batch", 1, "batch entries")
    number("--heads", 32, "query heads")
    number("--heads-kv", None, "KV heads (default: as many as query heads)")
    number("--len-q", 1, "queries", several)
    number("--len-k", 4096, "keys")
    number("--head-dim", 128, "elements of a query and of a key", several)
    number("--head-dim-v", None, "elements of a value (default: as many as of a key)")
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        nargs=several,
        default=["float16"] if several else "float16",
        help="of q, k, v and out (default float16)",
    )


def _add_masks(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("masks", "several are and-ed")
    group.add_argument("--causal", action="store_true", help="causal=True")
    group.add_argument(
        "--window",
        type=int,
        nargs=2,
        metavar=("LEFT", "RIGHT"),
        help="masks.window(LEFT, RIGHT); -1 is open",
    )
    group.add_argument(
        "--mask",
        metavar="MODULE:NAME",
        help="import a mask, a boolean array or a function of (b, h, q, k)",
    )
    group.add_argument(
        "--key-lengths",
        nargs="?",
        const="int64",
        choices=("int32", "int64"),
        help="with key_lengths, of this dtype (int64 where none is named)",
    )


def _add_options(command: argparse.ArgumentParser, name: str) -> None:
    group = command.add_argument_group("options of the call")
    group.add_argument("--layout", choices=LAYOUTS, default="BHLD", help="default BHLD")
    group.add_argument(
        "--lse",
        nargs="?",
        const="yes",
        default="no",
        choices=("no", "yes", "both") if name == "compile" else ("no", "yes"),
        help="return_lse",
    )
    if name != "bench":
        group.add_argument(
            "--partial", action="store_true", help="partial_attention: gives a State"
        )
    group.add_argument("--path", choices=[p.name for p in PATHS], help="the path to take")
    if name in ("explain", "bench"):
        group.add_argument("--splits", type=int, metavar="N", help="parts of the keys")
        group.add_argument("--split-by", choices=SPLIT_BY, default="tiles", help="default tiles")
        group.add_argument("--keys-per-split", type=int, metavar="N", help="keys of a part")
    if name == "emit":
        group.add_argument(
            "-o", "--output", metavar="FILE", default="-", help="file to write (default: stdout)"
        )


def _add_bench(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("what is measured", "default: the call of the sizes above")
    group.add_argument("--suite", nargs="+", metavar="NAME", default=[], help=_suite_help())
    group.add_argument(
        "--set",
        action="append",
        metavar="NAME=VALUE",
        default=[],
        help="a setting of the kernel's build, as in --set tile_keys=96; may be repeated",
    )
    group.add_argument("--peers", nargs="+", metavar="NAME", default=[], help="compare with: torch")
    group.add_argument("--warmups", type=int, metavar="N", help="default 10, or the suite's own")
    group.add_argument("--repeats", type=int, metavar="N", help="default 100, or the suite's own")
    group.add_argument(
        "--parts",
        nargs="*",
        metavar="NAME",
        help="what to measure beside the kernel: ceilings, eager, end_to_end (default all, or the "
        "suite's own); none of them given is the quickest",
    )
    group = command.add_argument_group("reports", "the Markdown goes to stdout too")
    group.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write all numbers; until the end, those there are to FILE.partial",
    )
    group.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    group.add_argument(
        "--progress",
        action="store_true",
        help="a progress bar on stderr also where that is no terminal",
    )


def _suite_help() -> str:
    from cumha.bench.suites import SUITES

    return "; ".join(f"{suite.name}: {suite.about}" for suite in SUITES.values())


# --- from options to a problem --------------------------------------------------------------------


def _never_read(shape: tuple[int, ...], dtype: Any, layout: str) -> Any:
    """An array with the strides of a contiguous one and the memory of one element."""
    if min(shape) < 0:
        raise ValueError(f"sizes must not be negative, got {shape}")
    if layout == "BLHD":
        shape = (shape[0], shape[2], shape[1], shape[3])
    steps = itertools.accumulate((max(n, 1) for n in shape[:0:-1]), lambda x, y: x * y, initial=1)
    strides = [n * dtype.itemsize for n in steps][::-1]
    return np.lib.stride_tricks.as_strided(np.zeros(1, dtype), shape, strides, writeable=False)


def _mask(options: argparse.Namespace) -> Any:
    window = masks.window(*options.window) if options.window else None
    if options.mask is None:
        return window
    module, colon, name = options.mask.partition(":")
    if not colon:
        raise ValueError(f"--mask {options.mask}: need MODULE:NAME")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the user's module raises
        raise ValueError(f"--mask {options.mask} cannot be imported: {error}") from error
    if callable(found):
        found = masks.where(found)
    elif not isinstance(found, masks.Expr):
        found = masks.dense(found)
    return found if window is None else found & window


def _problem(options: argparse.Namespace, *, on_gpu: bool) -> tuple[Problem, masks.Expr | None]:
    """The problem that the options describe; of GPU arrays, though there need be no GPU."""
    if options.partial and options.lse != "no":
        raise ValueError("--partial gives a State, which holds no lse: leave --lse out")
    dtype = np.dtype(ml_dtypes.bfloat16 if options.dtype == "bfloat16" else options.dtype)
    heads_kv = options.heads if options.heads_kv is None else options.heads_kv
    dim_v = options.head_dim if options.head_dim_v is None else options.head_dim_v
    q, k, v = (
        _never_read((options.batch, heads, length, dim), dtype, options.layout)
        for heads, length, dim in (
            (options.heads, options.len_q, options.head_dim),
            (heads_kv, options.len_k, options.head_dim),
            (heads_kv, options.len_k, dim_v),
        )
    )
    lengths = np.full(options.batch, options.len_k) if options.key_lengths else None
    problem, arrays = describe(
        q, k, v, mask=_mask(options), causal=options.causal, key_lengths=lengths,
        layout=options.layout, return_lse=options.lse == "yes", store_state=options.partial,
    )  # fmt: skip
    out_vector = dense_vector_bytes(problem.head_dim_v, q.itemsize)
    vector = min(out_vector, dense_vector_bytes(problem.head_dim, q.itemsize))
    problem = dataclasses.replace(problem, vector=vector, out_vector=out_vector)
    if on_gpu:
        problem = dataclasses.replace(
            problem, library="cupy", device=0, key_lengths=options.key_lengths
        )
    return problem, arrays.mask


def _device(options: argparse.Namespace) -> Device:
    if options.device is not None:
        return Device.named(options.device)
    instead = "--host" if options.command == "explain" else "--arch, as in --arch sm_90a"
    try:
        return Device.current()
    except RuntimeError as error:
        raise RuntimeError(
            f"{_one_line(error)}. Name a GPU, as in --device h200, or give {instead}"
        ) from error


# --- explain, compile, emit -----------------------------------------------------------------------


def _explain(options: argparse.Namespace) -> int:
    request = Request.checked(
        options.splits, options.split_by, options.keys_per_split, options.path, None
    )
    device = None if options.host else _device(options)
    problem, mask = _problem(options, on_gpu=device is not None)
    print(explain(decide(problem, request, device), problem, mask))
    return 0


def _targets(options: argparse.Namespace) -> Iterator[tuple[Device, str]]:
    """What to build for: a device to plan for, and the architecture's name."""
    if options.arch is None:
        device = _device(options)
        number = 10 * device.compute_capability[0] + device.compute_capability[1]
        emitting = options.command == "emit"  # nvcc will build it: NVRTC need not know the GPU
        known = (number,) if emitting else compiler.supported_architectures()
        yield device, architecture(device.compute_capability, known)
        return
    for name in [options.arch] if isinstance(options.arch, str) else options.arch:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
        if not found:
            raise ValueError(f"--arch {name}: need a name like sm_90a or compute_90")
        capability = (int(found[2]), int(found[3]))
        known = compiler.supported_architectures() if options.command == "compile" else ()
        number = 10 * capability[0] + capability[1]
        if known and number not in known:
            version = ".".join(map(str, compiler.nvrtc_version()))
            builds = ", ".join(f"sm_{n}" for n in known)
            raise ValueError(f"--arch {name}: NVRTC {version} builds for {builds}")
        # Plain sm_90 is what people call the GPU; calls on it look for sm_90a.
        plain = found[1] == "sm" and not found[4]
        yield _like(capability), architecture(capability, (number,)) if plain else name


def _like(capability: tuple[int, int]) -> Device:
    """A known GPU of this capability, or the newest older one called by it."""
    known = sorted(NAMED.values(), key=lambda d: d.compute_capability)
    older = [d for d in known if d.compute_capability <= capability] or known[:1]
    return dataclasses.replace(older[-1], compute_capability=capability)


def _spec(options: argparse.Namespace, device: Device, arch: str) -> tuple[Problem, KernelSpec]:
    """The path's own kernel for one set of options."""
    return next(_specs(options, device, arch))


def _specs(
    options: argparse.Namespace, device: Device, arch: str
) -> Iterator[tuple[Problem, KernelSpec]]:
    """All kernels of a call, some twice: the planned one, then that with splits, that without.

    Longer or shorter sequences may be divided or not. Keys of a single tile never are, so that a
    call with so few has no kernel with splits.
    """
    problem, mask = _problem(options, on_gpu=True)
    path = options.path
    for splits in (None, 2, 1):
        request = Request.checked(splits, "tiles", None, path, None)
        try:
            choice = decide(problem, request, device)
        except UnsupportedError:
            if splits is None:
                raise
            continue  # a path without splits
        path = choice.path
        yield problem, kernel_spec(choice, problem, mask, arch=arch, build=options.build)
        step = reduce_step(choice, problem)
        if step is not None:
            yield problem, kernel_spec(*step, None, arch=arch, build=options.build)


def _variants(options: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """One set of options for each combination of those that may be several."""
    lse = ("no", "yes") if options.lse == "both" else (options.lse,)
    for dtype, head_dim, len_q, with_lse in itertools.product(
        options.dtype, options.head_dim, options.len_q, lse
    ):
        changed = {"dtype": dtype, "head_dim": head_dim, "len_q": len_q, "lse": with_lse}
        yield argparse.Namespace(**{**vars(options), **changed})


def _compile(options: argparse.Namespace) -> int:
    done: set[KernelSpec] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # an entry that cannot be kept
        for device, arch in _targets(options):
            for variant in _variants(options):
                for problem, spec in _specs(variant, device, arch):
                    if spec not in done:
                        print(_build_line(problem, spec), flush=True)
                    done.add(spec)
    info = compiler.cache_info()
    print(f"{len(done)} kernels; {info.directory} holds {info.entries}, {_size(info.bytes)}")
    return 0


def _build_line(problem: Problem, spec: KernelSpec) -> str:
    start = time.perf_counter()
    try:
        binary = compiler.build(spec)
    except RuntimeWarning as error:
        raise RuntimeError(_one_line(error)) from error
    took = (time.perf_counter() - start) * 1e3
    gives = "state" if problem.store_state else "out+lse" if problem.return_lse else "out"
    dim = f"{problem.head_dim}"
    dim += "" if problem.head_dim == problem.head_dim_v else f"->{problem.head_dim_v}"
    what = f"{spec.path:<12} {spec.arch:<10} {problem.dtype:<8} head_dim {dim:<8} "
    what += f"len_q {problem.len_q:<5} {gives:<8}"
    used = "PTX"
    if binary.registers is not None:
        used = f"{binary.registers} registers, {binary.spill_bytes} bytes spilled"
    return f"{what} {used}, {took:.0f} ms, {'cached' if binary.cached else 'built'}"


def _emit(options: argparse.Namespace) -> int:
    ((device, arch),) = _targets(options)
    _, spec = _spec(options, device, arch)
    unit = compiler.translation_unit(spec)
    if options.output == "-":
        print(compiler.flatten(unit), end="")
        return 0
    file = Path(options.output)
    text = compiler.flatten(dataclasses.replace(unit, name=file.name))
    file.write_text(text, encoding="utf-8")
    command = text.partition("\n")[0].removeprefix("// ")
    print(f"wrote {file}, entry {unit.entry}; build it there with\n  {command}")
    return 0


def _size(n: float) -> str:
    return f"{n / 1e6:.1f} MB" if n >= 1e5 else f"{n / 1e3:.1f} kB"


# --- bench ----------------------------------------------------------------------------------------


def _bench(options: argparse.Namespace) -> int:
    from cumha import bench

    for name in ("warmups", "repeats"):
        count = getattr(options, name)
        if count is not None and count < (1 if name == "repeats" else 0):
            raise ValueError(f"--{name} {count}: too few")
    if options.suite:
        _refuse_beside_suites(options)
    request = bench.Request(
        command=_repeatable(options.arguments),
        digest=verified_digest(),
        suites=tuple(options.suite),
        case=None if options.suite else _case(options),
        path=options.path,
        settings=_settings(options.set),
        host=options.host,
        warmups=options.warmups,
        repeats=options.repeats,
        parts=None if options.parts is None else tuple(options.parts),
        peers=tuple(options.peers),
    )
    bar = sys.stderr if options.progress or sys.stderr.isatty() else None
    with contextlib.ExitStack() as opened:
        partial = None
        if options.json is not None:
            lines = options.json.with_name(f"{options.json.name}.partial")
            partial = opened.enter_context(lines.open("w", encoding="utf-8"))
        text, document = bench.run(request, bar, partial)
    print(text, end="", flush=True)  # first: a file that cannot be written loses nothing
    for file, content in ((options.markdown, text), (options.json, document)):
        if file is not None:
            file.write_text(content, encoding="utf-8")
    if options.json is not None:
        lines.unlink()
    return 0


def _repeatable(arguments: Sequence[str]) -> str:
    """The command line without what only says where the report goes."""
    kept = [PROGRAM]
    rest = iter(arguments)
    for argument in rest:
        if argument in ("--json", "--markdown"):
            next(rest, None)
        elif not argument.startswith(("--json=", "--markdown=", "--progress")):
            kept.append(shlex.quote(argument))
    return " ".join(kept)


def _refuse_beside_suites(options: argparse.Namespace) -> None:
    """A suite brings its own sizes, masks and options; only the path may be chosen."""
    usual = _parser().parse_args(["bench"])
    for action in ("batch", "heads", "heads_kv", "len_q", "len_k", "head_dim", "head_dim_v",
                   "dtype", "causal", "window", "mask", "key_lengths", "layout", "lse", "splits",
                   "split_by", "keys_per_split"):  # fmt: skip
        if getattr(options, action) != getattr(usual, action):
            flag = f"--{action.replace('_', '-')}"
            raise ValueError(f"{flag} is for a single call: leave it or --suite out")


def _settings(given: Sequence[str]) -> dict[str, int]:
    """``NAME=VALUE`` as settings of `cumha.tuning`."""
    known = [field.name for field in dataclasses.fields(tuning.Tuning)]
    settings = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not value.isdecimal():
            raise ValueError(f"--set {text}: need NAME=VALUE, a whole number from 0 on")
        if name not in known:
            raise ValueError(f"--set {text}: unknown setting; known are {', '.join(known)}")
        settings[name] = int(value)
    return settings


def _case(options: argparse.Namespace) -> Any:
    """The call that the flags describe."""
    from cumha.bench import Case

    mask = _mask(options)
    window = "" if options.window is None else f"window({', '.join(map(str, options.window))})"
    _problem(argparse.Namespace(**vars(options), partial=False), on_gpu=False)  # checks the sizes
    return Case(
        name="call",
        batch=options.batch,
        heads_q=options.heads,
        heads_kv=options.heads if options.heads_kv is None else options.heads_kv,
        len_q=options.len_q,
        len_k=options.len_k,
        head_dim=options.head_dim,
        head_dim_v=options.head_dim if options.head_dim_v is None else options.head_dim_v,
        dtype=options.dtype,
        layout=options.layout,
        causal=options.causal,
        mask=mask,
        mask_name=" & ".join(filter(None, (options.mask, window))),
        key_lengths=options.len_k if options.key_lengths else None,
        length_dtype=options.key_lengths or "int64",
        return_lse=options.lse == "yes",
        path=options.path,
        splits=options.splits,
        split_by=options.split_by,
        keys_per_split=options.keys_per_split,
    )


# --- doctor ---------------------------------------------------------------------------------------


def verified_digest() -> str:
    """Return the SHA-256 of all that decides what the kernels compute, as hexadecimal digits.

    It covers the kernel sources and the text of the modules that emit code or fill the parameters;
    ``docs/verified.json`` keeps that of the sources that passed on a GPU.

    Raises
    ------
    RuntimeError, OSError
        The sources of kernels or modules cannot be read.
    """
    total = hashlib.sha256(sources.digest().encode())
    package = files("cumha")
    for module in EMITTING_MODULES:
        folder = package.joinpath(module)  # where the module is a package
        parts = folder.iterdir() if folder.is_dir() else [package.joinpath(f"{module}.py")]
        for file in sorted(parts, key=lambda f: f.name):
            if file.name.endswith(".py"):
                text = file.read_text(encoding="utf-8").encode()
                total.update(f"{module} {file.name} {len(text)}\n".encode() + text)
    return total.hexdigest()


def _doctor(options: argparse.Namespace) -> int:
    """Print what there is; a check that fails says so and the others go on."""
    broken = []
    told: dict[str, str] = {}
    for name, check, needed in (
        ("cumha", _check_cumha, False),
        ("numpy", _check_numpy, False),
        ("kernels", _check_kernels, True),
        ("verified", _check_verified, False),
        ("CuPy", _check_cupy, True),
        ("NVRTC", _check_nvrtc, True),
        ("headers", _check_headers, True),
        ("driver", _check_driver, True),
        ("GPU", _check_gpus, True),
        ("options", _check_options, False),
        ("trial", _check_trial, True),
        ("cache", _check_cache, False),
        ("emulation", _check_emulation, False),
    ):
        fine, text = _tried(check)
        new = told.setdefault(text, name) == name
        shown = text if new else f"see {told[text]}"
        print(f"  {'' if fine else '!':<2}{name:<10}{shown}", flush=True)
        if needed and not fine and new:
            broken.append(name)
    if not broken:
        print("kernels can run on this machine")
        return 0
    print(f"kernels cannot run here: see {', '.join(broken)}")
    print("NumPy arrays work without any of it: they take the host path")
    return 1


def _tried(check: Callable[[], str]) -> tuple[bool, str]:
    """Whether a check passed, and its text or the error's."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return True, check()
    except Exception as error:  # whatever a broken installation raises
        return False, _one_line(error)


def _check_cumha() -> str:
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return f"{cumha.__version__} in {Path(str(files('cumha')))}, {system}"


def _check_numpy() -> str:
    return f"{np.__version__}, ml_dtypes {ml_dtypes.__version__}"


def _check_kernels() -> str:
    return f"{len(sources.names())} sources in {sources.root()}"


def _check_verified() -> str:
    digest = verified_digest()
    record = Path(str(sources.root())).parent / "docs" / "verified.json"
    if not record.is_file():
        return f"no record here ({record} is missing); these sources are {digest[:12]}"
    entry = json.loads(record.read_text(encoding="utf-8"))
    when = f"{entry.get('gpu')}, driver {entry.get('driver')}, NVRTC {entry.get('nvrtc')}"
    when += f", {entry.get('date')}, {entry.get('passed')} passed"
    if entry.get("digest") == digest:
        return f"yes, {digest[:12]} on {when}"
    raise RuntimeError(
        f"these sources ({digest[:12]}) are not those that were verified "
        f"({str(entry.get('digest'))[:12]} on {when}): run the tests on a GPU"
    )


def _check_cupy() -> str:
    return str(import_cupy().__version__)


def _check_nvrtc() -> str:
    builds = ", ".join(f"{n // 10}.{n % 10}" for n in compiler.supported_architectures())
    return f"{'.'.join(map(str, compiler.nvrtc_version()))}, builds for {builds}"


def _check_headers() -> str:
    found = compiler.cuda_headers()
    return f"{cuda_version(found.version)} in {found.directory}"


def _check_driver() -> str:
    version = int(import_cupy().cuda.runtime.driverGetVersion())
    if version == 0:
        raise RuntimeError("missing: install NVIDIA's driver for the GPU (see nvidia-smi)")
    major = compiler.nvrtc_version()[0]
    if version // 1000 < major:
        raise RuntimeError(
            f"for CUDA {cuda_version(version)}, too old for NVRTC {major}: update it, or "
            f"{INSTALL_HINT}"
        )
    return f"for CUDA {cuda_version(version)}"


def _check_gpus() -> str:
    current = Device.current()
    count = int(import_cupy().cuda.runtime.getDeviceCount())
    return "; ".join(
        f"{'*' if index == current.index and count > 1 else ''}{_gpu(Device.of(index))}"
        for index in range(count)
    )


def _gpu(device: Device) -> str:
    return f"{device.name}, {device.sm_count} SMs, builds {compiler.target_architecture(device)}"


def _trial_spec() -> KernelSpec:
    """A small kernel for the current GPU; without one, for the newest that NVRTC knows."""
    try:
        device = Device.current()
    except Exception:  # whatever a broken installation raises; the line "GPU" has told it
        number = compiler.supported_architectures()[-1]
        device = _like((number // 10, number % 10))
    options = _parser().parse_args(["emit", "--head-dim", "64"])
    return _spec(options, device, compiler.target_architecture(device))[1]


def _check_options() -> str:
    return " ".join(compiler.translation_unit(_trial_spec()).options)


def _check_trial() -> str:
    """Build a kernel and, where there is a GPU, load it."""
    spec = _trial_spec()
    binary = compiler.build(spec)
    how = "from the cache" if binary.cached else f"in {binary.seconds:.2f} s"
    text = f"{spec.path} built for {spec.arch} {how}"
    try:
        index = Device.current().index
    except RuntimeError:
        return f"{text}; no GPU to load it on"
    compiler.load(spec, index)
    return f"{text} and loaded"


def _check_cache() -> str:
    info = compiler.cache_info()
    text = f"{info.directory}, {info.entries} entries, {_size(info.bytes)}"
    try:
        _try_to_write(info.directory)
    except OSError as error:
        raise RuntimeError(
            f"{text}, cannot be written ({error}): every process compiles its own kernels; "
            "set CUMHA_CACHE_DIR"
        ) from error
    return f"{text}, writable"


def _check_emulation() -> str:
    from cumha.emulate import host_compiler

    return f"kernels run on the CPU too, built by {host_compiler().version}"


def _try_to_write(directory: Path) -> None:
    """Write a file there; where the folder does not exist yet, ask for leave to make it."""
    if directory.exists():
        with tempfile.TemporaryFile(dir=directory):
            return
    parent = next(p for p in directory.parents if p.exists())
    if not parent.is_dir():
        raise NotADirectoryError(20, "not a folder", str(parent))
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(13, "permission denied", str(parent))
