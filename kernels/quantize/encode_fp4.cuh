// Slot encode: e2m1 by the conversions of the device.
// Needs: cvt_fp6_fp4. Data flow: 8 floats -> 4 pairs of codes -> codes side by side.
#pragma once

#include <humming/ptx/cvt_fp4.cuh>
#include <humming/types.cuh>

namespace humming {

struct EncodeE2m1Pairs {
  static constexpr int kBits = 4, kMaxExponent = 2;
  static constexpr bool kHasNan = false;
  static constexpr float kMax = 6.f;

  template <bool kBounded, bool kNan>
  static __device__ void encode(const float (&v)[8], u32 (&words)[1]) {
    words[0] = ptx::f32x8_to_e2m1x8(v);
  }
};

}  // namespace humming
