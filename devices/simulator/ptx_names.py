"""Names of PTX: scopes that hide each other's, and what the operands of instructions stand for."""

import re
from dataclasses import dataclass, field, replace

from .errors import PtxSyntaxError, Where
from .ptx_syntax import (
    Address,
    Instruction,
    Label,
    Module,
    Not,
    Operand,
    Pair,
    Register,
    Special,
    Symbol,
    Variable,
    Vector,
)

_ORDINARY = re.compile(r"%(?!pm)[a-z]{1,2}\d+$")
"""Names that compilers give to registers, and that no special register has (PTX ISA 10)."""


@dataclass(slots=True)
class Scope:
    """Names that are visible in a `{ }` block; inner blocks hide those of outer ones."""

    outer: "Scope | None" = None
    suffix: str = ""
    names: dict[str, Register | Variable | Label | Vector] = field(default_factory=dict)

    def find(self, name: str) -> "Register | Variable | Label | Vector | None":
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.outer
        return None


def resolved(instruction: Instruction, scope: Scope, module: Module) -> Instruction:
    """The instruction with registers, labels and variables in place of their names.

    Raises:
        PtxSyntaxError: a name that is not declared.
    """
    return _Resolver(instruction, scope, module).instruction()


class _Resolver:
    def __init__(self, instruction: Instruction, scope: Scope, module: Module) -> None:
        self._instruction, self._scope, self._module = instruction, scope, module
        self._is_call = instruction.opcode.startswith("call")

    def instruction(self) -> Instruction:
        operands = tuple(map(self._resolve, self._instruction.operands))
        return replace(self._instruction, operands=operands)

    def _resolve(self, operand: Operand) -> Operand:
        if isinstance(operand, Symbol):
            return self._meaning(operand)
        if isinstance(operand, Address):
            base = self._resolve(operand.base)
            offset = operand.offset
            if isinstance(base, Symbol):  # a variable: one offset instead of two
                base, offset = replace(base, offset=0), offset + base.offset
            return Address(base, offset, tuple(map(self._resolve, operand.extra)))
        if isinstance(operand, Vector):
            return Vector(tuple(map(self._resolve, operand.items)))
        if isinstance(operand, Pair):
            return Pair(self._resolve(operand.first), self._resolve(operand.second))
        if isinstance(operand, Not):
            return Not(self._resolve(operand.operand))
        return operand

    def _meaning(self, symbol: Symbol) -> Operand:
        found = self._scope.find(symbol.name)
        if isinstance(found, (Register, Label)) and symbol.offset == 0:
            return found
        if isinstance(found, Vector):  # the labels of a branch table
            return Vector(tuple(map(self._resolve, found.items)))
        if isinstance(found, Variable):
            return Symbol(found.name, symbol.offset)
        if found is None and symbol.name[0] == "%" and not _ORDINARY.match(symbol.name):
            return Special(symbol.name)
        known = self._module.variables, self._module.functions
        if found is None and (self._is_call or any(symbol.name in names for names in known)):
            return symbol
        inst = self._instruction
        where = Where(inst.line, inst.text, listing=self._module.listing(inst.line))
        raise PtxSyntaxError(f"the name {symbol.name!r} is not declared", where)
