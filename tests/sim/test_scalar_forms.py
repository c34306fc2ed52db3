"""Less common forms of scalar instructions: carries, roundings, wide words, mixed precision."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from exact_formats import code_of

ROUNDINGS = ("rn", "rz", "rp", "rm")
M32, M64 = 2**32 - 1, 2**64 - 1


def random_words(rng: np.random.Generator, count: int, dtype: Any = np.uint32) -> np.ndarray:
    found = rng.integers(0, 2 ** (8 * np.dtype(dtype).itemsize), count, dtype=dtype)
    found[::5] = np.array(np.iinfo(dtype).max, dtype)
    found[1::7] = 0
    return found


@pytest.mark.parametrize("combine", ["or", "and"])
@pytest.mark.parametrize("negated", ["", "!"], ids=["plain", "negated"])
def test_lop3_with_a_predicate(
    evaluate: Callable[..., Any], rng: Any, combine: str, negated: str
) -> None:
    """PTX ISA 9.7.8.6: p = (d != 0) BoolOp q; d may be left out."""
    a, b, c = (rng.integers(0, 4, 64, dtype=np.uint32) for _ in range(3))
    body = f"""
      .reg .pred p, q, r; setp.lt.u32 q, %a0, 2;
      lop3.{combine}.b32 %d0|p, %a0, %a1, %a2, 0x80, {negated}q;
      lop3.{combine}.b32 _|r, %a0, %a1, %a2, 0x80, {negated}q;
      selp.u32 %d1, 1, 0, p; selp.u32 %d2, 1, 0, r;
    """
    value, flag, other = evaluate(body, [a, b, c], [np.uint32] * 3)
    assert (value == (a & b & c)).all()
    given = (a < 2) ^ bool(negated)
    holds = (value != 0) | given if combine == "or" else (value != 0) & given
    assert (flag.astype(bool) == holds).all()
    assert (other == flag).all()


def test_a_predicate_of_lop3_is_defined_where_one_operand_decides(
    evaluate: Callable[..., Any],
) -> None:
    """A set bit, or the other predicate, decides whatever is undefined."""
    body = """
      .reg .pred p, q; .reg .b32 wild; setp.eq.u32 q, 0, 0;
      lop3.or.b32 _|p, wild, %a0, %a0, 0xF8, !q; selp.u32 %d0, 1, 0, p;
      lop3.or.b32 _|p, wild, 0, 0, 0x80, q; selp.u32 %d1, 1, 0, p;
    """
    found = evaluate(body, [np.full(32, 4, np.uint32)], [np.uint32] * 2)
    assert [part.tolist() for part in found] == [[1] * 32, [1] * 32]


@pytest.mark.parametrize("signed", [False, True], ids=["u32", "s32"])
def test_long_products(evaluate: Callable[..., Any], rng: Any, signed: bool) -> None:
    """PTX ISA 9.7.2.5-6: 64-bit products and sums of words, by mad.cc and madc."""
    kind = "s32" if signed else "u32"
    a, b = (random_words(rng, 128, np.uint64) for _ in range(2))
    parts = [(v & M32).astype(np.uint32) for v in (a, a >> 32, b, b >> 32)]
    low_a, high_a, low_b, high_b = parts
    body = f"""
      mul.lo.u32 %d0, %a0, %a2;
      mul.hi.u32 %d1, %a0, %a2;
      mad.lo.cc.u32 %d1, %a0, %a3, %d1;
      madc.hi.u32 %d2, %a0, %a3, 0;
      mad.lo.cc.u32 %d1, %a1, %a2, %d1;
      madc.hi.cc.u32 %d2, %a1, %a2, %d2;
      addc.u32 %d3, 0, 0;
      mad.lo.cc.u32 %d2, %a1, %a3, %d2;
      madc.hi.u32 %d3, %a1, %a3, %d3;
      mad.hi.sat.s32 %d4, %a0, %a2, %a1;
      madc.lo.{kind} %d5, %a0, %a2, %a1;
    """
    found = evaluate(body, [low_a, high_a, low_b, high_b], [np.uint32] * 6)
    for i in range(128):
        value = sum(int(part[i]) << 32 * place for place, part in enumerate(found[:4]))
        assert value == int(a[i]) * int(b[i])
        first, second, third = (int(v[i]) - (int(v[i]) >> 31 << 32) for v in (low_a, low_b, high_a))
        wanted = max(min((first * second >> 32) + third, 2**31 - 1), -(2**31))
        assert int(found[4][i]) == wanted & M32


@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_products_of_24_bits(evaluate: Callable[..., Any], rng: Any, kind: str) -> None:
    """PTX ISA 9.7.1.5-6."""
    a, b, c = (random_words(rng, 64) for _ in range(3))
    body = f"mad24.lo.{kind} %d0, %a0, %a1, %a2; mad24.hi.{kind} %d1, %a0, %a1, %a2;"
    body += "mad24.hi.sat.s32 %d2, %a0, %a1, %a2;"
    low, high, saturated = evaluate(body, [a, b, c], [np.uint32] * 3)

    def cut(value: int, signed: bool) -> int:
        value &= 0xFFFFFF
        return value - (1 << 24) if signed and value >> 23 else value

    columns = (v.tolist() for v in (a, b, c, low, high, saturated))
    for x, y, z, lower, upper, s in zip(*columns, strict=True):
        product = cut(x, kind == "s32") * cut(y, kind == "s32")
        assert lower == (product + z) & M32
        assert upper == ((product >> 16) + z) & M32
        third = z - (z >> 31 << 32)
        wanted = (cut(x, True) * cut(y, True) >> 16) + third
        assert s == max(min(wanted, 2**31 - 1), -(2**31)) & M32


def test_chains_of_64_bits(evaluate: Callable[..., Any], rng: Any) -> None:
    """PTX ISA 9.7.2.1-4: sums and differences of 128 bits."""
    words = [random_words(rng, 64, np.uint64) for _ in range(4)]
    body = """
      add.cc.u64 %d0, %a0, %a2; addc.u64 %d1, %a1, %a3;
      sub.cc.u64 %d2, %a0, %a2; subc.u64 %d3, %a1, %a3;
    """
    found = evaluate(body, words, [np.uint64] * 4)
    for i in range(64):
        a = int(words[0][i]) | int(words[1][i]) << 64
        b = int(words[2][i]) | int(words[3][i]) << 64
        assert int(found[0][i]) | int(found[1][i]) << 64 == (a + b) % 2**128
        assert int(found[2][i]) | int(found[3][i]) << 64 == (a - b) % 2**128


# -- roundings ------------------------------------------------------------------------------------


def checked(found: float, exact: Fraction, mode: str, kind: str) -> bool:
    """Whether a float is an exact number's rounding: on its side, and no neighbour is closer."""
    step = (
        np.nextafter
        if kind == "f64"
        else (lambda x, to: np.nextafter(np.float32(x), np.float32(to)))
    )
    below, above = float(step(found, -math.inf)), float(step(found, math.inf))
    value = Fraction(found)
    if mode == "rn":
        gap = abs(value - exact)
        return gap <= abs(Fraction(below) - exact) and gap <= abs(Fraction(above) - exact)
    downwards = mode == "rm" or (mode == "rz" and exact > 0)
    if downwards:
        return value <= exact < Fraction(above)
    return Fraction(below) < exact <= value


