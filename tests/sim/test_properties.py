"""What a problem may ask of its sums beside being right: halves, equal bits, the batch left out."""

import copy
import dataclasses
from dataclasses import replace

import pytest
import torch
from products import Product, Tokens, product_of

from humming import plugins, reference
from humming.capability import DeviceCapabilities
from humming.composer import KernelPlan, compose, decide, m_range_of
from humming.errors import UnsupportedError
from humming.problem import GemmProblem
from humming.runtime import Kernel

N, K = 40, 256
FORMATS = (
    *("int4_g128 x fp16", "uint4_g64_zp x fp16", "nvfp4 x fp16", "fp8 x fp16"),
    *("int8 x int8", "int4_g128 x int8", "int8 x int8_asym", "int4 x int4"),
    *("mxfp8 x mxfp8", "fp8_block128 x fp8_g128", "nvfp4 x nvfp4"),
)
DEVICES = ("t4", "a100")


def simulated(device: str) -> DeviceCapabilities:
    return plugins.capabilities(f"sim:{device}")


def run(
    product: Product,
    tokens: Tokens | None = None,
    seed: int | None = None,
    plan: KernelPlan | None = None,
) -> torch.Tensor:
    """The product, of other tokens or by another plan if any are given, in a schedule of a seed."""
    plan, tokens = plan or product.plan, tokens or product.tokens
    kernel = Kernel(plan, -1)
    if seed is not None:
        # Kernels are loaded once; this one goes a way of its own.
        scheduled = copy.copy(kernel._launch.__self__)
        scheduled.options = dataclasses.replace(scheduled.options, seed=seed)
        scheduled._machines = {}
        kernel._launch = scheduled.launch
    out_dtype = getattr(torch, plan.problem.out_dtype.name)
    out = torch.full((len(tokens.x), plan.problem.n), torch.nan, dtype=out_dtype)
    kernel.launch(tokens.x, product.operands, out, 0, tokens.scales)
    assert not out.isnan().any()
    return out


def taken(tokens: Tokens, rows: torch.Tensor) -> Tokens:
    """Some of the tokens, in some order."""
    x, scales = tokens.x[rows], tokens.scales
    if not tokens.x.is_floating_point():
        # Rows of codes are padded with zeros to multiples of 16 bytes.
        padded = torch.zeros(len(rows), tokens.x.stride(0), dtype=torch.uint8)
        padded[:, : tokens.x.shape[1]] = x
        x = padded[:, : tokens.x.shape[1]]
    if scales is not None:
        zeros = None if scales.zeros is None else scales.zeros[rows].contiguous()
        scales = scales._replace(scales=scales.scales[rows].contiguous(), zeros=zeros)
    return Tokens(x, scales, tokens.values[rows], tokens.sizes[rows])


# -- sums in float16 ------------------------------------------------------------------------------


def half_plan(problem: GemmProblem, caps: DeviceCapabilities, m: int) -> KernelPlan:
    """The plan of a device that has no sums but halves."""
    halves = tuple(row for row in caps.mma if row.accumulator == "float16")
    return compose(problem, replace(caps, mma=halves), m_range_of(m))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name", ["int4_g128 x fp16", "int4 x fp16", "mxfp4 x fp16", "int4 x int4", "nvfp4 x nvfp4"]
)
def test_sums_in_half_are_within_their_bound(device: str, name: str) -> None:
    torch.manual_seed(3)
    problem = GemmProblem.parse(f"{name} -> fp32", N, K, fp16_accumulation=True)
    plan = half_plan(problem, simulated(device), 9)
    assert plan.lowering.mma.accumulator == "float16"
    product = product_of(plan, 9)
    tokens = product.tokens
    # Small enough for sums of halves to have a bound.
    if tokens.scales is None:
        tokens = Tokens(tokens.x / 8, None, tokens.values / 8, tokens.sizes / 8)
        product = replace(product, tokens=tokens, exact=product.exact / 8, bound=product.bound / 8)
    out = run(product)
    assert product.excess(out) <= 0
    # The certain bound allows for a rounding in every addition; sums that leave halves every few
    # values of K, as these do, stay far from it.
    assert reference.relative_error(out, product.exact) < 2e-3


