"""Atomic operations and reductions on memory (PTX ISA 9.7.13.11-13).

Threads take their turns in the order of their numbers, or a random one in a random schedule.
Sums of float32 flush subnormal numbers in global memory, and keep them in shared memory.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import numerics
from ..decoder import Decoder, Step, instruction
from ..errors import BoundsError, PoisonError
from ..global_memory import GlobalMemory
from ..groups import Array, Group
from ..locations import RELEASES, Released, released
from ..memory import SHARED_WINDOW, fault, window_of
from ..ptx_syntax import TYPE_BITS
from ..shared_memory import SharedMemory
from . import forms
from .data import require_defined
from .floating import expand, storage
from .memory import Access, read_wide, wide_register, write_wide

_OPERATIONS = ("and", "or", "xor", "cas", "exch", "add", "inc", "dec", "min", "max")
_TYPES = (
    *("b16", "b32", "b64", "b128", "u32", "u64", "s32", "s64"),
    *("f16", "f16x2", "bf16", "bf16x2", "f32", "f64"),
)


def _function(operation: str, kind: str) -> Callable[..., Any]:
    """The new value of (old, b, c), all NumPy scalars of the type they are stored in."""
    functions: dict[str, Callable[..., Any]] = {
        "and": lambda old, b, c: old & b,
        "or": lambda old, b, c: old | b,
        "xor": lambda old, b, c: old ^ b,
        "exch": lambda old, b, c: b,
        "cas": lambda old, b, c: c if old == b else old,
        "inc": lambda old, b, c: 0 if old >= b else old + 1,
        "dec": lambda old, b, c: b if old == 0 or old > b else old - 1,
        "add": lambda old, b, c: old + b,
        "min": lambda old, b, c: min(old, b),
        "max": lambda old, b, c: max(old, b),
    }
    if kind in ("f16", "f16x2", "bf16", "bf16x2"):
        choose = {"add": np.add, "min": np.fmin, "max": np.fmax}[operation]

        def halves(old: Any, b: Any, c: Any) -> Any:
            values = choose(expand(np.array([old]), kind), expand(np.array([b]), kind))
            name = "bf16" if kind[0] == "b" else "f16"
            codes = numerics.encode(values.astype(np.float64), name).astype(np.uint16)
            return codes.view(np.uint32 if kind.endswith("x2") else np.uint16)[0]

        return halves
    if kind == "f32" and operation == "add":
        return lambda old, b, c: numerics.canonical_f32(np.add(old, b))
    return functions[operation]


def _flushed_sum(old: Any, b: Any, c: Any) -> Any:
    """float32 `add` in global memory."""
    return numerics.canonical_f32(numerics.flush(numerics.flush(old) + numerics.flush(b)))


@instruction("atom")
def atomic(d: Decoder) -> Step:
    """PTX ISA 9.7.13.11."""
    if _kind_of(d) == "b128":
        return _of_128_bits(d)
    return _build(d, d.targets(0, storage(_kind_of(d)), given=_kind_of(d)), 1)


@instruction("red")
def reduction(d: Decoder) -> Step:
    """PTX ISA 9.7.13.12: without a result."""
    return _build(d, [], 0)


def _kind_of(d: Decoder) -> str:
    return next((part for part in d.modifiers.left if part in _TYPES), "b32")


def _build(d: Decoder, targets: list[Any], first: int) -> Step:
    access = Access(d)
    operation = d.modifiers.one_of(*_OPERATIONS)
    noftz = d.modifiers.flag("noftz")
    kind = d.modifiers.one_of(*_TYPES)
    count = access.count
    wrong = forms.atomic(d.opcode, operation, kind, count, access.space, noftz)
    if wrong or access.space not in ("", "global", "shared", "shared::cta", "shared::cluster"):
        d.refuse(wrong or f"{d.opcode} on {access.space} memory")
    stored = storage(kind)
    size = TYPE_BITS[kind] // 8
    addresses = d.address(first)
    seconds = d.sources(first + 1, stored, given=kind)
    if len(seconds) != count:
        d.refuse(f"{len(seconds)} operands for a vector of {count}")
    third = d.source(first + 2, stored, given=kind) if operation == "cas" else None
    in_shared = _function(operation, kind)
    in_global = _flushed_sum if (operation, kind) == ("add", "f32") else in_shared
    dtype = np.dtype(seconds[0].dtype)
    machine = d.machine
    pc, polls = d.pc, bool(targets) and d.in_loop

    def step(group: Group) -> None:
        at = addresses.read(group)
        changed = False
        shape = (len(group), 32)
        operands = [
            np.broadcast_to(require_defined(s, group, "the operand"), shape) for s in seconds
        ]
        swap = operands[0]
        if third is not None:
            swap = np.broadcast_to(require_defined(third, group, "the new value"), shape)
        old = np.zeros((*shape, count), dtype)
        for part, rows, space, inner in _spaces(access, group, at):
            offsets = _places(access, part, space, inner, size * count)
            order = _order(space, offsets if space is machine.shared else inner)
            undefined = space._poison(part, offsets, size * count, 1)
            if undefined is not None:
                bad = undefined != 0 if undefined.ndim == 2 else (undefined != 0).any(axis=-1)
                told = "an atomic operation on memory that is undefined"
                raise fault(PoisonError, told, part, bad)
            active = part.active()
            turns = machine.schedule.shuffled(np.argwhere(active))
            view = space.memory.data
            function = in_shared if isinstance(space, SharedMemory) else in_global
            for row, lane in turns:
                offset = int(offsets[row, lane])
                own = int(rows[row])
                cell = view[offset : offset + size * count].view(dtype)
                for place in range(count):
                    before = cell[place]
                    old[own, lane, place] = before
                    cell[place] = function(before, operands[place][own, lane], swap[own, lane])
                    changed = changed or cell[place] != before
                if order is not None:
                    order(int(part.index[row]), row, lane)
        # One that changes nothing lets nobody go on, as the attempts to get a lock.
        machine.progress += changed
        if polls:
            machine.polled(group, pc, at, True)
        for place, target in enumerate(targets):
            target.put(group, old[..., place])

    def _order(space: Any, places: Array) -> Callable[[int, int, int], None] | None:
        """Passes on, and takes, what the operations of a thread order."""
        races = machine.races
        if races is None or machine.memory.order is None:
            return None
        shared = space is machine.shared
        locations = machine.locations if shared else machine.memory.order.locations

        known: dict[int, Released | None] = {}

        def order(warp: int, row: int, lane: int) -> None:
            place = int(places[row, lane])
            locations.has_read(races, warp, place, access.semantics, access.far)
            # What a fence covers stays the same from one thread of the warp to the next.
            if warp not in known or access.semantics in RELEASES:
                known[warp] = released(races, warp, access.semantics, access.far)
            locations.put(place, known[warp], adds=True)

        return order

    return step


def _spaces(access: Access, group: Group, at: Array) -> list[tuple[Group, Array, Any, Array]]:
    """The parts of a group that access one space each, with their rows in it, and addresses."""
    machine, everyone = access.machine, np.arange(len(group))
    if access.space.startswith("shared"):
        return [(group, everyone, machine.shared, at)]
    if access.space == "global":
        return [(group, everyone, machine.memory, at)]
    found: list[tuple[Group, Array, GlobalMemory | SharedMemory, Array]] = []
    windows = window_of(at)
    for window in np.unique(windows[group.active()]):
        part = machine.group(group.spread(windows == window))
        rows = np.searchsorted(group.index, part.index)
        if window == SHARED_WINDOW >> 56:
            found.append((part, rows, machine.shared, at[rows] - np.uint64(SHARED_WINDOW)))
        else:
            found.append((part, rows, machine.memory, at[rows]))
    return found


def _places(access: Access, part: Group, space: Any, inner: Array, total: int) -> Array:
    """Offsets of the operation in a space; it must be settled and defined there."""
    try:
        return _settled(access, part, space, inner, total)
    except BoundsError as error:
        error.what = error.what.replace("a store", "an atomic operation", 1)
        raise


def _settled(access: Access, part: Group, space: Any, inner: Array, total: int) -> Array:
    if isinstance(space, SharedMemory):
        cluster = access.space in ("", "shared::cluster")
        offsets = space.place(part, inner, total, True, cluster)
        space.check_settled(part, offsets, total, "an atomic operation on")
        if access.machine.races is not None:
            access.machine.races.strong(part, offsets, total, reads=True, writes=True)
        return offsets
    found: Array = space.locate(part, inner, total, True)
    if space.order is not None:
        space.order.write(part, inner, total, strong=True)
    return found


def _of_128_bits(d: Decoder) -> Step:
    """`atom.exch.b128` and `atom.cas.b128`."""
    access = Access(d)
    operation = d.modifiers.one_of("exch", "cas")
    d.modifiers.one_of("b128")
    d.expect(4 if operation == "cas" else 3)
    addresses, target = d.address(1), wide_register(d, d.operands[0])
    given = [wide_register(d, operand) for operand in d.operands[2:]]
    machine = d.machine

    def step(group: Group) -> None:
        operands = []
        for register in given:
            values, bad = read_wide(group, register)
            if bad is not None:
                raise fault(PoisonError, "the operand is undefined", group, bad.any(axis=-1))
            operands.append(values.copy())
        old = np.zeros((len(group), 32, 2), np.uint64)
        for part, rows, space, inner in _spaces(access, group, addresses.read(group)):
            offsets = _places(access, part, space, inner, 16)
            undefined = space._poison(part, offsets, 8, 2)
            if undefined is not None:
                told = "an atomic operation on memory that is undefined"
                raise fault(PoisonError, told, part, (undefined != 0).any(axis=-1))
            for row, lane in machine.schedule.shuffled(np.argwhere(part.active())):
                own, offset = int(rows[row]), int(offsets[row, lane])
                cell = space.memory.data[offset : offset + 16].view(np.uint64)
                old[own, lane] = cell
                if operation == "exch" or (cell == operands[0][own, lane]).all():
                    cell[:] = operands[-1][own, lane]
        machine.progress += 1
        write_wide(group, target, old, None)

    return step