@pytest.mark.parametrize("mode", ROUNDINGS)
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_division_in_every_rounding(
    evaluate: Callable[..., Any], rng: Any, kind: str, mode: str
) -> None:
    """PTX ISA 9.7.3.8, .13, .15."""
    dtype = np.float32 if kind == "f32" else np.float64
    a, b = (rng.normal(size=128).astype(dtype) for _ in range(2))
    a[::9] = b[::9] * 3  # exact quotients
    size = np.abs(a) + dtype(0.01)
    size[::7] = 2.25
    body = (
        f"div.{mode}.{kind} %d0, %a0, %a1; rcp.{mode}.{kind} %d1, %a1; sqrt.{mode}.{kind} %d2, %a2;"
    )
    quotient, inverse, root = evaluate(body, [a, b, size], [dtype] * 3)
    columns = (v.tolist() for v in (a, b, size, quotient, inverse, root))
    for x, y, s, q, i, r in zip(*columns, strict=True):
        assert checked(q, Fraction(x) / Fraction(y), mode, kind)
        assert checked(i, 1 / Fraction(y), mode, kind)
        square = Fraction(r) ** 2
        if mode in ("rz", "rm"):
            assert square <= Fraction(s)
        if mode == "rp":
            assert square >= Fraction(s)
        assert abs(square - Fraction(s)) <= 4 * Fraction(s) * Fraction(2) ** (
            -23 if kind == "f32" else -52
        )


@pytest.mark.parametrize("mode", ["rz", "rp", "rm"])
def test_arithmetic_of_doubles_in_every_rounding(
    evaluate: Callable[..., Any], rng: Any, mode: str
) -> None:
    """PTX ISA 9.7.3.3-6."""
    a, b, c = rng.normal(size=(3, 64))
    c[::5] = -(a * b)[::5]
    body = f"""
      add.{mode}.f64 %d0, %a0, %a1; sub.{mode}.f64 %d1, %a0, %a1; mul.{mode}.f64 %d2, %a0, %a1;
      fma.{mode}.f64 %d3, %a0, %a1, %a2;
    """
    found = evaluate(body, [a, b, c], [np.float64] * 4)
    for x, y, z, s, d, p, f in zip(*(v.tolist() for v in (a, b, c, *found)), strict=True):
        x, y, z = map(Fraction, (x, y, z))
        assert checked(s, x + y, mode, "f64")
        assert checked(d, x - y, mode, "f64")
        assert checked(p, x * y, mode, "f64")
        assert checked(f, x * y + z, mode, "f64")


