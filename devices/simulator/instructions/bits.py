"""Bits: logic, shifts, fields, permutations and counts (PTX ISA 9.7.1 and 9.7.8)."""

from typing import Any

import numpy as np

from ..decoder import Decoder, Step, instruction
from ..groups import Array, Group
from ..ptx_syntax import Integer
from . import poison


def _u32(value: int) -> Any:
    return np.uint32(value)


@instruction("and", "or", "xor")
def logic(d: Decoder) -> Step:
    """PTX ISA 9.7.8.1-3."""
    kind = d.modifiers.one_of("pred", "b16", "b32", "b64")
    d.expect(3)
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[d.opcode]
    rule = {"and": poison.bitwise_and, "or": poison.bitwise_or, "xor": poison.bitwise}[d.opcode]
    return d.elementwise(
        function, d.target(0, kind), d.source(1, kind), d.source(2, kind), poison=rule
    )


@instruction("not")
def invert(d: Decoder) -> Step:
    """PTX ISA 9.7.8.4."""
    kind = d.modifiers.one_of("pred", "b16", "b32", "b64")
    d.expect(2)
    return d.elementwise(
        np.bitwise_not, d.target(0, kind), d.source(1, kind), poison=poison.bitwise
    )


@instruction("cnot")
def logical_not(d: Decoder) -> Step:
    """PTX ISA 9.7.8.5: one if the operand is zero."""
    kind = d.modifiers.one_of("b16", "b32", "b64")
    d.expect(2)
    return d.elementwise(lambda a: (a == 0).astype(a.dtype), d.target(0, kind), d.source(1, kind))


@instruction("lop3")
def lop3(d: Decoder) -> Step:
    """PTX ISA 9.7.8.6: any function of three bits, by its table."""
    combine = d.modifiers.one_of("or", "and", default="")
    d.modifiers.one_of("b32")
    d.expect(6 if combine else 5)
    table = d.operands[4]
    if not isinstance(table, Integer):
        d.refuse("the table of lop3 is a constant")
    function = lop3_function(table.value & 0xFF)
    sources = [d.source(place, "b32") for place in (1, 2, 3)]
    if combine:
        return _lop3_with_predicate(d, combine, function, sources)
    return d.elementwise(
        function, d.target(0, "b32"), *sources, poison=poison.three_inputs(function)
    )


def _lop3_with_predicate(d: Decoder, combine: str, function: Any, sources: list[Any]) -> Step:
    """`d|p`: also whether the result is not zero, combined with another predicate."""
    first, second = d.pair(0)
    target, other, third = d.target(first, "b32"), d.target(second, "pred"), d.source(5, "pred")
    rule = poison.three_inputs(function)
    join = np.logical_or if combine == "or" else np.logical_and
    joined = poison.bitwise_or if combine == "or" else poison.bitwise_and

    def step(group: Group) -> None:
        shape = (len(group), 32)
        values = [np.broadcast_to(source.read(group), shape) for source in sources]
        result = function(*values)
        bits, of_third = [source.poison(group) for source in sources], third.poison(group)
        bad = None if all(part is None for part in bits) else rule(values, bits)
        holds, given = result != 0, np.broadcast_to(third.read(group), shape)
        wild = of_third
        if bad is not None:
            # One defined bit that is set decides.
            unknown = (bad != 0) & ((result & ~bad) == 0)
            wild = joined([holds, given], [unknown, of_third])
        elif of_third is not None:
            wild = joined([holds, given], [None, of_third])
        target.put(group, result, bad)
        other.put(group, join(holds, given), wild if wild is not None and wild.any() else None)

    return step


_LOP3: dict[int, Any] = {
    0x80: lambda a, b, c: a & b & c,
    0xFE: lambda a, b, c: a | b | c,
    0x96: lambda a, b, c: a ^ b ^ c,
    0x6A: lambda a, b, c: (a & b) ^ c,
    0xEA: lambda a, b, c: (a & b) | c,
    0xF8: lambda a, b, c: a | (b & c),
    0xCA: lambda a, b, c: c ^ (a & (b ^ c)),
    0x78: lambda a, b, c: a ^ (b & c),
    0xC0: lambda a, b, c: (a & b) | (c & _u32(0)),
    0x3C: lambda a, b, c: (a ^ b) | (c & _u32(0)),
}


