// CUDA for a host compiler: what the kernels use of the device, in plain C++.
//
// A unit that g++ or clang++ builds (cumha/emulate.py) begins with this file. Each CUDA thread is a
// fiber of emulate.cpp; barriers, shuffles and votes are where fibers give way. The functions here
// have CUDA's names and meaning, so kernels do not know where they run.
#pragma once

#include <cuda_bf16.h>  // before the macros below: CUDA's headers use the names for themselves
#include <cuda_fp16.h>
#include <vector_types.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define CUMHA_EMULATED 1  // wrappers around PTX take their host body

namespace cumha_emulate {

// Where the running thread stands.
uint3 thread_index();
uint3 block_index();
dim3 block_size();
dim3 grid_size();
int lane();  // in its warp

// One barrier of the block. `threads` = 0: all of the block. Returns when that many have come.
void block_barrier(int id, int threads, bool wait);

// Every lane of `mask` gives up to 64 bytes and gets those of all: lane i's at result + 64 * i.
// `name` is what the lanes do; they must all do the same.
constexpr int kGiftBytes = 64;
const unsigned char* warp_exchange(const char* name, unsigned mask, const void* gift, int bytes,
                                   bool orders_memory);

// The block's dynamic shared memory, 1024-byte aligned, poisoned when the block starts.
void* dynamic_shared();

// Asynchronous copies of this thread: issued, closed into groups, carried out by the wait for them.
void copy_async(void* to, const void* from, int bytes, int source_bytes);
void commit_copies();
void wait_copies(int newest_left);

// Atomic accesses of 4 or 8 bytes; the swap updates `expected` where it fails.
void atomic_load(const void* from, void* value, int bytes);
bool atomic_swap_if(void* to, void* expected, const void* desired, int bytes);
void memory_fence();

// Reports a look-up index outside [0, extent), which the device would clamp.
void expect_inside(long long index, long long extent);

// Ends the emulation with this message and the caller's place in the source.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// What a lane gave: read by the runtime, not by instrumented code.
void take(const unsigned char* table, int lane, void* to, int bytes);

template <class T>
__forceinline__ T from_lane(const unsigned char* table, int lane) {
  T value;
  take(table, lane, &value, sizeof(T));
  return value;
}

// First and last lane of the group of `width` lanes that this one is in.
__forceinline__ int first_lane(int width) { return lane() & ~(width - 1); }
__forceinline__ int last_lane(int width) { return lane() | (width - 1); }

// The value of lane `source`; the lane's own where `reachable` is false.
template <class T>
__forceinline__ T shuffle(const char* name, unsigned mask, T value, int source, bool reachable) {
  static_assert(sizeof(T) <= 8, "a shuffle moves 4 or 8 bytes");
  const unsigned char* table = warp_exchange(name, mask, &value, sizeof(T), false);
  if (!reachable) return value;
  if (!(mask >> source & 1))
    fail("%s reads lane %d, which is not in its mask %08x", name, source, mask);
  return from_lane<T>(table, source);
}

__forceinline__ unsigned ballot(const char* name, unsigned mask, int predicate) {
  const unsigned char* table = warp_exchange(name, mask, &predicate, sizeof(int), false);
  unsigned votes = 0;
  for (int i = 0; i < 32; ++i)
    if (mask >> i & 1 && from_lane<int>(table, i)) votes |= 1u << i;
  return votes;
}

// ldmatrix: every lane gives a row's address and reads its part of each matrix.
__forceinline__ void load_matrices(unsigned* registers, int matrices, bool transposed,
                                   const void* row) {
  if (reinterpret_cast<std::uintptr_t>(row) % 16 != 0)
    fail("ldmatrix: %p is not aligned to 16", row);
  const unsigned char* table = warp_exchange("ldmatrix", 0xffffffffu, &row, sizeof row, false);
  const int g = lane() / 4, t = lane() % 4;
  for (int i = 0; i < matrices; ++i) {
    std::uint16_t pair[2];
    for (int j = 0; j < 2; ++j) {
      const int at_row = transposed ? 2 * t + j : g, column = transposed ? g : 2 * t + j;
      pair[j] = from_lane<const std::uint16_t*>(table, 8 * i + at_row)[column];
    }
    registers[i] = pair[0] | static_cast<unsigned>(pair[1]) << 16;
  }
}

// mma.m16n8k16: every lane gives its parts of A and B and sums its four elements of C.
template <class Decode>
__forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                  Decode decode) {
  const unsigned gift[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  const unsigned char* table = warp_exchange("mma.sync", 0xffffffffu, gift, sizeof gift, false);
  struct Parts {
    unsigned registers[6];
  };
  const auto half = [&](unsigned pair, int which) {
    return decode(static_cast<unsigned short>(pair >> 16 * which));
  };
  const int g = lane() / 4, t = lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = i / 2, column = 2 * t + i % 2;  // row g or g + 8
    double sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const int pair = k % 8 / 2, upper = k / 8;
      const Parts of_a = from_lane<Parts>(table, 4 * g + pair);
      const Parts of_b = from_lane<Parts>(table, 4 * column + pair);
      sum += static_cast<double>(half(of_a.registers[row + 2 * upper], k % 2)) *
             half(of_b.registers[4 + upper], k % 2);
    }
    c[i] = static_cast<float>(sum);
  }
}

}  // namespace cumha_emulate

