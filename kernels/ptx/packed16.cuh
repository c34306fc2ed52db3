// Arithmetic on two 16-bit floats in a register.
#pragma once

namespace humming::ptx {

// PTX ISA 9.7.4.1 "add" (half precision).
__device__ inline unsigned add_f16x2(unsigned a, unsigned b) {
  unsigned d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// PTX ISA 9.7.4.2 "sub" (half precision).
__device__ inline unsigned sub_f16x2(unsigned a, unsigned b) {
  unsigned d;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// PTX ISA 9.7.4.3 "mul" (half precision).
__device__ inline unsigned mul_f16x2(unsigned a, unsigned b) {
  unsigned d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// PTX ISA 9.7.4.4 "fma" (half precision).
__device__ inline unsigned fma_f16x2(unsigned a, unsigned b, unsigned c) {
  unsigned d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

__device__ inline unsigned fma_bf16x2(unsigned a, unsigned b, unsigned c) {
  unsigned d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// PTX ISA 9.7.4.8 "max" and 9.7.4.7 "min" (half precision), of which NaN is the result if one of
// both is.
__device__ inline unsigned max_nan_f16x2(unsigned a, unsigned b) {
  unsigned d;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ inline unsigned max_nan_bf16x2(unsigned a, unsigned b) {
  unsigned d;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ inline unsigned min_nan_f16x2(unsigned a, unsigned b) {
  unsigned d;
  asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ inline unsigned min_nan_bf16x2(unsigned a, unsigned b) {
  unsigned d;
  asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// PTX ISA 9.7.9.21 "cvt": two floats to bfloat16, to nearest even; `low` to the lower half.
__device__ inline unsigned f32x2_to_bf16x2(float low, float high) {
  unsigned d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

}  // namespace humming::ptx
