"""Choosing emulation: settings, compiler and headers, cache and builds, and the public calls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cumha
from cumha import cache, emulate, masks

EMULATED = {"path": "naive", "backend": "emulate"}


def problem(
    len_q: int = 3, len_k: int = 6, dim: int = 8, dtype: Any = np.float32
) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    shapes = ((2, 2, len_q, dim), (2, 1, len_k, dim), (2, 1, len_k, dim))
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def close(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


# --- settings -------------------------------------------------------------------------------------


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHECKS", "SEED", "WORKERS", "DEVICE"):
        monkeypatch.delenv(f"CUMHA_EMULATE_{name}", raising=False)
    assert emulate.settings() == emulate.Settings("all", 0, 0, "h200")


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMHA_EMULATE_CHECKS", "none")
    monkeypatch.setenv("CUMHA_EMULATE_SEED", "17")
    monkeypatch.setenv("CUMHA_EMULATE_WORKERS", "3")
    monkeypatch.setenv("CUMHA_EMULATE_DEVICE", "a100")
    assert emulate.settings() == emulate.Settings("none", 17, 3, "a100")
    with emulate.using(seed=1):
        assert emulate.settings() == emulate.Settings("none", 1, 3, "a100")


@pytest.mark.parametrize("name", ["SEED", "WORKERS"])
def test_environment_wants_whole_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"CUMHA_EMULATE_{name}", "many")
    with pytest.raises(ValueError, match=rf"CUMHA_EMULATE_{name}.*'many'"):
        emulate.settings()


def test_unknown_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    match = "checks is 'some': use one of all, none, sanitizers"
    with pytest.raises(ValueError, match=match), emulate.using(checks="some"):
        pass
    monkeypatch.setenv("CUMHA_EMULATE_CHECKS", "some")
    with pytest.raises(ValueError, match=match):
        emulate.settings()


def test_unknown_setting() -> None:
    with pytest.raises(TypeError, match="cheques"), emulate.using(cheques="all"):
        pass


def test_unknown_device() -> None:
    with emulate.using(device="z80"), pytest.raises(ValueError, match="z80"):
        cumha.plan(*problem(), **EMULATED)


def test_using_nests_and_ends() -> None:
    before = emulate.settings()
    with emulate.using(seed=1, checks="none") as outer:
        assert emulate.settings() is outer
        with pytest.raises(ZeroDivisionError), emulate.using(seed=2) as inner:
            assert inner == emulate.Settings("none", 2, before.workers, before.device)
            raise ZeroDivisionError
        assert emulate.settings() is outer
    assert emulate.settings() == before


def test_using_is_for_its_own_thread() -> None:
    seen = []
    with emulate.using(seed=4):
        thread = threading.Thread(target=lambda: seen.append(emulate.settings().seed))
        thread.start()
        thread.join()
    assert seen == [0]


# --- compiler and headers -------------------------------------------------------------------------


@pytest.fixture
def searching() -> Iterator[None]:
    """The compiler is looked for anew, before the test and after it."""
    emulate.host_compiler.cache_clear()
    yield
    emulate.host_compiler.cache_clear()


@pytest.mark.usefixtures("searching")
def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RuntimeError, match=r"g\+\+ or clang\+\+ on PATH.*CXX.*package g\+\+"):
        emulate.host_compiler()
    with pytest.raises(RuntimeError, match=r"g\+\+ or clang\+\+"):
        cumha.attention(*problem(dim=7), **EMULATED)
    assert cumha.plan(*problem(), **EMULATED).path == "naive"  # plans need none


@pytest.mark.usefixtures("searching")
def test_compiler_named_by_the_environment(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    link = tmp_path / "my-compiler"
    link.symlink_to(str(shutil.which(compiler)))
    monkeypatch.setenv("CXX", str(link))
    assert emulate.host_compiler().command == str(link)


@pytest.mark.usefixtures("searching")
def test_compiler_that_cannot_fill_unset_variables(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """g++ 11: kernels are built all the same."""
    script = tmp_path / "old-compiler"
    refuse = 'case "$*" in *auto-var-init*) exit 1;; esac'
    script.write_text(f'#!/bin/sh\n{refuse}\nexec {shutil.which(compiler)} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("CUMHA_CACHE_DIR", str(tmp_path))
    assert emulate.host_compiler().unset_flags == ()
    q, k, v = problem(dim=9)
    close(cumha.attention(q, k, v, **EMULATED), cumha.attention(q, k, v))


@pytest.mark.usefixtures("searching")
@pytest.mark.parametrize(
    ("header", "package"),
    [
        ("cuda_fp16.h", "nvidia-cuda-runtime"),
        ("crt/host_defines.h", "nvidia-cuda-crt"),
        ("nv/target", "nvidia-cuda-cccl"),
    ],
)
def test_missing_headers(
    compiler: str, header: str, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("cuda_fp16.h", "crt/host_defines.h", "nv/target"):
        if name != header:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
    monkeypatch.setattr(emulate, "header_directories", lambda: iter([tmp_path]))
    monkeypatch.setattr(emulate, "_bundled_cccl", lambda: iter(()))
    with pytest.raises(RuntimeError, match=rf"{header} not found.*{package};.*cumha\[emulate\]"):
        emulate.host_compiler()


@pytest.mark.usefixtures("searching")
@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_only_on_linux(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(RuntimeError, match=f"emulated on Linux only, this is {platform}"):
        emulate.host_compiler()


def test_refused_source(compiler: str) -> None:
    with pytest.raises(RuntimeError, match=r"refused the kernel:(.|\n)*kernels_cu/bad\.cu:7"):
        emulate.load_source("bad", '#include "emulate.hpp"\n#line 7 "kernels_cu/bad.cu"\nnonsense')


def test_sanitizers_need_their_runtime(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    match = r"LD_PRELOAD=\S*(libasan|clang_rt\.asan)\S* ASAN_OPTIONS=detect_leaks=0"
    with emulate.using(checks="sanitizers"), pytest.raises(RuntimeError, match=match):
        cumha.attention(*problem(), **EMULATED)


def test_places_without_addr2line(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "addr2line, of the package binutils" in emulate._source_line(Path("kernel.so"), 0x40)


# --- cache and builds -----------------------------------------------------------------------------

# Runs a small problem in a process of its own; prints how often the compiler was called, and bits.
SCRIPT = """
import sys
import numpy as np
import cumha
from cumha import emulate
calls, run = [], emulate._run
emulate._run = lambda arguments: (calls.append(arguments), run(arguments))
q = np.arange(40, dtype=np.float32).reshape(1, 1, 8, 5) / 40
out = cumha.attention(q, q, q, path="naive", backend="emulate")
print(len(calls), out.tobytes().hex())
"""


def in_new_process(directory: Path) -> tuple[int, str]:
    environment = {**os.environ, "CUMHA_CACHE_DIR": str(directory)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    calls, bits = done.stdout.split()
    return int(calls), bits


def test_disk_cache(compiler: str, tmp_path: Path) -> None:
    """The second process does not compile; a damaged entry is built again, alone."""
    cumha.attention(*problem(), **EMULATED)  # the part that all kernels share is in the cache
    runtimes = list(cache.cache_directory().glob("emulate-runtime-*"))
    assert runtimes
    for entry in runtimes:
        shutil.copy(entry, tmp_path)
    calls, bits = in_new_process(tmp_path)
    assert calls == 2  # compile, link
    assert in_new_process(tmp_path) == (0, bits)
    (entry,) = tmp_path.glob("naive-emulated-*")
    data = bytearray(entry.read_bytes())
    for damaged in (data[: len(data) // 2], data[:-1] + bytes([data[-1] ^ 1]), b""):
        entry.write_bytes(damaged)
        assert in_new_process(tmp_path) == (2, bits)
        assert entry.read_bytes() != damaged
    assert in_new_process(tmp_path) == (0, bits)


def test_kernel_is_loaded_once(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cumha.attention(*problem(), **EMULATED)
    monkeypatch.setattr(emulate, "load_source", None)  # must not be called again
    cumha.attention(*problem(len_q=4, len_k=9), **EMULATED)


def test_checks_are_builds_of_their_own(compiler: str) -> None:
    q, k, v = problem()
    results = []
    for checks in ("all", "none"):
        with emulate.using(checks=checks):
            results.append(cumha.attention(q, k, v, **EMULATED))
    np.testing.assert_array_equal(*results)


def test_debug_build(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[str] = []
    run = emulate._run

    def seen(arguments: list[str]) -> None:
        flags.extend(arguments)
        run(arguments)

    monkeypatch.setattr(emulate, "_run", seen)
    monkeypatch.setenv("CUMHA_BUILD", "debug")
    q, k, v = problem(dim=3)
    close(cumha.attention(q, k, v, **EMULATED), cumha.attention(q, k, v))
    assert "-O0" in flags
    assert any(flag.startswith("-g") for flag in flags)


# --- the public calls -----------------------------------------------------------------------------


def test_never_chosen_by_itself() -> None:
    assert cumha.plan(*problem()).choice.backend == "host"


def test_plan_and_explain(compiler: str) -> None:
    q, k, v = problem()
    assert cumha.plan(q, k, v, backend="emulate", causal=True).path == "gemv"
    plan = cumha.plan(q, k, v, path="naive", backend="emulate", causal=True)
    assert plan.path == "naive"
    assert plan.workspace_bytes == 0
    text = plan.explain()
    assert "naive on the CPU, emulating" in text
    assert "sm_90" in text
    assert "3 blocks x 128 threads" in text
    assert "it runs on backend 'host', 'emulate' was asked for" in text
    close(plan.run(q, k, v), cumha.attention(q, k, v, causal=True))
    with emulate.using(device="a100"):
        assert "sm_80" in cumha.plan(q, k, v, backend="emulate").explain()


def test_host_path_is_not_emulated() -> None:
    with pytest.raises(cumha.UnsupportedError, match=r"runs on backend 'host', 'emulate' was as"):
        cumha.attention(*problem(), path="host", backend="emulate")


def test_splits_are_refused_as_on_a_gpu() -> None:
    with pytest.raises(cumha.UnsupportedError, match="nothing to split"):
        cumha.attention(*problem(), splits=2, **EMULATED)


def test_cupy_arrays_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Array:
        """What the checks ask of a CuPy array."""

        def __init__(self, x: np.ndarray) -> None:
            self.dtype, self.shape, self.strides = x.dtype, x.shape, x.strides
            self.ndim, self.size, self.itemsize = x.ndim, x.size, x.itemsize
            self.device = types.SimpleNamespace(id=0)
            self.data = types.SimpleNamespace(ptr=x.ctypes.data)

    module = types.ModuleType("cupy")
    module.ndarray = Array  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", module)
    h200 = cumha.device.Device.named("h200")
    monkeypatch.setattr("cumha.api.device_of", lambda problem, request: h200)
    arrays = problem()
    match = r"emulation takes NumPy arrays, got cupy: move them with \.get\(\)"
    with pytest.raises(cumha.UnsupportedError, match=match):
        cumha.attention(*(Array(x) for x in arrays), backend="emulate")


def test_partial_attention(compiler: str) -> None:
    q, k, v = problem(len_k=9)
    mask = masks.causal()
    parts = []
    for lo, hi in ((0, 4), (4, 4), (4, 9)):
        options: dict[str, Any] = {"mask": mask, "key_offset": lo, "total_keys": 9}
        given = (q, k[:, :, lo:hi], v[:, :, lo:hi])
        state = cumha.partial_attention(*given, **options, **EMULATED)
        expected = cumha.partial_attention(*given, **options)
        for got, wanted in zip(state.finish(), expected.finish(), strict=True):
            close(got, wanted)
        parts.append(state)
    out, lse = cumha.merge(*parts).finish()
    expected_out, expected_lse = cumha.attention(q, k, v, mask=mask, return_lse=True)
    close(out, expected_out)
    close(lse, expected_lse)


def outputs(kind: str) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """A view for out [2, 2, 3, 8], one for lse [2, 2, 3], and the buffers that they lie in."""
    if kind == "gaps":
        buffers = [np.full((4, 3, 9, 20), 7, np.float32), np.full((2, 5, 6), 7, np.float32)]
        return buffers[0][1:3, :2, ::4, 3:19:2], buffers[1][:, 1::3, ::2], buffers
    if kind == "reversed":
        buffers = [np.full((2, 2, 3, 8), 7, np.float32), np.full((2, 2, 3), 7, np.float32)]
        return buffers[0][::-1, :, ::-1, ::-1], buffers[1][:, ::-1, ::-1], buffers
    buffers = [np.full((8, 3, 2, 2), 7, np.float32), np.full((3, 2, 2), 7, np.float32)]
    return buffers[0].T, buffers[1].T, buffers


@pytest.mark.parametrize("kind", ["gaps", "reversed", "transposed"])
def test_output_views(compiler: str, kind: str) -> None:
    q, k, v = problem()
    out, lse, buffers = outputs(kind)
    got = cumha.attention(q, k, v, out=out, lse=lse, return_lse=True, **EMULATED)
    assert got[0] is out
    assert got[1] is lse
    expected = cumha.attention(q, k, v, return_lse=True)
    for view, buffer, wanted in zip((out, lse), buffers, expected, strict=True):
        close(view, wanted)
        view[...] = 7
        assert (buffer == 7).all(), "something around the view was written"


@pytest.mark.parametrize("shape", [(0, 6), (3, 0)])
def test_empty_problems(compiler: str, shape: tuple[int, int]) -> None:
    q, k, v = problem(*shape)
    out, lse = cumha.attention(q, k, v, return_lse=True, **EMULATED)
    assert out.shape == q.shape
    assert not out.any()
    assert (lse == -np.inf).all()


def test_strides_between_elements_are_refused(compiler: str) -> None:
    """A GPU could not have them either."""
    raw = np.zeros((2, 2, 3, 8), [("x", np.float32), ("y", np.uint8)])
    _, k, v = problem()
    with pytest.raises(ValueError, match="q has byte strides"):
        cumha.attention(raw["x"], k, v, **EMULATED)
