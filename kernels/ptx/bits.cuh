// Three-input bit operations and byte permutation (PTX ISA 9.7.8.6 "lop3", 9.7.9.7 "prmt"), and a
// product and sum that stay with the multipliers.
#pragma once

namespace humming::ptx {

// (a & b) ^ c: 0x6a = (0xf0 & 0xcc) ^ 0xaa.
__device__ inline unsigned and_xor(unsigned a, unsigned b, unsigned c) {
  unsigned d;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Bit by bit, a where `mask` is set and b elsewhere: 0xca = (0xf0 & 0xcc) | (~0xf0 & 0xaa).
__device__ inline unsigned select(unsigned mask, unsigned a, unsigned b) {
  unsigned d;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(d) : "r"(mask), "r"(a), "r"(b));
  return d;
}

// Byte i of the result is the byte of {b, a} that nibble i of `selector` names: 0..3 of a, 4..7 of
// b; with bit 3 of the nibble set it is that byte's sign, repeated.
__device__ inline unsigned permute(unsigned a, unsigned b, unsigned selector) {
  unsigned d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

// The low half of a * b + c (PTX ISA 9.7.1.4 "mad"). For a power of two the compiler would shift, at
// half the rate.
__device__ inline unsigned mad(unsigned a, unsigned b, unsigned c) {
  unsigned d;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// The lower half, or the upper one, in both halves, which instructions on halves can have for free.
__device__ inline unsigned lower_twice(unsigned a) {
  unsigned d;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};\n}" : "=r"(d) : "r"(a));
  return d;
}
__device__ inline unsigned upper_twice(unsigned a) {
  unsigned d;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};\n}" : "=r"(d) : "r"(a));
  return d;
}

}  // namespace humming::ptx
