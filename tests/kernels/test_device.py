"""Rows of the contract that only kernels have: device-side numbers, extents, streams, graphs.

The first two hold for emulated kernels too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cumha
from cumha import emulate, masks, testing
from cumha.testing import normal, qkv


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture
def stream(cupy: Any) -> Any:
    """A stream that does not wait for the default one; capturing needs such a one."""
    return cupy.cuda.Stream(non_blocking=True)


def bits(x: Any) -> bytes:
    return np.ascontiguousarray(testing.to_host(x)).tobytes()


def moved(*arrays: np.ndarray) -> list[Any]:
    """Copies on the device, complete before any stream looks at them."""
    import cupy

    result = [testing.to_device(np.ascontiguousarray(x)) for x in arrays]
    cupy.cuda.Device().synchronize()
    return result


class Busy:
    """Keeps a stream busy for some tens of milliseconds without any kernel of its own."""

    def __init__(self) -> None:
        import cupy

        self.nbytes = 2**28
        self.block = cupy.empty(2 * self.nbytes, np.uint8)
        self.half = self.block.data + self.nbytes

    def on(self, stream: Any) -> None:
        for _ in range(400):
            self.block.data.copy_from_device_async(self.half, self.nbytes, stream)


# -- arrays ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int64"])
@pytest.mark.parametrize("kind", testing.VIEWS)
def test_to_device_builds_the_same_view(kind: str, dtype: str) -> None:
    values = normal(2, 3, 5, 7).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    with np.errstate(invalid="ignore"):  # the NaN between the elements, as integers
        x = testing.view(values, kind)
    there = testing.to_device(x)
    assert there.strides == x.strides
    assert str(there.dtype) == dtype
    back = testing.to_host(there)
    assert back.strides == x.strides
    assert bits(back) == bits(x)


@pytest.mark.gpu
def test_read_back_brings_the_surroundings_too() -> None:
    buffer = np.arange(100, dtype=np.float32)
    inside = buffer[11:60:3]
    there = testing.to_device(inside)
    there.fill(-1)
    buffer[...] = 0
    testing.read_back(there, inside)
    wanted = np.arange(100, dtype=np.float32)
    wanted[11:60:3] = -1
    assert bits(buffer) == bits(wanted)


def test_arrays_of_two_libraries_are_refused(gpu: Any) -> None:
    q, k, v = qkv()
    with pytest.raises(TypeError, match=r"one library.*cupy\.asarray"):
        cumha.attention(gpu.move(q), k, v)
    with pytest.raises(TypeError, match="mask array"):
        cumha.attention(*(gpu.move(x) for x in (q, k, v)), mask=np.ones((5, 7), bool))
    with pytest.raises(TypeError, match="out"):
        cumha.attention(*(gpu.move(x) for x in (q, k, v)), out=np.empty_like(q))


def test_results_are_allocated_through_cupys_allocator(gpu: Any, cupy: Any) -> None:
    asked = []

    def allocator(nbytes: int) -> Any:
        asked.append(nbytes)
        return cupy.get_default_memory_pool().malloc(nbytes)

    arrays = moved(*qkv())
    with cupy.cuda.using_allocator(allocator):
        cumha.attention(*arrays, return_lse=True, path=gpu.path)
    assert len(asked) == 2
    assert asked[0] >= arrays[0].nbytes


def test_diagnose_takes_cupy_arrays(gpu: Any) -> None:
    q, k, v = (gpu.move(x) for x in qkv(2, 4, 2, 9, 11, 16))
    mask = gpu.move(masks.key_padding(np.arange(11) < np.array([[9], [4]])))
    found = testing.diagnose(q, k, v, mask=mask, causal=True)
    assert found.ok, found


# -- device-side numbers --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int32", "int64"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("column", [False, True])
def test_device_numbers_lengths_are_clamped(
    kernel: Any, kind: str, causal: bool, column: bool
) -> None:
    """Wrong lengths give the answer of the nearest right ones, never an illegal access."""
    info = np.iinfo(kind)
    lengths = np.array([0, 7, 11, 12, -1, 2**30, info.min, info.max], kind)
    q, k, v = qkv(8, 4, 2, 5, 11, 16)
    table = np.full((8, 3), 4, kind)
    table[:, 1] = lengths
    given = table[:, 1] if column else lengths
    got = kernel.with_device_lengths(q, k, v, given, causal=causal)
    clamped = np.clip(lengths.astype(np.int64), 0, 11)
    testing.expect(q, k, v, key_lengths=clamped, causal=causal).check(*got)


@pytest.mark.parametrize("kind", ["int16", "uint32", "uint64", "float32", "bool"])
def test_device_numbers_of_other_types_are_refused(gpu: Any, kind: str) -> None:
    arrays = [gpu.move(x) for x in qkv(2)]
    with pytest.raises(TypeError, match=r"int32 or int64"):
        cumha.attention(*arrays, key_lengths=gpu.move(np.ones(2, kind)))


def test_device_numbers_look_up_indices_are_clamped(kernel: Any) -> None:
    """Emulated kernels report them, unless told not to."""
    q, k, v = qkv(2, 2, 2, 5, 11, 16)
    keep = np.random.default_rng(2).random((2, 7)) < 0.5
    table = masks.array(keep)
    steps = 2**20
    mask = masks.where(lambda b, h, q, k: table[b * 5 - h, k * steps - 3 * steps + q])
    if kernel.emulated:
        with pytest.raises(emulate.EmulationError, match=r"outside|look-up"):
            kernel.attention(q, k, v, mask=mask)
    with emulate.using(checks="none"):
        out, lse = kernel.attention(q, k, v, mask=mask)
    b, h, i, j = np.ogrid[:2, :2, :5, :11]
    wanted = keep[np.clip(b * 5 - h, 0, 1), np.clip(j * steps - 3 * steps + i, 0, 6)]
    testing.expect(q, k, v, mask=wanted).check(out, lse)


def test_device_numbers_are_never_read_on_the_host(gpu: Any, cupy: Any, stream: Any) -> None:
    """Lengths that are written on the stream after the call was issued before them still count."""
    arrays = qkv(2, 4, 2, 5, 11, 16)
    on_device = moved(*arrays)
    lengths = moved(np.array([3, 9]))[0]
    busy, later = Busy(), moved(np.array([11, 11]))[0]
    with stream:
        cumha.attention(*on_device, key_lengths=lengths)  # built before it is timed
        stream.synchronize()
        busy.on(stream)
        lengths.data.copy_from_device_async(later.data, lengths.nbytes, stream)
        out = cumha.attention(*on_device, key_lengths=lengths)
        still_running = not stream.done
        stream.synchronize()
    assert still_running, "the call waited for the device"
    testing.expect(*arrays).check(testing.to_host(out))


# -- streams --------------------------------------------------------------------------------------


def test_streams_the_current_one_is_used_and_not_waited_for(
    gpu: Any, cupy: Any, stream: Any
) -> None:
    arrays = qkv(2, 4, 2, 9, 300, 16)
    on_device, stale = moved(*arrays), moved(*(np.full_like(x, np.nan) for x in arrays))
    cumha.attention(*on_device, causal=True, return_lse=True, path=gpu.path)
    busy = Busy()
    with stream:
        busy.on(stream)
        for x, y in zip(stale, on_device, strict=True):
            x.data.copy_from_device_async(y.data, x.nbytes, stream)
        out, lse = cumha.attention(*stale, causal=True, return_lse=True, path=gpu.path)
        still_running = not stream.done
        for x in stale:  # on the same stream, so after the kernel
            x.data.memset_async(0xFF, x.nbytes, stream)
        stream.synchronize()
    assert still_running, "the call waited for the device"
    testing.expect(*arrays, causal=True).check(testing.to_host(out), testing.to_host(lse))


def test_streams_arrays_may_be_overwritten_after_the_call(gpu: Any, cupy: Any, stream: Any) -> None:
    """pytorch#131277: temporaries that were freed before the device was done with them."""
    arrays = qkv(2, 4, 2, 5, 64, 16, dtype="float16")
    originals = moved(*arrays)
    wanted = bits(cumha.attention(*originals))
    with stream:
        for _ in range(50):
            copies = [cupy.empty_like(x) for x in originals]
            for x, y in zip(copies, originals, strict=True):
                x.data.copy_from_device_async(y.data, x.nbytes, stream)
            out = cumha.attention(*copies)
            for x in copies:
                x.data.memset_async(0xFF, x.nbytes, stream)
            del copies
            stream.synchronize()
            assert bits(out) == wanted


