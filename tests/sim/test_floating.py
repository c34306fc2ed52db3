"""Floating-point arithmetic against exact arithmetic (PTX ISA 9.7.3 and 9.7.4)."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from exact_formats import code_of

COUNT = 512
NAN = {"f32": 0x7FFFFFFF, "f16": 0x7FFF, "bf16": 0x7FFF}
STORED = {"f32": np.uint32, "f16": np.uint16, "bf16": np.uint16}
EDGES = {
    "f32": [0, 1, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 0x00800000],
    "f16": [0, 1, 0x8000, 0x7C00, 0xFC00, 0x7E00, 0x7BFF, 0x0400, 0x03FF],
    "bf16": [0, 1, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F7F, 0x0080],
}


def value_of(code: int, kind: str) -> float:
    """The value of a code; exact in Python's floats."""
    if kind == "f32":
        return float(np.array(code, np.uint32).view(np.float32))
    if kind == "bf16":
        return float(np.array(code << 16, np.uint32).view(np.float32))
    return float(np.array(code, np.uint16).view(np.float16))


def codes(rng: np.random.Generator, kind: str) -> np.ndarray:
    """Random codes: of all magnitudes, of similar ones, and the special ones."""
    dtype = STORED[kind]
    wild = rng.integers(0, 2 ** (8 * np.dtype(dtype).itemsize), COUNT // 2, dtype=dtype)
    tame = rng.normal(size=COUNT // 2).astype(np.float32)
    if kind == "f16":
        tame_codes = tame.astype(np.float16).view(np.uint16)
    else:
        tame_codes = tame.view(np.uint32) if kind == "f32" else tame.view(np.uint32) >> 16
    found = np.concatenate([wild, tame_codes.astype(dtype)])
    places = rng.permutation(COUNT)[: 8 * len(EDGES[kind])]
    found[places] = np.array(EDGES[kind] * 8, dtype)
    return found


def fused(a: float, b: float, c: float, kind: str, mode: str = "rn") -> int:
    """Code of a * b + c, rounded once; NaN and infinities by IEEE 754."""
    with np.errstate(all="ignore"):
        plain = np.float64(a) * np.float64(b) + np.float64(c)
    if not np.isfinite([a, b, c]).all():
        if np.isnan(plain):
            return NAN[kind]
        bits = {"f32": (0x7F800000, 31), "f16": (0x7C00, 15), "bf16": (0x7F80, 15)}[kind]
        return bits[0] | int(plain < 0) << bits[1]
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    product_negative = np.signbit(a) != np.signbit(b)
    if exact == 0:
        both = product_negative and np.signbit(c)
        either = product_negative or np.signbit(c)
        cancels = Fraction(c) != 0
        negative = (mode == "rm" and (either or cancels)) or bool(both)
        if not cancels and product_negative == np.signbit(c):
            negative = bool(np.signbit(c))
        return code_of(exact, kind, mode, negative)
    return code_of(exact, kind, mode)


def close_sums(rng: np.random.Generator, kind: str) -> tuple[np.ndarray, ...]:
    """Operands whose exact sum lies near the middle of two numbers, the hard ones for fma."""
    a, b = (codes(rng, kind) for _ in range(2))
    bits = {"f32": 24, "f16": 11, "bf16": 8}[kind]
    found = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        product = value_of(x, kind) * value_of(y, kind)
        scale = 2.0 ** int(rng.integers(-2 * bits - 8, 2 * bits + 8))
        wanted = -product * scale if np.isfinite(product) else 1.0
        with np.errstate(all="ignore"):
            if kind == "f16":
                found.append(int(np.float16(wanted).view(np.uint16)))
            else:
                raw = int(np.float32(wanted).view(np.uint32))
                found.append(raw if kind == "f32" else raw >> 16)
    return a, b, np.array(found, STORED[kind])


@pytest.mark.parametrize("operands", ["random", "close"])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_fma_rounds_once(evaluate: Callable[..., Any], rng: Any, kind: str, operands: str) -> None:
    """PTX ISA 9.7.3.6, 9.7.4.4."""
    if operands == "close":
        a, b, c = close_sums(rng, kind)
    else:
        a, b, c = (codes(rng, kind) for _ in range(3))
    (found,) = evaluate(f"fma.rn.{kind} %d0, %a0, %a1, %a2;", [a, b, c], [STORED[kind]])
    rows = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    expected = [fused(*(value_of(x, kind) for x in row), kind) for row in rows]
    assert found.tolist() == expected


def test_fma_of_bf16_decides_ties_by_the_smallest_addend(evaluate: Callable[..., Any]) -> None:
    """A product that is a tie of bfloat16, and an addend that float64 cannot hold beside it."""
    a = np.full(32, 0x3F81, np.uint16)  # 1 + 2^-7
    b = np.full(32, 0x3FC0, np.uint16)  # 1.5: the product is 1.5 + 1.5 * 2^-7, a tie
    c = np.array([0x0080, 0x8080] * 16, np.uint16)  # 2^-126 and its negative
    (found,) = evaluate("fma.rn.bf16 %d0, %a0, %a1, %a2;", [a, b, c], [np.uint16])
    assert found.tolist() == [0x3FC2, 0x3FC1] * 16


@pytest.mark.parametrize("mode", ["rz", "rp", "rm"])
@pytest.mark.parametrize("operation", ["add", "sub", "mul", "fma"])
def test_directed_roundings(
    evaluate: Callable[..., Any], rng: Any, operation: str, mode: str
) -> None:
    a, b, c = close_sums(rng, "f32")
    operands = "%a0, %a1, %a2" if operation == "fma" else "%a0, %a1"
    (found,) = evaluate(f"{operation}.{mode}.f32 %d0, {operands};", [a, b, c], [np.uint32])
    for x, y, z, code in zip(*(v.tolist() for v in (a, b, c, found)), strict=True):
        values = [value_of(v, "f32") for v in (x, y, z)]
        used = values if operation == "fma" else values[:2]
        if not np.isfinite(used).all():
            continue
        if operation == "mul":
            zero = np.signbit(values[0]) != np.signbit(values[1])
            exact = Fraction(values[0]) * Fraction(values[1])
            assert code == code_of(exact, "f32", mode, bool(zero))
        elif operation == "fma":
            assert code == fused(*values, "f32", mode)
        else:
            other = -values[1] if operation == "sub" else values[1]
            assert code == fused(values[0], 1.0, other, "f32", mode)


@pytest.mark.parametrize("operation", ["add", "sub", "mul"])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_sums_and_products(
    evaluate: Callable[..., Any], rng: Any, kind: str, operation: str
) -> None:
    a, b = codes(rng, kind), codes(rng, kind)
    rounding = ".rn" if kind == "f32" else ""
    (found,) = evaluate(f"{operation}{rounding}.{kind} %d0, %a0, %a1;", [a, b], [STORED[kind]])
    for x, y, code in zip(a.tolist(), b.tolist(), found.tolist(), strict=True):
        first, second = value_of(x, kind), value_of(y, kind)
        if operation == "mul":
            zero = -0.0 if np.signbit(first) != np.signbit(second) else 0.0
            assert code == fused(first, second, zero, kind)
        else:
            second = -second if operation == "sub" else second
            assert code == fused(first, 1.0, second, kind)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_packed_halves_are_two_of_one(evaluate: Callable[..., Any], rng: Any, kind: str) -> None:
    a, b, c = (np.concatenate([codes(rng, kind)] * 2) for _ in range(3))
    pairs = [v.view(np.uint32) for v in (a, b, c)]
    body = f"fma.rn.{kind}x2 %d0, %a0, %a1, %a2; max.{kind}x2 %d1, %a0, %a1;"
    packed = evaluate(body + f"neg.{kind}x2 %d2, %a0;", pairs, [np.uint32] * 3)
    body = f"fma.rn.{kind} %d0, %a0, %a1, %a2; max.{kind} %d1, %a0, %a1;"
    single = evaluate(body + f"neg.{kind} %d2, %a0;", [a, b, c], [np.uint16] * 3)
    for two, one in zip(packed, single, strict=True):
        assert (two.view(np.uint16) == one).all()


@pytest.mark.parametrize("operation", ["div.rn", "sqrt.rn", "rcp.rn"])
def test_division_and_roots_are_rounded_once(
    evaluate: Callable[..., Any], rng: Any, operation: str
) -> None:
    """PTX ISA 9.7.3.8, .13, .14: the neighbours of the result are no closer."""
    a, b = (rng.normal(size=COUNT).astype(np.float32) for _ in range(2))
    a = np.abs(a) + np.float32(1e-3)
    operands = "%a0, %a1" if operation == "div.rn" else "%a0"
    (found,) = evaluate(f"{operation}.f32 %d0, {operands};", [a, b], [np.float32])
    for x, y, z in zip(a.tolist(), b.tolist(), found.tolist(), strict=True):
        if operation == "sqrt.rn":
            near = [
                Fraction(float(np.nextafter(np.float32(z), np.float32(s)))) for s in (-1e9, 1e9)
            ]
            halves = [(Fraction(z) + n) / 2 for n in near]
            assert halves[0] ** 2 <= Fraction(x) <= halves[1] ** 2
        else:
            exact = Fraction(x) / Fraction(y) if operation == "div.rn" else 1 / Fraction(x)
            assert int(np.float32(z).view(np.uint32)) == code_of(exact, "f32")


def test_minimum_prefers_numbers_and_negative_zero(evaluate: Callable[..., Any]) -> None:
    """PTX ISA 9.7.3.11."""
    nan, minus = np.uint32(0x7FC00000), np.uint32(0x80000000)
    one = np.float32(1.0).view(np.uint32)
    a = np.array([nan, nan, 0, minus] * 8, np.uint32)
    b = np.array([one, nan, minus, 0] * 8, np.uint32)
    body = "min.f32 %d0, %a0, %a1; max.f32 %d1, %a0, %a1; min.NaN.f32 %d2, %a0, %a1;"
    least, most, strict = evaluate(body, [a, b], [np.uint32] * 3)
    assert least[:4].tolist() == [one, 0x7FFFFFFF, minus, minus]
    assert most[:4].tolist() == [one, 0x7FFFFFFF, 0, 0]
    assert strict[:4].tolist() == [0x7FFFFFFF, 0x7FFFFFFF, minus, minus]


def test_flushing_keeps_the_sign(evaluate: Callable[..., Any]) -> None:
    a = np.array([0x00000001, 0x807FFFFF, 0x00800000, 0x3F800000] * 8, np.uint32)
    zero = np.full(32, 0x80000000, np.uint32)
    (found,) = evaluate("add.ftz.f32 %d0, %a0, %a1;", [a, zero], [np.uint32])
    assert found[:4].tolist() == [0, 0x80000000, 0x00800000, 0x3F800000]


def test_saturation_clamps_to_the_unit_interval(evaluate: Callable[..., Any]) -> None:
    a = np.array([-2.0, 0.25, 3.0, np.nan] * 8, np.float32)
    zero = np.zeros(32, np.float32)
    (found,) = evaluate("add.sat.f32 %d0, %a0, %a1;", [a, zero], [np.float32])
    assert found[:4].tolist() == [0.0, 0.25, 1.0, 0.0]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("add.sat.f32 %d0, %a0, %a0;", 0x80000000),
        ("mul.sat.f32 %d0, %a0, 1.0;", 0x80000000),
        ("fma.rn.sat.f32 %d0, %a0, 0f3F800000, %a0;", 0x80000000),
        ("cvt.sat.f32.f32 %d0, %a0;", 0x80000000),
        ("cvt.rzi.sat.f32.f32 %d0, %a0;", 0xBF000000),
        ("add.sat.f16x2 %d0, %a0, %a0;", 0x80008000),
        ("fma.rn.sat.f16x2 %d0, %a0, %a0, %a0;", 0x80008000),
        ("fma.rn.relu.f16x2 %d0, %a0, 0x3C003C00, %a0;", 0x80008000),
        ("fma.rn.relu.bf16x2 %d0, %a0, 0x3F803F80, %a0;", 0x80008000),
        ("fma.rn.relu.f16x2 %d0, %a0, 0x3C003C00, %a0;", 0xBC00BC00),
    ],
    ids=lambda part: part.split()[0] if isinstance(part, str) else "",
)
def test_no_clamp_gives_a_negative_zero(evaluate: Callable[..., Any], body: str, code: int) -> None:
    """PTX ISA 9.7.3.3-6, 9.7.4.1-4, 9.7.9.21: .sat clamps to [+0, 1], .relu to +0."""
    body = body.replace("1.0", "0f3F800000")
    (found,) = evaluate(body, [np.full(32, code, np.uint32)], [np.uint32])
    assert found.tolist() == [0] * 32


