"""Matrix descriptors of `wgmma`: where the pieces of a matrix lie (PTX ISA 9.7.15.5.1.2).

A piece is 16 bytes: T elements that are neighbours along K, or along M or N in a matrix that is
transposed. The canonical layouts, in units of pieces, before the swizzle:

    K-major, no swizzle   ((8, m), 2) : ((1, SBO), LBO)
    K-major, swizzled     ((8, m), 2) : ((w, SBO), 1)          w pieces in a row, 2, 4 or 8
    MN-major, no swizzle  (m, (8, k)) : (SBO, (1, LBO))
    MN-major, swizzled    ((w, m), (8, k)) : ((1, LBO), (w, SBO))
"""

from dataclasses import dataclass

import numpy as np

from .errors import UndefinedBehaviorError
from .groups import Array
from .shared_memory import PIECE
from .swizzles import OF_DESCRIPTOR

START = np.uint64(0x3FFF)
"""The bits of the start address; all others are the same for most matrices of a kernel."""
_RESERVED = 0xC000 | 0xC0000000 | 0x7 << 46 | 0x3FF << 52


@dataclass(frozen=True, slots=True)
class Layout:
    """What a descriptor says beside the start address.

    Attributes:
        leading, stride: byte offsets.
        base: row of 128 bytes at which the pattern of the swizzle begins.
        mode: index into `OF_DESCRIPTOR`.
    """

    leading: int
    stride: int
    base: int
    mode: int

    def offsets(self, size: int, k_pieces: int, transposed: bool) -> Array:
        """Byte offsets of pieces from the start address, before the swizzle.

        Args:
            size: M or N.
            k_pieces: pieces in the direction of K: 2, or if transposed elements, 16; twice as many
                of B if A is sparse.
            transposed: whether M or N is contiguous.

        Returns:
            int64 [size, k_pieces], or transposed [k_pieces, size / 8].

        Raises:
            UndefinedBehaviorError: K is longer than the rows of the swizzle.
        """
        width = OF_DESCRIPTOR[self.mode].span_bytes // PIECE
        if not transposed and 0 < width < k_pieces:
            told = f"a matrix has {k_pieces * PIECE} bytes along K in rows of {width * PIECE}"
            raise UndefinedBehaviorError(f"{told}: where the others lie is not documented")
        if not transposed:
            row, k = np.arange(size)[:, None], np.arange(k_pieces)
            pitch, step = (width * PIECE, PIECE) if width else (PIECE, self.leading)
            return row // 8 * self.stride + row % 8 * pitch + k * step
        k, column = np.arange(k_pieces)[:, None], np.arange(size // 8)
        if not width:
            return column * self.stride + k % 8 * PIECE + k // 8 * self.leading
        return (
            column % width * PIECE
            + column // width * self.leading
            + k % 8 * (width * PIECE)
            + k // 8 * self.stride
        )

    def place(self, starts: Array, offsets: Array) -> Array:
        """Addresses of pieces, int64 [n, *offsets.shape], in the window of the CTA."""
        shape = (-1,) + (1,) * offsets.ndim
        return OF_DESCRIPTOR[self.mode](starts.reshape(shape) + offsets, self.base)


def layout_of(descriptor: int, name: str) -> Layout:
    """Reads a descriptor.

    Args:
        descriptor: its 64 bits.
        name: of the operand, for messages.

    Raises:
        UndefinedBehaviorError: bits are set that have no meaning.
    """
    if descriptor & _RESERVED:
        told = f"the descriptor of {name}, {descriptor:#018x}, has bits set that are reserved"
        raise UndefinedBehaviorError(told)
    mode, base = descriptor >> 62, descriptor >> 49 & 7
    if base and not mode:
        told = f"the descriptor of {name} has a base offset, which no swizzle uses"
        raise UndefinedBehaviorError(told)
    leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (16, 32))
    return Layout(leading, stride, base, mode)
