"""Memory: state spaces of bytes, their bounds and alignment, and which bits are undefined.

Every space answers loads and stores of a group of threads with one NumPy operation. Beside the
bytes lies a shadow of the same size whose ones mark undefined bits.
"""

import numpy as np

from .errors import AlignmentError, BoundsError, SimulationError
from .groups import Array, Group, Lanes
from .registers import STORAGE

# Generic addresses: where the windows of the state spaces begin; others are global.
SHARED_WINDOW = 1 << 56
LOCAL_WINDOW = 2 << 56
PARAM_WINDOW = 3 << 56
_WINDOW_BITS = 56


def fault(kind: type[SimulationError], what: str, group: Group, bad: Lanes) -> SimulationError:
    """An error of some threads of a group; the machine adds the instruction and its place."""
    error = kind(what)
    error.thread = group.first(bad)
    return error


class Bytes:
    """Bytes that are read and written in elements of 1 to 32 bytes, at offsets of any shape.

    Attributes:
        data: the bytes.
        changes: how often they have been written.
    """

    def __init__(self, data: Array) -> None:
        self.data = data
        self.changes = 0
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
        self.changes += 1

    def fill(self, offsets: Array, total: int, value: int) -> None:
        """Writes the same byte to elements of `total` bytes."""
        view = self._view(total)
        view[offsets // total] = np.full(total, value, np.uint8).view(view.dtype)[0]
        self.changes += 1

    def put_bytes(self, offsets: Array, data: Array) -> None:
        """Writes elements given as bytes [n, total]."""
        total = data.shape[1]
        view = self._view(total)
        view[offsets // total] = np.ascontiguousarray(data).view(view.dtype)[:, 0]
        self.changes += 1

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

    def describe(self, address: int) -> str:
        """An address for messages, with what lies there."""
        return f"{self.name} address {address:#x}"

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


def check_alignment(group: Group, addresses: Array, bits: int, total: int, space: Space) -> None:
    """Raises AlignmentError if an address is no multiple of the size of its access."""
    if bits & (total - 1):
        bad = (addresses & np.uint64(total - 1)) != 0
        bad = bad if group.mask is None else bad & group.mask
        at = space.describe(int(addresses[bad][0]))
        raise fault(AlignmentError, f"an access of {total} bytes is misaligned: {at}", group, bad)


class LocalMemory(Space):
    """Private memory of every thread; also where device functions get their parameters from."""

    def __init__(self, warps: int, size_bytes: int, name: str = "local") -> None:
        self.size = padded(size_bytes)
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
        check_alignment(group, addresses, bits, total, self)
        if greatest + total > self._end:
            bad = addresses + np.uint64(total) > self._end
            told = f"an access of {total} bytes lies outside of {self.name} memory"
            raise fault(BoundsError, told, group, bad)
        offsets: Array = addresses.astype(np.int64) + self._thread[group.rows]
        return offsets if group.mask is None else np.where(group.mask, offsets, 0)


class ParamMemory(Space):
    """The parameters of a kernel: the same for all threads, read-only."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__("param", Bytes(np.zeros(padded(size_bytes), np.uint8)), None)
        self._end = size_bytes

    def locate(self, group: Group, addresses: Array, total: int, writing: bool) -> Array:
        _, greatest, bits = active_range(group, addresses)
        check_alignment(group, addresses, bits, total, self)
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


def padded(size_bytes: int) -> int:
    """A size with room for accesses of up to 32 bytes."""
    return -(-max(size_bytes, 1) // 32) * 32
