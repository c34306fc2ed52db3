// Bytes gathered from two registers.
#pragma once

namespace humming::ptx {

// Byte i of the result is byte `(kSelector >> 4i) & 7` of b:a (PTX ISA 9.7.9.7 "prmt").
template <unsigned kSelector>
__device__ inline unsigned prmt(unsigned a, unsigned b) {
  unsigned d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "n"(kSelector));
  return d;
}

}  // namespace humming::ptx
