// Slot scheduler: which output tile a CTA computes, and which part of K.
// Tiles are numbered so that CTAs which run together share weights and activations in L2: within
// groups of kGroup tiles along N, tokens advance first.
//
//   n ->   0  1  2  3 | 12 13 ...      kGroup = 4, three token tiles
//          4  5  6  7 | 16 17
//   m      8  9 10 11 | 20 21
#pragma once

#include <humming/types.cuh>

namespace humming {

struct TileIndex {
  int n;
  int m;
  int linear;       // number of the tile, for workspaces
  int stage_begin;  // pipeline stages of K that this CTA sums, [begin, end)
  int stage_end;
};

template <int kGroup, int kSplitK>
struct RasterScheduler {
  static constexpr int kGroupTiles = kGroup;
  static __device__ TileIndex tile(int stages) {
    const int tiles_n = gridDim.x, tiles_m = gridDim.y;
    TileIndex index;
    index.linear = blockIdx.y * tiles_n + blockIdx.x;
    const int per_group = kGroup * tiles_m;
    const int group = index.linear / per_group;
    const int inside = index.linear - group * per_group;
    const int width = tiles_n - group * kGroup < kGroup ? tiles_n - group * kGroup : kGroup;
    index.m = inside / width;
    index.n = group * kGroup + inside - index.m * width;
    index.stage_begin = kSplitK == 1 ? 0 : int(i64(stages) * blockIdx.z / kSplitK);
    index.stage_end = kSplitK == 1 ? stages : int(i64(stages) * (blockIdx.z + 1) / kSplitK);
    return index;
  }
};

}  // namespace humming
