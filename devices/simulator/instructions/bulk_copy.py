"""Bulk copies and reductions without a tensor map (PTX ISA 9.7.9.25.5), and their groups."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import reductions
from ..bulk import Arrivals, BulkGroups, Outgoing, barrier_offset, deliver_pieces
from ..decoder import Decoder, Step, instruction
from ..errors import PoisonError, UndefinedBehaviorError
from ..groups import Array, Group
from ..machine import Machine
from ..operands import Source
from ..parts import part_of
from ..ptx_syntax import Integer, Operand
from ..ranges import (
    Thread,
    begin_global_read,
    begin_global_write,
    begin_read,
    begin_write,
    check_global,
    cta_of,
    failure,
    global_bytes,
    pieces_of,
    put_global,
    require_multiple,
    shared_bytes,
    shared_offset,
    threads_of,
    undefined_in,
)
from ..ranges_of_bytes import Ranges
from ..shared_memory import PIECE
from .data import require_defined

MBARRIER = "mbarrier::complete_tx::bytes"
_REDUCED = (*reductions.INTEGERS, *reductions.FLOATS)


def reader(source: Source, what: str) -> Callable[[Group], Callable[[int, Thread], int]]:
    """Makes functions of a group that tell an operand's value in one of its threads."""

    def of_group(group: Group) -> Callable[[int, Thread], int]:
        values = np.broadcast_to(require_defined(source, group, what), (len(group), 32))
        return lambda row, thread: int(values[row, thread.lane])

    return of_group


def take_hint(d: Decoder) -> list[Operand]:
    """The operands without the cache policy, which means nothing here."""
    operands = list(d.operands)
    if d.modifiers.flag("L2::cache_hint"):
        d.source(operands.pop(), "b64")
    return operands


def take_masked(d: Decoder, operands: list[Operand], flag: str) -> Source | None:
    """The 16-bit mask that is the last operand if a modifier is there."""
    return d.source(operands.pop(), "u16") if d.modifiers.flag(flag) else None


class Targets:
    """Where a copy into shared memory goes: one CTA, or those of a multicast.

    Args:
        d: the decoder of an instruction.
        to, barrier: the operands of the destination and of the barrier object.
        mask: the operand with the CTAs of a multicast.
        cluster: whether other CTAs may be named.
        pair: whether the barrier may be in the other CTA of the destination's pair
            (`.cta_group::2`); that of a multicast is in the CTAs of its own parity.
    """

    def __init__(
        self,
        d: Decoder,
        to: Operand,
        barrier: Operand,
        mask: Source | None,
        cluster: bool,
        pair: bool = False,
    ) -> None:
        self._machine, self._pc, self._cluster = d.machine, d.pc, cluster
        self._pair = pair
        self._to = reader(d.address(to), "the destination")
        self._barrier = reader(d.address(barrier), "the address of the mbarrier")
        self._mask = None if mask is None else reader(mask, "the mask of CTAs")

    def bind(self, group: Group) -> Callable[[int, Thread, int, int], list[tuple[int, int]]]:
        """A function (row, thread, size, alignment) -> (destination, barrier) for each CTA."""
        machine = self._machine
        to, barrier = self._to(group), self._barrier(group)
        mask = None if self._mask is None else self._mask(group)

        def places(row: int, thread: Thread, size: int, align: int) -> list[tuple[int, int]]:
            address, at = to(row, thread), barrier(row, thread)
            require_multiple(thread, address & 0xFFFFFF, align, "the destination's address")
            require_multiple(thread, at & 0xFFFFFF, 8, "the address of the mbarrier")
            if mask is None:
                ranks = [address >> 24]
                apart = cta_of(machine, thread, at), cta_of(machine, thread, address)
                if apart[0] != apart[1] and not (self._pair and apart[0] ^ apart[1] == 1):
                    told = "the mbarrier is in another CTA than the destination"
                    told += ", and not in that of its pair" if self._pair else ""
                    raise failure(UndefinedBehaviorError, told, thread)
            else:
                bits = mask(row, thread)
                ranks = [rank for rank in range(16) if bits >> rank & 1]
                if not ranks or ranks[-1] >= machine.shape.cluster_size:
                    told = f"the mask {bits:#x} names no CTA, or one that the cluster lacks"
                    raise failure(UndefinedBehaviorError, told, thread)
            found = []
            for rank in ranks:
                base = rank << 24
                home = (rank & ~1 | at >> 24 & 1) << 24 if self._pair else base
                remote = self._cluster or mask is not None
                offset = shared_offset(
                    machine,
                    thread,
                    base | (address & 0xFFFFFF),
                    size,
                    "the destination",
                    cluster=remote,
                )
                found.append(
                    (
                        offset,
                        barrier_offset(machine, thread, home | (at & 0xFFFFFF), cluster=remote),
                    )
                )
            return found

        return places


