// What a block works on: some rows of one KV head, over all of their keys or one split of them.
//
// The query heads that share a KV head are packed into rows: packed row r of KV head j is query
// head j * group + r % group at query r / group. So K and V are read once for all of them.
#pragma once

#include "keys.cuh"
#include "output.cuh"
#include "reduce.cuh"

namespace cumha {

struct Work {
  Index b;
  Index head_kv;
  Index first;  // packed row
  int rows;     // of at most kBlockRows
  Index split;
};

// Query heads per KV head.
__device__ __forceinline__ Index group_of(const Core& core) {
  return static_cast<Index>(core.heads_q) / static_cast<Index>(core.heads_kv);
}

// Grid: batch x heads_kv x row blocks x splits, the splits of a row block next to each other.
__device__ __forceinline__ Work work_of_block(const Core& core, int block_rows) {
  const Index heads_kv = static_cast<Index>(core.heads_kv);
  const Index packed = group_of(core) * static_cast<Index>(core.len_q);
  const Index row_blocks = (packed + block_rows - 1) / block_rows;
  const Index splits = kSplitBy == SplitBy::kNone ? 1 : static_cast<Index>(core.splits);
  Index at = static_cast<Index>(blockIdx.x);
  Work work;
  work.split = at % splits;
  at /= splits;
  work.first = at % row_blocks * block_rows;
  at /= row_blocks;
  work.head_kv = at % heads_kv;
  work.b = at / heads_kv;
  const Index left = packed - work.first;
  work.rows = static_cast<int>(left < block_rows ? left : block_rows);
  return work;
}

__device__ __forceinline__ Row row_of(const Core& core, const Work& work, int r) {
  const Index group = group_of(core);
  const Index packed = work.first + r;
  return Row{work.b, work.head_kv * group + packed % group, packed / group};
}

// Query heads and queries of a block's rows, as the mask's walks take them.
__device__ __forceinline__ Span heads_of(const Core& core, const Work& work) {
  const Row first = row_of(core, work, 0), last = row_of(core, work, work.rows - 1);
  const Index group = group_of(core);
  const bool one_query = first.q == last.q;
  const Index lo = one_query ? first.h : work.head_kv * group;
  const Index hi = one_query ? last.h : (work.head_kv + 1) * group - 1;
  return Span{lo, hi + 1};
}
__device__ __forceinline__ Span queries_of(const Core& core, const Work& work) {
  const Row first = row_of(core, work, 0), last = row_of(core, work, work.rows - 1);
  return Span{first.q, last.q + 1};
}

// The part of the visible keys that falls to a split. `held`: the valid keys of this call.
template <int kTileKeys>
__device__ __forceinline__ Span keys_of_split(const Core& core, Span seen, Span held,
                                              long long split) {
  if constexpr (kSplitBy == SplitBy::kNone) return seen;
  long long lo, hi;
  if constexpr (kSplitBy == SplitBy::kTiles) {  // equal numbers of tiles of the visible range
    const long long tiles = (seen.hi - seen.lo + kTileKeys - 1) / kTileKeys;
    lo = seen.lo + split * tiles / core.splits * kTileKeys;
    hi = seen.lo + (split + 1) * tiles / core.splits * kTileKeys;
  } else if constexpr (kSplitBy == SplitBy::kLength) {  // equal parts of all valid keys
    const long long keys = held.hi > held.lo ? held.hi - held.lo : 0;
    lo = held.lo + split * keys / core.splits;
    hi = held.lo + (split + 1) * keys / core.splits;
  } else {  // fixed boundaries, counted from the sequence's first key
    lo = split * core.keys_per_split;
    hi = lo + core.keys_per_split;
  }
  lo = lo < seen.lo ? seen.lo : lo;
  hi = hi > seen.hi ? seen.hi : hi;
  return Span{static_cast<Index>(lo), static_cast<Index>(hi < lo ? lo : hi)};
}

// The class of a tile, by the whole warp: each lane looks at some of its keys, so that bounding a
// look-up reads a few elements per lane.
__device__ __forceinline__ TileClass class_by_warp(const MaskArgs& args, Index b, Span heads,
                                                   Span queries, Span keys, Index len_q,
                                                   Index len_k) {
  if constexpr (Mask::kAlways) return TileClass::kFull;
  const Index share = (keys.hi - keys.lo + kWarpSize - 1) / kWarpSize;
  const Index lo = keys.lo + share * static_cast<Index>(threadIdx.x % kWarpSize);
  const Index hi = lo + share < keys.hi ? lo + share : keys.hi;
  bool none = true, all = true;
  if (lo < hi) {
    const TileClass mine = Mask::tile_class(args, b, heads, queries, Span{lo, hi}, len_q, len_k);
    none = mine == TileClass::kSkip;
    all = mine == TileClass::kFull;
  }
  return all_lanes(none)  ? TileClass::kSkip
         : all_lanes(all) ? TileClass::kFull
                          : TileClass::kPartial;
}

}  // namespace cumha
