"""Copies of boxes of tensors (PTX ISA 9.7.9.27), and changes of tensor maps (9.7.9.26)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from humming.errors import HummingError

from .. import availability, reductions
from ..boxes import Box, flushed, shared_pieces
from ..bulk import Arrivals, BulkGroups, Outgoing, deliver_pieces
from ..decoder import Decoder, Step, instruction
from ..errors import (
    AlignmentError,
    AsyncHazardError,
    BoundsError,
    PoisonError,
    UndefinedBehaviorError,
)
from ..groups import Array, Group
from ..machine import Machine
from ..memory import PARAM_WINDOW, SHARED_WINDOW
from ..parts import part_of
from ..ptx_syntax import Address, Integer, Operand
from ..ranges import (
    Thread,
    begin_global_read,
    begin_global_write,
    begin_read,
    begin_write,
    check_global,
    failure,
    global_bytes,
    put_global,
    require_multiple,
    shared_bytes,
    shared_offset,
    threads_of,
    undefined_in,
)
from ..shared_memory import PIECE
from ..tensor_maps import ALIGN, BYTES, TensorMap, decode
from .bulk_copy import MBARRIER, Targets, reader, take_hint, take_masked

_TILE_ALIGN = 128
_OFFSETS = {3: 1 << 16, 4: 1 << 8, 5: 1 << 5}
"""What offsets of im2col must be below, by the number of dimensions (PTX ISA 5.5.4.1)."""
_ROWS = 4
"""Rows of the modes `tile::gather4` and `tile::scatter4`."""


class MapStates:
    """Which tensor maps in global memory have been changed and not acquired."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._changed: dict[int, set[int]] = {}

    def reset(self) -> None:
        """None has been changed."""
        self._changed.clear()

    def change(self, address: int) -> None:
        """A map is changed: each CTA has to acquire it before it is used there."""
        self._changed[address] = set()

    def acquire(self, address: int, cta: int) -> None:
        """`fence.proxy.tensormap::generic.acquire` in a CTA."""
        if address in self._changed:
            self._changed[address].add(cta)

    def is_stale(self, address: int, cta: int) -> bool:
        """Whether a map must not be used."""
        return address in self._changed and cta not in self._changed[address]


def _states(machine: Machine) -> MapStates:
    for part in machine.parts:
        if isinstance(part, MapStates):
            return part
    made = MapStates(machine)
    machine.parts.append(made)
    return made


def _bytes_of_map(machine: Machine, thread: Thread, address: int) -> bytes:
    require_multiple(thread, address, ALIGN, "the address of the tensor map")
    window = address >> 56
    if window == PARAM_WINDOW >> 56:
        start = address - PARAM_WINDOW
        if start + BYTES > machine.program.param_bytes:
            raise failure(BoundsError, "the tensor map lies outside of the parameters", thread)
        return bytes(machine.params.memory.data[start : start + BYTES].tobytes())
    if window:
        told = "a tensor map lies in parameters, constant or global memory, and nowhere else"
        raise failure(UndefinedBehaviorError, told, thread)
    check_global(machine, thread, address, BYTES, False)
    if _states(machine).is_stale(address, int(machine.row_cta[thread.row])):
        told = "the tensor map has been changed, and no fence.proxy.tensormap::generic.acquire "
        raise failure(AsyncHazardError, told + "of this CTA lies in between", thread)
    data, poison = global_bytes(machine, address, BYTES)
    if poison is not None and poison.any():
        raise failure(PoisonError, "the tensor map is undefined", thread)
    return bytes(data.tobytes())


class _Tensor:
    """The operand `[map, {coordinates}]`.

    Args:
        d: at an instruction.
        operand: the operand.
        rows: whether it names four single rows: a column and four row numbers (the modes
            `tile::gather4` and `tile::scatter4`), of a map whose box has one row.
        offsets: the operand with those of the mode `im2col`.
    """

    def __init__(
        self, d: Decoder, operand: Operand, rows: bool = False, offsets: Operand | None = None
    ) -> None:
        if not isinstance(operand, Address) or len(operand.extra) != 1:
            d.refuse("a tensor is given as [address of the map, {coordinates}]")
        self._machine = d.machine
        self._map = reader(d.address(Address(operand.base, operand.offset)), "the tensor map")
        items = d.items(operand.extra[0])
        self._rank, self._rows, self._target = len(items), rows, d.arch
        if rows and len(items) != 1 + _ROWS:
            d.refuse("four rows are named by a column and the numbers of four rows")
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
            data = _bytes_of_map(machine, thread, address(row, thread))
            coordinates = tuple(each(row, thread) for each in at)
            offsets = tuple(each(row, thread) for each in offsets_of)
            try:
                tensor = self._known.get(data)
                if tensor is None:
                    tensor = decode(data)
                    tensor.check()
                    self._known[data] = tensor
                _require_simulated(tensor, 2 if self._rows else self._rank, self._target)
                if bool(tensor.corners) != self._im2col:
                    mode = "im2col" if tensor.corners else "tile"
                    raise HummingError(f"the tensor map is one of the mode {mode}")
                if self._rows:
                    tensor = _of_rows(tensor)
                if self._im2col:
                    _check_base(tensor, coordinates, offsets)
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


