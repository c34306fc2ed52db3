// What mainloops with a producer have in common: pipeline stages in shared memory, which one warp has
// the copy engine fill, and their barriers.
// Needs: mbarrier_tx; clusters where tiles share them.
//
// Full barriers tell that a stage's bytes are there, empty barriers that all warps are done with it:
//
//   producer   wait empty[s]   announce bytes, copy -> full[s]                s = s + 1 mod kStages
//   warps      wait full[s]    read; when done with s, arrive at empty[s]
//
// CTAs of a cluster have neighbouring row blocks and the same tokens. Each brings its share of the
// tokens into all of them, so the tokens are read from L2 once a cluster; a stage is empty when the
// warps of all CTAs are done with it.
//
// What is beyond N, M or K are zeros of the boxes: code 0 is a number in every type, and tokens beyond
// K are 0. Sums of rows beyond N are not stored.
//
// Boxes, and no copies of runs of bytes: the copy engine takes about 100 clocks for a copy however
// short it is, and a stage has one run of codes and one of scales for each row block.
#pragma once

#include <humming/mainloop/token_scales.cuh>
#include <humming/mainloop/weights.cuh>
#include <humming/ptx/barrier.cuh>
#include <humming/ptx/cluster.cuh>
#include <humming/ptx/cp_async.cuh>
#include <humming/ptx/grid.cuh>
#include <humming/types.cuh>

namespace humming {

template <class C, class Weights>
struct BoxedStages {
  using Params = MappedGemmParams;
  static constexpr int kBricks = Weights::kBricks;
  static constexpr bool kScalesInLoop = Weights::kScalesInLoop;
  static constexpr bool kClustered = C::kClusterN > 1;
  static constexpr int kConsumers = C::kWarpsN * C::kClusterN;

  static_assert(C::Scheduler::kGroupTiles % C::kClusterN == 0,
                "slot scheduler: neighbours along N of a cluster have the same tokens");

  // Bytes of a stage. Boxes begin where the pattern of their swizzle does.
  static constexpr int kBoxK = 128 * 8 / C::Tokens::kBits;
  static constexpr int kBoxes = ceil_div(C::kBlockK, kBoxK);
  static constexpr int kBoxBytes = C::kBlockM * 128;
  static_assert(C::kBlockM % (8 * C::kClusterN) == 0,
                "slot mainloop: shares of tokens are whole patterns of the swizzle");
  // Boxes of codes lie one behind the other, each with its bricks of all row blocks.
  static constexpr int kCodeRunBytes = C::kBoxBricks * Weights::kBrickBytes;
  static constexpr int kCodeBoxBytes = Weights::kBlocks * kCodeRunBytes;
  static constexpr int kCodeBoxes = ceil_div(kBricks, C::kBoxBricks);
  static_assert(kBricks % C::kBoxBricks == 0, "slot mainloop: boxes of codes divide a stage");
  static constexpr int kScaleRunBytes = Weights::kGroups * 16 * Weights::kScaleBytes;
  static constexpr int kZeroRunBytes = Weights::kGroups * 16 * Weights::kZeroBytes;
  static constexpr int kWeightBytes =
      Weights::kCodesSize + Weights::kBlocks * ((kScalesInLoop ? kScaleRunBytes : 0) +
                                                (Weights::kHasZero ? kZeroRunBytes : 0));
  // Scales of groups of tokens lie behind the weights, [group][token], if they are words; threads copy
  // them, for a map of theirs would need 16 bytes of a token at once.
  using TokenScales = StoredTokenScales<C>;
  static constexpr bool kHasTokenScales = TokenScales::kStaged;
  static constexpr int kTokenScalesAt = kBoxes * kBoxBytes + Weights::kSize;
  static constexpr int kStageSize =
      ceil_div(kTokenScalesAt + TokenScales::kStageBytes, 1024) * 1024;
  // The barriers lie behind everything, where the epilogue does not write.
  static constexpr int kReservedBytes = 16 * C::kStages;
  static constexpr int kSharedBytes = C::kStages * kStageSize + kReservedBytes;

  // The barriers of stages, and where in the ring a warp is.
  struct Ring {
    u32 full, empty;  // addresses of those of slot 0
    int slot = 0;
    u32 parity = 0;

    __device__ explicit Ring(u32 shared)
        : full(shared + C::kSharedBytes - kReservedBytes), empty(full + 8 * C::kStages) {}
    // By one thread, before all meet.
    __device__ void init() const {
#pragma unroll
      for (int i = 0; i < C::kStages; ++i) {
        ptx::mbarrier_init(full + 8 * i, kHasTokenScales ? 33 : 1);
        ptx::mbarrier_init(empty + 8 * i, kConsumers);
      }
      ptx::fence_mbarrier_init();
    }
    __device__ void advance() {
      if (++slot == C::kStages) {
        slot = 0;
        parity ^= 1;
      }
    }
    __device__ void wait_full() const { ptx::mbarrier_wait(full + 8 * slot, parity); }
    __device__ void wait_empty() const { ptx::mbarrier_wait(empty + 8 * slot, parity ^ 1); }
  };

  // By all threads: barriers are there before a CTA of the cluster arrives at them.
  static __device__ void begin() {
    if constexpr (kClustered) {
      ptx::cluster_sync();
    } else {
      __syncthreads();
    }
  }

