"""GGUF files: a header, descriptions of tensors, and blocks of quantized values.

A file describes itself, so that the configuration of its method is made of its own header. Sizes
are stored from the innermost on, K before N.
"""

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from humming.checkpoints.config_keys import ConfigKeys
from humming.checkpoints.decisions import Decision, Linear
from humming.checkpoints.gguf_blocks import BLOCK_TYPES, BlockType, weight_of_blocks
from humming.checkpoints.module_parts import FLOATS, ModuleParts, refuse_bad_numbers
from humming.checkpoints.scaled import plain_linear
from humming.checkpoints.tensors import TensorSource, matrices
from humming.errors import CheckpointError
from humming.formats import WeightSpec

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_MOST_DIMENSIONS = 4
_EXPERT = re.compile(r"(.+_exps)\.(\d{1,6})")
# Files of these architectures hold the rows of queries and keys in the order of a rotary embedding
# that turns neighbours, whereas the original models turn halves.
_REORDERED = ("llama",)
_REORDERED_MODULES = (".attn_q", ".attn_k")


class _Tensor(NamedTuple):
    """Where a tensor lies.

    Attributes:
        kind: its type.
        shape: from the outermost size on, in values.
        at: offset of its first byte in the file.
    """

    kind: BlockType
    shape: tuple[int, ...]
    at: int

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.kind.values * self.kind.size


