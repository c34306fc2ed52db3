// Accesses to global memory that other CTAs of the same launch write or read.
#pragma once

namespace humming::ptx {

// Reads through L2, past a possibly stale L1 (PTX ISA 9.7.9.8 "ld", cache operator .cg).
__device__ inline void load_l2_x4(float (&d)[4], const float* from) {
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "l"(from)
               : "memory");
}

__device__ inline void load_l2_x4(int (&d)[4], const int* from) {
  asm volatile("ld.global.cg.v4.s32 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "l"(from)
               : "memory");
}

// Counts up to `last` and back to zero, returning the count before (PTX ISA 9.7.13.5 "atom" .inc).
__device__ inline unsigned count_wrapping(unsigned* counter, unsigned last) {
  unsigned before;
  asm volatile("atom.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(last)
               : "memory");
  return before;
}

}  // namespace humming::ptx
