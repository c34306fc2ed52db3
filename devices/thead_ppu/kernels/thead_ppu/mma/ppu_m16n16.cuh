// Slot mma: ppu.mma, 256 bits of K of 16 rows x 16 tokens in one instruction.
// Needs: the mma row ppu_mma of the operands and the sums.
// Registers 1 and 2 of A change places on the way: the packed weights need no other order.
#pragma once

#include <humming/mma/sums.cuh>
#include <humming/thead_ppu/ptx/ppu_mma.cuh>

namespace humming {

// (lane, i) -> row g + 8 * (i >> 2), token t + 4 * (i & 3)
struct StridedPlaces {
  static __device__ constexpr int half(int i) { return i >> 2; }
  static __device__ constexpr int column(int i) { return i & 3; }
  static __device__ constexpr int token(int lane, int column) { return lane % 4 + 4 * column; }
};

template <class A, class B, class Number>
struct PpuMma : PlainSums<Number, 16, StridedPlaces> {
  using Operand = A;
  using Sums = typename PlainSums<Number, 16, StridedPlaces>::Sums;
  static __device__ void fma(Sums& d, const u32 (&a)[4], u32 b0, u32 b1, u32 b2, u32 b3) {
    const u32 by_row[4] = {a[0], a[2], a[1], a[3]};
    ptx::ppu_mma<A, B>(d, by_row, b0, b1, b2, b3);
  }
};

}  // namespace humming
