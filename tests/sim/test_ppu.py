"""Matrix instructions of T-Head PPUs, as t-head/actlize orders their registers."""

from typing import Any

import numpy as np
import pytest
import tensor_kernels as tk

LANE = np.arange(32)
G, T = LANE >> 2, LANE & 3
V1 = "ppu.mma.sync.aligned"
V15 = "ppu.tc02.mma.sync.aligned"


def run(text: str, registers: list[np.ndarray], results: int, target: str) -> np.ndarray:
    """Registers [results, 32] after an instruction on r0, r1, ... that writes d0, d1, ..."""
    count = len(registers)
    loads = "".join(f"ld.global.u32 r{i}, [at+{128 * i}];" for i in range(count))
    stores = "".join(f"st.global.u32 [at+{128 * i}], d{i};" for i in range(results))
    body = f"""
    .version 8.0
    .target {target}
    .address_size 64
    .visible .entry test(.param .u64 p0, .param .u64 p1) {{
      .reg .b32 t, r<{count}>, d<{results}>; .reg .b64 base, at;
      mov.u32 t, %tid.x; ld.param.u64 base, [p0]; mad.wide.u32 at, t, 4, base;
      {loads}
      {text}
      ld.param.u64 base, [p1]; mad.wide.u32 at, t, 4, base;
      {stores}
      ret;
    }}
    """
    given, out = np.stack(registers), np.zeros((results, 32), np.uint32)
    tk.launch(body, {"given": given, "out": out}, ["given", "out"], block=32)
    return out


