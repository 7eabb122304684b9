// tiled: attention in tiles on the CUDA cores, for prefill: any dtype, head size and mask.
//
//   out[row] = sum_k softmax_k( scale * q[row] . k  where the mask keeps k ) * v[k]
//
// A block takes kBlockRows packed rows of one KV head (split.cuh) and walks over its keys in tiles.
// Its 128 threads are kRowThreads x kColumns: thread (y, x) owns rows y, y + kRowThreads, ... of
// scores and output, of every row the keys x, x + kColumns, ... and kGroup neighbouring output
// columns of every kColumns * kGroup. With 8 x 16 threads and groups of 4:
//
//            keys x, x+16, ...           columns 4x..4x+3, 64+4x..
//          +------------------+        +------------------+
//   row y  |  scores (regs)   |  ----> |  output (regs)   |     a row's 16 threads are in one warp
//          +------------------+   p    +------------------+
//
// With kColumns 32 a warp has a row, and each lane head_dim / 32 elements of its output. With
// fewer, neighbouring lanes have the rows of a warp, at the same keys and columns: what they read
// of K and V is the same, and a warp's access of 16 bytes per lane takes two passes, not four.
//
// K and V tiles pass through a ring of kRingSlots slots, filled in the background. Load n, that is
// K of tile n / 2 for an even n, else its V, has slot n % kRingSlots: it begins when load
// n - kRingSlots has been used.
//
//   slots   while K of tile i is used   while V of tile i is used
//   1       nothing is loaded           nothing is loaded           V takes the place of K
//   2       V of tile i                 K of tile i + 1
//   4       and K, V of tile i + 1      and V of tile i + 1, K of tile i + 2
//
// The mask's predicate runs in PARTIAL tiles only; SKIP tiles are not loaded.
//
// Grid: batch x heads_kv x row blocks x splits (split.cuh).
// Shared memory:
//   q       [kBlockRows, kKeyDim] Accum, scaled; the rows of a warp interleaved (place_of_row)
//   p       [kBlockRows, kTileKeys] Accum, likewise
//   ring    K [kTileKeys, kKeyDim + kPad] and V [kTileKeys, kValueDim] Element, twice with 4 slots;
//           with 1 slot the larger of the two
//   staged  [kTileKeys] the mask's look-ups in k alone of a PARTIAL tile, if they are staged
// A warp reads neighbouring rows of K at once: with kPad the planner makes them an odd number of 16
// bytes apart, so that they use all banks.
#include "reduce.cuh"
#include "softmax.cuh"
#include "split.cuh"

namespace cumha {

constexpr int kWarpRows = kWarpSize / kColumns;   // rows of a warp at a time
constexpr int kRowThreads = kThreads / kColumns;  // threads down the rows
constexpr int kRows = kBlockRows / kRowThreads;   // rows of a thread
constexpr int kKeys = kTileKeys / kColumns;       // keys of a thread
static_assert(kThreads == 128 && kBlockRows % kRowThreads == 0 && kTileKeys % 32 == 0, "tiling");
static_assert(kRingSlots == 1 || kRingSlots == 2 || kRingSlots == 4, "ring");

constexpr int kWide = 16 / int(sizeof(Element));  // elements of a 16-byte access
constexpr int kPad = kPaddingBytes / int(sizeof(Element));
constexpr int kKeyDim = ceil_div(kHeadDim, kWide) * kWide;

// Neighbouring output columns of a thread: 16 bytes of them where no more stay unused than with 4,
// else as many as leave less than half of all unused.
__host__ __device__ constexpr int value_dim(int group) {
  return ceil_div(kHeadDimV, kColumns * group) * kColumns * group;
}
constexpr int kNarrow = value_dim(4) < 2 * kHeadDimV ? 4 : value_dim(2) < 2 * kHeadDimV ? 2 : 1;
constexpr int kGroup = kNarrow == 4 && value_dim(kWide) == value_dim(4) ? kWide : kNarrow;
constexpr int kValueDim = value_dim(kGroup);
constexpr int kOutputs = kValueDim / kColumns;  // output columns of a thread

constexpr int kKeyStride = kKeyDim + kPad;           // elements from one key to the next
constexpr int kStep = kKeyDim % 8 == 0 ? 8 : kWide;  // elements of a key in a partial sum

// The ring as pairs of slots, one of K and one of V; a single slot is both of its pair.
constexpr int kPairs = ceil_div(kRingSlots, 2);
constexpr int kPairStride = kTileKeys * (kKeyStride + kValueDim);  // elements
constexpr int kLargerStride = kKeyStride > kValueDim ? kKeyStride : kValueDim;
constexpr int kRingElements = kRingSlots == 1 ? kTileKeys * kLargerStride : kPairs * kPairStride;

constexpr bool kStages = kStageMask && Mask::kStagedBytes > 0;
static_assert(kTileKeys <= kThreads, "each key of a tile has a thread that stages its look-ups");

struct Shared {
  Accum* q;
  Accum* p;
  Element* ring;
  Mask::Staged* staged;

