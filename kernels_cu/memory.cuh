// Shared memory, asynchronous copies and barriers: thin wrappers around PTX, each with a host body
// for the emulation (emulate.hpp defines CUMHA_EMULATED).
#pragma once

#include "config.cuh"

namespace cumha {

// The block's dynamic shared memory; its layout is the kernel's, in the comment at its top.
__device__ __forceinline__ unsigned char* dynamic_shared() {
#ifdef CUMHA_EMULATED
  return static_cast<unsigned char*>(cumha_emulate::dynamic_shared());
#else
  extern __shared__ __align__(1024) unsigned char cumha_dynamic_shared[];
  return cumha_dynamic_shared;
#endif
}

// Shared memory as PTX addresses it.
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
#ifdef CUMHA_EMULATED
  cumha_emulate::fail("shared_address: %p has no 32-bit address on the host", pointer);
#else
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
#endif
}

// kCount neighbouring elements, as one access of their size reads and writes them.
template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Vector {
  T values[kCount];
};

// Reads a vector that no other thread of this SM will want: 16 bytes pass L1 by.
// PTX ISA, Data Movement: ld.global.nc with L1::no_allocate.
template <class T, int kCount>
__device__ __forceinline__ Vector<T, kCount> load_once(const T* from) {
#ifndef CUMHA_EMULATED
  if constexpr (kCount * sizeof(T) == 16) {
    union {
      uint4 words;
      Vector<T, kCount> vector;
    } loaded;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(loaded.words.x), "=r"(loaded.words.y), "=r"(loaded.words.z), "=r"(loaded.words.w)
        : "l"(from));
    return loaded.vector;
  }
#endif
  return *reinterpret_cast<const Vector<T, kCount>*>(from);
}

// Writes a vector to global memory in one access, where the compiler would take it apart.
// PTX ISA, Data Movement: st.global.
template <class T, int kCount>
__device__ __forceinline__ void store_vector(T* to, const Vector<T, kCount>& vector) {
#ifndef CUMHA_EMULATED
  constexpr int kBytes = kCount * int(sizeof(T));
  if constexpr (kBytes == 16) {
    const auto& words = reinterpret_cast<const uint4&>(vector);
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y),
                 "r"(words.z), "r"(words.w)
                 : "memory");
    return;
  } else if constexpr (kBytes == 8) {
    const auto& words = reinterpret_cast<const uint2&>(vector);
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(words.x), "r"(words.y)
                 : "memory");
    return;
  }
#endif
  *reinterpret_cast<Vector<T, kCount>*>(to) = vector;
}

// A vector out of shared memory, in accesses of at most 16 bytes.
template <class T, int kCount>
__device__ __forceinline__ Vector<T, kCount> read_shared(const T* from) {
  constexpr int kPart = kCount * int(sizeof(T)) > 16 ? 16 / int(sizeof(T)) : kCount;
  Vector<T, kCount> result;
#pragma unroll
  for (int i = 0; i < kCount; i += kPart) {
    const auto part = *reinterpret_cast<const Vector<T, kPart>*>(from + i);
#pragma unroll
    for (int j = 0; j < kPart; ++j) result.values[i + j] = part.values[j];
  }
  return result;
}

// Copies kBytes (4, 8 or 16, all aligned) from global to shared memory in the background: the first
// `source_bytes` of them, the rest becomes zeros. PTX ISA, Data Movement: cp.async (sm_80+).
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to_shared, const void* from, int source_bytes) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async copies 4, 8 or 16 bytes");
#ifdef CUMHA_EMULATED
  cumha_emulate::copy_async(to_shared, from, kBytes, source_bytes);
#elif __CUDA_ARCH__ < 800  // no such copies: at once instead
  Vector<unsigned, kBytes / 4> words{};
  if (source_bytes > 0) words = *reinterpret_cast<const Vector<unsigned, kBytes / 4>*>(from);
  *reinterpret_cast<Vector<unsigned, kBytes / 4>*>(to_shared) = words;
#else
  if constexpr (kBytes == 16) {  // .cg: past L1, as nothing of it is read twice by this SM
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to_shared)),
                 "l"(from), "r"(source_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to_shared)),
                 "l"(from), "n"(kBytes), "r"(source_bytes)
                 : "memory");
  }
#endif
}

// Closes the group of this thread's copies since the last commit. PTX ISA: cp.async.commit_group.
__device__ __forceinline__ void commit_copies() {
#ifdef CUMHA_EMULATED
  cumha_emulate::commit_copies();
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kNewest of this thread's groups are under way; other threads' copies need a
// barrier after it. PTX ISA: cp.async.wait_group.
template <int kNewest>
__device__ __forceinline__ void wait_copies() {
#ifdef CUMHA_EMULATED
  cumha_emulate::wait_copies(kNewest);
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
#endif
}

// Barrier `id` (1 to 15; 0 is __syncthreads) for `threads` threads, a multiple of 32.
// PTX ISA, Parallel Synchronization: bar.sync, bar.arrive.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
#ifdef CUMHA_EMULATED
  cumha_emulate::block_barrier(id, threads, true);
#else
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
#ifdef CUMHA_EMULATED
  cumha_emulate::block_barrier(id, threads, false);
#else
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

// An index that the caller will clamp: the device says nothing, the emulation reports it.
__device__ __forceinline__ void expect_inside(long long index, long long extent) {
#ifdef CUMHA_EMULATED
  cumha_emulate::expect_inside(index, extent);
#else
  (void)index, (void)extent;
#endif
}

}  // namespace cumha
