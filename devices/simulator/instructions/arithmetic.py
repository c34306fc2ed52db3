"""Arithmetic: one builder per opcode, which takes the integer or the floating-point form.

Integers: PTX ISA 9.7.1 and 9.7.2. Floating point is in `floating.py`, of all widths.
"""

from typing import Any

import numpy as np

from ..decoder import Decoder, Step, instruction
from ..groups import Array
from ..ptx_syntax import Register
from . import floating, poison

INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64", "u16x2", "s16x2")
_CARRY = Register("%carry", "pred")
_WORDS = ("u32", "s32", "u64", "s64")
"""Types of additions with a carry."""


def _kind(d: Decoder) -> str:
    return d.modifiers.one_of(*INTEGERS, *floating.FLOATS)


@instruction("add", "sub")
def add(d: Decoder) -> Step:
    """PTX ISA 9.7.1.1-2, 9.7.3.3-4, 9.7.4.1-2; with .cc 9.7.2.1 and .3."""
    kind = _kind(d)
    if kind in floating.FLOATS:
        return floating.two_operands(d, kind, d.opcode)
    d.expect(3)
    if d.modifiers.flag("cc"):
        return _with_carry(d, kind, takes=False, gives=True)
    function: Any = np.add if d.opcode == "add" else np.subtract
    if d.modifiers.flag("sat"):
        function = _saturating(function)
    return _packed_or_plain(d, kind, function)


@instruction("addc", "subc")
def add_with_carry(d: Decoder) -> Step:
    """PTX ISA 9.7.2.2 and .4."""
    kind = d.modifiers.one_of(*_WORDS)
    d.expect(3)
    return _with_carry(d, kind, takes=True, gives=d.modifiers.flag("cc"))


def _with_carry(d: Decoder, kind: str, takes: bool, gives: bool, factors: Any = None) -> Step:
    """Additions of several words: a carry of the thread joins them.

    Args:
        d: at the instruction.
        kind: type of a word.
        takes, gives: whether a carry comes in, and goes out.
        factors: the function whose result, of the first two operands, is added to the third.
    """
    if kind not in _WORDS:
        d.refuse(f"{d.opcode} with a carry is for words of 32 and 64 bits")
    unsigned = f"u{kind[1:]}"
    minus = d.opcode.startswith("sub")
    target = d.target(0, unsigned)
    if factors is None:
        sources = [d.source(1, unsigned), d.source(2, unsigned)]
    else:
        sources = [d.source(1, kind), d.source(2, kind), d.source(3, unsigned)]
    carry_in = d.source(_CARRY, "pred")
    carry_out = d.target(_CARRY, "pred")

    def step(group: Any) -> None:
        values = [np.asarray(source.read(group)) for source in sources]
        a, b = values if factors is None else (factors(*values[:2]), values[2])
        bad = [source.poison(group) for source in (*sources, *([carry_in] if takes else []))]
        carry = carry_in.read(group).astype(a.dtype) if takes else a.dtype.type(0)
        total = a - b - carry if minus else a + b + carry
        # The carry of a sum, or the borrow of a difference.
        if minus:
            out = (a < b) | ((a == b) & (carry != 0))
        else:
            out = (total < a) | ((total == a) & (carry != 0))
        undefined = None
        for part in bad:
            if part is not None:
                undefined = part != 0 if undefined is None else undefined | (part != 0)
        ones = None
        if undefined is not None:
            ones = np.where(undefined, np.array(np.iinfo(total.dtype).max, total.dtype), 0)
        target.put(group, total, ones)
        if gives:
            carry_out.put(group, np.broadcast_to(out, total.shape), undefined)

    return step


def _saturating(function: Any) -> Any:
    def saturated(a: Any, b: Any) -> Array:
        wide = function(np.asarray(a, np.int64), np.asarray(b, np.int64))
        return np.clip(wide, -(2**31), 2**31 - 1).astype(np.int32)

    return saturated


def _packed_or_plain(d: Decoder, kind: str, function: Any) -> Step:
    """Two operands of a type, or of two 16-bit integers in a register."""
    if not kind.endswith("x2"):
        return d.elementwise(function, d.target(0, kind), d.source(1, kind), d.source(2, kind))
    half = np.int16 if kind[0] == "s" else np.uint16

    def pairs(a: Any, b: Any) -> Array:
        found: Array = function(floating.split(a, half), floating.split(b, half)).view(np.uint32)
        return found

    target = d.target(0, "u32", given=kind)
    sources = [d.source(place, "u32", given=kind) for place in (1, 2)]
    return d.elementwise(pairs, target, *sources, poison=poison.halves)


@instruction("mul")
def multiply(d: Decoder) -> Step:
    """PTX ISA 9.7.1.3, 9.7.3.5, 9.7.4.3."""
    kind = _kind(d)
    if kind in floating.FLOATS:
        return floating.two_operands(d, kind, "mul")
    d.expect(3)
    part = d.modifiers.one_of("lo", "hi", "wide")
    target = d.target(0, _wide(kind) if part == "wide" else kind)
    return d.elementwise(_product(kind, part), target, d.source(1, kind), d.source(2, kind))


