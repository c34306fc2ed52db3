"""Checkpoints of GPTQ: integers in words along K, a scale and a zero point per group of columns.

    qweight  int32 [K * bits / 32, N]   codes along K, the first in the lowest bits, without gaps
    qzeros   int32 [G, N * bits / 32]   zero points along N in the same way
    scales   [G, N]
    g_idx    int32 [K]                  the group of each column, in any order (`desc_act`)

Stored zero points are lower than the true ones by 1, modulo the range, but not in `gptq_v2`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from humming.checkpoints.config_keys import ConfigKeys
from humming.checkpoints.decisions import Decision, Linear
from humming.checkpoints.integer_words import in_group_order
from humming.checkpoints.layer_rules import (
    TUNING_KEYS,
    IntegerFormat,
    check_integers,
    dynamic_rules,
    first_rule,
    names_of,
)
from humming.checkpoints.module_parts import (
    FLOATS,
    ModuleParts,
    flip_sign_bits,
    readable_parts,
    weight_of,
)
from humming.checkpoints.patterns import holds_components, is_in_block
from humming.checkpoints.scaled import linear, plain_linear
from humming.checkpoints.tensors import TensorSource
from humming.dtypes import DataType
from humming.errors import CheckpointError
from humming.formats import WeightSpec
from humming.quantized import SCALE_TENSOR_DTYPES, QuantizedWeight, pack_bits, unpack_bits

WIDTHS = (2, 3, 4, 5, 6, 7, 8)
# What a stored zero point is lower by than the true one.
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
_FORMATS = (*_ZERO_OFFSETS, "marlin", "bitblas", "gptq_p", "qqq")
_HARMLESS = (
    *("use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "cache_block_outputs"),
    *("backend", "version", "quant_block_list", "module_name_preceding_first_block"),
)


class Gptq:
    """Reads checkpoints of GPTQ; see `Method`."""

    name = "gptq"

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        keys = ConfigKeys(config, where)
        self._where = where
        notes = []
        named = keys.one_of("quant_method", ("gptq",), "")
        keys.one_of("method", ("gptq",), "gptq")
        if not named:
            notes.append("no quantization method is named; the keys are those of gptq")
        self._format = IntegerFormat.of(keys, WIDTHS)
        self._offset = self._zero_offset(keys)
        self._ordered = keys.take("desc_act", bool, False)
        self._lm_head = keys.take("lm_head", bool, False)
        rules = keys.take("dynamic", (Mapping, bool), {}) or {}
        if rules is True:
            raise CheckpointError(f"{where}: 'dynamic' is true, no mapping")
        self._rules = dynamic_rules(rules, where, WIDTHS, self._format)
        self._blocks = names_of(keys, "block_name_to_quantize")
        self._within = names_of(keys, "modules_in_block_to_quantize")
        self._skipped = keys.strings("modules_to_not_convert")
        keys.empty("rotation", because="inputs that were rotated are not read")
        keys.empty("adapter", because="adapters on top of weights are not read")
        keys.empty("activation", because="quantized activations of this method are not read")
        check_integers(keys)
        keys.ignore(*TUNING_KEYS, *_HARMLESS)
        keys.finish()
        self.notes: tuple[str, ...] = tuple(notes)

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        """Whether a config is of this method; the oldest name none, but have its keys."""
        if config.get("quant_method") is None:
            return {"bits", "group_size", "desc_act"} <= config.keys()
        return config.get("quant_method") == "gptq"

    def _zero_offset(self, keys: ConfigKeys) -> int:
        stored = keys.one_of("checkpoint_format", _FORMATS, "gptq")
        named = keys.one_of("format", _FORMATS, stored)
        if named != stored and "checkpoint_format" in keys:
            raise CheckpointError(
                f"{keys.where}: 'checkpoint_format' is {stored!r} and 'format' is {named!r}"
            )
        if keys.take("is_marlin_format", bool, False):
            named = "marlin"
        if named not in _ZERO_OFFSETS:
            known = " and ".join(_ZERO_OFFSETS)
            raise CheckpointError(
                f"{keys.where}: tensors of the format {named!r} are in the order of one kernel, "
                f"which is not read; {known} are"
            )
        packed = keys.one_of("pack_dtype", ("int32", "int8", "int16", "int64"), "int32")
        if packed != "int32" and self._format.bits not in (2, 4, 8):
            raise CheckpointError(
                f"{keys.where}: 'pack_dtype' is {packed!r}; codes of {self._format.bits} bits are "
                "read from int32 words"
            )
        return _ZERO_OFFSETS[named]

    def decide(self, module: str) -> Decision:
        """What the config says of a module: rules in their order, then one format for all blocks.

        Heads are quantized only if `lm_head` says so, everything else outside blocks only if a
        rule does.
        """
        leaf = module.rpartition(".")[2]
        rule = first_rule(self._rules, module)
        if rule is not None and rule.format is None:
            return Decision(module, "plain", None, None, f"{rule.text!r} leaves it alone")
        if leaf == "lm_head" and not self._lm_head:
            return Decision(module, "plain", None, None, "lm_head is false")
        for entry in self._skipped:
            if holds_components(module, entry):
                return Decision(module, "plain", None, None, f"{entry!r} is not converted")
        if rule is not None and rule.format is not None:
            return Decision(module, "quantized", rule.format.spec, None, f"{rule.text!r} takes it")
        if leaf != "lm_head":
            if not is_in_block(module, self._blocks):
                return Decision(module, "plain", None, None, "it is outside the blocks")
            if self._within and not any(module.endswith(f".{name}") for name in self._within):
                why = "modules_in_block_to_quantize does not name it"
                return Decision(module, "plain", None, None, why)
        return Decision(module, "quantized", self._format.spec, None, "quant_method is gptq")

    def read(self, module: str, decision: Decision, tensors: TensorSource) -> Linear:
        """The module, in the format that its tensors have."""
        parts = readable_parts(tensors, module, decision, self._where)
        if not parts.has("qweight"):
            return plain_linear(parts, decision)
        wanted = decision.weight or self._format.spec
        weight, permutation = read_gptq(parts, wanted, self._offset, self._ordered)
        return linear(parts, decision, weight, input_permutation=permutation)


_WORDS = (torch.int32, torch.int64, torch.int16, torch.int8)


def read_gptq(
    parts: ModuleParts, wanted: WeightSpec, zero_offset: int, ordered: bool = False
) -> tuple[QuantizedWeight, torch.Tensor | None]:
    """A weight, and the order of the inputs that it takes (None for their own).

    Args:
        parts: the module.
        wanted: the format that the configuration says.
        zero_offset: what stored zero points are lower by than true ones.
        ordered: whether columns may belong to groups in any order, which `g_idx` must say then.

    Raises:
        CheckpointError: a tensor is missing, or does not fit.
    """
    words = parts.take("qweight", _WORDS, (2,))
    scales = parts.take("scales", FLOATS, (2,))
    n = words.shape[1]
    if scales.shape[1] != n:
        raise parts.error(
            "scales", f"has the shape {list(scales.shape)}", f"qweight has {n} columns."
        )
    bits = _bits(parts, wanted.dtype.bits, n)
    word_bits = 8 * words.element_size()
    k = words.shape[0] * word_bits // bits
    if parts.has("g_idx"):
        k = parts.take("g_idx", (torch.int32, torch.int64), (1,)).shape[0]
    if words.shape[0] != -(-k * bits // word_bits):
        raise parts.error(
            "qweight",
            f"has {words.shape[0]} rows for {k} values of {bits} bits",
            f"They take {-(-k * bits // word_bits)} words of {word_bits} bits.",
        )
    spec = group_format(parts, wanted, bits, scales.shape[0], k)
    zeros = _zeros(parts, spec, n, scales.shape[0], zero_offset)
    raw = words.T.contiguous().view(torch.uint8)
    exact = k * bits % 8 == 0
    codes = raw[:, : k * bits // 8] if exact else pack_bits(unpack_bits(raw, bits, k), bits)
    permutation = None
    if parts.has("g_idx"):
        codes, permutation = in_group_order(parts, "g_idx", spec, codes, k)
    elif ordered and spec.granularity == "group":
        raise parts.error("g_idx", "is missing", "With desc_act it says the group of each column.")
    codes = codes.contiguous()
    if zeros is None:
        codes = flip_sign_bits(codes, bits, k)
    return make_integers(parts, spec, (n, k), codes, scales, zeros), permutation


def make_integers(
    parts: ModuleParts,
    spec: WeightSpec,
    shape: tuple[int, int],
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
) -> QuantizedWeight:
    """The weight of codes and of scales and zero points [G, N], the latter None if symmetric."""
    prefix, zero = ("int", "none") if zeros is None else ("uint", "integer")
    stored = next(kind for kind, found in SCALE_TENSOR_DTYPES.items() if found == scales.dtype)
    spec = replace(
        spec,
        dtype=DataType.parse(f"{prefix}{spec.dtype.bits}"),
        zero_point=zero,
        scale_dtype=stored,
    )
    zeros = None if zeros is None else zeros.T.contiguous()
    return weight_of(parts, ("qweight", "scales"), spec, shape, codes, scales.T.contiguous(), zeros)


def _bits(parts: ModuleParts, wanted: int, n: int) -> int:
    """Bits of a code: those of the configuration, unless the words of zero points say others."""
    if not parts.has("qzeros"):
        return wanted
    words = parts.take("qzeros", _WORDS, (2,))
    width = 8 * words.element_size()
    for bits in (wanted, *WIDTHS):
        if words.shape[1] == -(-n * bits // width):
            if bits != wanted:
                parts.note(f"the configuration says {wanted} bits, but the tensors have {bits}")
            return bits
    raise parts.error(
        "qzeros",
        f"has {words.shape[1]} columns for {n} zero points",
        f"{wanted} bits take {-(-n * wanted // width)}.",
    )


def group_format(
    parts: ModuleParts, wanted: WeightSpec, bits: int, groups: int, k: int
) -> WeightSpec:
    """The wanted format with the group size that the number of scales tells."""
    prefix = "uint" if wanted.zero_point == "integer" else "int"
    wanted = replace(wanted, dtype=DataType.parse(f"{prefix}{bits}"))
    if wanted.scale_shape(1, k)[1] == groups:
        return wanted
    size = -1 if groups == 1 else k // groups
    if groups > k or (size > 0 and k % groups):
        raise parts.error(
            "scales",
            f"has {groups} rows for K = {k}",
            f"{wanted} has {wanted.scale_shape(1, k)[1]}, groups of another equal size have a "
            "divisor of K.",
        )
    found = replace(wanted, granularity="group", group_size=size)
    parts.note(f"the configuration says {wanted}, but with {groups} rows of scales it is {found}")
    return found


def _zeros(
    parts: ModuleParts, spec: WeightSpec, n: int, groups: int, offset: int
) -> torch.Tensor | None:
    """Zero points uint8 [G, N], None where the weight is symmetric.

    Raises:
        CheckpointError: they are missing, or of another shape.
    """
    bits, symmetric = spec.dtype.bits, spec.zero_point == "none"
    if not parts.has("qzeros"):
        if not symmetric:
            raise parts.error("qzeros", "is missing", "The weight is asymmetric, and needs it.")
        parts.note("qzeros is missing; the weight is symmetric, which says them")
        return None
    words = parts.take("qzeros", _WORDS, (2,))
    if words.shape[0] != groups:
        raise parts.error(
            "qzeros", f"has {words.shape[0]} rows", f"There are {groups} rows of scales."
        )
    stored = unpack_bits(words.contiguous().view(torch.uint8), bits, n)
    zeros = (stored + offset) & ((1 << bits) - 1)
    if not symmetric:
        return zeros
    half = 1 << (bits - 1)
    if bool((zeros == half).all()):
        return None
    # Some writers name the other convention than they use, which only symmetry betrays.
    if bool((stored == stored[0, 0]).all()) and int(stored[0, 0]) in (half, half - 1):
        parts.note(
            f"qzeros is {int(stored[0, 0])} throughout: the zero point {half} of symmetric weights "
            "in the other convention than the configuration names; it is read so"
        )
        return None
    parts.note("the configuration says symmetric, but zero points differ from half the range")
    return zeros