def word(codes: np.ndarray, row: np.ndarray, first: np.ndarray, bits: int) -> np.ndarray:
    """A register of each thread: elements of its row from its first one on."""
    found = np.zeros(32, np.uint64)
    for e in range(32 // bits):
        found |= codes[row, first + e].astype(np.uint64) << np.uint64(bits * e)
    return found.astype(np.uint32)


def operands(
    a: np.ndarray, b: np.ndarray, bits: int, version: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Registers of A [16, K] and B [16 columns, K]."""
    per = 32 // bits
    low, high = per * T, per * T + 4 * per
    order = {
        1: [(G, low), (G, high), (G + 8, low), (G + 8, high)],
        15: [(G, low), (G + 8, low), (G, high), (G + 8, high)],
    }[version]
    columns = [(G, low), (G, high), (G + 8, low), (G + 8, high)]
    return (
        [word(a, row, first, bits) for row, first in order],
        [word(b, row, first, bits) for row, first in columns],
    )


def place(version: int, i: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of D[i] in each thread."""
    if version == 1:
        return G + 8 * (i >> 2), T + 4 * (i & 3)
    return G + 8 * (i >> 1 & 1), 2 * T + (i & 1) + 8 * (i >> 2)


def names(letter: str, first: int, count: int) -> str:
    return "{" + ", ".join(f"{letter}{first + i}" for i in range(count)) + "}"


FORMS = [
    *((1, "m16n16k16", "f32", name, name) for name in ("f16", "bf16")),
    (1, "m16n16k8", "f32", "tf32", "tf32"),
    *((1, "m16n16k32", "s32", name, name) for name in ("s8", "u8")),
    *((15, "m16n16k16", "f32", name, name) for name in ("f16", "bf16")),
    (15, "m16n16k16", "f16", "f16", "f16"),
    (15, "m16n16k8", "f32", "tf32", "tf32"),
    (15, "m16n16k8", "f32", "f32", "f32"),
    *((15, "m16n16k32", "s32", name, name) for name in ("s8", "u8")),
    *(
        (15, "m16n16k32", d, a, b)
        for d in ("f32", "f16")
        for a in ("e4m3", "e5m2")
        for b in ("e4m3", "e5m2")
    ),
]


@pytest.mark.parametrize(("version", "shape", "d", "a", "b"), FORMS)
def test_products(rng: Any, version: int, shape: str, d: str, a: str, b: str) -> None:
    k = int(shape.rpartition("k")[2])
    bits = 256 // k

    def codes(name: str) -> tuple[np.ndarray, np.ndarray]:
        if name == "f32":
            values = rng.normal(size=(16, k)).astype(np.float32)
            return values.view(np.uint32), values.astype(np.float64)
        return tk.random_codes(rng, (16, k), name)

    (a_codes, a_values), (b_codes, b_values) = codes(a), codes(b)
    if d == "f16" and bits == 8:  # sums that half precision holds
        a_codes, a_values = a_codes & 0x3, tk.table(a)[a_codes & 0x3]
    c = rng.integers(-4, 5, (16, 16)).astype(np.float64)
    left, right = operands(a_codes, b_codes, bits, version)
    if d == "f16":
        halves = [c[place(15, i)].astype(np.float16).view(np.uint16) for i in range(8)]
        sums = [
            halves[2 * i].astype(np.uint32) | halves[2 * i + 1].astype(np.uint32) << 16
            for i in range(4)
        ]
    else:
        dtype = np.int32 if d == "s32" else np.float32
        sums = [c[place(version, i)].astype(dtype).view(np.uint32) for i in range(8)]
    count = len(sums)
    text = (
        f"{V1 if version == 1 else V15}.{shape}.row.col.{d}.{a}.{b}.{d} {names('d', 0, count)}, "
        f"{names('r', 0, 4)}, {names('r', 4, 4)}, {names('r', 8, count)};"
    )
    target = "sm_80" if version == 1 else "sm_89"
    found = run(text, [*left, *right, *sums], count, target)
    exact = a_values @ b_values.T + c
    for i in range(8):
        want = exact[place(version, i)]
        if d == "f16":
            got = (found[i >> 1] >> 16 * (i & 1)).astype(np.uint16).view(np.float16)
            with np.errstate(over="ignore"):
                assert np.array_equal(got, want.astype(np.float16), equal_nan=True)
        elif d == "s32":
            assert (found[i].view(np.int32) == want).all()
        else:
            assert np.allclose(found[i].view(np.float32), want, rtol=2**-22, atol=1e-6)


def test_mxfp4_with_scales_of_one(rng: Any) -> None:
    a_codes, a_values = tk.random_codes(rng, (16, 64), "e2m1")
    b_codes, b_values = tk.random_codes(rng, (16, 64), "e2m1")
    c = rng.normal(size=(16, 16)).astype(np.float32)
    left, right = operands(a_codes, b_codes, 4, 15)
    sums = [c[place(15, i)].view(np.uint32) for i in range(8)]
    ones = np.full(32, 0x7F7F7F7F, np.uint32)
    text = (
        f"ppu.tc02.mma.mx.sync.aligned.m16n16k64.row.col.f32.f4.f4.f32 {names('d', 0, 8)}, "
        f"{names('r', 0, 4)}, {names('r', 4, 4)}, {names('r', 8, 8)}, {{r16, r16}}, r16, r16, 0;"
    )
    found = run(text, [*left, *right, *sums, ones], 8, "sm_89")
    exact = a_values @ b_values.T + c
    for i in range(8):
        assert np.allclose(found[i].view(np.float32), exact[place(15, i)], rtol=2**-22, atol=1e-6)
    with pytest.raises(Exception, match=r"which rows the scales .* is not known"):
        run(text, [*left, *right, *sums, ones + np.uint32(1)], 8, "sm_89")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ppu.cp.async.aiu.bulk.tensor.shared.global.padz.linear.stride.2d.b16 [r0];", "aiu"),
        ("ppu.ldmatrix.sync.aligned.m8n8.x4.swzl.shared.b16 {d0, d1}, [r0];", "swizzle"),
        (f"{V1}.m8n16k16.row.col.f32.f16.f16.f32 d0, r0, r0, r0;", "m8n16k16"),
        (
            f"{V1}.m16n16k16.row.col.f16.f16.f16.f16 {{d0, d1, d2, d3}}, {{r0, r0, r0, r0}}, "
            "{r0, r0, r0, r0}, {r0, r0, r0, r0};",
            "halves",
        ),
        (f"{V1}.m16n16k32.row.col.f32.e4m3.e4m3.f32 d0, r0, r0, r0;", "has the types"),
    ],
)
def test_what_is_not_known_is_refused(text: str, why: str) -> None:
    """An instruction of which no public source says enough is no guess."""
    with pytest.raises(Exception, match=why):
        run(text, [np.zeros(32, np.uint32)], 4, "sm_80")


def test_undefined_operands_make_their_row_undefined(rng: Any) -> None:
    registers = [np.zeros(32, np.uint32)] * 8
    text = f"""
      .reg .b32 x;
      {V15}.m16n16k16.row.col.f32.f16.f16.f32 {names("d", 0, 8)},
        {{x, r1, r2, r3}}, {names("r", 4, 4)}, {names("r", 0, 8)};
      mov.u32 d0, 0; mov.u32 d1, 0; mov.u32 d4, 0; mov.u32 d5, 0;
    """
    assert (run(text, registers, 8, "sm_89") == 0).all()
    with pytest.raises(Exception, match="an undefined value is stored"):
        run(text.replace("mov.u32 d4, 0;", ""), registers, 8, "sm_89")
