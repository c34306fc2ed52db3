// Warp-level matrix multiply-accumulate of T-Head PPUs (t-head/actlize, cute/arch/mma_ppu0010.hpp and
// mma_ppu0015.hpp): A is 16 x k (rows of weights), B is k x 16 (tokens), D and C are 16 x 16.
// With g = lane >> 2, t = lane & 3 and E elements of a register:
//   B: (lane, register r, element e) -> (k E t + e + 4 E (r & 1), token g + 8 * (r >> 1))
// ppu_mma, of the first generation:
//   A: (lane, register r, element e) -> (row g + 8 * (r >> 1), k E t + e + 4 E (r & 1))
//   D: (lane, i) -> (row g + 8 * (i >> 2), token t + 4 * (i & 3))
// ppu_tc02_mma, of generation 1.5, is two of NVIDIA's m16n8 side by side:
//   A: (lane, register r, element e) -> (row g + 8 * (r & 1), k E t + e + 4 E (r >> 1))
//   D: (lane, i) -> (row g + 8 * (i >> 1 & 1), token 2t + (i & 1) + 8 * (i >> 2))
// and has D in half too, elements 2r and 2r + 1 in register r.
#pragma once

#include <humming/types.cuh>

namespace humming::ptx {

// By operand types A and B and the registers of D.
template <class A, class B, class Sums>
__device__ void ppu_mma(Sums& d, const u32 (&a)[4], u32 b0, u32 b1, u32 b2, u32 b3);
template <class A, class B, class Sums>
__device__ void ppu_tc02_mma(Sums& d, const u32 (&a)[4], u32 b0, u32 b1, u32 b2, u32 b3);

#define HUMMING_PPU_MMA(NAME, A, B, NUMBER, REGISTER, OPCODE, K, TYPES)                            \
  template <>                                                                                      \
  __device__ inline void NAME<A, B, NUMBER[8]>(NUMBER(&d)[8], const u32(&a)[4], u32 b0, u32 b1,    \
                                               u32 b2, u32 b3) {                                   \
    asm volatile(OPCODE ".sync.aligned.m16n16k" K ".row.col." TYPES                                \
                        " {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, {%12,%13,%14,%15}, "         \
                        "{%0,%1,%2,%3,%4,%5,%6,%7};"                                               \
                 : REGISTER(d[0]), REGISTER(d[1]), REGISTER(d[2]), REGISTER(d[3]), REGISTER(d[4]), \
                   REGISTER(d[5]), REGISTER(d[6]), REGISTER(d[7])                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(b2),          \
                   "r"(b3));                                                                       \
  }
#define HUMMING_PPU_MMA_HALF(NAME, A, B, OPCODE, K, TYPES)                                        \
  template <>                                                                                     \
  __device__ inline void NAME<A, B, u32[4]>(u32(&d)[4], const u32(&a)[4], u32 b0, u32 b1, u32 b2, \
                                            u32 b3) {                                             \
    asm volatile(OPCODE ".sync.aligned.m16n16k" K ".row.col." TYPES                               \
                        " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3};"          \
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(b2),         \
                   "r"(b3));                                                                      \
  }

HUMMING_PPU_MMA(ppu_mma, F16, F16, float, "+f", "ppu.mma", "16", "f32.f16.f16.f32")
HUMMING_PPU_MMA(ppu_mma, Bf16, Bf16, float, "+f", "ppu.mma", "16", "f32.bf16.bf16.f32")
HUMMING_PPU_MMA(ppu_mma, S8, S8, int, "+r", "ppu.mma", "32", "s32.s8.s8.s32")

HUMMING_PPU_MMA(ppu_tc02_mma, F16, F16, float, "+f", "ppu.tc02.mma", "16", "f32.f16.f16.f32")
HUMMING_PPU_MMA(ppu_tc02_mma, Bf16, Bf16, float, "+f", "ppu.tc02.mma", "16", "f32.bf16.bf16.f32")
HUMMING_PPU_MMA(ppu_tc02_mma, S8, S8, int, "+r", "ppu.tc02.mma", "32", "s32.s8.s8.s32")
HUMMING_PPU_MMA(ppu_tc02_mma, E4m3, E4m3, float, "+f", "ppu.tc02.mma", "32", "f32.e4m3.e4m3.f32")
HUMMING_PPU_MMA(ppu_tc02_mma, E4m3, E5m2, float, "+f", "ppu.tc02.mma", "32", "f32.e4m3.e5m2.f32")
HUMMING_PPU_MMA(ppu_tc02_mma, E5m2, E4m3, float, "+f", "ppu.tc02.mma", "32", "f32.e5m2.e4m3.f32")
HUMMING_PPU_MMA(ppu_tc02_mma, E5m2, E5m2, float, "+f", "ppu.tc02.mma", "32", "f32.e5m2.e5m2.f32")
HUMMING_PPU_MMA_HALF(ppu_tc02_mma, F16, F16, "ppu.tc02.mma", "16", "f16.f16.f16.f16")
#undef HUMMING_PPU_MMA
#undef HUMMING_PPU_MMA_HALF

}  // namespace humming::ptx
