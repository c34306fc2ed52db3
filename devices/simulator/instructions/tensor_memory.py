"""Loads and stores of tensor memory, waits and fences (PTX ISA 9.7.16.8 and .11)."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..decoder import Decoder, Step, instruction
from ..errors import BoundsError
from ..groups import Array, Group
from ..memory import fault
from ..operands import Source
from ..ptx_syntax import Address
from ..tensor_loads import tensor_loads
from ..tensor_memory import Region, tensor_memory
from .tensor_allocation import lanes_at, uniform

# -- loads and stores -----------------------------------------------------------------------------

_LANE = np.arange(32)


class _Fragment:
    """Which cells the registers of a warp are (PTX ISA 9.7.16.2.3).

    Attributes:
        lanes, columns: int [registers, 32], relative to the address.
        height: lanes that are accessed, 16 or 32.
        parts: (first, count) of the accessed columns.
    """

    def __init__(self, shape: str, number: int, packed: bool, split: int) -> None:
        per = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}[shape]
        wide = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8, "16x32bx2": 1}[shape]
        register = np.arange(per * number)[:, None]
        inner, repeat = register % per, register // per
        lane, quad = _LANE[None], _LANE[None] & 3
        self.height = 32 if shape == "32x32b" else 16
        if shape == "32x32b":
            lanes, columns = lane, inner
        elif shape == "16x64b":
            lanes, columns = (lane >> 2) + 8 * (lane & 1), lane >> 1 & 1
        elif shape == "16x128b":
            lanes, columns = (lane >> 2) + 8 * inner, quad
        elif shape == "16x256b":
            lanes, columns = (lane >> 2) + 8 * (inner >> 1), 2 * quad + (inner & 1)
        else:
            lanes, columns = lane & 15, inner
        size = (len(register), 32)
        self.lanes = np.broadcast_to(lanes, size)
        columns = np.broadcast_to(columns, size) + wide * repeat
        # Two cells of 16 bits make one register: they are neighbours.
        factor = 2 if packed else 1
        self.columns = columns * factor
        self.packed = packed
        self.parts = [(0, wide * number * factor)]
        if shape == "16x32bx2":
            self.columns = self.columns + (lane >> 4) * split
            self.parts.append((split, wide * number * factor))

    @property
    def registers(self) -> int:
        """How many registers a thread has."""
        return len(self.lanes)

    def regions(self, cta: int, lane: int, column: int) -> list[Region]:
        """The cells that are accessed."""
        lanes = slice(lane, lane + self.height)
        return [Region(cta, lanes, column + first, count) for first, count in self.parts]


def _fragment(d: Decoder, packing: str, split: int) -> _Fragment:
    shape = d.modifiers.one_of("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")
    number = int(d.modifiers.one_of(*(f"x{1 << n}" for n in range(8)))[1:])
    fragment = _Fragment(shape, number, d.modifiers.flag(packing), split)
    if fragment.registers > 128:
        d.refuse(f"{shape}.x{number} would take more than 128 registers")
    return fragment


def _split_offset(d: Decoder, place: int) -> int:
    """`immHalfSplitoff` of the shape 16x32bx2."""
    if "16x32bx2" not in d.modifiers.left:
        return 0
    value = d.source(place, "u32")
    return int(np.asarray(value.read(Group(np.zeros((1, 32), np.bool_)))))


def _places(
    d: Decoder, address: Source, fragment: _Fragment, threads: Group
) -> Iterator[tuple[int, int, int, int, int]]:
    """(index in the group, row, CTA, lane, column) of the access of each warp."""
    machine = d.machine
    found = uniform(address, threads, "the address of tensor memory")
    for place, row in enumerate(threads.index.tolist()):
        lane, column = int(found[place]) >> 16, int(found[place]) & 0xFFFF
        warp = int(machine.row_warp[row])
        first = 32 * (warp % 4)
        aligned = (first,) if fragment.height == 32 else (first, first + 16)
        if lane not in aligned:
            told = f"warp {warp} can access lanes {first} to {first + 31} of tensor memory, and"
            told = f"{told} here an access of {fragment.height} lanes begins at lane {lane}"
            raise fault(BoundsError, told, threads, lanes_at(threads, place))
        yield place, row, int(machine.row_cta[row]), lane, column


@instruction("tcgen05.ld.sync.aligned", together="warp")
def load(d: Decoder) -> Step:
    """PTX ISA 9.7.16.8.3: registers have their values behind `tcgen05.wait::ld`."""
    return _load(d, "")


@instruction("tcgen05.ld.red.sync.aligned", together="warp")
def load_reduced(d: Decoder) -> Step:
    """PTX ISA 9.7.16.8.3: in addition the least or greatest of each thread's values."""
    if "16x32bx2" in d.modifiers.left:
        d.refuse("which columns tcgen05.ld.red.16x32bx2 reduces for a thread is not known")
    return _load(d, d.modifiers.one_of("min", "max"))


