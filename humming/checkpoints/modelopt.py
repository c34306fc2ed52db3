"""Checkpoints of ModelOpt: nvfp4, 8-bit floats and 4-bit integers, one algorithm or one per module.

The configuration is `hf_quant_config.json` or the `quantization_config` of `config.json`; they
spell some keys differently. A weight of nvfp4 is code * weight_scale * weight_scale_2, with scales
row by row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from humming.checkpoints.config_keys import ConfigKeys
from humming.checkpoints.decisions import Decision, Linear
from humming.checkpoints.module_parts import (
    FLOATS,
    ModuleParts,
    as_matrix,
    fit_scales,
    readable_parts,
    weight_of,
)
from humming.checkpoints.patterns import is_at_or_below
from humming.checkpoints.scaled import (
    is_plain,
    linear,
    plain_linear,
    read_bytes,
    read_fp4,
    settled,
    static_scale,
)
from humming.checkpoints.tensors import TensorSource
from humming.errors import CheckpointError
from humming.formats import ActivationSpec, WeightSpec
from humming.quantized import QuantizedWeight, pack_bits

# Algorithm: formats of the weights and of the activations, which stay 16-bit without one.
_ALGORITHMS: dict[str, tuple[str, str | None]] = {
    "FP8": ("fp8_tensor", "fp8_tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_channel", "fp8"),
    "FP8_PB_WO": ("fp8_block128", None),
    "NVFP4": ("nvfp4", "nvfp4"),
    "NVFP4_AWQ": ("nvfp4", "nvfp4"),
    "W4A16_NVFP4": ("nvfp4", None),
    "W4A8_NVFP4_FP8": ("nvfp4", "fp8_tensor"),
    "W4A8_MXFP4_FP8": ("mxfp4", "fp8_tensor"),
    "MXFP8": ("mxfp8", "mxfp8"),
    "W4A16_AWQ": ("int4_g128", None),
    "INT4_AWQ": ("int4_g128", None),
}
_WHY_NOT = {
    "W4A8_AWQ": "which of its two scales make up a weight is not settled here",
    "W8A8_SQ_PER_CHANNEL": "how its activations are scaled is not settled here",
    "INT8_SQ": "how its activations are scaled is not settled here",
}
_SCALES = ("weight_scale", "weight_scale_inv", "scale")


@dataclass(frozen=True, slots=True)
class _Algorithm:
    """Formats of the modules of one algorithm, or why there are none."""

    name: str
    weight: WeightSpec | None
    activation: ActivationSpec | None
    why_not: str = ""


class ModelOpt:
    """Reads checkpoints of ModelOpt; see `Method`."""

    name = "modelopt"

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._where = where
        outer = ConfigKeys(config, where)
        outer.take("quant_method", str, "modelopt")
        outer.ignore("producer")
        if "quantization" in config:
            keys = ConfigKeys(outer.take("quantization", Mapping), f"{where}: quantization")
            outer.finish()
        else:
            keys = outer
        algorithm = keys.take("quant_algo", str)
        size = keys.take("group_size", int, keys.take("awq_block_size", int, None))
        self._excluded = keys.strings("exclude_modules", "ignore")
        layers = keys.take("quantized_layers", Mapping, {})
        cache = keys.take("kv_cache_quant_algo", str, None)
        cache = keys.take("kv_cache_scheme", Mapping, None) or cache
        zero_point = keys.take("has_zero_point", bool, False)
        if zero_point:
            raise CheckpointError(f"{where}: has_zero_point is true; zero points are not read")
        # The groups repeat what the algorithm says; pre_quant_scale is told from the tensors.
        keys.ignore("config_groups", "pre_quant_scale", "version")
        keys.finish()
        self._mixed = algorithm.upper() == "MIXED_PRECISION"
        if self._mixed and not layers:
            raise CheckpointError(f"{where}: quant_algo is {algorithm}, without quantized_layers")
        self._default = None if self._mixed else _algorithm(algorithm, size, where)
        self._layers = {
            name: _layer(values, f"{where}: quantized_layers.{name}")
            for name, values in layers.items()
        }
        self.notes: tuple[str, ...] = (
            ("scales of the KV cache are not part of linear layers, and not read",) if cache else ()
        )

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        """Whether a config is of this method."""
        method = config.get("quant_method")
        if isinstance(method, str):
            return method.lower().startswith("modelopt")
        inner = config.get("quantization")
        return method is None and isinstance(inner, Mapping) and "quant_algo" in inner

    def decide(self, module: str) -> Decision:
        """What the config says of a module.

        An entry of `quantized_layers` holds for all that is below it, the longest first. Entries of
        the skip list are names or patterns of whole names.
        """
        for entry in self._excluded:
            if is_at_or_below(module, entry):
                return Decision(module, "plain", None, None, f"{entry!r} is excluded")
        entry, found = self._listed(module)
        if found is None:
            return Decision(module, "plain", None, None, "it is not among quantized_layers")
        why = f"{entry} has quant_algo {found.name}" if entry else f"quant_algo is {found.name}"
        if found.weight is None:
            return Decision(module, "refused", None, None, f"{why}: {found.why_not}")
        return Decision(module, "quantized", found.weight, found.activation, why)

    def _listed(self, module: str) -> tuple[str, "_Algorithm | None"]:
        """The entry that holds for a module, and its algorithm."""
        name = module
        while name:
            if name in self._layers:
                return name, self._layers[name]
            name = name.rpartition(".")[0]
        return "", self._default

    def read(self, module: str, decision: Decision, tensors: TensorSource) -> Linear:
        """The module, in the format that its tensors have."""
        parts = readable_parts(tensors, module, decision, self._where)
        if is_plain(parts, "weight", _SCALES):
            return plain_linear(parts, decision)
        scale = next((name for name in _SCALES if parts.has(name)), _SCALES[0])
        if parts.dtype("weight") in (torch.uint8, torch.int8):
            weight = self._read_pairs(parts, scale, decision)
        else:
            wanted = decision.weight
            if wanted is None or wanted.dtype != "float8e4m3":
                wanted = WeightSpec.parse("fp8_tensor")
            weight = read_bytes(parts, wanted, scale=scale)
        decision = settled(parts, decision, weight)
        static = static_scale(parts, decision.activation, "input_scale")
        before = None
        if parts.has("pre_quant_scale"):
            before = parts.take("pre_quant_scale", FLOATS, (1,))
            if before.shape != (weight.shape[1],) or not bool(torch.isfinite(before).all()):
                raise parts.error(
                    "pre_quant_scale", "does not fit", f"It holds {weight.shape[1]} numbers."
                )
        return linear(parts, decision, weight, activation_scale=static, input_scale=before)

    def _read_pairs(self, parts: ModuleParts, scale: str, decision: Decision) -> QuantizedWeight:
        """Two codes in a byte: 4-bit floats along K, or signed integers along N."""
        if parts.dtype(scale) not in FLOATS:
            second = parts.scalar("weight_scale_2") if parts.has("weight_scale_2") else None
            if second is None and parts.dtype(scale) == torch.float8_e4m3fn:
                raise parts.error(
                    "weight_scale_2", "is missing", "nvfp4 weights have a second scale."
                )
            return read_fp4(parts, ("weight", scale), second)
        packed = parts.take("weight", (torch.uint8,), (2,))
        n, k = 2 * packed.shape[0], packed.shape[1]
        if parts.has("weight_scale_2"):
            raise parts.error("weight_scale_2", "is there", _WHY_NOT["W4A8_AWQ"].capitalize() + ".")
        scales = as_matrix(parts.take(scale, FLOATS))
        wanted = decision.weight
        if wanted is None or wanted.dtype != "int4":
            wanted = WeightSpec.parse("int4_g128")
        spec, scales = fit_scales(parts, scale, scales, wanted, n, k)
        codes = torch.stack([packed & 15, packed >> 4], 1).reshape(n, k)
        return weight_of(parts, ("weight", scale), spec, (n, k), pack_bits(codes, 4), scales)


def _layer(values: Any, where: str) -> _Algorithm:
    keys = ConfigKeys(values, where)
    algorithm = keys.take("quant_algo", str)
    size = keys.take("group_size", int, keys.take("awq_block_size", int, None))
    if keys.take("has_zero_point", bool, False):
        raise CheckpointError(f"{where}: has_zero_point is true; zero points are not read")
    keys.ignore("pre_quant_scale")
    keys.finish()
    return _algorithm(algorithm, size, where)


def _algorithm(name: str, size: int | None, where: str) -> _Algorithm:
    """The formats of an algorithm, with the size of groups where the config gives one."""
    name = name.upper()
    if name in _WHY_NOT:
        return _Algorithm(name, None, None, _WHY_NOT[name])
    if name not in _ALGORITHMS:
        possible = ", ".join(_ALGORITHMS)
        return _Algorithm(name, None, None, f"it is unknown; known are {possible}")
    weight_name, activation_name = _ALGORITHMS[name]
    weight = WeightSpec.parse(weight_name)
    activation = None if activation_name is None else ActivationSpec.parse(activation_name)
    if size is not None and weight.granularity == "group" and size != weight.group_size:
        if not weight.dtype.is_integer or not 0 < size < 1 << 20:
            why = f"groups of {size} values; {weight} has {weight.group_size}"
            return _Algorithm(name, None, None, why)
        weight = replace(weight, group_size=size)
    return _Algorithm(name, weight, activation)
