"""The barrier of a cluster (PTX ISA "barrier.cluster")."""

from typing import TYPE_CHECKING

import numpy as np

from .clocks import Known
from .decoder import STOP
from .errors import BarrierError
from .groups import WARP, Array, Group, Lanes
from .memory import fault

if TYPE_CHECKING:
    from .machine import Machine


class ClusterBarrier:
    """Counts, for each cluster, the phases that all of its threads have arrived in."""

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        size = machine.shape.cluster_size
        self._cluster: Array = machine.row_cta // size
        self._count = -(-machine.shape.ctas // size)
        self.reset()

    def reset(self) -> None:
        """No thread has arrived."""
        shape = (self._machine.warps, WARP)
        self._arrived: Lanes = np.zeros(shape, np.bool_)
        self._in_phase: Array = np.full(shape, -1, np.int64)
        self._phase: Array = np.zeros(self._count, np.int64)
        self._waiting: list[tuple[int, Lanes]] = []
        # What those that have arrived know, and what the last phase has passed on, by cluster.
        self._gathered: dict[int, Known] = {}
        self._passed: dict[int, Known] = {}

    def arrive(self, group: Group, *, relaxed: bool = False) -> None:
        """Counts threads in.

        Args:
            group: who arrives.
            relaxed: whether the arrivals order nothing but what a fence covers.

        Raises:
            BarrierError: a thread arrives twice without waiting.
        """
        twice = (self._in_phase[group.rows] >= 0) & group.active()
        if twice.any():
            told = "a thread arrives at the barrier of its cluster again without waiting at it"
            raise fault(BarrierError, told, group, twice)
        self._release(group.index, relaxed)
        self._arrived |= group.lanes
        phases = np.broadcast_to(self._phase[self._cluster][:, None], self._in_phase.shape)
        self._in_phase[group.lanes] = phases[group.lanes]
        self.check()

    def wait(self, group: Group, pc: int) -> int | None:
        """Lets threads wait for the phase that they have arrived in.

        Raises:
            BarrierError: a thread waits without having arrived.
        """
        mine = self._in_phase[group.rows]
        idle = (mine < 0) & group.active()
        if idle.any():
            told = "a thread waits at the barrier of its cluster without having arrived"
            raise fault(BarrierError, told, group, idle)
        done = group.spread(mine < self._phase[self._cluster[group.rows]][:, None])
        self._in_phase[done] = -1
        self._acquire(done)
        rest = group.lanes & ~done
        if not rest.any():
            return None
        self._waiting.append((pc, rest))
        self._machine.park(pc, rest)
        if done.any():
            self._machine.put(pc + 1, done)
        return STOP

    def check(self) -> None:
        """Completes the phases that no living thread is missing in."""
        machine = self._machine
        lacking = (machine.live & ~self._arrived).any(axis=1)
        open_ = np.zeros(self._count, np.bool_)
        np.logical_or.at(open_, self._cluster[lacking], True)
        present = np.zeros(self._count, np.bool_)
        np.logical_or.at(present, self._cluster[self._arrived.any(axis=1)], True)
        complete = present & ~open_
        if not complete.any():
            return
        machine.progress += 1
        self._phase[complete] += 1
        rows = complete[self._cluster]
        for cluster in np.flatnonzero(complete).tolist():
            if cluster in self._gathered:
                self._passed[cluster] = self._gathered.pop(cluster)
        self._arrived[rows] = False
        waiting, self._waiting = self._waiting, []
        for pc, lanes in waiting:
            free = lanes & rows[:, None]
            if free.any():
                self._in_phase[free] = -1
                self._acquire(free)
                machine.put(pc + 1, free)
            if (lanes & ~free).any():
                self._waiting.append((pc, lanes & ~free))

    def _release(self, rows: Array, relaxed: bool) -> None:
        races = self._machine.races
        if races is None:
            return
        for cluster in np.unique(self._cluster[rows]).tolist():
            own = rows[self._cluster[rows] == cluster]
            known = races.release_relaxed(own, False) if relaxed else races.release(own)
            self._gathered[cluster] = known.joined(self._gathered.get(cluster))

    def _acquire(self, lanes: Lanes) -> None:
        races = self._machine.races
        if races is None:
            return
        rows = np.flatnonzero(lanes.any(axis=1))
        for cluster in np.unique(self._cluster[rows]).tolist():
            races.acquire(rows[self._cluster[rows] == cluster], self._passed[cluster])
