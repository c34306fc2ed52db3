"""The quantized layers of the files that transformers loads a model from."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
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

_EXTRA = "_extra_state"


class Layers(Protocol):
    """The layers of a checkpoint that are quantized, by the names that they have there.

    Attributes:
        notes: what is to be told of all of them.
        layer_notes: what is to be told of those that have been read, by name.
    """

    notes: tuple[str, ...]
    layer_notes: Mapping[str, tuple[str, ...]]

    def names(self) -> Iterable[str]:
        """All of them."""

    def stored_bytes(self, name: str) -> int:
        """The size of a layer's tensors.

        Raises:
            CheckpointError: the layer cannot be read.
        """

    def read(self, name: str, place: str, device: torch.device) -> torch.nn.Module:
        """A layer on a device, to be called `place` in the model.

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
        self._tensors, self._owned = tensors, self._checkpoint.quantized_modules()
        self.notes = self._checkpoint.notes + self._checkpoint.notes_on_tensors(self._owned)
        self._told: dict[str, tuple[str, ...]] = {}
        self.layer_notes: Mapping[str, tuple[str, ...]] = self._told

    def names(self) -> Iterable[str]:
        """Those that are no plain layers by their tensors."""
        return self._owned.keys()

    def stored_bytes(self, name: str) -> int:
        """The size of a layer's tensors."""
        decision = self._checkpoint.decide(name)
        readable_parts(self._tensors, name, decision, self._checkpoint.where)
        return _bytes(self._tensors, self._owned[name])

    def read(self, name: str, place: str, device: torch.device) -> torch.nn.Module:
        """A layer, packed on a device."""
        found = self._checkpoint.read(name)
        self._told[name] = self._checkpoint.notes_of(found)
        return found.to_module(device)


class SavedLayers:
    """Layers of a model that was saved with `save_pretrained` when it was quantized already.

    Args:
        activations: what layers quantize activations to: name -> format.
        default: what all others do.
        tensors: the tensors of the checkpoint.
    """

    notes: tuple[str, ...] = ()
    layer_notes: Mapping[str, tuple[str, ...]] = MappingProxyType({})

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
        return _bytes(self._tensors, [f"{name}.{part}" for part in self._parts[name]])

    def read(self, name: str, place: str, device: torch.device) -> torch.nn.Module:
        """A layer, whose tensors are moved to a device."""
        parts = {part: self._tensors.get(f"{name}.{part}") for part in sorted(self._parts[name])}
        try:
            metadata = json.loads(bytes(parts.pop(_EXTRA).tolist()))
            packed = {part: parts.pop(part) for part in PACKED_PARTS if part in parts}
            inputs = {part: parts.pop(part) for part in INPUT_PARTS if part in parts}
            weight = PackedWeight.from_tensors(metadata, packed).to(device)
            activation = self._activation_of(name, place)
            layer = QuantLinear(weight, parts.pop("bias", None), activation=activation, **inputs)
        except (UnsupportedError, ValueError, TypeError) as error:
            raise CheckpointError(f"{self._tensors.where}: {name} is damaged: {error}") from error
        if parts:
            raise CheckpointError(f"{self._tensors.where}: {name} has unknown parts {[*parts]}")
        return layer

    def _activation_of(self, name: str, place: str) -> str | None:
        """What a layer quantizes activations to; its name was that in the model that was saved.

        A file may name it otherwise, and a part of a model or a larger one does too.
        """
        for known in (place, name):
            if known in self._activations:
                return self._activations[known]
        longer = {
            told
            for known, told in self._activations.items()
            if f".{known}".endswith(f".{place}") or f".{place}".endswith(f".{known}")
        }
        if len(longer) > 1:
            raise CheckpointError(
                f"{self._tensors.where}: several layers of the saved model end like {place}, and "
                "quantize activations differently; possible: the class of model that was saved"
            )
        return longer.pop() if longer else self._default


def _parts(tensors: TensorSource) -> dict[str, set[str]]:
    """What the tensors of each module are called after its name and a dot."""
    found: dict[str, set[str]] = {}
    for name in tensors.names:
        module, _, part = name.rpartition(".")
        found.setdefault(module, set()).add(part)
    return found


def _bytes(tensors: TensorSource, names: Iterable[str]) -> int:
    return sum(
        torch.Size(tensors.shape(name)).numel() * tensors.dtype(name).itemsize for name in names
    )
