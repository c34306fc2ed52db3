// Slot mainloop: D[rows x tokens] += W[rows x K] X[tokens x K]^T with MMA of warpgroups, whose A
// operand is dequantized into registers while the step before is multiplied.
// Needs: the components of its Config; wgmma, mbarrier_tx, setmaxnreg.
//
// Data flow, per pipeline stage of kBlockK values of K:
//   activations --boxes of 128 bytes x kBlockM tokens--> shared memory, swizzled
//   packed codes, scales, zeros --runs of bytes--> shared memory behind them
//   codes --16-byte reads--> registers --dequant--> A fragments   (a lane reads only its own words)
//   A x B --wgmma--> sums; per group of K scaled into the accumulators where the plan says so
//
// One warp tells the copy engine what to bring; the others divide the tile along N. Full barriers
// tell that a stage's bytes are there, empty barriers that all warps are done with it:
//
//   producer   wait empty[s]   announce bytes, copy -> full[s]              s = s + 1 mod kStages
//   warps      wait full[s]    dequant, multiply; when the last product that reads s has ended,
//                              arrive at empty[s]
//
// Rows beyond N repeat the last row block, and their sums are not stored. Tokens beyond M and values
// beyond K are zeros of the boxes; bricks beyond K are left out.
#pragma once

#include <humming/mainloop/token_scales.cuh>
#include <humming/mainloop/weights.cuh>
#include <humming/ptx/barrier.cuh>
#include <humming/ptx/grid.cuh>
#include <humming/ptx/setmaxnreg.cuh>
#include <humming/ptx/shared.cuh>
#include <humming/ptx/wgmma.cuh>
#include <humming/types.cuh>

namespace humming {

template <class C>
struct WgmmaMainloop {
  using Params = MappedGemmParams;
  using Places = typename C::Mma::Places;
  // Those that multiply, and the warpgroup of the producer.
  static constexpr int kThreads = 32 * C::kWarpsN;
  static constexpr int kLaunchedThreads = kThreads + 128;
  static constexpr int kRowBlocks = C::kBlockN / 16 / C::kWarpsN;
  static constexpr int kTileTokens = 8;
  static constexpr int kTokenTiles = C::kBlockM / kTileTokens;
  // Sums of a group that are scaled into the accumulators in float.
  static constexpr bool kPartial = C::kScaleSite == ScaleSite::kAccumulator;
  // Notes of several row blocks would take the registers that partial sums need.
  using Weights = StagedWeights<C, !kPartial || kRowBlocks == 1>;
  static constexpr int kBricks = Weights::kBricks;
  static constexpr int kWords = Weights::kWords;
  static constexpr int kStepK = Weights::kStepK;
  static constexpr int kBrickSteps = Weights::kBrickSteps;
  static constexpr int kStageSteps = kBricks * kBrickSteps;
  static constexpr bool kScalesInLoop = Weights::kScalesInLoop;

  static_assert(C::kWarpsN % 4 == 0 && C::kWarpsK == 1 && C::kBlockN % (16 * C::kWarpsN) == 0,
                "slot mainloop: warpgroups divide a tile along N");
  static_assert(C::kScaleStepK == 0 || C::kScaleStepK % 64 == 0 || 64 % C::kScaleStepK == 0,
                "slot mainloop: groups and bricks divide one another");
  static_assert(C::kTokenGroupK == 0 || kPartial,
                "slot mainloop: scales of groups of tokens meet partial sums only");
  static_assert(kBrickSteps % 2 == 0, "slot mainloop: fragments alternate between two places");

  // Bytes of a stage. Boxes begin where the pattern of their swizzle does.
  static constexpr int kBoxK = 128 * 8 / C::Tokens::kBits;
  static constexpr int kBoxes = ceil_div(C::kBlockK, kBoxK);
  static constexpr int kBoxBytes = C::kBlockM * 128;
  static constexpr int kStageSize = ceil_div(kBoxes * kBoxBytes + Weights::kSize, 1024) * 1024;
  // The barriers lie behind everything, where the epilogue does not write.
  static constexpr int kReservedBytes = 16 * C::kStages;
  // It waits for the grids ahead of it by itself, where it first needs what they write.
  static constexpr bool kWaits = true;
  static constexpr int kSharedBytes = C::kStages * kStageSize + kReservedBytes;

