// gemv: attention of few query rows, for decode: K and V stream through once with wide loads.
//
//   out[row] = sum_k softmax_k( scale * q[row] . k  where the mask keeps k ) * v[k]
//
// A block takes the packed rows of one KV head (split.cuh). Its warps share the keys in chunks; in
// a chunk, kLanes lanes hold one key, each kVec neighbouring elements per vector:
//
//   warp:  | key 0: lanes 0 ... kLanes-1 | key 1: the next kLanes | ...      kUnroll such steps
//   lane:  | elements l*kVec ... +kVec-1, then kLanes*kVec further |         make a chunk
//
// Each lane copies its vectors into a ring of its own in shared memory, kRingSlots - 1 chunks
// ahead: bytes in flight without registers, and nothing to synchronise. A score is a sum over the
// lanes of its key; summing all scores of a chunk at once leaves each lane with its share of them
// (scatter_sums). That lane tests the mask and computes the weight, once, and hands it to the
// others. A warp has one reference per row, which moves only when some score passes it.
//
// Grid: batch x heads_kv x row blocks x splits (split.cuh).
// Shared memory: the ring [kRingSlots, kUnroll, K and V vectors of a step, kThreads] of vectors;
// after it, in its place: o [kWarps, kBlockRows, head_dim_v], m and l [kWarps, kBlockRows], Accum.
#include "reduce.cuh"
#include "softmax.cuh"
#include "split.cuh"

namespace cumha {

constexpr int kWarps = kThreads / kWarpSize;
constexpr int kVec = kVectorBytes / int(sizeof(Element));  // elements of one vector

// Lanes that hold one key: a power of two, and at least one for each row (each owns scores).
__host__ __device__ constexpr int lanes_for(int vectors) {
  int lanes = kBlockRows;
  while (lanes < vectors && lanes < kWarpSize) lanes *= 2;
  return lanes;
}
constexpr int kWiderDim = kHeadDim > kHeadDimV ? kHeadDim : kHeadDimV;
constexpr int kLanes = lanes_for(ceil_div(kWiderDim, kVec));
constexpr int kGroups = kWarpSize / kLanes;  // keys side by side in a warp
constexpr int kKeyVectors = ceil_div(kHeadDim, kVec* kLanes);
constexpr int kValueVectors = ceil_div(kHeadDimV, kVec* kLanes);
constexpr int kKeyElements = kKeyVectors * kVec;  // of one key, per lane
constexpr int kValueElements = kValueVectors * kVec;

// Steps of a chunk: 128 bytes per lane, as far as that is 1, 2 or 4 steps (GemvTiling in
// cumha/tilings.py counts the same).
constexpr int kStepBytes = (kKeyVectors + kValueVectors) * kVectorBytes;
constexpr int kUnroll = kStepBytes <= 32 ? 4 : kStepBytes <= 64 ? 2 : 1;
constexpr int kChunk = kGroups * kUnroll;  // keys of a warp at a time

// Score i = row * kUnroll + step of a group's keys. A lane owns kOwned neighbouring scores of one
// row, or kCopies lanes own the same one. kRowLanes neighbours own all scores of a row.
constexpr int kScores = kBlockRows * kUnroll;
constexpr int kOwned = kScores > kLanes ? kScores / kLanes : 1;
constexpr int kCopies = kScores < kLanes ? kLanes / kScores : 1;
constexpr int kRowLanes = kLanes / kBlockRows;
static_assert(kBlockRows == 1 || kBlockRows == 2 || kBlockRows == 4, "packed rows of a block");
static_assert(kRingSlots >= 1, "ring");

using Loaded = Vector<Element, kVec>;

// One thread's part of the ring.
struct Ring {
  Loaded* mine;  // [kRingSlots, kUnroll, kKeyVectors + kValueVectors], kThreads apart

  __device__ __forceinline__ Ring()
      : mine(reinterpret_cast<Loaded*>(dynamic_shared()) + threadIdx.x) {}
  __device__ __forceinline__ Loaded* step(int slot, int u) const {
    return mine + (slot * kUnroll + u) * (kKeyVectors + kValueVectors) * kThreads;
  }
};

// Starts to copy the lane's vectors of one key or value; zeros past the head, and for no `inside`.
template <int kDim, int kVectors>
__device__ __forceinline__ void fetch(Loaded* to, const Element* row, long long stride,
                                      bool inside) {
  const int lane = threadIdx.x % kLanes;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int d = (i * kLanes + lane) * kVec;
    const bool there = inside && d < kDim;
    const Element* from = row + (!there ? 0 : kVec == 1 ? d * stride : d);
    if constexpr (kVectorBytes >= 4) {
      copy_async<kVectorBytes>(to + i * kThreads, from, there ? kVectorBytes : 0);
    } else {
      to[i * kThreads].values[0] = there ? *from : Element(0.0f);
    }
  }
}

