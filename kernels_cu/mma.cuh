// Tensor-core products on register fragments: thin wrappers around PTX, each with a host body for
// the emulation that acts on the warp's real fragments.
//
// Of a warp, lane L holds (g = L / 4, t = L % 4; each register two neighbouring 16-bit elements):
//
//   A 16 x 16  a[0]: row g,     columns 2t, 2t+1      a[1]: row g + 8, the same columns
//              a[2]: row g,     columns 2t+8, 2t+9    a[3]: row g + 8, the same columns
//   B 16 x 8   b[0]: rows 2t, 2t+1, column g          b[1]: rows 2t+8, 2t+9, column g
//   C 16 x 8   c[0], c[1]: row g, columns 2t, 2t+1    c[2], c[3]: row g + 8, the same columns
#pragma once

#include "memory.cuh"
#include "numeric.cuh"

namespace cumha {

// Loads kMatrices 8 x 8 matrices of 16-bit elements from shared memory. Lane L gives the address of
// row L % 8 of matrix L / 8 (16 bytes, aligned; lanes past 8 * kMatrices give any valid one).
// Register i is row g, columns 2t, 2t+1 of matrix i; with kTransposed, rows 2t, 2t+1 of column g.
// PTX ISA, Warp Level Matrix Instructions: ldmatrix (sm_75+).
template <int kMatrices, bool kTransposed>
__device__ __forceinline__ void load_matrices(unsigned (&registers)[kMatrices], const void* row) {
  static_assert(kMatrices == 1 || kMatrices == 2 || kMatrices == 4, "ldmatrix loads 1, 2 or 4");
#ifdef CUMHA_EMULATED
  cumha_emulate::load_matrices(registers, kMatrices, kTransposed, row);
#else
  const unsigned address = shared_address(row);
  if constexpr (kMatrices == 4 && !kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kMatrices == 4) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kMatrices == 2 && !kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(registers[0]), "=r"(registers[1])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kMatrices == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(registers[0]), "=r"(registers[1])
                 : "r"(address)
                 : "memory");
  } else if constexpr (!kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(registers[0])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(registers[0])
                 : "r"(address)
                 : "memory");
  }
#endif
}

// c += A B in float, for 16-bit elements of type T: 16 x 8 x 16.
// PTX ISA, Warp Level Matrix Instructions: mma.m16n8k16 (sm_80+).
template <class T>
__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4],
                                             const unsigned (&b)[2]);

#ifdef CUMHA_EMULATED
template <>
__device__ __forceinline__ void multiply_add<__half>(float (&c)[4], const unsigned (&a)[4],
                                                     const unsigned (&b)[2]) {
  cumha_emulate::multiply_add(
      c, a, b, [](unsigned short bits) { return __half2float(__half(__half_raw{bits})); });
}
template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float (&c)[4], const unsigned (&a)[4],
                                                            const unsigned (&b)[2]) {
  cumha_emulate::multiply_add(c, a, b, [](unsigned short bits) {
    return __bfloat162float(__nv_bfloat16(__nv_bfloat16_raw{bits}));
  });
}
#else
template <>
__device__ __forceinline__ void multiply_add<__half>(float (&c)[4], const unsigned (&a)[4],
                                                     const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float (&c)[4], const unsigned (&a)[4],
                                                            const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

}  // namespace cumha
