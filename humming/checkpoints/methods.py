"""The methods of quantization that checkpoints name, and where a checkpoint names them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from humming.checkpoints.autoround import AutoRound
from humming.checkpoints.awq import Awq
from humming.checkpoints.bitnet import BitNet
from humming.checkpoints.compressed_tensors import CompressedTensors
from humming.checkpoints.decisions import Decision, Linear
from humming.checkpoints.fp8 import Fp8
from humming.checkpoints.gguf import Gguf
from humming.checkpoints.gptq import Gptq
from humming.checkpoints.json_files import read_json
from humming.checkpoints.modelopt import ModelOpt
from humming.checkpoints.mxfp4 import Mxfp4
from humming.checkpoints.quark import Quark
from humming.checkpoints.tensors import TensorSource
from humming.errors import CheckpointError


class Method(Protocol):
    """A way to quantize a model and to store it.

    The constructor `(config, where)` reads every key of the configuration: one that it does not
    know, or whose value cannot be honoured, is a `CheckpointError`.

    Attributes:
        name: what messages call it.
        notes: what the configuration says that does not matter here, or has to be assumed.
    """

    name: str
    notes: tuple[str, ...]

    def __init__(self, config: Mapping[str, Any], where: str) -> None: ...

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        """Whether a configuration is of this method. It never fails."""

    def decide(self, module: str) -> Decision:
        """What the configuration alone says of a module."""

    def read(self, module: str, decision: Decision, tensors: TensorSource) -> Linear:
        """The module. Where its tensors contradict the decision they are right, and noted.

        Raises:
            CheckpointError: a tensor is missing or damaged, or the decision is `refused`.
        """


@runtime_checkable
class Lists(Protocol):
    """A method whose modules are not each a group of tensors of the same name."""

    def modules(self, tensors: TensorSource) -> Iterable[str]:
        """The names of all modules that hold a matrix."""

    def tensors_of(self, module: str, tensors: TensorSource) -> Iterable[str]:
        """The names of the tensors that a module is in."""


METHODS: tuple[type[Method], ...] = (
    Gptq,
    Awq,
    AutoRound,
    CompressedTensors,
    Fp8,
    ModelOpt,
    Mxfp4,
    Quark,
    BitNet,
    Gguf,
)
"""Every method; at most one recognizes a configuration."""

_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")


def method_of(config: Mapping[str, Any], where: str) -> Method:
    """The method that a configuration names, made with it.

    Raises:
        CheckpointError: no method recognizes it, or the one that does refuses it.
    """
    for method in METHODS:
        if method.recognizes(config):
            return method(config, where)
    named = config.get("quant_method")
    if named == "humming":
        raise CheckpointError(
            f"{where}: transformers saved this model with layers of humming; possible: "
            "AutoModelForCausalLM.from_pretrained after `import humming.integrations.transformers`"
        )
    what = f"the quantization method {named!r} is unknown" if named else "no method is named"
    known = ", ".join(method.name for method in METHODS)
    raise CheckpointError(f"{where}: {what}; methods that are read: {known}")


def find_config(path: Path) -> tuple[Mapping[str, Any], str] | None:
    """The quantization configuration of a folder or of a JSON file, and where it stands.

    Of several the one in config.json holds, which is what engines read first.

    Raises:
        CheckpointError: a file is no JSON object, or what it holds is no configuration.
    """
    if path.is_file():
        return _within(path)
    config = path / "config.json"
    found = _within(config) if config.is_file() else None
    for name in _FILES:
        if found is None and (path / name).is_file():
            found = _within(path / name)
    return found


def unused_configs(path: Path, where: str) -> tuple[str, ...]:
    """The files of a folder that hold a configuration too, beside the one that `where` says."""
    return tuple(name for name in _FILES if (path / name).is_file() and name not in where)


def _within(path: Path) -> tuple[Mapping[str, Any], str] | None:
    """The configuration in one file: the whole of it where the file is for nothing else."""
    whole = read_json(path)
    if not isinstance(whole, Mapping):
        raise CheckpointError(f"{path} holds no object of keys and values")
    for outer in (None, *_NESTED):
        inside = whole if outer is None else whole.get(outer)
        if not isinstance(inside, Mapping):
            continue
        for key in ("quantization_config", "compression_config"):
            found = inside.get(key)
            where = f"{path}: {key if outer is None else f'{outer}.{key}'}"
            if found is None:
                continue
            if not isinstance(found, Mapping):
                raise CheckpointError(f"{where} is no object of keys and values")
            return found, where
    return None if path.name == "config.json" else (whole, str(path))
