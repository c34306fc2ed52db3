// Slot mma: wgmma with A in registers and B in shared memory, sums of a warpgroup in registers.
// Needs: the mma row wgmma of the types.
#pragma once

#include <humming/mma/sums.cuh>
#include <humming/ptx/wgmma.cuh>

namespace humming {

template <class A, class B, class Number>
struct Wgmma {
  using Operand = A;
  using Sum = Number;
  using Places = PairPlaces;

  // (tile of 8 tokens, i) -> row g + 8 * Places::half(i), token 8 * tile + Places::token(...)
  template <int kTiles>
  static __device__ void fma(Number (&d)[kTiles][4], const u32 (&a)[4], u64 b, bool adds) {
    ptx::wgmma<A, B>(d, a, b, adds);
  }
};

}  // namespace humming
