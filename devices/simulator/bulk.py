"""Bulk copies under way: those that complete at a barrier object, and those in bulk groups.

All of them happen as late as the PTX ISA allows (9.7.9.25): what they read must stay as it is, and
what they write is undefined, until a wait covers them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .errors import AsyncHazardError, BarrierError
from .groups import Array, Group
from .ranges import Thread, failure, shared_offset, threads_of
from .shared_memory import PIECE

if TYPE_CHECKING:
    from .machine import Machine


@dataclass(slots=True)
class _Arrival:
    """An operation that will complete at a barrier object.

    Attributes:
        thread, pc: who issued it, at which step.
        barrier: offset of the object.
        phase: of the object when it was issued.
        cta: CTA of the wave whose memory it writes.
        size: bytes that it completes.
        pieces: of shared memory that it writes.
        finish: makes its writes visible.
    """

    thread: Thread
    pc: int
    barrier: int
    phase: int
    cta: int
    size: int
    pieces: Array
    finish: Callable[[], None]


class Arrivals:
    """Operations that complete at barrier objects."""

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self._under_way: list[_Arrival] = []

    def reset(self) -> None:
        """Nothing is under way."""
        self._under_way.clear()

    def add(
        self,
        thread: Thread,
        pc: int,
        barrier: int,
        size: int,
        pieces: Array,
        finish: Callable[[], None],
    ) -> None:
        """Begins an operation.

        Args:
            thread, pc: who issues it, at which step.
            barrier: offset of the barrier object, in the CTA that is written to.
            size: bytes that it completes.
            pieces: of 16 bytes of shared memory that it writes.
            finish: makes its writes visible; called once, as late as possible.

        Raises:
            BarrierError: there is no barrier object.
        """
        machine = self._machine
        phase = machine.mbarriers.phase(barrier)
        if phase is None:
            told = f"the mbarrier at shared address {barrier % machine.shared.size:#x} is not "
            raise failure(BarrierError, told + "initialized", thread)
        machine.mbarriers.require_ready(barrier, thread.row, thread.lane)
        cta = barrier // machine.shared.size
        arrival = _Arrival(thread, pc, barrier, phase, cta, size, pieces, finish)
        self._under_way.append(arrival)
        machine.completions.add(lambda: self._complete(arrival), pc)

    def _complete(self, arrival: _Arrival) -> None:
        machine = self._machine
        self._under_way.remove(arrival)
        if not machine.live[machine.row_cta == arrival.cta].any():
            told = "an asynchronous operation writes shared memory of a CTA that has ended"
            raise failure(AsyncHazardError, told, arrival.thread)
        phase = machine.mbarriers.phase(arrival.barrier)
        if phase is not None and phase != arrival.phase:
            told = f"{arrival.size} bytes arrive in phase {phase} of their mbarrier, and phase "
            told += f"{arrival.phase}, in which the copy began, is over: it expected too few bytes"
            raise failure(BarrierError, told, arrival.thread)
        arrival.finish()
        clock = None
        if machine.races is not None and len(arrival.pieces):
            cluster = arrival.cta // machine.shape.cluster_size
            clock = machine.races.note_write(cluster, arrival.barrier, arrival.pieces)
        try:
            machine.mbarriers.complete_bytes(arrival.barrier, arrival.size, clock)
        except BarrierError as error:
            error.thread = (arrival.thread.row, arrival.thread.lane)
            raise

    def finish(self) -> None:
        """Checks, when all threads have ended, that nothing is under way.

        Raises:
            AsyncHazardError: an operation that nobody waited for.
        """
        for arrival in self._under_way:
            told = "the kernel ends while an asynchronous operation writes its shared memory"
            error = failure(AsyncHazardError, told, arrival.thread)
            error.where = self._machine.where(arrival.pc, error.thread)
            raise error


def barrier_offset(machine: "Machine", thread: Thread, address: int, *, cluster: bool) -> int:
    """Offset in shared memory of a barrier object by its address."""
    return shared_offset(machine, thread, address, 8, "the mbarrier", cluster=cluster)


@dataclass(slots=True)
class Outgoing:
    """An operation that reads shared memory and belongs to a bulk group.

    Attributes:
        thread, pc: who issued it, at which step.
        pieces: of shared memory that it reads.
        read: takes the data; called once, at the latest moment.
        write: makes its effects visible; called once, after `read`.
    """

    thread: Thread
    pc: int
    pieces: Array
    read: Callable[[], None]
    write: Callable[[], None]
    has_read: bool = False
    is_done: bool = False


class BulkGroups:
    """The bulk groups of each thread (PTX ISA 9.7.9.25.1.1)."""

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self._open: dict[Thread, list[Outgoing]] = {}
        self._groups: dict[Thread, list[list[Outgoing]]] = {}

    def reset(self) -> None:
        """There are no groups."""
        self._open.clear()
        self._groups.clear()

    def add(self, operation: Outgoing) -> None:
        """Begins an operation; what it reads is held already."""
        self._open.setdefault(operation.thread, []).append(operation)

    def commit(self, group: Group) -> None:
        """`cp.async.bulk.commit_group`."""
        for _, thread in threads_of(group):
            self._groups.setdefault(thread, []).append(self._open.pop(thread, []))

    def wait(self, group: Group, allowed: int, only_reads: bool) -> None:
        """`cp.async.bulk.wait_group`: all but a thread's last groups have ended, or read."""
        for _, thread in threads_of(group):
            groups = self._groups.get(thread, [])
            done = groups[: max(0, len(groups) - allowed)]
            for operation in (o for each in done for o in each):
                self._read(operation)
                if not only_reads:
                    self._write(operation)
            if not only_reads:
                del groups[: len(done)]
            self._machine.progress += bool(done)

    def finish(self) -> None:
        """Ends what is left when all threads have ended.

        Raises:
            AsyncHazardError: an operation still reads shared memory, or is in no group.
        """
        everything = [o for each in self._groups.values() for group in each for o in group]
        left = [o for each in self._open.values() for o in each]
        for operation in left + [o for o in everything if not o.has_read and len(o.pieces)]:
            told = "the kernel ends while a bulk copy reads its shared memory: no wait_group "
            error = failure(AsyncHazardError, told + "covers it", operation.thread)
            error.where = self._machine.where(operation.pc, error.thread)
            raise error
        for operation in everything:
            self._read(operation)
            self._write(operation)

    def _read(self, operation: Outgoing) -> None:
        if operation.has_read:
            return
        operation.has_read = True
        operation.read()
        if len(operation.pieces):
            self._machine.shared.let_go(operation.pieces)
            if self._machine.races is not None:
                self._machine.races.note_read(operation.thread.row, operation.pieces)

    def _write(self, operation: Outgoing) -> None:
        if not operation.is_done:
            operation.is_done = True
            operation.write()


def deliver_pieces(machine: "Machine", pieces: Array, data: Array, poison: Array | None) -> None:
    """Makes bytes [n, 16] visible in pieces of shared memory that a write has begun for."""
    flat = np.ascontiguousarray(data.reshape(-1, PIECE))
    bad = None if poison is None else np.ascontiguousarray(poison.reshape(-1, PIECE))
    machine.shared.deliver(pieces * PIECE, flat, bad, PIECE)