  __device__ __forceinline__ Element* keys(int pair) const { return ring + pair * kPairStride; }
  __device__ __forceinline__ Element* values(int pair) const {
    return keys(pair) + (kRingSlots == 1 ? 0 : kTileKeys * kKeyStride);
  }
};

__device__ __forceinline__ Shared shared_parts() {
  Accum* const q = reinterpret_cast<Accum*>(dynamic_shared());
  Accum* const p = q + kBlockRows * kKeyDim;
  Element* const ring = reinterpret_cast<Element*>(p + kBlockRows * kTileKeys);
  return Shared{q, p, ring, reinterpret_cast<Mask::Staged*>(ring + kRingElements)};
}

// Where q or p, of rows of kLength elements, has row i of a thread, and where a row has an element:
// the rows of a warp take turns, four elements each. So lanes that read 16 bytes of them or write
// one weight use different banks. An element 4 n further is 4 n kWarpRows further.
template <int kLength>
__device__ __forceinline__ int place_of_row(int y, int i) {
  return y / kWarpRows * (kWarpRows * kLength) + y % kWarpRows * 4 + i * kRowThreads * kLength;
}
__device__ __forceinline__ int place_in_row(int element) {
  return element / 4 * (4 * kWarpRows) + element % 4;
}

// Starts to fill a slot with the rows of a tile; zeros past `rows` and, up to kUsed, past the head.
template <int kDim, int kUsed, int kStride>
__device__ __forceinline__ void fetch(Element* slot, const Element* first, const Strides& stride,
                                      int rows) {
  constexpr int kVec = kVectorBytes / int(sizeof(Element));
  constexpr int kAlong = kVectorBytes < 4 ? 32 : 128 / kVectorBytes;  // threads along a row
  constexpr int kApart = kThreads / kAlong;                           // keys of a thread
  const int along = threadIdx.x % kAlong * kVec, mine = threadIdx.x / kAlong;
  const long long element = kVec == 1 ? stride.element : 1;
  const Element* from = first + mine * stride.row + along * element;
  Element* to = slot + mine * kStride + along;
#pragma unroll(kVectorBytes < 4 ? 4 : 1)  // loads are waited for, copies are not
  for (int key = mine; key < kTileKeys; key += kApart) {
    const bool inside = key < rows;  // a copy of 0 bytes reads nothing
#pragma unroll
    for (int step = 0; step < kDim; step += kAlong * kVec) {
      if (kDim % (kAlong * kVec) != 0 && step + along >= kDim) break;
      if constexpr (kVectorBytes >= 4) {
        copy_async<kVectorBytes>(to + step, from + step * element, inside ? kVectorBytes : 0);
      } else {
        to[step] = inside ? from[step * element] : Element(0.0f);
      }
    }
    from += kApart * stride.row;
    to += kApart * kStride;
  }
  if constexpr (kDim < kUsed) {
    constexpr int kTail = kUsed - kDim;
    for (int i = threadIdx.x; i < kTileKeys * kTail; i += kThreads) {
      slot[i / kTail * kStride + kDim + i % kTail] = Element(0.0f);
    }
  }
  commit_copies();
}

// q * scale of the block's rows; zeros past the last row and past the head. A warp reads a row at a
// time, of short rows several, so that each lane has a few loads under way.
__device__ __forceinline__ void load_queries(const Core& core, const Work& work, Accum* to) {
#pragma unroll(kKeyDim > 64 ? 1 : kKeyDim > 32 ? 2 : 4)
  for (int r = threadIdx.x / kWarpSize; r < kBlockRows; r += kThreads / kWarpSize) {
    const Element* const from = row_of(core, work, r < work.rows ? r : 0).query(core);
    Accum* const row = to + place_of_row<kKeyDim>(r, 0);
#pragma unroll
    for (int d = threadIdx.x % kWarpSize; d < kKeyDim; d += kWarpSize) {
      Accum x = 0;
      if (r < work.rows && d < kHeadDim) {
        x = to_accum(from[d * core.q_stride.element]) * static_cast<Accum>(core.scale);
      }
      row[place_in_row(d)] = x;
    }
  }
}

// s = q k^T of the thread's rows and keys.
__device__ __forceinline__ void score(const Shared& shared, const Element* keys, int y, int x,
                                      Accum (&s)[kRows][kKeys]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kKeys; ++j) s[i][j] = 0;
#pragma unroll 1
  for (int d = 0; d < kKeyDim; d += kStep) {
    Accum q[kRows][kStep];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int e = 0; e < kStep; e += 4) {
        const Accum* const from = shared.q + place_of_row<kKeyDim>(y, i) + (d + e) * kWarpRows;
        const auto part = read_shared<Accum, 4>(from);
#pragma unroll
        for (int c = 0; c < 4; ++c) q[i][e + c] = part.values[c];
      }
    }
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      const auto k = read_shared<Element, kStep>(keys + (x + j * kColumns) * kKeyStride + d);
      Accum part[kRows] = {};  // kStep products: long sums of large terms lose less this way