def _wide(kind: str) -> str:
    return f"{kind[0]}{2 * int(kind[1:])}"


def _product(kind: str, part: str) -> Any:
    """The function of `mul` for a type and a part of the product."""
    bits, signed = int(kind[1:]), kind[0] == "s"
    if part == "lo":
        return np.multiply
    if part == "hi" and bits == 64:
        return _high_64_signed if signed else _high_64
    wide = np.dtype(f"{'i' if signed else 'u'}{bits // 4}").type
    narrow = np.dtype(f"{'i' if signed else 'u'}{bits // 8}").type
    if part == "wide":
        return lambda a, b: np.asarray(a).astype(wide) * np.asarray(b).astype(wide)
    return lambda a, b: (
        (np.asarray(a).astype(wide) * np.asarray(b).astype(wide)) >> wide(bits)
    ).astype(narrow)


def _high_64(a: Any, b: Any) -> Array:
    """The upper half of an unsigned 64 x 64-bit product, from products of 32-bit halves."""
    a, b = np.asarray(a, np.uint64), np.asarray(b, np.uint64)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
    middle = a1 * b0 + (a0 * b0 >> half)
    other = a0 * b1 + (middle & low)
    result: Array = a1 * b1 + (middle >> half) + (other >> half)
    return result


def _high_64_signed(a: Any, b: Any) -> Array:
    a, b = np.asarray(a, np.int64), np.asarray(b, np.int64)
    result = _high_64(a.view(np.uint64), b.view(np.uint64)).view(np.int64)
    return result - np.where(a < 0, b, 0) - np.where(b < 0, a, 0)


@instruction("mad", "mad24")
def multiply_add(d: Decoder) -> Step:
    """PTX ISA 9.7.1.4 and .6; on floating-point numbers it is `fma`."""
    kind = _kind(d)
    if kind in floating.FLOATS:
        return floating.fused(d, kind)
    d.expect(4)
    part = d.modifiers.one_of("lo", "hi", "wide")
    saturate, gives = d.modifiers.flag("sat"), d.modifiers.flag("cc")
    if saturate and (part != "hi" or kind != "s32"):
        d.refuse(f"{d.opcode}.{part}.{kind} has no .sat; .hi.s32 has")
    if d.opcode == "mad24":
        if gives or part == "wide" or kind not in ("u32", "s32"):
            d.refuse("mad24 has .lo or .hi, of u32 or s32, and no .cc")
        product = _product_24(kind, part == "hi")
    else:
        product = _product(kind, part)
    if gives:
        return _multiply_with_carry(d, kind, part, takes=False, gives=True)
    if saturate:
        sources = [d.source(place, kind) for place in (1, 2, 3)]
        total = _saturating(np.add)
        return d.elementwise(lambda a, b, c: total(product(a, b), c), d.target(0, kind), *sources)
    result = _wide(kind) if part == "wide" else kind
    sources = [d.source(1, kind), d.source(2, kind), d.source(3, result)]
    return d.elementwise(lambda a, b, c: product(a, b) + c, d.target(0, result), *sources)


@instruction("madc")
def multiply_add_with_carry(d: Decoder) -> Step:
    """PTX ISA 9.7.2.6."""
    kind = d.modifiers.one_of("u32", "s32", "u64", "s64")
    d.expect(4)
    part = d.modifiers.one_of("lo", "hi")
    return _multiply_with_carry(d, kind, part, takes=True, gives=d.modifiers.flag("cc"))


def _multiply_with_carry(d: Decoder, kind: str, part: str, takes: bool, gives: bool) -> Step:
    """PTX ISA 9.7.2.5-6: half of a product, and a word of a longer sum."""
    if part == "wide" or kind[1:] not in ("32", "64"):
        d.refuse(f"{d.opcode}.{part}.{kind} has no .cc")
    product = _product(kind, part)
    unsigned = np.dtype(f"u{int(kind[1:]) // 8}").type
    return _with_carry(
        d,
        kind,
        takes=takes,
        gives=gives,
        factors=lambda a, b: np.asarray(product(a, b)).astype(unsigned),
    )


@instruction("mul24")
def multiply_24(d: Decoder) -> Step:
    """PTX ISA 9.7.1.5: the product of the low 24 bits."""
    kind = d.modifiers.one_of("u32", "s32")
    high = d.modifiers.one_of("lo", "hi") == "hi"
    d.expect(3)
    function = _product_24(kind, high)
    return d.elementwise(function, d.target(0, kind), d.source(1, kind), d.source(2, kind))


def _product_24(kind: str, high: bool) -> Any:
    """The low or the high 32 bits of the 48-bit product of the low 24 bits."""
    dtype = np.int64 if kind == "s32" else np.uint64

    def function(a: Any, b: Any) -> Array:
        low = [np.asarray(v).astype(dtype) & dtype(0xFFFFFF) for v in (a, b)]
        if kind == "s32":
            low = [np.where(v & dtype(0x800000), v - dtype(1 << 24), v) for v in low]
        product = low[0] * low[1]
        return (product >> dtype(16) if high else product).astype(
            np.int32 if kind == "s32" else np.uint32
        )

    return function


