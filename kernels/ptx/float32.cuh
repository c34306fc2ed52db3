// Single float operations that are rounded exactly once: the compiler fuses none of them with
// another, so that results can be repeated bit by bit elsewhere.
#pragma once

namespace humming::ptx {

// PTX ISA 9.7.3.7 "mul".
__device__ inline float mul_rn(float a, float b) {
  float d;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

// PTX ISA 9.7.3.5 "add".
__device__ inline float add_rn(float a, float b) {
  float d;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

// Between 0 and 1; 0 if it is NaN (PTX ISA 9.7.3.7 "mul.sat" and 9.7.3.8 "fma.sat").
__device__ inline float mul_sat(float a, float b) {
  float d;
  asm("mul.rn.sat.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

__device__ inline float fma_sat(float a, float b, float c) {
  float d;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}

// PTX ISA 9.7.3.6 "sub".
__device__ inline float sub_rn(float a, float b) {
  float d;
  asm("sub.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

// PTX ISA 9.7.3.8 "fma": a * b + c, rounded once.
__device__ inline float fma_rn(float a, float b, float c) {
  float d;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}

// PTX ISA 9.7.3.9 "div", as IEEE 754 has it.
__device__ inline float div_rn(float a, float b) {
  float d;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

// PTX ISA 9.7.3.14 "rcp", as IEEE 754 has 1 / a.
__device__ inline float rcp_rn(float a) {
  float d;
  asm("rcp.rn.f32 %0, %1;" : "=f"(d) : "f"(a));
  return d;
}

// PTX ISA 9.7.3.12 "min": of a number and a NaN the number.
__device__ inline float min_f32(float a, float b) {
  float d;
  asm("min.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

// PTX ISA 9.7.3.13 "max": of a number and a NaN the number.
__device__ inline float max_f32(float a, float b) {
  float d;
  asm("max.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

// 2^a with a relative error of about 2^-22 (PTX ISA 9.7.3.21 "ex2").
__device__ inline float ex2_approx(float a) {
  float d;
  asm("ex2.approx.f32 %0, %1;" : "=f"(d) : "f"(a));
  return d;
}

// 1 / a with an error of at most 1 ulp (PTX ISA 9.7.3.14 "rcp").
__device__ inline float rcp_approx(float a) {
  float d;
  asm("rcp.approx.f32 %0, %1;" : "=f"(d) : "f"(a));
  return d;
}

}  // namespace humming::ptx
