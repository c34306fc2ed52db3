"""What a machine says when something goes wrong."""

from typing import TYPE_CHECKING

import numpy as np

from .errors import DeadlockError, DivergenceError, SimulationError, Where
from .groups import WARP

if TYPE_CHECKING:
    from .machine import Machine

_LISTED = 8


def where(machine: "Machine", pc: int, thread: tuple[int, int] | None = None) -> Where:
    """The place of a step, and of a thread given by (warp row, lane)."""
    instruction = machine.program.instructions[machine.instruction_of[pc]]
    listing = machine.program.module.listing(instruction.line)
    if thread is None:
        return Where(instruction.line, instruction.text, listing=listing)
    row, lane = thread
    cta = machine.ctas[int(machine.row_cta[row])]
    warp = int(machine.row_warp[row])
    return Where(instruction.line, instruction.text, cta, warp, lane, listing)


def deadlock(machine: "Machine") -> SimulationError:
    """The error for threads of which none can go on; it lists what each waits for."""
    stalled = machine.meetings.waiting()
    divergent = bool(stalled.any())
    row, lane = (int(v) for v in np.argwhere(stalled if divergent else machine.live)[0])
    kind: type[SimulationError] = DivergenceError if divergent else DeadlockError
    told = "no thread can go on"
    if divergent:
        told = "threads of a warp that must execute one instruction together wait in vain"
    error = kind(f"{told}:\n{_waiting(machine)}")
    error.where = where(machine, int(machine.parked_at[row, lane]), (row, lane))
    return error


def endless(machine: "Machine", pc: int) -> SimulationError:
    """The error for a wave that does not come to an end."""
    row, lane = (int(v) for v in np.argwhere(machine.schedule.ready[pc])[0])
    error = DeadlockError(f"the kernel did not end within {machine.options.limit} blocks")
    error.where = where(machine, pc, (row, lane))
    return error


def _waiting(machine: "Machine") -> str:
    """Who waits where, and for what."""
    told: dict[str, list[str]] = {}
    for row in np.flatnonzero(machine.live.any(axis=1)).tolist():
        lanes = machine.live[row]
        for pc in np.unique(machine.parked_at[row][lanes]).tolist():
            there = np.flatnonzero(lanes & (machine.parked_at[row] == pc)).tolist()
            instruction = machine.program.instructions[machine.instruction_of[pc]]
            reason = machine.mbarriers.describe(row, there[0])
            reason = reason or machine.barriers.describe(row, there[0])
            place = f"line {instruction.line}: {instruction.text}"
            place += f" ({reason})" if reason else ""
            who = f"CTA {machine.ctas[int(machine.row_cta[row])]} warp {machine.row_warp[row]}"
            if len(there) < WARP:
                who += f" lanes {', '.join(map(str, there))}"
            told.setdefault(place, []).append(who)
    lines = []
    for place, threads in told.items():
        more = f" and {len(threads) - _LISTED} more" if len(threads) > _LISTED else ""
        lines.append(f"  {place}\n    waited at by {'; '.join(threads[:_LISTED])}{more}")
    return "\n".join(lines)
