"""Whole models: what is a layer and what is not, memory, devices, and what cannot be read."""

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import humming
from humming import QuantLinear, progress
from humming.checkpoints.model import load_model
from humming.checkpoints.packed_reader import PackedFile
from humming.errors import CheckpointError, UnsupportedError

N, K = 16, 64
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True}
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


def gptq(module: str, n: int = N, k: int = K, group: int = 32) -> dict[str, torch.Tensor]:
    words = torch.randint(-(1 << 31), 1 << 31, (k // 8, n)).to(torch.int32)
    return {
        f"{module}.qweight": words,
        f"{module}.qzeros": torch.full((k // group, n // 8), 0x77777777, dtype=torch.int32),
        f"{module}.scales": (torch.rand(k // group, n) + 0.1).half(),
        f"{module}.g_idx": (torch.arange(k) % (k // group)).int(),
    }


def folder(path: Path, config: dict[str, Any], *shards: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of several files with an index."""
    placed = {}
    for number, tensors in enumerate(shards):
        name = f"model-{number}.safetensors"
        save_file(tensors, path / name)
        placed |= dict.fromkeys(tensors, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return folder(
        tmp_path,
        GPTQ,
        {
            **gptq(UP),
            f"{UP}.bias": torch.randn(N).half(),
            "model.embed_tokens.weight": torch.randn(32, K).half(),
        },
        {
            **gptq(DOWN),
            f"{DOWN}.k_scale": torch.ones(1),
            "model.layers.0.mlp.gate_proj.weight": torch.randn(N, K).half(),
            "model.norm.weight": torch.ones(K),
            "lm_head.weight": torch.randn(32, K).half(),
        },
    )


def test_layers_and_the_rest(checkpoint: Path) -> None:
    model = load_model(checkpoint)
    assert set(model.layers) == {UP, DOWN}
    assert set(model.tensors) == {
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
        f"{DOWN}.k_scale",
    }
    assert not model.skipped
    assert any("the first is model.layers.0.mlp.gate_proj" in note for note in model.notes)
    layer = model.layers[UP]
    loaded = humming.load_linear(checkpoint, UP)
    assert isinstance(layer, QuantLinear)
    assert layer.packed.equals(humming.pack(loaded.weight))
    assert torch.equal(layer.input_permutation, loaded.input_permutation)
    assert torch.equal(layer.bias, loaded.bias)
    assert float(model.tensors["model.norm.weight"].sum()) == K
    assert model.linears[UP].weight.equals(loaded.weight)


def test_on_a_device_and_for_other_activations(checkpoint: Path) -> None:
    model = load_model(checkpoint, "meta", activation="int8")
    layer = model.layers[UP]
    assert (layer.activation, layer.packed.operand_bits) == ("int8", 8)
    assert {tensor.device.type for tensor in layer.buffers()} == {"meta"}
    assert all(tensor.is_meta for tensor in model.tensors.values())


def test_streaming_keeps_no_layer_and_tells_how_far_it_is(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    shown: list[tuple[str, int, int]] = []

    class Listener:
        def show(self, what: str, done: int, total: int) -> None:
            shown.append((what, done, total))

        def hide(self) -> None:
            shown.append(("hidden", 0, 0))

    seen: dict[str, Any] = {}
    with progress.listening(Listener()):
        for name, layer in load_model(checkpoint).stream():
            assert all(found() is None for found in seen.values()), "one layer at a time"
            seen[name] = weakref.ref(layer)
            del layer
    assert set(seen) == {UP, DOWN}
    assert shown[0] == ("loading layers", 0, 2)
    assert shown[-1] == ("hidden", 0, 0)


_STREAM = """
import sys, humming
def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
sizes = []
for _, layer in humming.load_model(sys.argv[1]).stream():
    sizes.append(anonymous())
print(max(sizes[3:]) - sizes[2], layer.packed.nbytes, len(sizes))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    shards = [
        gptq(f"layers.{2 * i}.up", 1024, 2048, 128)
        | gptq(f"layers.{2 * i + 1}.up", 1024, 2048, 128)
        for i in range(8)
    ]
    folder(tmp_path, {**GPTQ, "group_size": 128}, *shards)
    # Else glibc keeps some of what was freed, now more and now less.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", _STREAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    grown, layer_bytes, layers = map(int, done.stdout.split())
    assert layers == 16
    assert grown < layer_bytes, "layers that were read before are still there"


# --- what cannot be read -----------------------------------------------------------------------


def test_a_damaged_layer_is_named_and_others_go_on(tmp_path: Path) -> None:
    broken = gptq(DOWN)
    broken[f"{DOWN}.scales"] = torch.full_like(broken[f"{DOWN}.scales"], torch.nan)
    model = load_model(folder(tmp_path, GPTQ, gptq(UP), broken))
    with pytest.raises(CheckpointError, match=rf"index.json: {DOWN}: the tensor {DOWN}.scales"):
        model.layers[DOWN]
    with pytest.raises(CheckpointError, match=f"{DOWN}.scales"):
        dict(model.stream())
    assert isinstance(model.layers[UP], QuantLinear)


def test_what_no_kernel_multiplies_is_named(checkpoint: Path) -> None:
    model = load_model(checkpoint, activation="fp8_tensor")
    with pytest.raises(CheckpointError, match=f"{checkpoint}: {UP}: .*known beforehand"):
        model.layers[UP]


def test_refused_modules_are_told_with_the_reason(tmp_path: Path) -> None:
    config = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {UP: {"quant_algo": "INT8_SQ"}, DOWN: {"quant_algo": "FP8"}},
    }
    fp8 = {
        "weight": torch.randn(N, K).to(torch.float8_e4m3fn),
        "weight_scale": torch.tensor(0.5),
        "input_scale": torch.tensor(0.25),
    }
    tensors = {f"{module}.{name}": fp8[name].clone() for module in (UP, DOWN) for name in fp8}
    model = load_model(folder(tmp_path, config, tensors))
    assert set(model.layers) == {DOWN}
    assert set(model.skipped) == {UP}
    assert "INT8_SQ" in model.skipped[UP]
    with pytest.raises(CheckpointError, match=rf"{UP}.*cannot be read: .*INT8_SQ"):
        model.layers[UP]
    layer = model.layers[DOWN]
    assert layer.activation == "fp8_tensor"
    assert float(layer.activation_scale) == 0.25


@pytest.mark.parametrize("name", ["missing", "model.norm"])
def test_names_that_are_no_layers(name: str, checkpoint: Path) -> None:
    model = load_model(checkpoint)
    assert name not in model.layers
    with pytest.raises(CheckpointError, match=f"the layer '{name}' is not there"):
        model.layers[name]
    with pytest.raises(KeyError):
        model.layers[name]


def test_configurations_alone_are_no_model(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no tensors"):
        load_model(checkpoint / "config.json")


# --- files of many experts ---------------------------------------------------------------------


def test_experts_in_stacks(tmp_path: Path) -> None:
    experts = "model.layers.0.mlp.experts"
    tensors = {
        f"{experts}.gate_up_proj_blocks": torch.randint(0, 256, (2, N, K // 32, 16)).byte(),
        f"{experts}.gate_up_proj_scales": torch.randint(100, 140, (2, N, K // 32)).byte(),
        f"{experts}.gate_up_proj_bias": torch.randn(2, N).bfloat16(),
        "model.layers.0.mlp.router.weight": torch.randn(2, K).bfloat16(),
    }
    model = load_model(folder(tmp_path, {"quant_method": "mxfp4"}, tensors))
    assert set(model.layers) == {f"{experts}.{index}.gate_up_proj" for index in range(2)}
    assert set(model.tensors) == {"model.layers.0.mlp.router.weight"}
    bias = model.layers[f"{experts}.1.gate_up_proj"].bias
    assert torch.equal(bias, tensors[f"{experts}.gate_up_proj_bias"][1])


# --- packed files ------------------------------------------------------------------------------


def test_a_packed_file_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "packed.safetensors"
    weight = humming.quantize(torch.randn(N, K), "int4_g32")
    layer = QuantLinear.from_quantized(
        weight, torch.randn(N), activation="int8", input_permutation=torch.randperm(K)
    )
    humming.save_packed(
        {"layer": layer, "weight": humming.pack(weight)}, path, {"norm": torch.ones(3)}
    )
    model = load_model(path)
    assert dict(model.stream()).keys() == {"layer", "weight"}
    assert model.layers["layer"].activation == "int8"
    assert model.layers["weight"].activation is None
    assert set(model.tensors) == {"norm"}
    linear = model.linears["layer"]
    assert linear.weight.equals(weight)
    assert linear.activation.name == "int8"
    assert torch.equal(linear.input_permutation, layer.input_permutation)
    assert torch.equal(linear.to_module().codes, layer.codes)
    # Other activations of the same width take the same packed weight.
    other = load_model(path, activation="int8_asym").layers["layer"]
    assert other.activation == "int8_asym"
    assert torch.equal(other.input_permutation, layer.input_permutation)
    assert other.row_sums is not None


@pytest.mark.parametrize(("activation", "bits"), [("int8", (16, 8)), ("bf16", (8, 16))])
def test_a_file_packed_for_another_width_is_told(
    activation: str, bits: tuple[int, int], tmp_path: Path
) -> None:
    path = tmp_path / "packed.safetensors"
    weight = humming.quantize(torch.randn(N, K), "int4_g32")
    humming.save_packed({"layer": humming.pack(weight, bits[0])}, path)
    told = f"packed.safetensors: layer: .*for {bits[0]}-bit operands.*packed for {bits[1]} bits"
    with pytest.raises(CheckpointError, match=told):
        load_model(path, activation=activation).layers["layer"]
    with pytest.raises(UnsupportedError, match="packed already"):
        load_model(path, scale_dtype="float16")


def test_what_was_packed_from_a_checkpoint_is_what_it_is(checkpoint: Path, tmp_path: Path) -> None:
    model, path = load_model(checkpoint), tmp_path / "packed" / "packed.safetensors"
    humming.save_packed(dict(model.layers), path, dict(model.tensors))
    again = load_model(path)
    for name, layer in model.stream():
        mine, theirs = layer.state_dict(), again.layers[name].state_dict()
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[part], theirs[part]) for part in mine)
    assert set(PackedFile(path).tensors) == set(model.tensors)