#pragma unroll
      for (int e = 0; e < kStep; ++e) {
        const Accum its = to_accum(k.values[e]);
#pragma unroll
        for (int i = 0; i < kRows; ++i) part[i] += q[i][e] * its;
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) s[i][j] += part[i];
    }
  }
}

// Bit i * kKeys + j: whether row i of a thread sees its key j.
template <bool kMany>
struct BitsOf {
  using Type = unsigned;
};
template <>
struct BitsOf<true> {
  using Type = unsigned long long;
};
using Bits = BitsOf<(kRows * kKeys > 32)>::Type;
static_assert(kRows * kKeys <= 64, "bits");

// -inf where a row does not see a key.
__device__ __forceinline__ void apply_mask(const Params& p, const Work& work,
                                           const Mask::Staged* staged, Index first, int rows,
                                           Index valid, bool partial, int y, int x,
                                           Accum (&s)[kRows][kKeys]) {
  Bits seen = ~Bits(0);
  if (!Mask::kAlways && partial) {
    seen = 0;
    const Index len_q = static_cast<Index>(p.core.len_q);
#pragma unroll 1  // a mask may be long: its text stands here once for each key of a row
    for (int i = 0; i < kRows; ++i) {
      const int r = y + i * kRowThreads;
      const Row row = row_of(p.core, work, r < work.rows ? r : 0);
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        const int key = x + j * kColumns < rows ? x + j * kColumns : rows - 1;  // one that exists
        const Index k = first + key;
        const bool keep =
            Mask::keep(p.mask, row.b, row.h, row.q, k, len_q, valid,
                       kStages ? staged[key] : Mask::stage(p.mask, row.b, k, len_q, valid));
        seen |= static_cast<Bits>(keep) << (i * kKeys + j);
      }
    }
  }
  if (partial || rows < kTileKeys) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        const bool kept = x + j * kColumns < rows && (seen >> (i * kKeys + j) & 1);
        if (!kept) s[i][j] = negative_infinity();
      }
    }
  }
}

using State = SoftmaxState<kOutputs>;

// Blocks per multiprocessor that the compiler leaves registers for: three, if scores and outputs of
// a thread are few.
constexpr bool kFew = kRows * (kKeys + kOutputs) <= 64;
constexpr int kBlocksPerSm = kFew ? 3 : 2;

