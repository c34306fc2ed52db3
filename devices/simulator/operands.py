"""Operands of instructions: what is read, what is written, and the modifiers of an opcode."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .groups import Array, Group
from .ptx_syntax import TYPE_BITS
from .registers import STORAGE, RegisterFile, all_ones, store


class Modifiers:
    """The parts of an opcode behind its registered beginning."""

    def __init__(self, parts: Sequence[str]) -> None:
        self.left = list(parts)

    def flag(self, name: str) -> bool:
        """Takes a modifier if it is there."""
        if name in self.left:
            self.left.remove(name)
            return True
        return False

    def one_of(self, *names: str, default: str | None = None) -> str:
        """Takes the first modifier that is one of these; KeyError if none is and no default."""
        for part in self.left:
            if part in names:
                self.left.remove(part)
                return part
        if default is None:
            raise KeyError(f"none of .{', .'.join(names)}")
        return default

    def ignore(self, *names: str) -> None:
        """Takes modifiers that change nothing here."""
        self.left = [part for part in self.left if part not in names]

    def ignore_prefixes(self, *prefixes: str) -> None:
        """Takes modifiers that begin with one of these, such as `L2::`."""
        self.left = [part for part in self.left if not part.startswith(prefixes)]

    def type(self, default: str | None = None) -> str:
        """Takes the first modifier that is a type."""
        return self.one_of(*TYPE_BITS, default=default)


class _Clean:
    """Stands for the register of an operand that is never undefined."""

    poison: Array | None = None


CLEAN: Any = _Clean()


class Source:
    """An operand that is read.

    Attributes:
        read: values of a group's threads: [n, 32], or a scalar that is the same for all.
        register: whose poison it has; `CLEAN` for constants.
        dtype: of the values.
    """

    __slots__ = ("dtype", "read", "register")

    def __init__(self, read: Callable[[Group], Any], register: Any, dtype: Any) -> None:
        self.read, self.register, self.dtype = read, register, dtype

    def poison(self, group: Group) -> Array | None:
        """Which bits are undefined in the active threads: unsigned [n, 32]; None if none are."""
        if self.register.poison is None:
            return None
        found: Array = self.register.poison[group.rows]
        bits = STORAGE[8 * np.dtype(self.dtype).itemsize] if self.dtype is not np.bool_ else None
        if bits is not None and found.dtype != bits:
            found = found.astype(bits)
        if group.mask is not None:
            found = np.where(group.mask, found, found.dtype.type(0))
        return found if found.any() else None


class Target:
    """A register that is written, or nothing at all.

    Attributes:
        register: the register file; None for `_`.
    """

    __slots__ = ("_data", "_extend", "register")

    def __init__(self, register: RegisterFile | None, dtype: Any, extend: Any = None) -> None:
        self.register = register
        self._extend = extend
        if register is not None:
            self._data: Array = register.data if extend is not None else register.data.view(dtype)

    def put(self, group: Group, values: Any, poison: Array | None = None) -> None:
        """Writes values of a group's threads, with their undefined bits."""
        register = self.register
        if register is None:
            return
        if self._extend is not None:
            # Into a register wider than the value: extended by the sign of its type.
            values = np.asarray(values).astype(self._extend).astype(register.data.dtype)
            if poison is not None:
                poison = np.where(poison != 0, all_ones(register.data.dtype.type), 0)
        if group.mask is None:
            self._data[group.rows] = values
        else:
            store(self._data, group, values)
        if poison is not None:
            register.taint(group, poison)
        elif register.poison is not None:
            register.define(group)


def converted(source: Source, dtype: Any) -> Source:
    """The same operand in another type."""
    read = source.read
    return Source(lambda group: read(group).astype(dtype), source.register, dtype)


def smear(target: Target) -> Callable[..., Array | None]:
    """The rule that any undefined bit of an operand makes the whole result undefined."""
    ones = np.True_ if target.register is None else all_ones(target.register.data.dtype.type)
    none = type(ones)(0)

    def rule(values: list[Any], poisons: list[Array | None]) -> Array | None:
        bad = None
        for poison in poisons:
            if poison is not None:
                bad = poison != 0 if bad is None else bad | (poison != 0)
        return None if bad is None else np.where(bad, ones, none)

    return rule
