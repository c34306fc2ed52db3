"""Number formats of at most 32 bits: names, limits, and exact tables of the narrow ones.

A code is the unsigned integer that a value is stored as. The kinds and what their codes mean:

- `int`: two's complement, `int1` ... `int8`. `int1` holds 0 and -1.
- `uint`: plain binary, `uint1` ... `uint8`.
- `float`: sign, exponent and mantissa as in IEEE 754, with subnormals and a negative zero. The
  exponent bias is 2**(exponent_bits - 1) - 1.
- `sign_magnitude` (`e0mY`): a sign bit above a plain binary magnitude, so there is a -0.
- `ufloat`: without sign. `float8e8m0` (ue8m0) is 2**(code - 127): no zero, no subnormals.
  `float8ue4m3` is float8e4m3 without the sign: bit 7 of its byte is 0, and ignored when read.

Conventions for NaN and infinity, the `specials` of a type:

- `none`: every code is a finite number. All types of fewer than 8 bits, and those of 8 bits that
  neither OCP nor an instruction set gives special codes.
- `fn`: the code whose magnitude bits are all ones is NaN, and there is no infinity:
  `float8e4m3` (largest 448), `float8e3m4` (largest 30), `float8ue4m3` (448), `float8e8m0` (2**127).
- `ieee`: the largest exponent holds infinity and NaN: `float8e5m2` (largest 57344), `float16`,
  `bfloat16`, `float32`.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from humming.errors import UnsupportedError

_KINDS = ("int", "uint", "float", "ufloat", "sign_magnitude")
_SPECIALS = ("none", "fn", "ieee")
# Types of 8 bits in which some codes are not finite numbers; every other narrow type is all finite.
_NARROW_SPECIALS = {(4, 3): "fn", (3, 4): "fn", (5, 2): "ieee"}
_WIDE_PTX = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DataType:
    """A number format. Get one from `DataType.parse` or the constants of this module.

    Attributes:
        name: canonical name: `int4`, `uint8`, `float8e4m3`, `float4e0m3`, `bfloat16`.
        kind: `int`, `uint`, `float`, `ufloat` or `sign_magnitude`.
        bits: width of a code.
        exponent_bits: 0 for integers and sign-magnitude types.
        mantissa_bits: without the implied one; for sign-magnitude types the magnitude bits.
        specials: which codes are no finite numbers: `none`, `fn` or `ieee` (see the module).

    A type equals another of the same name, and any string that parses to it. Its hash is that of
    the canonical name, so in sets and dictionaries only canonical strings find it.

    Raises:
        UnsupportedError: the fields contradict one another.
    """

    name: str
    kind: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    specials: str

    def __post_init__(self) -> None:
        problem = _contradiction(self)
        if problem:
            raise UnsupportedError(
                f"DataType {self.name!r}", problem, "Use DataType.parse, e.g. on 'float8e4m3'."
            )

    @property
    def is_integer(self) -> bool:
        """Whether the type is `int` or `uint`; sign-magnitude types are not, having a -0."""
        return self.kind in ("int", "uint")

    @property
    def is_float(self) -> bool:
        """Whether the type is anything but `int` and `uint`."""
        return not self.is_integer

    @property
    def is_signed(self) -> bool:
        """Whether negative numbers can be represented."""
        return self.kind not in ("uint", "ufloat")

    @property
    def is_narrow(self) -> bool:
        """Whether a code has at most 8 bits, so that the type has tables."""
        return self.bits <= 8

    @property
    def exponent_bias(self) -> int:
        """What is subtracted from the stored exponent; 0 for types without one."""
        if not self.exponent_bits:
            return 0
        # 2**(e-1)-1 is 127 for ue8m0 as well.
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def max(self) -> float:
        """The largest finite number."""
        if self.is_narrow:
            return float(_finite_values(self).max())
        return float((2 - 2.0**-self.mantissa_bits) * 2.0**self.exponent_bias)

    @property
    def min(self) -> float:
        """The lowest finite number: -max for floats, 2**-127 for ue8m0."""
        return float(_finite_values(self).min()) if self.is_narrow else -self.max

    @property
    def nan_code(self) -> int | None:
        """The code that `encode` gives for NaN, or None where the type has no NaN."""
        if self.specials == "none":
            return None
        return int(2 ** (self.exponent_bits + self.mantissa_bits)) - 1

    @property
    def ptx(self) -> str:
        """The PTX spelling, also of types PTX lacks: `s4`, `u8`, `e4m3`, `ue8m0`, `bf16`."""
        if self.is_integer:
            return f"{'s' if self.kind == 'int' else 'u'}{self.bits}"
        if not self.is_narrow:
            return _WIDE_PTX[self.name]
        unsigned = "u" if self.kind == "ufloat" else ""
        return f"{unsigned}e{self.exponent_bits}m{self.mantissa_bits}"

    def decode_table(self) -> npt.NDArray[np.float64]:
        """The number that each code stands for: float64 [2**bits], read-only.

        Raises:
            UnsupportedError: the type has more than 8 bits.
        """
        _require_narrow(self)
        return _decode_table(self)

    def encode(self, values: npt.ArrayLike) -> npt.NDArray[np.uint8]:
        """Round numbers to codes: uint8, of the shape of `values`.

        To the nearest number, and to the even code halfway between two. What lies beyond the
        finite range, infinities included, becomes the largest or lowest finite number; so
        negative numbers become the lowest in unsigned types. NaN becomes `nan_code`. The sign of a
        zero, and of what rounds to zero, is kept by `float` and `sign_magnitude` types.

        Raises:
            UnsupportedError: a value is NaN and the type has none, or it has more than 8 bits.
        """
        _require_narrow(self)
        numbers = np.asarray(values, dtype=np.float64)
        is_nan = np.isnan(numbers)
        if self.nan_code is None and is_nan.any():
            raise UnsupportedError(
                f"encode NaN as {self}",
                f"{self} has no code for NaN",
                "Replace NaN first, or use a type that has one, e.g. float8e4m3.",
            )
        has_sign_bit = self.kind in ("float", "sign_magnitude")
        midpoints, codes = _rounding_grid(self)
        targets = np.abs(numbers) if has_sign_bit else numbers
        nearest = np.searchsorted(midpoints, targets)
        # A number on a midpoint got the code below it; it belongs above if that one is odd.
        on_midpoint = np.append(midpoints, np.nan)[nearest] == targets
        nearest = nearest + (on_midpoint & (codes[nearest] % 2 == 1))
        result = codes[nearest]
        if has_sign_bit:
            result = result | (np.signbit(numbers).astype(np.uint8) << (self.bits - 1))
        if self.nan_code is not None:
            result = np.where(is_nan, self.nan_code, result)
        return np.asarray(result, dtype=np.uint8)

    @classmethod
    def parse(cls, source: Any) -> "DataType":
        """The type of a name, of a torch, numpy or ml_dtypes type, or of a `DataType`.

        >>> DataType.parse("fp8").name, DataType.parse("s4").name, DataType.parse("half").name
        ('float8e4m3', 'int4', 'float16')

        Raises:
            UnsupportedError: no such type; the message suggests the nearest.
        """
        if isinstance(source, DataType):
            return source
        if isinstance(source, type):
            # Python's own float has 64 bits, yet the name "float" means 32 elsewhere.
            text = source.__name__ if source.__module__ != "builtins" else repr(source)
        else:
            text = str(source)
        return _parse_name(text)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DataType):
            return self.name == other.name
        if isinstance(other, str):
            try:
                return self.name == _parse_name(other).name
            except UnsupportedError:
                return False
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"DataType({self.name!r})"


def suggest(name: str, known: Iterable[str]) -> str:
    """A sentence with what is known and most like `name`, or else the first of what is known."""
    names = list(dict.fromkeys(known))
    close = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.55)
    if close:
        return f"Did you mean {' or '.join(repr(n) for n in close)}?"
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"Known are {', '.join(names[:12])}{more}."


def _contradiction(dtype: DataType) -> str:
    """What is wrong with the fields of a type, or an empty string."""
    kind, bits = dtype.kind, dtype.bits
    exponent, mantissa = dtype.exponent_bits, dtype.mantissa_bits
    if kind not in _KINDS:
        return f"kind {kind!r} is none of {', '.join(_KINDS)}"
    if dtype.specials not in _SPECIALS:
        return f"specials {dtype.specials!r} is none of {', '.join(_SPECIALS)}"
    if kind in ("int", "uint"):
        if not 1 <= bits <= 8 or (exponent, mantissa, dtype.specials) != (0, 0, "none"):
            return "integers have 1 to 8 bits, no exponent, no mantissa and no specials"
        expected = f"{kind}{bits}"
    elif dtype.name in _WIDE_PTX:
        widths = {"float16": (16, 5, 10), "bfloat16": (16, 8, 7), "float32": (32, 8, 23)}
        if (bits, exponent, mantissa) != widths[dtype.name] or dtype.specials != "ieee":
            return "its widths are not those of this IEEE type"
        expected = dtype.name
    elif kind == "ufloat":
        if (bits, exponent, mantissa, dtype.specials) not in ((8, 8, 0, "fn"), (8, 4, 3, "fn")):
            return "the unsigned floats are float8e8m0 and float8ue4m3"
        expected = "float8e8m0" if mantissa == 0 else "float8ue4m3"
    else:
        if not 2 <= bits <= 8 or bits != 1 + exponent + mantissa or min(exponent, mantissa) < 0:
            return "a float has a sign, an exponent and a mantissa of 2 to 8 bits together"
        if (kind == "sign_magnitude") != (exponent == 0):
            return "sign_magnitude types are those without an exponent"
        if dtype.specials != _NARROW_SPECIALS.get((exponent, mantissa), "none"):
            return f"specials {dtype.specials!r} is not the convention of this type"
        expected = f"float{bits}e{exponent}m{mantissa}"
    return "" if dtype.name == expected else f"the name of such a type is {expected!r}"


def _integer(bits: int, signed: bool) -> DataType:
    kind = "int" if signed else "uint"
    return DataType(f"{kind}{bits}", kind, bits, 0, 0, "none")


def _narrow_float(exponent: int, mantissa: int) -> DataType:
    bits = 1 + exponent + mantissa
    kind = "float" if exponent else "sign_magnitude"
    specials = _NARROW_SPECIALS.get((exponent, mantissa), "none")
    return DataType(f"float{bits}e{exponent}m{mantissa}", kind, bits, exponent, mantissa, specials)


int1, int2, int3, int4, int5, int6, int7, int8 = (_integer(bits, True) for bits in range(1, 9))
uint1, uint2, uint3, uint4, uint5, uint6, uint7, uint8 = (
    _integer(bits, False) for bits in range(1, 9)
)
float4e2m1 = _narrow_float(2, 1)
float4e0m3 = _narrow_float(0, 3)
float6e3m2 = _narrow_float(3, 2)
float6e2m3 = _narrow_float(2, 3)
float8e4m3 = _narrow_float(4, 3)
float8e5m2 = _narrow_float(5, 2)
float8e3m4 = _narrow_float(3, 4)
float8e8m0 = DataType("float8e8m0", "ufloat", 8, 8, 0, "fn")
float8ue4m3 = DataType("float8ue4m3", "ufloat", 8, 4, 3, "fn")
float16 = DataType("float16", "float", 16, 5, 10, "ieee")
bfloat16 = DataType("bfloat16", "float", 16, 8, 7, "ieee")
float32 = DataType("float32", "float", 32, 8, 23, "ieee")

NARROW: tuple[DataType, ...] = (
    *(_integer(bits, signed) for signed in (True, False) for bits in range(1, 9)),
    *(_narrow_float(e, bits - 1 - e) for bits in range(2, 9) for e in range(bits)),
    float8e8m0,
    float8ue4m3,
)
"""Every type of at most 8 bits."""

WIDE: tuple[DataType, ...] = (float16, bfloat16, float32)
"""The types of 16 and 32 bits."""

UNKNOWN_NAME = "no number format of at most 32 bits has this name"
"""Why `DataType.parse` refuses what it does not know; types it knows of but refuses differ."""

_ALIASES = {
    "fp16": float16,
    "f16": float16,
    "half": float16,
    "bf16": bfloat16,
    "fp32": float32,
    "f32": float32,
    "float": float32,
    "fp8": float8e4m3,
    "fp4": float4e2m1,
}
_BY_NAME = {dtype.name: dtype for dtype in (*NARROW, *WIDE)}
_BY_PTX = {dtype.ptx: dtype for dtype in (*NARROW, *WIDE)} | {"e8m0": float8e8m0}
# float8_e4m3fn, fp8_e5m2, float8e3m4, F8_E8M0, float8_e8m0fnu, float4_e2m1fn_x2
_SPELLED_FLOAT = re.compile(r"(?:float|fp|f)(\d)_?(u?e\dm\d)(fn|fnu)?(_x2)?")
# Names of ml_dtypes whose codes mean other numbers than those of the type they resemble.
_FOREIGN = {
    "float8_e4m3": "ml_dtypes' float8_e4m3 has infinities and ends at 240",
    "float8_e3m4": "ml_dtypes' float8_e3m4 has infinities and ends at 15.5",
}


@lru_cache(maxsize=1024)
def _parse_name(text: str) -> DataType:
    name = text.strip().lower().removeprefix("torch.")
    for table in (_BY_NAME, _ALIASES, _BY_PTX):
        if name in table:
            return table[name]
    if name in _FOREIGN:
        raise UnsupportedError(
            f"dtype {text!r}", _FOREIGN[name], f"Did you mean {name.replace('_', '')!r}?"
        )
    spelled = _SPELLED_FLOAT.fullmatch(name)
    if spelled:
        bits, layout, suffix, _ = spelled.groups()
        dtype = _BY_PTX.get(layout)
        # "fn" says finite and "u" unsigned: a name that says either of another type is wrong.
        unsuited = dtype is None or (
            (suffix == "fn" and (dtype.specials == "ieee" or dtype.kind == "ufloat"))
            or (suffix == "fnu" and dtype != float8e8m0)
        )
        if dtype is not None and dtype.bits == int(bits) and not unsuited:
            return dtype
    why = UNKNOWN_NAME
    if name.endswith("fnuz"):
        why = "types whose negative zero is NaN (fnuz) are not supported"
    elif name == "fp6":
        why = "there are two of them"
        raise UnsupportedError(f"dtype {text!r}", why, "Say 'float6e3m2' or 'float6e2m3'.")
    raise UnsupportedError(f"dtype {text!r}", why, suggest(name, _known_names()))


def _known_names() -> list[str]:
    return [*_ALIASES, *_BY_NAME, *_BY_PTX]


def _require_narrow(dtype: DataType) -> None:
    if not dtype.is_narrow:
        raise UnsupportedError(
            f"a table of {dtype}", "it has more than 8 bits", "Convert with numpy or torch."
        )


def _magnitude(dtype: DataType, code: int) -> float:
    """The number that the bits below the sign stand for."""
    exponent, mantissa = divmod(code, 2**dtype.mantissa_bits)
    if dtype.specials == "fn" and code == dtype.nan_code:
        return float("nan")
    if dtype.specials == "ieee" and exponent == 2**dtype.exponent_bits - 1:
        return float("nan") if mantissa else float("inf")
    if not dtype.exponent_bits:
        return float(code)
    if exponent == 0 and dtype != float8e8m0:
        return float(mantissa * 2.0 ** (1 - dtype.exponent_bias - dtype.mantissa_bits))
    significand = 1 + mantissa * 2.0**-dtype.mantissa_bits
    return float(significand * 2.0 ** (exponent - dtype.exponent_bias))


def _decode(dtype: DataType, code: int) -> float:
    if dtype.kind == "uint":
        return float(code)
    if dtype.kind == "int":
        return float(code - 2**dtype.bits if code >= 2 ** (dtype.bits - 1) else code)
    if dtype.kind == "ufloat":
        return _magnitude(dtype, code % 128 if dtype == float8ue4m3 else code)
    sign, magnitude = divmod(code, 2 ** (dtype.bits - 1))
    return -_magnitude(dtype, magnitude) if sign else _magnitude(dtype, magnitude)


@cache
def _decode_table(dtype: DataType) -> npt.NDArray[np.float64]:
    table = np.array([_decode(dtype, code) for code in range(2**dtype.bits)], dtype=np.float64)
    table.setflags(write=False)
    return table


@cache
def _finite_values(dtype: DataType) -> npt.NDArray[np.float64]:
    table = _decode_table(dtype)
    return table[np.isfinite(table)]


@cache
def _rounding_grid(
    dtype: DataType,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.uint8]]:
    """The codes to round to in ascending order of their numbers, and the midpoints between these.

    Types with a sign bit are rounded by magnitude, so that only codes without it occur here.
    Neighbours have one odd and one even code in every type, and halves of sums of neighbours are
    exact in float64, so comparing with the midpoints rounds exactly.
    """
    table = _decode_table(dtype)
    codes = np.arange(len(table))
    if dtype.kind in ("float", "sign_magnitude"):
        codes = codes[: len(table) // 2]
    elif dtype == float8ue4m3:
        codes = codes[:128]
    codes = codes[np.isfinite(table[codes])]
    codes = codes[np.argsort(table[codes], kind="stable")]
    grid = table[codes]
    return (grid[:-1] + grid[1:]) / 2, codes.astype(np.uint8)
