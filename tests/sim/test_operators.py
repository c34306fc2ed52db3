"""Operators as torch knows them: schemas, fake and real results alike, on a simulated device."""

from typing import Any

import pytest
import torch

import humming
import humming.ops  # which has the operators
from humming.errors import UnsupportedError

ACTIVATIONS = ("int8", "int8_asym", "int8_tensor", "int8_g64", "fp8", "mxfp8", "nvfp4", "int4_asym")
CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUMMING_SIMULATE", "a100_80gb")


def given(activation: str) -> tuple[torch.Tensor | None, None, torch.Tensor | None]:
    """A known scale, zero point and second scale, where the format takes them."""
    scale = torch.full((1, 1), 0.05) if activation.endswith("_tensor") else None
    return scale, None, torch.ones(1) if activation == "nvfp4" else None


@pytest.mark.parametrize("rows", [3, 0])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_quantization_is_an_operator(activation: str, rows: int) -> None:
    arguments = torch.randn(rows, 128).half(), activation, "none", *given(activation)
    operator = torch.ops.humming.quantize_activation.default
    torch.library.opcheck(operator, arguments, test_utils=CHECKS)


@pytest.mark.parametrize("rows", [3, 0])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_quantized_product_is_an_operator(activation: str, rows: int) -> None:
    x = humming.quantize_activation(
        torch.randn(rows, 128).half(), activation, **_named(given(activation))
    )
    weight = humming.pack(humming.quantize(torch.randn(24, 128), "int4_g64"), activation=activation)
    sums = None if x.spec.symmetric else weight.row_sums
    arguments = (
        *(x.codes, x.scales, x.zeros, x.second_scale),
        *(weight.codes, weight.scales, weight.zeros, weight.second_scale, sums, None),
        *(x.spec.name, weight.spec.name, 24, 128, torch.float16),
    )
    operator = torch.ops.humming.matmul_quantized.default
    # To see whether inputs change, torch adds them up, which it cannot do with every type.
    summed = torch.float8_e4m3fn not in (x.scales.dtype, weight.scales.dtype)
    torch.library.opcheck(operator, arguments, test_utils=CHECKS[0 if summed else 1 :])


def _named(known: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(("scale", "zero", "second_scale"), known, strict=True))


@pytest.mark.parametrize("activation", ["", "bf16"])
@pytest.mark.parametrize("rows", [3, 0])
def test_a_product_is_an_operator(activation: str, rows: int) -> None:
    weight = humming.pack(humming.quantize(torch.randn(24, 128), "uint4_g64_zp"))
    x = torch.randn(rows, 128).half()
    bias = torch.randn(24).half() if activation else None
    parts = weight.codes, weight.scales, weight.zeros, weight.second_scale, bias
    arguments = x, *parts, weight.spec.name, 24, 128, torch.float16
    torch.library.opcheck(torch.ops.humming.matmul.default, arguments, test_utils=CHECKS)


@pytest.mark.parametrize("activation", ["int8_asym", "int8", "nvfp4", "fp8"])
def test_no_tokens_are_a_product_of_none(activation: str) -> None:
    """By layers and functions, as a batch may have none for a layer."""
    weight = humming.quantize(torch.randn(24, 128), "int4_g64")
    layer = humming.QuantLinear.from_quantized(weight, activation=activation)
    empty = torch.empty(0, 128).half()
    assert layer(empty).shape == (0, 24)
    assert layer(empty.reshape(2, 0, 128)).shape == (2, 0, 24)
    assert humming.matmul(empty, layer.packed, activation=activation).shape == (0, 24)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"x": torch.ones(2, 128, dtype=torch.int32)}, "no activations"),
        ({"x": torch.ones(2, 128, dtype=torch.float64)}, "no activations"),
        ({"fuse": "tanh"}, "nobody has fused that"),
        ({"spec": "int8_tensor"}, "none is given"),
        ({"second_scale": torch.ones(1)}, "no second scale"),
        ({"scale": torch.ones(1, 1)}, "found from the activations"),
        ({"spec": "int8_tensor", "scale": torch.ones(2)}, "one value of another type"),
        ({"x": torch.ones(())}, "no last dimension"),
    ],
    ids=[
        *("integers", "float64", "fuse", "no-scale", "second-scale"),
        *("scale", "two-scales", "scalar"),
    ],
)
def test_operators_called_directly_check_what_they_get(change: dict[str, Any], told: str) -> None:
    arguments = {"x": torch.randn(2, 128).half(), "spec": "int8", "fuse": "none"}
    arguments |= {"scale": None, "zero": None, "second_scale": None} | change
    with pytest.raises(UnsupportedError, match=told):
        torch.ops.humming.quantize_activation(*arguments.values())


def test_layers_refuse_what_are_no_activations() -> None:
    layer = humming.QuantLinear.from_quantized(
        humming.quantize(torch.randn(24, 128), "int8"), activation="int8"
    )
    for dtype in (torch.float8_e4m3fn, torch.int8, torch.float64):
        with pytest.raises(UnsupportedError, match="float"):
            layer(torch.ones(2, 128).to(dtype))
