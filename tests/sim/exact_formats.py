"""Rounding to floating-point formats in exact arithmetic: the reference of the numeric tests."""

from fractions import Fraction
from typing import NamedTuple


class Format(NamedTuple):
    """Fields of a format; `top` is its largest finite number's code, without sign."""

    exponent: int
    mantissa: int
    bias: int
    top: int
    infinite: bool

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa


FORMATS = {
    "f16": Format(5, 10, 15, 0x7BFF, True),
    "bf16": Format(8, 7, 127, 0x7F7F, True),
    "tf32": Format(8, 10, 127, 0x3FBFF, True),
    "f32": Format(8, 23, 127, 0x7F7FFFFF, True),
    "e4m3": Format(4, 3, 7, 0x7E, False),
    "e5m2": Format(5, 2, 15, 0x7B, True),
    "e3m2": Format(3, 2, 3, 0x1F, False),
    "e2m3": Format(2, 3, 1, 0x1F, False),
    "e2m1": Format(2, 1, 1, 0x7, False),
}


def magnitude_of(code: int, name: str) -> Fraction:
    """The value of a finite code without sign."""
    form = FORMATS[name]
    exponent, mantissa = code >> form.mantissa, code & (1 << form.mantissa) - 1
    if exponent == 0:
        return Fraction(mantissa) * Fraction(2) ** (1 - form.bias - form.mantissa)
    mantissa |= 1 << form.mantissa
    return Fraction(mantissa) * Fraction(2) ** (exponent - form.bias - form.mantissa)


def code_of(value: Fraction, name: str, mode: str = "rn", negative_zero: bool = False) -> int:
    """Code of an exact value, by search among neighbours: rn, rz, rp, rm or rna.

    Out of range it becomes infinity, or the largest number in formats without one and in
    roundings towards it.
    """
    form = FORMATS[name]
    negative = value < 0 or (value == 0 and negative_zero)
    sign = int(negative) << (form.exponent + form.mantissa)
    size = abs(value)
    low, high = 0, form.top
    while low < high:  # the largest code that is not above
        middle = (low + high + 1) // 2
        if magnitude_of(middle, name) <= size:
            low = middle
        else:
            high = middle - 1
    below = magnitude_of(low, name)
    if below == size:
        return sign | low
    above = magnitude_of(low + 1, name)  # of the code behind the top, if it had a value
    outwards = {"rz": False, "rp": not negative, "rm": negative}.get(mode)
    if outwards is None:
        double = 2 * size - below - above
        tie = low & 1 == 1 if mode == "rn" else True
        outwards = double > 0 or (double == 0 and tie)
    code = low + int(outwards)
    if code > form.top:
        code = form.top + 1 if form.infinite else form.top
        if form.infinite and name in ("tf32",):
            code = form.top + 1
    return sign | code
