// Warp-level matrix multiply-accumulate of integers (PTX ISA 9.7.14.5 "Matrix Fragments for mma").
// A is m x k (rows of weights), B is k x 8 (tokens), sums are 32-bit integers that wrap around.
// With g = lane >> 2, t = lane & 3 and E = 8 or 4 codes of a register:
//   A: (lane, register r, element e) -> (row g + 8 * (r & 1), k E t + e + 4 E (r >> 1))
//   B: (lane, register r, element e) -> (k E t + e + 4 E r, token g)
//   D: (lane, i) -> (row g + 8 * (i >> 1), token 2t + (i & 1)); m = 8 has the first halves only
#pragma once

#include <humming/types.cuh>

namespace humming::ptx {

// By operand types A and B; the instructions exist for every pair of signs.
template <class A, class B>
__device__ void mma_m16_integer(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <class A, class B>
__device__ void mma_m8_integer(int& d0, int& d1, u32 a, u32 b);

#define HUMMING_MMA_INTEGER(A, B, M16, M8, TYPES)                                                  \
  template <>                                                                                      \
  __device__ inline void mma_m16_integer<A, B>(int (&d)[4], const u32(&a)[4], u32 b0, u32 b1) {    \
    asm volatile("mma.sync.aligned." M16 ".row.col.s32." TYPES                                     \
                 ".s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                      \
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                  \
  }                                                                                                \
  template <>                                                                                      \
  __device__ inline void mma_m8_integer<A, B>(int& d0, int& d1, u32 a, u32 b) {                    \
    asm volatile("mma.sync.aligned." M8 ".row.col.s32." TYPES ".s32 {%0,%1}, {%2}, {%3}, {%0,%1};" \
                 : "+r"(d0), "+r"(d1)                                                              \
                 : "r"(a), "r"(b));                                                                \
  }

HUMMING_MMA_INTEGER(S8, S8, "m16n8k32", "m8n8k16", "s8.s8")
HUMMING_MMA_INTEGER(S8, U8, "m16n8k32", "m8n8k16", "s8.u8")
HUMMING_MMA_INTEGER(U8, S8, "m16n8k32", "m8n8k16", "u8.s8")
HUMMING_MMA_INTEGER(U8, U8, "m16n8k32", "m8n8k16", "u8.u8")
HUMMING_MMA_INTEGER(S4, S4, "m16n8k64", "m8n8k32", "s4.s4")
HUMMING_MMA_INTEGER(S4, U4, "m16n8k64", "m8n8k32", "s4.u4")
HUMMING_MMA_INTEGER(U4, S4, "m16n8k64", "m8n8k32", "u4.s4")
HUMMING_MMA_INTEGER(U4, U4, "m16n8k64", "m8n8k32", "u4.u4")
#undef HUMMING_MMA_INTEGER

}  // namespace humming::ptx
