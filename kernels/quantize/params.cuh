// The one argument of a quantizing kernel. The host writes the same fields in the same order.
#pragma once

namespace humming {

struct QuantizeParams {
  const void* x;              // [m, k], or [m, 2k] for a product of halves, of the input type
  const void* scale;          // one scale that is known beforehand, in the scale type, or null
  const void* zero;           // its zero point, int8, or null
  const float* second_scale;  // one factor on top of the scales, or null
  void* codes;                // [m] rows of codes, codes_stride bytes apart, 16-byte aligned
  void* scales;               // [m, groups] in the scale type; not written where `scale` is given
  void* zeros;                // [m, groups] int8, or null
  long long x_stride;         // elements from row to row
  long long codes_stride;     // bytes from row to row, a multiple of 16
  int m;
  int k;         // values of a row
  int k_padded;  // codes that fit into codes_stride; those from k on are written as 0
  int piece;     // values of a row that an item takes
  int groups;    // scales of a row
  int aligned;   // whether every eighth value of a row begins at a multiple of 16 bytes
};

}  // namespace humming
