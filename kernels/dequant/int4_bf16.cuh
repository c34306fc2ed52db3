// Slot dequant: 4-bit integers to bfloat16, three instructions for two codes less one in eight.
// Needs: bf16_fma.
//
// 0x4300 | q = 128 + q: a bfloat16 has 7 mantissa bits, so only codes at bits 0..3 of each half can
// be read without a shift (at bits 4..7 the code would reach the exponent). Codes lie at bits 0, 4,
// 8 and 12 of each half; register r is the word shifted by 4 r.
// Two's complement codes: q ^ 8 = value + 8 as in half. All steps are exact.
#pragma once

#include <humming/ptx/packed16.cuh>
#include <humming/types.cuh>

namespace humming {

template <class Order, bool kTwosComplement>
struct DequantInt4Bf16 {
  static_assert(Order::kCodeBits == 4 && Order::kOperandBits == 16,
                "slot dequant: DequantInt4Bf16 reads 4-bit codes packed for 16-bit operands");
  static_assert(Order::kWord[0][3] == 0 && Order::kWord[0][4] == 1 && Order::kBit[0][1] == 4 &&
                    Order::kBit[0][2] == 8 && Order::kBit[0][3] == 12,
                "slot dequant: DequantInt4Bf16 expects a step of K in each word, 4 bits apart");
  using Operand = Bf16;

  // Minus what is to be subtracted, for both halves of one row.
  struct Offset {
    u32 minus;
  };

  // The offset without a zero point: -(128 (+ 8)).
  static __device__ Offset offset() { return Offset{kTwosComplement ? 0xc308c308u : 0xc300c300u}; }

  // The offset of an integer zero point 0..15: -(128 + z).
  static __device__ Offset offset(u32 zero) { return Offset{0xc300c300u | zero * 0x00010001u}; }

  // Registers of step kStep: (lane, r, e) -> (row g + 8 * (r & 1), k 16 * kStep + 2t + e + 8 (r/2)).
  template <int kStep>
  static __device__ void run(const u32 (&words)[4], const Offset (&rows)[2], u32 (&a)[4]) {
    constexpr u32 kMagic = 0x43004300u ^ (kTwosComplement ? 0x00080008u : 0);
    constexpr u32 kOne = 0x3f803f80u;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const u32 code = ptx::and_xor(words[kStep] >> (4 * r), 0x000f000fu, kMagic);
      a[r] = ptx::fma_bf16x2(code, kOne, rows[r & 1].minus);
    }
  }

  // For zero points that are floats: both halves minus both halves, rounded.
  static __device__ u32 subtract(u32 values, u32 zero) {
    return ptx::fma_bf16x2(values, 0x3f803f80u, zero ^ 0x80008000u);
  }

  // For scales that are applied to operands, rounded; adding -0 keeps the product as it is.
  static __device__ u32 scale(u32 values, u32 factor) {
    return ptx::fma_bf16x2(values, factor, 0x80008000u);
  }
};

}  // namespace humming
