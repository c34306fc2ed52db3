"""Shared memory of the CTAs of a wave, and what asynchronous operations may still write in it."""

from typing import TYPE_CHECKING

import numpy as np

from .errors import AsyncHazardError, BarrierError, BoundsError, RaceError
from .groups import Array, Group
from .memory import Bytes, Space, active_range, check_alignment, fault, padded

if TYPE_CHECKING:
    from .races import RaceDetector

PIECE = 16
"""Bytes of the pieces in which asynchronous operations read shared memory."""
_OBJECT = 8


class SharedMemory(Space):
    """Shared memory of several CTAs, and which bytes asynchronous copies may still write.

    An address is the rank of the CTA in its cluster from bit 24 on, and the place in its window.

    Args:
        ctas: number of CTAs.
        extents: (first, last + 1) of each variable in the window.
        row_cta: index of the CTA of each warp.
        cluster_size: CTAs of a cluster; these are neighbours.

    Attributes:
        names: of the variables, as `extents`; for messages.
        pending: for each byte, how many asynchronous writes to it have not been delivered.
        in_flight: number of such writes altogether.
        held: for each piece of 16 bytes, how many asynchronous operations may still read it.
        reads_in_flight: number of such operations altogether.
        ended: bool [CTAs], those all of whose threads have exited.
    """

    def __init__(
        self, ctas: int, extents: list[tuple[int, int]], row_cta: Array, cluster_size: int
    ) -> None:
        self.extents = extents or [(0, 0)]
        self.names: list[str] = []
        self.size = padded(max(end for _, end in self.extents))
        data = np.zeros(ctas * self.size, np.uint8)
        super().__init__("shared", Bytes(data), Bytes(np.full(len(data), 0xFF, np.uint8)))
        self.pending = np.zeros(len(data), np.uint8)
        self.in_flight = 0
        self.held = np.zeros(len(data) // PIECE, np.uint16)
        self.reads_in_flight = 0
        self.ended = np.zeros(ctas, np.bool_)
        # Where barrier objects are, by pieces of 8 bytes, and how many there are.
        self._objects = np.zeros(len(data) // _OBJECT, np.bool_)
        self._object_count = 0
        self.races: RaceDetector | None = None
        self._pending = Bytes(self.pending)
        self._claims = np.zeros(len(data) // 4, np.int32)
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
        self.held.fill(0)
        self.reads_in_flight = 0
        self.ended.fill(False)
        self._objects.fill(False)
        self._object_count = 0

    def locate(self, group: Group, addresses: Array, total: int, writing: bool) -> Array:
        offsets = self.place(group, addresses, total, writing, False)
        self.check_settled(group, offsets, total, "a store to" if writing else "a load of")
        return offsets

    def describe(self, address: int) -> str:
        place = address & 0xFFFFFF
        told = super().describe(address)
        for (start, end), name in zip(self.extents, self.names, strict=False):
            if start <= place < end:
                return f"{told}, offset {place - start} of {name}"
        return told

    def check_settled(self, group: Group, offsets: Array, total: int, verb: str) -> None:
        """Raises AsyncHazardError if an asynchronous operation may still write these bytes.

        Or read them, unless it is for a load that is asked.
        """
        if self._object_count and verb != "a load of":
            at = offsets // _OBJECT
            live = self._objects[at]
            for further in range(1, total // _OBJECT):
                live = live | self._objects[at + further]
            live = live if group.mask is None else live & group.mask
            if live.any():
                told = f"{verb} shared memory that holds an mbarrier"
                raise fault(BarrierError, told, group, live)
        if self.reads_in_flight and verb != "a load of":
            held = self.held[offsets // PIECE] != 0
            held = held if group.mask is None else held & group.mask
            if held.any():
                told = "shared memory that an asynchronous operation may still read"
                raise fault(AsyncHazardError, f"{verb} {told}: no wait covers it", group, held)
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
        if self.races is not None:
            if strong:
                self.races.strong(group, offsets, size * count, reads=True, writes=False)
            else:
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
        *,
        strong: bool = False,
    ) -> None:
        if self.races is not None:
            if strong:
                self.races.strong(group, offsets, size * count, reads=False, writes=True)
            else:
                self.races.write(group, offsets, size * count)
        super().put(group, offsets, values, poison, size, count)

    def hold(self, pieces: Array) -> None:
        """Notes that an operation may read pieces of 16 bytes from now on; each occurs once."""
        self.held[pieces] += 1
        self.reads_in_flight += 1

    def let_go(self, pieces: Array) -> None:
        """The reverse."""
        self.held[pieces] -= 1
        self.reads_in_flight -= 1

    def protect(self, offset: int) -> None:
        """Notes that a barrier object is at an offset: only its own instructions may go there."""
        self._objects[offset // _OBJECT] = True
        self._object_count += 1

    def unprotect(self, offset: int) -> None:
        """The reverse."""
        self._objects[offset // _OBJECT] = False
        self._object_count -= 1

    def holds_object(self, pieces: Array) -> bool:
        """Whether a barrier object is in one of some pieces of 16 bytes."""
        if not self._object_count:
            return False
        return bool(self._objects.reshape(-1, PIECE // _OBJECT)[pieces].any())

    def repeated(self, offsets: Array, size: int) -> Array:
        """Which of some writes [n] of a size, that begin together, go where another one goes."""
        self._claims[offsets // size] = np.arange(len(offsets))
        found: Array = self._claims[offsets // size] != np.arange(len(offsets))
        return found

    def mark_pending(self, offsets: Array, size: int) -> None:
        """Notes that asynchronous writes to some offsets [n] have begun: they are undefined now.

        They are different ones, and no write to them is under way.
        """
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
        check_alignment(group, addresses, bits, total, self)
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
        if group.mask is not None:
            offsets = np.where(group.mask, offsets, 0)
        if cluster and self.ended.any():
            gone = self.ended[offsets // self.size] & group.active()
            if gone.any():
                told = "an access to shared memory of a CTA that has ended"
                raise fault(RaceError, told, group, gone)
        return offsets

    def _outside(self, address: int, total: int, writing: bool) -> str:
        verb = "a store of" if writing else "a load of"
        variables = ", ".join(f"{start:#x} to {end:#x}" for start, end in self.extents)
        return (
            f"{verb} {total} bytes at shared address {address:#x} lies in no variable of the CTA; "
            f"these are at {variables}"
        )
