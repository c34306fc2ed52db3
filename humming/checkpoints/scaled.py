"""Weights that are stored as codes beside their scales: 8-bit floats, integers, 4-bit floats."""

from dataclasses import replace

import torch

from humming.checkpoints.decisions import Decision, Linear
from humming.checkpoints.module_parts import (
    E8M0,
    FLOATS,
    ModuleParts,
    as_matrix,
    fit_scales,
    refusals,
    weight_of,
)
from humming.dtypes import DataType, float8e4m3
from humming.formats import ActivationSpec, WeightSpec
from humming.quantized import QuantizedWeight, pack_bits

MXFP4, MXFP8, NVFP4 = (WeightSpec.parse(name) for name in ("mxfp4", "mxfp8", "nvfp4"))
_SAYS = "the configuration says"
_FP4_BYTES = (torch.uint8, torch.int8)


def is_plain(parts: ModuleParts, weight: str, scales: tuple[str, ...]) -> bool:
    """Whether a module holds a weight of ordinary numbers and no scale of it."""
    return parts.dtype(weight) in FLOATS and not any(parts.has(scale) for scale in scales)


def plain_linear(parts: ModuleParts, decision: Decision, weight: str = "weight") -> Linear:
    """A module whose weight is not quantized.

    Raises:
        CheckpointError: it is missing, or no matrix of ordinary numbers.
    """
    matrix = parts.take(weight, FLOATS, (2,))
    if decision.action == "quantized":
        parts.note(
            f"the configuration says {decision.weight}, but the weight is {matrix.dtype} and not "
            "quantized"
        )
    return Linear(matrix, parts.bias(matrix.shape[0]), notes=tuple(parts.notes))


def read_bytes(
    parts: ModuleParts, wanted: WeightSpec, weight: str = "weight", scale: str = "weight_scale"
) -> QuantizedWeight:
    """A weight with a byte for each code, float8e4m3 or int8, and scales of any extent.

    Raises:
        CheckpointError: a tensor is missing, or does not fit.
    """
    codes = parts.take(weight, (torch.float8_e4m3fn, torch.int8), (2,))
    found = float8e4m3 if codes.dtype == torch.float8_e4m3fn else DataType.parse("int8")
    if found != wanted.dtype:
        parts.note(f"the configuration says {wanted.dtype} weights, but they are {found}")
        with refusals(parts):
            wanted = replace(wanted, dtype=found, second_scale="none", zero_point="none")
    n, k = codes.shape
    types = (*FLOATS, *E8M0) if found == float8e4m3 else FLOATS
    scales = as_matrix(parts.take(scale, types))
    spec, scales = fit_scales(parts, scale, scales, wanted, n, k)
    return weight_of(parts, (weight, scale), spec, (n, k), codes.view(torch.uint8), scales)


def read_fp4(
    parts: ModuleParts,
    names: tuple[str, str],
    second_scale: torch.Tensor | None = None,
) -> QuantizedWeight:
    """A weight of 4-bit floats in pairs, the first in the lower bits: mxfp4, or nvfp4.

    Args:
        parts: the module.
        names: of the codes [N, K / 2] and of the scales: ue8m0 [N, K / 32] or e4m3 [N, K / 16].
        second_scale: float32 [1, 1], which e4m3 scales need.

    Raises:
        CheckpointError: a tensor is missing, or does not fit.
    """
    codes = parts.take(names[0], _FP4_BYTES, (2,))
    n, k = codes.shape[0], 2 * codes.shape[1]
    scales = as_matrix(parts.take(names[1], (torch.float8_e4m3fn, *E8M0), (2,)))
    spec = MXFP4
    if scales.dtype == torch.float8_e4m3fn:
        spec = NVFP4 if second_scale is not None else replace(NVFP4, second_scale="none")
    elif second_scale is not None:
        raise parts.error(
            names[1], f"is {scales.dtype} beside a second scale", "Those have e4m3 scales."
        )
    if tuple(scales.shape) != spec.scale_shape(n, k):
        raise parts.error(
            names[1],
            f"has the shape {list(scales.shape)} for a weight [{n}, {k}]",
            f"{spec} has scales {list(spec.scale_shape(n, k))}, row by row.",
        )
    return weight_of(
        parts, names, spec, (n, k), codes.view(torch.uint8), scales, second_scale=second_scale
    )


def ternary(parts: ModuleParts, weight: str) -> torch.Tensor:
    """Packed int2 codes of a weight whose rows lie in four blocks, two bits of a byte each."""
    packed = parts.take(weight, (torch.uint8,), (2,))
    raised = torch.cat([(packed >> shift) & 3 for shift in (0, 2, 4, 6)])
    if bool((raised == 3).any()):
        row, column = (int(i) for i in (raised == 3).nonzero()[0])
        raise parts.error(
            weight, f"has the code 3 at [{row}, {column}]", "Ternary weights have 0, 1 and 2."
        )
    return pack_bits((raised + 3) & 3, 2)


def linear(
    parts: ModuleParts,
    decision: Decision,
    weight: QuantizedWeight,
    activation_scale: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    input_permutation: torch.Tensor | None = None,
) -> Linear:
    """A module with a quantized weight, its bias, and what `settled` leaves of the decision."""
    decision = settled(parts, decision, weight)
    return Linear(
        weight,
        parts.bias(weight.shape[0]),
        activation=decision.activation,
        activation_scale=activation_scale,
        input_scale=input_scale,
        input_permutation=input_permutation,
        notes=tuple(parts.notes),
    )


def settled(parts: ModuleParts, decision: Decision, weight: QuantizedWeight) -> Decision:
    """The decision in view of the weight; where it was another, that is noted.

    What the configuration says of activations goes with weights of the type that it names. With
    those of another type activations stay 16-bit.
    """
    said, found = decision.weight, weight.spec
    if said is None:
        parts.note(f"the configuration leaves it alone, but its weight is {found}")
        return decision
    # Where the scales did not fit this has been said already.
    if not _alike(said, found) and not any(note.startswith(_SAYS) for note in parts.notes):
        parts.note(f"{_SAYS} {said}, the tensors are {found}")
    types = {said.dtype.kind.removeprefix("u"), found.dtype.kind.removeprefix("u")}
    if decision.activation is not None and (len(types) > 1 or said.dtype.bits != found.dtype.bits):
        parts.note(f"activations stay 16-bit: {decision.activation} is meant for {said}")
        return replace(decision, activation=None)
    return decision


def _alike(one: WeightSpec, other: WeightSpec) -> bool:
    """Whether two formats are the same but for the type of ordinary scales, which few declare."""
    return replace(one, scale_dtype=other.scale_dtype) == other


def static_scale(
    parts: ModuleParts, activation: ActivationSpec | None, part: str
) -> torch.Tensor | None:
    """The scale of activations that is known beforehand, None where they have none.

    Raises:
        CheckpointError: the activations need it, and it is missing.
    """
    if activation is None or not needs_scale(activation):
        if parts.has(part):
            parts.note(f"{part} is not used: the activations need none")
        return None
    if not parts.has(part):
        raise parts.error(
            part,
            f"is missing, by which activations {activation} are quantized",
            "Read the module with a decision without activation, for 16-bit ones.",
        )
    return parts.scalar(part)


def needs_scale(activation: ActivationSpec) -> bool:
    """Whether activations are quantized by a number that the checkpoint must hold."""
    static = activation.granularity == "tensor" and not activation.dynamic
    return static or activation.second_scale != "none"
