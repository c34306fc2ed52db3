"""Roundings of exact rational numbers: for operations that NumPy rounds to nearest only.

Element by element in Python's integers, so slow; kernels seldom ask for it.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from .groups import Array

_FORMATS = {"f32": (24, -126, 127), "f64": (53, -1022, 1023)}
"""Bits of the significand, least and greatest exponent of normal numbers."""
_ROOT_BITS = 160


def rounded(value: Fraction, kind: str, mode: str) -> float:
    """A number that is not 0, rounded to f32 or f64: mode rn, rz, rp or rm."""
    bits, least, most = _FORMATS[kind]
    negative, size = value < 0, abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    quantum = max(exponent, least) - bits + 1
    scaled = size / Fraction(2) ** quantum
    whole = scaled.numerator // scaled.denominator
    rest = scaled - whole
    away = {"rz": False, "rp": not negative, "rm": negative}.get(mode)
    if away is None:
        up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1)
    else:
        up = away and rest > 0
    whole += int(up)
    if whole.bit_length() + quantum - 1 > most:
        largest = math.ldexp((1 << bits) - 1, most - bits + 1)
        found = math.inf if away is None or away else largest
    else:
        found = math.ldexp(whole, quantum)
    return -found if negative else found


def root(value: Fraction) -> Fraction:
    """A number that is rounded as the square root of a positive one is, exact where that is."""
    shift = _ROOT_BITS + value.denominator.bit_length()
    scaled = (value.numerator << 2 * shift) // value.denominator
    found = math.isqrt(scaled)
    exact = found * found * value.denominator == value.numerator << 2 * shift
    return Fraction(2 * found + (0 if exact else 1), 2 << shift)


def elementwise(
    plain: Callable[..., Any],
    exact: Callable[..., Fraction],
    zero: Callable[..., bool],
    kind: str,
    mode: str,
) -> Callable[..., Array]:
    """A function of arrays in a directed rounding.

    Args:
        plain: the function of floats, whose results stand where an operand or the exact result is
            not finite.
        exact: the same of fractions.
        zero: of floats, whether an exact 0 is negative.
        kind, mode: type and rounding of the result.
    """

    def single(*operands: float) -> float:
        simple = float(plain(*map(np.float64, operands)))
        if not all(map(math.isfinite, operands)):
            return simple
        try:
            value = exact(*map(Fraction, operands))
        except (ZeroDivisionError, ValueError):
            return simple
        if value == 0:
            return -0.0 if zero(*operands) else 0.0
        return rounded(value, kind, mode)

    dtype = np.float32 if kind == "f32" else np.float64
    vector = np.vectorize(single, otypes=[np.float64])

    def function(*operands: Any) -> Array:
        wide = [np.asarray(operand, np.float64) for operand in operands]
        found: Array = vector(*wide).astype(dtype)
        return found

    return function


def _sign(*operands: float) -> bool:
    return bool(sum(math.copysign(1, o) < 0 for o in operands) % 2)


def function_of(name: str, kind: str, mode: str) -> Callable[..., Array]:
    """`add`, `sub`, `mul`, `fma`, `div`, `rcp` or `sqrt` in a rounding."""

    def of_sum(*parts: float) -> bool:
        """An exact sum of zero: of zeros of one sign, or of numbers that cancel."""
        negative = [math.copysign(1, part) < 0 for part in parts]
        return all(negative) or (mode == "rm" and any(negative))

    def square_root(value: Fraction) -> Fraction:
        return root(value) if value > 0 else (Fraction(0) if value == 0 else Fraction(1, 0))

    def of_fma(a: float, b: float, c: float) -> bool:
        return of_sum(-1.0 if _sign(a, b) else 1.0, c)

    table: dict[str, tuple[Any, Any, Any]] = {
        "add": (lambda a, b: a + b, lambda a, b: a + b, of_sum),
        "sub": (lambda a, b: a - b, lambda a, b: a - b, lambda a, b: of_sum(a, -b)),
        "mul": (lambda a, b: a * b, lambda a, b: a * b, _sign),
        "fma": (lambda a, b, c: a * b + c, lambda a, b, c: a * b + c, of_fma),
        "div": (lambda a, b: np.divide(a, b), lambda a, b: a / b, _sign),
        "rcp": (lambda a: np.divide(1.0, a), lambda a: 1 / a, _sign),
        "sqrt": (np.sqrt, square_root, _sign),
    }
    return elementwise(*table[name], kind, mode)