# -- copies ---------------------------------------------------------------------------------------


@instruction("cp.async.bulk")
def bulk_copy(d: Decoder) -> Step:
    """PTX ISA 9.7.9.25.5.2."""
    to = d.modifiers.one_of("shared::cluster", "shared::cta", "global")
    source = d.modifiers.one_of("global", "shared::cta")
    if to == "global":
        return _to_global(d, "", "")
    d.modifiers.one_of(MBARRIER)
    operands = take_hint(d)
    mask = take_masked(d, operands, "multicast::cluster")
    if len(operands) != 4 or (mask is not None and (to, source) != ("shared::cluster", "global")):
        d.refuse("cp.async.bulk into shared memory has two addresses, a size and an mbarrier")
    if source == "shared::cta":
        return _between_ctas(d, operands, "", "")
    targets = Targets(d, operands[0], operands[3], mask, to == "shared::cluster")
    address = reader(d.address(operands[1]), "the source")
    size_of = reader(d.source(operands[2], "u32"), "the size")
    machine, pc = d.machine, d.pc
    arrivals = part_of(machine, Arrivals)

    def step(group: Group) -> None:
        places, sources, sizes = targets.bind(group), address(group), size_of(group)
        for row, thread in threads_of(group):
            size, start = sizes(row, thread), sources(row, thread)
            require_multiple(thread, size, PIECE, "the size")
            require_multiple(thread, start, PIECE, "the source's address")
            check_global(machine, thread, start, size, False)
            for offset, barrier in places(row, thread, size, PIECE):
                pieces = pieces_of(offset, size)
                begin_write(machine, thread, pieces)
                finish = _load(machine, thread, pieces, start, size)
                arrivals.add(thread, pc, barrier, size, pieces, finish)

    return step


def _load(
    machine: Machine, thread: Thread, pieces: Array, start: int, size: int
) -> Callable[[], None]:
    end = begin_global_read(machine, thread, Ranges(np.array([start]), size))

    def finish() -> None:
        end()
        data, poison = global_bytes(machine, start, size)
        deliver_pieces(machine, pieces, data, poison)

    return finish


def _between_ctas(d: Decoder, operands: list[Operand], operation: str, kind: str) -> Step:
    """From shared memory to that of a CTA of the cluster, copied or combined with what is there."""
    targets = Targets(d, operands[0], operands[3], None, True)
    address = reader(d.address(operands[1]), "the source")
    size_of = reader(d.source(operands[2], "u32"), "the size")
    machine, pc = d.machine, d.pc
    arrivals = part_of(machine, Arrivals)

    def begin(row: int, thread: Thread, size: int, start: int, places: Any) -> None:
        require_multiple(thread, size, PIECE, "the size")
        require_multiple(thread, start & 0xFFFFFF, PIECE, "the source's address")
        offset = shared_offset(machine, thread, start, size, "the source", cluster=False)
        source = pieces_of(offset, size)
        begin_read(machine, thread, np.array([thread.row]), source)
        for place, barrier in places(row, thread, size, PIECE):
            pieces = pieces_of(place, size)
            if operation:
                _require_defined(machine, thread, pieces, "what is reduced into")
            else:
                begin_write(machine, thread, pieces)

            def finish(pieces: Array = pieces) -> None:
                data = shared_bytes(machine, source)
                poison = undefined_in(machine, source)
                machine.shared.let_go(source)
                if machine.races is not None:
                    machine.races.note_read(thread.row, source)
                if not operation:
                    deliver_pieces(machine, pieces, data, poison)
                    return
                old = shared_bytes(machine, pieces).reshape(-1)
                new = reductions.reduced(operation, kind, old, data.reshape(-1))
                machine.shared.memory.data.reshape(-1, PIECE)[pieces] = new.reshape(-1, PIECE)

            arrivals.add(thread, pc, barrier, size, pieces, finish)

    def step(group: Group) -> None:
        places, sources, sizes = targets.bind(group), address(group), size_of(group)
        for row, thread in threads_of(group):
            begin(row, thread, sizes(row, thread), sources(row, thread), places)

    return step


def _require_defined(machine: Machine, thread: Thread, pieces: Array, what: str) -> None:
    if undefined_in(machine, pieces).any():
        raise failure(PoisonError, f"{what} is undefined", thread)


