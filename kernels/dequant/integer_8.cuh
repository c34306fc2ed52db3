// Slot dequant: integers of 1 to 8 bits to operands of 8 or 4 bits, exactly.
// Needs: nothing.
//
// Two's complement codes of fewer bits go to the top of a slot, which multiplies them by a power of
// two and needs no sign extension: one instruction a plane for all codes of a register. The power
// of two goes into the scales. 4-bit codes in bytes:
//   word      hhhh gggg ffff eeee dddd cccc bbbb aaaa
//   << 4, & 0xf0: 16 g, 16 e, 16 c, 16 a         & 0xf0: 16 h, 16 f, 16 d, 16 b
// Unsigned codes stay at the bottom. With an integer zero point they become signed,
//   ((q | 0x80) - zero) ^ 0x80
// which borrows from no neighbour: q < 0x80, so that every byte stays above 0 (after Warren,
// Hacker's Delight, section 2-18).
#pragma once

#include <humming/dequant/codes.cuh>

namespace humming {

template <class Order, class Code, class Type, bool kZeroPoint>
struct DequantInteger8 {
  using Operand = Type;
  static constexpr int kBits = Code::kBits, kSlotBits = Order::kOperandBits;
  static_assert(kSlotBits <= 8 && kBits <= kSlotBits && Order::kCodeBits == kBits,
                "slot dequant: DequantInteger8 reads codes packed for narrow operands");
  static_assert(!kZeroPoint || (kSlotBits == 8 && kBits < 8 && !Code::kTwosComplement),
                "slot dequant: zero points belong to unsigned codes of less than 8 bits");
  static constexpr bool kIdentity = kBits == kSlotBits;  // codes are operands as they are
  static constexpr int kAt = Code::kTwosComplement ? kSlotBits - kBits : 0;
  static constexpr float kFactor = 1.f / (1 << kAt);

  // The zero point of a row, in each slot.
  struct Offset {
    u32 zeros;
  };

  static __device__ Offset offset() { return Offset{0}; }
  static __device__ Offset offset(u32 zero) { return Offset{zero * in_slots<kSlotBits>(1)}; }

  // The values of operand register kRegister, of a row with this offset.
  template <int kRegister>
  static __device__ u32 value(const u32 (&words)[kBits], const Offset& row) {
    if constexpr (kBits == kSlotBits) {
      return words[Order::kWord[0][kRegister]];
    } else if constexpr (kZeroPoint) {
      constexpr u32 kTop = in_slots<kSlotBits>(0x80);
      return (Codes<Order>::template take<kRegister, 0>(words, kTop) - row.zeros) ^ kTop;
    } else {
      return Codes<Order>::template take<kRegister, kAt>(words, 0);
    }
  }
};

}  // namespace humming