@instruction("fma")
def fused_multiply_add(d: Decoder) -> Step:
    """PTX ISA 9.7.3.6, 9.7.4.4."""
    return floating.fused(d, d.modifiers.one_of(*floating.FLOATS))


@instruction("div")
def divide(d: Decoder) -> Step:
    """PTX ISA 9.7.1.8, 9.7.3.8. The result of an integer division by zero is undefined."""
    kind = _kind(d)
    if kind in floating.FLOATS:
        return floating.divide(d, kind)
    return _divided(d, kind, lambda q, r: q)


@instruction("rem")
def remainder(d: Decoder) -> Step:
    """PTX ISA 9.7.1.9: the sign is that of the dividend."""
    return _divided(d, d.modifiers.one_of(*INTEGERS), lambda q, r: r)


def _divided(d: Decoder, kind: str, choose: Any) -> Step:
    d.expect(3)

    def function(a: Any, b: Any) -> Array:
        divisor = np.where(b == 0, np.asarray(b).dtype.type(1), b)
        quotient, rest = np.floor_divide(a, divisor), np.remainder(a, divisor)
        if kind[0] == "s":
            # Towards zero instead of downwards.
            rounds = (rest != 0) & ((np.asarray(a) < 0) != (divisor < 0))
            quotient = quotient + rounds
            rest = rest - np.where(rounds, divisor, divisor.dtype.type(0))
        found: Array = choose(quotient, rest)
        return found

    target, sources = d.target(0, kind), [d.source(1, kind), d.source(2, kind)]
    plain = d.elementwise(function, target, *sources)

    def step(group: Any) -> int | None:
        zero = np.broadcast_to(np.asarray(sources[1].read(group)) == 0, (len(group), 32))
        action = plain(group)
        if target.register is not None and zero.any():
            bad = zero if group.mask is None else zero & group.mask
            if bad.any():
                register = target.register
                ones = np.array(np.iinfo(register.data.dtype).max, register.data.dtype)
                register.taint(group, np.where(bad, ones, 0))
        return action

    return step


@instruction("min", "max")
def extreme(d: Decoder) -> Step:
    """PTX ISA 9.7.1.12-13, 9.7.3.11-12, 9.7.4.7-8."""
    kind = _kind(d)
    if kind in floating.FLOATS:
        return floating.extreme(d, kind, d.opcode == "max")
    d.expect(3)
    function: Any = np.minimum if d.opcode == "min" else np.maximum
    if d.modifiers.flag("relu"):
        chosen = function
        function = lambda a, b: np.maximum(chosen(a, b), 0)  # noqa: E731
    return _packed_or_plain(d, kind, function)


@instruction("abs", "neg")
def sign(d: Decoder) -> Step:
    """PTX ISA 9.7.1.10-11, 9.7.3.9-10, 9.7.4.5-6."""
    kind = _kind(d)
    if kind in floating.FLOATS:
        return floating.sign(d, kind, d.opcode)
    d.expect(2)
    function = np.abs if d.opcode == "abs" else np.negative
    return d.elementwise(function, d.target(0, kind), d.source(1, kind))


@instruction("sad")
def absolute_difference(d: Decoder) -> Step:
    """PTX ISA 9.7.1.7: |a - b| + c."""
    kind = d.modifiers.one_of(*INTEGERS)
    d.expect(4)
    sources = [d.source(place, kind) for place in (1, 2, 3)]
    return d.elementwise(
        lambda a, b, c: np.where(a < b, b - a, a - b) + c, d.target(0, kind), *sources
    )


@instruction("dp4a", "dp2a")
def dot_product(d: Decoder) -> Step:
    """PTX ISA 9.7.1.25-26: products of bytes, or of two 16-bit values and two bytes, and c."""
    pairs = d.opcode == "dp2a"
    high = pairs and d.modifiers.one_of("lo", "hi") == "hi"
    kinds = [d.modifiers.one_of("u32", "s32"), d.modifiers.one_of("u32", "s32")]
    d.expect(4)

    def parts(value: Any, kind: str, bits: int) -> Array:
        raw = np.ascontiguousarray(np.atleast_1d(value)).view(np.uint32)
        split = raw.view(np.dtype(f"{'i' if kind == 's32' else 'u'}{bits // 8}"))
        return split.reshape(*raw.shape, 32 // bits).astype(np.int64)

    def function(a: Any, b: Any, c: Any) -> Array:
        first = parts(a, kinds[0], 16 if pairs else 8)
        second = parts(b, kinds[1], 8)
        if pairs:
            second = second[..., 2:] if high else second[..., :2]
        total = (first * second).sum(axis=-1) + np.asarray(c).astype(np.int64)
        return (total & 0xFFFFFFFF).astype(np.uint32)

    return d.elementwise(
        function, d.target(0, "u32"), *(d.source(place, "u32") for place in (1, 2, 3))
    )
