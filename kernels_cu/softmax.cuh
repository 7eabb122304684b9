// The online softmax: what is left of a row after any number of its keys.
//
//   m    the reference that was subtracted: the largest score so far
//   l    sum of e^(score - m)
//   acc  sum of e^(score - m) * v, this thread's elements
//
// Rules: a score of -inf is no key: add() gives kRemovedWeight, and the sum is as before. Empty
// means l == 0, never m == -inf: larger() drops a NaN, so m alone cannot tell a row without keys
// from NaN scores.
#pragma once

#include "numeric.cuh"

namespace cumha {

// No weight is negative.
constexpr Accum kRemovedWeight = -1;

// Adds what a key gives to an element of its row's acc. kExact: some key is removed; its value may
// be anything, and 0 * NaN is NaN.
template <bool kExact>
__device__ __forceinline__ void add_weighted(Accum& acc, Accum weight, Accum value) {
  if (kExact && weight < 0) return;
  acc += weight * value;
}

// Reference and sum of a row.
struct SoftmaxSum {
  Accum m;
  Accum l;

  __device__ __forceinline__ void init() {
    m = negative_infinity();
    l = 0;
  }
  // What to subtract from scores: not m before there is one, as -inf - -inf is NaN.
  __device__ __forceinline__ Accum reference() const {
    return m == negative_infinity() ? Accum(0) : m;
  }
  // Raises the reference to `score` if that is larger; afterwards no score up to it has a weight
  // above 1. Rescales the sum and returns the factor for all else that was summed with weights.
  __device__ __forceinline__ Accum raise(Accum score) {
    const Accum old = m;
    m = larger(m, score);
    const Accum shrink = exponential(old - reference());
    l *= shrink;
    return shrink;
  }
  // The weight of a score up to the reference; takes it into the sum.
  __device__ __forceinline__ Accum add(Accum score) {
    if (score == negative_infinity()) return kRemovedWeight;
    const Accum weight = exponential(score - reference());
    l += weight;
    return weight;
  }
  // Whether the score is a key's whose weight is a normal number: add_near() then gives what add()
  // does with fewer instructions. No NaN is.
  __device__ __forceinline__ bool is_near(Accum score) const {
    return score - reference() >= kLeastNormalExponent;
  }
  __device__ __forceinline__ Accum add_near(Accum score) {
    const Accum weight = normal_exponential(score - reference());
    l += weight;
    return weight;
  }
  // Merging states over different keys: m is the largest of their references. Takes in the sum of
  // one and returns what its values weigh; those of an empty one must not be read, nor its m.
  __device__ __forceinline__ Accum add_part(Accum its_m, Accum its_l) {
    if (its_l == 0) return kRemovedWeight;
    const Accum weight = exponential(its_m - reference());
    l += its_l * weight;
    return weight;
  }
};

template <int kValues>
struct SoftmaxState : SoftmaxSum {
  Accum acc[kValues];

  __device__ __forceinline__ void init() {
    SoftmaxSum::init();
#pragma unroll
    for (int i = 0; i < kValues; ++i) acc[i] = 0;
  }

  // Raises the reference and rescales the row.
  __device__ __forceinline__ void raise(Accum score) {
    const Accum shrink = SoftmaxSum::raise(score);
#pragma unroll
    for (int i = 0; i < kValues; ++i) acc[i] *= shrink;
  }

  // Takes a score in and returns the weight of its key.
  __device__ __forceinline__ Accum weigh(Accum score) {
    raise(score);
    return add(score);
  }
};

}  // namespace cumha
