// Conversions between float and its bits, between float and 16 bits (PTX ISA 9.7.9.21 "cvt"), and of
// integers to narrow ones, saturating (9.7.9.22 "cvt.pack").
#pragma once

namespace humming::ptx {

__device__ inline float bits_to_f32(unsigned bits) {
  float value;
  asm("mov.b32 %0, %1;" : "=f"(value) : "r"(bits));
  return value;
}

__device__ inline unsigned f32_to_bits(float value) {
  unsigned bits;
  asm("mov.b32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

__device__ inline float f16_to_f32(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ inline unsigned short f32_to_f16(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// From sm_80 on.
__device__ inline unsigned short f32_to_bf16(float value) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// From the lowest bits: b, a, and the lower half of c.
__device__ inline unsigned pack_saturated_s8(int a, int b, unsigned c) {
  unsigned d;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// From the lowest bits: b, a, and the lower 24 bits of c.
__device__ inline unsigned pack_saturated_s4(int a, int b, unsigned c) {
  unsigned d;
  asm("cvt.pack.sat.s4.s32.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

}  // namespace humming::ptx
