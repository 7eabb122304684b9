// Sums, votes and exchanges among the lanes of a warp.
#pragma once

#include "numeric.cuh"

namespace cumha {

constexpr unsigned kAllLanes = 0xffffffffu;

template <class T>
__device__ __forceinline__ T shuffle_xor(T x, int lanes) {
  return __shfl_xor_sync(kAllLanes, x, lanes);
}

template <class T>
__device__ __forceinline__ T shuffle(T x, int from_lane) {
  return __shfl_sync(kAllLanes, x, from_lane);
}

__device__ __forceinline__ bool any_lane(bool x) { return __any_sync(kAllLanes, x); }
__device__ __forceinline__ bool all_lanes(bool x) { return __all_sync(kAllLanes, x); }
// Bit i is lane i's vote.
__device__ __forceinline__ unsigned ballot(bool x) { return __ballot_sync(kAllLanes, x); }

// The sum over each group of kLanes lanes, kApart from one to the next, both powers of two: the
// same bits in all lanes of a group. All lanes of the warp must take part.
template <int kLanes, int kApart = 1, class T>
__device__ __forceinline__ T group_sum(T x) {
#pragma unroll
  for (int lanes = kLanes / 2 * kApart; lanes >= kApart; lanes /= 2) x += shuffle_xor(x, lanes);
  return x;
}
template <class T>
__device__ __forceinline__ T warp_sum(T x) {
  return group_sum<kWarpSize>(x);
}

// The largest over each of such groups; NaN where all are.
template <int kLanes, int kApart = 1, class T>
__device__ __forceinline__ T group_largest(T x) {
#pragma unroll
  for (int lanes = kLanes / 2 * kApart; lanes >= kApart; lanes /= 2) {
    x = larger(x, shuffle_xor(x, lanes));
  }
  return x;
}
template <class T>
__device__ __forceinline__ T warp_largest(T x) {
  return group_largest<kWarpSize>(x);
}

// x of a lane of the same group of kLanes neighbouring lanes.
template <int kLanes, class T>
__device__ __forceinline__ T group_shuffle(T x, int from_lane) {
  return __shfl_sync(kAllLanes, x, from_lane, kLanes);
}

// Sums kCount values over each group of kLanes neighbouring lanes (both powers of two) and leaves
// every lane with its share of the sums: lane l of a group has, from x[0] on, those of the values
// l * kCount / kLanes and following, kCount / kLanes of them; with fewer values than lanes, one,
// which kLanes / kCount neighbours share. It takes kCount - 1 exchanges or the group's logarithm,
// whichever is more, where a sum of each value for all lanes takes kCount times that logarithm.
template <int kLanes, int kCount, class T>
__device__ __forceinline__ void scatter_sums(T (&x)[kCount]) {
  static_assert((kLanes & (kLanes - 1)) == 0 && (kCount & (kCount - 1)) == 0, "powers of two");
  int count = kCount;
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    if (count == 1) {
      x[0] += shuffle_xor(x[0], lanes);
      continue;
    }
    count /= 2;  // this half is kept, the other lane's half goes to it
    const bool upper = threadIdx.x & lanes;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      if (i >= count) break;
      const T kept = upper ? x[count + i] : x[i];
      const T given = upper ? x[i] : x[count + i];
      x[i] = kept + shuffle_xor(given, lanes);
    }
  }
}

}  // namespace cumha
