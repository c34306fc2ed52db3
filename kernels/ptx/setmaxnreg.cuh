// Registers that the warps of a warpgroup give up or get (PTX ISA 9.7.19.5 "setmaxnreg").
// Needs: setmaxnreg.
#pragma once

namespace humming::ptx {

// kRegisters: a multiple of 8 from 24 to 256. All warps of a warpgroup execute it.
template <int kRegisters>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace humming::ptx
