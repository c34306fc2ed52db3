"""Every lowering on the present card: also those of older devices, by their instructions.

An older device's rows, movers and shared memory in place of the card's own make the composer choose
what it would choose there; compiled for the card, the same instructions run on it.
"""

import products
import pytest
import torch

import humming
from humming import reference
from humming.capability import DeviceCapabilities
from humming.composer import M_RANGES, compose, compose_as
from humming.plugins import capabilities
from humming.problem import GemmProblem
from humming.runtime import Kernel, Operands

pytestmark = pytest.mark.gpu

# Lowerings by the device that has them; the card's own stand under its name.
LIKE = ("t4", "a100_80gb", "rtx4090", "present")
FORMATS = (
    "int4_g128",
    "int4_g32",
    "int4_g64_sfp32",
    "int4",
    "int4_tensor",
    "int4_block128",
    "mxint4",
    "uint4_g32_zp",
    "uint4_g128_zp_sbf16",
    "uint4_zp",
    "uint4_g64_fzp",
    "int4_g128_s2tensor",
    "int4_g16_se4m3_s2channel",
)
# (N, K): whole tiles, tails of both, less than a brick, a single row.
SHAPES = ((256, 512), (208, 1088), (40, 72), (1, 200), (576, 1536), (130, 4096))
TOKENS = {(1, 8): (1, 7, 8), (9, 16): (9, 16), (17, 32): (17, 32), (33, 64): (64,)}
TOKENS |= {(65, 128): (65, 128), (129, 256): (129,), (257, 512): (300,), (513, None): (517,)}


def like(name: str) -> DeviceCapabilities:
    """The present card with the means of another device."""
    card = capabilities()
    return card if name == "present" else products.like(card, capabilities(name))


def weight_of(n: int, k: int, spec: str) -> humming.QuantizedWeight:
    """A quantized weight with an offset, so that zero points matter."""
    dense = torch.randn(n, k, device="cuda") + 0.3 * torch.rand(n, 1, device="cuda")
    return humming.quantize(dense * k**-0.5, spec)


def launch(plan: humming.KernelPlan, x: torch.Tensor, operands: Operands) -> torch.Tensor:
    """What the kernel of a plan leaves in a poisoned output with poisoned surroundings."""
    m, n = x.shape[0], plan.problem.n
    dtype = getattr(torch, plan.problem.out_dtype.name)
    guarded = torch.full((m + 2, n), float("nan"), device="cuda", dtype=dtype)
    kernel = Kernel(plan, 0)
    kernel.launch(x, operands, guarded[1:-1], torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert guarded[0].isnan().all(), "wrote before the output"
    assert guarded[-1].isnan().all(), "wrote behind the output"
    return guarded[1:-1]


@pytest.mark.parametrize("m_range", M_RANGES, ids=lambda r: f"m{r[0]}-{r[1] or 'up'}")
@pytest.mark.parametrize("spec", FORMATS)
@pytest.mark.parametrize("activation", ["float16", "bfloat16"])
@pytest.mark.parametrize("device", LIKE)
def test_every_lowering_meets_its_bound(device, activation, spec, m_range):
    caps = like(device)
    problem = GemmProblem.parse(f"{spec} x {activation}", 64, 64)
    if not any(row.b == activation for row in caps.mma):
        with pytest.raises(humming.UnsupportedError, match=activation):
            compose(problem, caps, m_range)
        return
    if spec.endswith("_fzp") and activation == "bfloat16":
        spec += "_sbf16"  # a float zero point has the type of the scale and of the operand
    start = FORMATS.index(spec.removesuffix("_sbf16") if "fzp" in spec else spec) + m_range[0]
    for index, (n, k) in enumerate((SHAPES[start % 6], SHAPES[(start + 3) % 6])):
        out_dtype = ("float32", activation)[index % 2]
        problem = GemmProblem.parse(
            f"{spec} x {activation}", n, k, out_dtype=humming.DataType.parse(out_dtype), bias=True
        )
        try:
            plan = compose(problem, caps, m_range)
        except humming.UnsupportedError:
            # A single scale step can be wider than the weight is; nothing else may be refused.
            assert k < problem.weight.group_size
            continue
        weight = weight_of(n, k, spec)
        packed = humming.pack(weight)
        bias = torch.randn(n, device="cuda").to(getattr(torch, out_dtype))
        operands = Operands(packed.codes, packed.scales, packed.zeros, packed.second_scale, bias)
        for m in TOKENS[m_range]:
            x = torch.randn(m, k, device="cuda").to(getattr(torch, activation))
            # Rows that begin at multiples of 16 bytes are what kernels are given.
            rows = torch.nn.functional.pad(x, (0, -k % 8))
            out = launch(plan, rows, operands)
            bound = reference.error_bound(
                problem,
                x,
                weight,
                bias,
                **plan.roundings,
            )
            exact = reference.matmul(x, weight, bias)
            excess = (out.double() - exact).abs() - bound
            assert excess.max() <= 0, f"{n}x{k} m={m} {plan.tile}: {excess.max()} over the bound"


@pytest.mark.parametrize("device", LIKE)
def test_results_repeat_bit_for_bit(device):
    caps = like(device)
    problem = GemmProblem.parse("int4_g64 x float16", 384, 4096)
    weight = humming.pack(weight_of(384, 4096, "int4_g64"))
    operands = Operands(weight.codes, weight.scales, None, None, None)
    for m_range in M_RANGES:
        plan = compose(problem, caps, m_range)
        x = torch.randn(m_range[0], 4096, device="cuda", dtype=torch.float16)
        first = launch(plan, x, operands)
        for _ in range(20):
            assert torch.equal(launch(plan, x, operands), first)


def test_all_tiles_of_a_problem_agree():
    """Every tile that the composer may choose, not only the one that it does."""
    from humming.compiler import compile_many
    from humming.tiles import candidates

    caps = capabilities()
    problem = GemmProblem.parse("int4_g64 x float16", 272, 1216)
    weight = weight_of(272, 1216, "int4_g64")
    packed = humming.pack(weight)
    operands = Operands(packed.codes, packed.scales, None, None, None)
    for m_range in ((9, 16), (33, 64)):
        chosen = compose(problem, caps, m_range)
        tiles = candidates(problem, chosen.lowering, caps, m_range)
        plans = [
            compose_as(problem, caps, m_range, chosen.lowering, tile)
            for tile in tiles[:: max(1, len(tiles) // 40)]
        ]
        x = torch.randn(m_range[1], 1216, device="cuda", dtype=torch.float16)
        exact = reference.matmul(x, weight)
        for plan, compiled in zip(plans, compile_many(plans), strict=True):
            bound = reference.error_bound(problem, x, weight, **plan.roundings)
            out = torch.full((m_range[1], 272), float("nan"), device="cuda", dtype=torch.float16)
            Kernel(plan, 0, compiled).launch(
                x, operands, out, torch.cuda.current_stream().cuda_stream
            )
            assert ((out.double() - exact).abs() <= bound).all(), str(plan.tile)
