// Copies of the copy engine, global to shared memory, whose bytes a barrier object counts.
// Needs: tma; multicast where it says so.
#pragma once

namespace humming::ptx {

// A box of a matrix, from column and row on; zeros where the matrix ends (PTX ISA 9.7.9.25.5
// "cp.async.bulk.tensor").
__device__ inline void cp_async_bulk_tensor_2d(unsigned shared, const void* map, int column,
                                               int row, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3}], [%4];" ::"r"(shared),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// The same into all CTAs of a cluster that `ctas` names, where each has `shared` and `barrier`.
__device__ inline void cp_async_bulk_tensor_2d_multicast(unsigned shared, const void* map,
                                                         int column, int row, unsigned barrier,
                                                         unsigned short ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(ctas)
      : "memory");
}

// Fetches a tensor map ahead of its first use (PTX ISA 9.7.9.16 "prefetch").
__device__ inline void prefetch_tensormap(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace humming::ptx
