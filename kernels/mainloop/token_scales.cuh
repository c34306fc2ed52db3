// What mainloops have in common: scales of groups of K of the activations, from global memory.
// Needs: nothing.
#pragma once

#include <humming/mainloop/weights.cuh>
#include <humming/params.cuh>
#include <humming/types.cuh>

namespace humming {

// Of the tokens of one tile.
template <class C>
struct StoredTokenScales {
  using Scale = typename C::TokenScale::Storage;

  const Scale* values;
  int tokens;  // from the tile's first one on
  int groups;

  __device__ StoredTokenScales(const GemmParams& p, int tile_m) {
    const i64 first = i64(tile_m) * C::kBlockM;
    values = static_cast<const Scale*>(p.x_scales) + first * p.x_groups;
    tokens = p.m - int(first);
    groups = p.x_groups;
  }

  // That of a token for the group that a step of K belongs to; tokens and groups that do not exist
  // have the last one's, whose products with zeros are zero or, being its NaN, are not stored.
  __device__ Scale at(int token, int step) const {
    const int group =
        min_of(step * StagedWeights<C>::kStepK / max_of(C::kTokenGroupK, 1), groups - 1);
    return values[i64(min_of(token, tokens - 1)) * groups + group];
  }
  // Those of a pair of tokens in float.
  __device__ void floats(int first, int second, int step, float (&found)[2]) const {
    C::TokenScales::floats(at(first, step), at(second, step), found);
  }
};

}  // namespace humming