def test_streams_scratch_contents_never_matter(gpu: Any, cupy: Any) -> None:
    """vllm#25520: one kernel needed zeroed scratch, another left it dirty."""
    shapes = ((1, 4, 2, 1, 300), (2, 4, 2, 9, 40), (1, 4, 2, 1, 7))
    calls = [qkv(*shape, 16, seed=i) for i, shape in enumerate(shapes)]
    on_device = [moved(*arrays) for arrays in calls]
    first = [bits(cumha.attention(*arrays)) for arrays in on_device]
    for _ in range(30):
        blocks = [cupy.empty(n, np.uint8) for n in (512, 4096, 65536, 2**20)]
        for block in blocks:
            block.data.memset_async(0xFF, block.nbytes, cupy.cuda.get_current_stream())
        del blocks
        assert [bits(cumha.attention(*arrays)) for arrays in on_device] == first


def test_streams_with_outputs_given_nothing_is_allocated(gpu: Any, cupy: Any) -> None:
    class Count(cupy.cuda.MemoryHook):
        name = "count"
        calls = 0

        def malloc_preprocess(self, **_: Any) -> None:
            self.calls += 1

        def alloc_preprocess(self, **_: Any) -> None:
            self.calls += 1

    arrays = moved(*qkv(2, 4, 2, 9, 11, 16))
    out, lse, lengths = moved(
        np.zeros((2, 4, 9, 16), np.float32), np.zeros((2, 4, 9), np.float32), np.array([3, 11])
    )
    options = {"out": out, "lse": lse, "return_lse": True, "causal": True, "key_lengths": lengths}
    cumha.attention(*arrays, **options)
    plan = cumha.plan(*arrays, **options)
    count = Count()
    with count:
        cumha.attention(*arrays, **options)
        plan.run(*arrays)
    assert count.calls == 0
    with count:
        cumha.attention(*arrays, causal=True)
    assert count.calls > 0, "the hook does not count"


