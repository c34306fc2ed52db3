"""The quantized layers of the files that transformers loads a model from."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from humming.checkpoints.checkpoint import Checkpoint
from humming.checkpoints.methods import method_of
from humming.checkpoints.module_parts import readable_parts
from humming.checkpoints.packed_writer import INPUT_PARTS, PACKED_PARTS
from humming.checkpoints.tensors import TensorSource
from humming.errors import CheckpointError, UnsupportedError
from humming.nn import QuantLinear
from humming.packing import PackedWeight

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_EXTRA = "_extra_state"


class Layers(Protocol):
    """The layers of a checkpoint that are quantized, by the names that they have there."""

    def names(self) -> Iterable[str]:
        """All of them."""

    def stored_bytes(self, name: str) -> int:
        """The size of a layer's tensors.

        Raises:
            CheckpointError: the layer cannot be read.
        """

    def read(self, name: str, device: torch.device) -> torch.nn.Module:
        """A layer on a device.

        Raises:
            CheckpointError: it is damaged.
        """


def open_files(files: list[str]) -> TensorSource:
    """The tensors of a checkpoint's files.

    Raises:
        CheckpointError: the files are none that are read.
    """
    if not files or not all(file.endswith(".safetensors") for file in files):
        found = ", ".join(Path(file).name for file in files) or "nothing"
        raise CheckpointError(f"a quantized model in {found}; possible: *.safetensors")
    return TensorSource.of_files(files, str(Path(files[0]).parent))


class OthersLayers:
    """Layers that another method quantized.

    Args:
        config: the method's configuration.
        tensors: the tensors of the checkpoint.
    """

    def __init__(self, config: Mapping[str, Any], tensors: TensorSource) -> None:
        folder = Path(tensors.where)
        where = f"{folder / 'config.json'}: quantization_config"
        self._checkpoint = Checkpoint(folder, where, method_of(config, where), tensors)
        self._tensors, self._parts = tensors, _parts(tensors)

    def names(self) -> Iterable[str]:
        """Those that have other tensors than a weight of 16 or 32 bits and a bias."""
        return [name for name in self._checkpoint.modules() if not self._is_plain(name)]

    def _is_plain(self, name: str) -> bool:
        parts = self._parts.get(name, set())
        return (
            "weight" in parts
            and parts <= {"weight", "bias"}
            and all(self._tensors.dtype(f"{name}.{part}") in _FLOATS for part in parts)
        )

    def stored_bytes(self, name: str) -> int:
        """The size of a layer's tensors."""
        decision = self._checkpoint.decide(name)
        readable_parts(self._tensors, name, decision, self._checkpoint.where)
        return _bytes(self._tensors, name, self._parts[name])

    def read(self, name: str, device: torch.device) -> torch.nn.Module:
        """A layer, packed on a device."""
        return self._checkpoint.read(name).to_module(device)


class SavedLayers:
    """Layers of a model that was saved with `save_pretrained` when it was quantized already.

    Args:
        activations: what layers quantize activations to: name -> format.
        default: what all others do.
        tensors: the tensors of the checkpoint.
    """

    def __init__(
        self, activations: Mapping[str, str | None], default: str | None, tensors: TensorSource
    ) -> None:
        self._activations, self._default = activations, default
        self._tensors, self._parts = tensors, _parts(tensors)

    def names(self) -> Iterable[str]:
        """Those with the description of a `QuantLinear`."""
        return [name for name, parts in self._parts.items() if {_EXTRA, "codes"} <= parts]

    def stored_bytes(self, name: str) -> int:
        """The size of a layer's tensors."""
        return _bytes(self._tensors, name, self._parts[name])

    def read(self, name: str, device: torch.device) -> torch.nn.Module:
        """A layer, whose tensors are moved to a device."""
        parts = {part: self._tensors.get(f"{name}.{part}") for part in sorted(self._parts[name])}
        try:
            metadata = json.loads(bytes(parts.pop(_EXTRA).tolist()))
            packed = {part: parts.pop(part) for part in PACKED_PARTS if part in parts}
            inputs = {part: parts.pop(part) for part in INPUT_PARTS if part in parts}
            weight = PackedWeight.from_tensors(metadata, packed).to(device)
            activation = self._activations.get(name, self._default)
            layer = QuantLinear(weight, parts.pop("bias", None), activation=activation, **inputs)
        except (UnsupportedError, ValueError, TypeError) as error:
            raise CheckpointError(f"{self._tensors.where}: {name} is damaged: {error}") from error
        if parts:
            raise CheckpointError(f"{self._tensors.where}: {name} has unknown parts {[*parts]}")
        return layer


def _parts(tensors: TensorSource) -> dict[str, set[str]]:
    """What the tensors of each module are called after its name and a dot."""
    found: dict[str, set[str]] = {}
    for name in tensors.names:
        module, _, part = name.rpartition(".")
        found.setdefault(module, set()).add(part)
    return found


def _bytes(tensors: TensorSource, name: str, parts: Iterable[str]) -> int:
    names = [f"{name}.{part}" for part in parts]
    return sum(
        torch.Size(tensors.shape(part)).numel() * tensors.dtype(part).itemsize for part in names
    )
