"""Number formats and roundings, as array functions that give the bits that PTX prescribes.

Formats of up to 16 bits are decoded by tables into float64, in which each of their values and of
float32's is exact. Rounding to a format happens once, from a float64 value or from the exact sum
that a float64 value and its error stand for.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from .groups import Array

_F64_MANTISSA = 52


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A binary floating-point format.

    Attributes:
        name: PTX name.
        exponent_bits, mantissa_bits, bias: its fields; the sign is in front of them.
        specials: "ieee" (infinities and NaNs), "fn" (one NaN, all ones) or "none".
        signed: whether there is a sign.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: str = "ieee"
    signed: bool = True

    @property
    def bits(self) -> int:
        """Width."""
        return self.exponent_bits + self.mantissa_bits + int(self.signed)

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def max_finite(self) -> float:
        """Largest finite number."""
        top = (1 << self.exponent_bits) - 1 - (1 if self.specials == "ieee" else 0)
        mantissa = (1 << self.mantissa_bits) - 1 - (1 if self.specials == "fn" else 0)
        fraction = 1 + mantissa / (1 << self.mantissa_bits)
        return float(np.ldexp(fraction, top - self.bias))

    @property
    def nan_bits(self) -> int:
        """The NaN that PTX instructions produce, without sign."""
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1


FORMATS = {
    f.name: f
    for f in (
        FloatFormat("f16", 5, 10, 15),
        FloatFormat("bf16", 8, 7, 127),
        FloatFormat("f32", 8, 23, 127),
        FloatFormat("f64", 11, 52, 1023),
        FloatFormat("tf32", 8, 10, 127),
        FloatFormat("e4m3", 4, 3, 7, "fn"),
        FloatFormat("e5m2", 5, 2, 15),
        FloatFormat("e3m2", 3, 2, 3, "none"),
        FloatFormat("e2m3", 2, 3, 1, "none"),
        FloatFormat("e2m1", 2, 1, 1, "none"),
        FloatFormat("ue4m3", 4, 3, 7, "fn", signed=False),
        FloatFormat("ue5m3", 5, 3, 15, "fn", signed=False),
    )
}
"""By PTX name; ue8m0, which has no mantissa, is handled apart."""


@cache
def decode_table(name: str) -> Array:
    """float64 value of every code of a format of at most 16 bits; of ue8m0 too."""
    if name == "ue8m0":
        codes = np.arange(256)
        return np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127))
    form = FORMATS[name]
    codes = np.arange(1 << form.bits)
    mantissa = codes & ((1 << form.mantissa_bits) - 1)
    exponent = (codes >> form.mantissa_bits) & ((1 << form.exponent_bits) - 1)
    fraction = mantissa / (1 << form.mantissa_bits)
    normal = np.ldexp(1 + fraction, exponent - form.bias)
    values = np.where(exponent == 0, np.ldexp(fraction, form.min_exponent), normal)
    top = (1 << form.exponent_bits) - 1
    if form.specials == "ieee":
        special = np.where(mantissa == 0, np.inf, np.nan)
        values = np.where(exponent == top, special, values)
    elif form.specials == "fn":
        ones = (exponent == top) & (mantissa == (1 << form.mantissa_bits) - 1)
        values = np.where(ones, np.nan, values)
    if form.signed:
        values = np.where(codes >> (form.bits - 1), -values, values)
    return values


@cache
def decode_table32(name: str) -> Array:
    """The same as float32, for formats whose values are all exact in it."""
    return decode_table(name).astype(np.float32)


def decode(codes: Array, name: str) -> Array:
    """float64 values of codes, unsigned integers of any width of at least the format's bits."""
    if name == "f32":
        return codes.view(np.float32).astype(np.float64)
    if name == "tf32":
        return (codes & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if name == "f64":
        return codes.view(np.float64)
    return decode_table(name).take(codes)


def round_odd(value: Array, error: Array) -> Array:
    """float64 `value + error` rounded to odd: a later rounding of it to less is then exact.

    An even value that is not exact is moved by one unit towards the exact one. The result of
    rounding it to 51 bits or fewer is that of rounding the exact sum (Boldo and Melquiond, 2008).
    """
    bits = value.view(np.int64)
    inexact = (error != 0) & np.isfinite(value) & ((bits & 1) == 0)
    if not inexact.any():
        return value
    away = (error > 0) == (value > 0)
    step = np.where(away, 1, -1)
    moved = (bits + step).view(np.float64)
    # From zero, there is no smaller magnitude: the neighbour has the sign of the error.
    moved = np.where(value == 0, np.copysign(5e-324, error), moved)
    return np.where(inexact, moved, value)


def exact_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """float64 sum and its rounding error (Knuth's two-sum)."""
    total = a + b
    virtual = total - a
    error = (a - (total - virtual)) + (b - virtual)
    return total, np.where(np.isfinite(total), error, 0.0)


def round_to(values: Array, name: str, mode: str = "rn") -> Array:
    """float64 values rounded to a format's grid, with its subnormals, without regard to its range.

    Args:
        values: float64.
        name: of the format.
        mode: rn, rz, rp, rm, or rna (to nearest, ties away from zero).
    """
    form = FORMATS[name]
    if name == "f64":
        return values
    _, exponent = np.frexp(values)
    quantum = np.maximum(exponent - 1, form.min_exponent) - form.mantissa_bits
    scaled = np.ldexp(values, -quantum)
    rounded = _ROUNDINGS[mode](scaled)
    result = np.ldexp(rounded, quantum)
    return np.where(np.isfinite(values), np.copysign(result, values), values)


def _away(x: Array) -> Array:
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


_ROUNDINGS: dict[str, Any] = {
    "rn": np.rint,
    "rz": np.trunc,
    "rp": np.ceil,
    "rm": np.floor,
    "rna": _away,
    "rni": np.rint,
    "rzi": np.trunc,
    "rpi": np.ceil,
    "rmi": np.floor,
}


def round_integral(values: Array, mode: str) -> Array:
    """Values rounded to integers, still floating-point: mode rni, rzi, rpi or rmi."""
    found: Array = _ROUNDINGS[mode](values)
    return found


def encode(
    values: Array, name: str, mode: str = "rn", *, saturate: bool = False, relu: bool = False
) -> Array:
    """Codes (uint64) of float64 values, rounded once to a format.

    Args:
        values: float64; the sign of a zero counts.
        name: of the format.
        mode: as for `round_to`.
        saturate: whether what is too large becomes the largest finite number. Formats without
            infinities always do that; NaN becomes NaN, or the largest number where there is none.
        relu: whether negative values and negative NaNs become zero.
    """
    form = FORMATS[name]
    rounded = round_to(values, name, mode)
    limit = form.max_finite
    over = np.abs(rounded) > limit
    if over.any():
        finite = saturate or form.specials != "ieee"
        clamp = np.copysign(limit, values)
        if not finite:
            # Directed roundings stop at the largest number where that is on their side.
            keeps = {
                "rz": np.ones(values.shape, np.bool_),
                "rp": values < 0,
                "rm": values > 0,
            }.get(mode, np.zeros(values.shape, np.bool_))
            clamp = np.where(keeps & np.isfinite(values), clamp, np.copysign(np.inf, values))
        rounded = np.where(over, clamp, rounded)
    if relu:
        rounded = np.where(rounded > 0, rounded, np.where(np.isnan(rounded), rounded, 0.0))
    return _bits_of(rounded, form)


def _bits_of(values: Array, form: FloatFormat) -> Array:
    """Codes of values that the format has."""
    raw = values.view(np.uint64) if values.flags.c_contiguous else values.copy().view(np.uint64)
    sign = raw >> np.uint64(63)
    exponent = ((raw >> np.uint64(52)) & np.uint64(0x7FF)).astype(np.int64) - 1023
    mantissa = (raw & np.uint64((1 << 52) - 1)) >> np.uint64(_F64_MANTISSA - form.mantissa_bits)
    normal = ((exponent + form.bias).astype(np.uint64) << np.uint64(form.mantissa_bits)) | mantissa
    small = np.ldexp(np.abs(values), form.mantissa_bits - form.min_exponent)
    small = np.where(np.isfinite(small) & (exponent < form.min_exponent), small, 0.0)
    codes = np.where(exponent < form.min_exponent, small.astype(np.uint64), normal)
    if form.specials == "ieee":
        infinity = np.uint64(((1 << form.exponent_bits) - 1) << form.mantissa_bits)
        codes = np.where(np.isinf(values), infinity, codes)
    nan = np.isnan(values)
    magnitude = form.nan_bits
    if form.specials == "none":
        sign = np.where(nan, np.uint64(0), sign)
    codes = np.where(nan, np.uint64(magnitude), codes)
    if form.signed:
        sign = np.where(nan, np.uint64(0), sign)
        codes = codes | (sign << np.uint64(form.bits - 1))
    return codes


def encode_ue8m0(values: Array, mode: str, *, saturate: bool = False) -> Array:
    """Codes (uint64) of ue8m0, powers of two: mode rz or rp; NaN and negative values are 255."""
    mantissa, exponent = np.frexp(values)
    power = exponent - 1 + ((mantissa > 0.5).astype(np.int64) if mode == "rp" else 0)
    codes = np.clip(power + 127, 0, 254 if saturate else 255)
    codes = np.where(values == 0, 0, codes)
    infinite = 254 if saturate else 255
    codes = np.where(np.isinf(values), infinite, codes)
    return np.where(np.isnan(values) | (values < 0), 255, codes).astype(np.uint64)


def canonical_f32(values: Array) -> Array:
    """float32 results with the one NaN that PTX arithmetic produces."""
    if np.isnan(values).any():
        nan = np.array(0x7FFFFFFF, np.uint32).view(np.float32)
        return np.where(np.isnan(values), nan, values)
    return values


def canonical_f64(values: Array) -> Array:
    """float64 results with the NaN that the device makes."""
    if np.isnan(values).any():
        nan = np.array(0xFFF8000000000000, np.uint64).view(np.float64)
        return np.where(np.isnan(values), nan, values)
    return values


def flush(values: Array) -> Array:
    """float32 values with subnormals replaced by zeros of their sign (`.ftz`)."""
    tiny = np.abs(values) < np.float32(2.0**-126)
    return np.where(tiny, np.copysign(np.float32(0), values), values)


def to_f32(value: Array, error: Array | None = None, mode: str = "rn") -> Array:
    """float32 of the exact sum of a float64 value and an error, rounded once."""
    if error is not None:
        if mode == "rn" and not _near_tie(value).any():
            return value.astype(np.float32)
        value = round_odd(value, error)
    if mode == "rn":
        return value.astype(np.float32)
    codes = encode(value, "f32", mode).astype(np.uint32)
    return codes.view(np.float32)


def _near_tie(value: Array) -> Array:
    """Where rounding float64 to float32 could hinge on bits that float64 has lost."""
    bits = value.view(np.uint64)
    tie = (bits & np.uint64(0x1FFFFFFF)) == 0x10000000
    return tie | (np.abs(value) < 2.0**-125)


def fma_f32(a: Array, b: Array, c: Array, mode: str = "rn") -> Array:
    """float32 a * b + c, rounded once.

    The product of two 24-bit significands is exact in float64. The sum is exact as a pair of two
    float64, and only where the first lies on a tie of float32 does the second decide.
    """
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    total = product + np.asarray(c, np.float64)
    if mode == "rn" and not _near_tie(total).any():
        return total.astype(np.float32)
    total, error = exact_sum(product, np.asarray(c, np.float64))
    if mode != "rn":
        return _directed(total, error, mode, product, np.asarray(c, np.float64))
    return to_f32(total, error)


def fma_f64(a: Any, b: Any, c: Any) -> Array:
    """float64 a * b + c with one rounding, element by element in exact arithmetic."""

    def single(x: float, y: float, z: float) -> float:
        plain = x * y + z
        if not all(map(np.isfinite, (x, y, z))):
            return plain
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        try:
            return math.copysign(float(exact), exact) if exact else plain
        except OverflowError:
            return float(np.copysign(np.inf, plain))

    found: Array = np.vectorize(single, otypes=[np.float64])(a, b, c)
    return found


def add_f32(a: Array, b: Array, mode: str) -> Array:
    """float32 a + b in a directed rounding."""
    left, right = np.asarray(a, np.float64), np.asarray(b, np.float64)
    total, error = exact_sum(left, right)
    return _directed(total, error, mode, left, right)


def _directed(total: Array, error: Array, mode: str, left: Array, right: Array) -> Array:
    result = to_f32(total, error, mode)
    # An exact zero from operands of unlike signs is negative only in rounding downwards.
    if mode == "rm":
        cancels = (total == 0) & (error == 0) & (np.signbit(left) != np.signbit(right))
        result = np.where(cancels, np.float32(-0.0), result)
    return result


def bf16_of_f32(values: Array) -> Array:
    """uint16 codes of float32 values, rounded to nearest even."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = np.isnan(values)
    if nan.any():
        rounded = np.where(nan, np.uint32(0x7FFF), rounded)
    return rounded.astype(np.uint16)


def f32_of_bf16(codes: Array) -> Array:
    """float32 values of uint16 codes."""
    return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f16_of_f32(values: Array) -> Array:
    """uint16 codes of float32 values, rounded to nearest even."""
    codes = values.astype(np.float16).view(np.uint16)
    nan = np.isnan(values)
    return np.where(nan, np.uint16(0x7FFF), codes) if nan.any() else codes


def f32_of_f16(codes: Array) -> Array:
    """float32 values of uint16 codes."""
    return decode_table32("f16").take(codes)
