"""Tensors of fp8, mxfp8, w4afp8, ModelOpt, gpt-oss, Quark and BitNet, written by hand."""

from typing import Any

import numpy as np
import pytest
import torch

from humming.checkpoints.bitnet import BitNet
from humming.checkpoints.decisions import Linear
from humming.checkpoints.fp8 import Fp8
from humming.checkpoints.methods import Method
from humming.checkpoints.modelopt import ModelOpt
from humming.checkpoints.mxfp4 import Mxfp4
from humming.checkpoints.quark import Quark
from humming.checkpoints.tensors import TensorSource
from humming.errors import CheckpointError
from humming.quantized import QuantizedWeight
from humming.reference import dequantize

MODULE = "model.layers.3.mlp.experts.0.down_proj"
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def read(
    method: type[Method],
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    module: str = MODULE,
) -> Linear:
    made = method(config, "config.json")
    return made.read(module, made.decide(module), TensorSource(tensors, "model.safetensors"))


def of_module(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"{MODULE}.{name}": tensor for name, tensor in tensors.items()}


def numbers(linear: Linear) -> np.ndarray:
    assert isinstance(linear.weight, QuantizedWeight)
    return dequantize(linear.weight).numpy()


def fp8(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(size=shape) * 40).to(torch.float8_e4m3fn)


def fp4(rng: np.random.Generator, *shape: int) -> tuple[torch.Tensor, np.ndarray]:
    """Pairs of 4-bit floats and the numbers they stand for."""
    codes = rng.integers(0, 16, shape)
    values = np.array([*E2M1, *(-value for value in E2M1)])[codes]
    return torch.from_numpy((codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)), values


def e8m0(rng: np.random.Generator, *shape: int) -> tuple[torch.Tensor, np.ndarray]:
    codes = rng.integers(0, 255, shape)
    return torch.from_numpy(codes.astype(np.uint8)), np.exp2(codes.astype(np.float64) - 127)


