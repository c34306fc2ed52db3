"""What the configurations of public checkpoints say of their modules: floats and their kin."""

import doctest
import json
from pathlib import Path
from typing import Any

import pytest

from humming.checkpoints import patterns
from humming.checkpoints.bitnet import BitNet
from humming.checkpoints.compressed_tensors import CompressedTensors
from humming.checkpoints.decisions import Decision
from humming.checkpoints.fp8 import Fp8
from humming.checkpoints.gguf import Gguf
from humming.checkpoints.modelopt import ModelOpt
from humming.checkpoints.mxfp4 import Mxfp4
from humming.checkpoints.quark import Quark
from humming.errors import CheckpointError

CONFIGS = Path(__file__).parent / "configs"
METHODS = (BitNet, CompressedTensors, Fp8, Gguf, ModelOpt, Mxfp4, Quark)

PLAIN = "plain"
# File, module, and the formats of weights and activations, or what happens instead.
EXPECTED: tuple[tuple[str, str, str], ...] = (
    ("bitnet_b158_2b4t_bf16_online", "model.layers.0.mlp.up_proj", PLAIN),
    ("bitnet_llama3_8b_hf1bit", "model.layers.0.mlp.up_proj", "int2_tensor_sfp32 x int8"),
    ("bitnet_llama3_8b_hf1bit", "lm_head", PLAIN),
    ("ct_int4_asym_g32_glm53_flash_awq", "model.layers.0.mlp.up_proj", "uint4_g32_zp_sbf16"),
    ("ct_int4_asym_g32_glm53_flash_awq", "lm_head", PLAIN),
    # Both groups take layers 56 to 63; the first one holds.
    ("ct_mixed_fp8_nvfp4_qwen36_dense", "model.layers.55.mlp.up_proj", "nvfp4 x nvfp4"),
    ("ct_mixed_fp8_nvfp4_qwen36_dense", "model.layers.56.mlp.up_proj", "fp8_sbf16 x fp8"),
    ("ct_mixed_fp8_nvfp4_qwen36_dense", "model.layers.3.self_attn.q_proj", "fp8_sbf16 x fp8"),
    ("ct_mixed_fp8_nvfp4_qwen36_dense", "lm_head", "fp8_sbf16 x fp8"),
    ("ct_mixed_fp8_nvfp4_qwen36_dense", "model.visual.blocks.0.mlp.fc1", PLAIN),
    ("ct_mixed_fp8_nvfp4_qwen36_moe", "model.layers.1.mlp.experts.77.up_proj", "nvfp4 x nvfp4"),
    ("ct_mixed_fp8_nvfp4_qwen36_moe", "model.layers.1.mlp.gate", PLAIN),
    ("ct_mxfp4_kimi_k3_nested_text_config", "model.layers.9.moe.experts.0.w1", "mxfp4"),
    ("ct_mxfp4_kimi_k3_nested_text_config", "vision_tower.encoder.blocks.0.mlp.fc0", PLAIN),
    ("ct_mxfp4_kimi_k3_nested_text_config", "layers.0.mlp.gate_up_proj", PLAIN),
    ("ct_mxfp8_qwen25_05b", "model.layers.0.mlp.up_proj", "mxfp8 x mxfp8"),
    ("ct_nvfp4_qwen3_coder_next", "model.layers.1.linear_attn.out_proj", "nvfp4 x nvfp4"),
    ("ct_nvfp4_qwen3_coder_next", "model.layers.0.linear_attn.out_proj", PLAIN),
    ("ct_w8a8_autoround_provider", "model.layers.0.mlp.up_proj", "int8_sbf16 x int8"),
    # `.*mlp*` is an expression: "ml" and any number of p.
    ("ct_w8a8_int8_step35_flash", "model.layers.0.mlp.up_proj", PLAIN),
    ("ct_w8a8_int8_step35_flash", "model.layers.4.moe.up_proj", "int8_sbf16 x int8"),
    ("ct_w8a8_int8_step35_flash", "model.layers.4.moe.gate", PLAIN),
    ("fp8_block_deepseek_v3", "model.layers.9.mlp.experts.3.up_proj", "fp8_block128 x fp8_g128"),
    ("fp8_block_deepseek_v3", "model.layers.9.mlp.gate", PLAIN),
    ("fp8_block_deepseek_v3", "lm_head", PLAIN),
    ("fp8_block_glm5", "model.layers.3.mlp.gate", PLAIN),
    ("fp8_block_glm5", "model.layers.3.mlp.gate_proj", "fp8_block128 x fp8_g128"),
    ("fp8_block_glm5", "model.layers.0.self_attn.indexers_proj", PLAIN),
    ("fp8_block_minimax_m25", "model.layers.0.block_sparse_moe.gate", PLAIN),
    ("fp8_block_minimax_m25", "model.layers.0.mlp.gate_proj", "fp8_block128 x fp8_g128"),
    ("fp8_block_null_skip", "model.layers.0.mlp.gate_proj", "fp8_block128 x fp8_g128"),
    ("fp8_block_null_skip", "lm_head", PLAIN),
    ("fp8_block_qwen3_235b", "model.layers.93.mlp.gate", PLAIN),
    ("fp8_block_qwen3_235b", "model.layers.93.self_attn.q_proj", "fp8_block128 x fp8_g128"),
    ("fp8_block_qwen3_30b_a3b", "model.layers.1.mlp.gate", PLAIN),
    ("fp8_block_qwen3_30b_a3b", "model.layers.1.self_attn.q_proj", "fp8_block128 x fp8_g128"),
    (
        "fp8_block_ue8m0_deepseek_v4_flash",
        "layers.1.attn.wq_a",
        "fp8_block128 x fp8_g128_sue8m0",
    ),
    ("modelopt_mixed_deepseek_v4_flash_hf_quant", "layers.1.ffn.experts.5.w1", "nvfp4 x nvfp4"),
    ("modelopt_mixed_deepseek_v4_flash_hf_quant", "layers.1.ffn.shared_experts.w1", PLAIN),
    ("modelopt_mixed_deepseek_v4_flash_hf_quant", "layers.1.attn.wq_a", PLAIN),
    (
        "modelopt_mixed_nemotron_lightning_hf_quant",
        "backbone.layers.1.mixer.experts.10.up_proj",
        "nvfp4",
    ),
    (
        "modelopt_mixed_nemotron_lightning_hf_quant",
        "backbone.layers.0.mixer.in_proj",
        "fp8_tensor x fp8_tensor",
    ),
    ("modelopt_mixed_nemotron_lightning_hf_quant", "backbone.layers.1.mixer.gate", PLAIN),
    ("modelopt_mixed_qwen36_27b_hf_quant", "model.language_model.layers.0.mlp.up_proj", "nvfp4"),
    ("modelopt_mixed_qwen36_27b_hf_quant", "mtp.layers.0.mlp.up_proj", PLAIN),
    (
        "modelopt_mixed_qwen36_35b_moe_hf_quant",
        "model.language_model.layers.0.mlp.experts.17.up_proj",
        "nvfp4",
    ),
    ("modelopt_mixed_qwen36_35b_moe_hf_quant", "model.language_model.layers.0.mlp.gate", PLAIN),
    ("modelopt_nvfp4_deepseek_v31_hf_quant", "model.layers.1.self_attn.q_a_proj", PLAIN),
    ("modelopt_nvfp4_deepseek_v31_hf_quant", "model.layers.1.self_attn.o_proj", "nvfp4 x nvfp4"),
    ("modelopt_nvfp4_deepseek_v31_hf_quant", "model.layers.61.mlp.up_proj", PLAIN),
    ("modelopt_nvfp4_gemma4_26b_config", "model.language_model.layers.0.mlp.up_proj", PLAIN),
    (
        "modelopt_nvfp4_gemma4_26b_config",
        "model.language_model.layers.0.moe.experts.3.up_proj",
        "nvfp4 x nvfp4",
    ),
    # "model.layers.1.*" is not to take layer 10, "model.layers.0*" no layer but 0.
    ("modelopt_nvfp4_glm51_config", "model.layers.1.mlp.up_proj", PLAIN),
    ("modelopt_nvfp4_glm51_config", "model.layers.0.mlp.up_proj", PLAIN),
    ("modelopt_nvfp4_glm51_config", "model.layers.10.mlp.experts.0.up_proj", "nvfp4 x nvfp4"),
    ("modelopt_nvfp4_glm51_hf_quant", "model.layers.10.mlp.experts.0.up_proj", "nvfp4 x nvfp4"),
    ("modelopt_nvfp4_glm51_hf_quant", "model.layers.10.self_attn.o_proj", PLAIN),
    ("modelopt_nvfp4_kimi_k25_config", "language_model.lm_head", PLAIN),
    (
        "modelopt_nvfp4_kimi_k25_config",
        "language_model.model.layers.3.mlp.experts.1.up_proj",
        "nvfp4 x nvfp4",
    ),
    ("modelopt_nvfp4_nemotron_super_hf_quant", "backbone.layers.0.mixer.up", "nvfp4 x nvfp4"),
    (
        "modelopt_nvfp4_qwen35_397b_config",
        "model.language_model.layers.7.mlp.shared_expert.up_proj",
        PLAIN,
    ),
    (
        "modelopt_nvfp4_qwen35_397b_config",
        "model.language_model.layers.7.mlp.experts.0.up_proj",
        "nvfp4 x nvfp4",
    ),
    ("modelopt_nvfp4_qwen3_235b_hf_quant", "lm_head", PLAIN),
    ("modelopt_nvfp4_qwen3_235b_hf_quant", "model.layers.0.self_attn.o_proj", "nvfp4 x nvfp4"),
    ("mxfp4_gpt_oss_20b", "model.layers.3.mlp.experts.7.down_proj", "mxfp4"),
    ("mxfp4_gpt_oss_20b", "model.layers.3.self_attn.q_proj", PLAIN),
    ("mxfp4_gpt_oss_20b", "model.layers.3.mlp.router", PLAIN),
    ("mxfp8_minimax_m3", "language_model.model.layers.10.mlp.up_proj", "mxfp8 x mxfp8"),
    ("mxfp8_minimax_m3", "language_model.model.layers.10.block_sparse_moe.gate", PLAIN),
    ("mxfp8_minimax_m3", "vision_tower.layers.0.mlp.fc1", PLAIN),
    ("quark_mxfp4_deepseek_v32", "model.layers.3.mlp.experts.0.up_proj", "mxfp4 x mxfp4"),
    ("quark_mxfp4_deepseek_v32", "model.layers.3.mlp.gate", PLAIN),
    ("quark_mxfp4_deepseek_v32", "model.layers.61.mlp.experts.0.up_proj", PLAIN),
    (
        "quark_mxfp4_plus_blockfp8_glm53",
        "model.language_model.layers.7.self_attn.q_a_proj",
        "fp8_block128",
    ),
    (
        "quark_mxfp4_plus_blockfp8_glm53",
        "model.language_model.layers.8.self_attn.q_a_proj",
        "mxfp4 x mxfp4",
    ),
    ("quark_mxfp4_plus_blockfp8_glm53", "model.visual.blocks.0.attn.qkv_proj", PLAIN),
    ("w4afp8_glm52", "model.layers.3.mlp.experts.0.up_proj", "int4_g128_sbf16 x fp8_tensor"),
    ("w4afp8_glm52", "model.layers.3.self_attn.o_proj", "fp8_block128 x fp8_g128"),
)