// Weights of the tile's keys, to shared memory; the states' sums are this thread's share.
template <bool kExact>
__device__ __forceinline__ void put_weights(const Shared& shared, int y, int x,
                                            const Accum (&s)[kRows][kKeys],
                                            State (&states)[kRows]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      const int at = place_of_row<kTileKeys>(y, i) + place_in_row(x) + j * kColumns * kWarpRows;
      shared.p[at] = kExact ? states[i].add(s[i][j]) : states[i].add_near(s[i][j]);
    }
  }
}

// Raises the references and puts the weights. Returns whether some key of the warp's rows is
// removed or so far below a reference that its weight may be denormal: all others take shorter
// ways.
__device__ __forceinline__ bool weigh(const Shared& shared, int y, int x,
                                      const Accum (&s)[kRows][kKeys], State (&states)[kRows]) {
  bool near = true;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    Accum largest = s[i][0], smallest = s[i][0];
#pragma unroll
    for (int j = 1; j < kKeys; ++j) {
      largest = larger(largest, s[i][j]);
      smallest = smaller(smallest, s[i][j]);
    }
    states[i].raise(group_largest<kColumns, kWarpRows>(largest));
    near = near && states[i].is_near(smallest);
  }
  const bool exact = any_lane(!near);
  if (exact) {
    put_weights<true>(shared, y, x, s, states);
  } else {
    put_weights<false>(shared, y, x, s, states);
  }
  return exact;
}

// acc += p v, some keys at a time. kExact leaves out removed keys: 0 * NaN is NaN. Its loop and
// that of long rows take few keys at once, for the time to compile.
template <bool kExact>
__device__ __forceinline__ void add_values(const Shared& shared, const Element* values, int y,
                                           int x, State (&states)[kRows]) {
  constexpr int kAtOnce = kExact ? 2 : 4;
#pragma unroll(kExact || kOutputs > 4 ? 1 : 2)
  for (int key = 0; key < kTileKeys; key += kAtOnce) {
    Vector<Accum, kAtOnce> p[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Accum* const from = shared.p + place_of_row<kTileKeys>(y, i) + place_in_row(key);
      p[i] = read_shared<Accum, kAtOnce>(from);
    }
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) {
#pragma unroll
      for (int j = 0; j < kOutputs / kGroup; ++j) {
        const auto v = read_shared<Element, kGroup>(values + (key + e) * kValueDim +
                                                    (j * kColumns + x) * kGroup);
#pragma unroll
        for (int c = 0; c < kGroup; ++c) {
          const Accum its = to_accum(v.values[c]);
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            add_weighted<kExact>(states[i].acc[j * kGroup + c], p[i].values[e], its);
          }
        }
      }
    }
  }
}

struct Tile {
  Index first;      // key
  TileClass found;  // not PARTIAL where `first` is past the last key
};

// Row after row: divisions and addresses of all rows at once take long to compile. States are in
// registers, which have no index, so they move up.
__device__ __forceinline__ void store(const Core& core, const Work& work, int y, int x,
                                      State (&states)[kRows]) {
#pragma unroll 1
  for (int i = 0; i < kRows; ++i) {
    const State state = states[0];
#pragma unroll
    for (int next = 1; next < kRows; ++next) states[next - 1] = states[next];
    const int r = y + i * kRowThreads;
    const Accum l = group_sum<kColumns, kWarpRows>(state.l);
    if (r >= work.rows) continue;
    const Row row = row_of(core, work, r);
#pragma unroll
    for (int j = 0; j < kOutputs / kGroup; ++j) {
      Accum o[kGroup];
#pragma unroll
      for (int c = 0; c < kGroup; ++c) o[c] = state.acc[j * kGroup + c];
      store_elements(core, row, work.split, (j * kColumns + x) * kGroup, o, l);
    }
    if (x == 0) store_scalars(core, row, work.split, state.m, l);
  }
}

}  // namespace cumha