#define threadIdx (::cumha_emulate::thread_index())
#define blockIdx (::cumha_emulate::block_index())
#define blockDim (::cumha_emulate::block_size())
#define gridDim (::cumha_emulate::grid_size())

#define __launch_bounds__(...)

// Static shared memory: an operating-system thread runs one block at a time, whose fibers share it.
#undef __shared__
#define __shared__ static thread_local

__forceinline__ void __syncthreads() { cumha_emulate::block_barrier(0, 0, true); }
__forceinline__ void __syncwarp(unsigned mask = 0xffffffffu) {
  cumha_emulate::warp_exchange("__syncwarp", mask, nullptr, 0, true);
}

// Which lanes a shuffle reaches: PTX ISA, shfl.sync.
template <class T>
__forceinline__ T __shfl_sync(unsigned mask, T x, int source, int width = 32) {
  const int lane = cumha_emulate::first_lane(width) | (source & (width - 1));
  return cumha_emulate::shuffle("__shfl_sync", mask, x, lane, true);
}
template <class T>
__forceinline__ T __shfl_xor_sync(unsigned mask, T x, int lanes, int width = 32) {
  const int lane = cumha_emulate::lane() ^ lanes;
  return cumha_emulate::shuffle("__shfl_xor_sync", mask, x, lane,
                                lane <= cumha_emulate::last_lane(width));
}
template <class T>
__forceinline__ T __shfl_up_sync(unsigned mask, T x, unsigned delta, int width = 32) {
  const int lane = cumha_emulate::lane() - static_cast<int>(delta);
  return cumha_emulate::shuffle("__shfl_up_sync", mask, x, lane,
                                lane >= cumha_emulate::first_lane(width));
}
template <class T>
__forceinline__ T __shfl_down_sync(unsigned mask, T x, unsigned delta, int width = 32) {
  const int lane = cumha_emulate::lane() + static_cast<int>(delta);
  return cumha_emulate::shuffle("__shfl_down_sync", mask, x, lane,
                                lane <= cumha_emulate::last_lane(width));
}
__forceinline__ unsigned __ballot_sync(unsigned mask, int predicate) {
  return cumha_emulate::ballot("__ballot_sync", mask, predicate);
}
__forceinline__ int __any_sync(unsigned mask, int predicate) {
  return cumha_emulate::ballot("__any_sync", mask, predicate) != 0;
}
__forceinline__ int __all_sync(unsigned mask, int predicate) {
  return cumha_emulate::ballot("__all_sync", mask, predicate) == mask;
}

// Blocks of one grid run on several cores: atomics are real ones.
template <class T, class Other>
__forceinline__ T atomicAdd(T* to, Other other) {
  const T value = other;
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomicAdd takes 4 or 8 bytes");
  T old, sum;
  cumha_emulate::atomic_load(to, &old, sizeof(T));
  do {
    sum = old + value;
  } while (!cumha_emulate::atomic_swap_if(to, &old, &sum, sizeof(T)));
  return old;
}
__forceinline__ void __threadfence() { cumha_emulate::memory_fence(); }

// Loads and stores with a cache hint: the hint means nothing here.
template <class T>
__forceinline__ T __ldg(const T* from) {
  return *from;
}
template <class T>
__forceinline__ T __ldca(const T* from) {
  return *from;
}
template <class T>
__forceinline__ T __ldcg(const T* from) {
  return *from;
}
template <class T>
__forceinline__ T __ldcs(const T* from) {
  return *from;
}
template <class T>
__forceinline__ void __stcg(T* to, T value) {
  *to = value;
}
template <class T>
__forceinline__ void __stcs(T* to, T value) {
  *to = value;
}

__forceinline__ int __popc(unsigned x) { return __builtin_popcount(x); }
__forceinline__ int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
__forceinline__ int __ffs(int x) { return __builtin_ffs(x); }
__forceinline__ int min(int x, int y) { return x < y ? x : y; }
__forceinline__ int max(int x, int y) { return x > y ? x : y; }
__forceinline__ unsigned min(unsigned x, unsigned y) { return x < y ? x : y; }
__forceinline__ unsigned max(unsigned x, unsigned y) { return x > y ? x : y; }
__forceinline__ long long min(long long x, long long y) { return x < y ? x : y; }
__forceinline__ long long max(long long x, long long y) { return x > y ? x : y; }
__forceinline__ float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

__forceinline__ double __longlong_as_double(long long bits) {
  double x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
__forceinline__ float __int_as_float(int bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
__forceinline__ int __float_as_int(float x) {
  int bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
// Products and sums that must not be contracted; the build forbids it anyway (-ffp-contract=off).
__forceinline__ double __dadd_rn(double x, double y) { return x + y; }
__forceinline__ double __dmul_rn(double x, double y) { return x * y; }
__forceinline__ float __fadd_rn(float x, float y) { return x + y; }
__forceinline__ float __fmul_rn(float x, float y) { return x * y; }
