"""``python -m cumha``: what it prints, its exit codes, what it does on a broken installation."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cumha import cli, compile, masks, sources

DECODE = ["--heads", "32", "--heads-kv", "8", "--len-q", "1", "--len-k", "4096"]


@pytest.fixture
def nvrtc() -> None:
    """Skips where NVRTC, CuPy or the CUDA headers are missing."""
    try:
        compile.cuda_headers()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python without CuPy, whatever this machine has."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    for cached in (compile._nvrtc, compile.nvrtc_version, compile.cuda_headers):
        monkeypatch.setattr(compile, cached.__name__, cached.__wrapped__)
    versions = compile.supported_architectures.__wrapped__
    monkeypatch.setattr(compile, "supported_architectures", versions)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command in this process."""
    try:
        code = cli.main(arguments)
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    return code, *capsys.readouterr()


def in_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cumha", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


# --- explain


def test_explain_plans_for_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "explain", "--batch", "1", *DECODE, "--head-dim", "128", "--dtype", "float16",
        "--causal", "--device", "h200",
    )  # fmt: skip
    assert code == 0
    assert "Problem(cupy float16 BHLD, batch 1, heads 32:8, len_q 1, len_k 4096, " in out
    assert "gemv on NVIDIA H200 (sm_90, 132 SMs)" in out
    assert "128 blocks x 256 threads" in out
    assert "splits      up to 16, equal tiles" in out
    assert "workspace   266240 bytes" in out
    assert "4 query heads per KV head" in out
    assert "not host    it takes NumPy arrays" in out
    assert "masked" not in out  # one query row sees all: no test is left of a causal mask


def test_explain_plans_the_path_and_splits_that_are_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(capsys, "explain", *DECODE, "--device", "h200", "--splits", "2")
    assert code == 0
    assert "gemv on" in out and "splits      up to 2, equal tiles" in out
    code, out, _ = run(capsys, "explain", *DECODE, "--device", "h200", "--path", "naive")
    assert code == 0
    assert "naive on NVIDIA H200" in out and "8 blocks x 128 threads" in out
    assert "not gemv    path='naive' was asked for" in out
    code, out, _ = run(capsys, "explain", "--len-q", "100", "--device", "h200")
    assert code == 0
    assert "tiled on NVIDIA H200" in out and "x len_q 100 are above 16 rows" in out


def test_explain_plans_for_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "explain", "--host", "--len-q", "100", "--window", "127", "-1", "--key-lengths",
        "--layout", "BLHD", "--lse", "--dtype", "bfloat16", "--head-dim-v", "64", "--splits", "3",
    )  # fmt: skip
    assert code == 0
    assert "Problem(numpy bfloat16 BLHD, batch 1, heads 32, len_q 100, len_k 4096" in out
    assert "head_dim 128->64" in out and "key_lengths" in out
    assert "mask        (((q + (len_k - len_q)) - 127) <= k)" in out
    assert "path        host" in out
    assert "splits      up to 3, equal tiles" in out


