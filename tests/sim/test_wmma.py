"""Products with opaque fragments (PTX ISA 9.7.14.4), as CUDA's `nvcuda::wmma` compiles to."""

import importlib
from typing import Any

import numpy as np
import pytest
from hopper_kernels import aligned, placed, run

errors = importlib.import_module("humming.devices.simulator.errors")

SHAPES = {"m16n16k16": (16, 16, 16), "m8n32k16": (8, 32, 16), "m32n8k16": (32, 8, 16)}
REGISTERS = {
    # shape -> registers of A, B and C of bytes; of 32-bit C and D there are 8 always
    "m16n16k16": (2, 2),
    "m8n32k16": (1, 4),
    "m32n8k16": (4, 1),
}
HALVES = {"m16n16k16": (4, 4), "m8n32k16": (2, 8), "m32n8k16": (8, 2)}


def fragment(letter: str, count: int) -> str:
    return "{" + ", ".join(f"{letter}{i}" for i in range(count)) + "}"


def product(
    run_ptx: Any,
    shape: str,
    kind: str,
    accumulator: str,
    operands: list[np.ndarray],
    orders: tuple[str, str, str],
    sizes: tuple[int, int, int],
    edit: Any = None,
) -> np.ndarray:
    """D of A, B and C in memory, as bits of the accumulator's type."""
    a, b, c = sizes
    wide = "b64" if kind == "f64" else "b32"
    types = f"{accumulator}.{accumulator}"
    if kind != "f16":
        types = f"{accumulator}.{kind}.{kind}.{accumulator}"
    body = f"""
      .reg .b64 pa, pb, pc, pd; .reg .{wide} a<{a}>, b<{b}>, c<{c}>, d<{c}>;
      ld.param.u64 pa, [p0]; ld.param.u64 pb, [p1]; ld.param.u64 pc, [p2]; ld.param.u64 pd, [p3];
      wmma.load.a.sync.aligned.{orders[0]}.{shape}.global.{kind} {fragment("a", a)}, [pa];
      wmma.load.b.sync.aligned.{orders[1]}.{shape}.global.{kind} {fragment("b", b)}, [pb];
      wmma.load.c.sync.aligned.{orders[2]}.{shape}.{accumulator} {fragment("c", c)}, [pc];
      wmma.mma.sync.aligned.{orders[0]}.{orders[1]}.{shape}.{types}
        {fragment("d", c)}, {fragment("a", a)}, {fragment("b", b)}, {fragment("c", c)};
      wmma.store.d.sync.aligned.row.{shape}.global.{accumulator} [pd], {fragment("d", c)};
    """
    out = np.zeros(operands[2].shape, operands[2].dtype)
    stored = [
        placed(np.ascontiguousarray(m if order == "row" else m.T))
        for m, order in zip(operands, orders, strict=True)
    ]
    buffers = dict(zip("abc", stored, strict=True)) | {"d": out}
    run_ptx(edit(body) if edit else body, buffers)
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("orders", [("row", "col", "row"), ("col", "row", "col")])
@pytest.mark.parametrize("accumulator", ["f16", "f32"])
def test_halves(
    run_ptx: Any, rng: np.random.Generator, shape: str, orders: Any, accumulator: str
) -> None:
    m, n, k = SHAPES[shape]
    dtype = np.float16 if accumulator == "f16" else np.float32
    a, b = (rng.integers(-8, 8, size).astype(np.float16) for size in ((m, k), (k, n)))
    c = rng.integers(-100, 100, (m, n)).astype(dtype)
    sizes = (8, 8, 4 if accumulator == "f16" else 8)
    found = product(run_ptx, shape, "f16", accumulator, [a, b, c], orders, sizes)
    assert (found == a.astype(float) @ b.astype(float) + c).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["s8", "u8"])
