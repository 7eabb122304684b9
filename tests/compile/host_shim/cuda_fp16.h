// Just enough of CUDA for g++ to build the mask code: qualifiers, half precision, rounding-mode arithmetic.
#pragma once
#include <cmath>
#include <cstring>
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))

struct __half {
  unsigned short bits;
};
struct __nv_bfloat16 {
  unsigned short bits;
};
inline float __half2float(__half x) {
  _Float16 value;
  std::memcpy(&value, &x.bits, 2);
  return static_cast<float>(value);
}
inline float __bfloat162float(__nv_bfloat16 x) {
  const unsigned int bits = static_cast<unsigned int>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline double __longlong_as_double(long long bits) {
  double value;
  std::memcpy(&value, &bits, 8);
  return value;
}
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
