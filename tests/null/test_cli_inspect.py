"""`humming inspect`: folders with and without tensors, for people and for programs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

Shell = Any  # of conftest.py, which tests do not import
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with a layer in act-order, one that is not quantized after all, and a head."""
    n, k = 8, 64
    tensors = {
        f"{UP}.qweight": torch.randint(-(1 << 31), 1 << 31, (k // 8, n)).to(torch.int32),
        f"{UP}.qzeros": torch.full((k // 32, n // 8), 0x77777777, dtype=torch.int32),
        f"{UP}.scales": (torch.rand(k // 32, n) + 0.1).half(),
        f"{UP}.g_idx": (torch.arange(k) % 2).int(),
        f"{DOWN}.weight": torch.randn(n, k).half(),
        "lm_head.weight": torch.randn(16, k).half(),
        "model.norm.weight": torch.ones(k),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": CONFIG}))
    return tmp_path


def test_what_the_configuration_says(humming: Shell, checkpoint: Path) -> None:
    told = humming.json("inspect", str(checkpoint))
    assert told["method"] == "gptq"
    assert told["configuration"].endswith("config.json: quantization_config")
    assert {row["module"]: (row["action"], row["weight"]) for row in told["modules"]} == {
        UP: ("quantized", "int4_g32"),
        DOWN: ("quantized", "int4_g32"),
        "lm_head": ("plain", None),
    }


def test_what_the_tensors_say(humming: Shell, checkpoint: Path) -> None:
    told = humming.json("inspect", str(checkpoint), "--read")
    rows = {row["module"]: row for row in told["modules"]}
    assert rows[UP]["read"] == "int4_g32"
    assert rows[UP]["shape"] == [8, 64]
    assert rows[UP]["bits_per_weight"] == 4.5
    assert rows[UP]["reordered"] is True
    assert rows[DOWN]["read"] == "torch.float16"
    assert "not quantized" in rows[DOWN]["notes"][0]
    assert humming("inspect", str(checkpoint), "--read") == 0
    assert "not quantized" in humming.out


def test_modules_that_cannot_be_read_fail(humming: Shell, checkpoint: Path) -> None:
    told = humming.json("inspect", str(checkpoint), "--read", "--module", "missing", status=1)
    assert "missing.weight is missing" in told["modules"][0]["error"]


def test_configurations_alone(humming: Shell, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert humming("inspect", str(checkpoint)) == 0
    assert "--module NAME" in humming.out
    assert humming("inspect", str(checkpoint), "--module", UP, "--module", "lm_head") == 0
    assert "int4_g32" in humming.out
    assert "lm_head is false" in humming.out


def test_globs_take_modules_of_the_tensors(humming: Shell, checkpoint: Path) -> None:
    told = humming.json("inspect", str(checkpoint), "--module", "*_proj")
    assert [row["module"] for row in told["modules"]] == [DOWN, UP]


@pytest.mark.parametrize("path", ["none", "."])
def test_paths_without_a_checkpoint(humming: Shell, tmp_path: Path, path: str) -> None:
    told = humming.json("inspect", str(tmp_path / path), status=2)
    assert told["error"]["type"] == "CheckpointError"
