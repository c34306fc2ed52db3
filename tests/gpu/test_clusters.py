"""Parts of K that a cluster adds in shared memory, on the present card."""

from dataclasses import replace

import pytest
import torch
from products import Product, product_of

from humming.composer import KernelPlan, compose_as, decide
from humming.plugins import capabilities, registry
from humming.problem import GemmProblem
from humming.runtime import Kernel
from humming.tiles import measurable

pytestmark = pytest.mark.gpu

PER_LOWERING = 6


def run(plan: KernelPlan, product: Product) -> torch.Tensor:
    tokens, n = product.tokens, plan.problem.n
    dtype = getattr(torch, plan.problem.out_dtype.name)
    out = torch.full((tokens.x.shape[0], n), torch.nan, device="cuda", dtype=dtype)
    stream = torch.cuda.current_stream().cuda_stream
    Kernel(plan, 0).launch(tokens.x, product.operands, out, stream, tokens.scales)
    return out


@pytest.mark.parametrize("m_range", [(1, 8), (9, 16), (33, 64)])
@pytest.mark.parametrize("text", ["int4_g64 x fp16", "int4 x int8", "fp8 x fp8"])
def test_clusters_sum_the_same_bits(text: str, m_range: tuple[int, int]) -> None:
    """The same as through a workspace, by every lowering in some tiles of each."""
    caps = capabilities()
    problem = GemmProblem.parse(text, 400, 4096)
    if "clusters" not in caps.features:
        pytest.skip("the card has no clusters")
    ready = decide(problem, caps, m_range, registry()).ready
    for lowering in {option.lowering.name: option.lowering for option in ready}.values():
        tiles = [t for t in measurable(problem, lowering, caps, m_range) if t.cluster_k > 1]
        assert tiles
        for tile in tiles[:: max(1, len(tiles) // PER_LOWERING)]:
            plan = compose_as(problem, caps, m_range, lowering, tile)
            product = product_of(plan, m_range[1], "cuda")
            result = run(plan, product)
            assert product.excess(result) <= 0, str(tile)
            through_memory = replace(tile, cluster_k=1)
            plan = compose_as(problem, caps, m_range, lowering, through_memory)
            assert torch.equal(result, run(plan, product)), str(tile)
