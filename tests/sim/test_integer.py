"""Integer and bit instructions against Python's integers (PTX ISA 9.7.1, 9.7.2, 9.7.8)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

COUNT = 256
M32, M64 = 2**32 - 1, 2**64 - 1


def s32(value: int) -> int:
    """A 32-bit pattern as a signed number."""
    return value - 2**32 if value >> 31 else value


def s64(value: int) -> int:
    return value - 2**64 if value >> 63 else value


def numbers(rng: np.random.Generator, dtype: Any) -> np.ndarray:
    """Random bits, with the values at which things go wrong among them."""
    bits = np.dtype(dtype).itemsize * 8
    values = rng.integers(0, 2**bits, COUNT, dtype=dtype)
    edges = [0, 1, 2, 2 ** (bits - 1) - 1, 2 ** (bits - 1), 2**bits - 1, 31, 32, 33]
    values[rng.permutation(COUNT)[: 8 * len(edges)]] = np.array(edges * 8, dtype)
    return values


def quotient(a: int, b: int) -> int:
    """Division towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def shifted(a: int, b: int, left: bool) -> int:
    return (a << min(b, 64)) if left else a >> min(b, 64)


def permuted(a: int, b: int, selector: int) -> int:
    data = (b << 32 | a).to_bytes(8, "little")
    result = 0
    for place in range(4):
        choice = selector >> 4 * place & 0xF
        byte = data[choice & 7]
        result |= (0xFF * (byte >> 7) if choice & 8 else byte) << 8 * place
    return result


def field(a: int, at: int, length: int, bits: int, signed: bool) -> int:
    at, length = at & 0xFF, length & 0xFF
    top = min(at + length - 1, bits - 1)
    sign = a >> top & 1 if signed and length else 0
    result = 0
    for place in range(bits):
        inside = place < length and at + place < bits
        result |= (a >> (at + place) & 1 if inside else sign) << place
    return result


def inserted(a: int, b: int, at: int, length: int, bits: int) -> int:
    at, length = at & 0xFF, length & 0xFF
    for place in range(length):
        if at + place < bits:
            b = b & ~(1 << at + place) | (a >> place & 1) << at + place
    return b


def highest(value: int, bits: int, signed: bool) -> int:
    if signed and value >> (bits - 1):
        value ^= 2**bits - 1
    return (value.bit_length() - 1) & M32


# name -> (instruction with operands, types of the operands, function of unsigned integers)
TWO = {
    "add.u32": lambda a, b: a + b,
    "add.s32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "mul.lo.u32": lambda a, b: a * b,
    "mul.hi.u32": lambda a, b: a * b >> 32,
    "mul.hi.s32": lambda a, b: s32(a) * s32(b) >> 32,
    "mul24.lo.u32": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "min.u32": min,
    "max.u32": max,
    "min.s32": lambda a, b: min(s32(a), s32(b)),
    "max.s32": lambda a, b: max(s32(a), s32(b)),
    "add.sat.s32": lambda a, b: max(-(2**31), min(2**31 - 1, s32(a) + s32(b))),
    "sub.sat.s32": lambda a, b: max(-(2**31), min(2**31 - 1, s32(a) - s32(b))),
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: shifted(a, b, True),
    "shr.u32": lambda a, b: shifted(a, b, False),
    "shr.s32": lambda a, b: shifted(s32(a), b, False),
    "szext.clamp.u32": lambda a, b: a & (1 << min(b, 32)) - 1,
    "bmsk.clamp.b32": lambda a, b: (1 << min(b, 32)) - 1 << min(a, 32),
    "bmsk.wrap.b32": lambda a, b: (1 << b % 32) - 1 << a % 32,
}
TWO_64 = {
    "add.u64": lambda a, b: a + b,
    "sub.s64": lambda a, b: a - b,
    "mul.lo.u64": lambda a, b: a * b,
    "mul.hi.u64": lambda a, b: a * b >> 64,
    "mul.hi.s64": lambda a, b: s64(a) * s64(b) >> 64,
    "min.s64": lambda a, b: min(s64(a), s64(b)),
    "max.u64": max,
    "xor.b64": lambda a, b: a ^ b,
}
ONE = {
    "not.b32": lambda a: ~a,
    "neg.s32": lambda a: -a,
    "abs.s32": lambda a: abs(s32(a)),
    "cnot.b32": lambda a: int(a == 0),
    "popc.b32": lambda a: a.bit_count(),
    "clz.b32": lambda a: 32 - a.bit_length(),
    "brev.b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "bfind.u32": lambda a: highest(a, 32, False),
    "bfind.s32": lambda a: highest(a, 32, True),
    "bfind.shiftamt.u32": lambda a: 31 - (a.bit_length() - 1) if a else M32,
}
THREE = {
    "mad.lo.s32": lambda a, b, c: a * b + c,
    "mad.hi.u32": lambda a, b, c: (a * b >> 32) + c,
    "sad.u32": lambda a, b, c: abs(a - b) + c,
    "prmt.b32": permuted,
    "bfe.u32": lambda a, b, c: field(a, b, c, 32, False),
    "bfe.s32": lambda a, b, c: field(a, b, c, 32, True),
    "shf.l.wrap.b32": lambda a, b, c: (b << 32 | a) << c % 32 >> 32,
    "shf.r.wrap.b32": lambda a, b, c: (b << 32 | a) >> c % 32,
    "shf.l.clamp.b32": lambda a, b, c: (b << 32 | a) << min(c, 32) >> 32,
    "shf.r.clamp.b32": lambda a, b, c: (b << 32 | a) >> min(c, 32),
    "dp4a.u32.u32": lambda a, b, c: (
        sum(x * y for x, y in zip(a.to_bytes(4, "little"), b.to_bytes(4, "little"), strict=True))
        + c
    ),
}


