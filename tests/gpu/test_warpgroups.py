"""The mainloop of warpgroups on the present card, in every kind of tile."""

import numpy as np
import products
import pytest
import torch
import warpgroups

import humming
from humming import reference
from humming.composer import compose_as
from humming.plugins import capabilities
from humming.problem import GemmProblem
from humming.quantized import QuantizedWeight, pack_bits
from humming.runtime import Kernel, Operands, TokenScales
from humming.tiles import fits, warpgroup_tile

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


@pytest.mark.parametrize("shape", warpgroups.SHAPES)
@pytest.mark.parametrize("problem", ["fp8_sfp32 x fp8", "int8_sfp32 x int8", "int4_sfp32 x fp8"])
def test_every_fragment_reaches_the_product(problem: str, shape: tuple[int, ...]) -> None:
    """One-hot tokens read the weight back; fragments overwritten while they are multiplied show.

    Several warps of a scheduler make products wait, and weights that differ make fragments differ.
    """
    k = 2048
    described = GemmProblem.parse(f"{problem} -> float32", 512, k)
    spec, one = described.weight, {"float8e4m3": 0x38, "int8": 1}[described.activation.dtype.name]
    (lowering, *_) = warpgroups.lowerings(described, capabilities())
    tile = warpgroup_tile(*shape)
    if not fits(tile, described, lowering, capabilities()):
        pytest.skip("the tile does not fit")
    kernel = Kernel(compose_as(described, capabilities(), (1, None), lowering, tile), 0)
    x = torch.eye(k, device="cuda", dtype=torch.uint8) * one
    for _ in range(8):
        codes = torch.randint(0, 1 << min(spec.dtype.bits, 7), (512, k), dtype=torch.uint8)
        codes[codes == 127] = 0  # NaN of 8-bit floats
        weight = QuantizedWeight(
            spec, (512, k), pack_bits(codes, spec.dtype.bits), torch.ones(512, 1)
        ).to("cuda")
        packed = humming.pack(weight, operand_bits=8)
        out = torch.full((k, 512), torch.nan, device="cuda")
        operands = Operands(packed.codes, packed.scales, None, None, None)
        scales = TokenScales(torch.ones(k, 1, device="cuda"))
        kernel.launch(x, operands, out, torch.cuda.current_stream().cuda_stream, scales)
        assert torch.equal(out.double(), reference.dequantize(weight).T)


def test_small_sums_are_not_lost_beside_large_ones() -> None:
    """Beside 448 x 448 sums of ones are less than the last bit that short sums keep."""
    k = 1024
    described = GemmProblem.parse("fp8_sfp32 x fp8 -> float32", 256, k)
    (lowering, *_) = warpgroups.lowerings(described, capabilities())
    one, largest = 0x38, 0x7E
    codes = torch.full((256, k), one, dtype=torch.uint8)
    codes[:, 0] = largest
    codes[:, 1:128] = 0
    weight = QuantizedWeight(described.weight, (256, k), codes, torch.ones(256, 1)).to("cuda")
    packed = humming.pack(weight, operand_bits=8)
    operands = Operands(packed.codes, packed.scales, None, None, None)
    x = codes[:8].contiguous().to("cuda")
    for shape in warpgroups.SHAPES:
        tile = warpgroup_tile(*shape)
        if fits(tile, described, lowering, capabilities()):
            kernel = Kernel(compose_as(described, capabilities(), (1, None), lowering, tile), 0)
            out = torch.full((8, 256), torch.nan, device="cuda")
            scales = TokenScales(torch.ones(8, 1, device="cuda"))
            kernel.launch(x, operands, out, torch.cuda.current_stream().cuda_stream, scales)
            assert (out == 448.0 * 448.0 + (k - 128)).all(), str(tile)


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
            excess = product.excess(guarded[1:-1])
            assert excess <= 0, f"{excess} beyond the bound: {plan.lowering.name}, {plan.tile}"
            assert guarded[0].isnan().all()
            assert guarded[-1].isnan().all()
