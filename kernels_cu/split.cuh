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
  Span heads;    // of its rows, as the mask's walks take them
  Span queries;  // likewise
  Index valid;   // keys of the entry
  Span keys;     // that some row may see, of this split
};

// Query heads per KV head.
__device__ __forceinline__ Index group_of(const Core& core) {
  return static_cast<Index>(core.heads_q) / static_cast<Index>(core.heads_kv);
}

__device__ __forceinline__ Row row_of(const Core& core, const Work& work, int r) {
  const Index group = group_of(core);
  const Index packed = work.first + r;
  return Row{work.b, work.head_kv * group + packed % group, packed / group};
}

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

// Grid: batch x heads_kv x row blocks x splits, the splits of a row block next to each other. The
// last row block comes first: causal rows have the more keys the later they are, and what starts
// last should be short.
__device__ __forceinline__ Work work_of_block(const Params& p) {
  const Core& core = p.core;
  const Index heads_kv = static_cast<Index>(core.heads_kv);
  const Index packed = group_of(core) * static_cast<Index>(core.len_q);
  const Index row_blocks = (packed + kBlockRows - 1) / kBlockRows;
  const Index splits = kSplitBy == SplitBy::kNone ? 1 : static_cast<Index>(core.splits);
  Index at = static_cast<Index>(blockIdx.x);
  Work work;
  work.split = at % splits;
  at /= splits;
  work.first = (row_blocks - 1 - at % row_blocks) * kBlockRows;
  at /= row_blocks;
  work.head_kv = at % heads_kv;
  work.b = at / heads_kv;
  const Index left = packed - work.first;
  work.rows = static_cast<int>(left < kBlockRows ? left : kBlockRows);
  work.heads = heads_of(core, work);
  work.queries = queries_of(core, work);
  work.valid = valid_keys(core, work.b);
  const Span seen = visible_keys(p, work.b, work.heads, work.queries, work.valid);
  work.keys = keys_of_split(core, seen, held_keys(core, work.valid), work.split);
  return work;
}

// The bounds of all lanes of a warp together. Not a lambda: NVRTC 13.0 takes a generic one for a
// function of the host.
struct HullOfLanes {
  template <typename Bounds>
  __device__ __forceinline__ Bounds operator()(Bounds x) const {
#pragma unroll
    for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
      x = hull(x, {shuffle_xor(x.lo, lanes), shuffle_xor(x.hi, lanes)});
    }
    return x;
  }
};

// Bounds of the mask's look-ups without k over the rows, by the whole warp: each lane reads those
// of some queries.
__device__ __forceinline__ Mask::RowBounds bounds_of_rows(const MaskArgs& args, Index b, Span heads,
                                                          Span queries, Index len_q, Index valid) {
  const Index share = (queries.hi - queries.lo + kWarpSize - 1) / kWarpSize;
  const Index start = queries.lo + share * static_cast<Index>(threadIdx.x % kWarpSize);
  const Index lo = start < queries.hi ? start : queries.hi - 1;
  const Index hi = lo + share < queries.hi ? lo + share : queries.hi;
  const auto mine = Mask::row_bounds(args, b, heads, Span{lo, hi}, len_q, valid);
  return Mask::each(mine, HullOfLanes{});
}

// Walks over the tiles of a row block's keys that some row may see. Every warp finds the classes
// for itself, of 32 tiles at a time: so the mask's look-ups of many tiles are under way together,
// where tile after tile would wait for memory each.
template <int kTileKeys>
struct VisibleTiles {
  static constexpr Index kBatchKeys = kWarpSize * kTileKeys;
  static constexpr int kAtOnce = Mask::kStagedBytes > 0 ? 8 : 1;  // tiles whose look-ups fly

  const MaskArgs& args;
  const Index b;
  const Span heads;
  const Span queries;
  const Span keys;
  const Index len_q;
  const Index valid;
  Index batch;         // key at which the 32 tiles begin
  unsigned seen = 0;   // bit i: tile i is not SKIP
  unsigned whole = 0;  // bit i: tile i is FULL

