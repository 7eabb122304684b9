"""What the emulation offers kernels does what CUDA says: indices, warps, memory, order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cumha import emulate

SOURCE = """
__device__ int thread_number() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
__device__ int block_number() {
  return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
}
__device__ int threads_in_block() { return blockDim.x * blockDim.y * blockDim.z; }
__device__ int flat() { return block_number() * threads_in_block() + thread_number(); }

CASE(indices) {
  int* to = array<int>(p, 0) + 12 * flat();
  const int values[12] = {int(threadIdx.x), int(threadIdx.y), int(threadIdx.z), int(blockIdx.x),
                          int(blockIdx.y),  int(blockIdx.z),  int(blockDim.x),  int(blockDim.y),
                          int(blockDim.z),  int(gridDim.x),   int(gridDim.y),   int(gridDim.z)};
  for (int i = 0; i < 12; ++i) to[i] = values[i];
}

// Block b shuffles with argument first + b; the last lanes sit out where the mask says so.
template <class T>
__device__ void shuffle(const Params& p) {
  const int kind = p.numbers[0], width = p.numbers[1], argument = p.numbers[2] + blockIdx.x;
  const unsigned mask = p.numbers[3];
  if (!(mask >> threadIdx.x % 32 & 1)) return;
  const T x = array<const T>(p, 0)[threadIdx.x];
  T got = x;
  if (kind == 0) got = __shfl_sync(mask, x, argument, width);
  if (kind == 1) got = __shfl_up_sync(mask, x, argument, width);
  if (kind == 2) got = __shfl_down_sync(mask, x, argument, width);
  if (kind == 3) got = __shfl_xor_sync(mask, x, argument, width);
  array<T>(p, 1)[flat()] = got;
}
CASE(shuffle_int) { shuffle<int>(p); }
CASE(shuffle_float) { shuffle<float>(p); }
CASE(shuffle_double) { shuffle<double>(p); }
CASE(shuffle_long) { shuffle<long long>(p); }

CASE(votes) {
  const unsigned* given = array<const unsigned>(p, 0) + 2 * blockIdx.x;
  const unsigned mask = given[0], lane = threadIdx.x;
  unsigned* to = array<unsigned>(p, 1) + 4 * flat();
  if (!(mask >> lane & 1)) return;
  const int vote = given[1] >> lane & 1 ? 7 : 0;
  to[0] = __ballot_sync(mask, vote);
  to[1] = __any_sync(mask, vote);
  to[2] = __all_sync(mask, vote);
  to[3] = 1;
}

// Each group of lanes exchanges through shared memory, at its own pace.
CASE(groups_of_a_warp) {
  __shared__ int s[32];
  const int lane = threadIdx.x, size = p.numbers[0], first = lane / size * size;
  const unsigned mask = (size == 32 ? ~0u : (1u << size) - 1) << first;
  int x = lane;
  for (int step = 0; step < first / size + 3; ++step) {
    s[lane] = x;
    __syncwarp(mask);
    x = s[first + (lane - first + 1) % size] + 1;
    __syncwarp(mask);
  }
  array<int>(p, 0)[lane] = x;
}

// Reads what the block finds in shared memory, then leaves its own.
CASE(first_look) {
  __shared__ unsigned t[64];
  unsigned* s = reinterpret_cast<unsigned*>(cumha::dynamic_shared());
  const int i = threadIdx.x;
  unsigned* to = array<unsigned>(p, 0) + 2 * flat();
  to[0] = s[i];
  to[1] = t[i];
  s[i] = t[i] = 12345;
  __syncthreads();
}
// Only block 0 writes: the others must not find it.
CASE(left_behind) {
  __shared__ unsigned t[64];
  unsigned* s = reinterpret_cast<unsigned*>(cumha::dynamic_shared());
  const int i = threadIdx.x;
  unsigned* x = p.numbers[0] ? s : t;
  if (blockIdx.x == 0 || p.numbers[1]) x[i] = 12345;
  array<unsigned>(p, 0)[flat()] = x[i];  //! left_behind
}
CASE(alignment) {
  const auto at = reinterpret_cast<std::uintptr_t>(cumha::dynamic_shared());
  if (threadIdx.x == 0) array<long long>(p, 0)[blockIdx.x] = at % 1024;
}

