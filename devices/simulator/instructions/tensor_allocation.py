"""Allocation of tensor memory (PTX ISA 9.7.16.7), and what `tcgen05` instructions share."""

from collections.abc import Callable

import numpy as np

from ..decoder import STOP, Decoder, Step, instruction
from ..errors import TensorMemoryError, UndefinedBehaviorError
from ..groups import Array, Group
from ..machine import Machine
from ..memory import fault
from ..operands import Source
from ..tensor_memory import same_group, tensor_memory
from .data import require_defined
from .memory import shared_addresses


def cta_group(d: Decoder) -> int:
    """Takes `.cta_group::1` or `::2`."""
    return int(d.modifiers.one_of("cta_group::1", "cta_group::2")[-1])


def peers(machine: Machine, cta: int, group: int) -> list[int]:
    """The CTA, or both CTAs of its pair with the even one first, as indices in the wave.

    Raises:
        UndefinedBehaviorError: it is in no pair.
    """
    if group == 1:
        return [cta]
    size = machine.shape.cluster_size
    rank = cta % size
    if rank ^ 1 >= size:
        raise UndefinedBehaviorError("the CTA has no peer: a cluster of an even size is needed")
    even = cta - rank + (rank & ~1)
    return [even, even + 1]


def uniform(source: Source, group: Group, what: str) -> Array:
    """An operand that all threads of a warp must agree about: int64 [n], one for each warp."""
    values = np.asarray(require_defined(source, group, what))
    values = np.broadcast_to(values, (len(group), 32)).astype(np.int64)
    first = values[np.arange(len(group)), group.active().argmax(axis=1)]
    differs = (values != first[:, None]) & group.active()
    if differs.any():
        raise fault(UndefinedBehaviorError, f"threads disagree about {what}", group, differs)
    return first


# -- allocation -----------------------------------------------------------------------------------


class _Meeting:
    """Lets warps of both CTAs of a pair come together at an allocation instruction."""

    def __init__(self, d: Decoder, group: int) -> None:
        self._machine, self._group = d.machine, group
        self._waiting: dict[int, int] = {}
        d.machine.parts.append(self)

    def reset(self) -> None:
        """Nobody is there."""
        self._waiting.clear()

    def rows(self, row: int) -> list[int] | None:
        """The rows that can go on together, the even CTA's first; None if the peer lacks."""
        if self._group == 1:
            return [row]
        cta = int(self._machine.row_cta[row])
        pair = peers(self._machine, cta, 2)
        other = self._waiting.pop(pair[0] + pair[1] - cta, None)
        if other is None:
            self._waiting[cta] = row
            return None
        return sorted((row, other))


@instruction("tcgen05.alloc", together="warp")
def allocate(d: Decoder) -> Step:
    """PTX ISA 9.7.16.7.1: waits until there are enough columns, writes the address."""
    group = cta_group(d)
    d.modifiers.ignore("sync", "aligned", "b32")
    space = d.modifiers.one_of("shared::cta", "shared", default="")
    d.expect(2)
    addresses = shared_addresses(d, 0, space == "")
    count = d.source(1, "u32")
    machine, memory, pc = d.machine, tensor_memory(d.machine), d.pc
    meeting = _Meeting(d, group)

    def allocated(rows: list[int], columns: int) -> int | None:
        ctas = [int(machine.row_cta[row]) for row in rows]
        first = memory.free_columns(ctas, columns)
        if first is not None:
            for row, cta in zip(rows, ctas, strict=True):
                memory.allocate(cta, first, columns, pc, row)
        return first

    def step(threads: Group) -> int | None:
        counts = uniform(count, threads, "the number of columns")
        at = addresses(threads)
        for place, row in enumerate(threads.index):
            same_group(memory, group, int(row))
            _check_count(int(counts[place]), threads, place)
            if not memory.may_allocate(int(machine.row_cta[row])):
                told = "the CTA allocates tensor memory after tcgen05.relinquish_alloc_permit"
                raise fault(TensorMemoryError, told, threads, lanes_at(threads, place))
            pending[int(row)] = (int(counts[place]), int(at[place, 0]))
        return _settle(machine, pc, threads, meeting, finish)

    pending: dict[int, tuple[int, int]] = {}

    def finish(rows: list[int]) -> bool:
        columns = pending[rows[0]][0]
        first = allocated(rows, columns)
        if first is None:
            memory.waiting.append((pc, rows))
            return False
        for row in rows:
            _write_address(machine, row, pending[row][1], first)
        return True

    return step


