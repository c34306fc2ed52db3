"""Tensor memory: its cells, who has allocated them, and in which order accesses to them happen.

Each CTA has 128 lanes x 512 columns of 32 bits (PTX ISA "Tensor Memory"). `tcgen05` operations are
asynchronous: a cell remembers the last accesses to it, and an access is an error if an earlier one
may still be under way, or if nothing orders the two. What counts as order is what the ISA says:
the tensor pipe runs the products and copies of a CTA as they were issued; `wait::ld` and `wait::st`
end a warp's own loads and stores; `commit` and a wait on its barrier end products and copies;
between warps, `fence::before_thread_sync`, a barrier and `fence::after_thread_sync` are needed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import (
    AsyncHazardError,
    BoundsError,
    RaceError,
    SimulationError,
    TensorMemoryError,
    UndefinedBehaviorError,
)
from .groups import Array

if TYPE_CHECKING:
    from .machine import Machine

LANES, COLUMNS = 128, 512
_ALL = np.uint32(0xFFFFFFFF)
_UNRELEASED = 1 << 62


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Cells of a CTA: some lanes, and neighbouring columns.

    Attributes:
        cta: index of the CTA in the wave.
        lanes: a slice, or indices.
        first, count: the columns.
    """

    cta: int
    lanes: slice | Array
    first: int
    count: int

    @property
    def index(self) -> Any:
        """What to index arrays [lanes, columns] with."""
        columns = slice(self.first, self.first + self.count)
        if isinstance(self.lanes, slice):
            return self.lanes, columns
        return np.ix_(self.lanes, np.arange(self.first, self.first + self.count))


@dataclass(slots=True, eq=False)
class Access:
    """One operation's access to tensor memory.

    Attributes:
        number: what cells remember it by.
        row, lane: the thread that issued it: row of its warp, and lane.
        what: the instruction, for messages.
        piped: whether the tensor pipe executes it (mma, cp) or the warp does (ld, st).
        pc: the step of the instruction.
        tick: how many times the warp had released its accesses before.
        pending: whether it may still be under way.
        done: when it ended, on the clock of the tensor memory.
    """

    number: int
    row: int
    lane: int
    what: str
    piped: bool
    pc: int
    tick: int
    pending: bool = True
    done: int = 0


@dataclass(slots=True)
class _Store:
    access: Access
    region: Region
    values: Array
    poison: Array | None


class _Cells:
    """The tensor memory of one CTA."""

    def __init__(self) -> None:
        shape = (LANES, COLUMNS)
        self.data: Array = np.zeros(shape, np.uint32)
        self.poison: Array = np.full(shape, _ALL)
        self.owner: Array = np.zeros(COLUMNS, np.int32)
        # Numbers of the last accesses: by anything that writes, by loads, by the tensor pipe.
        self.written: Array = np.zeros(shape, np.int32)
        self.loaded: Array = np.zeros(shape, np.int32)
        self.read: Array = np.zeros(shape, np.int32)


@dataclass(slots=True)
class _Allocation:
    first: int
    count: int
    pc: int
    row: int


@dataclass(slots=True)
class _Warp:
    """What the order of accesses needs to know of a warp."""

    tick: int = 0
    # For each tick, the count of the warp's releases with which its accesses become known.
    released: list[int] = field(default_factory=list)
    fenced: int = 0  # when it last executed fence::after_thread_sync
    seen: Array | None = None  # what it knew of others then
    loads: list[Access] = field(default_factory=list)
    stores: list[_Store] = field(default_factory=list)


