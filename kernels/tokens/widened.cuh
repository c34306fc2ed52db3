// Slot tokens: activations of another type than the MMA takes, mostly a narrower one, converted on
// the way to it.
// Needs: what its component of slot dequant needs.
//
// A lane's codes of a register are neighbours in a row: one narrow read brings them, they are spread
// over the slots of the operand and dequantized like weights.
#pragma once

#include <humming/dequant/codes.cuh>
#include <humming/ptx/shared.cuh>

namespace humming {

template <class Dequant, int kOperandBits>
struct WidenedTokens {
  static constexpr int kBits = Dequant::kBits;
  static constexpr float kFactor = Dequant::kFactor;
  static constexpr int kElements = 32 / kOperandBits;
  static constexpr int kRead = kElements * kBits / 8;  // bytes of the codes of a register
  static_assert(kRead == 1 || kRead == 2 || kRead == 4,
                "slot tokens: a register's codes are one, two or four bytes");

  static __device__ u32 lane_offset(int lane, int pitch) {
    return (lane / 4) * pitch + (lane % 4) * kRead;
  }

  // B registers of MMA steps: (lane, r, e) -> (k E t + e + 4 E r, token g), E = 32 / kOperandBits.
  template <int kRegisters>
  static __device__ void load(u32 (&b)[kRegisters], u32 address) {
#pragma unroll
    for (int r = 0; r < kRegisters; ++r) {
      u32 words[kBits];
      words[0] = spread(read(address + 4 * kRead * r));
      b[r] = Dequant::template value<0>(words, Dequant::offset());
    }
  }

 private:
  static __device__ u32 read(u32 address) {
    if constexpr (kRead == 4) {
      return ptx::load_shared_u32(address);
    } else {
      return kRead == 2 ? ptx::load_shared_u16(address) : ptx::load_shared_u8(address);
    }
  }

  // Neighbouring codes to the bottom of their slots.
  static __device__ u32 spread(u32 codes) {
    if constexpr (kBits == kOperandBits) {
      return codes;
    } else if constexpr (kBits == 8) {
      return ptx::permute(codes, 0, 0x4140);
    } else if constexpr (kOperandBits == 16) {
      return (codes | codes << 12) & 0x000f000fu;
    } else {
      const u32 pairs = (codes | codes << 8) & 0x00ff00ffu;
      return (pairs | pairs << 4) & 0x0f0f0f0fu;
    }
  }
};

}  // namespace humming
