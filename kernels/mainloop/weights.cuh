// What mainloops have in common: a stage's packed weights in shared memory, with their scales and
// zero points, become A registers.
// Needs: what the components of slot dequant of its Config need.
//
// A stage holds for each row block of 16 rows a run of kBricks bricks, then for each one the scales
// of kGroups groups of 16 rows, then their zero points:
//   codes [blocks][kBricks][128 kWords bytes], scales [blocks][kGroups][16], zeros the same
#pragma once

#include <humming/dequant/codes.cuh>
#include <humming/dequant/pairs.cuh>
#include <humming/params.cuh>
#include <humming/ptx/bits.cuh>
#include <humming/ptx/shared.cuh>
#include <humming/types.cuh>

namespace humming {

// Where scales meet the product.
enum class ScaleSite {
  kEpilogue,     // one scale a row: applied to finished sums
  kAccumulator,  // one scale a row and group: applied to the group's partial sum, in float
  kOperand,      // one scale a row and group: multiplied into A, rounded to the operand; those of
                 // groups of tokens into B, exactly
};

// What is subtracted from a code: nothing, a uint8, or a value of the scale's type.
enum class ZeroPoint { kNone, kInteger, kFloat };

// kMayNote: whether NaN codes are noted, where that is cheaper than to make operands of them, in two
// registers a row block.
template <class C, bool kMayNote = true>
struct StagedWeights {
  static constexpr bool kNotes = kMayNote && Noting<typename C::Dequant>::kNotes;
  using Dequant = typename IfElse<kNotes, typename Noting<typename C::Dequant>::Type,
                                  typename C::Dequant>::Type;
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

  // Reads the A registers of step kStep of a brick whose codes are operands as they are.
  template <int kStep>
  static __device__ void read_step(const u8* brick, int lane, u32 (&a)[4]) {
    static_assert(kWords % 4 == 0 && C::Order::kWord[0][4 * kStep] / 4 == kStep,
                  "slot mainloop: a step of codes that are operands is a chunk of four words");
    const Words4 read = *reinterpret_cast<const Words4*>(brick + 512 * kStep + lane * 16);
#pragma unroll
    for (int r = 0; r < 4; ++r) a[r] = read.word[C::Order::kWord[0][4 * kStep + r] % 4];
  }

  // Scales and zero points of a warp's row blocks, as they lie in shared memory.
  struct StoredScales {
    using Scale = typename C::Scale::Storage;

    const u8* scales;  // of its first row block
    const u8* zeros;

    __device__ static int group_of(int step) {
      return C::kGroupK == 0 ? 0 : step * kStepK / max_of(C::kGroupK, 1);
    }
    // Those of row g of a block; what row g + 8 has is 8 further.
    __device__ const Scale* scale(int block, int group, int lane) const {
      return reinterpret_cast<const Scale*>(scales) + place(block, group, lane);
    }
    __device__ const u8* integer_zero(int block, int group, int lane) const {
      return zeros + place(block, group, lane);
    }
    __device__ const Scale* float_zero(int block, int group, int lane) const {
      return reinterpret_cast<const Scale*>(zeros) + place(block, group, lane);
    }
    __device__ static int place(int block, int group, int lane) {
      return (block * kGroups + group) * 16 + lane / 4;
    }
    // The scales of a lane's two rows in float.
    __device__ void floats(int block, int group, int lane, float (&found)[2]) const {
      const Scale* stored = scale(block, group, lane);
      C::Scales::floats(stored[0], stored[8], found);
    }
  };

  // What a group's scales and zero points mean to a lane's two rows, g and g + 8, in the lower and in
  // the upper half of a register; nothing that the Config does not use is read.
  struct Rows {
    using Operand = typename C::Mma::Operand;

    typename Dequant::Offset offset[2];
    u32 zeros;
    u32 factors;

    // Without groups that have zero points.
    __device__ void clear() { offset[0] = offset[1] = Dequant::offset(); }

    __device__ void load(const StoredScales& stage, int block, int group, int lane) {
      if constexpr (C::kZeroPoint == ZeroPoint::kInteger) {
        const u8* zero = stage.integer_zero(block, group, lane);
        offset[0] = Dequant::offset(zero[0]);
        offset[1] = Dequant::offset(zero[8]);
      }
      if constexpr (C::kZeroPoint == ZeroPoint::kFloat) {
        const auto* zero = stage.float_zero(block, group, lane);
        zeros = C::Scales::template operands<Operand>(zero[0], zero[8]);
      }
      if constexpr (C::kScaleSite == ScaleSite::kOperand) {
        const auto* scale = stage.scale(block, group, lane);
        factors = Dequant::factors(C::Scales::template operands<Operand>(scale[0], scale[8]));
        if constexpr (C::kScaleLeftOut > 0) {
          constexpr u32 kSmaller = power_of_two<Operand>(-C::kScaleLeftOut);
          factors = Pairs<Operand>::multiply(factors, kSmaller);
        }
      }
    }
  };

  // What a lane needs of row g, where kHalf is 0, or of row g + 8, in both halves of a register.
  template <int kHalf>
  static __device__ u32 of_row(u32 pair) {
    return kHalf == 0 ? ptx::lower_twice(pair) : ptx::upper_twice(pair);
  }

  // The A registers of step kStep of a brick: dequantized, less float zero points, times scales of
  // operands. (lane, r, e) -> (row g + 8 * (r & 1), k kStepK * kStep + E t + e + 4 E (r >> 1))
  template <int kStep, int kRegister = 0>
  static __device__ void fragment(const u32 (&words)[kWords], const Rows& rows, u32 (&a)[4]) {
    constexpr int kHalf = kRegister % 2;
    u32 made = Dequant::template value<4 * kStep + kRegister>(words, rows.offset[kHalf]);
    if constexpr (C::kZeroPoint == ZeroPoint::kFloat) {
      made = Dequant::subtract(made, of_row<kHalf>(rows.zeros));
    }
    if constexpr (C::kScaleSite == ScaleSite::kOperand) {
      made = Dequant::scale(made, of_row<kHalf>(rows.factors));
    }
    a[kRegister] = made;
    if constexpr (kRegister < 3) fragment<kStep, kRegister + 1>(words, rows, a);
  }

  // Of a row block, what a lane has found of NaN codes in rows g and g + 8.
  using Marks = u32[2];

  static __device__ void note(const u32 (&words)[kWords], Marks& marks) {
    if constexpr (kNotes) Dequant::note(words, marks);
  }

  // Makes the sums of a row block NaN in rows in which some lane has found a NaN code.
  template <class Sum, int kTiles, int kSums>
  static __device__ void spoil(Marks& marks, Sum (&sums)[kTiles][kSums]) {
    if constexpr (kNotes) {
#pragma unroll
      for (u32& half : marks) {
        // The four lanes of a row hold different parts of K.
        half |= __shfl_xor_sync(~0u, half, 1);
        half |= __shfl_xor_sync(~0u, half, 2);
      }
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        if (!Dequant::noted(marks, C::Mma::Places::half(i))) continue;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) sums[tile][i] = ptx::bits_to_f32(0x7fc00000u);
      }
    }
  }
};

}  // namespace humming