def test_explain_needs_no_memory(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", "--host", "--batch", "10000", "--len-k", str(10**10))
    assert code == 0
    assert "len_k 10000000000" in out


def test_the_problem_is_that_of_contiguous_arrays(capsys: pytest.CaptureFixture[str]) -> None:
    from cumha.problem import describe

    arguments = ["explain", "--host", "--batch", "2", "--heads", "4", "--heads-kv", "2"]
    arguments += ["--len-q", "3", "--len-k", "5", "--head-dim", "8", "--layout", "BLHD"]
    found, _ = cli._problem(cli._parser().parse_args(arguments), on_gpu=False)
    q, k = np.zeros((2, 3, 4, 8), np.float16), np.zeros((2, 5, 2, 8), np.float16)
    wanted, _ = describe(q, k, k, layout="BLHD")
    for name in ("q_strides", "k_strides", "v_strides", "batch", "heads_q", "heads_kv", "len_k"):
        assert getattr(found, name) == getattr(wanted, name), name


def test_explain_takes_a_mask_from_a_module(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules,
        "my_masks",
        types.SimpleNamespace(
            near=lambda b, h, q, k: abs(q - k) < 7,
            early=masks.causal("top_left"),
            block=np.ones((1, 1, 6, 9), bool),
            nothing="text",
        ),
    )
    sizes = ["--host", "--len-q", "6", "--len-k", "9"]
    for name, shown in (("near", "< 7"), ("early", "(k <= q)"), ("block", "array<bool")):
        code, out, _ = run(capsys, "explain", *sizes, "--mask", f"my_masks:{name}")
        assert code == 0
        assert shown in out
    code, out, _ = run(capsys, "explain", *sizes, "--mask", "my_masks:near", "--window", "3", "0")
    assert code == 0 and "< 7" in out and "- 3" in out
    for name, message in (
        ("my_masks:gone", "no attribute 'gone'"),
        ("my_masks", "MODULE:NAME"),
        ("not_there:x", "No module named 'not_there'"),
        ("my_masks:nothing", "dense needs"),
    ):
        code, _, err = run(capsys, "explain", *sizes, "--mask", name)
        assert code == 2
        assert message in err


@pytest.mark.usefixtures("no_gpu")
def test_explain_without_a_gpu_says_how_to_name_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "explain")
    assert code == 2
    assert "CuPy cannot be imported" in err and "cumha[cuda13]" in err
    assert "--device h200" in err and "--host" in err
    assert err.count("\n") == 1


# --- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "command"),
        (["dance"], "dance"),
        (["explain", "--device", "gtx"], "unknown device 'gtx'; known are a100"),
        (["explain", "--device", "h200", "--host"], "not allowed with"),
        (["explain", "--host", "--heads", "3", "--heads-kv", "2"], "multiple of the KV heads"),
        (["explain", "--host", "--head-dim", "wide"], "invalid int value: 'wide'"),
        (["explain", "--host", "--head-dim", "0"], "at least 1"),
        (
            ["explain", "--host", "--head-dim", "600"],
            "gemv: .* limit of 256.*tiled: .* limit of 256.*naive: .* limit of 512.*host: .*512",
        ),
        (["explain", "--host", "--len-q", "-1"], "must not be negative"),
        (["explain", "--host", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["explain", "--host", "--window", "-2", "0"], "-1 .open. or at least 0, got -2"),
        (["explain", "--host", "--splits", "0"], "splits must be at least 1"),
        (["explain", "--host", "--splits", "2", "--keys-per-split", "9"], "leave the other out"),
        (["explain", "--host", "--lse", "--partial"], "leave --lse out"),
        (["explain", "--device", "h200", "--path", "host"], "it takes NumPy arrays"),
        (
            ["explain", "--device", "h200", "--path", "naive", "--splits", "2"],
            "nothing to split",
        ),
        (
            ["explain", "--device", "h200", "--dtype", "float64", "--splits", "2"],
            "gemv: dtype float64.*tiled: dtype float64.*nothing to split",
        ),
        (["explain", "--host", "--batch", str(10**30)], "too large"),
        (["emit", "--arch", "quick"], "need a name like sm_90a"),
        (["emit", "--arch", "sm_61"], r"6\.1.*7\.5"),
        (["emit", "--arch", "sm_80", "-o", "/not/there/x.cu"], "No such file"),
    ],
    ids=" ".join,
)
def test_an_error_is_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("python -m cumha")
    assert err.count("\n") == 1 and err.endswith("\n")
    assert re.search(message, err), err


