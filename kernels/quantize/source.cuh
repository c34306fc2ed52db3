// Eight neighbours of a row as floats: read, and perhaps put through an activation function.
//
// Rows that are 16-byte aligned are read 16 bytes at a time, others value by value. What is beyond
// the end of a row counts as 0, of which every function here makes 0.
#pragma once

#include <humming/ptx/float32.cuh>
#include <humming/quantize/params.cuh>
#include <humming/types.cuh>

namespace humming {

// What is done to the input before it is quantized.
enum class Fuse { kNone, kSiluMul, kGelu, kGeluTanh };

// Eight values as they lie in memory.
template <class Input>
struct Raw8 {
  using Storage = typename Input::Storage;
  static constexpr int kWords = sizeof(Storage) * 8 / 4;
  u32 word[kWords];

  // kVector: `at` is 16-byte aligned, and all of the eight exist or none.
  template <bool kVector>
  static __device__ Raw8 load(const Storage* at, int count) {
    Raw8 raw;
    if constexpr (kVector) {
#pragma unroll
      for (int w = 0; w < kWords; w += 4) {
        Words4 four = {{0, 0, 0, 0}};
        if (count > 0) four = reinterpret_cast<const Words4*>(at)[w / 4];
#pragma unroll
        for (int i = 0; i < 4; ++i) raw.word[w + i] = four.word[i];
      }
    } else {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        if constexpr (sizeof(Storage) == 4) {
          raw.word[w] = w < count ? reinterpret_cast<const u32*>(at)[w] : 0u;
        } else {
          const u32 low = 2 * w < count ? at[2 * w] : 0u;
          const u32 high = 2 * w + 1 < count ? at[2 * w + 1] : 0u;
          raw.word[w] = low | high << 16;
        }
      }
    }
    return raw;
  }

  __device__ float operator[](int i) const {
    if constexpr (sizeof(Storage) == 4) {
      return ptx::bits_to_f32(word[i]);
    } else {
      return Input::to_float(u16(word[i / 2] >> (i % 2 * 16)));
    }
  }
};

struct Values8 {
  float value[8];
  __device__ float operator[](int i) const { return value[i]; }
};

// Chunk: what a thread keeps of eight values between finding a scale and encoding.
template <class Input, Fuse kFuse>
struct Source {
  using Chunk = Values8;

  template <bool kVector>
  static __device__ Chunk load(const typename Input::Storage* at, int k, int count) {
    const Raw8<Input> raw = Raw8<Input>::template load<kVector>(at, count);
    Chunk chunk;
    if constexpr (kFuse == Fuse::kSiluMul) {
      const Raw8<Input> factor = Raw8<Input>::template load<kVector>(at + k, count);
#pragma unroll
      for (int i = 0; i < 8; ++i) chunk.value[i] = times_sigmoid(raw[i], raw[i]) * factor[i];
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        chunk.value[i] = kFuse == Fuse::kGelu ? gelu(raw[i]) : gelu_tanh(raw[i]);
      }
    }
    return chunk;
  }

 private:
  // x / (1 + exp(-y))
  static __device__ float times_sigmoid(float x, float y) {
    return x * ptx::rcp_approx(1.f + ptx::ex2_approx(y * -1.44269504f));
  }
  // Not 1 + erf, which would cancel for negative numbers.
  static __device__ float gelu(float x) { return 0.5f * x * erfcf(x * -0.707106781f); }
  // (1 + tanh(y)) / 2 = 1 / (1 + exp(-2y)), with y = sqrt(2 / pi) (x + 0.044715 x^3)
  static __device__ float gelu_tanh(float x) {
    return times_sigmoid(x, 1.59576912f * (x + 0.044715f * x * x * x));
  }
};

template <class Input>
struct Source<Input, Fuse::kNone> {
  using Chunk = Raw8<Input>;

  template <bool kVector>
  static __device__ Chunk load(const typename Input::Storage* at, int /*k*/, int count) {
    return Chunk::template load<kVector>(at, count);
  }
};

}  // namespace humming