def config_of(file: str) -> dict[str, Any]:
    whole = json.loads((CONFIGS / f"{file}.json").read_text())
    for outer in (whole, whole.get("text_config", {})):
        if "quantization_config" in outer:
            return dict(outer["quantization_config"])
    return dict(whole)


def decided(file: str, module: str) -> Decision:
    config = config_of(file)
    (method,) = [method for method in METHODS if method.recognizes(config)]
    return method(config, file).decide(module)


@pytest.mark.parametrize(("file", "module", "expected"), EXPECTED)
def test_decisions(file: str, module: str, expected: str) -> None:
    found = decided(file, module)
    shown = found.action
    if found.weight is not None:
        activation = "" if found.activation is None else f" x {found.activation}"
        shown = f"{found.weight}{activation}"
    assert shown == expected, found.why
    assert found.module == module
    assert found.why


def test_every_config_has_an_expectation() -> None:
    recognized = {
        path.stem
        for path in CONFIGS.glob("*.json")
        if any(method.recognizes(config_of(path.stem)) for method in METHODS)
    }
    assert recognized == {file for file, _, _ in EXPECTED}


@pytest.mark.parametrize("file", sorted({file for file, _, _ in EXPECTED}))
def test_unknown_keys_do_not_pass(file: str) -> None:
    config = config_of(file)
    (method,) = [method for method in METHODS if method.recognizes(config)]
    with pytest.raises(CheckpointError, match="'rotation'") as error:
        method({**config, "rotation": "hadamard"}, "config.json")
    assert "config.json" in str(error.value)


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("ct_w8a8_autoround_provider", {"transform_config": {"R1": {}}}, "rotations"),
        ("ct_w8a8_autoround_provider", {"format": "gguf"}, "'gguf'"),
        ("ct_w8a8_autoround_provider", {"ignore": ["re:("]}, "regular expression"),
        ("ct_w8a8_autoround_provider", {"ignore": "lm_head"}, "'lm_head'"),
        ("fp8_block_deepseek_v3", {"fmt": "e5m2"}, "e4m3"),
        ("fp8_block_deepseek_v3", {"weight_block_size": [128]}, "weight_block_size"),
        ("fp8_block_deepseek_v3", {"activation_scheme": "per_tensor"}, "possible: dynamic"),
        ("modelopt_nvfp4_nemotron_super_hf_quant", {"quantization": None}, "missing"),
        ("bitnet_llama3_8b_hf1bit", {"use_rms_norm": True}, "normalized"),
        ("quark_mxfp4_deepseek_v32", {"global_quant_config": []}, "no Mapping"),
    ],
)
def test_configs_that_cannot_be_honoured(file: str, change: dict[str, Any], told: str) -> None:
    config = config_of(file)
    (method,) = [method for method in METHODS if method.recognizes(config)]
    with pytest.raises(CheckpointError, match=told):
        method({**config, **change}, "config.json")


def test_groups_that_are_not_served_are_refused_by_module() -> None:
    config = config_of("ct_w8a8_autoround_provider")
    config["config_groups"]["group_0"]["input_activations"].update(dynamic=False, symmetric=False)
    found = CompressedTensors(config, "config.json").decide("model.layers.0.mlp.up_proj")
    assert found.action == "refused"
    assert "zero point" in found.why


@pytest.mark.parametrize("algorithm", ["W4A8_AWQ", "INT3_MAGIC"])
def test_algorithms_that_are_not_read(algorithm: str) -> None:
    config = {"quantization": {"quant_algo": algorithm}}
    found = ModelOpt(config, "hf_quant_config.json").decide("model.layers.0.mlp.up_proj")
    assert found.action == "refused"
    assert algorithm in found.why


def test_examples_of_patterns() -> None:
    assert doctest.testmod(patterns).failed == 0