def blocks(scales: np.ndarray, rows: int, columns: int, shape: tuple[int, int]) -> np.ndarray:
    """The scale of each value, one at a time."""
    spread = np.empty(shape)
    for i in range(shape[0]):
        for j in range(shape[1]):
            spread[i, j] = scales[i // rows, j // columns]
    return spread


# -- 8-bit floats -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("shape", [(448, 256), (130, 192), (1, 100)])
def test_blocks_of_8_bit_floats(shape: tuple[int, int], kind: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    weight = fp8(rng, *shape)
    extent = (-(-shape[0] // 128), -(-shape[1] // 128))
    if kind == torch.float8_e8m0fnu:
        stored, scales = e8m0(rng, *extent)
        stored = stored.view(kind)
    else:
        stored = torch.from_numpy(rng.uniform(1e-4, 1e-2, extent)).to(kind)
        scales = stored.double().numpy()
    linear = read(Fp8, BLOCK, of_module(weight=weight, weight_scale_inv=stored))
    expected = weight.double().numpy() * blocks(scales, 128, 128, shape)
    np.testing.assert_array_equal(numbers(linear), expected)
    assert str(linear.activation) == "fp8_g128"


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    weight = fp8(rng, 24, 40)
    tensors = of_module(
        weight=weight,
        weight_scale=torch.full(shape, 0.03),
        input_scale=torch.full(shape, 0.25),
        bias=torch.arange(24.0),
    )
    config = {"quant_method": "fp8", "activation_scheme": "static"}
    linear = read(Fp8, config, tensors)
    scale = float(torch.tensor(0.03))
    np.testing.assert_array_equal(numbers(linear), weight.double().numpy() * scale)
    assert linear.activation_scale is not None
    assert linear.activation_scale.tolist() == [[0.25]]
    assert linear.bias is not None
    del tensors[f"{MODULE}.input_scale"]
    with pytest.raises(CheckpointError, match="input_scale is missing"):
        read(Fp8, config, tensors)


def test_scales_of_fused_matrices() -> None:
    weight = fp8(np.random.default_rng(3), 24, 40)
    config = {"quant_method": "fp8"}
    tensors = of_module(weight=weight, weight_scale=torch.tensor([0.5, 0.5, 0.5]))
    linear = read(Fp8, config, tensors)
    np.testing.assert_array_equal(numbers(linear), weight.double().numpy() / 2)
    assert any("the same" in note for note in linear.notes)
    tensors[f"{MODULE}.weight_scale"][1] = 0.25
    with pytest.raises(CheckpointError, match=r"weight_scale has the shape \[3, 1\]"):
        read(Fp8, config, tensors)


def test_mxfp8() -> None:
    rng = np.random.default_rng(4)
    weight = fp8(rng, 5, 96)
    stored, scales = e8m0(rng, 5, 3)
    config = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
    linear = read(Fp8, config, of_module(weight=weight, weight_scale_inv=stored))
    expected = weight.double().numpy() * scales.repeat(32, 1)
    np.testing.assert_array_equal(numbers(linear), expected)
    assert str(linear.activation) == "mxfp8"


def test_4_bit_floats_that_the_config_says_nothing_of() -> None:
    rng = np.random.default_rng(5)
    packed, values = fp4(rng, 6, 64)
    stored, scales = e8m0(rng, 6, 2)
    tensors = of_module(weight=packed.view(torch.int8), scale=stored.view(torch.float8_e8m0fnu))
    linear = read(Fp8, {**BLOCK, "scale_fmt": "ue8m0"}, tensors)
    np.testing.assert_array_equal(numbers(linear), values * scales.repeat(32, 1))
    assert any("mxfp4" in note for note in linear.notes)
    assert str(linear.activation) == "fp8_g128_sue8m0"


def test_signed_4_bit_integers_of_w4afp8() -> None:
    rng = np.random.default_rng(6)
    codes = rng.integers(-8, 8, (6, 256))
    packed = (codes[:, ::2] & 15 | (codes[:, 1::2] & 15) << 4).astype(np.uint8).view(np.int8)
    stored = torch.from_numpy(rng.uniform(0.01, 1, (6, 2))).to(torch.bfloat16)
    tensors = of_module(
        weight=torch.from_numpy(packed),
        weight_scale_inv=stored,
        input_scale=torch.tensor([2.0], dtype=torch.bfloat16),
    )
    linear = read(Fp8, {"quant_method": "w4afp8"}, tensors)
    expected = codes * stored.double().numpy().repeat(128, 1)
    np.testing.assert_array_equal(numbers(linear), expected)
    assert (str(linear.activation), linear.activation_scale is None) == ("fp8_tensor", False)
    with pytest.raises(CheckpointError, match="pairs of 4-bit floats"):
        read(Fp8, BLOCK, tensors)


# -- ModelOpt ---------------------------------------------------------------------------------


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quantization": {"quant_algo": algorithm, **more}}


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "NVFP4_AWQ"])
def test_nvfp4(algorithm: str) -> None:
    rng = np.random.default_rng(7)
    packed, values = fp4(rng, 6, 64)
    scales = torch.arange(24, dtype=torch.uint8).reshape(6, 4) * 5
    stored = scales.view(torch.float8_e4m3fn)  # from subnormal numbers to large ones
    second = torch.tensor(rng.uniform(0.01, 2), dtype=torch.float32)
    tensors = of_module(weight=packed, weight_scale=stored, weight_scale_2=second)
    if algorithm != "W4A16_NVFP4":
        tensors[f"{MODULE}.input_scale"] = torch.tensor(0.125)
    if algorithm == "NVFP4_AWQ":
        tensors[f"{MODULE}.pre_quant_scale"] = torch.arange(64, dtype=torch.bfloat16)
    linear = read(ModelOpt, modelopt(algorithm), tensors)
    expected = values * stored.double().numpy().repeat(16, 1) * float(second)
    np.testing.assert_array_equal(numbers(linear), expected)
    assert (linear.activation_scale is None) == (algorithm == "W4A16_NVFP4")
    assert (linear.input_scale is None) == (algorithm != "NVFP4_AWQ")
    del tensors[f"{MODULE}.weight_scale_2"]
    with pytest.raises(CheckpointError, match="weight_scale_2 is missing"):
        read(ModelOpt, modelopt(algorithm), tensors)


@pytest.mark.parametrize("group", [64, 128])
def test_4_bit_integers_along_rows(group: int) -> None:
    rng = np.random.default_rng(8)
    codes = rng.integers(-8, 8, (6, 256))
    packed = (codes[::2] & 15 | (codes[1::2] & 15) << 4).astype(np.uint8)
    stored = torch.from_numpy(rng.uniform(0.01, 1, (6, 256 // group))).to(torch.float16)
    tensors = of_module(weight=torch.from_numpy(packed), weight_scale=stored)
    linear = read(ModelOpt, modelopt("W4A16_AWQ", group_size=group), tensors)
    expected = codes * stored.double().numpy().repeat(group, 1)
    np.testing.assert_array_equal(numbers(linear), expected)


def test_modules_that_are_not_listed_are_what_they_are() -> None:
    rng = np.random.default_rng(9)
    weight, stored = fp8(rng, 130, 130), torch.rand(2, 2)
    layers = {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}}
    config = modelopt("MIXED_PRECISION", quantized_layers=layers)
    linear = read(ModelOpt, config, of_module(weight=weight, weight_scale_inv=stored))
    expected = weight.double().numpy() * blocks(stored.double().numpy(), 128, 128, (130, 130))
    np.testing.assert_array_equal(numbers(linear), expected)
    assert any("leaves it alone" in note for note in linear.notes)


def test_activations_go_with_the_weights_that_they_are_meant_for() -> None:
    weight = fp8(np.random.default_rng(15), 8, 64)
    tensors = of_module(weight=weight, weight_scale=torch.tensor(0.5))
    linear = read(ModelOpt, modelopt("NVFP4"), tensors)
    np.testing.assert_array_equal(numbers(linear), weight.double().numpy() / 2)
    assert linear.activation is None
    assert any("stay 16-bit" in note for note in linear.notes)


# -- gpt-oss ----------------------------------------------------------------------------------


def test_experts_of_one_tensor() -> None:
    rng = np.random.default_rng(10)
    experts, n, k = 3, 8, 96
    packed, values = fp4(rng, experts, n, k)
    stored, scales = e8m0(rng, experts, n, k // 32)
    bias = torch.from_numpy(rng.normal(size=(experts, n))).to(torch.bfloat16)
    head = "model.layers.3.mlp.experts"
    tensors = {
        f"{head}.gate_up_proj_blocks": packed.reshape(experts, n, k // 32, 16),
        f"{head}.gate_up_proj_scales": stored,
        f"{head}.gate_up_proj_bias": bias,
    }
    expected = values * scales.repeat(32, 2)
    rows = {
        "gate_up_proj": slice(None),
        "gate_proj": slice(0, None, 2),
        "up_proj": slice(1, None, 2),
    }
    config = {"quant_method": "mxfp4"}
    for name, taken in rows.items():
        linear = read(Mxfp4, config, tensors, f"{head}.1.{name}")
        np.testing.assert_array_equal(numbers(linear), expected[1, taken])
        assert linear.bias is not None
        assert torch.equal(linear.bias, bias[1, taken])
    for module in (f"{head}.3.up_proj", f"{head}.1.down_proj"):
        with pytest.raises(CheckpointError, match=r"experts\.(3|down_proj_blocks|down_proj)"):
            read(Mxfp4, config, tensors, module)
    tensors[f"{head}.gate_up_proj_scales"] = stored[:, :-1]
    with pytest.raises(CheckpointError, match="gate_up_proj_scales has the shape"):
        read(Mxfp4, config, tensors, f"{head}.1.up_proj")


# -- Quark ------------------------------------------------------------------------------------


def quark(weight: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    scheme = {"weight": weight, "input_tensors": inputs}
    return {"quant_method": "quark", "global_quant_config": scheme}


def test_quark_mxfp4() -> None:
    rng = np.random.default_rng(11)
    packed, values = fp4(rng, 6, 96)
    stored, scales = e8m0(rng, 6, 3)
    config = quark({"dtype": "fp4", "qscheme": "per_group", "group_size": 32})
    linear = read(Quark, config, of_module(weight=packed, weight_scale=stored))
    np.testing.assert_array_equal(numbers(linear), values * scales.repeat(32, 1))


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("scheme", ["per_tensor", "per_channel"])
def test_quark_bytes(dtype: str, scheme: str) -> None:
    rng = np.random.default_rng(12)
    weight = fp8(rng, 6, 40)
    if dtype == "int8":
        weight = torch.from_numpy(rng.integers(-128, 128, (6, 40)).astype(np.int8))
    stored = torch.rand(()) if scheme == "per_tensor" else torch.rand(6)
    inputs = {"dtype": dtype, "qscheme": "per_channel", "is_dynamic": True}
    config = quark({"dtype": dtype, "qscheme": scheme}, inputs)
    linear = read(Quark, config, of_module(weight=weight, weight_scale=stored))
    expected = weight.double().numpy() * stored.double().reshape(-1, 1).numpy()
    np.testing.assert_array_equal(numbers(linear), expected)
    assert linear.notes == ()
    assert str(linear.activation) == ("fp8" if dtype == "fp8_e4m3" else "int8")


def test_quark_integers_in_words_are_refused() -> None:
    config = quark({"dtype": "int4", "qscheme": "per_group", "group_size": 128})
    with pytest.raises(CheckpointError, match="not settled"):
        read(Quark, config, of_module(weight=torch.zeros(4, 4, dtype=torch.int32)))


# -- BitNet -----------------------------------------------------------------------------------


@pytest.mark.parametrize("divides", [True, False])
def test_ternary_weights(divides: bool) -> None:
    rng = np.random.default_rng(13)
    n, k = 12, 10
    values = rng.integers(-1, 2, (n, k))
    packed = np.zeros((n // 4, k), dtype=np.uint8)
    for row in range(n):
        for column in range(k):
            packed[row % (n // 4), column] |= (values[row, column] + 1) << 2 * (row // (n // 4))
    scale = torch.tensor([3.0], dtype=torch.bfloat16)
    config = {"quant_method": "bitnet"}
    if not divides:
        config["linear_class"] = "autobitlinear"
    tensors = of_module(weight=torch.from_numpy(packed), weight_scale=scale)
    linear = read(BitNet, config, tensors)
    expected = values / 3.0 if divides else values * 3.0
    np.testing.assert_allclose(numbers(linear), expected, rtol=2.0**-24)
    assert str(linear.activation) == "int8"
    tensors[f"{MODULE}.weight"][1, 2] |= 3
    with pytest.raises(CheckpointError, match=r"code 3 at \[1, 2\]"):
        read(BitNet, config, tensors)


def test_weights_that_become_ternary_later_are_plain() -> None:
    config = {"quant_method": "bitnet", "quantization_mode": "online"}
    linear = read(BitNet, config, of_module(weight=torch.zeros(4, 4)))
    assert isinstance(linear.weight, torch.Tensor)