@pytest.mark.parametrize("name", TWO)
def test_two_operands_of_32_bits(evaluate: Callable[..., Any], rng: Any, name: str) -> None:
    a, b = numbers(rng, np.uint32), numbers(rng, np.uint32)
    if "sh" in name or "bmsk" in name or "szext" in name:
        b %= 40
    (found,) = evaluate(f"{name} %d0, %a0, %a1;", [a, b], [np.uint32])
    assert found.tolist() == [
        TWO[name](x, y) & M32 for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]


@pytest.mark.parametrize("name", TWO_64)
def test_two_operands_of_64_bits(evaluate: Callable[..., Any], rng: Any, name: str) -> None:
    a, b = numbers(rng, np.uint64), numbers(rng, np.uint64)
    (found,) = evaluate(f"{name} %d0, %a0, %a1;", [a, b], [np.uint64])
    assert found.tolist() == [
        TWO_64[name](x, y) & M64 for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]


@pytest.mark.parametrize("name", ONE)
def test_one_operand(evaluate: Callable[..., Any], rng: Any, name: str) -> None:
    a = numbers(rng, np.uint32)
    (found,) = evaluate(f"{name} %d0, %a0;", [a], [np.uint32])
    assert found.tolist() == [ONE[name](x) & M32 for x in a.tolist()]


@pytest.mark.parametrize("name", ["popc.b64", "clz.b64", "bfind.u64", "bfind.s64"])
def test_counts_of_64_bits(evaluate: Callable[..., Any], rng: Any, name: str) -> None:
    a = numbers(rng, np.uint64)
    (found,) = evaluate(f"{name} %d0, %a0;", [a], [np.uint32])
    expected = {
        "popc.b64": lambda x: x.bit_count(),
        "clz.b64": lambda x: 64 - x.bit_length(),
        "bfind.u64": lambda x: highest(x, 64, False),
        "bfind.s64": lambda x: highest(x, 64, True),
    }[name]
    assert found.tolist() == [expected(x) for x in a.tolist()]


@pytest.mark.parametrize("name", THREE)
def test_three_operands(evaluate: Callable[..., Any], rng: Any, name: str) -> None:
    a, b, c = (numbers(rng, np.uint32) for _ in range(3))
    if "bfe" in name:
        b, c = b % 40, c % 40
    (found,) = evaluate(f"{name} %d0, %a0, %a1, %a2;", [a, b, c], [np.uint32])
    rows = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    assert found.tolist() == [THREE[name](*row) & M32 for row in rows]


