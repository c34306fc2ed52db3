"""Order of accesses to global memory, between CTAs and of asynchronous copies, during a launch.

A byte remembers who wrote it last, by the counts of `Clocks`: the cluster, also of earlier waves,
its warp, and the number of that one's next release. Who reads or overwrites it must know that this
has happened. What asynchronous copies read or write is remembered as long as they are under way.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .errors import AsyncHazardError, RaceError
from .groups import Array, Group, Lanes
from .locations import Locations
from .memory import active_range, fault
from .ranges import Thread, failure
from .ranges_of_bytes import Ranges

if TYPE_CHECKING:
    from .async_operations import CopyQueue
    from .global_memory import GlobalMemory
    from .machine import Machine
    from .proxies import ProxyRaces

_EARLY = (
    "what the launch before may still be writing is read, and no griddepcontrol.wait lies before"
)
_COUNT_BITS, _ACTOR_BITS = 28, 12
_COUNT = (1 << _COUNT_BITS) - 1
_ACTOR = (1 << _ACTOR_BITS) - 1


@dataclass(slots=True, eq=False)
class Transfer:
    """What an asynchronous operation reads or writes while it is under way.

    Attributes:
        ranges: of global memory.
        combines: whether it adds to what is there, as others may at the same time.
    """

    ranges: Ranges
    combines: bool = False


@dataclass(slots=True, eq=False)
class _Trace:
    """The last plain and the last strong write of each byte of an allocation; 0 for none."""

    base: int
    size: int
    plain: Array
    strong: Array | None = None


@dataclass(slots=True)
class GlobalOrder:
    """Who has written what of global memory during a launch.

    Attributes:
        locations: what strong operations have released.
        reading, writing: asynchronous operations under way.
    """

    memory: "GlobalMemory"
    locations: Locations = field(default_factory=Locations)
    reading: list[Transfer] = field(default_factory=list)
    writing: list[Transfer] = field(default_factory=list)
    _traces: list[_Trace] = field(default_factory=list)
    _awaited: list[tuple[int, int]] = field(default_factory=list)
    # For each cluster, the warps that have waited, and the numbers of their next releases then.
    _waited: dict[int, dict[int, int]] = field(default_factory=dict)
    _races: "ProxyRaces | None" = None
    _copies: "CopyQueue | None" = None

    def begin_launch(self, awaited: list[tuple[int, int]]) -> None:
        """Nothing has been written.

        Args:
            awaited: (start, end) of what the launch before may still write.
        """
        self.locations.reset()
        self._traces.clear()
        self._awaited = awaited

    def wait(self, group: Group) -> None:
        """`griddepcontrol.wait`: the launch before has ended, for all who know of this."""
        races = self._races
        if races is not None:
            for row in group.index.tolist():
                self._waited.setdefault(races.cluster(row), {}).setdefault(row, races.now(row))

    def begin_wave(self, machine: "Machine") -> None:
        """A machine runs CTAs of the launch from now on."""
        self._races, self._copies = machine.races, machine.copies
        self.reading.clear()
        self.writing.clear()
        self._waited.clear()

    # -- accesses of threads --------------------------------------------------------------------

    def read(self, group: Group, addresses: Array, total: int, *, strong: bool = False) -> None:
        """Checks loads of `total` bytes at addresses [n, 32]."""
        if self._awaited and (early := self._early(group.index)).any():
            at = addresses.astype(np.int64)
            for start, end in self._awaited:
                bad = (at < end) & (at + total > start) & early[:, None] & group.active()
                if bad.any():
                    raise fault(AsyncHazardError, _EARLY, group, bad)
        if self.writing:
            self._check_transfers(group, addresses, total, self.writing, "a load of", "write")
        if self._traces and self._races is not None:
            for trace, rows, places in self._touched(group, addresses, total):
                self._check(group, trace, trace.plain, rows, places, "reads")
                if trace.strong is not None and not strong:
                    self._check(group, trace, trace.strong, rows, places, "reads")

    def write(self, group: Group, addresses: Array, total: int, *, strong: bool = False) -> None:
        """Checks and notes stores, or strong ones and atomic operations."""
        for transfers, told in ((self.writing, "write"), (self.reading, "read")):
            if transfers:
                self._check_transfers(group, addresses, total, transfers, "a store to", told)
        if self._copies is not None:
            source = self._copies.reads(addresses, total)
            if source is not None:
                source = source & group.active()
                if source.any():
                    told = "a store to global memory that an asynchronous copy may still read"
                    raise fault(AsyncHazardError, f"{told}: no wait covers it", group, source)
        races = self._races
        if races is None:
            return
        self._make_traces(group, addresses)
        for trace, rows, places in self._touched(group, addresses, total):
            self._check(group, trace, trace.plain, rows, places, "writes")
            stamps = self._stamps(rows)
            if strong:
                if trace.strong is None:
                    trace.strong = np.zeros_like(trace.plain)
                trace.strong[places] = stamps
                continue
            if trace.strong is not None:
                self._check(group, trace, trace.strong, rows, places, "writes")
            trace.plain[places] = stamps
            if (bad := trace.plain[places] != stamps).any():
                place = int(np.flatnonzero(bad)[0])
                told = "writes the same global memory by the same instruction"
                other = int(trace.plain[places[place]])
                self._fail(group, int(rows[place]), other, f"{told} as", trace, int(places[place]))

    # -- accesses of asynchronous operations ----------------------------------------------------

    def begin_read(self, thread: Thread, ranges: Ranges) -> Transfer:
        """Checks that an asynchronous read may begin; it is under way until `end_read`."""
        if self._awaited and self._early(np.array([thread.row])).any():
            for start, end in self._awaited:
                if Ranges(np.array([start]), end - start).overlap(ranges):
                    raise failure(AsyncHazardError, _EARLY, thread)
        if any(t.ranges.overlap(ranges) for t in self.writing):
            told = "an asynchronous operation reads global memory that another one may still write"
            raise failure(AsyncHazardError, f"{told}: no wait covers it", thread)
        self._check_async(thread, ranges, "reads")
        transfer = Transfer(ranges)
        self.reading.append(transfer)
        return transfer

    def end_read(self, transfer: Transfer) -> None:
        """An asynchronous read is over."""
        self.reading.remove(transfer)

    def begin_write(self, thread: Thread, ranges: Ranges, combines: bool) -> Transfer:
        """The same of a write, or one that combines with what is there."""
        for transfers, told in ((self.writing, "write"), (self.reading, "read")):
            for other in transfers:
                if not (combines and other.combines) and other.ranges.overlap(ranges):
                    told = f"writes global memory that another one may still {told}"
                    told = f"an asynchronous operation {told}: no wait covers it"
                    raise failure(AsyncHazardError, told, thread)
        self._check_async(thread, ranges, "combines with" if combines else "writes")
        transfer = Transfer(ranges, combines)
        self.writing.append(transfer)
        return transfer

    def end_write(self, thread: Thread, transfer: Transfer) -> None:
        """An asynchronous write is over, and a warp has waited for it."""
        self.writing.remove(transfer)
        if self._races is None:
            return
        stamp = self._stamps(np.array([thread.row]))[0]
        for start, end in transfer.ranges.pairs():
            trace = self._trace_of(start)
            if trace is None:
                continue
            if transfer.combines and trace.strong is None:
                trace.strong = np.zeros_like(trace.plain)
            marks = trace.strong if transfer.combines else trace.plain
            assert marks is not None
            marks[start - trace.base : end - trace.base] = stamp

    def _check_async(self, thread: Thread, ranges: Ranges, verb: str) -> None:
        races = self._races
        if races is None or not self._traces:
            return
        for start, end in ranges.pairs():
            for trace in self._traces:
                part = slice(max(start - trace.base, 0), max(end - trace.base, 0))
                self._check_proxy(thread, np.unique(trace.plain[part]), verb)
                if trace.strong is not None and verb != "combines with":
                    self._check_proxy(thread, np.unique(trace.strong[part]), verb)

    def _check_proxy(self, thread: Thread, stamps: Array, verb: str) -> None:
        races, row = self._races, thread.row
        assert races is not None
        for stamp in stamps[stamps != 0].tolist():
            cluster, actor, count = _parts(stamp)
            own = cluster == races.cluster(row)
            known = races.known(row) if own else races.known_of(row, cluster)
            if known is None or known[actor] < count:
                told = f"{self._name(row, stamp)} has written what an asynchronous operation "
                told = f"{told}{verb}, and nothing orders the two"
                raise failure(RaceError, told, thread)
            if own and races.fenced_globally(row)[actor] < count:
                told = f"an asynchronous operation {verb} global memory that "
                told += f"{self._name(row, stamp)} has written, and no fence.proxy.async lies "
                raise failure(AsyncHazardError, f"{told}in between", thread)

    def _early(self, rows: Array) -> Lanes:
        """Which warps do not know that the launch before has ended."""
        races = self._races
        assert races is not None
        found = np.ones(len(rows), np.bool_)
        for place, row in enumerate(rows.tolist()):
            for other, count in self._waited.get(races.cluster(row), {}).items():
                if races.has_seen(np.array([row]), other, count)[0]:
                    found[place] = False
                    break
        return found

    # -- inside ---------------------------------------------------------------------------------

    def _check_transfers(
        self,
        group: Group,
        addresses: Array,
        total: int,
        transfers: list[Transfer],
        verb: str,
        may: str,
    ) -> None:
        least, greatest, _ = active_range(group, addresses)
        for transfer in transfers:
            ranges = transfer.ranges
            if ranges.first >= greatest + total or ranges.last <= least:
                continue
            bad = ranges.touched(addresses, total) & group.active()
            if bad.any():
                told = f"{verb} global memory that an asynchronous operation may still {may}"
                raise fault(AsyncHazardError, f"{told}: no wait covers it", group, bad)

    def _make_traces(self, group: Group, addresses: Array) -> None:
        for allocation in self.memory.owners(group, addresses):
            self._trace_of(allocation.base)

    def _trace_of(self, address: int) -> _Trace | None:
        for trace in self._traces:
            if trace.base <= address < trace.base + trace.size:
                return trace
        found = self.memory.find(address)
        if found is None:
            return None
        trace = _Trace(found.base, found.size_bytes, np.zeros(found.size_bytes, np.int64))
        self._traces.append(trace)
        return trace

    def _touched(
        self, group: Group, addresses: Array, total: int
    ) -> Iterator[tuple[_Trace, Array, Array]]:
        """Each trace with the warp and the place in it of every byte that threads touch."""
        least, greatest, _ = active_range(group, addresses)
        rows: Array = np.repeat(group.index, addresses.shape[1])
        flat: Array = addresses.ravel().astype(np.int64)
        if group.mask is not None:
            chosen = group.mask.ravel()
            rows, flat = rows[chosen], flat[chosen]
        for trace in self._traces:
            first, last = trace.base, trace.base + trace.size
            if least >= last or greatest + total <= first:
                continue
            own, at = rows, flat
            if least < first or greatest >= last:
                inside = (flat >= first) & (flat < last)
                own, at = rows[inside], flat[inside]
            places = (at[:, None] - first + np.arange(total)).ravel()
            yield trace, np.repeat(own, total), places

    def _stamps(self, rows: Array) -> Array:
        races = self._races
        assert races is not None
        return races.stamps(rows, _ACTOR_BITS, _COUNT_BITS)

    def _check(
        self, group: Group, trace: _Trace, marks: Array, rows: Array, places: Array, verb: str
    ) -> None:
        races = self._races
        assert races is not None
        stamps = marks[places]
        written = stamps != 0
        if not written.any():
            return
        if not written.all():
            rows, places, stamps = rows[written], places[written], stamps[written]
        bad = ~self._have_happened(races, rows, stamps)
        if bad.any():
            place = int(np.flatnonzero(bad)[0])
            told = f"has written without anything that orders it before, and {{own}} {verb}"
            at = int(places[place])
            self._fail(group, int(rows[place]), int(stamps[place]), told, trace, at)

    @staticmethod
    def _have_happened(races: "ProxyRaces", rows: Array, stamps: Array) -> Lanes:
        """Whether each warp knows of a write."""
        clusters = stamps >> (_ACTOR_BITS + _COUNT_BITS)
        actors = stamps >> _COUNT_BITS & _ACTOR
        own = clusters == races.clusters(rows)
        found: Lanes = races.knows(rows, np.where(own, actors, 0), stamps & _COUNT) & own
        if not own.all():
            away = np.flatnonzero(~own)
            pairs = np.stack([rows[away], stamps[away]])
            for row, stamp in np.unique(pairs, axis=1).T.tolist():
                cluster, actor, count = _parts(stamp)
                known = races.known_of(row, cluster)
                if known is not None and known[actor] >= count:
                    found |= (rows == row) & (stamps == stamp)
        return found

    def _name(self, row: int, stamp: int) -> str:
        """Who has written, for messages: seen from a warp."""
        races = self._races
        assert races is not None
        cluster, actor, _ = _parts(stamp)
        if cluster != races.cluster(row):
            return "another CTA"
        return races.name_of(actor)

    def _fail(
        self, group: Group, row: int, stamp: int, told: str, trace: _Trace, place: int
    ) -> None:
        races = self._races
        assert races is not None
        lanes = np.zeros((len(group), 32), np.bool_)
        lanes[group.index == row] = True
        found = self.memory.find(trace.base)
        name = (found.name if found is not None else "") or "global memory"
        own = races.name_of(races.actor(row))
        told = told.format(own=own) if "{own}" in told else f"{told} {own}"
        told = f"{self._name(row, stamp)} {told} (offset {place} of {name})"
        raise fault(RaceError, told, group, lanes)


def _parts(stamp: int) -> tuple[int, int, int]:
    """(cluster, warp in it, count) of a write."""
    cluster = stamp >> (_ACTOR_BITS + _COUNT_BITS)
    return cluster, stamp >> _COUNT_BITS & _ACTOR, stamp & _COUNT
