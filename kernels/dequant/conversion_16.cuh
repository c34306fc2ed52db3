// Slot dequant: 8-bit floats to half by the device's own conversion, which takes neighbouring bytes.
// Needs: cvt_fp8.
//
// The codes of a register lie two bytes apart, so the inner bytes of a word change places, once for
// two registers:
//   word    b3 b2 b1 b0  ->  b3 b1 | b2 b0,  the registers of codes at bits 8 and at bits 0
#pragma once

#include <humming/dequant/codes.cuh>
#include <humming/dequant/pairs.cuh>
#include <humming/ptx/cvt_fp8.cuh>

namespace humming {

template <class Order, class Stored>
struct DequantConversion16 : PairOperand<F16> {
  static constexpr int kBits = 8;
  static_assert(Order::kOperandBits == 16 && Order::kCodeBits == 8,
                "slot dequant: DequantConversion16 reads bytes packed for 16-bit operands");
  using Offset = NoOffset;

  static __device__ Offset offset() { return {}; }
  static __device__ Offset offset(u32) { return {}; }

  // Two values of operand register kRegister.
  template <int kRegister>
  static __device__ u32 value(const u32 (&words)[kBits], Offset) {
    const u32 word = words[Order::kWord[0][kRegister]];
    const u32 paired = ptx::permute(word, word, 0x3120);
    return ptx::fp8x2_to_f16x2<Stored>(paired >> 2 * Order::kBit[0][kRegister]);
  }
};

}  // namespace humming
