"""Sets of threads that execute an instruction together.

The machine runs many warps at once: state is kept in arrays [warps, 32], and an instruction is one
NumPy operation on the rows of all warps that are at it. A `Group` says which rows and lanes those
are, in the form that makes this cheap: whole arrays or slices as long as warps run in step.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

# The type of an array's elements is often a matter of the instruction; checkers can't follow it.
Array: TypeAlias = Any
Lanes = NDArray[np.bool_]
WARP = 32


class Group:
    """Threads at one instruction.

    Attributes:
        lanes: bool [warps, 32], which threads of all these are.
        rows: the warps that have one of them, as a slice if they are neighbours, else as indices.
        index: the same as an array of indices.
        mask: bool [len(index), 32], which of their lanes; None if all are.
    """

    __slots__ = ("index", "lanes", "mask", "rows")

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.index: Array = np.flatnonzero(lanes.any(axis=1))
        self.rows: slice | Array = self.index
        if len(self.index) and self.index[-1] - self.index[0] + 1 == len(self.index):
            self.rows = slice(int(self.index[0]), int(self.index[-1]) + 1)
        inner = lanes[self.rows]
        self.mask: Lanes | None = None if inner.all() else inner

    def __len__(self) -> int:
        return len(self.index)

    def active(self) -> Lanes:
        """The mask, also where all lanes are active."""
        return np.ones((len(self.index), WARP), np.bool_) if self.mask is None else self.mask

    def spread(self, inner: Lanes) -> Lanes:
        """bool [len(self), 32] of lanes of this group as lanes of all warps."""
        lanes = np.zeros_like(self.lanes)
        lanes[self.rows] = inner if self.mask is None else inner & self.mask
        return lanes

    def first(self, bad: Lanes) -> tuple[int, int]:
        """(warp row, lane) of the first of some threads of this group."""
        row, lane = np.argwhere(bad if self.mask is None else bad & self.mask)[0]
        return int(self.index[row]), int(lane)


class GroupCache:
    """Makes groups, the same one for the same threads: loops come back to them all the time."""

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._known: dict[bytes, Group] = {}

    def __call__(self, lanes: Lanes) -> Group:
        key = np.packbits(lanes).tobytes()
        group = self._known.get(key)
        if group is None:
            if len(self._known) >= self._limit:
                self._known.clear()
            group = self._known[key] = Group(lanes)
        return group
