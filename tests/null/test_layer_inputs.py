"""What a QuantLinear does to its inputs: how that is checked, held, cast, stored and traced."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import humming
from humming import QuantLinear
from humming.checkpoints.decisions import Linear
from humming.errors import UnsupportedError

N, K = 48, 192


def _weight(spec: str = "int4_g32") -> humming.QuantizedWeight:
    return humming.quantize(torch.randn(N, K), spec)


def _layer(**inputs: Any) -> QuantLinear:
    """A layer with an order, scales of its inputs, and an activation scale if one is asked for."""
    inputs = {"input_permutation": torch.randperm(K), "input_scale": torch.rand(K) + 0.5, **inputs}
    return QuantLinear.from_quantized(_weight(), torch.randn(N), **inputs)


def _same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ({"activation": "fp8_tensor"}, "known beforehand, and none is given.*use float8e4m3"),
        ({"activation": "int8_tensor_dynamic"}, "no kernel finds one scale"),
        ({"activation": "int8_tensor_asym", "activation_scale": 1.0}, "no zero point"),
        ({"activation": "fp8", "activation_scale": 1.0}, "found from the activations"),
        ({"activation_scale": 1.0}, "of 16 bits: an activation_scale is given"),
        ({"activation": "fp8_tensor", "activation_scale": torch.ones(2)}, r"float32 \[2\]"),
        ({"activation": "fp8_tensor", "activation_scale": 0.0}, "is 0.0"),
        ({"activation": "fp8_tensor", "activation_scale": float("nan")}, "is nan"),
        ({"activation": "int8_tensor", "activation_scale": float("inf")}, "is inf"),
        ({"activation": "nvfp4", "activation_scale": -1.0}, r"is -1.0"),
        ({"input_permutation": torch.arange(K - 1)}, r"int64 \[191\]"),
        ({"input_permutation": torch.arange(K).float()}, "float32"),
        ({"input_permutation": torch.arange(K) // 2}, "each of them once"),
        ({"input_permutation": torch.arange(K) - 1}, "each of them once"),
        ({"input_permutation": list(range(K))}, "of type list"),
        ({"input_scale": torch.ones(N)}, r"float32 \[48\]"),
        ({"input_scale": torch.ones(K, dtype=torch.float64)}, "float64"),
        ({"input_scale": 2.0}, "of type float"),
    ],
)
def test_refuses_to_make(inputs: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        QuantLinear.from_quantized(_weight("fp8_tensor"), **inputs)


@pytest.mark.parametrize("activation", [None, "fp16"])
def test_casting_leaves_them_alone(activation: str | None) -> None:
    layer = _layer(activation=activation)
    order, scale = layer.input_permutation.clone(), layer.input_scale.clone()
    layer.to(torch.bfloat16)
    assert torch.equal(layer.input_permutation, order)
    assert (layer.input_scale.dtype, layer.bias.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(layer.input_scale, scale)
    moved = layer.to("meta")
    assert {tensor.device.type for tensor in moved.buffers()} == {"meta"}


def test_casting_leaves_a_static_scale_alone() -> None:
    layer = QuantLinear.from_quantized(
        _weight(), torch.randn(N), activation="int8_tensor", activation_scale=0.1
    )
    assert layer.half().activation_scale.dtype == torch.float32
    assert float(layer.activation_scale) == float(torch.tensor(0.1))


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_state_round_trip_is_exact(assign: bool, tmp_path: Path) -> None:
    static = {"activation": "int8_tensor", "activation_scale": 0.25}
    layer, other = _layer(**static), _layer(**{**static, "activation_scale": 0.5})
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    assert not _same(layer, other)
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"), assign=assign)
    assert _same(layer, other)


def _without(state: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in state.items() if key != name}


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (lambda: _without(_layer().state_dict(), "input_permutation"), "without input_permutation"),
        (lambda: _without(_layer().state_dict(), "input_scale"), "without input_scale"),
        (
            lambda: {**_layer().state_dict(), "activation_scale": torch.ones(1, 1)},
            "with activation_scale.*the layer has none",
        ),
        (
            lambda: {**_layer().state_dict(), "input_permutation": torch.arange(K) + 1},
            "each of them once",
        ),
        (
            lambda: {**_layer().state_dict(), "input_scale": torch.ones(K).bfloat16()},
            "input_scale of torch.bfloat16",
        ),
    ],
)
def test_state_that_does_not_fit_is_refused_and_changes_nothing(state: Any, told: str) -> None:
    layer = _layer()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with pytest.raises(UnsupportedError, match=told):
        layer.load_state_dict(state())
    assert all(torch.equal(layer.state_dict()[name], before[name]) for name in before)


def test_a_state_of_a_bias_alone_is_for_strict_loading_to_judge() -> None:
    layer, bias = _layer(), torch.randn(N)
    layer.load_state_dict({"bias": bias}, strict=False)
    assert torch.equal(layer.bias, bias)


@pytest.mark.parametrize("k", [1, K - 8, K + 8])
def test_activations_of_another_k_are_refused(k: int) -> None:
    """A gather would read some of them, and a single one would be spread over all scales."""
    with pytest.raises(UnsupportedError, match=r"Pass activations \[..., 192\]"):
        _layer().to("meta")(torch.empty(3, k, dtype=torch.float16, device="meta"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [None, "int8_tensor", "nvfp4"])
def test_is_exported_and_compiles_into_one_graph(
    activation: str | None, dtype: torch.dtype
) -> None:
    scale = None if activation is None else 0.5
    layer = _layer(activation=activation, activation_scale=scale).to("meta")
    x = torch.empty(4, K, dtype=dtype, device="meta")
    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(layer, backend="eager", fullgraph=True)(x)
        exported = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("m")},))
    assert (out.shape, out.dtype) == ((4, N), dtype)
    targets = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    product = "humming.matmul" if activation is None else "humming.matmul_quantized"
    assert targets.count(f"{product}.default") == 1


def test_a_product_with_static_activations_is_not_traced_without_their_scale() -> None:
    packed = humming.pack(_weight("fp8_tensor"), activation="fp8_tensor").to("meta")
    x = torch.empty(4, K, dtype=torch.float16, device="meta")
    with pytest.raises(Exception, match="known beforehand"):
        torch.compile(humming.matmul, backend="eager", fullgraph=True)(
            x, packed, activation="fp8_tensor"
        )


def test_repr_tells_them() -> None:
    shown = repr(_layer(activation="int8_tensor", activation_scale=0.5))
    assert shown.endswith(
        "activation=int8_tensor, input_scale, input_permutation, activation_scale)"
    )


# --- from checkpoints --------------------------------------------------------------------------


def test_a_loaded_layer_becomes_a_module() -> None:
    loaded = Linear(
        _weight("fp8_tensor"),
        torch.randn(N),
        activation=humming.ActivationSpec.parse("fp8_tensor"),
        input_permutation=torch.randperm(K),
        input_scale=torch.rand(K).half(),
        activation_scale=torch.full((1, 1), 0.125),
    )
    layer = loaded.to_module()
    assert isinstance(layer, QuantLinear)
    assert humming.unpack(layer.packed).equals(loaded.weight)
    assert layer.activation_spec == loaded.activation
    for name in ("bias", "input_permutation", "input_scale", "activation_scale"):
        assert torch.equal(getattr(layer, name), getattr(loaded, name))


def test_scales_are_rounded_only_when_asked_for() -> None:
    loaded = Linear(_weight("int4_g32_sfp32"))
    assert loaded.to_module().weight_spec.name == "int4_g32_sfp32"
    rounded = loaded.to_module(scale_dtype="float16")
    assert rounded.scales.dtype == torch.float16
    assert torch.equal(rounded.codes, loaded.to_module().codes)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_what_is_not_quantized_becomes_a_linear_of_torch(bias: bool) -> None:
    weight, vector = torch.randn(N, K, dtype=torch.bfloat16), torch.randn(N, dtype=torch.bfloat16)
    layer = Linear(weight, vector if bias else None).to_module("cpu")
    assert type(layer) is torch.nn.Linear
    assert (layer.in_features, layer.out_features) == (K, N)
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    x = torch.randn(3, K, dtype=torch.bfloat16)
    expected = torch.nn.functional.linear(x, weight, vector if bias else None)
    assert torch.equal(layer(x), expected)
