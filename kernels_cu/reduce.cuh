// Sums, votes and exchanges among the lanes of a warp.
#pragma once

#include "config.cuh"

namespace cumha {

constexpr unsigned kAllLanes = 0xffffffffu;

template <class T>
__device__ __forceinline__ T shuffle_xor(T x, int lanes) {
  return __shfl_xor_sync(kAllLanes, x, lanes);
}

__device__ __forceinline__ float shuffle(float x, int from_lane) {
  return __shfl_sync(kAllLanes, x, from_lane);
}
__device__ __forceinline__ double shuffle(double x, int from_lane) {
  return __shfl_sync(kAllLanes, x, from_lane);
}

__device__ __forceinline__ bool any_lane(bool x) { return __any_sync(kAllLanes, x); }
__device__ __forceinline__ bool all_lanes(bool x) { return __all_sync(kAllLanes, x); }
// Bit i is lane i's vote.
__device__ __forceinline__ unsigned ballot(bool x) { return __ballot_sync(kAllLanes, x); }

// The sum over each group of kLanes neighbouring lanes, a power of two: the same bits in all lanes
// of a group. All lanes of the warp must take part.
template <int kLanes, class T>
__device__ __forceinline__ T group_sum(T x) {
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) x += shuffle_xor(x, lanes);
  return x;
}
template <class T>
__device__ __forceinline__ T warp_sum(T x) {
  return group_sum<kWarpSize>(x);
}

}  // namespace cumha
