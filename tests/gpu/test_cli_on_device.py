"""`humming run` where the kernel itself is executed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from humming import cli

pytestmark = pytest.mark.gpu


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    status = cli.main(["run", *words, "--check", "--json"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    told: dict[str, object] = json.loads(captured.out)
    return told


@pytest.mark.parametrize("activation", ["fp16", "bf16"])
@pytest.mark.parametrize("weight", ["int4_g128", "uint4_g64_zp", "uint4_g64_fzp", "int4"])
def test_run_executes_the_kernel(
    capsys: pytest.CaptureFixture[str], weight: str, activation: str
) -> None:
    if weight.endswith("_fzp") and activation == "bf16":
        weight += "_sbf16"  # a float zero point is subtracted in its own type
    formats = ("--weight", weight, "--activation", activation, "--bias")
    told = _run(capsys, "--random", "520x1088", *formats, "-m", "19")
    assert told["kernel_executed"] is True
    assert str(told["executed_on"]).startswith(f"{told['device']} (cuda:")
    assert told["passed"] is True


def test_run_executes_every_matrix_of_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save_file(
        {f"layers.{i}.weight": torch.randn(256, 512) for i in range(3)}, tmp_path / "m.safetensors"
    )
    told = _run(capsys, f"{tmp_path}/m.safetensors::*", "--activation", "bf16", "-m", "1")
    assert isinstance(told["results"], list)
    assert len(told["results"]) == 3
    assert told["passed"] is True


def test_device_that_is_not_present_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    present = cli.main(["devices", "--json"]) or json.loads(capsys.readouterr().out)["present"]
    other = "t4" if present[0]["row"] != "t4" else "a100"
    told = _run(capsys, "--random", "64x128", "--device", other)
    assert told["kernel_executed"] is False
    assert "present is" in str(told["executed_on"])
