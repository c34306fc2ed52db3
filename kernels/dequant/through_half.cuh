// Slot dequant: integers and sign-magnitude codes to 8-bit floats, by way of half, exactly.
// Needs: cvt_fp8.
//
// The codes of the even and of the odd bytes of a register become halves as in integer_16.cuh (or
// magnitude_16.cuh), and two halves become two 8-bit floats in one instruction.
#pragma once

#include <humming/dequant/codes.cuh>
#include <humming/dequant/integer_16.cuh>
#include <humming/dequant/magnitude_16.cuh>
#include <humming/ptx/cvt_fp8.cuh>

namespace humming {

template <class Order, class Code, class Type, template <class, class, class> class DequantHalf>
struct DequantThroughHalf {
  using Operand = Type;
  using Half = DequantHalf<TokenOrder<Code::kBits, 16, 16>, Code, F16>;
  static constexpr int kBits = Code::kBits;
  static_assert(Order::kOperandBits == 8 && Order::kCodeBits == kBits,
                "slot dequant: DequantThroughHalf reads codes packed for operands in bytes");
  static constexpr float kFactor = 1.f;
  using Offset = typename Half::Offset;

  static __device__ Offset offset() { return Half::offset(); }
  static __device__ Offset offset(u32 zero) { return Half::offset(zero); }

  // Four values of operand register kRegister, of a row with this offset.
  template <int kRegister>
  static __device__ u32 value(const u32 (&words)[kBits], const Offset& row) {
    constexpr int kAt = Codes<Order>::template raw_at<kRegister, 0>();
    const u32 code = Codes<Order>::template raw<kRegister, 0>(words);
    const u32 even = ptx::f16x2_to_fp8x2<Type>(half(moved<-kAt>(code), row));
    const u32 odd = ptx::f16x2_to_fp8x2<Type>(half(moved<-kAt - 8>(code), row));
    return ptx::permute(even, odd, 0x5140);
  }

 private:
  static __device__ u32 half(u32 codes, const Offset& row) {
    u32 words[kBits];
    words[0] = codes;
    return Half::template value<0>(words, row);
  }
};

}  // namespace humming