CASE(sums) {
  const int x = flat() % 7;
  atomicAdd(array<int>(p, 0), x);
  atomicAdd(array<unsigned>(p, 1), unsigned(x));
  atomicAdd(array<float>(p, 2), 0.5f * x);
  atomicAdd(array<double>(p, 3), 0.25 * x);
  atomicAdd(array<unsigned long long>(p, 4), (unsigned long long)(x) << 33);
}
CASE(shared_sums) {
  __shared__ int total;
  if (thread_number() == 0) total = 0;
  __syncthreads();
  atomicAdd(&total, thread_number() + 1);
  __syncthreads();
  array<int>(p, 0)[flat()] = total;
}

// Writes down who comes when.
CASE(order) {
  const unsigned ticket = atomicAdd(array<unsigned>(p, 0), 1u);
  array<int>(p, 1)[ticket] = flat();
}

// Sum of a block's numbers by a tree in shared memory, any number of threads.
CASE(tree) {
  float* s = reinterpret_cast<float*>(cumha::dynamic_shared());
  const int i = thread_number(), n = threads_in_block();
  s[i] = array<const float>(p, 0)[flat()];
  for (int left = n; left > 1;) {
    const int half = (left + 1) / 2;
    __syncthreads();
    if (i < left / 2) s[i] += s[i + half];
    left = half;
  }
  __syncthreads();
  array<float>(p, 1)[flat()] = s[0];
}
// The sum of each warp by shuffles of the lanes that there are.
CASE(warp_sums) {
  const int i = thread_number(), n = threads_in_block(), lane = i % 32;
  const int lanes = n - i / 32 * 32 < 32 ? n - i / 32 * 32 : 32;
  const unsigned mask = lanes == 32 ? ~0u : (1u << lanes) - 1;
  int sum = i;
  for (int delta = 16; delta > 0; delta /= 2) {
    const int other = __shfl_sync(mask, sum, lane + delta < lanes ? lane + delta : lane);
    if (lane + delta < lanes) sum += other;
  }
  array<int>(p, 0)[flat()] = __shfl_sync(mask, sum, 0);
}

CASE(one_block_is_at_fault) {
  if (threadIdx.x != 0) return;
  if (block_number() == p.numbers[0]) array<int>(p, 0)[1000] = 1;
  array<int>(p, 0)[block_number()] = 1;
}
CASE(early_return) {
  array<int>(p, 0)[flat()] = 1;
  if (threadIdx.x % 2) return;
  array<int>(p, 0)[flat()] = 2;
}
"""

# Parts of sums that the last block to come adds up, as kernels with splits do.
FENCE = """
CASE(last_block_adds) {
  __shared__ bool last;
  float* parts = array<float>(p, 1);
  const float* in = array<const float>(p, 0);
  const int blocks = gridDim.x, i = threadIdx.x;
  parts[blockIdx.x * blockDim.x + i] = 2 * in[blockIdx.x * blockDim.x + i];
  __threadfence();
  __syncthreads();
  if (i == 0) last = atomicAdd(array<unsigned>(p, 2), 1u) == unsigned(blocks - 1);
  __syncthreads();
  if (!last) return;
  __threadfence();
  float sum = 0;
  for (int b = 0; b < blocks; ++b) sum += __ldcg(parts + b * blockDim.x + i);
  array<float>(p, 3)[i] = sum;
}
"""
LANES = np.arange(32)


@pytest.fixture(scope="module")
def primitives(cases: Callable[..., Any]) -> Any:
    return cases("primitives", SOURCE)


@pytest.fixture(params=["all", "none"])
def checks(request: pytest.FixtureRequest) -> Any:
    """With and without checks: two builds."""
    with emulate.using(checks=request.param):
        yield request.param


# --- indices --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "block"),
    [((3,), (5,)), ((3, 2), (4, 3)), ((2, 3, 2), (2, 3, 4)), ((1, 1, 3), (1, 33, 1))],
    ids=str,
)
def test_indices(primitives: Any, checks: str, grid: Any, block: Any) -> None:
    sizes = [*block, *[1] * (3 - len(block)), *grid, *[1] * (3 - len(grid))]
    bx, by, bz, gx, gy, gz = sizes
    expected = [
        (tx, ty, tz, x, y, z, bx, by, bz, gx, gy, gz)
        for z, y, x, tz, ty, tx in itertools.product(*(range(n) for n in (gz, gy, gx, bz, by, bx)))
    ]
    out = np.full((len(expected), 12), -1, np.int32)
    primitives.run("indices", outputs={"out": out}, grid=grid, block=block)
    np.testing.assert_array_equal(out, expected)


# --- warps ----------------------------------------------------------------------------------------


def sources_of(kind: str, argument: int, width: int) -> np.ndarray:
    """Lane that each lane reads, as PTX's shfl defines it; its own where out of range."""
    first = LANES // width * width
    last = first + width - 1
    if kind == "idx":
        return first + argument % width
    if kind == "up":
        source = LANES - argument
        return np.where(source >= first, source, LANES)
    source = LANES + argument if kind == "down" else LANES ^ argument
    return np.where(source <= last, source, LANES)