def test_relu_keeps_nan(evaluate: Callable[..., Any]) -> None:
    """PTX ISA 9.7.4.4: the canonical one."""
    a = np.full(32, 0xFE00, np.uint16)
    (found,) = evaluate("fma.rn.relu.f16 %d0, %a0, %a0, %a0;", [a], [np.uint16])
    assert found.tolist() == [0x7FFF] * 32


def test_approximate_division_by_large_numbers(evaluate: Callable[..., Any]) -> None:
    """PTX ISA 9.7.3.8: beyond 2^126 a finite quotient is 0 and an infinite one NaN."""
    cases = [
        (2.0**127, 2.0**127, 0.0),
        (2.0**127, 2.0**126, 2.0),
        (2.0**127, -(2.0**127), -0.0),
        (np.inf, 2.0**127, np.nan),
        (np.inf, 2.0**126, np.inf),
        (1.0, np.nextafter(np.float32(2.0**126), np.float32(np.inf)), 0.0),
        (1.0, np.inf, 0.0),
        (3.0, 2.0, 1.5),
    ]
    a, b, expected = (np.array([c[i] for c in cases] * 4, np.float32) for i in range(3))
    body = "div.approx.f32 %d0, %a0, %a1; div.full.f32 %d1, %a0, %a1;"
    found, full = evaluate(body, [a, b], [np.float32] * 2)
    assert np.array_equal(found, expected, equal_nan=True)
    assert (np.signbit(found) == np.signbit(expected))[~np.isnan(expected)].all()
    assert full[:1].tolist() == [1.0]


