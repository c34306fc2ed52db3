// Two floats to two 8-bit floats (PTX ISA 9.7.9.21 "cvt"): nearest, halves to even, saturating.
// Needs: cvt_fp8.
#pragma once

namespace humming::ptx {

// (low, high) -> bits 0-7, 8-15; NaN becomes 0x7f.
__device__ inline unsigned f32x2_to_e4m3x2(float low, float high) {
  unsigned short d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
  return d;
}

__device__ inline unsigned f32x2_to_e5m2x2(float low, float high) {
  unsigned short d;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
  return d;
}

}  // namespace humming::ptx
