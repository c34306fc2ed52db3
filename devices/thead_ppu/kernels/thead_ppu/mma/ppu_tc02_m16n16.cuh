// Slot mma: ppu.tc02.mma, 256 bits of K of 16 rows x 16 tokens in one instruction.
// Needs: the mma row ppu_tc02_mma of the operands and the sums.
#pragma once

#include <humming/mma/sums.cuh>
#include <humming/thead_ppu/ptx/ppu_mma.cuh>

namespace humming {

template <class A, class B, class TileSums>
struct PpuTc02Mma : TileSums {
  using Operand = A;
  static __device__ void fma(typename TileSums::Sums& d, const u32 (&a)[4], u32 b0, u32 b1, u32 b2,
                             u32 b3) {
    ptx::ppu_tc02_mma<A, B>(d, a, b0, b1, b2, b3);
  }
};

}  // namespace humming
