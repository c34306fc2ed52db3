"""Checkpoints of Quark: mxfp4, 8-bit floats and integers, with exceptions for single modules."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from humming.checkpoints.config_keys import ConfigKeys
from humming.checkpoints.decisions import Decision, Linear
from humming.checkpoints.module_parts import readable_parts
from humming.checkpoints.patterns import check_expressions, is_at_or_below, matches_name
from humming.checkpoints.scaled import (
    MXFP4,
    is_plain,
    linear,
    plain_linear,
    read_bytes,
    read_fp4,
    settled,
    static_scale,
)
from humming.checkpoints.tensors import TensorSource
from humming.dtypes import float8e4m3, int8
from humming.errors import CheckpointError, UnsupportedError
from humming.formats import ActivationSpec, WeightSpec

_SCALES = ("weight_scale", "weight_scale_inv")
_BYTES = {"fp8_e4m3": float8e4m3, "int8": int8}
_EXTENTS = {"per_tensor": "tensor", "per_channel": "channel", "per_group": "group"}
_NOT_QUANTIZED = ("bfloat16", "float16", "float32")
_WHY_NOT = {
    "int4": "the order of its codes in a word is not settled here",
    "uint4": "the order of its codes in a word is not settled here",
    "fp6_e2m3": "how its codes are packed is not settled here",
    "fp6_e3m2": "how its codes are packed is not settled here",
}


@dataclass(frozen=True, slots=True)
class _Scheme:
    """The formats of some modules, or why there are none."""

    weight: WeightSpec | None = None
    activation: ActivationSpec | None = None
    why_not: str = ""


class Quark:
    """Reads checkpoints of Quark; see `Method`."""

    name = "quark"
    notes: tuple[str, ...] = ()

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        keys = ConfigKeys(config, where)
        self._where = where
        keys.one_of("quant_method", ("quark",))
        export = ConfigKeys(keys.take("export", Mapping, {}), f"{where}: export")
        export.one_of("pack_method", ("reorder", "order"), "reorder")
        export.one_of("weight_format", ("real_quantized",), "real_quantized")
        export.ignore("kv_cache_group", "min_kv_scale", "weight_merge_groups")
        export.finish()
        self._excluded = keys.strings("exclude")
        check_expressions(self._excluded, where)
        keys.empty("layer_type_quant_config", because="formats by class are not read")
        keys.ignore(
            "algo_config",
            "kv_cache_post_rope",
            "kv_cache_quant_config",
            "quant_mode",
            "softmax_quant_spec",
            "version",
        )
        self._default = _scheme(
            keys.take("global_quant_config", Mapping), f"{where}: global_quant_config"
        )
        self._layers = {
            name: _scheme(values, f"{where}: layer_quant_config.{name}")
            for name, values in keys.take("layer_quant_config", Mapping, {}).items()
        }
        keys.finish()

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        """Whether a config is of this method."""
        return config.get("quant_method") == "quark"

    def decide(self, module: str) -> Decision:
        """What the config says of a module: exclusion, its own entry, a pattern's, the default."""
        for entry in self._excluded:
            starred = "*" in entry and not entry.startswith("re:")
            if matches_name(module, entry) or (starred and is_at_or_below(module, entry)):
                return Decision(module, "plain", None, None, f"{entry!r} is excluded")
        scheme, why = self._default, "global_quant_config"
        for name, own in self._layers.items():
            if name == module:
                scheme, why = own, f"layer_quant_config has {name!r}"
                break
        else:
            for name, own in self._layers.items():
                if matches_name(module, name) or ("*" in name and is_at_or_below(module, name)):
                    scheme, why = own, f"layer_quant_config has {name!r}"
                    break
        if scheme.why_not:
            return Decision(module, "refused", None, None, f"{why}: {scheme.why_not}")
        if scheme.weight is None:
            return Decision(module, "plain", None, None, f"{why}: its weights are not quantized")
        return Decision(module, "quantized", scheme.weight, scheme.activation, why)

    def read(self, module: str, decision: Decision, tensors: TensorSource) -> Linear:
        """The module, in the format that its tensors have."""
        parts = readable_parts(tensors, module, decision, self._where)
        if is_plain(parts, "weight", _SCALES):
            return plain_linear(parts, decision)
        scale = next((name for name in _SCALES if parts.has(name)), _SCALES[0])
        if parts.has(f"{scale}_2"):
            raise parts.error(
                f"{scale}_2", "is there", "How two scales make up a weight is not settled here."
            )
        if parts.dtype("weight") == torch.uint8:
            weight = read_fp4(parts, ("weight", scale))
        else:
            wanted = decision.weight
            if wanted is None or wanted.dtype.bits != 8:
                wanted = WeightSpec.parse("fp8_tensor")
            weight = read_bytes(parts, wanted, scale=scale)
        decision = settled(parts, decision, weight)
        static = static_scale(parts, decision.activation, "input_scale")
        return linear(parts, decision, weight, activation_scale=static)