@pytest.mark.parametrize("kind", ["s32", "u32", "s16", "u16"])
def test_wide_products(evaluate: Callable[..., Any], rng: Any, kind: str) -> None:
    bits = int(kind[1:])
    narrow, wide = np.dtype(f"u{bits // 8}"), np.dtype(f"u{bits // 4}")
    a, b = numbers(rng, narrow), numbers(rng, narrow)
    c = numbers(rng, wide)
    body = f"mul.wide.{kind} %d0, %a0, %a1; mad.wide.{kind} %d1, %a0, %a1, %a2;"
    product, total = evaluate(body, [a, b, c], [wide, wide])
    signed = np.dtype(f"i{bits // 8}") if kind[0] == "s" else narrow
    exact = [x * y for x, y in zip(a.view(signed).tolist(), b.view(signed).tolist(), strict=True)]
    mask = (1 << 2 * bits) - 1
    assert product.tolist() == [x & mask for x in exact]
    assert total.tolist() == [x + y & mask for x, y in zip(exact, c.tolist(), strict=True)]


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_division(evaluate: Callable[..., Any], rng: Any, kind: str) -> None:
    dtype = np.dtype(f"u{int(kind[1:]) // 8}")
    a, b = numbers(rng, dtype), numbers(rng, dtype)
    b[b == 0] = 7
    signed = np.dtype(f"i{dtype.itemsize}") if kind[0] == "s" else dtype
    body = f"div.{kind} %d0, %a0, %a1; rem.{kind} %d1, %a0, %a1;"
    q, r = evaluate(body, [a, b], [dtype, dtype])
    mask = 2 ** (8 * dtype.itemsize) - 1
    rows = list(zip(a.view(signed).tolist(), b.view(signed).tolist(), strict=True))
    assert q.tolist() == [quotient(x, y) & mask for x, y in rows]
    assert r.tolist() == [x - y * quotient(x, y) & mask for x, y in rows]


@pytest.mark.parametrize("table", [0x6A, 0x96, 0xE2, 0x01, 0xD8, 0xCA, 0xFE, 0x80, 0xC0, 0x3C])
def test_lop3(evaluate: Callable[..., Any], rng: Any, table: int) -> None:
    a, b, c = (numbers(rng, np.uint32) for _ in range(3))
    (found,) = evaluate(f"lop3.b32 %d0, %a0, %a1, %a2, {table};", [a, b, c], [np.uint32])
    for bit in range(32):
        index = (a >> bit & 1) * 4 + (b >> bit & 1) * 2 + (c >> bit & 1)
        assert ((found >> bit & 1) == (table >> index & 1)).all()


@pytest.mark.parametrize("selector", [0x3210, 0x5410, 0x7632, 0x4440, 0x8BFC, 0x0123])
def test_prmt_with_a_constant(evaluate: Callable[..., Any], rng: Any, selector: int) -> None:
    a, b = numbers(rng, np.uint32), numbers(rng, np.uint32)
    (found,) = evaluate(f"prmt.b32 %d0, %a0, %a1, {selector};", [a, b], [np.uint32])
    assert found.tolist() == [
        permuted(x, y, selector) for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]


@pytest.mark.parametrize("bits", [32, 64])
def test_bfi(evaluate: Callable[..., Any], rng: Any, bits: int) -> None:
    dtype = np.dtype(f"u{bits // 8}")
    a, b = numbers(rng, dtype), numbers(rng, dtype)
    at, length = (rng.integers(0, bits + 6, COUNT, dtype=np.uint32) for _ in range(2))
    body = f"bfi.b{bits} %d0, %a0, %a1, %a2, %a3;"
    (found,) = evaluate(body, [a, b, at, length], [dtype])
    rows = zip(a.tolist(), b.tolist(), at.tolist(), length.tolist(), strict=True)
    assert found.tolist() == [inserted(*row, bits) for row in rows]


@pytest.mark.parametrize("signed", [False, True], ids=["u64", "s64"])
def test_bfe_of_64_bits(evaluate: Callable[..., Any], rng: Any, signed: bool) -> None:
    a = numbers(rng, np.uint64)
    at, length = (rng.integers(0, 70, COUNT, dtype=np.uint32) for _ in range(2))
    body = f"bfe.{'s' if signed else 'u'}64 %d0, %a0, %a1, %a2;"
    (found,) = evaluate(body, [a, at, length], [np.uint64])
    rows = zip(a.tolist(), at.tolist(), length.tolist(), strict=True)
    assert found.tolist() == [field(x, y, z, 64, signed) for x, y, z in rows]


def test_carries_join_words(evaluate: Callable[..., Any], rng: Any) -> None:
    """PTX ISA 9.7.2: 96-bit sums and differences of three words."""
    words = [numbers(rng, np.uint32) for _ in range(6)]
    total = "add.cc.u32 %d0, %a0, %a3; addc.cc.u32 %d1, %a1, %a4; addc.u32 %d2, %a2, %a5;"
    less = "sub.cc.u32 %d3, %a0, %a3; subc.cc.u32 %d4, %a1, %a4; subc.u32 %d5, %a2, %a5;"
    found = evaluate(total + less, words, [np.uint32] * 6)
    for row in range(COUNT):
        a, b = (sum(int(words[o + i][row]) << 32 * i for i in range(3)) for o in (0, 3))
        plus, minus = (sum(int(found[o + i][row]) << 32 * i for i in range(3)) for o in (0, 3))
        assert plus == (a + b) % 2**96
        assert minus == (a - b) % 2**96


