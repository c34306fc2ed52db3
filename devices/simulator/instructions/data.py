"""Moves between registers, addresses and policies (PTX ISA 9.7.9.1-6, .18-.24)."""

from typing import Any

import numpy as np

from ..decoder import Decoder, Step, instruction
from ..errors import PoisonError
from ..groups import Array, Group
from ..memory import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, fault
from ..operands import CLEAN, Source, Target
from ..ptx_syntax import TYPE_BITS, Register, Special, Vector
from ..registers import store
from . import poison


@instruction("mov")
def move(d: Decoder) -> Step:
    """PTX ISA 9.7.9.3-4: a register, constant or address; packs and unpacks vectors."""
    count = d.modifiers.one_of("v2", "v4", default="")
    kind = d.modifiers.type()
    d.expect(2)
    if count:
        return _move_vector(d, kind, int(count[1:]))
    if isinstance(d.operands[0], Vector):
        return _unpack(d, kind)
    if isinstance(d.operands[1], Vector):
        return _pack(d, kind)
    if kind == "b128":
        return _move_128(d)
    source, target = d.source(1, kind), d.target(0, kind)
    return d.elementwise(_same, target, source, poison=poison.bitwise)


def _move_vector(d: Decoder, kind: str, count: int) -> Step:
    """`mov.v4`: element by element, all read before one is written."""
    targets, sources = d.targets(0, kind), d.sources(1, kind)
    if len(targets) != count or len(sources) != count:
        d.refuse(f"mov.v{count} has {count} elements on either side")

    def step(group: Group) -> None:
        read = [(np.copy(source.read(group)), source.poison(group)) for source in sources]
        for target, (values, bad) in zip(targets, read, strict=True):
            target.put(group, values, bad)

    return step


def _same(a: Any) -> Any:
    return a


def _move_128(d: Decoder) -> Step:
    registers = [d.machine.register(o) for o in d.operands if isinstance(o, Register)]
    if len(registers) != 2:
        d.refuse("mov.b128 moves a register")
    if any(register.bits != 128 for register in registers):
        d.refuse("mov.b128 is of registers of 128 bits")
    target, source = registers

    def step(group: Group) -> None:
        mask = None if group.mask is None else group.mask
        values = source.data[group.rows]
        if mask is None:
            target.data[group.rows] = values
        else:
            old = target.data[group.rows]
            target.data[group.rows] = np.where(mask[..., None], values, old)
        if source.poison is not None:
            target.taint(group, source.poison[group.rows])
        else:
            target.define(group)

    return step


def _unpack(d: Decoder, kind: str) -> Step:
    """`mov.b32 {lo, hi}, a`: the first element is the least significant."""
    items = d.items(0)
    width = TYPE_BITS[kind] // len(items)
    if TYPE_BITS[kind] == 128:
        return _unpack_128(d)
    source = d.source(1, f"b{TYPE_BITS[kind]}")
    targets = [d.target(item, f"b{width}") for item in items]
    part = np.dtype(f"u{width // 8}")

    def step(group: Group) -> None:
        values = np.broadcast_to(source.read(group), (len(group), 32))
        parts = np.ascontiguousarray(values).view(part).reshape(len(group), 32, len(targets))
        undefined = source.poison(group)
        if undefined is not None:
            undefined = np.ascontiguousarray(undefined).view(part).reshape(parts.shape)
        for place, target in enumerate(targets):
            bad = None if undefined is None else undefined[..., place]
            target.put(group, parts[..., place], bad)

    return step


def _unpack_128(d: Decoder) -> Step:
    targets = d.targets(0, "b64")
    register = next(d.machine.register(o) for o in d.operands if isinstance(o, Register))

    def step(group: Group) -> None:
        for place, target in enumerate(targets):
            bad = None if register.poison is None else register.poison[group.rows][..., place]
            target.put(group, register.data[group.rows][..., place], bad)

    return step


def _pack(d: Decoder, kind: str) -> Step:
    """`mov.b32 a, {lo, hi}`."""
    items = d.items(1)
    bits = TYPE_BITS[kind]
    width = bits // len(items)
    sources = d.sources(1, f"b{width}")
    if bits == 128:
        return _pack_128(d, sources)
    target = d.target(0, f"b{bits}")
    wide = np.dtype(f"u{bits // 8}")

    def step(group: Group) -> None:
        target.put(group, _packed(group, [s.read(group) for s in sources], wide), bad(group))

    def bad(group: Group) -> Array | None:
        parts = [s.poison(group) for s in sources]
        if all(part is None for part in parts):
            return None
        zeros = np.zeros((len(group), 32), np.dtype(f"u{width // 8}"))
        return _packed(group, [zeros if part is None else part for part in parts], wide)

    return step


