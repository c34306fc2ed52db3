// Arithmetic on two 16-bit floats in a register, and the three-input bit operation.
#pragma once

namespace humming::ptx {

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

// (a & b) ^ c in one instruction (PTX ISA 9.7.8.6 "lop3"): 0x6a = (0xf0 & 0xcc) ^ 0xaa.
__device__ inline unsigned and_xor(unsigned a, unsigned b, unsigned c) {
  unsigned d;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

}  // namespace humming::ptx