  // Which of the cluster's CTAs is the first with this one's part of K: they share its tokens.
  static __device__ int first_neighbour() {
    return C::kClusterK > 1 ? C::kClusterN * int(blockIdx.z) : 0;
  }

  // By a whole warp: it is done with the stage that has this empty barrier.
  static __device__ void leave(u32 barrier, int lane) {
    __syncwarp();
    if constexpr (kClustered) {
      if (lane < C::kClusterN) ptx::mbarrier_arrive_at(barrier, first_neighbour() + lane);
    } else {
      if (lane == 0) ptx::mbarrier_arrive(barrier);
    }
  }

  // By one warp: fills stage after stage of [begin, end).
  static __device__ void produce(const Params& p, u32 shared, int tile_n, int tile_m, int begin,
                                 int end, Ring ring, int lane) {
    if (!kHasTokenScales && lane != 0) return;
    if (lane == 0) {
      C::Mover::prepare(p.x_map);
      C::Mover::prepare(p.codes_map);
      if constexpr (kScalesInLoop) C::Mover::prepare(p.scales_map);
      if constexpr (Weights::kHasZero) C::Mover::prepare(p.zeros_map);
    }
    const Source source(p, shared, tile_n, tile_m);
    // Weights come while grids ahead are still running.
    const int first = min_of(begin + C::kStages, end);
    if (lane == 0) {
      for (int at = begin; at < first; ++at) source.weights(at, ring, at - begin);
    }
    if constexpr (C::kDependentLaunch) ptx::griddepcontrol_wait();
    const TokenScales token_scales(p, tile_m);
    for (int at = begin; at < end; ++at, ring.advance()) {
      if (at >= first) {
        ring.wait_empty();
        if (lane == 0) source.weights(at, ring, ring.slot);
      }
      if (lane == 0) source.tokens(at, ring);
      if constexpr (kHasTokenScales) {
        token_scales.bring(at, shared + ring.slot * kStageSize + kTokenScalesAt, lane);
        ptx::cp_async_arrive(ring.full + 8 * ring.slot);
      }
    }
    if constexpr (kClustered) {
      // Barriers stay until no CTA arrives at them any more.
#pragma unroll
      for (int i = 0; i < C::kStages; ++i, ring.advance()) ring.wait_empty();
    }
  }

 private:
  // What the copy engine brings, of this tile: boxes, counted as whole also where a matrix ends.
  struct Source {
    const Params& p;
    u32 shared;  // address of stage 0
    int first_block, first_token;
    int rank = 0;  // which share of the tokens this CTA brings

    __device__ Source(const Params& p, u32 shared, int tile_n, int tile_m)
        : p(p),
          shared(shared),
          first_block(tile_n * Weights::kBlocks),
          first_token(tile_m * C::kBlockM) {
      if constexpr (kClustered) rank = int(ptx::cluster_ctarank()) - first_neighbour();
    }

    // Announces a stage, and brings its weights to a slot.
    __device__ void weights(int stage, const Ring& ring, int slot) const {
      const u32 barrier = ring.full + 8 * slot;
      ptx::mbarrier_arrive_expect_tx(barrier, kBoxes * kBoxBytes + kWeightBytes);
      const u32 codes = shared + slot * kStageSize + kBoxes * kBoxBytes;
#pragma unroll
      for (int box = 0; box < kCodeBoxes; ++box) {
        const int brick = stage * kBricks + box * C::kBoxBricks;
        C::Mover::box(codes + box * kCodeBoxBytes, p.codes_map,
                      brick * (Weights::kBrickBytes / C::kCodeElementBytes), first_block, barrier);
      }
      const int group = C::kGroupK == 0 ? 0 : stage * C::kBlockK / max_of(C::kGroupK, 1);
      const u32 scales = codes + Weights::kCodesSize, zeros = scales + Weights::kScalesSize;
      if constexpr (kScalesInLoop) {
        constexpr int kElements = 16 * Weights::kScaleBytes / C::kScaleElementBytes;
        C::Mover::box(scales, p.scales_map, group * kElements, first_block, barrier);
      }
      if constexpr (Weights::kHasZero) {
        constexpr int kElements = 16 * Weights::kZeroBytes / C::kZeroElementBytes;
        C::Mover::box(zeros, p.zeros_map, group * kElements, first_block, barrier);
      }
    }

    // Brings the tokens of a stage to the slot at hand.
    __device__ void tokens(int stage, const Ring& ring) const {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        token_box(stage, box, ring.slot, ring.full + 8 * ring.slot);
      }
    }

    // This CTA's share of a box of tokens, for all CTAs of the cluster.
    __device__ void token_box(int stage, int box, int slot, u32 barrier) const {
      constexpr int kShare = C::kBlockM / C::kClusterN;
      const u32 to = shared + slot * kStageSize + box * kBoxBytes + rank * kShare * 128;
      const int column = stage * C::kBlockK + box * kBoxK, row = first_token + rank * kShare;
      if constexpr (kClustered) {
        C::Mover::template shared_box<C::kClusterN>(to, p.x_map, column, row, barrier,
                                                    first_neighbour());
      } else {
        C::Mover::box(to, p.x_map, column, row, barrier);
      }
    }
  };
};

}  // namespace humming
