"""Translation units, NVRTC and its errors, and the flattened text; on kernels of the tests' own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cumha import compile, sources
from cumha.compile import CompileError, KernelSpec, TranslationUnit, translation_unit
from cumha.device import Device

CONFIG = """\
#pragma once
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include "numeric.cuh"
constexpr int kHeadDim = CUMHA_HEAD_DIM;
"""

NUMERIC = """\
#pragma once
__device__ inline float twice(float x) { return 2.0f * x; }
"""

SCALE = """\
// What the kernel computes.
#include "config.cuh"
#include "mask_emitted.cuh"
#include "numeric.cuh"

extern "C" __global__ void cumha_scale(float* x) {
  const int i = threadIdx.x;
  if (i < kHeadDim && keep(i)) x[i] = __half2float(__float2half(twice(x[i])));
}
"""

MASK = "__device__ inline bool keep(int k) { return k < 3; }\n"

SPEC = KernelSpec("scale", "sm_80", (("CUMHA_HEAD_DIM", "64"),), MASK)


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of kernel sources in place of the repository's, and no compiled kernel in memory."""
    root = tmp_path / "kernels"
    root.mkdir()
    for name, text in (("config.cuh", CONFIG), ("numeric.cuh", NUMERIC), ("scale.cu", SCALE)):
        (root / name).write_text(text)
    monkeypatch.setattr(sources, "root", lambda: root)
    monkeypatch.setattr(compile, "_built", {})
    monkeypatch.setattr(compile, "_loaded", {})
    monkeypatch.setenv("CUMHA_CACHE_DIR", str(tmp_path / "cache"))
    return root


@pytest.fixture
def nvrtc() -> tuple[int, int]:
    """The version of NVRTC; skips where it, CuPy or the CUDA headers are missing."""
    try:
        compile.cuda_headers()
        return compile.nvrtc_version()
    except RuntimeError as error:
        pytest.skip(str(error))


def unit_of(source: str, arch: str = "sm_80", **headers: str) -> TranslationUnit:
    return TranslationUnit(
        name="kernels_cu/scale.cu",
        entry="cumha_scale",
        arch=arch,
        source=source,
        headers={f"{name}.cuh": text for name, text in headers.items()},
        options=("--std=c++17", f"--gpu-architecture={arch}", "--ptxas-options=-v"),
    )


# --- the translation unit


def test_a_unit_holds_the_texts_that_the_source_reaches(kernels: Path) -> None:
    (kernels / "unrelated.cuh").write_text("#error not included\n")
    unit = translation_unit(SPEC)
    assert unit.name == "kernels_cu/scale.cu"
    assert unit.entry == "cumha_scale"
    assert unit.kind == "cubin"
    assert unit.source == '#define CUMHA_HEAD_DIM 64\n#line 1 "kernels_cu/scale.cu"\n' + SCALE
    assert unit.headers == {
        "config.cuh": '#line 1 "kernels_cu/config.cuh"\n' + CONFIG,
        "mask_emitted.cuh": '#line 1 "mask_emitted.cuh"\n' + MASK,
        "numeric.cuh": '#line 1 "kernels_cu/numeric.cuh"\n' + NUMERIC,
    }


