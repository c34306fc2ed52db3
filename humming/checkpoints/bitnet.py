"""Checkpoints of BitNet: weights -1, 0 and 1 with one scale, activations int8 per token.

Four blocks of rows share the bytes [N / 4, K]: the lowest two bits are of rows 0 ... N / 4 - 1.
Whether the scale multiplies or divides depends on the class of the layers.
"""

from collections.abc import Mapping
from typing import Any

import torch

from humming.checkpoints.config_keys import ConfigKeys
from humming.checkpoints.decisions import Decision, Linear
from humming.checkpoints.module_parts import FLOATS, ModuleParts, reciprocal, weight_of
from humming.checkpoints.patterns import holds_components
from humming.checkpoints.scaled import is_plain, linear, plain_linear, ternary
from humming.checkpoints.tensors import TensorSource
from humming.formats import ActivationSpec, WeightSpec

_WEIGHT = WeightSpec.parse("int2_tensor_sfp32")
_ACTIVATION = ActivationSpec.parse("int8")


class BitNet:
    """Reads checkpoints of BitNet; see `Method`."""

    name = "bitnet"

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        keys = ConfigKeys(config, where)
        self._where = where
        keys.one_of("quant_method", ("bitnet",))
        self._class = keys.one_of("linear_class", ("bitlinear", "autobitlinear"), "bitlinear")
        mode = keys.one_of("quantization_mode", ("offline", "online"), "offline")
        self._online = mode == "online"
        self._skipped = keys.strings("modules_to_not_convert")
        keys.empty("use_rms_norm", because="inputs are normalized first, which no kernel here does")
        keys.ignore("rms_norm_eps")
        keys.finish()
        self.notes: tuple[str, ...] = ()
        if self._online:
            self.notes = ("weights are stored in 16 bits, to be made ternary when they are used",)

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        """Whether a config is of this method."""
        return config.get("quant_method") == "bitnet"

    def decide(self, module: str) -> Decision:
        """What the config says of a module; heads are always left alone."""
        for entry in ("lm_head", *self._skipped):
            if holds_components(module, entry):
                return Decision(module, "plain", None, None, f"{entry!r} is not converted")
        if self._online:
            why = "quantization_mode is online: its weight is stored in 16 bits"
            return Decision(module, "plain", None, None, why)
        return Decision(module, "quantized", _WEIGHT, _ACTIVATION, "quant_method is bitnet")

    def read(self, module: str, decision: Decision, tensors: TensorSource) -> Linear:
        """The module, in the format that its tensors have."""
        parts = ModuleParts(tensors, module)
        if is_plain(parts, "weight", ("weight_scale",)):
            return plain_linear(parts, decision)
        if parts.dtype("weight") in FLOATS:
            raise parts.error("weight", "is not packed beside a scale", "Save the model packed.")
        codes = ternary(parts, "weight")
        if self._class == "bitlinear":
            scale = reciprocal(parts, "weight_scale")
            parts.note("weight_scale is a divisor; its reciprocal is rounded to float32 once")
        else:
            scale = parts.scalar("weight_scale")
        shape = (codes.shape[0], parts.take("weight", (torch.uint8,)).shape[1])
        weight = weight_of(parts, ("weight", "weight_scale"), _WEIGHT, shape, codes, scale)
        return linear(parts, decision, weight)
