"""Checkpoints of AWQ: 4-bit integers with zero points, in one of two orders.

gemm  qweight int32 [K, N / 8], qzeros int32 [G, N / 8], scales [G, N]; along N, and the eight
      codes of a word are those of columns 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on
gemv  qweight int32 [N, K / 8], qzeros int32 [N, G' / 8], scales [N, G']; along K and G in
      their own order, G' being the number of groups rounded up
"""

from collections.abc import Mapping
from typing import Any

import torch

from humming.checkpoints.config_keys import ConfigKeys
from humming.checkpoints.decisions import Decision, Linear
from humming.checkpoints.gptq import group_format, make_integers
from humming.checkpoints.layer_rules import (
    TUNING_KEYS,
    IntegerFormat,
    check_integers,
    dynamic_rules,
    first_rule,
)
from humming.checkpoints.module_parts import (
    FLOATS,
    ModuleParts,
    flip_sign_bits,
    readable_parts,
)
from humming.checkpoints.patterns import is_in_block
from humming.checkpoints.scaled import linear, plain_linear
from humming.checkpoints.tensors import TensorSource
from humming.errors import CheckpointError
from humming.formats import WeightSpec
from humming.quantized import QuantizedWeight, pack_bits, unpack_bits

WIDTHS = (4, 5, 6, 7)
# Where the codes of columns 0 ... 7 lie among eight.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_READ = ("gemm", "gemv")
_VERSIONS = (*_READ, "gemv_fast", "llm-awq", "marlin", "exllama", "ipex", "bitblas", "paroquant")
_HARMLESS = (
    *("backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config"),
    *("desc_act", "quant_block_list", "to_quant_block_names", "block_name_to_quantize"),
)


class Awq:
    """Reads checkpoints of AWQ; see `Method`."""

    name = "awq"

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        keys = ConfigKeys(_modern(config, where), where)
        self._where = where
        keys.one_of("quant_method", ("awq",), "awq")
        keys.one_of("method", ("awq",), "awq")
        symmetric = not keys.take("zero_point", bool, not keys.take("sym", bool, False))
        width, size = keys.take("bits", int, 4), keys.take("group_size", int, -1)
        self._format = IntegerFormat.of(keys, WIDTHS, IntegerFormat(width, size, symmetric))
        self._format = IntegerFormat(self._format.bits, self._format.group_size, symmetric)
        self._version = _version(keys)
        keys.one_of("pack_dtype", ("int32",), "int32")
        self._lm_head = keys.take("lm_head", bool, False)
        rules = keys.take("dynamic", Mapping, {})
        self._rules = dynamic_rules(rules, where, WIDTHS, self._format)
        self._skipped = keys.strings("modules_to_not_convert")
        keys.empty("rotation", because="inputs that were rotated are not read")
        keys.empty("activation", because="quantized activations of this method are not read")
        check_integers(keys)
        keys.ignore(*TUNING_KEYS, *_HARMLESS)
        keys.finish()
        self.notes: tuple[str, ...] = ()
        if config.get("desc_act"):
            self.notes = ("desc_act has no meaning in this method, which stores no order",)

    @classmethod
    def recognizes(cls, config: Mapping[str, Any]) -> bool:
        """Whether a config is of this method; the oldest name none, but have its keys."""
        if config.get("quant_method") is None:
            return {"w_bit", "q_group_size"} <= config.keys()
        return config.get("quant_method") == "awq"

    def decide(self, module: str) -> Decision:
        """What the config says of a module.

        Entries of the skip list are parts of names, the dot at the end of a name included: `gate`
        takes `gate_proj` too, as it did when the model was quantized.
        """
        for entry in self._skipped:
            if entry and entry in f"{module}.":
                return Decision(module, "plain", None, None, f"{entry!r} is not converted")
        rule = first_rule(self._rules, module)
        if rule is not None and rule.format is None:
            return Decision(module, "plain", None, None, f"{rule.text!r} leaves it alone")
        if module.rpartition(".")[2] == "lm_head":
            if not self._lm_head:
                return Decision(module, "plain", None, None, "heads are not converted")
        elif not is_in_block(module, ()):
            return Decision(module, "plain", None, None, "it is outside the blocks")
        if rule is not None and rule.format is not None:
            return Decision(module, "quantized", rule.format.spec, None, f"{rule.text!r} takes it")
        return Decision(module, "quantized", self._format.spec, None, "quant_method is awq")

    def read(self, module: str, decision: Decision, tensors: TensorSource) -> Linear:
        """The module, in the format that its tensors have."""
        parts = readable_parts(tensors, module, decision, self._where)
        if not parts.has("qweight"):
            return plain_linear(parts, decision)
        weight = read_awq(parts, decision.weight or self._format.spec, self._version)
        return linear(parts, decision, weight)


