// Slot dequant: a sign and an integer magnitude (e0mY) to integer operands of 8 or 4 bits, exactly.
// Needs: nothing.
//
// With b bits a slot and n all ones below its top bit where the sign is set, else 0:
//   ((magnitude ^ n) + (n & 1)) ^ (n's top bit)
// is 2^b - magnitude where the sign is set, and 0 for -0; no slot overflows into the next.
#pragma once

#include <humming/dequant/codes.cuh>

namespace humming {

template <class Order, class Code, class Type>
struct DequantMagnitude8 {
  using Operand = Type;
  static constexpr int kBits = Code::kBits, kSlotBits = Order::kOperandBits;
  static_assert(kSlotBits <= 8 && kBits <= kSlotBits && Order::kCodeBits == kBits,
                "slot dequant: DequantMagnitude8 reads codes packed for narrow operands");
  static constexpr float kFactor = 1.f;
  using Offset = NoOffset;

  static __device__ Offset offset() { return {}; }
  static __device__ Offset offset(u32) { return {}; }

  // The values of operand register kRegister.
  template <int kRegister>
  static __device__ u32 value(const u32 (&words)[kBits], Offset) {
    constexpr int kAt = Codes<Order>::template raw_at<kRegister, 0>();
    const u32 code = Codes<Order>::template raw<kRegister, 0>(words);
    constexpr u32 kTop = in_slots<kSlotBits>(1u << (kSlotBits - 1));
    const u32 magnitude = moved<-kAt>(code) & in_slots<kSlotBits>((1u << (kBits - 1)) - 1);
    const u32 sign = moved<kSlotBits - kBits - kAt>(code) & kTop;
    const u32 one = sign >> (kSlotBits - 1);
    return ((magnitude ^ (sign - one)) + one) ^ sign;
  }
};

}  // namespace humming
