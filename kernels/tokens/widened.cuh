// Slot tokens: activations of another type than the MMA takes, mostly a narrower one, converted on
// the way to it.
// Needs: ldmatrix, and what its component of slot dequant needs.
//
// Weights are packed for operands of kPackedBits. A packed register of a lane holds 32 / kPackedBits
// neighbours along K, and each of its kParts parts, every kParts-th code, is a register of the wider
// operand. Activations are read and split in the same way, so that both sides agree on which values
// of K an MMA step has:
//   word of a lane, 8 bits in 16    x3 x2 x1 x0  ->  part 0: x2 x0,  part 1: x3 x1
#pragma once

#include <humming/dequant/codes.cuh>
#include <humming/ptx/shared.cuh>

namespace humming {

template <class Dequant, int kStoredBits, int kPackedBits, int kOperandBits>
struct WidenedTokens {
  static constexpr int kBits = kStoredBits;
  static constexpr float kFactor = Dequant::kFactor;
  static constexpr int kParts = kOperandBits / kPackedBits;
  // Codes that are as far apart as those of weights come as they are, 4-bit ones in pairs of bytes.
  static constexpr bool kSpread = kStoredBits != kPackedBits;
  static_assert(!kSpread || (kStoredBits == 4 && kPackedBits == 8),
                "slot tokens: only 4-bit codes are spread, over bytes");

  // For scales of groups of tokens that are applied to operands of 16 bits.
  static __device__ u32 factors(u32 scales) { return Dequant::factors(scales); }
  static __device__ u32 scale(u32 values, u32 factor) { return Dequant::scale(values, factor); }

  // What a lane adds to the address of a tile of 8 tokens, whose rows lie `pitch` bytes apart.
  static __device__ u32 lane_offset(int lane, int pitch) {
    if constexpr (kSpread) {
      return (lane / 4) * pitch + (lane % 4) * 2;
    } else {
      return (lane % 8) * pitch + (lane / 8) * 16;
    }
  }

  // B registers of MMA steps, two each.
  template <int kRegisters>
  static __device__ void load(u32 (&b)[kRegisters], u32 address) {
    u32 packed[kRegisters / kParts];
    read(packed, address);
#pragma unroll
    for (int i = 0; i < kRegisters / kParts; ++i) {
      u32 words[kBits];
      words[0] = packed[i];
      b[kParts * i] = Dequant::template value<0>(words, Dequant::offset());
      if constexpr (kParts > 1) {
        b[kParts * i + 1] = Dequant::template value<1>(words, Dequant::offset());
      }
      if constexpr (kParts > 2) {
        b[kParts * i + 2] = Dequant::template value<2>(words, Dequant::offset());
        b[kParts * i + 3] = Dequant::template value<3>(words, Dequant::offset());
      }
    }
  }

 private:
  template <int kWords>
  static __device__ void read(u32 (&packed)[kWords], u32 address) {
    if constexpr (kSpread) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const u32 codes = ptx::load_shared_u16(address + 8 * i);
        const u32 pairs = (codes | codes << 8) & 0x00ff00ffu;
        packed[i] = (pairs | pairs << 4) & 0x0f0f0f0fu;
      }
    } else if constexpr (kWords == 4) {
      ptx::ldmatrix_x4(packed, address);
    } else if constexpr (kWords == 2) {
      ptx::ldmatrix_x2(packed, address);
    } else {
      ptx::ldmatrix_x1(packed, address);
    }
  }
};

}  // namespace humming
