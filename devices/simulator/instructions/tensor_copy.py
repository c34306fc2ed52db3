"""Copies of boxes of tensors (PTX ISA 9.7.9.27)."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from humming.errors import HummingError

from .. import availability, reductions
from ..boxes import Box, flushed, shared_pieces
from ..bulk import Arrivals, BulkGroups, Outgoing, deliver_pieces
from ..decoder import Decoder, Step, instruction
from ..errors import (
    AlignmentError,
    PoisonError,
    UndefinedBehaviorError,
    UnknownInstructionError,
)
from ..groups import Array, Group
from ..machine import Machine
from ..parts import part_of
from ..ptx_syntax import Address, Operand
from ..ranges import (
    Thread,
    begin_global_read,
    begin_global_write,
    begin_read,
    begin_write,
    failure,
    require_multiple,
    shared_bytes,
    shared_offset,
    threads_of,
    undefined_in,
)
from ..shared_memory import PIECE
from ..tensor_maps import TensorMap, decode
from .bulk_copy import MBARRIER, Targets, reader, take_hint, take_masked
from .tensormap import bytes_of_map

_TILE_ALIGN = 128
_OFFSETS = {3: 1 << 16, 4: 1 << 8, 5: 1 << 5}
"""What offsets of im2col must be below, by the number of dimensions (PTX ISA 5.5.4.1)."""
_ROWS = 4
"""Rows of the modes `tile::gather4` and `tile::scatter4`."""


class _Tensor:
    """The operand `[map, {coordinates}]`.

    Args:
        d: at an instruction.
        shape: what the instruction says of it. In the modes `tile::gather4` and `tile::scatter4` it
            names four single rows, by a column and four row numbers, of a map whose box has one.
        operand: the operand.
        offsets: the operand with those of the mode `im2col`.
    """

    def __init__(
        self, d: Decoder, shape: "_Shape", operand: Operand, offsets: Operand | None = None
    ) -> None:
        if not isinstance(operand, Address) or len(operand.extra) != 1:
            d.refuse("a tensor is given as [address of the map, {coordinates}]")
        self._machine = d.machine
        self._map = reader(d.address(Address(operand.base, operand.offset)), "the tensor map")
        items = d.items(operand.extra[0])
        self._rank, self._target = shape.rank, d.arch
        self._rows = shape.mode in ("tile::gather4", "tile::scatter4")
        if self._rows and len(items) != 1 + _ROWS:
            d.refuse("four rows are named by a column and the numbers of four rows")
        if not self._rows and len(items) != shape.rank:
            d.refuse(f"{len(items)} coordinates of a tensor of {shape.rank} dimensions")
        self._at = [reader(d.source(item, "s32"), "a coordinate") for item in items]
        self._im2col = offsets is not None
        steps = () if offsets is None else d.items(offsets)
        if self._im2col and len(steps) != self._rank - 2:
            d.refuse(f"a tensor of {self._rank} dimensions has {self._rank - 2} offsets of im2col")
        self._offsets = [reader(d.source(item, "u16"), "an offset of im2col") for item in steps]
        self._known: dict[bytes, TensorMap] = {}

    def bind(self, group: Group, written: bool = False) -> Callable[[int, Thread], Box]:
        """A function (row in the group, thread) -> the box, which may be `written`."""
        machine = self._machine
        address, at = self._map(group), [each(group) for each in self._at]
        offsets_of = [each(group) for each in self._offsets]

        def box(row: int, thread: Thread) -> Box:
            data = bytes_of_map(machine, thread, address(row, thread))
            coordinates = tuple(each(row, thread) for each in at)
            offsets = tuple(each(row, thread) for each in offsets_of)
            try:
                tensor = self._known.get(data)
                if tensor is None:
                    tensor = decode(data)
                    if reason := tensor.not_simulated:
                        raise failure(UnknownInstructionError, reason, thread)
                    tensor.check()
                    self._known[data] = tensor
                _require_known(tensor, self._rank, self._target)
                if bool(tensor.corners) != self._im2col:
                    mode = "im2col" if tensor.corners else "tile"
                    raise HummingError(f"the tensor map is one of the mode {mode}")
                if self._rows:
                    tensor = _of_rows(tensor)
                if self._im2col:
                    _check_base(tensor, coordinates, offsets)
            except UnknownInstructionError:
                raise
            except HummingError as error:
                raise failure(UndefinedBehaviorError, str(error), thread) from error
            # H200 take both of these for illegal instructions.
            if written and min(coordinates) < 0:
                told = f"a box is written at {coordinates}, before the tensor begins"
                raise failure(UndefinedBehaviorError, told, thread)
            start = coordinates[0] * tensor.element.bits
            if start % (8 * PIECE):
                told = f"the box begins {start / 8:g} bytes into the rows of the tensor"
                raise failure(AlignmentError, f"{told}, which is no multiple of {PIECE}", thread)
            if self._rows:
                return Box(tensor, (coordinates[0], 0), coordinates[1:], written=written)
            return Box(tensor, coordinates, offsets=offsets, written=written)

        return box


def _check_base(tensor: TensorMap, at: tuple[int, ...], offsets: tuple[int, ...]) -> None:
    """Checks where a copy of the mode im2col begins (PTX ISA 5.5.4.1)."""
    for base, (first, last) in zip(at[1:], tensor.bounding_box, strict=False):
        if not first <= base <= last:
            raise HummingError(f"the base {at} lies outside of the bounding box of {tensor}")
    limit = _OFFSETS[tensor.rank]
    if any(offset >= limit for offset in offsets):
        raise HummingError(f"the offsets {offsets} of im2col are not below {limit}")


def _of_rows(tensor: TensorMap) -> TensorMap:
    """The map of a copy of four single rows, which lie one behind the other in shared memory."""
    if tensor.box[1] != 1 or set(tensor.element_strides) - {1}:
        raise HummingError(
            f"copies of single rows take a map whose box has one row and steps of 1; it is {tensor}"
        )
    return replace(tensor, box=(tensor.box[0], _ROWS))


def _require_known(tensor: TensorMap, rank: int, target: str) -> None:
    if tensor.rank != rank:
        raise HummingError(f"a tensor map of {tensor.rank} dimensions with {rank} coordinates")
    if tensor.needs_sm_100 and availability.number_of(target) < 100:
        raise HummingError(f"sm_{target} has no such tensor maps as {tensor}: they need sm_100")


class _Shape(NamedTuple):
    """Dimensions and mode of a tensor copy."""

    rank: int
    mode: str


def _take_shape(d: Decoder, *modes: str) -> _Shape:
    """Takes the dimensions and the mode: one of some, or "" for tile."""
    rank = d.modifiers.one_of("1d", "2d", "3d", "4d", "5d")
    mode = d.modifiers.one_of(*modes, default="")
    for other in d.modifiers.left:
        if other.startswith("im2col"):
            d.refuse(f"tensor copies in the mode .{other} are not simulated")
    if mode.startswith("tile::") and rank != "2d":
        d.refuse(f".{mode} is for tensors of 2 dimensions")
    if mode == "im2col" and rank in ("1d", "2d"):
        d.refuse(".im2col is for tensors of 3, 4 and 5 dimensions")
    d.modifiers.flag("tile")
    return _Shape(int(rank[0]), mode)


@instruction("cp.async.bulk.tensor")
def tensor_copy(d: Decoder) -> Step:
    """PTX ISA 9.7.9.27.1.2."""
    shape = _take_shape(d, "tile::scatter4", "tile::gather4", "im2col")
    mode = shape.mode
    to = d.modifiers.one_of("shared::cluster", "shared::cta", "global")
    source = d.modifiers.one_of("global", "shared::cta")
    if mode and (mode == "tile::scatter4") != (to == "global"):
        d.refuse("tile::gather4 and im2col load, and tile::scatter4 stores")
    if to == "global":
        return _store(d, shape, "")
    if source != "global":
        d.refuse("cp.async.bulk.tensor into shared memory reads global memory")
    d.modifiers.one_of(MBARRIER)
    group_of = d.modifiers.one_of("cta_group::1", "cta_group::2", default="")
    operands = take_hint(d)
    mask = take_masked(d, operands, "multicast::cluster")
    offsets = operands.pop() if mode == "im2col" and len(operands) == 4 else None
    if len(operands) != 3 or (mode == "im2col") != (offsets is not None):
        told = "cp.async.bulk.tensor has a destination, a tensor and an mbarrier"
        d.refuse(f"{told}, and with .im2col offsets")
    pair = group_of == "cta_group::2"
    targets = Targets(d, operands[0], operands[2], mask, to == "shared::cluster", pair)
    tensors = _Tensor(d, shape, operands[1], offsets)
    machine, pc = d.machine, d.pc
    arrivals = part_of(machine, Arrivals)

    def step(group: Group) -> None:
        places, boxes = targets.bind(group), tensors.bind(group)
        for row, thread in threads_of(group):
            box = boxes(row, thread)
            box.check(machine, thread, False)
            size = box.tensor.box_bytes
            for offset, barrier in places(row, thread, size, _TILE_ALIGN):
                pieces = _checked_pieces(machine, thread, box.tensor, offset)
                begin_write(machine, thread, pieces)
                finish = _delivery(machine, thread, box, pieces)
                arrivals.add(thread, pc, barrier, size, pieces, finish)

    return step


def _checked_pieces(machine: Machine, thread: Thread, tensor: TensorMap, offset: int) -> Array:
    window = offset % machine.shared.size
    pieces = shared_pieces(tensor, offset, window)
    least, most = (int(p) * 16 - offset + window for p in (pieces.min(), pieces.max()))
    rank = offset // machine.shared.size % machine.shape.cluster_size
    at = rank << 24 | least
    shared_offset(machine, thread, at, most + 16 - least, "the swizzled box", cluster=True)
    return pieces


def _delivery(machine: Machine, thread: Thread, box: Box, pieces: Array) -> Callable[[], None]:
    end = begin_global_read(machine, thread, box.ranges)

    def finish() -> None:
        end()
        data, poison = box.load(machine)
        deliver_pieces(machine, pieces, data, poison)

    return finish


def _store(d: Decoder, shape: _Shape, operation: str) -> Step:
    d.modifiers.one_of("bulk_group")
    operands = take_hint(d)
    if len(operands) != 2:
        d.refuse(f"{d.opcode} into global memory has a tensor and a source")
    tensors = _Tensor(d, shape, operands[0])
    address = reader(d.address(operands[1]), "the source")
    machine, pc = d.machine, d.pc
    groups = part_of(machine, BulkGroups)

    def step(group: Group) -> None:
        sources, boxes = address(group), tensors.bind(group, written=True)
        for row, thread in threads_of(group):
            box, start = boxes(row, thread), sources(row, thread)
            box.check(machine, thread, True)
            kind = box.tensor.element.kind
            if operation in ("and", "or", "xor"):
                kind = {"u32": "b32", "s32": "b32", "u64": "b64", "s64": "b64"}.get(kind, "")
            if operation and not (kind and reductions.allowed(operation, kind)):
                told = f"elements of type {box.tensor.dtype} have no reduction .{operation}"
                raise failure(UndefinedBehaviorError, told, thread)
            require_multiple(thread, start & 0xFFFFFF, _TILE_ALIGN, "the source's address")
            size = box.tensor.box_bytes
            offset = shared_offset(machine, thread, start, size, "the source", cluster=False)
            pieces = _checked_pieces(machine, thread, box.tensor, offset)
            begin_read(machine, thread, np.array([thread.row]), pieces)
            if box.rows_inside(undefined_in(machine, pieces)).any():
                raise failure(PoisonError, "an undefined value is copied to global memory", thread)
            combine = _combination(box, operation, kind) if operation else None
            groups.add(_outgoing(machine, thread, pc, box, pieces, combine))

    return step


def _combination(box: Box, operation: str, kind: str) -> Callable[[Array, Array], Array]:
    """A reduction of elements of a box."""
    tidy = flushed if box.tensor.element.flushes else np.asarray
    return lambda old, new: tidy(reductions.reduced(operation, kind, tidy(old), tidy(new)))


def _outgoing(
    machine: Machine,
    thread: Thread,
    pc: int,
    box: Box,
    pieces: Array,
    combine: Callable[[Array, Array], Array] | None,
) -> Outgoing:
    """A store that is under way; `combine` is given what is there and what is written, flat."""
    taken: list[Array] = []
    done = begin_global_write(machine, thread, box.ranges, combines=combine is not None)

    def read() -> None:
        taken.append(box.rows_inside(shared_bytes(machine, pieces)).copy())

    def write() -> None:
        done()
        rows = taken[0]
        if combine is not None and rows.size:
            old = np.ascontiguousarray(box.current(machine)).reshape(-1)
            flat = np.ascontiguousarray(rows).reshape(-1)
            rows = combine(old, flat).reshape(taken[0].shape)
        box.store(machine, rows)

    return Outgoing(thread, pc, pieces, read, write)


@instruction("cp.reduce.async.bulk.tensor")
def tensor_reduction(d: Decoder) -> Step:
    """PTX ISA 9.7.9.27.1.3."""
    shape = _take_shape(d)
    d.modifiers.one_of("global")
    d.modifiers.one_of("shared::cta")
    return _store(d, shape, d.modifiers.one_of(*reductions.OPERATIONS))


@instruction("cp.async.bulk.prefetch.tensor")
def tensor_prefetch(d: Decoder) -> Step:
    """PTX ISA 9.7.9.27.1.4: only its operands are checked."""
    shape = _take_shape(d, "im2col")
    mode = shape.mode
    d.modifiers.one_of("L2")
    d.modifiers.one_of("global")
    operands = take_hint(d)
    if len(operands) != (2 if mode else 1):
        d.refuse("cp.async.bulk.prefetch.tensor has a tensor, and with .im2col offsets")
    tensors = _Tensor(d, shape, operands[0], operands[1] if mode else None)
    machine = d.machine

    def step(group: Group) -> None:
        boxes = tensors.bind(group)
        for row, thread in threads_of(group):
            boxes(row, thread).check(machine, thread, False)

    return step
