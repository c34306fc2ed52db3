"""Whole checkpoints: configurations of public models, folders of every form, and damaged ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import humming
from humming import reference
from humming.checkpoints.checkpoint import Checkpoint, load_linear
from humming.checkpoints.methods import METHODS, find_config, method_of
from humming.checkpoints.tensors import TensorSource
from humming.errors import CheckpointError
from humming.quantized import QuantizedWeight

CONFIGS = Path(__file__).parent / "configs"
PLAIN = "plain"

# File, module, and its format, or that it is left alone.
EXPECTED: tuple[tuple[str, str, str], ...] = (
    ("gptq_w3_g128_descact_genz70b", "model.layers.0.mlp.up_proj", "int3_g128"),
    ("gptq_w3_g128_descact_genz70b", "lm_head", PLAIN),
    ("gptq_w3_g128_descact_genz70b", "model.embed_tokens", PLAIN),
    # A head in 8 bits: lm_head says whether, the rule says how.
    ("gptq_w4_dynamic_lmhead8_qwen38_flash", "lm_head", "int8_g128"),
    ("gptq_w4_dynamic_lmhead8_qwen38_flash", "model.layers.1.mlp.gate", PLAIN),
    ("gptq_w4_dynamic_lmhead8_qwen38_flash", "model.layers.1.mlp.gate_proj", "int4_g128"),
    ("gptq_w4_dynamic_lmhead8_qwen38_flash", "model.layers.48.mlp.gate_proj", PLAIN),
    ("gptq_w4_dynamic_lmhead8_qwen38_flash", "model.layers.4.mlp.gate_proj", "int4_g128"),
    ("gptq_w4_dynamic_lmhead8_qwen38_flash", "model.layers.4.ple.proj", PLAIN),
    ("gptq_w4_dynamic_lmhead8_qwen38_flash", "model.layers.4.people.proj", "int4_g128"),
    ("gptq_w4_dynamic_negative_minicpm_sala", "model.layers.0.self_attn.o_gate", PLAIN),
    ("gptq_w4_dynamic_negative_minicpm_sala", "model.layers.0.self_attn.o_proj", "int4_g128"),
    ("gptq_w4_g128_minimal_wizard_mega13b", "model.layers.0.mlp.up_proj", "int4_g128"),
    ("gptq_w4_hf_transformers_keys_llama2", "model.layers.0.mlp.up_proj", "int4_g128"),
    ("gptq_w4_hf_transformers_keys_llama2", "visual.blocks.0.mlp.fc1", PLAIN),
    ("gptq_w8_in_config_json_qwen14b", "transformer.h.0.attn.c_attn", "int8_g128"),
    ("gptqmodel_awq_sym_false_qwen3_8b", "model.layers.0.mlp.up_proj", "uint4_g128_zp"),
    ("awq_gemm_visual_qwen2_vl", "visual.blocks.0.attn.qkv", PLAIN),
    ("awq_gemm_visual_qwen2_vl", "model.layers.0.mlp.up_proj", "uint4_g128_zp"),
    ("awq_gemm_visual_qwen2_vl", "lm_head", PLAIN),
    ("awq_gemm_dotted_fragments_deepseek_v32", "model.layers.1.mlp.up_proj", PLAIN),
    ("awq_gemm_dotted_fragments_deepseek_v32", "model.layers.10.mlp.up_proj", "uint4_g128_zp"),
    ("awq_gemm_dotted_fragments_deepseek_v32", "model.layers.10.mlp.gate", PLAIN),
    ("awq_gemm_dotted_fragments_deepseek_v32", "model.layers.10.mlp.gate_proj", "uint4_g128_zp"),
    ("awq_gemm_dotted_fragments_deepseek_v32", "model.layers.10.self_attn.indexer.wk", PLAIN),
    ("awq_legacy_quant_config", "model.layers.0.mlp.up_proj", "uint4_g128_zp"),
    ("autoround_w4_block_name_zr1", "model.layers.0.mlp.up_proj", "int4_g128"),
    ("autoround_w4_block_name_zr1", "model.visual.0.fc", PLAIN),
    ("autoround_w4_block_name_zr1", "lm_head", PLAIN),
    ("autoround_w4g128_extra_config_grug27b", "lm_head", PLAIN),
    (
        "autoround_w4g128_extra_config_grug27b",
        "model.language_model.layers.0.linear_attn.norm",
        PLAIN,
    ),
    (
        "autoround_w4g128_extra_config_grug27b",
        "model.language_model.layers.0.linear_attn.in_proj",
        "int4_g128",
    ),
)


@pytest.mark.parametrize(("file", "module", "expected"), EXPECTED)
def test_public_configurations(file: str, module: str, expected: str) -> None:
    decision = Checkpoint.open(CONFIGS / f"{file}.json").decide(module)
    found = decision.weight.name if decision.weight else decision.action
    assert found == expected, decision.why
    assert decision.why


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_every_public_configuration_has_one_method(path: Path) -> None:
    found = find_config(path)
    assert found is not None
    config, where = found
    assert sum(method.recognizes(config) for method in METHODS) == 1
    assert method_of(config, where).decide("model.layers.3.mlp.up_proj").why


# --- folders -----------------------------------------------------------------------------------

MODULE = "model.layers.0.mlp.up_proj"
CONFIG: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}


def _tensors(n: int = 8, k: int = 64) -> dict[str, torch.Tensor]:
    return {
        f"{MODULE}.qweight": torch.randint(-(1 << 31), 1 << 31, (k // 8, n)).to(torch.int32),
        f"{MODULE}.qzeros": torch.full((k // 32, n // 8), 0x77777777, dtype=torch.int32),
        f"{MODULE}.scales": (torch.rand(k // 32, n) + 0.1).half(),
        "lm_head.weight": torch.randn(16, k).half(),
    }


def _folder(path: Path, config: Any = None, name: str = "config.json") -> Path:
    save_file(_tensors(), path / "model.safetensors")
    (path / name).write_text(json.dumps({"quantization_config": config or CONFIG}))
    return path


@pytest.mark.parametrize("name", ["config.json", "quantize_config.json", "quant_config.json"])
def test_load_linear_from_a_folder_or_a_file(tmp_path: Path, name: str) -> None:
    folder = _folder(tmp_path, name=name)
    for path in (folder, folder / "model.safetensors", str(folder)):
        linear = humming.load_linear(path, MODULE)
        assert isinstance(linear.weight, QuantizedWeight)
        assert linear.weight.spec.name == "int4_g32"
        assert reference.dequantize(linear.weight).shape == (8, 64)
        assert isinstance(load_linear(path, "lm_head").weight, torch.Tensor)
    assert Checkpoint.open(folder).modules() == ("lm_head", MODULE)


def test_configurations_inside_others(tmp_path: Path) -> None:
    nested = {"model_type": "x", "text_config": {"quantization_config": CONFIG}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    opened = Checkpoint.open(tmp_path)
    assert opened.where.endswith("config.json: text_config.quantization_config")
    assert opened.decide(MODULE).action == "quantized"
    with pytest.raises(CheckpointError, match="holds no tensors"):
        opened.read(MODULE)


def test_a_second_configuration_is_told(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    assert not load_linear(folder, MODULE).notes
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert Checkpoint.open(folder).method.name == "gptq"  # type: ignore[union-attr]
    assert "hf_quant_config.json holds" in load_linear(folder, MODULE).notes[0]


def test_plain_checkpoints_have_no_method(tmp_path: Path) -> None:
    save_file({"a.weight": torch.randn(4, 8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    opened = Checkpoint.open(tmp_path)
    assert opened.method is None
    assert opened.read("a").weight.shape == (4, 8)
    with pytest.raises(CheckpointError, match=r"b\.weight is missing"):
        opened.read("b")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "no object of keys and values"),
        ("\udcff", "cannot be read as JSON"),
        ("{" + '"a":{' * 100_000, "cannot be read as JSON"),
        ('{"quantization_config": 4}', "quantization_config is no object"),
        ('{"quantization_config": {"quant_method": "exl3"}}', "'exl3' is unknown"),
        ('{"quantization_config": {}}', "no method is named"),
        ('{"quantization_config": {"quant_method": ["gptq"]}}', "is unknown"),
        ('{"quantization_config": {"quant_method": "gptq", "bits": 4, "bits": 8}}', "twice"),
        ('{"quantization_config": {"quant_method": "gptq", "bits": NaN}}', "'bits' is nan"),
    ],
)
def test_configurations_that_are_none(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=f"config.json.*{told}"):
        Checkpoint.open(tmp_path)


def test_paths_with_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        Checkpoint.open(tmp_path / "none")
    with pytest.raises(CheckpointError, match="neither tensors nor a configuration"):
        Checkpoint.open(tmp_path)


# --- damage ------------------------------------------------------------------------------------

NAMES = ("qweight", "qzeros", "scales", "g_idx", "bias")
DTYPES = (torch.int32, torch.int64, torch.uint8, torch.float16, torch.float64, torch.bool)
SHAPES = st.lists(st.integers(0, 9), max_size=3)
INTEGER_CONFIGS = (
    CONFIG,
    {**CONFIG, "sym": False, "desc_act": True},
    {**CONFIG, "quant_method": "awq"},
    {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"},
    {"quant_method": "auto-round", "bits": 4, "group_size": 16},
    {**CONFIG, "quant_method": "auto-round", "packing_format": "auto_round:auto_awq"},
)


@given(
    config=st.sampled_from(INTEGER_CONFIGS),
    damaged=st.dictionaries(
        st.sampled_from(NAMES), st.none() | st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1
    ),
)
def test_damaged_tensors_are_read_or_refused(
    config: dict[str, Any], damaged: dict[str, tuple[torch.dtype, list[int]] | None]
) -> None:
    tensors = _tensors()
    for name, tensor in damaged.items():
        if tensor is None:
            tensors.pop(f"{MODULE}.{name}", None)
        else:
            tensors[f"{MODULE}.{name}"] = torch.ones(tensor[1], dtype=tensor[0])
    method = method_of(config, "config.json")
    try:
        linear = method.read(MODULE, method.decide(MODULE), TensorSource(tensors, "model"))
    except CheckpointError as error:
        told = str(error)
    else:
        assert isinstance(linear.weight, QuantizedWeight)
        told = f"model: {MODULE}"
    assert "model" in told
    assert MODULE in told


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_scales_that_are_no_numbers(value: float) -> None:
    tensors = _tensors()
    tensors[f"{MODULE}.scales"][1, 3] = value
    method = method_of(CONFIG, "config.json")
    with pytest.raises(CheckpointError, match=r"scales is no finite number at \[3, 1\]"):
        method.read(MODULE, method.decide(MODULE), TensorSource(tensors, "model"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
KEYS = st.sampled_from(
    (
        *("bits", "group_size", "sym", "desc_act", "dynamic", "extra_config", "version", "format"),
        *("modules_to_not_convert", "block_name_to_quantize", "lm_head", "packing_format", "w_bit"),
    )
)


@given(
    named=st.sampled_from([method.name for method in METHODS]),
    config=st.dictionaries(KEYS | st.text(max_size=8), JSON, max_size=6),
)
def test_hostile_configurations_are_read_or_refused(named: str, config: dict[str, Any]) -> None:
    config = {"bits": 4, "group_size": 32, **config, "quant_method": named}
    try:
        told = method_of(config, "config.json").decide(MODULE).module
    except CheckpointError as error:
        told = str(error)
    assert told == MODULE or told.startswith("config.json")
