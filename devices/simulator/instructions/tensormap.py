"""Tensor maps in memory: what a copy takes, and how they are changed (PTX ISA 9.7.9.26)."""

from typing import Any

import numpy as np

from humming.errors import HummingError

from ..decoder import Decoder, Step, instruction
from ..errors import AsyncHazardError, BoundsError, PoisonError, UndefinedBehaviorError
from ..groups import Group
from ..machine import Machine
from ..memory import PARAM_WINDOW, SHARED_WINDOW
from ..parts import part_of
from ..ptx_syntax import Integer
from ..ranges import (
    Thread,
    check_global,
    failure,
    global_bytes,
    put_global,
    require_multiple,
    shared_offset,
    threads_of,
)
from ..tensor_maps import ALIGN, BYTES, decode
from .bulk_copy import reader


class MapStates:
    """Which tensor maps in global memory have been changed and not acquired."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._changed: dict[int, set[int]] = {}

    def reset(self) -> None:
        """None has been changed."""
        self._changed.clear()

    def finish(self) -> None:
        """Maps may be left changed."""

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
    return part_of(machine, MapStates)


def bytes_of_map(machine: Machine, thread: Thread, address: int) -> bytes:
    """The bytes of the map that a copy of a thread names, checked."""
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
