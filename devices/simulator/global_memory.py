"""Global memory: the memory of this process at its own addresses, where it is registered.

Tensors are registered, not copied. Between two allocations lies at least what the allocator of the
process keeps for itself, so an access over the end of one is found before it reaches another.
"""

import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import BoundsError
from .groups import Array, Group, Lanes
from .memory import Bytes, Space, active_range, check_alignment, fault, padded

if TYPE_CHECKING:
    from .global_order import GlobalOrder

_GUARD_BYTES = 256
# Shadows begin at a multiple of the largest access, so that aligned addresses have aligned offsets.
_SHADOW_ALIGN = 32

# One view over everything that this process could have mapped, so that threads may hit several
# allocations in one operation. Bounds are checked before it is used.
_FIRST_ADDRESS = 4096
_LAST_ADDRESS = 1 << 47


class _ProcessMemory:
    """What NumPy needs to make an array of the addresses of this process."""

    def __init__(self) -> None:
        self.__array_interface__ = {
            "data": (_FIRST_ADDRESS, False),
            "shape": (_LAST_ADDRESS - _FIRST_ADDRESS,),
            "typestr": "|u1",
            "version": 3,
        }


@dataclass(slots=True, eq=False)
class Allocation:
    """A piece of global memory.

    Attributes:
        base, size_bytes: where it is.
        name: for messages.
        writable: whether kernels may write it.
        shadow: ones where bits are undefined; None if all of it is defined.
        owner: keeps the memory alive.
    """

    base: int
    size_bytes: int
    name: str
    writable: bool = True
    shadow: Bytes | None = None
    owner: Any = None

    @property
    def end(self) -> int:
        """The address behind it."""
        return self.base + self.size_bytes

    def inner(self, addresses: Array) -> tuple[Lanes, Array]:
        """Which addresses lie in it, and the offsets of all in its shadow."""
        inside: Lanes = (addresses >= self.base) & (addresses < self.end)
        return inside, addresses - (self.base & -_SHADOW_ALIGN)


