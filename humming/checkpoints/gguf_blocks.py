"""The block types of GGUF files: bytes of a row to codes, scales and zero points.

A row is a sequence of blocks of 32 or 256 values, each with scales of its own. Offsets below count
bytes from the start of a block. Where a type has minima, a value is `scale * code + minimum`; the
canonical form subtracts a zero point before it scales, so that the zero point is -minimum / scale,
rounded once to float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from humming.formats import WeightSpec
from humming.quantized import QuantizedWeight, pack_bits

_ROWS_AT_ONCE_BYTES = 1 << 24


class _Values(NamedTuple):
    """Blocks [rows, blocks, ...] taken apart.

    Attributes:
        codes: uint8 [rows, blocks, values], as the format wants them.
        scales: [rows, blocks, groups].
        minima: as scales in float32, or None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class BlockType:
    """One type of tensor of a GGUF file.

    Attributes:
        name: as the ggml project spells it.
        values, size: number of values and of bytes of a block.
        plain: the dtype of types that are plain numbers.
        weight: the name of the canonical format, empty for types that have none.
        split: takes blocks apart.
        note: what a reader should know about the result.
        why_not: why a type has no canonical format.
    """

    name: str
    values: int
    size: int
    plain: torch.dtype | None = None
    weight: str = ""
    split: Callable[[torch.Tensor], _Values] | None = None
    note: str = ""
    why_not: str = ""


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 number at a byte of each block: [rows, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _split(data: torch.Tensor, *sizes: int) -> torch.Tensor:
    """The last dimension as several."""
    return data.reshape(*data.shape[:-1], *sizes)


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """All low nibbles of the last dimension, then all high ones."""
    return torch.cat([data & 15, data >> 4], -1)


def _fields(data: torch.Tensor, bits: int) -> torch.Tensor:
    """Bit fields from the lowest on, each over the whole last dimension: [..., 8 / bits, bytes]."""
    mask = (1 << bits) - 1
    return torch.stack([(data >> shift) & mask for shift in range(0, 8, bits)], -2)


def _in_halves(data: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """Fields of stretches of `size` bytes, a stretch at a time."""
    stretches = _split(data, -1, size)
    return _fields(stretches, bits).flatten(-3)


def _fifth_bits(data: torch.Tensor) -> torch.Tensor:
    """Bit j of four bytes, as bit 4 of value j."""
    return _fields(data, 1).transpose(-1, -2).flatten(-2) << 4


def _q4_0(blocks: torch.Tensor) -> _Values:
    return _Values(_nibbles(blocks[..., 2:]) ^ 8, _half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> _Values:
    return _Values(_nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2).float())


def _q5_0(blocks: torch.Tensor) -> _Values:
    raised = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return _Values(raised ^ 16, _half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> _Values:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return _Values(codes, _half(blocks, 0), _half(blocks, 2).float())


def _q8_0(blocks: torch.Tensor) -> _Values:
    return _Values(blocks[..., 2:], _half(blocks, 0))


def _q2_k(blocks: torch.Tensor) -> _Values:
    # 16 bytes of a 4-bit scale below a 4-bit minimum, 64 bytes of codes, d and dmin.
    both = blocks[..., :16]
    scales = _half(blocks, 80).float() * (both & 15)
    minima = -_half(blocks, 82).float() * (both >> 4)
    return _Values(_in_halves(blocks[..., 16:80], 2, 32), scales, minima)


def _q3_k(blocks: torch.Tensor) -> _Values:
    # 32 bytes of third bits, 64 bytes of the two lower ones, 12 bytes of scales, d. A scale has its
    # four lower bits in bytes 0-7 and its two upper ones in bytes 8-11. A third bit that is set
    # means no offset, so that it is the inverted sign of a three-bit number.
    third = _fields(blocks[..., :32], 1).flatten(-2)
    codes = (_in_halves(blocks[..., 32:96], 2, 32) | (third << 2)) ^ 4
    packed = blocks[..., 96:108]
    scales = _nibbles(packed[..., :8]) | (_fields(packed[..., 8:], 2).flatten(-2) << 4)
    return _Values(codes, _half(blocks, 108).float() * (scales.float() - 32))


def _six_bit_pairs(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight minima of 6 bits in 12 bytes.

    The first four of each fill the lower bits of bytes 0-3 and 4-7. Of the last four, bytes 8-11
    hold four bits each, a scale's below a minimum's; the two upper ones are on top of bytes 0-7.
    """
    first, second, third = _split(packed, 3, 4).unbind(-2)
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], -1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], -1)
    return scales, minima


def _q4_k(blocks: torch.Tensor) -> _Values:
    # d, dmin, 12 bytes of scales and minima, 128 bytes of codes.
    scales, minima = _six_bit_pairs(blocks[..., 4:16])
    codes = _in_halves(blocks[..., 16:], 4, 32)
    return _Values(codes, _half(blocks, 0).float() * scales, -_half(blocks, 2).float() * minima)


def _q5_k(blocks: torch.Tensor) -> _Values:
    # As Q4_K with 32 bytes of fifth bits before the codes.
    scales, minima = _six_bit_pairs(blocks[..., 4:16])
    fifth = _fields(blocks[..., 16:48], 1).flatten(-2) << 4
    codes = _in_halves(blocks[..., 48:], 4, 32) | fifth
    return _Values(codes, _half(blocks, 0).float() * scales, -_half(blocks, 2).float() * minima)


def _q6_k(blocks: torch.Tensor) -> _Values:
    # 128 bytes of the four lower bits, 64 of the two upper ones, 16 scales of 8 bits, d.
    low = _in_halves(blocks[..., :128], 4, 64)
    high = _in_halves(blocks[..., 128:192], 2, 32)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return _Values((low | (high << 4)) ^ 32, _half(blocks, 208).float() * scales)


# The 16 numbers that the codes of IQ4_NL and IQ4_XS stand for; they are whole and fit int8.
_IQ4_NUMBERS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _looked_up(codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor(_IQ4_NUMBERS, dtype=torch.int8).view(torch.uint8)[codes.int()]


def _iq4_nl(blocks: torch.Tensor) -> _Values:
    return _Values(_looked_up(_nibbles(blocks[..., 2:])), _half(blocks, 0))


def _iq4_xs(blocks: torch.Tensor) -> _Values:
    # d, two bytes and four bytes of the upper two and lower four bits of eight scales, codes.
    upper = _fields(blocks[..., 2:4], 2).transpose(-1, -2).flatten(-2)
    lower = _fields(blocks[..., 4:8], 4).transpose(-1, -2).flatten(-2)
    scales = (lower | (upper << 4)).float() - 32
    codes = _nibbles(_split(blocks[..., 8:], 8, 16)).flatten(-2)
    return _Values(_looked_up(codes), _half(blocks, 0).float() * scales)


def _tq2_0(blocks: torch.Tensor) -> _Values:
    # 64 bytes of codes 0, 1, 2 for -1, 0, 1, and d.
    raised = _in_halves(blocks[..., :64], 2, 32)
    return _Values((raised.to(torch.int8) - 1).view(torch.uint8) & 3, _half(blocks, 64))


def _mxfp4(blocks: torch.Tensor) -> _Values:
    return _Values(_nibbles(blocks[..., 1:]), blocks[..., :1])


_MINIMA = (
    "its minima became zero points -minimum / scale, each rounded to float32: weights differ from "
    "those of the file by at most 2**-23 of their minimum; kernels subtract 16-bit zero points, to "
    "which humming.checkpoints.rounding.round_scales rounds them"
)
_TABLE = "its 16 numbers are whole, so that its 4-bit codes are held as int8, twice their size"
_CODEBOOK = "its codes name vectors of a codebook, which no format here describes"
_ROWS = (
    (0, BlockType("F32", 1, 4, plain=torch.float32)),
    (1, BlockType("F16", 1, 2, plain=torch.float16)),
    (30, BlockType("BF16", 1, 2, plain=torch.bfloat16)),
    (2, BlockType("Q4_0", 32, 18, weight="int4_g32", split=_q4_0)),
    (3, BlockType("Q4_1", 32, 20, weight="uint4_g32_fzp_sfp32", split=_q4_1, note=_MINIMA)),
    (6, BlockType("Q5_0", 32, 22, weight="int5_g32", split=_q5_0)),
    (7, BlockType("Q5_1", 32, 24, weight="uint5_g32_fzp_sfp32", split=_q5_1, note=_MINIMA)),
    (8, BlockType("Q8_0", 32, 34, weight="int8_g32", split=_q8_0)),
    (10, BlockType("Q2_K", 256, 84, weight="uint2_g16_fzp_sfp32", split=_q2_k, note=_MINIMA)),
    (11, BlockType("Q3_K", 256, 110, weight="int3_g16_sfp32", split=_q3_k)),
    (12, BlockType("Q4_K", 256, 144, weight="uint4_g32_fzp_sfp32", split=_q4_k, note=_MINIMA)),
    (13, BlockType("Q5_K", 256, 176, weight="uint5_g32_fzp_sfp32", split=_q5_k, note=_MINIMA)),
    (14, BlockType("Q6_K", 256, 210, weight="int6_g16_sfp32", split=_q6_k)),
    (20, BlockType("IQ4_NL", 32, 18, weight="int8_g32", split=_iq4_nl, note=_TABLE)),
    (23, BlockType("IQ4_XS", 256, 136, weight="int8_g32_sfp32", split=_iq4_xs, note=_TABLE)),
    (35, BlockType("TQ2_0", 256, 66, weight="int2_g256", split=_tq2_0)),
    (39, BlockType("MXFP4", 32, 17, weight="mxfp4", split=_mxfp4)),
    (16, BlockType("IQ2_XXS", 256, 66, why_not=_CODEBOOK)),
    (17, BlockType("IQ2_XS", 256, 74, why_not=_CODEBOOK)),
    (18, BlockType("IQ3_XXS", 256, 98, why_not=_CODEBOOK)),
    (19, BlockType("IQ1_S", 256, 50, why_not=_CODEBOOK)),
    (21, BlockType("IQ3_S", 256, 110, why_not=_CODEBOOK)),
    (22, BlockType("IQ2_S", 256, 82, why_not=_CODEBOOK)),
    (29, BlockType("IQ1_M", 256, 56, why_not=_CODEBOOK)),
    (34, BlockType("TQ1_0", 256, 54, why_not="its digits to base 3 are not read")),
    (40, BlockType("NVFP4", 64, 36, why_not="the factor on top of its scales is no part of it")),
    (9, BlockType("Q8_1", 32, 36, why_not="it is a type of activations")),
    (15, BlockType("Q8_K", 256, 292, why_not="it is a type of activations")),
    (24, BlockType("I8", 1, 1, why_not="it holds integers, not weights")),
    (25, BlockType("I16", 1, 2, why_not="it holds integers, not weights")),
    (26, BlockType("I32", 1, 4, why_not="it holds integers, not weights")),
    (27, BlockType("I64", 1, 8, why_not="it holds integers, not weights")),
    (28, BlockType("F64", 1, 8, plain=torch.float64)),
)
BLOCK_TYPES: dict[int, BlockType] = dict(_ROWS)
"""The types by the number that files give them."""


def weight_of_blocks(kind: BlockType, data: torch.Tensor, k: int) -> QuantizedWeight:
    """The canonical form of a matrix.

    Args:
        kind: a type with a canonical format.
        data: uint8 [N, K / values * size], the rows of the file.
        k: the number of values of a row.
    """
    spec = WeightSpec.parse(kind.weight)
    n = data.shape[0]
    step = max(1, _ROWS_AT_ONCE_BYTES // data.shape[1])
    parts = [_rows(kind, spec, data[row : row + step]) for row in range(0, n, step)]
    codes, scales = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    zeros = [part[2] for part in parts if part[2] is not None]
    return QuantizedWeight(spec, (n, k), codes, scales, torch.cat(zeros) if zeros else None)


def _rows(
    kind: BlockType, spec: WeightSpec, data: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Packed codes, scales and zero points of some rows."""
    if kind.split is None:
        raise ValueError(f"{kind.name} has no canonical format")
    codes, scales, minima = kind.split(_split(data, -1, kind.size))
    zeros = None
    if minima is not None:
        codes, scales, zeros = _with_zeros(codes, scales.float(), minima)
    packed = pack_bits(codes.flatten(1).contiguous(), spec.dtype.bits)
    return packed, scales.flatten(1).contiguous(), zeros


def _with_zeros(
    codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Minima as zero points; a group of one value throughout becomes (0 - -1) * minimum."""
    constant = scales == 0
    zeros = torch.where(constant, -1.0, -minima / scales)
    groups = _split(codes, scales.shape[-1], -1)
    codes = torch.where(constant.unsqueeze(-1), 0, groups).flatten(-2)
    return codes, torch.where(constant, minima, scales), zeros.flatten(1).contiguous()