def _scheme(values: Any, where: str) -> _Scheme:
    keys = ConfigKeys(values, where)
    weight = keys.take("weight", (Mapping, list), None)
    inputs = keys.take("input_tensors", (Mapping, list), None)
    outputs, bias = keys.take("output_tensors", Mapping, None), keys.take("bias", Mapping, None)
    keys.ignore("target_device")
    keys.finish()
    if outputs or bias:
        what = "outputs" if outputs else "biases"
        return _Scheme(why_not=f"its {what} are quantized, which no kernel here does")
    if isinstance(weight, list) or isinstance(inputs, list):
        return _Scheme(why_not="how its two stages of scales are stored is not settled here")
    try:
        return _Scheme(
            None if weight is None else _weight_format(weight, f"{where}.weight"),
            None if inputs is None else _activation_format(inputs, f"{where}.input_tensors"),
        )
    except UnsupportedError as error:
        return _Scheme(why_not=str(error))


def _tensor_keys(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What matters of how a tensor is quantized."""
    keys = ConfigKeys(values, where)
    size = keys.take("group_size", int, None)
    found = {
        "dtype": keys.take("dtype", str),
        "qscheme": keys.take("qscheme", str, "per_tensor"),
        "size": size,
        "block": keys.take("block_size", (list, tuple), None),
        "dynamic": keys.take("is_dynamic", bool, False),
        "symmetric": keys.take("symmetric", bool, None),
        "axis": keys.take("ch_axis", int, None),
    }
    keys.one_of("scale_format", ("e8m0", "float", "float32"), None)
    keys.ignore(
        "is_scale_quant",
        "mx_element_dtype",
        "observer_cls",
        "round_method",
        "scale_calculation_mode",
        "scale_type",
        "qat_spec",
        "zero_point_type",
    )
    keys.finish()
    return found


def _weight_format(values: Mapping[str, Any], where: str) -> WeightSpec | None:
    """The format of weights, None for ordinary numbers.

    Raises:
        UnsupportedError: there is none.
    """
    keys = _tensor_keys(values, where)
    dtype, scheme = keys["dtype"], keys["qscheme"]
    asked = f"weights of {dtype} ({scheme})"
    if dtype in _NOT_QUANTIZED:
        return None
    if keys["symmetric"] is False:
        raise UnsupportedError(asked, "zero points of Quark are not read", "Use symmetric ones.")
    if dtype == "fp4" and scheme == "per_group" and keys["size"] == 32:
        return MXFP4
    if dtype not in _BYTES:
        why = _WHY_NOT.get(dtype, "there is no such format")
        raise UnsupportedError(asked, why, "Possible: fp4 in groups of 32, fp8_e4m3, int8.")
    if scheme == "per_block":
        block = list(keys["block"] or [])
        if len(block) != 2 or not all(type(extent) is int for extent in block):
            raise CheckpointError(f"{where}: 'block_size' is {block!r}, not [rows, columns]")
        return WeightSpec(_BYTES[dtype], "block", block=(block[0], block[1]))
    if scheme not in _EXTENTS:
        raise UnsupportedError(asked, "there is no such extent", f"Use {', '.join(_EXTENTS)}.")
    size = (keys["size"] or 0) if scheme == "per_group" else 0
    return WeightSpec(_BYTES[dtype], _EXTENTS[scheme], size)


def _activation_format(values: Mapping[str, Any], where: str) -> ActivationSpec | None:
    """The format of activations, None for ordinary numbers.

    Raises:
        UnsupportedError: there is none.
    """
    keys = _tensor_keys(values, where)
    dtype, scheme, dynamic = keys["dtype"], keys["qscheme"], keys["dynamic"]
    asked = f"activations of {dtype} ({scheme})"
    if dtype in _NOT_QUANTIZED:
        return None
    if dtype == "fp4" and scheme == "per_group" and keys["size"] == 32 and dynamic:
        return ActivationSpec.parse("mxfp4")
    if dtype not in _BYTES:
        why = _WHY_NOT.get(dtype, "there is no such format")
        raise UnsupportedError(asked, why, "Possible: fp4 in groups of 32, fp8_e4m3, int8.")
    symmetric = keys["symmetric"] is not False
    if not symmetric and not dynamic:
        raise UnsupportedError(asked, "a static zero point is not read", "Use symmetric ones.")
    granularity = {"per_tensor": "tensor", "per_channel": "token", "per_token": "token"}
    if scheme == "per_group":
        return ActivationSpec(
            _BYTES[dtype],
            "group",
            keys["size"] or 0,
            dynamic=dynamic,
            symmetric=symmetric,
        )
    if scheme not in granularity:
        raise UnsupportedError(asked, "there is no such extent", "Use per_tensor or per_channel.")
    return ActivationSpec(
        _BYTES[dtype],
        granularity[scheme],
        dynamic=dynamic,
        symmetric=symmetric,
    )
