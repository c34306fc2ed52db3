// Slot producer: the copy engine, told by one warp.
// Needs: tma, mbarrier_tx; multicast for clusters.
#pragma once

#include <humming/params.cuh>
#include <humming/ptx/bulk_copy.cuh>
#include <humming/types.cuh>

namespace humming {

struct TmaProducer {
  // What is fetched ahead of the first box.
  static __device__ void prepare(const TensorMap& map) { ptx::prefetch_tensormap(&map); }

  // A box of the mapped matrix, with zeros where that ends, counted as whole.
  static __device__ void box(u32 shared, const TensorMap& map, int column, int row, u32 barrier) {
    ptx::cp_async_bulk_tensor_2d(shared, &map, column, row, barrier);
  }

  // The same into each of kCtas CTAs of the cluster, from the first one on.
  template <int kCtas>
  static __device__ void shared_box(u32 shared, const TensorMap& map, int column, int row,
                                    u32 barrier, int first) {
    const unsigned short ctas = ((1 << kCtas) - 1) << first;
    ptx::cp_async_bulk_tensor_2d_multicast(shared, &map, column, row, barrier, ctas);
  }
};

}  // namespace humming
