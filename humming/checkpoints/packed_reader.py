"""Files of packed weights, read: `humming.load_packed`, and `PackedFile` layer by layer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from humming.checkpoints.lazy import Lazy
from humming.checkpoints.packed_writer import (
    CHECKSUM_KEY,
    LAYERS_KEY,
    PACKED_PARTS,
    PARTS,
    VERSION,
    VERSION_KEY,
    Layer,
    checksum,
)
from humming.checkpoints.tensors import TensorSource
from humming.dtypes import float8e4m3, float8e8m0
from humming.errors import CheckpointError, UnsupportedError, check_type
from humming.formats import WeightSpec
from humming.nn import QuantLinear
from humming.packing import PackedWeight
from humming.places import place_of

_REQUIRED = {"weight", "n", "k", "operand_bits", "parts"}
_HOW = "write it with humming.save_packed or `humming pack`"


def load_packed(path: Path | str, device: torch.device | str | None = None) -> dict[str, Layer]:
    """The layers of a file that `save_packed` wrote: each a `PackedWeight` or a `QuantLinear`.

    On the CPU their tensors are the mapped file. `PackedFile` gives them one by one, and the other
    tensors too.

    Args:
        path: the file, or a folder with no other.
        device: where they are to lie.

    Raises:
        CheckpointError: it is no such file, or damaged; the message names file and tensor.
    """
    return dict(PackedFile(path, device).layers)


class PackedFile:
    """A file of packed weights of which only the header is read until a layer is asked for.

    Args:
        path: the file, or a folder with no other.
        device: where layers and tensors are to lie; None for the CPU, where they are the mapped
            file itself.

    Attributes:
        path: the file.
        layers: each by its name, read when it is asked for: what was saved.
        tensors: all that belong to no layer, read when they are asked for.

    Raises:
        CheckpointError: it is no such file, or damaged.
    """

    def __init__(self, path: Path | str, device: torch.device | str | None = None) -> None:
        check_type("a file of packed weights", "the path", path, (str, Path), "Pass a path.")
        self.path = Path(path)
        self._device = None if device is None else place_of(f"the layers of {path}", device)
        if not self.path.exists():
            raise CheckpointError(f"{path} does not exist; possible: *.safetensors")
        self._source = TensorSource.open(self.path)
        metadata = self._source.metadata
        version = metadata.get(VERSION_KEY)
        if version is None:
            raise CheckpointError(
                f"{path} holds no packed weights: its metadata has no {VERSION_KEY!r}; {_HOW}"
            )
        if version != VERSION:
            raise CheckpointError(
                f"{path} has the version {version!r}; {VERSION} is read: {_HOW} of this version"
            )
        text = metadata.get(LAYERS_KEY, "")
        if checksum(text) != metadata.get(CHECKSUM_KEY):
            raise CheckpointError(
                f"{path}: the metadata {LAYERS_KEY!r} are damaged: they do not fit their checksum; "
                f"{_HOW} anew"
            )
        self._described = self._descriptions(text)
        belong = {full for name in self._described for full in self._parts(name).values()}
        others = [name for name in self._source.names if name not in belong]
        self.layers: Mapping[str, Layer] = Lazy(self._described, self._layer, f"{path}: the layer")
        self.tensors: Mapping[str, torch.Tensor] = Lazy(others, self._tensor, f"{path}: the tensor")

    @staticmethod
    def recognizes(path: Path | str) -> bool:
        """Whether a file, or the only one of a folder, says that it holds packed weights.

        It is False for what cannot be read.
        """
        path = Path(path)
        if not (path.is_dir() or (path.is_file() and path.name.endswith(".safetensors"))):
            return False
        try:
            return VERSION_KEY in TensorSource.open(path).metadata
        except CheckpointError:
            return False

    def activation(self, name: str) -> str | None:
        """What a layer quantizes activations to; None for 16 bits and for weights alone."""
        return self._described[name].get("activation")

    def described(self, name: str) -> Mapping[str, Any]:
        """What a layer is without reading it: weight, n, k, operand_bits, parts and activation."""
        return self._described[name]

    def stored_bytes(self, name: str) -> int:
        """The size of a layer's tensors."""
        shapes = (
            (self._source.dtype(n), self._source.shape(n)) for n in self._parts(name).values()
        )
        return sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in shapes)

    def _descriptions(self, text: str) -> dict[str, dict[str, Any]]:
        where = f"{self.path}: the metadata {LAYERS_KEY!r}"
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{where} are no JSON ({error}); {_HOW}") from error
        if not isinstance(found, dict):
            raise CheckpointError(f"{where} are no object of descriptions; {_HOW}")
        for name, description in found.items():
            keys = set(description) if isinstance(description, dict) else set()
            texts = all(
                isinstance(value, str) or (key == "activation" and value is None)
                for key, value in (description.items() if keys else ())
            )
            if not texts or not _REQUIRED <= keys <= _REQUIRED | {"activation"}:
                raise CheckpointError(
                    f"{where} describe {name!r} by {description!r}; possible: texts for "
                    f"{', '.join(sorted(_REQUIRED))}, and for layers activation"
                )
        return found

    def _parts(self, name: str) -> dict[str, str]:
        """The names of a layer's tensors, which are those that its description lists."""
        listed = self._described[name]["parts"].split()
        if unknown := [part for part in listed if part not in PARTS]:
            raise CheckpointError(
                f"{self.path}: {name} has the part {unknown[0]!r}; possible: {', '.join(PARTS)}"
            )
        for part in PARTS:
            if (f"{name}.{part}" in self._source) != (part in listed):
                what = "is missing" if part in listed else "is there, but not in its description"
                raise CheckpointError(
                    f"{self.path}: the tensor {name}.{part} {what}; its parts are "
                    f"{', '.join(listed)}: {_HOW} anew"
                )
        return {part: f"{name}.{part}" for part in listed}

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self._source.get(name)
        return tensor if self._device is None else tensor.to(self._device)

    def _layer(self, name: str) -> Layer:
        described = self._described[name]
        parts = {part: self._source.get(full) for part, full in self._parts(name).items()}
        packed = {part: parts.pop(part) for part in PACKED_PARTS if part in parts}
        try:
            metadata = {key: described[key] for key in _REQUIRED}
            weight = PackedWeight.from_tensors(metadata, packed)
            self._check_numbers(name, weight, parts)
            if self._device is not None:
                weight = weight.to(self._device)
            if "activation" in described:
                activation = described["activation"]
                bias = parts.pop("bias", None)
                return QuantLinear(weight, bias, activation=activation, **parts)
        except UnsupportedError as error:
            raise CheckpointError(f"{self.path}: {name}: {error}") from error
        if parts:
            raise CheckpointError(
                f"{self.path}: {name}.{min(parts)} is there, but {name} is described as a weight "
                "alone; a layer's description has an activation"
            )
        return weight

    def _check_numbers(
        self, name: str, weight: PackedWeight, others: Mapping[str, torch.Tensor]
    ) -> None:
        """Refuses scales, zero points and biases that no writer stores."""
        spec = weight.spec
        bad = {"scales": _not_finite(weight.scales, spec)}
        if weight.zeros is not None:
            if spec.zero_point == "integer":
                bad["zeros"] = weight.zeros.int() >= 1 << spec.dtype.bits
            else:
                bad["zeros"] = ~torch.isfinite(weight.zeros)
        if weight.second_scale is not None:
            bad["second_scale"] = ~torch.isfinite(weight.second_scale)
        for part, tensor in others.items():
            if tensor.is_floating_point():
                bad[part] = ~torch.isfinite(tensor.float())
        for part, where in bad.items():
            if bool(where.any()):
                at = [int(place) for place in where.nonzero()[0]]
                raise CheckpointError(
                    f"{self.path}: the tensor {name}.{part} holds no possible number at {at}: the "
                    f"file is damaged; {_HOW} anew"
                )


def _not_finite(scales: torch.Tensor, spec: WeightSpec) -> torch.Tensor:
    if spec.scale_dtype == float8e8m0:
        return scales == 255
    if spec.scale_dtype == float8e4m3:
        return (scales.view(torch.uint8) & 127) == 127
    return ~torch.isfinite(scales)
