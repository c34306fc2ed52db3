// Slot mma: mma.sync m16n8k32 on floats in bytes with float sums, one instruction.
// Needs: the mma row mma_sync m16n8k32 of the types.
#pragma once

#include <humming/mma/sums.cuh>
#include <humming/ptx/mma_float8.cuh>

namespace humming {

template <class A, class B>
struct MmaSyncFloat8 : FloatSums {
  using Operand = A;
  static __device__ void fma(Sums& d, const u32 (&a)[4], u32 b0, u32 b1) {
    ptx::mma_m16n8k32_f32<A, B>(d, a, b0, b1);
  }
};

}  // namespace humming
