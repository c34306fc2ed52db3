// Asynchronous matrix multiply-accumulate of a warpgroup (PTX ISA 9.7.15 "wgmma").
// Needs: wgmma.
//
// A is 64 x 32 bytes of k in registers, 16 rows a warp; B is 32 bytes of k x kTokens in shared
// memory, k contiguous in rows of 128 bytes under the 128-byte swizzle; D is in registers.
// With g = lane >> 2, t = lane & 3, E elements in a register, rows of the warp:
//   A: (lane, register r, element e) -> (row g + 8 * (r & 1), k E t + e + 4 E (r >> 1))
//   D: (lane, tile, i) -> (row g + 8 * (i >> 1), token 8 * tile + 2t + (i & 1))
#pragma once

#include <humming/types.cuh>

namespace humming::ptx {

// Orders what was written to registers of A and D before the instructions that follow.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending committed groups are still under way.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Makes the compiler have fragments in registers here: written before a fence that follows.
__device__ inline void keep(u32 (&a)[4]) {
#pragma unroll
  for (u32& word : a) asm volatile("" : "+r"(word)::"memory");
}

// Makes the assembler leave fragments in their registers up to here, where a product under way may
// still read them: to ptxas 13.0 they are free once that is issued. `never` must be negative never, and
// not be known to be so; the store is one that is not made.
__device__ inline void hold(const u32 (&a)[4], int never, u32 shared) {
  asm volatile(
      "{\n"
      ".reg .pred made;\n"
      "setp.lt.s32 made, %4, 0;\n"
      "@made st.shared.v4.b32 [%5], {%0, %1, %2, %3};\n"
      "}" ::"r"(a[0]),
      "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(never), "r"(shared)
      : "memory");
}

// Keeps the compiler from moving accesses to sums across this place: it does not know that an
// instruction under way still writes them.
template <class Number, int kTiles>
__device__ inline void keep_sums(Number (&d)[kTiles][4]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (IsSame<Number, float>::value) {
        asm volatile("" : "+f"(d[tile][i])::"memory");
      } else {
        asm volatile("" : "+r"(d[tile][i])::"memory");
      }
    }
  }
}

// The descriptor of B at an address in shared memory, a multiple of 1024 for its first row: layout
// 1 is the 128-byte swizzle, whose pattern of 8 rows repeats after 1024 bytes (9.7.15.5.1.2).
__device__ inline u64 wgmma_descriptor(u32 address) {
  constexpr u64 kLayout = u64(1) << 62 | u64(1024 >> 4) << 32 | u64(1) << 16;
  return kLayout | (address >> 4 & 0x3fff);
}

// What a descriptor grows by where its address grows by `bytes`.
__device__ constexpr u64 wgmma_descriptor_step(int bytes) { return u64(bytes >> 4); }

// The text and the operands of an instruction grow with the tokens, so both are put together from
// pieces: 4 sums of a lane for each 8 tokens.
#define HUMMING_D4 "%0,%1,%2,%3"
#define HUMMING_D8 HUMMING_D4 ",%4,%5,%6,%7"
#define HUMMING_D16 HUMMING_D8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define HUMMING_D32 HUMMING_D16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define HUMMING_D48 HUMMING_D32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define HUMMING_D64 HUMMING_D48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define HUMMING_D80 HUMMING_D64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define HUMMING_D96 HUMMING_D80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define HUMMING_D112 \
  HUMMING_D96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define HUMMING_D128 \
  HUMMING_D112       \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define HUMMING_S4(c, t) c(d[t][0]), c(d[t][1]), c(d[t][2]), c(d[t][3])
#define HUMMING_S8(c, t) HUMMING_S4(c, t), HUMMING_S4(c, t + 1)
#define HUMMING_S16(c, t) HUMMING_S8(c, t), HUMMING_S8(c, t + 2)
#define HUMMING_S32(c, t) HUMMING_S16(c, t), HUMMING_S16(c, t + 4)
#define HUMMING_S48(c, t) HUMMING_S32(c, t), HUMMING_S16(c, t + 8)
#define HUMMING_S64(c, t) HUMMING_S32(c, t), HUMMING_S32(c, t + 8)
#define HUMMING_S96(c, t) HUMMING_S64(c, t), HUMMING_S32(c, t + 16)
#define HUMMING_S128(c, t) HUMMING_S64(c, t), HUMMING_S64(c, t + 16)

