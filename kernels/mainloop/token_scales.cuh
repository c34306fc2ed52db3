// What mainloops have in common: scales of groups of K of the activations, from global memory or from
// a stage in shared memory.
// Needs: cp_async for stages.
#pragma once

#include <humming/mainloop/weights.cuh>
#include <humming/params.cuh>
#include <humming/ptx/cp_async.cuh>
#include <humming/types.cuh>

namespace humming {

// Of the tokens of one tile.
template <class C>
struct StoredTokenScales {
  using Scale = typename C::TokenScale::Storage;
  // Of a stage in shared memory, [group][token].
  static constexpr bool kStaged = C::kStagedTokenScales;
  static constexpr int kStageGroups =
      C::kTokenGroupK == 0 ? 0 : max_of(C::kBlockK / max_of(C::kTokenGroupK, 1), 1);
  static constexpr int kStageBytes = kStaged ? kStageGroups * C::kBlockM * int(sizeof(Scale)) : 0;

  const Scale* values;
  int tokens;  // from the tile's first one on
  int groups;

  __device__ StoredTokenScales(const GemmParams& p, int tile_m) {
    const i64 first = i64(tile_m) * C::kBlockM;
    values = static_cast<const Scale*>(p.x_scales) + first * p.x_groups;
    tokens = p.m - int(first);
    groups = p.x_groups;
  }

  // That of a token for the group that a step of K belongs to. Tokens that do not exist have the last
  // one's; they are not stored. Groups that do not exist have code 0, a number in every type: the last
  // one's might be infinite, and their sums are zeros.
  __device__ Scale at(int token, int step) const {
    const int group = step * StagedWeights<C>::kStepK / max_of(C::kTokenGroupK, 1);
    const bool exists = group < groups;
    const Scale found =
        values[i64(min_of(token, tokens - 1)) * groups + (exists ? group : groups - 1)];
    return exists ? found : Scale(0);
  }
  // Those of a pair of tokens in float.
  __device__ void floats(int first, int second, int step, float (&found)[2]) const {
    C::TokenScales::floats(at(first, step), at(second, step), found);
  }

  // By a warp: copies those of a stage to shared memory; of tokens and groups that do not exist, zeros.
  __device__ void bring(int stage, u32 shared, int lane) const {
    if constexpr (kStaged) {
      const int first = stage * C::kBlockK / C::kTokenGroupK;
#pragma unroll
      for (int group = 0; group < kStageGroups; ++group) {
#pragma unroll
        for (int i = 0; i < ceil_div(C::kBlockM, 32); ++i) {
          const int token = 32 * i + lane;
          if (C::kBlockM % 32 != 0 && token >= C::kBlockM) break;
          const bool exists = token < tokens && first + group < groups;
          const i64 place = exists ? i64(token) * groups + first + group : 0;
          ptx::cp_async_4(shared + 4 * (group * C::kBlockM + token), values + place, exists);
        }
      }
    }
  }

  // Where in a stage those of the group lie that a step of the stage belongs to.
  static __device__ const Scale* staged(const u8* scales, int step) {
    const int group = step * StagedWeights<C>::kStepK / max_of(C::kTokenGroupK, 1);
    return reinterpret_cast<const Scale*>(scales) + group * C::kBlockM;
  }
};

}  // namespace humming
