"""Exchange between the threads of a warp (PTX ISA 9.7.9.5-6, 9.7.13.5-9)."""

from typing import Any

import numpy as np

from ..decoder import STOP, Decoder, Step, instruction
from ..groups import WARP, Array, Group
from ..meetings import Exchange, bits_of_lanes
from ..operands import Source, Target
from .data import require_defined

_LANE = np.arange(WARP, dtype=np.int64)


def _members(
    d: Decoder, mask: Source, sources: list[Source], targets: list[Target], run: Any
) -> Step:
    """A step that first brings together the threads that a mask names.

    `run` gets the group, masks uint32 [n, 32], and the operands of all of them.
    """

    def execute(group: Group, masks: Any, *operands: Any) -> None:
        run(group, masks, *operands[:2])

    machine, opcode = d.machine, d.instruction.opcode
    exchange = Exchange(d.pc, sources, targets, execute)

    def together(group: Group) -> int | None:
        masks = np.broadcast_to(require_defined(mask, group, "the mask"), (len(group), WARP))
        whole = group.mask is None and bool((masks == 0xFFFFFFFF).all())
        if not whole and not machine.meetings.members(group, masks, opcode, exchange):
            return STOP
        run(group, masks, sources, targets)
        return None

    return together


@instruction("shfl.sync")
def shuffle(d: Decoder) -> Step:
    """PTX ISA 9.7.9.6: the value of another thread."""
    mode = d.modifiers.one_of("up", "down", "bfly", "idx")
    d.modifiers.one_of("b32")
    d.expect(5)
    result, inside = d.pair(0)
    targets = [d.target(result, "b32"), d.target(inside, "pred")]
    sources = [d.source(1, "b32"), *(d.source(i, "u32", given="b32") for i in (2, 3))]

    def run(group: Group, masks: Array, given: list[Source], results: list[Target]) -> None:
        (value, other, clamp), (target, valid) = given, results
        shape = (len(group), WARP)
        by = np.asarray(require_defined(other, group, "the lane")).astype(np.int64)
        limits = np.asarray(require_defined(clamp, group, "the clamp")).astype(np.int64)
        b, last, segment = by & 31, limits & 31, limits >> 8 & 31
        most, least = (_LANE & segment) | (last & ~segment), _LANE & segment
        if mode == "up":
            place = _LANE - b
            good = place >= most
        elif mode == "down":
            place = _LANE + b
            good = place <= most
        elif mode == "bfly":
            place = _LANE ^ b
            good = place <= most
        else:
            place = least | (b & ~segment)
            good = place <= most
        good = np.broadcast_to(good, shape)
        place = np.where(good, place, np.broadcast_to(_LANE, shape))
        values = np.broadcast_to(value.read(group), shape)
        taken = np.take_along_axis(values, place, axis=1)
        undefined = value.poison(group)
        bad = None if undefined is None else np.take_along_axis(undefined, place, axis=1)
        if group.mask is not None:
            # The value of a thread that does not take part is undefined.
            absent = ~np.take_along_axis(group.mask, place, axis=1)
            if (absent & group.mask).any():
                bad = np.where(absent, np.uint32(0xFFFFFFFF), 0 if bad is None else bad)
        target.put(group, taken, bad)
        valid.put(group, good)

    return _members(d, d.source(4, "u32"), sources, targets, run)


@instruction("vote.sync")
def vote(d: Decoder) -> Step:
    """PTX ISA 9.7.13.6."""
    mode = d.modifiers.one_of("all", "any", "uni", "ballot")
    kind = d.modifiers.one_of("pred", "b32")
    d.expect(3)
    sources, targets = [d.source(1, "pred")], [d.target(0, kind)]

    def run(group: Group, masks: Array, given: list[Source], answers: list[Target]) -> None:
        (predicate,), (target,) = given, answers
        active = group.active()
        votes = np.broadcast_to(predicate.read(group), active.shape) & active
        there = bits_of_lanes(active)[:, None] & masks
        ayes = bits_of_lanes(votes)[:, None] & masks
        results = {
            "ballot": ayes,
            "any": ayes != 0,
            "all": ayes == there,
            "uni": (ayes == 0) | (ayes == there),
        }
        undefined = predicate.poison(group)
        bad: Array | None = None
        if undefined is not None:
            bits = bits_of_lanes(undefined & active)[:, None] & masks
            bad = bits if mode == "ballot" else bits != 0
        target.put(group, results[mode], bad)

    return _members(d, d.source(2, "u32"), sources, targets, run)


