// Shared-memory addresses, matrix loads and 16-byte accesses.
#pragma once

namespace humming::ptx {

// Address within shared memory of a generic pointer (PTX ISA 9.7.9.20 "cvta").
__device__ inline unsigned shared_address(const void* pointer) {
  unsigned long long address;
  asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(pointer));
  return unsigned(address);
}

// Four 8 x 8 matrices of 16-bit values; matrix i takes its row addresses from lanes 8i..8i+7
// (PTX ISA 9.7.14.5.15 "ldmatrix"). (lane, register i) -> matrix i, row lane >> 2, 2 columns.
__device__ inline void ldmatrix_x4(unsigned (&d)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

// Two of them; the lanes from 16 on give addresses that are not read.
__device__ inline void ldmatrix_x2(unsigned (&d)[2], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(d[0]), "=r"(d[1])
               : "r"(address)
               : "memory");
}

__device__ inline void ldmatrix_x1(unsigned (&d)[1], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
               : "=r"(d[0])
               : "r"(address)
               : "memory");
}

// A narrow read (PTX ISA 9.7.9.8 "ld").
__device__ inline unsigned load_shared_u16(unsigned address) {
  unsigned short d;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(d) : "r"(address) : "memory");
  return d;
}

// 16-byte store (PTX ISA 9.7.9.11 "st") by shared address.
__device__ inline void store_shared_16(unsigned address, const unsigned (&word)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(word[0]), "r"(word[1]),
               "r"(word[2]), "r"(word[3])
               : "memory");
}

}  // namespace humming::ptx