# -- graphs ---------------------------------------------------------------------------------------


def test_graphs_replay_over_overwritten_arrays(gpu: Any, cupy: Any, stream: Any) -> None:
    calls = [qkv(2, 4, 2, 9, 40, 16, dtype="bfloat16", seed=seed) for seed in range(4)]
    keeps = [np.random.default_rng(i).random((2, 40)) < 0.7 for i in range(4)]
    arrays = moved(*calls[0])
    keep, out, lse = moved(keeps[0], np.zeros_like(calls[0][0]), np.zeros((2, 4, 9), np.float32))
    mask = masks.key_padding(keep) & masks.window(20, 5)
    with stream:
        plan = cumha.plan(*arrays, mask=mask, return_lse=True, out=out, lse=lse)
        plan.run(*arrays)
        stream.begin_capture()
        plan.run(*arrays)
        graph = stream.end_capture()
    for call, kept in zip(calls, keeps, strict=True):
        for x, y in zip((*arrays, keep), (*call, kept), strict=True):
            x.view(np.uint8).set(y.view(np.uint8))
        cupy.cuda.Device().synchronize()
        out.data.memset(0xFF, out.nbytes)
        lse.data.memset(0xFF, lse.nbytes)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        expected = testing.expect(*call, mask=masks.key_padding(kept) & masks.window(20, 5))
        expected.check(testing.to_host(out), testing.to_host(lse))


def test_graphs_lengths_may_grow_after_the_capture(gpu: Any, cupy: Any, stream: Any) -> None:
    """onnxruntime#32239: a plan frozen for the length at capture lost keys at replay."""
    arrays = qkv(1, 4, 2, 1, 4097, 16, dtype="float16")
    on_device = moved(*arrays)
    lengths, out, lse = moved(
        np.array([129]), np.zeros((1, 4, 1, 16), np.float16), np.zeros((1, 4, 1), np.float32)
    )
    options = {"key_lengths": lengths, "causal": True, "return_lse": True, "out": out, "lse": lse}
    with stream:
        cumha.attention(*on_device, **options)
        stream.begin_capture()
        cumha.attention(*on_device, **options)
        graph = stream.end_capture()
    for n in (129, 1024, 4097, 1, 0):
        lengths.set(np.array([n]))
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        expected = testing.expect(*arrays, key_lengths=[n], causal=True)
        expected.check(testing.to_host(out), testing.to_host(lse))


def test_graphs_a_plan_keeps_its_arrays_alive(gpu: Any, cupy: Any, stream: Any) -> None:
    arrays = qkv(2, 4, 2, 9, 40, 16)
    wanted = bits(cumha.attention(*moved(*arrays), path=gpu.path))
    out = moved(np.zeros_like(arrays[0]))[0]
    with stream:
        plan = cumha.plan(*moved(*arrays), out=out, path=gpu.path)
        plan.execute()
        stream.begin_capture()
        plan.execute()
        graph = stream.end_capture()
        for n in (2**10, 2**12, 2**14, 2**16):  # whatever was freed would be written over
            for _ in range(8):
                cupy.empty(n, np.uint8).data.memset_async(0xFF, n, stream)
        graph.launch(stream)
        stream.synchronize()
    assert bits(out) == wanted
    assert plan.path == gpu.path


def test_graphs_a_kernel_that_is_not_loaded_cannot_be_captured(
    gpu: Any, cupy: Any, stream: Any
) -> None:
    arrays = moved(*qkv(head_dim=37))  # no other test builds this head_dim
    out = moved(np.zeros((2, 2, 5, 37), np.float32))[0]
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match="cumha compile"):
                cumha.attention(*arrays, out=out, path=gpu.path)
        finally:
            stream.end_capture()
        cumha.attention(*arrays, out=out, path=gpu.path)
        stream.begin_capture()
        cumha.attention(*arrays, out=out, path=gpu.path)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    testing.expect(*qkv(head_dim=37)).check(testing.to_host(out))


