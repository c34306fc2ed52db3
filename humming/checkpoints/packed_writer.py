"""Files of packed weights, written: safetensors whose metadata describe each layer.

They are written layer by layer in one pass, so that memory holds a layer at a time. The header
stands first but is known last; room is left for as much as it can become, and filled with spaces.
"""

import json
import os
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from humming.checkpoints.tensors import TORCH_NAMES
from humming.errors import CheckpointError, UnsupportedError, check_type
from humming.nn import QuantLinear
from humming.packing import PackedWeight

VERSION = "1"
VERSION_KEY, LAYERS_KEY = "humming_packed", "humming_layers"
"""Keys of the metadata: the version, and a JSON object of each layer's description by name."""
CHECKSUM_KEY = "humming_layers_crc32"
"""Its checksum: a description that is damaged may fit the tensors as well."""
PACKED_PARTS = ("codes", "scales", "zeros", "second_scale")
INPUT_PARTS = ("input_permutation", "input_scale", "activation_scale")
PARTS = (*PACKED_PARTS, "bias", *INPUT_PARTS)
"""What the tensors of a layer are called, after its name and a dot."""

Layer = QuantLinear | PackedWeight

_STORED_NAMES = {name: stored for stored, name in TORCH_NAMES.items()}
_ALIGNMENT_BYTES = 64
# Kernels and bricks want tensors that begin at a multiple of this.
_TENSOR_ALIGNMENT_BYTES = 16
# What safetensors reads at most, and what an entry takes beside its name: dtype, shape, offsets.
_MOST_HEADER_BYTES = 100_000_000 - _ALIGNMENT_BYTES
_ENTRY_BYTES, _DESCRIPTION_BYTES, _FIXED_BYTES = 160, 400, 400


