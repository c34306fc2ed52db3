"""What Blackwell adds to ordinary instructions: pairs of float32, long vectors, bulk stores."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

errors = importlib.import_module("humming.devices.simulator.errors")


def pairs(values: np.ndarray) -> np.ndarray:
    """float32 [32, 2] as the 64-bit registers of a warp."""
    return np.ascontiguousarray(values, np.float32).view(np.uint64)[:, 0]


@pytest.mark.parametrize("opcode", ["add.rn", "sub.rn", "mul.rn", "fma.rn", "fma.rn.ftz"])
def test_pairs_of_float32(evaluate: Callable[..., Any], rng: Any, opcode: str) -> None:
    """PTX ISA 9.7.3: .f32x2, each half rounded on its own."""
    a, b, c = (rng.normal(size=(32, 2)).astype(np.float32) for _ in range(3))
    count = 3 if opcode.startswith("fma") else 2
    operands = ", ".join(f"%a{i}" for i in range(count))
    body = f"{opcode}.f32x2 %d0, {operands};"
    (found,) = evaluate(body, [pairs(a), pairs(b), pairs(c)][:count], [np.uint64])
    wide = [x.astype(np.float64) for x in (a, b, c)]
    exact = {
        "add": wide[0] + wide[1],
        "sub": wide[0] - wide[1],
        "mul": wide[0] * wide[1],
        "fma": wide[0] * wide[1] + wide[2],
    }[opcode[:3]]
    assert np.allclose(found.view(np.float32).reshape(32, 2), exact, rtol=2**-24, atol=0)


def test_loads_and_stores_of_32_bytes(run_ptx: Callable[..., Any], rng: Any) -> None:
    """PTX ISA 9.7.9.8: .v8 of 32 bits and .v4 of 64 bits, from sm_100 on."""
    given = rng.integers(0, 2**32, (32, 16), dtype=np.uint32)
    out = np.zeros((32, 16), np.uint32)
    regs = "{" + ", ".join(f"r{i}" for i in range(8)) + "}"
    body = f"""
      .reg .b32 t, r<8>; .reg .b64 from, to, q<4>;
      mov.u32 t, %tid.x; ld.param.u64 from, [p0]; ld.param.u64 to, [p1];
      mad.wide.u32 from, t, 64, from; mad.wide.u32 to, t, 64, to;
      ld.global.v8.b32 {regs}, [from];
      st.global.v8.b32 [to], {regs};
      ld.global.v4.b64 {{q0, q1, q2, q3}}, [from+32];
      st.global.v4.b64 [to+32], {{q0, q1, q2, q3}};
    """
    whole = np.zeros(32 * 16 + 8, np.uint32)
    start = -whole.ctypes.data % 32 // 4  # these accesses are aligned to 32 bytes
    aligned = whole[start : start + 512].reshape(32, 16)
    aligned[:] = given
    room = np.zeros(32 * 16 + 8, np.uint32)
    first = -room.ctypes.data % 32 // 4
    out = room[first : first + 512].reshape(32, 16)
    run_ptx(body, {"given": aligned, "out": out})
    assert (out == given).all()


@pytest.mark.parametrize("operation", ["min", "max", "min.abs", "max.abs.NaN"])
def test_warp_reductions_of_float32(evaluate: Callable[..., Any], rng: Any, operation: str) -> None:
    """PTX ISA 9.7.13.9 "redux.sync" of .f32."""
    values = rng.normal(size=32).astype(np.float32)
    values[7] = np.nan
    (found,) = evaluate(
        f"redux.sync.{operation}.f32 %d0, %a0, -1;", [values.view(np.uint32)], [np.uint32]
    )
    numbers = np.abs(values) if "abs" in operation else values
    if "NaN" in operation:
        assert np.isnan(found.view(np.float32)).all()
    else:
        reduce = np.nanmin if operation.startswith("min") else np.nanmax
        assert (found.view(np.float32) == reduce(numbers)).all()


BULK = """
  .reg .b32 t, s, i, v; .reg .b64 to, size; .reg .pred p;
  mov.u32 t, %tid.x; ld.param.u64 to, [p0]; ld.param.u64 size, [p1];
  mov.u32 s, tile;
  mad.lo.u32 i, t, 4, s;
  st.shared.u32 [i], 7; st.shared.u32 [i+128], 7; st.shared.u32 [i+256], 7;
  bar.warp.sync -1;
  setp.eq.u32 p, t, 3;
  @p st.bulk.weak.shared::cta [s+8], size, 0;
  bar.warp.sync -1;
  mad.wide.u32 to, t, 12, to;
  mad.lo.u32 i, t, 12, s;
  ld.shared.u32 v, [i]; st.global.u32 [to], v;
  ld.shared.u32 v, [i+4]; st.global.u32 [to+4], v;
  ld.shared.u32 v, [i+8]; st.global.u32 [to+8], v;
"""
TILE = ".shared .align 16 .b8 tile[384];"


@pytest.mark.parametrize("size", [8, 256, 344])
def test_bulk_stores(run_ptx: Callable[..., Any], size: int) -> None:
    """PTX ISA "st.bulk": one thread writes zeros."""
    out = np.zeros(96, np.uint32)
    run_ptx(BULK, {"out": out}, declarations=TILE, scalars=(size,))
    want = np.full(96, 7)
    want[2 : 2 + size // 4] = 0
    assert (out == want).all()


def test_bulk_stores_are_checked(run_ptx: Callable[..., Any]) -> None:
    out = np.zeros(96, np.uint32)
    with pytest.raises(errors.UndefinedBehaviorError, match="no multiple of 8"):
        run_ptx(BULK, {"out": out}, declarations=TILE, scalars=(12,))
    with pytest.raises(errors.BoundsError, match="lies in no variable"):
        run_ptx(BULK, {"out": out}, declarations=TILE, scalars=(512,))


def test_stochastic_rounding_is_refused(evaluate: Callable[..., Any]) -> None:
    with pytest.raises(errors.UnknownInstructionError, match="random bits"):
        evaluate("cvt.rs.satfinite.e4m3x4.f32 %d0, {%d0, %d0, %d0, %d0}, %d0;", [], [np.uint32])