  // (row block, token tile, i) -> row 16 * block + g + 8 * Places::half(i),
  //                               token kTileTokens * tile + Places::token(lane, column(i))
  using Product = typename C::Mma::Sum;
  using Sum = typename IfElse<kPartial, float, Product>::Type;
  using Accumulators = Sum[kRowBlocks][kTokenTiles][4];

  // The barriers of stages, and where in the ring a warp is.
  struct Ring {
    u32 full, empty;  // addresses of those of slot 0
    int slot = 0;
    u32 parity = 0;

    __device__ explicit Ring(u32 shared)
        : full(shared + C::kSharedBytes - kReservedBytes), empty(full + 8 * C::kStages) {}
    __device__ void advance() {
      if (++slot == C::kStages) {
        slot = 0;
        parity ^= 1;
      }
    }
    __device__ void wait_full() const { ptx::mbarrier_wait(full + 8 * slot, parity); }
    __device__ void wait_empty() const { ptx::mbarrier_wait(empty + 8 * slot, parity ^ 1); }
  };

  // Named barriers; 0 is that of the whole CTA.
  static constexpr int kMeet = 1, kStagger = 2;
  // Two warpgroups that started together would scale their partial sums at the same time, and leave
  // the tensor cores idle; so one begins a stage later.
  static constexpr bool kStaggered = kPartial && C::kWarpsN == 8;

  // Threads that hold sums meet.
  static __device__ void sync() { ptx::named_barrier_sync<kThreads>(kMeet); }

  // Sums stages [begin, end) of the tile; returns whether this thread holds sums.
  static __device__ bool run(const Params& p, u8* shared, int tile_n, int tile_m, int begin,
                             int end, Accumulators& acc) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Ring ring(ptx::shared_address(shared));
    if (threadIdx.x == 0) {
#pragma unroll
      for (int slot = 0; slot < C::kStages; ++slot) {
        ptx::mbarrier_init(ring.full + 8 * slot, 1);
        ptx::mbarrier_init(ring.empty + 8 * slot, C::kWarpsN);
      }
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (warp >= C::kWarpsN) {
      if constexpr (C::kRegisters != 0) ptx::setmaxnreg_dec<C::kProducerRegisters>();
      if (warp == C::kWarpsN) {
        const Source source(p, ptx::shared_address(shared), lane, tile_n, tile_m);
        produce(source, begin, end, ring);
      }
      return false;
    }
    if constexpr (C::kRegisters != 0) ptx::setmaxnreg_inc<C::kRegisters>();
    if constexpr (C::kDependentLaunch) ptx::griddepcontrol_wait();
    consume(p, shared, warp, lane, tile_m, begin, end, ring, acc);
    return true;
  }

 private:
  // What the producer brings, of this tile.
  struct Source {
    const Params& p;
    u32 shared;  // address of stage 0
    int lane;
    int bricks, groups, blocks;  // of the whole weight
    int first_block, first_token;

    __device__ Source(const Params& p, u32 shared, int lane, int tile_n, int tile_m)
        : p(p),
          shared(shared),
          lane(lane),
          bricks(Weights::bricks_of(p.k)),
          groups(Weights::groups_of(p.k)),
          blocks((p.n + 15) / 16),
          first_block(tile_n * Weights::kBlocks),
          first_token(tile_m * C::kBlockM) {}