SHUFFLES = {"idx": (0, -3, 70), "up": (1, 0, 32), "down": (2, 0, 32), "xor": (3, 0, 32)}


@pytest.mark.parametrize("width", [32, 16, 8, 4, 2, 1])
@pytest.mark.parametrize("kind", SHUFFLES)
def test_shuffles(primitives: Any, checks: str, kind: str, width: int) -> None:
    number, first, count = SHUFFLES[kind]
    rng = np.random.default_rng(width)
    for name, dtype in (
        ("int", np.int32),
        ("float", np.float32),
        ("double", np.float64),
        ("long", np.int64),
    ):
        x = (1e8 * rng.standard_normal(32)).astype(dtype)
        out = np.zeros((count, 32), dtype)
        given = (number, width, first, 0xFFFFFFFF)
        primitives.run(f"shuffle_{name}", *given, inputs={"x": x}, outputs={"out": out},
                       grid=(count,))  # fmt: skip
        expected = [x[sources_of(kind, first + i, width)] for i in range(count)]
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("lanes", [24, 16, 8])
def test_shuffles_of_some_lanes(primitives: Any, checks: str, lanes: int) -> None:
    """The others have ended."""
    x, out = np.arange(100, 132, dtype=np.int32), np.zeros((8, 32), np.int32)
    given = (SHUFFLES["xor"][0], 32, 0, 2**lanes - 1)
    primitives.run("shuffle_int", *given, inputs={"x": x}, outputs={"out": out}, grid=(8,))
    for i in range(8):
        np.testing.assert_array_equal(out[i, :lanes], x[LANES ^ i][:lanes])
    assert not out[:, lanes:].any()


def test_votes(primitives: Any, checks: str) -> None:
    rng = np.random.default_rng(0)
    masks = [0xFFFFFFFF, 1, 0x80000000, 0xFFFF, *map(int, rng.integers(1, 2**32, 40))]
    pairs = [(m, v) for m in masks for v in (0, 0xFFFFFFFF, m, int(rng.integers(2**32)))]
    given = np.array(pairs, np.uint32)
    out = np.zeros((len(given), 32, 4), np.uint32)
    primitives.run("votes", inputs={"x": given}, outputs={"out": out}, grid=(len(given),))
    for (mask, votes), got in zip(pairs, out, strict=True):
        inside = (mask >> LANES & 1).astype(bool)
        cast = mask & votes
        np.testing.assert_array_equal(
            got[inside], [[cast, cast != 0, cast == mask, 1]] * sum(inside)
        )
        assert not got[~inside].any()


@pytest.mark.parametrize("size", [32, 16, 8, 4, 1])
def test_groups_of_a_warp(primitives: Any, checks: str, size: int) -> None:
    out = np.zeros(32, np.int32)
    for seed in range(3):
        with emulate.using(seed=seed):
            primitives.run("groups_of_a_warp", size, outputs={"out": out})
        first = LANES // size * size
        steps = first // size + 3
        np.testing.assert_array_equal(out, first + (LANES - first + steps) % size + steps)


# --- memory ---------------------------------------------------------------------------------------


def test_shared_memory_is_poisoned_for_every_block(primitives: Any) -> None:
    out = np.zeros((20, 64, 2), np.uint32)
    for workers in (1, 3):
        with emulate.using(checks="none", workers=workers):
            primitives.run(
                "first_look", outputs={"out": out}, grid=(20,), block=(64,), shared_bytes=256
            )
        assert (out == 0xFFFFFFFF).all()
        assert np.isnan(out.view(np.float32)).all()
        assert np.isnan(out.view(np.float16)).all()