def lop3_function(table: int) -> Any:
    """The function of a table: bit 4a + 2b + c of it is the result for bits a, b, c."""
    known = _LOP3.get(table)
    if known is not None:
        return known

    def function(a: Any, b: Any, c: Any) -> Array:
        shape = np.broadcast_shapes(np.shape(a), np.shape(b), np.shape(c))
        result = np.zeros(shape, np.uint32)
        for entry in range(8):
            if table >> entry & 1:
                result |= (
                    (a if entry & 4 else ~a) & (b if entry & 2 else ~b) & (c if entry & 1 else ~c)
                )
        return result

    return function


@instruction("shl", "shr")
def shift(d: Decoder) -> Step:
    """PTX ISA 9.7.8.8-9: amounts beyond the width count as the width."""
    kind = d.modifiers.one_of("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64")
    d.expect(3)
    move = np.left_shift if d.opcode == "shl" else np.right_shift
    source = d.source(1, kind)
    dtype = source.dtype

    def function(a: Any, amount: Any) -> Any:
        return move(a, np.minimum(amount, 64).astype(dtype))

    amount = d.source(2, "u32")
    operand = d.operands[2]
    if isinstance(operand, Integer):
        fixed = np.array(min(operand.value & 0xFFFFFFFF, 64), dtype)[()]
        return d.elementwise(
            lambda a: move(a, fixed),
            d.target(0, kind),
            source,
            poison=poison.moved(lambda a: move(a, fixed)),
        )
    return d.elementwise(function, d.target(0, kind), source, amount, poison=poison.moved(function))


@instruction("shf")
def funnel_shift(d: Decoder) -> Step:
    """PTX ISA 9.7.8.7: 32 bits of the 64-bit value {b, a}."""
    left = d.modifiers.one_of("l", "r") == "l"
    wraps = d.modifiers.one_of("clamp", "wrap") == "wrap"
    d.modifiers.one_of("b32")
    d.expect(4)

    def function(a: Any, b: Any, c: Any) -> Array:
        both = np.asarray(b).astype(np.uint64) << np.uint64(32) | np.asarray(a).astype(np.uint64)
        amount = np.asarray(c & _u32(31) if wraps else np.minimum(c, 32)).astype(np.uint64)
        moved = both << amount >> np.uint64(32) if left else both >> amount
        return moved.astype(np.uint32)

    sources = [d.source(1, "u32", given="b32"), d.source(2, "u32", given="b32"), d.source(3, "u32")]
    return d.elementwise(function, d.target(0, "b32"), *sources, poison=poison.moved(function, 2))


@instruction("prmt")
def permute(d: Decoder) -> Step:
    """PTX ISA 9.7.9.7: four bytes, each chosen of eight."""
    d.modifiers.one_of("b32")
    mode = d.modifiers.one_of("f4e", "b4e", "rc8", "ecl", "ecr", "rc16", default="")
    d.expect(4)
    sources = [d.source(place, "u32", given="b32") for place in (1, 2, 3)]
    selector = d.operands[3]

    def function(a: Any, b: Any, c: Any) -> Array:
        both = np.asarray(b).astype(np.uint64) << np.uint64(32) | np.asarray(a).astype(np.uint64)
        result = np.zeros(np.broadcast_shapes(both.shape, np.shape(c)), np.uint32)
        for place in range(4):
            choice = _selection(c, place, mode)
            byte = (
                both >> (np.asarray(choice & _u32(7)).astype(np.uint64) << np.uint64(3))
            ).astype(np.uint32) & _u32(0xFF)
            sign = np.where(byte & _u32(0x80), _u32(0xFF), _u32(0))
            byte = np.where(choice & _u32(8), sign, byte)
            result |= byte << _u32(8 * place)
        return result

    if isinstance(selector, Integer) and not mode:
        fixed = _fixed_permutation(selector.value)
        return d.elementwise(fixed, d.target(0, "b32"), *sources[:2], poison=poison.moved(fixed, 2))
    return d.elementwise(function, d.target(0, "b32"), *sources, poison=poison.moved(function, 2))


def _fixed_permutation(selector: int) -> Any:
    """`prmt` with a constant selector: bytes gathered from those of a and b."""

    def function(a: Any, b: Any) -> Array:
        shape = np.broadcast_shapes(np.shape(a), np.shape(b))
        values = [np.broadcast_to(np.asarray(v, np.uint32), shape) for v in (a, b)]
        result = np.zeros(shape, np.uint32)
        for place in range(4):
            choice = selector >> (4 * place) & 0xF
            byte = values[choice >> 2 & 1] >> _u32(8 * (choice & 3)) & _u32(0xFF)
            if choice & 8:
                byte = np.where(byte & _u32(0x80), _u32(0xFF), _u32(0))
            result |= byte << _u32(8 * place)
        return result

    return function