def test_bytes(run_ptx: Any, rng: np.random.Generator, shape: str, kind: str) -> None:
    m, n, k = SHAPES[shape]
    dtype = np.int8 if kind == "s8" else np.uint8
    info = np.iinfo(dtype)
    a, b = (rng.integers(info.min, info.max, s, dtype=dtype) for s in ((m, k), (k, n)))
    c = rng.integers(-(2**31), 2**31, (m, n), dtype=np.int32)
    sizes = (*REGISTERS[shape], 8)
    found = product(run_ptx, shape, kind, "s32", [a, b, c], ("row", "col", "row"), sizes)
    exact = a.astype(np.int64) @ b.astype(np.int64) + c
    assert (found == exact.astype(np.int32)).all()
    plain = f".{shape}.s32.{kind}.{kind}.s32"
    clamped = product(
        run_ptx,
        shape,
        kind,
        "s32",
        [a, b, c],
        ("row", "col", "row"),
        sizes,
        lambda body: body.replace(plain, f"{plain}.satfinite"),
    )
    assert (clamped == np.clip(exact, -(2**31), 2**31 - 1)).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_brain_floats(run_ptx: Any, rng: np.random.Generator, shape: str) -> None:
    m, n, k = SHAPES[shape]
    a, b = (rng.integers(-8, 8, s).astype(np.float32) for s in ((m, k), (k, n)))
    codes = [(v.view(np.uint32) >> 16).astype(np.uint16) for v in (a, b)]
    c = rng.integers(-100, 100, (m, n)).astype(np.float32)
    sizes = (*HALVES[shape], 8)
    orders = ("row", "row", "row")
    found = product(run_ptx, shape, "bf16", "f32", [*codes, c], orders, sizes)
    assert (found == a @ b + c).all()


def test_tf32_and_doubles(run_ptx: Any, rng: np.random.Generator) -> None:
    a, b = (rng.integers(-8, 8, s).astype(np.float32) for s in ((16, 8), (8, 16)))
    c = rng.integers(-100, 100, (16, 16)).astype(np.float32)
    orders = ("row", "col", "row")
    found = product(run_ptx, "m16n16k8", "tf32", "f32", [a, b, c], orders, (4, 4, 8))
    assert (found == a @ b + c).all()
    a, b, c = (rng.integers(-8, 8, s).astype(np.float64) for s in ((8, 4), (4, 8), (8, 8)))
    found = product(run_ptx, "m8n8k4", "f64", "f64", [a, b, c], orders, (1, 1, 2))
    assert (found == a @ b + c).all()


def test_undefined_elements_reach_rows_and_columns(run_ptx: Any, rng: np.random.Generator) -> None:
    operands = [
        rng.integers(0, 9, (16, 16)).astype(t) for t in (np.float16, np.float16, np.float32)
    ]

    def edit(body: str) -> str:
        return body.replace("wmma.mma", ".reg .b32 wild; mov.b32 a0, wild; wmma.mma")

    with pytest.raises(errors.PoisonError):
        product(
            run_ptx, "m16n16k16", "f16", "f32", operands, ("row", "col", "row"), (8, 8, 8), edit
        )


def test_what_cuda_makes_of_its_classes(rng: np.random.Generator) -> None:
    """Loads with strides, from shared memory by generic addresses, and a loop along K."""
    source = r"""
    extern "C" __global__ void test(const unsigned short* a, const unsigned short* b, float* d) {
      __shared__ __align__(32) unsigned short tile[16 * 24];
      float c[8] = {0, 0, 0, 0, 0, 0, 0, 0};
      for (int k = 0; k < 48; k += 16) {
        __syncthreads();
        for (int i = threadIdx.x; i < 256; i += 32)
          tile[i / 16 * 24 + i % 16] = a[i / 16 * 48 + k + i % 16];
        __syncthreads();
        asm volatile("{ .reg .b32 a<8>, b<8>;\n"
          "wmma.load.a.sync.aligned.row.m16n16k16.f16 {a0, a1, a2, a3, a4, a5, a6, a7}, [%8], 24;\n"
          "wmma.load.b.sync.aligned.row.m16n16k16.global.f16"
          " {b0, b1, b2, b3, b4, b5, b6, b7}, [%9], 40;\n"
          "wmma.mma.sync.aligned.row.row.m16n16k16.f32.f32 {%0, %1, %2, %3, %4, %5, %6, %7},"
          " {a0, a1, a2, a3, a4, a5, a6, a7}, {b0, b1, b2, b3, b4, b5, b6, b7},"
          " {%0, %1, %2, %3, %4, %5, %6, %7}; }"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
            "+f"(c[7])
          : "l"(tile), "l"(b + 40 * k) : "memory");
      }
      asm volatile("wmma.store.d.sync.aligned.col.m16n16k16.f32"
        " [%0], {%1, %2, %3, %4, %5, %6, %7, %8}, 20;"
        :: "l"(d), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]), "f"(c[4]), "f"(c[5]), "f"(c[6]),
           "f"(c[7]) : "memory");
    }
    """
    a = placed(rng.integers(-8, 8, (16, 48)).astype(np.float16))
    b = placed(rng.integers(-8, 8, (48, 40)).astype(np.float16))
    out = aligned((16, 20), np.float32)
    run(source, a, b, out, block=32)
    np.testing.assert_array_equal(out[:, :16].T, a.astype(float) @ b[:, :16].astype(float))
    assert not out[:, 16:].any()