def _modern(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The config with its oldest keys under the names of today.

    Raises:
        CheckpointError: both are there and differ.
    """
    found = dict(config)
    for old, new in (("w_bit", "bits"), ("q_group_size", "group_size")):
        if old in found:
            value = found.pop(old)
            if found.setdefault(new, value) != value:
                raise CheckpointError(
                    f"{where}: {old!r} is {value!r} and {new!r} is {found[new]!r}"
                )
    return found


def _version(keys: ConfigKeys) -> str:
    """The order of the tensors, which three keys may name."""
    named = {
        key: keys.one_of(key, _VERSIONS)
        for key in ("version", "checkpoint_format", "format")
        if key in keys or keys.take(key, str, None)
    }
    if len(set(named.values())) > 1:
        raise CheckpointError(f"{keys.where}: the keys {named} contradict one another")
    version = next(iter(named.values()), "gemm")
    if version not in _READ:
        raise CheckpointError(
            f"{keys.where}: tensors of the version {version!r} are in the order of one kernel, "
            f"which is not read; {' and '.join(_READ)} are"
        )
    return str(version)


def read_awq(parts: ModuleParts, wanted: WeightSpec, version: str = "gemm") -> QuantizedWeight:
    """A weight in either order; where the tensors are in the other one than `version`, in theirs.

    Raises:
        CheckpointError: a tensor is missing, or does not fit.
    """
    bits = wanted.dtype.bits
    words = parts.take("qweight", (torch.int32,), (2,))
    scales = parts.take("scales", FLOATS, (2,))
    fits = {
        "gemm": 32 * words.shape[1] == bits * scales.shape[1],
        "gemv": bits == 4 and words.shape[0] == scales.shape[0],
    }
    found = version if fits[version] else next((name for name in _READ if fits[name]), None)
    if found is None:
        raise parts.error(
            "qweight",
            f"has the shape {list(words.shape)} beside scales {list(scales.shape)}",
            f"Of {bits} bits, gemm has [K, N * {bits} / 32] beside [G, N], and gemv [N, K / 8] "
            "beside [N, G].",
        )
    if found != version:
        parts.note(f"the configuration says {version}, but the tensors are in the order of {found}")
    if found == "gemm":
        k, n = words.shape[0], scales.shape[1]
        packed = pack_bits(_columns(words, bits, n).T.contiguous(), bits)
        spec = group_format(parts, wanted, bits, scales.shape[0], k)
    else:
        k, spec = 8 * words.shape[1], wanted
        packed = words.contiguous().view(torch.uint8)
        groups = spec.scale_shape(1, k)[1]
        if groups > scales.shape[1]:
            raise parts.error(
                "scales", f"has {scales.shape[1]} columns", f"{spec} has {groups} for K = {k}."
            )
        scales = scales[:, :groups].T
    zeros = _zeros(parts, spec, found, scales)
    if zeros is None:
        packed = flip_sign_bits(packed, bits, k)
    return make_integers(parts, spec, (scales.shape[1], k), packed, scales, zeros)


def _columns(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Codes uint8 [rows, columns] of words [rows, columns * bits / 32], in the order of columns."""
    stored = unpack_bits(words.contiguous().view(torch.uint8), bits, columns)
    return stored.view(len(words), -1, 8)[:, :, list(_PLACES)].reshape(len(words), columns)


def _zeros(
    parts: ModuleParts, spec: WeightSpec, version: str, scales: torch.Tensor
) -> torch.Tensor | None:
    """Zero points uint8 [G, N], None where the configuration and they say symmetric."""
    bits, (groups, n) = spec.dtype.bits, scales.shape
    words = parts.take("qzeros", (torch.int32,), (2,))
    in_columns = version == "gemm"
    rows, columns = (groups, n * bits // 32) if in_columns else (n, -(-groups // 8))
    # The order gemv rounds the number of groups up.
    fits = words.shape[1] == columns if in_columns else words.shape[1] >= columns
    if words.shape[0] != rows or not fits:
        raise parts.error(
            "qzeros",
            f"has the shape {list(words.shape)}",
            f"{version} has {[rows, columns]} for scales {[groups, n]}.",
        )
    if in_columns:
        zeros = _columns(words, bits, n)
    else:
        zeros = unpack_bits(words.contiguous().view(torch.uint8), bits, groups).T.contiguous()
    if spec.zero_point == "none":
        if bool((zeros == 1 << (bits - 1)).all()):
            return None
        parts.note("the configuration says symmetric, but zero points differ from half the range")
    return zeros
