// Slot mainloop: D[rows x tokens] += W[rows x K] X[tokens x K]^T with warp-level MMA, of 8 or of 16
// tokens an instruction.
// Needs: the components of its Config; ldmatrix.
//
// Data flow, per pipeline stage of kBlockK values of K:
//   packed codes, scales, zeros, activations --mover--> shared memory (kStages deep)
//   codes --16-byte reads--> registers --dequant--> A fragments   (a lane reads only its own words)
//   activations --ldmatrix, or narrow reads and dequant--> B fragments
//   A x B --mma--> partial sums; per group of K scaled into the accumulators in float
//
// Warps divide the tile along N, kWarpsN, and each stage along K, kWarpsK:
//
//              kBlockK of one stage
//            +----------+----------+
//   kBlockN  | w0 (k 0) | w2 (k 1) |    each warp: kRowBlocks x 16 rows, kWarpBricks x 64 of K,
//            | w1 (k 0) | w3 (k 1) |    all kBlockM tokens
//            +----------+----------+
//
// Whatever lies outside N, M or K is filled with zeros on the way to shared memory, so it adds
// exactly zero; no step needs a bounds check.
#pragma once

#include <humming/mainloop/token_scales.cuh>
#include <humming/mainloop/weights.cuh>
#include <humming/params.cuh>
#include <humming/ptx/bits.cuh>
#include <humming/ptx/global.cuh>
#include <humming/ptx/grid.cuh>
#include <humming/ptx/shared.cuh>
#include <humming/types.cuh>

namespace humming {

template <class C>
struct MmaSyncMainloop {
  using Params = GemmParams;
  using Weights = StagedWeights<C>;
  static constexpr int kThreads = 32 * C::kWarpsN * C::kWarpsK;
  static constexpr int kRowBlocks = C::kBlockN / 16 / C::kWarpsN;
  // A token tile is what one instruction takes; its B registers are those of tiles of 8 tokens.
  static constexpr int kTileTokens = C::Mma::kTokens;
  static constexpr int kTokenTiles = C::kBlockM / kTileTokens;
  using Places = typename C::Mma::Places;
  static constexpr int kBricks = Weights::kBricks;
  static constexpr int kWarpBricks = kBricks / C::kWarpsK;
  static constexpr int kWords = Weights::kWords;
  static constexpr int kBrickBytes = Weights::kBrickBytes;
  static constexpr bool kPerGroup = C::kScaleSite == ScaleSite::kAccumulator;
  static constexpr bool kScalesInLoop = Weights::kScalesInLoop;
  static constexpr bool kWaitsForGrids = true;
  // Sums of a group, or of a stage, that are added to the accumulators in float.
  static constexpr bool kPartial = C::kPartialK != 0;
  static constexpr int kStepK = Weights::kStepK;
  static constexpr int kBrickSteps = Weights::kBrickSteps;
  static constexpr bool kHasZero = Weights::kHasZero;

  static_assert(C::kBlockN % (16 * C::kWarpsN) == 0 && C::kBlockM % kTileTokens == 0,
                "slot mainloop: tiles are multiples of 16 rows a warp and of an MMA's tokens");
  static_assert(C::kBlockK % (64 * C::kWarpsK) == 0,
                "slot mainloop: a stage holds whole bricks for each warp along K");
  static_assert(C::kStages >= 2, "slot mainloop: a pipeline has at least two stages");

  // Steps of K that share all scales in a warp, and whose sums are added together.
  static constexpr int kGroups = Weights::kGroups;
  static constexpr int kWarpSteps = kBrickSteps * kWarpBricks;
  static constexpr int kTogetherK = C::kPartialK == 0 || C::kScaleStepK == 0
                                        ? C::kPartialK + C::kScaleStepK
                                        : min_of(C::kPartialK, C::kScaleStepK);
  static constexpr int kGroupSteps =
      kTogetherK == 0 ? kWarpSteps : min_of(kTogetherK / kStepK, kWarpSteps);
  static_assert(kWarpSteps % kGroupSteps == 0,
                "slot mainloop: groups divide a warp's part of a stage");
  // Steps that one ldmatrix serves.
  static constexpr int kPairSteps = min_of(2, kBrickSteps);
  // Without a second chain, one tile a warp would wait for each mma to finish; groups of two steps
  // are chains of their own.
  static constexpr int kChains =
      kRowBlocks * kTokenTiles == 1 && kPairSteps == 2 && kGroupSteps % 2 == 0 && kGroupSteps > 2
          ? 2
          : 1;

