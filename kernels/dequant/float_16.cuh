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

template <class Order, class Code, class Type, bool kFoldWanted>
struct DequantFloat16 : PairOperand<Type> {
  static_assert(Order::kOperandBits == 16 && Order::kCodeBits == Code::kBits,
                "slot dequant: DequantFloat16 reads codes packed for 16-bit operands");
  static constexpr int kBits = Code::kBits;
  static constexpr int kUp = Pairs<Type>::kBias - Code::kBias;  // power of two to be put back
  // Not in bfloat16, whose bias is float's: products would fall below the least float.
  static constexpr bool kFold = kFoldWanted && IsSame<Type, F16>::value;
  static constexpr float kFactor = kFold ? float_power_of_two(kUp) : 1.f;
  using Offset = NoOffset;

  static constexpr int kMagnitudeAt = Pairs<Type>::kMantissaBits - Code::kMantissaBits;
  static constexpr int kTop = kMagnitudeAt + kBits - 1;  // the bit above the magnitude
  static constexpr u32 kMagnitude = both_halves(((1u << (kBits - 1)) - 1) << kMagnitudeAt);
  // How many more exponent bits the wide type has, as a factor that repeats bit kTop over them.
  static constexpr u32 kFill = (1u << (15 - kTop)) - 1;

  static __device__ Offset offset() { return {}; }
  static __device__ Offset offset(u32) { return {}; }

  // Two values of operand register kRegister.
  template <int kRegister>
  static __device__ u32 value(const u32 (&words)[kBits], Offset) {
    constexpr int kAt = Codes<Order>::template raw_at<kRegister, kMagnitudeAt>();
    const u32 code = Codes<Order>::template raw<kRegister, kMagnitudeAt>(words);
    const u32 magnitude = moved<kMagnitudeAt - kAt>(code) & kMagnitude;
    u32 placed = ptx::and_xor(moved<16 - kBits - kAt>(code), both_halves(0x8000), magnitude);
    if constexpr (Code::kSpecials != Specials::kNone && kFill != 0) {
      constexpr int kLast =
          kMagnitudeAt + (Code::kSpecials == Specials::kIeee ? Code::kMantissaBits : 0);
      const u32 carried = magnitude + both_halves(1u << kLast);
      if constexpr (kFill == 1) {
        placed = ptx::and_xor(carried, both_halves(1u << kTop), placed);
      } else {
        placed += (carried & both_halves(1u << kTop)) * kFill;
      }
    }
    if constexpr (kUp == 0 || kFold) {
      return placed;
    } else {
      return Pairs<Type>::multiply(placed, power_of_two<Type>(kUp));
    }
  }
};

}  // namespace humming
