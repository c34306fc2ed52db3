"""The mainloop of warpgroups on the present card, in every kind of tile."""

import numpy as np
import products
import pytest
import torch
import warpgroups

from humming.plugins import capabilities
from humming.runtime import Kernel

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _has_warpgroups() -> None:
    if "wgmma" not in capabilities().instructions:
        pytest.skip("the card has no warpgroups")


@pytest.mark.parametrize("m", [1, 7, 64, 65, 130, 517])
@pytest.mark.parametrize("activation", ["bf16", "fp16"])
@pytest.mark.parametrize("weight", warpgroups.FORMATS)
def test_products_of_warpgroups(weight: str, activation: str, m: int) -> None:
    if weight.endswith("_fzp") and activation == "bf16":
        weight += "_sbf16"
    check(f"{weight} x {activation}", m)


@pytest.mark.parametrize("m", [1, 65, 517])
@pytest.mark.parametrize("problem", warpgroups.QUANTIZED)
def test_products_of_quantized_activations(problem: str, m: int) -> None:
    check(problem, m)


def check(problem: str, m: int) -> None:
    """Holds products of random sizes to their bounds, by each lowering of warpgroups."""
    seed = int(np.random.SeedSequence().entropy) % 2**32  # type: ignore[arg-type]
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    for _ in range(4):
        size = m, int(rng.integers(20, 1200)), int(rng.integers(20, 3000))
        for plan in warpgroups.plans(problem, capabilities(), size, rng):
            print(plan.lowering.name, plan.tile, size)
            product = products.product_of(plan, m, "cuda")
            guarded = torch.full(
                (m + 2, plan.problem.n), torch.nan, device="cuda", dtype=torch.bfloat16
            )
            guarded = guarded.to(getattr(torch, plan.problem.out_dtype.name))
            stream = torch.cuda.current_stream().cuda_stream
            tokens = product.tokens
            Kernel(plan, 0).launch(tokens.x, product.operands, guarded[1:-1], stream, tokens.scales)
            torch.cuda.synchronize()
            assert product.excess(guarded[1:-1]) <= 0
            assert guarded[0].isnan().all()
            assert guarded[-1].isnan().all()
