// The one argument of every dense kernel. The host writes the same fields in the same order.
#pragma once

namespace humming {

struct GemmParams {
  const void* x;             // activations [m, k], rows x_stride elements apart, 16-byte aligned
  const void* codes;         // packed weights [ceil(n/16)][ceil(k/64)] bricks
  const void* scales;        // [ceil(n/16)][groups][16], in the scale dtype
  const void* zeros;         // [ceil(n/16)][groups][16] uint8, or null
  const void* second_scale;  // float [1] or [n], or null
  const void* bias;          // [n] in the output dtype, or null
  void* out;                 // [m, n], rows out_stride elements apart
  float* partials;           // workspace of split-K: [split][tile][block_m][block_n]
  unsigned* counters;        // one a tile; zero before and after each launch
  long long x_stride;
  long long out_stride;
  int m;
  int n;
  int k;
  int reserved;
};

}  // namespace humming
