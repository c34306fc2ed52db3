"""`humming pack`: a checkpoint as one file, for people and for programs."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from humming import load_model

Shell = Any  # of conftest.py, which tests do not import
UP, DOWN = "layers.0.up_proj", "layers.0.down_proj"
N, K = 16, 64


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two 8-bit layers with float32 scales, one of which has a format that is refused."""
    algorithms = {UP: {"quant_algo": "FP8"}, DOWN: {"quant_algo": "INT8_SQ"}}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    weight = {
        "weight": torch.randn(N, K).to(torch.float8_e4m3fn),
        "weight_scale": torch.tensor(0.5),
        "input_scale": torch.tensor(0.25),
    }
    tensors = {f"{module}.{name}": weight[name].clone() for module in (UP, DOWN) for name in weight}
    path = tmp_path / "model"
    path.mkdir()
    save_file({**tensors, "norm.weight": torch.ones(K)}, path / "model.safetensors")
    whole = {"quantization_config": {**config, "quantized_layers": algorithms}}
    (path / "config.json").write_text(json.dumps(whole))
    return path


def test_refused_modules_stop_it(humming: Shell, checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "out" / "packed.safetensors"
    told = humming.json("pack", str(checkpoint), "--output", str(output), status=2)
    assert "1 modules cannot be read; the first is layers.0.down_proj" in told["error"]["message"]
    assert not output.parent.exists()


def test_a_file_is_written(humming: Shell, checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "packed.safetensors"
    words = ("pack", str(checkpoint), "--output", str(output), "--skip-refused")
    told = humming.json(*words)
    assert (told["layers"], told["tensors"]) == (1, 1)
    assert told["formats"] == {"fp8_tensor x fp8_tensor": 1}
    assert set(told["skipped"]) == {DOWN}
    assert told["bytes"] == output.stat().st_size
    layer = load_model(output).layers[UP]
    assert float(layer.activation_scale) == 0.25
    assert humming(*words) == 0
    assert "1 layers and 1 other tensors" in humming.out
    assert f"left out: {DOWN}" in humming.out


def test_for_other_activations(humming: Shell, checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "packed.safetensors"
    words = ("--output", str(output), "--skip-refused", "--activation", "bf16")
    told = humming.json("pack", str(checkpoint), *words, "--scale-dtype", "float16")
    assert told["formats"] == {"fp8_tensor_sfp16 x bfloat16": 1}


@pytest.mark.parametrize(
    ("output", "told"),
    [
        ("model/packed.safetensors", "another folder"),
        ("packed.bin", "End its name"),
        ("file/packed.safetensors", "cannot be written"),
    ],
)
def test_outputs_that_cannot_be(
    output: str, told: str, humming: Shell, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    before = sorted(os.listdir(tmp_path)) + sorted(os.listdir(checkpoint))
    words = ("--output", str(tmp_path / output), "--skip-refused")
    error = humming.json("pack", str(checkpoint), *words, status=2)["error"]
    assert told in error["message"]
    assert sorted(os.listdir(tmp_path)) + sorted(os.listdir(checkpoint)) == before


def test_a_damaged_layer_leaves_nothing(humming: Shell, checkpoint: Path, tmp_path: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F8_E4M3"', b'"F8_E5M2"'))
    output = tmp_path / "out.safetensors"
    words = ("--output", str(output), "--skip-refused")
    told = humming.json("pack", str(checkpoint), *words, status=2)
    assert f"{UP}.weight is torch.float8_e5m2" in told["error"]["message"]
    assert sorted(os.listdir(tmp_path)) == ["model"]


def test_a_model_that_is_not_quantized(humming: Shell, tmp_path: Path) -> None:
    path, output = tmp_path / "model.safetensors", tmp_path / "packed.safetensors"
    save_file({f"{UP}.weight": torch.randn(N, K)}, path)
    told = humming.json("pack", str(path), "--output", str(output), status=2)
    assert "no layer of it is quantized" in told["error"]["message"]
    assert "quantize_model" in told["error"]["message"]
    assert not output.exists()


def test_beside_the_files_of_an_index(humming: Shell, checkpoint: Path) -> None:
    names = {f"{UP}.weight": "model.safetensors"}
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    output = checkpoint / "packed.safetensors"
    told = humming.json("pack", str(index), "--output", str(output), status=2)
    assert "another folder" in told["error"]["message"]
    assert not output.exists()


def test_notes_of_layers_are_told(humming: Shell, checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "packed.safetensors"
    tensors = {
        f"{UP}.weight": torch.randn(N, K).to(torch.float8_e4m3fn),
        f"{UP}.weight_scale": torch.zeros(()),
        f"{UP}.input_scale": torch.tensor(0.25),
        f"{UP}.checksum": torch.zeros(3),
    }
    save_file(tensors, checkpoint / "model.safetensors")
    words = ("pack", str(checkpoint), "--output", str(output))
    told = humming.json(*words)["layer_notes"][UP]
    assert any("checksum is not used" in note for note in told)
    assert any("1 scales of weight_scale are 0" in note for note in told)
    assert humming(*words) == 0
    assert "checksum" in humming.out
