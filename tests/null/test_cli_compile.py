"""`humming compile` and `humming doctor`."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from humming import plugins
from humming.capability import DeviceCapabilities
from humming.cli import shapes
from humming.errors import CheckpointError, CompileError, PluginError, UnsupportedError

Shell = Any  # of conftest.py, which tests do not import


def test_compile_fills_a_folder_that_serves_as_cache(
    humming: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("compile", "w4a16", "--shapes", "256x128,512x128", "-m", "1", "--device", "t4")
    told = humming.json(*words, "--device", "h100", "--output", str(tmp_path))
    assert {(row["device"], row["n"]) for row in told["kernels"]} == {
        (device, n) for device in ("t4", "h100") for n in (256, 512)
    }
    files = {path.stem for path in Path(told["folder"]).glob("*.kernel")}
    assert files == {row["key"] for row in told["kernels"]}
    monkeypatch.setenv("HUMMING_CACHE_DIR", str(tmp_path))
    again = humming.json(*words)
    assert all(row["from_cache"] for row in again["kernels"])
    assert humming(*words) == 0
    assert "distinct kernels in" in humming.out


def test_compile_tells_of_kernels_that_were_there_before(humming: Shell, tmp_path: Path) -> None:
    def compiled(problem: str, *more: str) -> Any:
        words = ("-n", "64", "-k", "128", "-m", "1", "--device", "h100", "--output", str(tmp_path))
        return humming.json("compile", problem, *words, *more)

    def kept() -> set[str]:
        return {path.stem for path in tmp_path.rglob("*.kernel")}

    first, second = compiled("int4 x fp16"), compiled("int4 x bf16")
    assert first["notes"] == []
    assert second["notes"] == ["1 other kernels were there before; --clean removes such"]
    keys = [told["kernels"][0]["key"] for told in (first, second)]
    assert kept() == set(keys)
    assert compiled("int4 x bf16", "--clean")["notes"] == ["1 other kernels were removed"]
    assert kept() == {keys[1]}
    assert compiled("int4 x bf16", "--clean")["notes"] == []
    told = humming.json("compile", "w4a16", "-n", "64", "-k", "64", "--clean", status=2)
    assert "--output" in told["error"]["possible"]


def test_compile_prepares_the_quantization_of_activations_too(
    humming: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("compile", "int8 x int8", "-n", "64", "-k", "96", "-m", "3", "--device", "sim:t4")
    humming.json(*words, "--output", str(tmp_path))
    monkeypatch.setenv("HUMMING_CACHE_DIR", str(tmp_path))
    kernels = set(tmp_path.rglob("*.kernel"))
    run = ("run", "--random", "64x96", "--weight", "int8", "--activation", "int8", "-m", "3")
    assert humming(*run, "--device", "sim:t4", "--check") == 0
    assert set(tmp_path.rglob("*.kernel")) == kernels, "nothing had to be compiled"


def test_compile_without_an_accelerator_asks_for_a_device(humming: Shell) -> None:
    words = ("compile", "w4a16", "-n", "64", "-k", "64", "-m", "1")
    error = humming.json(*words, status=2)["error"]
    assert error["why"] == "no accelerator is present"
    assert "--device" in error["possible"]


def test_compile_is_for_the_accelerator_that_is_present(
    humming: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = plugins.PresentDevice(0, "NVIDIA H200", "h200", plugin="nvidia")
    monkeypatch.setattr(plugins, "devices", lambda: plugins.PresentDevices([present], []))
    told = humming.json("compile", "w4a16", "-n", "64", "-k", "64", "-m", "1")
    assert [row["device"] for row in told["kernels"]] == ["h200"]
    assert told["kernels"][0]["compiler"].startswith("nvrtc ")


def test_compile_takes_a_model(humming: Shell, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "num_key_value_heads": 2}))
    told = humming.json("compile", "w4a16", "--model", str(tmp_path), "--device", "a100", "-m", "1")
    found = {(row["n"], row["k"]): row["name"] for row in told["kernels"]}
    assert found[(128, 128)] == "q_proj, o_proj"
    assert set(found) == {(128, 128), (64, 128), (256, 128), (512, 128), (128, 256)}


@pytest.mark.parametrize(
    ("config", "left_out"),
    [({"num_experts": 8}, "experts"), ({"kv_lora_rank": 64}, "low rank")],
    ids=["experts", "low-rank-attention"],
)
def test_model_shapes_say_what_they_leave_out(
    tmp_path: Path, config: dict[str, int], left_out: str
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": sizes | config}))
    found, notes = shapes.model_shapes(tmp_path)
    assert found
    assert len(notes) == 1
    assert left_out in notes[0]


def test_model_shapes_of_a_config_without_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="no positive hidden_size"):
        shapes.model_shapes(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        shapes.model_shapes(tmp_path)


# --- doctor -----------------------------------------------------------------------------------


def test_doctor_builds_for_every_architecture(humming: Shell) -> None:
    told = humming.json("doctor")
    assert told["healthy"] is True
    subjects = {finding["subject"] for finding in told["findings"]}
    assert {f"compiler {caps.arch}" for caps in plugins.registry().devices()} <= subjects
    assert {"python", "packages", "torch", "driver", "plugins", "cache"} <= subjects
    assert all(f["advice"] for f in told["findings"] if f["state"] == "fault")


def test_doctor_reports_a_missing_compiler(humming: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(caps: DeviceCapabilities) -> None:
        raise CompileError(
            "libnvrtc was not found. Install it with `pip install nvidia-cuda-nvrtc`."
        )

    monkeypatch.setattr(plugins, "compiler_for", no_compiler)
    assert humming("doctor") == 3
    assert "no architecture of any device can be built" in humming.out
    assert "pip install nvidia-cuda-nvrtc" in humming.out


def test_doctor_reports_a_broken_plugin_and_goes_on(
    humming: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = plugins.Problem("acme", "acme 1.0", "loading", PluginError("acme: no module x"))
    monkeypatch.setattr(plugins, "devices", lambda: plugins.PresentDevices([], [problem]))
    told = humming.json("doctor", status=3)
    faults = [finding for finding in told["findings"] if finding["state"] == "fault"]
    assert [fault["found"] for fault in faults] == ["acme: no module x"]
    assert "acme 1.0" in faults[0]["advice"]


def test_doctor_reports_a_missing_torch(humming: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    told = humming.json("doctor", status=3)
    (fault,) = [finding for finding in told["findings"] if finding["state"] == "fault"]
    assert fault["subject"] == "torch"
    assert "pip install torch" in fault["advice"]


def test_doctor_survives_an_examination_that_breaks(
    humming: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUMMING_COMPILE_JOBS", "many")
    told = humming.json("doctor", status=3)
    (fault,) = [finding for finding in told["findings"] if finding["state"] == "fault"]
    assert fault["subject"] == "cache"
    assert "HUMMING_COMPILE_JOBS=many" in fault["found"]


def test_doctor_reports_an_unwritable_cache(
    humming: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("HUMMING_CACHE_DIR", str(blocked / "cache"))
    told = humming.json("doctor")
    (cache,) = [finding for finding in told["findings"] if finding["subject"] == "cache"]
    assert cache["state"] == "note"
    assert "HUMMING_CACHE_DIR" in cache["advice"]


@pytest.mark.parametrize("why", ["file", "disabled"])
def test_kernels_that_were_not_kept_are_no_success(
    humming: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str
) -> None:
    words = ["compile", "w4a16", "-n", "64", "-k", "64", "-m", "1", "--device", "h20"]
    if why == "file":
        (tmp_path / "file").write_text("")
        words += ["--output", str(tmp_path / "file" / "below")]
    else:
        monkeypatch.setenv("HUMMING_CACHE_DIR", str(tmp_path / "none"))
        monkeypatch.setenv("HUMMING_DISABLE_CACHE", "1")
    assert humming(*words) == 2
    assert "could not be kept" in humming.err


def test_what_is_said_before_anything_is_compiled(humming: Shell, tmp_path: Path) -> None:
    words = ("compile", "w4a16", "-n", "64", "-k", "64", "--device", "h20")
    (tmp_path / "file").write_text("")
    assert humming(*words, "-m", "1", "--output", str(tmp_path / "file")) == 2
    assert "it is no folder" in humming.err
    assert humming(*words, "-m", "1,x") == 2
    assert "-m 1,16,64" in humming.err
