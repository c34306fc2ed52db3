// Slot encode: e4m3 and e5m2 by the conversions of the device.
// Needs: cvt_fp8. Data flow: 8 floats -> 4 pairs of codes -> codes side by side.
#pragma once

#include <humming/ptx/cvt_fp8.cuh>
#include <humming/types.cuh>

namespace humming {

struct EncodeE4m3Pairs {
  static constexpr int kBits = 8, kMaxExponent = 8;
  static constexpr bool kHasNan = true;
  static constexpr float kMax = 448.f;

  template <bool kBounded, bool kNan>
  static __device__ void encode(const float (&v)[8], u32 (&words)[2]) {
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const u32 low = ptx::f32x2_to_e4m3x2(v[4 * w], v[4 * w + 1]);
      words[w] = low | ptx::f32x2_to_e4m3x2(v[4 * w + 2], v[4 * w + 3]) << 16;
    }
  }
  static __device__ u32 one(float v) { return ptx::f32x2_to_e4m3x2(v, 0.f); }
};

struct EncodeE5m2Pairs {
  static constexpr int kBits = 8, kMaxExponent = 15;
  static constexpr bool kHasNan = true;
  static constexpr float kMax = 57344.f;

  template <bool kBounded, bool kNan>
  static __device__ void encode(const float (&v)[8], u32 (&words)[2]) {
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const u32 low = ptx::f32x2_to_e5m2x2(v[4 * w], v[4 * w + 1]);
      words[w] = low | ptx::f32x2_to_e5m2x2(v[4 * w + 2], v[4 * w + 3]) << 16;
    }
  }
  static __device__ u32 one(float v) { return ptx::f32x2_to_e5m2x2(v, 0.f); }
};

}  // namespace humming