extern "C" __global__ void __launch_bounds__(cumha::kThreads, cumha::kBlocksPerSm)
    cumha_tiled(const __grid_constant__ cumha::Params p) {
  using namespace cumha;
  const Core& core = p.core;
  const Work work = work_of_block(p);
  const Index b = work.b, len_q = static_cast<Index>(core.len_q), valid = work.valid;
  const Span keys = work.keys;
  const KeySource source(core, b, work.head_kv);
  const Shared shared = shared_parts();
  const int lane = threadIdx.x % kWarpSize, x = lane / kWarpRows;
  const int y = threadIdx.x / kWarpSize * kWarpRows + lane % kWarpRows;

  const auto rows_of = [&](Index first) {
    return static_cast<int>(keys.hi - first < kTileKeys ? keys.hi - first : kTileKeys);
  };
  VisibleTiles<kTileKeys> visible(p.mask, b, work.heads, work.queries, keys, len_q, valid);
  const auto tile_from = [&](Index first) {  // the first one that is not SKIP
    Tile tile;
    tile.first = visible.next(first, tile.found);
    return tile;
  };
  const int mine = threadIdx.x;  // key of a tile whose look-ups this thread stages
  const auto look_up_keys = [&](const Tile& tile) {
    const bool wanted = kStages && tile.found == TileClass::kPartial && mine < rows_of(tile.first);
    return wanted ? Mask::stage(p.mask, b, tile.first + mine, len_q, valid) : Mask::Staged{};
  };
  const auto keep_staged = [&](const Mask::Staged& at) {
    if (kStages && mine < kTileKeys) shared.staged[mine] = at;
  };
  Tile tiles[kPairs + 1];  // from the present one on; past the last one `first` is from keys.hi on
  tiles[0] = tile_from(keys.lo);
#pragma unroll
  for (int i = 1; i < kPairs; ++i) tiles[i] = tile_from(tiles[i - 1].first + kTileKeys);
  int pair = 0;                        // of slots that the present tile has
  const auto load = [&](int number) {  // K of the present tile is load 0, its V load 1, and so on
    const Index first = tiles[number / 2].first;
    const int to = (pair + number / 2) % kPairs;
    if (first >= keys.hi) {
      commit_copies();  // an empty group keeps the count
    } else if (number % 2 == 0) {
      fetch<kHeadDim, kKeyDim, kKeyStride>(shared.keys(to), source.key(core, first), core.k_stride,
                                           rows_of(first));
    } else {
      fetch<kHeadDimV, kValueDim, kValueDim>(shared.values(to), source.value(core, first),
                                             core.v_stride, rows_of(first));
    }
  };

  State states[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) states[i].init();
#pragma unroll
  for (int number = 0; number < kRingSlots; ++number) load(number);
  load_queries(core, work, shared.q);
  keep_staged(look_up_keys(tiles[0]));

  while (tiles[0].first < keys.hi) {
    tiles[kPairs] = tile_from(tiles[kPairs - 1].first + kTileKeys);
    const Tile tile = tiles[0];
    const int rows = rows_of(tile.first);

    wait_copies<kRingSlots - 1>();  // K of this tile; the loads after it may be under way
    __syncthreads();
    Accum s[kRows][kKeys];
    score(shared, shared.keys(pair), y, x, s);
    __syncthreads();  // everybody is done with K
    load(kRingSlots);
    const bool partial = tile.found == TileClass::kPartial;
    apply_mask(p, work, shared.staged, tile.first, rows, valid, partial, y, x, s);
    const bool exact = weigh(shared, y, x, s, states);
    wait_copies<kRingSlots - 1>();  // V of this tile
    __syncthreads();                // also: the weights are written, the staged look-ups are used
    const Mask::Staged ahead = look_up_keys(tiles[1]);
    if (exact) {
      add_values<true>(shared, shared.values(pair), y, x, states);
    } else {
      add_values<false>(shared, shared.values(pair), y, x, states);
    }
    __syncthreads();  // everybody is done with V
    load(kRingSlots + 1);
    keep_staged(ahead);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) tiles[i] = tiles[i + 1];
    pair = (pair + 1) % kPairs;
  }
  store(core, work, y, x, states);
}
