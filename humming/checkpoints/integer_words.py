"""Integers of 1 to 8 bits in 32-bit words, as compressed-tensors packs them."""

import torch

from humming.checkpoints.module_parts import (
    FLOATS,
    ModuleParts,
    as_matrix,
    fit_scales,
    flip_sign_bits,
    refusals,
    weight_of,
)
from humming.dtypes import DataType
from humming.formats import WeightSpec
from humming.quantized import QuantizedWeight, pack_bits, unpack_bits

_LARGEST = 1 << 31


def read_words(
    parts: ModuleParts, wanted: WeightSpec | None
) -> tuple[QuantizedWeight, torch.Tensor | None]:
    """A weight and the order of its columns, None for their own.

    Codes lie along K, raised by half their range, the first in the lowest bits, densely over the
    borders of words; older files of widths that do not divide 32 leave the upper bits of each word
    empty instead. Zero points lie along N in the same way.

    Raises:
        CheckpointError: a tensor is missing, or does not fit.
    """
    words = parts.take("weight_packed", (torch.int32,), (2,))
    scales = as_matrix(parts.take("weight_scale", FLOATS))
    if wanted is None or not wanted.dtype.is_integer:
        wanted = _guessed(parts, words, scales)
    n, k = _shape(parts, words, scales, wanted)
    bits, dense = _width(parts, words.shape[1], k, wanted.dtype.bits)
    asymmetric = parts.has("weight_zero_point")
    if asymmetric != (wanted.zero_point == "integer"):
        if not asymmetric:
            raise parts.error(
                "weight_zero_point", "is missing", "The weight is asymmetric, and needs it."
            )
        parts.note("the configuration says symmetric, but there are zero points, which are used")
    prefix, zero = ("uint", "integer") if asymmetric else ("int", "none")
    with refusals(parts):
        wanted = WeightSpec(
            DataType.parse(f"{prefix}{bits}"),
            wanted.granularity,
            wanted.group_size,
            wanted.block,
            scale_dtype=wanted.scale_dtype,
            zero_point=zero,
        )
    spec, scales = fit_scales(parts, "weight_scale", scales, wanted, n, k)
    codes = _codes(words, bits, k, dense)
    if not asymmetric:
        codes = flip_sign_bits(codes, bits, k)
    zeros = _zeros(parts, bits, spec.scale_shape(n, k), dense) if asymmetric else None
    permutation = None
    if parts.has("weight_g_idx"):
        codes, permutation = in_group_order(parts, "weight_g_idx", spec, codes, k)
    weight = weight_of(parts, ("weight_packed", "weight_scale"), spec, (n, k), codes, scales, zeros)
    return weight, permutation


