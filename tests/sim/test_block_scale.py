"""mma.sync with block scales and with operands of 4 and 6 bits (PTX ISA 9.7.14.3 and .5.14)."""

from typing import Any

import numpy as np
import pytest
import tensor_kernels as tk

LANE = np.arange(32)
G, T = LANE >> 2, LANE & 3
FORMATS = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")

SOURCE = r"""
typedef unsigned u32;
extern "C" __global__ void test(const u32* given, u32* out, const unsigned short* ids) {
  u32 r[12], l = threadIdx.x;
  for (int i = 0; i < 12; ++i) r[i] = given[i * 32 + l];
  u32 d[4];
  asm volatile("MMA {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13}SCALES;"
    : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
    : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(r[4]), "r"(r[5]),
      "r"(r[6]), "r"(r[7]), "r"(r[8]), "r"(r[9]), "r"(r[10]), "r"(r[11]),
      "h"(ids[0]), "h"(ids[1]), "h"(ids[2]), "h"(ids[3]));
  for (int i = 0; i < 4; ++i) out[i * 32 + l] = d[i];
}
"""
SCALED = ", {%14}, {%16, %17}, {%15}, {%18, %19}"


def multiply(opcode: str, registers: list[np.ndarray], ids: Any = (0, 0, 0, 0)) -> np.ndarray:
    """D [16, 8] of an instruction on 12 registers: A, B, C and the scales."""
    text = SOURCE.replace("MMA", opcode)
    text = text.replace("SCALES", SCALED if len(registers) == 12 else "")
    given = np.zeros((12, 32), np.uint32)
    given[: len(registers)] = registers
    out = np.zeros((4, 32), np.uint32)
    tk.launch(
        tk.ptx_of(text, "sm_120a"),
        {"given": given, "out": out, "ids": np.array(ids, np.uint16)},
        ["given", "out", "ids"],
        block=32,
    )
    found = np.zeros((16, 8), np.float32)
    for i in range(4):
        found[G + 8 * (i >> 1), 2 * T + (i & 1)] = out[i].view(np.float32)
    return found


