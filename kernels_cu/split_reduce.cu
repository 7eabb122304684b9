// split_reduce: merges the States that the splits of every row left in the workspace.
//
//   m = max_s m[s],  l = sum_s l[s] e^(m[s] - m),  o = sum_s o[s] e^(m[s] - m)     if l[s] != 0
//
// A warp takes a row. Lane i reads m and l of split i, of 32 splits at a time, once; they then go
// round by shuffles. Lanes hold kVec neighbouring elements of o per step. Empty splits are skipped:
// their o is not read.
//
// Grid: rows, one per warp; row = (b * heads_q + h) * len_q + q. Shared memory: none.
#include "memory.cuh"
#include "output.cuh"
#include "reduce.cuh"
#include "softmax.cuh"

namespace cumha {

constexpr int kVec = kHeadDimV % 4 == 0 ? 4 : 1;  // elements of o per load
constexpr int kSteps = ceil_div(kHeadDimV, kVec* kWarpSize);
using State = SoftmaxState<kSteps * kVec>;

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
  const int lane = threadIdx.x % kWarpSize;
  const long long rows = core.batch * core.heads_q * core.len_q;
  const long long flat =
      static_cast<long long>(blockIdx.x) * (kThreads / kWarpSize) + threadIdx.x / kWarpSize;
  if (flat >= rows) return;
  const Row row = row_at(core, flat);

  State state;
  state.init();
  for (long long first = 0; first < core.splits; first += kWarpSize) {
    const bool mine = first + lane < core.splits;
    const long long at = (first + lane) * rows + flat;
    const Accum l = mine ? core.split_l[at] : Accum(0);
    const Accum m = mine && l != 0 ? core.split_m[at] : negative_infinity();
    const int count = core.splits - first < kWarpSize ? int(core.splits - first) : kWarpSize;
    for (int s = 0; s < count; ++s) {
      const Accum its_l = shuffle(l, s), its_m = shuffle(m, s);
      if (its_l == 0) continue;
      Accum o[kSteps * kVec];
      load_o(core.split_o + ((first + s) * rows + flat) * kHeadDimV, lane, o);
      state.merge(its_m, its_l, o);
    }
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    Accum o[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) o[j] = state.acc[i * kVec + j];
    store_elements(core, row, 0, (i * kWarpSize + lane) * kVec, o, state.l);
  }
  if (lane == 0) store_scalars(core, row, 0, state.m, state.l);
}