def _settle(
    machine: Machine,
    pc: int,
    threads: Group,
    meeting: _Meeting,
    finish: Callable[[list[int]], bool],
) -> int | None:
    """Lets warps go on for which `finish` succeeds, alone or with the warp of the peer CTA."""
    done: list[int] = []
    for row in threads.index:
        rows = meeting.rows(int(row))
        if rows is not None and finish(rows):
            done += rows
    if sorted(done) == threads.index.tolist():
        return None
    machine.park(pc, threads.lanes)
    if done:
        lanes = np.zeros_like(machine.live)
        lanes[done] = machine.live[done]
        machine.put(pc + 1, lanes)
        machine.progress += 1
    return STOP


def lanes_at(threads: Group, place: int) -> Array:
    """bool [n, 32] of all threads of one warp of a group, for errors."""
    lanes = np.zeros((len(threads), 32), np.bool_)
    lanes[place] = True
    return lanes


def _check_count(count: int, threads: Group, place: int) -> None:
    if count not in (32, 64, 128, 256, 512):
        told = f"{count} columns: they are allocated in powers of two from 32 to 512"
        raise fault(TensorMemoryError, told, threads, lanes_at(threads, place))


def _write_address(machine: Machine, row: int, address: int, first: int) -> None:
    lanes = np.zeros_like(machine.live)
    lanes[row, 0] = True
    group = Group(lanes)
    addresses = np.full((1, 32), address, np.uint64)
    machine.shared.store(group, addresses, np.full((1, 32), first, np.uint32), None, 4)


@instruction("tcgen05.dealloc", together="warp")
def deallocate(d: Decoder) -> Step:
    """PTX ISA 9.7.16.7.1."""
    group = cta_group(d)
    d.modifiers.ignore("sync", "aligned", "b32")
    d.expect(2)
    address, count = d.source(0, "b32"), d.source(1, "u32")
    machine, memory, pc = d.machine, tensor_memory(d.machine), d.pc
    meeting = _Meeting(d, group)
    pending: dict[int, tuple[int, int]] = {}

    def finish(rows: list[int]) -> bool:
        for row in rows:
            at, columns = pending[row]
            if at >> 16:
                told = f"tensor memory is freed at lane {at >> 16}, and not at lane 0"
                error = TensorMemoryError(told)
                error.thread = (row, 0)
                raise error
            memory.deallocate(int(machine.row_cta[row]), at, columns, row)
        for where, parked in memory.waiting:
            lanes = np.zeros_like(machine.live)
            lanes[parked] = machine.live[parked]
            machine.put(where, lanes)
        memory.waiting.clear()
        return True

    def step(threads: Group) -> int | None:
        at = uniform(address, threads, "the address of tensor memory")
        counts = uniform(count, threads, "the number of columns")
        for place, row in enumerate(threads.index):
            same_group(memory, group, int(row))
            _check_count(int(counts[place]), threads, place)
            pending[int(row)] = (int(at[place]), int(counts[place]))
        return _settle(machine, pc, threads, meeting, finish)

    return step


@instruction("tcgen05.relinquish_alloc_permit", together="warp")
def relinquish(d: Decoder) -> Step:
    """PTX ISA 9.7.16.7.1: the CTA allocates no more."""
    group = cta_group(d)
    d.modifiers.ignore("sync", "aligned")
    d.expect(0)
    machine, memory = d.machine, tensor_memory(d.machine)

    def step(threads: Group) -> None:
        for row in threads.index:
            same_group(memory, group, int(row))
            memory.relinquish(int(machine.row_cta[row]))

    return step
