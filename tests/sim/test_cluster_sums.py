"""Parts of K that a cluster adds in shared memory: the same bits as through a workspace."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from products import Product, product_of
from test_kernels import Product as SimulatedProduct
from test_kernels import errors

from humming import plugins
from humming.composer import KernelPlan, compose_as, decide, m_range_of
from humming.problem import GemmProblem
from humming.runtime import Kernel
from humming.tiles import TileConfig, fits, in_memory_of_cluster, warpgroup_tile

# The warp-level mainloop, with warps along K of their own and without.
WARPS = TileConfig(64, 16, 128, warps_n=4, warps_k=2, num_stages=2, split_k=2, epilogue_m=16)
ROWS = TileConfig(64, 32, 64, warps_n=4, warps_k=1, num_stages=3, split_k=4, epilogue_m=16)
CASES = (
    ("sim:h200", "int4_g64 x bf16", WARPS),
    ("sim:h200", "int4_g128 x fp16 -> float32", ROWS),
    ("sim:h200", "int8 x int8", replace(ROWS, block_k=128, warps_k=2)),
    ("sim:rtx5090", "uint4_g64_zp x bf16", WARPS),
    ("sim:b300", "mxfp4 x bf16", ROWS),
    ("sim:h200", "int4_g128 x bf16", warpgroup_tile(1, 1, 16, 2, 2, 2)),
    ("sim:h200", "int4_g128 x int8", warpgroup_tile(2, 1, 64, 2, 2, 4)),
    ("sim:h200", "fp8 x fp8", warpgroup_tile(1, 1, 8, 2, 2, 8)),
    # Neighbours along N share their part's tokens.
    ("sim:h200", "int4_g128 x bf16", warpgroup_tile(1, 1, 16, 2, 2, 2, cluster_n=2)),
    ("sim:h200", "int4 x int8", warpgroup_tile(1, 1, 32, 2, 2, 2, cluster_n=4)),
)


def plan_of(device: str, text: str, m: int, n: int, tile: TileConfig) -> KernelPlan:
    """A plan of two to three stages for each part of K, the last one not whole."""
    caps = plugins.capabilities(device)
    problem = GemmProblem.parse(text, n, tile.block_k * (2 * tile.split_k + 1) - 16)
    ready = decide(problem, caps, m_range_of(m), plugins.registry()).ready
    boxes = tile.producer_warps > 0
    lowering = next(option.lowering for option in ready if option.lowering.has_producer == boxes)
    assert fits(tile, problem, lowering, caps)
    return compose_as(problem, caps, m_range_of(m), lowering, tile)


def run(plan: KernelPlan, product: Product) -> torch.Tensor:
    dtype = getattr(torch, plan.problem.out_dtype.name)
    out = torch.full((product.tokens.x.shape[0], plan.problem.n), torch.nan, dtype=dtype)
    tokens = product.tokens
    Kernel(plan, -1).launch(tokens.x, product.operands, out, 0, tokens.scales)
    return out


@pytest.mark.parametrize(("device", "text", "tile"), CASES, ids=str)
def test_clusters_sum_the_same_bits(
    device: str, text: str, tile: TileConfig, rng: np.random.Generator
) -> None:
    """Of rows and tokens that fill tiles and do not, beside the float64 reference."""
    torch.manual_seed(int(rng.integers(2**31)))
    m, n = (int(rng.integers(1, 2 * size)) for size in (tile.block_m, tile.block_n))
    print(m, n)
    plan = plan_of(device, text, m, n, tile)
    product = product_of(plan, m)
    clustered = plan_of(device, text, m, n, in_memory_of_cluster(tile))
    assert clustered.workspace(m) == (0, 0) < plan.workspace(m)
    result = run(clustered, product)
    assert product.excess(result) <= 0
    assert torch.equal(result, run(plan, product))


def simulated(**options: Any) -> SimulatedProduct:
    device, text, m, n = "sim:h200", "int4_g64 x bf16", 9, 100
    plan = plan_of(device, text, m, n, in_memory_of_cluster(WARPS))
    product = SimulatedProduct(text, device, m, n, plan.problem.k, **options)
    product.plan = plan
    return product


def test_clusters_in_a_random_schedule(rng: np.random.Generator) -> None:
    torch.manual_seed(int(rng.integers(2**31)))
    simulated(seed=int(rng.integers(2**31))).check()


@pytest.mark.parametrize("which", [0, 1], ids=["before", "after"])
def test_clusters_must_meet(which: int, rng: np.random.Generator) -> None:
    """Without a meeting, sums are read before they are there, or memory that is gone."""
    product = simulated(seed=int(rng.integers(2**31)))
    meeting = re.compile(r"barrier\.cluster\.arrive[^;]*;(?s:.*?)barrier\.cluster\.wait[^;]*;")

    def without(ptx: str) -> str:
        met = list(meeting.finditer(ptx))
        assert len(met) == 2
        return ptx[: met[which].start()] + ptx[met[which].end() :]

    product.edit = without
    with pytest.raises(errors.SimulationError):
        product.run()
