// Slot mma: a k16 step as two mma.sync m16n8k8, for devices that have no m16n8k16.
// Needs: the mma row mma_sync m16n8k8 of half and the sums.
// The halves of a k16 fragment are two k8 fragments: registers 0, 1 of A with register 0 of B hold
// k 0..7, registers 2, 3 with register 1 hold k 8..15. The packed weights need no other order.
#pragma once

#include <humming/mma/sums.cuh>
#include <humming/ptx/mma_sync.cuh>

namespace humming {

struct MmaSync1688F16 : FloatSums {
  using Operand = F16;
  static __device__ void fma(Sums& d, const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 low[2] = {a[0], a[1]};
    const u32 high[2] = {a[2], a[3]};
    ptx::mma_m16n8k8_f32_f16(d, low, b0);
    ptx::mma_m16n8k8_f32_f16(d, high, b1);
  }
};

struct MmaSync1688HalfSums : HalfSums {
  using Operand = F16;
  static __device__ void fma(Sums& d, const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 low[2] = {a[0], a[1]};
    const u32 high[2] = {a[2], a[3]};
    ptx::mma_m16n8k8_f16(d, low, b0);
    ptx::mma_m16n8k8_f16(d, high, b1);
  }
};

}  // namespace humming
