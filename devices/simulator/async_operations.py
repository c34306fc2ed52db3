"""Asynchronous operations: they happen as late as the PTX ISA allows, and poison what they write.

`CopyQueue` holds the copies of `cp.async`, which the threads that issued them wait for.
`Completions` holds operations that end on their own, such as bulk copies; one of them is run when
no thread can go on, or at a random time in a random schedule.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .errors import AsyncHazardError, SimulationError
from .groups import WARP, Array, Group, Lanes
from .memory import fault
from .ranges_of_bytes import Ranges

if TYPE_CHECKING:
    from .machine import Machine


class Completions:
    """Operations under way that end on their own."""

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self._waiting: list[tuple[Callable[[], None], int]] = []

    def reset(self) -> None:
        """Nothing is under way."""
        self._waiting.clear()

    def add(self, finish: Callable[[], None], pc: int) -> None:
        """Starts an operation.

        Args:
            finish: makes its effects visible; called once, as late as possible.
            pc: the step that started it, for errors.
        """
        self._waiting.append((finish, pc))

    def any(self) -> bool:
        """Whether some are under way."""
        return bool(self._waiting)

    def run_one(self) -> bool:
        """Ends the oldest operation; False if there is none."""
        return self._run(0)

    def run(self, rng: np.random.Generator | None = None) -> None:
        """Ends the oldest operation, or a random one, if there is any."""
        self._run(int(rng.integers(len(self._waiting))) if rng and self._waiting else 0)

    def _run(self, place: int) -> bool:
        if not self._waiting:
            return False
        finish, pc = self._waiting.pop(place)
        self._machine.progress += 1
        try:
            finish()
        except SimulationError as error:
            if error.where is None:
                error.where = self._machine.where(pc, error.thread)
            raise
        return True


@dataclass(slots=True)
class _Copies:
    """Copies of one instruction, one per thread that executed it; arrays are one-dimensional."""

    rows: Array
    lanes: Array
    to: Array  # offset in shared memory
    source: Array  # global address
    taken: Array  # bytes to read; the rest is zeros
    number: Array  # of the group that the copy will be committed to, per thread
    size: int
    pc: int
    issued: int  # number of the last mark made before

    def part(self, chosen: Lanes) -> "_Copies":
        return _Copies(
            self.rows[chosen],
            self.lanes[chosen],
            self.to[chosen],
            self.source[chosen],
            self.taken[chosen],
            self.number[chosen],
            self.size,
            self.pc,
            self.issued,
        )


class CopyQueue:
    """Copies of `cp.async` that have been issued and not delivered."""

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self._copies: list[_Copies] = []
        self._issued = 0
        self._committed: Array = np.zeros((machine.warps, WARP), np.int64)

    def reset(self) -> None:
        """No copies are under way."""
        self._copies.clear()
        self._committed[:] = 0

    def issue(
        self, group: Group, pc: int, to: Array, source: Array, size: int, taken: Array
    ) -> None:
        """Begins copies from global to shared memory.

        Args:
            group: who issues them.
            pc: the step of the instruction.
            to: offsets in shared memory, int64 [n, 32], checked.
            source: global addresses, uint64 [n, 32].
            size: bytes written, 4, 8 or 16.
            taken: bytes read, uint64 [n, 32]; zeros fill the rest.
        """
        active = group.active()
        self._check_sources(group, source, taken)
        rows = np.broadcast_to(group.index[:, None], active.shape)[active]
        lanes = np.broadcast_to(np.arange(WARP), active.shape)[active]
        number = self._committed[rows, lanes]
        copies = _Copies(
            rows, lanes, to[active], source[active], taken[active], number, size, pc, self._issued
        )
        shared = self._machine.shared
        if (again := shared.repeated(copies.to, size)).any():
            twice = np.zeros(active.shape, np.bool_)
            twice[active] = again
            told = "two threads begin an asynchronous copy to the same shared memory"
            raise fault(AsyncHazardError, told, group, twice)
        shared.mark_pending(copies.to, size)
        self._copies.append(copies)

    def _check_sources(self, group: Group, source: Array, taken: Array) -> None:
        reading = group.active() & (taken > 0)
        for size in np.unique(taken[reading]):
            lanes = group.spread(reading & (taken == size))
            part = self._machine.group(lanes)
            inner = source if part is group else self._of(source, group, part)
            whole = int(size) & -int(size)  # a power of two that divides the size
            for offset in range(0, int(size), whole):
                at = inner + np.uint64(offset)
                self._machine.memory.locate(part, at, whole, False)
                if self._machine.memory.order is not None:
                    self._machine.memory.order.read(part, at, whole)

    def reads(self, addresses: Array, total: int) -> Lanes | None:
        """Which accesses of `total` bytes touch what copies under way may still read."""
        found: Lanes | None = None
        for copies in self._copies:
            used = copies.source[copies.taken > 0]
            if len(used):
                touched = Ranges(used, copies.size).touched(addresses, total)
                found = touched if found is None else found | touched
        return found

    @staticmethod
    def _of(values: Array, group: Group, part: Group) -> Array:
        """The rows of a part of a group."""
        found: Array = values[np.searchsorted(group.index, part.index)]
        return found

    def commit(self, group: Group) -> None:
        """`cp.async.commit_group`: closes the group of each thread's copies so far."""
        if group.mask is None:
            self._committed[group.rows] += 1
        else:
            self._committed += group.lanes

    def wait(self, group: Group, allowed: int) -> None:
        """`cp.async.wait_group`: delivers all but the last groups of each thread."""
        self._deliver(group, self._committed - allowed)

    def wait_all(self, group: Group) -> None:
        """`cp.async.wait_all`: delivers everything that these threads have issued."""
        self._deliver(group, self._committed + 1)

    def _deliver(self, group: Group, until: Array) -> None:
        """Delivers the copies of a group's threads that belong to groups before a number."""
        left = []
        for copies in self._copies:
            rows, lanes = copies.rows, copies.lanes
            done = copies.number < until[rows, lanes]
            if group.mask is not None or len(group) != self._machine.warps:
                done &= group.lanes[rows, lanes]
            if done.all():
                self._finish(copies)
                continue
            if done.any():
                self._finish(copies.part(done))
                copies = copies.part(~done)
            left.append(copies)
        self._copies = left

    def mark(self) -> int:
        """A mark that tells what has been issued from what will be."""
        self._issued += 1
        return self._issued

    def wait_all_before(self, group: Group, mark: int) -> None:
        """Delivers what a group's threads had issued when a mark was made."""
        later = [copies for copies in self._copies if copies.issued >= mark]
        self._copies = [copies for copies in self._copies if copies.issued < mark]
        self.wait_all(group)
        self._copies += later

    def _finish(self, copies: _Copies) -> None:
        """Makes copies visible: reads the source now, and not when they were issued."""
        machine, size = self._machine, copies.size
        data = np.zeros((len(copies.to), size), np.uint8)
        poison = None
        shadows = machine.memory.has_shadows
        whole = copies.taken == size
        data[whole] = machine.memory.bytes_at(copies.source[whole], size)
        if shadows:
            poison = np.zeros_like(data)
            poison[whole] = machine.memory.shadow_at(copies.source[whole], size)
        for place in np.flatnonzero(~whole & (copies.taken > 0)):
            part = int(copies.taken[place])
            at = copies.source[place : place + 1] + np.arange(part, dtype=np.uint64)
            data[place, :part] = machine.memory.bytes_at(at, 1)[:, 0]
            if poison is not None:
                poison[place, :part] = machine.memory.shadow_at(at, 1)[:, 0]
        machine.shared.deliver(copies.to, data, poison, size)
        if machine.races is not None:
            machine.races.write_as(copies.rows, copies.to, size)
