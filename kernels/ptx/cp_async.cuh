// Non-bulk asynchronous copies, global to shared memory (PTX ISA 9.7.9.25.3 "cp.async").
#pragma once

namespace humming::ptx {

// Copies `bytes` (0 or 16) and fills the rest of the 16 bytes with zeros; bypasses L1.
__device__ inline void cp_async_16(unsigned shared, const void* global, unsigned bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}

// Copies 4 bytes, or makes them zero; neighbours stay in L1.
__device__ inline void cp_async_4(unsigned shared, const void* global, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global),
               "r"(exists ? 4 : 0)
               : "memory");
}

// Arrives at a barrier object, which counts it, when this thread's copies have ended (PTX ISA
// 9.7.13.15.15 "cp.async.mbarrier.arrive").
__device__ inline void cp_async_arrive(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace humming::ptx
