"""One file of packed weights multiplies on every device of a fleet."""

from pathlib import Path

import pytest
import torch

import humming
from humming import GemmProblem, reference
from humming.checkpoints.decisions import Linear

N, K = 48, 192


@pytest.fixture(scope="module")
def linear() -> Linear:
    weight = humming.quantize(torch.randn(N, K) * K**-0.5, "int4_g64")
    bias, order = torch.randn(N, dtype=torch.float16), torch.randperm(K)
    return Linear(weight, bias, input_permutation=order)


@pytest.fixture(scope="module")
def path(linear: Linear, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "model.safetensors"
    humming.save_packed({"layer": linear.to_module()}, path)
    return path


@pytest.mark.parametrize("device", ["t4", "a100", "h200", "b300", "rtx5090", "zw810e"])
def test_products(device: str, linear: Linear, path: Path) -> None:
    layer = humming.load_model(path).layers["layer"]
    assert torch.equal(layer.input_permutation, linear.input_permutation)
    rows = torch.randn(3, K, dtype=torch.float16)[:, layer.input_permutation]
    out = humming.matmul(rows, layer.packed, layer.bias, device=f"sim:{device}")
    problem = GemmProblem.parse("int4_g64 x float16", N, K, bias=True)
    plan = humming.plan(problem, humming.capabilities(device), m=3)
    exact = reference.matmul(rows, linear.weight, linear.bias)
    bound = reference.error_bound(problem, rows, linear.weight, linear.bias, **plan.roundings)
    assert ((out.double() - exact).abs() <= bound).all()
