"""Where threads of a warp wait for each other: instructions that they execute together.

Aligned ones are executed together at one place. Of the others the PTX ISA asks that all threads
execute the same instruction with the same qualifiers (and mask), and not that they do so at the
same place: threads in both arms of a branch may exchange values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import DivergenceError, UndefinedBehaviorError
from .groups import WARP, Array, Group, Lanes
from .memory import fault
from .operands import Source, Target

if TYPE_CHECKING:
    from .machine import Machine


def bits_of_lanes(lanes: Lanes) -> Array:
    """uint32 [n] with a bit for each thread that is set in bool [n, 32]."""
    packed = np.packbits(lanes, axis=1, bitorder="little")
    return np.ascontiguousarray(packed).view("<u4")[:, 0]


Waiting = tuple[int, Lanes, Target | None]
"""Threads that wait at a step, and what gets a result for them."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """An instruction that threads may execute together from different places.

    Attributes:
        pc: its step.
        sources, targets: its operands.
        run: does it for a group, with masks uint32 [n, 32], of operands; where threads come from
            several places it is told who comes from where. Returns what a step does.
    """

    pc: int
    sources: Sequence[Source]
    targets: Sequence[Target]
    run: Callable[
        [Group, Any, Sequence[Source], Sequence[Target], Sequence[Waiting]],
        int | None,
    ]


class _Everyone:
    """An operand, each thread's at its own place; used as a `Source` or `Target`."""

    def __init__(self, machine: "Machine", operands: list[tuple[Lanes, Any]]) -> None:
        self._machine, self._operands = machine, operands
        # What is defined for some may be undefined for others: never taken for a constant.
        self.register: Any = None

    def read(self, group: Group) -> Array:
        found: Any = None
        for lanes, source in self._operands:
            values = np.broadcast_to(source.read(group), (len(group), WARP))
            found = values if found is None else np.where(lanes[group.rows], values, found)
        return found

    def poison(self, group: Group) -> Array | None:
        found: Any = None
        for lanes, source in self._operands:
            bad = source.poison(self._machine.group(lanes & group.lanes))
            if bad is not None:
                own = self._machine.group(lanes & group.lanes)
                found = np.zeros((len(group), WARP), bad.dtype) if found is None else found
                rows = np.searchsorted(group.index, own.index)
                found[rows] = np.where(own.active(), bad, found[rows])
        return found

    def put(self, group: Group, values: Any, poison: Array | None = None) -> None:
        shape = (len(group), WARP)
        for lanes, target in self._operands:
            own = self._machine.group(lanes & group.lanes)
            rows = np.searchsorted(group.index, own.index)
            bad = None if poison is None else np.broadcast_to(poison, shape)[rows]
            target.put(own, np.broadcast_to(values, shape)[rows], bad)


@dataclass(slots=True)
class _Meeting:
    """Threads that wait for others: their steps, and masks (None for the whole warp)."""

    lanes: Lanes
    masks: Array | None
    at: dict[int, Lanes]
    exchanges: dict[int, Exchange]


class Meetings:
    """Threads that wait at a step for others of their warp.

    Attributes:
        others: further sources of waiting threads, such as those of warpgroups.
    """

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self._stalled: dict[int | str, _Meeting] = {}
        self.others: list[Callable[[], Lanes]] = []

    def reset(self) -> None:
        """Nobody waits."""
        self._stalled.clear()

    def waiting(self) -> Lanes:
        """All threads that wait for others of their warp."""
        found = np.zeros_like(self._machine.live)
        for meeting in self._stalled.values():
            found |= meeting.lanes
        for more in self.others:
            found |= more()
        return found

    def check(self) -> None:
        """Lets those go on who waited for threads that have exited now."""
        for key in list(self._stalled):
            self._free_stalled(key)

    def whole_warps(
        self, group: Group, pc: int, whole: bool, opcode: str, exchange: Exchange | None = None
    ) -> bool:
        """Whether every warp of a group is complete at a step; if not, its threads wait there.

        Args:
            group: who has come.
            pc: the step.
            whole: whether no thread may have exited.
            opcode: of the instruction.
            exchange: how it is executed from several places; None if it is from one only.

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
        self._stall(group, pc, None, opcode, exchange)
        return False

    def members(self, group: Group, masks: Array, opcode: str, exchange: Exchange) -> bool:
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
        self._stall(group, exchange.pc, everyone, opcode, exchange)
        return False

    def _stall(
        self, group: Group, pc: int, masks: Array | None, opcode: str, exchange: Exchange | None
    ) -> None:
        """Adds threads to those that wait for others of their warp."""
        key = pc if exchange is None else opcode
        meeting = self._stalled.get(key)
        if meeting is None:
            none = np.zeros_like(group.lanes)
            meeting = self._stalled[key] = _Meeting(none, masks, {}, {})
        meeting.lanes = meeting.lanes | group.lanes
        meeting.at[pc] = meeting.at.get(pc, False) | group.lanes
        if exchange is not None:
            meeting.exchanges[pc] = exchange
        if masks is not None and meeting.masks is not None:
            meeting.masks = np.where(group.lanes, masks, meeting.masks)
        self._machine.park(pc, group.lanes)
        self._free_stalled(key)

    def _free_stalled(self, key: int | str) -> None:
        """Lets those go on that are complete now."""
        meeting = self._stalled[key]
        lanes, live = meeting.lanes, self._machine.live
        if meeting.masks is None:
            free = lanes & (lanes == live).all(axis=1)[:, None]
        else:
            lacking = meeting.masks & (bits_of_lanes(live) & ~bits_of_lanes(lanes))[:, None]
            free = lanes & (lacking == 0)
        if not free.any():
            return
        meeting.lanes = lanes & ~free
        leaving = {pc: own & free for pc, own in meeting.at.items() if (own & free).any()}
        meeting.at = {pc: own & ~free for pc, own in meeting.at.items() if (own & ~free).any()}
        if not meeting.at:
            del self._stalled[key]
        places = np.sum([own.any(axis=1) for own in leaving.values()], axis=0)
        apart = (places > 1)[:, None]
        for pc, own in leaving.items():
            if (own & ~apart).any():
                self._machine.put(pc, own & ~apart)
        if apart.any():
            parts = {pc: own & apart for pc, own in leaving.items() if (own & apart).any()}
            self._perform(parts, meeting)

    def _perform(self, parts: dict[int, Lanes], meeting: _Meeting) -> None:
        """Executes an instruction for threads that have come to it at different places."""
        machine = self._machine
        group = machine.group(np.logical_or.reduce(list(parts.values())))
        taking = [(own, meeting.exchanges[pc]) for pc, own in parts.items()]
        first = taking[0][1]

        def everyone(select: Callable[[Exchange], Sequence[Any]]) -> list[Any]:
            counts = range(len(select(first)))
            return [_Everyone(machine, [(own, select(e)[i]) for own, e in taking]) for i in counts]

        sources, targets = everyone(lambda e: e.sources), everyone(lambda e: e.targets)
        waiting = [(e.pc, own, e.targets[0] if e.targets else None) for own, e in taking]
        masks = None if meeting.masks is None else meeting.masks[group.rows]
        if first.run(group, masks, sources, targets, waiting) is None:
            for pc, own in parts.items():
                machine.put(pc + 1, own)
