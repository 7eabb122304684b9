// naive: attention as its formula, one warp per query row. The oracle on the device, kept forever.
//
//   out[b, h, q] = sum_k softmax_k( scale * q . k  where the mask keeps k ) * v[k]
//
// A row walks over its visible keys one by one; the 32 lanes share head_dim:
//
//   lane        0    1   ...  31 |  0    1   ...      element d of q, k, v belongs to lane d % 32
//   element     0    1   ...  31 | 32   33   ...
//
// Grid: 4 rows per block of 128 threads, row = (b * heads_q + h) * len_q + q; blocks stride.
// Shared memory: none. Nothing of a key that the mask removes is read.
#include "keys.cuh"
#include "output.cuh"
#include "reduce.cuh"
#include "softmax.cuh"

namespace cumha {

static_assert(kSplitBy == SplitBy::kNone, "a warp walks over all keys of its row");
constexpr int kRowsPerBlock = kThreads / kWarpSize;
constexpr int kQueryValues = ceil_div(kHeadDim, kWarpSize);    // elements of q per lane
constexpr int kOutputValues = ceil_div(kHeadDimV, kWarpSize);  // elements of out per lane

// q * scale, in Accum: one multiplication per element instead of one per score.
__device__ __forceinline__ void load_query(const Core& core, const Row& row, int lane,
                                           Accum (&q)[kQueryValues]) {
  const Element* from = row.query(core);
  const long long stride = core.q_stride.element;
#pragma unroll
  for (int i = 0; i < kQueryValues; ++i) {
    const int d = i * kWarpSize + lane;
    q[i] = d < kHeadDim ? to_accum(from[d * stride]) * static_cast<Accum>(core.scale) : Accum(0);
  }
}

__device__ __forceinline__ Accum dot(const Accum (&q)[kQueryValues], const Element* key,
                                     long long stride, int lane) {
  Accum sum = 0;
#pragma unroll
  for (int i = 0; i < kQueryValues; ++i) {
    const int d = i * kWarpSize + lane;
    if (d < kHeadDim) sum += q[i] * to_accum(key[d * stride]);
  }
  return warp_sum(sum);
}

__device__ __forceinline__ void add_value(SoftmaxState<kOutputValues>& state, Accum weight,
                                          const Element* value, long long stride, int lane) {
#pragma unroll
  for (int i = 0; i < kOutputValues; ++i) {
    const int d = i * kWarpSize + lane;
    if (d < kHeadDimV) state.acc[i] += weight * to_accum(value[d * stride]);
  }
}

__device__ __forceinline__ void store(const Core& core, const Row& row,
                                      const SoftmaxState<kOutputValues>& state, int lane) {
#pragma unroll
  for (int i = 0; i < kOutputValues; ++i) {
    const Accum element[1] = {state.acc[i]};
    store_elements(core, row, 0, i * kWarpSize + lane, element, state.l);
  }
  if (lane == 0) store_scalars(core, row, 0, state.m, state.l);
}

}  // namespace cumha

// One block per SM is all it asks for: more would cap the registers, and large heads would spill.
extern "C" __global__ void __launch_bounds__(cumha::kThreads, 1)
    cumha_naive(const __grid_constant__ cumha::Params p) {
  using namespace cumha;
  const Core& core = p.core;
  const int lane = threadIdx.x % kWarpSize;
  const long long rows = core.batch * core.heads_q * core.len_q;
  const long long first =
      static_cast<long long>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarpSize;
  const long long step = static_cast<long long>(gridDim.x) * kRowsPerBlock;

  for (long long flat = first; flat < rows; flat += step) {
    const Row row = row_at(core, flat);
    const KeySource keys(core, row.b, row.h / (core.heads_q / core.heads_kv));
    const Index len_q = static_cast<Index>(core.len_q);
    const Index valid = valid_keys(core, row.b);
    const Span seen = visible_keys(p, row.b, {row.h, row.h + 1}, {row.q, row.q + 1}, valid);

    Accum query[kQueryValues];
    load_query(core, row, lane, query);
    SoftmaxState<kOutputValues> state;
    state.init();

    for (Index k = seen.lo; k < seen.hi; ++k) {
      const Mask::Staged at = Mask::stage(p.mask, row.b, k, len_q, valid);
      if (!Mask::keep(p.mask, row.b, row.h, row.q, k, len_q, valid, at)) continue;
      const Accum score = dot(query, keys.key(core, k), core.k_stride.element, lane);
      if (score == negative_infinity()) continue;  // -inf removes a key, whatever its cause
      const Accum weight = state.weigh(score);
      add_value(state, weight, keys.value(core, k), core.v_stride.element, lane);
    }

    store(core, row, state, lane);
  }
}
