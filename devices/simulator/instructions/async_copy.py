"""Asynchronous copies that threads wait for: `cp.async` (PTX ISA 9.7.9.25.3)."""

import numpy as np

from ..decoder import Decoder, Step, instruction
from ..errors import UndefinedBehaviorError
from ..groups import Group
from ..memory import fault
from ..ptx_syntax import Integer, Register
from .data import require_defined
from .memory import shared_addresses


@instruction("cp.async")
def copy(d: Decoder) -> Step:
    """PTX ISA 9.7.9.25.3.1: 4, 8 or 16 bytes a thread, of which some may be zeros."""
    bypasses = d.modifiers.one_of("ca", "cg") == "cg"
    d.modifiers.one_of("shared", "shared::cta")
    d.modifiers.one_of("global")
    hinted = d.modifiers.flag("L2::cache_hint")
    d.modifiers.ignore_prefixes("L2::")
    operands = d.operands[:-1] if hinted else d.operands
    if len(operands) not in (3, 4):
        d.refuse("cp.async has two addresses, a size, and perhaps the size of the source")
    size = operands[2]
    if not isinstance(size, Integer) or size.value not in ((16,) if bypasses else (4, 8, 16)):
        d.refuse("cp.async copies 16 bytes, or with .ca also 4 or 8")
    machine, pc = d.machine, d.pc
    total = size.value
    to, source = d.address(0), d.address(1)
    limit = operands[3] if len(operands) == 4 else None
    ignores = isinstance(limit, Register) and limit.type == "pred"
    amount = None if limit is None else d.source(limit, "pred" if ignores else "u32")

    def step(group: Group) -> None:
        shape = (len(group), 32)
        taken = np.full(shape, total, np.uint64)
        if amount is not None:
            told = require_defined(amount, group, "the size of the source")
            part = np.where(told, 0, total) if ignores else told
            taken = np.broadcast_to(part, shape).astype(np.uint64)
            if (beyond := (taken > total) & group.active()).any():
                what = f"a source of more than the {total} bytes that cp.async copies"
                raise fault(UndefinedBehaviorError, what, group, beyond)
        shared = machine.shared
        offsets = shared.place(group, to.read(group), total, True, False)
        shared.check_settled(group, offsets, total, "another asynchronous copy to")
        if machine.races is not None:
            machine.races.check_overwrite(group, offsets, total)
        addresses = source.read(group)
        machine.copies.issue(group, pc, offsets, addresses, total, taken)

    return step


@instruction("cp.async.commit_group")
def commit(d: Decoder) -> Step:
    """PTX ISA 9.7.9.25.3.2."""
    d.expect(0)
    machine = d.machine

    def step(group: Group) -> None:
        machine.copies.commit(group)

    return step


@instruction("cp.async.wait_group")
def wait(d: Decoder) -> Step:
    """PTX ISA 9.7.9.25.3.3: all but the last groups of the thread are complete."""
    d.expect(1)
    allowed = d.operands[0]
    if not isinstance(allowed, Integer):
        d.refuse("the number of groups is a constant")
    machine, count = d.machine, allowed.value

    def step(group: Group) -> None:
        machine.copies.wait(group, count)

    return step


@instruction("cp.async.wait_all")
def wait_all(d: Decoder) -> Step:
    """PTX ISA 9.7.9.25.3.3."""
    d.expect(0)
    machine = d.machine

    def step(group: Group) -> None:
        machine.copies.wait_all(group)

    return step


@instruction("cp.async.mbarrier.arrive")
def arrive_after_copies(d: Decoder) -> Step:
    """PTX ISA 9.7.13.15.15: an arrival once all earlier copies of the thread are complete."""
    counted = d.modifiers.flag("noinc")
    explicit = d.modifiers.one_of("shared", "shared::cta", default="")
    d.modifiers.one_of("b64")
    d.expect(1)
    addresses = shared_addresses(d, 0, not explicit)
    machine, pc = d.machine, d.pc

    def step(group: Group) -> None:
        offsets = machine.shared.place(group, addresses(group), 8, True, False)
        if not counted:
            machine.mbarriers.raise_pending(group, offsets)
        active = group.active()
        rows = np.broadcast_to(group.index[:, None], active.shape)[active]

        mark = machine.copies.mark()

        def finish() -> None:
            machine.copies.wait_all_before(group, mark)
            for row, offset in zip(rows.tolist(), offsets[active].tolist(), strict=True):
                machine.mbarriers.arrive_late(offset, 1, row)

        machine.completions.add(finish, pc)

    return step
