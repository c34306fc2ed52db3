"""Products of the PPUs' own matrix instructions, simulated, against the float64 reference."""

from dataclasses import replace

import pytest
import torch
from products import product_of, random_product

import humming
from humming import plugins
from humming.capability import DeviceCapabilities
from humming.composer import KernelPlan, compose, decide, m_range_of
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


def own_rows(device: str) -> DeviceCapabilities:
    """A simulated PPU without the instructions that it shares with others."""
    caps = plugins.capabilities(f"sim:{device}")
    return replace(caps, mma=tuple(r for r in caps.mma if r.instruction == FAMILIES[device]))


def check(plan: KernelPlan, m: int) -> None:
    product = product_of(plan, m)
    out = torch.full((m, plan.problem.n), torch.nan, dtype=getattr(torch, plan.problem.out_dtype.name))
    Kernel(plan, -1).launch(product.tokens.x, product.operands, out, 0, product.tokens.scales)
    assert product.excess(out) <= 0, (plan.lowering.name, plan.tile)


@pytest.mark.parametrize("device", FAMILIES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(device: str, name: str) -> None:
    m, n, k = 19, 48, 260
    problem = GemmProblem.parse(f"{name} -> float32", n, k, bias=True)
    plan = compose(problem, own_rows(device), m_range_of(m))
    assert plan.lowering.mainloop == FAMILIES[device]
    check(plan, m)
