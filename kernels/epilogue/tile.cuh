// Slot epilogue: combines what warps (and CTAs) hold of a tile, applies scales and bias, stores.
// Needs: nothing.
//
// Data flow, for kEpilogueM tokens at a time:
//   accumulators --> shared memory [kWarpsK][token][row] --> sum over kWarpsK, in order, in float
//   or, where the MMA sums integers over all of K, in integers
//   --> token zero point, channel scale, token scale, second scales, bias --> output dtype
//   --> out [token][row], rows contiguous
// With split-K the sums go to the workspace instead; the CTA that finishes a tile last adds all
// parts in the order of K, so the result is the same in every run. Where the parts are a cluster they
// stay in shared memory, and each CTA adds and stores a share of the tile, in the same order.
#pragma once

#include <humming/dequant/codes.cuh>
#include <humming/params.cuh>
#include <humming/ptx/cluster.cuh>
#include <humming/ptx/global.cuh>
#include <humming/ptx/shared.cuh>
#include <humming/scheduler/raster.cuh>
#include <humming/types.cuh>

namespace humming {

// Which scales beyond the weight's own an output row has.
enum class SecondScale { kNone, kTensor, kChannel };

// Which scales activations have that do not change with K: none, one, or one a token.
enum class TokenScaling { kNone, kTensor, kToken };

template <class C, class Mainloop>
struct TileEpilogue {
  using Sum = typename Mainloop::Sum;
  static constexpr int kThreads = Mainloop::kThreads;
  static constexpr int kTokens = C::kEpilogueM;
  static constexpr int kPasses = C::kBlockM / kTokens;
  // Rows of floats 4 apart modulo 16: where a lane's tokens are neighbours, a warp's stores of its
  // accumulators meet no bank twice.
  static constexpr int kPitch = C::kBlockN + 4;
  static constexpr int kVector = 4;
  static constexpr int kUnitsPerToken = C::kBlockN / kVector;
  // Units of a thread that are under way together, where it has as many.
  static constexpr int kUnrolled = min_of(4, ceil_div(kTokens* kUnitsPerToken, kThreads));
  static constexpr int kSharedBytes = 4 * C::kWarpsK * kTokens * kPitch;
  static constexpr int kTileTokens = Mainloop::kTileTokens;
  using Places = typename Mainloop::Places;
  static_assert(C::kBlockM % kTokens == 0 && kTokens % kTileTokens == 0,
                "slot epilogue: a pass takes whole token tiles");
  static constexpr bool kClustered = C::kClusterK > 1;
  static_assert(!kClustered || (kPasses == 1 && C::kClusterK == C::kSplitK),
                "slot epilogue: clusters along K add whole tiles of all parts");

  static __device__ void run(const GemmParams& p, u8* shared, const TileIndex& tile,
                             const typename Mainloop::Accumulators& acc) {
    Sum* staged = reinterpret_cast<Sum*>(shared);
    const int token0 = tile.m * C::kBlockM, row0 = tile.n * C::kBlockN;
    Sum* part = nullptr;
    if constexpr (kClustered) return add_cluster(p, staged, token0, row0, acc);
    if constexpr (C::kSplitK > 1) {
      const i64 tiles = i64(gridDim.x) * gridDim.y;
      part = static_cast<Sum*>(p.partials) +
             (blockIdx.z * tiles + tile.linear) * (C::kBlockM * C::kBlockN);
    }
    const bool whole = is_whole(p, row0);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (token0 + pass * kTokens >= p.m) break;
      if (pass > 0) Mainloop::sync();
      stage(staged, pass, acc);
      Mainloop::sync();
      if (whole) {
        leave<true>(p, staged, part, token0, row0, pass);
      } else {
        leave<false>(p, staged, part, token0, row0, pass);
      }
    }
    if constexpr (C::kSplitK > 1) combine(p, shared, tile);
  }

