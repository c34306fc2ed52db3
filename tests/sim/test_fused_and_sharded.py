"""Products of layers that were fused from several, and of parts of a layer on several ranks."""

import pytest
import torch

import humming
from humming import GemmProblem, reference
from humming.checkpoints.decisions import Linear
from humming.checkpoints.fusing import fuse

K = 256


def close(layer: Linear, x: torch.Tensor) -> bool:
    """Whether the product of a layer's module is within the bound of its kernel."""
    weight, bias = layer.weight, layer.bias
    problem = GemmProblem.parse(f"{weight.spec} x float16", *weight.shape, bias=bias is not None)
    plan = humming.plan(problem, humming.capabilities(), m=x.shape[0])
    bound = reference.error_bound(problem, x, weight, bias, **plan.roundings)
    with torch.no_grad():
        out = layer.to_module()(x)
    return bool(((out.double() - reference.matmul(x, weight, bias)).abs() <= bound).all())


def linear(spec: str, n: int, size: float = 1.0) -> Linear:
    weight = humming.quantize(torch.randn(n, K) * size * K**-0.5, spec)
    return Linear(weight, torch.randn(n, dtype=torch.float16))


@pytest.mark.parametrize("spec", ["int4_g64", "nvfp4", "fp8_tensor", "fp8_block128"])
def test_fused_products(spec: str) -> None:
    """Scales of tensors become those of rows, and the straddling blocks become groups."""
    parts = linear(spec, 80), linear(spec, 32, 5.0), linear(spec, 32, 0.1)
    fused = fuse({str(i): part for i, part in enumerate(parts)})
    x = torch.randn(3, K, dtype=torch.float16)
    matrix = torch.cat([reference.dequantize(part.weight) for part in parts])
    assert torch.equal(reference.dequantize(fused.weight), matrix)
    assert close(fused, x)


@pytest.mark.parametrize("spec", ["int4_g64", "nvfp4", "uint4_g32_zp"])
@pytest.mark.parametrize("dim", ["n", "k"])
def test_products_of_ranks(dim: str, spec: str) -> None:
    whole = linear(spec, 64)
    x = torch.randn(3, K, dtype=torch.float16)
    matrix = reference.dequantize(whole.weight)
    for rank in range(2):
        part = whole.shard(rank, 2, dim)
        mine = matrix.chunk(2, "nk".index(dim))[rank]
        assert torch.equal(reference.dequantize(part.weight), mine)
        assert close(part, x if dim == "n" else x.chunk(2, 1)[rank].contiguous())
