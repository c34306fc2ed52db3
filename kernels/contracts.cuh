// The contract of each slot of a kernel, as C++20 concepts. The composed source asserts them ahead of
// the kernel, so that a component that does not fit says so in one sentence.
#pragma once

#include <humming/params.cuh>
#include <humming/types.cuh>

namespace humming {

// Moves 16-byte pieces from global to shared memory in stages: issue starts a piece, land completes
// what issue could not do alone, commit closes a stage, wait<n> leaves at most n stages under way.
// kAsynchronous: whether issue is all that a copy takes, so that it may run ahead of others.
template <class T>
concept Mover = requires(typename T::template Fetch<1> fetch, u32 shared, const u8* global) {
  fetch.issue(0, shared, global, true);
  fetch.skip(0);
  fetch.land();
  T::commit();
  T::template wait<0>();
  { T::kAsynchronous };
};

// Fills a stage of shared memory from one thread: boxes of mapped matrices, which a
// barrier object counts.
template <class T>
concept Producer = requires(u32 shared, const TensorMap& map, u32 barrier) {
  T::prepare(map);
  T::box(shared, map, 0, 0, barrier);
};

// Multiplies a fragment of 16 rows x 256 bits of k with one of 256 bits of k x 8 or 16 tokens, two
// registers for each 8, into sums, says where they lie, and turns a sum into a float.
template <class T>
concept WarpMma = requires(typename T::Sums& d) {
  T::value(d, 0);
} && (requires(typename T::Sums& d, const u32 (&a)[4], u32 b) {
  requires T::kTokens == 8;
  T::fma(d, a, b, b);
} || requires(typename T::Sums& d, const u32 (&a)[4], u32 b) {
  requires T::kTokens == 16;
  T::fma(d, a, b, b, b, b);
});

// Multiplies the fragments of four warps with 256 bits of k x 8 or more tokens in shared memory, into
// sums in registers that arrive later.
template <class T>
concept WarpgroupMma = requires(typename T::Sum (&d)[1][4], const u32 (&a)[4], u64 b, bool adds) {
  T::fma(d, a, b, adds);
};

template <class T>
concept MmaAtom = requires {
  typename T::Operand;
  typename T::Sum;
  T::Places::half(0);
  T::Places::column(0);
  T::Places::token(0, 0);
} && (WarpMma<T> || WarpgroupMma<T>);

// Reads the B registers of one or two MMA steps from the activations in shared memory: their values
// over kFactor, exactly.
template <class T>
concept Tokens = requires(u32 (&b)[2], u32 address, int lane) {
  T::kBits;
  T::kFactor;
  { T::lane_offset(lane, 0) };
  T::load(b, address);
};

// Turns a lane's packed words, as many as codes have bits, into registers of A: the codes' values
// over kFactor, exactly. Operands of 16 bits also subtract and scale, rounded.
template <class T>
concept Dequant = requires(const u32 (&words)[T::kBits], typename T::Offset row, u32 zero) {
  typename T::Operand;
  T::kFactor;
  { T::offset() };
  { T::offset(zero) };
  { T::template value<0>(words, row) };
};

// Turns two stored scales into floats, and into both halves of a register of operands.
template <class T>
concept Scales = requires(typename T::Storage code, float (&values)[2]) {
  typename T::Scale;
  T::floats(code, code, values);
  T::template operands<F16>(code, code);
};

// Names the output tile and the range of K of a CTA.
template <class T>
concept TileScheduler = requires(int stages) {
  T::tile(stages).n;
  T::tile(stages).m;
  T::tile(stages).linear;
  T::tile(stages).stage_begin;
  T::tile(stages).stage_end;
};

// Sums a CTA's tile over its range of K, and waits for the grids ahead before it reads what they may
// have written: all but the weights; kWaitsForGrids says so, as those which do not would read
// activations too early. kReservedBytes at the end of shared memory are its own.
template <class T>
concept Mainloop = requires {
  typename T::Params;
  typename T::Accumulators;
  T::kThreads;
  T::kSharedBytes;
  T::kReservedBytes;
  requires T::kWaitsForGrids;
  T::sync();
};

// Combines what the warps and CTAs hold of a tile, applies scales and bias, and stores it.
template <class T>
concept Epilogue = requires { T::kSharedBytes; };

// Turns eight floats into codes side by side, saturating, halves to the even code.
template <class T>
concept Encode = requires(const float (&v)[8], u32 (&words)[T::kBits / 4]) {
  T::template encode<false, true>(v, words);
  { T::kHasNan };
  { T::kMax };
  { T::kMaxExponent };
};

}  // namespace humming
