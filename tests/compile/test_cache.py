"""The disk cache: where it is, what its key covers, and what happens to damaged entries."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cumha import cache, compile, sources
from cumha.compile import Binary, KernelSpec, TranslationUnit, translation_unit

SOURCE = '#include "rows.cuh"\nextern "C" __global__ void cumha_fill(float* x) { x[0] = ROWS; }\n'
HEADER = "#pragma once\n#include <cuda_fp16.h>\n#define ROWS 4\n"
SPEC = KernelSpec("fill", "sm_80", (("CUMHA_UNUSED", "1"),))


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of kernel sources and an empty cache; nothing compiled in memory."""
    root = tmp_path / "kernels"
    root.mkdir()
    (root / "fill.cu").write_text(SOURCE)
    (root / "rows.cuh").write_text(HEADER)
    monkeypatch.setattr(sources, "root", lambda: root)
    monkeypatch.setattr(compile, "_built", {})
    monkeypatch.setenv("CUMHA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", type(cache._warned)())
    return root


@pytest.fixture
def compiled(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A compiler of the tests' own that needs no NVRTC; the list names what it was asked for."""
    asked: list[str] = []

    def compiler(unit: TranslationUnit) -> Binary:
        asked.append(unit.name)
        return Binary(f"image {len(asked)}".encode(), "cubin", "log", 8, 0, 0, 16, 0.1)

    headers = compile.CudaHeaders(Path("/cuda/include"), 13050, "digest")
    monkeypatch.setattr(compile, "compile_unit", compiler)
    monkeypatch.setattr(compile, "nvrtc_version", lambda: (13, 5))
    monkeypatch.setattr(compile, "cuda_headers", lambda: headers)
    return asked


def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what this process has built, as a new one would not know it."""
    monkeypatch.setattr(compile, "_built", {})


def only_entry() -> Path:
    (entry,) = compile.cache_directory().glob(f"*{cache.ENTRY_SUFFIX}")
    return entry


# --- the directory


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {}, "/home/me/.cache/cumha"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/cumha"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/cumha"),
        ("linux", {"XDG_CACHE_HOME": "/xdg", "CUMHA_CACHE_DIR": "/mine"}, "/mine"),
        ("linux", {"CUMHA_CACHE_DIR": "~/mine"}, "/home/me/mine"),
        ("linux", {"CUMHA_CACHE_DIR": ""}, "/home/me/.cache/cumha"),
        ("darwin", {"XDG_CACHE_HOME": "/xdg"}, "/home/me/Library/Caches/cumha"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/cumha"),
        ("win32", {}, "/home/me/AppData/Local/cumha"),
    ],
)
@pytest.mark.skipif(os.name != "posix", reason="paths are spelled as on POSIX")
def test_where_the_cache_is(
    platform: str, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUMHA_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert compile.cache_directory() == Path(expected)


def test_the_cache_is_counted(compiled: list[str], tmp_path: Path) -> None:
    assert compile.cache_info() == compile.CacheInfo(tmp_path / "cache", 0, 0)
    compile.build(SPEC)
    compile.build(replace(SPEC, arch="sm_90a"))
    (tmp_path / "cache" / "README").write_text("not an entry")
    info = compile.cache_info()
    assert info.entries == 2
    entries = (tmp_path / "cache").glob("*.kernel")
    assert info.bytes == sum(entry.stat().st_size for entry in entries) > 0


# --- hits and misses


def test_a_second_process_reads_what_the_first_one_built(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compile.build(SPEC)
    assert not first.cached
    assert compile.build(SPEC) is first
    new_process(monkeypatch)
    assert compile.is_built(SPEC)
    second = compile.build(SPEC)
    assert second == first
    assert (second.cached, second.log, second.seconds) == (True, "log", 0.1)
    assert len(compiled) == 1
    assert only_entry().name.startswith("fill-sm_80-")


def edit(file: str, old: str, new: str) -> Callable[[Path, pytest.MonkeyPatch], KernelSpec]:
    def change(root: Path, monkeypatch: pytest.MonkeyPatch) -> KernelSpec:
        text = (root / file).read_text()
        assert old in text
        (root / file).write_text(text.replace(old, new))
        return SPEC

    return change


def other(**fields: Any) -> Callable[[Path, pytest.MonkeyPatch], KernelSpec]:
    return lambda root, monkeypatch: replace(SPEC, **fields)


def environment(name: str, value: Any) -> Callable[[Path, pytest.MonkeyPatch], KernelSpec]:
    def change(root: Path, monkeypatch: pytest.MonkeyPatch) -> KernelSpec:
        monkeypatch.setattr(compile, name, lambda: value)
        return SPEC

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(edit("fill.cu", "x[0]", "x[1]"), id="source"),
        pytest.param(edit("rows.cuh", "4", "5"), id="header"),
        pytest.param(other(arch="sm_86"), id="architecture"),
        pytest.param(other(arch="compute_80"), id="PTX"),
        pytest.param(other(defines=(("CUMHA_UNUSED", "2"),)), id="define"),
        pytest.param(other(build="lineinfo"), id="build"),
        pytest.param(environment("nvrtc_version", (13, 4)), id="NVRTC"),
        pytest.param(
            environment("cuda_headers", compile.CudaHeaders(Path("/"), 13040, "digest")),
            id="header package version",
        ),
        pytest.param(
            environment("cuda_headers", compile.CudaHeaders(Path("/"), 13050, "other")),
            id="header package text",
        ),
    ],
)
def test_whatever_the_compiler_reads_changes_the_key(
    change: Callable[[Path, pytest.MonkeyPatch], KernelSpec],
    kernels: Path,
    compiled: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile.build(SPEC)
    compile.build(change(kernels, monkeypatch))
    assert len(compiled) == 2
    assert compile.cache_info().entries == 2


def test_the_emitted_mask_is_in_the_key(kernels: Path, compiled: list[str]) -> None:
    (kernels / "fill.cu").write_text('#include "mask_emitted.cuh"\n' + SOURCE)
    for text in ("// causal\n", "// window\n"):
        compile.build(replace(SPEC, mask_source=text))
    assert len(compiled) == 2


def test_what_the_compiler_does_not_read_leaves_the_key_alone(
    kernels: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile.build(SPEC)
    (kernels / "other.cuh").write_text("#error not included\n")
    moved = compile.CudaHeaders(Path("/elsewhere"), 13050, "digest")
    monkeypatch.setattr(compile, "cuda_headers", lambda: moved)
    new_process(monkeypatch)
    assert compile.build(SPEC).cached
    assert len(compiled) == 1


def test_texts_that_join_to_the_same_bytes_have_different_keys(compiled: list[str]) -> None:
    unit = translation_unit(SPEC)
    keys = {
        compile.cache_key(replace(unit, source=source, headers=headers, options=options))
        for source, headers, options in [
            ("ab", {}, ("c", "d")),
            ("a", {}, ("bc", "d")),
            ("ab", {"c": "d"}, ()),
            ("ab", {"cd": ""}, ()),
            ("ab", {}, ("cd",)),
        ]
    }
    assert len(keys) == 5


# --- damage


def cut(data: bytes) -> bytes:
    return data[:-1]


def flip(position: int) -> Callable[[bytes], bytes]:
    def damage(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[position] ^= 1
        return bytes(changed)

    return damage


def claim_of_another_key(data: bytes) -> bytes:
    entry = cache.unpack(data)
    assert entry is not None
    return cache.pack({**entry[0], "key": "0" * 64}, b"another image")


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(cut, id="one byte short"),
        pytest.param(lambda data: data[:20], id="short header"),
        pytest.param(lambda data: data + b"\0", id="one byte long"),
        pytest.param(flip(0), id="magic"),
        pytest.param(flip(8), id="format version"),
        pytest.param(flip(12), id="length"),
        pytest.param(flip(60), id="metadata"),
        pytest.param(flip(-1), id="image"),
        pytest.param(lambda data: b"\x7fELF" + bytes(4000), id="foreign"),
        pytest.param(claim_of_another_key, id="entry of another key"),
    ],
)
def test_a_damaged_entry_is_silently_built_and_written_again(
    damage: Callable[[bytes], bytes], compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile.build(SPEC)
    entry = only_entry()
    sound = entry.read_bytes()
    assert damage(sound) != sound
    entry.write_bytes(damage(sound))
    new_process(monkeypatch)
    assert not compile.is_built(SPEC)
    rebuilt = compile.build(SPEC)
    assert (rebuilt.image, rebuilt.cached) == (b"image 2", False)
    new_process(monkeypatch)
    again = compile.build(SPEC)
    assert (again.image, again.cached) == (b"image 2", True)
    assert len(compiled) == 2


def test_every_single_damaged_byte_is_noticed() -> None:
    data = cache.pack({"key": "k"}, b"image")
    assert cache.unpack(data) == ({"key": "k"}, b"image")
    for position in range(len(data)):
        assert cache.unpack(flip(position)(data)) is None
        assert cache.unpack(data[:position]) is None


# --- a directory that does not serve


def test_a_directory_that_cannot_be_made_costs_one_warning(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUMHA_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.warns(RuntimeWarning, match=r"cannot be kept.*CUMHA_CACHE_DIR"):
        first = compile.build(SPEC)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile.build(replace(SPEC, arch="sm_90a"))
        assert compile.build(SPEC) is first
    assert compile.cache_info().entries == 0


def test_a_directory_that_cannot_be_written_is_still_read(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path, data: bytes) -> int:
        raise PermissionError(13, "Permission denied", str(self))

    compile.build(SPEC)
    new_process(monkeypatch)
    monkeypatch.setattr(Path, "write_bytes", refused)
    assert compile.build(SPEC).cached
    with pytest.warns(RuntimeWarning, match=r"cannot be kept.*Permission denied"):
        compile.build(replace(SPEC, arch="sm_90a"))
    assert len(compiled) == 2


def test_a_failed_write_leaves_no_file_behind(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        compile.build(SPEC)
    assert list(compile.cache_directory().iterdir()) == []


def test_without_a_home_directory_kernels_are_still_built(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("CUMHA_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.warns(RuntimeWarning, match="home directory"):
        assert compile.build(SPEC).image == b"image 1"


# --- the real compiler


@pytest.fixture
def nvrtc() -> tuple[int, int]:
    """The version of NVRTC; skips where it, CuPy or the CUDA headers are missing."""
    try:
        compile.cuda_headers()
        return compile.nvrtc_version()
    except RuntimeError as error:
        pytest.skip(str(error))


def other_process(root: Path) -> subprocess.Popen[str]:
    """Start a process that builds `SPEC` and prints: seconds, whether cached, digest of the image.

    Its imports, CuPy's and the load of NVRTC's library among them, are not in the seconds.
    """
    code = f"""
import hashlib, pathlib, time
from cupy.cuda import nvrtc
from cumha import compile, sources
nvrtc.getVersion()
sources.root = lambda: pathlib.Path({str(root)!r})
start = time.perf_counter()
binary = compile.build(compile.{SPEC!r})
print(time.perf_counter() - start, binary.cached, hashlib.sha256(binary.image).hexdigest())
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> tuple[float, bool, str]:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    seconds, cached, digest = out.split()
    return float(seconds), cached == "True", digest


def test_several_processes_at_once_agree_and_leave_one_entry(
    kernels: Path, nvrtc: tuple[int, int]
) -> None:
    answers = [answer(process) for process in [other_process(kernels) for _ in range(4)]]
    assert len({digest for _, _, digest in answers}) == 1
    assert not all(cached for _, cached, _ in answers)
    assert compile.build(SPEC).cached
    names = [entry.name for entry in compile.cache_directory().iterdir()]
    assert names == [only_entry().name]


def test_a_second_process_runs_no_compiler_and_takes_little_time(
    kernels: Path, nvrtc: tuple[int, int]
) -> None:
    image = compile.build(SPEC).image
    seconds = []
    for _ in range(3):
        took, cached, digest = answer(other_process(kernels))
        assert cached and digest == hashlib.sha256(image).hexdigest()
        seconds.append(took)
        if took < 0.1:
            return
        time.sleep(1)  # the machine may be busy with other tests
    pytest.fail(f"key, read and check took {seconds} s; at most 0.1 s is allowed")


def test_a_variant_compiles_cold_within_a_second(kernels: Path, nvrtc: tuple[int, int]) -> None:
    seconds = min(compile.compile_unit(translation_unit(SPEC)).seconds for _ in range(3))
    assert seconds < 1.0
