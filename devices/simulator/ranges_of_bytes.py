"""Ranges of bytes that do not overlap, such as the rows of a box in global memory."""

from collections.abc import Iterator

import numpy as np

from .groups import Array, Lanes


class Ranges:
    """Ranges of one length.

    Args:
        starts: where they begin, in any order.
        length: in bytes.

    Attributes:
        first, last: the first byte of all, and the one behind the last.
    """

    __slots__ = ("_length", "_starts", "first", "last")

    def __init__(self, starts: Array, length: int) -> None:
        self._starts: Array = np.sort(np.asarray(starts, np.int64))
        self._length = length
        self.first = int(self._starts[0]) if len(self._starts) else 0
        self.last = int(self._starts[-1]) + length if len(self._starts) else 0

    def pairs(self) -> Iterator[tuple[int, int]]:
        """(start, end) of each."""
        for start in self._starts.tolist():
            yield start, start + self._length

    def touched(self, addresses: Array, total: int) -> Lanes:
        """Which accesses of `total` bytes touch one."""
        at = addresses.astype(np.int64)
        if not len(self._starts):
            return np.zeros(at.shape, np.bool_)
        near = np.searchsorted(self._starts, at + total - 1, "right") - 1
        found: Lanes = (near >= 0) & (self._starts[np.maximum(near, 0)] + self._length > at)
        return found

    def overlap(self, other: "Ranges") -> bool:
        """Whether two have a byte in common."""
        if self.first >= other.last or other.first >= self.last:
            return False
        return bool(self.touched(other._starts, other._length).any())
