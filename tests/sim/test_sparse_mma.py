"""Products with a sparse A, by the definition of its storage (PTX ISA 9.7.14.6)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensor_kernels as tk
from test_block_scale import container, fragments, scale_registers
from test_matrix import WIDTH, a_registers, b_registers, c_positions, random_codes

# Pairs of units of a chunk that metadata can name: increasing ones, and all.
INCREASING = [(i, j) for i in range(4) for j in range(4) if i < j]
ANY = [(i, j) for i in range(4) for j in range(4) if i != j]

SHAPES = [
    *((f"m16n8k{k}", kind, kind, "f32") for kind in ("f16", "bf16") for k in (16, 32)),
    *((f"m16n8k{k}", "f16", "f16", "f16") for k in (16, 32)),
    *((f"m16n8k{k}", "tf32", "tf32", "f32") for k in (8, 16)),
    *(("m16n8k64", a, b, "f32") for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
    *((f"m16n8k{k}", a, b, "s32") for k in (32, 64) for a in ("s8", "u8") for b in ("s8", "u8")),
    *((f"m16n8k{k}", a, b, "s32") for k in (64, 128) for a in ("s4", "u4") for b in ("s4", "u4")),
]
SELECTORS = {
    # (bits of an element, K): values of the sparsity selector
    **{(16, 16): 4, (16, 32): 2, (32, 8): 4, (32, 16): 2},
    **{(8, 32): 2, (8, 64): 1, (4, 64): 2, (4, 128): 1},
}
CASES = [
    (*shape, f) for shape in SHAPES for f in range(SELECTORS[WIDTH[shape[1]], int(shape[0][6:])])
]
ORDERED_ONLY = ("tf32", "e4m3", "e5m2")
"""Types of A for which only increasing numbers mean something, without the suffix too."""


def chunks(rng: np.random.Generator, k: int, width: int, pairs: Any) -> tuple[Any, Any]:
    """(nibbles of metadata [16, chunks], columns of the kept elements [16, K / 2]).

    Written chunk by chunk as 9.7.14.6.1 describes each type.
    """
    size = {32: 2, 16: 4, 8: 4, 4: 8}[width]
    nibbles = np.zeros((16, k // size), np.uint32)
    columns = np.zeros((16, k // 2), np.int64)
    for row in range(16):
        kept: list[int] = []
        for chunk in range(k // size):
            first, second = pairs[rng.integers(len(pairs))]
            if width == 32:  # one element of two
                place = int(rng.integers(2))
                nibbles[row, chunk] = 0b1110 if place else 0b0100
                kept.append(2 * chunk + place)
                continue
            nibbles[row, chunk] = second << 2 | first
            for unit in (first, second):
                if width == 4:  # pairs of neighbours
                    kept += [8 * chunk + 2 * unit, 8 * chunk + 2 * unit + 1]
                else:
                    kept.append(4 * chunk + unit)
        columns[row] = kept
    return nibbles, columns


def metadata(rng: np.random.Generator, nibbles: Any, width: int, selector: int) -> np.ndarray:
    """The register of each lane; those that do not contribute hold anything."""
    found = rng.integers(0, 2**32, 32, dtype=np.uint32)
    count = nibbles.shape[1]
    lanes = count // 4

    def word(part: Any) -> int:
        return sum(int(nibble) << 4 * i for i, nibble in enumerate(part))

    for g in range(8):
        for t in range(lanes):
            lane = 4 * g + lanes * selector + t
            if width >= 16:
                part = slice(4 * t, 4 * t + 4)
                found[lane] = word(nibbles[g, part]) | word(nibbles[g + 8, part]) << 16
            else:
                part = slice(8 * (t >> 1), 8 * (t >> 1) + 8)
                found[lane] = word(nibbles[g + 8 * (t & 1), part])
    return found


def expanded(kept: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The matrix with its zeros."""
    found = np.zeros((len(kept), 2 * kept.shape[1]), kept.dtype)
    for row in range(len(kept)):
        for place, column in enumerate(columns[row]):
            found[row, column] = kept[row, place]
    return found