    // Announces a stage and brings its weights; a lane copies the runs of a row block.
    __device__ void weights(int stage, const Ring& ring) const {
      const u32 barrier = ring.full + 8 * ring.slot;
      const int brick = stage * kBricks;
      const int group = C::kGroupK == 0 ? 0 : brick * 64 / max_of(C::kGroupK, 1);
      const int code_bytes = min_of(kBricks, bricks - brick) * Weights::kBrickBytes;
      const int values = min_of(Weights::kGroups, groups - group) * 16;
      const int scale_bytes = kScalesInLoop ? values * Weights::kScaleBytes : 0;
      const int zero_bytes = Weights::kHasZero ? values * Weights::kZeroBytes : 0;
      if (lane == 0) {
        const int run_bytes = code_bytes + scale_bytes + zero_bytes;
        ptx::mbarrier_arrive_expect_tx(barrier, kBoxes * kBoxBytes + Weights::kBlocks * run_bytes);
      }
      __syncwarp();
      const u32 codes = shared + ring.slot * kStageSize + kBoxes * kBoxBytes;
      const u32 scales = codes + Weights::kCodesSize, zeros = scales + Weights::kScalesSize;
      for (int run = lane; run < Weights::kBlocks; run += 32) {
        const i64 block = min_of(first_block + run, blocks - 1);
        C::Mover::run(
            codes + run * kBricks * Weights::kBrickBytes,
            static_cast<const u8*>(p.codes) + (block * bricks + brick) * Weights::kBrickBytes,
            code_bytes, barrier);
        const i64 from = (block * groups + group) * 16;
        const int to = run * Weights::kGroups * 16;
        if constexpr (kScalesInLoop) {
          C::Mover::run(scales + to * Weights::kScaleBytes,
                        static_cast<const u8*>(p.scales) + from * Weights::kScaleBytes, scale_bytes,
                        barrier);
        }
        if constexpr (Weights::kHasZero) {
          C::Mover::run(zeros + to * Weights::kZeroBytes,
                        static_cast<const u8*>(p.zeros) + from * Weights::kZeroBytes, zero_bytes,
                        barrier);
        }
      }
    }

    __device__ void tokens(int stage, const Ring& ring) const {
      if (lane != 0) return;
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        C::Mover::box(shared + ring.slot * kStageSize + box * kBoxBytes, p.x_map,
                      stage * C::kBlockK + box * kBoxK, first_token, ring.full + 8 * ring.slot);
      }
    }
  };

  // Fills stage after stage.
  static __device__ void produce(const Source& source, int begin, int end, Ring ring) {
    if (source.lane == 0) C::Mover::prepare(source.p.x_map);
    int at = begin;
    if constexpr (C::kDependentLaunch) {
      // Weights are constant: the first ones come while the grids ahead still write the tokens.
      Ring ahead = ring;
      for (; at < end && at < begin + C::kStages; ++at, ahead.advance()) source.weights(at, ahead);
      ptx::griddepcontrol_wait();
      for (int stage = begin; stage < at; ++stage, ring.advance()) source.tokens(stage, ring);
    }
    for (; at < end; ++at, ring.advance()) {
      ring.wait_empty();
      source.weights(at, ring);
      source.tokens(at, ring);
    }
  }

  // Row blocks that a warp multiplies side by side. With partial sums it is one after the other, all
  // bricks of a stage each, so that one row block's partial sums are enough.
  static constexpr int kPasses = kPartial ? kRowBlocks : 1;
  static constexpr int kSide = kRowBlocks / kPasses;
  using Products = Product[kSide][kTokenTiles][4];
  // Steps and bricks of a group of K whose sums are scaled together; not more than a stage.
  static constexpr int kGroupSteps =
      C::kScaleStepK == 0 ? kBrickSteps : min_of(C::kScaleStepK / kStepK, kBrickSteps);
  static constexpr int kGroupBricks =
      C::kScaleStepK == 0 ? 1 : min_of(max_of(C::kScaleStepK / 64, 1), kBricks);

  // A warp's way through its part of K: stage after stage, in each one pass after the other, brick
  // after brick. Fragments of a step are made while the step before is multiplied, in the other of
  // two places.
  struct Consumer {
    const u8* shared;
    int warp, lane;
    Ring ring;
    int bricks;      // of K from the stage at hand on
    int stages;      // of the part from the one at hand on
    int step;        // first one of K of the stage at hand
    int brick = 0;   // the one at hand, within its stage
    u32 done = 0;    // barrier to arrive at when all products before the next one have ended
    u64 tokens = 0;  // descriptor of the brick's tokens
    typename Weights::StoredScales scales;
    u32 words[kSide][kWords];
    typename Weights::Rows rows[kSide];
    typename Weights::Marks marks[kRowBlocks] = {};
    u32 a[2][kSide][4];

