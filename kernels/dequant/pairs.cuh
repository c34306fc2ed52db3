// Two 16-bit floats in a register, by their type: what the 16-bit components of slot dequant use.
#pragma once

#include <humming/ptx/packed16.cuh>
#include <humming/types.cuh>

namespace humming {

constexpr u32 both_halves(u32 bits) { return bits * 0x00010001u; }

template <class Operand>
struct Pairs;

template <>
struct Pairs<F16> {
  static constexpr int kMantissaBits = 10, kBias = 15;
  static __device__ u32 add(u32 a, u32 b) { return ptx::add_f16x2(a, b); }
  static __device__ u32 subtract(u32 a, u32 b) { return ptx::sub_f16x2(a, b); }
  static __device__ u32 multiply(u32 a, u32 b) { return ptx::mul_f16x2(a, b); }
  static __device__ u32 fma(u32 a, u32 b, u32 c) { return ptx::fma_f16x2(a, b, c); }
};

// Only fma exists on every architecture with bfloat16; adding -0 keeps a product as it is.
template <>
struct Pairs<Bf16> {
  static constexpr int kMantissaBits = 7, kBias = 127;
  static __device__ u32 add(u32 a, u32 b) { return ptx::fma_bf16x2(a, both_halves(0x3f80), b); }
  static __device__ u32 subtract(u32 a, u32 b) {
    return ptx::fma_bf16x2(b, both_halves(0xbf80), a);
  }
  static __device__ u32 multiply(u32 a, u32 b) {
    return ptx::fma_bf16x2(a, b, both_halves(0x8000));
  }
  static __device__ u32 fma(u32 a, u32 b, u32 c) { return ptx::fma_bf16x2(a, b, c); }
};

// Bits of 2^exponent in both halves; a normal number of the type.
template <class Operand>
constexpr u32 power_of_two(int exponent) {
  return both_halves(u32(exponent + Pairs<Operand>::kBias) << Pairs<Operand>::kMantissaBits);
}

// What is done with 16-bit operands after dequantization, rounded.
template <class Type>
struct PairOperand {
  using Operand = Type;
  static constexpr float kFactor = 1.f;

  // For zero points that are floats: both halves minus both halves.
  static __device__ u32 subtract(u32 values, u32 zero) {
    return Pairs<Type>::subtract(values, zero);
  }
  // For scales that are applied to operands: what they become before, two of them.
  static __device__ u32 factors(u32 scales) { return scales; }
  // Both halves times both halves.
  static __device__ u32 scale(u32 values, u32 factor) {
    return Pairs<Type>::multiply(values, factor);
  }
};

}  // namespace humming
