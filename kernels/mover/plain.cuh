// Slot mover: ordinary loads and stores, for devices without asynchronous copies.
// Needs: nothing. Data flow: global -> registers (issue) ... computation ... -> shared (land), so
// that the latency of the loads hides behind the computation on the stage before.
#pragma once

#include <humming/ptx/shared.cuh>
#include <humming/types.cuh>

namespace humming {

struct PlainMover {
  static constexpr bool kAsynchronous = false;

  // The copies of one thread for one pipeline stage.
  template <int kCount>
  struct Fetch {
    static constexpr u32 kNowhere = 0xffffffffu;
    Words4 data[kCount];
    u32 target[kCount];

    // Starts copy number i: 16 bytes, or 16 zero bytes where the source does not exist.
    __device__ void issue(int i, u32 shared, const u8* global, bool exists) {
      target[i] = shared;
      data[i] = exists ? *reinterpret_cast<const Words4*>(global) : Words4{{0, 0, 0, 0}};
    }
    __device__ void skip(int i) { target[i] = kNowhere; }
    __device__ void land() {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (target[i] != kNowhere) ptx::store_shared_16(target[i], data[i].word);
      }
    }
  };

  static __device__ void commit() {}

  // The barrier that follows makes landed stages visible; there is nothing to wait for.
  template <int kPending>
  static __device__ void wait() {}
};

}  // namespace humming
