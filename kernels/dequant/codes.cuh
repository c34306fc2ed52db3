// Where a lane's codes lie in its words: what the components of slot dequant have in common.
//
// A register of the MMA operand holds 32 / kOperandBits codes, one in each slot of kOperandBits; the
// composer's Order says for each bit plane of the codes which word and which bit of the slot holds
// it. Shifts and masks are known when compiling, and equal shifts of a word are made once.
#pragma once

#include <humming/ptx/bits.cuh>
#include <humming/types.cuh>

namespace humming {

// `bits` in each slot of a register.
template <int kSlotBits>
constexpr u32 in_slots(u32 bits) {
  u32 all = 0;
  for (int at = 0; at < 32; at += kSlotBits) all |= bits << at;
  return all;
}

// Bits move up by kUp, down where it is negative; what enters and leaves a slot is the caller's care.
template <int kUp>
__device__ inline u32 moved(u32 word) {
  if constexpr (kUp >= 0) {
    return word << kUp;
  } else {
    return word >> -kUp;
  }
}

// The Order of registers whose codes lie at the bottom of slots of kPackedBits: operand register p
// has those of slots p, p + r, ..., r being the ratio of the widths.
template <int kBits, int kPackedBits, int kSlotBits>
struct TokenOrder {
  static constexpr int kCodeBits = kBits, kOperandBits = kSlotBits, kPlanes = 1;
  static constexpr int kPlaneBits[1] = {kBits};
  static constexpr int kWord[1][4] = {{0, 0, 0, 0}};
  static constexpr int kBit[1][4] = {{0, kPackedBits, 2 * kPackedBits, 3 * kPackedBits}};
};

// What a mainloop that spoils the sums of marked rows dequantizes with: the component's variant that
// reads NaN as a number and notes it, where there is one.
template <class Dequant>
struct Noting {
  using Type = Dequant;
  static constexpr bool kNotes = false;
};
template <class Dequant>
  requires(Dequant::Unchecked::kNotes)
struct Noting<Dequant> {
  using Type = typename Dequant::Unchecked;
  static constexpr bool kNotes = true;
};

// The Offset of codes that have no zero point.
struct NoOffset {};

// 2^exponent, for factors of whole kernels.
constexpr float float_power_of_two(int exponent) {
  float value = 1.f;
  for (int i = 0; i < exponent; ++i) value *= 2.f;
  for (int i = 0; i > exponent; --i) value *= 0.5f;
  return value;
}

template <class Order>
struct Codes {
  static constexpr int kBits = Order::kCodeBits;
  static constexpr int kSlotBits = Order::kOperandBits;

  // The codes of a register at bit kAt of each slot, XORed onto `onto`, one instruction a plane
  // beside shifts.
  template <int kRegister, int kAt, int kPlane = 0, int kCodeBit = 0>
  static __device__ u32 take(const u32 (&words)[kBits], u32 onto) {
    constexpr int kWidth = Order::kPlaneBits[kPlane];
    constexpr int kUp = kAt + kCodeBit - Order::kBit[kPlane][kRegister];
    constexpr u32 kMask = in_slots<kSlotBits>(((1u << kWidth) - 1) << (kAt + kCodeBit));
    const u32 word = moved<kUp>(words[Order::kWord[kPlane][kRegister]]);
    const u32 found = ptx::and_xor(word, kMask, onto);
    if constexpr (kPlane + 1 < Order::kPlanes) {
      return take<kRegister, kAt, kPlane + 1, kCodeBit + kWidth>(words, found);
    } else {
      return found;
    }
  }

  // Where `raw` leaves the codes of a register: where they lie if they are in one piece, else at
  // kWish.
  template <int kRegister, int kWish>
  static constexpr int raw_at() {
    return Order::kPlanes == 1 ? Order::kBit[0][kRegister] : kWish;
  }

  // The codes of a register, for those who mask them anyway: other bits of a slot are anything.
  template <int kRegister, int kWish>
  static __device__ u32 raw(const u32 (&words)[kBits]) {
    if constexpr (Order::kPlanes == 1) {
      return words[Order::kWord[0][kRegister]];
    } else {
      return take<kRegister, kWish>(words, 0);
    }
  }
};

}  // namespace humming
