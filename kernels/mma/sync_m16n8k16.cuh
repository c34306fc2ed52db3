// Slot mma: mma.sync m16n8k16 on 16-bit floats, one instruction.
// Needs: the mma row mma_sync m16n8k16 of the operand and the sums.
#pragma once

#include <humming/mma/sums.cuh>
#include <humming/ptx/mma_sync.cuh>

namespace humming {

template <class Operand>
struct MmaSync16816;

template <>
struct MmaSync16816<F16> : FloatSums {
  using Operand = F16;
  static __device__ void fma(Sums& d, const u32 (&a)[4], u32 b0, u32 b1) {
    ptx::mma_m16n8k16_f32_f16(d, a, b0, b1);
  }
};

template <>
struct MmaSync16816<Bf16> : FloatSums {
  using Operand = Bf16;
  static __device__ void fma(Sums& d, const u32 (&a)[4], u32 b0, u32 b1) {
    ptx::mma_m16n8k16_f32_bf16(d, a, b0, b1);
  }
};

struct MmaSync16816HalfSums : HalfSums {
  using Operand = F16;
  static __device__ void fma(Sums& d, const u32 (&a)[4], u32 b0, u32 b1) {
    ptx::mma_m16n8k16_f16(d, a, b0, b1);
  }
};

}  // namespace humming
