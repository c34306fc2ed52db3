"""Sparse operands A: where metadata lies in registers, and what it says (PTX ISA 9.7.14.6.1-2).

Half of the elements of a row of A are kept. Four bits of metadata stand for a chunk of four units,
two of which are kept: the number of the first kept one in bits 0-1, of the second in bits 2-3. The
lowest bits are those of the first chunk of a row. A unit is

    an element of 16 or 8 bits                                              2:4
    a pair of neighbouring elements of 4 bits                               4:8, in pairs
    half of an element of 32 bits, so that only 0b0100 and 0b1110 are any   1:2

Rows g and g + 8 have their metadata in the lanes 4 g + t, in so many of these as it fills; the
selector f says in which, if there is a choice:

    bits of a row   t              elements of 32 and 16 bits      elements of 8 and 4 bits
    16              f              bits 0-15 row g, 16-31 g + 8
    32              2 f, 2 f + 1   the same, t & 1 along K         row g + 8 (t & 1)
    64              0-3; f = 0                                     row g + 8 (t & 1), t >> 1 along K

The ISA draws this. The same says what ptxas makes of it: where a target needs increasing numbers
(`mma.sp` of 16 and 8 bits for sm_120), code that sorts those of each lane's own chunks, swaps the
elements with them, and puts the metadata together again; for sm_90, products of e4m3 by those
of f16, and of s4 by those of s8 with the same metadata. CUTLASS orders that of tf32 as of f16.
"""

from dataclasses import dataclass

import numpy as np

from .errors import PoisonError, UndefinedBehaviorError
from .groups import WARP, Array, Group, Lanes
from .memory import fault
from .operands import Source

_CHUNKS = {32: 2, 16: 4, 8: 4, 4: 8}
"""Elements of a chunk by the bits that each has in a register."""
_OF_WORDS = (0b0100, 0b1110)
"""The metadata of chunks of 32-bit elements that keep the first or the second one."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """The metadata operand of a product.

    Attributes:
        source: the register.
        k: columns of A with those that are not kept.
        bits: of an element of A in registers.
        ordered: whether the second number of a chunk must be above the first.
        selector: f.
    """

    source: Source
    k: int
    bits: int
    ordered: bool
    selector: int

    @property
    def selectors(self) -> int:
        """How many values of f there are."""
        return 4 // self._lanes

    @property
    def _lanes(self) -> int:
        """Lanes of four that contribute: each has 8 of the chunks of two rows."""
        return self.k // _CHUNKS[self.bits] // 4

    def columns(self, group: Group) -> Array:
        """The column of each kept element, int64 [n, 16, K / 2].

        Raises:
            PoisonError: metadata is undefined in a lane that contributes.
            UndefinedBehaviorError: it says nothing that is defined.
        """
        first = self.selector * self._lanes
        used = (np.arange(WARP) % 4 >= first) & (np.arange(WARP) % 4 < first + self._lanes)
        bad = self.source.poison(group)
        if bad is not None and (bad[:, used] != 0).any():
            raise fault(PoisonError, "metadata of A is undefined", group, (bad != 0) & used)
        words = np.broadcast_to(self.source.read(group), (len(group), WARP)).astype(np.uint32)
        codes = words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
        self._check(group, words, codes, used)
        return self._columns(_rows(codes[:, used], self.bits))

    def _check(self, group: Group, words: Array, codes: Array, used: Lanes) -> None:
        first, second = codes & 3, codes >> 2
        told = "the two numbers of a chunk differ"
        if self.bits == 32:
            wrong, told = ~np.isin(codes, _OF_WORDS), "chunks of 32-bit elements are 0x4 or 0xe"
        elif self.ordered:
            wrong, told = first >= second, "the second number of a chunk is above the first"
        else:
            wrong = first == second
        lanes = wrong.any(axis=2) & used
        if lanes.any():
            row, lane = np.argwhere(lanes)[0]
            word = int(words[row, lane])
            told = f"metadata of A is {word:#010x}, but {told}"
            raise fault(UndefinedBehaviorError, told, group, lanes)

    def _columns(self, codes: Array) -> Array:
        n, rows, chunks = codes.shape
        units = np.stack([codes & 3, codes >> 2], axis=-1).astype(np.int64)
        if self.bits == 32:
            units = units[..., :1] >> 1
        chunk = _CHUNKS[self.bits]
        per = chunk // 2 // units.shape[-1]
        start = chunk * np.arange(chunks)[:, None, None]
        found: Array = start + per * units[..., None] + np.arange(per)
        return found.reshape(n, rows, -1)


def _rows(codes: Array, bits: int) -> Array:
    """Chunks [n, lanes that contribute, 8] by rows: [n, 16, chunks]."""
    n = len(codes)
    together = 4 if bits >= 16 else 8
    parts = codes.reshape(n, 8, -1, 2, together).transpose(0, 3, 1, 2, 4)
    return np.ascontiguousarray(parts).reshape(n, 16, -1)


def dense(kept: Array, columns: Array, k: int) -> Array:
    """A [n, M, K] with zeros, of the elements that are kept [n, M, K / 2] and their columns."""
    found = np.zeros((*kept.shape[:-1], k), kept.dtype)
    np.put_along_axis(found, columns, kept, axis=-1)
    return found


def multiplied(kept: Array, right: Array, columns: Array) -> Array:
    """A B, float64 [n, M, N], of kept elements of A and B as [n, N, K].

    Elements of B opposite zeros of A take no part: an infinite one leaves no NaN.
    """
    if np.isfinite(right).all():
        return dense(kept, columns, right.shape[-1]) @ right.transpose(0, 2, 1)
    opposite = np.take_along_axis(right[:, None], columns[:, :, None], axis=-1)
    found: Array = (kept[:, :, None] * opposite).sum(axis=-1)
    return found