def test_fma_of_doubles_rounds_once(evaluate: Callable[..., Any], rng: Any) -> None:
    a, b = rng.normal(size=(2, 64))
    c = -a * b  # what is left is the rounding error of the product
    (found,) = evaluate("fma.rn.f64 %d0, %a0, %a1, %a2;", [a, b, c], [np.float64])
    for x, y, z, d in zip(a.tolist(), b.tolist(), c.tolist(), found.tolist(), strict=True):
        assert d == float(Fraction(x) * Fraction(y) + Fraction(z))


@pytest.mark.parametrize("comparison", ["eq", "ne", "lt", "le", "gt", "ge"])
@pytest.mark.parametrize("unordered", ["", "u"], ids=["ordered", "unordered"])
def test_comparisons_with_nan(
    evaluate: Callable[..., Any], rng: Any, comparison: str, unordered: str
) -> None:
    """PTX ISA 9.7.6.2."""
    a, b = codes(rng, "f32"), codes(rng, "f32")
    b[::3] = a[::3]
    body = f".reg .pred p; setp.{comparison}{unordered}.f32 p, %a0, %a1; selp.b32 %d0, 1, 0, p;"
    (found,) = evaluate(body, [a, b], [np.uint32])
    with np.errstate(invalid="ignore"):
        x, y = a.view(np.float32).astype(float), b.view(np.float32).astype(float)
    plain = {
        "eq": x == y,
        "ne": x != y,
        "lt": x < y,
        "le": x <= y,
        "gt": x > y,
        "ge": x >= y,
    }[comparison]
    nan = np.isnan(x) | np.isnan(y)
    assert (found.astype(bool) == np.where(nan, bool(unordered), plain)).all()
