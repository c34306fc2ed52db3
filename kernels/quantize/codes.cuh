// Eight codes of 4 or 8 bits side by side, the first in the lowest bits.
#pragma once

#include <humming/ptx/bits.cuh>
#include <humming/types.cuh>

namespace humming {

// The low bytes of four registers.
__device__ inline u32 low_bytes(u32 a, u32 b, u32 c, u32 d) {
  return ptx::permute(ptx::permute(a, b, 0x0040), ptx::permute(c, d, 0x0040), 0x5410);
}

__device__ inline u32 high_bytes(u32 a, u32 b, u32 c, u32 d) {
  return ptx::permute(ptx::permute(a, b, 0x0073), ptx::permute(c, d, 0x0073), 0x5410);
}

// Of each code the low bits count, whatever is above them.
__device__ inline void pack_codes(const u32 (&code)[8], u32 (&words)[2]) {
  words[0] = low_bytes(code[0], code[1], code[2], code[3]);
  words[1] = low_bytes(code[4], code[5], code[6], code[7]);
}

__device__ inline void pack_codes(const u32 (&code)[8], u32 (&words)[1]) {
  const u32 even = low_bytes(code[0], code[2], code[4], code[6]);
  const u32 odd = low_bytes(code[1], code[3], code[5], code[7]);
  words[0] = (even & 0x0f0f0f0fu) | (odd << 4 & 0xf0f0f0f0u);
}

// Signed numbers, of which the nearest that there is a code for is taken.
__device__ inline void pack_saturated(const int (&code)[8], u32 (&words)[2]) {
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    const u32 high = ptx::pack_saturated_s8(code[4 * w + 3], code[4 * w + 2], 0);
    words[w] = ptx::pack_saturated_s8(code[4 * w + 1], code[4 * w], high);
  }
}

__device__ inline void pack_saturated(const int (&code)[8], u32 (&words)[1]) {
  u32 word = 0;
#pragma unroll
  for (int i = 6; i >= 0; i -= 2) word = ptx::pack_saturated_s4(code[i + 1], code[i], word);
  words[0] = word;
}

// The signs of eight floats in the places of the signs of eight codes; other bits are any.
__device__ inline void pack_signs(const u32 (&bits)[8], u32 (&words)[2]) {
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    words[w] = high_bytes(bits[4 * w], bits[4 * w + 1], bits[4 * w + 2], bits[4 * w + 3]);
  }
}

__device__ inline void pack_signs(const u32 (&bits)[8], u32 (&words)[1]) {
  const u32 even = high_bytes(bits[0], bits[2], bits[4], bits[6]);
  const u32 odd = high_bytes(bits[1], bits[3], bits[5], bits[7]);
  words[0] = ptx::select(0x0f0f0f0fu, even >> 4, odd);
}

// Leaves the first `count` codes and makes the others 0.
template <int kBits>
__device__ inline void keep_codes(int count, u32 (&words)[kBits / 4]) {
#pragma unroll
  for (int w = 0; w < kBits / 4; ++w) {
    const int bits = count * kBits - 32 * w;
    if (bits <= 0) words[w] = 0;
    if (bits > 0 && bits < 32) words[w] &= (1u << bits) - 1u;
  }
}

}  // namespace humming
