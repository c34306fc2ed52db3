// Slot encode: e2m1 in float arithmetic, where a device has no conversion.
//
// Codes count steps from 0: 4 of 1/2 up to 2, 2 of 1 up to 4, and 1 of 2 up to 6. How far a magnitude
// reaches into each of the three ranges is a sum that saturates at 0 and 1; adding these, times their
// steps, to a number whose lowest bit is 1 leaves the code in the lowest bits:
//
//   |v| / 2 --saturate--> of [0, 2] --+
//           --- 1, sat.-> of [2, 4] --+--> 2^23 + 4, 2 and 1 times these, rounded at each step
//           --- 2, sat.-> of [4, 6] --+
//
// The ranges begin at even codes, so that halves go to even ones as everywhere. All but the signs
// keeps the multipliers busy, which have twice the rate of integer logic. NaN becomes any code.
#pragma once

#include <humming/ptx/float32.cuh>
#include <humming/quantize/codes.cuh>

namespace humming {

struct EncodeE2m1 {
  static constexpr int kBits = 4, kMaxExponent = 2;
  static constexpr bool kHasNan = false;
  static constexpr float kMax = 6.f;

  template <bool kBounded, bool kNan>
  static __device__ void encode(const float (&v)[8], u32 (&words)[1]) {
    u32 bits[8], signs[1], word = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) {
      bits[i] = ptx::f32_to_bits(v[i]);
      word = ptx::mad(word, 16u, magnitude(ptx::bits_to_f32(bits[i] & 0x7fffffffu)));
    }
    // What the bits of 2^23 left: kOne (1 + 16), for higher powers of 16 are beyond the word.
    word -= ptx::f32_to_bits(kOne) * 17u;
    pack_signs(bits, signs);
    words[0] = (word & 0x77777777u) | (signs[0] & 0x88888888u);
  }

 private:
  static constexpr float kOne = 8388608.f;

  // The code, above the bits of kOne.
  static __device__ u32 magnitude(float size) {
    float sum = ptx::fma_rn(ptx::mul_sat(size, 0.5f), 4.f, kOne);
    sum = ptx::fma_rn(ptx::fma_sat(size, 0.5f, -1.f), 2.f, sum);
    return ptx::f32_to_bits(ptx::add_rn(ptx::fma_sat(size, 0.5f, -2.f), sum));
  }
};

}  // namespace humming
