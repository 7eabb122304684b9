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

  // Takes a score in: rescales the row to the new reference, returns the weight of the key.
  __device__ __forceinline__ Accum weigh(Accum score) {
    const Accum m_new = larger(m, score);
    const Accum reference = m_new == negative_infinity() ? Accum(0) : m_new;  // -inf - -inf is NaN
    const Accum shrink = exponential(m - reference);
    const Accum weight = exponential(score - reference);
    m = m_new;
    l = l * shrink + weight;
#pragma unroll
    for (int i = 0; i < kValues; ++i) acc[i] *= shrink;
    return weight;
  }

  __device__ __forceinline__ bool empty() const { return l == 0; }

  // Element i of the output; exactly 0 for a row with no key.
  __device__ __forceinline__ Accum output(int i) const { return empty() ? Accum(0) : acc[i] / l; }

  // Natural logarithm of the sum of e^score.
  __device__ __forceinline__ Accum log_sum() const {
    return empty() ? negative_infinity() : m + logarithm(l);
  }
};

}  // namespace cumha
