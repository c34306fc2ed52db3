// What the components of slot mma sum in, per 16 rows x kTokens tokens, and how a sum becomes a float.
// Where sum i of a lane lies, the instruction's Places say:
// (lane, i) -> row g + 8 * half(i), token token(lane, column(i)).
#pragma once

#include <humming/types.cuh>

namespace humming {

// Pairs of neighbouring tokens, as mma.sync has them; 16 tokens are two tiles of 8 side by side:
// (lane, i) -> row g + 8 * (i >> 1 & 1), token 2t + (i & 1) + 8 * (i >> 2)
struct PairPlaces {
  static __device__ constexpr int half(int i) { return i >> 1 & 1; }
  static __device__ constexpr int column(int i) { return (i & 1) + 2 * (i >> 2); }
  static __device__ constexpr int token(int lane, int column) {
    return lane % 4 * 2 + (column & 1) + 8 * (column >> 1);
  }
};

template <class Number, int kTileTokens, class TilePlaces = PairPlaces>
struct PlainSums {
  static constexpr int kTokens = kTileTokens;
  using Places = TilePlaces;
  using Sums = Number[kTokens / 2];
  using Sum = Number;
  static __device__ float value(const Sums& sums, int i) { return float(sums[i]); }
};
using FloatSums = PlainSums<float, 8>;
using IntegerSums = PlainSums<int, 8>;

// Two halves in a register.
template <int kTileTokens>
struct PairedHalfSums {
  static constexpr int kTokens = kTileTokens;
  using Places = PairPlaces;
  using Sums = u32[kTokens / 4];
  using Sum = float;
  static __device__ float value(const Sums& sums, int i) {
    return F16::to_float(u16(sums[i >> 1] >> 16 * (i & 1)));
  }
};
using HalfSums = PairedHalfSums<8>;

}  // namespace humming
