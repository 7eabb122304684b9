"""The wrappers around PTX: their host bodies do what a GPU does, and NVRTC takes the PTX ones.

Kernel, cases and expectations are in tests/gpu/wrapper_kernels.py.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cumha import compile as compiler_module
from cumha import emulate


def _load() -> Any:
    """The module beside the tests: a script too, so no package holds it."""
    file = Path(__file__).parents[1] / "gpu" / "wrapper_kernels.py"
    spec = importlib.util.spec_from_file_location("wrapper_kernels", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["wrapper_kernels"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


wrapper_kernels = _load()
CASES = {case.name: case for case in wrapper_kernels.cases()}


@pytest.fixture(scope="module")
def emulated(compiler: str, cases: Callable[..., Any]) -> Callable[..., np.ndarray]:
    """Runs a case in the emulation, by the settings in force."""
    unit = wrapper_kernels.unit("sm_90a")
    entry = (
        '\nextern "C" void cumha_emulate_entry(const void* params) {\n'
        f"  {unit.entry}(*static_cast<const cumha::Params*>(params));\n}}\n"
    )
    source = f'#include "emulate.hpp"\n{compiler_module.flatten(unit)}{entry}'
    kernels: dict[str, emulate.EmulatedKernel] = {}

    def run(case: Any) -> np.ndarray:
        checks = emulate.settings().checks
        if checks not in kernels:
            kernels[checks] = emulate.load_source("wrappers", source, checks)
        out = np.full(case.words, 0xCCCCCCCC, np.uint32)
        addresses = [x.__array_interface__["data"][0] for x in (case.given, out)]
        memory = [
            emulate.Memory("in", addresses[0], addresses[0] + case.given.nbytes),
            emulate.Memory("out", addresses[1], addresses[1] + out.nbytes, writable=True),
        ]
        params = wrapper_kernels.pack(*addresses, case.numbers)
        grid, block = (case.grid, 1, 1), (case.block, 1, 1)
        emulate.run(kernels[checks], grid, block, params, memory, case.shared_bytes)
        return out

    return run


@pytest.fixture(scope="module")
def gpu_run() -> Iterator[Any]:
    """Runs a case on the GPU; the kernel is built once."""
    return wrapper_kernels.gpu_runner()


@pytest.mark.parametrize("checks", ["all", "none"])
@pytest.mark.parametrize("name", CASES)
def test_emulated(emulated: Any, name: str, checks: str) -> None:
    for seed in range(2):
        with emulate.using(checks=checks, seed=seed):
            CASES[name].check(emulated(CASES[name]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_gpu(gpu_run: Any, name: str) -> None:
    CASES[name].check(gpu_run(CASES[name]))


def test_copies_are_carried_out_by_their_wait(emulated: Any) -> None:
    """Nothing of a group is there before."""
    case = wrapper_kernels.groups_case(peek=True)
    with emulate.using(checks="none"):
        case.check(emulated(case))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_emulated_products_round_once(emulated: Any, dtype: str) -> None:
    """Summed in double: whole numbers are exact, and no result is off by more than its rounding."""
    case = CASES[f"mma {dtype}, whole numbers"]
    given = case.given.reshape(-1, 32, 10)
    with emulate.using(checks="none"):
        out = emulated(case).view(np.float32).reshape(-1, 32, 4)
    assert (out == np.round(out)).all()
    assert (out != given[:, :, 6:].view(np.float32)).any()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nvrtc_builds(arch: str) -> None:
    """The PTX of every wrapper is accepted; instructions are looked up in PTX for one of them."""
    pytest.importorskip("cupy")
    try:
        known = compiler_module.supported_architectures()
    except RuntimeError as error:
        pytest.skip(str(error))
    if int(arch.strip("sma_")) not in known:
        pytest.skip(f"NVRTC {compiler_module.nvrtc_version()} does not know {arch}")
    binary = compiler_module.compile_unit(wrapper_kernels.unit(arch))
    assert binary.kind == "cubin"
    assert binary.spill_bytes == 0


def test_nvrtc_emits_the_instructions() -> None:
    pytest.importorskip("cupy")
    try:
        ptx = compiler_module.compile_unit(wrapper_kernels.unit("compute_80")).image.decode()
    except RuntimeError as error:
        pytest.skip(str(error))
    for text in (
        "cp.async.cg.shared.global",
        "cp.async.ca.shared.global",
        "cp.async.commit_group",
        "cp.async.wait_group 3",
        "bar.sync",
        "bar.arrive",
        *(f"ldmatrix.sync.aligned.m8n8.x{n}.shared.b16" for n in (1, 2, 4)),
        *(f"ldmatrix.sync.aligned.m8n8.x{n}.trans.shared.b16" for n in (1, 2, 4)),
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    ):
        assert text in ptx, text
