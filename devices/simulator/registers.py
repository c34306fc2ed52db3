"""Registers of all threads, and which of their bits are undefined.

A register is an array [warps, 32] of unsigned integers (bool for predicates). Its poison is None
as long as every bit in every thread is defined, else an array of the same type whose ones mark
undefined bits. A register that was never written is poison in every bit.
"""

from typing import Any

import numpy as np

from .groups import WARP, Array, Group
from .ptx_syntax import TYPE_BITS

STORAGE: dict[int, Any] = {
    1: np.bool_,
    8: np.uint8,
    16: np.uint16,
    32: np.uint32,
    64: np.uint64,
}
"""The type that registers of a width are kept in. 128 bits are two values of 64."""

_FLOATS: dict[str, Any] = {"f16": np.float16, "f32": np.float32, "f64": np.float64}


def dtype_of(kind: str) -> Any:
    """NumPy type in which values of a PTX type are computed; unsigned where NumPy has none."""
    if kind in _FLOATS:
        return _FLOATS[kind]
    bits = TYPE_BITS[kind]
    return np.dtype(f"i{bits // 8}").type if kind.startswith("s") else STORAGE[bits]


def all_ones(dtype: Any) -> Any:
    """The value of an unsigned type (or bool) with every bit set."""
    return np.True_ if dtype is np.bool_ else dtype(np.iinfo(dtype).max)


class RegisterFile:
    """One register for every thread of a machine.

    Attributes:
        name, bits: of the register.
        data: unsigned [warps, 32], or [warps, 32, 2] for 128 bits.
        poison: None, or what bits of `data` are undefined.
    """

    __slots__ = ("_own", "_undefined", "bits", "data", "name", "poison")

    def __init__(self, name: str, kind: str, warps: int) -> None:
        self.name, self.bits = name, TYPE_BITS[kind]
        shape = (warps, WARP, 2) if self.bits == 128 else (warps, WARP)
        storage = STORAGE[min(self.bits, 64)]
        self.data: Array = np.zeros(shape, storage)
        # Read-only and of one element's size, until a thread writes the register.
        self._undefined: Array = np.broadcast_to(np.array(all_ones(storage), storage), shape)
        self._own: Array | None = None
        self.poison: Array | None = self._undefined

    @property
    def untouched(self) -> bool:
        """Whether no thread has written it."""
        return self.poison is self._undefined

    def reset(self) -> None:
        """Makes it undefined in every thread."""
        self.poison = self._undefined

    def define(self, group: Group) -> None:
        """Notes that a group has written defined values."""
        if self.poison is None:
            return
        if group.mask is None and len(group) == len(self.data):
            self.poison = None
            return
        own = self._owned()
        if group.mask is None:
            own[group.rows] = 0
        else:
            inner = own[group.rows]
            inner[group.mask] = 0
            if not isinstance(group.rows, slice):
                own[group.rows] = inner
        if not own.any():
            self.poison = None

    def taint(self, group: Group, poison: Array) -> None:
        """Notes that a group has written values of which some bits are undefined."""
        own = self._owned()
        store(own, group, poison)

    def _owned(self) -> Array:
        """The poison, writable."""
        if self.poison is None or self.poison is self._undefined:
            value = 0 if self.poison is None else all_ones(self.data.dtype.type)
            if self._own is None:
                self._own = np.full(self.data.shape, value, self.data.dtype)
            else:
                self._own.fill(value)
            self.poison = self._own
        return self.poison


def store(array: Array, group: Group, values: Any) -> None:
    """Writes values of a group's threads into an array [warps, 32, ...]."""
    mask = group.mask
    if mask is None:
        array[group.rows] = values
        return
    if array.ndim == 3:
        mask = mask[..., None]
    if isinstance(group.rows, slice):
        np.copyto(array[group.rows], values, where=mask, casting="unsafe")
    else:
        inner = array[group.rows]
        np.copyto(inner, values, where=mask, casting="unsafe")
        array[group.rows] = inner
