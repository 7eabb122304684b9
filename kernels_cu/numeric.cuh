// Conversions between storage and arithmetic, and the few functions the kernels need.
#pragma once

#include "config.cuh"

namespace cumha {

// IEEE infinity, not a large number: a large finite mask value would be a bias.
__device__ __forceinline__ Accum negative_infinity() {
  return static_cast<Accum>(-__longlong_as_double(0x7ff0000000000000LL));
}

__device__ __forceinline__ Accum to_accum(__half x) { return static_cast<Accum>(__half2float(x)); }
__device__ __forceinline__ Accum to_accum(__nv_bfloat16 x) {
  return static_cast<Accum>(__bfloat162float(x));
}
__device__ __forceinline__ Accum to_accum(float x) { return static_cast<Accum>(x); }
__device__ __forceinline__ Accum to_accum(double x) { return static_cast<Accum>(x); }

// The one rounding of a result, to nearest even.
__device__ __forceinline__ void store_rounded(__half* to, Accum x) {
  *to = __float2half_rn(static_cast<float>(x));
}
__device__ __forceinline__ void store_rounded(__nv_bfloat16* to, Accum x) {
  *to = __float2bfloat16_rn(static_cast<float>(x));
}
__device__ __forceinline__ void store_rounded(float* to, Accum x) { *to = static_cast<float>(x); }
__device__ __forceinline__ void store_rounded(double* to, Accum x) { *to = static_cast<double>(x); }

// e^x. The factor comes after the subtraction of two scores, never into a score itself: scores near
// the largest float must not overflow.
__device__ __forceinline__ float exponential(float x) { return exp2f(x * 1.4426950408889634f); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }

// The same for an x from kLeastNormalExponent on: exp2f scales its argument and its result, in case
// that is denormal; without it nothing is flushed here. PTX ISA, Floating Point Instructions: ex2.
constexpr float kLeastNormalExponent = -87.0f;
__device__ __forceinline__ float normal_exponential(float x) {
#ifdef CUMHA_EMULATED
  const float result = exponential(x);
  return result < 1.17549435e-38f ? 0.0f : result;  // .ftz
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634f));
  return result;
#endif
}
__device__ __forceinline__ double normal_exponential(double x) { return exp(x); }

__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }

// The larger number; a NaN loses. Whether a row is empty is therefore asked of its sum.
__device__ __forceinline__ float larger(float x, float y) { return fmaxf(x, y); }
__device__ __forceinline__ double larger(double x, double y) { return fmax(x, y); }
__device__ __forceinline__ float smaller(float x, float y) { return fminf(x, y); }
__device__ __forceinline__ double smaller(double x, double y) { return fmin(x, y); }

}  // namespace cumha
