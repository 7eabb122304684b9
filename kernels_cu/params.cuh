// The one argument of every kernel, passed by value. cumha/params.py packs the same fields in the
// same order; every field has 8 bytes, so neither side has padding.
#pragma once

#include "config.cuh"

namespace cumha {

// Distances between neighbours along each axis, in elements; any sign, 0 for broadcast axes.
struct Strides {
  long long batch;
  long long head;
  long long row;      // one query or key further
  long long element;  // one element of head_dim further
};

struct Core {
  const Element* q;  // [batch, heads_q, len_q, head_dim]
  const Element* k;  // [batch, heads_kv, len_k, head_dim]
  const Element* v;  // [batch, heads_kv, len_k, head_dim_v]
  Element* out;      // [batch, heads_q, len_q, head_dim_v]; null if kStoreState
  float* lse;        // [batch, heads_q, len_q], natural logarithm; null unless kStoreLse
  Accum* state_o;    // [batch, heads_q, len_q, head_dim_v] dense, unnormalised; or null
  Accum* state_m;    // [batch, heads_q, len_q] dense, natural units; null unless kStoreState
  Accum* state_l;    // [batch, heads_q, len_q] dense; null unless kStoreState
  Accum* split_o;    // [splits, batch, heads_q, len_q, head_dim_v] dense; null without splits
  Accum* split_m;    // [splits, batch, heads_q, len_q] dense; null without splits
  Accum* split_l;    // [splits, batch, heads_q, len_q] dense; null without splits
  const KeyLength* key_lengths;  // [batch], valid keys of each sequence; null unless kHasKeyLengths
  Strides q_stride;
  Strides k_stride;
  Strides v_stride;
  Strides out_stride;
  Strides lse_stride;  // element is unused
  long long key_length_stride;
  long long batch;
  long long heads_q;
  long long heads_kv;
  long long len_q;
  long long len_k;           // keys in k and v
  long long key_offset;      // position of key 0 of this call in its sequence
  long long total_keys;      // keys of the whole sequence, as masks see them
  long long splits;          // parts of each row block's keys; 1 without splits
  long long keys_per_split;  // fixed boundaries; 0 elsewhere
  double scale;              // factor of q . k, natural units
};

// A number of the mask expression: an integer or a real, as the expression says.
union MaskNumber {
  long long i;
  double f;
};

// An array of the mask expression; unused axes have extent 1 and stride 0.
struct MaskArray {
  const void* data;
  long long extent[4];
  long long stride[4];  // in elements
};

__host__ __device__ constexpr int at_least_one(int n) { return n > 0 ? n : 1; }

template <int kNumbers, int kArrays>
struct MaskArgsOf {
  MaskNumber numbers[at_least_one(kNumbers)];
  MaskArray arrays[at_least_one(kArrays)];
};
using MaskArgs = MaskArgsOf<kMaskNumbers, kMaskArrays>;

struct Params {
  Core core;
  MaskArgs mask;
};
static_assert(sizeof(Params) == kParamsBytes, "params.cuh and cumha/params.py differ");

}  // namespace cumha