__device__ __forceinline__ void fetch_chunk(const Core& core, const KeySource& source, Span keys,
                                            Index first, const Ring& ring, int slot) {
  const int group = threadIdx.x % kWarpSize / kLanes;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const Index at = first + u * kGroups + group;
    const bool inside = at < keys.hi;
    const Index position = inside ? at : keys.lo;
    Loaded* const to = ring.step(slot, u);
    fetch<kHeadDim, kKeyVectors>(to, source.key(core, position), core.k_stride.element, inside);
    fetch<kHeadDimV, kValueVectors>(to + kKeyVectors * kThreads, source.value(core, position),
                                    core.v_stride.element, inside);
  }
  commit_copies();
}

// q * scale of every row, the lane's elements; zeros for rows past the last.
__device__ __forceinline__ void load_queries(const Core& core, const Work& work,
                                             Accum (&q)[kBlockRows][kKeyElements]) {
  const long long stride = core.q_stride.element;
  const int lane = threadIdx.x % kLanes;
#pragma unroll
  for (int r = 0; r < kBlockRows; ++r) {
    const Row row = row_of(core, work, r < work.rows ? r : 0);
    const Element* from = row.query(core);
#pragma unroll
    for (int i = 0; i < kKeyElements; ++i) {
      const int d = (i / kVec * kLanes + lane) * kVec + i % kVec;
      const bool inside = r < work.rows && d < kHeadDim;
      q[r][i] = inside ? to_accum(from[d * stride]) * static_cast<Accum>(core.scale) : 0;
    }
  }
}

// The scores of a chunk that this lane owns, in s[0] to s[kOwned - 1].
__device__ __forceinline__ void score(const Accum (&q)[kBlockRows][kKeyElements], const Ring& ring,
                                      int slot, Accum (&s)[kScores]) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) s[i] = 0;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
    for (int i = 0; i < kKeyVectors; ++i) {
      const Loaded key = ring.step(slot, u)[i * kThreads];
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const Accum x = to_accum(key.values[j]);
#pragma unroll
        for (int r = 0; r < kBlockRows; ++r) s[r * kUnroll + u] += q[r][i * kVec + j] * x;
      }
    }
  }
  scatter_sums<kLanes>(s);
}

// Raises the references of all rows to the largest scores in the warp.
__device__ __forceinline__ void raise(Accum largest, SoftmaxSum& own,
                                      Accum (&acc)[kBlockRows][kValueElements]) {
#pragma unroll
  for (int lanes = 1; lanes < kWarpSize; lanes *= 2) {
    if (lanes < kRowLanes || lanes >= kLanes)
      largest = larger(largest, shuffle_xor(largest, lanes));
  }
  const Accum shrink = own.raise(largest);
#pragma unroll
  for (int r = 0; r < kBlockRows; ++r) {
    const Accum its = group_shuffle<kLanes>(shrink, r * kRowLanes);
#pragma unroll
    for (int i = 0; i < kValueElements; ++i) acc[r][i] *= its;
  }
}

// acc += weight * value over a chunk; each weight comes from a lane that owns it.
template <bool kExact>
__device__ __forceinline__ void add_values(const Accum (&weights)[kScores], const Ring& ring,
                                           int slot, Accum (&acc)[kBlockRows][kValueElements]) {
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    Accum weight[kBlockRows];
#pragma unroll
    for (int r = 0; r < kBlockRows; ++r) {
      const int i = r * kUnroll + u;
      weight[r] = group_shuffle<kLanes>(weights[i % kOwned], i / kOwned * kCopies);
    }
#pragma unroll
    for (int i = 0; i < kValueVectors; ++i) {
      const Loaded value = ring.step(slot, u)[(kKeyVectors + i) * kThreads];
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const Accum x = to_accum(value.values[j]);
#pragma unroll
        for (int r = 0; r < kBlockRows; ++r)
          add_weighted<kExact>(acc[r][i * kVec + j], weight[r], x);
      }
    }
  }
}

// Sums the groups of a warp, merges the warps through shared memory and stores the rows, each by
// kThreads / kBlockRows threads.
__device__ __forceinline__ void finish(const Core& core, const Work& work, SoftmaxSum own,
                                       Accum (&acc)[kBlockRows][kValueElements]) {
  Accum* const o = reinterpret_cast<Accum*>(dynamic_shared());
  Accum* const m = o + kWarps * kBlockRows * kHeadDimV;
  Accum* const l = m + kWarps * kBlockRows;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int lanes = kCopies; lanes < kWarpSize; lanes *= 2) {
    if (lanes < kRowLanes || lanes >= kLanes) own.l += shuffle_xor(own.l, lanes);
  }
  wait_copies<0>();
  __syncthreads();  // the ring is done with
  if (lane < kLanes && lane % kRowLanes == 0) {
    m[warp * kBlockRows + lane / kRowLanes] = own.m;
    l[warp * kBlockRows + lane / kRowLanes] = own.l;
  }
