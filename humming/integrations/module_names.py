"""Which module of a transformers model a module of a checkpoint becomes."""

from typing import Any

from humming.integrations.transformers_api import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)


class ModelNames:
    """The names that transformers gives to the modules of a checkpoint.

    Args:
        model: the model, as it is before quantized layers are put into it.
        conversions: the changes of names and of tensors that transformers makes on loading.
    """

    def __init__(self, model: Any, conversions: list[Any]) -> None:
        self._model = model
        self._renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        self._state = model.state_dict()

    def in_model(self, module: str) -> str:
        """The name of the weight's module, whether or not the model has it."""
        return self._renamed(module, self._state)[0]

    def of_unknown(self, module: str) -> str:
        """How the name begins under which transformers reports tensors that the model lacks."""
        return self._renamed(module, None)[0]

    def holder_of(self, module: str) -> str | None:
        """What the model holds a weight in that is no linear layer, None if it has no such weight.

        That is what several weights are merged into, or the module that has it as a parameter.
        """
        name, merged = self._renamed(module, self._state)
        if merged:
            return f"{name}, which it is merged into"
        while name:
            try:
                found = self._model.get_submodule(name)
            except AttributeError:
                name = name.rpartition(".")[0]
                continue
            own = any(True for _ in found.parameters(recurse=False))
            return f"{name}, a {type(found).__name__}" if own else None
        return None

    def _renamed(self, module: str, state: dict[str, Any] | None) -> tuple[str, bool]:
        prefix = self._model.base_model_prefix
        conversions = self._renamings, self._converters
        key, pattern = rename_source_key(f"{module}.weight", *conversions, prefix, state)
        return key.removesuffix(".weight"), pattern is not None
