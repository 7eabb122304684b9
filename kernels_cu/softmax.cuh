// The online softmax: what is left of a row after any number of its keys.
//
//   m    the reference that was subtracted: the largest score so far
//   l    sum of e^(score - m)
//   acc  sum of e^(score - m) * v, this thread's elements
//
// Rules: a score of -inf is no key and must not be given to weigh(). Empty means l == 0, never
// m == -inf: larger() drops a NaN, so m alone cannot tell a row without keys from NaN scores.
#pragma once

#include "numeric.cuh"

namespace cumha {

template <int kValues>
struct SoftmaxState {
  Accum m;
  Accum l;
  Accum acc[kValues];

  __device__ __forceinline__ void init() {
    m = negative_infinity();
    l = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) acc[i] = 0;
  }

  // Raises the reference to `score` if that is larger and rescales the row; returns what to
  // subtract from scores. Afterwards no score up to `score` has a weight above 1.
  __device__ __forceinline__ Accum raise(Accum score) {
    const Accum m_new = larger(m, score);
    const Accum reference = m_new == negative_infinity() ? Accum(0) : m_new;  // -inf - -inf is NaN
    const Accum shrink = exponential(m - reference);
    m = m_new;
    l *= shrink;
#pragma unroll
    for (int i = 0; i < kValues; ++i) acc[i] *= shrink;
    return reference;
  }

  // Takes a score in and returns the weight of its key.
  __device__ __forceinline__ Accum weigh(Accum score) {
    const Accum weight = exponential(score - raise(score));
    l += weight;
    return weight;
  }

  // Takes in a state over other keys; an empty one changes nothing, and its m and acc are not read.
  __device__ __forceinline__ void merge(Accum other_m, Accum other_l,
                                        const Accum (&other_acc)[kValues]) {
    if (other_l == 0) return;
    const Accum reference = raise(other_m);
    const Accum weight = exponential(other_m - reference);
    l += other_l * weight;
#pragma unroll
    for (int i = 0; i < kValues; ++i) acc[i] += other_acc[i] * weight;
  }
};

}  // namespace cumha
