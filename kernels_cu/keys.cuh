// Where the keys of a batch entry are: which of them are valid, and where each one lies in memory.
#pragma once

#include "mask.cuh"

namespace cumha {

// Keys of the sequence that entry b has. Lengths on the device are clamped: a wrong one gives wrong
// rows, never an illegal access.
__device__ __forceinline__ Index valid_keys(const Core& core, long long b) {
  if constexpr (kHasKeyLengths) {
    const long long n = core.key_lengths[b * core.key_length_stride];
    return static_cast<Index>(n < 0 ? 0 : n > core.total_keys ? core.total_keys : n);
  }
  return static_cast<Index>(core.total_keys);
}

// Positions of the valid keys that this call holds.
__device__ __forceinline__ Span held_keys(const Core& core, Index valid) {
  const long long first = core.key_offset;
  const long long end = first + core.len_k < valid ? first + core.len_k : valid;
  return Span{static_cast<Index>(first), static_cast<Index>(end)};
}

// Positions that this call holds and rows h x q of entry b can see, of `valid` keys in all.
__device__ __forceinline__ Span visible_keys(const Params& p, Index b, Span h, Span q,
                                             Index valid) {
  const Span seen = Mask::key_range(p.mask, b, h, q, static_cast<Index>(p.core.len_q), valid);
  const Span held = held_keys(p.core, valid);
  return Span{seen.lo > held.lo ? seen.lo : held.lo, seen.hi < held.hi ? seen.hi : held.hi};
}

// Keys and values of one (batch entry, KV head) in dense arrays.
struct KeySource {
  const Element* k;
  const Element* v;

  __device__ __forceinline__ KeySource(const Core& core, long long b, long long head_kv)
      : k(core.k + b * core.k_stride.batch + head_kv * core.k_stride.head),
        v(core.v + b * core.v_stride.batch + head_kv * core.v_stride.head) {}

  // Key and value at a position of the sequence; their elements are element strides apart.
  __device__ __forceinline__ const Element* key(const Core& core, long long position) const {
    return k + (position - core.key_offset) * core.k_stride.row;
  }
  __device__ __forceinline__ const Element* value(const Core& core, long long position) const {
    return v + (position - core.key_offset) * core.v_stride.row;
  }
};

}  // namespace cumha
