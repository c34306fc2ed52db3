"""The packed layout of weights: bricks of 16 rows x 64 K values in MMA fragment order.

This module is the only definition of that order. The host packs by it, and the composer emits it
into each kernel as constants, so host and device cannot disagree.

A brick is what one warp holds of a weight tile: a lane owns 32 of its 1024 codes. With c-bit codes
that is exactly c 32-bit words per lane and 128 * c bytes per brick. The order depends on the width
of the codes and on the width of the operand that they are dequantized to, never on a device:

- value v of a lane lies in MMA register `v // E` at element `v % E`, with E = 32 / operand bits
  (PTX ISA, "Matrix Fragments for mma.m16n8k*": register r, element e of A is
  row g + 8 * (r & 1), k = E * t + e + 4 * E * (r >> 1), with g = lane >> 2 and t = lane & 3);
- codes are split into bit planes of 4, 2, 1 or 8 bits (5 bits are a plane of 4 and one of 1), so
  that a field never straddles a word;
- within a plane the E elements of a register lie a slot apart (operand bits, or the plane's width
  where that is larger) and successive registers lie next to one another inside the slot. One
  `and` with a mask therefore yields a whole register of codes, at a known bit.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from humming.errors import UnsupportedError

BRICK_ROWS = 16
BRICK_K = 64
LANES = 32
CODES_PER_LANE = BRICK_ROWS * BRICK_K // LANES
OPERAND_BITS = (16, 8, 4)
CODE_BITS = (1, 2, 3, 4, 5, 6, 7, 8)
_VECTOR_WORDS = 4  # a lane reads at most 16 bytes at once


def planes(code_bits: int) -> tuple[int, ...]:
    """Widths of the bit planes of a code, low bits first: 5 -> (4, 1), 7 -> (4, 2, 1)."""
    if code_bits not in CODE_BITS:
        raise UnsupportedError(
            f"a code of {code_bits} bits", "codes have 1 to 8 bits", "Choose a width of 1 to 8."
        )
    return tuple(width for width in (8, 4, 2, 1) if code_bits & width)


def lane_value_to_row_k(operand_bits: int, lane: int, value: int) -> tuple[int, int]:
    """Row (0..15) and K (0..63) inside a brick of a lane's value (0..31)."""
    elements = 32 // _checked_operand(operand_bits)
    register, element = divmod(value, elements)
    step, part = divmod(register, 4)  # four registers per MMA step of 256 bits of K
    row = lane // 4 + 8 * (part & 1)
    k = elements * (8 * step + lane % 4 + 4 * (part >> 1)) + element
    return row, k


@dataclass(frozen=True, slots=True)
class Field:
    """One plane of one value: `width` bits of the code from `code_bit` on, at `bit` of `word`."""

    code_bit: int
    width: int
    word: int
    bit: int


