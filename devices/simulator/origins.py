"""Where undefined values may come from: what an instruction computes with, followed backwards.

Values carry no history, so this tells what is possible: registers that nobody has written, loads
that did read undefined memory, and instructions that make a result undefined.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .ptx_syntax import Address, Instruction, Not, Operand, Pair, Register, Vector

if TYPE_CHECKING:
    from .machine import Machine

_MAKERS = {
    "div": "undefined where it divides by zero",
    "rem": "undefined where it divides by zero",
    "shfl": "undefined where it reads a thread that does not take part",
}
_WITHOUT_RESULT = ("st", "red", "bra", "brx", "bar", "barrier")
_LISTED = 6


def origins(machine: "Machine", pc: int, thread: tuple[int, int]) -> str:
    """Lines on where what a thread found undefined at a step may come from; empty if unknown."""
    program = machine.program
    writers: dict[str, list[int]] = {}
    for index, instruction in enumerate(program.instructions):
        for register in _registers(_results(instruction)):
            writers.setdefault(register.name, []).append(index)
    start = machine.instruction_of[pc]
    pending, seen, told = [start], {start}, []
    while pending:
        index = pending.pop(0)
        told += _made_at(machine, index, thread)
        for register in _inputs(program.instructions[index], index == start):
            file = machine.register(register)
            if file.poison is None or not file.poison[thread].any():
                continue
            if file.untouched:
                told.append(f"register {register.name}, which nothing has written")
            for writer in writers.get(register.name, ()):
                if writer not in seen:
                    seen.add(writer)
                    pending.append(writer)
    told = list(dict.fromkeys(told))
    return "".join(f"\n    it may come from {each}" for each in told[:_LISTED])


def _made_at(machine: "Machine", index: int, thread: tuple[int, int]) -> list[str]:
    """What an instruction has made undefined, or may have."""
    instruction = machine.program.instructions[index]
    place = f"line {instruction.line}: {instruction.text}"
    address = machine.undefined_loads.get(machine.step_of[index])
    if address is not None:
        where = machine.place_of(instruction.opcode, address)
        return [f"{place} (nobody has written what it read: {where})"]
    why = _MAKERS.get(instruction.opcode.split(".")[0])
    return [f"{place} ({why})"] if why else []


def _results(instruction: Instruction) -> tuple[Operand, ...]:
    has = instruction.opcode.split(".")[0] not in _WITHOUT_RESULT
    return instruction.operands[:1] if has else ()


def _inputs(instruction: Instruction, at_fault: bool) -> Iterator[Register]:
    """The registers that an instruction computes with; where it failed, those of addresses too."""
    operands = instruction.operands[len(_results(instruction)) :]
    if instruction.guard is not None:
        yield instruction.guard.register
    yield from _registers(operands, addresses=at_fault)


def _registers(operands: tuple[Operand, ...], addresses: bool = False) -> Iterator[Register]:
    for operand in operands:
        if isinstance(operand, Register):
            yield operand
        elif isinstance(operand, Vector):
            yield from _registers(operand.items)
        elif isinstance(operand, Pair):
            yield from _registers((operand.first, operand.second))
        elif addresses and isinstance(operand, Address):
            yield from _registers((operand.base, *operand.extra))
        elif isinstance(operand, Not):
            yield from _registers((operand.operand,))
