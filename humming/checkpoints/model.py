"""Whole models: the layers of a checkpoint or of a file of packed weights, one after another."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from humming import progress
from humming.checkpoints.checkpoint import Checkpoint
from humming.checkpoints.decisions import Linear
from humming.checkpoints.lazy import Lazy
from humming.checkpoints.packed_reader import PackedFile
from humming.checkpoints.packed_writer import INPUT_PARTS
from humming.dtypes import DataType
from humming.errors import CheckpointError, UnsupportedError, check_type
from humming.formats import ActivationSpec
from humming.nn import QuantLinear
from humming.packing import unpack
from humming.places import place_of

Module = QuantLinear | torch.nn.Linear


@dataclass(frozen=True, eq=False)
class Model:
    """A quantized model in files, of which nothing but headers is read until it is asked for.

    A layer is read, packed and placed when it is asked for, and kept by nobody but who asked: a
    model that is streamed needs memory for one layer beside those that are kept.

    Attributes:
        path: where it is.
        layers: the quantized layers by name. One that has a weight of ordinary numbers in spite of
            scales beside it is a `torch.nn.Linear`.
        linears: the same before they are packed, to fuse or shard them first.
        tensors: all that belongs to no quantized layer, by name: embeddings, norms, layers that are
            not quantized.
        skipped: the modules that cannot be read, each with the reason.
        notes: what else is to be known of the whole.
        layer_notes: what is to be known of single layers, of those that have been read so far.
    """

    path: Path
    layers: Mapping[str, Module]
    linears: Mapping[str, Linear]
    tensors: Mapping[str, torch.Tensor]
    skipped: Mapping[str, str]
    notes: tuple[str, ...] = ()
    layer_notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def stream(self) -> Iterator[tuple[str, Module]]:
        """Every layer in turn with its name; how far it is shows on a terminal.

        Raises:
            CheckpointError: a layer is damaged; the message names file, module and tensor.
        """
        with progress.watch("loading layers") as tell:
            for done, name in enumerate(self.layers):
                tell(done, len(self.layers))
                yield name, self.layers[name]


def load_model(
    path: Path | str,
    device: torch.device | str | None = None,
    *,
    activation: ActivationSpec | str | None = None,
    scale_dtype: DataType | str | None = None,
) -> Model:
    """Opens a quantized model, to take its layers and its other tensors out of it.

    Args:
        path: of a checkpoint, as for `load_linear`; or a file of packed weights, see `save_packed`,
            or a folder with no other.
        device: where to pack layers, and to leave them and the tensors; None for the CPU.
        activation: what all layers quantize activations to instead of what the checkpoint wants,
            "fp16" or "bf16" to leave them; None for what it wants.
        scale_dtype: float16 or bfloat16, to round scales of weights to, see
            `humming.checkpoints.rounding.round_scales`; None keeps them.

    Raises:
        CheckpointError: a file is missing or damaged, or the method is not one that is read.
    """
    check_type("load_model", "the path", path, (str, Path), "Pass a folder or file.")
    if activation is not None:
        activation = ActivationSpec.parse(activation)
    if device is not None:
        device = place_of(f"the layers of {path}", device)
    if PackedFile.recognizes(path):
        return _of_packed(PackedFile(path, device), activation, scale_dtype)
    return _of_checkpoint(Checkpoint.open(path), device, activation, scale_dtype)


def _of_checkpoint(
    checkpoint: Checkpoint,
    device: torch.device | str | None,
    activation: ActivationSpec | None,
    scale_dtype: DataType | str | None,
) -> Model:
    path, tensors = checkpoint.path, checkpoint.tensors
    if tensors is None:
        raise CheckpointError(f"{path} holds no tensors; possible: a folder with *.safetensors")
    owned = checkpoint.quantized_modules()
    skipped = {}
    for module in owned:
        decision = checkpoint.decide(module)
        if decision.action in ("refused", "skipped"):
            skipped[module] = decision.why

    def layer(name: str) -> Module:
        linear = linears[name]
        try:
            return linear.to_module(device, activation=activation, scale_dtype=scale_dtype)
        except UnsupportedError as error:
            raise CheckpointError(f"{path}: {name}: {error}") from error

    layer_notes: dict[str, tuple[str, ...]] = {}

    def linear(name: str) -> Linear:
        found = checkpoint.read(name)
        if told := checkpoint.notes_of(found):
            layer_notes[name] = told
        return found

    names = [module for module in owned if module not in skipped]
    linears = Lazy(names, linear, f"{path}: the layer", skipped)

    def tensor(name: str) -> torch.Tensor:
        found = tensors.get(name)
        return found if device is None else found.to(device)

    taken = {name for names in owned.values() for name in names}
    others = [name for name in tensors.names if name not in taken]
    notes = checkpoint.notes + checkpoint.notes_on_tensors(owned)
    return Model(
        path,
        Lazy(names, layer, f"{path}: the layer", skipped),
        linears,
        Lazy(others, tensor, f"{path}: the tensor"),
        skipped,
        notes,
        layer_notes,
    )


def _of_packed(
    file: PackedFile, activation: ActivationSpec | None, scale_dtype: DataType | str | None
) -> Model:
    if scale_dtype is not None:
        raise UnsupportedError(
            f"scales of {file.path} in {scale_dtype}",
            "its weights are packed already",
            "Round them when they are packed, or load them as they are.",
        )

    def layer(name: str) -> Module:
        found = file.layers[name]
        try:
            if not isinstance(found, QuantLinear):
                return QuantLinear.from_packed(found, activation=activation)
            if activation is None or _takes(found, activation):
                return found
            # A static scale is that of the other format.
            kept = {part: getattr(found, part) for part in INPUT_PARTS[:2]}
            return QuantLinear.from_packed(found.packed, found.bias, activation=activation, **kept)
        except UnsupportedError as error:
            raise CheckpointError(f"{file.path}: {name}: {error}") from error

    def linear(name: str) -> Linear:
        found = file.layers[name]
        return _unpacked(found) if isinstance(found, QuantLinear) else Linear(unpack(found))

    layers = Lazy(file.layers, layer, f"{file.path}: the layer")
    linears = Lazy(file.layers, linear, f"{file.path}: the layer")
    return Model(file.path, layers, linears, file.tensors, {})


def _unpacked(layer: QuantLinear) -> Linear:
    """What a layer was made of."""
    static = layer.activation_scale
    return Linear(
        unpack(layer.packed),
        layer.bias,
        activation=None if layer.activation is None else ActivationSpec.parse(layer.activation),
        input_permutation=layer.input_permutation,
        input_scale=layer.input_scale,
        activation_scale=None if static is None else static.reshape(1, 1),
    )


def _takes(layer: QuantLinear, activation: ActivationSpec) -> bool:
    return layer.activation is not None and ActivationSpec.parse(layer.activation) == activation
