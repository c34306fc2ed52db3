"""Checkpoints whose config says fp8, mxfp8, fbgemm_fp8 or w4afp8: 8-bit floats, and 4-bit experts.

Weights are float8e4m3 [N, K] with float32, bfloat16 or ue8m0 scales per block, row or tensor, or
ue8m0 scales for 32 values (mxfp8). Two kinds of experts lie beside them: pairs of 4-bit floats with
ue8m0 scales, which the config says nothing of, and (w4afp8) pairs of signed 4-bit integers.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from humming.checkpoints.config_keys import ConfigKeys
from humming.checkpoints.decisions import Decision, Linear
from humming.checkpoints.module_parts import (
    E8M0,
    FLOATS,
    ModuleParts,
    as_matrix,
    fit_scales,
    weight_of,
)
from humming.checkpoints.patterns import holds_components
from humming.checkpoints.scaled import (
    MXFP4,
    MXFP8,
    is_plain,
    linear,
    plain_linear,
    read_bytes,
    read_fp4,
    settled,
    static_scale,
)
from humming.checkpoints.tensors import TensorSource
from humming.dtypes import float8e4m3
from humming.errors import CheckpointError
from humming.formats import ActivationSpec, WeightSpec
from humming.quantized import QuantizedWeight

_SCALES = ("weight_scale_inv", "weight_scale", "scale")
_METHODS = ("fp8", "mxfp8", "fbgemm_fp8", "w4afp8")
# What is left in 16 bits in every model, whether or not a list says so.
_NEVER = ("lm_head", "head", "embed_tokens", "embed", "gate", "router", "shared_expert_gate")
_INT4_EXPERTS = WeightSpec.parse("int4_g128_sbf16")


class Fp8:
    """Reads checkpoints of 8-bit floats; see `Method`."""

    name = "fp8"

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        keys = ConfigKeys(config, where)
        self._where = where
        self._method = keys.one_of("quant_method", _METHODS)
        keys.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        keys.one_of("weight_fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        scheme = keys.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
        scale_fmt = keys.one_of("scale_fmt", ("ue8m0", "float", "float32", "fp32"), "float")
        block = keys.take("weight_block_size", (list, tuple), None)
        self._skipped = keys.strings(
            "modules_to_not_convert", "ignored_layers", "ignore", "modules_to_not_quantize"
        )
        # An upper limit for dynamic scales of activations, which kernels here do not apply.
        self._limit = keys.take("activation_scale_ub", (int, float), None)
        keys.take("dequantize", bool, False)
        keys.ignore("is_checkpoint_fp8_serialized", "kv_cache_scheme", "kv_cache_quant_method")
        keys.finish()
        self._listed = any(
            config.get(key) is not None
            for key in ("modules_to_not_convert", "ignored_layers", "ignore")
        )
        self._weight = self._weight_format(block)
        self._activation = self._activation_format(scheme, scale_fmt)
        self.notes = self._general_notes()

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        """Whether a config is of this method."""
        return config.get("quant_method") in _METHODS

    def _weight_format(self, block: Any) -> WeightSpec:
        if block is None:
            if self._method == "mxfp8":
                return MXFP8
            if self._method == "w4afp8":
                return WeightSpec.parse("fp8_block128")
            return WeightSpec.parse("fp8_channel" if self._method == "fbgemm_fp8" else "fp8_tensor")
        whole = all(type(extent) is int and 0 < extent < 1 << 31 for extent in block)
        if len(block) != 2 or not whole:
            raise CheckpointError(
                f"{self._where}: weight_block_size is {block!r}, not [rows, columns]"
            )
        if self._method == "mxfp8" or tuple(block) == (1, 32):
            if tuple(block) != (1, 32):
                raise CheckpointError(
                    f"{self._where}: weight_block_size is {block!r}; mxfp8 has [1, 32]"
                )
            return MXFP8
        return WeightSpec(float8e4m3, "block", block=(block[0], block[1]))

    def _activation_format(self, scheme: str, scale_fmt: str) -> ActivationSpec:
        if self._weight == MXFP8:
            return ActivationSpec.parse("mxfp8")
        if self._weight.granularity == "block":
            name = f"fp8_g{self._weight.block[1]}"
            return ActivationSpec.parse(f"{name}_sue8m0" if scale_fmt == "ue8m0" else name)
        if scheme == "static":
            return ActivationSpec.parse("fp8_tensor")
        return ActivationSpec.parse("fp8")

    def _general_notes(self) -> tuple[str, ...]:
        notes = []
        if self._limit is not None:
            notes.append(f"activation_scale_ub {self._limit} is not applied to activations")
        if not self._listed:
            notes.append(
                "the config lists no modules to leave alone: heads, embeddings and gates are taken "
                "to be 16-bit"
            )
        if self._method == "w4afp8":
            notes.append(
                "the config implies its formats: experts int4_g128 with static fp8 activations, "
                "the rest fp8_block128"
            )
        return tuple(notes)

    def decide(self, module: str) -> Decision:
        """What the config says of a module; entries name whole components of paths."""
        for entry in self._skipped:
            if holds_components(module, entry):
                return Decision(module, "plain", None, None, f"{entry!r} is to be left alone")
        leaf = module.rpartition(".")[2]
        if not self._listed and leaf in _NEVER:
            why = f"{leaf} is left in 16 bits where the config lists no modules"
            return Decision(module, "plain", None, None, why)
        if self._method == "w4afp8" and ".experts." in f".{module}.":
            activation = ActivationSpec.parse("fp8_tensor")
            why = "experts of w4afp8 have signed 4-bit integers"
            return Decision(module, "quantized", _INT4_EXPERTS, activation, why)
        why = f"quant_method is {self._method}"
        return Decision(module, "quantized", self._weight, self._activation, why)

    def read(self, module: str, decision: Decision, tensors: TensorSource) -> Linear:
        """The module, in the format that its tensors have."""
        parts = ModuleParts(tensors, module)
        if is_plain(parts, "weight", _SCALES):
            return plain_linear(parts, decision)
        scale = next((name for name in _SCALES if parts.has(name)), _SCALES[0])
        if parts.dtype("weight") in (torch.int8, torch.uint8):
            weight = self._read_pairs(parts, scale)
            if weight.spec == MXFP4 and decision.weight is not None:
                # No key tells of these experts; their activations are those of all the rest.
                parts.note(f"the configuration says {decision.weight}, the tensors are mxfp4")
                decision = replace(decision, weight=MXFP4)
        else:
            wanted = decision.weight or self._weight
            if wanted.dtype != self._weight.dtype:
                wanted = self._weight
            weight = read_bytes(parts, wanted, scale=scale)
        decision = settled(parts, decision, weight)
        static = static_scale(parts, decision.activation, "input_scale")
        return linear(parts, decision, weight, activation_scale=static)

    def _read_pairs(self, parts: ModuleParts, scale: str) -> QuantizedWeight:
        """Two codes in a byte: 4-bit floats where scales are ue8m0, else signed integers."""
        if parts.dtype(scale) in E8M0:
            return read_fp4(parts, ("weight", scale))
        if self._method != "w4afp8":
            raise parts.error(
                "weight",
                f"is {parts.dtype('weight')} beside {parts.dtype(scale)} scales",
                f"Weights of {self._method} are float8_e4m3fn, or pairs of 4-bit floats beside "
                "ue8m0 scales.",
            )
        codes = parts.take("weight", (torch.int8, torch.uint8), (2,))
        n, k = codes.shape[0], 2 * codes.shape[1]
        scales = as_matrix(parts.take(scale, FLOATS))
        spec, scales = fit_scales(parts, scale, scales, _INT4_EXPERTS, n, k)
        return weight_of(parts, ("weight", scale), spec, (n, k), codes.view(torch.uint8), scales)