@instruction("match.any.sync", "match.all.sync")
def match(d: Decoder) -> Step:
    """PTX ISA 9.7.13.7: which threads have the same value."""
    kind = d.modifiers.one_of("b32", "b64")
    every = d.opcode == "match.all.sync"
    d.expect(3)
    first, second = d.pair(0)
    sources, targets = [d.source(1, kind)], [d.target(first, "u32"), d.target(second, "pred")]

    def run(group: Group, masks: Array, given: list[Source], results: list[Target]) -> None:
        (value,), (target, agreed) = given, results
        active = group.active()
        values = np.broadcast_to(require_defined(value, group, "the value"), active.shape)
        same = (values[:, :, None] == values[:, None, :]) & active[:, None, :]
        bits = bits_of_lanes(same.reshape(-1, WARP)).reshape(active.shape) & masks
        if every:
            there = bits_of_lanes(active)[:, None] & masks
            agreed.put(group, bits == there)
            bits = np.where(bits == there, masks, np.uint32(0))
        target.put(group, bits)

    return _members(d, d.source(2, "u32"), sources, targets, run)


@instruction("activemask")
def active_mask(d: Decoder) -> Step:
    """PTX ISA 9.7.13.8: the threads that execute this together."""
    d.modifiers.one_of("b32")
    d.expect(1)
    target = d.target(0, "b32")

    def step(group: Group) -> None:
        target.put(group, np.broadcast_to(bits_of_lanes(group.active())[:, None], (len(group), 32)))

    return step


_REDUCTIONS: dict[str, Any] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@instruction("redux.sync")
def reduce(d: Decoder) -> Step:
    """PTX ISA 9.7.13.9: one result for all threads of a mask."""
    operation = d.modifiers.one_of(*_REDUCTIONS)
    absolute, keeps_nan = d.modifiers.flag("abs"), d.modifiers.flag("NaN")
    kind = d.modifiers.one_of("u32", "s32", "b32", "f32")
    d.expect(3)
    sources, targets = [d.source(1, kind)], [d.target(0, kind)]
    function = _REDUCTIONS[operation]
    if kind == "f32" and not keeps_nan:
        function = {"min": np.fmin, "max": np.fmax}[operation]

    def run(group: Group, masks: Array, given: list[Source], results: list[Target]) -> None:
        (value,), (target,) = given, results
        active = group.active()
        values = np.broadcast_to(require_defined(value, group, "the value"), active.shape)
        values = np.abs(values) if absolute else values
        result = np.zeros(active.shape, values.dtype)
        for mask in np.unique(masks[active]):
            own = active & (masks == mask)
            for row in np.flatnonzero(own.any(axis=1)):
                result[row, own[row]] = function.reduce(values[row, own[row]])
        target.put(group, result)

    return _members(d, d.source(2, "u32"), sources, targets, run)


@instruction("elect.sync")
def elect(d: Decoder) -> Step:
    """PTX ISA 9.7.13.10: the lowest thread of the mask is the leader."""
    d.expect(2)
    first, second = d.pair(0)
    targets = [d.target(first, "u32"), d.target(second, "pred")]

    def run(group: Group, masks: Array, given: list[Source], results: list[Target]) -> None:
        target, leads = results
        there = masks & bits_of_lanes(group.active())[:, None]
        lowest = there & (~there + np.uint32(1))
        leader = np.log2(np.maximum(lowest, 1).astype(np.float64)).astype(np.uint32)
        target.put(group, leader)
        leads.put(group, leader == _LANE)

    return _members(d, d.source(1, "u32"), [], targets, run)


@instruction("bar.warp.sync")
def warp_sync(d: Decoder) -> Step:
    """PTX ISA 9.7.13.2."""
    d.expect(1)
    return _members(d, d.source(0, "u32"), [], [], lambda *_: None)
