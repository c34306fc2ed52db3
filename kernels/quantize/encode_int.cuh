// Slot encode: integers of 4 or 8 bits, in two's complement.
// Needs: nothing. Data flow: 8 floats -> clamp -> round -> codes side by side.
//
// A sum keeps no bits below its last one, and rounds to the nearest, halves to even: 1.5 * 2^23 + v
// has v as a whole number in its low bits.
#pragma once

#include <humming/ptx/float32.cuh>
#include <humming/quantize/codes.cuh>

namespace humming {

template <int kCodeBits>
struct EncodeInt {
  static constexpr int kBits = kCodeBits;
  static constexpr bool kHasNan = false;
  static constexpr float kMax = float((1 << (kBits - 1)) - 1);
  static constexpr float kMin = -kMax - 1.f;
  static constexpr int kMaxExponent = kBits - 2;  // of kMax
  static constexpr float kRound = 12582912.f;
  static_assert(kBits == 4 || kBits == 8, "slot encode: codes have 4 or 8 bits");

  // Symmetric codes leave the lowest number out. kBounded: no number rounds to more than kMax.
  template <bool kBounded, bool kNan>
  static __device__ void encode(const float (&v)[8], u32 (&words)[kBits / 4]) {
    u32 code[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      code[i] = rounded(kBounded ? v[i] : ptx::min_f32(ptx::max_f32(v[i], -kMax), kMax));
    }
    pack_codes(code, words);
  }

  // Codes around a zero point, which is a whole number. kBounded: magnitudes are below 1024.
  template <bool kBounded>
  static __device__ void encode(const float (&v)[8], float zero, u32 (&words)[kBits / 4]) {
    // The sum's lowest bits count from those of kRound.
    const int shift = int(zero) - int(ptx::f32_to_bits(kRound));
    int code[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float near = kBounded ? v[i] : ptx::min_f32(ptx::max_f32(v[i], -1024.f), 1024.f);
      code[i] = int(rounded(near)) + shift;
    }
    pack_saturated(code, words);
  }

  // To the nearest whole number, of magnitudes below 2^22.
  static __device__ float round(float v) { return ptx::sub_rn(ptx::add_rn(v, kRound), kRound); }

 private:
  static __device__ u32 rounded(float v) { return ptx::f32_to_bits(ptx::add_rn(v, kRound)); }
};

}  // namespace humming