#pragma unroll
  for (int r = 0; r < kBlockRows; ++r) {
#pragma unroll
    for (int i = 0; i < kValueElements; ++i) {
#pragma unroll
      for (int lanes = kLanes; lanes < kWarpSize; lanes *= 2)
        acc[r][i] += shuffle_xor(acc[r][i], lanes);
      const int d = (i / kVec * kLanes + lane) * kVec + i % kVec;
      if (lane < kLanes && d < kHeadDimV) o[(warp * kBlockRows + r) * kHeadDimV + d] = acc[r][i];
    }
  }
  __syncthreads();
  // Every thread works out all weights of its row: to share them takes another barrier.
  constexpr int kRowThreads = kThreads / kBlockRows;
  const int r = threadIdx.x / kRowThreads;
  if (r >= work.rows) return;
  SoftmaxSum whole;
  whole.init();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (l[w * kBlockRows + r] != 0) whole.m = larger(whole.m, m[w * kBlockRows + r]);
  }
  Accum weights[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    weights[w] = whole.add_part(m[w * kBlockRows + r], l[w * kBlockRows + r]);
  }
  const Row row = row_of(core, work, r);
  for (int d = threadIdx.x % kRowThreads; d < kHeadDimV; d += kRowThreads) {
    Accum sum[1] = {0};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      add_weighted<true>(sum[0], weights[w], o[(w * kBlockRows + r) * kHeadDimV + d]);
    }
    store_elements(core, row, work.split, d, sum, whole.l);
  }
  if (threadIdx.x % kRowThreads == 0) store_scalars(core, row, work.split, whole.m, whole.l);
}

}  // namespace cumha

// Two blocks per SM: one computes while the other waits for its first keys or merges.
extern "C" __global__ void __launch_bounds__(cumha::kThreads, 2)
    cumha_gemv(const __grid_constant__ cumha::Params p) {
  using namespace cumha;
  const Core& core = p.core;
  const Work work = work_of_block(p);
  const Index b = work.b, len_q = static_cast<Index>(core.len_q), valid = work.valid;
  const Span keys = work.keys;
  const KeySource source(core, b, work.head_kv);
  const Ring ring;
  const int warp = threadIdx.x / kWarpSize, group = threadIdx.x % kWarpSize / kLanes;
  // What this lane owns: scores of one row (of another one's, where there are fewer), from a step.
  const int lane = threadIdx.x % kLanes, its_row = lane / kRowLanes;
  const int its_step = lane / kCopies * kOwned % kUnroll;
  const Row row = row_of(core, work, its_row < work.rows ? its_row : 0);
  SoftmaxSum own;
  own.init();
  Accum acc[kBlockRows][kValueElements] = {};
  Accum q[kBlockRows][kKeyElements];

  Index first = keys.lo + warp * kChunk, ahead = first;
#pragma unroll
  for (int slot = 0; slot < kRingSlots - 1; ++slot, ahead += kWarps * kChunk) {
    fetch_chunk(core, source, keys, ahead, ring, slot);
  }
  load_queries(core, work, q);
  int slot = 0, filled = kRingSlots - 1;

  for (; first < keys.hi; first += kWarps * kChunk, ahead += kWarps * kChunk) {
    fetch_chunk(core, source, keys, ahead, ring, filled);
    wait_copies<kRingSlots - 1>();
    Accum s[kScores];
    score(q, ring, slot, s);

    bool removed = false;  // some score is -inf: masked, past the end, or by its own value
    Accum largest = negative_infinity();
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      const Index at = first + (its_step + i) * kGroups + group;
      bool kept = at < keys.hi;
      if (!Mask::kAlways && kept) {
        kept = Mask::keep(p.mask, b, row.h, row.q, at, len_q, valid,
                          Mask::stage(p.mask, b, at, len_q, valid));
      }
      if (!kept) s[i] = negative_infinity();
      removed = removed || s[i] == negative_infinity();
      largest = larger(largest, s[i]);
    }
    if (any_lane(largest > own.m)) raise(largest, own, acc);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      s[i] = own.add(s[i]);
    }
    if (any_lane(removed)) {
      add_values<true>(s, ring, slot, acc);
    } else {
      add_values<false>(s, ring, slot, acc);
    }
    slot = slot + 1 == kRingSlots ? 0 : slot + 1;
    filled = filled + 1 == kRingSlots ? 0 : filled + 1;
  }
  finish(core, work, own, acc);
}