class GgufFile(TensorSource):
    """The tensors of a GGUF file; blocks are given as bytes, uint8 [..., N, bytes of a row].

    Args:
        path: the file, which is mapped into memory.

    Raises:
        CheckpointError: it is no such file, or truncated.
    """

    def __init__(self, path: Path | str) -> None:
        super().__init__({}, str(path))
        try:
            # Tensors want memory that could be written; what is written stays in this process.
            with Path(path).open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        reader = _Reader(self._data, self.where)
        self.metadata, self._at = reader.header()

    @property
    def config(self) -> dict[str, Any]:
        """What the method reads: architecture, number of files, and type and shape of tensors."""
        return {
            "quant_method": Gguf.name,
            "architecture": self.metadata.get("general.architecture"),
            "files": self.metadata.get("split.count"),
            "types": {name: tensor.kind.name for name, tensor in self._at.items()},
        }

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors."""
        return tuple(self._at)

    def __contains__(self, name: object) -> bool:
        return name in self._at

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor as `get` gives it."""
        tensor = self._tensor(name)
        if tensor.kind.plain is not None:
            return tensor.shape
        return (*tensor.shape[:-1], tensor.row_bytes)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor as `get` gives it."""
        return self._tensor(name).kind.plain or torch.uint8

    def get(self, name: str) -> torch.Tensor:
        """A tensor, mapped: an expert of many is cut out of all of them."""
        tensor = self._tensor(name)
        rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
        data = np.frombuffer(self._data, np.uint8, rows * tensor.row_bytes, tensor.at)
        found = torch.from_numpy(data)
        return found.view(self.dtype(name)).reshape(self.shape(name))

    def _tensor(self, name: str) -> _Tensor:
        if name not in self._at:
            raise CheckpointError(f"{self.where} has no tensor {name!r}")
        return self._at[name]


class _Reader:
    """Reads the header of a file, never beyond its end."""

    def __init__(self, data: mmap.mmap, where: str) -> None:
        self._data, self._at, self._where = data, 0, where

    def header(self) -> tuple[dict[str, Any], dict[str, _Tensor]]:
        """Metadata by key, and tensors by name."""
        if self._bytes(4) != _MAGIC:
            raise CheckpointError(f"{self._where} is no GGUF file: it starts otherwise")
        version = self._number("I")
        if version not in _VERSIONS:
            known = " and ".join(map(str, _VERSIONS))
            raise CheckpointError(
                f"{self._where} is a GGUF file of version {version}; {known} are read"
            )
        tensors, pairs = self._count(24), self._count(13)
        metadata = {}
        for _ in range(pairs):
            key = self._string()
            metadata[key] = self._value(self._number("I"), key)
        described = [self._description() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment < 1 << 20:
            raise CheckpointError(f"{self._where}: general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        placed: dict[str, _Tensor] = {}
        for name, kind, shape, offset in described:
            if name in placed:
                raise CheckpointError(f"{self._where} holds two tensors {name!r}")
            placed[name] = self._placed(name, _Tensor(kind, shape, start + offset))
        return metadata, placed

    def _description(self) -> tuple[str, BlockType, tuple[int, ...], int]:
        name, dimensions = self._string(), self._number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise CheckpointError(f"{self._where}: {name} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        number, offset = self._number("I"), self._number("Q")
        if number not in BLOCK_TYPES:
            raise CheckpointError(
                f"{self._where}: {name} is of the type {number}, which is unknown"
            )
        return name, BLOCK_TYPES[number], shape, offset

    def _placed(self, name: str, tensor: _Tensor) -> _Tensor:
        """A tensor that lies in the file."""
        if 0 in tensor.shape or tensor.shape[-1] % tensor.kind.values:
            raise CheckpointError(
                f"{self._where}: {name} has the shape {list(tensor.shape)}; rows of "
                f"{tensor.kind.name} are whole blocks of {tensor.kind.values} values"
            )
        size = tensor.row_bytes
        for extent in tensor.shape[:-1]:
            size *= extent
        if tensor.at + size > len(self._data):
            raise CheckpointError(
                f"{self._where} is truncated: {name} ends at byte {tensor.at + size}, the file at "
                f"{len(self._data)}"
            )
        return tensor

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise CheckpointError(f"{self._where} is truncated: its header ends beyond the file")
        self._at += count
        return self._data[self._at - count : self._at]

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}")))[0]

    def _count(self, least_bytes: int) -> int:
        """A number of things that take some bytes each, which the rest of the file can hold."""
        count = int(self._number("Q"))
        if count * least_bytes > len(self._data) - self._at:
            raise CheckpointError(f"{self._where} is truncated: it promises {count} entries")
        return count

    def _string(self) -> str:
        return self._bytes(self._number("Q")).decode("utf-8", "replace")

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise CheckpointError(f"{self._where}: {key} is of the type {kind}, which is unknown")
        element = self._number("I")
        if element == _STRING:
            return [self._string() for _ in range(self._count(8))]
        if element not in _NUMBERS:
            raise CheckpointError(f"{self._where}: {key} is an array of the type {element}")
        width = struct.calcsize(_NUMBERS[element])
        count = self._count(width)
        return struct.unpack(f"<{count}{_NUMBERS[element]}", self._bytes(count * width))


class Gguf:
    """Reads GGUF files; see `Method`. Its configuration is `GgufFile.config`.

    A module is the name of a tensor without `.weight`; of a tensor [E, N, K] of experts it is that
    and the number of one: `blk.0.ffn_up_exps.3`.
    """

    name = "gguf"

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        keys = ConfigKeys(config, where)
        self._where = where
        keys.one_of("quant_method", (self.name,))
        self._architecture = keys.take("architecture", str, "")
        files = keys.take("files", int, 1)
        self._types: Mapping[str, str] = keys.take("types", Mapping)
        keys.finish()
        self._kinds = {kind.name: kind for kind in BLOCK_TYPES.values()}
        self.notes: tuple[str, ...] = ()
        if files > 1:
            self.notes = (f"it is one of {files} files; the tensors of the others are not seen",)

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        """Whether a config is of this method."""
        return config.get("quant_method") == cls.name

    def decide(self, module: str) -> Decision:
        """What the file says of a module: the type of its weight."""
        name = self._types.get(_tensor_of(module)[0])
        kind = None if name is None else self._kinds.get(name)
        if kind is None:
            why = "there is no weight of this name" if name is None else f"{name} is unknown"
            return Decision(module, "refused", None, None, why)
        why = f"its weight is {kind.name}"
        if kind.plain is not None:
            return Decision(module, "plain", None, None, why)
        if not kind.weight:
            possible = ", ".join(row.name for row in BLOCK_TYPES.values() if row.weight)
            why = f"{why}: {kind.why_not}; types that are read: {possible}"
            return Decision(module, "refused", None, None, why)
        return Decision(module, "quantized", WeightSpec.parse(kind.weight), None, why)

    def modules(self, tensors: TensorSource) -> Iterator[str]:
        """The modules with a matrix, those of experts by their numbers."""
        for module in matrices(tensors):
            shape = tensors.shape(f"{module}.weight")
            if len(shape) == 3 and _EXPERT.fullmatch(f"{module}.0"):
                yield from (f"{module}.{index}" for index in range(shape[0]))
            else:
                yield module

    def tensors_of(self, module: str, tensors: TensorSource) -> Iterator[str]:
        """Its weight, or that of all experts of its layer, and its bias."""
        name, expert = _tensor_of(module)
        names = (name, f"{module}.bias") if expert is None else (name,)
        yield from (name for name in names if name in tensors)

    def read(self, module: str, decision: Decision, tensors: TensorSource) -> Linear:
        """The module, with weights in the order of the file."""
        decision.require_readable(self._where)
        name, expert = _tensor_of(module)
        parts = ModuleParts(tensors, module, name.removesuffix("weight"))
        if self._architecture in _REORDERED and module.endswith(_REORDERED_MODULES):
            parts.note(
                "rows of queries and keys are in the order of a rotary embedding of neighbours"
            )
        if decision.action != "quantized" and expert is None:
            return plain_linear(parts, decision)
        kind = self._kinds[self._types[name]]
        dtypes = FLOATS if kind.plain is not None else (torch.uint8,)
        data = parts.take("weight", dtypes, (2,) if expert is None else (3,))
        if expert is not None:
            if expert >= data.shape[0]:
                raise parts.error(
                    "weight", f"has {data.shape[0]} experts", f"{expert} is none, counted from 0."
                )
            data = data[expert]
        if kind.plain is not None:
            return Linear(data, notes=tuple(parts.notes))
        k = data.shape[1] // kind.size * kind.values
        weight = weight_of_blocks(kind, data, k)
        weight = refuse_bad_numbers(parts, ("weight", "weight"), weight)
        if kind.note:
            parts.note(f"{kind.name}: {kind.note}")
        bias = parts.bias(weight.shape[0]) if expert is None else None
        return Linear(weight, bias, notes=tuple(parts.notes))


def _tensor_of(module: str) -> tuple[str, int | None]:
    """The tensor that holds a module, and which of its experts the module is."""
    found = _EXPERT.fullmatch(module)
    if found is None:
        return f"{module}.weight", None
    return f"{found[1]}.weight", int(found[2])
