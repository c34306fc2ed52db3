// Slot dequant: floats to float operands of at most 8 bits, one in each byte, exactly.
// Needs: nothing.
//
// Exponent and mantissa put where the operand has them mean the value times
// 2^(narrow bias - operand bias), subnormals included; the power of two goes into the scales. The
// 4-bit type lies in bits 5..2 of its byte, others at the bottom (PTX ISA 9.7.14.5, "Matrix
// Fragments for mma.m16n8k32" with .kind::f8f6f4).
#pragma once

#include <humming/dequant/codes.cuh>

namespace humming {

template <class Order, class Code, class Type>
struct DequantFloat8 {
  using Operand = Type;
  static constexpr int kBits = Code::kBits;
  static_assert(Order::kOperandBits == 8 && Order::kCodeBits == kBits,
                "slot dequant: DequantFloat8 reads codes packed for operands in bytes");
  static constexpr float kFactor = float_power_of_two(Type::kBias - Code::kBias);
  static constexpr bool kIdentity = kBits == 8;  // codes are operands as they are
  static constexpr int kMagnitudeAt = Type::kAt + Type::kMantissaBits - Code::kMantissaBits;
  static constexpr int kSignAt = Type::kAt + Type::kBits - 1;
  using Offset = NoOffset;

  static __device__ Offset offset() { return {}; }
  static __device__ Offset offset(u32) { return {}; }

  // Four values of operand register kRegister.
  template <int kRegister>
  static __device__ u32 value(const u32 (&words)[kBits], Offset) {
    if constexpr (kBits == 8) {
      static_assert(Type::kMantissaBits == Code::kMantissaBits, "slot dequant: no room to widen");
      return words[Order::kWord[0][kRegister]];
    } else if constexpr (kMagnitudeAt + kBits - 1 == kSignAt) {
      return Codes<Order>::template take<kRegister, kMagnitudeAt>(words, 0);
    } else {
      constexpr int kFrom = Codes<Order>::template raw_at<kRegister, kMagnitudeAt>();
      const u32 code = Codes<Order>::template raw<kRegister, kMagnitudeAt>(words);
      constexpr u32 kMagnitude = in_slots<8>(((1u << (kBits - 1)) - 1) << kMagnitudeAt);
      const u32 magnitude = moved<kMagnitudeAt - kFrom>(code) & kMagnitude;
      return ptx::and_xor(moved<kSignAt - (kFrom + kBits - 1)>(code), in_slots<8>(1u << kSignAt),
                          magnitude);
    }
  }
};

}  // namespace humming
