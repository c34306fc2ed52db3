// Floats to 4-bit floats (PTX ISA 9.7.9.21 "cvt"): nearest, halves to even, saturating.
// Needs: cvt_fp6_fp4.
#pragma once

namespace humming::ptx {

// Eight floats -> eight codes e2m1, the first in the lowest bits.
__device__ inline unsigned f32x8_to_e2m1x8(const float (&v)[8]) {
  unsigned d;
  asm("{\n"
      ".reg .b8 b0, b1, b2, b3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n"
      "mov.b32 %0, {b0, b1, b2, b3};\n"
      "}"
      : "=r"(d)
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
  return d;
}

}  // namespace humming::ptx