def test_fns_finds_the_nth_set_bit(evaluate: Callable[..., Any], rng: Any) -> None:
    """PTX ISA 9.7.1.22, by its own pseudo code."""
    mask = numbers(rng, np.uint32)
    base = rng.integers(0, 32, COUNT, dtype=np.uint32)
    offset = rng.integers(-5, 6, COUNT, dtype=np.int32)
    body = "fns.b32 %d0, %a0, %a1, %a2;"
    (found,) = evaluate(body, [mask, base, offset.view(np.uint32)], [np.uint32])
    for m, b, o, f in zip(
        mask.tolist(), base.tolist(), offset.tolist(), found.tolist(), strict=True
    ):
        if o == 0:
            expected = b if m >> b & 1 else M32
        else:
            step = range(b, 32) if o > 0 else range(b, -1, -1)
            places = [place for place in step if m >> place & 1]
            expected = places[abs(o) - 1] if len(places) >= abs(o) else M32
        assert f == expected


def test_packed_16_bit_sums(evaluate: Callable[..., Any], rng: Any) -> None:
    a, b = numbers(rng, np.uint32), numbers(rng, np.uint32)
    body = "add.u16x2 %d0, %a0, %a1; min.s16x2 %d1, %a0, %a1; max.u16x2 %d2, %a0, %a1;"
    total, least, most = evaluate(body, [a, b], [np.uint32] * 3)
    x, y = a.view(np.uint16), b.view(np.uint16)
    assert (total.view(np.uint16) == x + y).all()
    assert (least.view(np.int16) == np.minimum(x.view(np.int16), y.view(np.int16))).all()
    assert (most.view(np.uint16) == np.maximum(x, y)).all()


def parts_of(value: int, count: int, signed: bool) -> list[int]:
    bits = 32 // count
    found = [value >> bits * i & (1 << bits) - 1 for i in range(count)]
    return [part - (1 << bits) if signed and part >> bits - 1 else part for part in found]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("kinds", ["u32.u32.u32", "s32.s32.s32", "s32.u32.s32"])
@pytest.mark.parametrize("name", ["vadd", "vsub", "vabsdiff", "vmin", "vmax"])
@pytest.mark.parametrize("ending", ["", ".sat", ".add"])
def test_video_instructions(
    evaluate: Callable[..., Any], rng: Any, name: str, kinds: str, count: int, ending: str
) -> None:
    """PTX ISA 9.7.18.5-6: part by part, cut, clamped or summed up."""
    a, b, c = (numbers(rng, np.uint32) for _ in range(3))
    body = f"{name}{count}.{kinds}{ending} %d0, %a0, %a1, %a2;"
    (found,) = evaluate(body, [a, b, c], [np.uint32])
    result, *signs = (kind == "s32" for kind in kinds.split("."))
    bits = 32 // count
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if result else (0, (1 << bits) - 1)
    function = {
        "vadd": lambda x, y: x + y,
        "vsub": lambda x, y: x - y,
        "vabsdiff": lambda x, y: abs(x - y),
        "vmin": min,
        "vmax": max,
    }[name]
    for x, y, z, got in zip(*(v.tolist() for v in (a, b, c, found)), strict=True):
        pairs = zip(parts_of(x, count, signs[0]), parts_of(y, count, signs[1]), strict=True)
        values = [function(p, q) for p, q in pairs]
        if ending == ".add":
            assert got == (sum(values) + z) & M32
            continue
        if ending == ".sat":
            values = [max(low, min(high, v)) for v in values]
        wanted = sum((v & (1 << bits) - 1) << bits * i for i, v in enumerate(values))
        assert got == wanted


@pytest.mark.parametrize("count", [2, 4])
def test_video_comparisons(evaluate: Callable[..., Any], rng: Any, count: int) -> None:
    """PTX ISA 9.7.18.5-6: one or zero in each part, or how many hold."""
    a, b = numbers(rng, np.uint32), numbers(rng, np.uint32)
    b[::3] = a[::3]
    body = f"vset{count}.s32.s32.ge %d0, %a0, %a1, 0; vset{count}.u32.u32.ne.add %d1, %a0, %a1, 5;"
    marks, counted = evaluate(body, [a, b], [np.uint32] * 2)
    bits = 32 // count
    for x, y, mark, total in zip(*(v.tolist() for v in (a, b, marks, counted)), strict=True):
        signed = zip(parts_of(x, count, True), parts_of(y, count, True), strict=True)
        assert mark == sum((p >= q) << bits * i for i, (p, q) in enumerate(signed))
        plain = zip(parts_of(x, count, False), parts_of(y, count, False), strict=True)
        assert total == 5 + sum(p != q for p, q in plain)
