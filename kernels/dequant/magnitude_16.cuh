// Slot dequant: a sign and an integer magnitude (e0mY) to half or bfloat16, exactly, -0 included.
// Needs: bf16_fma for bfloat16.
//
// The magnitude becomes a float as in integer_16.cuh, 2^m + magnitude minus 2^m; the sign bit is
// put on top afterwards.
#pragma once

#include <humming/dequant/codes.cuh>
#include <humming/dequant/pairs.cuh>

namespace humming {

template <class Order, class Code, class Type>
struct DequantMagnitude16 : PairOperand<Type> {
  static_assert(Order::kOperandBits == 16 && Order::kCodeBits == Code::kBits,
                "slot dequant: DequantMagnitude16 reads codes packed for 16-bit operands");
  static constexpr int kBits = Code::kBits;
  static constexpr u32 kMagic = power_of_two<Type>(Pairs<Type>::kMantissaBits);
  static_assert(kBits - 1 <= Pairs<Type>::kMantissaBits, "slot dequant: the magnitude is too wide");
  using Offset = NoOffset;

  static __device__ Offset offset() { return {}; }
  static __device__ Offset offset(u32) { return {}; }

  // Two values of operand register kRegister.
  template <int kRegister>
  static __device__ u32 value(const u32 (&words)[kBits], Offset) {
    constexpr int kAt = Codes<Order>::template raw_at<kRegister, 0>();
    const u32 code = Codes<Order>::template raw<kRegister, 0>(words);
    constexpr u32 kMagnitude = both_halves((1u << (kBits - 1)) - 1);
    const u32 held = ptx::and_xor(moved<-kAt>(code), kMagnitude, kMagic);
    const u32 magnitude = Pairs<Type>::subtract(held, kMagic);
    return ptx::and_xor(moved<16 - kBits - kAt>(code), both_halves(0x8000), magnitude);
  }
};

}  // namespace humming
