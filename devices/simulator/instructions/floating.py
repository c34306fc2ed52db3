"""Floating-point arithmetic of every width, with PTX's roundings and NaNs.

float16 and bfloat16 sums, products and quotients are computed in float32, which has more than
twice their bits plus two, so that rounding again to them changes nothing (Figueroa, 1995). Their
fused products are computed in float64 as `numerics.fma_f32` does: exact products, and sums that are
rounded to odd where float64 cannot hold them. `.approx` functions are the exact ones, rounded;
devices differ from that in the last bits.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import exact, numerics
from ..decoder import Decoder, Step, instruction
from ..groups import Array
from ..numerics import canonical_f32, canonical_f64, flush
from . import poison

FLOATS = ("f32", "f64", "f16", "f16x2", "bf16", "bf16x2", "f32x2")
_ROUNDINGS = ("rn", "rz", "rp", "rm")
_HALVES = ("f16", "f16x2", "bf16", "bf16x2")


def storage(kind: str) -> str:
    """The type in which operands are read: bits for those that NumPy cannot compute with."""
    return {
        "f16": "b16",
        "bf16": "b16",
        "f16x2": "b32",
        "bf16x2": "b32",
        "f32x2": "b64",
    }.get(kind, kind)


def _rule(kind: str) -> poison.Rule | None:
    return poison.halves if kind.endswith("16x2") else None


def expand(codes: Any, kind: str) -> Array:
    """float32 values of 16-bit floats; of two in each element, as an array twice as long."""
    parts = split(codes, np.uint16)
    return numerics.f32_of_bf16(parts) if kind[0] == "b" else numerics.f32_of_f16(parts)


def split(values: Any, part: Any) -> Array:
    """Packed values as an array of their parts, twice as long in the direction of the lanes."""
    found = np.ascontiguousarray(np.atleast_1d(values)).view(part)
    # A constant is the same in every lane.
    return found if np.ndim(values) else np.tile(found, 32)


def contract(values: Array, kind: str) -> Array:
    """The reverse, rounded to nearest even."""
    codes = numerics.bf16_of_f32(values) if kind[0] == "b" else numerics.f16_of_f32(values)
    return codes.view(np.uint32) if kind.endswith("x2") else codes


def saturated(values: Array) -> Array:
    """`.sat`: clamped to [0, 1]; NaN and -0 become +0."""
    return np.where(values > 0, np.minimum(values, 1), values.dtype.type(0))


def rectified(values: Array) -> Array:
    """`.relu`: what is negative becomes +0, -0 too; NaN stays NaN."""
    return np.where((values > 0) | np.isnan(values), values, values.dtype.type(0))


def _flushed_f16(values: Array) -> Array:
    """`.ftz` on half precision: subnormals become zeros of their sign."""
    tiny = np.abs(values) < np.float32(2.0**-14)
    return np.where(tiny, np.copysign(np.float32(0), values), values)


def apply(
    d: Decoder,
    kind: str,
    function: Callable[..., Array],
    *,
    flushes: bool = False,
    saturates: bool = False,
    relu: bool = False,
    count: int = 2,
    narrow: tuple[str, ...] = (),
) -> Step:
    """A step of a function on floating-point operands of a type.

    Args:
        d: at the instruction.
        kind: type of the operands and the result.
        function: on float32 (for 16-bit types, too) or float64 arrays.
        flushes, saturates, relu: the modifiers .ftz, .sat and .relu.
        count: number of operands.
        narrow: for each operand, a type of 16 bits that it has instead, or "".
    """
    stored = storage(kind)
    kinds = [each or kind for each in narrow] or [kind] * count
    # The assembler takes integers for bf16 that is widened.
    given = ["u16" if each == "bf16" != kind else each for each in kinds]
    sources = [d.source(i + 1, storage(each), given=given[i]) for i, each in enumerate(kinds)]
    if narrow:
        inner = function

        def function(*operands: Any) -> Array:
            wide = [
                expand(v, each).reshape(np.shape(v) or (32,)) if each else v
                for v, each in zip(operands, narrow, strict=True)
            ]
            return inner(*wide)

    def finish(values: Array) -> Array:
        if saturates:
            values = saturated(values)
        if relu:
            values = rectified(values)
        return values

    if kind in _HALVES:
        flush_half = flushes and kind[0] == "f"

        def halves(*operands: Any) -> Array:
            values = [expand(operand, kind) for operand in operands]
            if flush_half:
                values = [_flushed_f16(v) for v in values]
            result = finish(function(*values))
            if flush_half:
                result = _flushed_f16(result)
            return contract(result, kind)

        return d.elementwise(halves, d.target(0, stored, given=kind), *sources, poison=_rule(kind))
    if kind == "f32x2":

        def pairs(*operands: Any) -> Array:
            values = [split(v, np.float32) for v in operands]
            if flushes:
                values = [flush(v) for v in values]
            result = canonical_f32(finish(function(*values)))
            return (flush(result) if flushes else result).view(np.uint64)

        return d.elementwise(pairs, d.target(0, stored, given=kind), *sources)
    canonical = canonical_f64 if kind == "f64" else canonical_f32
    if not (flushes or saturates or relu):
        return d.elementwise(
            lambda *operands: canonical(function(*operands)), d.target(0, kind), *sources
        )

    def single(*operands: Any) -> Array:
        values = [flush(v) for v in operands] if flushes else operands
        result = canonical(finish(function(*values)))
        return flush(result) if flushes else result

    return d.elementwise(single, d.target(0, kind), *sources)


def two_operands(d: Decoder, kind: str, opcode: str) -> Step:
    """`add`, `sub` and `mul`."""
    d.expect(3)
    mode = d.modifiers.one_of(*_ROUNDINGS, default="rn")
    flags = {"flushes": d.modifiers.flag("ftz"), "saturates": d.modifiers.flag("sat")}
    function: Callable[..., Array]
    function = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[opcode]
    narrow = d.modifiers.one_of("f16", "bf16", default="") if kind == "f32" else ""
    if narrow:
        d.expect(3)
        if opcode == "mul":
            d.refuse("mul has no operands of another type")
    if mode != "rn" and kind == "f64":
        function = exact.function_of(opcode, kind, mode)
    elif mode != "rn":
        if kind not in ("f32", "f32x2"):
            d.refuse(f"{opcode}.{mode}.{kind}: this type is rounded to nearest")
        function = {
            "add": lambda a, b: numerics.add_f32(a, b, mode),
            "sub": lambda a, b: numerics.add_f32(a, -np.asarray(b), mode),
            "mul": lambda a, b: numerics.to_f32(
                np.asarray(a, np.float64) * np.asarray(b, np.float64), None, mode
            ),
        }[opcode]
    if narrow:
        return apply(d, kind, function, **flags, narrow=(narrow, ""))
    return apply(d, kind, function, **flags)


def fused(d: Decoder, kind: str) -> Step:
    """`fma`."""
    d.expect(4)
    mode = d.modifiers.one_of(*_ROUNDINGS, default="rn")
    flushes, saturates = d.modifiers.flag("ftz"), d.modifiers.flag("sat")
    relu = d.modifiers.flag("relu")
    if kind == "f64":
        function = numerics.fma_f64 if mode == "rn" else exact.function_of("fma", kind, mode)
        return apply(d, kind, function, count=3)
    if kind not in _HALVES:
        narrow = d.modifiers.one_of("f16", "bf16", default="") if kind == "f32" else ""
        return apply(
            d,
            kind,
            lambda a, b, c: numerics.fma_f32(a, b, c, mode),
            flushes=flushes,
            saturates=saturates,
            count=3,
            narrow=(narrow, narrow, "") if narrow else (),
        )
    if mode != "rn":
        d.refuse(f"fma.{mode}.{kind}: this type is rounded to nearest")
    stored = storage(kind)
    sources = [d.source(place, stored, given=kind) for place in (1, 2, 3)]
    name = "bf16" if kind[0] == "b" else "f16"

    def function(*operands: Any) -> Array:
        a, b, c = (expand(operand, kind).astype(np.float64) for operand in operands)
        if flushes:
            a, b, c = (_flushed_f16(v) for v in (a, b, c))
        result = a * b + c
        if name == "bf16":
            total, error = numerics.exact_sum(a * b, c)
            result = numerics.round_odd(total, error)
        # Of float16 operands, float64 holds every sum that decides a tie: what it loses lies more
        # than 18 bits below the last bit of the larger addend, which is then the float16 one.
        if saturates:
            result = saturated(result)
        if relu:
            result = rectified(result)
        if name == "f16":
            codes = _f16_of_f64(result)
            if flushes:
                codes = np.where(codes & 0x7C00, codes, codes & 0x8000).astype(np.uint16)
        else:
            codes = numerics.encode(result, "bf16").astype(np.uint16)
        return codes.view(np.uint32) if kind.endswith("x2") else codes

    return d.elementwise(function, d.target(0, stored, given=kind), *sources, poison=_rule(kind))


def _f16_of_f64(values: Array) -> Array:
    codes = values.astype(np.float16).view(np.uint16)
    nan = np.isnan(values)
    return np.where(nan, np.uint16(0x7FFF), codes) if nan.any() else codes


def divide(d: Decoder, kind: str) -> Step:
    """`div`; `.full` and, up to 2^126, `.approx` are rounded like `.rn`.

    Beyond that `.approx` multiplies with a reciprocal of 0.
    """
    d.expect(3)
    mode = d.modifiers.one_of(*_ROUNDINGS, "approx", "full", default="")
    if not mode or kind not in ("f32", "f64") or (kind == "f64" and mode in ("approx", "full")):
        d.refuse(f"div.{kind} is for f32 and f64 and needs a rounding, .approx or .full (f32)")
    function: Callable[..., Array] = np.divide
    if mode == "approx":
        function = _divide_approximately
    elif mode in ("rz", "rp", "rm"):
        function = exact.function_of("div", kind, mode)
    if kind == "f64" and "ftz" in d.modifiers.left:
        d.refuse("div.f64 has no .ftz")
    return apply(d, kind, function, flushes=d.modifiers.flag("ftz"))


def _divide_approximately(a: Any, b: Any) -> Array:
    large = np.abs(b) > np.float32(2.0**126)
    return np.where(large, a * np.copysign(np.float32(0), b), np.divide(a, b))


def extreme(d: Decoder, kind: str, largest: bool) -> Step:
    """`min` and `max`: a number wins over NaN unless `.NaN` is given; -0 is below +0."""
    d.expect(3, 4)
    flushes, keeps_nan = d.modifiers.flag("ftz"), d.modifiers.flag("NaN")
    xor_sign, absolute = d.modifiers.flag("xorsign"), d.modifiers.flag("abs")
    choose = np.fmax if largest else np.fmin

    def pair(a: Any, b: Any) -> Array:
        a, b = np.asarray(a), np.asarray(b)
        sign = np.signbit(a) != np.signbit(b)
        if absolute:
            a, b = np.abs(a), np.abs(b)
        result = choose(a, b)
        zero = (a == 0) & (b == 0)
        if zero.any():
            negative = (np.signbit(a) & np.signbit(b)) if largest else np.signbit(a) | np.signbit(b)
            result = np.where(zero, np.where(negative, -0.0, 0.0).astype(result.dtype), result)
        if keeps_nan:
            result = np.where(np.isnan(a) | np.isnan(b), result.dtype.type(np.nan), result)
        if xor_sign:
            result = np.where(sign, -np.abs(result), np.abs(result))
        return np.asarray(result)

    def function(*operands: Any) -> Array:
        result = pair(operands[0], operands[1])
        return pair(result, operands[2]) if len(operands) == 3 else result

    return apply(d, kind, function, flushes=flushes, count=len(d.operands) - 1)


def sign(d: Decoder, kind: str, opcode: str) -> Step:
    """`abs` and `neg`, which change the sign bit, of NaNs too."""
    d.expect(2)
    flushes = d.modifiers.flag("ftz")
    if kind in _HALVES and not flushes:
        bits = np.uint32 if kind.endswith("x2") else np.uint16
        mask = bits(0x80008000 if kind.endswith("x2") else 0x8000)
        stored = storage(kind)
        change = (lambda a: a & ~mask) if opcode == "abs" else (lambda a: a ^ mask)
        target, source = d.target(0, stored, given=kind), d.source(1, stored, given=kind)
        return d.elementwise(change, target, source, poison=_rule(kind))
    function = np.abs if opcode == "abs" else np.negative
    return apply(d, kind, function, flushes=flushes, count=1)


# Types of each function with .approx; those of "rounded" ones have roundings for f32 and f64, too.
_APPROXIMATE: dict[str, tuple[str, ...]] = {
    "rcp": ("f32", "f64"),
    "sqrt": ("f32",),
    "rsqrt": ("f32", "f64"),
    "ex2": ("f32", "f16", "f16x2", "bf16", "bf16x2"),
    "tanh": ("f32", "f16", "f16x2", "bf16", "bf16x2"),
}
_ROUNDED = ("rcp", "sqrt")


def _one_operand(function: Callable[[Array], Array]) -> Callable[[Decoder], Step]:
    """A builder of a function that is computed in float64 and rounded once."""

    def build(d: Decoder) -> Step:
        d.expect(2)
        mode = d.modifiers.one_of(*_ROUNDINGS, "approx", default="")
        flushes = d.modifiers.flag("ftz")
        kind = d.modifiers.one_of(*FLOATS)
        if mode == "approx":
            known = _APPROXIMATE.get(d.opcode, ("f32",))
        else:
            known = ("f32", "f64") if d.opcode in _ROUNDED and mode else ()
        if kind not in known:
            what = f"{d.opcode}{f'.{mode}' if mode else ''}.{kind}"
            rest = " or a rounding" if d.opcode in _ROUNDED else ""
            d.refuse(f"{what}: {d.opcode} needs .approx{rest}, and has not all types")
        if kind == "f64" and mode == "approx":
            d.refuse(f"which bits {d.opcode}.approx.f64 gives is not known to the simulator")
        if mode in ("rz", "rp", "rm"):
            directed = exact.function_of(d.opcode, kind, mode)
            return apply(d, kind, directed, flushes=flushes, count=1)

        def rounded(a: Array) -> Array:
            result = function(np.asarray(a, np.float64))
            return result.astype(np.asarray(a).dtype)

        return apply(d, kind, rounded, flushes=flushes, count=1)

    return build


_ONE_OPERAND: dict[str, Callable[[Array], Array]] = {
    "rcp": lambda a: 1.0 / a,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1.0 / np.sqrt(a),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}
for _opcode, _function in _ONE_OPERAND.items():
    instruction(_opcode)(_one_operand(_function))


@instruction("copysign")
def copy_sign(d: Decoder) -> Step:
    """PTX ISA 9.7.3.2: the magnitude of b with the sign of a."""
    kind = d.modifiers.one_of("f32", "f64")
    d.expect(3)
    sources = d.source(1, kind), d.source(2, kind)
    return d.elementwise(lambda a, b: np.copysign(b, a), d.target(0, kind), *sources)


@instruction("testp")
def test_property(d: Decoder) -> Step:
    """PTX ISA 9.7.3.1."""
    wanted = d.modifiers.one_of("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    kind = d.modifiers.one_of("f32", "f64")
    d.expect(2)
    tiny = 2.0**-126 if kind == "f32" else 2.0**-1022
    tests: dict[str, Callable[[Array], Array]] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: ~np.isnan(a),
        "notanumber": np.isnan,
        # Zeros count as normal numbers.
        "normal": lambda a: np.isfinite(a) & ((np.abs(a) >= tiny) | (a == 0)),
        "subnormal": lambda a: (a != 0) & (np.abs(a) < tiny),
    }
    return d.elementwise(tests[wanted], d.target(0, "pred"), d.source(1, kind))