def test_ends_of_the_range_in_directed_roundings(evaluate: Callable[..., Any]) -> None:
    """IEEE 754: what is too large or too small, zeros and infinities."""
    top, tiny = float(np.finfo(np.float32).max), 2.0**-149
    cases = [
        # a, b, a / b in rz, rp, rm
        (top, 0.5, top, math.inf, top),
        (-top, 0.5, -top, -top, -math.inf),
        (tiny, 2.0, 0.0, tiny, 0.0),
        (-tiny, 2.0, -0.0, -0.0, -tiny),
        (1.0, 0.0, math.inf, math.inf, math.inf),
        (0.0, -3.0, -0.0, -0.0, -0.0),
        (math.inf, -2.0, -math.inf, -math.inf, -math.inf),
        (math.inf, math.inf, math.nan, math.nan, math.nan),
    ] * 4
    a, b, *expected = (np.array(column, np.float32) for column in zip(*cases, strict=True))
    body = "div.rz.f32 %d0, %a0, %a1; div.rp.f32 %d1, %a0, %a1; div.rm.f32 %d2, %a0, %a1;"
    found = evaluate(body, [a, b], [np.float32] * 3)
    for values, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(values, wanted)
        number = ~np.isnan(wanted)
        assert (np.signbit(values) == np.signbit(wanted))[number].all()


