// What is known of the values under one scale: the largest magnitude, and for codes around a zero
// point the lowest and highest value.
#pragma once

#include <humming/ptx/float32.cuh>
#include <humming/ptx/packed16.cuh>
#include <humming/quantize/source.cuh>
#include <humming/types.cuh>

namespace humming {

// Magnitudes are compared as bits: infinity and NaN are above all numbers there.
template <bool kSymmetric>
struct Extremes {
  u32 magnitude;
  float low, high;

  static __device__ Extremes none() { return {0, 0.f, 0.f}; }

  template <class Chunk>
  __device__ void take(const Chunk& chunk) {
#pragma unroll
    for (int i = 0; i < 8; ++i) take(chunk[i]);
  }
  __device__ void take(float value) {
    raise(ptx::f32_to_bits(value) & 0x7fffffffu);
    if constexpr (!kSymmetric) low = ptx::min_f32(low, value), high = ptx::max_f32(high, value);
  }
  __device__ void take(const Extremes& other) {
    raise(other.magnitude);
    if constexpr (!kSymmetric) {
      low = ptx::min_f32(low, other.low), high = ptx::max_f32(high, other.high);
    }
  }
  __device__ const Extremes& whole() const { return *this; }

  // Of the kLanes neighbouring lanes, each of which gets the result.
  template <int kLanes>
  __device__ void combine() {
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      Extremes other = none();
      other.magnitude = __shfl_xor_sync(0xffffffffu, magnitude, step);
      if constexpr (!kSymmetric) {
        other.low = __shfl_xor_sync(0xffffffffu, low, step);
        other.high = __shfl_xor_sync(0xffffffffu, high, step);
      }
      take(other);
    }
  }

 private:
  __device__ void raise(u32 other) { magnitude = magnitude < other ? other : magnitude; }
};

// The larger and the smaller of two pairs; NaN is both.
template <class Element>
struct PairOrder {
  static __device__ u32 max(u32 a, u32 b) { return ptx::max_nan_f16x2(a, b); }
  static __device__ u32 min(u32 a, u32 b) { return ptx::min_nan_f16x2(a, b); }
};
template <>
struct PairOrder<Bf16> {
  static __device__ u32 max(u32 a, u32 b) { return ptx::max_nan_bf16x2(a, b); }
  static __device__ u32 min(u32 a, u32 b) { return ptx::min_nan_bf16x2(a, b); }
};

// The same of 16-bit values that still lie in pairs: an instruction looks at two of them, and NaN
// wins. Those at even and at odd places are told apart until `whole`. Needs: packed_max.
template <class Element, bool kSymmetric>
struct PackedExtremes {
  u32 low, high;

  static __device__ PackedExtremes none() { return {0, 0}; }

  __device__ void take(const Raw8<Element>& raw) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (kSymmetric) {
        high = PairOrder<Element>::max(high, raw.word[w] & 0x7fff7fffu);
      } else {
        low = PairOrder<Element>::min(low, raw.word[w]),
        high = PairOrder<Element>::max(high, raw.word[w]);
      }
    }
  }
  __device__ Extremes<kSymmetric> whole() const {
    Extremes<kSymmetric> found = Extremes<kSymmetric>::none();
    found.take(Element::to_float(u16(high)));
    found.take(Element::to_float(u16(high >> 16)));
    if constexpr (!kSymmetric) {
      found.take(Element::to_float(u16(low)));
      found.take(Element::to_float(u16(low >> 16)));
    }
    return found;
  }
};

}  // namespace humming
