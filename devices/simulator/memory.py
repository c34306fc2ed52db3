"""Memory: the state spaces, their bounds, alignment, and which bits in them are undefined.

Every space answers loads and stores of a group of threads with one NumPy operation. Beside the
bytes lies a shadow of the same size whose ones mark undefined bits. Global memory is the memory of
this process at its own addresses: tensors are registered, not copied.
"""

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import AlignmentError, AsyncHazardError, BoundsError, SimulationError
from .groups import Array, Group, Lanes
from .registers import STORAGE

if TYPE_CHECKING:
    from .races import RaceDetector

SHARED_WINDOW = 1 << 56
LOCAL_WINDOW = 2 << 56
PARAM_WINDOW = 3 << 56
_WINDOW_BITS = 56
_GUARD_BYTES = 256
# Shadows begin at a multiple of the largest access, so that aligned addresses have aligned offsets.
_SHADOW_ALIGN = 32

# One view over everything that this process could have mapped, so that threads may hit several
# allocations in one operation. Bounds are checked before it is used.
_FIRST_ADDRESS = 4096
_LAST_ADDRESS = 1 << 47


def fault(kind: type[SimulationError], what: str, group: Group, bad: Lanes) -> SimulationError:
    """An error of some threads of a group; the machine adds the instruction and its place."""
    error = kind(what)
    error.thread = group.first(bad)
    return error


class _ProcessMemory:
    """What NumPy needs to make an array of the addresses of this process."""

    def __init__(self) -> None:
        self.__array_interface__ = {
            "data": (_FIRST_ADDRESS, False),
            "shape": (_LAST_ADDRESS - _FIRST_ADDRESS,),
            "typestr": "|u1",
            "version": 3,
        }


