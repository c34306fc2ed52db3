// Slot dequant: floats of at most 8 bits to half or bfloat16, exactly, with subnormals, -0, infinity
// and NaN. Needs: bf16_fma for bfloat16.
//
// Exponent and mantissa put where the wide type has them mean the value times 2^(narrow bias - wide
// bias): its subnormals are the wide type's, so nothing has to be normalized. e4m3 in half:
//   code    s eeee mmm            half   s 0eeee mmm0000000, 2^(7 - 15) times the value
// The power of two is put back by a product here, or, where kFold, by whoever applies scales. Scales
// that are applied to operands take 2^kScaleUp of it, where that is not negative.
//
// Sign and magnitude have places of their own, so each piece of a code moves twice. One product
// does both where the copies do not touch; e2m1 at the bottom of a half, for bfloat16:
//   seem * (2^12 + 2^6)           seem ..se em.. ....  -> mask ->  s... ...e em.. ....
// Where all that a code becomes lies in the upper byte, two registers are placed at once, in bytes;
// e2m1 in half:
//   .... seem .... seem           s... eem. s... eem.  ->  s... eem. .... ....  of either
//
// Where all exponent (and mantissa) bits set means infinity or NaN, adding the last exponent bit
// (mantissa bit) carries into the bit above them only for these codes; that bit, repeated over the
// rest of the wide exponent, makes them the wide type's infinity or NaN. A mainloop that can spoil
// the sums of a row instead takes `Unchecked`, which reads NaN as the next number and notes it.
#pragma once

#include <humming/dequant/codes.cuh>
#include <humming/dequant/pairs.cuh>

namespace humming {

template <class Order, class Code, class Type, bool kFoldWanted, int kScaleUp = -1,
          bool kChecked = true>
struct DequantFloat16 : PairOperand<Type> {
  static_assert(Order::kOperandBits == 16 && Order::kCodeBits == Code::kBits,
                "slot dequant: DequantFloat16 reads codes packed for 16-bit operands");
  static constexpr int kBits = Code::kBits;
  static constexpr int kUp = Pairs<Type>::kBias - Code::kBias;  // power of two to be put back
  // Not wholly in bfloat16, whose bias is float's: products would fall below the least float.
  static constexpr bool kFold = kScaleUp >= 0 || (kFoldWanted && IsSame<Type, F16>::value);
  static constexpr float kFactor = kFold ? float_power_of_two(kUp - max_of(kScaleUp, 0)) : 1.f;
  using Offset = NoOffset;

  static constexpr int kMagnitudeAt = Pairs<Type>::kMantissaBits - Code::kMantissaBits;
  static constexpr int kTop = kMagnitudeAt + kBits - 1;  // the bit above the magnitude
  static constexpr u32 kSign = both_halves(0x8000);
  // How many more exponent bits the wide type has, as a factor that repeats bit kTop over them.
  static constexpr u32 kFill = (1u << (15 - kTop)) - 1;
  static constexpr bool kSpecial = Code::kSpecials != Specials::kNone && kFill != 0;

  // Only codes of 8 bits with a single NaN have it noted in fewer instructions.
  static constexpr bool kNotes = !kChecked && kSpecial && Code::kSpecials == Specials::kFn;
  using Unchecked = DequantFloat16<Order, Code, Type, kFoldWanted, kScaleUp, false>;

  static __device__ Offset offset() { return {}; }
  static __device__ Offset offset(u32) { return {}; }

  static __device__ u32 factors(u32 scales) {
    return kScaleUp > 0 ? Pairs<Type>::multiply(scales, power_of_two<Type>(kScaleUp)) : scales;
  }

  // Two values of operand register kRegister.
  template <int kRegister>
  static __device__ u32 value(const u32 (&words)[kBits], Offset) {
    u32 placed = place<kRegister>(words, 0);
    if constexpr (kSpecial && !kNotes) {
      constexpr int kLast =
          kMagnitudeAt + (Code::kSpecials == Specials::kIeee ? Code::kMantissaBits : 0);
      const u32 carried = placed + both_halves(1u << kLast);  // the sign lies above
      if constexpr (kFill == 1) {
        placed = ptx::and_xor(carried, both_halves(1u << kTop), placed);
      } else {
        placed += (carried & both_halves(1u << kTop)) * kFill;
      }
    }
    if constexpr (kUp == 0 || kFold) {
      return placed;
    } else {
      return Pairs<Type>::multiply(placed, power_of_two<Type>(kUp));
    }
  }

