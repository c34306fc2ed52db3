// Slot mainloop: D[rows x tokens] += W[rows x K] X[tokens x K]^T with MMA of warpgroups, whose A
// operand is dequantized into registers while what is before it is multiplied.
// Needs: the components of its Config; wgmma, mbarrier_tx, setmaxnreg.
//
// Data flow, per pipeline stage of kBlockK values of K:
//   activations --boxes of 128 bytes x kBlockM tokens--> shared memory, swizzled
//   packed codes, scales, zeros --boxes of all row blocks--> shared memory behind them
//   codes --16-byte reads--> registers --dequant--> A fragments   (a lane reads only its own words)
//   A x B --wgmma--> sums; per group of K scaled into the accumulators where the plan says so
//
// One warp tells the copy engine what to bring (mainloop/stages.cuh); the others divide the tile along
// N. A warp leaves a stage when the last product that reads it has ended.
#pragma once

#include <humming/mainloop/stages.cuh>
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
  // Sums of kPartialK values of K that are added to the accumulators in float, times the scales of
  // their group where the plan says so.
  static constexpr bool kPartial = C::kPartialK != 0;
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
  static_assert(C::kStages >= 2, "slot mainloop: a pipeline has at least two stages");
  static_assert(C::kTokenGroupK == 0 || kPartial,
                "slot mainloop: scales of groups of tokens meet partial sums only");

  using Stages = BoxedStages<C, Weights>;
  using Ring = typename Stages::Ring;
  using TokenScales = StoredTokenScales<C>;
  static constexpr int kReservedBytes = Stages::kReservedBytes;
  static constexpr bool kWaitsForGrids = true;
  static constexpr int kSharedBytes = Stages::kSharedBytes;

  // (row block, token tile, i) -> row 16 * block + g + 8 * Places::half(i),
  //                               token kTileTokens * tile + Places::token(lane, column(i))
  using Product = typename C::Mma::Sum;
  using Sum = typename IfElse<kPartial, float, Product>::Type;
  using Accumulators = Sum[kRowBlocks][kTokenTiles][4];

  // Threads that hold sums meet.
  static __device__ void sync() { ptx::named_barrier_sync<kThreads>(1); }

  // Sums stages [begin, end) of the tile; returns whether this thread holds sums.
  static __device__ bool run(const Params& p, u8* shared, int tile_n, int tile_m, int begin,
                             int end, Accumulators& acc) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 address = ptx::shared_address(shared);
    const Ring ring(address);
    if (threadIdx.x == 0) ring.init();
    Stages::begin();
    if (warp >= C::kWarpsN) {
      if constexpr (C::kRegisters != 0) ptx::setmaxnreg_dec<C::kProducerRegisters>();
      if (warp == C::kWarpsN) Stages::produce(p, address, tile_n, tile_m, begin, end, ring, lane);
      return false;
    }
    if constexpr (C::kRegisters != 0) ptx::setmaxnreg_inc<C::kRegisters>();
    if constexpr (C::kDependentLaunch) ptx::griddepcontrol_wait();
    consume(p, shared, warp, lane, tile_m, begin, end, ring, acc);
    sync();  // shared memory is free for the epilogue
    return true;
  }

 private:
  // Row blocks that a warp multiplies side by side. With partial sums it is one after the other, all
  // bricks of a stage each, so that one row block's partial sums are enough.
  static constexpr int kPasses = kPartial ? kRowBlocks : 1;
  static constexpr int kSide = kRowBlocks / kPasses;
  // Partial sums are those of two halves of the tokens: while one is multiplied, the sums of the
  // other are added to the accumulators. Scales of tokens that stages do not hold are loaded ahead
  // and leave no registers for it.
  static constexpr bool kScattered = C::kTokenGroupK != 0 && !Stages::kHasTokenScales;
  static constexpr int kHalves = kPartial && kTokenTiles >= 16 && !kScattered ? 2 : 1;
  static constexpr int kHalfTiles = kTokenTiles / kHalves;
  using Products = Product[kSide * kHalves][kHalfTiles][4];
  // What is opened together: the bricks that share a box of tokens.
  static constexpr int kUnitK = Stages::kBoxK;
  static constexpr int kUnitBricks = kUnitK / 64;
  static constexpr int kUnitSteps = kUnitBricks * kBrickSteps;
  static constexpr int kUnits = kBricks / kUnitBricks;
  static_assert(kUnitK % 64 == 0 && kBricks % kUnitBricks == 0,
                "slot mainloop: stages hold whole boxes of tokens, and these whole bricks");
  // Steps and units of a group of K whose sums are added together; not more than a stage.
  static constexpr int kGroupSteps =
      kPartial ? min_of(C::kPartialK / kStepK, kUnitSteps) : kUnitSteps;
  static constexpr int kGroupUnits =
      kPartial ? min_of(max_of(C::kPartialK / kUnitK, 1), kUnits) : 1;

  // Codes that are operands as they are come from shared memory when their place is free. Were they
  // read before, the assembler would read them into registers that a product under way still reads.
  static constexpr bool kNative = requires { requires Weights::Dequant::kIdentity; };

  // A turn multiplies the fragments of one place while those of the next turn are made in the other.
  // The more steps of a unit it has, the longer the latency that it hides; registers decide.
  static constexpr int kSumRegisters = 4 * kTokenTiles * (kRowBlocks + (kPartial ? 1 : 0));
  static constexpr int kSpare = (C::kRegisters != 0 ? C::kRegisters : 168) - kSumRegisters - 60;
  static constexpr int kMostSteps = kPartial ? kGroupSteps : kUnitSteps;
  static constexpr int kTurnSteps = 8 * kMostSteps * kSide <= kSpare   ? kMostSteps
                                    : 4 * kMostSteps * kSide <= kSpare ? max_of(kMostSteps / 2, 1)
                                                                       : 1;
  static constexpr int kGroupTurns = kPartial ? kGroupUnits * kGroupSteps / kTurnSteps : 1;
  static constexpr int kParts = kUnitSteps / kTurnSteps;

  // A warp's way through its part of K: stage after stage, in each one pass after the other, unit
  // after unit.
  struct Consumer {
    int m;  // tokens, more than 0
    const u8* shared;
    int warp, lane;
    Ring ring;
    int stages;      // of the part from the one at hand on
    int step;        // first one of K of the stage at hand
    int unit = 0;    // the one at hand, within its stage
    int pass = 0;    // the one at hand
    u32 done = 0;    // barrier to arrive at when all products before the next ones have ended
    u64 tokens = 0;  // descriptor of the unit's tokens
    typename Weights::StoredScales scales;
    u32 words[kUnitBricks][kSide][kNative ? 1 : kWords];
    typename Weights::Rows rows[kSide];
    typename Weights::Marks marks[kRowBlocks] = {};
    u32 a[2][kTurnSteps][kSide][4];

    __device__ Consumer(const Params& p, const u8* shared, int warp, int lane, const Ring& ring,
                        int begin, int end)
        : m(p.m),
          shared(shared),
          warp(warp),
          lane(lane),
          ring(ring),
          stages(end - begin),
          step(begin * kStageSteps) {
#pragma unroll
      for (int block = 0; block < kSide; ++block) rows[block].clear();
      this->ring.wait_full();
      open();
    }

    // Where a brick of the unit at hand lies, of a row block of the pass.
    __device__ const u8* run(int in_unit, int block) const {
      const int brick = unit * kUnitBricks + in_unit;
      const int row_block = warp * kRowBlocks + pass + block;
      return shared + ring.slot * Stages::kStageSize + Stages::kBoxes * Stages::kBoxBytes +
             brick / C::kBoxBricks * Stages::kCodeBoxBytes + row_block * Stages::kCodeRunBytes +
             brick % C::kBoxBricks * Weights::kBrickBytes;
    }

    // Reads the words of the unit at hand, of this warp's row blocks of the pass.
    __device__ void open() {
      if constexpr (!kNative) {
#pragma unroll
        for (int in_unit = 0; in_unit < kUnitBricks; ++in_unit) {
#pragma unroll
          for (int block = 0; block < kSide; ++block) {
            Weights::read_words(run(in_unit, block), lane, words[in_unit][block]);
          }
        }
        note<0>();
      }
      const u8* base = shared + ring.slot * Stages::kStageSize;
      const u8* codes = base + Stages::kBoxes * Stages::kBoxBytes;
      const int first = warp * kRowBlocks + pass;
      const int values = first * 16 * Weights::kGroups;
      scales.scales = codes + Weights::kCodesSize + values * Weights::kScaleBytes;
      scales.zeros =
          codes + Weights::kCodesSize + Weights::kScalesSize + values * Weights::kZeroBytes;
      tokens = ptx::wgmma_descriptor(ptx::shared_address(base) + unit * Stages::kBoxBytes);
    }

    // Of the pass at hand, which is kPass or one behind.
    template <int kPass>
    __device__ void note() {
      if constexpr (kPass + 1 < kPasses) {
        if (pass != kPass) return note<kPass + 1>();
      }
#pragma unroll
      for (int block = 0; block < kSide * kUnitBricks; ++block) {
        Weights::note(words[block / kSide][block % kSide], marks[kPass + block % kSide]);
      }
    }

    // Goes to the next unit: of this pass, of the next one, or of the next stage. False at the end.
    // kSure: whether there is one for sure.
    template <bool kSure>
    __device__ bool advance() {
      if (++unit == kUnits) {
        unit = 0;
        if (++pass == kPasses) {
          pass = 0;
          done = ring.empty + 8 * ring.slot;
          step += kStageSteps;
          if (--stages == 0 && !kSure) return false;
          ring.advance();
          ring.wait_full();
        }
      }
      open();
      return true;
    }

    // Makes the fragments of steps [kStep, kEnd) of the unit at hand, from step 0 of a place on.
    template <int kPlace, int kStep, int kEnd, int kTo = 0>
    __device__ void fill() {
      constexpr int kGroupK = max_of(C::kGroupK, 1);
      if constexpr (kStep == 0 || (C::kGroupK != 0 && kStep * kStepK % kGroupK == 0)) {
        const int group = Weights::StoredScales::group_of(unit * kUnitSteps + kStep);
#pragma unroll
        for (int block = 0; block < kSide; ++block) rows[block].load(scales, block, group, lane);
      }
#pragma unroll
      for (int block = 0; block < kSide; ++block) {
        u32(&to)[4] = a[kPlace][kTo][block];
        if constexpr (kNative) {
          Weights::template read_step<kStep % kBrickSteps>(run(kStep / kBrickSteps, block), lane,
                                                           to);
        } else {
          Weights::template fragment<kStep % kBrickSteps>(words[kStep / kBrickSteps][block],
                                                          rows[block], to);
        }
      }
      if constexpr (kStep + 1 < kEnd) fill<kPlace, kStep + 1, kEnd, kTo + 1>();
    }

    // The scales of a lane's rows for the group that a step of the unit belongs to.
    __device__ void row_factors(int step, float (&factors)[2]) const {
      if constexpr (C::kGroupK != 0) {
        const int group = Weights::StoredScales::group_of(unit * kUnitSteps + step);
        scales.floats(0, group, lane, factors);
      }
    }
  };

  // Leaves the fragments of a place where they are up to here, where the products that read them have
  // ended.
  template <int kPlace>
  static __device__ void hold(const Consumer& c) {
#pragma unroll
    for (int step = 0; step < kTurnSteps; ++step) {
#pragma unroll
      for (int block = 0; block < kSide; ++block) {
        ptx::hold(c.a[kPlace][step][block], c.m, c.ring.full);
      }
    }
  }

  // Multiplies the fragments of a place, which belong to steps [kStep, kEnd) of a unit, with a half
  // of the tokens. `adds` is false where sums begin.
  template <int kPlace, int kStep, int kEnd, int kHalf = 0>
  static __device__ void multiply(Consumer& c, Products& sums, bool adds) {
#pragma unroll
    for (int step = kStep; step < kEnd; ++step) {
#pragma unroll
      for (int block = 0; block < kSide; ++block) ptx::keep(c.a[kPlace][step - kStep][block]);
    }
    ptx::wgmma_fence();
    constexpr int kFirstToken = kHalf * kHalfTiles * kTileTokens;
#pragma unroll
    for (int step = kStep; step < kEnd; ++step) {
#pragma unroll
      for (int block = 0; block < kSide; ++block) {
        C::Mma::fma(sums[block + kHalf], c.a[kPlace][step - kStep][block],
                    c.tokens + ptx::wgmma_descriptor_step(128 * kFirstToken + 32 * step),
                    adds || step > kStep);
      }
    }
    ptx::wgmma_commit();
  }

  // Where all products but those of the last turn have ended, so that the other place is free, and
  // the stage before, if they were the last to read it.
  // kOtherRead: whether one of them may have read the other place.
  template <int kPlace, bool kOtherRead>
  static __device__ void release(Consumer& c) {
    if constexpr (kOtherRead) hold<1 - kPlace>(c);
    if (c.done != 0) {
      Stages::leave(c.done, c.lane);
      c.done = 0;
    }
  }

  // Goes on to what the next turn multiplies, and makes its fragments in the other place.
  // kSure: whether there is a next turn for sure.
  template <int kPlace, int kPart, bool kSure = false>
  static __device__ bool prepare(Consumer& c) {
    constexpr int kNext = (kPart + 1) % kParts * kTurnSteps;
    const bool more = kPart + 1 < kParts || c.template advance<kSure>();
    if (kSure || more) c.template fill<1 - kPlace, kNext, kNext + kTurnSteps>();
    return kSure || more;
  }

  // What the sums of a group are scaled with, and where they go.
  struct Group {
    float factors[2] = {1.f, 1.f};
    int step, pass;
    const typename C::TokenScale::Storage* staged;  // its tokens' scales, if stages have them

    __device__ Group(const Consumer& c, int first)
        : step(c.step + c.unit * kUnitSteps + first), pass(c.pass) {
      c.row_factors(first, factors);
      if constexpr (Stages::kHasTokenScales) {
        const u8* stage = c.shared + c.ring.slot * Stages::kStageSize;
        staged = Stages::TokenScales::staged(stage + Stages::kTokenScalesAt,
                                             c.unit * kUnitSteps + first);
      }
    }
  };

  // Adds the finished sums of a half of a group, times its scales, to the accumulators of its row
  // block, which is kPass or one behind. No loop finds it, for an index would put accumulators into
  // memory.
  template <int kHalf, int kPass = 0>
  static __device__ void flush(const TokenScales& token_scales, const Group& group,
                               const Products& sums, Accumulators& acc) {
    if constexpr (kPass + 1 < kPasses) {
      if (group.pass != kPass) return flush<kHalf, kPass + 1>(token_scales, group, sums, acc);
    }
    const int lane = threadIdx.x % 32;
    constexpr int kFirst = kHalf * kHalfTiles;
#pragma unroll
    for (int tile = kFirst; tile < kFirst + kHalfTiles; ++tile) {
      float tokens[2];
      if constexpr (C::kTokenGroupK != 0) {
        const int first = kTileTokens * tile + Places::token(lane, 0);
        const int second = kTileTokens * tile + Places::token(lane, 1);
        if constexpr (Stages::kHasTokenScales) {
          C::TokenScales::floats(group.staged[first], group.staged[second], tokens);
        } else {
          token_scales.floats(first, second, group.step, tokens);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float sum = float(sums[kHalf][tile - kFirst][i]);
        if constexpr (C::kTokenGroupK != 0) sum *= tokens[Places::column(i)];
        acc[kPass][tile][i] += sum * group.factors[Places::half(i)];
      }
    }
    // Here, not where the compiler finds it convenient: their registers are to be used again.
    ptx::keep_sums(acc[kPass]);
  }

  // The turns of a group from kTurn on; returns whether there is another group.
  // kOwes: whether sums of the second half of the `last` group are still to be added.
  // kOwed: whether those of this one may stay so, and there is another group.
  template <int kPlace, int kPart, int kTurn, bool kOwes, bool kOwed>
  static __device__ bool turns(const TokenScales& token_scales, Consumer& c, const Group& group,
                               const Group& last, Products& sums, Accumulators& acc) {
    constexpr int kStep = kPart * kTurnSteps, kEnd = kStep + kTurnSteps;
    multiply<kPlace, kStep, kEnd>(c, sums, kTurn > 0);
    if constexpr (kOwes && kTurn == 0) {
      ptx::wgmma_wait<1>();
      add<1>(token_scales, last, sums, acc);
      release<kPlace, true>(c);
    }
    if constexpr (kHalves == 2) multiply<kPlace, kStep, kEnd, 1>(c, sums, kTurn > 0);
    if constexpr (!kOwes || kTurn > 0) {
      ptx::wgmma_wait<kHalves>();
      release<kPlace, (kTurn > 0)>(c);
    }
    constexpr bool kEnds = kTurn + 1 == kGroupTurns;
    const bool more = prepare < kPlace, kPart, !kEnds || kOwed > (c);
    if constexpr (!kEnds) {
      return turns<1 - kPlace, (kPart + 1) % kParts, kTurn + 1, kOwes, kOwed>(
          token_scales, c, group, last, sums, acc);
    } else {
      ptx::wgmma_wait<kHalves - 1>();
      if constexpr (kHalves == 1) hold<kPlace>(c);
      add<0>(token_scales, group, sums, acc);
      if constexpr (kHalves == 2 && !kOwed) {
        ptx::wgmma_wait<0>();
        hold<kPlace>(c);
        add<1>(token_scales, group, sums, acc);
      }
      return more;
    }
  }

  // Adds the sums of a half, whose products have ended.
  template <int kHalf>
  static __device__ void add(const TokenScales& token_scales, const Group& group, Products& sums,
                             Accumulators& acc) {
    ptx::keep_sums(sums[kHalf]);
    flush<kHalf>(token_scales, group, sums, acc);
  }

  // Groups of a run owe one another their second halves. They come without a branch between them, and
  // end without debts: the assembler does not see beyond a branch which products have ended, and would
  // wait for each. A run is two stages or more if they have one group, a stage, or, where that would
  // be long to assemble, an equal part of it.
  static constexpr int kStageGroups =
      kPartial ? kPasses * kStageSteps / (kGroupSteps * kGroupUnits) : 1;
  static constexpr int kShortRun = 2, kLongRun = 4;
  static constexpr int run_groups() {
    if (kStageGroups < kShortRun) return kShortRun;
    int groups = min_of(kStageGroups, kLongRun);
    while (kStageGroups % groups != 0 || groups * kGroupTurns % 2 != 0 ||
           groups * kGroupTurns % kParts != 0) {
      if (++groups > kStageGroups) return kStageGroups;
    }
    return groups;
  }
  static constexpr int kRunGroups = run_groups();
  static constexpr int kRunStages = ceil_div(kRunGroups, kStageGroups);

  // kLeft groups one after the other, all but the last sure of another; at least as many as bring
  // place and part back to those of the beginning, if there are so many. Returns whether there are
  // more.
  template <int kPlace, int kPart, int kLeft, bool kOwes = false>
  static __device__ bool groups(const TokenScales& token_scales, Consumer& c, const Group& last,
                                Products& sums, Accumulators& acc) {
    constexpr bool kOwed = kLeft > 1;
    const Group group(c, kPart * kTurnSteps);
    const bool more =
        turns<kPlace, kPart, 0, kOwes, kOwed>(token_scales, c, group, last, sums, acc);
    constexpr int kNextPlace = (kPlace + kGroupTurns) % 2,
                  kNextPart = (kPart + kGroupTurns) % kParts;
    if constexpr (kOwed || kNextPlace != 0 || kNextPart != 0) {
      constexpr int kNextLeft = max_of(kLeft - 1, 1);
      return more &&
             groups<kNextPlace, kNextPart, kNextLeft, kOwed>(token_scales, c, group, sums, acc);
    } else {
      return more;
    }
  }

  // The same without groups, turn after turn.
  template <int kPlace, int kPart>
  static __device__ bool cycle(Consumer& c, Accumulators& acc) {
    multiply<kPlace, kPart * kTurnSteps, (kPart + 1) * kTurnSteps>(c, acc, true);
    ptx::wgmma_wait<1>();
    release<kPlace, true>(c);
    const bool more = prepare<kPlace, kPart>(c);
    constexpr int kNextPart = (kPart + 1) % kParts;
    if constexpr (kPlace == 1 && kNextPart == 0) {
      return more;
    } else {
      return more && cycle<1 - kPlace, kNextPart>(c, acc);
    }
  }

  static __device__ void consume(const Params& p, const u8* shared, int warp, int lane, int tile_m,
                                 int begin, int end, const Ring& ring, Accumulators& acc) {
    Consumer c(p, shared, warp, lane, ring, begin, end);
    c.template fill<0, 0, kTurnSteps>();
    const TokenScales token_scales(p, tile_m);
    if constexpr (kPartial) {
      Products sums;
#pragma unroll
      for (auto& half : sums) ptx::keep_sums(half);
      const Group none(c, 0);
      bool more = true;
      if constexpr (kHalves == 2) {
        static_assert(kRunGroups * kGroupTurns % 2 == 0, "slot mainloop: runs begin at one place");
        while (more && c.stages >= kRunStages) {
          more = groups<0, 0, kRunGroups>(token_scales, c, none, sums, acc);
        }
      }
      // Runs within a stage leave nothing over.
      if constexpr (kHalves == 1 || kRunStages > 1) {
        while (more) more = groups<0, 0, 1>(token_scales, c, none, sums, acc);
      }
    } else {
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block) ptx::keep_sums(acc[block]);
      while (cycle<0, 0>(c, acc)) {
      }
      ptx::wgmma_wait<0>();
      hold<0>(c);
      hold<1>(c);
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block) ptx::keep_sums(acc[block]);
    }
    if constexpr (Stages::kClustered) Stages::leave(c.done, lane);
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) Weights::spoil(c.marks[block], acc[block]);
  }
};

}  // namespace humming