    __device__ Consumer(const u8* shared, int warp, int lane, const Ring& ring, int bricks,
                        int begin, int end)
        : shared(shared),
          warp(warp),
          lane(lane),
          ring(ring),
          bricks(bricks - begin * kBricks),
          stages(end - begin),
          step(begin * kStageSteps) {
#pragma unroll
      for (int block = 0; block < kSide; ++block) rows[block].clear();
      this->ring.wait_full();
      open<0>();
    }

    // Reads the words of the brick at hand, of this warp's row blocks of a pass.
    template <int kPass>
    __device__ void open() {
      const u8* base = shared + ring.slot * kStageSize;
      const u8* codes = base + kBoxes * kBoxBytes;
      const int first = warp * kRowBlocks + kPass;
#pragma unroll
      for (int block = 0; block < kSide; ++block) {
        const int run = (first + block) * kBricks + brick;
        Weights::read_words(codes + run * Weights::kBrickBytes, lane, words[block]);
        Weights::note(words[block], marks[kPass + block]);
      }
      const int values = first * 16 * Weights::kGroups;
      scales.scales = codes + Weights::kCodesSize + values * Weights::kScaleBytes;
      scales.zeros =
          codes + Weights::kCodesSize + Weights::kScalesSize + values * Weights::kZeroBytes;
      const int box = brick * 64 / kBoxK, in_box = brick * 64 % kBoxK * C::Tokens::kBits / 8;
      tokens = ptx::wgmma_descriptor(ptx::shared_address(base) + box * kBoxBytes + in_box);
    }

    // The next brick, and its first fragments: of this pass, of the next one, or of the next stage.
    template <int kPass>
    __device__ void advance() {
      if (++brick < min_of(kBricks, bricks)) {
        open<kPass>();
      } else {
        brick = 0;
        if constexpr (kPass + 1 < kPasses) {
          open<kPass + 1>();
        } else {
          done = ring.empty + 8 * ring.slot;
          bricks -= kBricks;
          step += kStageSteps;
          if (--stages == 0) return;
          ring.advance();
          ring.wait_full();
          open<0>();
        }
      }
      prepare<0>();
    }

    // Tells the producer that the stage before has been read to its end.
    __device__ void release() {
      if (done == 0) return;
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(done);
      done = 0;
    }

    template <int kStep>
    __device__ void prepare() {
      constexpr int kGroupK = max_of(C::kGroupK, 1);
      if constexpr (kStep == 0 || (C::kGroupK != 0 && kStep * kStepK % kGroupK == 0)) {
        const int group = Weights::StoredScales::group_of(brick * kBrickSteps + kStep);
#pragma unroll
        for (int block = 0; block < kSide; ++block) rows[block].load(scales, block, group, lane);
      }
#pragma unroll
      for (int block = 0; block < kSide; ++block) {
        u32(&to)[4] = a[kStep % 2][block];
        Weights::template fragment<kStep>(words[block], rows[block], to);
        // Codes that are operands as they are would stay where the next words are read to.
        if constexpr (C::Order::kCodeBits == C::Order::kOperandBits) {
#pragma unroll
          for (u32& word : to) word = ptx::copied(word);
        }
      }
    }

    // The scales of a lane's rows for the group that a step of the brick belongs to.
    __device__ void row_factors(int step, float (&factors)[2]) const {
      if constexpr (C::kGroupK != 0) {
        const int group = Weights::StoredScales::group_of(brick * kBrickSteps + step);
        scales.floats(0, group, lane, factors);
      }
    }
  };

