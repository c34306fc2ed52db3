// Small own types, so that a kernel includes no toolkit or standard header and compiles fast.
#pragma once

#include <humming/ptx/convert.cuh>
#include <humming/ptx/float32.cuh>

namespace humming {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// 16 bytes that move as one access.
struct alignas(16) Words4 {
  u32 word[4];
};

// Element types: how a value is stored in memory and how it becomes a float and back.
struct F32 {
  using Storage = float;
  static __device__ float to_float(float value) { return value; }
  static __device__ float from_float(float value) { return value; }
};

struct F16 {
  using Storage = u16;
  static __device__ float to_float(u16 bits) { return ptx::f16_to_f32(bits); }
  static __device__ u16 from_float(float value) { return ptx::f32_to_f16(value); }
};

struct Bf16 {
  using Storage = u16;
  // bfloat16 is the upper half of a float.
  static __device__ float to_float(u16 bits) { return ptx::bits_to_f32(u32(bits) << 16); }
  // Round to nearest even in integers, which every architecture has; a NaN keeps its quiet bit.
  static __device__ u16 from_float(float value) {
    const u32 bits = ptx::f32_to_bits(value);
    const u32 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return u16((value != value ? bits | 0x400000u : rounded) >> 16);
  }
};

// The same for devices that round by themselves.
struct NativeBf16 : Bf16 {
  static __device__ u16 from_float(float value) { return ptx::f32_to_bf16(value); }
};

// Exponent only, 2^(code - 127); 255 is NaN (OCP Microscaling Formats, section 5.4.1).
struct E8m0 {
  using Storage = u8;
  // Code 0 is subnormal in float, 255 has the bits of infinity: only that times 0 is NaN.
  static __device__ float to_float(u8 code) {
    const float normal = ptx::bits_to_f32(u32(code) << 23);
    const float value = ptx::max_f32(normal, ptx::bits_to_f32(0x00400000u));
    return ptx::fma_rn(value, 0.f, value);
  }
};

// Sign, 4 bits of exponent with bias 7, 3 of mantissa; all ones is NaN (OCP FP8, E4M3).
struct E4m3 {
  using Storage = u8;
  static constexpr int kBits = 8, kMantissaBits = 3, kBias = 7, kAt = 0;
  static __device__ float to_float(u8 code) {
    const u32 magnitude = code & 0x7fu, sign = u32(code & 0x80u) << 24;
    if (magnitude == 0x7fu) return ptx::bits_to_f32(0x7fc00000u | sign);
    // Exponent and mantissa put where float has them mean the value times 2^-120, exactly, and
    // subnormals too; the product restores it.
    return ptx::bits_to_f32(magnitude << 20 | sign) * ptx::bits_to_f32(0x7b800000u);
  }
};

// Operand types that only MMA instructions compute with. kAt: lowest bit of the type in its byte.
struct E5m2 {
  static constexpr int kBits = 8, kMantissaBits = 2, kBias = 15, kAt = 0;
};
struct E3m2 {
  static constexpr int kBits = 6, kMantissaBits = 2, kBias = 3, kAt = 0;
};
struct E2m3 {
  static constexpr int kBits = 6, kMantissaBits = 3, kBias = 1, kAt = 0;
};
struct E2m1 {
  static constexpr int kBits = 4, kMantissaBits = 1, kBias = 1, kAt = 2;
};
struct S8 {};
struct U8 {};
struct S4 {};
struct U4 {};

// Which codes of a float type are no numbers: none; all exponent and mantissa bits set, NaN; all
// exponent bits set, infinity or NaN.
enum class Specials { kNone, kFn, kIeee };

template <class A, class B>
struct IsSame {
  static constexpr bool value = false;
};
template <class A>
struct IsSame<A, A> {
  static constexpr bool value = true;
};

template <bool kFirst, class A, class B>
struct IfElse {
  using Type = A;
};
template <class A, class B>
struct IfElse<false, A, B> {
  using Type = B;
};

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int min_of(int a, int b) { return a < b ? a : b; }
constexpr int max_of(int a, int b) { return a > b ? a : b; }

}  // namespace humming