def _require_simulated(tensor: TensorMap, rank: int, target: str) -> None:
    if tensor.rank != rank:
        raise HummingError(f"a tensor map of {tensor.rank} dimensions with {rank} coordinates")
    if tensor.needs_sm_100 and availability.number_of(target) < 100:
        raise HummingError(f"sm_{target} has no such tensor maps as {tensor}: they need sm_100")
    if tensor.dtype.startswith("tfloat32"):
        raise HummingError("the rounding of tensor maps of type tfloat32 is not simulated")
    if tensor.swizzle and tensor.row_bytes != tensor.swizzling.span_bytes:
        raise HummingError(
            f"rows of {tensor.row_bytes} bytes in the swizzle {tensor.swizzling.name} are not "
            "simulated: how they lie in shared memory is not documented"
        )


def _take_shape(d: Decoder, *modes: str) -> str:
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
    return mode


@instruction("cp.async.bulk.tensor")
def tensor_copy(d: Decoder) -> Step:
    """PTX ISA 9.7.9.27.1.2."""
    mode = _take_shape(d, "tile::scatter4", "tile::gather4", "im2col")
    to = d.modifiers.one_of("shared::cluster", "shared::cta", "global")
    source = d.modifiers.one_of("global", "shared::cta")
    if mode and (mode == "tile::scatter4") != (to == "global"):
        d.refuse("tile::gather4 and im2col load, and tile::scatter4 stores")
    if to == "global":
        return _store(d, "", mode == "tile::scatter4")
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
    tensors = _Tensor(d, operands[1], mode == "tile::gather4", offsets)
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


def _store(d: Decoder, operation: str, scatters: bool = False) -> Step:
    d.modifiers.one_of("bulk_group")
    operands = take_hint(d)
    if len(operands) != 2:
        d.refuse(f"{d.opcode} into global memory has a tensor and a source")
    tensors = _Tensor(d, operands[0], scatters)
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
            groups.add(_outgoing(machine, thread, pc, box, pieces, operation, kind))

    return step


def _outgoing(
    machine: Machine,
    thread: Thread,
    pc: int,
    box: Box,
    pieces: Array,
    operation: str,
    kind: str,
) -> Outgoing:
    taken: list[Array] = []
    done = begin_global_write(machine, thread, box.ranges, combines=bool(operation))

    def read() -> None:
        taken.append(box.rows_inside(shared_bytes(machine, pieces)).copy())

    def write() -> None:
        done()
        rows = taken[0]
        if operation and rows.size:
            old = np.ascontiguousarray(box.current(machine)).reshape(-1)
            flat = np.ascontiguousarray(rows).reshape(-1)
            tidy = flushed if box.tensor.element.flushes else np.asarray
            rows = tidy(reductions.reduced(operation, kind, tidy(old), tidy(flat)))
            rows = rows.reshape(taken[0].shape)
        box.store(machine, rows)

    return Outgoing(thread, pc, pieces, read, write)


@instruction("cp.reduce.async.bulk.tensor")
def tensor_reduction(d: Decoder) -> Step:
    """PTX ISA 9.7.9.27.1.3."""
    _take_shape(d)
    d.modifiers.one_of("global")
    d.modifiers.one_of("shared::cta")
    return _store(d, d.modifiers.one_of(*reductions.OPERATIONS))


@instruction("cp.async.bulk.prefetch.tensor")
def tensor_prefetch(d: Decoder) -> Step:
    """PTX ISA 9.7.9.27.1.4: only its operands are checked."""
    mode = _take_shape(d, "im2col")
    d.modifiers.one_of("L2")
    d.modifiers.one_of("global")
    operands = take_hint(d)
    if len(operands) != (2 if mode else 1):
        d.refuse("cp.async.bulk.prefetch.tensor has a tensor, and with .im2col offsets")
    tensors = _Tensor(d, operands[0], offsets=operands[1] if mode else None)
    machine = d.machine

    def step(group: Group) -> None:
        boxes = tensors.bind(group)
        for row, thread in threads_of(group):
            boxes(row, thread).check(machine, thread, False)

    return step


