// The quantizing kernel: x[m, k] -> codes[m, k] and scales, from the components of a Config.
//
//   x --16 bytes a load--> registers --> largest magnitude (shuffles, shared memory) --> scale
//                              |                                                           |
//                              +-----------------> encode <------------- its reciprocal ---+
//                                                     +--4 or 8 bytes a store--> codes
//
// A row is cut into pieces of K; kItemThreads threads take a piece of one row, in steps of 8 values a
// thread, and a CTA takes several rows. A scale belongs to
//   kItem: all of a piece (a whole row, or a group of any size);
//   kLanes: 8 * kGroupLanes values, so that a piece has many; the lanes of one group are neighbours;
//   kStatic: everything, and is known beforehand.
// kVectors says that pieces are a multiple of 8 values, so that stores never have less than 8 codes.
// Every row is read once if kResident, else twice, the second time from L2: that is for rows that
// registers do not hold.
#pragma once

#include <humming/contracts.cuh>
#include <humming/ptx/grid.cuh>
#include <humming/quantize/codes.cuh>
#include <humming/quantize/extremes.cuh>
#include <humming/quantize/params.cuh>
#include <humming/quantize/scale.cuh>
#include <humming/quantize/source.cuh>

namespace humming {

enum class ScaleOf { kItem, kLanes, kStatic };

// A scale, and how values become codes under it.
template <class C>
struct Quantizer {
  using Encoder = typename C::Encoder;
  using Scale = typename C::Scale;
  using Stored = typename Scale::Storage;
  static constexpr int kWords = Encoder::kBits / 4;
  static constexpr bool kStatic = C::kScaleOf == ScaleOf::kStatic;

  Stored stored;
  float factor;  // of values, before they are encoded
  float zero = 0.f;
  u32 mask = ~0u;  // of the codes: 0 under a scale that is NaN

  static __device__ Quantizer known(const QuantizeParams& p) {
    Quantizer q;
    q.stored = *static_cast<const Stored*>(p.scale);
    q.factor = ptx::rcp_rn(Scale::value(q.stored));
    if constexpr (!C::kSymmetric) q.zero = float(*static_cast<const signed char*>(p.zero));
    return q;
  }

  // second: the second scale, and the reciprocal of its product with the largest code.
  static __device__ Quantizer of(const Extremes<C::kSymmetric>& found, const float (&second)[2]) {
    Quantizer q;
    const bool finite = found.magnitude < 0x7f800000u;
    if constexpr (!C::kSymmetric) {
      // Not their difference divided, for that may be beyond all numbers.
      constexpr float kSteps = Encoder::kMax - Encoder::kMin;
      const float size =
          ptx::sub_rn(ptx::div_rn(found.high, kSteps), ptx::div_rn(found.low, kSteps));
      q.stored = Scale::store(size);
    } else {
      const float magnitude = ptx::bits_to_f32(found.magnitude);
      q.stored = Scale::template of<Encoder::kMaxExponent>(magnitude, Encoder::kMax, second[1]);
    }
    if (found.magnitude == 0) q.stored = Scale::one();
    if constexpr (C::kSecondScale) {
      const float both = ptx::mul_rn(Scale::number(q.stored), second[0]);
      q.factor = ptx::rcp_rn(ptx::max_f32(both, ptx::bits_to_f32(0x00800000u)));
    } else {
      q.factor = Scale::reciprocal(q.stored);
    }
    if constexpr (!C::kSymmetric) {
      const float zero = Encoder::kMin - Encoder::round(ptx::mul_rn(found.low, q.factor));
      q.zero = ptx::min_f32(ptx::max_f32(zero, Encoder::kMin), Encoder::kMax);
      if (found.magnitude == 0 || !finite) q.zero = 0.f;
    }
    if (!finite) q.stored = Scale::nan(), q.mask = 0;
    return q;
  }

