// Slot dequant: 4-bit integers to half, two instructions for two codes and a shift for eight.
// Needs: nothing beyond half arithmetic.
//
// A half with exponent 25 - 15 holds integers: 0x6400 | q = 1024 + q, as the mantissa's last bit is
// worth one (magic number as in Kim et al., "Who Says Elephants Can't Run", 2022). Codes lie at
// bits 0, 4, 8 and 12 of each 16-bit half:
//   word       hhhh gggg ffff eeee dddd cccc bbbb aaaa
//   register   r = 0: (a, e)   r = 1: (b, f)   r = 2: (c, g)   r = 3: (d, h)
//   & 0x000f000f, | 0x6400:  1024 + q             r = 0, and r = 2 after a shift by 8
//   & 0x00f000f0, | 0x6400:  1024 + 16 q          r = 1, and r = 3 after it; times 1/16 = 64 + q
// Two's complement codes: q ^ 8 = value + 8, so the magic number absorbs the flip (the bit
// operation computes (word & mask) ^ magic) and 8 more is subtracted. All steps are exact.
#pragma once

#include <humming/ptx/packed16.cuh>
#include <humming/types.cuh>

namespace humming {

template <class Order, bool kTwosComplement>
struct DequantInt4F16 {
  static_assert(Order::kCodeBits == 4 && Order::kOperandBits == 16,
                "slot dequant: DequantInt4F16 reads 4-bit codes packed for 16-bit operands");
  static_assert(Order::kWord[0][3] == 0 && Order::kWord[0][4] == 1 && Order::kBit[0][1] == 4 &&
                    Order::kBit[0][2] == 8 && Order::kBit[0][3] == 12,
                "slot dequant: DequantInt4F16 expects a step of K in each word, 4 bits apart");
  using Operand = F16;

  // What is subtracted from registers 0, 2 and from registers 1, 3: both halves of one row.
  struct Offset {
    u32 low;
    u32 high;
  };

  // The offset without a zero point: 1024 (+ 8), and -(64 (+ 8)).
  static __device__ Offset offset() {
    return kTwosComplement ? Offset{0x64086408u, 0xd480d480u} : Offset{0x64006400u, 0xd400d400u};
  }

  // The offset of an integer zero point 0..15: 1024 + z, and -(64 + z), whose last bit is 1/16.
  static __device__ Offset offset(u32 zero) {
    const u32 both = zero * 0x00010001u;
    return Offset{0x64006400u | both, 0xd400d400u | (both << 4)};
  }

  // Registers of step kStep: (lane, r, e) -> (row g + 8 * (r & 1), k 16 * kStep + 2t + e + 8 (r/2)).
  template <int kStep>
  static __device__ void run(const u32 (&words)[4], const Offset (&rows)[2], u32 (&a)[4]) {
    constexpr u32 kFlip = kTwosComplement ? 0x00080008u : 0;
    constexpr u32 kSixteenth = 0x2c002c00u;
    const u32 near = words[kStep];
    const u32 far = near >> 8;
    const u32 code0 = ptx::and_xor(near, 0x000f000fu, 0x64006400u ^ kFlip);
    const u32 code1 = ptx::and_xor(near, 0x00f000f0u, 0x64006400u ^ (kFlip << 4));
    const u32 code2 = ptx::and_xor(far, 0x000f000fu, 0x64006400u ^ kFlip);
    const u32 code3 = ptx::and_xor(far, 0x00f000f0u, 0x64006400u ^ (kFlip << 4));
    a[0] = ptx::sub_f16x2(code0, rows[0].low);
    a[1] = ptx::fma_f16x2(code1, kSixteenth, rows[1].high);
    a[2] = ptx::sub_f16x2(code2, rows[0].low);
    a[3] = ptx::fma_f16x2(code3, kSixteenth, rows[1].high);
  }

  // For zero points that are floats: both halves minus both halves, rounded.
  static __device__ u32 subtract(u32 values, u32 zero) { return ptx::sub_f16x2(values, zero); }

  // For scales that are applied to operands: both halves times both halves, rounded.
  static __device__ u32 scale(u32 values, u32 factor) { return ptx::mul_f16x2(values, factor); }
};

}  // namespace humming
