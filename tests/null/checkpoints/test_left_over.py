"""Tensors that a reader does not take, and weights of which parts alone are there."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from humming import load_linear, load_model, load_packed, save_packed
from humming.checkpoints.checkpoint import Checkpoint
from humming.errors import CheckpointError

UP = "model.layers.0.mlp.up_proj"
N, K = 32, 64
SCALE = torch.full((N, 1), 0.5)
BYTES = torch.randn(N, K).to(torch.float8_e4m3fn)
# Configuration and tensors of one small layer of each kind of method.
METHODS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False},
        {
            "qweight": torch.randint(-(1 << 31), 1 << 31, (K // 8, N)).to(torch.int32),
            "qzeros": torch.full((K // 32, N // 8), 0x77777777, dtype=torch.int32),
            "scales": torch.rand(K // 32, N).half() + 0.1,
        },
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        {
            "qweight": torch.randint(-(1 << 31), 1 << 31, (K, N // 8)).to(torch.int32),
            "qzeros": torch.randint(-(1 << 31), 1 << 31, (K // 32, N // 8)).to(torch.int32),
            "scales": torch.rand(K // 32, N).half() + 0.1,
        },
    ),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                }
            },
        },
        {"weight": BYTES, "weight_scale": SCALE},
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        {"weight": BYTES, "weight_scale_inv": torch.ones(1, 1)},
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"weight": BYTES, "weight_scale": torch.tensor(0.5), "input_scale": torch.tensor(0.25)},
    ),
}


def written(path: Path, method: str, change: dict[str, torch.Tensor | None]) -> Path:
    """A folder with one layer; `change` adds tensors to it, or with None takes them away."""
    config, parts = METHODS[method]
    kept = {name: tensor for name, tensor in {**parts, **change}.items() if tensor is not None}
    tensors = {f"{UP}.{name}": tensor.clone() for name, tensor in kept.items()}
    save_file({**tensors, "model.norm.weight": torch.ones(K)}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return path


@pytest.mark.parametrize("method", METHODS)
def test_the_layers_themselves_are_read_without_a_word(method: str, tmp_path: Path) -> None:
    found = load_linear(written(tmp_path, method, {}), UP)
    assert found.weight.shape == (N, K)
    assert not any("is not used" in note for note in found.notes)


@pytest.mark.parametrize("part", ["weight", "qweight", "weight_scale_of_nobody", "lora_A"])
@pytest.mark.parametrize("method", METHODS)
def test_a_second_weight_or_scale_is_refused(method: str, part: str, tmp_path: Path) -> None:
    if part in METHODS[method][1]:
        part = "weight_packed" if part == "qweight" else "qweight"
    path = written(tmp_path, method, {part: torch.ones(N, K)})
    with pytest.raises(CheckpointError, match=rf"{UP}\.{part} is not read with a weight"):
        load_linear(path, UP)
    model = load_model(path)
    with pytest.raises(CheckpointError, match=UP):
        model.layers[UP]


@pytest.mark.parametrize("method", METHODS)
def test_what_changes_no_number_is_told(method: str, tmp_path: Path) -> None:
    model = load_model(written(tmp_path, method, {"checksum": torch.zeros(1)}))
    assert [*model.layers] == [UP]
    assert not model.layer_notes
    _ = model.layers[UP]
    assert f"the tensor {UP}.checksum is not used" in model.layer_notes[UP]


@pytest.mark.parametrize(
    ("part", "tensor"),
    [
        ("input_global_scale", torch.ones(1)),
        ("output_scale_of_nobody", torch.ones(1)),
        ("zero_point_of_nobody", torch.zeros(N, 1, dtype=torch.int64)),
        ("weight_shape_of_nobody", torch.tensor([N, K])),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_what_leaves_the_weight_as_it_is_is_told(
    method: str, part: str, tensor: torch.Tensor, tmp_path: Path
) -> None:
    found = load_linear(written(tmp_path, method, {part: tensor}), UP)
    assert f"the tensor {UP}.{part} is not used" in found.notes


@pytest.mark.parametrize("method", METHODS)
def test_zero_points_that_are_not_read_are_refused(method: str, tmp_path: Path) -> None:
    zeros = torch.zeros(N, 1, dtype=torch.int8)
    zeros[3] = 1
    path = written(tmp_path, method, {"zero_point_of_nobody": zeros})
    with pytest.raises(CheckpointError, match="zero_point_of_nobody is not read"):
        load_linear(path, UP)


@pytest.mark.parametrize("value", [0, 3])
def test_zero_points_of_inputs(value: int, tmp_path: Path) -> None:
    zero = torch.full((1,), value, dtype=torch.int8)
    path = written(tmp_path, "compressed-tensors", {"input_zero_point": zero})
    if value:
        with pytest.raises(CheckpointError, match="input_zero_point is not 0"):
            load_linear(path, UP)
    else:
        assert load_linear(path, UP).weight.shape == (N, K)


@pytest.mark.parametrize("method", METHODS)
def test_scales_of_caches_are_the_models(method: str, tmp_path: Path) -> None:
    model = load_model(written(tmp_path, method, {"k_scale": torch.ones(1)}))
    assert not any("k_scale" in note for note in load_linear(model.path, UP).notes)
    assert f"{UP}.k_scale" in model.tensors


@pytest.mark.parametrize("method", METHODS)
def test_a_weight_that_is_lacking_is_an_error_and_no_plain_tensor(
    method: str, tmp_path: Path
) -> None:
    main = next(name for name in METHODS[method][1] if "weight" in name)
    path = written(tmp_path, method, {main: None})
    assert UP in Checkpoint.open(path).modules()
    model = load_model(path)
    assert [*model.layers] == [UP]
    assert not [name for name in model.tensors if name.startswith(UP)]
    with pytest.raises(CheckpointError, match=rf"{UP}: of its weight there is only .*{UP}\."):
        model.layers[UP]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_prj", "up_proj", "", "model.layers.0"])
def test_names_of_nothing_get_the_nearest(name: str, method: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"no module {name!r}.* possible: {UP}"):
        load_linear(written(tmp_path, method, {}), name)


def test_several_files_of_packed_weights_are_named(tmp_path: Path) -> None:
    from humming import pack, quantize

    weight = pack(quantize(torch.randn(N, K), "int4_g32"))
    for name in ("a", "b"):
        save_packed({name: weight}, tmp_path / f"{name}.safetensors")
    for load in (load_model, load_packed):
        with pytest.raises(CheckpointError, match=r"a\.safetensors.*b\.safetensors|no packed"):
            load(tmp_path)
    assert [*load_model(tmp_path / "a.safetensors").layers] == ["a"]