@pytest.mark.parametrize("dynamic", [0, 1])
def test_a_block_does_not_see_what_another_left(primitives: Any, dynamic: int) -> None:
    out = np.zeros((8, 64), np.uint32)
    options = {"outputs": {"out": out}, "grid": (8,), "block": (64,), "shared_bytes": 256}
    with emulate.using(checks="none", workers=1):
        primitives.run("left_behind", dynamic, 0, **options)
    assert (out[0] == 12345).all()
    assert (out[1:] == 0xFFFFFFFF).all()
    with emulate.using(checks="all", workers=1):
        with pytest.raises(emulate.EmulationError, match="no thread has written") as caught:
            primitives.run("left_behind", dynamic, 0, **options)
        assert caught.value.places[0].startswith(primitives.place("left_behind"))
        primitives.run("left_behind", dynamic, 1, **options)
    assert (out == 12345).all()


@pytest.mark.parametrize("size", [0, 16, 48 * 1024, 227 * 1024])
def test_dynamic_shared_memory_is_aligned(primitives: Any, checks: str, size: int) -> None:
    out = np.full(4, -1, np.int64)
    primitives.run("alignment", outputs={"out": out}, grid=(4,), shared_bytes=size)
    assert not out.any()


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_atomics_across_blocks(primitives: Any, checks: str, workers: int) -> None:
    blocks, threads = 100, 64
    outputs = {
        name: np.zeros(1, dtype)
        for name, dtype in (("i", np.int32), ("u", np.uint32), ("f", np.float32),
                            ("d", np.float64), ("l", np.uint64))
    }  # fmt: skip
    with emulate.using(workers=workers):
        primitives.run("sums", outputs=outputs, grid=(blocks,), block=(threads,))
    total = int((np.arange(blocks * threads) % 7).sum())
    for name, factor in (("i", 1), ("u", 1), ("f", 0.5), ("d", 0.25), ("l", 2**33)):
        assert outputs[name][0] == total * factor, name