def fields(code_bits: int, operand_bits: int, value: int) -> tuple[Field, ...]:
    """The fields of a lane's value (0..31), one per plane; words count from 0 within the lane."""
    found, first_word, code_bit = [], 0, 0
    for width in planes(code_bits):
        slot = max(_checked_operand(operand_bits), width)
        register, element = divmod(value, 32 // slot)
        word, place = divmod(register, slot // width)
        found.append(Field(code_bit, width, first_word + word, width * place + slot * element))
        first_word += width
        code_bit += width
    return tuple(found)


def chunks(code_bits: int) -> tuple[int, ...]:
    """Sizes in words of the runs in which a lane reads its words, at most 16 bytes each."""
    found: list[int] = []
    for width in planes(code_bits):
        found += [_VECTOR_WORDS] * (width // _VECTOR_WORDS) or [width]
    return tuple(found)


def word_offset(code_bits: int, lane: int, word: int) -> int:
    """Index inside the brick's 32 * code_bits words of a lane's word.

    Each chunk is stored for all lanes before the next one, so a warp's read of it is contiguous.
    """
    start = 0
    for size in chunks(code_bits):
        if word < start + size:
            return LANES * start + lane * size + word - start
        start += size
    raise UnsupportedError(
        f"word {word} of a lane", f"a lane holds {code_bits} words", "Count words from 0."
    )


@dataclass(frozen=True, slots=True, eq=False)
class BrickOrder:
    """Index tables of one (code bits, operand bits) pair, each [32 lanes, 32 values].

    Attributes:
        row, k: place in the brick of each value.
        planes: per plane (code_bit, width, word [32, 32], bit [32, 32]); words count in the brick.
    """

    code_bits: int
    operand_bits: int
    row: npt.NDArray[np.int64]
    k: npt.NDArray[np.int64]
    planes: tuple[tuple[int, int, npt.NDArray[np.int64], npt.NDArray[np.int64]], ...]


@cache
def brick_order(code_bits: int, operand_bits: int) -> BrickOrder:
    """The order as index tables, for packing."""
    cells = [(lane, value) for lane in range(LANES) for value in range(CODES_PER_LANE)]
    shape = (LANES, CODES_PER_LANE)
    places = np.array([lane_value_to_row_k(operand_bits, *cell) for cell in cells])
    tables = []
    for plane, width in enumerate(planes(code_bits)):
        found = [(lane, fields(code_bits, operand_bits, value)[plane]) for lane, value in cells]
        word = np.array([word_offset(code_bits, lane, field.word) for lane, field in found])
        bit = np.array([field.bit for _, field in found])
        code_bit = found[0][1].code_bit
        tables.append((code_bit, width, word.reshape(shape), bit.reshape(shape)))
    return BrickOrder(
        code_bits,
        operand_bits,
        places[:, 0].reshape(shape),
        places[:, 1].reshape(shape),
        tuple(tables),
    )


def widened_register(packed_bits: int, operand_bits: int, register: int) -> tuple[int, int]:
    """Where an MMA's A register of wider operands finds its codes: packed register, part.

    A weight that is packed for narrow operands serves wider ones as well. Of the codes that a
    packed register holds, those in slots p, p + r, p + 2r, ... (r the ratio of the widths) make
    part p, one operand register with a code in each of its wider slots. The parts follow each
    other along K, in which activations that are split the same way make the same order of it.

    >>> [widened_register(8, 16, register) for register in range(4)]
    [(0, 0), (1, 0), (0, 1), (1, 1)]
    """
    step, part = divmod(register, 4)
    # Registers 0, 1 and 2, 3 of an MMA step are two runs of K; the low bit is the half of the rows.
    packed_run, sub = divmod(2 * step + (part >> 1), operand_bits // packed_bits)
    return 4 * (packed_run // 2) + 2 * (packed_run % 2) + (part & 1), sub


def device_struct(code_bits: int, packed_bits: int, operand_bits: int, name: str) -> str:
    """The order as a C++ struct of constants, for the composed source.

    `kWord[plane][register]` and `kBit[plane][register]` place element 0 of each of a lane's MMA
    registers of `operand_bits`; element e lies `operand_bits * e` bits above it.

    Args:
        code_bits: width of a code.
        packed_bits: width of the operand that the weight is packed for.
        operand_bits: width of the operand that it is dequantized to, that or a wider one.
        name: of the struct.
    """
    if _checked_operand(operand_bits) < _checked_operand(packed_bits):
        raise UnsupportedError(
            f"a weight packed for {packed_bits}-bit operands in {operand_bits}-bit ones",
            "its codes lie too far apart",
            "Pack it for the narrower operand.",
        )
    elements = 32 // packed_bits
    widths = planes(code_bits)
    found = [widened_register(packed_bits, operand_bits, r) for r in range(operand_bits)]
    rows = [(fields(code_bits, packed_bits, source * elements), sub) for source, sub in found]

    def flat(values: Iterable[int]) -> str:
        return "{" + ", ".join(map(str, values)) + "}"

    words = [flat(row[plane].word for row, _ in rows) for plane in range(len(widths))]
    bits = [
        flat(row[plane].bit + packed_bits * sub for row, sub in rows)
        for plane in range(len(widths))
    ]
    sizes = chunks(code_bits)
    return "\n".join(
        [
            f"struct {name} {{",
            f"  static constexpr int kCodeBits = {code_bits};",
            f"  static constexpr int kOperandBits = {operand_bits};",
            f"  static constexpr int kPlanes = {len(widths)};",
            f"  static constexpr int kChunks = {len(sizes)};",
            f"  static constexpr int kChunkWords[{len(sizes)}] = {flat(sizes)};",
            f"  static constexpr int kPlaneBits[{len(widths)}] = {flat(widths)};",
            f"  static constexpr int kWord[{len(widths)}][{len(rows)}] = {{{', '.join(words)}}};",
            f"  static constexpr int kBit[{len(widths)}][{len(rows)}] = {{{', '.join(bits)}}};",
            "};",
        ]
    )


def padded(n: int, k: int) -> tuple[int, int]:
    """N and K rounded up to whole bricks."""
    return -(-n // BRICK_ROWS) * BRICK_ROWS, -(-k // BRICK_K) * BRICK_K


def _checked_operand(operand_bits: int) -> int:
    if operand_bits not in OPERAND_BITS:
        raise UnsupportedError(
            f"an operand of {operand_bits} bits",
            "bricks are defined for the operand widths of MMA instructions",
            "Choose 16, 8 or 4.",
        )
    return operand_bits
