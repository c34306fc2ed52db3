"""Damaged or hostile tensors and configurations: a layer of finite numbers, or an error."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from humming.checkpoints.bitnet import BitNet
from humming.checkpoints.compressed_tensors import CompressedTensors
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
BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def read(method: type[Method], config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Linear:
    made = method(config, "config.json")
    return made.read(MODULE, made.decide(MODULE), TensorSource(tensors, "model.safetensors"))


def of_module(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"{MODULE}.{name}": tensor for name, tensor in tensors.items()}


def fp8(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(size=shape) * 40).to(torch.float8_e4m3fn)


def modelopt(algorithm: str) -> dict[str, Any]:
    return {"quantization": {"quant_algo": algorithm}}


def quark(weight: dict[str, Any]) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}}


def compressed(weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def test_codes_and_scales_that_are_no_numbers() -> None:
    weight = fp8(np.random.default_rng(14), 4, 8)
    scale = torch.ones(1, 1)
    weight.view(torch.uint8)[2, 3] = 0xFF
    with pytest.raises(CheckpointError, match=r"weight is NaN at \[2, 3\]"):
        read(Fp8, BLOCK, of_module(weight=weight, weight_scale_inv=scale))
    weight.view(torch.uint8)[2, 3] = 0
    scale[0, 0] = torch.inf
    with pytest.raises(CheckpointError, match=r"weight_scale_inv is no finite number at \[0, 0\]"):
        read(Fp8, BLOCK, of_module(weight=weight, weight_scale_inv=scale))


def test_a_module_without_tensors() -> None:
    for method, config in CONFIGS:
        with pytest.raises(CheckpointError, match="missing") as error:
            read(method, config, {"other.weight": torch.zeros(2, 2)})
        assert "model.safetensors" in str(error.value)
        assert MODULE in str(error.value)


CONFIGS: tuple[tuple[type[Method], dict[str, Any]], ...] = (
    (Fp8, BLOCK),
    (Fp8, {"quant_method": "w4afp8"}),
    (ModelOpt, modelopt("NVFP4")),
    (ModelOpt, modelopt("W4A16_AWQ")),
    (Mxfp4, {"quant_method": "mxfp4"}),
    (Quark, quark({"dtype": "fp4", "qscheme": "per_group", "group_size": 32})),
    (BitNet, {"quant_method": "bitnet"}),
    *(
        (CompressedTensors, compressed(weights))
        for weights in (
            {"num_bits": 4, "strategy": "group", "group_size": 32},
            {"num_bits": 3, "strategy": "channel", "symmetric": False},
            {"num_bits": 8, "strategy": "tensor", "type": "float"},
            {"num_bits": 4, "strategy": "tensor_group", "type": "float", "group_size": 16},
        )
    ),
)
DTYPES = (
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(
        torch.float8_e8m0fnu,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.bool,
    ),
)
NAMES = (
    *("weight", "weight_scale", "weight_scale_inv", "scale", "weight_scale_2", "input_scale"),
    *("pre_quant_scale", "bias", "weight_packed", "weight_global_scale", "weight_shape"),
    *("weight_zero_point", "weight_g_idx", "input_global_scale"),
)
SIZES = st.sampled_from((0, 1, 2, 3, 16, 32, 33, 64))


@st.composite
def some_tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    found = {}
    for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=6, unique=True)):
        shape = draw(st.lists(SIZES, max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        size = torch.empty(shape, dtype=dtype).nbytes
        data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        if dtype == torch.bool:
            data &= 1
        found[name] = data.view(dtype).reshape(shape)
    return found


def check(method: type[Method], config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """A layer of finite numbers, or an error that names the module."""
    told = ""
    try:
        linear = read(method, config, tensors)
    except CheckpointError as error:
        told = str(error)
    else:
        if isinstance(linear.weight, QuantizedWeight):
            assert bool(torch.isfinite(dequantize(linear.weight)).all())
    assert not told or MODULE in told


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(CONFIGS), some_tensors())
def test_any_tensors(
    of: tuple[type[Method], dict[str, Any]], tensors: dict[str, torch.Tensor]
) -> None:
    check(*of, of_module(**tensors))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_hostile_configs(data: st.DataObject) -> None:
    method, config = data.draw(st.sampled_from(CONFIGS))
    hostile: Any = dict(config)
    inner = hostile.get("quantization") or hostile.get("global_quant_config")
    target = hostile
    if inner and data.draw(st.booleans()):
        target = dict(inner)
        hostile = {key: target if value is inner else value for key, value in hostile.items()}
    known = st.sampled_from(
        (
            *config,
            *("modules_to_not_convert", "weight_block_size", "exclude", "ignore", "group_size"),
            *("quantized_layers", "weight", "input_tensors", "layer_quant_config", "quant_algo"),
            *("config_groups", "format", "targets", "input_activations", "sparsity_config"),
        )
    )
    target[data.draw(known)] = data.draw(VALUES)
    action, told = "", ""
    try:
        action = method(hostile, "config.json").decide(MODULE).action
    except CheckpointError as error:
        told = str(error)
    assert action in ("quantized", "plain", "refused") or told.startswith("config.json")


# -- checkpoints that were whole, with one thing changed ------------------------------------------


def codes(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.randint(0, 255, shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


EXPERTS = "model.layers.3.mlp.experts.down_proj"
PACKED = {"weight_packed": codes(8, 8, dtype=torch.int32), "weight_shape": torch.tensor([8, 64])}
WHOLE: tuple[tuple[type[Method], dict[str, Any], dict[str, torch.Tensor]], ...] = (
    (Fp8, BLOCK, of_module(weight=ones(4, 200).to(torch.float8_e4m3fn), weight_scale=ones(1, 2))),
    (Fp8, BLOCK, of_module(weight=codes(4, 32, dtype=torch.int8), scale=codes(4, 2))),
    (
        Fp8,
        {"quant_method": "w4afp8"},
        of_module(weight=codes(4, 64), weight_scale_inv=ones(4, 1), input_scale=ones(1)),
    ),
    (
        ModelOpt,
        modelopt("NVFP4_AWQ"),
        of_module(
            weight=codes(4, 32),
            weight_scale=ones(4, 4).to(torch.float8_e4m3fn),
            weight_scale_2=ones(),
            input_scale=ones(),
            pre_quant_scale=ones(64),
            bias=ones(4),
        ),
    ),
    (
        ModelOpt,
        modelopt("W4A16_AWQ"),
        of_module(weight=codes(4, 256), weight_scale=ones(8, 2)),
    ),
    (
        Mxfp4,
        {"quant_method": "mxfp4"},
        {
            f"{EXPERTS}_blocks": codes(2, 4, 3, 16),
            f"{EXPERTS}_scales": codes(2, 4, 3),
            f"{EXPERTS}_bias": ones(2, 4),
        },
    ),
    (
        Quark,
        quark({"dtype": "fp4", "qscheme": "per_group", "group_size": 32}),
        of_module(weight=codes(4, 48), weight_scale=codes(4, 3)),
    ),
    (
        BitNet,
        {"quant_method": "bitnet"},
        of_module(weight=codes(2, 5) & 0b10101010, weight_scale=ones(1)),
    ),
    (
        CompressedTensors,
        compressed({"num_bits": 4, "strategy": "group", "group_size": 32}),
        of_module(
            **PACKED,
            weight_scale=ones(8, 2),
            weight_g_idx=(torch.arange(64) % 2).to(torch.int32),
        ),
    ),
    (
        CompressedTensors,
        compressed({"num_bits": 4, "strategy": "channel", "symmetric": False}),
        of_module(
            **PACKED, weight_scale=ones(8, 1), weight_zero_point=codes(1, 1, dtype=torch.int32)
        ),
    ),
    (
        CompressedTensors,
        compressed({"num_bits": 8, "strategy": "channel", "symmetric": False}),
        of_module(
            weight=codes(4, 9, dtype=torch.int8),
            weight_scale=ones(4, 1),
            weight_zero_point=codes(4, 1, dtype=torch.int8),
        ),
    ),
    (
        CompressedTensors,
        compressed({"num_bits": 6, "strategy": "group", "type": "float", "group_size": 32}),
        of_module(weight_packed=codes(4, 48), weight_scale=codes(4, 2)),
    ),
)


@pytest.mark.parametrize("whole", WHOLE, ids=lambda whole: whole[0].__name__)
def test_what_is_whole_is_read(
    whole: tuple[type[Method], dict[str, Any], dict[str, torch.Tensor]],
) -> None:
    assert isinstance(read(*whole).weight, QuantizedWeight)


@st.composite
def changed(draw: st.DrawFn, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = draw(st.sampled_from(sorted(tensors)))
    tensor, found = tensors[name], dict(tensors)
    how = draw(st.sampled_from(("drop", "cut", "grow", "cast", "view", "noise", "nan", "flatten")))
    if how == "drop":
        del found[name]
    elif how in ("cut", "grow") and tensor.ndim:
        dim, count = draw(st.integers(0, tensor.ndim - 1)), draw(st.integers(0, 3))
        more = torch.cat([tensor.view(torch.uint8)] * 2, dim) if how == "grow" else None
        end = tensor.shape[dim] - count
        found[name] = (
            tensor.narrow(dim, 0, max(end, 0)) if more is None else more.view(tensor.dtype)
        )
    elif how == "cast":
        found[name] = tensor.to(torch.float32).to(draw(st.sampled_from(DTYPES)))
    elif how == "view":
        same = [dtype for dtype in DTYPES if dtype.itemsize == tensor.dtype.itemsize]
        found[name] = tensor.view(draw(st.sampled_from([d for d in same if d != torch.bool])))
    elif how == "noise":
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        noise = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=generator)
        found[name] = noise.view(tensor.dtype).reshape(tensor.shape)
    elif how == "nan":
        full = torch.full((tensor.nbytes,), 255, dtype=torch.uint8)
        found[name] = full.view(tensor.dtype).reshape(tensor.shape)
    else:
        found[name] = tensor.reshape(-1)
    return found


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_one_change(data: st.DataObject) -> None:
    method, config, tensors = data.draw(st.sampled_from(WHOLE))
    check(method, config, data.draw(changed(tensors)))