def test_an_error_of_the_module_itself_is_no_traceback() -> None:
    done = in_process("explain", "--host", "--head-dim", "0")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("python -m cumha explain: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["doctor", "explain", "compile", "emit", "bench"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert f"python -m cumha {command}" in out
    code, out, _ = run(capsys, "--help")
    assert code == 0 and command in out


# --- compile


@pytest.mark.usefixtures("nvrtc")
def test_compile_fills_the_cache_that_calls_look_into(tmp_path: Path) -> None:
    arguments = ["compile", "--device", "h200", "--head-dim", "64", "--causal"]
    arguments += ["--len-q", "1", "17", "--lse", "both", "--dtype", "float16", "bfloat16"]
    done = in_process(*arguments, CUMHA_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    # for each dtype and lse: both paths with splits and without, and one merge
    paths = [line.split()[0] for line in lines]
    counts = {path: paths.count(path) for path in paths}
    assert counts == {"gemv": 8, "tiled": 8, "split_reduce": 4}
    assert all("sm_90a" in line and line.endswith("built") for line in lines)
    assert all("0 bytes spilled" in line and " ms, " in line for line in lines)
    assert sum("out+lse" in line for line in lines) == 10
    assert last.startswith(f"20 kernels; {tmp_path} holds 20, ")
    again = in_process(
        "compile", "--arch", "sm_90", "--head-dim", "64", "--causal", CUMHA_CACHE_DIR=str(tmp_path)
    )
    *lines, _ = again.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["gemv", "split_reduce", "gemv"]
    for line in lines:
        assert line.endswith("cached") and "sm_90a" in line  # what a call on that GPU asks for


@pytest.mark.usefixtures("nvrtc")
def test_compile_names_partial_calls_and_ptx(tmp_path: Path) -> None:
    done = in_process(
        "compile", "--arch", "compute_80", "sm_80", "--partial", "--key-lengths", "int32",
        "--head-dim", "32", "--head-dim-v", "16", CUMHA_CACHE_DIR=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *lines, _ = done.stdout.splitlines()
    assert len(lines) == 6
    first, second = lines[0], lines[3]
    assert "compute_80" in first and "state" in first and "PTX" in first and "32->16" in first
    assert "sm_80" in second and "registers" in second


@pytest.mark.usefixtures("nvrtc")
def test_compile_refuses_what_nvrtc_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "compile", "--arch", "sm_990")
    assert code == 2
    assert "--arch sm_990: NVRTC" in err and "sm_90" in err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("nvrtc")
def test_compile_fails_where_nothing_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = in_process(
        "compile", "--arch", "sm_80", CUMHA_CACHE_DIR=str(tmp_path / "file" / "below")
    )
    assert done.returncode == 2
    assert "cannot be kept" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.usefixtures("no_gpu")
def test_compile_without_nvrtc_names_the_extra(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "compile", "--arch", "sm_80")
    assert code == 2
    assert "cumha[cuda13]" in err and err.count("\n") == 1


# --- emit


@pytest.mark.usefixtures("no_gpu")
def test_emit_needs_neither_gpu_nor_nvrtc(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.cu"
    call = ["--causal", "--len-q", "17"]
    code, out, _ = run(capsys, "emit", "--device", "h200", *call, "-o", str(file))
    assert code == 0
    assert str(file) in out and "cumha_tiled" in out
    text = file.read_text()
    assert text.startswith("// nvcc -cubin --std=c++17 --gpu-architecture=sm_90a ")
    assert text.partition("\n")[0].endswith(" -o mine.cubin mine.cu")
    assert '#include "' not in text
    assert "cumha_tiled(const __grid_constant__" in text
    code, out, _ = run(capsys, "emit", "--arch", "sm_90", *call)
    assert code == 0
    assert out.partition("\n")[2] == text.partition("\n")[2].replace("mine.cu", "tiled.cu")


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("gemv", "--arch sm_80"),
        ("tiled", "--arch sm_90a --causal --window 5 0 --len-q 17 --key-lengths"),
        ("naive", "--arch compute_75 --dtype float64 --partial --build lineinfo"),
        ("naive", "--device b200 --dtype bfloat16 --lse --head-dim 300"),
        ("naive", "--arch sm_80 --path naive"),
    ],
)
def test_plain_nvcc_builds_what_is_emitted(
    path: str, options: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")
    arguments = options.split()
    code, out, err = run(capsys, "emit", *arguments, "-o", str(tmp_path / "kernel.cu"))
    assert code == 0, err
    command = out.splitlines()[1].split()
    assert command[0] == "nvcc"
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    built = tmp_path / ("kernel.ptx" if "compute_75" in arguments else "kernel.cubin")
    assert f"cumha_{path}".encode() in built.read_bytes()


# --- doctor


class FakeRuntimeError(RuntimeError):
    pass


def fake_cupy(driver: int, devices: int) -> Any:
    """CuPy with a driver and H200s; kernels load."""
    attributes = {
        "MultiProcessorCount": 132,
        "MaxSharedMemoryPerBlockOptin": 232448,
        "MaxSharedMemoryPerMultiprocessor": 233472,
        "MaxRegistersPerMultiprocessor": 65536,
        "MaxThreadsPerMultiProcessor": 2048,
        "L2CacheSize": 62914560,
    }

    def current() -> int:
        if not devices:
            raise FakeRuntimeError("cudaErrorNoDevice")
        return 0

    return types.SimpleNamespace(
        __version__="14.9",
        cuda=types.SimpleNamespace(
            runtime=types.SimpleNamespace(
                getDevice=current,
                getDeviceCount=lambda: devices,
                driverGetVersion=lambda: driver,
                getDeviceProperties=lambda index: {"name": b"Fake H200", "major": 9, "minor": 0},
                CUDARuntimeError=FakeRuntimeError,
            ),
            Device=lambda index: types.SimpleNamespace(attributes=attributes),
        ),
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A made-up machine: CuPy, NVRTC 13.5 and its headers; call it with driver and GPUs."""
    from cumha import device

    binary = compile.Binary(b"image", "cubin", "", 40, 0, 0, 0, 0.25)
    headers = compile.CudaHeaders(Path("/cuda/include"), 13050, "digest")
    monkeypatch.setattr(compile, "nvrtc_version", lambda: (13, 5))
    monkeypatch.setattr(compile, "supported_architectures", lambda: (75, 80, 90, 120))
    monkeypatch.setattr(compile, "cuda_headers", lambda: headers)
    monkeypatch.setattr(compile, "build", lambda spec: binary)
    monkeypatch.setattr(compile, "load", lambda spec, index: None)
    monkeypatch.setenv("CUMHA_CACHE_DIR", str(tmp_path / "cache"))

    def set_up(driver: int, devices: int) -> None:
        monkeypatch.setitem(sys.modules, "cupy", fake_cupy(driver, devices))

    device._query.cache_clear()
    yield set_up
    device._query.cache_clear()


def test_doctor_on_a_sound_machine(machine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    machine(13000, 2)
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "CuPy      14.9" in out
    assert "NVRTC     13.5, builds for 7.5, 8.0, 9.0, 12.0" in out
    assert "headers   13.5 in /cuda/include" in out
    assert "driver    for CUDA 13.0" in out
    assert "*Fake H200, 132 SMs, builds sm_90a; Fake H200" in out
    assert "--gpu-architecture=sm_90a --ftz=false" in out
    assert "gemv built for sm_90a in 0.25 s and loaded" in out
    assert "cache, 0 entries, 0.0 kB, writable" in out
    assert "kernels can run on this machine" in out
    warned = [line.split()[1] for line in out.splitlines() if line.startswith("  ! ")]
    assert set(warned) <= {"verified", "emulation"}  # not run since a change; no compiler here


@pytest.mark.parametrize(
    ("driver", "devices", "messages"),
    [
        (0, 0, ["! driver    missing", "! GPU ", "see driver, GPU", "no GPU to load it on"]),
        (12080, 1, ["! driver    for CUDA 12.8, too old for NVRTC 13", "cumha[cuda12]"]),
        (13000, 0, ["! GPU       no GPU available: cudaErrorNoDevice", "cannot run here: see GPU"]),
    ],
    ids=["no driver", "old driver", "no GPU"],
)
def test_doctor_says_what_is_missing(
    machine: Any,
    capsys: pytest.CaptureFixture[str],
    driver: int,
    devices: int,
    messages: list[str],
) -> None:
    machine(driver, devices)
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    for message in [*messages, "kernels cannot run", "NumPy arrays work"]:
        assert message in out


@pytest.mark.usefixtures("no_gpu")
def test_doctor_without_cupy_names_the_extra_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "! CuPy      CuPy cannot be imported" in out
    assert out.count("cumha[cuda13]") == 1
    assert "kernels cannot run here: see CuPy\n" in out
    assert "NumPy arrays work" in out


def test_doctor_survives_any_failure(
    machine: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> Any:
        raise AttributeError("half an installation")

    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace())  # without a version or cuda
    for name in ("nvrtc_version", "supported_architectures", "cuda_headers", "build", "cache_info"):
        monkeypatch.setattr(compile, name, broken)
    monkeypatch.setattr(sources, "root", broken)
    code, out, err = run(capsys, "doctor")
    assert code == 1
    assert "half an installation" in out
    assert err == ""
    assert len(out.splitlines()) == 15


def test_doctor_tells_a_missing_nvrtc_package(
    machine: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise RuntimeError("NVRTC cannot be loaded; it comes with nvidia-cuda-nvrtc")

    machine(13000, 1)
    monkeypatch.setattr(compile, "nvrtc_version", missing)
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "! NVRTC     NVRTC cannot be loaded; it comes with nvidia-cuda-nvrtc" in out
    assert "! driver    see NVRTC" in out


def test_doctor_tries_the_cache_directory(
    machine: Any,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(13000, 1)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUMHA_CACHE_DIR", str(tmp_path / "file" / "below"))
    code, out, _ = run(capsys, "doctor")
    assert code == 0  # kernels run, only more slowly
    assert "! cache" in out and "cannot be written" in out and "CUMHA_CACHE_DIR" in out
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (None, "verified  no record here"),
        ({"digest": "same"}, "verified  yes, "),
        ({"digest": "0" * 64}, "! verified  these sources ("),
        ("{", "! verified  "),
        ([], "! verified  "),
    ],
    ids=["absent", "same", "other", "damaged", "not an object"],
)
def test_doctor_compares_the_sources_with_the_verified_ones(
    record: Any,
    message: str,
    machine: Any,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = tmp_path / "kernels_cu"
    shutil.copytree(str(sources.root()), root)
    monkeypatch.setattr(sources, "root", lambda: root)
    if record is not None:
        (tmp_path / "docs").mkdir()
        if record == {"digest": "same"}:
            record = {
                "digest": cli.verified_digest(), "gpu": "NVIDIA H200", "driver": "580.1",
                "nvrtc": "13.5", "date": "2025-01-31", "passed": 77,
            }  # fmt: skip
        text = record if isinstance(record, str) else json.dumps(record)
        (tmp_path / "docs" / "verified.json").write_text(text)
    machine(13000, 1)
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert message in out
    if isinstance(record, dict) and "gpu" in record:
        assert "on NVIDIA H200, driver 580.1, NVRTC 13.5, 2025-01-31, 77 passed" in out


def test_the_verified_digest_covers_kernels_and_what_emits_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "cumha"
    shutil.copytree(Path(cli.__file__).parent, package)
    root = tmp_path / "kernels_cu"
    shutil.copytree(str(sources.root()), root)
    before = cli.verified_digest()
    monkeypatch.setattr(cli, "files", lambda name: package)
    monkeypatch.setattr(sources, "root", lambda: root)
    assert cli.verified_digest() == before
    seen = {before}
    (package / "host.py").write_text("another host path\n")
    assert cli.verified_digest() == before
    for file in (
        package / "masks" / "rules.py",
        package / "launch.py",
        root / "naive.cu",
        root / "keys.cuh",
    ):
        file.write_text(file.read_text() + "\n")
        seen.add(cli.verified_digest())
    assert len(seen) == 5


def test_doctor_as_a_process() -> None:
    done = in_process("doctor")
    assert done.returncode in (0, 1), done.stderr
    assert done.stderr == ""
    assert ("kernels can run" in done.stdout) == (done.returncode == 0)