def _selection(c: Any, place: int, mode: str) -> Any:
    """The selector of one byte, of 4 bits."""
    if not mode:
        return c >> _u32(4 * place) & _u32(0xF)
    start = c & _u32(3)
    if mode == "f4e":
        return start + _u32(place)
    if mode == "b4e":
        return (start - _u32(place)) & _u32(7)
    if mode == "rc8":
        return start
    if mode == "ecl":
        return np.maximum(start, _u32(place))
    if mode == "ecr":
        return np.minimum(start, _u32(place))
    return (start & _u32(1)) * _u32(2) + _u32(place & 1)


@instruction("bfe")
def extract_field(d: Decoder) -> Step:
    """PTX ISA 9.7.1.20: bits b to b + c - 1 of a, extended by zeros or the sign."""
    kind = d.modifiers.one_of("u32", "s32", "u64", "s64")
    d.expect(4)
    bits, signed = int(kind[1:]), kind[0] == "s"
    sources = [d.source(1, f"u{bits}"), d.source(2, "u32"), d.source(3, "u32")]

    def function(a: Any, b: Any, c: Any) -> Array:
        wide = np.asarray(a).astype(np.uint64)
        if signed and bits == 32:
            wide = np.asarray(a).view(np.int32).astype(np.int64).view(np.uint64)
        at = np.asarray(b & _u32(0xFF)).astype(np.uint64)
        length = np.asarray(c & _u32(0xFF)).astype(np.uint64)
        last = np.minimum(at + length - np.uint64(1), np.uint64(bits - 1))
        last = np.where(length == 0, np.uint64(bits - 1), last)
        sign = wide >> last & np.uint64(1) if signed else np.zeros((), np.uint64)
        sign = np.where(length == 0, np.uint64(0), sign)
        # numpy gives zeros for shifts of 64 and more
        held = np.minimum(length, np.uint64(bits))
        mask = np.where(held >= 64, ~np.uint64(0), (np.uint64(1) << held) - np.uint64(1))
        inside = np.where(at >= bits, np.uint64(0), ~np.uint64(0) >> np.uint64(64 - bits) >> at)
        mask = mask & inside
        field = np.where(at >= bits, np.uint64(0), wide >> at) & mask
        result = np.where(sign != 0, field | ~mask, field)
        return result.astype(np.uint32 if bits == 32 else np.uint64)

    return d.elementwise(function, d.target(0, f"u{bits}"), *sources, poison=poison.moved(function))


@instruction("bfi")
def insert_field(d: Decoder) -> Step:
    """PTX ISA 9.7.1.21: the low d bits of a replace those of b from bit c on."""
    kind = d.modifiers.one_of("b32", "b64")
    d.expect(5)
    bits = int(kind[1:])
    sources = [d.source(1, kind), d.source(2, kind), d.source(3, "u32"), d.source(4, "u32")]

    def function(a: Any, b: Any, c: Any, length: Any) -> Array:
        at = np.asarray(c & _u32(0xFF)).astype(np.uint64)
        held = np.asarray(length & _u32(0xFF)).astype(np.uint64)
        ones = np.where(held >= 64, ~np.uint64(0), (np.uint64(1) << held) - np.uint64(1))
        mask = np.where(at >= bits, np.uint64(0), ones << at)
        moved = np.where(at >= bits, np.uint64(0), np.asarray(a).astype(np.uint64) << at)
        result = (moved & mask) | (np.asarray(b).astype(np.uint64) & ~mask)
        return result.astype(np.uint32 if bits == 32 else np.uint64)

    return d.elementwise(function, d.target(0, kind), *sources, poison=poison.moved(function, 2))


@instruction("bmsk")
def bit_mask(d: Decoder) -> Step:
    """PTX ISA 9.7.1.24: b ones from bit a on."""
    wraps = d.modifiers.one_of("clamp", "wrap") == "wrap"
    d.modifiers.one_of("b32")
    d.expect(3)

    def limited(value: Any) -> Array:
        return np.asarray(value & _u32(31) if wraps else np.minimum(value, 32)).astype(np.uint64)

    def function(a: Any, b: Any) -> Array:
        ones = (np.uint64(1) << limited(b)) - np.uint64(1)
        return (ones << limited(a)).astype(np.uint32)

    return d.elementwise(function, d.target(0, "u32"), d.source(1, "u32"), d.source(2, "u32"))


