"""Products of the tensor pipe: shapes, how D lies in tensor memory, elements, scales, arithmetic.

Products are exact, and their sum with D is rounded once, as for `mma.sync`.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from humming.capability import DeviceCapabilities
from humming.dtypes import DataType

from . import numerics
from .errors import IllegalInstructionError, TensorMemoryError, UndefinedBehaviorError
from .groups import Array
from .tensor_descriptors import UNDOCUMENTED, Product


@dataclass(frozen=True, slots=True)
class Layout:
    """How a CTA's part of D lies in tensor memory (PTX ISA 9.7.16.10.5).

    D[row, column] is at lane `lanes[row] + rows * (column // columns)` and column
    `column % columns`: it is split along N into `blocks` that lie below each other.

    Attributes:
        rows: of the CTA.
        blocks: number of parts along N.
        lanes: lane of each row in the first block.
        columns: of tensor memory that D takes.
    """

    rows: int
    blocks: int
    lanes: Array
    columns: int

    def lanes_of(self, block: int) -> slice | Array:
        """The lanes of a block."""
        first = int(self.lanes[0])
        if self.lanes[-1] - first + 1 == self.rows:
            return slice(first + self.rows * block, first + self.rows * (block + 1))
        return self.lanes + self.rows * block


def layout_of(product: Product, group: int, weight_stationary: bool, lane: int) -> Layout:
    """The layout of D.

    Args:
        product: what is computed.
        group: 1, or 2 for a pair of CTAs.
        weight_stationary: whether the opcode is `tcgen05.mma.ws`.
        lane: lane of the address of D.

    Raises:
        UndefinedBehaviorError: a shape that there is not.
        TensorMemoryError: D begins at a lane where it cannot.
    """
    m, n = product.m, product.n
    _check_shape(product, group, weight_stationary)
    half = group == 1 and m == 64 and not weight_stationary
    if lane not in ((0, 16) if half else (0,)):
        raise TensorMemoryError(f"D of M = {m} cannot begin at lane {lane}")
    if half:
        row = np.arange(64)
        return Layout(64, 1, row % 16 + row // 16 * 32 + lane, n)
    rows = m // group
    blocks = 128 // rows
    return Layout(rows, blocks, np.arange(rows), n // blocks)


def _check_shape(product: Product, group: int, weight_stationary: bool) -> None:
    """PTX ISA 9.7.16.2.1, "Matrix Shape"."""
    m, n, kind = product.m, product.n, product.kind
    told = f"there is no product of M = {m} and N = {n} of kind {kind} with .cta_group::{group}"
    if weight_stationary:
        if m not in (32, 64, 128) or n not in (64, 128, 256):
            raise UndefinedBehaviorError(f"{told} and .ws: M is 32, 64 or 128, N 64, 128 or 256")
        return
    ms = (128,) if group == 1 and product.block else (64, 128) if group == 1 else (128, 256)
    if product.block and group == 2 and m == 128:
        raise UndefinedBehaviorError(f"{told}: where its scales lie is not known")
    step = 8 if m == 64 and group == 1 else 16 if group == 1 or m == 128 else 32
    if product.block:
        step = 8 if group == 1 else 16
    if kind == "i8" and n > 8:
        step = max(step, 16)
    least = 8 if step == 8 else step
    if m not in ms or n % step or not least <= n <= 256:
        sizes = " or ".join(map(str, ms))
        raise UndefinedBehaviorError(f"{told}: M is {sizes}, N a multiple of {step} up to 256")
    along_n = product.b_along_n and product.element_bits == 8
    if along_n and n % (16 * group):
        told = f"{told}: 8-bit B along N needs a multiple of {16 * group}"
        raise UndefinedBehaviorError(told)


def check_executes(product: Product, device: DeviceCapabilities | None) -> None:
    """Checks that a device executes the formats that no document names.

    Raises:
        IllegalInstructionError: its row does not say so, or the device is not known.
    """
    hidden = [name for name in (product.a, product.b) if name in UNDOCUMENTED]
    if not hidden:
        return
    if device is None:
        told = f"{hidden[0]} operands are undocumented, and which device is simulated is not known"
        raise IllegalInstructionError(told)
    a, b = (DataType.parse(name) for name in (product.a, product.b))
    scale = DataType.parse(product.scale) if product.scale else None
    for row in device.mma:
        scaled = {(dtype.name, size) for dtype, size in row.block_scale}
        fits = not scaled if scale is None else (scale.name, product.block) in scaled
        if row.instruction == "tcgen05" and (row.a, row.b) == (a, b) and fits:
            return
    why = device.why_absent(DataType.parse(hidden[0])) or "no row of the device has them"
    told = f"illegal instruction: {device.name} does not execute {hidden[0]} operands ({why})"
    raise IllegalInstructionError(told)


_SINGLE_THREADED = 200_000
"""Multiply-adds that BLAS does in the calling thread."""


# -- elements -------------------------------------------------------------------------------------


@cache
def values_of(name: str) -> Array:
    """float64 value of each code of a type of at most 16 bits."""
    if name in UNDOCUMENTED:
        return DataType.parse(name).decode_table()
    if name in ("u8", "s8"):
        codes = np.arange(256)
        return np.where((name == "s8") & (codes > 127), codes - 256, codes).astype(np.float64)
    return numerics.decode_table(name)


def element_bits(name: str) -> int:
    """Width of an element type."""
    if name == "tf32":
        return 32
    return int(np.log2(len(values_of(name))))


def codes_in_shared(chunks: Array, product: Product, name: str) -> Array:
    """Codes of 16-byte chunks [..., 16] of shared memory, [..., elements].

    Elements of 4 and 6 bits lie in groups of 16, padded to 16 bytes, but for the kinds mxf4*, which
    take 32 elements of 4 bits (PTX ISA 9.7.16.10.4).
    """
    if product.element_bits == 4:
        return np.stack([chunks & 15, chunks >> 4], axis=-1).reshape(*chunks.shape[:-1], 32)
    if product.element_bits > 8:
        return np.ascontiguousarray(chunks).view(np.dtype(f"u{product.element_bits // 8}"))
    return unpacked(chunks, element_bits(name))


def unpacked(chunks: Array, bits: int) -> Array:
    """Codes [..., 16] of 16 elements of 4, 6 or 8 bits that are packed and padded to 16 bytes."""
    if bits == 4:
        part = chunks[..., :8]
        return np.stack([part & 15, part >> 4], axis=-1).reshape(*chunks.shape[:-1], 16)
    if bits == 6:
        triples = chunks[..., :12].reshape(*chunks.shape[:-1], 4, 3).astype(np.uint32)
        word = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
        parts = [(word >> shift & 63).astype(np.uint8) for shift in (0, 6, 12, 18)]
        return np.stack(parts, axis=-1).reshape(*chunks.shape[:-1], 16)
    return chunks


def codes_in_tensor(words: Array, product: Product, name: str) -> Array:
    """Codes of A in words [rows, columns] of tensor memory: [rows, K].

    Elements of 4 and 6 bits have a byte each, 4 bits in bits 5:2 of it, but for the kinds mxf4*.
    """
    raw = np.ascontiguousarray(words).view(np.uint8)
    if product.element_bits == 4:
        return np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(words), -1)
    if product.element_bits > 8:
        return raw.view(np.dtype(f"u{product.element_bits // 8}"))
    bits = element_bits(name)
    return raw >> 2 & 15 if bits == 4 else raw & ((1 << bits) - 1)


def decoded(codes: Array, name: str, negate: bool) -> Array:
    """float64 values of codes."""
    if name == "tf32":
        values = numerics.decode(np.ascontiguousarray(codes, np.uint32), "tf32")
    else:
        values = values_of(name).take(codes)
    return -values if negate else values


# -- scales ---------------------------------------------------------------------------------------


class Scales(NamedTuple):
    """Scales of one operand: float64 [rows, K / block], and rows of which one is undefined."""

    values: Array
    undefined: Array


def scale_columns(product: Product, rows: int, first: int) -> list[tuple[int, int]]:
    """(offset, count) of the columns that hold the scales of some rows, by their words.

    A word of 4 scales of row r is at column r // 32, lane r % 32 of each of the four partitions of
    32 lanes (PTX ISA 9.7.16.10.7). Words follow at the next 4 columns.

    Args:
        product: what is computed.
        rows: of A in the CTA, or N.
        first: the data id, the byte of the first word where the scales begin.

    Raises:
        UndefinedBehaviorError: more than one word for more than 128 rows, which nobody describes.
    """
    words = -(-(first + product.k // product.block) // 4)
    if words > 1 and rows > 128:
        told = "where the second word of scales lies for N above 128 is not known"
        raise UndefinedBehaviorError(told)
    return [(4 * word, -(-rows // 32)) for word in range(words)]


def scales_of(
    product: Product,
    rows: int,
    first: int,
    words: list[tuple[Array, Array | None]],
) -> Scales:
    """Scales of some rows from words, each [128 lanes, columns] with its undefined bits.

    Raises:
        UndefinedBehaviorError: the partitions of 32 lanes differ.
    """
    count = product.k // product.block
    parts: list[Array] = []
    bad: list[Array] = []
    for data, poison in words:
        for array, found in ((data, parts), (poison, bad)):
            if array is None:
                array = np.zeros_like(data)
            split = np.ascontiguousarray(array).reshape(4, 32, -1)
            if (split != split[0]).any():
                told = "the scales in the four partitions of 32 lanes of tensor memory differ"
                raise UndefinedBehaviorError(told)
            by_row = np.ascontiguousarray(split[0].T).reshape(-1)[:rows]
            found.append(by_row.view(np.uint8).reshape(rows, 4))
    codes = np.concatenate(parts, axis=1)[:, first : first + count]
    undefined = np.concatenate(bad, axis=1)[:, first : first + count].any(axis=1)
    if product.scale == "ue4m3":
        codes = codes & 0x7F
    return Scales(values_of(product.scale).take(codes), undefined)


# -- arithmetic -----------------------------------------------------------------------------------


def d_values(words: Array, kind: str) -> Array:
    """float64 values of D in words of tensor memory; f16 is in the lower half of each."""
    if kind == "f16":
        return values_of("f16").take(words & 0xFFFF)
    return words.view(np.float32 if kind == "f32" else np.int32).astype(np.float64)


def d_words(total: Array, product: Product) -> tuple[Array, Array | None]:
    """Words of D for exact sums, and what of them is undefined: the upper half of f16."""
    if product.d == "f16":
        codes = numerics.encode(total, "f16").astype(np.uint32)
        return codes, np.full(codes.shape, 0xFFFF0000, np.uint32)
    if product.d == "f32":
        return numerics.canonical_f32(total.astype(np.float32)).view(np.uint32), None
    whole = total.astype(np.int64)
    if product.saturate:
        whole = np.clip(whole, -(2**31), 2**31 - 1)
    return whole.astype(np.int32).view(np.uint32), None


def multiplied(a: Array, b: Array) -> Array:
    """float64 [rows, N] of A [rows, K] and B [N, K].

    In parts that are small enough for BLAS not to start threads, which wait for each other for
    longer than the product takes when the cores have other work.
    """
    size = max(1, _SINGLE_THREADED // max(1, b.size))
    found = np.empty((len(a), len(b)))
    for first in range(0, len(a), size):
        np.matmul(a[first : first + size], b.T, out=found[first : first + size])
    return found


def zero_columns(bits: int, product: Product, m: int) -> tuple[Array, int]:
    """Columns of B that count as zeros, and by how many columns B is shifted.

    The zero-column mask descriptor of PTX ISA 9.7.16.4.3, by its examples: runs of `skip + 1`
    columns are zero, runs of `use + 1` are not.
    """
    if bits >> 36 & 7 or bits >> 62:
        raise UndefinedBehaviorError("reserved bits of the zero-column mask descriptor are set")
    shift = bits >> 56 & 63
    if shift:
        told = "the simulator does not shift columns of B by a zero-column mask descriptor"
        raise UndefinedBehaviorError(told)
    mask = np.zeros(product.n, np.bool_)
    if bits >> 39 & 1:
        zeros, used = (bits >> 40 & 255) + 1, (bits >> 48 & 255) + 1
        parts = 128 // m
        size = product.n // parts
        for part in range(parts):
            start, first = bits >> 8 * part & 255, bits >> 32 + part & 1
            place = np.arange(size) + start
            place = place % (zeros + used)
            own = place < zeros if first else place >= used
            mask[part * size : (part + 1) * size] = own
    return mask, shift
