"""The tensors of a checkpoint: safetensors files with or without an index, or a mapping."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from humming.checkpoints.json_files import read_json
from humming.errors import CheckpointError

INDEX = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
# Of types that this torch may lack the name alone is known; they are refused when they are read.
TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}


# What a weight's name ends with, and how many dimensions it has at least.
_WEIGHTS = ((".weight", 2), (".qweight", 2), (".weight_packed", 2))


class TensorSource:
    """Tensors by name; of those in files only the headers are read until one is asked for.

    Args:
        tensors: what it holds, for checkpoints that are in memory.

    Attributes:
        where: the folder or file, for errors.
        metadata: what a file says beside its tensors; empty where there are several.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], where: str = "a mapping") -> None:
        self._tensors, self.where = dict(tensors), where
        self.metadata: Mapping[str, Any] = {}

    @staticmethod
    def open(path: Path | str) -> "TensorSource":
        """The tensors of a safetensors file, an index, or a folder of these.

        Raises:
            CheckpointError: a file is missing, truncated, or not what its name says.
        """
        path = Path(path)
        if path.is_dir():
            if (path / INDEX).is_file():
                return _Files(*_indexed(path / INDEX))
            found = sorted(path.glob(f"*{_SUFFIX}"))
            if not found:
                raise CheckpointError(
                    f"{path} holds no tensors: neither {INDEX} nor a file *{_SUFFIX}"
                )
            return _Files(str(path), dict.fromkeys(found))
        if path.name.endswith(".json"):
            return _Files(*_indexed(path))
        return _Files(str(path), {path: None})

    @staticmethod
    def of_files(paths: Iterable[Path | str], where: str) -> "TensorSource":
        """The tensors of some safetensors files, all of them.

        Raises:
            CheckpointError: as for `open`.
        """
        return _Files(where, dict.fromkeys(map(Path, paths)))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors."""
        return tuple(self._tensors)

    def says(self, key: str) -> list[str]:
        """The names of the files whose metadata have a key."""
        return [self.where] if key in self.metadata else []

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    @cached_property
    def _of_modules(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, list[str]] = defaultdict(list)
        for name in self.names:
            found[name.rpartition(".")[0]].append(name)
        return {module: tuple(names) for module, names in found.items()}

    def names_of(self, module: str) -> tuple[str, ...]:
        """The names that are a module's, a dot, and a suffix without any."""
        return self._of_modules.get(module, ())

    def modules_with(self, parts: Iterable[str]) -> Iterator[str]:
        """The modules that have tensors of some suffix."""
        wanted = set(parts)
        for module, names in self._of_modules.items():
            if any(name.rpartition(".")[2] in wanted for name in names):
                yield module

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self.get(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return self.get(name).dtype

    def get(self, name: str) -> torch.Tensor:
        """A tensor, on the CPU.

        Raises:
            CheckpointError: there is none of this name, or it cannot be read.
        """
        if name not in self._tensors:
            raise CheckpointError(f"{self.where} has no tensor {name!r}")
        return self._tensors[name]


class Asked(TensorSource):
    """The tensors of another source, which notes the names that are asked for.

    Attributes:
        asked: these.
    """

    def __init__(self, source: TensorSource) -> None:
        super().__init__({}, source.where)
        self._source, self.metadata = source, source.metadata
        self.asked: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        return self._source.names

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return name in self._source

    def shape(self, name: str) -> tuple[int, ...]:
        self.asked.add(name)
        return self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        self.asked.add(name)
        return self._source.dtype(name)

    def get(self, name: str) -> torch.Tensor:
        self.asked.add(name)
        return self._source.get(name)


class _Files(TensorSource):
    """Tensors of safetensors files, mapped into memory.

    Args:
        where: what they are called in errors.
        files: the files, with the names that an index promises of each, or None.
    """

    def __init__(self, where: str, files: Mapping[Path, set[str] | None]) -> None:
        super().__init__({}, where)
        self._open: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        for path, promised in files.items():
            held = self._names_of(path)
            if promised is not None and (missing := sorted(promised - held)):
                raise CheckpointError(
                    f"{where} places {missing[0]!r} in {path.name}, which does not hold it"
                )
            # What an index does not place is no part of the checkpoint.
            for name in held if promised is None else promised:
                if name in self._file_of:
                    raise CheckpointError(
                        f"{where}: {name!r} is in {self._file_of[name].name} and in {path.name}"
                    )
                self._file_of[name] = path
        if len(self._open) == 1:
            self.metadata = self._metadata_of(path)

    def says(self, key: str) -> list[str]:
        return [path.name for path in self._open if key in self._metadata_of(path)]

    def _metadata_of(self, path: Path) -> Mapping[str, Any]:
        return self._open[path].metadata() or {}

    def _names_of(self, path: Path) -> set[str]:
        from safetensors import SafetensorError, safe_open

        try:
            self._open[path] = safe_open(path, framework="pt")
            return set(self._open[path].keys())
        except (OSError, SafetensorError, ValueError, RuntimeError) as error:
            told = f"{path} cannot be read as a safetensors file (is it whole?): {error}"
            raise CheckpointError(told) from error

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._file_of))

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise CheckpointError(f"{self.where} has no tensor {name!r}")
        return self._open[self._file_of[name]].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        stored = self._slice(name).get_dtype()
        found = getattr(torch, TORCH_NAMES.get(stored, ""), None)
        if not isinstance(found, torch.dtype):
            raise CheckpointError(
                f"{self._file_of[name]}: {name} is of the type {stored}, which torch "
                f"{torch.__version__} does not have"
            )
        return found

    def get(self, name: str) -> torch.Tensor:
        from safetensors import SafetensorError

        self.dtype(name)
        path = self._file_of[name]
        try:
            tensor: torch.Tensor = self._open[path].get_tensor(name)
        except (OSError, SafetensorError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {error}") from error
        return tensor


def _indexed(path: Path) -> tuple[str, dict[Path, set[str] | None]]:
    """The files that an index names, and what it places in each."""
    index = read_json(path)
    placed = index.get("weight_map") if isinstance(index, Mapping) else None
    if not isinstance(placed, Mapping) or not placed:
        raise CheckpointError(f"{path}: 'weight_map' does not map tensors to files")
    files: dict[Path, set[str] | None] = {}
    for name, file in placed.items():
        # An index speaks of files beside it; any other place is none of a checkpoint.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(_SUFFIX):
            raise CheckpointError(f"{path}: {name!r} is in {file!r}, no file *{_SUFFIX} beside it")
        held = files.setdefault(path.parent / file, set())
        if held is not None:
            held.add(name)
    return str(path), files


def matrices(tensors: TensorSource) -> list[str]:
    """The modules with a tensor that is named as a weight and has two dimensions or more."""
    found: set[str] = set()
    for name in tensors.names:
        for suffix, dims in _WEIGHTS:
            if name.endswith(suffix) and len(tensors.shape(name)) >= dims:
                found.add(name.removesuffix(suffix))
    return sorted(found)