// `sums` of a lane; operand numbers of A, of the descriptor and of `adds` follow those of D.
#define HUMMING_WGMMA(tokens, sums, r0, r1, r2, r3, r4, r5, k_types, constraint, tail)          \
  if constexpr (kTiles * 8 == tokens) {                                                         \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #r5                                 \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #tokens k_types " {" HUMMING_D##sums \
                 "}, {%" #r0 ",%" #r1 ",%" #r2 ",%" #r3 "}, %" #r4 ", adds" tail ";\n}"         \
                 : HUMMING_S##sums(constraint, 0)                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(adds)));         \
  }
#define HUMMING_WGMMA_ALL(k_types, constraint, tail)                          \
  HUMMING_WGMMA(8, 4, 4, 5, 6, 7, 8, 9, k_types, constraint, tail)            \
  HUMMING_WGMMA(16, 8, 8, 9, 10, 11, 12, 13, k_types, constraint, tail)       \
  HUMMING_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, k_types, constraint, tail)    \
  HUMMING_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, k_types, constraint, tail)    \
  HUMMING_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, k_types, constraint, tail)    \
  HUMMING_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, k_types, constraint, tail)   \
  HUMMING_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, k_types, constraint, tail) \
  HUMMING_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, k_types, constraint, tail)

// D = A B + (adds ? D : 0), of 8 kTiles tokens: 8, 16, 32, 64, 96, 128, 192 or 256.
template <class A, class B, int kTiles>
__device__ inline void wgmma(float (&d)[kTiles][4], const u32 (&a)[4], u64 b, bool adds) {
  if constexpr (IsSame<A, F16>::value) {
    HUMMING_WGMMA_ALL("k16.f32.f16.f16", "+f", ", 1, 1, 0")
  } else if constexpr (IsSame<A, Bf16>::value) {
    HUMMING_WGMMA_ALL("k16.f32.bf16.bf16", "+f", ", 1, 1, 0")
  } else if constexpr (IsSame<A, E4m3>::value && IsSame<B, E4m3>::value) {
    HUMMING_WGMMA_ALL("k32.f32.e4m3.e4m3", "+f", ", 1, 1")
  } else if constexpr (IsSame<A, E4m3>::value) {
    HUMMING_WGMMA_ALL("k32.f32.e4m3.e5m2", "+f", ", 1, 1")
  } else if constexpr (IsSame<B, E4m3>::value) {
    HUMMING_WGMMA_ALL("k32.f32.e5m2.e4m3", "+f", ", 1, 1")
  } else {
    HUMMING_WGMMA_ALL("k32.f32.e5m2.e5m2", "+f", ", 1, 1")
  }
}

template <class A, class B, int kTiles>
__device__ inline void wgmma(int (&d)[kTiles][4], const u32 (&a)[4], u64 b, bool adds) {
  if constexpr (IsSame<A, S8>::value && IsSame<B, S8>::value) {
    HUMMING_WGMMA_ALL("k32.s32.s8.s8", "+r", "")
  } else if constexpr (IsSame<A, S8>::value) {
    HUMMING_WGMMA_ALL("k32.s32.s8.u8", "+r", "")
  } else if constexpr (IsSame<B, S8>::value) {
    HUMMING_WGMMA_ALL("k32.s32.u8.s8", "+r", "")
  } else {
    HUMMING_WGMMA_ALL("k32.s32.u8.u8", "+r", "")
  }
}

#undef HUMMING_D4
#undef HUMMING_D8
#undef HUMMING_D16
#undef HUMMING_D32
#undef HUMMING_D48
#undef HUMMING_D64
#undef HUMMING_D80
#undef HUMMING_D96
#undef HUMMING_D112
#undef HUMMING_D128
#undef HUMMING_S4
#undef HUMMING_S8
#undef HUMMING_S16
#undef HUMMING_S32
#undef HUMMING_S48
#undef HUMMING_S64
#undef HUMMING_S96
#undef HUMMING_S128
#undef HUMMING_WGMMA
#undef HUMMING_WGMMA_ALL

}  // namespace humming::ptx
