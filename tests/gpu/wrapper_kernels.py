"""The wrappers of memory.cuh and mma.cuh in one small kernel, and what it must give.

The same kernel and expectations serve the emulation and a GPU (tests/emulation/test_wrappers.py).
On a GPU, by itself:

    python tests/gpu/wrapper_kernels.py
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from cumha import sources
from cumha.compile import TranslationUnit, compile_unit

sys.path.insert(0, str(Path(__file__).parents[2]))  # for a run as a script
from tests.macros import define_lines

NUMBERS = 4
ENTRY = "cumha_wrappers"

SOURCE = """
#include "mma.cuh"

namespace cumha {

struct Params {
  const unsigned* in;
  unsigned* out;
  long long numbers[4];
};

// Each thread copies its slot; numbers: source bytes. All of shared memory is written out.
template <int kBytes>
__device__ void copy_slots(const Params& p, unsigned* s) {
  const int words = blockDim.x * kBytes / 4, i = threadIdx.x;
  for (int j = i; j < words; j += blockDim.x) s[j] = 0xaaaaaaaau;
  __syncthreads();
  copy_async<kBytes>(s + i * kBytes / 4, p.in + i * kBytes / 4, int(p.numbers[1]));
  commit_copies();
  wait_copies<0>();
  __syncthreads();
  for (int j = words - 1 - i; j >= 0; j -= blockDim.x) p.out[j] = s[j];
}

// Three groups of copies, an empty one among them; after each wait the words that have come, and
// with numbers[1] the others too, which on a GPU may have come or not.
__device__ void copy_groups(const Params& p, unsigned* s) {
  const int n = blockDim.x, i = threadIdx.x;
  for (int group = 0; group < 4; ++group) s[n * group + i] = 0xaaaaaaaau;
  for (int group = 0; group < 4; ++group) {
    if (group != 1) copy_async<4>(s + n * group + i, p.in + n * group + i, 4);
    commit_copies();
  }
  const auto show = [&](int wait, int arrived) {
    for (int group = 0; group < 4; ++group)
      if (group < arrived || p.numbers[1] != 0)
        p.out[(4 * wait + group) * n + i] = s[n * group + i];
  };
  wait_copies<4>();
  show(0, 0);
  wait_copies<3>();
  show(1, 1);
  wait_copies<1>();
  show(2, 3);
  wait_copies<0>();
  show(3, 4);
}

// Warp 0 makes numbers in two slots, warp 1 uses them up: barriers 1, 2 say full, 3, 4 empty.
__device__ void produce_and_consume(const Params& p, unsigned* s) {
  const int rounds = int(p.numbers[1]), lane = threadIdx.x % 32;
  for (int i = 0; i < rounds; ++i) {
    const int slot = i % 2;
    if (threadIdx.x < 32) {
      if (i >= 2) named_barrier_sync(3 + slot, 64);
      s[32 * slot + lane] = p.in[32 * i + lane] + 1;
      named_barrier_arrive(1 + slot, 64);
    } else {
      named_barrier_sync(1 + slot, 64);
      p.out[32 * i + lane] = s[32 * slot + (lane + 1) % 32];
      if (i + 2 < rounds) named_barrier_arrive(3 + slot, 64);
    }
  }
}

// Two pairs of warps keep to themselves, then all four meet.
__device__ void two_groups(const Params& p, unsigned* s) {
  const int i = threadIdx.x, group = i / 64;
  unsigned x = p.in[i];
  for (int step = 0; step <= 3 * group; ++step) {
    s[i] = x;
    named_barrier_sync(7 + group, 64);
    x += s[64 * group + (i + 32) % 64];
    named_barrier_sync(7 + group, 64);
  }
  s[i] = x;
  __syncthreads();
  p.out[i] = s[127 - i];
}

// Rows of 8 elements stand at a stride of 24; lane L gives row (5 L + 3) % 32 of them.
template <int kMatrices, bool kTransposed>
__device__ void load(const Params& p, unsigned* s) {
  const int lane = threadIdx.x;
  for (int j = lane; j < 32 * 12; j += 32) s[j] = p.in[j];
  __syncwarp();
  unsigned registers[kMatrices];
  load_matrices<kMatrices, kTransposed>(registers, s + 12 * ((5 * lane + 3) % 32));
  for (int i = 0; i < kMatrices; ++i) p.out[32 * i + lane] = registers[i];
}

// Registers come and go as they are: of each lane a[0..3], b[0..1], c[0..3].
template <class T>
__device__ void multiply(const Params& p) {
  const unsigned* in = p.in + (32 * blockIdx.x + threadIdx.x) * 10;
  const unsigned a[4] = {in[0], in[1], in[2], in[3]};
  const unsigned b[2] = {in[4], in[5]};
  float c[4];
  for (int i = 0; i < 4; ++i) c[i] = __int_as_float(int(in[6 + i]));
  multiply_add<T>(c, a, b);
  for (int i = 0; i < 4; ++i)
    p.out[(32 * blockIdx.x + threadIdx.x) * 4 + i] = unsigned(__float_as_int(c[i]));
}

}  // namespace cumha