def multiply(
    evaluate: Callable[..., Any],
    opcode: str,
    registers: tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]],
    meta: np.ndarray,
    selector: int,
    **options: Any,
) -> list[np.ndarray]:
    """Registers of D; those given are of A, B and C."""
    operands, at = [], 0
    for part in registers:
        names = ", ".join(f"%a{at + i}" for i in range(len(part)))
        operands.append(f"{{{names}}}")
        at += len(part)
    count = len(registers[2])
    outputs = ", ".join(f"%d{i}" for i in range(count))
    body = f"{opcode} {{{outputs}}}, {', '.join(operands)}, %a{at}, {selector};"
    inputs = [each for part in registers for each in part]
    options = {"target": "sm_90a", **options}
    found: list[np.ndarray] = evaluate(body, [*inputs, meta], [np.uint32] * count, **options)
    return found


def c_operand(rng: np.random.Generator, d: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """Random C [16, 8] and its registers."""
    if d == "s32":
        c = rng.integers(-(2**31), 2**31, (16, 8), dtype=np.int64)
        return c, [c[c_positions(16, i)].astype(np.int32).view(np.uint32) for i in range(4)]
    c = rng.normal(size=(16, 8)).astype(np.float16).astype(np.float64)
    if d == "f32":
        return c, [c[c_positions(16, i)].astype(np.float32).view(np.uint32) for i in range(4)]
    halves = [c[c_positions(16, i)].astype(np.float16).view(np.uint16) for i in range(4)]
    return c, [
        halves[2 * i].astype(np.uint32) | halves[2 * i + 1].astype(np.uint32) << 16 for i in (0, 1)
    ]


def check(found: list[np.ndarray], exact: np.ndarray, d: str) -> None:
    """Integers exactly, floats within one rounding of the exact sum."""
    for i in range(4):
        want = exact[c_positions(16, i)]
        if d == "s32":
            assert (found[i].view(np.int32) == want.astype(np.int64).astype(np.int32)).all()
        elif d == "f32":
            assert np.allclose(found[i].view(np.float32), want, rtol=2**-23, atol=1e-12)
        else:
            half = (found[i >> 1] >> 16 * (i & 1)).astype(np.uint16).view(np.float16)
            assert np.array_equal(half, want.astype(np.float16))


@pytest.mark.parametrize(
    ("shape", "a", "b", "d", "selector", "order"),
    [
        (*case, order)
        for case in CASES
        for order in ("ordered", "increasing", "any-order")
        if order != "any-order" or case[1] not in ORDERED_ONLY
    ],
)
def test_sparse_mma(
    evaluate: Callable[..., Any],
    rng: Any,
    shape: str,
    a: str,
    b: str,
    d: str,
    selector: int,
    order: str,
) -> None:
    """PTX ISA 9.7.14.6.3, with every selector that a shape has, with the suffix and without it."""
    k, width = int(shape[6:]), WIDTH[a]
    nibbles, columns = chunks(rng, k, width, ANY if order == "any-order" else INCREASING)
    a_codes, a_values = random_codes(rng, (16, k // 2), a, tame=d == "f16")
    b_codes, b_values = random_codes(rng, (k, 8), b, tame=d == "f16")
    c, c_regs = c_operand(rng, d)
    registers = a_registers(a_codes, width), b_registers(b_codes, WIDTH[b]), c_regs
    suffix = "::ordered_metadata" if order == "ordered" else ""
    opcode = f"mma.sp{suffix}.sync.aligned.{shape}.row.col.{d}.{a}.{b}.{d}"
    found = multiply(evaluate, opcode, registers, metadata(rng, nibbles, width, selector), selector)
    check(found, expanded(a_values, columns) @ b_values + c, d)


@pytest.mark.parametrize(("shape", "a", "b", "d", "selector"), [c for c in CASES if c[1] == c[2]])
def test_where_metadata_lies(
    evaluate: Callable[..., Any], rng: Any, shape: str, a: str, b: str, d: str, selector: int
) -> None:
    """9.7.14.6.2: columns of B are bits of the number of a row, so D tells which one A is opposite.

    One kept element of each row is 1, all others are 0.
    """
    k, width = int(shape[6:]), WIDTH[a]
    one = {"f16": 0x3C00, "bf16": 0x3F80, "tf32": 0x3F800000, "e4m3": 0x38, "e5m2": 0x3C}.get(a, 1)
    nibbles, columns = chunks(rng, k, width, INCREASING)
    places = rng.integers(0, k // 2, 16)
    rows = np.arange(16)
    a_codes = np.zeros((16, k // 2), np.uint32)
    a_codes[rows, places] = one
    b_codes = np.where(np.arange(k)[:, None] >> np.arange(8) & 1, one, 0).astype(np.uint32)
    count = 2 if d == "f16" else 4
    zeros = [np.zeros(32, np.uint32)] * count
    registers = a_registers(a_codes, width), b_registers(b_codes, width), zeros
    opcode = f"mma.sp::ordered_metadata.sync.aligned.{shape}.row.col.{d}.{a}.{b}.{d}"
    found = multiply(evaluate, opcode, registers, metadata(rng, nibbles, width, selector), selector)
    exact = (columns[rows, places][:, None] >> np.arange(8) & 1).astype(np.float64)
    check(found, exact, d)


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "any-order"])
def test_only_what_is_opposite_kept_elements_counts(
    evaluate: Callable[..., Any], rng: Any, ordered: bool
) -> None:
    """An infinite element of B opposite zeros of A leaves no NaN, opposite others an infinity.

    All else are small integers, whose sums are exact in every order.
    """
    nibbles, columns = chunks(rng, 32, 16, INCREASING if ordered else ANY)
    a = rng.integers(1, 9, (16, 16)).astype(np.float16)
    b = rng.integers(1, 9, (32, 8)).astype(np.float16)
    row = int(rng.integers(32))
    b[row] = np.inf
    registers = (
        a_registers(a.view(np.uint16), 16),
        b_registers(b.view(np.uint16), 16),
        [np.zeros(32, np.uint32)] * 4,
    )
    suffix = "::ordered_metadata" if ordered else ""
    opcode = f"mma.sp{suffix}.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32"
    found = multiply(evaluate, opcode, registers, metadata(rng, nibbles, 16, 0), 0)
    exact = expanded(a.astype(np.float64), columns) @ np.where(np.isinf(b), 0, b).astype(np.float64)
    exact[(columns == row).any(axis=1)] = np.inf
    check(found, exact, "f32")


def test_sparse_integers_saturate(evaluate: Callable[..., Any]) -> None:
    ones = np.full(32, 0x7F7F7F7F, np.uint32)
    meta = np.full(32, 0x44444444, np.uint32)
    c = np.full(32, 2**31 - 10, np.uint32)
    for modifier, total in ((".satfinite", 2**31 - 1), ("", 2**31 - 10 + 32 * 127**2 - 2**32)):
        opcode = f"mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col{modifier}.s32.s8.s8.s32"
        found = multiply(evaluate, opcode, ([ones] * 4, [ones] * 4, [c] * 4), meta, 0)
        assert all((each.view(np.int32) == total).all() for each in found)


# -- what is refused ------------------------------------------------------------------------------

HALF = "sync.aligned.m16n8k32.row.col.f32.f16.f16.f32"
WORD = "sync.aligned.m16n8k16.row.col.f32.tf32.tf32.f32"


@pytest.mark.parametrize(
    ("opcode", "word", "told"),
    [
        (f"mma.sp.{HALF}", 0x44444445, "the two numbers of a chunk differ"),
        (f"mma.sp::ordered_metadata.{HALF}", 0x44444414, "is above the first"),
        (f"mma.sp.{WORD}", 0x44448444, "0x4 or 0xe"),
        (f"mma.sp::ordered_metadata.{WORD}", 0x44444484, "0x4 or 0xe"),
        (
            "mma.sp.sync.aligned.m16n8k64.row.col.f32.e4m3.e4m3.f32",
            0x44444441,
            "is above the first",
        ),
    ],
)
def test_metadata_without_a_meaning(
    evaluate: Callable[..., Any], opcode: str, word: int, told: str
) -> None:
    """9.7.14.6.1; the lanes that do not contribute may hold anything."""
    zeros = [np.zeros(32, np.uint32)] * 4
    meta = np.full(32, 0x44444444, np.uint32)
    everything = "m16n8k64" in opcode
    meta[2] = 0 if not everything else meta[2]
    multiply(evaluate, opcode, (zeros, zeros, zeros), meta, 0)
    meta[1] = word
    with pytest.raises(Exception, match=f"metadata of A is {word:#010x}, but .*{told}"):
        multiply(evaluate, opcode, (zeros, zeros, zeros), meta, 0)


def test_undefined_metadata(run_ptx: Callable[..., Any]) -> None:
    """It must be defined in the lanes that contribute: here in even pairs only."""
    body = """
      .reg .b32 e, t, n; .reg .f32 d<4>; .reg .pred p;
      mov.u32 t, %laneid; and.b32 t, t, 2; setp.eq.u32 p, t, 0; mov.b32 n, 0;
      @p mov.b32 e, 0x44444444; mov.f32 d0, 0f00000000;
      mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32
        {d0, d1, d2, d3}, {n, n, n, n}, {n, n, n, n}, {d0, d0, d0, d0}, e, SELECTOR;
    """
    out = np.zeros(1, np.uint32)
    run_ptx(body.replace("SELECTOR", "0"), {"out": out}, target="sm_90a")
    with pytest.raises(Exception, match="metadata of A is undefined"):
        run_ptx(body.replace("SELECTOR", "1"), {"out": out}, target="sm_90a")


def test_what_an_undefined_element_reaches(run_ptx: Callable[..., Any]) -> None:
    """Undefined elements of A make a row of D undefined, those of B a column."""
    body = """
      .reg .b32 e, t, n, u; .reg .f32 d<4>; .reg .pred p; .reg .b64 at;
      mov.u32 t, %laneid; mov.b32 n, 0; mov.b32 e, 0x44444444; setp.lt.u32 p, t, 28;
      @p mov.b32 u, 0; mov.f32 d0, 0f00000000;
      mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32
        {d0, d1, d2, d3}, {A, n, n, n}, {B, n, n, n}, {d0, d0, d0, d0}, e, 0;
      ld.param.u64 at, [p0]; mad.wide.u32 at, t, 4, at; setp.lt.u32 p, t, LIMIT;
      @p st.global.f32 [at], STORED;
    """
    out = np.zeros(32, np.uint32)
    row = body.replace("A,", "u,").replace("B,", "n,").replace("STORED", "d0")
    run_ptx(row.replace("LIMIT", "28"), {"out": out}, target="sm_90a")
    with pytest.raises(Exception, match="undefined"):
        run_ptx(row.replace("LIMIT", "32"), {"out": out}, target="sm_90a")
    column = body.replace("A,", "n,").replace("B,", "u,").replace("STORED", "d1")
    run_ptx(column.replace("LIMIT", "3"), {"out": out}, target="sm_90a")
    with pytest.raises(Exception, match="undefined"):
        run_ptx(column.replace("LIMIT", "4"), {"out": out}, target="sm_90a")


# -- narrow types and block scales ----------------------------------------------------------------

FORMATS = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")


def narrow_operands(
    rng: Any, k: int, a: str, b: str, bits: int
) -> tuple[tuple[list[np.ndarray], list[np.ndarray]], np.ndarray, np.ndarray]:
    """(registers of A and B, values of what A keeps [16, K / 2], of B [K, 8])."""
    a_codes, a_values = tk.random_codes(rng, (16, k // 2), a)
    b_codes, b_values = tk.random_codes(rng, (8, k), b)
    if bits == 8:
        a_codes, b_codes = container(a_codes, a), container(b_codes, b)
    return (fragments(a_codes, bits), fragments(b_codes, bits)), a_values, b_values.T


@pytest.mark.parametrize("b", FORMATS)
@pytest.mark.parametrize("a", FORMATS)
def test_sparse_f8f6f4(evaluate: Callable[..., Any], rng: Any, a: str, b: str) -> None:
    (left, right), a_values, b_values = narrow_operands(rng, 64, a, b, 8)
    nibbles, columns = chunks(rng, 64, 8, INCREASING)
    c, c_regs = c_operand(rng, "f32")
    opcode = f"mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.kind::f8f6f4.f32.{a}.{b}.f32"
    meta = metadata(rng, nibbles, 8, 0)
    found = multiply(evaluate, opcode, (left, right, c_regs), meta, 0, target="sm_120a")
    check(found, expanded(a_values, columns) @ b_values + c, "f32")


SPARSE = "mma.sp::ordered_metadata.sync.aligned"
SCALED = [
    # opcode, K, types of A, B and scales, scales of a row
    *((f"{SPARSE}.kind::mxf8f6f4.block_scale.m16n8k64.row.col", 64, a, "e4m3", "ue8m0", 1)
      for a in FORMATS),
    (f"{SPARSE}.m16n8k64.row.col.kind::mxf8f6f4.block_scale", 64, "e5m2", "e2m1", "ue8m0", 1),
    (f"{SPARSE}.m16n8k128.row.col.kind::mxf4.block_scale", 128, "e2m1", "e2m1", "ue8m0", 2),
    (f"{SPARSE}.kind::mxf4.block_scale.m16n8k128.row.col", 128, "e2m1", "e2m1", "ue8m0", 2),
    *((f"{SPARSE}.m16n8k128.row.col.kind::mxf4nvf4.block_scale.scale_vec::{n}X",
       128, "e2m1", "e2m1", s, n) for n, s in ((2, "ue8m0"), (4, "ue8m0"), (4, "ue4m3"))),
    (f"{SPARSE}.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k128.row.col",
     128, "e2m1", "e2m1", "ue4m3", 4),
]  # fmt: skip


@pytest.mark.parametrize(("opcode", "k", "a", "b", "scale", "count"), SCALED)
def test_sparse_block_scales(
    evaluate: Callable[..., Any],
    rng: Any,
    opcode: str,
    k: int,
    a: str,
    b: str,
    scale: str,
    count: int,
) -> None:
    """9.7.14.3: A has M x count scales and B count x N, each for K / count columns."""
    bits = 4 if k == 128 else 8
    (left, right), a_values, b_values = narrow_operands(rng, k, a, b, bits)
    nibbles, columns = chunks(rng, k, bits, INCREASING)
    low, high = (110, 140) if scale == "ue8m0" else (0, 127)
    scales = rng.integers(low, high, (16, count)), rng.integers(low, high, (8, count))
    table = tk.table(scale)
    dense = expanded(a_values, columns) * np.repeat(table[scales[0]], k // count, axis=1)
    exact = dense @ (b_values * np.repeat(table[scales[1]], k // count, axis=1).T)
    ids = (4 - count, 1, 0, 2) if count < 4 else (0, 1, 0, 2)
    registers = [*left, *right, *[np.zeros(32, np.uint32)] * 4]
    registers += [metadata(rng, nibbles, bits, 0), *scale_registers(rng, scales, ids)]
    groups = ("%a0, %a1, %a2, %a3", "%a4, %a5, %a6, %a7", "%a8, %a9, %a10, %a11")
    body = f"{opcode}.f32.{a}.{b}.f32.{scale} {{%d0, %d1, %d2, %d3}}, "
    body += ", ".join(f"{{{group}}}" for group in groups)
    body += f", %a12, 0, %a13, {{{ids[0]}, {ids[1]}}}, %a14, {{{ids[2]}, {ids[3]}}};"
    found = evaluate(body, registers, [np.float32] * 4, target="sm_120a")
    for i in range(4):
        want = exact[c_positions(16, i)].astype(np.float32)
        assert np.allclose(found[i], want, rtol=2**-22, atol=0)


def test_selectors_that_the_assembler_lets_pass(evaluate: Callable[..., Any]) -> None:
    """It takes 2 and 3 for this shape; 9.7.14.6.1 has no meaning for them."""
    zeros = [np.zeros(32, np.uint32)] * 4
    meta = np.full(32, 0x44444444, np.uint32)
    with pytest.raises(Exception, match="one of 0, 1"):
        multiply(evaluate, f"mma.sp.{HALF}", (zeros, zeros, zeros), meta, 2)
