"""Ranges of memory that an asynchronous operation of one thread accesses, and their checks."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .errors import (
    AlignmentError,
    AsyncHazardError,
    BarrierError,
    BoundsError,
    SimulationError,
)
from .groups import WARP, Array, Group
from .ranges_of_bytes import Ranges
from .shared_memory import PIECE

if TYPE_CHECKING:
    from .machine import Machine


class Thread(NamedTuple):
    """A thread: row of its warp in the machine, and lane."""

    row: int
    lane: int


def failure(kind: type[SimulationError], told: str, thread: Thread) -> SimulationError:
    """An error of one thread; the machine adds the instruction and its place."""
    error = kind(told)
    error.thread = (thread.row, thread.lane)
    return error


def threads_of(group: Group) -> list[tuple[int, Thread]]:
    """(row in the group, thread) of each active thread of a group."""
    found = np.argwhere(group.active()).tolist()
    return [(row, Thread(int(group.index[row]), lane)) for row, lane in found]


def require_multiple(thread: Thread, value: int, of: int, what: str) -> None:
    """Raises AlignmentError unless a number is a multiple of another one."""
    if value % of:
        told = f"{what}, {value:#x}, is no multiple of {of}"
        raise failure(AlignmentError, told, thread)


def cta_of(machine: "Machine", thread: Thread, address: int) -> int:
    """The CTA of the wave that an address in `shared::cluster` belongs to."""
    own = int(machine.row_cta[thread.row])
    size = machine.shape.cluster_size
    rank = address >> 24
    if rank >= size:
        told = f"shared address {address:#x} belongs to CTA {rank} of a cluster of {size}"
        raise failure(BoundsError, told, thread)
    return own - own % size + rank


def shared_offset(
    machine: "Machine", thread: Thread, address: int, size: int, what: str, *, cluster: bool
) -> int:
    """Offset in the bytes of shared memory of a range; all of it lies in one variable.

    Args:
        machine: whose memory it is.
        thread: which accesses it.
        address: in `shared::cluster`.
        size: in bytes.
        what: for messages: what it is.
        cluster: whether it may lie in another CTA.
    """
    own = int(machine.row_cta[thread.row])
    cta = cta_of(machine, thread, address)
    if cta != own and not cluster:
        told = f"{what}, shared address {address:#x}, belongs to another CTA"
        raise failure(BoundsError, told, thread)
    window = address & 0xFFFFFF
    extents = machine.shared.extents
    if not any(start <= window and window + size <= end for start, end in extents):
        variables = ", ".join(f"{start:#x} to {end:#x}" for start, end in extents)
        told = f"{what}, {size} bytes at shared address {window:#x}, lies in no variable of the CTA"
        raise failure(BoundsError, f"{told}; these are at {variables}", thread)
    return cta * machine.shared.size + window


def pieces_of(offset: int, size: int) -> Array:
    """Numbers of the pieces of 16 bytes of a range."""
    return np.arange(offset // PIECE, (offset + size) // PIECE)


def begin_write(machine: "Machine", thread: Thread, pieces: Array) -> None:
    """Checks that an asynchronous write may begin, and makes its target undefined."""
    shared = machine.shared
    if shared.holds_object(pieces):
        told = "an asynchronous operation writes shared memory that holds an mbarrier"
        raise failure(BarrierError, told, thread)
    if shared.pending.reshape(-1, PIECE)[pieces].any():
        told = "an asynchronous operation writes what another one may still write"
        raise failure(AsyncHazardError, f"{told}: no wait covers it", thread)
    if shared.held[pieces].any():
        told = "an asynchronous operation writes what another one may still read"
        raise failure(AsyncHazardError, f"{told}: no wait covers it", thread)
    if machine.races is not None:
        machine.races.check_async(np.array([thread.row]), thread.lane, pieces, True)
    shared.mark_pending(pieces * PIECE, PIECE)


def begin_read(machine: "Machine", thread: Thread, rows: Array, pieces: Array) -> None:
    """Checks that warps may begin an asynchronous read; until `let_go` nobody may write there."""
    shared = machine.shared
    if shared.in_flight and shared.pending.reshape(-1, PIECE)[pieces].any():
        told = "an asynchronous operation reads what another one may still write"
        raise failure(AsyncHazardError, f"{told}: no wait covers it", thread)
    if machine.races is not None:
        machine.races.check_async(rows, thread.lane, pieces, False)
    shared.hold(pieces)


def undefined_in(machine: "Machine", pieces: Array) -> Array:
    """Undefined bits of pieces of shared memory, uint8 [n, 16]."""
    assert machine.shared.shadow is not None
    found: Array = machine.shared.shadow.data.reshape(-1, PIECE)[pieces]
    return found


def shared_bytes(machine: "Machine", pieces: Array) -> Array:
    """Bytes of pieces of shared memory, uint8 [n, 16]."""
    found: Array = machine.shared.memory.data.reshape(-1, PIECE)[pieces]
    return found


def check_global(
    machine: "Machine", thread: Thread, address: int, size: int, writing: bool
) -> None:
    """Raises BoundsError unless a range of global memory lies in one allocation."""
    memory = machine.memory
    found = memory.find(address)
    if found is not None and address + size <= found.end and (found.writable or not writing):
        return
    lanes = np.zeros_like(machine.live)
    lanes[thread.row, thread.lane] = True
    part = Group(lanes)
    first = found.end if found is not None and found.writable >= writing else address
    memory.locate(part, np.full((1, WARP), first, np.uint64), 1, writing)
    told = f"{size} bytes at global address {address:#x} lie in more than one allocation"
    raise failure(BoundsError, told, thread)


def begin_global_read(machine: "Machine", thread: Thread, where: Ranges) -> Callable[[], None]:
    """Checks that an asynchronous operation may read global memory; returns what ends it."""
    order = machine.memory.order
    if order is None:
        return lambda: None
    transfer = order.begin_read(thread, where)
    return lambda: order.end_read(transfer)


def begin_global_write(
    machine: "Machine", thread: Thread, where: Ranges, *, combines: bool
) -> Callable[[], None]:
    """The same of a write, or of a reduction, which combines with what is there."""
    order = machine.memory.order
    if order is None:
        return lambda: None
    transfer = order.begin_write(thread, where, combines)
    return lambda: order.end_write(thread, transfer)


def global_bytes(machine: "Machine", address: int, size: int) -> tuple[Array, Array | None]:
    """Bytes of a checked range of global memory, and their undefined bits, uint8 [size]."""
    memory = machine.memory
    found = memory.find(address)
    shadow = None
    if found is not None and found.shadow is not None:
        start = int(found.inner(np.array([address]))[1][0])
        shadow = found.shadow.data[start : start + size].copy()
    return memory.read(address, size), shadow


def put_global(machine: "Machine", address: int, data: Array) -> None:
    """Writes defined bytes to a checked range of global memory."""
    memory = machine.memory
    memory.write(address, data.tobytes())
    found = memory.find(address)
    if found is not None and found.shadow is not None:
        start = int(found.inner(np.array([address]))[1][0])
        found.shadow.data[start : start + len(data)] = 0
