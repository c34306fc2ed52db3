"""The tensor pipe: executes products and copies to tensor memory, as late as commits allow.

What one CTA (or, with `.cta_group::2`, one pair of CTAs) issues runs in the order of issue. It runs
when a commit behind it completes, and that is when nothing else can go on. Operands in shared
memory are read then; from the issue on, nobody may overwrite them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .errors import AsyncHazardError, BoundsError, SimulationError
from .groups import Array
from .shared_memory import PIECE
from .tensor_memory import Access, TensorMemory, tensor_memory

if TYPE_CHECKING:
    from .machine import Machine


@dataclass(slots=True, eq=False)
class Operation:
    """A product or copy that has been issued.

    Attributes:
        access: what it does to tensor memory.
        finish: makes its results visible.
    """

    access: Access
    finish: Callable[[], None]


class SharedOperand:
    """A matrix in shared memory that an operation reads, in pieces of 16 bytes.

    Args:
        machine: whose memory it is.
        access: the operation.
        pieces: index of each piece among all of the wave's shared memory, of any shape.
        different: the same, each once.
    """

    def __init__(self, machine: "Machine", access: Access, pieces: Array, different: Array) -> None:
        self._machine, self._row = machine, access.row
        self._pieces, self._different = pieces, different
        machine.shared.hold(different)

    def read(self) -> tuple[Array, Array | None]:
        """Its bytes [..., 16] and their undefined bits; from now on it may be overwritten."""
        shared = self._machine.shared
        assert shared.shadow is not None
        shared.let_go(self._different)
        races = self._machine.races
        if races is not None:
            races.note_read(self._row, self._different)
        data = shared.memory.data.reshape(-1, PIECE)[self._pieces]
        poison = shared.shadow.data.reshape(-1, PIECE)[self._pieces]
        return data, poison if poison.any() else None


class TensorPipe:
    """The tensor pipes of all CTAs of a wave."""

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self.memory: TensorMemory = tensor_memory(machine)
        machine.parts.append(self)
        self.reset()

    def reset(self) -> None:
        """Nothing is under way."""
        self._waiting: dict[int, list[Operation]] = {}

    def issue(self, pipe: int, operation: Operation) -> None:
        """Begins an operation on the pipe of a CTA, or of the even one of a pair."""
        self._waiting.setdefault(pipe, []).append(operation)

    def commit(self, pipe: int, row: int, lane: int, barriers: list[int], pc: int) -> None:
        """`tcgen05.commit`: arrives at barriers when all that a thread has issued is done.

        Args:
            pipe: as in `issue`.
            row, lane: the thread.
            barriers: offsets of barrier objects in shared memory.
            pc: the step of the instruction.
        """
        for offset in barriers:
            self._machine.mbarriers.require_ready(offset, row, lane)
        own = [
            place
            for place, operation in enumerate(self._waiting.get(pipe, ()))
            if (operation.access.row, operation.access.lane) == (row, lane)
        ]
        last = self._waiting[pipe][own[-1]] if own else None
        tick = self.memory.tick(row)

        def finish() -> None:
            if last is not None:
                self._run_until(pipe, last)
            self.memory.release(row, tick)
            for offset in barriers:
                self._machine.mbarriers.arrive_late(offset, 1, row)

        self._machine.completions.add(finish, pc)

    def _run_until(self, pipe: int, last: Operation) -> None:
        waiting = self._waiting[pipe]
        while last.access.pending:
            operation = waiting.pop(0)
            access = operation.access
            try:
                operation.finish()
            except SimulationError as error:
                if error.where is None:
                    error.where = self._machine.where(access.pc, (access.row, access.lane))
                raise
            self.memory.end(access)

    # -- operands in shared memory --------------------------------------------------------------

    def operand(self, access: Access, cta: int, window: Array, what: str) -> SharedOperand:
        """An operand at offsets of pieces of 16 bytes in the window of a CTA.

        Raises:
            BoundsError: pieces outside of the CTA's variables.
            AsyncHazardError: pieces that a copy may still write, or that were stored without a
                proxy fence.
            RaceError: pieces that others wrote, without a barrier in between.
        """
        shared = self._machine.shared
        starts = np.array([start for start, _ in shared.extents])
        ends = np.array([end for _, end in shared.extents])
        near = np.searchsorted(starts, window, "right") - 1
        outside = (near < 0) | (window + PIECE > ends[near])
        if outside.any():
            at = int(window[outside].flat[0])
            told = f"{access.what} reads {what} at shared address {at:#x}, which lies in no"
            raise self._fault(BoundsError, f"{told} variable of the CTA", access)
        pieces = (cta * shared.size + window) // PIECE
        if shared.in_flight and shared.pending.reshape(-1, PIECE)[pieces].any():
            told = f"{access.what} reads {what} while an asynchronous copy may still write it"
            raise self._fault(AsyncHazardError, told, access)
        different = np.unique(pieces)
        races = self._machine.races
        if races is not None:
            races.check_async(np.array([access.row]), access.lane, different, False)
        return SharedOperand(self._machine, access, pieces, different)

    @staticmethod
    def _fault(kind: type[SimulationError], told: str, access: Access) -> SimulationError:
        error = kind(told)
        error.thread = (access.row, access.lane)
        return error


def tensor_pipe(machine: "Machine") -> TensorPipe:
    """The tensor pipes of a machine, made when an instruction first needs them."""
    for part in machine.parts:
        if isinstance(part, TensorPipe):
            return part
    return TensorPipe(machine)
