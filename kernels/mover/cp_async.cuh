// Slot mover: asynchronous copies of 16 bytes that bypass registers.
// Needs: cp_async. Data flow: global -> L2 -> shared.
#pragma once

#include <humming/ptx/cp_async.cuh>
#include <humming/types.cuh>

namespace humming {

struct CpAsyncMover {
  // Copies land without the threads that started them.
  static constexpr bool kAsynchronous = true;

  // The copies of one thread for one pipeline stage.
  template <int kCount>
  struct Fetch {
    // Starts copy number i: 16 bytes, or 16 zero bytes where the source does not exist.
    __device__ void issue(int /*i*/, u32 shared, const u8* global, bool exists) {
      ptx::cp_async_16(shared, global, exists ? 16 : 0);
    }
    __device__ void skip(int /*i*/) {}
    __device__ void land() {}
  };

  static __device__ void commit() { ptx::cp_async_commit(); }

  // Waits until at most kPending committed stages are still under way.
  template <int kPending>
  static __device__ void wait() {
    ptx::cp_async_wait<kPending>();
  }
};

}  // namespace humming
