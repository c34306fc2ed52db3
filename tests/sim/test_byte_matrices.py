"""Transposed matrix loads and stores of bytes (PTX ISA 9.7.14.5.15-16), from Blackwell on."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

LANE = np.arange(32)
G, T = LANE >> 2, LANE & 3
HEAD = """
  .reg .b32 t, s, i, a, r<4>, f<4>; .reg .b64 base, at;
  mov.u32 t, %tid.x; mov.u32 s, tile; ld.param.u64 base, [p0];
  mad.wide.u32 at, t, 16, base; mad.lo.u32 i, t, 16, s;
  ld.global.v4.u32 {f0, f1, f2, f3}, [at];
  st.shared.v4.u32 [i], {f0, f1, f2, f3};
  bar.warp.sync -1;
  mad.lo.u32 a, t, 16, s;
"""
TILE = ".shared .align 128 .b8 tile[512];"


def loaded(run_ptx: Any, tile: np.ndarray, form: str, registers: int) -> np.ndarray:
    """Bytes [registers, 32, 4] that a warp gets of 32 rows of 16 bytes."""
    regs = ", ".join(f"r{i}" for i in range(registers))
    stores = "".join(f"st.global.u32 [at+{128 * i}], r{i};" for i in range(registers))
    body = f"""{HEAD}
      ldmatrix.sync.aligned.{form} {{{regs}}}, [a];
      ld.param.u64 base, [p1]; mad.wide.u32 at, t, 4, base; {stores}
    """
    out = np.zeros((registers, 32), np.uint32)
    run_ptx(body, {"tile": tile, "out": out}, declarations=TILE)
    return out.view(np.uint8).reshape(registers, 32, 4)


@pytest.mark.parametrize("packed", ["b8", "b8x16.b4x16_p64", "b8x16.b6x16_p32"])
@pytest.mark.parametrize("number", [1, 2])
def test_transposed_loads(run_ptx: Callable[..., Any], rng: Any, number: int, packed: str) -> None:
    """A thread gets rows 2t, 2t + 1 of columns g, g + 8; the second register the rows + 8."""
    tile = rng.integers(0, 256, (32, 16), dtype=np.uint8)
    found = loaded(run_ptx, tile, f"m16n16.x{number}.trans.shared.{packed}", 2 * number)
    bits = {"b8": 8, "b8x16.b4x16_p64": 4, "b8x16.b6x16_p32": 6}[packed]
    whole = [int.from_bytes(row.tobytes(), "little") for row in tile]
    values = np.array([[w >> bits * e & (1 << bits) - 1 for e in range(16)] for w in whole])
    for register in range(2 * number):
        matrix, upper = divmod(register, 2)
        for byte in range(4):
            row = 16 * matrix + 8 * upper + 2 * T + byte % 2
            assert (found[register, :, byte] == values[row, G + 8 * (byte // 2)]).all()


@pytest.mark.parametrize("number", [1, 2, 4])
def test_transposed_stores(run_ptx: Callable[..., Any], rng: Any, number: int) -> None:
    """A register is rows 2t, 2t + 1, 2t + 8, 2t + 9 of column g; columns become rows."""
    given = rng.integers(0, 2**32, (32, 4), dtype=np.uint32)
    regs = ", ".join(f"f{i}" for i in range(number))
    body = f"""{HEAD}
      stmatrix.sync.aligned.m16n8.x{number}.trans.shared.b8 [a], {{{regs}}};
      bar.warp.sync -1;
      ld.shared.v4.u32 {{r0, r1, r2, r3}}, [i];
      ld.param.u64 base, [p1]; mad.wide.u32 at, t, 16, base;
      st.global.v4.u32 [at], {{r0, r1, r2, r3}};
    """
    out = np.zeros((32, 4), np.uint32)
    run_ptx(body, {"given": given, "out": out}, declarations=TILE)
    rows = out.view(np.uint8).reshape(32, 16)
    registers = given.view(np.uint8).reshape(32, 4, 4)
    for matrix in range(number):
        for byte in range(4):
            column = 2 * T + byte % 2 + 8 * (byte // 2)
            assert (rows[8 * matrix + G, column] == registers[:, matrix, byte]).all()