def test_atomics_on_shared_memory(primitives: Any, checks: str) -> None:
    out = np.zeros((5, 70), np.int32)
    primitives.run("shared_sums", outputs={"out": out}, grid=(5,), block=(70,))
    assert (out == 70 * 71 // 2).all()


@pytest.mark.parametrize("workers", [1, 4])
def test_last_block_adds(cases: Callable[..., Any], checks: str, workers: int) -> None:
    fence = cases("fence", FENCE)
    x = np.random.default_rng(0).integers(0, 100, (40, 32)).astype(np.float32)
    for seed in range(3):
        outputs = {
            "parts": np.full_like(x, np.nan),
            "count": np.zeros(1, np.uint32),
            "sum": np.zeros(32, np.float32),
        }
        with emulate.using(workers=workers, seed=seed):
            fence.run("last_block_adds", inputs={"x": x}, outputs=outputs, grid=(40,))
        np.testing.assert_array_equal(outputs["sum"], 2 * x.sum(axis=0))


# --- order ----------------------------------------------------------------------------------------


def order_of(primitives: Any, seed: int, grid: int, block: int) -> np.ndarray:
    outputs = {"next": np.zeros(1, np.uint32), "order": np.full(grid * block, -1, np.int32)}
    with emulate.using(seed=seed, workers=1):
        primitives.run("order", outputs=outputs, grid=(grid,), block=(block,))
    assert outputs["next"][0] == grid * block
    np.testing.assert_array_equal(np.sort(outputs["order"]), np.arange(grid * block))
    return outputs["order"]


def test_seed_decides_order(primitives: Any, checks: str) -> None:
    blocks = [order_of(primitives, seed, 40, 1).tolist() for seed in (0, 1, 0)]
    threads = [order_of(primitives, seed, 1, 40).tolist() for seed in (0, 1, 0)]
    for first, other, again in (blocks, threads):
        assert first == again
        assert first != other
        assert first != sorted(first)
        assert other != sorted(other)


def test_threads_of_two_blocks_run_in_different_orders(primitives: Any, checks: str) -> None:
    order = order_of(primitives, 0, 2, 40).reshape(2, 40) % 40
    assert order[0].tolist() != order[1].tolist()


def test_result_depends_on_neither_seed_nor_workers(primitives: Any, checks: str) -> None:
    x = np.random.default_rng(0).standard_normal((30, 96)).astype(np.float32)
    results = []
    for seed, workers in ((0, 1), (1, 1), (2, 2), (3, 7), (2**63, 0)):
        out = np.zeros_like(x)
        with emulate.using(seed=seed, workers=workers):
            primitives.run(
                "tree", inputs={"x": x}, outputs={"out": out}, grid=(30,), block=(96,),
                shared_bytes=4 * 96,
            )  # fmt: skip
        results.append(out)
    np.testing.assert_allclose(results[0][:, 0], x.sum(axis=1), rtol=1e-4, atol=1e-5)
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


@pytest.mark.parametrize("block", [(1,), (31,), (33,), (40,), (7, 9), (5, 5, 5), (1024,)], ids=str)
def test_any_number_of_threads(primitives: Any, checks: str, block: tuple[int, ...]) -> None:
    threads = int(np.prod(block))
    x = np.random.default_rng(threads).integers(0, 50, (2, threads)).astype(np.float32)
    out = np.zeros_like(x)
    options = {"grid": (2,), "block": block, "shared_bytes": 4 * threads}
    primitives.run("tree", inputs={"x": x}, outputs={"out": out}, **options)
    np.testing.assert_array_equal(out, np.repeat(x.sum(axis=1, keepdims=True), threads, axis=1))
    sums = np.zeros((2, threads), np.int32)
    primitives.run("warp_sums", outputs={"out": sums}, **options)
    numbers = np.arange(threads)
    expected = [numbers[i // 32 * 32 : i // 32 * 32 + 32].sum() for i in numbers]
    np.testing.assert_array_equal(sums, [expected, expected])


def test_many_blocks(primitives: Any, checks: str) -> None:
    out = np.zeros((100, 100), np.int32)
    primitives.run("early_return", outputs={"out": out}, grid=(50, 100), block=(2,))
    assert (out[:, 0::2] == 2).all()
    assert (out[:, 1::2] == 1).all()


def test_ten_thousand_blocks(primitives: Any, checks: str) -> None:
    out = np.zeros(10_000, np.int32)
    primitives.run("indices", outputs={"out": np.zeros((10_000, 12), np.int32)}, grid=(10_000,),
                   block=(1,))  # fmt: skip
    primitives.run("one_block_is_at_fault", -1, outputs={"out": out}, grid=(100, 10, 10))
    assert (out == 1).all()


def test_no_block(primitives: Any, checks: str) -> None:
    primitives.run("one_block_is_at_fault", 0, outputs={"out": np.zeros(1, np.int32)}, grid=(0,))


# --- faults ---------------------------------------------------------------------------------------


def test_process_is_usable_after_a_fault(primitives: Any) -> None:
    """The fault ends all blocks, whatever the other CPU threads do, and nothing stays behind."""
    for workers, seed in itertools.product((1, 4), range(5)):
        out = np.zeros(200, np.int32)
        with emulate.using(checks="all", workers=workers, seed=seed):
            with pytest.raises(emulate.EmulationError, match="outside out, 3201 bytes past"):
                primitives.run("one_block_is_at_fault", 77, outputs={"out": out}, grid=(200,))
            primitives.run("one_block_is_at_fault", -1, outputs={"out": out}, grid=(200,))
        assert (out == 1).all()


def test_calls_at_the_same_time(primitives: Any, checks: str) -> None:
    """Python threads launch the same kernel; each call is for itself, its faults too."""
    outs = [np.zeros((20, 70), np.int32) for _ in range(4)]
    caught = []

    def call(out: np.ndarray) -> None:
        with emulate.using(checks=checks, workers=2):
            for _ in range(5):
                primitives.run("shared_sums", outputs={"out": out}, grid=(20,), block=(70,))
            if checks == "all":
                try:
                    primitives.run("one_block_is_at_fault", 3, outputs={"out": out[0]}, grid=(9,))
                except emulate.EmulationError as error:
                    caught.append(error)

    primitives.kernel(checks)
    threads = [threading.Thread(target=call, args=(out,)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(caught) == (4 if checks == "all" else 0)
    for out in outs:
        assert (out[1:] == 70 * 71 // 2).all()
