"""`humming run`: what it computes, checks and says, with random matrices and those of files."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from humming import plugins, quantize
from humming.cli import execution, weights
from humming.errors import UnsupportedError
from humming.problem import GemmProblem

RANDOM = ("run", "--random", "80x192", "--weight", "int4_g64", "--activation", "fp16", "-m", "3")
Shell = Any  # of conftest.py, which tests do not import


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A file with two matrices of floats, and two tensors that are none."""
    tensors = {
        "layers.0.up_proj.weight": torch.randn(48, 128),
        "layers.0.down_proj.weight": torch.randn(32, 192, dtype=torch.bfloat16),
        "layers.0.norm.weight": torch.ones(48),
        "layers.0.ids": torch.zeros(4, 4, dtype=torch.int32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_run_without_an_accelerator_simulates_one(humming: Shell) -> None:
    told = humming.json(*RANDOM, "--check")
    assert told["kernel_executed"] is True
    assert told["executed_on"] == "sim:a100_80gb (cpu)"
    assert told["passed"] is True


@pytest.mark.parametrize("device", ["t4", "h200", "b300"])
def test_run_simulates_any_device_by_name(humming: Shell, device: str) -> None:
    told = humming.json(*RANDOM, "--device", f"sim:{device}", "--check")
    assert told["executed_on"] == f"sim:{device} (cpu)"
    assert told["passed"] is True


def test_run_says_that_the_kernel_did_not_run(humming: Shell) -> None:
    assert humming(*RANDOM, "--device", "a100", "--check") == 0
    line = humming.out.strip().splitlines()[-1]
    pattern = (
        r"executed on: reference arithmetic on the CPU \(no accelerator present\); "
        r"the a100_80gb kernel was compiled \(\d+ bytes, [^)]+\) but not executed"
    )
    assert re.fullmatch(pattern, line), line


@pytest.mark.parametrize("device", ["t4", "h100", "b300"])
def test_run_compiles_for_a_named_device(humming: Shell, device: str) -> None:
    told = humming.json(*RANDOM, "--device", device, "--check")
    assert told["device"] == device
    assert told["kernel_executed"] is False
    assert told["executed_on"] == "reference arithmetic on the CPU (no accelerator present)"
    (result,) = told["results"]
    assert result["kernel"]["bytes"] > 1000
    assert list(result["seconds"]) == list(execution.Job.STEPS)
    assert told["passed"] is True
    assert 0 < result["check"]["relative_error"] < result["check"]["relative_bound"] < 0.01


@pytest.mark.parametrize("weight", ["int4_g128", "int4", "uint4_g32_zp", "int4_g64"])
@pytest.mark.parametrize("activation", ["fp16", "bf16"], ids=lambda activation: f"x-{activation}")
def test_run_checks_formats(humming: Shell, weight: str, activation: str) -> None:
    words = ("--weight", weight, "--activation", activation, "--bias", "--check")
    told = humming.json("run", "--random", "70x320", *words, "-m", "5")
    assert told["passed"] is True


@pytest.mark.parametrize("out_dtype", ["fp16", "bf16", "fp32"])
def test_run_writes_any_output_type(humming: Shell, out_dtype: str) -> None:
    told = humming.json(*RANDOM, "--out-dtype", out_dtype, "--check")
    largest = {"fp16": 1e-2, "bf16": 1e-1, "fp32": 1e-3}[out_dtype]
    assert told["results"][0]["check"]["relative_bound"] < largest


def test_run_of_no_tokens(humming: Shell) -> None:
    words = ("run", "--random", "16x64", "--weight", "int4_g64", "-m", "0")
    told = humming.json(*words, "--check")
    assert told["passed"] is None
    assert told["results"][0]["check"] is None
    assert "nothing to check" in told["notes"][0]
    assert humming(*words, "--check") == 0
    assert "nothing to check" in humming.out
    assert "ok" not in humming.out.split()
    assert humming(*words) == 0
    assert "nothing to check" not in humming.out


def test_a_wrong_result_fails_the_check(humming: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    from humming import packing

    right: Callable[..., Any] = packing.pack

    def wrong(*arguments: Any, **keywords: Any) -> Any:
        packed = right(*arguments, **keywords)
        packed.codes[0, 0, 5] ^= 0x40  # one bit of one code
        return packed

    monkeypatch.setattr(packing, "pack", wrong)
    told = humming.json(*RANDOM, "--check", status=1)
    assert told["passed"] is False
    assert told["results"][0]["check"]["worst"] > 1
    assert humming(*RANDOM, "--check") == 1
    assert "check: FAILED" in humming.out
    assert humming(*RANDOM) == 0, "without --check nothing is compared"


def test_seed_makes_a_run_repeatable(humming: Shell) -> None:
    def error(*more: str) -> float:
        (result,) = humming.json(*RANDOM, "--check", *more)["results"]
        return float(result["check"]["relative_error"])

    fresh = humming.json(*RANDOM, "--check")
    assert error("--seed", "7") == error("--seed", "7") != error("--seed", "8")
    assert error("--seed", str(fresh["seed"])) == fresh["results"][0]["check"]["relative_error"]


def test_run_takes_a_tensor_of_a_file(humming: Shell, checkpoint: Path) -> None:
    told = humming.json("run", f"{checkpoint}::layers.0.up_proj.weight", "--check")
    (result,) = told["results"]
    assert (result["name"], result["n"], result["k"]) == ("layers.0.up_proj.weight", 48, 128)
    assert told["passed"] is True
    assert told["notes"] == []


def test_glob_runs_every_matrix_and_says_what_it_left_out(humming: Shell, checkpoint: Path) -> None:
    words = ("run", f"{checkpoint}::*", "--weight", "int4_g64", "--activation", "bf16", "--check")
    words += ("--device", "h100")
    told = humming.json(*words)
    assert {r["name"] for r in told["results"]} == {
        "layers.0.up_proj.weight",
        "layers.0.down_proj.weight",
    }
    assert "2 tensors that are no matrices of floats left out" in told["notes"][0]
    assert humming(*words) == 0
    assert "check: all ok of 2 matrices" in humming.out
    assert "left out" in humming.out
    assert "kernels were compiled" in humming.out


def test_run_on_a_present_device_runs_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    present = plugins.PresentDevice(1, "NVIDIA H200", "h200", plugin="nvidia")
    monkeypatch.setattr(plugins, "devices", lambda: plugins.PresentDevices([present], []))
    monkeypatch.setattr(plugins.installed(), "devices", lambda: plugins.devices())
    monkeypatch.setattr(plugins.installed(), "_seen", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert execution.choose_target(None).executed_on == "h200 (cuda:1)"
    assert execution.choose_target("h200").kernel_runs
    other = execution.choose_target("a100")
    assert not other.kernel_runs
    assert other.why_not == "present is h200, not a100_80gb"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    unusable = execution.choose_target(None)
    assert not unusable.kernel_runs
    assert "torch" in unusable.why_not


@pytest.mark.parametrize(
    ("pattern", "why", "offer"),
    [
        ("layers.0.up_porj.weight", "no such tensor", "layers.0.up_proj.weight"),
        ("layers.0.norm.weight", "shape [48]", "matrix"),
        ("layers.0.ids", "I32", "matrix"),
        ("*.ids", "1 tensors match, none", "2 matrices"),
    ],
    ids=["misspelt", "vector", "integers", "glob-of-integers"],
)
def test_wrong_tensor(checkpoint: Path, pattern: str, why: str, offer: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        weights.file_matrices([f"{checkpoint}::{pattern}"])
    assert why in error.value.why
    assert offer in error.value.possible


def test_file_that_is_no_checkpoint(humming: Shell, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("not a checkpoint")
    assert humming("run", f"{file}::*") == 2
    assert f"{file} cannot be read" in humming.err
    assert humming("run", f"{tmp_path}::*") == 2
    assert f"{tmp_path} is a folder; name a file in it" in humming.err
    assert humming("run", f"{tmp_path / 'absent'}::*") == 2
    assert "absent does not exist" in humming.err


def test_weights_that_cannot_be_quantized(humming: Shell, tmp_path: Path) -> None:
    weight = torch.randn(16, 64)
    weight[3, 5] = torch.nan
    save_file({"w": weight}, tmp_path / "m.safetensors")
    assert humming("run", f"{tmp_path}/m.safetensors::w", "--weight", "int4_g64") == 2
    assert "finite" in humming.err


def test_one_matrix_that_cannot_be_done_leaves_the_others(humming: Shell, tmp_path: Path) -> None:
    broken = torch.randn(16, 64)
    broken[3, 5] = torch.inf
    tensors = {"a": torch.randn(16, 64), "b": broken, "c": torch.randn(32, 64)}
    save_file(tensors, tmp_path / "m.safetensors")
    words = ("run", f"{tmp_path}/m.safetensors::*", "--weight", "int4_g64", "--check")
    told = humming.json(*words, status=2)
    assert [result["name"] for result in told["results"]] == ["a", "c"]
    assert all(result["check"]["passed"] for result in told["results"])
    assert told["passed"] is False
    (failed,) = told["failed"]
    assert failed["name"] == "b"
    assert "finite" in failed["message"]
    assert humming(*words) == 2
    assert re.search(r"^b: FAILED: .*finite", humming.out, re.MULTILINE)
    assert "all ok of 2 matrices" in humming.out


def test_only_matrices_that_cannot_be_done(humming: Shell, tmp_path: Path) -> None:
    broken = torch.full((16, 64), torch.nan)
    save_file({"a": broken, "b": broken.clone()}, tmp_path / "m.safetensors")
    assert humming("run", f"{tmp_path}/m.safetensors::*", "--weight", "int4_g64") == 2
    assert humming.out.count("FAILED") == 2


@pytest.mark.parametrize("expected_within", [True, False], ids=["within", "beyond"])
def test_an_infinite_bound_admits_overflow_but_no_nan(expected_within: bool) -> None:
    # Outputs that may exceed float16 have no bound, which proves nothing; NaN is never within one.
    x = torch.full((1, 64), 6e4, dtype=torch.float16)
    problem = GemmProblem.parse("int4_g64 x fp16", 16, 64)
    quantized = quantize(torch.ones(16, 64), problem.weight)
    result = torch.full((1, 16), torch.inf if expected_within else torch.nan, dtype=torch.float16)
    plan = SimpleNamespace(
        problem=problem,
        roundings={},
    )
    check = execution._compare(result, plan, x, quantized, None)  # type: ignore[arg-type]
    assert check.passed is False
    assert check.verdict == ("no verdict" if expected_within else "FAILED")
    assert (check.worst == 0) is expected_within


@pytest.fixture
def large(tmp_path: Path) -> str:
    """A file with a matrix of usual numbers, and one whose products leave float16."""
    beyond = torch.randn(48, 128)
    beyond[7] *= 1e5
    save_file({"usual": torch.randn(48, 128), "beyond": beyond}, tmp_path / "large.safetensors")
    return str(tmp_path / "large.safetensors")


def test_outputs_without_a_bound_are_no_verdict(humming: Shell, large: str) -> None:
    words = ("run", f"{large}::beyond", "--check", "-m", "3", "--weight", "int4_sfp32")
    words += ("--device", "a100", "--seed", "11")
    told = humming.json(*words, status=1)
    (result,) = told["results"]
    assert told["passed"] is result["check"]["passed"] is False
    why = result["check"]["no_verdict"]
    match = re.fullmatch(r"(\d) of 144 outputs have no bound, since they may exceed .*65504", why)
    assert match
    assert 1 <= int(match[1]) <= 3
    assert humming(*words) == 1
    assert f"check: no verdict: {why}; relative error" in humming.out
    assert humming.json(*words, "--out-dtype", "fp32")["passed"] is True


def test_a_table_tells_what_has_no_verdict(humming: Shell, large: str) -> None:
    words = ("run", f"{large}::*", "--check", "--weight", "int4_sfp32", "--device", "a100")
    assert humming(*words) == 1
    assert "beyond: no verdict: " in humming.out
    assert "check: 1 no verdict of 2 matrices" in humming.out


def test_an_output_beyond_its_bound_fails_whatever_has_none(
    humming: Shell, large: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from humming import reference

    right: Callable[..., Any] = reference.matmul

    def wrong(*arguments: Any, **keywords: Any) -> Any:
        out = right(*arguments, **keywords)
        if len(arguments) == 4:  # the product that is rounded, not the one it is compared with
            out[0, 3] += 1
        return out

    monkeypatch.setattr(reference, "matmul", wrong)
    words = ("run", f"{large}::beyond", "--weight", "int4_sfp32", "--device", "a100", "--check")
    (result,) = humming.json(*words, status=1)["results"]
    assert result["check"]["no_verdict"] == ""
    assert humming(*words) == 1
    assert "check: FAILED" in humming.out
