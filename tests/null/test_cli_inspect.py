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
    assert "has no module 'missing'" in told["modules"][0]["error"]


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


def test_what_multiplies_each_layer(humming: Shell, checkpoint: Path) -> None:
    """Its activations, instruction, time and bound, on a device that need not be there."""
    told = humming.json("inspect", str(checkpoint), "--device", "h200", "-m", "16")
    rows = {row["module"]: row for row in told["modules"]}
    assert told["device"] == "h200"
    assert rows[UP]["bytes"] == 8 * 64 // 2 + 2 * 8 * 2
    assert rows[UP]["runs"].startswith("bf16: ")
    assert (rows[UP]["m"], rows[UP]["bound"]) == (16, "overhead")
    assert rows[UP]["us"] > 0
    assert "runs" not in rows[DOWN]
    assert humming("inspect", str(checkpoint), "--device", "t4") == 0
    assert "fp16: mma_sync" in humming.out.replace("\n", " ")
    assert "on t4, 1 tokens" in humming.out


def test_formats_that_a_device_does_not_multiply_are_told(
    humming: Shell, checkpoint: Path, tmp_path: Path
) -> None:
    config = CONFIG | {"group_size": 40, "desc_act": False}
    (checkpoint / "config.json").write_text(json.dumps({"quantization_config": config}))
    n, k = 8, 80
    tensors = {
        f"{UP}.qweight": torch.zeros(k // 8, n, dtype=torch.int32),
        f"{UP}.qzeros": torch.full((2, n // 8), 0x77777777, dtype=torch.int32),
        f"{UP}.scales": torch.ones(2, n).half(),
    }
    save_file(tensors, checkpoint / "model.safetensors")
    (row,) = humming.json("inspect", str(checkpoint), "--device", "h200")["modules"]
    assert (row["read"], row["runs"]) == ("int4_g40", None)
    assert "40 values of K" in row["refusal"]


def test_a_configuration_alone_has_no_sizes(humming: Shell, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    words = ("inspect", str(checkpoint), "--device", "h20", "--module", UP)
    told = humming.json(*words)
    assert told["modules"][0]["weight"] == "int4_g32"
    assert "humming explain" in told["notes"][-1]


def test_files_of_packed_weights(humming: Shell, checkpoint: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed" / "model.safetensors"
    packed.parent.mkdir()
    assert humming("pack", str(checkpoint), "--output", str(packed)) == 0
    for path in (packed, packed.parent):
        told = humming.json("inspect", str(path), "--device", "rtx4090")
        (row,) = told["modules"]
        assert told["method"] == "packed weights"
        assert (row["module"], row["weight"], row["shape"]) == (UP, "int4_g32", [8, 64])
        assert row["runs"].startswith("bf16: ")
        assert row["bytes"] > 8 * 64 // 2
    told = humming.json("inspect", str(packed), "--module", "nothing", status=2)
    assert UP in told["error"]["message"]


def test_globs_of_nothing_are_told(humming: Shell, checkpoint: Path) -> None:
    told = humming.json("inspect", str(checkpoint), "--module", "*foo*", status=2)
    assert "no module is called '*foo*'" in told["error"]["message"]
    assert "lm_head" in told["error"]["message"]
