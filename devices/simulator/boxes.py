"""The box of a tensor that one copy moves: where its rows lie in global and in shared memory."""

import math
from typing import TYPE_CHECKING

import numpy as np

from .groups import Array
from .ranges import Thread, check_global, global_bytes, put_global
from .ranges_of_bytes import Ranges
from .shared_memory import PIECE
from .tensor_maps import TensorMap

if TYPE_CHECKING:
    from .machine import Machine

# Whatever the type, as H200 fill with it.
_NAN = 0x7FF7


class Box:
    """A box at some coordinates.

    Args:
        tensor: the map, checked.
        at: coordinates of its first element, of either sign.
        lines: the numbers of its rows, where they do not follow each other, of a 2D tensor.
        offsets: of the mode im2col, what is added to W, H and D.
        written: whether it is written. Then a row ends with the 16 bytes that its last element in
            the tensor is in, even if the tensor ends before: so it is on H200.

    Attributes:
        tensor: the map.
    """

    def __init__(
        self,
        tensor: TensorMap,
        at: tuple[int, ...],
        lines: tuple[int, ...] = (),
        offsets: tuple[int, ...] = (),
        written: bool = False,
    ) -> None:
        self.tensor = tensor
        bits = tensor.element.bits
        self._first = min(max(0, -at[0]), tensor.box[0])
        last = max(self._first, min(tensor.box[0], tensor.dims[0] - at[0]))
        begin, end = self._first * bits // 8, last * bits // 8
        if written and last > self._first:
            end = min(-(-end // PIECE) * PIECE, tensor.box[0] * bits // 8)
        self._row = slice(begin, end)
        self._length = end - begin
        if lines:
            places = np.array([lines], np.int64)
        else:
            places = _pixels(tensor, at, offsets) if tensor.corners else _traversed(tensor, at)
        rows = places.shape[1]
        inside = np.ones(rows, np.bool_)
        addresses = np.full(rows, tensor.address + (at[0] + self._first) * bits // 8, np.int64)
        for where, size, stride in zip(places, tensor.dims[1:], tensor.strides, strict=True):
            inside &= (where >= 0) & (where < size)
            addresses += where * stride
        self._inside: Array = np.flatnonzero(inside) if self._length else np.zeros(0, np.int64)
        self._addresses: Array = addresses
        self._rows = rows

    def check(self, machine: "Machine", thread: Thread, writing: bool) -> None:
        """Raises BoundsError unless what lies inside of the tensor is allocated."""
        for row in self._inside.tolist():
            check_global(machine, thread, int(self._addresses[row]), self._length, writing)

    @property
    def ranges(self) -> Ranges:
        """What of global memory it covers."""
        return Ranges(self._addresses[self._inside], self._length)

    def load(self, machine: "Machine") -> tuple[Array, Array | None]:
        """Bytes of the box as in shared memory, [pieces, 16], and their undefined bits."""
        tensor = self.tensor
        wide = tensor.box[0] * tensor.element.bits // 8
        data = np.zeros((self._rows, wide), np.uint8)
        if tensor.fill:
            data.view(np.uint16)[:] = _NAN
        poison = np.zeros_like(data)
        for row in self._inside.tolist():
            address = int(self._addresses[row])
            data[row, self._row], shadow = global_bytes(machine, address, self._length)
            if shadow is not None:
                poison[row, self._row] = shadow
        data, bad = _spread(tensor, data), _spread(tensor, poison)
        return data.reshape(-1, PIECE), bad.reshape(-1, PIECE) if bad.any() else None

    def rows_inside(self, data: Array) -> Array:
        """Of bytes of the box as in shared memory: those inside of the tensor, [rows, length]."""
        dense = _gathered(self.tensor, data.reshape(self._rows, -1))
        found: Array = dense[self._inside, self._row]
        return found

    def store(self, machine: "Machine", rows: Array) -> None:
        """Writes what `rows_inside` returns."""
        for row, data in zip(self._inside.tolist(), rows, strict=True):
            put_global(machine, int(self._addresses[row]), data)

    def current(self, machine: "Machine") -> Array:
        """What is in global memory in place of `rows_inside`."""
        rows = self._inside.tolist()
        found = [global_bytes(machine, int(self._addresses[r]), self._length)[0] for r in rows]
        return np.stack(found) if found else np.zeros((0, self._length), np.uint8)


def _traversed(tensor: TensorMap, at: tuple[int, ...]) -> Array:
    """Coordinates behind the first one of the rows of a box: [rank - 1, rows]."""
    steps = tensor.element_strides or (1,) * tensor.rank
    rows = math.prod(tensor.counts[1:])
    grid = np.indices(tensor.counts[:0:-1]).reshape(tensor.rank - 1, rows)[::-1]
    start, step = (np.array(values[1:], np.int64)[:, None] for values in (at, steps))
    found: Array = start + grid * step
    return found


def _pixels(tensor: TensorMap, at: tuple[int, ...], offsets: tuple[int, ...]) -> Array:
    """The same of the pixels of a column.

    The base goes along W, then H, D and N, in W, H and D through the bounding box in the steps of
    the traversal; the offsets are added to it.
    """
    box = tensor.bounding_box
    steps = tensor.element_strides or (1,) * tensor.rank
    base = list(at[1:])
    found = np.empty((tensor.rank - 1, tensor.box[1]), np.int64)
    for pixel in range(tensor.box[1]):
        found[:, pixel] = base
        for place, (first, last) in enumerate(box):
            base[place] += steps[place + 1]
            if base[place] <= last:
                break
            base[place] = first
        else:
            base[-1] += 1
    found[:-1] += np.array(offsets)[:, None]
    return found


def shared_pieces(tensor: TensorMap, offset: int, window: int) -> Array:
    """Numbers of the pieces of shared memory that hold a box, in the order of the box.

    Args:
        tensor: the map.
        offset: of the box in the bytes of shared memory.
        window: the same place as an address in the window of the CTA, which swizzles.
    """
    linear = window + PIECE * np.arange(tensor.box_bytes // PIECE)
    found: Array = (tensor.swizzling(linear) + (offset - window)) // PIECE
    return found


def _spread(tensor: TensorMap, rows: Array) -> Array:
    """Rows as in global memory as they are in shared memory: packed elements get gaps."""
    elements, width = tensor.element.packed
    if not elements:
        return rows
    groups = rows.reshape(len(rows), -1, width)
    return np.pad(groups, ((0, 0), (0, 0), (0, PIECE - width))).reshape(len(rows), -1)


def _gathered(tensor: TensorMap, rows: Array) -> Array:
    """The reverse."""
    elements, width = tensor.element.packed
    if not elements:
        return rows
    groups = rows.reshape(len(rows), -1, PIECE)[..., :width]
    return groups.reshape(len(rows), -1)


def flushed(rows: Array) -> Array:
    """float32 rows with subnormals replaced by zeros."""
    bits = np.ascontiguousarray(rows).view(np.uint32)
    tiny = (bits & np.uint32(0x7F800000)) == 0
    found: Array = np.where(tiny, bits & np.uint32(0x80000000), bits).astype(np.uint32)
    return found.view(np.uint8)