class Bytes:
    """Bytes that are read and written in elements of 1 to 32 bytes, at offsets of any shape."""

    def __init__(self, data: Array) -> None:
        self.data = data
        self._views: dict[int, Array] = {}

    def _view(self, total: int) -> Array:
        view = self._views.get(total)
        if view is None:
            whole = self.data[: len(self.data) // total * total]
            kind = STORAGE[8 * total] if total <= 8 else np.dtype(f"V{total}")
            view = self._views[total] = whole.view(kind)
        return view

    def take(self, offsets: Array, size: int, count: int = 1) -> Array:
        """Elements at byte offsets (multiples of size * count): [..., count], or [...] for one."""
        total = size * count
        taken = self._view(total).take(offsets // total if total > 1 else offsets)
        if count == 1 and size <= 8:
            return taken
        parts = taken.view(STORAGE[8 * min(size, 8)])
        return parts.reshape(*offsets.shape, total // min(size, 8))

    def put(self, offsets: Array, values: Array, size: int, count: int = 1) -> None:
        """The reverse of `take`."""
        total = size * count
        if count > 1 or size > 8:
            values = np.ascontiguousarray(values).view(self._view(total).dtype)[..., 0]
        self._view(total)[offsets // total] = values

    def fill(self, offsets: Array, total: int, value: int) -> None:
        """Writes the same byte to elements of `total` bytes."""
        view = self._view(total)
        view[offsets // total] = np.full(total, value, np.uint8).view(view.dtype)[0]

    def put_bytes(self, offsets: Array, data: Array) -> None:
        """Writes elements given as bytes [n, total]."""
        total = data.shape[1]
        view = self._view(total)
        view[offsets // total] = np.ascontiguousarray(data).view(view.dtype)[:, 0]

    def take_bytes(self, offsets: Array, total: int) -> Array:
        """Elements of `total` bytes, as bytes [n, total]."""
        taken = self._view(total).take(offsets // total)
        return taken.view(np.uint8).reshape(len(offsets), total)


class Space:
    """A state space: turns addresses into offsets into its bytes, and checks them.

    Attributes:
        name: for messages.
        memory: its bytes.
        shadow: ones where bits are undefined; None if all of it is defined.
    """

    def __init__(self, name: str, memory: Bytes, shadow: Bytes | None) -> None:
        self.name, self.memory, self.shadow = name, memory, shadow

    def locate(self, group: Group, addresses: Array, total: int, writing: bool) -> Array:
        """Offsets (int64) of accesses of `total` bytes; valid ones for inactive threads, too.

        Raises:
            AlignmentError, BoundsError: for the first thread that is at fault.
        """
        raise NotImplementedError

    def load(
        self, group: Group, addresses: Array, size: int, count: int = 1
    ) -> tuple[Array, Array | None]:
        """Values [n, 32] (or [n, 32, count]) at uint64 addresses, and their undefined bits."""
        offsets = self.locate(group, addresses, size * count, False)
        values = self.memory.take(offsets, size, count)
        return values, self._poison(group, offsets, size, count)

    def _poison(self, group: Group, offsets: Array, size: int, count: int) -> Array | None:
        if self.shadow is None:
            return None
        poison = self.shadow.take(offsets, size, count)
        if group.mask is not None:
            poison = np.where(group.mask if count == 1 else group.mask[..., None], poison, 0)
        return poison if poison.any() else None

    def store(
        self,
        group: Group,
        addresses: Array,
        values: Array,
        poison: Array | None,
        size: int,
        count: int = 1,
    ) -> None:
        """Writes values [n, 32] (or [n, 32, count]), and their undefined bits."""
        offsets = self.locate(group, addresses, size * count, True)
        self.put(group, offsets, values, poison, size, count)

    def put(
        self,
        group: Group,
        offsets: Array,
        values: Array,
        poison: Array | None,
        size: int,
        count: int = 1,
    ) -> None:
        """Writes at offsets that `locate` has checked."""
        if group.mask is not None:
            offsets, values = offsets[group.mask], values[group.mask]
            poison = None if poison is None else poison[group.mask]
        self.memory.put(offsets, values, size, count)
        if self.shadow is not None:
            if poison is None:
                poison = np.zeros(values.shape, values.dtype)
            self.shadow.put(offsets, poison, size, count)


def active_range(group: Group, addresses: Array) -> tuple[int, int, int]:
    """Least and greatest address of the active threads, and the bits that any of them has set."""
    used = addresses if group.mask is None else addresses[group.mask]
    return int(used.min()), int(used.max()), int(np.bitwise_or.reduce(used, axis=None))


def check_alignment(group: Group, addresses: Array, bits: int, total: int) -> None:
    """Raises AlignmentError if an address is no multiple of the size of its access."""
    if bits & (total - 1):
        bad = (addresses & np.uint64(total - 1)) != 0
        raise fault(AlignmentError, f"an access of {total} bytes is misaligned", group, bad)


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
    """The memory that kernels share with the host: registered allocations, nothing else."""

    def __init__(self) -> None:
        super().__init__("global", Bytes(np.asarray(_ProcessMemory())), None)
        self._bases: list[int] = []
        self._allocations: list[Allocation] = []

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
        """Lets kernels access memory of this process; what overlaps it is forgotten.

        Args:
            address, size_bytes: where it is.
            name: for messages.
            writable: whether kernels may write it.
            undefined: whether its content counts as undefined until a kernel writes it.
            owner: kept as long as the memory is registered.
        """
        self.forget(address, size_bytes)
        room = _padded(size_bytes + address % _SHADOW_ALIGN)
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
        """Takes back what overlaps a range."""
        kept = [a for a in self._allocations if a.end <= address or a.base >= address + size_bytes]
        if len(kept) != len(self._allocations):
            self._allocations = kept
            self._bases = [a.base for a in kept]

    def write(self, address: int, data: bytes) -> None:
        """Writes from the host."""
        self.memory.data[address - _FIRST_ADDRESS : address - _FIRST_ADDRESS + len(data)] = (
            np.frombuffer(data, np.uint8)
        )

    def read(self, address: int, size_bytes: int) -> Array:
        """A copy of some bytes, for the host."""
        start = address - _FIRST_ADDRESS
        return self.memory.data[start : start + size_bytes].copy()

    def find(self, address: int) -> Allocation | None:
        """The allocation that an address lies in."""
        place = bisect_right(self._bases, address) - 1
        if place >= 0 and address < self._allocations[place].end:
            return self._allocations[place]
        return None

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

    def locate(self, group: Group, addresses: Array, total: int, writing: bool) -> Array:
        least, greatest, bits = active_range(group, addresses)
        check_alignment(group, addresses, bits, total)
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


class SharedMemory(Space):
    """Shared memory of several CTAs, and which bytes asynchronous copies may still write.

    An address is the rank of the CTA in its cluster from bit 24 on, and the place in its window.

    Args:
        ctas: number of CTAs.
        extents: (first, last + 1) of each variable in the window.
        row_cta: index of the CTA of each warp.
        cluster_size: CTAs of a cluster; these are neighbours.

    Attributes:
        pending: for each byte, how many asynchronous writes to it have not been delivered.
        in_flight: number of such writes altogether.
    """

    def __init__(
        self, ctas: int, extents: list[tuple[int, int]], row_cta: Array, cluster_size: int
    ) -> None:
        self.extents = extents or [(0, 0)]
        self.size = _padded(max(end for _, end in self.extents))
        data = np.zeros(ctas * self.size, np.uint8)
        super().__init__("shared", Bytes(data), Bytes(np.full(len(data), 0xFF, np.uint8)))
        self.pending = np.zeros(len(data), np.uint8)
        self.in_flight = 0
        self.races: RaceDetector | None = None
        self._pending = Bytes(self.pending)
        self._cta = row_cta.astype(np.int64)
        self._rank = (row_cta % cluster_size).astype(np.uint64)
        self._first = (row_cta - row_cta % cluster_size).astype(np.int64)
        self._cluster_size = cluster_size
        self._starts = np.array([start for start, _ in self.extents], np.uint64)
        self._ends = np.array([end for _, end in self.extents], np.uint64)

    def reset(self) -> None:
        """Makes all of it undefined, as it is when a CTA starts."""
        assert self.shadow is not None
        self.shadow.data.fill(0xFF)
        self.pending.fill(0)
        self.in_flight = 0

    def locate(self, group: Group, addresses: Array, total: int, writing: bool) -> Array:
        offsets = self.place(group, addresses, total, writing, False)
        self.check_settled(group, offsets, total, "a store to" if writing else "a load of")
        return offsets

    def check_settled(self, group: Group, offsets: Array, total: int, verb: str) -> None:
        """Raises AsyncHazardError if an asynchronous operation may still write these bytes."""
        if not self.in_flight:
            return
        busy = self._pending.take(offsets, 1 if total == 1 else total)
        if total > 8:
            busy = busy.any(axis=-1)
        bad = busy != 0 if group.mask is None else (busy != 0) & group.mask
        if bad.any():
            told = "shared memory that an asynchronous copy may still write: no wait covers it"
            raise fault(AsyncHazardError, f"{verb} {told}", group, bad)

    def load(
        self,
        group: Group,
        addresses: Array,
        size: int,
        count: int = 1,
        *,
        strong: bool = False,
        cluster: bool = False,
    ) -> tuple[Array, Array | None]:
        offsets = self.place(group, addresses, size * count, False, cluster)
        self.check_settled(group, offsets, size * count, "a load of")
        if self.races is not None and not strong:
            self.races.read(group, offsets, size * count)
        values = self.memory.take(offsets, size, count)
        return values, self._poison(group, offsets, size, count)

    def put(
        self,
        group: Group,
        offsets: Array,
        values: Array,
        poison: Array | None,
        size: int,
        count: int = 1,
    ) -> None:
        if self.races is not None:
            self.races.write(group, offsets, size * count)
        super().put(group, offsets, values, poison, size, count)

    def mark_pending(self, offsets: Array, size: int) -> None:
        """Notes that asynchronous writes to some offsets [n] have begun: they are undefined now."""
        assert self.shadow is not None
        self.in_flight += len(offsets)
        for marks in (self._pending, self.shadow):
            marks.fill(offsets, size, 0xFF)

    def deliver(self, offsets: Array, data: Array, poison: Array | None, size: int) -> None:
        """Makes asynchronous writes visible: bytes [n, size] with their undefined bits."""
        assert self.shadow is not None
        self.in_flight -= len(offsets)
        self._pending.fill(offsets, size, 0)
        self.memory.put_bytes(offsets, data)
        if poison is None:
            self.shadow.fill(offsets, size, 0)
        else:
            self.shadow.put_bytes(offsets, poison)

    def place(
        self, group: Group, addresses: Array, total: int, writing: bool, cluster: bool
    ) -> Array:
        """`locate`, for `shared::cluster` too: there CTAs of the cluster may be addressed."""
        _, _, bits = active_range(group, addresses)
        check_alignment(group, addresses, bits, total)
        rank, window = addresses >> np.uint64(24), addresses & np.uint64(0xFFFFFF)
        own = self._rank[group.rows][:, None]
        if len(self._starts) == 1:
            bad = (window < self._starts[0]) | (window + np.uint64(total) > self._ends[0])
        else:
            near = np.searchsorted(self._starts, window, "right") - 1
            bad = (near < 0) | (window + np.uint64(total) > self._ends[near])
        bad = bad | (rank >= self._cluster_size if cluster else rank != own)
        if group.mask is not None:
            bad &= group.mask
        if bad.any():
            row, lane = np.argwhere(bad)[0]
            raise fault(
                BoundsError, self._outside(int(addresses[row, lane]), total, writing), group, bad
            )
        cta = self._first[group.rows][:, None] + rank.astype(np.int64) if cluster else None
        cta = self._cta[group.rows][:, None] if cta is None else cta
        offsets: Array = cta * self.size + window.astype(np.int64)
        return offsets if group.mask is None else np.where(group.mask, offsets, 0)

    def _outside(self, address: int, total: int, writing: bool) -> str:
        verb = "a store of" if writing else "a load of"
        variables = ", ".join(f"{start:#x} to {end:#x}" for start, end in self.extents)
        return (
            f"{verb} {total} bytes at shared address {address:#x} lies in no variable of the CTA; "
            f"these are at {variables}"
        )


class LocalMemory(Space):
    """Private memory of every thread; also where device functions get their parameters from."""

    def __init__(self, warps: int, size_bytes: int, name: str = "local") -> None:
        self.size = _padded(size_bytes)
        total = warps * 32 * self.size
        super().__init__(name, Bytes(np.zeros(total, np.uint8)), Bytes(np.zeros(total, np.uint8)))
        self._thread = np.arange(warps * 32, dtype=np.int64).reshape(warps, 32) * self.size
        self._end = size_bytes
        self.reset()

    def reset(self) -> None:
        """Makes all of it undefined."""
        assert self.shadow is not None
        self.shadow.data.fill(0xFF)

    def locate(self, group: Group, addresses: Array, total: int, writing: bool) -> Array:
        _, greatest, bits = active_range(group, addresses)
        check_alignment(group, addresses, bits, total)
        if greatest + total > self._end:
            bad = addresses + np.uint64(total) > self._end
            told = f"an access of {total} bytes lies outside of {self.name} memory"
            raise fault(BoundsError, told, group, bad)
        offsets: Array = addresses.astype(np.int64) + self._thread[group.rows]
        return offsets if group.mask is None else np.where(group.mask, offsets, 0)


class ParamMemory(Space):
    """The parameters of a kernel: the same for all threads, read-only."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__("param", Bytes(np.zeros(_padded(size_bytes), np.uint8)), None)
        self._end = size_bytes

    def locate(self, group: Group, addresses: Array, total: int, writing: bool) -> Array:
        _, greatest, bits = active_range(group, addresses)
        check_alignment(group, addresses, bits, total)
        if writing or greatest + total > self._end:
            bad = np.ones(addresses.shape, np.bool_)
            if not writing:
                bad = addresses + np.uint64(total) > self._end
            told = "a store to" if writing else f"a load of {total} bytes outside of"
            raise fault(BoundsError, f"{told} the kernel's parameters", group, bad)
        offsets: Array = addresses.astype(np.int64)
        return offsets if group.mask is None else np.where(group.mask, offsets, 0)


def window_of(addresses: Array) -> Array:
    """Which window generic addresses lie in: 0 global, 1 shared, 2 local, 3 parameters."""
    window: Array = addresses >> np.uint64(_WINDOW_BITS)
    return window


def _padded(size_bytes: int) -> int:
    """Room for accesses of up to 32 bytes."""
    return -(-max(size_bytes, 1) // 32) * 32
