"""Integer formats of single layers: rules by expression on top of one format for all."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from humming.checkpoints.config_keys import ConfigKeys
from humming.dtypes import DataType
from humming.errors import CheckpointError
from humming.formats import WeightSpec

FULL_WIDTH = 16
"""Bits from which on values are no quantized ones."""
ACTIVATION_KEYS = ("act_data_type", "act_group_size", "act_sym", "act_dynamic")
TUNING_KEYS = (
    *("damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "mse", "meta"),
    *("model_name_or_path", "model_file_base_name", "model_seqlen", "dataset", "tokenizer"),
    *("iters", "lr", "minmax_lr", "nsamples", "seqlen", "batch_size", "amp", "pad_token_id"),
    *("enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "model_free"),
    *("enable_alg_ext", "gradient_accumulate_steps", "low_gpu_mem_usage", "low_cpu_mem_usage"),
    *("autoround_version", "provider", "scale_dtype", "supported_types", "act_group_aware"),
    *("static_kv_granularity", "static_attention_granularity", "max_input_length"),
)
"""Keys that say how codes were found, which does not change what they mean."""

_MOST_GROUP = 1 << 30


@dataclass(frozen=True, slots=True)
class IntegerFormat:
    """How the integers of a layer are quantized.

    Attributes:
        bits: of a code.
        group_size: columns that share a scale, -1 for all.
        symmetric: whether every zero point is half the range.
    """

    bits: int
    group_size: int
    symmetric: bool

    @classmethod
    def of(
        cls, keys: ConfigKeys, widths: tuple[int, ...], default: "IntegerFormat | None" = None
    ) -> "IntegerFormat":
        """The format that `bits`, `group_size` and `sym` say; what is absent is the default's.

        Raises:
            CheckpointError: a value has no meaning.
        """
        if default is None:
            default = cls(keys.take("bits", int), keys.take("group_size", int, -1), True)
        bits = keys.take("bits", int, default.bits)
        size = keys.take("group_size", int, default.group_size)
        if bits not in widths:
            known = ", ".join(map(str, widths))
            raise CheckpointError(f"{keys.where}: 'bits' is {bits}; possible: {known}")
        if size != -1 and not 0 < size < _MOST_GROUP:
            raise CheckpointError(
                f"{keys.where}: 'group_size' is {size}; possible: a positive number, or -1 for all "
                "columns"
            )
        return cls(bits, size, keys.take("sym", bool, default.symmetric))

    @property
    def spec(self) -> WeightSpec:
        """The format of the weight, with the scales that are usual."""
        prefix, zero = ("int", "none") if self.symmetric else ("uint", "integer")
        return WeightSpec(
            DataType.parse(f"{prefix}{self.bits}"), "group", self.group_size, zero_point=zero
        )


@dataclass(frozen=True, slots=True)
class LayerRule:
    """What becomes of the modules whose names an expression takes from their start on.

    Attributes:
        text: the key of the rule, for reasons.
        expression: the expression.
        format: the format, None where modules are left alone.
    """

    text: str
    expression: "re.Pattern[str]"
    format: IntegerFormat | None


def dynamic_rules(
    rules: Mapping[str, Any], where: str, widths: tuple[int, ...], default: IntegerFormat
) -> tuple[LayerRule, ...]:
    """Rules in their order: `-:` leaves modules alone, `+:` or nothing overrides the format.

    Raises:
        CheckpointError: an expression is none, or an override says what is not known.
    """
    found = []
    for text, values in rules.items():
        keys = ConfigKeys({} if values is None else values, f"{where}: dynamic[{text!r}]")
        sign = text[:2] if text[:2] in ("-:", "+:") else ""
        try:
            expression = re.compile(text.removeprefix(sign))
        except (re.error, RecursionError, OverflowError) as error:
            raise CheckpointError(f"{keys.where}: no regular expression: {error}") from None
        override = IntegerFormat.of(keys, widths, default)
        check_integers(keys)
        # The tensors say whether columns are ordered.
        keys.ignore("desc_act", "failsafe", "fallback", "gptaq", "foem", *TUNING_KEYS)
        keys.finish()
        found.append(LayerRule(text, expression, None if sign == "-:" else override))
    return tuple(found)


def first_rule(rules: tuple[LayerRule, ...], module: str) -> LayerRule | None:
    """The first rule that takes a module."""
    return next((rule for rule in rules if rule.expression.match(module)), None)


def names_of(keys: ConfigKeys, key: str) -> tuple[str, ...]:
    """Names of modules that are one string with commas, a list, or a list of lists.

    Raises:
        CheckpointError: the value is none of these.
    """
    value = keys.take(key, (str, list, tuple), ())
    found: list[Any] = []
    for entry in value.split(",") if isinstance(value, str) else value:
        found += entry if isinstance(entry, (list, tuple)) else [entry]
    if not all(isinstance(entry, str) for entry in found):
        raise CheckpointError(f"{keys.where}: {key!r} holds more than names")
    return tuple(entry.strip() for entry in found if entry.strip())


def check_integers(keys: ConfigKeys) -> None:
    """Refuse weights that are no integers, and activations that are quantized.

    Raises:
        CheckpointError: with the key that says so.
    """
    kind = keys.take("data_type", str, "int")
    # Suffixes say how codes were found: int_asym_dq, int_sym, ...
    if kind.split("_")[0] != "int":
        raise CheckpointError(
            f"{keys.where}: 'data_type' is {kind!r}; of this method int weights are read, others "
            "where it writes the checkpoint in the format of compressed-tensors"
        )
    if keys.take("act_bits", int, FULL_WIDTH) < FULL_WIDTH:
        raise CheckpointError(
            f"{keys.where}: 'act_bits' is {keys.take('act_bits', int)}; of this method weights "
            "with 16-bit activations are read"
        )
    keys.ignore(*ACTIVATION_KEYS)