  // A warp with many tiles has enough to overlap in one brick; unrolling all would only take longer
  // to compile.
  static constexpr int kUnrolledBricks = kRowBlocks * kTokenTiles >= 16 ? 1 : kWarpBricks;

  // Bytes of a stage, in the order in which they lie in shared memory.
  static constexpr int kXBits = C::Tokens::kBits;
  static constexpr int kXBytes = C::kBlockK * kXBits / 8;  // of a token
  static constexpr int kXPitch = kXBytes + 16;  // the 16 bytes spread ldmatrix over the banks
  static constexpr int kScaleBytes = Weights::kScaleBytes;
  static constexpr int kCodesSize = Weights::kCodesSize;
  static constexpr int kScalesSize = Weights::kScalesSize;
  static constexpr int kZeroBytes = Weights::kZeroBytes;
  static constexpr int kStageSize = Weights::kSize + C::kBlockM * kXPitch;
  static constexpr int kSharedBytes = C::kStages * kStageSize;
  static constexpr int kReservedBytes = 0;

  // (row block, token tile, i) -> row 16 * block + g + 8 * Places::half(i),
  //                               token kTileTokens * tile + Places::token(lane, column(i))
  static constexpr int kTileSums = kTileTokens / 2;
  using Sum = typename IfElse<kPartial, float, typename C::Mma::Sum>::Type;
  using Accumulators = Sum[kRowBlocks][kTokenTiles][kTileSums];

  // A matrix that is copied in runs: kRuns rows (or row blocks), kRun pieces of 16 bytes from each.
  // Copy i of a thread is piece `piece(i)` of run `run(i)`. Where threads and runs divide one another
  // these are a first place plus constants, and addressing costs an addition a copy.
  template <int kRuns, int kRun>
  struct Runs {
    static constexpr int kTotal = kRuns * kRun;
    static constexpr int kCount = ceil_div(kTotal, kThreads);
    static constexpr bool kWideThreads = kThreads % kRun == 0;
    static constexpr bool kWideRuns = kRun % kThreads == 0;

    static __device__ int run(int i) {
      const int thread = threadIdx.x;
      if (kWideThreads) return thread / kRun + i * (kThreads / kRun);
      if (kWideRuns) return i * kThreads / kRun;
      return (thread + i * kThreads) / kRun;
    }
    static __device__ int piece(int i) {
      const int thread = threadIdx.x;
      if (kWideThreads) return thread % kRun;
      if (kWideRuns) return thread + i * kThreads % kRun;
      return (thread + i * kThreads) % kRun;
    }
    // Bytes from copy 0 to copy i, where runs lie `pitch` bytes apart.
    static __device__ i64 step(int i, i64 pitch) {
      if (kWideThreads) return i * (kThreads / kRun) * pitch;
      return (run(i) - run(0)) * pitch + (piece(i) - piece(0)) * 16;
    }
    static __device__ bool mine(int i) {
      return kTotal % kThreads == 0 || int(threadIdx.x) + i * kThreads < kTotal;
    }
  };
  using CodeRuns = Runs<C::kBlockN / 16, kBricks * kBrickBytes / 16>;
  using ScaleRuns = Runs<kScalesInLoop ? C::kBlockN / 16 : 0, kGroups * kScaleBytes>;
  using ZeroRuns = Runs<kHasZero ? C::kBlockN / 16 : 0, kGroups * kZeroBytes>;
  using XRuns = Runs<C::kBlockM, kXBytes / 16>;
  static constexpr int kPieces =
      CodeRuns::kCount + ScaleRuns::kCount + ZeroRuns::kCount + XRuns::kCount;
  using Fetch = typename C::Mover::template Fetch<kPieces>;

  // Copies stage after stage of this CTA's tile; pieces outside the matrices become zeros.
  struct Loader {
    u32 shared;          // address of stage 0
    int blocks, tokens;  // row blocks and tokens of the matrices from this tile's first one on
    int bricks, groups, k;
    i64 x_pitch;
    // Where copy 0 of this thread reads in stage 0.
    const u8* codes;
    const u8* scales;
    const u8* zeros;
    const u8* x;