def _load(d: Decoder, reduction: str) -> Step:
    extra = 1 if reduction else 0
    split = _split_offset(d, 2 + extra)
    fragment = _fragment(d, "pack::16b", split)
    absolute, keeps_nan = d.modifiers.flag("abs"), d.modifiers.flag("NaN")
    kind = d.modifiers.one_of("f32", "u32", "s32") if reduction else d.modifiers.one_of("b32")
    d.expect(2 + extra, 3 + extra)
    targets = d.targets(0, "b32")
    if len(targets) != fragment.registers:
        d.refuse(f"this form writes {fragment.registers} registers, and {len(targets)} are given")
    reduce = _reduction(reduction, kind, absolute, keeps_nan) if reduction else None
    result = d.target(1, "b32") if reduction else None
    address = _address(d, 1 + extra)
    memory, pc = tensor_memory(d.machine), d.pc
    loads = tensor_loads(d.machine)
    files = [target.register for target in (*targets, *([result] if result else []))]
    if any(file is not None and file.bits != 32 for file in files):
        d.refuse("tcgen05.ld writes registers of 32 bits")

    def step(threads: Group) -> None:
        shape = (len(threads), fragment.registers, 32)
        values, poison = np.zeros(shape, np.uint32), np.zeros(shape, np.uint32)
        for place, row, cta, lane, column in _places(d, address, fragment, threads):
            access = memory.begin(row, 0, "tcgen05.ld", False, pc)
            for region in fragment.regions(cta, lane, column):
                memory.will_read(access, region)
            memory.load_issued(access)
            whole = Region(cta, slice(lane, lane + fragment.height), column, 512 - column)
            data, bad = memory.load(whole)
            values[place] = _gathered(data, fragment)
            if bad is not None:
                poison[place] = _gathered(bad, fragment)
        if reduce is not None:
            undefined = np.where((poison != 0).any(axis=1), np.uint32(0xFFFFFFFF), np.uint32(0))
            values = np.concatenate([values, reduce(values)[:, None]], axis=1)
            poison = np.concatenate([poison, undefined[:, None]], axis=1)
        loads.begin(threads, pc, files, values, poison)

    return step


def _gathered(cells: Array, fragment: _Fragment) -> Array:
    """Registers [registers, 32] of cells."""
    found: Array = cells[fragment.lanes, fragment.columns]
    if fragment.packed:
        upper = cells[fragment.lanes, fragment.columns + 1]
        found = found & np.uint32(0xFFFF) | upper << np.uint32(16)
    return found


def _reduction(
    operation: str, kind: str, absolute: bool, keeps_nan: bool
) -> Callable[[Array], Array]:
    """uint32 [n, 32] of [n, registers, 32]."""
    dtype = {"f32": np.float32, "u32": np.uint32, "s32": np.int32}[kind]
    functions: dict[str, Any] = {"min": np.minimum, "max": np.maximum}
    if kind == "f32" and not keeps_nan:
        functions = {"min": np.fmin, "max": np.fmax}

    def reduce(values: Array) -> Array:
        numbers = values.view(dtype)
        found = functions[operation].reduce(np.abs(numbers) if absolute else numbers, axis=1)
        return np.ascontiguousarray(found).view(np.uint32)

    return reduce


def _address(d: Decoder, place: int) -> Source:
    operand = d.operands[place]
    if not isinstance(operand, Address):
        d.refuse("an address in tensor memory is expected")
    return d.address(operand)


@instruction("tcgen05.st.sync.aligned", together="warp")
def store(d: Decoder) -> Step:
    """PTX ISA 9.7.16.8.4: the cells have the values after `tcgen05.wait::st`."""
    split = _split_offset(d, 1)
    fragment = _fragment(d, "unpack::16b", split)
    d.modifiers.one_of("b32")
    d.expect(2, 3)
    sources = d.sources(len(d.operands) - 1, "b32")
    if len(sources) != fragment.registers:
        d.refuse(f"this form reads {fragment.registers} registers, and {len(sources)} are given")
    address = _address(d, 0)
    memory, pc = tensor_memory(d.machine), d.pc

    def step(threads: Group) -> None:
        shape = (len(threads), 32)
        values = np.stack([np.broadcast_to(s.read(threads), shape) for s in sources], axis=1)
        poison = np.zeros_like(values)
        for register, source in enumerate(sources):
            bad = source.poison(threads)
            if bad is not None:
                poison[:, register] = bad
        for place, row, cta, lane, column in _places(d, address, fragment, threads):
            access = memory.begin(row, 0, "tcgen05.st", False, pc)
            regions = fragment.regions(cta, lane, column)
            for region in regions:
                memory.will_write(access, region)
            data = _scattered(values[place], fragment)
            bad = _scattered(poison[place], fragment)
            for region, (first, count) in zip(regions, fragment.parts, strict=True):
                part = slice(first, first + count)
                memory.store_issued(access, region, data[:, part], bad[:, part])

    return step


def _scattered(registers: Array, fragment: _Fragment) -> Array:
    """Cells [height, columns] of registers; packed ones are spread over two cells each."""
    last = max(first + count for first, count in fragment.parts)
    cells = np.zeros((fragment.height, last), np.uint32)
    if fragment.packed:
        cells[fragment.lanes, fragment.columns] = registers & np.uint32(0xFFFF)
        cells[fragment.lanes, fragment.columns + 1] = registers >> np.uint32(16)
    else:
        cells[fragment.lanes, fragment.columns] = registers
    return cells


# -- order ----------------------------------------------------------------------------------------


@instruction("tcgen05.wait::ld", "tcgen05.wait::st", together="warp")
def wait(d: Decoder) -> Step:
    """PTX ISA 9.7.16.8.5."""
    d.modifiers.ignore("sync", "aligned")
    d.expect(0)
    memory = tensor_memory(d.machine)
    loads = tensor_loads(d.machine) if d.opcode.endswith("ld") else None
    finish = memory.wait_stores if loads is None else memory.wait_loads

    def step(threads: Group) -> None:
        if loads is not None:
            loads.wait(threads)
        for row in threads.index.tolist():
            finish(row)

    return step


@instruction("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def fence(d: Decoder) -> Step:
    """PTX ISA 9.7.16.11; a fence of one thread counts for its warp here."""
    d.expect(0)
    memory = tensor_memory(d.machine)
    order = memory.fence_before if "before" in d.opcode else memory.fence_after

    def step(threads: Group) -> None:
        for row in threads.index.tolist():
            order(row)

    return step
