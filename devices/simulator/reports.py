"""What a machine says when something goes wrong."""

from typing import TYPE_CHECKING

import numpy as np

from .errors import DeadlockError, DivergenceError, SimulationError, Where
from .groups import WARP, Array, Lanes

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
    error = kind(f"{told}:\n{_waiting(machine, machine.parked_at, np.zeros_like(machine.live))}")
    error.where = where(machine, int(machine.parked_at[row, lane]), (row, lane))
    return error


def polling(machine: "Machine", not_started: int) -> SimulationError:
    """The error for threads that run for ever, as nobody writes what they wait for.

    Args:
        machine: whose threads these are.
        not_started: CTAs of the grid that begin when others have ended.
    """
    told = "the kernel never ends: what runs does the same again and again, and nobody writes"
    told += " what it reads"
    if not_started:
        held = len(machine.ctas)
        told += f". {not_started} more CTAs start only when one of these {held} ends, which are all"
        told += " that the device holds at once"
    ready = np.zeros_like(machine.live)
    places = machine.parked_at.copy()
    for pc, lanes in machine.schedule.ready.items():
        ready |= lanes
        places[lanes] = pc
    polls = ready & (machine.watch.polled_by >= 0)
    places = np.where(polls, machine.watch.polled_by, places)
    row, lane = (int(v) for v in np.argwhere(polls if polls.any() else ready)[0])
    error = DeadlockError(f"{told}:\n{_waiting(machine, places, ready)}")
    error.where = where(machine, int(places[row, lane]), (row, lane))
    return error


def endless(machine: "Machine", pc: int) -> SimulationError:
    """The error for a wave that does not come to an end."""
    row, lane = (int(v) for v in np.argwhere(machine.schedule.ready[pc])[0])
    error = DeadlockError(
        f"the kernel did not end within {machine.options.max_basic_blocks} basic blocks "
        "(Options.max_basic_blocks)"
    )
    error.where = where(machine, pc, (row, lane))
    return error


def _waiting(machine: "Machine", places: Array, running: Lanes) -> str:
    """Who waits where, and for what: steps and threads that run, both [warps, 32]."""
    told: dict[str, list[str]] = {}
    for row in np.flatnonzero(machine.live.any(axis=1)).tolist():
        lanes = machine.live[row]
        for pc in np.unique(places[row][lanes]).tolist():
            there = np.flatnonzero(lanes & (places[row] == pc)).tolist()
            reason = _reason(machine, pc, row, there[0], bool(running[row, there[0]]))
            instruction = machine.program.instructions[machine.instruction_of[pc]]
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


def _reason(machine: "Machine", pc: int, row: int, lane: int, runs: bool) -> str:
    """What a thread waits for."""
    if not runs:
        reason = machine.mbarriers.describe(row, lane) or machine.barriers.describe(row, lane)
        return reason or ("the rest of its warp" if machine.meetings.waiting()[row, lane] else "")
    if machine.watch.polled_by[row, lane] != pc:
        return "a loop that does not end"
    opcode = machine.program.instructions[machine.instruction_of[pc]].opcode
    address = int(machine.watch.polled[row, lane])
    return f"reads {machine.place_of(opcode, address)} again and again"