    __device__ Loader(const GemmParams& p, u32 address, int tile_n, int tile_m)
        : shared(address),
          blocks((p.n + 15) / 16 - tile_n * (C::kBlockN / 16)),
          tokens(p.m - tile_m * C::kBlockM),
          bricks(Weights::bricks_of(p.k)),
          groups(Weights::groups_of(p.k)),
          k(p.k),
          x_pitch(p.x_stride) {
      const i64 block = tile_n * (C::kBlockN / 16), token = tile_m * C::kBlockM;
      codes = static_cast<const u8*>(p.codes) + (block + CodeRuns::run(0)) * bricks * kBrickBytes +
              CodeRuns::piece(0) * 16;
      scales = static_cast<const u8*>(p.scales) +
               (block + ScaleRuns::run(0)) * groups * 16 * kScaleBytes + ScaleRuns::piece(0) * 16;
      zeros = static_cast<const u8*>(p.zeros) +
              (block + ZeroRuns::run(0)) * groups * 16 * kZeroBytes + ZeroRuns::piece(0) * 16;
      x = static_cast<const u8*>(p.x) + (token + XRuns::run(0)) * x_pitch + XRuns::piece(0) * 16;
    }

    // Starts the copies of a stage: of all, or of weights or activations alone.
    template <bool kOfWeights = true, bool kOfTokens = true>
    __device__ void issue(Fetch& fetch, int stage, int slot) const {
      const u32 base = shared + slot * kStageSize;
      const u32 lane_base = base + threadIdx.x * 16;
      int at = 0;
      const int brick = stage * kBricks;
      const u8* from = codes + i64(brick) * kBrickBytes;
#pragma unroll
      for (int i = 0; i < CodeRuns::kCount; ++i, ++at) {
        const bool exists =
            CodeRuns::run(i) < blocks && brick + CodeRuns::piece(i) / (kBrickBytes / 16) < bricks;
        copy(fetch, at, kOfWeights && CodeRuns::mine(i), lane_base + i * kThreads * 16,
             from + CodeRuns::step(i, i64(bricks) * kBrickBytes), exists);
      }
      const int group = C::kGroupK == 0 ? 0 : stage * C::kBlockK / max_of(C::kGroupK, 1);
      from = scales + i64(group) * 16 * kScaleBytes;
#pragma unroll
      for (int i = 0; i < ScaleRuns::kCount; ++i, ++at) {
        const bool exists =
            ScaleRuns::run(i) < blocks && group + ScaleRuns::piece(i) / kScaleBytes < groups;
        copy(fetch, at, kOfWeights && ScaleRuns::mine(i),
             lane_base + kCodesSize + i * kThreads * 16,
             from + ScaleRuns::step(i, i64(groups) * 16 * kScaleBytes), exists);
      }
      from = zeros + i64(group) * 16 * kZeroBytes;
#pragma unroll
      for (int i = 0; i < ZeroRuns::kCount; ++i, ++at) {
        const bool exists =
            ZeroRuns::run(i) < blocks && group + ZeroRuns::piece(i) / kZeroBytes < groups;
        copy(fetch, at, kOfWeights && ZeroRuns::mine(i),
             lane_base + kCodesSize + kScalesSize + i * kThreads * 16,
             from + ZeroRuns::step(i, i64(groups) * 16 * kZeroBytes), exists);
      }
      const u32 x_base = base + Weights::kSize;
      from = x + i64(stage) * kXBytes;
#pragma unroll
      for (int i = 0; i < XRuns::kCount; ++i, ++at) {
        const int token = XRuns::run(i), piece = XRuns::piece(i);
        const bool exists = token < tokens && stage * C::kBlockK + 128 / kXBits * piece < k;
        copy(fetch, at, kOfTokens && XRuns::mine(i), x_base + token * kXPitch + 16 * piece,
             from + XRuns::step(i, x_pitch), exists);
      }
    }

    // Piece `at` of a stage. A piece that does not exist is not read, wherever its address points.
    static __device__ void copy(Fetch& fetch, int at, bool mine, u32 target, const u8* from,
                                bool exists) {
      if (mine) {
        fetch.issue(at, target, from, exists);
      } else {
        fetch.skip(at);
      }
    }
  };

  using Partials = typename C::Mma::Sums[kChains][kRowBlocks][kTokenTiles];
  using Rows = typename Weights::Rows[kRowBlocks];
  using Marks = typename Weights::Marks[kRowBlocks];

  // What a warp needs of one stage.
  struct Stage {
    const u8* codes;  // of this warp's first row block and first brick
    typename Weights::StoredScales scales;
    u32 x;  // address of what this lane reads of token tile 0, first k
    int lane;
    StoredTokenScales<C> token_scales;
    int step;  // the stage's first one of K

    __device__ Stage(const GemmParams& p, int tile_m) : token_scales(p, tile_m) {}
  };

  // Steps since a group of K began, known when compiling where groups end within a brick.
  static __device__ constexpr int phase(int brick, int step) {
    return (kGroupSteps <= kBrickSteps ? step : kBrickSteps * brick + step) % kGroupSteps;
  }