def test_a_unit_is_pure_and_needs_no_cupy(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert translation_unit(SPEC) == translation_unit(replace(SPEC))


@pytest.mark.parametrize(
    ("build", "extra"), [("release", ()), ("lineinfo", ("-lineinfo",)), ("debug", ("-G",))]
)
def test_options_keep_denormals_and_use_no_fast_math(
    kernels: Path, build: Any, extra: tuple[str, ...]
) -> None:
    options = translation_unit(replace(SPEC, arch="sm_90a", build=build)).options
    assert options == (
        "--std=c++17",
        "--gpu-architecture=sm_90a",
        "--ftz=false",
        "--prec-div=true",
        "--prec-sqrt=true",
        "--fmad=true",
        "--ptxas-options=-v",
        *extra,
    )


def test_what_is_missing_is_named(kernels: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"'mistyped\.cu'.*config\.cuh.*scale\.cu"):
        translation_unit(replace(SPEC, path="mistyped"))
    (kernels / "scale.cu").write_text('#include "gone.cuh"\n')
    with pytest.raises(FileNotFoundError, match=r"'gone\.cuh'"):
        translation_unit(SPEC)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": "90"}, "arch is '90'"),
        ({"arch": "sm_90 -use_fast_math"}, "arch is"),
        ({"build": "fast"}, "build is 'fast'.*release, lineinfo, debug"),
        ({"defines": (("A B", "1"),)}, "define 'A B'"),
        ({"defines": (("A", "1\n#error"),)}, "one #define line"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SPEC, **change)


def test_kernels_include_no_cuda_header_that_the_key_does_not_cover() -> None:
    included = {
        line.split("<")[1].split(">")[0]
        for name in sources.names()
        for line in sources.read(name).splitlines()
        if line.lstrip().startswith("#") and "include" in line and "<" in line
    }
    assert included <= set(compile.CUDA_HEADERS)


# --- the CUDA headers


def test_headers_of_another_major_version_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in compile.CUDA_HEADERS:
        (tmp_path / name).write_text("")
    (tmp_path / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  12090\n")
    monkeypatch.setattr(compile, "nvrtc_version", lambda: (13, 5))
    monkeypatch.setattr(compile, "header_directories", lambda: iter([tmp_path / "no", tmp_path]))
    find = compile.cuda_headers.__wrapped__
    with pytest.raises(RuntimeError, match=r"13\.x.*No such file.*12\.9.*nvidia-cuda-runtime"):
        find()
    monkeypatch.setattr(compile, "nvrtc_version", lambda: (12, 4))
    assert find().directory == tmp_path
    assert find().version == 12090


def test_cuda_path_is_looked_into_where_no_package_has_the_headers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    monkeypatch.setenv("CUDA_PATH", "/toolkit")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert list(compile.header_directories()) == [Path("/toolkit/include")]


def test_nvrtc_that_does_not_load_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("libnvrtc.so.13 not found")

    fake = types.SimpleNamespace(
        cuda=types.SimpleNamespace(nvrtc=types.SimpleNamespace(getVersion=missing))
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    with pytest.raises(RuntimeError, match=r"libnvrtc\.so\.13.*nvidia-cuda-nvrtc.*cuda13"):
        compile._nvrtc.__wrapped__()


# --- NVRTC


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a"])
def test_a_cubin_is_whole_and_carries_its_resources(
    kernels: Path, nvrtc: tuple[int, int], arch: str, tmp_path: Path
) -> None:
    if int("".join(c for c in arch if c.isdigit())) not in compile.supported_architectures():
        pytest.skip(f"NVRTC {nvrtc[0]}.{nvrtc[1]} does not know {arch}")
    binary = compile.compile_unit(translation_unit(replace(SPEC, arch=arch)))
    assert binary.kind == "cubin"
    assert binary.image[:4] == b"\x7fELF"
    assert binary.registers is not None and 4 <= binary.registers <= 32
    assert (binary.spill_bytes, binary.stack_bytes, binary.shared_bytes) == (0, 0, 0)
    nvdisasm = find_tool("nvdisasm")
    if nvdisasm:  # which answers "invalid ELF file" to a cubin that lacks a byte
        file = tmp_path / "whole.cubin"
        file.write_bytes(binary.image)
        sass = subprocess.run([nvdisasm, file], capture_output=True, text=True, timeout=60)
        assert sass.returncode == 0, sass.stderr
        assert "cumha_scale" in sass.stdout


def find_tool(name: str) -> str | None:
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        return shutil.which(name)
    return find_nvidia_binary_utility(name) or shutil.which(name)


def test_a_gpu_that_nvrtc_does_not_know_gets_ptx(kernels: Path, nvrtc: tuple[int, int]) -> None:
    future = replace(Device.named("b200"), compute_capability=(99, 0))
    arch = compile.target_architecture(future)
    assert arch == f"compute_{max(compile.supported_architectures())}"
    binary = compile.compile_unit(translation_unit(replace(SPEC, arch=arch)))
    assert binary.kind == "ptx"
    assert binary.registers is None
    text = binary.image.decode()
    assert text.endswith("\0") and text.count("\0") == 1
    assert text[:-1].rstrip().endswith("}")
    assert f".target sm_{arch.removeprefix('compute_')}\n" in text
    assert ".ftz" not in text


def test_static_shared_memory_stack_and_spills_are_read(nvrtc: tuple[int, int]) -> None:
    greedy = """
    extern "C" __global__ void __launch_bounds__(1024, 2) cumha_scale(float* x, int n, int m) {
      __shared__ float tile[256];
      float r[96];
      #pragma unroll
      for (int i = 0; i < 96; ++i) r[i] = x[i * n];
      tile[threadIdx.x] = r[m & 1];
      __syncthreads();
      #pragma unroll
      for (int i = 0; i < 96; ++i) x[i * n + 1] = r[i] * tile[i] + r[95 - i];
    }
    """
    binary = compile.compile_unit(unit_of(greedy))
    assert binary.shared_bytes == 1024
    assert binary.spill_bytes is not None and binary.spill_bytes > 0
    assert binary.stack_bytes is not None and binary.stack_bytes > 0
    assert binary.registers is not None and binary.registers <= 32


def test_line_info_and_debug_builds_name_the_repository_file(
    kernels: Path, nvrtc: tuple[int, int]
) -> None:
    for build in ("lineinfo", "debug"):
        binary = compile.compile_unit(translation_unit(replace(SPEC, build=build)))
        assert b"scale.cu" in binary.image
        assert binary.registers is not None and binary.registers > 0
    release = compile.compile_unit(translation_unit(SPEC))
    assert b"scale.cu" not in release.image


def test_denormals_are_kept(nvrtc: tuple[int, int]) -> None:
    source = 'extern "C" __global__ void cumha_scale(float* x) { x[0] = x[1] * x[2]; }\n'
    options = (*translation_options(), "--gpu-architecture=compute_80")
    binary = compile.compile_unit(replace(unit_of(source, "compute_80"), options=options))
    assert b"mul.f32" in binary.image


def translation_options() -> tuple[str, ...]:
    return ("--std=c++17", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--fmad=true")


@pytest.mark.parametrize(
    ("file", "old", "new", "location"),
    [
        ("scale.cu", "twice(", "thrice(", "kernels_cu/scale.cu:8"),
        ("numeric.cuh", "float x)", "flaot x)", "kernels_cu/numeric.cuh:2"),
        ("config.cuh", "CUMHA_HEAD_DIM", "CUMHA_HEAD_DEM", "kernels_cu/config.cuh:5"),
    ],
)
def test_an_error_names_file_line_options_and_version(
    kernels: Path, nvrtc: tuple[int, int], file: str, old: str, new: str, location: str
) -> None:
    path = kernels / file
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(CompileError) as refused:
        compile.build(SPEC)
    error = refused.value
    message = str(error)
    assert error.location == location
    assert message.startswith(f"{location}: ")
    assert new.rstrip("( x)") in error.log
    assert f"NVRTC {nvrtc[0]}.{nvrtc[1]} could not build cumha_scale for sm_80" in message
    assert "--gpu-architecture=sm_80" in message and "-I" in message
    assert compile.cache_info().entries == 0


def test_an_error_in_the_generated_mask_names_it(kernels: Path, nvrtc: tuple[int, int]) -> None:
    with pytest.raises(CompileError) as refused:
        compile.build(replace(SPEC, mask_source="\n\nbool keep(;\n"))
    assert refused.value.location == "mask_emitted.cuh:3"


def test_an_option_that_nvrtc_refuses_is_shown(nvrtc: tuple[int, int]) -> None:
    unit = unit_of("", "sm_13")
    with pytest.raises(CompileError, match=r"(?s)gpu-architecture.*options: .*sm_13") as refused:
        compile.compile_unit(unit)
    assert refused.value.location == "kernels_cu/scale.cu"


def test_threads_that_want_one_kernel_compile_it_once(
    kernels: Path, nvrtc: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    plain = compile.compile_unit

    def counting(unit: TranslationUnit) -> compile.Binary:
        compiled.append(unit)
        return plain(unit)

    monkeypatch.setattr(compile, "compile_unit", counting)
    results: list[compile.Binary] = []
    threads = [
        threading.Thread(target=lambda: results.append(compile.build(SPEC))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1
    assert len(results) == 8 and all(binary is results[0] for binary in results)


# --- loading, on a made-up driver


class FakeDriverError(RuntimeError):
    pass


def fake_cupy(load: Callable[[bytes], None]) -> Any:
    class Module:
        def load(self, image: bytes) -> None:
            load(image)

        def get_function(self, name: str) -> str:
            return f"function {name}"

    class CudaDevice:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    return types.SimpleNamespace(
        cuda=types.SimpleNamespace(
            Module=Module,
            Device=CudaDevice,
            driver=types.SimpleNamespace(CUDADriverError=FakeDriverError),
            runtime=types.SimpleNamespace(CUDARuntimeError=FakeDriverError),
        )
    )


def test_a_kernel_is_loaded_once_per_device(
    kernels: Path, nvrtc: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    images: list[bytes] = []
    monkeypatch.setattr(compile, "import_cupy", lambda: fake_cupy(images.append))
    assert compile.loaded(SPEC, 0) is None
    assert not compile.is_built(SPEC)
    first = compile.load(SPEC, 0)
    assert compile.is_built(SPEC)
    assert compile.loaded(SPEC, 0) is first is compile.load(replace(SPEC), 0)
    assert compile.loaded(SPEC, 1) is None
    second = compile.load(SPEC, 1)
    assert second.binary is first.binary
    assert first.function == "function cumha_scale"
    assert images == [first.binary.image] * 2


def test_code_that_the_driver_refuses_is_explained(
    kernels: Path, nvrtc: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(image: bytes) -> None:
        raise FakeDriverError("CUDA_ERROR_NO_BINARY_FOR_GPU")

    monkeypatch.setattr(compile, "import_cupy", lambda: fake_cupy(refuse))
    with pytest.raises(RuntimeError, match=r"device 0 .*sm_80 .*NO_BINARY_FOR_GPU.*driver"):
        compile.load(SPEC, 0)
    assert compile.loaded(SPEC, 0) is None


@pytest.mark.gpu
@pytest.mark.parametrize("build", ["release", "lineinfo", "debug"])
def test_a_kernel_runs_from_nvrtc_and_from_the_cache(kernels: Path, build: Any) -> None:
    import cupy

    device = Device.current()
    spec = replace(SPEC, arch=compile.target_architecture(device), build=build)
    for cached in (False, True):
        kernel = compile.load(spec, device.index)
        assert kernel.binary.cached is cached
        x = cupy.arange(64, dtype=cupy.float32)
        kernel.function((1,), (64,), (x,))
        assert x[:5].tolist() == [0, 2, 4, 3, 4]
        compile._loaded.clear()
        compile._built.clear()


@pytest.mark.gpu
def test_ptx_for_an_older_gpu_runs(kernels: Path) -> None:
    import cupy

    device = Device.current()
    kernel = compile.load(replace(SPEC, arch="compute_75"), device.index)
    x = cupy.arange(64, dtype=cupy.float32)
    kernel.function((1,), (64,), (x,))
    assert x[:5].tolist() == [0, 2, 4, 3, 4]


# --- the flattened text


def preprocess(text: str, tmp_path: Path) -> list[str]:
    """What a preprocessor leaves of a text without CUDA's headers: its lines, blank ones out."""
    compiler = shutil.which("cpp")
    if compiler is None:
        pytest.skip("no C preprocessor on PATH")
    file = tmp_path / "flat.cu"
    file.write_text(text)
    done = subprocess.run(
        [compiler, "-P", "-xc++", file], capture_output=True, text=True, check=True, timeout=60
    )
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def test_flatten_inlines_each_header_once_and_keeps_names_and_lines(kernels: Path) -> None:
    text = compile.flatten(translation_unit(SPEC))
    assert text.startswith("// nvcc -cubin --std=c++17 --gpu-architecture=sm_80 ")
    assert text.splitlines()[0].endswith("-o scale.cubin scale.cu")
    assert '#include "' not in text and "#pragma once" not in text
    assert "#include <cuda_fp16.h>" in text
    assert text.count("float twice(") == 1
    lines = text.splitlines()
    after_config = lines.index('#line 3 "kernels_cu/scale.cu"')
    assert lines[after_config + 1] == '#line 1 "mask_emitted.cuh"'
    assert '#line 5 "kernels_cu/config.cuh"' in lines


def test_flatten_of_ptx_gives_a_ptx_command(kernels: Path) -> None:
    text = compile.flatten(translation_unit(replace(SPEC, arch="compute_90")))
    assert text.startswith("// nvcc -ptx --std=c++17 --gpu-architecture=compute_90 ")


def test_flatten_inlines_again_what_an_if_may_have_skipped(tmp_path: Path) -> None:
    source = '#if 0\n#include "a.cuh"\n#endif\n#include "a.cuh"\n#include "a.cuh"\n'
    flat = compile.flatten(unit_of(source, a="#pragma once\nint a;\n"))
    assert preprocess(flat, tmp_path) == ["int a;"]


def test_flatten_repeats_a_header_without_pragma_once(tmp_path: Path) -> None:
    flat = compile.flatten(unit_of('#include "a.cuh"\n#include "a.cuh"\n', a="ROW(1)\n"))
    assert preprocess(flat, tmp_path) == ["ROW(1)", "ROW(1)"]


def test_flatten_ends_on_headers_that_include_each_other(tmp_path: Path) -> None:
    mutual = {
        "a": '#pragma once\n#include "b.cuh"\nint a;\n',
        "b": '#pragma once\n#include "a.cuh"\nint b;\n',
    }
    for source in ('#include "a.cuh"\n', '#if 1\n#include "a.cuh"\n#endif\n'):
        assert preprocess(compile.flatten(unit_of(source, **mutual)), tmp_path) == [
            "int b;",
            "int a;",
        ]
    with pytest.raises(ValueError, match=r"a\.cuh -> a\.cuh"):
        compile.flatten(unit_of('#include "a.cuh"\n', a='#include "a.cuh"\n'))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_plain_nvcc_builds_the_flattened_text(kernels: Path, tmp_path: Path, arch: str) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on PATH")
    (tmp_path / "scale.cu").write_text(compile.flatten(translation_unit(replace(SPEC, arch=arch))))
    command = [nvcc, "-cubin", f"-arch={arch}", "-std=c++17", "scale.cu"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "scale.cubin").read_bytes()[:4] == b"\x7fELF"


def test_the_command_in_the_flattened_text_works(kernels: Path, tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")
    text = compile.flatten(translation_unit(SPEC))
    (tmp_path / "scale.cu").write_text(text)
    command = text.splitlines()[0].removeprefix("// ").split()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "scale.cubin").read_bytes()[:4] == b"\x7fELF"
