// gemv: attention of few query rows, for decode: K and V stream through once with wide loads.
//
//   out[row] = sum_k softmax_k( scale * q[row] . k  where the mask keeps k ) * v[k]
//
// A block takes the packed rows of one KV head (split.cuh). Its warps share the keys in chunks; in
// a chunk, kLanes lanes hold one key, each kVec neighbouring elements per load:
//
//   warp:  | key 0: lanes 0 ... kLanes-1 | key 1: the next kLanes | ...      kUnroll such steps in
//   lane:  | elements l*kVec ... +kVec-1, then kLanes*kVec further |         flight, K and V
//
// Each group of lanes keeps its own online softmax of every row; at the end the groups of a warp
// merge by shuffles and the warps through shared memory.
//
// Grid: batch x heads_kv x row blocks x splits (split.cuh).
// Shared memory: o [kWarps, kBlockRows, head_dim_v], m and l [kWarps, kBlockRows], float.
#include "reduce.cuh"
#include "softmax.cuh"
#include "split.cuh"

namespace cumha {

constexpr int kWarps = kThreads / kWarpSize;
constexpr int kVec = kVectorBytes / int(sizeof(Element));  // elements of one load

__host__ __device__ constexpr int lanes_for(int vectors) {
  int lanes = 1;
  while (lanes < vectors && lanes < kWarpSize) lanes *= 2;
  return lanes;
}
constexpr int kWiderDim = kHeadDim > kHeadDimV ? kHeadDim : kHeadDimV;
constexpr int kLanes = lanes_for(ceil_div(kWiderDim, kVec));  // that hold one key
constexpr int kGroups = kWarpSize / kLanes;                   // keys side by side in a warp
constexpr int kKeyVectors = ceil_div(kHeadDim, kVec* kLanes);
constexpr int kValueVectors = ceil_div(kHeadDimV, kVec* kLanes);
constexpr int kKeyElements = kKeyVectors * kVec;  // of one key, per lane
constexpr int kValueElements = kValueVectors * kVec;
// Bytes of K and V in flight per lane: what two blocks per SM have registers for without spilling
// (tests/compile/test_kernels.py). More rows leave fewer, as their states are larger.
constexpr int kFlightBytes = kBlockRows > 2 ? 32 : 64;
constexpr int kStepBytes = (kKeyVectors + kValueVectors) * kVectorBytes;
constexpr int kUnroll = kFlightBytes / kStepBytes > 0 ? kFlightBytes / kStepBytes : 1;
constexpr int kChunk = kGroups * kUnroll;  // keys of a warp at a time

using State = SoftmaxState<kValueElements>;

// The lane's elements of one key or value; zeros past the head and for keys outside the range.
template <int kDim, int kVectors>
struct Slice {
  Vector<Element, kVec> vectors[kVectors];

  __device__ __forceinline__ void load(const Element* row, long long stride, bool inside) {
    const int lane = threadIdx.x % kLanes;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int d = (i * kLanes + lane) * kVec;
      if (inside && d < kDim) {
        vectors[i] = load_once<Element, kVec>(row + (kVec == 1 ? d * stride : d));
      } else {
        vectors[i] = Vector<Element, kVec>{};
      }
    }
  }
  __device__ __forceinline__ Accum element(int i) const {
    return to_accum(vectors[i / kVec].values[i % kVec]);
  }
};

// q * scale of every row, the lane's elements; zeros for rows past the last.
__device__ __forceinline__ void load_queries(const Core& core, const Work& work,
                                             Accum (&q)[kBlockRows][kKeyElements]) {
  const Strides& stride = core.q_stride;
  const int lane = threadIdx.x % kLanes;
#pragma unroll
  for (int r = 0; r < kBlockRows; ++r) {
    const Row row = row_of(core, work, r < work.rows ? r : 0);
    const Element* from = core.q + row.b * stride.batch + row.h * stride.head + row.q * stride.row;
#pragma unroll
    for (int i = 0; i < kKeyElements; ++i) {
      const int d = (i / kVec * kLanes + lane) * kVec + i % kVec;
      const bool inside = r < work.rows && d < kHeadDim;
      q[r][i] = inside ? to_accum(from[d * stride.element]) * static_cast<Accum>(core.scale) : 0;
    }
  }
}

// Scores of kUnroll keys for every row: the same in all lanes of a group.
__device__ __forceinline__ void score(const Accum (&q)[kBlockRows][kKeyElements],
                                      const Slice<kHeadDim, kKeyVectors> (&keys)[kUnroll],
                                      Accum (&s)[kUnroll][kBlockRows]) {
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
    for (int r = 0; r < kBlockRows; ++r) s[u][r] = 0;
#pragma unroll
    for (int i = 0; i < kKeyElements; ++i) {
      const Accum x = keys[u].element(i);
#pragma unroll
      for (int r = 0; r < kBlockRows; ++r) s[u][r] += q[r][i] * x;
    }
#pragma unroll
    for (int r = 0; r < kBlockRows; ++r) s[u][r] = group_sum<kLanes>(s[u][r]);
  }
}

// Adds weight * value to a row. kExact leaves out values whose key is removed: 0 * NaN is NaN.
template <bool kExact>
__device__ __forceinline__ void add_values(
    State (&states)[kBlockRows], const Accum (&s)[kUnroll][kBlockRows],
    const Accum (&reference)[kBlockRows],
    const Slice<kHeadDimV, kValueVectors> (&values)[kUnroll]) {
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    Accum weight[kBlockRows];
#pragma unroll
    for (int r = 0; r < kBlockRows; ++r) {
      weight[r] = exponential(s[u][r] - reference[r]);
      states[r].l += weight[r];
    }
#pragma unroll
    for (int i = 0; i < kValueElements; ++i) {
      const Accum x = values[u].element(i);
#pragma unroll
      for (int r = 0; r < kBlockRows; ++r) {
        const bool removed = kExact && s[u][r] == negative_infinity();
        states[r].acc[i] += removed ? Accum(0) : weight[r] * x;
      }
    }
  }
}

