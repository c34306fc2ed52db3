"""Composed kernels of warpgroups against a float64 reference, and the faults they must not have."""

import importlib

import numpy as np
import pytest
import torch
from products import Product, product_of
from warpgroups import FORMATS, plans

from humming import plugins
from humming.composer import KernelPlan
from humming.runtime import Kernel

compiler = importlib.import_module("humming.devices.simulator.compiler")
errors = importlib.import_module("humming.devices.simulator.errors")

CAPS = plugins.capabilities("sim:h200")
TOKENS = (1, 7, 64, 65, 130)


def run(plan: KernelPlan, m: int) -> tuple[Product, torch.Tensor]:
    """Random operands of a plan, and what its kernel makes of them."""
    product = product_of(plan, m)
    out = torch.full(
        (m, plan.problem.n), torch.nan, dtype=getattr(torch, plan.problem.out_dtype.name)
    )
    Kernel(plan, -1).launch(product.tokens.x, product.operands, out, 0)
    return product, out


@pytest.mark.parametrize("activation", ["bf16", "fp16"])
@pytest.mark.parametrize("weight", FORMATS)
def test_products_of_warpgroups(weight: str, activation: str, rng: np.random.Generator) -> None:
    torch.manual_seed(int(rng.integers(2**31)))
    if weight.endswith("_fzp") and activation == "bf16":
        weight += "_sbf16"
    n, k = int(rng.integers(20, 300)), int(rng.integers(20, 400))
    m = int(rng.choice(TOKENS))
    out = rng.choice(["float32", "bfloat16", "float16"])
    found = list(plans(f"{weight} x {activation} -> {out}", CAPS, (m, n, k), rng))
    assert found
    for plan in found:
        print(plan.lowering.name, plan.tile, m, n, k)
        product, result = run(plan, m)
        assert product.excess(result) <= 0