  // Adds to `marks`, of rows g and g + 8, whether words hold NaN: one added to the seven bits of a
  // magnitude sets the bit above only if all of them are set.
  static __device__ void note(const u32 (&words)[kBits], u32 (&marks)[2]) {
#pragma unroll
    for (int i = 0; i < kBits; ++i) {
      marks[kSharedWords ? 0 : i % 2] |= (words[i] & 0x7f7f7f7fu) + 0x01010101u;
    }
  }
  // Whether row g + 8 * half has been marked.
  static __device__ bool noted(const u32 (&marks)[2], int half) {
    return kSharedWords ? marks[0] & (0x00800080u << 8 * half) : marks[half] & 0x80808080u;
  }

 private:
  // Registers of both rows lie in each word, side by side, or take words in turn.
  static constexpr bool kSharedWords = Order::kWord[0][0] == Order::kWord[0][1];

  // Whether another register has its codes a byte away.
  template <int kRegister>
  static constexpr bool has_neighbour() {
    constexpr int kAt = Order::kBit[0][kRegister];
    for (unsigned r = 0; r < sizeof(Order::kBit[0]) / sizeof(int); ++r) {
      if (Order::kWord[0][r] == Order::kWord[0][kRegister] && Order::kBit[0][r] == (kAt ^ 8)) {
        return kAt % 8 + kBits <= 8;
      }
    }
    return false;
  }

  // Sign and magnitude of a register in the places that they have in the wide type, plane by plane.
  template <int kRegister, int kPlane = 0, int kCodeBit = 0>
  static __device__ u32 place(const u32 (&words)[kBits], u32 onto) {
    constexpr int kWidth = Order::kPlaneBits[kPlane], kAt = Order::kBit[kPlane][kRegister];
    constexpr bool kLastPlane = kPlane + 1 == Order::kPlanes;
    constexpr int kLow = kLastPlane ? kWidth - 1 : kWidth;  // bits of the magnitude
    constexpr int kLowAt = kMagnitudeAt + kCodeBit;
    constexpr u32 kLowMask = both_halves(((1u << kLow) - 1) << kLowAt);
    constexpr int kUpLow = kLowAt - kAt, kUpSign = 15 - (kAt + kWidth - 1);
    const u32 word = words[Order::kWord[kPlane][kRegister]];
    if constexpr (!kLastPlane) {
      return place<kRegister, kPlane + 1, kCodeBit + kWidth>(
          words, ptx::and_xor(moved<kUpLow>(word), kLowMask, onto));
    } else if constexpr (kCodeBit == 0 && kLowAt >= 8 && has_neighbour<kRegister>()) {
      constexpr int kNarrowAt = kAt % 8;
      const u32 low = moved<kLowAt - 8 - kNarrowAt>(word) & (kLowMask >> 8 | kLowMask);
      const u32 bytes = (moved<8 - kWidth - kNarrowAt>(word) & 0x80808080u) | low;
      return ptx::permute(bytes, 0, kAt < 8 ? 0x2404 : 0x3414);
    } else if constexpr (kLow == 0) {
      return ptx::and_xor(moved<kUpSign>(word), kSign, onto);
    } else if constexpr (kUpLow > 0 && kUpSign >= kUpLow + kWidth) {
      const u32 field = word & both_halves(((1u << kWidth) - 1) << kAt);
      return ptx::and_xor(field * ((1u << kUpLow) | (1u << kUpSign)), kLowMask | kSign, onto);
    } else {
      const u32 magnitude = ptx::and_xor(moved<kUpLow>(word), kLowMask, onto);
      return ptx::and_xor(moved<kUpSign>(word), kSign, magnitude);
    }
  }
};

}  // namespace humming
