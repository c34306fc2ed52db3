// Slot dequant: 4-bit integers and sign-magnitude codes to 8-bit floats, exactly, by tables.
// Needs: nothing.
//
// A byte permutation looks four codes up in a table of eight bytes. Codes below 8 have one table, the
// others another, and the upper bit of each code, repeated over a byte, chooses. Eight codes of a word
// are two registers, whose codes take turns:
//   word   h g f e d c b a    ->  lookups  d c b a, h g f e    ->  g e c a  and  h f d b
#pragma once

#include <humming/dequant/codes.cuh>
#include <humming/dequant/through_half.cuh>

namespace humming {

template <class Order, class Code, class Type>
struct DequantTable8 {
  using Operand = Type;
  static constexpr int kBits = 4;
  static_assert(Order::kOperandBits == 8 && Order::kCodeBits == 4 && Code::kBits == 4,
                "slot dequant: DequantTable8 reads codes of 4 bits packed for operands in bytes");
  static constexpr float kFactor = 1.f;
  using Offset = NoOffset;

  static __device__ Offset offset() { return {}; }
  static __device__ Offset offset(u32) { return {}; }

  // Four values of operand register kRegister.
  template <int kRegister>
  static __device__ u32 value(const u32 (&words)[kBits], Offset) {
    constexpr int kAt = Order::kBit[0][kRegister];
    static_assert(kAt == 0 || kAt == 4, "slot dequant: codes of 4 bits lie in halves of bytes");
    const u32 word = words[Order::kWord[0][kRegister]];
    const u32 low = looked_up<0>(word), high = looked_up<1>(word);
    return ptx::permute(low, high, kAt == 0 ? 0x6420 : 0x7531);
  }

 private:
  // Whether codes from 8 on are negative, and their sizes.
  static constexpr bool kMagnitude = Code::kMantissaBits == 3;
  static constexpr bool kSigned = Code::kTwosComplement || kMagnitude;

  // The number of a code as bits of the operand's type.
  static constexpr u32 encoded(int code) {
    const bool negative = kSigned && code >= 8;
    const int size = !negative ? code : kMagnitude ? code - 8 : 16 - code;
    const u32 sign = negative ? 0x80 : 0;
    if (size == 0) return sign;
    int exponent = 0;
    while (size >> (exponent + 1)) ++exponent;
    const int significand = size << Type::kMantissaBits >> exponent;
    return sign | (u32(exponent + Type::kBias - 1) << Type::kMantissaBits) + u32(significand);
  }

  // Four numbers from code kFirst on.
  template <int kFirst>
  static constexpr u32 table() {
    u32 bytes = 0;
    for (int i = 0; i < 4; ++i) bytes |= encoded(kFirst + i) << 8 * i;
    return bytes;
  }

  // Codes 4 kHalf to 4 kHalf + 3 of a word.
  template <int kHalf>
  static __device__ u32 looked_up(u32 word) {
    const u32 index = (word & 0x77777777u) >> 16 * kHalf;
    const u32 lower = ptx::permute(table<0>(), table<4>(), index);
    const u32 upper = ptx::permute(table<8>(), table<12>(), index);
    const u32 is_upper = ptx::permute(word << 4, word, kHalf == 0 ? 0xd9c8 : 0xfbea);
    return ptx::select(is_upper, upper, lower);
  }
};

// Small integers in 8-bit floats: by tables where codes have 4 bits and no zero point.
template <class Order, class Code, class Type, bool kZeroPoint,
          template <class, class, class> class DequantHalf>
using DequantSmall8 =
    typename IfElse<Code::kBits == 4 && !kZeroPoint, DequantTable8<Order, Code, Type>,
                    DequantThroughHalf<Order, Code, Type, DequantHalf>>::Type;

}  // namespace humming
