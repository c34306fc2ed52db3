"""How many registers warpgroups have (PTX ISA 9.7.19.5, `setmaxnreg`)."""

import math
from collections.abc import Iterator

import numpy as np

from ..decoder import STOP, Decoder, Step, instruction
from ..errors import UndefinedBehaviorError
from ..groups import WARP, Array, Group
from ..machine import Machine
from ..memory import fault
from ..parts import part_of
from ..proxies import WARPGROUP
from ..ptx_syntax import Integer
from ..warpgroups import Warpgroups

_LEAST, _MOST, _STEP = 24, 256, 8
_PER_CTA = 65536


class RegisterBudget:
    """The registers of each warp, and those that a CTA has left over.

    What a kernel starts with is what its directives allow: ptxas gives it all of that.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        limits = machine.program.entry.limits
        threads = limits.get("maxntid") or limits.get("reqntid")
        self._start = 0
        if "maxnreg" in limits:
            self._start = limits["maxnreg"][0]
        elif threads:
            ctas = (limits.get("minnctapersm") or (1,))[0]
            each = _PER_CTA // (math.prod(threads) * max(ctas, 1))
            self._start = min(each // _STEP * _STEP, _MOST - 1)
        self.reset()

    def reset(self) -> None:
        """Every warp has what it starts with."""
        self._count: Array = np.full(self._machine.warps, self._start, np.int64)
        self._free = [0] * self._machine.shape.ctas
        self._waiting: list[tuple[int, Array, int]] = []

    def finish(self) -> None:
        """Nothing has to be given back."""

    def change(self, group: Group, pc: int, count: int, grows: bool) -> int | None:
        """Whole warpgroups take or give registers; they wait where a CTA has too few left."""
        if not self._start:
            told = "the kernel says no number of registers or threads (.maxnreg, .maxntid), "
            told += "without which setmaxnreg means nothing"
            raise fault(UndefinedBehaviorError, told, group, group.active())
        now = self._count[group.index]
        bad = now > count if grows else now < count
        if bad.any():
            what = "more" if grows else "less"
            told = f"setmaxnreg.{'inc' if grows else 'dec'} to {count} registers, and the warp "
            told += f"has {what}, {int(now[bad][0])}"
            raise fault(UndefinedBehaviorError, told, group, np.repeat(bad[:, None], WARP, 1))
        went_on = [self._take(rows, count) for rows in self._groups(group)]
        if all(went_on):
            self._wake()
            return None
        for rows, done in zip(self._groups(group), went_on, strict=True):
            lanes = np.zeros_like(self._machine.live)
            lanes[rows] = self._machine.live[rows]
            if done:
                self._machine.put(pc + 1, lanes)
            else:
                self._waiting.append((pc, rows, count))
                self._machine.park(pc, lanes)
        return STOP

    def _groups(self, group: Group) -> Iterator[Array]:
        yield from group.index.reshape(-1, WARPGROUP)

    def _take(self, rows: Array, count: int) -> bool:
        """Gives a warpgroup so many registers, if its CTA has them."""
        cta = int(self._machine.row_cta[rows[0]])
        more = int((count - self._count[rows]).sum()) * WARP
        if more > self._free[cta]:
            return False
        self._free[cta] -= more
        self._count[rows] = count
        return True

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for pc, rows, count in waiting:
            if self._take(rows, count):
                lanes = np.zeros_like(self._machine.live)
                lanes[rows] = self._machine.live[rows]
                self._machine.put(pc + 1, lanes)
                self._machine.progress += 1
            else:
                self._waiting.append((pc, rows, count))


@instruction("setmaxnreg", together="warp")
def set_registers(d: Decoder) -> Step:
    """All warps of a warpgroup execute it; more registers come from what others have given."""
    grows = d.modifiers.one_of("inc", "dec") == "inc"
    for part in ("sync", "aligned", "u32"):
        d.modifiers.one_of(part)
    d.expect(1)
    count = d.operands[0]
    if not isinstance(count, Integer):
        d.refuse("the number of registers is a constant")
    wanted = count.value
    if not _LEAST <= wanted <= _MOST or wanted % _STEP:
        d.refuse(f"{wanted} registers: a multiple of {_STEP} from {_LEAST} to {_MOST} is needed")
    budget, warpgroups = part_of(d.machine, RegisterBudget), part_of(d.machine, Warpgroups)
    machine, pc = d.machine, d.pc

    def step(group: Group) -> int | None:
        ready = warpgroups.gather(group, pc, "setmaxnreg")
        if ready is None:
            return STOP
        action = budget.change(ready, pc, wanted, grows)
        if action is None and ready is not group:
            machine.put(pc + 1, ready.lanes)
            return STOP
        return action

    return step
