// The mask of the problem on the device: helpers here, the expression itself in mask_emitted.cuh.
//
// cumha/masks/cuda.py writes `struct Mask` from the user's expression:
//   keep(args, b, h, q, k, len_q, len_k, at)              whether the query sees the key
//   tile_class(args, b, h, q, k, len_q, len_k, rows, at)  what rows h x q see of keys k
//   key_range(args, b, h, q, len_q, len_k)                the keys that the rows can see at all
//   stage(args, b, k, len_q, len_k)                       look-ups in k, not in a row, at one key
//   row_bounds(args, b, h, q, len_q, len_k)               bounds of look-ups without k, over rows
//   each(rows, f)                                         f of each of them
// `at` is what stage gives, `rows` what row_bounds gives; look-ups in both are read where needed.
// If kReadsKeys, the keys of tile_class must be a single one: its look-ups are exact.
// The caller keeps k within the keys there are. Positions are those of the sequence, len_k counts
// its valid keys. Integers follow NumPy: floor division, 0 for a zero divisor, 64-bit wrap-around;
// reals are double and never contracted, so that NumPy agrees bit for bit.
#pragma once

#include "memory.cuh"
#include "params.cuh"

namespace cumha {

enum class TileClass : int { kSkip = 0, kPartial = 1, kFull = 2 };

// Half-open.
struct Span {
  Index lo;
  Index hi;
};

__device__ __forceinline__ Span clamped_span(long long lo, long long hi, Index len_k) {
  lo = lo < 0 ? 0 : lo > len_k ? len_k : lo;
  hi = hi < lo ? lo : hi > len_k ? len_k : hi;
  return Span{static_cast<Index>(lo), static_cast<Index>(hi)};
}

template <class T>
__device__ __forceinline__ T integer_floordiv(T x, T y) {
  if (y == 0) return 0;
  const T quotient = x / y;
  return quotient - ((x % y != 0) && ((x < 0) != (y < 0)));
}
template <class T>
__device__ __forceinline__ T integer_mod(T x, T y) {
  if (y == 0 || y == -1) return 0;  // the smallest integer % -1 overflows
  const T rest = x % y;
  return rest + ((rest != 0 && (rest < 0) != (y < 0)) ? y : 0);
}
template <class T>
__device__ __forceinline__ T integer_min(T x, T y) {
  return x < y ? x : y;
}
template <class T>
__device__ __forceinline__ T integer_max(T x, T y) {
  return x > y ? x : y;
}
template <class T>
__device__ __forceinline__ T integer_neg(T x) {
  return -x;
}

// Two's complement where a result may leave 64 bits.
__device__ __forceinline__ long long wrapped(unsigned long long x) {
  return static_cast<long long>(x);
}
__device__ __forceinline__ unsigned long long raw(long long x) {
  return static_cast<unsigned long long>(x);
}
__device__ __forceinline__ long long wrap_add(long long x, long long y) {
  return wrapped(raw(x) + raw(y));
}
__device__ __forceinline__ long long wrap_sub(long long x, long long y) {
  return wrapped(raw(x) - raw(y));
}
__device__ __forceinline__ long long wrap_mul(long long x, long long y) {
  return wrapped(raw(x) * raw(y));
}
__device__ __forceinline__ long long wrap_neg(long long x) { return wrapped(0ull - raw(x)); }
__device__ __forceinline__ long long wrap_floordiv(long long x, long long y) {
  return y == -1 ? wrap_neg(x) : integer_floordiv(x, y);
}
__device__ __forceinline__ long long wrap_mod(long long x, long long y) {
  return integer_mod(x, y);
}
__device__ __forceinline__ long long wrap_min(long long x, long long y) { return x < y ? x : y; }
__device__ __forceinline__ long long wrap_max(long long x, long long y) { return x > y ? x : y; }

__device__ __forceinline__ double real_add(double x, double y) { return __dadd_rn(x, y); }
__device__ __forceinline__ double real_sub(double x, double y) { return __dadd_rn(x, -y); }
__device__ __forceinline__ double real_mul(double x, double y) { return __dmul_rn(x, y); }
__device__ __forceinline__ double real_neg(double x) { return -x; }
__device__ __forceinline__ double real_min(double x, double y) { return x != x || x < y ? x : y; }
__device__ __forceinline__ double real_max(double x, double y) { return x != x || x > y ? x : y; }
__device__ __forceinline__ double not_a_number() {
  return __longlong_as_double(0x7ff8000000000000LL);
}
__device__ __forceinline__ bool is_finite(double x) { return x - x == 0.0; }

__device__ __forceinline__ double stored_value(__half x) { return __half2float(x); }
__device__ __forceinline__ double stored_value(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T>
__device__ __forceinline__ T stored_value(T x) {
  return x;
}

// A wrong index gives a wrong row, never an illegal access.
__device__ __forceinline__ long long clamped_index(const MaskArray& a, int axis, long long i) {
  const long long last = a.extent[axis] - 1;
  return i < 0 ? 0 : i > last ? last : i;
}

// a[i0, i1, …]
template <class Stored, class T, class... I>
__device__ __forceinline__ T look_up(const MaskArray& a, I... index) {
  const long long at[] = {index...};
  long long offset = 0;
#pragma unroll
  for (int axis = 0; axis < int(sizeof...(I)); ++axis) {
    expect_inside(at[axis], a.extent[axis]);
    offset += clamped_index(a, axis, at[axis]) * a.stride[axis];
  }
  return static_cast<T>(stored_value(static_cast<const Stored*>(a.data)[offset]));
}

// Inclusive ends of an index interval.
struct Ends {
  long long lo;
  long long hi;
};

template <class T>
struct Bounds {
  T lo;
  T hi;
};

// Bounds of every value that an array of Stored can hold, as T. The emitted arithmetic is typed by
// them: wider ones would overflow it.
template <class Stored, class T>
struct Every {  // integers
  static __device__ __forceinline__ Bounds<T> bounds() {
    constexpr bool kSigned = static_cast<Stored>(-1) < static_cast<Stored>(0);
    constexpr int kBits = 8 * int(sizeof(Stored)) - (kSigned ? 1 : 0);
    static_assert(kBits <= 63, "a value fits a signed 64-bit integer");
    constexpr long long kMost = static_cast<long long>(~0ull >> (64 - kBits));
    return {static_cast<T>(kSigned ? -kMost - 1 : 0), static_cast<T>(kMost)};
  }
};
template <class Stored>
struct Every<Stored, bool> {
  static __device__ __forceinline__ Bounds<bool> bounds() { return {false, true}; }
};
template <class Stored>
struct Every<Stored, double> {
  static __device__ __forceinline__ Bounds<double> bounds() {
    return {not_a_number(), not_a_number()};
  }
};

// Bounds of what `x` or `y` bounds.
template <class T>
__device__ __forceinline__ Bounds<T> hull(const Bounds<T>& x, const Bounds<T>& y) {
  return {y.lo < x.lo || y.lo != y.lo ? y.lo : x.lo, y.hi > x.hi || y.hi != y.hi ? y.hi : x.hi};
}

// Most elements that one look-up reads to bound itself over the rows of a block, once, or over the
// rows at one key, for every key; beyond it nothing is said.
constexpr long long kMostOfRows = 64;
constexpr long long kMostOfKey = 32;

// Smallest and largest value of `a` over a box of at most kMost indices.
template <long long kMost, class Stored, class T, class... E>
__device__ __attribute__((noinline)) Bounds<T> look_up_bounds(const MaskArray& a, E... ends) {
  constexpr int kAxes = sizeof...(E);
  const Ends box[] = {ends...};
  long long lo[4] = {0, 0, 0, 0};
  long long hi[4] = {0, 0, 0, 0};
  long long count = 1;
  for (int axis = 0; axis < kAxes; ++axis) {
    lo[axis] = clamped_index(a, axis, box[axis].lo);
    hi[axis] = clamped_index(a, axis, box[axis].hi);
    if (hi[axis] - lo[axis] >= kMost) return Every<Stored, T>::bounds();
    count *= hi[axis] - lo[axis] + 1;
    if (count > kMost) return Every<Stored, T>::bounds();
  }
  T least = look_up<Stored, T>(a, lo[0], lo[1], lo[2], lo[3]);
  T most = least;
  for (long long i = lo[0]; i <= hi[0]; ++i)
    for (long long j = lo[1]; j <= hi[1]; ++j)
      for (long long r = lo[2]; r <= hi[2]; ++r)
        for (long long s = lo[3]; s <= hi[3]; ++s) {
          const T x = look_up<Stored, T>(a, i, j, r, s);
          if (x != x) return Every<Stored, T>::bounds();
          least = x < least ? x : least;
          most = x > most ? x : most;
        }
  return {least, most};
}

}  // namespace cumha

#include "mask_emitted.cuh"
