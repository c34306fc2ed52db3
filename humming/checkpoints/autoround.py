"""Checkpoints of AutoRound: the tensors of GPTQ or AWQ, and a format of its own for each layer."""

import re
from collections.abc import Mapping
from typing import Any

from humming.checkpoints import awq, gptq
from humming.checkpoints.config_keys import ConfigKeys
from humming.checkpoints.decisions import Decision, Linear
from humming.checkpoints.layer_rules import (
    ACTIVATION_KEYS,
    FULL_WIDTH,
    TUNING_KEYS,
    IntegerFormat,
    LayerRule,
    check_integers,
    first_rule,
    names_of,
)
from humming.checkpoints.module_parts import readable_parts
from humming.checkpoints.patterns import holds_components, is_in_block
from humming.checkpoints.scaled import linear, plain_linear
from humming.checkpoints.tensors import TensorSource
from humming.errors import CheckpointError

_NAMES = ("auto-round", "auto_round", "autoround", "intel/auto-round")
_AWQ = "auto_round:auto_awq"
# What a stored zero point is lower by than the true one.
_ZERO_OFFSETS = {"auto_round:auto_gptq": 1, "auto_round:gptqmodel": 0, "auto_round": 0}
_PACKINGS = (*_ZERO_OFFSETS, _AWQ)
_EXPRESSION_CHARACTERS = frozenset("*^$|()[]?+\\")


class AutoRound:
    """Reads checkpoints of AutoRound; see `Method`."""

    name = "auto-round"

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        keys = ConfigKeys(config, where)
        self._where = where
        keys.one_of("quant_method", _NAMES)
        # Zero points of symmetric weights tell the convention; those of others do not.
        known = keys.take("sym", bool, True)
        self._packing = keys.one_of(
            "packing_format", _PACKINGS, *(["auto_round:auto_gptq"] if known else [])
        )
        self._widths = awq.WIDTHS if self._packing == _AWQ else gptq.WIDTHS
        check_integers(keys)
        self._format = IntegerFormat.of(keys, self._widths)
        self._blocks = names_of(keys, "block_name_to_quantize")
        self._blocks += names_of(keys, "to_quant_block_names")
        self._skipped = keys.strings("modules_to_not_convert")
        self._exact: dict[str, LayerRule] = {}
        self._rules: tuple[LayerRule, ...] = ()
        for name, values in keys.take("extra_config", Mapping, {}).items():
            self._add_rule(name, values)
        for key in ("rotation_config", "rotation_configs", "transform_config"):
            keys.empty(key, because="inputs that were rotated are not read")
        for key in ("super_bits", "super_group_size"):
            keys.empty(key, because="scales that are quantized themselves are not read")
        keys.ignore("static_kv_dtype", "static_attention_dtype")
        keys.ignore(*TUNING_KEYS, "quant_block_list", "backend")
        keys.finish()
        self.notes: tuple[str, ...] = ()
        if config.get("static_kv_dtype"):
            self.notes = ("scales of the KV cache are not part of linear layers, and not read",)

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        """Whether a config is of this method."""
        return config.get("quant_method") in _NAMES

    def _add_rule(self, name: str, values: Any) -> None:
        where = f"{self._where}: extra_config[{name!r}]"
        keys = ConfigKeys(values, where)
        bits = keys.take("bits", int, self._format.bits)
        layer = None
        if bits >= FULL_WIDTH:
            keys.ignore("group_size", "sym", "data_type", "act_bits", *ACTIVATION_KEYS)
        else:
            check_integers(keys)
            layer = IntegerFormat.of(keys, self._widths, self._format)
        for key in ("super_bits", "super_group_size"):
            keys.empty(key, because="scales that are quantized themselves are not read")
        keys.empty("rotation_config", because="inputs that were rotated are not read")
        keys.ignore("scale_dtype", "in_blocks", "fixed_by_user")
        keys.finish()
        try:
            expression = re.compile(name)
        except (re.error, RecursionError, OverflowError) as error:
            raise CheckpointError(f"{where}: no regular expression: {error}") from None
        rule = LayerRule(name, expression, layer)
        self._exact[name] = rule
        if _EXPRESSION_CHARACTERS & set(name):
            self._rules += (rule,)

    def decide(self, module: str) -> Decision:
        """What the config says of a module: its own entry, an expression, then one for all blocks.

        Heads, and whatever else is outside the blocks, are quantized only if an entry says so.
        """
        rule = self._exact.get(module) or first_rule(self._rules, module)
        if rule is not None:
            why = f"extra_config has {rule.text!r}"
            if rule.format is None:
                return Decision(module, "plain", None, None, why)
            return Decision(module, "quantized", rule.format.spec, None, why)
        for entry in self._skipped:
            if holds_components(module, entry):
                return Decision(module, "plain", None, None, f"{entry!r} is not converted")
        if not is_in_block(module, self._blocks):
            return Decision(module, "plain", None, None, "it is outside the blocks")
        return Decision(module, "quantized", self._format.spec, None, "quant_method is auto-round")

    def read(self, module: str, decision: Decision, tensors: TensorSource) -> Linear:
        """The module, in the format that its tensors have."""
        parts = readable_parts(tensors, module, decision, self._where)
        if not parts.has("qweight"):
            return plain_linear(parts, decision)
        wanted = decision.weight or self._format.spec
        if self._packing == _AWQ:
            return linear(parts, decision, awq.read_awq(parts, wanted))
        weight, permutation = gptq.read_gptq(parts, wanted, _ZERO_OFFSETS[self._packing])
        return linear(parts, decision, weight, input_permutation=permutation)