def test_graphs_lengths_of_the_host_cannot_be_captured(gpu: Any, cupy: Any, stream: Any) -> None:
    arrays = moved(*qkv(2, 2, 2, 5, 7, 16))
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match="pass a CuPy array"):
                cumha.attention(*arrays, key_lengths=[3, 4])
        finally:
            stream.end_capture()


# -- devices and threads --------------------------------------------------------------------------


def test_devices_a_call_runs_where_its_arrays_are(gpu: Any, cupy: Any) -> None:
    """flashinfer#452: launched on the current device instead, with an illegal access."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    arrays = qkv(2, 4, 2, 9, 40, 16)
    with cupy.cuda.Device(1):
        there = moved(*arrays)
    here = moved(*arrays)
    for _ in range(2):
        out, lse = cumha.attention(*there, causal=True, return_lse=True)
        assert out.device.id == lse.device.id == 1
        assert cupy.cuda.runtime.getDevice() == 0
        testing.expect(*arrays, causal=True).check(testing.to_host(out), testing.to_host(lse))
        assert bits(cumha.attention(*here, causal=True)) == bits(out)
    with pytest.raises(ValueError, match="one device"):
        cumha.attention(here[0], *there[1:])
    with pytest.raises(cumha.UnsupportedError):
        cumha.attention(*there, splits=2, path="naive")
    assert cupy.cuda.runtime.getDevice() == 0


def test_devices_first_calls_of_many_threads(gpu: Any, cupy: Any) -> None:
    """cupy#7259: a race while several threads compile their first kernel."""
    arrays = qkv(head_dim=43)  # no other test builds this head_dim
    on_device = moved(*arrays)
    start = threading.Barrier(10)

    def first_call(_: int) -> bytes:
        start.wait()
        return bits(cumha.attention(*on_device))

    with ThreadPoolExecutor(10) as pool:
        results = list(pool.map(first_call, range(10)))
    assert len(set(results)) == 1
    testing.expect(*arrays).check(testing.to_host(cumha.attention(*on_device)))


# -- extents --------------------------------------------------------------------------------------

FAR = 1_200_000_064  # elements between rows: the third row starts past 2**31


@pytest.fixture
def far_memory(kernel: Any) -> Iterator[list[Any]]:
    """Three blocks of memory for rows that lie FAR elements apart, as uint8 arrays."""
    nbytes = 4 * FAR + 2048
    if kernel.library == "numpy":  # only what is touched takes memory
        yield [np.empty(nbytes, np.uint8) for _ in range(3)]
        return
    import cupy

    if cupy.cuda.runtime.memGetInfo()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    blocks = [cupy.empty(nbytes, np.uint8) for _ in range(3)]
    yield blocks
    blocks.clear()
    cupy.get_default_memory_pool().free_all_blocks()


def _rows(x: Any) -> list[Any]:
    """The rows of an array whose other axes have one element."""
    return [x[(0,) * (x.ndim - 2)][i] for i in range(x.shape[-2])]


def _far_apart(x: np.ndarray, block: Any, offset: int, apart: int) -> Any:
    """A copy of [..., 3, dim] in a block, its rows that many elements apart."""
    size = x.itemsize
    strides = (*(0,) * (x.ndim - 2), apart * size, size)
    if isinstance(block, np.ndarray):
        there = np.ndarray(x.shape, x.dtype, block, offset, strides)
        there[...] = x
        return there
    import cupy

    there = cupy.ndarray(x.shape, x.dtype, memptr=block.data + offset, strides=strides)
    for row, values in zip(_rows(there), _rows(x), strict=True):
        row.set(values)
    return there


def test_sizes_of_extents_beyond_32_bits(kernel: Any, far_memory: list[Any]) -> None:
    """Rows of q, k, v, out and of a boolean mask whose offsets pass 2**31 elements."""
    inputs, results, seen = far_memory
    arrays = qkv(1, 1, 1, 3, 3, 16, dtype="float16")
    keep = np.array([[1, 0, 1], [0, 1, 1], [1, 1, 0]], bool)
    q, k, v = (_far_apart(x, inputs, 512 * i, FAR) for i, x in enumerate(arrays))
    out = _far_apart(np.full_like(arrays[0], np.nan), results, 0, FAR)
    mask = _far_apart(keep, seen, 0, 2 * FAR)
    cumha.attention(q, k, v, mask=mask, out=out, **kernel.how)
    got = np.stack([testing.to_host(x) for x in _rows(out)])[None, None]
    testing.expect(*arrays, mask=keep).check(got)
