"""Device values, and what NVRTC is asked to build for each GPU."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from cumha import device
from cumha.device import Device, architecture
from cumha.errors import UnsupportedError

NVRTC_12_0 = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90)
NVRTC_12_9 = (*NVRTC_12_0, 100, 101, 103, 120, 121)
NVRTC_13_5 = (75, 80, 86, 87, 88, 89, 90, 100, 103, 107, 110, 120, 121)


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((7, 5), "sm_75"),
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_87"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((11, 0), "sm_110a"),
        ((12, 0), "sm_120a"),
        ((12, 1), "sm_121a"),
    ],
)
def test_a_known_gpu_gets_its_own_machine_code(capability: tuple[int, int], name: str) -> None:
    assert architecture(capability, NVRTC_13_5) == name


@pytest.mark.parametrize(
    ("capability", "supported", "name"),
    [
        ((10, 0), NVRTC_12_0, "compute_90"),
        ((12, 1), NVRTC_12_0, "compute_90"),
        ((13, 0), NVRTC_13_5, "compute_121"),
        ((8, 8), NVRTC_12_9, "compute_87"),  # not the newest known, which is newer
        ((11, 0), NVRTC_12_9, "compute_103"),
        ((7, 9), (75,), "compute_75"),
    ],
)
def test_a_gpu_that_nvrtc_does_not_know_gets_plain_ptx_that_runs_on_it(
    capability: tuple[int, int], supported: tuple[int, ...], name: str
) -> None:
    assert architecture(capability, supported) == name


@pytest.mark.parametrize("capability", [(7, 0), (6, 1), (0, 0)])
def test_too_old_a_gpu_is_refused_even_where_nvrtc_would_build(
    capability: tuple[int, int],
) -> None:
    with pytest.raises(UnsupportedError) as refused:
        architecture(capability, NVRTC_12_0)
    message = str(refused.value)
    assert f"{capability[0]}.{capability[1]}" in message
    assert "7.5" in message and "9.0" in message
    assert "\n" not in message


def test_a_gpu_older_than_all_that_nvrtc_builds_for_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"7\.5: .*builds for 8\.0, 9\.0, none") as refused:
        architecture((7, 5), (90, 80))
    assert "\n" not in str(refused.value)


def test_named_devices_are_whole() -> None:
    h200 = Device.named("H200")
    assert h200.compute_capability == (9, 0)
    assert h200.sm_count == 132
    assert h200.shared_memory_optin == 232448
    for name in ("t4", "a100", "rtx3090", "rtx4090", "h100", "h200", "b200", "rtx5090"):
        value = Device.named(name)
        assert value.shared_memory_optin <= value.shared_memory_per_sm
        assert value.l2_bytes > 0
        assert value.memory_bandwidth is not None and value.memory_bandwidth > 1e11
        assert architecture(value.compute_capability, NVRTC_13_5).startswith("sm_")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'gtx1080'.*a100.*t4"):
        Device.named("gtx1080")


def test_a_device_is_a_frozen_hashable_value() -> None:
    t4 = Device.named("t4")
    assert hash(t4) == hash(dataclasses.replace(t4))
    with pytest.raises(dataclasses.FrozenInstanceError):
        t4.sm_count = 1  # type: ignore[misc]


class FakeRuntimeError(RuntimeError):
    pass


def fake_cupy(current: Callable[[], int]) -> Any:
    """CuPy as `Device` sees it: one GPU with index 0."""
    attributes = {
        "MultiProcessorCount": 132,
        "MaxSharedMemoryPerBlockOptin": 232448,
        "MaxSharedMemoryPerMultiprocessor": 233472,
        "MaxRegistersPerMultiprocessor": 65536,
        "MaxThreadsPerMultiProcessor": 2048,
        "L2CacheSize": 62914560,
        "MemoryClockRate": 3201000,
        "GlobalMemoryBusWidth": 6144,
    }

    def of(index: int) -> Any:
        if index != 0:
            raise FakeRuntimeError("cudaErrorInvalidDevice")
        return types.SimpleNamespace(attributes=attributes)

    runtime = types.SimpleNamespace(
        getDevice=current,
        getDeviceProperties=lambda index: {"name": b"Fake", "major": 9, "minor": 0},
        CUDARuntimeError=FakeRuntimeError,
    )
    return types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime, Device=of))


@pytest.fixture
def forget_devices() -> Any:
    device._query.cache_clear()
    yield
    device._query.cache_clear()


@pytest.mark.usefixtures("forget_devices")
def test_the_current_device_is_read_from_cupy_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(lambda: 0))
    found = Device.current()
    assert (found.name, found.compute_capability, found.index) == ("Fake", (9, 0), 0)
    assert found.memory_bandwidth == pytest.approx(4.9e12, rel=0.01)
    assert Device.of(0) is found


@pytest.mark.usefixtures("forget_devices")
def test_no_gpu_and_no_such_gpu_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> int:
        raise FakeRuntimeError("cudaErrorInsufficientDriver")

    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(none))
    with pytest.raises(RuntimeError, match=r"no GPU .*InsufficientDriver.*cuda13.*cuda12"):
        Device.current()
    with pytest.raises(RuntimeError, match=r"GPU 3 .*InvalidDevice.*CUDA_VISIBLE_DEVICES"):
        Device.of(3)


@pytest.mark.usefixtures("forget_devices")
def test_without_cupy_the_extras_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match=r"CuPy cannot be imported.*cuda13.*cuda12"):
        Device.current()


def test_importing_the_modules_imports_no_cupy() -> None:
    code = (
        "import sys, cumha.device, cumha.compile, cumha.sources, cumha.cache\n"
        "print([m for m in ('cupy', 'cuda', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.gpu
def test_the_gpu_of_this_machine_is_described() -> None:
    found = Device.current()
    assert found.sm_count > 0
    assert found.compute_capability >= (7, 5)
    assert found.shared_memory_optin <= found.shared_memory_per_sm
    assert found.l2_bytes > 0
    assert Device.of(found.index) is found