extern "C" __global__ void cumha_wrappers(const __grid_constant__ cumha::Params p) {
  using namespace cumha;
  unsigned* s = reinterpret_cast<unsigned*>(dynamic_shared());
  switch (p.numbers[0]) {
    case 0: return copy_slots<4>(p, s);
    case 1: return copy_slots<8>(p, s);
    case 2: return copy_slots<16>(p, s);
    case 3: return copy_groups(p, s);
    case 4: return produce_and_consume(p, s);
    case 5: return two_groups(p, s);
    case 6: return load<1, false>(p, s);
    case 7: return load<2, false>(p, s);
    case 8: return load<4, false>(p, s);
    case 9: return load<1, true>(p, s);
    case 10: return load<2, true>(p, s);
    case 11: return load<4, true>(p, s);
    case 12: return multiply<__half>(p);
    case 13: return multiply<__nv_bfloat16>(p);
  }
}
"""


def unit(arch: str) -> TranslationUnit:
    """The kernel as NVRTC gets it."""
    defines = define_lines()
    headers = {n: sources.read(n) for n in sources.names() if n.endswith(".cuh")}
    del headers["mask.cuh"]  # includes a header that is generated for a problem
    return TranslationUnit(
        name="kernels_cu/wrappers.cu",
        entry=ENTRY,
        arch=arch,
        source=f'{defines}#line 1 "kernels_cu/wrappers.cu"{SOURCE}',
        headers={n: f'#line 1 "kernels_cu/{n}"\n{text}' for n, text in headers.items()},
        options=("--std=c++17", f"--gpu-architecture={arch}", "--ptxas-options=-v"),
    )


def pack(source: int, target: int, numbers: tuple[int, ...]) -> bytes:
    """The struct Params."""
    padded = (*numbers, *[0] * (NUMBERS - len(numbers)))
    return struct.pack(f"QQ{NUMBERS}q", source, target, *padded)


@dataclass(frozen=True)
class Case:
    """One launch: 32-bit words in, words out, and a check of them."""

    name: str
    numbers: tuple[int, ...]  # the first one chooses the code
    given: np.ndarray  # uint32
    words: int  # of out, 0xcccccccc before
    check: Callable[[np.ndarray], None]
    block: int = 32
    grid: int = 1
    shared_bytes: int = 4096


Run = Callable[[Case], np.ndarray]


def cases() -> Iterator[Case]:
    """All cases, the same at every call."""
    for which, size in enumerate((4, 8, 16)):
        for source_bytes in range(size + 1):
            yield _copy_case(which, size, source_bytes)
    yield groups_case(peek=False)
    yield from _barrier_cases()
    for which, (transposed, count) in enumerate(
        [(t, c) for t in (False, True) for c in (1, 2, 4)], 6
    ):
        yield _matrix_case(which, count, transposed)
    for which, dtype in ((12, np.dtype(np.float16)), (13, np.dtype(ml_dtypes.bfloat16))):
        yield from _product_cases(which, dtype)


# --- copies and barriers --------------------------------------------------------------------------


def _words(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, count, np.uint32)


def _copy_case(which: int, size: int, source_bytes: int) -> Case:
    threads = 48
    given = _words(which, threads * size // 4)
    expected = given.view(np.uint8).reshape(threads, size).copy()
    expected[:, source_bytes:] = 0

    def check(out: np.ndarray) -> None:
        np.testing.assert_array_equal(out.view(np.uint8).reshape(threads, size), expected)

    name = f"copy of {size} bytes, {source_bytes} from the source"
    return Case(name, (which, source_bytes), given, given.size, check, block=threads)


def groups_case(*, peek: bool) -> Case:
    """Groups of copies; with ``peek`` also what has not been waited for is shown: poison."""
    threads = 64
    given = _words(3, 4 * threads)
    new = given.reshape(4, threads).copy()
    new[1] = 0xAAAAAAAA  # the group without a copy
    expected = np.full((4, 4, threads), 0xFFFFFFFF if peek else 0xCCCCCCCC, np.uint32)
    if peek:
        expected[:, 1] = new[1]
    for wait, arrived in enumerate((0, 1, 3, 4)):
        expected[wait, :arrived] = new[:arrived]

    def check(out: np.ndarray) -> None:
        np.testing.assert_array_equal(out.reshape(expected.shape), expected)

    return Case("groups of copies", (3, int(peek)), given, expected.size, check, block=threads)


def _barrier_cases() -> Iterator[Case]:
    rounds = 9
    given = _words(4, 32 * rounds)
    made = np.roll(given.reshape(rounds, 32) + np.uint32(1), -1, axis=1)

    def check(out: np.ndarray) -> None:
        np.testing.assert_array_equal(out.reshape(rounds, 32), made)

    yield Case("producer and consumer", (4, rounds), given, given.size, check, block=64)

    numbers = _words(5, 128)
    expected = numbers.reshape(2, 2, 32).copy()  # group, warp, lane
    for group, steps in enumerate((1, 4)):
        for _ in range(steps):
            expected[group] += expected[group, ::-1]

    def check_groups(out: np.ndarray) -> None:
        np.testing.assert_array_equal(out, expected.ravel()[::-1])

    yield Case("two groups of warps", (5,), numbers, 128, check_groups, block=128)


# --- matrices -------------------------------------------------------------------------------------

LANES = np.arange(32)
G, T = LANES // 4, LANES % 4  # the names of mma.cuh


def _matrix_case(which: int, count: int, transposed: bool) -> Case:
    given = _words(which, 32 * 12)
    rows = given.view(np.uint16).reshape(32, 24)[:, :8][(5 * LANES + 3) % 32]
    matrices = rows.reshape(4, 8, 8)[:count]
    if transposed:
        matrices = matrices.transpose(0, 2, 1)
    pairs = np.stack([matrices[:, G, 2 * T], matrices[:, G, 2 * T + 1]], axis=-1)
    expected = np.ascontiguousarray(pairs).view(np.uint32)[..., 0]

    def check(out: np.ndarray) -> None:
        np.testing.assert_array_equal(out.reshape(count, 32), expected)

    name = f"ldmatrix x{count}{' transposed' if transposed else ''}"
    return Case(name, (which,), given, 32 * count, check)


def _registers(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The ten words of each lane, [products, 32, 10], by the table in mma.cuh."""

    def pair(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        both = np.stack([first, second], axis=-1).view(np.uint16)
        return np.ascontiguousarray(both).view(np.uint32)[..., 0]

    words = [
        pair(a[:, G + row, 2 * T + column], a[:, G + row, 2 * T + column + 1])
        for column in (0, 8)
        for row in (0, 8)
    ]
    words += [pair(b[:, 2 * T + row, G], b[:, 2 * T + row + 1, G]) for row in (0, 8)]
    words += [c[:, G + row, 2 * T + i].view(np.uint32) for row in (0, 8) for i in (0, 1)]
    return np.stack(words, axis=-1)


def _product_cases(which: int, dtype: np.dtype) -> Iterator[Case]:
    for name, (a, b, c) in _products(dtype).items():
        yield _product_case(f"mma {dtype.name}, {name}", which, a, b, c)


def _products(dtype: np.dtype) -> dict[str, tuple[np.ndarray, ...]]:
    """Factors a [n, 16, 16] and b [n, 16, 8], and the sums to add to, c [n, 16, 8] float32."""
    rng = np.random.default_rng(16)
    n = 20

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((n, *shape))

    # one element of A each that is not 0, times numbers that tell where they stand
    single = np.zeros((256, 16, 16))
    single.reshape(256, 256)[np.arange(256), np.arange(256)] = 1
    places = np.broadcast_to(np.arange(128.0).reshape(16, 8), (256, 16, 8))
    largest = float(ml_dtypes.finfo(dtype).max)
    scales = 2.0 ** rng.integers(-12, 8, (n, 16, 1))
    special_a, special_b = normal(16, 16), normal(16, 8)
    for i, value in enumerate((np.inf, -np.inf, np.nan)):
        special_a[i::5, 3, 2 * i] = value
        special_b[i + 1 :: 5, 5 - i, 6] = value
    special_b[:, 0, 2] = 0  # times infinity in A: NaN
    given = {
        "places": (single, places, np.zeros((256, 16, 8))),
        "random": (normal(16, 16), normal(16, 8), normal(16, 8)),
        "many scales": (normal(16, 16) * scales, normal(16, 8), 100 * normal(16, 8)),
        "whole numbers": (np.round(4 * normal(16, 16)), np.round(4 * normal(16, 8)),
                          np.round(100 * normal(16, 8))),
        "subnormal": (normal(16, 16) * float(ml_dtypes.finfo(dtype).smallest_normal) / 4,
                      normal(16, 8), np.zeros((n, 16, 8))),
        "largest": (np.full((1, 16, 16), largest), np.full((1, 16, 8), 1.0), np.zeros((1, 16, 8))),
        "infinities and NaN": (special_a, special_b, normal(16, 8)),
    }  # fmt: skip
    return {
        name: (a.astype(dtype), b.astype(dtype), c.astype(np.float32))
        for name, (a, b, c) in given.items()
    }


def _product_case(name: str, which: int, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> Case:
    wide_a, wide_b, wide_c = (x.astype(np.float64) for x in (a, b, c))
    with np.errstate(invalid="ignore", over="ignore"):
        exact = wide_a @ wide_b + wide_c
        rounded = exact.astype(np.float32)  # infinite where the sum overflows
        # An accumulator of a tensor core keeps fewer bits than float's sum would: a few units in
        # the last place of the largest partial sum.
        bound = 2.0**-20 * (np.abs(wide_a) @ np.abs(wide_b) + np.abs(wide_c)) + 2.0**-149
    finite = np.isfinite(rounded)
    bound, exact = np.where(finite, bound, 0), np.where(finite, exact, 0)

    def check(out: np.ndarray) -> None:
        got = np.empty(exact.shape, np.float32)
        lanes = out.view(np.float32).reshape(-1, 32, 4)
        for i in range(4):
            got[:, G + 8 * (i // 2), 2 * T + i % 2] = lanes[:, :, i]
        np.testing.assert_array_equal(got[~finite], rounded[~finite])
        off = np.abs(np.where(finite, got, 0).astype(np.float64) - exact)
        worst = np.unravel_index(np.argmax(off - bound), off.shape)
        assert off[worst] <= bound[worst], (worst, got[worst], exact[worst], bound[worst])

    given = _registers(a, b, c).ravel()
    return Case(name, (which,), given, exact.size, check, grid=len(a))


# --- on a GPU -------------------------------------------------------------------------------------


def gpu_runner() -> Run:
    """Build for the current GPU, load, and return what runs a case there."""
    import cupy

    capability = cupy.cuda.Device().compute_capability
    arch = f"sm_{capability}" + ("a" if int(capability) >= 90 else "")
    module = cupy.cuda.Module()
    module.load(compile_unit(unit(arch)).image)
    function = module.get_function(ENTRY)

    def run(case: Case) -> np.ndarray:
        source = cupy.asarray(case.given)
        target = cupy.full(case.words, 0xCCCCCCCC, np.uint32)
        packed = np.void(pack(source.data.ptr, target.data.ptr, case.numbers))
        function((case.grid, 1, 1), (case.block, 1, 1), (packed,), case.shared_bytes)
        return cupy.asnumpy(target)

    return run


def main() -> None:
    run = gpu_runner()
    count = 0
    for case in cases():
        case.check(run(case))
        count += 1
        print(f"ok  {case.name}")
    print(f"{count} cases agree")


if __name__ == "__main__":
    main()
