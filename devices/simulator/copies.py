"""Copies of registers that compilers make where they like, also of values that are in flight."""

from typing import TYPE_CHECKING

from .ptx_syntax import FloatBits, Instruction, Integer, Operand, Register, Vector
from .registers import RegisterFile

if TYPE_CHECKING:
    from .machine import Machine


class Copies:
    """Which registers are copied to others, and which constants they are given.

    Args:
        machine: whose kernel it is.
        opcode: what the instructions begin with whose registers are watched.

    Attributes:
        watched: registers of D, of A and of metadata, and those that they are copied from.
        constants: of each register.
    """

    def __init__(self, machine: "Machine", opcode: str) -> None:
        self._machine = machine
        self._from: dict[str, set[str]] = {}
        self._to: dict[str, set[str]] = {}
        self.constants: dict[str, set[int]] = {}
        self._registers: dict[str, Register] = {}
        wanted: set[str] = set()
        for instruction in machine.program.instructions:
            if instruction.opcode.startswith("mov."):
                self._note_copy(instruction)
            elif instruction.opcode.startswith(opcode):
                metadata = instruction.operands[3:4] if ".sp." in instruction.opcode else ()
                for operand in (*instruction.operands[:2], Vector(metadata)):
                    wanted |= self._names(operand)
        for name in list(wanted):
            wanted |= self._reach(name, self._from)
        self.watched = [machine.register(self._registers[name]) for name in sorted(wanted)]
        self._targets: dict[str, list[RegisterFile]] = {}

    def sources(self, name: str) -> set[str]:
        """The registers that may be copied to one."""
        return self._reach(name, self._from)

    def targets(self, name: str) -> list[RegisterFile]:
        """The registers that one may be copied to."""
        found = self._targets.get(name)
        if found is None:
            names = sorted(self._reach(name, self._to))
            found = [self._machine.register(self._registers[n]) for n in names]
            self._targets[name] = found
        return found

    def _note_copy(self, instruction: Instruction) -> None:
        to, source = instruction.operands[:2]
        if not isinstance(to, Register):
            return
        if isinstance(source, Register):
            self._registers[to.name], self._registers[source.name] = to, source
            self._from.setdefault(to.name, set()).add(source.name)
            self._to.setdefault(source.name, set()).add(to.name)
        elif isinstance(source, Integer):
            self.constants.setdefault(to.name, set()).add(source.value & 0xFFFFFFFF)
        elif isinstance(source, FloatBits):
            self.constants.setdefault(to.name, set()).add(source.bits & 0xFFFFFFFF)

    def _names(self, operand: Operand) -> set[str]:
        items = operand.items if isinstance(operand, Vector) else ()
        found = {item.name: item for item in items if isinstance(item, Register)}
        self._registers.update(found)
        return set(found)

    @staticmethod
    def _reach(name: str, steps: dict[str, set[str]]) -> set[str]:
        found: set[str] = set()
        left = [name]
        while left:
            for other in steps.get(left.pop(), ()):
                if other not in found and other != name:
                    found.add(other)
                    left.append(other)
        return found