@pytest.mark.parametrize("device", DEVICES)
def test_halves_are_used_with_permission_only(device: str) -> None:
    caps = simulated(device)
    for permitted in (False, True):
        problem = GemmProblem.parse("int4_g128 x fp16", N, K, fp16_accumulation=permitted)
        for m in (1, 1024):
            ready = decide(problem, caps, m_range_of(m), plugins.registry()).ready
            sums = {option.lowering.mma.accumulator.name for option in ready}
            assert sums == ({"float32", "float16"} if permitted else {"float32"})


@pytest.mark.parametrize("name", ["fp8 x fp8", "int4 x fp8", "int8 x int8"])
def test_codes_do_not_overflow_halves(name: str) -> None:
    problem = GemmProblem.parse(name, N, K, fp16_accumulation=True)
    with pytest.raises(UnsupportedError, match="may leave float16"):
        half_plan(problem, simulated("a100"), 9)


def test_halves_are_chosen_where_they_are_faster() -> None:
    problem = GemmProblem.parse("int4_g128 x fp16", 4096, 4096, fp16_accumulation=True)
    plan = compose(problem, simulated("rtx4090"), m_range_of(1024))
    assert plan.lowering.mma.accumulator == "float16"
    exact = compose(replace(problem, fp16_accumulation=False), simulated("rtx4090"), (513, None))
    assert exact.lowering.mma.accumulator == "float32"


# -- equal bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FORMATS)
def test_runs_and_schedules_give_equal_bits(device: str, name: str) -> None:
    torch.manual_seed(5)
    problem = GemmProblem.parse(name, N, K)
    product = product_of(compose(problem, simulated(device), m_range_of(9)), 9)
    first = run(product)
    assert product.excess(first) <= 0
    assert torch.equal(run(product), first)
    assert torch.equal(run(product, seed=1), first)


def test_parts_of_k_are_summed_in_one_order() -> None:
    """Split K: whichever CTA comes last adds up."""
    torch.manual_seed(6)
    problem = GemmProblem.parse("int4_g128 x fp16 -> fp32", N, 4096)
    product = product_of(compose(problem, simulated("a100"), m_range_of(5)), 5)
    assert product.plan.tile.split_k > 1
    first = run(product)
    for seed in (1, 2, 3):
        assert torch.equal(run(product, seed=seed), first)


# -- batch invariance -----------------------------------------------------------------------------

TOKENS = 70


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FORMATS)
def test_results_do_not_depend_on_the_batch(device: str, name: str) -> None:
    torch.manual_seed(7)
    caps = simulated(device)
    problem = GemmProblem.parse(f"{name} -> fp32", N, K, batch_invariant=True)
    product = product_of(compose(problem, caps, m_range_of(TOKENS)), TOKENS)
    whole = run(product)
    assert product.excess(whole) <= 0
    for m in (1, 9, 33):
        rows = torch.arange(m)
        plan = compose(problem, caps, m_range_of(m))
        assert plan.source == product.plan.source
        assert torch.equal(run(product, taken(product.tokens, rows), plan=plan), whole[:m]), m
    # Elsewhere in the batch, and beside other tokens.
    for rows in (torch.randperm(TOKENS), torch.tensor([69])):
        plan = compose(problem, caps, m_range_of(len(rows)))
        assert torch.equal(run(product, taken(product.tokens, rows), plan=plan), whole[rows])


def test_a_batch_matters_without_being_asked_not_to() -> None:
    """Otherwise the tests above would show nothing."""
    torch.manual_seed(8)
    problem = GemmProblem.parse("int4_g128 x fp16 -> fp32", N, 4096)
    plans = [compose(problem, simulated("a100"), m_range_of(m)) for m in (1, TOKENS)]
    product = product_of(plans[1], TOKENS)
    alone = run(product, taken(product.tokens, torch.arange(1)), plan=plans[0])
    assert not torch.equal(alone, run(product)[:1])
