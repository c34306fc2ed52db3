"""A checkpoint as one thing: its configuration, its tensors, and its modules."""

import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from humming.checkpoints.decisions import Decision, Linear
from humming.checkpoints.fusing import fuse
from humming.checkpoints.gguf import GgufFile
from humming.checkpoints.methods import Lists, Method, find_config, method_of, unused_configs
from humming.checkpoints.module_parts import FLOATS, ModuleParts
from humming.checkpoints.packed_writer import VERSION_KEY
from humming.checkpoints.scaled import plain_linear
from humming.checkpoints.tensors import Asked, TensorSource, matrices
from humming.errors import CheckpointError, UnsupportedError, check_type
from humming.quantized import QuantizedWeight

# Scales of caches and of products that are no linear layers stand among the tensors of those that
# are, and belong to the model.
_OF_ATTENTION = ("k_scale", "v_scale", "q_scale", "prob_scale", "output_scale")
# Tensors of a weight by their suffixes: what holds its codes or numbers, and what nothing but a
# quantized weight has.
_WEIGHTS = ("weight", "qweight", "weight_packed")
_BESIDE_WEIGHTS = ("qzeros", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point")
# Parts of names of tensors that change the numbers of a layer; and how names of those begin that
# belong to activations, which a layer that reads none of them does not quantize by them.
_TELLING = ("scale", "zero", "idx", "perm", "lora", "rotation", "smooth")
_OF_ACTIVATIONS = ("input_", "output_")


@dataclass(frozen=True)
class Checkpoint:
    """A quantized model in files.

    Attributes:
        path: the folder or file.
        where: the place of the configuration, empty without one.
        method: how it is quantized, None where no configuration says so.
        tensors: None where there are configurations only.
    """

    path: Path
    where: str
    method: Method | None
    tensors: TensorSource | None

    @classmethod
    def open(cls, path: Path | str) -> "Checkpoint":
        """Reads a configuration and the headers of the tensors.

        Args:
            path: a folder; a safetensors file, or the index of several, with its configuration
                beside it; a GGUF file; or a JSON file with nothing but a configuration.

        Raises:
            CheckpointError: a file is missing or damaged, or the method is not one that is read.
        """
        path = Path(path)
        if not path.exists():
            raise CheckpointError(
                f"{path} does not exist; possible: a folder, a *.safetensors or *.gguf file"
            )
        if path.suffix == ".gguf":
            file = GgufFile(path)
            return cls(path, str(path), method_of(file.config, str(path)), file)
        holds_tensors = path.name.endswith((".safetensors", ".safetensors.index.json"))
        found = find_config(path.parent if holds_tensors else path)
        has_tensors = holds_tensors or (path.is_dir() and any(path.glob("*.safetensors*")))
        tensors = TensorSource.open(path) if has_tensors else None
        if tensors is not None and (packed := tensors.says(VERSION_KEY)):
            # The readers of packed weights take a folder with one file.
            several = f"; one file at a time, of {', '.join(packed)}" if len(packed) > 1 else ""
            raise CheckpointError(
                f"{path} holds packed weights; possible: humming.load_model and humming.load_packed"
                f"{several}"
            )
        if found is None and tensors is None:
            raise CheckpointError(
                f"{path} holds neither tensors nor a configuration of a quantization; possible: "
                "config.json, quantize_config.json, quant_config.json, hf_quant_config.json and "
                "*.safetensors"
            )
        config, where = found or ({}, "")
        return cls(path, where, method_of(config, where) if found else None, tensors)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What is to be known of all modules, as files are when it is asked first."""
        if self.method is None:
            return ()
        folder = self.path if self.path.is_dir() else self.path.parent
        unused = unused_configs(folder, self.where) if self.where != str(self.path) else ()
        return (
            *self.method.notes,
            *(f"{name} holds a configuration too, which is not used" for name in unused),
        )

    def modules(self) -> tuple[str, ...]:
        """The names of the modules that hold a matrix, without what the method tells apart."""
        if self.tensors is None:
            return ()
        if isinstance(self.method, Lists):
            return tuple(self.method.modules(self.tensors))
        if self.method is None:
            return tuple(matrices(self.tensors))
        # Modules of which the weight itself is lacking are not passed over.
        lacking = self.tensors.modules_with(_BESIDE_WEIGHTS)
        return tuple(sorted({*matrices(self.tensors), *lacking}))

    def quantized_modules(self) -> dict[str, tuple[str, ...]]:
        """The modules that are no plain layers by their tensors, and the names of these.

        What holds a weight of ordinary numbers is plain, whatever the configuration says.
        """
        if self.tensors is None:
            return {}
        found = {}
        for module in self.modules():
            if isinstance(self.method, Lists):
                names = tuple(self.method.tensors_of(module, self.tensors))
            else:
                names = _of_layer(self.tensors.names_of(module))
            if not self._is_plain(module, names):
                found[module] = names
        return found

    def _is_plain(self, module: str, names: Iterable[str]) -> bool:
        """Whether the names are those of a plain layer, and the weight is of ordinary numbers."""
        weight = ""
        for name in names:
            if not name.endswith((".weight", ".bias")):
                return False
            weight = name if name.endswith(".weight") else weight
        if not weight or self.tensors is None:
            return False
        is_packed = self.tensors.dtype(weight) not in FLOATS
        return not is_packed or self.decide(module).action == "plain"

    def notes_of(self, linear: Linear) -> tuple[str, ...]:
        """Of what is to be known of a module that was read, what is not so of all."""
        return tuple(note for note in linear.notes if note not in self.notes)

    def notes_on_tensors(self, owned: Collection[str]) -> tuple[str, ...]:
        """Where the tensors are not what the configuration says, of `quantized_modules()`."""
        if self.method is None:
            return ()
        plain = [
            module
            for module in self.modules()
            if module not in owned and self.decide(module).action == "quantized"
        ]
        notes: tuple[str, ...] = ()
        if plain:
            notes += (
                f"{len(plain)} modules are quantized by the configuration, but not by their "
                f"tensors; the first is {plain[0]}",
            )
        return notes if owned else (*notes, "no tensors are those of a quantized layer")

    def decide(self, module: str) -> Decision:
        """What the configuration says of a module; without one every module is plain."""
        if self.method is None:
            return Decision(module, "plain", None, None, "no configuration says otherwise")
        return self.method.decide(module)

    def read(self, module: str) -> Linear:
        """A module as its tensors hold it, with the notes of the whole checkpoint.

        Raises:
            CheckpointError: the checkpoint has no such module, or it cannot be read.
        """
        if self.tensors is None:
            raise CheckpointError(f"{self.path} holds no tensors, so that {module!r} is not there")
        decision = self.decide(module)
        if self.method is None:
            return plain_linear(ModuleParts(self.tensors, module), decision)
        if isinstance(self.method, Lists):
            found = self.method.read(module, decision, self.tensors)
        else:
            found = self._read_whole(self.method, module, decision, self.tensors)
        return replace(found, notes=tuple(dict.fromkeys(self.notes + found.notes)))

    def _read_whole(
        self, method: Method, module: str, decision: Decision, tensors: TensorSource
    ) -> Linear:
        """What a method reads of a module, if it looks at all tensors that change its numbers."""
        names = _of_layer(tensors.names_of(module))
        where = f"{tensors.where}: {module}"
        if not names:
            near = difflib.get_close_matches(module, self.modules(), 3, 0.4) or self.modules()[:3]
            raise CheckpointError(
                f"{tensors.where} has no module {module!r}, and no tensor that begins so; "
                f"possible: {', '.join(near)}"
            )
        if not any(name.rpartition(".")[2] in _WEIGHTS for name in names):
            raise CheckpointError(
                f"{where}: of its weight there is only {', '.join(names)}; possible: a tensor "
                f"{', '.join(_WEIGHTS[:-1])} or {_WEIGHTS[-1]}, in a checkpoint that is whole"
            )
        asked = Asked(tensors)
        found = method.read(module, decision, asked)
        left = [name for name in names if name not in asked.asked]
        if isinstance(weight := found.weight, QuantizedWeight):
            for name in left:
                if _changes_numbers(name, tensors):
                    raise CheckpointError(
                        f"{where}: the tensor {name} is not read with a weight {weight.spec} of "
                        f"{method.name}; possible: a checkpoint without it, if it is nothing"
                    )
        told = tuple(f"the tensor {name} is not used" for name in left)
        return replace(found, notes=found.notes + told)


def _changes_numbers(name: str, tensors: TensorSource) -> bool:
    """Whether a weight is another without this tensor, as far as its name tells."""
    part = name.rpartition(".")[2]
    if part in _WEIGHTS:
        return True
    if part.startswith(_OF_ACTIVATIONS) or not any(telling in part for telling in _TELLING):
        return False
    # Symmetric weights may come with the zero points that they do not have.
    return "zero" not in part or bool(tensors.get(name).double().any())


def _of_layer(names: Iterable[str]) -> tuple[str, ...]:
    """The names among those of a module that are no attention's."""
    return tuple(name for name in names if name.rpartition(".")[2] not in _OF_ATTENTION)


def load_linear(path: Path | str, module: str | Sequence[str]) -> Linear:
    """A linear layer of a quantized checkpoint, as it was quantized.

    Args:
        path: as for `Checkpoint.open`.
        module: the layer's name, `model.layers.0.mlp.up_proj`; or several, whose rows become one
            layer, see `humming.checkpoints.fusing.fuse`.

    Raises:
        CheckpointError: a file, the configuration or a tensor is missing, damaged, or of a form
            that is not read, or several layers do not fit one another; the message says which.
    """
    asked = "load_linear"
    check_type(asked, "the path", path, (str, Path), "Pass the folder or file of a checkpoint.")
    how = "Pass a name, e.g. 'model.layers.0.mlp.up_proj', or a list of names."
    check_type(asked, "the module", module, (str, list, tuple), how)
    checkpoint = Checkpoint.open(path)
    if isinstance(module, str):
        return checkpoint.read(module)
    for name in module:
        check_type(asked, "a module", name, str, how)
    if len(set(module)) < len(module):
        raise UnsupportedError(f"{asked} of {', '.join(module)}", "one is named twice", how)
    try:
        return fuse({name: checkpoint.read(name) for name in module})
    except UnsupportedError as error:
        raise CheckpointError(f"{path}: {error}") from error