def _guessed(parts: ModuleParts, words: torch.Tensor, scales: torch.Tensor) -> WeightSpec:
    """The format where the config says none: as many bits as the shape tells."""
    shape = _stored_shape(parts)
    if shape is None:
        raise parts.error("weight_shape", "is missing", "Without a format it cannot be told.")
    k, columns = shape[1], scales.shape[1]
    bits = words.shape[1] * 32 // k
    zero = "integer" if parts.has("weight_zero_point") else "none"
    dtype = f"{'uint' if zero == 'integer' else 'int'}{bits}"
    with refusals(parts):
        if columns > 1:
            return WeightSpec(DataType.parse(dtype), "group", k // columns, zero_point=zero)
        granularity = "channel" if scales.shape[0] > 1 else "tensor"
        return WeightSpec(DataType.parse(dtype), granularity, zero_point=zero)


def _stored_shape(parts: ModuleParts) -> tuple[int, int] | None:
    if not parts.has("weight_shape"):
        return None
    stored = parts.take("weight_shape", (torch.int64, torch.int32), (1,))
    n, k = (int(size) for size in stored) if stored.numel() == 2 else (0, 0)
    if not 0 < n < _LARGEST or not 0 < k < _LARGEST:
        raise parts.error("weight_shape", f"is {stored.tolist()[:4]}", "It is [N, K].")
    return n, k


def _shape(
    parts: ModuleParts, words: torch.Tensor, scales: torch.Tensor, wanted: WeightSpec
) -> tuple[int, int]:
    stored = _stored_shape(parts)
    if stored is None:
        k = words.shape[1] * 32 // wanted.dtype.bits
        if wanted.granularity == "group":
            k = scales.shape[1] * wanted.group_size
        parts.note(f"weight_shape is missing; K is taken to be {k}")
        return words.shape[0], k
    if stored[0] != words.shape[0]:
        raise parts.error(
            "weight_shape",
            f"says {stored[0]} rows, weight_packed has {words.shape[0]}",
            "Both are of one matrix.",
        )
    return stored


def _width(parts: ModuleParts, words: int, k: int, bits: int) -> tuple[int, bool]:
    """Bits of a code and whether they are packed densely, as the number of words tells."""
    for width in (bits, *(other for other in range(1, 9) if other != bits)):
        layouts = {-(-k * width // 32): True, -(-k // (32 // width)): False}
        # Where both layouts take as many words they may differ still; the dense one is today's.
        layouts[-(-k * width // 32)] = True
        if words in layouts:
            if width != bits:
                parts.note(
                    f"the configuration says {bits} bits, but {words} words for {k} values are "
                    f"{width} bits"
                )
            elif 32 % bits and layouts[words] and -(-k // (32 // bits)) == words:
                parts.note(
                    f"{words} words hold {k} values of {bits} bits in two layouts; the one without "
                    "gaps is assumed"
                )
            return width, layouts[words]
    raise parts.error(
        "weight_packed",
        f"has {words} words for {k} values",
        f"Values of {bits} bits take {-(-k * bits // 32)}.",
    )


def _codes(words: torch.Tensor, bits: int, count: int, dense: bool) -> torch.Tensor:
    """Words along the last dimension as packed codes, raised by half their range."""
    raw = words.contiguous().view(torch.uint8)
    if dense and count * bits % 8 == 0:
        return raw[..., : count * bits // 8].contiguous()
    if dense:
        return pack_bits(unpack_bits(raw, bits, count), bits)
    per_word, mask = 32 // bits, (1 << bits) - 1
    values = [((words >> (bits * place)) & mask).to(torch.uint8) for place in range(per_word)]
    return pack_bits(torch.stack(values, -1).flatten(-2)[..., :count].contiguous(), bits)


def _zeros(parts: ModuleParts, bits: int, shape: tuple[int, int], dense: bool) -> torch.Tensor:
    """Zero points as codes, from words along N as dense as the weight's, or a signed byte each."""
    part = "weight_zero_point"
    stored = parts.take(part, (torch.int32, torch.int8), (1, 2))
    stored = stored.reshape(-1, 1) if stored.ndim == 1 else stored
    rows, columns = shape
    if stored.dtype == torch.int8 and tuple(stored.shape) == shape:
        codes = stored.to(torch.int16) + (1 << (bits - 1))
        if not bool(((codes >= 0) & (codes < 1 << bits)).all()):
            raise parts.error(part, f"holds more than {bits}-bit integers", "It is damaged.")
        return codes.to(torch.uint8)
    counts = {True: -(-rows * bits // 32), False: -(-rows // (32 // bits))}
    if stored.shape[0] != counts[dense]:
        dense = not dense
    fits = stored.shape[0] == counts[dense]
    if stored.dtype != torch.int32 or stored.shape[1] != columns or not fits:
        raise parts.error(
            part,
            f"is {stored.dtype} {list(stored.shape)}",
            f"{bits}-bit zero points {list(shape)} are int32 [{counts[True]}, {columns}].",
        )
    packed = _codes(stored.T.contiguous(), bits, rows, dense)
    return unpack_bits(packed, bits, rows).T.contiguous()


def in_group_order(
    parts: ModuleParts, part: str, spec: WeightSpec, codes: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes with their columns sorted by group, and the order of the inputs that this takes.

    Args:
        parts: the module.
        part: the tensor [K] that says the group of each column.
        spec, codes: of the weight, columns as they are stored.
        k: number of columns.

    Raises:
        CheckpointError: the groups are not those of the format.
    """
    groups = parts.take(part, (torch.int32, torch.int64), (1,)).long()
    if groups.shape != (k,):
        raise parts.error(part, f"has the shape {list(groups.shape)}", f"K is {k}.")
    if spec.granularity != "group":
        if bool(groups.any()):
            parts.note(f"{part} is not used: a scale covers all of K")
        return codes, None
    order = torch.argsort(groups, stable=True)
    expected = torch.arange(k) // spec.group_size
    if not torch.equal(groups[order], expected):
        raise parts.error(
            part,
            "does not name each group as often as it has columns",
            f"Groups have {spec.group_size} columns each.",
        )
    if torch.equal(groups, expected):
        return codes, None
    bits = spec.dtype.bits
    return pack_bits(unpack_bits(codes, bits, k)[:, order].contiguous(), bits), order
