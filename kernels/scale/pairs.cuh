// Slot scale: the scales of two rows (or tokens) at once, from their stored codes.
// Needs: bf16_fma for operands of bfloat16.
//
// A lane of a warp-level MMA holds values of rows g and g + 8, so scales are wanted in pairs; what
// can be done for both in one register costs half.
#pragma once

#include <humming/ptx/bits.cuh>
#include <humming/ptx/packed16.cuh>
#include <humming/types.cuh>

namespace humming {

// What is the same for every way to convert: to two floats, or to both halves of a register.
template <class Type>
struct ScalePairs {
  using Scale = Type;
  using Storage = typename Type::Storage;

  static __device__ void floats(Storage first, Storage second, float (&found)[2]) {
    found[0] = Type::to_float(first);
    found[1] = Type::to_float(second);
  }

  template <class Operand>
  static __device__ u32 operands(Storage first, Storage second) {
    if constexpr (IsSame<Operand, Type>::value) {
      return first | u32(second) << 16;
    } else if constexpr (IsSame<Type, E8m0>::value && IsSame<Operand, Bf16>::value) {
      // The bits of exponents; code 0 is subnormal, 255 has the bits of infinity: only that times 0
      // is NaN.
      const u32 normal = (first | u32(second) << 16) << 7;
      const u32 value = ptx::max_nan_bf16x2(normal, 0x00400040u);
      return ptx::fma_bf16x2(value, 0, value);
    } else {
      float values[2];
      floats(first, second, values);
      return narrow<Operand>(values);
    }
  }

  template <class Operand>
  static __device__ u32 narrow(const float (&values)[2]) {
    if constexpr (IsSame<Operand, Bf16>::value) {
      return ptx::f32x2_to_bf16x2(values[0], values[1]);
    } else {
      return Operand::from_float(values[0]) | u32(Operand::from_float(values[1])) << 16;
    }
  }
};

// E4m3 by way of two halves in a register, which Halves makes of two codes.
template <class Halves>
struct E4m3Pairs : ScalePairs<E4m3> {
  static __device__ void floats(u8 first, u8 second, float (&found)[2]) {
    const u32 halves = Halves::halves(first, second);
    found[0] = ptx::f16_to_f32(u16(halves));
    found[1] = ptx::f16_to_f32(u16(halves >> 16));
  }

  template <class Operand>
  static __device__ u32 operands(u8 first, u8 second) {
    if constexpr (IsSame<Operand, F16>::value) {
      return Halves::halves(first, second);
    } else {
      float values[2];
      floats(first, second, values);
      return narrow<Operand>(values);
    }
  }
};

// As float_16.cuh dequantizes codes: magnitudes put where a half has them mean 2^-8 times the
// scale, and a carry out of all ones is the NaN's upper exponent bit.
//   code    s eeee mmm            half   s 0eeee mmm0000000
struct E4m3Arithmetic {
  static __device__ u32 halves(u32 first, u32 second) {
    const u32 codes = ptx::permute(first, second, 0x4101);  // in the upper byte of each half
    const u32 magnitude = (codes >> 1) & 0x3f803f80u;
    const u32 placed = ptx::and_xor(codes, 0x80008000u, magnitude);
    const u32 number = ptx::and_xor(magnitude + 0x00800080u, 0x40004000u, placed);
    return ptx::mul_f16x2(number, 0x5c005c00u);
  }
};

}  // namespace humming