  // Multiplies one brick's steps from kStep on, as many as one ldmatrix serves, for all rows and
  // tokens of the warp.
  template <int kStep>
  static __device__ void step_pair(const Stage& stage, int brick, int first_step,
                                   const u32 (&words)[kRowBlocks][kWords], Accumulators& acc,
                                   Partials& partial, Rows& rows) {
    u32 a[kPairSteps][kRowBlocks][4];
#pragma unroll
    for (int half = 0; half < kPairSteps; ++half) {
      const int step = first_step + kBrickSteps * brick + kStep + half;
      const int group = Weights::StoredScales::group_of(step);
      const bool opens = phase(brick, kStep + half) == 0;
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block) {
        if (opens) rows[block].load(stage.scales, block, group, stage.lane);
        if (half == 0) {
          Weights::template fragment<kStep>(words[block], rows[block], a[0][block]);
        } else {
          Weights::template fragment<kStep + kPairSteps - 1>(words[block], rows[block],
                                                             a[kPairSteps - 1][block]);
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      u32 b[kTileTokens / 8][2 * kPairSteps];
#pragma unroll
      for (int part = 0; part < kTileTokens / 8; ++part) {
        C::Tokens::load(b[part], stage.x + (tile * kTileTokens + part * 8) * kXPitch +
                                     (64 * brick + kStepK * kStep) * kXBits / 8);
        if constexpr (C::kScaleSite == ScaleSite::kOperand && C::kTokenGroupK != 0) {
          scale_tokens(stage, kTileTokens * tile + 8 * part,
                       first_step + kBrickSteps * brick + kStep, b[part]);
        }
      }
#pragma unroll
      for (int half = 0; half < kPairSteps; ++half) {
        const int chain = kChains == 2 ? half : 0;
        const int step = kBrickSteps * brick + kStep + half;
#pragma unroll
        for (int block = 0; block < kRowBlocks; ++block) {
          if constexpr (kPartial) {
            auto& sums = partial[chain][block][tile];
            if (phase(brick, kStep + half) < kChains) {
#pragma unroll
              for (auto& sum : sums) sum = 0;
            }
            multiply(sums, a[half][block], b, half);
            // With groups of one step a sum is complete after every step.
            if (kGroupSteps == 1) flush_tile(stage, first_step, step, block, tile, acc, partial);
          } else {
            multiply(acc[block][tile], a[half][block], b, half);
          }
        }
      }
    }
    constexpr int kLast = kStep + kPairSteps - 1;
    if (kPartial && kGroupSteps > 1 && phase(brick, kLast) == kGroupSteps - 1) {
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block) {
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; ++tile) {
          flush_tile(stage, first_step, kBrickSteps * brick + kLast, block, tile, acc, partial);
        }
      }
    }
  }

  // Multiplies the B registers of eight tokens and of steps from `step` on with the tokens' scales.
  static __device__ void scale_tokens(const Stage& stage, int first, int step,
                                      u32 (&b)[2 * kPairSteps]) {
    using Operand = typename C::Mma::Operand;
    const int token = first + stage.lane / 4;
    const auto scale = stage.token_scales.at(token, stage.step + step);
    const auto next = stage.token_scales.at(token, stage.step + step + kPairSteps - 1);
    const u32 both = C::Tokens::factors(C::TokenScales::template operands<Operand>(scale, next));
#pragma unroll
    for (int i = 0; i < 2 * kPairSteps; ++i) {
      b[i] = C::Tokens::scale(b[i], i < 2 ? ptx::lower_twice(both) : ptx::upper_twice(both));
    }
  }

  // One instruction: the B registers of a step, of each 8 tokens of a tile.
  static __device__ void multiply(typename C::Mma::Sums& sums, const u32 (&a)[4],
                                  const u32 (&b)[kTileTokens / 8][2 * kPairSteps], int half) {
    if constexpr (kTileTokens == 8) {
      C::Mma::fma(sums, a, b[0][2 * half], b[0][2 * half + 1]);
    } else {
      C::Mma::fma(sums, a, b[0][2 * half], b[0][2 * half + 1], b[1][2 * half], b[1][2 * half + 1]);
    }
  }

