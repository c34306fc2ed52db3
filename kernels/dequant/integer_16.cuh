// Slot dequant: integers of 1 to 8 bits to half or bfloat16, exactly.
// Needs: bf16_fma for bfloat16.
//
// A float whose mantissa's last bit is worth 2^-s holds integers at bit s: with m mantissa bits,
// OR-ing the code q at bit s into 2^m makes 2^m + 2^s q (magic number as in Kim et al., "Who Says
// Elephants Can't Run", 2022), as long as q ends below bit m. Times 2^-s and minus
// 2^(m - s) + zero that is q - zero:
//   half (m = 10), 4-bit codes at bits 0, 4, 8, 12 of each half hhhh .. dddd cccc bbbb aaaa
//     & 0x000f, | 0x6400:  1024 + q               for a, and for c after a shift by 8
//     & 0x00f0, | 0x6400:  1024 + 16 q            for b, and for d after it
// s is 0 or 4, whichever is nearer to where codes lie, so that half of the shifts are saved.
// Two's complement: flipping the highest bit adds 2^(bits - 1), which the zero point then takes off;
// the flip costs nothing, since the bit operation computes (word & mask) ^ magic.
//
// 8-bit codes do not fit bfloat16's 7 bits. Their highest bit h and the others l go apart:
//   (128 + l) - (128 + 128 h) = l - 128 h, the value of a two's complement code.
#pragma once

#include <humming/dequant/codes.cuh>
#include <humming/dequant/pairs.cuh>

namespace humming {

template <class Order, class Code, class Type>
struct DequantInteger16 : PairOperand<Type> {
  static_assert(Order::kOperandBits == 16 && Order::kCodeBits == Code::kBits,
                "slot dequant: DequantInteger16 reads codes packed for 16-bit operands");
  static constexpr int kBits = Code::kBits;
  static constexpr int kMantissaBits = Pairs<Type>::kMantissaBits;
  static constexpr bool kSplit = kBits > kMantissaBits;
  static constexpr bool kHighPlace = kBits + 4 <= kMantissaBits;
  static constexpr u32 kSignBit = Code::kTwosComplement ? 1u << (kBits - 1) : 0;
  static constexpr u32 kMagic = power_of_two<Type>(kMantissaBits);

  // Minus what is to be taken off codes at bit 0 and at bit 4, in both halves.
  struct Offset {
    u32 low;
    u32 high;
  };

  static __device__ Offset offset() { return offset(kSignBit); }

  // The offset of an integer zero point 0 .. 2^kBits - 1: its bits go into the mantissa as well.
  static __device__ Offset offset(u32 zero) {
    if constexpr (kSplit) {
      return Offset{both_halves(Type::from_float(128.f - float(int(zero)))), 0};
    } else {
      constexpr u32 kLow = both_halves(0x8000) | kMagic;
      constexpr u32 kHigh = both_halves(0x8000) | power_of_two<Type>(kMantissaBits - 4);
      return Offset{kLow | both_halves(zero), kHigh | both_halves(zero) << 4};
    }
  }

  // Two values of operand register kRegister, of a row with this offset.
  template <int kRegister>
  static __device__ u32 value(const u32 (&words)[kBits], const Offset& row) {
    if constexpr (kSplit) {
      return split_value<kRegister>(words, row);
    } else {
      constexpr int kAt = kHighPlace ? Order::kBit[0][kRegister] & 4 : 0;
      const u32 held =
          Codes<Order>::template take<kRegister, kAt>(words, kMagic ^ both_halves(kSignBit << kAt));
      if constexpr (kAt == 0) {
        return Pairs<Type>::add(held, row.low);
      } else {
        return Pairs<Type>::fma(held, power_of_two<Type>(-kAt), row.high);
      }
    }
  }

 private:
  template <int kRegister>
  static __device__ u32 split_value(const u32 (&words)[kBits], const Offset& row) {
    static_assert(kBits == 8 && kMantissaBits == 7, "slot dequant: one bit goes apart");
    constexpr u32 kFlip = Code::kTwosComplement ? 0 : 0x80;
    const u32 code = moved<-Order::kBit[0][kRegister]>(words[Order::kWord[0][kRegister]]);
    const u32 low = ptx::and_xor(code, both_halves(0x7f), kMagic);
    const u32 high = ptx::and_xor(code, both_halves(0x80), kMagic ^ both_halves(kFlip));
    const u32 signed_value = Pairs<Type>::subtract(low, high);  // q, or q - 128
    if constexpr (Code::kTwosComplement) {
      return signed_value;
    } else {
      return Pairs<Type>::add(signed_value, row.low);
    }
  }
};

}  // namespace humming
