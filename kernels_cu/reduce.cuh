// Sums over the lanes of a warp.
#pragma once

#include "config.cuh"

namespace cumha {

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ float shuffle_xor(float x, int lanes) {
  return __shfl_xor_sync(kAllLanes, x, lanes);
}
__device__ __forceinline__ double shuffle_xor(double x, int lanes) {
  return __shfl_xor_sync(kAllLanes, x, lanes);
}

// The sum over all 32 lanes, the same bits in every lane. All lanes must take part.
template <class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) x += shuffle_xor(x, lanes);
  return x;
}

}  // namespace cumha
