// Dependent launches of grids (PTX ISA 9.7.13.13 "griddepcontrol").
#pragma once

namespace humming::ptx {

// Waits until the grids that this one depends on have finished and their writes are visible.
__device__ inline void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the grids that depend on this one start as soon as there is room.
__device__ inline void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace humming::ptx
