// What mainloops have in common: scales of groups of K of the activations, from global memory.
// Needs: nothing.
#pragma once

#include <humming/params.cuh>
#include <humming/types.cuh>

namespace humming {

// Of the tokens of one tile.
template <class C>
struct TokenScales {
  const typename C::TokenScale::Storage* values;
  int tokens;  // from the tile's first one on
  int groups;

  __device__ TokenScales(const GemmParams& p, int tile_m) {
    const i64 first = i64(tile_m) * C::kBlockM;
    values = static_cast<const typename C::TokenScale::Storage*>(p.x_scales) + first * p.x_groups;
    tokens = p.m - int(first);
    groups = p.x_groups;
  }

  // The scale of a token for the group that value k belongs to; tokens and groups that do not exist
  // have the last one's, whose products with zeros are zero or, being its NaN, are not stored.
  __device__ float at(int token, int k) const {
    const int group = min_of(k / max_of(C::kTokenGroupK, 1), groups - 1);
    return C::TokenScale::to_float(values[i64(min_of(token, tokens - 1)) * groups + group]);
  }
};

}  // namespace humming
