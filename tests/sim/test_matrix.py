"""Matrix loads and products by the fragment tables of PTX ISA 9.7.14.5."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

LANE = np.arange(32)
G, T = LANE >> 2, LANE & 3

DECLARE = ".extern .shared .align 128 .b8 tile[];"
FILL = """
  .reg .b32 t, s, v, i; .reg .b64 base, at; .reg .pred p;
  mov.u32 t, %tid.x; mov.u32 s, tile; ld.param.u64 base, [p0];
  mad.wide.u32 at, t, 16, base; mad.lo.u32 i, t, 16, s;
  .reg .b32 f<4>;
  ld.global.v4.u32 {f0, f1, f2, f3}, [at];
  st.shared.v4.u32 [i], {f0, f1, f2, f3};
  bar.warp.sync -1;
"""


def loaded(run_ptx: Any, tile: np.ndarray, code: str, registers: int) -> np.ndarray:
    """Registers [registers, 32] after `code`, which reads the 512-byte tile at `s`."""
    outputs = "".join(f"st.global.u32 [at+{128 * r}], r{r};" for r in range(registers))
    body = f"""{FILL}
      .reg .b32 r<{registers}>, a;
      {code}
      ld.param.u64 base, [p1]; mad.wide.u32 at, t, 4, base;
      {outputs}
    """
    out = np.zeros((registers, 32), np.uint32)
    run_ptx(body, {"tile": tile, "out": out}, declarations=DECLARE, smem_bytes=512)
    return out


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True], ids=["rows", "trans"])
def test_ldmatrix(run_ptx: Any, rng: Any, number: int, trans: bool) -> None:
    """PTX ISA 9.7.14.5.15: thread l has row l / 4, elements 2 (l % 4) and the next."""
    tile = rng.integers(0, 2**16, (32, 8), dtype=np.uint16)
    regs = ", ".join(f"r{i}" for i in range(number))
    order = rng.permutation(32)
    flip = ".trans" if trans else ""
    # Rows lie in a random order: what counts is which address a thread gives.
    table = np.argsort(order)
    data = np.ascontiguousarray(tile[order])
    index = ", ".join(str(x) for x in table)
    code = f"""
      .reg .b64 q;
      mov.u64 q, places; mad.wide.u32 q, t, 4, q; ld.global.u32 a, [q];
      mad.lo.u32 a, a, 16, s;
      ldmatrix.sync.aligned.m8n8.x{number}{flip}.shared.b16 {{{regs}}}, [a];
    """
    outputs = "".join(f"st.global.u32 [at+{128 * r}], r{r};" for r in range(number))
    body = f"""{FILL}
      .reg .b32 r<{number}>, a;
      {code}
      ld.param.u64 base, [p1]; mad.wide.u32 at, t, 4, base;
      {outputs}
    """
    out = np.zeros((number, 32), np.uint32)
    declarations = f"{DECLARE}\n.global .align 4 .u32 places[32] = {{{index}}};"
    run_ptx(body, {"tile": data, "out": out}, declarations=declarations, smem_bytes=512)
    for i in range(number):
        matrix = tile[8 * i : 8 * i + 8]
        matrix = matrix.T if trans else matrix
        low, high = matrix[G, 2 * T], matrix[G, 2 * T + 1]
        assert (out[i] == (high.astype(np.uint32) << 16 | low)).all()


def test_ldmatrix_unpacks_4_bits(run_ptx: Any, rng: Any) -> None:
    tile = rng.integers(0, 256, (32, 16), dtype=np.uint8)
    code = """
      mad.lo.u32 a, t, 16, s;
      ldmatrix.sync.aligned.m8n16.x4.shared.b8x16.b4x16_p64 {r0, r1, r2, r3}, [a];
    """
    out = loaded(run_ptx, tile, code, 4).view(np.uint8).reshape(4, 32, 4)
    nibbles = np.stack([tile[:, :8] & 15, tile[:, :8] >> 4], axis=-1).reshape(32, 16)
    for i in range(4):
        for e in range(4):
            assert (out[i, :, e] == nibbles[8 * i + G, 4 * T + e]).all()


def test_ldmatrix_unpacks_6_bits(run_ptx: Any, rng: Any) -> None:
    tile = rng.integers(0, 256, (32, 16), dtype=np.uint8)
    code = """
      mad.lo.u32 a, t, 16, s;
      ldmatrix.sync.aligned.m8n16.x4.shared.b8x16.b6x16_p32 {r0, r1, r2, r3}, [a];
    """
    out = loaded(run_ptx, tile, code, 4).view(np.uint8).reshape(4, 32, 4)
    rows = [int.from_bytes(row[:12].tobytes(), "little") for row in tile]
    for i in range(4):
        for lane in range(32):
            for e in range(4):
                column = 4 * (lane & 3) + e
                assert out[i, lane, e] == rows[8 * i + (lane >> 2)] >> 6 * column & 63


def test_ldmatrix_extends_signed_4_bits(run_ptx: Any, rng: Any) -> None:
    """Rows of 8 bytes, without padding."""
    tile = rng.integers(0, 256, 512, dtype=np.uint8)
    code = """
      mad.lo.u32 a, t, 8, s;
      ldmatrix.sync.aligned.m8n16.x4.shared.s8.s4 {r0, r1, r2, r3}, [a];
    """
    out = loaded(run_ptx, tile, code, 4).view(np.int8).reshape(4, 32, 4)
    rows = tile[:256].reshape(32, 8)
    nibbles = np.stack([rows & 15, rows >> 4], axis=-1).reshape(32, 16).astype(np.int8)
    nibbles = np.where(nibbles > 7, nibbles - 16, nibbles)
    for i in range(4):
        for e in range(4):
            assert (out[i, :, e] == nibbles[8 * i + G, 4 * T + e]).all()


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True], ids=["rows", "trans"])
def test_stmatrix_is_the_reverse(run_ptx: Any, rng: Any, number: int, trans: bool) -> None:
    tile = rng.integers(0, 2**32, (32, 4), dtype=np.uint32)
    regs = ", ".join(f"r{i}" for i in range(number))
    flip = ".trans" if trans else ""
    code = f"""
      mad.lo.u32 a, t, 16, s;
      ldmatrix.sync.aligned.m8n8.x{number}{flip}.shared.b16 {{{regs}}}, [a];
      bar.warp.sync -1;
      xor.b32 i, t, 5; mad.lo.u32 a, i, 16, s;
      stmatrix.sync.aligned.m8n8.x{number}{flip}.shared.b16 [a], {{{regs}}};
      bar.warp.sync -1;
      mad.lo.u32 a, t, 16, s;
      ld.shared.v4.u32 {{f0, f1, f2, f3}}, [a];
      mov.b32 r0, f1;
    """
    out = loaded(run_ptx, tile, code, number)
    rows = tile.copy()
    for row in range(8 * number):
        rows[row ^ 5] = tile[row]
    assert out[0].tolist() == rows[:, 1].tolist()


def test_movmatrix(evaluate: Callable[..., Any], rng: Any) -> None:
    """PTX ISA 9.7.14.5.17."""
    matrix = rng.integers(0, 2**16, (8, 8), dtype=np.uint16)
    a = np.ascontiguousarray(matrix).view(np.uint32).reshape(32)
    (found,) = evaluate("movmatrix.sync.aligned.m8n8.trans.b16 %d0, %a0;", [a], [np.uint32])
    assert (found.view(np.uint16).reshape(8, 8) == matrix.T).all()


# -- mma ------------------------------------------------------------------------------------------

WIDTH = {
    "f16": 16,
    "bf16": 16,
    "tf32": 32,
    "s8": 8,
    "u8": 8,
    "s4": 4,
    "u4": 4,
    "e4m3": 8,
    "e5m2": 8,
}


def packed(codes: np.ndarray, width: int) -> np.ndarray:
    """Codes [32, elements] as one 32-bit register a lane."""
    shifts = (np.arange(codes.shape[1]) * width).astype(np.uint64)
    return (codes.astype(np.uint64) << shifts).sum(axis=1).astype(np.uint32)


def a_registers(codes: np.ndarray, width: int) -> list[np.ndarray]:
    m, k = codes.shape
    per = 32 // width
    found = []
    for r in range(m * k * width // 1024):
        row = G + 8 * (r & 1) if m == 16 else G
        column = per * T + 4 * per * (r >> 1)
        elements = [codes[row, column + e] for e in range(per)]
        found.append(packed(np.stack(elements, axis=1), width))
    return found


def b_registers(codes: np.ndarray, width: int) -> list[np.ndarray]:
    k, _ = codes.shape
    per = 32 // width
    found = []
    for r in range(8 * k * width // 1024):
        first = per * T + 4 * per * r
        elements = [codes[first + e, G] for e in range(per)]
        found.append(packed(np.stack(elements, axis=1), width))
    return found


def c_positions(m: int, i: int) -> tuple[np.ndarray, np.ndarray]:
    return G + 8 * (i >> 1), 2 * T + (i & 1)


def random_codes(
    rng: np.random.Generator, shape: tuple[int, int], kind: str, tame: bool = False
) -> Any:
    """Codes of an operand and their values; tame ones have sums that float64 and f16 can hold."""
    width = WIDTH[kind]
    if kind in ("f16", "bf16", "tf32"):
        values = rng.normal(size=shape).astype(np.float32)
        if kind == "f16":
            half = values.astype(np.float16)
            return half.view(np.uint16), half.astype(np.float64)
        raw = values.view(np.uint32)
        if kind == "bf16":
            cut = raw & np.uint32(0xFFFF0000)
            return raw >> 16, cut.view(np.float32).astype(np.float64)
        return raw, (raw & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    codes = rng.integers(0, 2**width, shape, dtype=np.uint8)
    if kind in ("e4m3", "e5m2"):
        mantissa, bias = (3, 7) if kind == "e4m3" else (2, 15)
        codes &= 0xBF if kind == "e5m2" else 0xF7  # no NaN, no infinity
        if tame:
            low, high = (9, 19) if kind == "e5m2" else (1, 9)
            exponents = rng.integers(low, high, shape, dtype=np.uint8) << mantissa
            codes = codes & np.uint8(0x80 | (1 << mantissa) - 1) | exponents
        exponent = (codes.astype(int) & 0x7F) >> mantissa
        part = (codes & (1 << mantissa) - 1).astype(float) / (1 << mantissa)
        size = np.where(exponent, (1 + part) * 2.0 ** (exponent - bias), part * 2.0 ** (1 - bias))
        return codes, np.where(codes >> 7, -size, size)
    values = codes.astype(np.float64)
    if kind[0] == "s":
        values = np.where(codes >> (width - 1), values - 2**width, values)
    return codes, values


SHAPES = [
    *((f"m16n8k{k}", kind, kind, "f32") for kind in ("f16", "bf16") for k in (8, 16)),
    *((f"m16n8k{k}", "f16", "f16", "f16") for k in (8, 16)),
    *((f"m16n8k{k}", "tf32", "tf32", "f32") for k in (4, 8)),
    *(
        (f"m16n8k{k}", a, b, d)
        for a in ("e4m3", "e5m2")
        for b in ("e4m3", "e5m2")
        for k in (16, 32)
        for d in ("f32", "f16")
    ),
    *(
        (s, a, b, "s32")
        for s in ("m8n8k16", "m16n8k16", "m16n8k32")
        for a, b in (("s8", "s8"), ("u8", "s8"), ("s8", "u8"), ("u8", "u8"))
    ),
    *(
        (s, a, b, "s32")
        for s in ("m8n8k32", "m16n8k32", "m16n8k64")
        for a, b in (("s4", "s4"), ("s4", "u4"), ("u4", "s4"), ("u4", "u4"))
    ),
]


@pytest.mark.parametrize(("shape", "a", "b", "d"), SHAPES, ids="-".join)
def test_mma(evaluate: Callable[..., Any], rng: Any, shape: str, a: str, b: str, d: str) -> None:
    """PTX ISA 9.7.14.5.14; integers exactly, floats within one rounding of the exact sum."""
    m, k = (16 if shape.startswith("m16") else 8), int(shape.partition("k")[2])
    a_codes, a_values = random_codes(rng, (m, k), a, tame=d == "f16")
    b_codes, b_values = random_codes(rng, (k, 8), b, tame=d == "f16")
    left, right = a_registers(a_codes, WIDTH[a]), b_registers(b_codes, WIDTH[b])
    count = m // 4
    if d == "s32":
        c = rng.integers(-(2**31), 2**31, (m, 8), dtype=np.int64)
        c_regs = [c[c_positions(m, i)].astype(np.int32).view(np.uint32) for i in range(count)]
    else:
        c = rng.normal(size=(m, 8)).astype(np.float16).astype(np.float64)
        c_regs = [c[c_positions(m, i)].astype(np.float32).view(np.uint32) for i in range(count)]
    if d == "f16":
        halves = [c[c_positions(m, i)].astype(np.float16).view(np.uint16) for i in range(4)]
        c_regs = [
            halves[2 * i].astype(np.uint32) | halves[2 * i + 1].astype(np.uint32) << 16
            for i in (0, 1)
        ]
    operands, at = [], 0
    for registers in (left, right, c_regs):
        names = ", ".join(f"%a{at + i}" for i in range(len(registers)))
        operands.append(f"{{{names}}}")
        at += len(registers)
    outputs = ", ".join(f"%d{i}" for i in range(len(c_regs)))
    body = f"mma.sync.aligned.{shape}.row.col.{d}.{a}.{b}.{d} {{{outputs}}}, {', '.join(operands)};"
    found = evaluate(body, [*left, *right, *c_regs], [np.uint32] * len(c_regs))
    exact = a_values @ b_values + c
    for i in range(count):
        want = exact[c_positions(m, i)]
        if d == "s32":
            assert (found[i].view(np.int32) == want.astype(np.int64).astype(np.int32)).all()
        elif d == "f32":
            assert np.allclose(found[i].view(np.float32), want, rtol=2**-23, atol=1e-12)
        else:
            half = (found[i >> 1] >> 16 * (i & 1)).astype(np.uint16).view(np.float16)
            assert np.isfinite(half).all()
            assert np.count_nonzero(half) > 20  # there is something to compare
            assert np.array_equal(half, want.astype(np.float16))


@pytest.mark.parametrize("shape", ["m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "rounded"])
def test_mma_of_doubles(evaluate: Callable[..., Any], rng: Any, shape: str, exact: bool) -> None:
    """PTX ISA 9.7.14.5.14: sums that are exact, and such as are rounded for every product."""
    m, k = (16 if shape.startswith("m16") else 8), int(shape.partition("k")[2])

    def matrix(rows: int, columns: int) -> np.ndarray:
        if exact:
            return rng.integers(-1000, 1000, (rows, columns)).astype(np.float64)
        return rng.normal(size=(rows, columns))

    a, b, c = matrix(m, k), matrix(k, 8), matrix(m, 8)
    left = [a[G + 8 * (r & 1) if m == 16 else G, T + 4 * (r >> 1 if m == 16 else r)]
            for r in range(m * k // 32)]  # fmt: skip
    right = [b[T + 4 * r, G] for r in range(k // 4)]
    held = [c[c_positions(m, i)] for i in range(m // 4)]
    inputs = [*left, *right, *held]
    names = iter(f"%a{i}" for i in range(len(inputs)))
    operands = ["{" + ", ".join(next(names) for _ in part) + "}" for part in (left, right, held)]
    outputs = ", ".join(f"%d{i}" for i in range(len(held)))
    body = f"mma.sync.aligned.{shape}.row.col.f64.f64.f64.f64 {{{outputs}}}, {', '.join(operands)};"
    found = evaluate(body, inputs, [np.float64] * len(held))
    total = a @ b + c
    sizes = np.abs(a) @ np.abs(b) + np.abs(c)
    for i, values in enumerate(found):
        place = c_positions(m, i)
        if exact:
            assert (values == total[place]).all()
        else:
            assert (np.abs(values - total[place]) <= (k + 2) * 2.0**-52 * sizes[place]).all()


@pytest.mark.parametrize("order_a", ["row", "col"])
@pytest.mark.parametrize("order_b", ["row", "col"])
@pytest.mark.parametrize(("d", "c"), [("f32", "f32"), ("f32", "f16"), ("f16", "f16")])
def test_four_products_of_quarter_warps(
    evaluate: Callable[..., Any], rng: Any, order_a: str, order_b: str, d: str, c: str
) -> None:
    """PTX ISA 9.7.14.5.1, element by element as its tables say."""
    left = rng.integers(-8, 8, (4, 8, 4)).astype(np.float16)
    right = rng.integers(-8, 8, (4, 4, 8)).astype(np.float16)
    held = rng.integers(-64, 64, (4, 8, 8)).astype(np.float16)
    exact = left.astype(float) @ right.astype(float) + held

    def place(lane: int, i: int, kind: str) -> tuple[int, int]:
        upper = 4 if lane >= 16 else 0
        if kind == "f16":
            return lane % 4 + upper, i
        return (lane & 1) + (i & 2) + upper, (i & 4) + (lane & 2) + (i & 1)

    def packed_halves(elements: np.ndarray) -> list[np.ndarray]:
        """Registers of halves [32, count]."""
        words = np.ascontiguousarray(elements).view(np.uint32)
        return [np.ascontiguousarray(words[:, r]) for r in range(words.shape[1])]

    a, b = np.zeros((32, 4), np.float16), np.zeros((32, 4), np.float16)
    before = np.zeros((32, 8), np.float16)
    for lane in range(32):
        quarter, upper = lane % 16 // 4, 4 if lane >= 16 else 0
        for i in range(4):
            along = (lane % 4 + upper, i) if order_a == "row" else (i + upper, lane % 4)
            a[lane, i] = left[quarter][along]
            across = (lane % 4, i + upper) if order_b == "row" else (i, lane % 4 + upper)
            b[lane, i] = right[quarter][across]
        for i in range(8):
            before[lane, i] = held[quarter][place(lane, i, c)]
    if c == "f16":
        c_regs = packed_halves(before)
    else:
        c_regs = [before[:, i].astype(np.float32).view(np.uint32) for i in range(8)]
    inputs = [*packed_halves(a), *packed_halves(b), *c_regs]
    names = ", ".join(f"%a{4 + i}" for i in range(len(c_regs)))
    count = 8 if d == "f32" else 4
    outputs = ", ".join(f"%d{i}" for i in range(count))
    body = f"mma.sync.aligned.m8n8k4.{order_a}.{order_b}.{d}.f16.f16.{c} {{{outputs}}},"
    body += f" {{%a0, %a1}}, {{%a2, %a3}}, {{{names}}};"
    found = evaluate(body, inputs, [np.uint32] * count)
    for lane in range(32):
        for i in range(8):
            row, column = place(lane, i, d)
            if d == "f32":
                value = float(found[i][lane : lane + 1].view(np.float32)[0])
            else:
                value = float(found[i >> 1].view(np.float16).reshape(32, 2)[lane, i & 1])
            assert value == exact[lane % 16 // 4, row, column]


def test_integer_mma_saturates_if_asked(evaluate: Callable[..., Any]) -> None:
    ones = np.full(32, 0x7F7F7F7F, np.uint32)
    c = np.full(32, 2**31 - 10, np.int32).view(np.uint32)
    names = "{%a0, %a0, %a0, %a0}, {%a0, %a0}, {%a1, %a1, %a1, %a1}"
    body = f"""
      mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32 {{%d0, %d1, %d2, %d3}}, {names};
      mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {{%d4, %d1, %d2, %d3}}, {names};
    """
    found = evaluate(body, [ones, c], [np.int32] * 5)
    assert (found[0] == 2**31 - 1).all()
    assert (found[4] == 2**31 - 10 + 32 * 127 * 127 - 2**32).all()
