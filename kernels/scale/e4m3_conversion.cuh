// Slot scale: two e4m3 scales by the device's own conversion to half.
// Needs: cvt_fp8.
#pragma once

#include <humming/ptx/cvt_fp8.cuh>
#include <humming/scale/pairs.cuh>

namespace humming {

struct E4m3Conversion {
  static __device__ u32 halves(u32 first, u32 second) {
    return ptx::fp8x2_to_f16x2<E4m3>(ptx::permute(first, second, 0x1140));
  }
};

}  // namespace humming