class TensorMemory:
    """The tensor memory of all CTAs of a wave."""

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        machine.parts.append(self)
        machine.at_end.append(self.finish)
        self.reset()

    def reset(self) -> None:
        """Nothing is allocated, and all of it is undefined."""
        self._ctas: dict[int, _Cells] = {}
        self._allocations: dict[int, list[_Allocation]] = {}
        self._relinquished: set[int] = set()
        # (step, rows) of warps that wait for columns.
        self.waiting: list[tuple[int, list[int]]] = []
        self._serial = 0
        self.group = 0
        self.clock = 0
        self._accesses: list[Access | None] = [None]
        self._warps: dict[int, _Warp] = {}

    # -- allocation -----------------------------------------------------------------------------

    def free_columns(self, ctas: list[int], count: int) -> int | None:
        """Where all of some CTAs have so many columns free: the last such place, None if none.

        The last, and not the first, because a kernel must not take it for granted that it is 0.
        """
        for first in range(COLUMNS - count, -1, -count):
            part = slice(first, first + count)
            if not any(self._cells(cta).owner[part].any() for cta in ctas):
                return first
        return None

    def allocate(self, cta: int, first: int, count: int, pc: int, row: int) -> None:
        """Gives columns that are free to a CTA; their content is undefined."""
        cells = self._cells(cta)
        self._serial += 1
        part = slice(first, first + count)
        cells.owner[part] = self._serial
        cells.poison[:, part] = _ALL
        for marks in (cells.written, cells.loaded, cells.read):
            marks[:, part] = 0
        self._allocations.setdefault(cta, []).append(_Allocation(first, count, pc, row))

    def relinquish(self, cta: int) -> None:
        """A CTA gives up its right to allocate."""
        self._relinquished.add(cta)

    def may_allocate(self, cta: int) -> bool:
        """Whether a CTA still has the right to allocate."""
        return cta not in self._relinquished

    def deallocate(self, cta: int, first: int, count: int, row: int) -> None:
        """Takes columns back.

        Raises:
            TensorMemoryError: they are not what one `alloc` gave.
            AsyncHazardError: an operation on them may be under way.
        """
        found = self._allocations.get(cta, [])
        match = [a for a in found if (a.first, a.count) == (first, count)]
        if not match:
            told = ", ".join(f"{a.count} at column {a.first}" for a in found) or "nothing"
            what = f"{count} columns at column {first} are freed; allocated are {told}"
            raise self._fault(TensorMemoryError, what, row, 0)
        cells = self._cells(cta)
        for marks in (cells.written, cells.loaded, cells.read):
            for access in self._accesses_in(marks[:, first : first + count]):
                if access.pending:
                    told = f"columns are freed while {_unfinished(access)}"
                    raise self._fault(AsyncHazardError, told, row, 0)
        found.remove(match[0])
        cells.owner[first : first + count] = 0

    def finish(self) -> None:
        """Checks what a kernel leaves behind.

        Raises:
            TensorMemoryError: columns that are still allocated.
            AsyncHazardError: loads or stores that were never waited for.
        """
        for row, warp in self._warps.items():
            left = [*warp.loads, *(store.access for store in warp.stores)]
            if left:
                error = AsyncHazardError(f"the kernel ends while {_unfinished(left[0])}")
                error.where = self._machine.where(left[0].pc, (row, left[0].lane))
                raise error
        for found in self._allocations.values():
            for allocation in found:
                told = f"the kernel ends with {allocation.count} columns of tensor memory allocated"
                lost = TensorMemoryError(told)
                lost.where = self._machine.where(allocation.pc, (allocation.row, 0))
                raise lost

    def require(self, region: Region, row: int, lane: int = 0) -> None:
        """Checks that cells exist and are allocated.

        Raises:
            BoundsError: they don't exist.
            TensorMemoryError: they are not allocated.
        """
        last = region.first + region.count
        lanes = region.lanes
        top = lanes.stop if isinstance(lanes, slice) else int(lanes.max()) + 1
        if last > COLUMNS or top > LANES:
            told = f"columns {region.first} to {last - 1} and lanes up to {top - 1} do not all"
            told = f"{told} exist: tensor memory has {LANES} lanes and {COLUMNS} columns"
            raise self._fault(BoundsError, told, row, lane)
        owner = self._cells(region.cta).owner[region.first : last]
        if not owner.all():
            column = region.first + int(np.flatnonzero(owner == 0)[0])
            told = f"column {column} of tensor memory is not allocated"
            raise self._fault(TensorMemoryError, told, row, lane)

    # -- content --------------------------------------------------------------------------------

    def load(self, region: Region) -> tuple[Array, Array | None]:
        """uint32 [lanes, columns] and their undefined bits."""
        cells = self._cells(region.cta)
        poison = cells.poison[region.index]
        return cells.data[region.index], poison if poison.any() else None

    def store(
        self, region: Region, values: Array, poison: Array | None, keep: Array | None = None
    ) -> None:
        """Writes uint32 [lanes, columns]; not the lanes of `keep`, bool [lanes]."""
        cells = self._cells(region.cta)
        bad = np.zeros_like(values) if poison is None else poison
        if keep is not None:
            held = keep[:, None]
            values = np.where(held, cells.data[region.index], values)
            bad = np.where(held, cells.poison[region.index], bad)
        self._machine.progress += 1
        cells.data[region.index] = values
        cells.poison[region.index] = bad

    # -- order ----------------------------------------------------------------------------------

    def begin(self, row: int, lane: int, what: str, piped: bool, pc: int) -> Access:
        """A new access, which is under way."""
        tick = self._warp(row).tick
        access = Access(len(self._accesses), row, lane, what, piped, pc, tick)
        self._accesses.append(access)
        return access

    def end(self, access: Access) -> None:
        """Notes that an access is over."""
        self.clock += 1
        access.pending, access.done = False, self.clock

    def will_read(self, access: Access, region: Region) -> None:
        """Checks and notes that an access reads cells."""
        self.require(region, access.row, access.lane)
        cells = self._cells(region.cta)
        index = region.index
        for earlier in self._accesses_in(cells.written[index]):
            self._check(access, earlier, "reads what", region)
        (cells.read if access.piped else cells.loaded)[index] = access.number

    def will_write(self, access: Access, region: Region) -> None:
        """Checks and notes that an access writes cells."""
        self.require(region, access.row, access.lane)
        cells = self._cells(region.cta)
        index = region.index
        for marks in (cells.written, cells.loaded, cells.read):
            for earlier in self._accesses_in(marks[index]):
                self._check(access, earlier, "overwrites what", region)
        cells.written[index] = access.number

    def load_issued(self, access: Access) -> None:
        """A load of a warp, until `wait_loads`."""
        self._warp(access.row).loads.append(access)

    def store_issued(
        self, access: Access, region: Region, values: Array, poison: Array | None
    ) -> None:
        """A store of a warp; `wait_stores` makes it visible."""
        self._warp(access.row).stores.append(_Store(access, region, values, poison))

    def wait_loads(self, row: int) -> None:
        """`tcgen05.wait::ld`."""
        warp = self._warp(row)
        for access in warp.loads:
            self.end(access)
        warp.loads.clear()

    def wait_stores(self, row: int) -> None:
        """`tcgen05.wait::st`."""
        warp = self._warp(row)
        for store in warp.stores:
            self.store(store.region, store.values, store.poison)
            self.end(store.access)
        warp.stores.clear()

    def fence_before(self, row: int) -> None:
        """`tcgen05.fence::before_thread_sync`: what the warp releases next covers its accesses."""
        self.release(row, self.tick(row))

    def tick(self, row: int) -> int:
        """Begins a new tick of a warp; accesses so far belong to the one returned or earlier."""
        warp = self._warp(row)
        warp.released.append(_UNRELEASED)
        warp.tick += 1
        return warp.tick - 1

    def release(self, row: int, tick: int) -> None:
        """Those who acquire what the warp releases next know its accesses up to a tick."""
        races = self._machine.races
        if races is not None:
            self._warp(row).released[tick] = races.now(row)

    def fence_after(self, row: int) -> None:
        """`tcgen05.fence::after_thread_sync`: later accesses of a warp follow what it knows."""
        self.clock += 1
        warp = self._warp(row)
        warp.fenced = self.clock
        races = self._machine.races
        warp.seen = None if races is None else races.known(row)

    def _check(self, access: Access, earlier: Access, verb: str, region: Region) -> None:
        pipe = access.piped and earlier.piped
        place = f"columns {region.first} to {region.first + region.count - 1}"
        if earlier.pending and not pipe:
            told = f"{access.what} {verb} {earlier.what} accesses in {place}: "
            raise self._fault(
                AsyncHazardError, told + _unfinished(earlier), access.row, access.lane
            )
        if earlier.row == access.row:
            if earlier.piped and not access.piped and self._warp(access.row).fenced < earlier.done:
                told = f"{access.what} {verb} {earlier.what} accessed in {place} without"
                told = f"{told} tcgen05.fence::after_thread_sync behind the wait for it"
                raise self._fault(AsyncHazardError, told, access.row, access.lane)
            return
        if self._machine.races is None or self._visible(earlier, access.row):
            return
        machine = self._machine
        told = (
            f"{access.what} {verb} {earlier.what} of warp {machine.row_warp[earlier.row]} accesses "
            f"in {place}, and nothing orders them: tcgen05.fence::before_thread_sync there, a "
            "barrier, and tcgen05.fence::after_thread_sync here would"
        )
        raise self._fault(RaceError, told, access.row, access.lane)

    def _visible(self, earlier: Access, row: int) -> bool:
        """Whether a warp has learnt of an access of another one."""
        seen = self._warp(row).seen
        races = self._machine.races
        assert races is not None
        if seen is None:
            return False
        released = self._warp(earlier.row).released[earlier.tick :]
        return any(count <= seen[races.actor(earlier.row)] for count in released)

    # -- inside ---------------------------------------------------------------------------------

    def _cells(self, cta: int) -> _Cells:
        found = self._ctas.get(cta)
        if found is None:
            found = self._ctas[cta] = _Cells()
        return found

    def _warp(self, row: int) -> _Warp:
        found = self._warps.get(row)
        if found is None:
            found = self._warps[row] = _Warp()
        return found

    def _accesses_in(self, numbers: Array) -> Iterable[Access]:
        """The accesses that some cells remember."""
        first = numbers.flat[0]
        found = [first] if (numbers == first).all() else np.unique(numbers)
        for number in found:
            access = self._accesses[int(number)]
            if access is not None:
                yield access

    @staticmethod
    def _fault(kind: type[SimulationError], told: str, row: int, lane: int) -> SimulationError:
        error = kind(told)
        error.thread = (row, lane)
        return error


def _unfinished(access: Access) -> str:
    """Why an access may be under way."""
    if access.what == "tcgen05.ld":
        return "no tcgen05.wait::ld covers the load"
    if access.what == "tcgen05.st":
        return "no tcgen05.wait::st covers the store"
    return f"no wait for a commit covers {access.what}"


def tensor_memory(machine: "Machine") -> TensorMemory:
    """The tensor memory of a machine, made when an instruction first needs it."""
    for part in machine.parts:
        if isinstance(part, TensorMemory):
            return part
    return TensorMemory(machine)


def same_group(memory: TensorMemory, group: int, row: int) -> None:
    """Checks that all `tcgen05` instructions of a kernel say the same `.cta_group`.

    Raises:
        UndefinedBehaviorError: this one says another than those before.
    """
    if memory.group not in (0, group):
        error = UndefinedBehaviorError(
            f"this kernel uses .cta_group::{memory.group} and .cta_group::{group}"
        )
        error.thread = (row, 0)
        raise error
    memory.group = group
