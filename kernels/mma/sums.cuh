// What the components of slot mma sum in, per 16 rows x 8 tokens, and how a sum becomes a float:
// (lane, i) -> row g + 8 * (i >> 1), token 2t + (i & 1).
#pragma once

#include <humming/types.cuh>

namespace humming {

struct FloatSums {
  using Sums = float[4];
  static constexpr bool kPromoted = false;  // sums may run over all of K
  using Sum = float;
  static __device__ float value(const Sums& sums, int i) { return sums[i]; }
};

struct IntegerSums {
  using Sums = int[4];
  static constexpr bool kPromoted = false;
  using Sum = int;
  static __device__ float value(const Sums& sums, int i) { return float(sums[i]); }
};

// Two halves in a register. They are added to floats before they lose too much.
struct HalfSums {
  using Sums = u32[2];
  static constexpr bool kPromoted = true;
  using Sum = float;
  static __device__ float value(const Sums& sums, int i) {
    return F16::to_float(u16(sums[i >> 1] >> 16 * (i & 1)));
  }
};

}  // namespace humming