  template <class Chunk>
  __device__ void encode(const Chunk& chunk, u32 (&words)[kWords]) const {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[i] = ptx::mul_rn(chunk[i], factor);
      // Elsewhere the scale tells of NaN.
      if constexpr (kStatic && !Encoder::kHasNan) v[i] = v[i] != v[i] ? 0.f : v[i];
    }
    if constexpr (C::kSymmetric) {
      Encoder::template encode<!kStatic && Scale::kBounds, kStatic>(v, words);
    } else {
      Encoder::template encode<!kStatic && Scale::kBounds>(v, zero, words);
    }
    if constexpr (!kStatic) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[w] &= mask;
    }
  }

  // at: which of all scales it is.
  __device__ void store(const QuantizeParams& p, i64 at) const {
    static_cast<Stored*>(p.scales)[at] = stored;
    if constexpr (!C::kSymmetric) static_cast<signed char*>(p.zeros)[at] = (signed char)(int(zero));
  }
};

template <class C>
struct QuantizeKernel {
  using Input = typename C::Input;
  using Load = Source<Input, C::kFuse>;
  using Chunk = typename Load::Chunk;
  static constexpr bool kPairs =
      C::kPackedMax && C::kFuse == Fuse::kNone && sizeof(typename Input::Storage) == 2;
  // Whole: of all values that share a scale; Found: of those of one thread.
  using Whole = Extremes<C::kSymmetric>;
  using Found = typename IfElse<kPairs, PackedExtremes<Input, C::kSymmetric>, Whole>::Type;
  static constexpr int kBits = C::Encoder::kBits, kWords = kBits / 4;
  static constexpr int kStep = 8 * C::kItemThreads;
  static constexpr int kWarps = C::kItemThreads / 32;
  static constexpr bool kPerLanes = C::kScaleOf == ScaleOf::kLanes;
  static_assert(Encode<typename C::Encoder>, "slot encode: does not turn 8 floats into codes");
  static_assert(C::kThreads % C::kItemThreads == 0 && C::kItemThreads % 32 == 0,
                "warps share no row");

  static __device__ void run(const QuantizeParams& p) {
    if constexpr (C::kDependentLaunch) ptx::griddepcontrol_wait();
    const int thread = threadIdx.x % C::kItemThreads;
    const int row = blockIdx.x * (C::kThreads / C::kItemThreads) + threadIdx.x / C::kItemThreads;
    const int begin = blockIdx.y * p.piece, first = begin + 8 * thread;
    const int end = blockIdx.y + 1 == gridDim.y ? p.k_padded : begin + p.piece;
    const int readable = row < p.m ? min_of(p.k, end) : 0;
    const int writable = row < p.m ? end : 0;
    const auto* x = static_cast<const typename Input::Storage*>(p.x) + i64(row) * p.x_stride;
    float second[2] = {1.f, 1.f};
    if constexpr (C::kSecondScale) {
      if (p.second_scale != nullptr) second[0] = *p.second_scale;
      second[1] = ptx::rcp_rn(ptx::mul_rn(C::Encoder::kMax, second[0]));
    }
    u8* const codes = static_cast<u8*>(p.codes) + i64(row) * p.codes_stride + bytes_of(first);
    const bool vector = C::kVectors && p.aligned != 0 && p.k % 8 == 0;

    if constexpr (C::kResident) {
      Chunk chunk[C::kChunks];
      if (vector) {
#pragma unroll
        for (int c = 0; c < C::kChunks; ++c) {
          chunk[c] = read<C::kVectors>(p, x, first + c * kStep, readable);
        }
      } else {
#pragma unroll
        for (int c = 0; c < C::kChunks; ++c) {
          chunk[c] = read<false>(p, x, first + c * kStep, readable);
        }
      }
      if constexpr (C::kDependentLaunch) ptx::griddepcontrol_launch_dependents();
      Quantizer<C> q[C::kChunks];
      if constexpr (C::kScaleOf == ScaleOf::kStatic) q[0] = Quantizer<C>::known(p);
      if constexpr (C::kScaleOf == ScaleOf::kItem) {
        Found found = Found::none();
#pragma unroll
        for (int c = 0; c < C::kChunks; ++c) found.take(chunk[c]);
        q[0] = whole_item(p, found.whole(), row, second);
      }
#pragma unroll
      for (int c = 0; c < C::kChunks; ++c) {
        if constexpr (kPerLanes) {
          Found found = Found::none();
          found.take(chunk[c]);
          Whole whole = found.whole();
          whole.template combine<C::kGroupLanes>();
          q[c] = Quantizer<C>::of(whole, second);
        }
        write(p, q[kPerLanes ? c : 0], chunk[c], codes + bytes_of(c * kStep), first + c * kStep,
              writable);
      }
      if constexpr (kPerLanes) store_scales(p, q, row, first, readable);
    } else {
      static_assert(C::kScaleOf == ScaleOf::kItem, "other scales need no second look");
      Found found = Found::none();
      for (int k = first; k < readable; k += kStep) {
        found.take(vector ? read<C::kVectors>(p, x, k, readable) : read<false>(p, x, k, readable));
      }
      const Quantizer<C> q = whole_item(p, found.whole(), row, second);
      for (int k = first; k < writable; k += kStep) {
        write(p, q, vector ? read<C::kVectors>(p, x, k, readable) : read<false>(p, x, k, readable),
              codes + bytes_of(k - first), k, writable);
      }
    }
  }

