// Scales of quantized activations: from the largest magnitude that one covers to what is stored,
// and to the factor that values are multiplied with before they are encoded.
//
// The stored scale is what counts: the factor is its reciprocal, rounded once. Under zeros the scale
// is 1. A magnitude that is no finite number makes it NaN.
#pragma once

#include <humming/ptx/float32.cuh>
#include <humming/types.cuh>

namespace humming {

// A float, F16 or Bf16: quotient of magnitude and largest code, but not below what has a reciprocal,
// nor beyond the largest number of the type.
template <class Element, u32 kSmallestBits, u32 kLargestBits>
struct WideScale {
  using Storage = typename Element::Storage;
  // Whether a magnitude under its own scale rounds to no more than the largest code.
  static constexpr bool kBounds = sizeof(Storage) == 4;

  static __device__ Storage one() { return Element::from_float(1.f); }
  static __device__ Storage nan() { return Element::from_float(ptx::bits_to_f32(0x7fc00000u)); }
  static __device__ float value(Storage stored) { return Element::to_float(stored); }
  static __device__ Storage store(float size) {
    size = ptx::max_f32(size, ptx::bits_to_f32(kSmallestBits));
    return Element::from_float(ptx::min_f32(size, ptx::bits_to_f32(kLargestBits)));
  }

  template <int kMaxExponent>
  static __device__ Storage of(float magnitude, float largest_code, float /*reciprocal*/) {
    return store(ptx::div_rn(magnitude, largest_code));
  }
  static __device__ float reciprocal(Storage stored) { return ptx::rcp_rn(value(stored)); }
};

using ScaleF32 = WideScale<F32, 0x00800000u, 0x7f7fffffu>;    // 2^-126, whose reciprocal is finite
using ScaleF16 = WideScale<F16, 0x33800000u, 0x477fe000u>;    // 2^-24, 65504
using ScaleBf16 = WideScale<Bf16, 0x00800000u, 0x7f7f0000u>;  // 2^-126, 255 * 2^120

// A power of two: the exponent of the magnitude less that of the largest code (OCP Microscaling
// Formats 1.0, section 6.3).
struct ScaleE8m0 {
  using Storage = u8;
  static constexpr bool kBounds = false;

  static __device__ Storage one() { return 127; }
  static __device__ Storage nan() { return 255; }
  static __device__ float value(Storage code) { return E8m0::to_float(code); }

  template <int kMaxExponent>
  static __device__ Storage of(float magnitude, float /*largest_code*/, float /*reciprocal*/) {
    static_assert(kMaxExponent > 0, "codes up to 253 have a normal reciprocal");
    const int code = int(ptx::f32_to_bits(magnitude) >> 23) - kMaxExponent;
    return Storage(code < 0 ? 0 : code);
  }
  static __device__ float reciprocal(Storage code) {
    return ptx::bits_to_f32(u32(254 - code) << 23);
  }
};

// e4m3 without sign, below a second scale that belongs to all of the activations. There are so many
// of them that a product with the reciprocal of largest code and second scale takes the place of a
// quotient. Encoder: of e4m3.
template <class Encoder>
struct ScaleE4m3 {
  using Storage = u8;
  static constexpr bool kBounds = false;

  static __device__ Storage one() { return 0x38; }
  static __device__ Storage nan() { return 0x7f; }
  static __device__ float value(Storage code) { return E4m3::to_float(code); }
  // Of a code that `of` made of a number: see `E4m3::to_float`.
  static __device__ float number(Storage code) {
    return ptx::mul_rn(ptx::bits_to_f32(u32(code) << 20), ptx::bits_to_f32(0x7b800000u));
  }

  // Of a magnitude above 0 at least the smallest number.
  template <int kMaxExponent>
  static __device__ Storage of(float magnitude, float /*largest_code*/, float reciprocal) {
    const float size = ptx::mul_rn(magnitude, reciprocal);
    return Storage(Encoder::one(ptx::max_f32(size, ptx::bits_to_f32(0x3b000000u))));  // 2^-9
  }
};

}  // namespace humming
