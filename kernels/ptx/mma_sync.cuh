// Warp-level matrix multiply-accumulate (PTX ISA 9.7.14.5 "Matrix Fragments for mma.m16n8k*").
// A is 16 x k (rows of weights), B is k x 8 (tokens), D and C are 16 x 8 in float.
// With g = lane >> 2, t = lane & 3:
//   A: (lane, register r, element e) -> (row g + 8 * (r & 1), k 2t + e + 8 * (r >> 1))
//   B: (lane, register r, element e) -> (k 2t + e + 8r, token g)
//   D: (lane, i) -> (row g + 8 * (i >> 1), token 2t + (i & 1))
#pragma once

namespace humming::ptx {

__device__ inline void mma_m16n8k8_f32_f16(float (&d)[4], const unsigned (&a)[2], unsigned b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

__device__ inline void mma_m16n8k16_f32_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                            unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void mma_m16n8k16_f32_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// With sums in half: two in a register, (lane, register r) -> row g + 8 * r, tokens 2t and 2t + 1.
__device__ inline void mma_m16n8k8_f16(unsigned (&d)[2], const unsigned (&a)[2], unsigned b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3}, {%4}, {%0,%1};"
               : "+r"(d[0]), "+r"(d[1])
               : "r"(a[0]), "r"(a[1]), "r"(b));
}

__device__ inline void mma_m16n8k16_f16(unsigned (&d)[2], const unsigned (&a)[4], unsigned b0,
                                        unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, "
      "{%0,%1};"
      : "+r"(d[0]), "+r"(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace humming::ptx