  // Adds the finished sums of a group, times its scales, to the accumulators.
  static __device__ void flush_tile(const Stage& stage, int first_step, int step, int block,
                                    int tile, Accumulators& acc, const Partials& partial) {
    float factors[2] = {1.f, 1.f}, tokens[kTileTokens / 8][2];
    if constexpr (kPerGroup && C::kGroupK != 0) {
      const int group = Weights::StoredScales::group_of(first_step + step);
      stage.scales.floats(block, group, stage.lane, factors);
    }
    if constexpr (kPerGroup && C::kTokenGroupK != 0) {
#pragma unroll
      for (int pair = 0; pair < kTileTokens / 8; ++pair) {
        const int first = kTileTokens * tile + Places::token(stage.lane, 2 * pair);
        const int second = kTileTokens * tile + Places::token(stage.lane, 2 * pair + 1);
        stage.token_scales.floats(first, second, stage.step + first_step + step, tokens[pair]);
      }
    }
#pragma unroll
    for (int i = 0; i < kTileSums; ++i) {
      float sum = C::Mma::value(partial[0][block][tile], i);
      if (kChains == 2) sum += C::Mma::value(partial[kChains - 1][block][tile], i);
      if constexpr (kPerGroup && C::kTokenGroupK != 0) {
        sum *= tokens[Places::column(i) / 2][Places::column(i) % 2];
      }
      acc[block][tile][i] += sum * factors[Places::half(i)];
    }
  }

  static __device__ void compute(const Stage& stage, int first_step, Accumulators& acc,
                                 Marks& marks) {
    Partials partial;
    Rows rows;
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) rows[block].clear();
#pragma unroll(kUnrolledBricks)
    for (int brick = 0; brick < kWarpBricks; ++brick) {
      u32 words[kRowBlocks][kWords];
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block) {
        Weights::read_words(stage.codes + (block * kBricks + brick) * kBrickBytes, stage.lane,
                            words[block]);
        Weights::note(words[block], marks[block]);
      }
      step_pair<0>(stage, brick, first_step, words, acc, partial, rows);
      if constexpr (kBrickSteps > 2) {
        step_pair<2>(stage, brick, first_step, words, acc, partial, rows);
      }
    }
  }

  // Threads that hold sums meet.
  static __device__ void sync() { __syncthreads(); }

  // Sums stages [begin, end) of the tile; returns whether this thread holds sums.
  static __device__ bool run(const GemmParams& p, u8* shared, int tile_n, int tile_m, int begin,
                             int end, Accumulators& acc) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_n = warp % C::kWarpsN, warp_k = warp / C::kWarpsN;
    const Loader loader(p, ptx::shared_address(shared), tile_n, tile_m);
    Fetch fetch;
    // Weights that land by themselves come while grids ahead are still running.
    constexpr bool kWeightsAhead = C::kDependentLaunch && C::Mover::kAsynchronous;
    if constexpr (kWeightsAhead) {
#pragma unroll
      for (int ahead = 0; ahead < C::kStages - 1; ++ahead) {
        if (begin + ahead < end) loader.template issue<true, false>(fetch, begin + ahead, ahead);
      }
    }
    if constexpr (C::kDependentLaunch) ptx::griddepcontrol_wait();
#pragma unroll
    for (int ahead = 0; ahead < C::kStages - 1; ++ahead) {
      if (begin + ahead < end) {
        loader.template issue<!kWeightsAhead, true>(fetch, begin + ahead, ahead);
        fetch.land();
      }
      C::Mover::commit();
    }
    const int first_step = warp_k * kWarpSteps;
    const u32 x_offset =
        Weights::kSize + C::Tokens::lane_offset(lane, kXPitch) + first_step * kStepK * kXBits / 8;
    Marks marks = {};
    int slot = 0;
    for (int at = begin; at < end; ++at) {
      C::Mover::template wait<C::kStages - 2>();
      __syncthreads();  // the stage is there for all, and all have left the one before
      const int next = at + C::kStages - 1;
      const int next_slot = slot == 0 ? C::kStages - 1 : slot - 1;
      if (next < end) loader.issue(fetch, next, next_slot);
      const u8* base = shared + slot * kStageSize;
      Stage stage(p, tile_m);
      stage.codes = base + (warp_n * kRowBlocks * kBricks + warp_k * kWarpBricks) * kBrickBytes;
      stage.scales.scales = base + kCodesSize + warp_n * kRowBlocks * kGroups * 16 * kScaleBytes;
      stage.scales.zeros =
          base + kCodesSize + kScalesSize + warp_n * kRowBlocks * kGroups * 16 * kZeroBytes;
      stage.x = ptx::shared_address(base) + x_offset;
      stage.lane = lane;
      stage.step = at * (C::kBlockK / kStepK);
      compute(stage, first_step, acc, marks);
      if (next < end) fetch.land();
      C::Mover::commit();
      slot = slot == C::kStages - 1 ? 0 : slot + 1;
    }
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) Weights::spoil(marks[block], acc[block]);
    C::Mover::template wait<0>();
    __syncthreads();  // shared memory is free for the epilogue
    return true;
  }
};

}  // namespace humming
