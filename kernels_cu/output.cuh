// A row of the problem, and where its result goes: the output, a State of the caller's, or the
// workspace of a split.
#pragma once

#include "memory.cuh"
#include "numeric.cuh"
#include "params.cuh"

namespace cumha {

// A softmax row of the problem.
struct Row {
  Index b;
  Index h;
  Index q;

  // Position in dense [batch, heads_q, len_q] arrays.
  __device__ __forceinline__ long long flat(const Core& core) const {
    return (b * core.heads_q + h) * core.len_q + q;
  }
  __device__ __forceinline__ const Element* query(const Core& core) const {
    const Strides& stride = core.q_stride;
    return core.q + b * stride.batch + h * stride.head + q * stride.row;
  }
};

// The row at a position of those arrays.
__device__ __forceinline__ Row row_at(const Core& core, long long flat) {
  const long long bh = flat / core.len_q;
  return Row{static_cast<Index>(bh / core.heads_q), static_cast<Index>(bh % core.heads_q),
             static_cast<Index>(flat % core.len_q)};
}

// Stores neighbouring elements of a row from d on, kVec at a time, as far as the head goes.
template <int kVec, class T, int kCount>
__device__ __forceinline__ void store_vectors(T* row, long long stride, int d,
                                              const Accum (&x)[kCount]) {
  Vector<T, kVec> vector;
#pragma unroll
  for (int i = 0; i < kCount; i += kVec) {
    if (d + i >= kHeadDimV) break;
#pragma unroll
    for (int j = 0; j < kVec; ++j) store_rounded(&vector.values[j], x[i + j]);
    store_vector(row + (kVec == 1 ? (d + i) * stride : d + i), vector);
  }
}

// kCount neighbouring elements of a row from d on, not normalised yet; l is the row's sum.
// Stores vectors: in the output as wide as the host found its rows aligned (kOutVectorBytes).
template <int kCount>
__device__ __forceinline__ void store_elements(const Core& core, const Row& row, long long split,
                                               int d, const Accum (&o)[kCount], Accum l) {
  const long long rows = core.batch * core.heads_q * core.len_q;
  if constexpr (kSplitBy != SplitBy::kNone || kStoreState) {
    Accum* to = kSplitBy != SplitBy::kNone ? core.split_o + split * rows * kHeadDimV : core.state_o;
    constexpr int kVec = kCount % 4 == 0 && kHeadDimV % 4 == 0 ? 4 : 1;  // rows begin at vectors
    store_vectors<kVec>(to + row.flat(core) * kHeadDimV, 1, d, o);
  } else {
    const Strides& stride = core.out_stride;
    Element* to = core.out + row.b * stride.batch + row.h * stride.head + row.q * stride.row;
    constexpr int kAligned = kOutVectorBytes / int(sizeof(Element));
    constexpr int kVec = kAligned < kCount ? kAligned : kCount;
    Accum x[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = l == 0 ? Accum(0) : o[i] / l;
    store_vectors<kVec>(to, stride.element, d, x);
  }
}

// What a row has once: its LSE, or reference and sum of its State. By one thread.
__device__ __forceinline__ void store_scalars(const Core& core, const Row& row, long long split,
                                              Accum m, Accum l) {
  const long long rows = core.batch * core.heads_q * core.len_q;
  if constexpr (kSplitBy != SplitBy::kNone) {
    core.split_m[split * rows + row.flat(core)] = m;
    core.split_l[split * rows + row.flat(core)] = l;
  } else if constexpr (kStoreState) {
    core.state_m[row.flat(core)] = m;
    core.state_l[row.flat(core)] = l;
  } else if constexpr (kStoreLse) {
    const Strides& at = core.lse_stride;
    const Accum lse = l == 0 ? negative_infinity() : m + logarithm(l);
    core.lse[row.b * at.batch + row.h * at.head + row.q * at.row] = static_cast<float>(lse);
  }
}

}  // namespace cumha
