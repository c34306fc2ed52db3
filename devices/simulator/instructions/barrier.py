"""Barriers of warps, CTAs and clusters, and barrier objects (PTX ISA 9.7.13.1-3 and .15)."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..decoder import STOP, Decoder, Step, instruction
from ..errors import UndefinedBehaviorError
from ..groups import Array, Group
from ..meetings import Exchange, Waiting
from ..memory import fault
from ..operands import Source, Target
from .data import require_defined
from .memory import shared_addresses

Given = Sequence[Source]
Results = Sequence[Target]
Places = Sequence[Waiting]


def _uniform(source: Source, group: Group, what: str) -> int:
    """The value of an operand that all threads must agree about."""
    values = np.asarray(require_defined(source, group, what))
    if values.ndim == 0:
        return int(values)
    first = values[group.active()][0] if group.mask is not None else values.flat[0]
    differs = values != first
    if group.mask is not None:
        differs &= group.mask
    if differs.any():
        raise fault(UndefinedBehaviorError, f"threads disagree about {what}", group, differs)
    return int(first)


def _by_value(d: Decoder, source: Source, group: Group, what: str) -> list[tuple[int, Group]]:
    """Parts of a group by the value of an operand, which the threads of a warp agree about."""
    values = np.asarray(require_defined(source, group, what))
    if values.ndim == 0:
        return [(int(values), group)]
    active = group.active()
    found = np.unique(values[active])
    first = np.where(active, values, values.max()).min(axis=1, keepdims=True)
    if ((values != first) & active).any():
        told = f"threads of a warp disagree about {what}"
        raise fault(UndefinedBehaviorError, told, group, (values != first) & active)
    if len(found) == 1:
        return [(int(found[0]), group)]
    return [(int(v), d.machine.group(group.spread((values == v) & active))) for v in found]


@instruction("bar.sync", "bar.cta.sync", together="live")
def bar_sync(d: Decoder) -> Step:
    """PTX ISA 9.7.13.1, the aligned form."""
    return _step(_sync(d))


@instruction("barrier.sync", "barrier.cta.sync")
def barrier_sync(d: Decoder) -> Step:
    """PTX ISA 9.7.13.1; without .aligned the threads of a warp still count as one here."""
    return _together(d, _sync)


def _step(exchange: Exchange) -> Step:
    return lambda group: exchange.run(group, None, exchange.sources, exchange.targets, ())


def _together(d: Decoder, build: Callable[[Decoder], Exchange]) -> Step:
    """Adds the meeting of a warp's threads: barriers count whole warps.

    With .aligned they are at one place, without it anywhere.
    """
    aligned = d.modifiers.flag("aligned")
    exchange = build(d)
    return together_live(d, _step(exchange), None if aligned else exchange)


def together_live(d: Decoder, step: Step, exchange: Exchange | None = None) -> Step:
    """A step that the living threads of a warp execute together."""
    machine, pc = d.machine, d.pc
    opcode = d.opcode if exchange is None else d.instruction.opcode

    def together(group: Group) -> int | None:
        whole = group.mask is None
        if not whole and not machine.meetings.whole_warps(group, pc, False, opcode, exchange):
            return STOP
        return step(group)

    return together


def _sync(d: Decoder) -> Exchange:
    d.expect(1, 2)
    machine, pc = d.machine, d.pc

    def run(group: Group, _: Any, given: Given, __: Results, waiting: Places) -> int | None:
        parts = _by_value(d, given[0], group, "the number of the barrier")
        action: int | None = None
        for which, part in parts:
            threads = _threads(given[1:], part)
            action = machine.barriers.arrive(part, pc, which, threads, places=waiting)
            if action is None and len(parts) > 1:
                machine.put(pc + 1, part.lanes)
        return action if len(parts) == 1 else STOP

    return Exchange(pc, [d.source(i, "u32") for i in range(len(d.operands))], [], run)


def _threads(count: Given, group: Group) -> int | None:
    """How many threads take part, by an operand that may be missing."""
    return _uniform(count[0], group, "the number of threads") if count else None


@instruction("bar.arrive", "bar.cta.arrive", together="live")
def bar_arrive(d: Decoder) -> Step:
    """PTX ISA 9.7.13.1."""
    return _step(_arrive(d))


@instruction("barrier.arrive", "barrier.cta.arrive")
def barrier_arrive(d: Decoder) -> Step:
    """PTX ISA 9.7.13.1."""
    return _together(d, _arrive)


def _arrive(d: Decoder) -> Exchange:
    d.expect(2)
    machine, pc = d.machine, d.pc

    def run(group: Group, _: Any, given: Given, __: Results, ___: Places) -> None:
        for which, part in _by_value(d, given[0], group, "the number of the barrier"):
            threads = _threads(given[1:], part)
            machine.barriers.arrive(part, pc, which, threads, waits=False)

    return Exchange(pc, [d.source(0, "u32"), d.source(1, "u32")], [], run)


@instruction("bar.red", "bar.cta.red", together="live")
def bar_reduce(d: Decoder) -> Step:
    """PTX ISA 9.7.13.1."""
    return _step(_reduce(d))


@instruction("barrier.red", "barrier.cta.red")
def barrier_reduce(d: Decoder) -> Step:
    """PTX ISA 9.7.13.1."""
    return _together(d, _reduce)


def _reduce(d: Decoder) -> Exchange:
    operation = d.modifiers.one_of("popc", "and", "or")
    kind = d.modifiers.one_of("u32", "pred")
    d.expect(3, 4)
    machine, pc = d.machine, d.pc
    vote = d.source(len(d.operands) - 1, "pred")
    numbers = [d.source(i, "u32") for i in range(1, len(d.operands) - 1)]

    def run(group: Group, _: Any, given: Given, results: Results, waiting: Places) -> int | None:
        which = _uniform(given[1], group, "the number of the barrier")
        votes = require_defined(given[0], group, "the predicate")
        return machine.barriers.arrive(
            group,
            pc,
            which,
            _threads(given[2:], group),
            votes=np.broadcast_to(votes, (len(group), 32)),
            reduction=operation,
            target=results[0],
            places=waiting,
        )

    return Exchange(pc, [vote, *numbers], [d.target(0, kind)], run)


@instruction("barrier.cluster.arrive")
def cluster_arrive(d: Decoder) -> Step:
    """PTX ISA 9.7.13.3."""
    relaxed = d.modifiers.flag("relaxed")
    d.modifiers.ignore("release")
    aligned = d.modifiers.flag("aligned")
    d.expect(0)
    machine = d.machine

    def step(group: Group) -> None:
        machine.mbarriers.publish(group.index)
        machine.cluster_barrier.arrive(group, relaxed=relaxed)

    return together_live(d, step) if aligned else step


@instruction("barrier.cluster.wait")
def cluster_wait(d: Decoder) -> Step:
    """PTX ISA 9.7.13.3."""
    d.modifiers.ignore("acquire")
    aligned = d.modifiers.flag("aligned")
    d.expect(0)
    machine, pc = d.machine, d.pc

    def step(group: Group) -> int | None:
        return machine.cluster_barrier.wait(group, pc)

    return together_live(d, step) if aligned else step


# -- barrier objects ------------------------------------------------------------------------------


class _Object:
    """The operand that names a barrier object: its offset in shared memory."""

    def __init__(self, d: Decoder, operand: int, default: str = "") -> None:
        space = d.modifiers.one_of("shared", "shared::cta", "shared::cluster", default=default)
        self.relaxed = d.modifiers.flag("relaxed")
        d.modifiers.ignore("cta", "cluster", "acquire", "release")
        self._addresses = shared_addresses(d, operand, space == "")
        self._cluster = space == "shared::cluster"
        self._shared = d.machine.shared

    def read(self, group: Group) -> Array:
        """Offsets, int64 [n, 32]."""
        return self._shared.place(group, self._addresses(group), 8, True, self._cluster)


@instruction("mbarrier.init")
def mbarrier_init(d: Decoder) -> Step:
    """PTX ISA 9.7.13.15.9."""
    place = _Object(d, 0)
    d.modifiers.one_of("b64")
    d.expect(2)
    count = d.source(1, "u32")
    machine = d.machine

    def step(group: Group) -> None:
        counts = require_defined(count, group, "the number of arrivals")
        machine.mbarriers.initialize(group, place.read(group), counts)

    return step


@instruction("mbarrier.inval")
def mbarrier_inval(d: Decoder) -> Step:
    """PTX ISA 9.7.13.15.10."""
    place = _Object(d, 0)
    d.modifiers.one_of("b64")
    d.expect(1)
    machine = d.machine

    def step(group: Group) -> None:
        machine.mbarriers.invalidate(group, place.read(group))

    return step


@instruction("mbarrier.expect_tx", "mbarrier.complete_tx")
def mbarrier_bytes(d: Decoder) -> Step:
    """PTX ISA 9.7.13.15.11-12."""
    place = _Object(d, 0)
    d.modifiers.one_of("b64")
    d.expect(2)
    size = d.source(1, "u32")
    machine, expects = d.machine, d.opcode.endswith("expect_tx")

    def step(group: Group) -> None:
        sizes = require_defined(size, group, "the number of bytes")
        offsets = place.read(group)
        if expects:
            machine.mbarriers.expect(group, offsets, sizes)
            return
        active = group.active()
        values = np.broadcast_to(sizes, active.shape)
        for offset, value in zip(offsets[active].tolist(), values[active].tolist(), strict=True):
            machine.mbarriers.complete_bytes(offset, value)

    return step


@instruction("mbarrier.arrive", "mbarrier.arrive_drop")
def mbarrier_arrive(d: Decoder) -> Step:
    """PTX ISA 9.7.13.15.13-14."""
    expects = d.modifiers.flag("expect_tx")
    completes = not d.modifiers.flag("noComplete")
    drops = d.opcode.endswith("drop")
    has_state = not hasattr(d.operands[0], "base")
    place = _Object(d, 1 if has_state else 0)
    d.modifiers.one_of("b64")
    target = d.target(0, "u64") if has_state else None
    rest = d.operands[2 if has_state else 1 :]
    amount = d.source(rest[0], "u32") if rest else None
    machine = d.machine

    def step(group: Group) -> None:
        offsets = place.read(group)
        counts: Any = np.uint32(1)
        if amount is not None:
            counts = require_defined(amount, group, "the count")
        if expects:
            machine.mbarriers.expect(group, offsets, counts)
            counts = np.uint32(1)
        states = machine.mbarriers.arrive(
            group, offsets, counts, drop=drops, relaxed=place.relaxed, completes=completes
        )
        if target is not None:
            target.put(group, states)

    return step


@instruction("mbarrier.test_wait", "mbarrier.try_wait")
def mbarrier_wait(d: Decoder) -> Step:
    """PTX ISA 9.7.13.15.16: test_wait answers at once; try_wait sleeps until the phase is over."""
    sleeps = d.opcode.endswith("try_wait")
    by_parity = d.modifiers.flag("parity")
    place = _Object(d, 1)
    d.modifiers.one_of("b64")
    d.expect(3, 4)
    target = d.target(0, "pred")
    asked = d.source(2, "u32" if by_parity else "u64")
    machine, pc = d.machine, d.pc

    def step(group: Group) -> int | None:
        offsets = place.read(group)
        value = require_defined(asked, group, "the phase")
        mbarriers = machine.mbarriers
        if by_parity:
            done = mbarriers.completed(group, offsets, value, None, relaxed=place.relaxed)
        else:
            done = mbarriers.completed(group, offsets, None, value, relaxed=place.relaxed)
        active = group.active()
        lacking = active & ~done
        if not lacking.any():
            target.put(group, np.True_)
            return None
        if not sleeps:
            target.put(group, done)
            machine.schedule.yield_soon()
            return None
        expired = mbarriers.wait(group, pc, offsets, lacking)
        for lanes, result in ((active & done, np.True_), (expired, np.False_)):
            if lanes.any():
                spread = group.spread(lanes)
                target.put(machine.group(spread), result)
                machine.put(pc + 1, spread)
        return STOP

    return step


@instruction("mbarrier.pending_count")
def mbarrier_pending(d: Decoder) -> Step:
    """PTX ISA 9.7.13.15.17: arrivals that were pending when a state was taken."""
    d.modifiers.one_of("b64")
    d.expect(2)
    return d.elementwise(
        lambda state: (state & np.uint64(0xFFFFFFFF)).astype(np.uint32),
        d.target(0, "u32"),
        d.source(1, "u64"),
    )
