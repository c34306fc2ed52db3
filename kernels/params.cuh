// The one argument of a dense kernel. The host writes the same fields in the same order.
#pragma once

namespace humming {

struct GemmParams {
  const void* x;             // activations [m, k], rows x_stride bytes apart, 16-byte aligned
  const void* x_scales;      // [m][x_groups], [m] or [1], in the activations' scale dtype, or null
  const void* x_zeros;       // int8 [m] or [1], or null
  const float* x_second;     // [1], factor of all activations, or null
  const void* codes;         // packed weights [ceil(n/16)][ceil(k/64)] bricks
  const void* scales;        // [ceil(n/16)][groups][16], in the scale dtype
  const void* zeros;         // [ceil(n/16)][groups][16] uint8, or null
  const void* second_scale;  // float [1] or [n], or null
  const float* row_sums;     // [n]: sum over k of the weights without second scale, or null
  const void* bias;          // [n] in the output dtype, or null
  void* out;                 // [m, n], rows out_stride elements apart
  void* partials;            // workspace of split-K: [split][tile][block_m][block_n]
  unsigned* counters;        // one a tile; zero before and after each launch
  long long x_stride;
  long long out_stride;
  int m;
  int n;
  int k;
  int x_groups;  // scales of a token
  int early;     // whether the next kernel's CTAs may start beside this one's
};

// What the driver made of a matrix for copies of boxes.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// Of kernels whose copy engine reads the operands. A row of weights is a block of 16 rows.
struct MappedGemmParams : GemmParams {
  TensorMap x_map;      // x as [m, k] codes, in boxes of 128 bytes x block_m rows, 128-byte swizzle
  TensorMap codes_map;  // in boxes of box_bricks bricks x block_n / 16 row blocks
  TensorMap scales_map;  // in boxes of a stage's groups x 16 values x block_n / 16 row blocks
  TensorMap zeros_map;   // so, too
};

}  // namespace humming
