// Slot dequant: floats of at most 8 bits to half or bfloat16, exactly, with subnormals, -0, infinity
// and NaN. Needs: bf16_fma for bfloat16.
//
// Exponent and mantissa put where the wide type has them mean the value times 2^(narrow bias - wide
// bias): its subnormals are the wide type's, so nothing has to be normalized. e4m3 in half:
//   code    s eeee mmm            half   s 0eeee mmm0000000, 2^(7 - 15) times the value
// The power of two is put back by a product here, or, where kFold, by whoever applies scales.
//
// Where all exponent (and mantissa) bits set means infinity or NaN, adding the last exponent bit
// (mantissa bit) carries into the bit above them only for these codes; that bit, repeated over the
// rest of the wide exponent, makes them the wide type's infinity or NaN.
#pragma once

#include <humming/dequant/codes.cuh>
#include <humming/dequant/pairs.cuh>

namespace humming {

constexpr float float_power_of_two(int exponent) {
  float value = 1.f;
  for (int i = 0; i < exponent; ++i) value *= 2.f;
  return value;
}

template <class Order, class Code, class Type, bool kFold>
struct DequantFloat16 : PairOperand<Type> {
  static_assert(Order::kOperandBits == 16 && Order::kCodeBits == Code::kBits,
                "slot dequant: DequantFloat16 reads codes packed for 16-bit operands");
  static constexpr int kBits = Code::kBits;
  static constexpr int kUp = Pairs<Type>::kBias - Code::kBias;  // power of two to be put back
  static constexpr float kFactor = kFold ? float_power_of_two(kUp) : 1.f;
  using Offset = NoOffset;

  static __device__ Offset offset() { return {}; }
  static __device__ Offset offset(u32) { return {}; }

  // Registers of step kStep: (lane, r, e) -> (row g + 8 * (r & 1), k 16 * kStep + 2t + e + 8 (r/2)).
  template <int kStep>
  static __device__ void run(const u32 (&words)[kBits], const Offset (&)[2], u32 (&a)[4]) {
    a[0] = value<4 * kStep>(words);
    a[1] = value<4 * kStep + 1>(words);
    a[2] = value<4 * kStep + 2>(words);
    a[3] = value<4 * kStep + 3>(words);
  }

 private:
  static constexpr int kMagnitudeAt = Pairs<Type>::kMantissaBits - Code::kMantissaBits;
  static constexpr int kTop = kMagnitudeAt + kBits - 1;  // the bit above the magnitude
  static constexpr u32 kMagnitude = both_halves(((1u << (kBits - 1)) - 1) << kMagnitudeAt);
  // How many more exponent bits the wide type has, as a factor that repeats bit kTop over them.
  static constexpr u32 kFill = (1u << (15 - kTop)) - 1;

  template <int kRegister>
  static __device__ u32 value(const u32 (&words)[kBits]) {
    constexpr int kAt = Codes<Order>::template raw_at<kRegister, kMagnitudeAt>();
    const u32 code = Codes<Order>::template raw<kRegister, kMagnitudeAt>(words);
    const u32 magnitude = moved<kMagnitudeAt - kAt>(code) & kMagnitude;
    u32 placed = ptx::and_xor(moved<16 - kBits - kAt>(code), both_halves(0x8000), magnitude);
    if constexpr (Code::kSpecials != Specials::kNone && kFill != 0) {
      constexpr int kLast = kMagnitudeAt + (Code::kSpecials == Specials::kIeee ? Code::kMantissaBits
                                                                               : 0);
      const u32 carried = magnitude + both_halves(1u << kLast);
      if constexpr (kFill == 1) {
        placed = ptx::and_xor(carried, both_halves(1u << kTop), placed);
      } else {
        placed += (carried & both_halves(1u << kTop)) * kFill;
      }
    }
    if constexpr (kUp == 0 || kFold) return placed;
    return Pairs<Type>::multiply(placed, power_of_two<Type>(kUp));
  }
};

}  // namespace humming
