"""Calls of device functions: parameters are copied, and threads remember where they came from."""

from typing import TYPE_CHECKING

import numpy as np

from .decoder import STOP
from .errors import UndefinedBehaviorError
from .groups import Array, Group
from .memory import fault

if TYPE_CHECKING:
    from .machine import Machine

Pairs = list[tuple[str, str]]


class Calls:
    """For each function and thread: the step to return to, and what to copy then."""

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self._return_to: dict[str, Array] = {}
        self._results: dict[tuple[str, int], Pairs] = {}

    def reset(self) -> None:
        """No thread is in a function."""
        self._return_to.clear()

    def enter(
        self, name: str, group: Group, start: int, after: int, incoming: Pairs, outgoing: Pairs
    ) -> int:
        """Goes to a function.

        Args:
            name: of the function.
            group: who calls.
            start, after: steps where it begins, and where its callers go on.
            incoming, outgoing: (from, to) names of variables to copy now, and at the return.

        Raises:
            UndefinedBehaviorError: a thread is in the function already: registers are not saved.
        """
        shape = (self._machine.warps, 32)
        places = self._return_to.setdefault(name, np.full(shape, -1, np.int64))
        busy = places[group.rows] >= 0
        if (busy & group.active()).any():
            told = f"{name} calls itself; recursion is not simulated"
            raise fault(UndefinedBehaviorError, told, group, busy)
        places[group.lanes] = after
        self._results[name, after] = outgoing
        self._copy(group, incoming)
        return start

    def leave(self, name: str, group: Group) -> int:
        """Goes back; returns what the step of `ret` returns."""
        places = self._return_to[name]
        back = np.unique(places[group.lanes])
        for after in back.tolist():
            lanes = group.lanes & (places == after)
            part = group if len(back) == 1 else self._machine.group(lanes)
            self._copy(part, self._results[name, after])
            places[lanes] = -1
            if len(back) == 1:
                return int(after)
            self._machine.put(after, lanes)
        return STOP

    def _copy(self, group: Group, pairs: Pairs) -> None:
        frames = self._machine.program.frames
        memory = self._machine.frames
        assert memory.shadow is not None
        for origin, to in pairs:
            (start, size), (end, room) = frames[origin], frames[to]
            size = min(size, room)
            for part in (memory.memory, memory.shadow):
                table = part.data.reshape(self._machine.warps, 32, memory.size)
                table[group.lanes, end : end + size] = table[group.lanes, start : start + size]