def _to_global(d: Decoder, operation: str, kind: str) -> Step:
    """From shared to global memory, in a bulk group."""
    d.modifiers.one_of("bulk_group")
    operands = take_hint(d)
    mask = take_masked(d, operands, "cp_mask")
    if len(operands) != 3:
        d.refuse(f"{d.opcode} into global memory has two addresses and a size")
    destination = reader(d.address(operands[0]), "the destination")
    address = reader(d.address(operands[1]), "the source")
    size_of = reader(d.source(operands[2], "u32"), "the size")
    mask_of = None if mask is None else reader(mask, "the mask of bytes")
    machine, pc = d.machine, d.pc
    groups = part_of(machine, BulkGroups)

    def step(group: Group) -> None:
        to, sources, sizes = destination(group), address(group), size_of(group)
        masks = None if mask_of is None else mask_of(group)
        for row, thread in threads_of(group):
            size, start, end = sizes(row, thread), sources(row, thread), to(row, thread)
            require_multiple(thread, size, PIECE, "the size")
            require_multiple(thread, start & 0xFFFFFF, PIECE, "the source's address")
            require_multiple(thread, end, PIECE, "the destination's address")
            check_global(machine, thread, end, size, True)
            offset = shared_offset(machine, thread, start, size, "the source", cluster=False)
            pieces = pieces_of(offset, size)
            begin_read(machine, thread, np.array([thread.row]), pieces)
            kept = np.ones(PIECE, np.bool_)
            if masks is not None:
                kept = (masks(row, thread) >> np.arange(PIECE) & 1).astype(np.bool_)
            if undefined_in(machine, pieces)[:, kept].any():
                told = "an undefined value is copied to global memory"
                raise failure(PoisonError, told, thread)
            groups.add(_store(machine, thread, pc, pieces, end, kept, operation, kind))

    return step


def _store(
    machine: Machine,
    thread: Thread,
    pc: int,
    pieces: Array,
    to: int,
    kept: Array,
    operation: str,
    kind: str,
) -> Outgoing:
    taken: list[Array] = []
    # What a mask leaves alone may be anyone's, and is not followed.
    done = None
    if kept.all():
        where = Ranges(np.array([to]), PIECE * len(pieces))
        done = begin_global_write(machine, thread, where, combines=bool(operation))

    def read() -> None:
        taken.append(shared_bytes(machine, pieces).copy())

    def write() -> None:
        if done is not None:
            done()
        data = taken[0]
        old = global_bytes(machine, to, data.size)[0]
        if operation:
            data = reductions.reduced(operation, kind, old, data.reshape(-1)).reshape(-1, PIECE)
        put_global(machine, to, np.where(kept, data, old.reshape(-1, PIECE)).reshape(-1))

    return Outgoing(thread, pc, pieces, read, write)


@instruction("cp.reduce.async.bulk")
def bulk_reduction(d: Decoder) -> Step:
    """PTX ISA 9.7.9.25.5.3."""
    to = d.modifiers.one_of("shared::cluster", "global")
    d.modifiers.one_of("shared::cta")
    operation = d.modifiers.one_of(*reductions.OPERATIONS)
    d.modifiers.ignore("noftz")
    kind = d.modifiers.one_of(*_REDUCED)
    if not reductions.allowed(operation, kind):
        d.refuse(f"cp.reduce.async.bulk has no .{operation}.{kind}")
    if to == "global":
        return _to_global(d, operation, kind)
    wide = kind in reductions.FLOATS or kind.endswith("64")
    if wide and (operation, kind) != ("add", "u64"):
        d.refuse(f"a reduction of {kind} into shared memory")
    d.modifiers.one_of(MBARRIER)
    d.expect(4)
    return _between_ctas(d, list(d.operands), operation, kind)


@instruction("cp.async.bulk.prefetch")
def bulk_prefetch(d: Decoder) -> Step:
    """PTX ISA 9.7.9.25.5.4: only its operands are checked."""
    d.modifiers.one_of("L2")
    d.modifiers.one_of("global")
    operands = take_hint(d)
    if len(operands) != 2:
        d.refuse("cp.async.bulk.prefetch has an address and a size")
    address = reader(d.address(operands[0]), "the source")
    size_of = reader(d.source(operands[1], "u32"), "the size")
    machine = d.machine

    def step(group: Group) -> None:
        sources, sizes = address(group), size_of(group)
        for row, thread in threads_of(group):
            size, start = sizes(row, thread), sources(row, thread)
            require_multiple(thread, size, PIECE, "the size")
            require_multiple(thread, start, PIECE, "the source's address")
            check_global(machine, thread, start, size, False)

    return step


# -- groups ---------------------------------------------------------------------------------------


@instruction("cp.async.bulk.commit_group")
def bulk_commit(d: Decoder) -> Step:
    """PTX ISA 9.7.9.25.5.5."""
    d.expect(0)
    return part_of(d.machine, BulkGroups).commit


@instruction("cp.async.bulk.wait_group")
def bulk_wait(d: Decoder) -> Step:
    """PTX ISA 9.7.9.25.5.6."""
    only_reads = d.modifiers.flag("read")
    d.expect(1)
    allowed = d.operands[0]
    if not isinstance(allowed, Integer):
        d.refuse("the number of groups is a constant")
    groups, count = part_of(d.machine, BulkGroups), allowed.value
    return lambda group: groups.wait(group, count, only_reads)
