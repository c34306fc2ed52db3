"""Finds kernels that never end although threads run: all of them poll what nobody will write.

A warp whose registers and places are what they were before repeats itself for ever, as long as
memory stays as it is and nobody else gives it anything. If every warp that runs does so, and
nothing is in flight, memory will stay as it is. A loop that counts, or looks at a clock, does not
come back to the same state, so it is no such loop.
"""

from typing import TYPE_CHECKING

import numpy as np

from .groups import WARP, Array, Group, Lanes

if TYPE_CHECKING:
    from .machine import Machine
    from .registers import RegisterFile

_QUIET = 64
"""How often threads are chosen without a change of memory before their state is looked at."""


class PollWatch:
    """Compares the state of warps with an earlier one while nothing changes memory.

    Their distance doubles (Brent), since nobody knows how long a round of polling is.

    Attributes:
        clocks_read: how often threads have read a clock: they may wait for it, and not for memory.
        polled_by: the step of the last load in a loop of each thread; -1 for none.
        polled: the address that it has read, in the space of the load.
    """

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        shape = (machine.warps, WARP)
        self.clocks_read = 0
        self.polled_by: Array = np.full(shape, -1, np.int64)
        self.polled: Array = np.zeros(shape, np.uint64)
        self.reset()

    def reset(self) -> None:
        """Nothing has been looked at."""
        self.polled_by[:] = -1
        self._before: tuple[int, ...] = ()
        self._forget()

    @property
    def active(self) -> bool:
        """Whether nothing has changed for some time."""
        return self._rounds >= _QUIET

    def note(self, group: Group, pc: int, addresses: Array) -> None:
        """Threads have loaded something in a loop."""
        if self.active:
            self.polled_by[group.lanes] = pc
            self.polled[group.lanes] = addresses[group.active()]

    def ran(self, lanes: Lanes) -> None:
        """Threads begin a basic block."""
        if self._snapshot:
            self._moved |= lanes

    def finds_no_end(self) -> bool:
        """Whether all threads that can run repeat themselves; called before some are chosen."""
        machine = self._machine
        now = machine.changes()
        if now != self._before:
            self._before = now
            self._forget()
            return False
        self._rounds += 1
        if not self.active or machine.completions.any():
            return False
        if self._rounds >= self._next:
            self._take_snapshot()
            return False
        return self._compare()

    def _forget(self) -> None:
        self._rounds, self._next = 0, _QUIET
        self._snapshot: list[tuple[RegisterFile, Array]] = []

    def _take_snapshot(self) -> None:
        machine = self._machine
        self._next = 2 * self._rounds
        self._snapshot = [(file, file.data.copy()) for file in machine.register_files()]
        self._places, _ = self._where()
        self._meetings = machine.barriers.meetings
        self._moved: Lanes = np.zeros_like(machine.live)
        self._repeated: Array = np.zeros(machine.warps, np.bool_)

    def _where(self) -> tuple[Array, Lanes]:
        """The step of each thread, below zero where it waits, and which threads can run."""
        machine = self._machine
        places = -1 - machine.parked_at
        ready = np.zeros_like(machine.live)
        for pc, lanes in machine.schedule.ready.items():
            places[lanes] = pc
            ready |= lanes
        return places, ready

    def _compare(self) -> bool:
        places, ready = self._where()
        if self._meetings != self._machine.barriers.meetings:
            # Warps that meet depend on each other: all of them must repeat at the same time.
            self._repeated[:] = False
        running = ready.any(axis=1)
        rows = np.flatnonzero(running & ~self._repeated & ~(ready & ~self._moved).any(axis=1))
        rows = rows[(places[rows] == self._places[rows]).all(axis=1)]
        for index, (file, old) in enumerate(self._snapshot):
            if not len(rows):
                # What differs now will probably differ the next time: it is compared first.
                self._snapshot.insert(0, self._snapshot.pop(max(0, index - 1)))
                return False
            same = file.data[rows] == old[rows]
            rows = rows[same.reshape(len(rows), -1).all(axis=1)]
        self._repeated[rows] = True
        return bool(self._repeated[running].all())
