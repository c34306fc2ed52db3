// The dense kernel: out[m, n] = x[m, k] * dequantized(w)[n, k]^T, from the components of a Config.
//
// One CTA computes one tile of kBlockN rows of weights x kBlockM tokens over its part of K.
// Constraints: rows of x are 16-byte aligned and hold whole pieces of 16 bytes, zero behind k;
// everything else is any.
#pragma once

#include <humming/contracts.cuh>
#include <humming/ptx/grid.cuh>

namespace humming {

template <class C, template <class> class MainloopOf, template <class, class> class EpilogueOf>
__device__ void gemm(const typename MainloopOf<C>::Params& p) {
  using Loop = MainloopOf<C>;
  using Tail = EpilogueOf<C, Loop>;
  static_assert(Mover<typename C::Mover> || Producer<typename C::Mover>,
                "slots mover and producer: does not fill stages");
  static_assert(MmaAtom<typename C::Mma>, "slot mma: does not multiply 16 rows by 8 tokens");
  static_assert(Tokens<typename C::Tokens>, "slot tokens: does not read B registers");
  static_assert(Dequant<typename C::Dequant>, "slot dequant: does not make A registers");
  static_assert(Scales<typename C::Scales> && Scales<typename C::TokenScales>,
                "slots scale and token_scale: do not make pairs of scales");
  static_assert(TileScheduler<typename C::Scheduler>, "slot scheduler: does not name tiles");
  static_assert(Mainloop<Loop>, "slot mainloop: does not sum a tile");
  static_assert(Epilogue<Tail>, "slot epilogue: does not store a tile");
  static_assert(IsSame<typename C::Mma::Operand, typename C::Dequant::Operand>::value,
                "slots mma and dequant: different operands");
  static_assert(C::kSharedBytes >= Loop::kSharedBytes &&
                    C::kSharedBytes >= Tail::kSharedBytes + Loop::kReservedBytes,
                "the host planned less shared memory than the components use");

  // Boxes of 128-byte rows are swizzled in a pattern of 1024 bytes.
  extern __shared__ __align__(1024) u8 shared[];
  if constexpr (C::kDependentLaunch) {
    if (p.early) ptx::griddepcontrol_launch_dependents();
  }
  const TileIndex tile = C::Scheduler::tile((p.k + C::kBlockK - 1) / C::kBlockK);
  typename Loop::Accumulators acc = {};
  // Threads that only brought operands leave.
  if (!Loop::run(p, shared, tile.n, tile.m, tile.stage_begin, tile.stage_end, acc)) return;
  // Not earlier, if the host has not said so: the next grid's CTAs would be placed around this one's,
  // several on the SMs that have the most room, and run unevenly. Now they start while this one
  // reduces and stores.
  if constexpr (C::kDependentLaunch) {
    if (!p.early) ptx::griddepcontrol_launch_dependents();
  }
  Tail::run(p, shared, tile, acc);
}

}  // namespace humming
