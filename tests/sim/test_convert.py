"""Conversions against exact arithmetic, from every code to every format (PTX ISA 9.7.9.21)."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from exact_formats import FORMATS, code_of, magnitude_of

COUNT = 512


def floats(rng: np.random.Generator, reach: int) -> np.ndarray:
    """float32 numbers of magnitudes from 2^-reach to 2^reach, with ties and specials."""
    values = rng.normal(size=COUNT) * 2.0 ** rng.integers(-reach, reach, COUNT)
    values[::4] = np.ldexp(rng.integers(-64, 64, COUNT // 4), rng.integers(-12, 8, COUNT // 4))
    found = values.astype(np.float32)
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 448.0, 464.0, 480.0, 57344.0, 61440.0, 6.0, 28.0]
    found[rng.permutation(COUNT)[: len(edges)]] = edges
    return found


def narrow_code(value: float, name: str, mode: str, saturate: bool) -> int:
    """Code of a float in a format, with what PTX says about NaN and overflow."""
    form = FORMATS[name]
    sign = int(np.signbit(value)) << (form.bits - 1)
    if np.isnan(value):
        all_ones = (1 << (form.bits - 1)) - 1
        return form.top if name in ("e3m2", "e2m3", "e2m1") else all_ones
    if np.isinf(value):
        kept = saturate or not form.infinite
        return sign | (form.top if kept else form.top + 1)
    code = code_of(Fraction(value), name, mode, bool(np.signbit(value)))
    if saturate and code & ~(1 << (form.bits - 1)) > form.top:
        return sign | form.top
    return code


@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_float32_to_16_bits(evaluate: Callable[..., Any], rng: Any, name: str, mode: str) -> None:
    a = floats(rng, 30)
    (found,) = evaluate(f"cvt.{mode}.{name}.f32 %d0, %a0;", [a], [np.uint16])
    assert found.tolist() == [narrow_code(float(x), name, mode, False) for x in a]


@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("name", ["f16x2", "bf16x2"])
def test_float32_pairs_to_16_bits(
    evaluate: Callable[..., Any], rng: Any, name: str, mode: str
) -> None:
    """The first operand is the upper half."""
    a, b = floats(rng, 30), floats(rng, 30)
    (found,) = evaluate(f"cvt.{mode}.{name}.f32 %d0, %a0, %a1;", [a, b], [np.uint32])
    inner = name.removesuffix("x2")
    expected = [
        narrow_code(float(x), inner, mode, False) << 16 | narrow_code(float(y), inner, mode, False)
        for x, y in zip(a, b, strict=True)
    ]
    assert found.tolist() == expected


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e3m2", "e2m3"])
def test_float32_pairs_to_8_bits(evaluate: Callable[..., Any], rng: Any, name: str) -> None:
    a, b = floats(rng, 12), floats(rng, 12)
    body = f"cvt.rn.satfinite.{name}x2.f32 %d0, %a0, %a1;"
    (found,) = evaluate(body, [a, b], [np.uint16])
    expected = [
        narrow_code(float(x), name, "rn", True) << 8 | narrow_code(float(y), name, "rn", True)
        for x, y in zip(a, b, strict=True)
    ]
    assert found.tolist() == expected


def test_float32_pairs_to_4_bits(evaluate: Callable[..., Any], rng: Any) -> None:
    """The result is a .b8 register, as compilers use it."""
    a, b = floats(rng, 4), floats(rng, 4)
    body = "{ .reg .b8 r; cvt.rn.satfinite.e2m1x2.f32 r, %a0, %a1; mov.b32 %d0, {r, r, 0, 0}; }"
    (found,) = evaluate(body, [a, b], [np.uint32])
    expected = [
        narrow_code(float(x), "e2m1", "rn", True) << 4 | narrow_code(float(y), "e2m1", "rn", True)
        for x, y in zip(a, b, strict=True)
    ]
    assert found.tolist() == [code * 0x101 for code in expected]


def test_relu_turns_negative_numbers_to_zero(evaluate: Callable[..., Any], rng: Any) -> None:
    a = floats(rng, 4)
    body = "cvt.rn.relu.f16.f32 %d0, %a0; cvt.rn.satfinite.relu.e4m3x2.f32 %d1, %a0, %a0;"
    half, eight = evaluate(body, [a], [np.uint16, np.uint16])
    positive = np.where(a > 0, a, np.float32(0.0))
    positive = np.where(np.isnan(a), a, positive)
    assert half.tolist() == [narrow_code(float(x), "f16", "rn", False) for x in positive]
    assert eight.tolist() == [narrow_code(float(x), "e4m3", "rn", True) * 0x101 for x in positive]


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1"])
def test_every_narrow_code_to_half(evaluate: Callable[..., Any], name: str) -> None:
    form = FORMATS[name]
    width = 4 if name == "e2m1" else 8
    codes = np.arange(256, dtype=np.uint16)
    pairs = codes << 8 | codes[::-1] if width == 8 else codes
    if width == 8:
        mask = (1 << form.bits) - 1
        pairs = (codes & mask) << 8 | codes[::-1] & mask
        body = f"cvt.rn.f16x2.{name}x2 %d0, %a0;"
    else:
        body = "{ .reg .b8 r, s; mov.b16 {r, s}, %a0; cvt.rn.f16x2.e2m1x2 %d0, r; }"
    (found,) = evaluate(body, [pairs], [np.uint32])
    for pair, two in zip(pairs.tolist(), found.tolist(), strict=True):
        for shift, part in ((0, two & 0xFFFF), (width, two >> 16)):
            code = pair >> shift & (1 << width) - 1
            magnitude = code & (1 << (form.bits - 1)) - 1
            half = np.array(part, np.uint16).view(np.float16)
            if magnitude <= form.top:
                assert Fraction(float(abs(half))) == magnitude_of(magnitude, name)
                assert bool(np.signbit(half)) == bool(code >> (form.bits - 1))
            elif form.infinite and magnitude == form.top + 1:
                assert np.isinf(half)
            else:
                assert part == 0x7FFF


def test_half_to_float32_is_exact(evaluate: Callable[..., Any]) -> None:
    codes = np.arange(65536, dtype=np.uint16)
    half, brain = evaluate(
        "cvt.f32.f16 %d0, %a0; cvt.f32.bf16 %d1, %a0;", [codes], [np.float32, np.uint32]
    )
    expected = codes.view(np.float16).astype(np.float32)
    assert np.array_equal(half, expected, equal_nan=True)
    wide = codes.astype(np.uint32) << 16
    number = ~np.isnan(wide.view(np.float32))
    assert (brain[number] == wide[number]).all()


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64", "s8", "u16"])
def test_float32_to_integers(evaluate: Callable[..., Any], rng: Any, kind: str, mode: str) -> None:
    """Out of range clamps; NaN is zero, or of 64 bits the least signed integer."""
    a = floats(rng, 70)
    a[:4] = [0.5, 1.5, -0.5, -2.5]
    bits = int(kind[1:])
    dtype = np.uint64 if bits == 64 else np.uint32
    (found,) = evaluate(f"cvt.{mode}.{kind}.f32 %d0, %a0;", [a], [dtype])
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if kind[0] == "s" else (0, 2**bits - 1)
    for value, code in zip(a.tolist(), found.tolist(), strict=True):
        if np.isnan(value):
            expected = 1 << 63 if bits == 64 else 0
        elif np.isinf(value):
            expected = high if value > 0 else low
        else:
            rounded = {
                "rni": round(Fraction(value)),
                "rzi": int(Fraction(value)),
                "rmi": Fraction(value).__floor__(),
                "rpi": Fraction(value).__ceil__(),
            }[mode]
            expected = max(low, min(high, rounded))
        assert code == expected & (2 ** (8 * np.dtype(dtype).itemsize) - 1)


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_integers_to_float32(evaluate: Callable[..., Any], rng: Any, kind: str) -> None:
    bits = int(kind[1:])
    dtype = np.dtype(f"u{bits // 8}")
    a = rng.integers(0, 2**bits, COUNT, dtype=dtype) >> rng.integers(0, bits, COUNT).astype(dtype)
    (found,) = evaluate(f"cvt.rn.f32.{kind} %d0, %a0;", [a], [np.uint32])
    signed = a.view(f"i{bits // 8}") if kind[0] == "s" else a
    assert found.tolist() == [code_of(Fraction(x), "f32") for x in signed.tolist()]


@pytest.mark.parametrize("mode", ["rz", "rp", "rm"])
def test_integers_to_float32_in_directed_roundings(
    evaluate: Callable[..., Any], rng: Any, mode: str
) -> None:
    a = rng.integers(-(2**31), 2**31, COUNT, dtype=np.int32)
    (found,) = evaluate(f"cvt.{mode}.f32.s32 %d0, %a0;", [a.view(np.uint32)], [np.uint32])
    assert found.tolist() == [code_of(Fraction(x), "f32", mode) for x in a.tolist()]


@pytest.mark.parametrize(
    ("to", "of"), [("s8", "s32"), ("u8", "s32"), ("s16", "u32"), ("u16", "s32")]
)
@pytest.mark.parametrize("saturate", [False, True], ids=["cut", "sat"])
def test_narrower_integers(
    evaluate: Callable[..., Any], rng: Any, to: str, of: str, saturate: bool
) -> None:
    """The result is extended to its register by the sign of its own type."""
    a = rng.integers(0, 2**32, COUNT, dtype=np.uint32) >> rng.integers(
        0, 32, COUNT, dtype=np.uint32
    )
    (found,) = evaluate(f"cvt{'.sat' if saturate else ''}.{to}.{of} %d0, %a0;", [a], [np.uint32])
    bits = int(to[1:])
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if to[0] == "s" else (0, 2**bits - 1)
    values = (a.view(np.int32) if of[0] == "s" else a).tolist()
    for value, code in zip(values, found.tolist(), strict=True):
        if saturate:
            expected = max(low, min(high, value))
        else:
            expected = value & (2**bits - 1)
            expected -= 2**bits if to[0] == "s" and expected >> (bits - 1) else 0
        assert code == expected & 0xFFFFFFFF


def test_widening_extends_by_the_sign_of_the_source(evaluate: Callable[..., Any]) -> None:
    a = np.array([0x7F, 0x80, 0xFF, 0x1234] * 8, np.uint32)
    body = "cvt.s32.s8 %d0, %a0; cvt.u32.u8 %d1, %a0; cvt.s64.s32 %d2, %a0; cvt.u64.s8 %d3, %a0;"
    byte, plain, wide, mixed = evaluate(body, [a], [np.int32, np.uint32, np.int64, np.uint64])
    assert byte[:4].tolist() == [127, -128, -1, 0x34]
    assert plain[:4].tolist() == [127, 128, 255, 0x34]
    assert wide[:4].tolist() == [127, 128, 255, 0x1234]
    assert mixed[:3].tolist() == [127, 2**64 - 128, 2**64 - 1]


@pytest.mark.parametrize("mode", ["rz", "rp"])
def test_powers_of_two(evaluate: Callable[..., Any], rng: Any, mode: str) -> None:
    """ue8m0: the exponent, rounded down or up; NaN and negative numbers have no code but 255."""
    a = np.abs(floats(rng, 100))
    (found,) = evaluate(f"cvt.{mode}.satfinite.ue8m0x2.f32 %d0, %a0, %a0;", [a], [np.uint16])
    for value, code in zip(a.tolist(), found.tolist(), strict=True):
        assert code >> 8 == code & 0xFF
        if np.isnan(value):
            assert code & 0xFF == 255
        elif np.isinf(value):
            assert code & 0xFF == 254
        elif value:
            power = Fraction(2) ** ((code & 0xFF) - 127)
            exact = Fraction(value)
            assert (power <= exact < 2 * power) if mode == "rz" else (power / 2 < exact <= power)


def test_tf32_drops_13_bits(evaluate: Callable[..., Any], rng: Any) -> None:
    """cvt.rna: to nearest, ties away from zero."""
    a = floats(rng, 20)
    (found,) = evaluate("cvt.rna.tf32.f32 %d0, %a0;", [a], [np.uint32])
    for value, code in zip(a.tolist(), found.tolist(), strict=True):
        if np.isfinite(value):
            exact = code_of(Fraction(value), "tf32", "rna", bool(np.signbit(value)))
            assert code == exact << 13


def test_packed_saturation(evaluate: Callable[..., Any], rng: Any) -> None:
    """PTX ISA 9.7.9.22."""
    a, b = (rng.integers(-300, 300, COUNT, dtype=np.int32) for _ in range(2))
    c = rng.integers(0, 2**32, COUNT, dtype=np.uint32)
    body = "cvt.pack.sat.s8.s32.b32 %d0, %a0, %a1, %a2;"
    (found,) = evaluate(body, [a.view(np.uint32), b.view(np.uint32), c], [np.uint32])
    high, low = (np.clip(v, -128, 127).astype(np.uint8).astype(np.uint32) for v in (a, b))
    assert (found == (c << 16 | high << 8 | low)).all()
