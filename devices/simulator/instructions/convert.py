"""Conversions between number formats (PTX ISA 9.7.9.21-22)."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import numerics
from ..decoder import Decoder, Step, instruction
from ..groups import Array
from ..numerics import FORMATS
from ..operands import Source
from . import floating, forms, poison

_INTEGERS = ("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64")
_SINGLES = ("f16", "bf16", "f32", "f64", "tf32")
_NARROW = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "ue8m0", "ue5m3")
_PAIRS = ("f16x2", "bf16x2", *(f"{name}x2" for name in _NARROW))
_INTEGRAL = ("rni", "rzi", "rmi", "rpi")
_ROUNDINGS = ("rn", "rz", "rm", "rp", "rna")
_SCALED = "scaled::n2::ue8m0"


@instruction("cvt")
def convert(d: Decoder) -> Step:
    """PTX ISA 9.7.9.21."""
    modifiers = d.modifiers
    integral = modifiers.one_of(*_INTEGRAL, default="")
    mode = modifiers.one_of(*_ROUNDINGS, default="")
    flushes, relu = modifiers.flag("ftz"), modifiers.flag("relu")
    saturates = modifiers.flag("sat")
    finite = modifiers.flag("satfinite")
    scaled = modifiers.flag(_SCALED)
    kinds = list(modifiers.left)
    if len(kinds) != 2:
        d.refuse("cvt has the types of its result and its operand")
    modifiers.left.clear()
    to, of = kinds
    if "s2f6x2" in kinds:
        d.refuse("what becomes of NaN in a conversion to s2f6x2 is not known")
    flags = {"ftz": flushes, "sat": saturates, "finite": finite, "relu": relu}
    if to in _PAIRS:
        if of not in (*_PAIRS, "f32"):
            d.refuse(f"a conversion from {of} to {to}")
        wrong = forms.packed_conversion(to, of, integral or mode, scaled=scaled, **flags)
        if wrong:
            d.refuse(wrong)
        return _pair(d, to, of, mode or "rn", finite, relu, scaled)
    if any(kind not in (*_INTEGERS, *_SINGLES) for kind in kinds):
        d.refuse(f"a conversion from {of} to {to}")
    wrong = forms.conversion(to, of, integral or mode, **flags)
    if wrong or scaled or (integral and mode):
        d.refuse(wrong or "modifiers of a conversion that do not go together")
    d.expect(2)
    if to in _INTEGERS and of in _INTEGERS:
        return _between_integers(d, to, of, saturates)
    if to in _INTEGERS:
        return _to_integer(d, to, of, integral, flushes)
    if of in _INTEGERS:
        return _from_integer(d, to, of, mode or "rn", saturates)
    return _between_floats(d, to, of, integral, mode or "rn", flushes, saturates, finite, relu)


def _between_integers(d: Decoder, to: str, of: str, saturates: bool) -> Step:
    low, high = _range(to)
    dtype = _integer_dtype(to)

    def clamp(a: Any) -> Array:
        if of == "u64":
            return np.minimum(a, np.uint64(high)).astype(dtype)
        wide = np.asarray(a)
        if to == "u64":
            return np.maximum(wide, 0).astype(np.uint64)
        return np.clip(wide.astype(np.int64), low, high).astype(dtype)

    def cut(a: Any) -> Any:
        return np.asarray(a).astype(dtype)

    target, source = d.target(0, to, wider=True), d.source(1, of, wider=True)
    if saturates:
        return d.elementwise(clamp, target, source)
    return d.elementwise(cut, target, source, poison=poison.moved(cut))


def _range(kind: str) -> tuple[int, int]:
    bits = int(kind[1:])
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


def _integer_dtype(kind: str) -> Any:
    return np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}").type


def _float_source(d: Decoder, operand: int, kind: str) -> tuple[Source, Callable[[Any], Array]]:
    """An operand of a floating-point type as it is stored, and its values in float64."""
    stored = "b32" if kind == "tf32" else floating.storage(kind)
    opcode = d.instruction.opcode
    wider = "bf16" not in opcode and "tf32" not in opcode
    source = d.source(operand, stored, given=kind, wider=wider)

    def values(a: Any) -> Array:
        stored = np.asarray(a)
        if kind in ("f32", "f64"):
            return stored.astype(np.float64)
        return numerics.decode(stored, kind)

    return source, values


def _to_integer(d: Decoder, to: str, of: str, mode: str, flushes: bool) -> Step:
    """Out of range becomes the nearest integer, NaN zero (or, of 64 bits, the least integer)."""
    low, high = _range(to)
    dtype = _integer_dtype(to)
    wide = to[1:] == "64" or of == "f64"
    source, values = _float_source(d, 1, of)

    def function(a: Any) -> Array:
        number = values(numerics.flush(a) if flushes and of == "f32" else a)
        whole = numerics.round_integral(number, mode)
        nan = np.isnan(whole)
        over, under = whole >= float(high), whole <= float(low)
        inner = np.where(nan | over | under, 0.0, whole)
        result = inner.astype(np.uint64 if to == "u64" else np.int64).astype(dtype)
        result = np.where(over, dtype(high), np.where(under, dtype(low), result))
        # Half of the range for unsigned types is the bits of the least signed integer.
        odd = dtype(1 << (int(to[1:]) - 1)) if to[0] == "u" else dtype(low)
        return np.where(nan, odd if wide else dtype(0), result)

    return d.elementwise(function, d.target(0, to, wider=True), source)


def _from_integer(d: Decoder, to: str, of: str, mode: str, saturates: bool) -> Step:
    source = d.source(1, of, wider=to != "bf16")
    exact = int(of[1:]) < 64

    def finish(result: Array) -> Array:
        return np.clip(result, 0, 1) if saturates else result

    if to in ("f32", "f64") and (mode == "rn" or (to == "f64" and exact)):
        dtype = np.float32 if to == "f32" else np.float64
        target = d.target(0, to, wider=True)
        return d.elementwise(lambda a: finish(np.asarray(a).astype(dtype)), target, source)
    if not exact or to == "f64":
        d.refuse(f"cvt.{mode}.{to}.{of} is not supported")

    def function(a: Any) -> Array:
        codes = numerics.encode(finish(np.asarray(a).astype(np.float64)), to, mode)
        return codes.astype(np.uint32 if to == "f32" else np.uint16)

    target = d.target(0, "b32" if to == "f32" else "b16", given=to, wider=to != "bf16")
    return d.elementwise(function, target, source)


def _between_floats(
    d: Decoder,
    to: str,
    of: str,
    integral: str,
    mode: str,
    flushes: bool,
    saturates: bool,
    finite: bool,
    relu: bool,
) -> Step:
    source, values = _float_source(d, 1, of)
    stored = "b32" if to in ("f32", "tf32") else floating.storage(to)
    target = d.target(0, stored, given=to, wider="bf16" not in (to, of) and to != "tf32")
    plain = not (integral or flushes or saturates or finite or relu)
    if plain and to == "f32" and of in ("f16", "bf16"):
        return d.elementwise(
            lambda a: numerics.canonical_f32(floating.expand(a, of).reshape(np.shape(a))),
            d.target(0, "f32", wider=of == "f16"),
            source,
        )
    if plain and of == "f32" and to == "f16" and mode == "rn":
        return d.elementwise(numerics.f16_of_f32, target, source)
    if plain and of == "f32" and to == "bf16" and mode == "rn":
        return d.elementwise(numerics.bf16_of_f32, target, source)
    dtype = {"b16": np.uint16, "b32": np.uint32}.get(stored)

    def function(a: Any) -> Array:
        number = values(numerics.flush(a) if flushes and of == "f32" else a)
        if integral:
            number = np.copysign(numerics.round_integral(number, integral), number)
        if saturates:
            number = floating.saturated(number)
        if to == "f64":
            return numerics.canonical_f64(number)
        if to == "tf32":
            return _tf32(number, mode, finite, relu)
        codes = numerics.encode(number, to, mode, saturate=finite, relu=relu)
        result = codes.astype(dtype)
        if flushes and to == "f32":
            return numerics.flush(result.view(np.float32)).view(np.uint32)
        return result

    return d.elementwise(function, target, source)


def _tf32(values: Array, mode: str, finite: bool, relu: bool) -> Array:
    """tf32 in a 32-bit register, its low 13 bits zero."""
    codes = numerics.encode(values, "tf32", mode, saturate=finite, relu=relu)
    raw = (codes << np.uint64(13)).astype(np.uint32)
    return np.where(np.isnan(values), np.uint32(0x7FFFFFFF), raw)


def _pair(d: Decoder, to: str, of: str, mode: str, finite: bool, relu: bool, scaled: bool) -> Step:
    """Conversions to two values in one register; the first operand is the upper one."""
    name = to.removesuffix("x2")
    width = 4 if name == "e2m1" else 16 if name in ("f16", "bf16") else 8
    stored = {4: "b8", 8: "b16", 16: "b32"}[width]
    dtype = {4: np.uint8, 8: np.uint16, 16: np.uint32}[width]
    wider = (to, of) == ("f16x2", "f32")
    with_scales = "ue8m0" in (name, of.removesuffix("x2"))
    given = to if width == 16 and not with_scales else ""
    target = d.target(0, stored, given=given, wider=wider)

    def code(values: Array) -> Array:
        if name == "ue8m0":
            return numerics.encode_ue8m0(values, mode, saturate=finite)
        form = FORMATS[name]
        saturate = finite or form.specials == "none"
        codes = numerics.encode(values, name, mode, saturate=saturate, relu=relu)
        if form.specials == "none":
            # NaN becomes the largest positive number.
            top = np.uint64((1 << (form.bits - 1)) - 1)
            codes = np.where(np.isnan(values), top, codes)
        return codes

    def join(upper: Array, lower: Array) -> Array:
        return (code(upper) << np.uint64(width) | code(lower)).astype(dtype)

    if of == "f32":
        d.expect(4 if scaled else 3)
        sources = [d.source(1, "f32", wider=wider), d.source(2, "f32", wider=wider)]
        if scaled:
            sources.append(d.source(3, "b16"))

        def of_two(a: Any, b: Any, *scale: Any) -> Array:
            upper, lower = (np.asarray(v).astype(np.float64) for v in (a, b))
            if scale:
                high, low = _scales(scale[0])
                upper, lower = upper / high, lower / low
            return join(*np.broadcast_arrays(upper, lower))

        fast = _fast_pair(name, mode, finite, relu) if not scaled else None
        return d.elementwise(fast or of_two, target, *sources, poison=_two_halves(width, dtype))
    if of not in _PAIRS:
        d.refuse(f"a conversion from {of} to {to}")
    inner = of.removesuffix("x2")
    narrow = 4 if inner == "e2m1" else 16 if inner in ("f16", "bf16") else 8
    d.expect(3 if scaled else 2)
    given = of if narrow == 16 and not with_scales else ""
    source = d.source(1, {4: "b8", 8: "b16", 16: "b32"}[narrow], given=given)

    def of_pair(a: Any, *scale: Any) -> Array:
        raw = np.asarray(a).astype(np.uint64)
        mask = np.uint64((1 << min(narrow, _bits(inner))) - 1)
        upper = numerics.decode(raw >> np.uint64(narrow) & mask, inner)
        lower = numerics.decode(raw & mask, inner)
        if scale:
            high, low = _scales(scale[0])
            factor = -1 if name not in ("f16", "bf16") else 1
            upper, lower = upper * high**factor, lower * low**factor
        return join(upper, lower)

    sources = [source, d.source(2, "b16")] if scaled else [source]
    return d.elementwise(of_pair, target, *sources)


def _bits(name: str) -> int:
    return 8 if name == "ue8m0" else FORMATS[name].bits


def _scales(codes: Any) -> tuple[Array, Array]:
    """Two ue8m0 scales, of the upper and of the lower value."""
    raw = np.asarray(codes).astype(np.uint64)
    return (
        numerics.decode(raw >> np.uint64(8), "ue8m0"),
        numerics.decode(raw & np.uint64(0xFF), "ue8m0"),
    )


def _fast_pair(name: str, mode: str, finite: bool, relu: bool) -> Callable[..., Array] | None:
    """Two float32 to two 16-bit floats, to nearest: what epilogues do all the time."""
    if mode != "rn" or finite or relu or name not in ("f16", "bf16"):
        return None
    single = numerics.f16_of_f32 if name == "f16" else numerics.bf16_of_f32

    def function(a: Any, b: Any) -> Array:
        upper, lower = np.broadcast_arrays(np.asarray(a), np.asarray(b))
        return single(upper).astype(np.uint32) << np.uint32(16) | single(lower)

    return function


def _two_halves(width: int, dtype: Any) -> poison.Rule:
    """Which of the two parts are undefined."""
    ones = dtype((1 << width) - 1)

    def rule(values: list[Any], poisons: list[Array | None]) -> Array:
        masks = poison.filled(values, poisons)
        upper = np.where(masks[0] != 0, ones, dtype(0))
        lower = np.where(masks[1] != 0, ones, dtype(0))
        found: Array = upper << dtype(width) | lower
        for other in masks[2:]:
            found = np.where(other != 0, dtype((1 << 2 * width) - 1), found)
        return found

    return rule


@instruction("cvt.pack")
def convert_packed(d: Decoder) -> Step:
    """PTX ISA 9.7.9.22: two saturated integers, below the upper ones of c."""
    if not d.modifiers.flag("sat"):
        d.refuse("cvt.pack has .sat")
    kinds = list(d.modifiers.left)
    d.modifiers.left.clear()
    to = kinds[0]
    bits = int(to[1:])
    low, high = _range(to)
    if bits == 16:
        d.expect(3)
    else:
        d.expect(4)
    sources = [d.source(1, "s32", wider=True), d.source(2, "s32", wider=True)]
    if len(d.operands) == 4:
        sources.append(d.source(3, "b32", wider=True))

    def function(a: Any, b: Any, *rest: Any) -> Array:
        parts = [np.clip(np.asarray(v).astype(np.int64), low, high) for v in (a, b)]
        mask = (1 << bits) - 1
        result = (parts[0] & mask) << bits | (parts[1] & mask)
        if rest:
            result = result | np.asarray(rest[0]).astype(np.int64) << 2 * bits
        return (result & 0xFFFFFFFF).astype(np.uint32)

    return d.elementwise(function, d.target(0, "u32", wider=True), *sources)