def test_sums_of_zero_in_directed_roundings(evaluate: Callable[..., Any]) -> None:
    """IEEE 754: what cancels is -0 only when rounding downwards."""
    a, b = np.full(32, 1.5), np.full(32, -1.5)
    body = "add.rm.f64 %d0, %a0, %a1; add.rp.f64 %d1, %a0, %a1;"
    body += "fma.rm.f64 %d2, %a0, 0d3FF0000000000000, %a1;"
    found = evaluate(body, [a, b], [np.float64] * 3)
    assert [bool(np.signbit(part[0])) for part in found] == [True, False, True]
    assert not np.stack(found).any()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_mixed_precision(evaluate: Callable[..., Any], rng: Any, kind: str) -> None:
    """PTX ISA 9.7.5: operands of 16 bits, results of f32, rounded once."""
    wide = rng.normal(size=(2, 64)).astype(np.float32)
    if kind == "f16":
        codes = wide.astype(np.float16).view(np.uint16)
        values = codes.view(np.float16).astype(np.float64)
    else:
        codes = (wide.view(np.uint32) >> 16).astype(np.uint16)
        values = (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    c = rng.normal(size=64).astype(np.float32)
    body = f"""
      fma.rn.f32.{kind} %d0, %a0, %a1, %a2; add.f32.{kind} %d1, %a0, %a2;
      sub.rz.f32.{kind} %d2, %a0, %a2; fma.rn.sat.f32.{kind} %d3, %a0, %a1, %a2;
    """
    found = evaluate(body, [codes[0], codes[1], c], [np.uint32] * 4)
    for i in range(64):
        x, y, z = (Fraction(float(v)) for v in (values[0, i], values[1, i], c[i]))
        assert int(found[0][i]) == code_of(x * y + z, "f32")
        assert int(found[1][i]) == code_of(x + z, "f32")
        assert int(found[2][i]) == code_of(x - z, "f32", "rz")
        assert int(found[3][i]) == code_of(max(Fraction(0), min(Fraction(1), x * y + z)), "f32")


# -- 128 bits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", ["global", "shared", "generic"])
def test_words_of_128_bits(run_ptx: Callable[..., Any], rng: Any, space: str) -> None:
    """PTX ISA 9.7.9.8, .11, 9.7.13.11: ld, st, atom.exch and atom.cas."""
    named = "" if space == "generic" else f".{space}"
    where = "g" if space == "global" else ("x" if space == "generic" else "s")
    body = f"""
      .shared .align 16 .b8 cell[16];
      .reg .b64 g, s, x, lo, hi, out; .reg .b128 a, b, c, old, seen;
      ld.param.u64 g, [p0]; ld.param.u64 out, [p1]; mov.u64 s, cell; cvta.shared.u64 x, s;
      ld.global.b128 a, [g]; ld.global.b128 b, [g+16]; ld.relaxed.gpu.global.b128 c, [g+32];
      st{named}.b128 [{where}], a;
      atom{named}.cas.b128 old, [{where}], b, c; st.global.b128 [out], old;
      ld{named}.b128 seen, [{where}]; st.global.b128 [out+16], seen;
      atom{named}.cas.b128 old, [{where}], a, c;
      atom{named}.exch.b128 old, [{where}], b; st.global.b128 [out+32], old;
      ld{named}.b128 seen, [{where}]; st.global.b128 [out+48], seen;
    """
    room = np.zeros(40, np.uint64)
    start = (-room.ctypes.data % 16) // 8
    data, out = room[start : start + 6], room[start + 8 : start + 16]
    data[:] = rng.integers(0, 2**63, 6, dtype=np.uint64)
    data[2:4] = [data[0], data[1] + np.uint64(1)]  # equal in half of the bits
    a, b, c = (data[i : i + 2].tolist() for i in (0, 2, 4))
    run_ptx(body, {"data": data, "out": out}, block=1)
    assert out.reshape(4, 2).tolist() == [a, a, c, b]


# -- syntax ---------------------------------------------------------------------------------------


def test_registers_of_vector_types(run_ptx: Callable[..., Any]) -> None:
    """PTX ISA 5.4.2: elements are .x to .w, or .r to .a."""
    body = """
      .reg .v4 .b32 v, w; .reg .v2 .b64 d; .reg .b64 in, out; .reg .b32 s;
      ld.param.u64 in, [p0]; ld.param.u64 out, [p1];
      ld.global.v4.b32 v, [in];
      mov.v4.b32 w, {v.w, v.z, v.y, v.x};
      add.u32 w.x, w.x, v.r; mov.b32 w.a, 9;
      st.global.v4.b32 [out], w;
      mov.b64 d.x, v; mov.b64 d.y, 7;
      st.global.v2.b64 [out+16], d;
    """.replace("mov.b64 d.x, v;", "mov.b64 d.x, {v.x, v.y};")
    room = np.zeros(16, np.uint32)
    start = (-room.ctypes.data % 16) // 4
    data, out = np.zeros(4, np.uint32), room[start : start + 8]
    data = room[start + 8 : start + 12] if start + 12 <= 16 else aligned_words(4)
    data[:] = [1, 2, 3, 4]
    run_ptx(body, {"data": data, "out": out}, block=1)
    assert out.tolist() == [5, 3, 2, 9, 1, 2, 7, 0]


def aligned_words(count: int) -> np.ndarray:
    room = np.zeros(count + 4, np.uint32)
    start = (-room.ctypes.data % 16) // 4
    return room[start : start + count]


def test_constant_expressions(run_ptx: Callable[..., Any]) -> None:
    """PTX ISA 4.5.4: as in C; division is towards zero, remainders are of unsigned numbers."""
    cases = {
        "-7 % 2": 1,
        "7 % -2": 7,
        "-7 / 2": -3,
        "1 ? 2 : 3": 2,
        "5 > 3 ? 2 + 1 : 3 * 2": 3,
        "0 ? 1 : 0 ? 2 : 4": 4,
        "(1 | 6) & ~2": 5,
        "9007199254740993 / 1 - 9007199254740992": 1,
        "!3 + (2 << 3)": 16,
    }
    stores = "".join(f"st.global.s32 [out+{4 * i}], {text};" for i, text in enumerate(cases))
    out = np.zeros(len(cases), np.int32)
    run_ptx(f".reg .b64 out; ld.param.u64 out, [p0]; {stores}", {"out": out}, block=1)
    assert out.tolist() == list(cases.values())


def test_special_registers_of_memory_and_time(run_ptx: Callable[..., Any]) -> None:
    """PTX ISA 10.22-33."""
    body = """
      .shared .align 4 .b8 tile[256]; .reg .b64 out, s; .reg .b32 a, b, c, d, e;
      ld.param.u64 out, [p0]; mov.u64 s, tile; st.shared.u32 [s], 1;
      mov.u32 a, %aggr_smem_size; mov.u32 b, %total_smem_size;
      mov.u32 c, %reserved_smem_offset_begin; mov.u32 d, %reserved_smem_offset_end;
      st.global.v4.u32 [out], {a, b, c, d};
      mov.u32 a, %globaltimer_hi; mov.u32 b, %clock_hi; mov.u32 c, %reserved_smem_offset_cap;
      mov.u32 d, %reserved_smem_offset_0; st.global.v4.u32 [out+16], {a, b, c, d};
    """
    out = aligned_words(8)
    run_ptx(body, {"out": out}, block=1, smem_bytes=512)
    assert out.tolist() == [1024 + 768, 768, 0, 1024, 0, 0, 1024, 0]
