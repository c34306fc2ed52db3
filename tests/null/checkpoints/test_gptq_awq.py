"""GPTQ, AWQ and AutoRound: tensors written value by value are read bit by bit."""

import importlib.util
import math
import random
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from humming import reference
from humming.checkpoints.autoround import AutoRound
from humming.checkpoints.awq import Awq
from humming.checkpoints.decisions import Linear
from humming.checkpoints.gptq import Gptq
from humming.checkpoints.methods import method_of
from humming.checkpoints.tensors import TensorSource
from humming.errors import CheckpointError
from humming.quantized import QuantizedWeight

MODULE = "model.layers.0.mlp.up_proj"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Layer:
    """A layer before it is packed: codes [N][K], zero points and scales [N][G], groups [K]."""

    bits: int
    group_size: int
    codes: list[list[int]]
    zeros: list[list[int]]
    scales: torch.Tensor
    groups: list[int]
    bias: torch.Tensor

    @classmethod
    def random(
        cls,
        n: int,
        k: int,
        bits: int = 4,
        group_size: int = 32,
        symmetric: bool = False,
        shuffled: bool = False,
        dtype: torch.dtype = torch.float16,
    ) -> "Layer":
        size = k if group_size == -1 else group_size
        count = -(-k // size)
        groups = [column // size for column in range(k)]
        if shuffled:
            random.shuffle(groups)
        top = (1 << bits) - 1
        half = 1 << (bits - 1)
        codes = [[random.randint(0, top) for _ in range(k)] for _ in range(n)]
        zeros = [
            [half if symmetric else random.randint(0, top) for _ in range(count)] for _ in range(n)
        ]
        scales = (torch.rand(n, count) + 0.01).to(dtype)
        return cls(bits, group_size, codes, zeros, scales, groups, torch.randn(n).to(dtype))

    def values(self) -> torch.Tensor:
        """The weight as float64 [N, K], one value after the other."""
        scales = self.scales.double()
        return torch.tensor(
            [
                [
                    (code - self.zeros[row][group]) * float(scales[row, group])
                    for code, group in zip(codes, self.groups, strict=True)
                ]
                for row, codes in enumerate(self.codes)
            ],
            dtype=torch.float64,
        )


def words_of(values: list[int], bits: int) -> list[int]:
    """Values side by side as signed 32-bit words, the first in the lowest bits."""
    stream = sum(value << (bits * place) for place, value in enumerate(values))
    count = -(-len(values) * bits // 32)
    words = [(stream >> (32 * word)) & 0xFFFFFFFF for word in range(count)]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def gptq_tensors(
    layer: Layer, offset: int = 1, with_groups: bool = True
) -> dict[str, torch.Tensor]:
    mask = (1 << layer.bits) - 1
    stored = [
        [(zero - offset) & mask for zero in column] for column in zip(*layer.zeros, strict=True)
    ]
    tensors = {
        "qweight": torch.tensor([words_of(row, layer.bits) for row in layer.codes]).int().T,
        "qzeros": torch.tensor([words_of(row, layer.bits) for row in stored]).int(),
        "scales": layer.scales.T,
        "bias": layer.bias,
    }
    if with_groups:
        tensors["g_idx"] = torch.tensor(layer.groups, dtype=torch.int32)
    return {f"{MODULE}.{name}": tensor.contiguous() for name, tensor in tensors.items()}


def awq_tensors(layer: Layer) -> dict[str, torch.Tensor]:
    def interleaved(values: list[int]) -> list[int]:
        eights = [values[start : start + 8] for start in range(0, len(values), 8)]
        return [eight[place] for eight in eights for place in AWQ_ORDER]

    columns = [list(column) for column in zip(*layer.codes, strict=True)]
    zeros = [list(column) for column in zip(*layer.zeros, strict=True)]
    bits = layer.bits
    tensors = {
        "qweight": torch.tensor([words_of(interleaved(row), bits) for row in columns]).int(),
        "qzeros": torch.tensor([words_of(interleaved(row), bits) for row in zeros]).int(),
        "scales": layer.scales.T.contiguous(),
        "bias": layer.bias,
    }
    return {f"{MODULE}.{name}": tensor for name, tensor in tensors.items()}


def gemv_tensors(layer: Layer) -> dict[str, torch.Tensor]:
    n, groups = layer.scales.shape
    multiple = {64: 2, 32: 4}.get(layer.group_size, 1)
    width = multiple * math.ceil(math.ceil(groups / 8) / multiple)
    scales = torch.zeros(n, 8 * width, dtype=layer.scales.dtype)
    scales[:, :groups] = layer.scales
    zeros = [row + [0] * (8 * width - groups) for row in layer.zeros]
    tensors = {
        "qweight": torch.tensor([words_of(row, 4) for row in layer.codes]).int(),
        "qzeros": torch.tensor([words_of(row, 4) for row in zeros]).int(),
        "scales": scales,
        "bias": layer.bias,
    }
    return {f"{MODULE}.{name}": tensor for name, tensor in tensors.items()}


def read(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Linear:
    method = method_of(config, "config.json")
    return method.read(MODULE, method.decide(MODULE), TensorSource(tensors, "model"))


def quantized(linear: Linear) -> QuantizedWeight:
    assert isinstance(linear.weight, QuantizedWeight)
    return linear.weight


def check(linear: Linear, layer: Layer) -> None:
    """Every value, in the order of the checkpoint's own columns, is the one that was written."""
    found, expected = reference.dequantize(quantized(linear)), layer.values()
    if linear.input_permutation is not None:
        expected = expected[:, linear.input_permutation]
    assert torch.equal(found, expected)
    assert linear.bias is not None
    assert torch.equal(linear.bias, layer.bias)


def gptq_config(layer: Layer, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": layer.bits, "group_size": layer.group_size, **more}


# --- GPTQ --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize(("checkpoint_format", "offset"), [("gptq", 1), ("gptq_v2", 0)])
@pytest.mark.parametrize("shuffled", [False, True], ids=["in_order", "act_order"])
def test_gptq_is_read_bit_by_bit(
    bits: int, checkpoint_format: str, offset: int, shuffled: bool
) -> None:
    layer = Layer.random(32, 96, bits, 32, shuffled=shuffled)
    config = gptq_config(layer, checkpoint_format=checkpoint_format, sym=False, desc_act=shuffled)
    linear = read(config, gptq_tensors(layer, offset))
    check(linear, layer)
    assert quantized(linear).spec.name == f"uint{bits}_g32_zp"
    assert (linear.input_permutation is not None) == shuffled
    assert not linear.notes


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_symmetric_gptq_has_no_zero_points(bits: int, dtype: torch.dtype) -> None:
    layer = Layer.random(32, 64, bits, 32, symmetric=True, dtype=dtype)
    linear = read(gptq_config(layer, sym=True), gptq_tensors(layer))
    check(linear, layer)
    assert quantized(linear).zeros is None
    assert not linear.notes


@pytest.mark.parametrize("k", [32, 64, 96, 128])
def test_three_bits_take_three_words_for_32_values(k: int) -> None:
    layer = Layer.random(32, k, 3, 32)
    tensors = gptq_tensors(layer)
    assert tensors[f"{MODULE}.qweight"].shape == (3 * k // 32, 32)
    check(read(gptq_config(layer, sym=False), tensors), layer)


@pytest.mark.parametrize("shuffled", [False, True])
def test_one_group_for_all_columns_has_no_order(shuffled: bool) -> None:
    layer = Layer.random(8, 64, 4, -1, shuffled=shuffled)
    linear = read(gptq_config(layer, sym=False, desc_act=True), gptq_tensors(layer))
    check(linear, layer)
    assert linear.input_permutation is None
    assert quantized(linear).spec.granularity == "channel"


def test_true_zero_points_of_0_are_stored_as_the_largest_code() -> None:
    layer = Layer.random(8, 32)
    layer.zeros = [[0] for _ in range(8)]
    tensors = gptq_tensors(layer)
    assert bool((tensors[f"{MODULE}.qzeros"] == -1).all())
    check(read(gptq_config(layer, sym=False), tensors), layer)


@pytest.mark.parametrize(("named", "offset"), [("gptq", 0), ("gptq_v2", 1)])
def test_symmetric_weights_betray_the_other_convention(named: str, offset: int) -> None:
    layer = Layer.random(8, 64, 4, 32, symmetric=True)
    linear = read(
        gptq_config(layer, sym=True, checkpoint_format=named), gptq_tensors(layer, offset)
    )
    check(linear, layer)
    assert "other convention" in linear.notes[0]


def test_zero_points_are_used_whatever_the_config_says() -> None:
    layer = Layer.random(8, 64, 4, 32)
    linear = read(gptq_config(layer, sym=True), gptq_tensors(layer))
    check(linear, layer)
    assert any("symmetric" in note for note in linear.notes)


def test_tensors_decide_about_bits_and_groups() -> None:
    layer = Layer.random(32, 128, 8, 32, symmetric=True)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    linear = read(config, gptq_tensors(layer))
    check(linear, layer)
    assert quantized(linear).spec.name == "int8_g32"
    assert len(linear.notes) >= 2


def test_symmetric_weights_do_without_zero_points() -> None:
    layer = Layer.random(8, 64, 4, 32, symmetric=True)
    tensors = gptq_tensors(layer)
    del tensors[f"{MODULE}.qzeros"]
    check(read(gptq_config(layer, sym=True), tensors), layer)
    with pytest.raises(CheckpointError, match="qzeros is missing"):
        read(gptq_config(layer, sym=False), tensors)


def test_the_order_of_columns_must_be_there() -> None:
    layer = Layer.random(8, 64, shuffled=True)
    with pytest.raises(CheckpointError, match="g_idx is missing"):
        read(gptq_config(layer, sym=False, desc_act=True), gptq_tensors(layer, with_groups=False))


def test_groups_of_unequal_size_are_refused() -> None:
    layer = Layer.random(8, 64)
    layer.groups[0] = 1
    with pytest.raises(CheckpointError, match="as often as it has columns"):
        read(gptq_config(layer, sym=False), gptq_tensors(layer))


def test_plain_tensors_overrule_a_rule_that_says_quantized() -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"+:.*mlp.*": {}}}
    matrix = torch.randn(8, 64)
    linear = read(config, {f"{MODULE}.weight": matrix})
    assert torch.equal(torch.as_tensor(linear.weight), matrix)
    assert "not quantized" in linear.notes[0]


def test_quantized_tensors_overrule_a_rule_that_says_plain() -> None:
    layer = Layer.random(8, 64)
    linear = read(gptq_config(layer, sym=False, dynamic={"-:.*": {}}), gptq_tensors(layer))
    check(linear, layer)
    assert "leaves it alone" in linear.notes[0]


# --- AWQ and AutoRound -------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, -1])
def test_awq_is_read_bit_by_bit(symmetric: bool, group_size: int) -> None:
    layer = Layer.random(24, 128, 4, group_size, symmetric=symmetric)
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True}
    linear = read({**config, "version": "GEMM"}, awq_tensors(layer))
    check(linear, layer)
    assert quantized(linear).spec.zero_point == "integer"
    assert not linear.notes


def test_awq_without_zero_points_is_symmetric() -> None:
    layer = Layer.random(24, 64, 4, 32, symmetric=True)
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": False}
    linear = read(config, awq_tensors(layer))
    check(linear, layer)
    assert quantized(linear).spec.name == "int4_g32"


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("version", ["gemv", "gemm"])
def test_gemv_is_told_by_its_shapes(group_size: int, version: str) -> None:
    layer = Layer.random(24, 384, 4, group_size)
    config = {"w_bit": 4, "q_group_size": group_size, "version": version, "zero_point": True}
    linear = read(config, gemv_tensors(layer))
    check(linear, layer)
    assert bool(linear.notes) == (version == "gemm")


@pytest.mark.parametrize(
    ("packing", "offset"),
    [("auto_round:auto_gptq", 1), ("auto_round", 0), ("auto_round:gptqmodel", 0)],
)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_autoround_stores_zero_points_as_its_packing_says(
    packing: str, offset: int, bits: int
) -> None:
    layer = Layer.random(32, 64, bits)
    config = {"quant_method": "auto-round", "bits": bits, "group_size": 32, "sym": False}
    tensors = gptq_tensors(layer, offset, with_groups=False)
    check(read({**config, "packing_format": packing}, tensors), layer)


@pytest.mark.parametrize("bits", [4, 5, 6, 7])
def test_autoround_in_the_order_of_awq(bits: int) -> None:
    layer = Layer.random(32, 64, bits)
    config = {"quant_method": "auto-round", "bits": bits, "group_size": 32, "sym": False}
    check(read({**config, "packing_format": "auto_round:auto_awq"}, awq_tensors(layer)), layer)


# --- against code that is not ours -------------------------------------------------------------


def _other(package: str, file: str) -> ModuleType:
    """A file of another package, without what the package as a whole needs."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    path = Path(next(iter(spec.submodule_search_locations))) / file
    own = importlib.util.spec_from_file_location(f"other_{package}", path)
    assert own is not None
    assert own.loader is not None
    module = importlib.util.module_from_spec(own)
    own.loader.exec_module(module)
    return module


def test_awq_as_autoawq_dequantizes_it() -> None:
    other = _other("awq", "utils/packing_utils.py")
    layer = Layer.random(24, 128, 4, 32)
    tensors = {name.rpartition(".")[2]: tensor for name, tensor in awq_tensors(layer).items()}
    words, zeros, scales = tensors["qweight"], tensors["qzeros"], tensors["scales"].float()
    theirs = other.dequantize_gemm(words, zeros, scales, 4, 32).T
    config = {"quant_method": "awq", "bits": 4, "group_size": 32}
    ours = reference.dequantize(quantized(read(config, awq_tensors(layer))), torch.float32)
    assert torch.equal(ours, theirs.contiguous())


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_gptq_as_autoround_packs_it(bits: int) -> None:
    other = _other("auto_round", "utils/bit_packing.py")
    layer = Layer.random(32, 96, bits, symmetric=False)
    tensors = gptq_tensors(layer, 0, with_groups=False)
    codes, zeros = torch.tensor(layer.codes), torch.tensor(layer.zeros).T
    tensors[f"{MODULE}.qweight"] = other.pack_bitstream(codes, bits, dim=1).T.contiguous()
    tensors[f"{MODULE}.qzeros"] = other.pack_bitstream(zeros, bits, dim=1)
    config = gptq_config(layer, checkpoint_format="gptq_v2", sym=False)
    check(read(config, tensors), layer)


# What AutoRound says beside the format, whatever method it exports for.
EXPORTED = {
    **{"data_type": "int", "iters": 200, "nsamples": 512, "enable_quanted_input": False},
    **{"autoround_version": "0.14.2", "provider": "auto-round", "amp": True, "lr": 0.005},
    **{"damp_percent": 0.01, "true_sequential": False, "static_kv_granularity": "tensor"},
    **{"bits": 4, "group_size": 32, "sym": False},
}


@pytest.mark.parametrize(
    ("more", "offset"),
    [
        ({"quant_method": "gptq", "desc_act": False, "block_name_to_quantize": "model.layers"}, 1),
        ({"quant_method": "gptq", "modules_in_block_to_quantize": [["mlp.up_proj"]]}, 1),
        ({"quant_method": "awq", "zero_point": True, "version": "gemm"}, None),
        ({"quant_method": "auto-round", "packing_format": "auto_round"}, 0),
    ],
)
def test_exports_of_autoround(more: dict[str, Any], offset: int | None) -> None:
    layer = Layer.random(32, 64)
    tensors = awq_tensors(layer) if offset is None else gptq_tensors(layer, offset, False)
    check(read({**EXPORTED, **more}, tensors), layer)


# --- configurations ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"bits": 4, "group_size": 32, "desk_act": True}, "did you mean 'desc_act'"),
        ({"bits": 9, "group_size": 32}, "'bits' is 9"),
        ({"bits": True, "group_size": 32}, "'bits' is True"),
        ({"bits": "4", "group_size": 32}, "'bits' is '4'"),
        ({"bits": 4, "group_size": 0}, "'group_size' is 0"),
        ({"bits": 4, "group_size": -2}, "'group_size' is -2"),
        ({"bits": 4, "group_size": 1 << 70}, "'group_size' is"),
        ({"bits": 4, "is_marlin_format": True}, "'marlin'"),
        ({"bits": 4, "checkpoint_format": "gptq_p"}, "'gptq_p'"),
        ({"bits": 4, "checkpoint_format": "gptq", "format": "gptq_v2"}, "'format' is 'gptq_v2'"),
        ({"bits": 3, "pack_dtype": "int64"}, "'pack_dtype' is 'int64'"),
        ({"bits": 4, "rotation": "hadamard"}, "rotated"),
        ({"bits": 4, "data_type": "mx_fp"}, "'data_type' is 'mx_fp'"),
        ({"bits": 4, "dynamic": {"a": {"act_bits": 8}}}, "'act_bits' is 8"),
        ({"bits": 4, "dynamic": {"+:(": {}}}, "no regular expression"),
        ({"bits": 4, "dynamic": {"+:a": {"bitz": 8}}}, "'bitz' is unknown"),
        ({"bits": 4, "dynamic": {"a": 8}}, "keys and values"),
        ({"group_size": 32}, "'bits' is missing"),
    ],
)
def test_gptq_refuses_what_it_does_not_know(config: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError, match=f"^config.json.*{told}"):
        Gptq({"quant_method": "gptq", **config}, "config.json")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"bits": 4, "version": "gemv_fast"}, "'gemv_fast'"),
        ({"bits": 4, "version": "gemm", "format": "gemv"}, "contradict"),
        ({"bits": 3}, "'bits' is 3"),
        ({"bits": 4, "w_bit": 8}, "'w_bit' is 8"),
        ({"bits": 4, "zeropoint": True}, "did you mean 'zero_point'"),
    ],
)
def test_awq_refuses_what_it_does_not_know(config: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError, match=f"^config.json.*{told}"):
        Awq({"quant_method": "awq", **config}, "config.json")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"bits": 4, "data_type": "mx_fp"}, "'data_type' is 'mx_fp'"),
        ({"bits": 4, "act_bits": 8}, "'act_bits' is 8"),
        ({"bits": 4, "packing_format": "auto_round:fake"}, "'packing_format'"),
        ({"bits": 4, "sym": False}, "'packing_format' is missing"),
        ({"bits": 4, "super_bits": 6}, "'super_bits' is 6"),
        ({"bits": 4, "extra_config": {"lm_head": {"bits": 1}}}, "'bits' is 1"),
        ({"bits": 4, "extra_config": {"a": {"sym": "no"}}}, "'sym' is 'no'"),
    ],
)
def test_autoround_refuses_what_it_does_not_know(config: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError, match=f"^config.json.*{told}"):
        AutoRound({"quant_method": "auto-round", **config}, "config.json")