def save_packed(
    layers: Mapping[str, Layer],
    path: Path | str,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Writes packed weights and layers to a safetensors file, whole or not at all.

    The file depends on no device: what is packed once runs on all of them. `load_packed` and
    `load_model` read it.

    Args:
        layers: by the names that modules have in the model.
        path: the file, `*.safetensors`; one that is there is replaced.
        tensors: further ones by name, such as embeddings and norms.

    Raises:
        UnsupportedError: names collide, or a tensor is of a type that safetensors does not have.
        CheckpointError: the file cannot be written.
    """
    tensors = tensors or {}
    asked = "saving packed weights"
    check_type(asked, "the layers", layers, Mapping, "Pass a mapping of names to layers.")
    check_type(asked, "the tensors", tensors, Mapping, "Pass a mapping of names to tensors.")
    with PackedWriter(path, layers, tensors) as writer:
        for name, layer in layers.items():
            writer.add(name, layer)
        for name, tensor in tensors.items():
            writer.add_tensor(name, tensor)


class PackedWriter:
    """Writes a file layer by layer; when its context ends in an error, nothing is left.

    Args:
        path: the file; it is there when the context has ended.
        layers, tensors: names of all that will be added, or more.
    """

    def __init__(self, path: Path | str, layers: Iterable[str], tensors: Iterable[str]) -> None:
        self.path = Path(path)
        if not self.path.name.endswith(".safetensors"):
            raise UnsupportedError(
                f"a file of packed weights {self.path.name}",
                "it is a safetensors file, which others know by its name",
                "End its name in .safetensors.",
            )
        most = _most_header_bytes(layers, tensors)
        whole = -(-(8 + min(most, _MOST_HEADER_BYTES)) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._room = whole - 8
        self._entries: dict[str, dict[str, Any]] = {}
        self._descriptions: dict[str, dict[str, str | None]] = {}
        self._deferred: dict[str, torch.Tensor] = {}
        self._end = 0

    def __enter__(self) -> "PackedWriter":
        with self._writing():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._temporary = self.path.with_name(f".{self.path.name}-{secrets.token_hex(4)}")
            self._file = self._temporary.open("xb")
            self._file.seek(8 + self._room)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                with self._writing():
                    self._finish()
                    self._file.close()
                    self._temporary.replace(self.path)
        finally:
            # Where the disk is full, closing fails as well.
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):
                self._temporary.unlink()

    def add(self, name: str, layer: Layer) -> None:
        """Write a layer's tensors.

        Raises:
            UnsupportedError: it is no packed weight, or its name is taken.
        """
        check_type("saving packed weights", "a name", name, str, "Pass a module's name.")
        kinds, how = (QuantLinear, PackedWeight), "Pack it with humming.pack, or add a tensor."
        check_type(f"saving {name!r} packed", "it", layer, kinds, how)
        weight = layer.packed if isinstance(layer, QuantLinear) else layer
        description: dict[str, str | None] = dict(weight.metadata())
        parts: dict[str, torch.Tensor | None] = dict(weight.tensors())
        if isinstance(layer, QuantLinear):
            parts |= {part: getattr(layer, part) for part in ("bias", *INPUT_PARTS)}
            description["activation"] = layer.activation
        present = {part: tensor for part, tensor in parts.items() if tensor is not None}
        for part, tensor in present.items():
            self.add_tensor(f"{name}.{part}", tensor)
        # A part whose name is damaged would be missed by nobody else.
        self._descriptions[name] = {**description, "parts": " ".join(present)}

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor under its own name.

        Raises:
            UnsupportedError: its name is taken, or safetensors has no such type.
        """
        asked = f"saving the tensor {name!r}"
        check_type(asked, "it", tensor, torch.Tensor, "Pass a tensor.")
        stored = _STORED_NAMES.get(str(tensor.dtype).removeprefix("torch."))
        if stored is None or tensor.layout != torch.strided or tensor.is_meta:
            kind = f"it is {tensor.dtype}, {tensor.layout}, on {tensor.device}"
            raise UnsupportedError(asked, kind, "Dense tensors of real numbers can be saved.")
        if name.encode(errors="replace").decode() != name:
            raise UnsupportedError(asked, "its name is no Unicode text", "Give it another name.")
        if name in self._entries or name in self._deferred:
            raise UnsupportedError(asked, "another has this name", "Give each name once.")
        if tensor.nbytes % _TENSOR_ALIGNMENT_BYTES:
            # It would move all that follow off their alignment, so it goes to the end.
            self._deferred[name] = tensor.detach().cpu().clone()
        else:
            self._write(name, stored, tensor)

    def _write(self, name: str, stored: str, tensor: torch.Tensor) -> None:
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        begin, self._end = self._end, self._end + data.numel()
        self._entries[name] = {
            "dtype": stored,
            "shape": list(tensor.shape),
            "data_offsets": [begin, self._end],
        }
        with self._writing():
            self._file.write(data.numpy().data)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be written: {error}") from error

    def _finish(self) -> None:
        """What does not end on an alignment, then the header before all."""
        for name, tensor in self._deferred.items():
            self._write(name, _STORED_NAMES[str(tensor.dtype).removeprefix("torch.")], tensor)
        for name, description in self._descriptions.items():
            for part in PARTS:
                if (
                    f"{name}.{part}" in self._entries
                    and part not in str(description["parts"]).split()
                ):
                    raise UnsupportedError(
                        f"saving the tensor {name + '.' + part!r}",
                        f"it would be read as the {part} of the layer {name!r}",
                        "Give it another name.",
                    )
        layers = json.dumps(self._descriptions, separators=(",", ":"), ensure_ascii=False)
        # The format is what loaders of torch's own models look for.
        metadata = {
            "format": "pt",
            VERSION_KEY: VERSION,
            LAYERS_KEY: layers,
            CHECKSUM_KEY: checksum(layers),
        }
        whole = {"__metadata__": metadata, **self._entries}
        header = json.dumps(whole, separators=(",", ":"), ensure_ascii=False).encode()
        if len(header) > self._room:
            raise UnsupportedError(
                f"a file of {len(self._entries)} tensors",
                f"their names and shapes take {len(header)} bytes, and there is room for "
                f"{self._room}",
                "Save parts of the model in files of their own, and name all that is saved.",
            )
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))
        self._file.flush()
        os.fsync(self._file.fileno())


def checksum(text: str) -> str:
    """CRC-32 of a text, in hexadecimal digits."""
    # What no header can spell is damaged anyway.
    return f"{zlib.crc32(text.encode(errors='replace')):08x}"


def _most_header_bytes(layers: Iterable[str], tensors: Iterable[str]) -> int:
    """What the header of all these takes at most."""
    total = _FIXED_BYTES
    for name in layers:
        # In the metadata a description is a string within a string.
        quoted = len(json.dumps(json.dumps(str(name), ensure_ascii=False)).encode())
        total += quoted + _DESCRIPTION_BYTES
        total += len(PARTS) * (quoted + _ENTRY_BYTES)
    return total + sum(len(json.dumps(str(name)).encode()) + _ENTRY_BYTES for name in tensors)
