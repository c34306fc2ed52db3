"""What a model of transformers says of its quantization."""

from collections.abc import Iterable, Mapping
from typing import Any

from humming.errors import UnsupportedError
from humming.formats import ActivationSpec, WeightSpec
from humming.integrations.transformers_api import QuantizationConfigMixin
from humming.model_quantizer import check_formats, check_names, check_unsupported
from humming.quantizer import check_method

METHOD = "humming"
"""The value of `quant_method` for models that are quantized, and saved, by humming."""


class HummingConfig(QuantizationConfigMixin):
    """How to quantize a model while it is loaded.

    Args:
        weight: the format, such as "mxfp4".
        activation: "fp16" or "bf16", or what activations are quantized to in each layer; None
            accepts both 16-bit types as they are.
        only, skip: names of layers as for `humming.quantize_model`. Skip None leaves the output
            layer, as the model names it.
        unsupported: "refuse" or "skip" for layers that the format cannot hold.
        method: how scales are chosen, see `humming.quantize`.
        activations: what single layers of a saved model quantize activations to, where it is not
            `activation`.
        checkpoint: the configuration of a checkpoint that is quantized by another method.
    """

    def __init__(
        self,
        weight: WeightSpec | str | None = None,
        activation: ActivationSpec | str | None = None,
        *,
        only: Iterable[str] = (),
        skip: Iterable[str] | None = None,
        unsupported: str = "refuse",
        method: str = "absmax",
        activations: Mapping[str, str | None] | None = None,
        checkpoint: Mapping[str, Any] | None = None,
    ) -> None:
        check_unsupported(unsupported)
        check_method(method)
        if weight is not None:
            check_formats(weight, activation, method)
        self.quant_method = METHOD
        self.weight = None if weight is None else WeightSpec.parse(weight).name
        self.activation = None if activation is None else ActivationSpec.parse(activation).name
        self.only = list(check_names("only", only))
        self.skip = None if skip is None else list(check_names("skip", skip))
        self.unsupported, self.method = unsupported, method
        self.activations = dict(activations or {})
        self.checkpoint = None if checkpoint is None else dict(checkpoint)

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """The configuration that a model carries, of whatever method.

        Raises:
            UnsupportedError: one of humming has a key that is unknown.
        """
        if config_dict.get("quant_method") == METHOD:
            values = {key: value for key, value in config_dict.items() if key != "quant_method"}
            try:
                config = cls(**values)
            except TypeError as error:
                known = ", ".join(key for key in cls().to_dict() if key != "quant_method")
                raise UnsupportedError(
                    "a quantization_config of humming", str(error), f"Its keys are {known}."
                ) from error
        else:
            config = cls(checkpoint=config_dict)
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """What is stored with a model that is saved: its layers are packed by then."""
        return {name: value for name, value in vars(self).items() if name != "checkpoint"}
