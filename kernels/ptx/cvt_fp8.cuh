// Two floats or halves to two 8-bit floats and back (PTX ISA 9.7.9.21 "cvt"): to 8 bits nearest, halves
// to even, saturating; to half exactly.
// Needs: cvt_fp8.
#pragma once

#include <humming/types.cuh>

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

// Both halves to two bytes, the lower half to the lower byte; saturating, to nearest even.
template <class Type>
__device__ u32 f16x2_to_fp8x2(u32 halves);

template <>
__device__ inline u32 f16x2_to_fp8x2<E4m3>(u32 halves) {
  u16 d;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(d) : "r"(halves));
  return d;
}

template <>
__device__ inline u32 f16x2_to_fp8x2<E5m2>(u32 halves) {
  u16 d;
  asm("cvt.rn.satfinite.e5m2x2.f16x2 %0, %1;" : "=h"(d) : "r"(halves));
  return d;
}

// The lower two bytes to two halves, the lower byte to the lower half; NaN stays NaN.
template <class Type>
__device__ u32 fp8x2_to_f16x2(u32 bytes);

template <>
__device__ inline u32 fp8x2_to_f16x2<E4m3>(u32 bytes) {
  u32 d;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(u16(bytes)));
  return d;
}

}  // namespace humming::ptx