def fragments(codes: np.ndarray, bits: int) -> list[np.ndarray]:
    """Registers of A [16, K] or of B as [8, K], one rule for all (9.7.14.5)."""
    rows, k = codes.shape
    per = 32 // bits
    found = []
    for register in range(rows * k * bits // 1024):
        row = G + 8 * (register & 1) if rows == 16 else G
        group = register >> 1 if rows == 16 else register
        word = np.zeros(32, np.uint64)
        for e in range(per):
            part = codes[row, per * T + e + 4 * per * group].astype(np.uint64)
            word |= part << np.uint64(bits * e)
        found.append(word.astype(np.uint32))
    return found


def c_registers(c: np.ndarray) -> list[np.ndarray]:
    places = [(G + 8 * (i >> 1), 2 * T + (i & 1)) for i in range(4)]
    return [c[place].astype(np.float32).view(np.uint32) for place in places]


def container(codes: np.ndarray, name: str) -> np.ndarray:
    """Codes in the bytes of kind f8f6f4: 4 bits are bits 5:2."""
    return codes << 2 if name == "e2m1" else codes


@pytest.mark.parametrize("b", FORMATS)
@pytest.mark.parametrize("a", FORMATS)
def test_f8f6f4(rng: Any, a: str, b: str) -> None:
    a_codes, a_values = tk.random_codes(rng, (16, 32), a)
    b_codes, b_values = tk.random_codes(rng, (8, 32), b)
    c = rng.normal(size=(16, 8)).astype(np.float32)
    registers = fragments(container(a_codes, a), 8) + fragments(container(b_codes, b), 8)
    opcode = f"mma.sync.aligned.kind::f8f6f4.m16n8k32.row.col.f32.{a}.{b}.f32"
    found = multiply(opcode, registers + c_registers(c))
    assert np.allclose(found, a_values @ b_values.T + c, rtol=2**-22, atol=1e-6)


def scale_registers(
    rng: Any, scales: tuple[np.ndarray, np.ndarray], ids: tuple[int, int, int, int]
) -> list[np.ndarray]:
    """Registers of the scales: where they are not taken from there is something else."""
    registers = [rng.integers(0, 2**32, 32, dtype=np.uint32) for _ in range(2)]
    count = scales[0].shape[1]
    for register, rows, found, byte, thread in (
        (registers[0], 16, scales[0], ids[0], ids[1]),
        (registers[1], 8, scales[1], ids[2], ids[3]),
    ):
        for row in range(rows):
            lane = 4 * row + thread if rows == 8 else 4 * (row % 8) + 2 * thread + row // 8
            for k in range(count):
                shift = 8 * (byte + k)
                kept = int(register[lane]) & ~(0xFF << shift)
                register[lane] = kept | int(found[row, k]) << shift
    return registers


def scaled(
    rng: Any,
    opcode: str,
    a: str,
    b: str,
    scale: str,
    count: int,
    ids: tuple[int, int, int, int] = (0, 0, 0, 0),
    scales: Any = None,
    codes: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(D, exact) of a random product."""
    dense4 = "mxf4" in opcode
    k = 64 if dense4 else 32
    a_codes, a_values = tk.random_codes(rng, (16, k), a)
    if codes is not None:
        a_codes, a_values = codes, tk.table(a)[codes]
    b_codes, b_values = tk.random_codes(rng, (8, k), b)
    if scales is None:
        low, high = (110, 140) if scale == "ue8m0" else (0, 127)
        scales = rng.integers(low, high, (16, count)), rng.integers(low, high, (8, count))
    bits = 4 if dense4 else 8
    stored = [c if dense4 else container(c, n) for c, n in ((a_codes, a), (b_codes, b))]
    registers = fragments(stored[0], bits) + fragments(stored[1], bits)
    registers += c_registers(np.zeros((16, 8))) + scale_registers(rng, scales, ids)
    found = multiply(f"{opcode}.f32.{a}.{b}.f32.{scale}", registers, ids)
    table = tk.table(scale)
    left = a_values * np.repeat(table[scales[0]], k // count, axis=1)
    right = b_values * np.repeat(table[scales[1]], k // count, axis=1)
    return found, left @ right.T


def close(found: np.ndarray, exact: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        return np.allclose(found, exact.astype(np.float32), rtol=2**-22, atol=0, equal_nan=True)


MX8 = "mma.sync.aligned.kind::mxf8f6f4.block_scale{}.m16n8k32.row.col"
MX4 = "mma.sync.aligned.m16n8k64.row.col.kind::{}"


@pytest.mark.parametrize("size", ["", ".scale_vec::1X"])
@pytest.mark.parametrize("a", FORMATS)
def test_mxf8f6f4(rng: Any, a: str, size: str) -> None:
    b = FORMATS[(FORMATS.index(a) + 2) % 5]
    assert close(*scaled(rng, MX8.format(size), a, b, "ue8m0", 1))


@pytest.mark.parametrize(
    ("kind", "scale", "count"),
    [
        ("mxf4.block_scale", "ue8m0", 2),
        ("mxf4.block_scale.scale_vec::2X", "ue8m0", 2),
        ("mxf4nvf4.block_scale.scale_vec::2X", "ue8m0", 2),
        ("mxf4nvf4.block_scale.scale_vec::4X", "ue8m0", 4),
        ("mxf4nvf4.block_scale.scale_vec::4X", "ue4m3", 4),
    ],
)
def test_mxf4(rng: Any, kind: str, scale: str, count: int) -> None:
    assert close(*scaled(rng, MX4.format(kind), "e2m1", "e2m1", scale, count))


@pytest.mark.parametrize("byte", range(4))
@pytest.mark.parametrize("thread", range(4))
def test_bytes_and_threads_of_scales_1x(rng: Any, byte: int, thread: int) -> None:
    """Rows of A come from a pair of threads of each four, columns of B from one."""
    ids = (byte, thread % 2, 3 - byte, thread)
    assert close(*scaled(rng, MX8.format(""), "e4m3", "e4m3", "ue8m0", 1, ids))


@pytest.mark.parametrize("ids", [(0, 1, 2, 3), (2, 0, 0, 1), (2, 1, 2, 2)])
def test_bytes_and_threads_of_scales_2x(rng: Any, ids: tuple[int, int, int, int]) -> None:
    opcode = MX4.format("mxf4.block_scale")
    assert close(*scaled(rng, opcode, "e2m1", "e2m1", "ue8m0", 2, ids))


@pytest.mark.parametrize("part", range(16))
def test_every_scale(rng: Any, part: int) -> None:
    """All 256 of ue8m0, NaN too; and all of ue4m3, of which bit 7 is ignored."""
    own = np.arange(16 * part, 16 * part + 16)
    pair = own[:, None], np.full((8, 1), 127)
    assert close(*scaled(rng, MX8.format(""), "e4m3", "e5m2", "ue8m0", 1, scales=pair))
    four = np.repeat(own[:, None], 4, axis=1), np.full((8, 4), 0x38)
    opcode = MX4.format("mxf4nvf4.block_scale.scale_vec::4X")
    assert close(*scaled(rng, opcode, "e2m1", "e2m1", "ue4m3", 4, scales=four))


@pytest.mark.parametrize("a", FORMATS)
def test_every_code(rng: Any, a: str) -> None:
    codes = np.arange(512, dtype=np.uint32).reshape(16, 32) % (1 << tk.BITS[a])
    found, exact = scaled(rng, MX8.format(""), a, "e4m3", "ue8m0", 1, codes=codes)
    with np.errstate(invalid="ignore"):
        assert close(found, exact)


def test_ids_that_do_not_exist_are_refused(rng: Any) -> None:
    with pytest.raises(Exception, match="scales from byte 1 of thread 0"):
        scaled(rng, MX4.format("mxf4.block_scale"), "e2m1", "e2m1", "ue8m0", 2, (1, 0, 0, 0))


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_only_consumer_blackwell_has_them(arch: str) -> None:
    opcode = MX8.format("") + ".f32.e4m3.e4m3.f32.ue8m0"
    source = SOURCE.replace("MMA", opcode).replace("SCALES", SCALED)
    given, out = np.zeros((12, 32), np.uint32), np.zeros((4, 32), np.uint32)
    with pytest.raises(Exception, match="the assembler does not take this"):
        tk.launch(
            tk.ptx_of(source, arch),
            {"given": given, "out": out, "ids": np.zeros(4, np.uint16)},
            ["given", "out", "ids"],
            block=32,
        )
