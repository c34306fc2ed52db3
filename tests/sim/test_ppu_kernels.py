"""Products of the PPUs' own matrix instructions, simulated, against the float64 reference."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from products import product_of

import humming
from humming import plugins
from humming.capability import DeviceCapabilities, MmaRow
from humming.compiler import compile_plan
from humming.composer import KernelPlan, compose, decide, m_range_of
from humming.errors import UnsupportedError
from humming.problem import GemmProblem
from humming.runtime import Kernel

FAMILIES = {"zw810e": "ppu_mma", "m890": "ppu_tc02_mma"}
PRODUCTS = (
    "int4_g128 x fp16",
    "uint4_g32_zp x bf16",
    "uint4_g64_fzp x fp16",
    "float6e2m3_block64x32 x bf16",
    "int3_tensor x int8",
    "int8 x int8_asym",
    "int4_g128 x int8_g128",
    "uint4_g64_zp x int8_tensor",
    "int2_g64 x int4_g64",
    "fp8 x fp8",
    "fp8_g128 x fp8_g128",
    "float8e5m2 x fp8_tensor",
    "int4_g32 x float8e5m2",
    "nvfp4 x nvfp4",
    "mxfp4 x mxfp8",
)


def with_rows(device: str, keep: Callable[[MmaRow], bool]) -> DeviceCapabilities:
    """A simulated PPU with some of its instructions."""
    caps = plugins.capabilities(f"sim:{device}")
    return replace(caps, mma=tuple(row for row in caps.mma if keep(row)))


def own_rows(device: str) -> DeviceCapabilities:
    return with_rows(device, lambda row: row.instruction == FAMILIES[device])


def run(plan: KernelPlan, m: int) -> None:
    product = product_of(plan, m)
    dtype = getattr(torch, plan.problem.out_dtype.name)
    out = torch.full((m, plan.problem.n), torch.nan, dtype=dtype)
    Kernel(plan, -1).launch(product.tokens.x, product.operands, out, 0, product.tokens.scales)
    assert product.excess(out) <= 0, (plan.lowering.name, plan.tile)


@pytest.mark.parametrize("device", FAMILIES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(device: str, name: str, rng: np.random.Generator) -> None:
    m, n, k = int(rng.integers(1, 40)), int(rng.integers(1, 100)), int(rng.integers(1, 400))
    print(m, n, k)
    problem = GemmProblem.parse(f"{name} -> float32", n, k, bias=True)
    plan = compose(problem, own_rows(device), m_range_of(m))
    assert plan.lowering.mainloop == FAMILIES[device]
    run(plan, m)


FLOAT8 = ("float8e4m3", "float8e5m2")
ROWS = [
    (device, row)
    for device in FAMILIES
    for row in own_rows(device).mma
    if plugins.registry().components("mma", row.key)
]


def test_which_instructions_have_components() -> None:
    """All but those whose sums are of no use or not public, and uint8, which no activation is."""
    built = {(device, row.a.name, row.b.name, row.accumulator.name) for device, row in ROWS}
    halves = ("float16", "float16", "float16")
    floats = [(name, name, "float32") for name in ("float16", "bfloat16")]
    float8 = [(a, b, "float32") for a in FLOAT8 for b in FLOAT8]
    integer = ("int8", "int8", "int32")
    assert built == {
        *(("zw810e", *types) for types in (*floats, integer)),
        *(("m890", *types) for types in (*floats, integer, halves, *float8)),
    }


@pytest.mark.parametrize(
    ("device", "row"), ROWS, ids=[f"{device}-{row.name.replace(' ', '-')}" for device, row in ROWS]
)
def test_every_instruction(device: str, row: MmaRow) -> None:
    """Each by itself, with several tiles of tokens and parts of K."""
    caps = with_rows(device, lambda other: other.key == row.key)
    name = f"{row.a} x {row.b} -> float32" if row.a.is_narrow else f"int4_g64 x {row.b} -> float32"
    problem = GemmProblem.parse(name, 90, 1100, fp16_accumulation=True)
    plan = compose(problem, caps, m_range_of(130))
    assert plan.lowering.mma.key == row.key
    assert plan.tile.block_m % 16 == 0
    opcode = {"ppu_mma": "ppu.mma.", "ppu_tc02_mma": "ppu.tc02.mma."}[row.instruction]
    assert opcode in ptx_of(plan)
    run(plan, 130)


def ptx_of(plan: KernelPlan) -> str:
    data: Any = compile_plan(plan, cache=False).image.data
    return data.decode() if isinstance(data, bytes) else str(data)


def test_choice_follows_rates_and_tokens() -> None:
    """Sixteen tokens at the full rate, or eight of fewer tokens at the plain instruction's."""
    problem = GemmProblem.parse("int4_g128 x fp16", 4096, 4096)
    caps = plugins.capabilities("zw810e")
    few, many = (decide(problem, caps, m_range_of(m), plugins.registry()) for m in (1, 16))
    assert few.chosen
    assert few.chosen.lowering.mma.shape == (16, 8, 16)
    assert many.chosen
    assert many.chosen.lowering.mma.shape == (16, 16, 16)
    assert few.missing == many.missing == ()
    assert "mma_sync at 0.6 of the f16 rate of ppu_mma" in few.explain()
    assert "118.7 Top/s" in many.explain()


def test_tiles_hold_whole_instructions() -> None:
    problem = GemmProblem.parse("int4_g128 x fp16", 256, 512)
    for m in (1, 9, 33, 513):
        ready = decide(problem, own_rows("m890"), m_range_of(m), plugins.registry()).ready
        assert ready
        assert all(option.tile.block_m % 16 == 0 for option in ready)
        assert all(option.tile.epilogue_m % 16 == 0 for option in ready)


def test_weights_are_packed_alike() -> None:
    """The order of A's registers is the kernel's to change: one packed weight serves them all."""
    problem = GemmProblem.parse("int4_g128 x fp16", 256, 512)
    rows = (own_rows("zw810e"), own_rows("m890"), plugins.capabilities("h200"))
    lowerings = [compose(problem, caps, m_range_of(16)).lowering for caps in rows]
    assert {(lowering.layout, lowering.packed_bits) for lowering in lowerings} == {("brick", 16)}


def test_what_is_not_public_has_no_component() -> None:
    """Where halves lie in registers of the first generation, and scales of MXFP4."""
    halves = with_rows("zw810e", lambda row: row.accumulator == "float16" and row.shape[1] == 16)
    problem = GemmProblem.parse("int4 x fp16", 64, 64, fp16_accumulation=True)
    with pytest.raises(UnsupportedError, match="lacks mma ppu_mma:m16n16k16:float16"):
        compose(problem, halves, m_range_of(1))
    mx = with_rows("m890", lambda row: bool(row.block_scale))
    with pytest.raises(UnsupportedError, match="mainloop ppu_tc02_mma_mx"):
        humming.plan("mxfp4 x mxfp4", mx, n=64, k=64)