 private:
  template <bool kVector>
  static __device__ Chunk read(const QuantizeParams& p, const typename Input::Storage* x, int k,
                               int readable) {
    return Load::template load<kVector>(x + k, p.k, readable - k);
  }

  // The scale of all that the threads of an item found; the first of them stores it.
  static __device__ Quantizer<C> whole_item(const QuantizeParams& p, Whole found, int row,
                                            const float (&second)[2]) {
    found.template combine<32>();
    if constexpr (kWarps > 1) {
      __shared__ Whole of_warp[C::kThreads / 32];
      if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = found;
      __syncthreads();
      const Whole* mine = of_warp + threadIdx.x / C::kItemThreads * kWarps;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) found.take(mine[warp]);
    }
    const Quantizer<C> q = Quantizer<C>::of(found, second);
    if (row < p.m && threadIdx.x % C::kItemThreads == 0) {
      q.store(p, i64(row) * p.groups + blockIdx.y);
    }
    return q;
  }

  // Those of the groups that begin with a lane. All at once, for each branch costs instructions.
  static __device__ void store_scales(const QuantizeParams& p, const Quantizer<C> (&q)[C::kChunks],
                                      int row, int first, int readable) {
    constexpr int kGroup = 8 * C::kGroupLanes;
    static_assert(kStep % kGroup == 0, "a step has whole groups");
    if (threadIdx.x % C::kGroupLanes != 0) return;
    const i64 at = i64(row) * p.groups + int(u32(first) / kGroup);
#pragma unroll
    for (int c = 0; c < C::kChunks; ++c) {
      if (first + c * kStep < readable) q[c].store(p, at + c * (kStep / kGroup));
    }
  }

  static constexpr __device__ int bytes_of(int codes) { return int(u32(codes) * kBits / 8); }

  // The codes from k on, to where they lie; those from `writable` on are not written.
  static __device__ void write(const QuantizeParams& p, const Quantizer<C>& q, const Chunk& chunk,
                               u8* to, int k, int writable) {
    u32 words[kWords];
    q.encode(chunk, words);
    // Elsewhere the code of 0 is 0.
    if constexpr (!C::kSymmetric || C::kScaleOf == ScaleOf::kStatic) {
      if (k + 8 > p.k) keep_codes<kBits>(p.k - k, words);
    }
    struct alignas(kBits) Packed {
      u32 word[kWords];
    };
    if (k + 8 <= writable && (C::kVectors || k % 8 == 0)) {
      Packed packed;
#pragma unroll
      for (int w = 0; w < kWords; ++w) packed.word[w] = words[w];
      *reinterpret_cast<Packed*>(to) = packed;
    } else if constexpr (!C::kVectors) {
#pragma unroll
      for (int b = 0; b < kBits; ++b) {
        if (8 * b < (writable - k) * kBits) to[b] = u8(words[b / 4] >> (b % 4 * 8));
      }
    }
  }
};

}  // namespace humming