# -- tensor maps ----------------------------------------------------------------------------------


@instruction("tensormap.replace")
def replace_field(d: Decoder) -> Step:
    """PTX ISA 9.7.9.26.1: changes a field of a map in shared or global memory."""
    d.modifiers.one_of("tile")
    fields = (
        *("global_address", "rank", "box_dim", "global_dim", "global_stride", "element_stride"),
        *("elemtype", "interleave_layout", "swizzle_mode", "swizzle_atomicity", "fill_mode"),
    )
    field = d.modifiers.one_of(*fields)
    space = d.modifiers.one_of("global", "shared::cta", default="")
    d.modifiers.one_of("b1024")
    kind = d.modifiers.one_of("b32", "b64")
    indexed = field in ("box_dim", "global_dim", "global_stride", "element_stride")
    d.expect(3 if indexed else 2)
    ordinal = d.operands[1] if indexed else Integer(0)
    if not isinstance(ordinal, Integer):
        d.refuse("the number of the dimension is a constant")
    address = reader(d.address(0), "the address of the tensor map")
    value_of = reader(d.source(len(d.operands) - 1, kind), "the new value")
    machine, which = d.machine, ordinal.value

    def step(group: Group) -> None:
        places, values = address(group), value_of(group)
        for row, thread in threads_of(group):
            at = places(row, thread)
            place, data = _map_bytes(machine, thread, at, space, True)
            try:
                changed = decode(data).replaced(field, values(row, thread), which)
            except HummingError as error:
                raise failure(UndefinedBehaviorError, str(error), thread) from error
            place(changed.encode_unchecked())

    return step


def _map_bytes(
    machine: Machine, thread: Thread, address: int, space: str, writing: bool
) -> tuple[Any, bytes]:
    """How to write a map, and its bytes."""
    if space == "" and address >> 56 == SHARED_WINDOW >> 56:
        space, address = "shared::cta", address - SHARED_WINDOW
    require_multiple(thread, address & 0xFFFFFF, ALIGN, "the address of the tensor map")
    if space == "shared::cta":
        shared = machine.shared
        offset = shared_offset(machine, thread, address, BYTES, "the tensor map", cluster=False)
        assert shared.shadow is not None
        if shared.shadow.data[offset : offset + BYTES].any():
            raise failure(PoisonError, "the tensor map is undefined", thread)

        def put(data: bytes) -> None:
            shared.memory.data[offset : offset + BYTES] = np.frombuffer(data, np.uint8)
            shared.memory.changes += 1

        return put, shared.memory.data[offset : offset + BYTES].tobytes()
    check_global(machine, thread, address, BYTES, writing)

    def put_back(data: bytes) -> None:
        put_global(machine, address, np.frombuffer(data, np.uint8))
        _states(machine).change(address)

    return put_back, bytes(global_bytes(machine, address, BYTES)[0].tobytes())


@instruction("tensormap.cp_fenceproxy", together="warp")
def copy_map(d: Decoder) -> Step:
    """PTX ISA 9.7.13.18: copies a map from shared to global memory and releases it."""
    for part in ("global", "shared::cta", "tensormap::generic", "release"):
        d.modifiers.one_of(part)
    d.modifiers.ignore("cta", "cluster", "gpu", "sys", "sync", "aligned")
    d.expect(3)
    if d.operands[2] != Integer(BYTES):
        d.refuse("tensormap.cp_fenceproxy copies 128 bytes")
    to, source = reader(d.address(0), "the destination"), reader(d.address(1), "the source")
    machine = d.machine

    def step(group: Group) -> None:
        targets, sources = to(group), source(group)
        for row in range(len(group)):
            thread = Thread(int(group.index[row]), 0)
            at = sources(row, thread)
            _, data = _map_bytes(machine, thread, at, "shared::cta", False)
            put, _ = _map_bytes(machine, thread, targets(row, thread), "global", True)
            put(data)

    return step


@instruction("fence.proxy.tensormap::generic")
def tensormap_fence(d: Decoder) -> Step:
    """PTX ISA 9.7.13.4: orders changes of tensor maps before their use."""
    acquires = d.modifiers.one_of("acquire", "release") == "acquire"
    d.modifiers.ignore("cta", "cluster", "gpu", "sys")
    d.expect(2 if acquires else 0)
    machine = d.machine
    address = reader(d.address(0), "the address of the tensor map") if acquires else None

    def step(group: Group) -> None:
        if address is None:
            return
        places = address(group)
        for row, thread in threads_of(group):
            _states(machine).acquire(places(row, thread), int(machine.row_cta[thread.row]))

    return step
