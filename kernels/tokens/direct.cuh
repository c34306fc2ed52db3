// Slot tokens: activations that are what the MMA takes, read as they lie.
// Needs: ldmatrix.
#pragma once

#include <humming/ptx/shared.cuh>
#include <humming/types.cuh>

namespace humming {

template <int kOperandBits>
struct DirectTokens {
  static constexpr int kBits = kOperandBits;
  static constexpr float kFactor = 1.f;

  // What a lane adds to the address of a tile of 8 tokens, whose rows lie `pitch` bytes apart:
  // ldmatrix takes the rows of matrix i from lanes 8i to 8i + 7.
  static __device__ u32 lane_offset(int lane, int pitch) {
    return (lane % 8) * pitch + (lane / 8) * 16;
  }

  // B registers of one or two MMA steps of 32 bytes of K: (lane, r, e) -> (k E t + e + 4 E r,
  // token g), with E = 32 / kOperandBits.
  static __device__ void load(u32 (&b)[4], u32 address) { ptx::ldmatrix_x4(b, address); }
  static __device__ void load(u32 (&b)[2], u32 address) { ptx::ldmatrix_x2(b, address); }
};

}  // namespace humming
