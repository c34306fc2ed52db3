"""Composed kernels of warpgroups against a float64 reference, and the faults that must be found."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from products import Product, operands_of, product_of
from test_kernels import Product as SimulatedProduct
from test_kernels import errors
from warpgroups import FORMATS, QUANTIZED, lowerings, plans

import humming
from humming import plugins, reference
from humming.composer import KernelPlan, compose_as, m_range_of
from humming.problem import GemmProblem
from humming.runtime import Kernel
from humming.tiles import warpgroup_tile

CAPS = plugins.capabilities("sim:h200")
TOKENS = (1, 7, 64, 65, 130)


def run(plan: KernelPlan, m: int) -> tuple[Product, torch.Tensor]:
    """Random operands of a plan, and what its kernel makes of them."""
    product = product_of(plan, m)
    out = torch.full(
        (m, plan.problem.n), torch.nan, dtype=getattr(torch, plan.problem.out_dtype.name)
    )
    tokens = product.tokens
    Kernel(plan, -1).launch(tokens.x, product.operands, out, 0, tokens.scales)
    return product, out


@pytest.mark.parametrize("weight", FORMATS)
def test_products_of_warpgroups(weight: str, rng: np.random.Generator) -> None:
    """With either type of activations, which takes the simulator long enough."""
    activation = str(rng.choice(["bf16", "fp16"]))
    if weight.endswith("_fzp") and activation == "bf16":
        weight += "_sbf16"
    check(f"{weight} x {activation}", rng)


@pytest.mark.parametrize("problem", QUANTIZED)
def test_products_of_quantized_activations(problem: str, rng: np.random.Generator) -> None:
    check(problem, rng)


def check(problem: str, rng: np.random.Generator) -> None:
    """Holds a product of random size to its bound, by each lowering of warpgroups."""
    torch.manual_seed(int(rng.integers(2**31)))
    n, k = int(rng.integers(20, 300)), int(rng.integers(20, 400))
    m = int(rng.choice(TOKENS))
    out = rng.choice(["float32", "bfloat16", "float16"])
    found = list(plans(f"{problem} -> {out}", CAPS, (m, n, k), rng))
    assert found
    for plan in found:
        print(plan.lowering.name, plan.tile, m, n, k)
        product, result = run(plan, m)
        assert product.excess(result) <= 0


def product_in(
    problem: str, m: int, n: int, k: int, tile: tuple[int, ...], **options: int
) -> SimulatedProduct:
    """A random product on a simulated H200, in a tile of warpgroups."""
    product = SimulatedProduct(problem, "sim:h200", m, n, k, **options)
    (lowering, *_) = lowerings(product.problem, CAPS)
    shape = warpgroup_tile(*tile)
    product.plan = compose_as(product.problem, CAPS, m_range_of(m), lowering, shape)
    return product


@pytest.mark.parametrize("tile", [(1, 1, 16, 1, 2), (2, 1, 32, 2, 3), (1, 2, 64, 1, 3, 2)])
def test_product_in_a_random_schedule(tile: tuple[int, ...], rng: np.random.Generator) -> None:
    """Warps run in any order, and wait where they may."""
    seed = int(rng.integers(2**31))
    torch.manual_seed(seed)
    formats = [f for f in FORMATS if not f.endswith("_fzp")]
    problem = f"{rng.choice(formats)} x {rng.choice(['fp16', 'bf16'])}"
    m, n, k = (int(rng.integers(*ends)) for ends in ((1, 40), (8, 150), (4, 12)))
    print(problem, m, n, 64 * k, seed)
    product_in(problem, m, n, 64 * k, tile, seed=seed).check()


# Whose sums are in two halves, or too many for it: (problem, tile, stages of K). Runs of groups are
# two stages (one group each), one (two passes of one group; four groups), or half of one (eight
# groups), and some stages are left over. Scales of tokens, and the lack of room, come last.
HALVES = (
    ("int4_g128 x bf16", (1, 1, 128, 2, 2), 5),
    ("int4_g128 x bf16", (1, 2, 128, 2, 2), 3),
    ("int4_g64 x bf16", (1, 1, 192, 2, 2), 3),
    ("int4_g64_sbf16 x fp16", (1, 1, 128, 1, 3), 3),
    ("int4_g128 x int8", (1, 1, 128, 4, 2), 3),
    ("mxfp4 x fp8", (1, 1, 128, 4, 2), 3),
    ("mxfp4 x fp8", (1, 2, 128, 4, 2), 1),
    ("fp8_block128 x fp8_g128", (1, 1, 192, 2, 2), 3),
    ("int8_g128 x int8_g128", (1, 1, 128, 4, 2), 2),
    ("mxfp8 x mxfp8", (1, 1, 128, 4, 2), 2),
)


@pytest.mark.parametrize(("text", "sizes", "stages"), HALVES, ids=str)
def test_sums_in_halves(
    text: str, sizes: tuple[int, ...], stages: int, rng: np.random.Generator
) -> None:
    """Tiles of many tokens, more of them than there are, and fewer rows."""
    torch.manual_seed(int(rng.integers(2**31)))
    tile = warpgroup_tile(*sizes)
    m, n = tile.block_m - int(rng.integers(1, 60)), tile.block_n - int(rng.integers(0, 8))
    problem = GemmProblem.parse(text, n, tile.block_k * stages)
    (lowering, *_) = lowerings(problem, CAPS)
    product, result = run(compose_as(problem, CAPS, m_range_of(m), lowering, tile), m)
    assert product.excess(result) <= 0


def test_the_order_of_warps_does_not_change_a_bit(rng: np.random.Generator) -> None:
    seed = int(rng.integers(2**31))
    results = []
    for options in ({}, {"seed": seed}):
        torch.manual_seed(7)
        results.append(product_in("int4_g128 x fp16", 9, 96, 768, (1, 1, 16, 1, 3, 2), **options))
    assert torch.equal(results[0].run(), results[1].run())


@pytest.mark.parametrize("n", [16, 40])
def test_rows_beyond_the_weight_are_not_read(n: int) -> None:
    """A tile of 128 rows over a weight of fewer reads what there is."""
    product_in("int4_g128 x bf16", 3, n, 192, (2, 1, 8, 2, 2)).check()


@pytest.mark.parametrize("activation", ["bf16", "fp16"])
@pytest.mark.parametrize("spec", ["fp8", "fp8_block128", "float8e3m4_channel"])
def test_rows_with_nan_codes_are_nan_and_no_others(
    spec: str, activation: str, rng: np.random.Generator
) -> None:
    """Each lane of a row, and every row block of a warp, may be the one that finds it."""
    m, n, k = 5, int(rng.integers(40, 150)), 8 * int(rng.integers(9, 30))
    torch.manual_seed(int(rng.integers(2**31)))
    made = list(plans(f"{spec} x {activation} -> float32", CAPS, (m, n, k), rng))
    assert made
    for plan in made:
        print(plan.lowering.name, plan.tile, n, k)
        weight = humming.quantize(torch.randn(n, k), plan.problem.weight)
        rows = torch.from_numpy(rng.choice(n, n // 4, replace=False))
        # Rows whose codes lie beside those of such rows have the largest numbers, of either sign.
        beside = torch.from_numpy(np.setdiff1d(rows.numpy() ^ 8, rows.numpy()))
        beside = beside[beside < n]
        weight.codes[beside] = torch.randint(0, 2, (len(beside), k), dtype=torch.uint8) * 128 + 126
        codes = weight.codes.clone()
        sign = torch.from_numpy(rng.integers(0, 2, len(rows)).astype(np.uint8)) * 128
        codes[rows, torch.from_numpy(rng.integers(0, k, len(rows)))] = sign + 127
        x = torch.randn(m, k).to(getattr(torch, plan.problem.activation.dtype.name))
        results = []
        for read in (weight, replace(weight, codes=codes)):
            operands = operands_of(plan, read, torch.zeros(n) if plan.problem.bias else None)
            out = torch.full((m, n), torch.nan)
            Kernel(plan, -1).launch(x, operands, out, 0)
            results.append(out)
        assert results[0].isfinite().all()
        assert torch.equal(results[1].isnan().any(0).nonzero().flatten(), rows.sort().values)
        assert results[1][:, rows].isnan().all()
        sound = ~results[1].isnan()
        assert torch.equal(results[0][sound], results[1][sound])


@pytest.mark.parametrize("rows", ["apart", "single", "repeated", "inner"])
def test_rows_of_activations_may_lie_anywhere(rows: str) -> None:
    """Tensor maps take rows as tensors have them."""
    problem = GemmProblem.parse("int4_g64 x bf16 -> float32", 40, 192)
    (lowering, *_) = lowerings(problem, CAPS)
    plan = compose_as(problem, CAPS, (1, 16), lowering, warpgroup_tile(1, 1, 8, 1, 2))
    memory = torch.randn(20, 512).bfloat16()
    x = {
        "apart": memory[::2, :192],
        "single": memory[3:4, :192].as_strided((1, 192), (7, 1), 1024),
        "repeated": memory[:1, :192].expand(9, 192),
        "inner": memory[:11, 64:256],
    }[rows]
    weight = humming.quantize(torch.randn(40, 192), problem.weight)
    out = torch.full((x.shape[0], 40), torch.nan)
    Kernel(plan, -1).launch(x, operands_of(plan, weight, None), out, 0)
    roundings = lowering.operand_roundings(problem)
    bound = reference.error_bound(problem, x, weight, operand_roundings=roundings)
    assert (out.double() - reference.matmul(x, weight)).abs().le(bound).all()


@pytest.mark.parametrize(
    ("text", "instead", "error"),
    [
        # Fragments, sums and stages that are used before they are there, or while they are read.
        (r"wgmma\.wait_group\.sync\.aligned 1;", "", "AsyncHazardError"),
        (r"wgmma\.fence\.sync\.aligned;", "", "UndefinedBehaviorError"),
        (r"mbarrier\.try_wait[^;]*;\s*@!ended bra again;", "", "SimulationError"),
        # Bytes and warps that never come.
        (r"mbarrier\.arrive\.shared\.b64 _, \[(%r\d+)\];", "", "DeadlockError"),
    ],
    ids=["wait", "fence", "barriers", "release"],
)
def test_faults_are_found(text: str, instead: str, error: str) -> None:
    product = product_in("int4 x bf16", 9, 64, 1024, (1, 1, 16, 1, 2))
    assert re.search(text, product.ptx())
    product.edit = lambda ptx: re.sub(text, instead, ptx)
    with pytest.raises(getattr(errors, error)):
        product.run()
