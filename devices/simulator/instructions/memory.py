"""Loads and stores in every state space (PTX ISA 9.7.9.8-13)."""

from typing import Any

import numpy as np

from ..decoder import Decoder, Step, instruction
from ..errors import PoisonError
from ..groups import Array, Group
from ..machine import Machine
from ..memory import SHARED_WINDOW, Space, active_range, fault, window_of
from ..ptx_syntax import TYPE_BITS, Address, Register, Symbol, Vector
from ..registers import store as put
from . import forms

_SPACES = (
    "global",
    "shared",
    "shared::cta",
    "shared::cluster",
    "local",
    "param",
    "param::entry",
    "param::func",
    "const",
)
_STRONG = ("volatile", "relaxed", "acquire", "release", "acq_rel")
_SCOPES = ("cta", "cluster", "gpu", "sys")
_TYPES = tuple(kind for kind in TYPE_BITS if kind != "pred")


class Access:
    """What an opcode says about an access to memory, and the loads and stores for it.

    Attributes:
        space: the state space by name; "" is generic.
        semantics: `relaxed`, `acquire` and so on; "" is weak.
        strong: whether it takes part in the order between threads.
        far: whether its scope is more than the CTA or cluster.
    """

    def __init__(self, d: Decoder) -> None:
        modifiers = d.modifiers
        self.space = modifiers.one_of(*_SPACES, default="")
        mmio = modifiers.flag("mmio")
        orders = [part for part in modifiers.left if part in ("weak", *_STRONG)]
        scopes = [part for part in modifiers.left if part in _SCOPES]
        wrong = forms.order(d.opcode, orders, scopes, mmio)
        if wrong:
            d.refuse(wrong)
        self.strong = bool(orders) and orders != ["weak"]
        self.semantics = orders[0] if self.strong else ""
        self.far = not {"cta", "cluster"} & set(scopes)
        modifiers.ignore(*orders, *scopes)
        modifiers.ignore("nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "unified")
        modifiers.ignore_prefixes("L1::", "L2::")
        self.count = int(modifiers.one_of("v2", "v4", "v8", default="v1")[1:])
        self.machine, self._pc = d.machine, d.pc

    def load(
        self, group: Group, addresses: Array, size: int, count: int = 1
    ) -> tuple[Array, Array | None]:
        """Values [n, 32] (or [n, 32, count]) and their undefined bits."""
        values, bad = self._load(group, addresses, size, count)
        if bad is not None and self._pc not in self.machine.undefined_loads:
            where = bad != 0 if bad.ndim == 2 else (bad != 0).any(axis=-1)
            self.machine.undefined_loads[self._pc] = int(addresses[where][0])
        return values, bad

    def _load(
        self, group: Group, addresses: Array, size: int, count: int
    ) -> tuple[Array, Array | None]:
        space = self._space(group, addresses)
        if space is None:
            return self._load_mixed(group, addresses, size, count)
        where, addresses = space
        if where is self.machine.shared:
            return self._load_shared(group, addresses, size, count)
        if self.strong and where is self.machine.memory:
            found = self.machine.memory.load(group, addresses, size, count, strong=True)
            self.order(group, addresses, where, reads=True)
            return found
        return where.load(group, addresses, size, count)

    def store(
        self,
        group: Group,
        addresses: Array,
        values: Array,
        poison: Array | None,
        size: int,
        count: int = 1,
    ) -> None:
        """Writes values; what is stored to global memory must be defined."""
        space = self._space(group, addresses)
        if space is None:
            for part, rows in self._windows(group, addresses):
                bad = None if poison is None else poison[rows]
                self.store(part, addresses[rows], values[rows], bad, size, count)
            return
        where, addresses = space
        if where is self.machine.memory and poison is not None:
            bad = poison != 0
            bad = bad if count == 1 and bad.ndim == 2 else bad.any(axis=-1)
            if (bad & group.active()).any():
                told = "an undefined value is stored to global memory"
                raise fault(PoisonError, told, group, bad)
        if where is self.machine.shared and self.space in ("", "shared::cluster"):
            shared = self.machine.shared
            offsets = shared.place(group, addresses, size * count, True, True)
            shared.check_settled(group, offsets, size * count, "a store to")
            self._put_shared(group, offsets, values, poison, size, count)
            return
        if self.strong and where is self.machine.shared:
            offsets = where.locate(group, addresses, size * count, True)
            self._put_shared(group, offsets, values, poison, size, count)
            return
        if self.strong and where is self.machine.memory:
            self.machine.memory.store(group, addresses, values, poison, size, count, strong=True)
            self.order(group, addresses, where, reads=False)
            return
        where.store(group, addresses, values, poison, size, count)

    def order(self, group: Group, places: Array, where: Space, *, reads: bool) -> None:
        """Passes on, or takes, what strong operations order by the places that they access."""
        machine = self.machine
        races, memory = machine.races, machine.memory
        if races is None or memory.order is None:
            return
        locations = memory.order.locations if where is memory else machine.locations
        done = locations.has_read if reads else locations.wrote
        seen = set()
        for row, lane in np.argwhere(group.active()).tolist():
            pair = int(group.index[row]), int(places[row, lane])
            if pair not in seen:
                seen.add(pair)
                done(races, *pair, self.semantics, self.far)

    def _put_shared(
        self,
        group: Group,
        offsets: Array,
        values: Array,
        poison: Array | None,
        size: int,
        count: int,
    ) -> None:
        shared = self.machine.shared
        shared.put(group, offsets, values, poison, size, count, strong=self.strong)
        if self.strong:
            self.order(group, offsets, shared, reads=False)

    def _load_shared(
        self, group: Group, addresses: Array, size: int, count: int
    ) -> tuple[Array, Array | None]:
        shared = self.machine.shared
        cluster = self.space in ("", "shared::cluster")
        found = shared.load(group, addresses, size, count, strong=self.strong, cluster=cluster)
        if self.strong:
            offsets = shared.place(group, addresses, size * count, False, cluster)
            self.order(group, offsets, shared, reads=True)
        return found

    def _space(self, group: Group, addresses: Array) -> tuple[Space, Array] | None:
        """The space of all active threads' addresses, with them; None if there are several."""
        machine = self.machine
        name = self.space
        if name in ("global", "const"):
            return machine.memory, addresses
        if name.startswith("shared"):
            return machine.shared, addresses
        if name == "local":
            return machine.local, addresses
        if name.startswith("param"):
            return machine.params, addresses
        least, greatest, _ = active_range(group, addresses)
        window = least >> 56
        if window != greatest >> 56:
            return None
        if window == 0:
            return machine.memory, addresses
        base = np.uint64(window << 56)
        spaces = {1: machine.shared, 2: machine.local, 3: machine.params}
        return spaces.get(window, machine.memory), addresses - base

    def _windows(self, group: Group, addresses: Array) -> list[tuple[Group, Any]]:
        """The parts of a group that access one space each, with their rows in the group's."""
        windows = window_of(addresses)
        found = []
        for window in np.unique(windows[group.active()]):
            part = self.machine.group(group.spread(windows == window))
            found.append((part, np.searchsorted(group.index, part.index)))
        return found

    def _load_mixed(
        self, group: Group, addresses: Array, size: int, count: int
    ) -> tuple[Array, Array | None]:
        values: Array | None = None
        poison: Array | None = None
        for part, rows in self._windows(group, addresses):
            loaded, bad = self.load(part, addresses[rows], size, count)
            if values is None:
                values = np.zeros((len(group), *loaded.shape[1:]), loaded.dtype)
            active = part.active() if loaded.ndim == 2 else part.active()[..., None]
            values[rows] = np.where(active, loaded, values[rows])
            if bad is not None:
                poison = np.zeros_like(values) if poison is None else poison
                poison[rows] = np.where(active, bad, poison[rows])
        assert values is not None
        return values, poison


@instruction("ld", "ldu")
def load(d: Decoder) -> Step:
    """PTX ISA 9.7.9.8-10."""
    access = Access(d)
    kind = d.modifiers.one_of(*_TYPES)
    d.expect(2, 3)
    if kind == "b128":
        return _load_128(d, access)
    size = TYPE_BITS[kind] // 8
    # Bits as they are, but for signed types, which a wider register extends.
    stored = kind if kind[0] == "s" else f"b{8 * size}"
    targets = d.targets(0, stored, given=kind, wider=not is_vector(d.operands[0]))
    if len(targets) != access.count:
        d.refuse(f"{len(targets)} registers for a vector of {access.count}")
    machine = d.machine
    address = d.operands[1]
    constant = _param_offset(machine, address)
    if access.space.startswith("param") and constant is not None:
        return _load_param(machine, constant, kind, targets)
    frame = _frame_offset(machine, address)
    addresses = d.address(1)
    signed = np.dtype(f"i{size}") if kind[0] == "s" else None
    pc, repeats, polls = d.pc, d.in_loop, access.strong

    def step(group: Group) -> None:
        at = addresses.read(group)
        if frame is None:
            values, bad = access.load(group, at, size, access.count)
        else:
            values, bad = machine.frames.load(group, at, size, access.count)
        if repeats:
            machine.polled(group, pc, at, polls)
        if signed is not None:
            values = values.view(signed)
        if access.count == 1:
            targets[0].put(group, values, bad)
            return
        for place, target in enumerate(targets):
            part = None if bad is None else bad[..., place]
            target.put(group, values[..., place], None if part is None or not part.any() else part)

    return step


def _param_offset(machine: Machine, operand: Any) -> int | None:
    """Offset of an address in the kernel's parameters, where the instruction says it."""
    if isinstance(operand, Address) and isinstance(operand.base, Symbol):
        start = machine.program.params.get(operand.base.name)
        return None if start is None else start + operand.offset
    return None


def _frame_offset(machine: Machine, operand: Any) -> int | None:
    """Offset of an address in the parameters of calls."""
    if isinstance(operand, Address) and isinstance(operand.base, Symbol):
        found = machine.program.frames.get(operand.base.name)
        return None if found is None else found[0] + operand.offset
    return None


def _load_param(machine: Machine, offset: int, kind: str, targets: Any) -> Step:
    """A load of parameters at a fixed place: the same value for all threads."""
    size = TYPE_BITS[kind] // 8
    code = f"{'i' if kind[0] == 's' else 'u'}{size}"
    end = machine.program.param_bytes

    def step(group: Group) -> None:
        if offset < 0 or offset + size * len(targets) > end or offset % (size * len(targets)):
            machine.params.load(group, np.full((len(group), 32), offset, np.uint64), size)
        data = machine.params.memory.data[offset : offset + size * len(targets)].view(code)
        for target, value in zip(targets, data, strict=True):
            target.put(group, value)

    return step


def wide_register(d: Decoder, operand: Any) -> Any:
    """A register of 128 bits, whose data and poison are [warps, 32, 2]."""
    if not isinstance(operand, Register) or d.machine.register(operand).bits != 128:
        d.refuse("an operand of .b128 is a register of that type")
    return d.machine.register(operand)


def read_wide(group: Group, register: Any) -> tuple[Array, Array | None]:
    """What a register of 128 bits holds, [n, 32, 2], and its undefined bits."""
    bad = None
    if register.poison is not None:
        bad = np.where(group.active()[..., None], register.poison[group.rows], np.uint64(0))
        bad = bad if bad.any() else None
    return register.data[group.rows], bad


def write_wide(group: Group, register: Any, values: Array, bad: Array | None) -> None:
    """Writes a register of 128 bits, of values [n, 32, 2]."""
    put(register.data, group, values)
    if bad is None:
        register.define(group)
    else:
        register.taint(group, bad)


def _load_128(d: Decoder, access: Access) -> Step:
    """`ld.b128`, as a load of two words of 64 bits."""
    if access.count != 1 or access.space.startswith("param"):
        d.refuse("ld.b128 reads one register, from any space but that of parameters")
    register, addresses = wide_register(d, d.operands[0]), d.address(1)

    def step(group: Group) -> None:
        write_wide(group, register, *access.load(group, addresses.read(group), 8, 2))

    return step


def _store_128(d: Decoder, access: Access) -> Step:
    """`st.b128`, the reverse."""
    if access.count != 1 or access.space.startswith("param"):
        d.refuse("st.b128 writes one register, to any space but that of parameters")
    register, addresses = wide_register(d, d.operands[1]), d.address(0)

    def step(group: Group) -> None:
        values, bad = read_wide(group, register)
        access.store(group, addresses.read(group), values, bad, 8, 2)

    return step


@instruction("st")
def store(d: Decoder) -> Step:
    """PTX ISA 9.7.9.11."""
    access = Access(d)
    kind = d.modifiers.one_of(*_TYPES)
    d.expect(2, 3)
    if kind == "b128":
        return _store_128(d, access)
    size = TYPE_BITS[kind] // 8
    stored = f"b{8 * size}" if kind[0] != "f" else kind
    values = d.sources(1, stored, given=kind, wider=not is_vector(d.operands[1]))
    if len(values) != access.count:
        d.refuse(f"{len(values)} registers for a vector of {access.count}")
    machine = d.machine
    frame = _frame_offset(machine, d.operands[0])
    addresses = d.address(0)
    unsigned = np.dtype(f"u{size}")

    def gathered(group: Group, parts: list[Any]) -> Array:
        arrays = [np.broadcast_to(np.asarray(p), (len(group), 32)).view(unsigned) for p in parts]
        return arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=-1)

    def step(group: Group) -> None:
        data = gathered(group, [source.read(group) for source in values])
        bad = [source.poison(group) for source in values]
        poison = None
        if any(part is not None for part in bad):
            zeros = np.zeros((len(group), 32), unsigned)
            poison = gathered(group, [zeros if part is None else part for part in bad])
        at = addresses.read(group)
        if frame is None:
            access.store(group, at, data, poison, size, access.count)
        else:
            machine.frames.store(group, at, data, poison, size, access.count)

    return step


def shared_addresses(d: Decoder, operand: int, generic: bool) -> Any:
    """Reads addresses of shared memory, as they are or of generic ones, uint64 [n, 32]."""
    source = d.address(operand)
    window = np.uint64(SHARED_WINDOW)
    if not generic:
        return source.read
    return lambda group: source.read(group) - window


def is_vector(operand: Any) -> bool:
    """Whether an operand is written in braces."""
    return isinstance(operand, Vector)
