// Conversions between pairs of halves and pairs of 8-bit floats (PTX ISA 9.7.9.21 "cvt").
#pragma once

#include <humming/types.cuh>

namespace humming::ptx {

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

}  // namespace humming::ptx