 private:
  // (lane, block, tile, i) -> row 16 * block + g + 8 * Places::half(i),
  //                           token kTileTokens * tile + Places::token(lane, column(i))
  static __device__ void stage(Sum* staged, int pass, const typename Mainloop::Accumulators& acc) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_n = warp % C::kWarpsN, warp_k = warp / C::kWarpsN;
    Sum* to = staged + warp_k * kTokens * kPitch + warp_n * Mainloop::kRowBlocks * 16 + lane / 4 +
              Places::token(lane, 0) * kPitch;
#pragma unroll
    for (int tile = 0; tile < Mainloop::kTokenTiles; ++tile) {
      const int inside = tile - pass * (kTokens / kTileTokens);
      if (inside < 0 || inside >= kTokens / kTileTokens) continue;
#pragma unroll
      for (int block = 0; block < Mainloop::kRowBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < kTileTokens / 2; ++i) {
          const int token = inside * kTileTokens + Places::token(0, Places::column(i));
          to[token * kPitch + block * 16 + 8 * Places::half(i)] = acc[block][tile][i];
        }
      }
    }
  }

  // A token's sum with a row, less what the token's zero point adds to it: times the sum of the
  // row's weights, in integers where the sums are.
  static __device__ float without_zero(const GemmParams& p, int token, int row, Sum sum) {
    if constexpr (C::kTokenZero) {
      const int at = C::kTokenScaling == TokenScaling::kToken ? token : 0;
      const int zero = static_cast<const signed char*>(p.x_zeros)[at];
      sum -= Sum(p.row_sums[row] * (1.f / kLeftOut)) * zero;
    }
    return float(sum);
  }

  // Adds what the CTAs of the cluster have staged: each a share of the tile, of all parts.
  static __device__ void add_cluster(const GemmParams& p, Sum* staged, int token0, int row0,
                                     const typename Mainloop::Accumulators& acc) {
    stage(staged, 0, acc);
    const int units = min_of(kTokens, p.m - token0) * kUnitsPerToken;
    if constexpr (C::kWarpsK > 1) {
      // Reading far away is slow: first each CTA adds up its own warps.
      Mainloop::sync();
      for (int unit = threadIdx.x; unit < units; unit += kThreads) {
        const int token = unit / kUnitsPerToken, row = unit % kUnitsPerToken * kVector;
        Sum sum[kVector];
        add_warps(staged, token, row, sum);
        *reinterpret_cast<Vector<Sum>*>(staged + token * kPitch + row) =
            Vector<Sum>{{sum[0], sum[1], sum[2], sum[3]}};
      }
    }
    ptx::cluster_sync();
    const bool whole = is_whole(p, row0);
    const u32 address = ptx::shared_address(staged);
    // The cluster's CTAs are numbered along N first.
    const int neighbour = blockIdx.x % C::kClusterN;
    for (int unit = threadIdx.x + blockIdx.z * kThreads; unit < units;
         unit += kThreads * C::kClusterK) {
      const int token = unit / kUnitsPerToken, row = unit % kUnitsPerToken * kVector;
      Sum part[C::kClusterK][kVector];
#pragma unroll
      for (int rank = 0; rank < C::kClusterK; ++rank) {
        const u32 from = address + (token * kPitch + row) * sizeof(Sum);
        ptx::load_cluster_x4(part[rank],
                             ptx::cluster_address(from, neighbour + C::kClusterN * rank));
      }
      finish_parts(p, token0 + token, row0 + row, part, whole);
    }
    // Shared memory stays until all have read it.
    ptx::cluster_sync();
  }

  // Adds what the warps along K have staged, in order.
  static __device__ void add_warps(const Sum* staged, int token, int row, Sum (&sum)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum[i] = 0;
#pragma unroll
    for (int k = 0; k < C::kWarpsK; ++k) {
      const Sum* from = staged + (k * kTokens + token) * kPitch + row;
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[i] += from[i];
    }
  }

  // Whether all rows of the tile exist and may be stored kVector at a time.
  static __device__ bool is_whole(const GemmParams& p, int row0) {
    using Out = typename C::Out::Storage;
    const u64 places = reinterpret_cast<u64>(p.out) | u64(p.out_stride) * sizeof(Out);
    return row0 + C::kBlockN <= p.n && places % sizeof(Vector<Out>) == 0;
  }

  // Adds what the warps along K have staged, and stores it: as results, or for those who combine.
  template <bool kWhole>
  static __device__ void leave(const GemmParams& p, const Sum* staged, Sum* part, int token0,
                               int row0, int pass) {
    const int tokens = min_of(kTokens, p.m - token0 - pass * kTokens);
#pragma unroll(kWhole ? kUnrolled : 1)
    for (int unit = threadIdx.x; unit < tokens * kUnitsPerToken; unit += kThreads) {
      const int in_pass = unit / kUnitsPerToken, row = unit % kUnitsPerToken * kVector;
      const int token = pass * kTokens + in_pass;
      Sum sum[kVector];
      add_warps(staged, in_pass, row, sum);
      if constexpr (C::kSplitK > 1) {
        *reinterpret_cast<Vector<Sum>*>(part + token * C::kBlockN + row) =
            Vector<Sum>{{sum[0], sum[1], sum[2], sum[3]}};
      } else {
        finish<kWhole>(p, token0 + token, row0 + row, sum);
      }
    }
  }

  // Rows that are stored as one.
  template <class Value>
  struct alignas(sizeof(Value) * kVector) Vector {
    Value value[kVector];
  };

  // Applies what is per row and per token, and stores four rows of one token.
  template <bool kWhole>
  static __device__ void finish(const GemmParams& p, int token, int row,
                                const Sum (&sum)[kVector]) {
    using Out = typename C::Out::Storage;
    Out* to = static_cast<Out*>(p.out) + i64(token) * p.out_stride + row;
    const Factors factors = factors_of(p, token);
    if constexpr (kWhole) {
      Vector<Out> packed;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        packed.value[i] = C::Out::from_float(finished(p, token, row + i, factors, sum[i]));
      }
      *reinterpret_cast<Vector<Out>*>(to) = packed;
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (row + i >= p.n) break;
        to[i] = C::Out::from_float(finished(p, token, row + i, factors, sum[i]));
      }
    }
  }

  // Adds the parts of K in order, and stores four rows of one token.
  static __device__ void finish_parts(const GemmParams& p, int token, int row,
                                      const Sum (&part)[C::kSplitK][kVector], bool whole) {
    Sum sum[kVector] = {0, 0, 0, 0};
#pragma unroll
    for (int split = 0; split < C::kSplitK; ++split) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[i] += part[split][i];
    }
    if (whole) {
      finish<true>(p, token, row, sum);
    } else {
      finish<false>(p, token, row, sum);
    }
  }

  // What all sums of a token are multiplied with, one after the other: their product may be beyond
  // float's range where the results are not. Large scales come first, small ones last.
  struct Factors {
    float first, last;
  };

  // One sum with all scales and the bias.
  static __device__ float finished(const GemmParams& p, int token, int row, const Factors& factors,
                                   Sum sum) {
    float value = without_zero(p, token, row, sum);
    if constexpr (!Mainloop::kScalesInLoop) {
      value *= C::Scale::to_float(static_cast<const typename C::Scale::Storage*>(p.scales)[row]);
    }
    if constexpr (kTokenFactor || kLeftOut != 1.f) value *= factors.first;
    if constexpr (kTokenFactor && kLeftOut != 1.f) value *= factors.last;
    const float* second = static_cast<const float*>(p.second_scale);
    if constexpr (C::kSecondScale == SecondScale::kTensor) value *= second[0];
    if constexpr (C::kSecondScale == SecondScale::kChannel) value *= second[row];
    const auto* bias = static_cast<const typename C::Out::Storage*>(p.bias);
    if (bias != nullptr) value += C::Out::to_float(bias[row]);
    return value;
  }

  // What dequantization and scales left out of operands, and whether tokens have scales.
  static constexpr float kLeftOut =
      C::Dequant::kFactor * C::Tokens::kFactor * float_power_of_two(C::kScaleLeftOut);
  static constexpr bool kTokenFactor = C::kTokenScaling != TokenScaling::kNone || C::kTokenSecond;

  static __device__ Factors factors_of(const GemmParams& p, int token) {
    if constexpr (!kTokenFactor) return {kLeftOut, 1.f};
    float scale = 1.f;
    if constexpr (C::kTokenScaling != TokenScaling::kNone) {
      const int at = C::kTokenScaling == TokenScaling::kToken ? token : 0;
      const auto* scales = static_cast<const typename C::TokenScale::Storage*>(p.x_scales);
      scale = C::TokenScale::to_float(scales[at]);
    }
    if (C::kTokenSecond && p.x_second != nullptr) scale *= *p.x_second;
    if constexpr (kLeftOut == 1.f) return {scale, 1.f};
    return scale > 1.f ? Factors{scale, kLeftOut} : Factors{kLeftOut, scale};
  }

  // The last CTA of a tile adds the parts of all and leaves the counter at zero.
  static __device__ void combine(const GemmParams& p, u8* shared, const TileIndex& tile) {
    u32* order = reinterpret_cast<u32*>(shared);
    __threadfence();
    Mainloop::sync();
    if (threadIdx.x == 0) {
      *order = ptx::count_wrapping(p.counters + tile.linear, C::kSplitK - 1);
    }
    Mainloop::sync();
    if (*order != C::kSplitK - 1) return;
    __threadfence();
    const int token0 = tile.m * C::kBlockM, row0 = tile.n * C::kBlockN;
    const bool whole = is_whole(p, row0);
    const i64 tiles = i64(gridDim.x) * gridDim.y;
    const Sum* parts =
        static_cast<const Sum*>(p.partials) + i64(tile.linear) * (C::kBlockM * C::kBlockN);
    for (int unit = threadIdx.x; unit < C::kBlockM * kUnitsPerToken; unit += kThreads) {
      const int token = unit / kUnitsPerToken, row = unit % kUnitsPerToken * kVector;
      if (token0 + token >= p.m) break;
      Sum part[C::kSplitK][kVector];
#pragma unroll
      for (int split = 0; split < C::kSplitK; ++split) {
        ptx::load_l2_x4(part[split], parts + split * tiles * (C::kBlockM * C::kBlockN) +
                                         token * C::kBlockN + row);
      }
      finish_parts(p, token0 + token, row0 + row, part, whole);
    }
  }
};

}  // namespace humming
