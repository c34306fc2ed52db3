"""Registers that `tcgen05.ld` has not written yet: their values arrive with `tcgen05.wait::ld`.

Until then they are undefined, and each holds a token of its own: wherever `mov` has carried it to,
the value is delivered. A register that has lost its token has been written too early.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .copies import Copies
from .errors import AsyncHazardError
from .groups import WARP, Array, Group
from .parts import part_of
from .registers import RegisterFile

if TYPE_CHECKING:
    from .machine import Machine

_ONES = np.uint32(0xFFFFFFFF)
_FIRST, _NUMBERS = 0x800000, 0x7FFFFF
"""The tokens of a load are its number in bits 31:8, and the register's place in bits 7:0."""


@dataclass(slots=True, eq=False)
class _Load:
    """A load of some warps.

    Attributes:
        number: of its tokens.
        rows: the warps that have not waited.
        files: the registers; None for those that nobody wants.
        values, poison: uint32 [registers, warps, 32].
        pc: its step.
    """

    number: int
    rows: Array
    files: list[RegisterFile | None]
    values: Array
    poison: Array
    pc: int

    def token(self, place: int) -> Array:
        return np.uint32(self.number << 8 | place)


class TensorLoads:
    """The registers of loads of tensor memory that are under way."""

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self._copies = Copies(machine, "tcgen05.ld")
        self.reset()

    def reset(self) -> None:
        """Nothing is under way."""
        self._loads: list[_Load] = []
        self._made = 0

    def finish(self) -> None:
        """Tensor memory itself complains about loads that were never waited for."""

    def begin(
        self,
        threads: Group,
        pc: int,
        files: list[RegisterFile | None],
        values: Array,
        poison: Array,
    ) -> None:
        """Whole warps begin a load.

        Args:
            threads: the warps.
            pc: the step.
            files: the registers.
            values, poison: what they will hold, uint32 [n, registers, 32].
        """
        number = _FIRST + self._made % _NUMBERS
        self._made += 1
        load = _Load(number, threads.index, files, values.swapaxes(0, 1), poison.swapaxes(0, 1), pc)
        undefined = np.broadcast_to(_ONES, (len(threads), WARP))
        for place, file in enumerate(files):
            if file is not None:
                file.data[threads.rows] = load.token(place)
                file.taint(threads, undefined)
        self._loads.append(load)

    def wait(self, threads: Group) -> None:
        """`tcgen05.wait::ld`: the registers of some warps have their values.

        Raises:
            AsyncHazardError: one of them has been written in between.
        """
        left = []
        for load in self._loads:
            own = np.isin(load.rows, threads.index)
            if own.any():
                self._deliver(load, own)
            if not own.all():
                rest = ~own
                load.rows = load.rows[rest]
                load.values, load.poison = load.values[:, rest], load.poison[:, rest]
                left.append(load)
        self._loads = left

    def _deliver(self, load: _Load, own: Array) -> None:
        lanes = np.zeros_like(self._machine.live)
        lanes[load.rows[own]] = True
        part = self._machine.group(lanes)
        for place, file in enumerate(load.files):
            if file is None:
                continue
            token = load.token(place)
            found = np.zeros(len(part), np.bool_)
            for target in (file, *self._copies.targets(file.name)):
                if target.poison is None or target.bits != file.bits:
                    continue
                undefined = target.poison[part.rows]
                has = ((target.data[part.rows] == token) & (undefined == _ONES)).all(axis=1)
                if has.any():
                    self._put(target, part, has, load.values[place][own], load.poison[place][own])
                    found |= has
            if not found.all():
                told = f"the register {file.name} of tcgen05.ld has been written before a "
                error = AsyncHazardError(f"{told}tcgen05.wait::ld covered it")
                row = int(part.index[~found][0])
                error.where = self._machine.where(load.pc, (row, 0))
                raise error

    def _put(self, file: RegisterFile, part: Group, has: Array, values: Array, bad: Array) -> None:
        if not has.all():
            lanes = np.zeros_like(part.lanes)
            lanes[part.index[has]] = True
            part, values, bad = self._machine.group(lanes), values[has], bad[has]
        file.data[part.rows] = values
        if bad.any():
            file.taint(part, bad)
        else:
            file.define(part)


def tensor_loads(machine: "Machine") -> TensorLoads:
    """The loads of a machine, made when an instruction first needs them."""
    return part_of(machine, TensorLoads)
