// Slot mma: integers with 32-bit sums, 256 bits of K at a time.
// Needs: the mma row mma_sync m16n8k32 (8 bits), m16n8k64 (4 bits), m8n8k16 or m8n8k32 of the types.
// Four m8 instructions make up an m16 one: registers 0, 2 of A are rows 0..7, registers 1, 3 rows
// 8..15; the packed weights need no other order.
#pragma once

#include <humming/mma/sums.cuh>
#include <humming/ptx/mma_integer.cuh>

namespace humming {

template <class A, class B>
struct MmaSyncInteger : IntegerSums {
  using Operand = A;
  static __device__ void fma(Sums& d, const u32 (&a)[4], u32 b0, u32 b1) {
    ptx::mma_m16_integer<A, B>(d, a, b0, b1);
  }
};

template <class A, class B>
struct MmaSyncIntegerM8 : IntegerSums {
  using Operand = A;
  static __device__ void fma(Sums& d, const u32 (&a)[4], u32 b0, u32 b1) {
    ptx::mma_m8_integer<A, B>(d[0], d[1], a[0], b0);
    ptx::mma_m8_integer<A, B>(d[2], d[3], a[1], b0);
    ptx::mma_m8_integer<A, B>(d[0], d[1], a[2], b1);
    ptx::mma_m8_integer<A, B>(d[2], d[3], a[3], b1);
  }
};

}  // namespace humming
