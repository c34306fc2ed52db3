"""Where threads of a warp wait for each other: instructions that they execute together."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .errors import DivergenceError, UndefinedBehaviorError
from .groups import WARP, Array, Group, Lanes
from .memory import fault

if TYPE_CHECKING:
    from .machine import Machine


def bits_of_lanes(lanes: Lanes) -> Array:
    """uint32 [n] with a bit for each thread that is set in bool [n, 32]."""
    packed = np.packbits(lanes, axis=1, bitorder="little")
    return np.ascontiguousarray(packed).view("<u4")[:, 0]


class Meetings:
    """Threads that wait at a step for others of their warp.

    Attributes:
        others: further sources of waiting threads, such as those of warpgroups.
    """

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self._stalled: dict[int, tuple[Lanes, Array | None]] = {}
        self.others: list[Callable[[], Lanes]] = []

    def reset(self) -> None:
        """Nobody waits."""
        self._stalled.clear()

    def waiting(self) -> Lanes:
        """All threads that wait for others of their warp."""
        found = np.zeros_like(self._machine.live)
        for lanes, _ in self._stalled.values():
            found |= lanes
        for more in self.others:
            found |= more()
        return found

    def check(self) -> None:
        """Lets those go on who waited for threads that have exited now."""
        for pc in list(self._stalled):
            self._free_stalled(pc)

    def whole_warps(self, group: Group, pc: int, whole: bool, opcode: str) -> bool:
        """Whether every warp of a group is complete at a step; if not, its threads wait there.

        Raises:
            DivergenceError: an exited thread can never come, and must.
        """
        assert group.mask is not None
        living = self._machine.live[group.rows]
        if whole and not living.all():
            told = f"{opcode} needs all 32 threads of a warp, some of which have exited"
            raise fault(DivergenceError, told, group, group.mask)
        if (group.mask == living).all():
            return True
        self._stall(group, pc, None)
        return False

    def members(self, group: Group, pc: int, masks: Array) -> bool:
        """`whole_warps` for the threads that each one names by a uint32 mask [n, 32], itself too.

        Raises:
            UndefinedBehaviorError: a thread is not in its own mask.
        """
        active = group.active()
        outside = (masks >> np.arange(WARP, dtype=np.uint32) & 1) == 0
        if (outside & active).any():
            told = "a thread executes this with a mask of which it is no member"
            raise fault(UndefinedBehaviorError, told, group, outside)
        present = bits_of_lanes(active)
        wanted = masks & bits_of_lanes(self._machine.live[group.rows])[:, None]
        if not ((wanted & ~present[:, None]) != 0)[active].any():
            return True
        everyone = np.zeros(self._machine.live.shape, np.uint32)
        everyone[group.rows] = masks
        self._stall(group, pc, everyone)
        return False

    def _stall(self, group: Group, pc: int, masks: Array | None) -> None:
        """Adds threads to those that wait for others of their warp at a step."""
        lanes, known = self._stalled.pop(pc, (None, None))
        together = group.lanes if lanes is None else lanes | group.lanes
        if masks is not None and known is not None:
            masks = np.where(group.lanes, masks, known)
        self._stalled[pc] = (together, masks)
        self._machine.park(pc, together)
        self._free_stalled(pc)

    def _free_stalled(self, pc: int) -> None:
        """Lets those go on that are complete now."""
        lanes, masks = self._stalled[pc]
        if masks is None:
            free = lanes & (lanes == self._machine.live).all(axis=1)[:, None]
        else:
            lacking = masks & (bits_of_lanes(self._machine.live) & ~bits_of_lanes(lanes))[:, None]
            free = lanes & (lacking == 0)
        if not free.any():
            return
        self._machine.put(pc, free)
        if (lanes & ~free).any():
            self._stalled[pc] = (lanes & ~free, masks)
        else:
            del self._stalled[pc]