def _pack_128(d: Decoder, sources: list[Source]) -> Step:
    if not isinstance(d.operands[0], Register):
        d.refuse("mov.b128 writes a register")
    register = d.machine.register(d.operands[0])

    def step(group: Group) -> None:
        values = [np.broadcast_to(s.read(group), (len(group), 32)) for s in sources]
        parts = [s.poison(group) for s in sources]
        store(register.data, group, np.stack(values, axis=-1))
        if any(part is not None for part in parts):
            zeros = np.zeros((len(group), 32), np.uint64)
            bad = np.stack([zeros if part is None else part for part in parts], axis=-1)
            register.taint(group, bad)
        else:
            register.define(group)

    return step


def _packed(group: Group, values: list[Any], wide: Any) -> Array:
    shape = (len(group), 32)
    parts = np.stack([np.broadcast_to(v, shape) for v in values], axis=-1)
    return parts.view(wide)[..., 0]


_WINDOWS = {
    "global": 0,
    "const": 0,
    "shared": SHARED_WINDOW,
    "shared::cta": SHARED_WINDOW,
    "shared::cluster": SHARED_WINDOW,
    "local": LOCAL_WINDOW,
    "param": PARAM_WINDOW,
    "param::entry": PARAM_WINDOW,
}


@instruction("cvta")
def convert_address(d: Decoder) -> Step:
    """PTX ISA 9.7.9.20: between the addresses of a state space and generic ones."""
    leaves = d.modifiers.flag("to")
    space = d.modifiers.one_of(*_WINDOWS)
    kind = d.modifiers.one_of("u32", "u64")
    d.expect(2)
    if kind != "u64":
        d.refuse("generic addresses have 64 bits")
    window = np.uint64(_WINDOWS[space])
    function = (lambda a: a - window) if leaves else (lambda a: a + window)
    return d.elementwise(function, d.target(0, "u64"), d.source(1, "u64"))


@instruction("isspacep")
def is_in_space(d: Decoder) -> Step:
    """PTX ISA 9.7.9.19: whether a generic address lies in a state space.

    Constant variables have a window of their own; that of parameters lies in the global one.
    """
    space = d.modifiers.one_of(*_WINDOWS)
    d.expect(2)
    source, target = d.source(1, "u64"), d.target(0, "pred")
    window = np.uint64(_WINDOWS[space] >> 56)
    constants = d.machine.constants
    if space in ("global", "const"):

        def in_global(a: Any) -> Array:
            constant = np.zeros(np.shape(a), np.bool_)
            for start, end in constants():
                constant |= (a >= np.uint64(start)) & (a < np.uint64(end))
            if space == "const":
                return constant
            top = a >> np.uint64(56)
            return ((top == 0) | (top == np.uint64(PARAM_WINDOW >> 56))) & ~constant

        return d.elementwise(in_global, target, source)
    if space in ("shared", "shared::cta"):
        own = d.source(Special("%cluster_ctarank"), "u64")
        return d.elementwise(
            lambda a, rank: (a >> np.uint64(24)) == (window << np.uint64(32) | rank),
            target,
            source,
            own,
        )
    return d.elementwise(lambda a: (a >> np.uint64(56)) == window, target, source)


@instruction("mapa")
def map_address(d: Decoder) -> Step:
    """PTX ISA 9.7.9.23: the address of the same place in another CTA of the cluster."""
    d.modifiers.flag("shared::cluster")
    kind = d.modifiers.one_of("u32", "u64")
    d.expect(3)
    clear = np.array(~(0xFF << 24) & ((1 << int(kind[1:])) - 1), np.dtype(f"u{int(kind[1:]) // 8}"))

    def function(address: Any, rank: Any) -> Array:
        bits = np.asarray(rank).astype(clear.dtype) << clear.dtype.type(24)
        return (address & clear[()]) | bits

    return d.elementwise(function, d.target(0, kind), d.source(1, kind), d.source(2, "u32"))


@instruction("getctarank")
def rank_of_address(d: Decoder) -> Step:
    """PTX ISA 9.7.9.24: the rank of the CTA that a shared address belongs to."""
    d.modifiers.flag("shared::cluster")
    kind = d.modifiers.one_of("u32", "u64")
    d.expect(2)
    return d.elementwise(
        lambda a: (np.asarray(a) >> 24 & 0xFF).astype(np.uint32),
        d.target(0, "u32"),
        d.source(1, kind),
    )


@instruction("createpolicy")
def create_policy(d: Decoder) -> Step:
    """PTX ISA 9.7.9.18: cache policies mean nothing here."""
    d.modifiers.left.clear()
    target: Target = d.target(0, "u64")

    def step(group: Group) -> None:
        target.put(group, np.uint64(0))

    return step


def require_defined(source: Source, group: Group, what: str) -> Any:
    """The values of an operand that must be defined.

    Raises:
        PoisonError: in some thread it is not.
    """
    if source.register is not CLEAN:
        bad = source.poison(group)
        if bad is not None:
            raise fault(PoisonError, f"{what} is undefined", group, bad != 0)
    return source.read(group)