// Merges the groups of a warp: afterwards each group holds the warp's state.
__device__ __forceinline__ void merge_groups(State& state) {
#pragma unroll
  for (int lanes = kLanes; lanes < kWarpSize; lanes *= 2) {
    const Accum m = shuffle_xor(state.m, lanes), l = shuffle_xor(state.l, lanes);
    Accum acc[kValueElements];
#pragma unroll
    for (int i = 0; i < kValueElements; ++i) acc[i] = shuffle_xor(state.acc[i], lanes);
    state.merge(m, l, acc);
  }
}

// Merges the warps through shared memory and stores the rows: warp w takes rows w, w + kWarps, ...
__device__ __forceinline__ void finish(const Core& core, const Work& work,
                                       State (&states)[kBlockRows]) {
  Accum* const o = reinterpret_cast<Accum*>(dynamic_shared());
  Accum* const m = o + kWarps * kBlockRows * kHeadDimV;
  Accum* const l = m + kWarps * kBlockRows;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int r = 0; r < kBlockRows; ++r) {
    merge_groups(states[r]);
    const int at = warp * kBlockRows + r;
#pragma unroll
    for (int i = 0; i < kValueElements; ++i) {
      const int d = (i / kVec * kLanes + lane) * kVec + i % kVec;
      if (lane < kLanes && d < kHeadDimV) o[at * kHeadDimV + d] = states[r].acc[i];
    }
    if (lane == 0) m[at] = states[r].m, l[at] = states[r].l;
  }
  __syncthreads();
  for (int r = warp; r < work.rows; r += kWarps) {
    const Row row = row_of(core, work, r);
    for (int d = lane; d < ceil_div(kHeadDimV, kWarpSize) * kWarpSize; d += kWarpSize) {
      SoftmaxState<1> whole;
      whole.init();
      for (int w = 0; w < kWarps; ++w) {
        const int at = w * kBlockRows + r;
        const Accum part[1] = {d < kHeadDimV ? o[at * kHeadDimV + d] : Accum(0)};
        whole.merge(m[at], l[at], part);
      }
      store_elements(core, row, work.split, d, whole.acc, whole.l);
      if (d == 0) store_scalars(core, row, work.split, whole.m, whole.l);
    }
  }
}

}  // namespace cumha

// Two blocks per SM: the loads of one are under way while the other computes.
extern "C" __global__ void __launch_bounds__(cumha::kThreads, 2)
    cumha_gemv(const __grid_constant__ cumha::Params p) {
  using namespace cumha;
  const Core& core = p.core;
  const Work work = work_of_block(core, kBlockRows);
  const Index b = static_cast<Index>(work.b), len_q = static_cast<Index>(core.len_q);
  const Index valid = valid_keys(core, work.b);
  const Span heads = heads_of(core, work), queries = queries_of(core, work);
  const Span seen = visible_keys(p, b, heads, queries, valid);
  const Span keys = keys_of_split<kTileKeys>(core, seen, held_keys(core, valid), work.split);
  const KeySource source(core, work.b, work.head_kv);
  const int warp = threadIdx.x / kWarpSize, group = threadIdx.x % kWarpSize / kLanes;

  Accum q[kBlockRows][kKeyElements];
  load_queries(core, work, q);
  State states[kBlockRows];
#pragma unroll
  for (int r = 0; r < kBlockRows; ++r) states[r].init();

  for (Index first = keys.lo + warp * kChunk; first < keys.hi; first += kWarps * kChunk) {
    Slice<kHeadDim, kKeyVectors> k[kUnroll];
    Slice<kHeadDimV, kValueVectors> v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const Index at = first + u * kGroups + group;
      k[u].load(source.key(core, at), core.k_stride.element, at < keys.hi);
      v[u].load(source.value(core, at), core.v_stride.element, at < keys.hi);
    }
    Accum s[kUnroll][kBlockRows];
    score(q, k, s);

    bool removed = false;  // some score is -inf: masked, past the end, or by its own value
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const Index at = first + u * kGroups + group;
#pragma unroll
      for (int r = 0; r < kBlockRows; ++r) {
        bool kept = at < keys.hi;  // rows past the last are computed too, and never stored
        if (!Mask::kAlways && kept && r < work.rows) {
          const Row row = row_of(core, work, r);
          kept = Mask::keep(p.mask, b, static_cast<Index>(row.h), static_cast<Index>(row.q), at,
                            len_q, valid, Mask::stage(p.mask, b, at, len_q, valid));
        }
        if (!kept) s[u][r] = negative_infinity();
        removed = removed || s[u][r] == negative_infinity();
      }
    }
    Accum reference[kBlockRows];
#pragma unroll
    for (int r = 0; r < kBlockRows; ++r) {
      Accum largest = s[0][r];
#pragma unroll
      for (int u = 1; u < kUnroll; ++u) largest = larger(largest, s[u][r]);
      reference[r] = states[r].raise(largest);
    }
    if (any_lane(removed)) {
      add_values<true>(states, s, reference, v);
    } else {
      add_values<false>(states, s, reference, v);
    }
  }
  finish(core, work, states);
}