@instruction("szext")
def sign_extend(d: Decoder) -> Step:
    """PTX ISA 9.7.1.23: the low b bits of a, extended by zeros or their sign."""
    wraps = d.modifiers.one_of("clamp", "wrap") == "wrap"
    kind = d.modifiers.one_of("u32", "s32")
    d.expect(3)

    def function(a: Any, b: Any) -> Array:
        width = np.asarray(b & _u32(31) if wraps else np.minimum(b, 32)).astype(np.int64)
        wide = np.asarray(a).astype(np.int64) & ((np.int64(1) << width) - 1)
        if kind == "s32":
            sign = np.where(width == 0, 0, wide >> np.maximum(width - 1, 0) & 1)
            wide = wide - (sign << width)
        return (wide & 0xFFFFFFFF).astype(np.uint32)

    return d.elementwise(function, d.target(0, "u32"), d.source(1, "u32"), d.source(2, "u32"))


@instruction("brev")
def reverse(d: Decoder) -> Step:
    """PTX ISA 9.7.1.19: the bits in reverse order."""
    kind = d.modifiers.one_of("b32", "b64")
    d.expect(2)

    def function(a: Any) -> Any:
        swapped = np.asarray(a).byteswap()
        for width, mask in ((4, 0x0F), (2, 0x33), (1, 0x55)):
            ones = a.dtype.type(int.from_bytes(bytes([mask]) * a.dtype.itemsize, "little"))
            by = a.dtype.type(width)
            swapped = (swapped >> by & ones) | ((swapped & ones) << by)
        return swapped

    return d.elementwise(
        function, d.target(0, kind), d.source(1, kind), poison=poison.moved(function)
    )


def count_ones(a: Any) -> Array:
    """Bits that are set, uint32."""
    value = np.ascontiguousarray(np.atleast_1d(a))
    ones = np.unpackbits(value.view(np.uint8).reshape(*value.shape, -1), axis=-1)
    return ones.sum(axis=-1, dtype=np.uint32).reshape(np.shape(a))


def highest_one(a: Any) -> Array:
    """Place of the highest bit that is set, int64; -1 if none is."""
    value = np.asarray(a).astype(np.uint64)
    high, low = (value >> np.uint64(32)).astype(np.float64), (value & np.uint64(0xFFFFFFFF))
    _, above = np.frexp(high)
    _, below = np.frexp(low.astype(np.float64))
    return np.where(high > 0, above + 31, below - 1).astype(np.int64)


@instruction("popc")
def population_count(d: Decoder) -> Step:
    """PTX ISA 9.7.1.16."""
    kind = d.modifiers.one_of("b32", "b64")
    d.expect(2)
    return d.elementwise(count_ones, d.target(0, "u32"), d.source(1, kind))


@instruction("clz")
def leading_zeros(d: Decoder) -> Step:
    """PTX ISA 9.7.1.17."""
    kind = d.modifiers.one_of("b32", "b64")
    d.expect(2)
    bits = int(kind[1:])
    return d.elementwise(
        lambda a: (bits - 1 - highest_one(a)).astype(np.uint32),
        d.target(0, "u32"),
        d.source(1, kind),
    )


@instruction("bfind")
def find_highest(d: Decoder) -> Step:
    """PTX ISA 9.7.1.18: place of the highest bit that differs from the sign."""
    amount = d.modifiers.flag("shiftamt")
    kind = d.modifiers.one_of("u32", "s32", "u64", "s64")
    d.expect(2)
    bits = int(kind[1:])

    def function(a: Any) -> Array:
        value = np.where(a < 0, ~a, a) if kind[0] == "s" else a
        found = highest_one(value.view(np.dtype(f"u{bits // 8}")))
        if amount:
            found = np.where(found < 0, found, bits - 1 - found)
        return (found & 0xFFFFFFFF).astype(np.uint32)

    return d.elementwise(function, d.target(0, "u32"), d.source(1, kind))


@instruction("fns")
def find_nth(d: Decoder) -> Step:
    """PTX ISA 9.7.1.22: place of the n-th set bit counted from a base, up or down."""
    d.modifiers.one_of("b32")
    d.expect(4)

    def single(mask: int, base: int, offset: int) -> int:
        if offset == 0:
            return base if mask >> base & 1 else 0xFFFFFFFF
        step, place, left = (1 if offset > 0 else -1), base, abs(offset)
        while 0 <= place < 32:
            left -= mask >> place & 1
            if left == 0:
                return place
            place += step
        return 0xFFFFFFFF

    several = np.vectorize(single, otypes=[np.uint32])

    def function(mask: Any, base: Any, offset: Any) -> Array:
        found: Array = several(mask.astype(np.int64), base.astype(np.int64), offset)
        return found

    sources = [
        d.source(place, each, given="b32") for place, each in enumerate(("u32", "u32", "s32"), 1)
    ]
    return d.elementwise(function, d.target(0, "u32", given="b32"), *sources)
