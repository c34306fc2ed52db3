// Slot encode: floats of 4 or 8 bits with a sign, by arithmetic that every architecture has.
// Needs: nothing. Data flow: 8 floats -> clamp -> round -> codes side by side.
//
// Let e be the exponent of v, but not below that of the smallest normal number. There, codes are
// 2^(e-M) apart, and that is the last bit of 2^(e+23-M) + v: the sum rounds v to the nearest, halves
// to even, and its low bits hold it in these units. With them,
//   code = units + (e - e_min) << M
// for normal and for subnormal numbers, and where rounding reached the next power of two. What the
// exponent field of e has in the way is made up for by an even number of units in the sum.
// Magnitudes without exponent have units of 1 throughout.
#pragma once

#include <humming/ptx/float32.cuh>
#include <humming/quantize/codes.cuh>

namespace humming {

// The number of a code without sign that is no subnormal one.
template <int kExponentBits, int kMantissaBits>
constexpr float float_of_code(int code) {
  if constexpr (kExponentBits == 0) {
    return float(code);
  } else {
    const int bias = (1 << (kExponentBits - 1)) - 1, mantissa = code & ((1 << kMantissaBits) - 1);
    float value = float((1 << kMantissaBits) + mantissa);
    const int exponent = (code >> kMantissaBits) - bias - kMantissaBits;
    for (int i = 0; i < exponent; ++i) value *= 2.f;
    for (int i = 0; i > exponent; --i) value *= 0.5f;
    return value;
  }
}

// kMaxCode is the code of the largest number, kNanCode that of NaN, or -1 where there is none.
template <int kExponentBits, int kMantissaBits, int kMaxCode, int kNanCode>
struct EncodeFloat {
  static constexpr int kBits = 1 + kExponentBits + kMantissaBits;
  static constexpr bool kHasNan = kNanCode >= 0;
  static constexpr float kMax = float_of_code<kExponentBits, kMantissaBits>(kMaxCode);
  static constexpr int kBias = kExponentBits == 0 ? 0 : (1 << (kExponentBits - 1)) - 1;
  static constexpr int kMaxExponent =  // of kMax
      kExponentBits == 0 ? kMantissaBits - 1 : (kMaxCode >> kMantissaBits) - kBias;
  static_assert(kBits == 4 || kBits == 8, "slot encode: codes have 4 or 8 bits");
  static_assert(kMantissaBits > 0, "slot encode: without mantissa, halves would not go to even");

  // kBounded: no number rounds to more than kMax. kNan: whether there may be NaN, which otherwise
  // becomes any code.
  template <bool kBounded, bool kNan>
  static __device__ void encode(const float (&v)[8], u32 (&words)[kBits / 4]) {
    u32 code[8], bits[8], signs[kBits / 4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      bits[i] = ptx::f32_to_bits(v[i]);
      code[i] = magnitude<kBounded>(bits[i]);
      if constexpr (kNan && kHasNan) {
        code[i] = v[i] != v[i] ? u32(kNanCode) : code[i];
        bits[i] = v[i] != v[i] ? 0u : bits[i];
      }
    }
    pack_codes(code, words);
    pack_signs(bits, signs);
    constexpr u32 kSigns = kBits == 8 ? 0x80808080u : 0x88888888u;
#pragma unroll
    for (int w = 0; w < kBits / 4; ++w) words[w] = (words[w] & ~kSigns) | (signs[w] & kSigns);
  }

  // The code of a number that is not negative.
  static __device__ u32 one(float v) {
    return magnitude<false>(ptx::f32_to_bits(v)) & ((1u << (kBits - 1)) - 1u);
  }

 private:
  // The code of a number's magnitude, in the bits below the code's sign; those above are any.
  template <bool kBounded>
  static __device__ u32 magnitude(u32 bits) {
    float size = ptx::bits_to_f32(bits & 0x7fffffffu);
    if constexpr (!kBounded) size = ptx::min_f32(size, kMax);
    if constexpr (kExponentBits == 0) {
      return ptx::f32_to_bits(ptx::add_rn(size, 8388608.f));
    } else {
      constexpr u32 kSmallest = u32(127 + 1 - kBias) << 23;
      constexpr int kShift = 23 - kMantissaBits;
      constexpr u32 kMakeUp = (0u - (kSmallest >> kShift)) & ((1u << kBits) - 1u);
      constexpr u32 kAbove = (u32(127 + kShift) << 23) + kMakeUp;  // the sum's first part over 2^e
      static_assert(kMakeUp % 2 == 0, "an odd number would change which halves are even");
      u32 exponent = ptx::f32_to_bits(size) & 0x7f800000u;
      exponent = exponent < kSmallest ? kSmallest : exponent;
      const float sum = ptx::fma_rn(ptx::bits_to_f32(exponent), ptx::bits_to_f32(kAbove), size);
      return ptx::f32_to_bits(sum) + (exponent >> kShift);
    }
  }
};

}  // namespace humming
