"""Stores and reductions that complete at a barrier of another CTA, and requests for its work.

PTX ISA 9.7.9.12 (`st.async`), 9.7.13.10 (`red.async`), 9.7.13.19-20 (`clusterlaunchcontrol`).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import reductions
from ..bulk import Arrivals, barrier_offset, deliver_pieces
from ..decoder import Decoder, Step, instruction
from ..errors import AsyncHazardError, PoisonError, UndefinedBehaviorError
from ..groups import Array, Group
from ..memory import fault
from ..operands import Source, Target
from ..parts import part_of
from ..ptx_syntax import TYPE_BITS, Register
from ..ranges import (
    Thread,
    begin_write,
    cta_of,
    failure,
    pieces_of,
    require_multiple,
    shared_offset,
    threads_of,
)
from ..shared_memory import PIECE
from .bulk_copy import MBARRIER, reader
from .data import require_defined

_STORED = ("b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64")
_ALL = "multicast::cluster::all"


class _Remote:
    """The address and the barrier object of an operation, in one CTA of the cluster."""

    def __init__(self, d: Decoder, size: int) -> None:
        self._machine, self._size = d.machine, size
        self._to = reader(d.address(0), "the address")
        self._barrier = reader(d.address(len(d.operands) - 1), "the address of the mbarrier")

    def bind(self, group: Group) -> Callable[[int, Thread], tuple[int, int]]:
        """A function (row, thread) -> (offset, barrier)."""
        machine, size = self._machine, self._size
        to, barrier = self._to(group), self._barrier(group)

        def place(row: int, thread: Thread) -> tuple[int, int]:
            address, at = to(row, thread), barrier(row, thread)
            require_multiple(thread, address & 0xFFFFFF, size, "the address")
            if cta_of(machine, thread, at) != cta_of(machine, thread, address):
                told = "the mbarrier is in another CTA than the address"
                raise failure(UndefinedBehaviorError, told, thread)
            offset = shared_offset(machine, thread, address, size, "the address", cluster=True)
            return offset, barrier_offset(machine, thread, at, cluster=True)

        return place


def _bytes_of(sources: list[Source], group: Group, size: int) -> Array:
    """uint8 [n, 32, bytes] of the values of operands."""
    shape = (len(group), 32)
    parts = [
        np.ascontiguousarray(np.broadcast_to(require_defined(s, group, "the operand"), shape))
        for s in sources
    ]
    return np.stack([p.view(np.uint8).reshape(*shape, -1) for p in parts], axis=2).reshape(
        *shape, size
    )


def _require_window(d: Decoder) -> None:
    """Refuses the generic forms, which H200 take for illegal instructions."""
    if not d.modifiers.flag("shared::cluster"):
        d.refuse(f"{d.opcode} by generic addresses is not simulated; name .shared::cluster")


@instruction("st.async")
def store(d: Decoder) -> Step:
    """PTX ISA 9.7.9.12."""
    modifiers = d.modifiers
    modifiers.ignore("weak")
    _require_window(d)
    modifiers.one_of(MBARRIER)
    count = int(modifiers.one_of("v2", "v4", default="v1")[1:])
    kind = modifiers.one_of(*_STORED)
    d.expect(3)
    values = d.sources(1, f"b{TYPE_BITS[kind]}")
    size = count * TYPE_BITS[kind] // 8
    if len(values) != count or size > PIECE:
        d.refuse("st.async stores one, two or four values, of up to 16 bytes together")
    remote, machine, pc = _Remote(d, size), d.machine, d.pc
    arrivals = part_of(machine, Arrivals)

    def step(group: Group) -> None:
        place, data = remote.bind(group), _bytes_of(values, group, size)
        for row, thread in threads_of(group):
            offset, barrier = place(row, thread)
            busy = machine.shared.pending[offset : offset + size].any()
            if busy or machine.shared.held[offset // PIECE]:
                told = "an asynchronous store to shared memory that another operation uses"
                raise failure(AsyncHazardError, f"{told}: no wait covers it", thread)
            at = np.array([offset])
            machine.shared.mark_pending(at, size)
            finish = _delivery(machine, at, data[row, thread.lane][None].copy(), size)
            arrivals.add(thread, pc, barrier, size, np.zeros(0, np.int64), finish)

    return step


def _delivery(machine: Any, at: Array, data: Array, size: int) -> Callable[[], None]:
    return lambda: machine.shared.deliver(at, data, None, size)


@instruction("red.async")
def reduction(d: Decoder) -> Step:
    """PTX ISA 9.7.13.10."""
    modifiers = d.modifiers
    modifiers.ignore("relaxed", "cluster")
    _require_window(d)
    modifiers.one_of(MBARRIER)
    operation = modifiers.one_of(*reductions.OPERATIONS)
    kind = modifiers.one_of(*reductions.INTEGERS)
    d.expect(3)
    if not reductions.allowed(operation, kind) or (kind, operation) in (
        *(("u64", "min"), ("u64", "max"), ("b64", "and"), ("b64", "or"), ("b64", "xor")),
        *(("s64", "min"), ("s64", "max")),
    ):
        d.refuse(f"red.async has no .{operation}.{kind}")
    values = d.sources(1, f"b{TYPE_BITS[kind]}")
    size = TYPE_BITS[kind] // 8
    remote, machine, pc = _Remote(d, size), d.machine, d.pc
    arrivals = part_of(machine, Arrivals)

    def step(group: Group) -> None:
        place, data = remote.bind(group), _bytes_of(values, group, size)
        shared = machine.shared
        assert shared.shadow is not None
        for row, thread in threads_of(group):
            offset, barrier = place(row, thread)
            if shared.shadow.data[offset : offset + size].any():
                raise failure(PoisonError, "what is reduced into is undefined", thread)
            new = data[row, thread.lane].copy()

            def finish(offset: int = offset, new: Array = new) -> None:
                cell = shared.memory.data[offset : offset + size]
                cell[:] = reductions.reduced(operation, kind, cell.copy(), new)

            arrivals.add(thread, pc, barrier, size, np.zeros(0, np.int64), finish)

    return step


# -- work of clusters that have not been launched -------------------------------------------------


@instruction("clusterlaunchcontrol.try_cancel")
def try_cancel(d: Decoder) -> Step:
    """PTX ISA 9.7.13.19: always fails, which it may: all clusters are under way here."""
    d.modifiers.one_of("async")
    d.modifiers.ignore("shared::cta")
    d.modifiers.one_of(MBARRIER)
    everywhere = d.modifiers.flag(_ALL)
    d.modifiers.one_of("b128")
    d.expect(2)
    to, barrier = reader(d.address(0), "the address"), reader(d.address(1), "the mbarrier")
    machine, pc = d.machine, d.pc
    arrivals = part_of(machine, Arrivals)

    def step(group: Group) -> None:
        places, barriers = to(group), barrier(group)
        for row, thread in threads_of(group):
            address, at = places(row, thread), barriers(row, thread)
            require_multiple(thread, address & 0xFFFFFF, PIECE, "the address")
            ranks = range(machine.shape.cluster_size) if everywhere else [address >> 24]
            for rank in ranks:
                target, object_ = ((rank << 24 | a & 0xFFFFFF) for a in (address, at))
                offset = shared_offset(
                    machine, thread, target, PIECE, "the response", cluster=everywhere
                )
                pieces = pieces_of(offset, PIECE)
                begin_write(machine, thread, pieces)
                place = barrier_offset(machine, thread, object_, cluster=everywhere)
                arrivals.add(thread, pc, place, PIECE, pieces, _refusal(machine, pieces))

    return step


def _refusal(machine: Any, pieces: Array) -> Callable[[], None]:
    return lambda: deliver_pieces(machine, pieces, np.zeros((1, PIECE), np.uint8), None)


@instruction("clusterlaunchcontrol.query_cancel.is_canceled")
def is_canceled(d: Decoder) -> Step:
    """PTX ISA 9.7.13.20."""
    d.modifiers.one_of("pred")
    d.modifiers.one_of("b128")
    d.expect(2)
    target: Target = d.target(0, "pred")
    response = d.operands[1]
    if not isinstance(response, Register) or d.machine.register(response).bits != 128:
        d.refuse("the response is in a register of 128 bits")
    file = d.machine.register(response)

    def step(group: Group) -> None:
        if file.poison is not None:
            undefined = file.poison[group.rows].any(axis=2) & group.active()
            if undefined.any():
                raise fault(PoisonError, "the response is undefined", group, undefined)
        target.put(group, np.False_)

    return step


@instruction(
    "clusterlaunchcontrol.query_cancel.get_first_ctaid",
    *(f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{axis}" for axis in "xyz"),
)
def first_cta(d: Decoder) -> Step:
    """PTX ISA 9.7.13.20: undefined for a request that has failed, as all do."""
    one = "::" in d.opcode
    if not one:
        d.modifiers.one_of("v4")
    d.modifiers.one_of("b32")
    d.modifiers.one_of("b128")
    d.expect(2)
    targets = d.targets(0, "b32")
    if len(targets) != (1 if one else 4):
        d.refuse("get_first_ctaid has four results, or one of ::x, ::y or ::z")

    def step(group: Group) -> None:
        undefined = np.full((len(group), 32), 0xFFFFFFFF, np.uint32)
        for target in targets:
            target.put(group, np.uint32(0), undefined)

    return step