  // Multiplies steps [kStep, kEnd) of the brick at hand, and makes the fragments that come next.
  template <int kPass, int kStep, int kEnd>
  static __device__ void multiply(Consumer& c, Products& sums, bool adds) {
    ptx::wgmma_fence();
#pragma unroll
    for (int block = 0; block < kSide; ++block) {
      C::Mma::fma(sums[block], c.a[kStep % 2][block],
                  c.tokens + ptx::wgmma_descriptor_step(32 * kStep), adds);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();  // frees the fragments of the step before
    if constexpr (kStep == 0) c.release();
    if constexpr (kStep + 1 < kBrickSteps) {
      c.template prepare<kStep + 1>();
    } else {
      c.template advance<kPass>();
    }
    if constexpr (kStep + 1 < kEnd) multiply<kPass, kStep + 1, kEnd>(c, sums, true);
  }

  // Adds the finished sums of a group, times its scales, to the accumulators of a row block. `step`
  // is one of the group.
  static __device__ void flush(const StoredTokenScales<C>& token_scales, int step, Products& sums,
                               const float (&factors)[2], Sum (&acc)[kTokenTiles][4]) {
    ptx::wgmma_wait<0>();
    ptx::keep_sums(sums[0]);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      float tokens[2];
      if constexpr (C::kTokenGroupK != 0) {
        const int first = kTileTokens * tile + Places::token(lane, 0);
        const int second = kTileTokens * tile + Places::token(lane, 1);
        token_scales.floats(first, second, step, tokens);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float sum = float(sums[0][tile][i]);
        if constexpr (C::kTokenGroupK != 0) sum *= tokens[Places::column(i)];
        acc[tile][i] += sum * factors[Places::half(i)];
      }
    }
  }

  // Multiplies and scales group after group: those of the brick at hand from step kStep on, or one
  // of several bricks.
  template <int kPass, int kStep>
  static __device__ void multiply_groups(const StoredTokenScales<C>& token_scales, Consumer& c,
                                         Products& sums, Accumulators& acc) {
    float factors[2] = {1.f, 1.f};
    c.row_factors(kStep, factors);
    const int step = c.step + c.brick * kBrickSteps + kStep;
    multiply<kPass, kStep, kStep + kGroupSteps>(c, sums, false);
    if constexpr (kGroupBricks > 1) {
      // At the end of the stage the brick at hand is the next one's first.
      while (c.brick % kGroupBricks != 0) multiply<kPass, 0, kBrickSteps>(c, sums, true);
    }
    flush(token_scales, step, sums, factors, acc[kPass]);
    if constexpr (kStep + kGroupSteps < kBrickSteps) {
      multiply_groups<kPass, kStep + kGroupSteps>(token_scales, c, sums, acc);
    }
  }

  // The stage at hand from pass kPass on.
  template <int kPass>
  static __device__ void multiply_stage(const StoredTokenScales<C>& token_scales, Consumer& c,
                                        Products& sums, Accumulators& acc) {
    do {
      multiply_groups<kPass, 0>(token_scales, c, sums, acc);
    } while (c.brick != 0);
    if constexpr (kPass + 1 < kPasses) multiply_stage<kPass + 1>(token_scales, c, sums, acc);
  }

  static __device__ void consume(const Params& p, const u8* shared, int warp, int lane, int tile_m,
                                 int begin, int end, const Ring& ring, Accumulators& acc) {
    Consumer c(shared, warp, lane, ring, Weights::bricks_of(p.k), begin, end);
    c.template prepare<0>();
    if constexpr (kPartial) {
      Products sums;
      ptx::keep_sums(sums[0]);
      const StoredTokenScales<C> token_scales(p, tile_m);
      if (kStaggered && warp >= 4) ptx::named_barrier_sync<kThreads>(kStagger);
      for (bool first = true; c.stages > 0; first = false) {
        multiply_stage<0>(token_scales, c, sums, acc);
        if (kStaggered && first && warp < 4) ptx::named_barrier_arrive<kThreads>(kStagger);
      }
    } else {
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block) ptx::keep_sums(acc[block]);
      while (c.stages > 0) multiply<0, 0, kBrickSteps>(c, acc, true);
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block) ptx::keep_sums(acc[block]);
    }
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) Weights::spoil(c.marks[block], acc[block]);
    sync();  // shared memory is free for the epilogue
  }
};

}  // namespace humming
