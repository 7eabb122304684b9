// What was decided before compiling: the only file that reads CUMHA_* macros.
//
// The host writes the macros at the top of the translation unit (kernel_defines in cumha/plan.py);
// they leave this file as types and constants.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace cumha {

using Element = CUMHA_ELEMENT;  // of q, k, v and out

// Scores, softmax and sums: float, but double for double inputs.
template <class T>
struct AccumulatorOf {
  using Type = float;
};
template <>
struct AccumulatorOf<double> {
  using Type = double;
};
using Accum = AccumulatorOf<Element>::Type;

constexpr int kHeadDim = CUMHA_HEAD_DIM;
constexpr int kHeadDimV = CUMHA_HEAD_DIM_V;
static_assert(1 <= kHeadDim && kHeadDim <= 512, "head_dim");
static_assert(1 <= kHeadDimV && kHeadDimV <= 512, "head_dim_v");

// Indices of one problem fit 2^28 unless the host says otherwise.
#if CUMHA_WIDE_INDEX
using Index = long long;
#else
using Index = int;
#endif

// How many keys of a batch entry are valid: all, or an array of that many bits per entry.
constexpr bool kHasKeyLengths = CUMHA_KEY_LENGTH_BITS != 0;
#if CUMHA_KEY_LENGTH_BITS == 64
using KeyLength = long long;
#else
using KeyLength = int;
#endif

constexpr bool kStoreState = CUMHA_STORE_STATE;  // o, m, l instead of out and lse
constexpr bool kStoreLse = CUMHA_STORE_LSE;

// How a row block's keys are divided over blocks; with splits, states go to the workspace.
enum class SplitBy { kNone = 0, kTiles = 1, kLength = 2, kFixed = 3 };
constexpr SplitBy kSplitBy = static_cast<SplitBy>(CUMHA_SPLIT_BY);

// Tiling, by path; 0 where a path has no use for it.
constexpr int kThreads = CUMHA_THREADS;
constexpr int kBlockRows = CUMHA_BLOCK_ROWS;  // packed query rows of a block
constexpr int kTileKeys = CUMHA_TILE_KEYS;
constexpr int kColumns = CUMHA_COLUMNS;        // threads that share a query row
constexpr int kRingSlots = CUMHA_RING_SLOTS;   // buffers that tiles of K and V pass through
constexpr int kPaddingBytes = CUMHA_PADDING;   // between the rows of a tile in shared memory
constexpr bool kStageMask = CUMHA_STAGE_MASK;  // look-ups in k alone come from shared memory

// Widest aligned access to rows of k and v, and of out, in bytes: one element or up to 16.
constexpr int kVectorBytes = CUMHA_VECTOR_BYTES;
constexpr int kOutVectorBytes = CUMHA_OUT_VECTOR_BYTES;

constexpr int kMaskNumbers = CUMHA_MASK_NUMBERS;
constexpr int kMaskArrays = CUMHA_MASK_ARRAYS;
constexpr int kParamsBytes = CUMHA_PARAMS_BYTES;

constexpr int kWarpSize = 32;

__host__ __device__ constexpr int ceil_div(int n, int d) { return (n + d - 1) / d; }

}  // namespace cumha
