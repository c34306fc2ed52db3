// Eight codes of 4 or 8 bits side by side, the first in the lowest bits.
#pragma once

#include <humming/ptx/bytes.cuh>
#include <humming/types.cuh>

namespace humming {

// Of each code the low bits count.
__device__ inline void pack_codes(const u32 (&code)[8], u32 (&words)[2]) {
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    const u32 low = ptx::prmt<0x0040>(code[4 * w], code[4 * w + 1]);
    const u32 high = ptx::prmt<0x0040>(code[4 * w + 2], code[4 * w + 3]);
    words[w] = ptx::prmt<0x5410>(low, high);
  }
}

__device__ inline void pack_codes(const u32 (&code)[8], u32 (&words)[1]) {
  u32 word = code[7];
#pragma unroll
  for (int i = 6; i >= 0; --i) word = word << 4 | (code[i] & 0xfu);
  words[0] = word;
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
