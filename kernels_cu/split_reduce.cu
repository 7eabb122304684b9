// split_reduce: merges the States that the splits of every row left in the workspace.
//
//   m = max_s m[s],  l = sum_s l[s] e^(m[s] - m),  o = sum_s o[s] e^(m[s] - m)     if l[s] != 0
//
// A block takes a row. Every warp finds m, l and the weights e^(m[s] - m) for itself, lane i those
// of split i, of 32 splits at a time. Then warp w sums o of splits w, w + kWarps, ..., each lane
// kVec neighbouring elements per step: kAtOnce splits are under way together, as a split on its own
// costs a trip to memory. Empty splits are skipped: their m and o are not read.
//
// Grid: rows; row = (b * heads_q + h) * len_q + q.
// Shared memory: o [kWarps, head_dim_v] Accum, each warp's sum.
#include "output.cuh"
#include "reduce.cuh"
#include "softmax.cuh"

namespace cumha {

constexpr int kWarps = kThreads / kWarpSize;
constexpr int kVec = kHeadDimV % 4 == 0 ? 4 : 1;  // elements of o per load
constexpr int kSteps = ceil_div(kHeadDimV, kVec* kWarpSize);
constexpr int kAtOnce = kSteps > 4 ? 2 : kSteps > 1 ? 4 : 8;  // splits

// Reference and sum of the row's split `s`; an empty state past the last one.
__device__ __forceinline__ SoftmaxSum sum_of_split(const Core& core, long long rows, long long row,
                                                   long long s) {
  SoftmaxSum its;
  its.init();
  if (s < core.splits) its.l = core.split_l[s * rows + row];
  if (its.l != 0) its.m = core.split_m[s * rows + row];
  return its;
}

// The lane's elements of a split's o.
__device__ __forceinline__ void load_o(const Accum* from, int lane, Accum (&o)[kSteps * kVec]) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int d = (i * kWarpSize + lane) * kVec;
    Vector<Accum, kVec> vector{};
    if (d < kHeadDimV) vector = load_once<Accum, kVec>(from + d);
#pragma unroll
    for (int j = 0; j < kVec; ++j) o[i * kVec + j] = vector.values[j];
  }
}

}  // namespace cumha

extern "C" __global__ void __launch_bounds__(cumha::kThreads)
    cumha_split_reduce(const __grid_constant__ cumha::Params p) {
  using namespace cumha;
  const Core& core = p.core;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const long long rows = core.batch * core.heads_q * core.len_q;
  const long long flat = static_cast<long long>(blockIdx.x);
  const long long splits = core.splits;

  SoftmaxSum whole;
  whole.init();
  SoftmaxSum its = sum_of_split(core, rows, flat, lane);
  whole.m = its.m;
  for (long long s = kWarpSize + lane; s < splits; s += kWarpSize) {
    whole.m = larger(whole.m, sum_of_split(core, rows, flat, s).m);
  }
  whole.m = warp_largest(whole.m);

  Accum acc[kSteps * kVec] = {};
  for (long long first = 0; first < splits; first += kWarpSize) {
    if (first > 0) its = sum_of_split(core, rows, flat, first + lane);
    const Accum weight = whole.add_part(its.m, its.l);
    const int count = splits - first < kWarpSize ? static_cast<int>(splits - first) : kWarpSize;
    for (int next = warp; next < count; next += kAtOnce * kWarps) {
      Accum weights[kAtOnce], o[kAtOnce][kSteps * kVec] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int s = next + i * kWarps;
        weights[i] = shuffle(weight, s % kWarpSize);
        if (s >= count) weights[i] = kRemovedWeight;
        if (weights[i] == kRemovedWeight) continue;
        load_o(core.split_o + ((first + s) * rows + flat) * kHeadDimV, lane, o[i]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int j = 0; j < kSteps * kVec; ++j) add_weighted<true>(acc[j], weights[i], o[i][j]);
      }
    }
  }
  whole.l = warp_sum(whole.l);

  Accum* const shared = reinterpret_cast<Accum*>(dynamic_shared());  // [kWarps, kHeadDimV]
#pragma unroll
  for (int i = 0; i < kSteps * kVec; ++i) {
    const int d = (i / kVec * kWarpSize + lane) * kVec + i % kVec;
    if (d < kHeadDimV) shared[warp * kHeadDimV + d] = acc[i];
  }
  __syncthreads();
  const Row row = row_at(core, flat);
  for (int d = threadIdx.x; d < kHeadDimV; d += kThreads) {
    Accum o[1] = {0};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) o[0] += shared[w * kHeadDimV + d];
    store_elements(core, row, 0, d, o, whole.l);
  }
  if (threadIdx.x == 0) store_scalars(core, row, 0, whole.m, whole.l);
}
