"""Products of layers with an order, scales and static scales of their inputs."""

from typing import Any

import pytest
import torch

import humming
from humming import QuantLinear, reference

N, K = 70, 192
# Sums are in float32 and rounded once to the output's type.
HALF_ULP = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def close(out: torch.Tensor, exact: torch.Tensor, sizes: torch.Tensor) -> bool:
    """Within the rounding of the result, and of sums in float32 of K terms of these sizes."""
    limit = HALF_ULP[out.dtype] * exact.abs() + K * 2.0**-24 * sizes + 2.0**-24
    return bool(((out.double() - exact).abs() <= limit).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale_dtype", [None, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("permuted", [True, False])
def test_inputs_are_scaled_and_ordered(
    permuted: bool, scale_dtype: torch.dtype | None, dtype: torch.dtype
) -> None:
    weight = humming.quantize(torch.randn(N, K) * K**-0.5, "int4_g64")
    order = torch.randperm(K)
    scale = None if scale_dtype is None else (torch.rand(K) + 0.5).to(scale_dtype)
    layer = QuantLinear.from_quantized(
        weight, input_permutation=order if permuted else None, input_scale=scale
    )
    x = torch.randn(2, 3, K, dtype=dtype)
    scaled = x if scale is None else (x.float() * scale.float()).to(dtype)
    rows = scaled[..., order] if permuted else scaled
    matrix = reference.dequantize(weight)
    torch._dynamo.reset()
    exact, sizes = rows.double() @ matrix.T, rows.double().abs() @ matrix.abs().T
    with torch.no_grad():
        out = layer(x)
        assert (out.shape, out.dtype) == ((2, 3, N), dtype)
        assert close(out, exact, sizes)
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(x), out)


@pytest.mark.parametrize(
    ("spec", "activation", "scale"),
    [
        ("fp8_tensor", "fp8_tensor", {"scale": 0.02}),
        ("int4_g64", "fp8_tensor", {"scale": 0.02}),
        ("int8", "int8_tensor", {"scale": 0.03}),
        ("nvfp4", "nvfp4", {"second_scale": torch.tensor([0.002])}),
    ],
)
def test_static_scales(spec: str, activation: str, scale: dict[str, Any]) -> None:
    weight = humming.quantize(torch.randn(N, K) * K**-0.5, spec)
    (given,) = scale.values()
    layer = QuantLinear.from_quantized(
        weight,
        activation=activation,
        activation_scale=given,
        input_permutation=torch.randperm(K),
        input_scale=torch.rand(K) + 0.5,
    )
    x = torch.randn(5, K, dtype=torch.float16)
    rows = (x.float() * layer.input_scale)[:, layer.input_permutation]
    quantized = humming.quantize_activation(rows, activation, **scale)
    matrix = reference.dequantize(weight)
    exact = quantized.dequantize() @ matrix.T
    with torch.no_grad():
        out = layer(x)
    assert close(out, exact, quantized.magnitudes() @ matrix.abs().T)
