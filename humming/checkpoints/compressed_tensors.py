"""Checkpoints of compressed-tensors: groups of modules, each with a format of its own.

A group says which modules it is for (names, `re:` expressions, classes), how their weights and
activations are quantized, and how the weights are stored. What is stored is told from the tensors:

    weight_packed int32     integers of 1 to 8 bits raised by half their range, along K
    weight_packed uint8     pairs of 4-bit floats (mxfp4, nvfp4), or four 6-bit floats in 3 bytes
    weight int8             integers
    weight float8_e4m3fn    8-bit floats
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from humming.checkpoints.compressed_formats import (
    MXFP6,
    activation_format,
    read_args,
    weight_format,
)
from humming.checkpoints.config_keys import ConfigKeys
from humming.checkpoints.decisions import Decision, Linear
from humming.checkpoints.integer_words import read_words
from humming.checkpoints.module_parts import (
    E8M0,
    FLOATS,
    ModuleParts,
    as_matrix,
    fit_scales,
    readable_parts,
    reciprocal,
    weight_of,
)
from humming.checkpoints.patterns import check_expressions, matches_name
from humming.checkpoints.scaled import (
    is_plain,
    linear,
    needs_scale,
    plain_linear,
    read_bytes,
    read_fp4,
    settled,
    static_scale,
)
from humming.checkpoints.tensors import TensorSource
from humming.dtypes import DataType
from humming.errors import CheckpointError, UnsupportedError
from humming.formats import ActivationSpec, WeightSpec
from humming.quantized import QuantizedWeight, pack_bits

_FORMATS = (
    "dense",
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)
_SPARSE = ("marlin-24", "sparse-24-bitmask", "sparse-bitmask")
_STATUSES = ("compressed", "frozen", "calibration", "initialized")
# Names of classes that are linear layers; all others hold no matrix that is read here.
_LINEAR_CLASSES = ("Linear", "LinearBase", "ColumnParallelLinear", "RowParallelLinear")


@dataclass(frozen=True, slots=True)
class _Group:
    """A group of modules.

    Attributes:
        name: its key, for reasons.
        targets: what takes modules.
        weight, activation: the formats, None where nothing is quantized.
        why_not: why the modules cannot be read, empty if they can.
    """

    name: str
    targets: tuple[str, ...]
    weight: WeightSpec | None
    activation: ActivationSpec | None
    why_not: str


_ZEROS = (torch.int8, torch.int32, torch.int64)


class CompressedTensors:
    """Reads checkpoints of compressed-tensors; see `Method`."""

    name = "compressed-tensors"

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        keys = ConfigKeys(config, where)
        self._where = where
        keys.one_of("quant_method", ("compressed-tensors", "compressed_tensors"))
        self._format = keys.one_of("format", (*_FORMATS, *_SPARSE), "dense")
        status = keys.one_of("quantization_status", _STATUSES, "compressed")
        groups = keys.take("config_groups", Mapping, {})
        self._ignored = keys.strings("ignore")
        check_expressions(self._ignored, where)
        keys.empty("transform_config", because="rotations of weights are not applied here")
        keys.empty("moe_sparsity_config", because="sparse experts are not read")
        keys.empty("output_activations", because="outputs are not quantized here")
        self._check_sparsity(keys.take("sparsity_config", Mapping, {}))
        cache = keys.take("kv_cache_scheme", Mapping, None)
        keys.ignore("global_compression_ratio", "version", "provider")
        keys.finish()
        self._groups = tuple(self._group(name, values) for name, values in groups.items())
        self.notes: tuple[str, ...] = ()
        if cache:
            self.notes += ("scales of the KV cache are not part of linear layers, and not read",)
        if status != "compressed":
            self.notes += (f"quantization_status is {status}: weights may not be quantized yet",)

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        """Whether a config is of this method."""
        return config.get("quant_method") in ("compressed-tensors", "compressed_tensors")

    def _check_sparsity(self, sparsity: Mapping[str, Any]) -> None:
        if sparsity and sparsity.get("format", "dense") != "dense":
            raise CheckpointError(
                f"{self._where}: sparsity_config has the format {sparsity['format']!r}: sparse "
                "weights are not read; possible: dense"
            )

    # -- groups -------------------------------------------------------------------------------

    def _group(self, name: str, values: Any) -> _Group:
        where = f"{self._where}: config_groups.{name}"
        keys = ConfigKeys(values, where)
        targets = keys.strings("targets")
        check_expressions(targets, where)
        stored = keys.one_of("format", (*_FORMATS, *_SPARSE), self._format)
        weights = read_args(keys.take("weights", Mapping, None), f"{where}.weights")
        inputs = read_args(
            keys.take("input_activations", Mapping, None), f"{where}.input_activations"
        )
        outputs = keys.take("output_activations", Mapping, None)
        keys.finish()
        why_not, weight, activation = "", None, None
        if stored in _SPARSE:
            why_not = f"weights of the format {stored} are sparse, which no kernel here reads"
        elif outputs:
            why_not = "its outputs are quantized, which no kernel here does"
        else:
            try:
                weight = None if weights is None else weight_format(weights)
                activation = None if inputs is None else activation_format(inputs)
            except UnsupportedError as error:
                why_not = str(error)
        return _Group(name, targets, weight, activation, why_not)

    def decide(self, module: str) -> Decision:
        """What the config says of a module.

        A module that is ignored by name, expression or class is left alone. Otherwise the first
        group whose names or expressions take it holds, and then the first whose classes do.
        """
        for entry in self._ignored:
            if matches_name(module, entry) or entry in _LINEAR_CLASSES:
                return Decision(module, "plain", None, None, f"{entry!r} is ignored")
        by_name = (
            (group, target)
            for group in self._groups
            for target in group.targets
            if matches_name(module, target)
        )
        by_class = (
            (group, target)
            for group in self._groups
            for target in group.targets
            if target in _LINEAR_CLASSES
        )
        group, target = next(by_name, None) or next(by_class, None) or (None, "")
        if group is None:
            return Decision(module, "plain", None, None, "no group takes it")
        why = f"{group.name} takes {target!r}"
        if group.why_not:
            return Decision(module, "refused", None, None, f"{why}: {group.why_not}")
        if group.weight is None:
            return Decision(module, "plain", None, None, f"{why}, without a format of weights")
        return Decision(module, "quantized", group.weight, group.activation, why)

    # -- tensors ------------------------------------------------------------------------------

    def read(self, module: str, decision: Decision, tensors: TensorSource) -> Linear:
        """The module, in the format that its tensors have."""
        parts = readable_parts(tensors, module, decision, self._where)
        if parts.has("input_zero_point") and bool(parts.take("input_zero_point", _ZEROS).any()):
            raise parts.error(
                "input_zero_point", "is not 0", "Known scales of symmetric activations are read."
            )
        if parts.has("weight_packed"):
            return self._read_packed(parts, decision)
        if is_plain(parts, "weight", ("weight_scale",)):
            return plain_linear(parts, decision)
        if parts.dtype("weight") in FLOATS:
            raise parts.error(
                "weight",
                f"is {parts.dtype('weight')} beside scales: it was not quantized to the end",
                "Save the model compressed.",
            )
        if parts.dtype("weight") == torch.int8:
            weight = self._read_int8(parts, decision)
        else:
            weight = read_bytes(parts, decision.weight or WeightSpec.parse("fp8_channel"))
        decision = settled(parts, decision, weight)
        static = static_scale(parts, decision.activation, "input_scale")
        return linear(parts, decision, weight, activation_scale=static)

    def _read_packed(self, parts: ModuleParts, decision: Decision) -> Linear:
        if parts.dtype("weight_packed") == torch.int32:
            weight, permutation = read_words(parts, decision.weight)
            decision = settled(parts, decision, weight)
            static = static_scale(parts, decision.activation, "input_scale")
            return linear(
                parts, decision, weight, activation_scale=static, input_permutation=permutation
            )
        names = ("weight_packed", "weight_scale")
        if parts.dtype("weight_scale") == torch.float8_e4m3fn:
            second = reciprocal(parts, "weight_global_scale")
            parts.note(
                "weight_global_scale is a divisor; its reciprocal is rounded to float32 once"
            )
            weight = read_fp4(parts, names, second)
        elif _is_six_bit(parts):
            weight = _read_fp6(parts, names)
        else:
            weight = read_fp4(parts, names)
        static = None
        decision = settled(parts, decision, weight)
        if decision.activation is not None and needs_scale(decision.activation):
            part = "input_global_scale"
            if not parts.has(part):
                static_scale(parts, decision.activation, part)
            static = reciprocal(parts, part)
        return linear(parts, decision, weight, activation_scale=static)

    def _read_int8(self, parts: ModuleParts, decision: Decision) -> QuantizedWeight:
        """Integers of at most 8 bits, each in a byte; those with zero points become unsigned."""
        wanted = decision.weight or WeightSpec.parse("int8")
        bits = wanted.dtype.bits if wanted.dtype.is_integer else 8
        codes = parts.take("weight", (torch.int8,), (2,))
        n, k = codes.shape
        half = 1 << (bits - 1)
        if bits < 8 and not bool(((codes >= -half) & (codes < half)).all()):
            raise parts.error("weight", f"holds more than {bits}-bit integers", "It was cut.")
        scales = as_matrix(parts.take("weight_scale", FLOATS))
        asymmetric = parts.has("weight_zero_point")
        signed = DataType.parse(f"int{bits}")
        unsigned = DataType.parse(f"uint{bits}")
        wanted = WeightSpec(
            unsigned if asymmetric else signed,
            wanted.granularity,
            wanted.group_size,
            wanted.block,
            zero_point="integer" if asymmetric else "none",
        )
        spec, scales = fit_scales(parts, "weight_scale", scales, wanted, n, k)
        raised = half if asymmetric else 0
        mask = (1 << bits) - 1
        packed = pack_bits(((codes.to(torch.int16) + raised) & mask).to(torch.uint8), bits)
        zeros = None
        if asymmetric:
            zeros = as_matrix(parts.take("weight_zero_point", (torch.int8, torch.int32)))
            zeros = (zeros.to(torch.int16) + half).to(torch.uint8)
        return weight_of(parts, ("weight", "weight_scale"), spec, (n, k), packed, scales, zeros)


def _is_six_bit(parts: ModuleParts) -> bool:
    codes = parts.take("weight_packed", (torch.uint8,), (2,))
    scales = as_matrix(parts.take("weight_scale", E8M0, (2,)))
    return codes.shape[1] == 24 * scales.shape[1]


def _read_fp6(parts: ModuleParts, names: tuple[str, str]) -> QuantizedWeight:
    """Four 6-bit floats in three bytes, the first in the lowest bits."""
    codes = parts.take(names[0], (torch.uint8,), (2,))
    scales = as_matrix(parts.take(names[1], E8M0, (2,)))
    shape = (codes.shape[0], codes.shape[1] // 3 * 4)
    return weight_of(parts, names, MXFP6, shape, codes, scales)
