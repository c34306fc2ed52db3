// Warp-level matrix multiply-accumulate of 8-bit floats and of narrower ones in bytes (PTX ISA
// 9.7.14.5 "Matrix Fragments for mma.m16n8k32"); fragments as in mma_integer.cuh, sums are floats.
#pragma once

#include <humming/types.cuh>

namespace humming::ptx {

template <class A, class B>
__device__ void mma_m16n8k32_f32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);

#define HUMMING_MMA_FLOAT8(A, B, KIND, TYPES)                                                      \
  template <>                                                                                      \
  __device__ inline void mma_m16n8k32_f32<A, B>(float (&d)[4], const u32(&a)[4], u32 b0, u32 b1) { \
    asm volatile("mma.sync.aligned.m16n8k32.row.col" KIND ".f32." TYPES                            \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                      \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                  \
  }

HUMMING_MMA_FLOAT8(E4m3, E4m3, "", "e4m3.e4m3")
HUMMING_MMA_FLOAT8(E4m3, E5m2, "", "e4m3.e5m2")
HUMMING_MMA_FLOAT8(E4m3, E3m2, ".kind::f8f6f4", "e4m3.e3m2")
HUMMING_MMA_FLOAT8(E4m3, E2m3, ".kind::f8f6f4", "e4m3.e2m3")
HUMMING_MMA_FLOAT8(E4m3, E2m1, ".kind::f8f6f4", "e4m3.e2m1")
HUMMING_MMA_FLOAT8(E5m2, E4m3, "", "e5m2.e4m3")
HUMMING_MMA_FLOAT8(E5m2, E5m2, "", "e5m2.e5m2")
HUMMING_MMA_FLOAT8(E5m2, E3m2, ".kind::f8f6f4", "e5m2.e3m2")
HUMMING_MMA_FLOAT8(E5m2, E2m3, ".kind::f8f6f4", "e5m2.e2m3")
HUMMING_MMA_FLOAT8(E5m2, E2m1, ".kind::f8f6f4", "e5m2.e2m1")
HUMMING_MMA_FLOAT8(E3m2, E4m3, ".kind::f8f6f4", "e3m2.e4m3")
HUMMING_MMA_FLOAT8(E3m2, E5m2, ".kind::f8f6f4", "e3m2.e5m2")
HUMMING_MMA_FLOAT8(E3m2, E3m2, ".kind::f8f6f4", "e3m2.e3m2")
HUMMING_MMA_FLOAT8(E3m2, E2m3, ".kind::f8f6f4", "e3m2.e2m3")
HUMMING_MMA_FLOAT8(E3m2, E2m1, ".kind::f8f6f4", "e3m2.e2m1")
HUMMING_MMA_FLOAT8(E2m3, E4m3, ".kind::f8f6f4", "e2m3.e4m3")
HUMMING_MMA_FLOAT8(E2m3, E5m2, ".kind::f8f6f4", "e2m3.e5m2")
HUMMING_MMA_FLOAT8(E2m3, E3m2, ".kind::f8f6f4", "e2m3.e3m2")
HUMMING_MMA_FLOAT8(E2m3, E2m3, ".kind::f8f6f4", "e2m3.e2m3")
HUMMING_MMA_FLOAT8(E2m3, E2m1, ".kind::f8f6f4", "e2m3.e2m1")
HUMMING_MMA_FLOAT8(E2m1, E4m3, ".kind::f8f6f4", "e2m1.e4m3")
HUMMING_MMA_FLOAT8(E2m1, E5m2, ".kind::f8f6f4", "e2m1.e5m2")
HUMMING_MMA_FLOAT8(E2m1, E3m2, ".kind::f8f6f4", "e2m1.e3m2")
HUMMING_MMA_FLOAT8(E2m1, E2m3, ".kind::f8f6f4", "e2m1.e2m3")
HUMMING_MMA_FLOAT8(E2m1, E2m1, ".kind::f8f6f4", "e2m1.e2m1")
#undef HUMMING_MMA_FLOAT8

}  // namespace humming::ptx
