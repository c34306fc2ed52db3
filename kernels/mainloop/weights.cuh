// What mainloops have in common: a stage's packed weights in shared memory, with their scales and
// zero points, become A registers.
// Needs: what the components of slot dequant of its Config need.
//
// A stage holds for each row block of 16 rows a run of kBricks bricks, then for each one the scales
// of kGroups groups of 16 rows, then their zero points:
//   codes [blocks][kBricks][128 kWords bytes], scales [blocks][kGroups][16], zeros the same
#pragma once

#include <humming/params.cuh>
#include <humming/ptx/shared.cuh>
#include <humming/types.cuh>

namespace humming {

// Where scales meet the product.
enum class ScaleSite {
  kEpilogue,     // one scale a row: applied to finished sums
  kAccumulator,  // one scale a row and group: applied to the group's partial sum, in float
  kOperand,      // one scale a row and group: multiplied into A, rounded to the operand
};

// What is subtracted from a code: nothing, a uint8, or a value of the scale's type.
enum class ZeroPoint { kNone, kInteger, kFloat };

template <class C>
struct StagedWeights {
  static constexpr int kBlocks = C::kBlockN / 16;
  static constexpr int kBricks = C::kBlockK / 64;
  static constexpr int kWords = C::Order::kCodeBits;
  static constexpr int kBrickBytes = 128 * kWords;
  // Scales of one value a row meet finished sums, whatever the site of those that change with K.
  static constexpr bool kScalesInLoop = C::kScaleSite != ScaleSite::kEpilogue && C::kGroupK != 0;
  static constexpr bool kHasZero = C::kZeroPoint != ZeroPoint::kNone;
  // An MMA step is 256 bits of K.
  static constexpr int kStepK = 256 / C::Order::kOperandBits;
  static constexpr int kBrickSteps = 64 / kStepK;

  // Groups of weights that one stage touches.
  static constexpr int kGroups =
      C::kGroupK == 0 || C::kGroupK >= C::kBlockK ? 1 : C::kBlockK / C::kGroupK;
  static_assert(C::kGroupK == 0 || C::kGroupK % C::kBlockK == 0 || C::kBlockK % C::kGroupK == 0,
                "slot mainloop: groups and stages divide one another");
  static_assert(C::kScaleStepK % kStepK == 0, "slot mainloop: scales change between steps only");

  // Bytes of a stage.
  static constexpr int kScaleBytes = sizeof(typename C::Scale::Storage);
  static constexpr int kZeroBytes = C::kZeroPoint == ZeroPoint::kFloat ? kScaleBytes : 1;
  static constexpr int kCodesSize = kBlocks * kBricks * kBrickBytes;
  // Boxes begin at multiples of 128 bytes.
  static constexpr int kScalesSize =
      kScalesInLoop ? ceil_div(C::kBlockN * kGroups * kScaleBytes, 128) * 128 : 0;
  static constexpr int kZerosSize =
      kHasZero ? ceil_div(C::kBlockN * kGroups * kZeroBytes, 128) * 128 : 0;
  static constexpr int kSize = kCodesSize + kScalesSize + kZerosSize;

  // Bricks along K of a weight, and groups in the order in which their scales lie.
  static __device__ int bricks_of(int k) { return (k + 63) / 64; }
  static __device__ int groups_of(int k) {
    return C::kGroupK == 0 ? 1 : (bricks_of(k) * 64 + C::kGroupK - 1) / max_of(C::kGroupK, 1);
  }

  // Reads this lane's words of a brick, chunk by chunk (word_offset of the layout).
  static __device__ void read_words(const u8* brick, int lane, u32 (&words)[kWords]) {
    int first = 0;
#pragma unroll
    for (int chunk = 0; chunk < C::Order::kChunks; ++chunk) {
      const int size = C::Order::kChunkWords[chunk];
      const u8* from = brick + 128 * first + lane * 4 * size;
      if (size == 4) {
        const Words4 read = *reinterpret_cast<const Words4*>(from);
#pragma unroll
        for (int i = 0; i < 4; ++i) words[first + i] = read.word[i];
      } else {
#pragma unroll
        for (int i = 0; i < size; ++i) words[first + i] = reinterpret_cast<const u32*>(from)[i];
      }
      first += size;
    }
  }

  // Scales and zero points of a warp's row blocks.
  struct Scales {
    const u8* scales;  // of its first row block
    const u8* zeros;

    __device__ static int group_of(int step) {
      return C::kGroupK == 0 ? 0 : step * kStepK / max_of(C::kGroupK, 1);
    }
    __device__ float scale(int block, int group, int row) const {
      const auto* values = reinterpret_cast<const typename C::Scale::Storage*>(scales);
      return C::Scale::to_float(values[(block * kGroups + group) * 16 + row]);
    }
    // The zero point's integer, or the bits of its float in the operand's type.
    __device__ u32 zero(int block, int group, int row) const {
      const int at = (block * kGroups + group) * 16 + row;
      if constexpr (C::kZeroPoint == ZeroPoint::kFloat) return operand(zeros, at);
      return zeros[at];
    }
    // A value of the scale's type, rounded to the operand's.
    static __device__ u32 operand(const u8* values, int at) {
      using Operand = typename C::Mma::Operand;
      const auto value = reinterpret_cast<const typename C::Scale::Storage*>(values)[at];
      if constexpr (IsSame<Operand, typename C::Scale>::value) return value;
      return Operand::from_float(C::Scale::to_float(value));
    }
  };

  // What a group's scales and zero points mean to a lane's two rows, g and g + 8, in both halves of
  // a register; nothing that the Config does not use is read.
  struct Rows {
    typename C::Dequant::Offset offset[2];
    u32 zero[2];
    u32 scale[2];

    // Without groups that have zero points.
    __device__ void clear() { offset[0] = offset[1] = C::Dequant::offset(); }

    __device__ void load(const Scales& stage, int block, int group, int lane) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + 8 * half;
        if constexpr (C::kZeroPoint == ZeroPoint::kInteger) {
          offset[half] = C::Dequant::offset(stage.zero(block, group, row));
        }
        if constexpr (C::kZeroPoint == ZeroPoint::kFloat) {
          zero[half] = stage.zero(block, group, row) * 0x00010001u;
        }
        if constexpr (C::kScaleSite == ScaleSite::kOperand) {
          const int at = (block * kGroups + group) * 16 + row;
          scale[half] = Scales::operand(stage.scales, at) * 0x00010001u;
        }
      }
    }
  };

  // The A registers of step kStep of a brick: dequantized, less float zero points, times scales of
  // operands. (lane, r, e) -> (row g + 8 * (r & 1), k kStepK * kStep + E t + e + 4 E (r >> 1))
  template <int kStep>
  static __device__ void fragment(const u32 (&words)[kWords], const Rows& rows, u32 (&a)[4]) {
    a[0] = C::Dequant::template value<4 * kStep>(words, rows.offset[0]);
    a[1] = C::Dequant::template value<4 * kStep + 1>(words, rows.offset[1]);
    a[2] = C::Dequant::template value<4 * kStep + 2>(words, rows.offset[0]);
    a[3] = C::Dequant::template value<4 * kStep + 3>(words, rows.offset[1]);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if constexpr (C::kZeroPoint == ZeroPoint::kFloat) {
        a[r] = C::Dequant::subtract(a[r], rows.zero[r & 1]);
      }
      if constexpr (C::kScaleSite == ScaleSite::kOperand) {
        a[r] = C::Dequant::scale(a[r], rows.scale[r & 1]);
      }
    }
  }
};

}  // namespace humming