class GlobalMemory(Space):
    """The memory that kernels share with the host: registered allocations, nothing else.

    Attributes:
        lock: held while a kernel runs.
        order: checks the order of accesses while one does.
    """

    def __init__(self) -> None:
        super().__init__("global", Bytes(np.asarray(_ProcessMemory())), None)
        self.lock = threading.RLock()
        self.order: GlobalOrder | None = None
        self._bases: list[int] = []
        self._allocations: list[Allocation] = []
        # What is registered inside of others: names, and what of these is defined.
        self._views: list[Allocation] = []

    def register(
        self,
        address: int,
        size_bytes: int,
        name: str = "",
        *,
        writable: bool = True,
        undefined: bool = False,
        owner: Any = None,
    ) -> Allocation:
        """Lets kernels access memory of this process.

        What it overlaps is forgotten, unless it lies inside of that: a view leaves its parent as it
        is, but for what is undefined.

        Args:
            address, size_bytes: where it is.
            name: for messages.
            writable: whether kernels may write it.
            undefined: whether its content counts as undefined until a kernel writes it.
            owner: kept as long as the memory is registered.
        """
        with self.lock:
            parent = self.find(address)
            inside = parent is not None and address + size_bytes <= parent.end
            if parent is not None and inside and parent.size_bytes > size_bytes:
                return self._register_view(parent, address, size_bytes, name, undefined)
            self.forget(address, size_bytes)
            return self._register(address, size_bytes, name, writable, undefined, owner)

    def _register_view(
        self, parent: Allocation, address: int, size_bytes: int, name: str, undefined: bool
    ) -> Allocation:
        self._views = [v for v in self._views if (v.base, v.size_bytes) != (address, size_bytes)]
        found = Allocation(address, size_bytes, name, parent.writable)
        self._views.append(found)
        if undefined:
            self.discard(address, size_bytes)
        else:
            self._define(parent, found)
        return found

    def _register(
        self,
        address: int,
        size_bytes: int,
        name: str,
        writable: bool,
        undefined: bool,
        owner: Any,
    ) -> Allocation:
        room = padded(size_bytes + address % _SHADOW_ALIGN)
        shadow = Bytes(np.full(room, 0xFF, np.uint8)) if undefined else None
        found = Allocation(address, size_bytes, name, writable, shadow, owner)
        place = bisect_right(self._bases, address)
        self._bases.insert(place, address)
        self._allocations.insert(place, found)
        return found

    def allocate(
        self, size_bytes: int, name: str = "", *, align: int = 256, undefined: bool = False
    ) -> Allocation:
        """New memory, zero, with a gap to everything else on both sides."""
        align = max(align, 32)
        whole = np.zeros(size_bytes + 2 * _GUARD_BYTES + align, np.uint8)
        address = -(-(whole.ctypes.data + _GUARD_BYTES) // align) * align
        return self.register(address, size_bytes, name, undefined=undefined, owner=whole)

    def forget(self, address: int, size_bytes: int) -> None:
        """Takes back what overlaps a range, but for what this is a part of."""
        end = address + size_bytes

        def stays(a: Allocation) -> bool:
            apart = a.end <= address or a.base >= end
            return apart or (a.base <= address and end <= a.end and a.size_bytes > size_bytes)

        with self.lock:
            for view in self._views:
                parent = self.find(view.base)
                if not stays(view) and parent is not None:
                    self._define(parent, view)
            self._restore(list(filter(stays, self._allocations)), list(filter(stays, self._views)))

    @contextmanager
    def lent(self) -> Iterator[None]:
        """What is registered inside of this is forgotten behind it, and nothing else."""
        with self.lock:
            before = list(self._allocations), list(self._views)
            try:
                yield
            finally:
                self._restore(*before)

    def _restore(self, allocations: list[Allocation], views: list[Allocation]) -> None:
        self._allocations, self._views = allocations, views
        self._bases = [a.base for a in allocations]

    @staticmethod
    def _define(parent: Allocation, view: Allocation) -> None:
        """Makes a part of an allocation defined."""
        if parent.shadow is not None:
            start = view.base - (parent.base & -_SHADOW_ALIGN)
            parent.shadow.data[start : start + view.size_bytes] = 0

    def write(self, address: int, data: bytes) -> None:
        """Writes from the host."""
        self.memory.data[address - _FIRST_ADDRESS : address - _FIRST_ADDRESS + len(data)] = (
            np.frombuffer(data, np.uint8)
        )

    def read(self, address: int, size_bytes: int) -> Array:
        """A copy of some bytes, for the host."""
        start = address - _FIRST_ADDRESS
        return self.memory.data[start : start + size_bytes].copy()

    def discard(self, address: int, size_bytes: int) -> None:
        """Makes what lies in an allocation undefined until something writes it."""
        found = self.find(address)
        assert found is not None
        if found.shadow is None:
            room = padded(found.size_bytes + found.base % _SHADOW_ALIGN)
            found.shadow = Bytes(np.zeros(room, np.uint8))
        start = address - (found.base & -_SHADOW_ALIGN)
        found.shadow.data[start : start + size_bytes] = 0xFF

    def find(self, address: int) -> Allocation | None:
        """The allocation that an address lies in."""
        place = bisect_right(self._bases, address) - 1
        if place >= 0 and address < self._allocations[place].end:
            return self._allocations[place]
        return None

    def describe(self, address: int) -> str:
        told = super().describe(address)
        inside = [v for v in self._views if v.base <= address < v.end]
        found = inside[-1] if inside else self.find(address)
        if found is None:
            return told
        return f"{told}, offset {address - found.base} of {found.name or 'one buffer'}"

    def owners(self, group: Group, addresses: Array) -> list[Allocation]:
        """The allocations that checked addresses of a group's threads lie in."""
        least, greatest, _ = active_range(group, addresses)
        found = self.find(least)
        if found is not None and greatest < found.end:
            return [found]
        used = addresses if group.mask is None else addresses[group.mask]
        places = np.searchsorted(np.array(self._bases, np.uint64), used, "right") - 1
        return [self._allocations[int(place)] for place in np.unique(places)]

    @property
    def has_shadows(self) -> bool:
        """Whether any of it may be undefined."""
        return any(a.shadow is not None for a in self._allocations)

    def bytes_at(self, addresses: Array, size: int) -> Array:
        """Bytes [n, size] at checked addresses that are multiples of the size."""
        return self.memory.take_bytes(addresses.astype(np.int64) - _FIRST_ADDRESS, size)

    def shadow_at(self, addresses: Array, size: int) -> Array:
        """The undefined bits of these."""
        found = np.zeros((len(addresses), size), np.uint8)
        for allocation, shadow in self._shadowed():
            inside, inner = allocation.inner(addresses.astype(np.int64))
            found[inside] = shadow.take_bytes(inner[inside], size)
        return found

    def load(
        self,
        group: Group,
        addresses: Array,
        size: int,
        count: int = 1,
        *,
        strong: bool = False,
    ) -> tuple[Array, Array | None]:
        offsets = self.locate(group, addresses, size * count, False)
        if self.order is not None:
            self.order.read(group, addresses, size * count, strong=strong)
        values = self.memory.take(offsets, size, count)
        return values, self._poison(group, offsets, size, count)

    def store(
        self,
        group: Group,
        addresses: Array,
        values: Array,
        poison: Array | None,
        size: int,
        count: int = 1,
        *,
        strong: bool = False,
    ) -> None:
        offsets = self.locate(group, addresses, size * count, True)
        if self.order is not None:
            self.order.write(group, addresses, size * count, strong=strong)
        self.put(group, offsets, values, poison, size, count)

    def locate(self, group: Group, addresses: Array, total: int, writing: bool) -> Array:
        least, greatest, bits = active_range(group, addresses)
        check_alignment(group, addresses, bits, total, self)
        found = self.find(least)
        inside = found is not None and greatest + total <= found.end
        if not inside or (writing and found is not None and not found.writable):
            self._check(group, addresses, total, writing)
        offsets: Array = addresses.astype(np.int64) - _FIRST_ADDRESS
        if group.mask is not None:
            # Not 0, where nothing is mapped: threads that are not active read here, too.
            offsets = np.where(group.mask, offsets, least - _FIRST_ADDRESS)
        return offsets

    def _check(self, group: Group, addresses: Array, total: int, writing: bool) -> None:
        """Looks at each thread, where they don't all access one allocation."""
        place = np.searchsorted(np.array(self._bases, np.uint64), addresses, "right") - 1
        ends = np.array([a.end for a in self._allocations] or [0], np.uint64)
        bad = (place < 0) | (addresses + np.uint64(total) > ends[place])
        if group.mask is not None:
            bad &= group.mask
        if bad.any():
            row, lane = np.argwhere(bad)[0]
            message = self._outside(int(addresses[row, lane]), total, writing)
            raise fault(BoundsError, message, group, bad)
        if writing:
            read_only = np.array([not a.writable for a in self._allocations])[place]
            if group.mask is not None:
                read_only &= group.mask
            if read_only.any():
                row, lane = np.argwhere(read_only)[0]
                name = self._allocations[int(place[row, lane])].name
                raise fault(BoundsError, f"a store to read-only memory, {name}", group, read_only)

    def _outside(self, address: int, total: int, writing: bool) -> str:
        verb = "a store of" if writing else "a load of"
        told = f"{verb} {total} bytes at global address {address:#x} lies in no allocation"
        near = [
            (min(abs(address - a.end), abs(a.base - address)), a)
            for a in self._allocations
            if abs(address - a.end) < 1 << 20 or abs(a.base - address) < 1 << 20
        ]
        if not near:
            return told
        nearest = min(near, key=lambda pair: pair[0])[1]
        offset = address - nearest.base
        named = nearest.name or "one"
        return f"{told}: it is at offset {offset} of {named}, which has {nearest.size_bytes} bytes"

    def _poison(self, group: Group, offsets: Array, size: int, count: int) -> Array | None:
        poison = None
        for found, shadow in self._shadowed():
            inside, inner = found.inner(offsets + _FIRST_ADDRESS)
            taken = shadow.take(np.where(inside, inner, 0), size, count)
            inside &= group.active()
            taken = np.where(inside if count == 1 else inside[..., None], taken, 0)
            poison = taken if poison is None else poison | taken
        return poison if poison is not None and poison.any() else None

    def put(
        self,
        group: Group,
        offsets: Array,
        values: Array,
        poison: Array | None,
        size: int,
        count: int = 1,
    ) -> None:
        super().put(group, offsets, values, None, size, count)
        used = offsets if group.mask is None else offsets[group.mask]
        for found, shadow in self._shadowed():
            inside, inner = found.inner(used + _FIRST_ADDRESS)
            shadow.fill(inner[inside], size * count, 0)

    def _shadowed(self) -> list[tuple[Allocation, Bytes]]:
        return [(a, a.shadow) for a in self._allocations if a.shadow is not None]