  __device__ __forceinline__ VisibleTiles(const MaskArgs& args, Index b, Span heads, Span queries,
                                          Span keys, Index len_q, Index valid)
      : args(args),
        b(b),
        heads(heads),
        queries(queries),
        keys(keys),
        len_q(len_q),
        valid(valid),
        batch(keys.lo - kBatchKeys) {}

  // The first tile that is not SKIP, from the one that begins at `tile` on, and its class; keys.hi
  // or more where none is left, and then never PARTIAL. All lanes of the warp must take part. The
  // class is always set: branches on it are taken to be those of the whole warp, and from what a
  // register held before lanes would part, at no place where the compiler brings them together.
  __device__ __forceinline__ Index next(Index tile, TileClass& found) {
    if constexpr (Mask::kAlways) {
      found = TileClass::kFull;
    } else {
      while (tile < keys.hi) {
        if (tile >= batch + kBatchKeys) classify(tile);
        const int i = static_cast<int>(tile - batch) / kTileKeys;
        const int skipped = __ffs(seen >> i) - 1;
        if (skipped >= 0) {
          found = whole >> (i + skipped) & 1 ? TileClass::kFull : TileClass::kPartial;
          return tile + skipped * kTileKeys;
        }
        tile = batch + kBatchKeys;
      }
      found = TileClass::kSkip;
    }
    return tile;
  }

 private:
  __device__ __forceinline__ void classify(Index first) {
    const Mask::RowBounds rows = bounds_of_rows(args, b, heads, queries, len_q, valid);
    batch = first;
    if constexpr (Mask::kReadsKeys) {
      classify_by_keys(rows);
    } else {  // a tile per lane
      const Index lo = batch + static_cast<Index>(threadIdx.x % kWarpSize) * kTileKeys;
      const Index hi = lo + kTileKeys < keys.hi ? lo + kTileKeys : keys.hi;
      const TileClass mine = lo < hi ? class_of(Span{lo, hi}, {}, rows) : TileClass::kSkip;
      seen = ballot(mine != TileClass::kSkip);
      whole = ballot(mine == TileClass::kFull);
    }
  }

  // A tile takes all lanes, key by key: neighbours read neighbours, and the look-ups of a single
  // key are exact. Past the end the last key counts again.
  __device__ __forceinline__ void classify_by_keys(const Mask::RowBounds& rows) {
    constexpr int kKeys = kTileKeys / kWarpSize;  // of a tile, per lane
    seen = whole = 0;
#pragma unroll 1
    for (int i = 0; i < kWarpSize && batch + i * kTileKeys < keys.hi; i += kAtOnce) {
      const Index from = batch + i * kTileKeys + static_cast<Index>(threadIdx.x % kWarpSize);
      const auto key = [&](int j) {
        const Index k = from + j * kWarpSize;
        return k < keys.hi ? k : keys.hi - 1;
      };
      Mask::Staged at[kAtOnce * kKeys];
#pragma unroll
      for (int j = 0; j < kAtOnce * kKeys; ++j) at[j] = Mask::stage(args, b, key(j), len_q, valid);
#pragma unroll
      for (int t = 0; t < kAtOnce; ++t) {
        bool none = true, all = true;
#pragma unroll
        for (int j = t * kKeys; j < (t + 1) * kKeys; ++j) {
          const TileClass mine = class_of(Span{key(j), key(j) + 1}, at[j], rows);
          none = none && mine == TileClass::kSkip;
          all = all && mine == TileClass::kFull;
        }
        if (any_lane(!none)) seen |= 1u << (i + t);
        if (all_lanes(all)) whole |= 1u << (i + t);
      }
    }
  }

  __device__ __forceinline__ TileClass class_of(Span span, const Mask::Staged& at,
                                                const Mask::RowBounds& rows) const {
    return Mask::tile_class(args, b, heads, queries, span, len_q, valid, rows, at);
  }
};

}  // namespace cumha
