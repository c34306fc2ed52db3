"""Warpgroups: their `wgmma` under way, and the rules for the registers and memory these use.

PTX ISA 9.7.15.7: a fence before the first one and behind other accesses to its registers, groups
that are committed and waited for. Results arrive with the wait; until then neither the registers
nor the shared memory that is read may change.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .accumulators import (
    Accumulator,
    flags_from_registers,
    from_registers,
    number_of,
)
from .copies import Copies
from .errors import (
    AsyncHazardError,
    DivergenceError,
    SimulationError,
    UndefinedBehaviorError,
)
from .groups import WARP, Array, Group, Lanes
from .memory import fault
from .proxies import WARPGROUP
from .registers import RegisterFile

if TYPE_CHECKING:
    from .machine import Machine

_ONES = np.uint32(0xFFFFFFFF)
PRODUCT = "wgmma.mma_async"
"""What the opcodes of products begin with."""


@dataclass(slots=True, eq=False)
class Part:
    """One warpgroup's part of a product: its warps, and the pieces of memory that it reads."""

    rows: Array
    pieces: Array
    event: int | None = None
    released: bool = False


@dataclass(slots=True, eq=False)
class Product:
    """One `wgmma` that warpgroups execute in step.

    Attributes:
        pc: its step.
        rows: the warps, four for each warpgroup.
        parts: by warpgroup.
        inputs: registers of A and of its metadata, and what they held.
        accumulator: what it writes.
    """

    pc: int
    rows: Array
    parts: list[Part]
    inputs: list[tuple[RegisterFile, Array]] = field(default_factory=list)
    accumulator: Accumulator | None = None


class Warpgroups:
    """State of the warpgroups of a machine."""

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        per_cta = -(-machine.shape.cta_warps // WARPGROUP)
        self._number: Array = machine.row_cta * per_cta + machine.row_warp // WARPGROUP
        self._whole = machine.row_warp // WARPGROUP < machine.shape.cta_warps // WARPGROUP
        self._copies = Copies(machine, PRODUCT)
        machine.meetings.others.append(self.waiting)
        self.reset()

    def reset(self) -> None:
        """Nothing is under way."""
        warps = self._machine.warps
        self._at: dict[int, Lanes] = {}
        self._fenced: Array = np.zeros(warps, np.bool_)
        self._open: list[list[Product]] = [[] for _ in range(warps)]
        self._groups: list[list[list[Product]]] = [[] for _ in range(warps)]
        self._accumulators: dict[int, Accumulator] = {}
        self._latest: dict[tuple[str, ...], Accumulator] = {}
        self._made = 0
        self._held: dict[str, Array] = {}

    # -- meeting --------------------------------------------------------------------------------

    def waiting(self) -> Lanes:
        """Threads that wait for other warps of their warpgroup."""
        found = np.zeros_like(self._machine.live)
        for lanes in self._at.values():
            found |= lanes
        return found

    def gather(self, group: Group, pc: int, opcode: str = PRODUCT) -> Group | None:
        """The complete warpgroups among warps at a step; the other warps wait there.

        Raises:
            DivergenceError: a warp of a warpgroup does not exist or has ended.
        """
        machine = self._machine
        number = self._number[group.index]
        if pc not in self._at and self._are_whole(group, number):
            return group
        lonely = ~self._whole[group.index]
        dead = ~machine.live.any(axis=1)
        lonely |= np.isin(number, self._number[dead & machine.exists.any(axis=1)])
        if lonely.any():
            told = f"{opcode} needs the four warps of a warpgroup, some of which are not there"
            raise fault(DivergenceError, told, group, np.repeat(lonely[:, None], WARP, 1))
        lanes = group.lanes | self._at.pop(pc, np.zeros_like(machine.live))
        there = np.bincount(self._number[lanes.any(axis=1)], minlength=self._number[-1] + 1)
        ready = lanes & (there == WARPGROUP)[self._number][:, None]
        rest = lanes & ~ready
        if rest.any():
            self._at[pc] = rest
            machine.park(pc, rest)
        return machine.group(ready) if ready.any() else None

    def _are_whole(self, group: Group, number: Array) -> bool:
        if len(group) % WARPGROUP:
            return False
        squares = number.reshape(-1, WARPGROUP)
        return bool((squares == squares[:, :1]).all() and self._whole[group.index].all())

    # -- registers ------------------------------------------------------------------------------

    def fence(self, group: Group) -> None:
        """`wgmma.fence`: what the registers hold now may be used."""
        self._fenced[group.index] = True
        for file in self._copies.watched:
            held = self._held.get(file.name)
            if held is None:
                held = self._held[file.name] = np.zeros(file.data.shape, file.data.dtype)
            held[group.rows] = file.data[group.rows]

    def require_fence(self, group: Group) -> None:
        """Raises UndefinedBehaviorError if a warp has not executed `wgmma.fence`."""
        bad = ~self._fenced[group.index]
        if bad.any():
            told = "no wgmma.fence lies before the first wgmma of the warp"
            raise fault(UndefinedBehaviorError, told, group, np.repeat(bad[:, None], WARP, 1))

    def require_fenced(self, group: Group, file: RegisterFile, wanted: Lanes) -> None:
        """Checks that a register has not been written since the fence.

        Args:
            group: who reads it.
            file: the register.
            wanted: bool [n, 1] or [n, 32], where this matters.

        Raises:
            UndefinedBehaviorError: it has been. Copies and constants, which compilers place where
                they like, are taken to have been there before.
        """
        now = file.data[group.rows]
        held = self._held.get(file.name)
        changed = wanted & (now != held[group.rows] if held is not None else True)
        if not changed.any():
            return
        for constant in self._copies.constants.get(file.name, ()):
            changed = changed & (now != constant)
        for source in self._copies.sources(file.name):
            held = self._held.get(source)
            if held is not None:
                changed = changed & (now != held[group.rows])
        if changed.any():
            told = f"the register {file.name} of a wgmma has been written since the last "
            bad = np.broadcast_to(changed, now.shape)
            raise fault(UndefinedBehaviorError, told + "wgmma.fence", group, bad)

    def accumulator_in(
        self, group: Group, files: list[RegisterFile], kind: str, wanted: Array
    ) -> tuple[Array, Array | None, Accumulator | None]:
        """What the accumulator registers of warpgroups stand for.

        Args:
            group: the warps.
            files: the registers.
            kind: PTX type of the values.
            wanted: bool [n], whether the values are used.

        Returns:
            float64 [warpgroups, 64, N], undefined elements, and the accumulator that already holds
            exactly these registers, if one does.
        """
        latest = self._latest.get(tuple(file.name for file in files))
        if latest is not None and self._still_holds(latest, group, files, kind):
            return latest.matrix, latest.undefined, latest
        shape = (len(files), len(group), WARP)
        values, undefined = np.zeros(shape, np.uint32), np.zeros(shape, np.uint32)
        for place, file in enumerate(files):
            now, bad = file.data[group.rows], _poison(file, group)
            own = self._resolve(group, now, bad, kind, len(files), values[place], undefined[place])
            rest = ~own
            if rest.any():
                values[place][rest] = now[rest]
                if bad is not None:
                    undefined[place][rest] = bad[rest]
                defined = True if bad is None else bad == 0
                self.require_fenced(group, file, (rest & wanted)[:, None] & defined)
        bad_elements = flags_from_registers(undefined, kind) if undefined.any() else None
        return from_registers(values, kind), bad_elements, None

    def _still_holds(
        self, latest: Accumulator, group: Group, files: list[RegisterFile], kind: str
    ) -> bool:
        if latest.kind != kind or latest.gone.any() or not np.array_equal(latest.rows, group.index):
            return False
        rows = group.rows
        return all((f.data[rows] == latest.token(i)).all() for i, f in enumerate(files))

    def _resolve(
        self,
        group: Group,
        now: Array,
        bad: Array | None,
        kind: str,
        count: int,
        values: Array,
        undefined: Array,
    ) -> Array:
        """Fills in values for tokens; returns bool [n], which warps have one in this register."""
        own = np.zeros(len(group), np.bool_)
        if bad is None or not self._accumulators:
            return own
        tokens: Array = now[:, 0]
        whole = (bad == _ONES).all(axis=1) & (now == tokens[:, None]).all(axis=1)
        for number in np.unique(tokens[whole] >> 8).tolist():
            found = self._accumulators.get(number)
            if found is None:
                continue
            here = whole & (tokens >> 8 == number) & np.isin(group.index, found.rows)
            if here.any() and (found.kind, len(found.files)) != (kind, count):
                told = "accumulator registers are still being written by a wgmma of another shape"
                lanes = np.repeat(here[:, None], WARP, 1)
                raise fault(AsyncHazardError, f"{told}: no wait covers it", group, lanes)
            at = _places(found.rows, group.index[here])
            places = tokens[here] & 0xFF
            bits, missing = found.registers()
            values[here] = bits[places, at]
            if missing is not None:
                undefined[here] = missing[places, at]
            found.gone[at] = True
            own |= here
        return own

    def begin(
        self,
        group: Group,
        product: Product,
        files: list[RegisterFile],
        kind: str,
        matrix: Array,
        undefined: Array | None,
        known: Accumulator | None,
    ) -> None:
        """Notes a product: its results are in flight from now on."""
        if known is None:
            left = {n: a for n, a in self._accumulators.items() if not a.gone.all()}
            self._accumulators = left
            number = number_of(self._made)
            self._made += 1
            known = Accumulator(number, group.index, files, kind, matrix, undefined, product)
            self._accumulators[number] = known
            self._latest[tuple(file.name for file in files)] = known
            for place, file in enumerate(files):
                file.data[group.rows] = known.token(place)
                file.taint(group, np.broadcast_to(_ONES, (len(group), WARP)))
        else:
            known.change(matrix, undefined, product)
        product.accumulator = known
        for row in group.index.tolist():
            self._open[row].append(product)

    # -- waiting --------------------------------------------------------------------------------

    def commit(self, group: Group) -> None:
        """`wgmma.commit_group`."""
        for row in group.index.tolist():
            self._groups[row].append(self._open[row])
            self._open[row] = []

    def wait(self, group: Group, allowed: int) -> None:
        """`wgmma.wait_group`: all but the last groups of each warp have ended."""
        ended: dict[Product, list[int]] = {}
        for row in group.index.tolist():
            groups = self._groups[row]
            count = max(0, len(groups) - allowed)
            for product in (p for each in groups[:count] for p in each):
                ended.setdefault(product, []).append(row)
            del groups[:count]
        for product, rows in ended.items():
            self._end(product, np.array(rows))

    def _end(self, product: Product, rows: Array) -> None:
        machine = self._machine
        for part in product.parts:
            own = rows[np.isin(rows, part.rows)]
            if not len(own):
                continue
            if not part.released:
                part.released = True
                machine.shared.let_go(part.pieces)
                if machine.races is not None:
                    part.event = machine.races.note_group_read(int(own[0]), part.pieces)
            if machine.races is not None and part.event is not None:
                machine.races.learn_group_read(own, part.event)
        at = _places(product.rows, rows)
        for file, held in product.inputs:
            changed = (file.data[rows] != held[at]).any(axis=1)
            if changed.any():
                told = f"the register {file.name} of an operand has been written before a wait "
                told += "covered it"
                raise self._failure(told, product, int(rows[changed][0]))
        accumulator = product.accumulator
        if accumulator is not None and accumulator.product is product:
            at = _places(accumulator.rows, rows)
            left: Array = ~accumulator.gone[at]
            if left.any():
                self._deliver(accumulator, product, rows[left], at[left])

    def _deliver(self, accumulator: Accumulator, product: Product, rows: Array, at: Array) -> None:
        """Gives registers their values, wherever their tokens have been copied to."""
        lanes = np.zeros_like(self._machine.live)
        lanes[rows] = True
        part = self._machine.group(lanes)
        bits, undefined = accumulator.registers()
        for place, file in enumerate(accumulator.files):
            token = accumulator.token(place)
            missing = None if undefined is None else undefined[place][at]
            found = np.zeros(len(rows), np.bool_)
            for target in (file, *self._copies.targets(file.name)):
                has = (target.data[part.rows] == token).all(axis=1)
                if target is not file:
                    has &= target.poison is not None
                if has.any():
                    self._put(target, part, has, bits[place][at], missing)
                    found |= has
            if not found.all():
                told = f"the accumulator register {file.name} has been written before a wait "
                raise self._failure(told + "covered it", product, int(rows[~found][0]))
        accumulator.gone[at] = True

    def _put(
        self, file: RegisterFile, part: Group, has: Array, values: Array, missing: Array | None
    ) -> None:
        if not has.all():
            lanes = np.zeros_like(part.lanes)
            lanes[part.index[has]] = True
            part = self._machine.group(lanes)
            values = values[has]
            missing = None if missing is None else missing[has]
        file.data[part.rows] = values
        if file.name in self._held:
            self._held[file.name][part.rows] = values
        if missing is not None and missing.any():
            file.taint(part, missing)
        else:
            file.define(part)

    def _failure(self, told: str, product: Product, row: int) -> SimulationError:
        error = AsyncHazardError(told)
        error.thread = (row, 0)
        error.where = self._machine.where(product.pc, error.thread)
        return error

    def finish(self) -> None:
        """Checks, when all threads have ended, that nothing is under way.

        Raises:
            AsyncHazardError: a product that was never waited for.
        """
        for row, groups in enumerate(self._groups):
            for product in [*(p for each in groups for p in each), *self._open[row]]:
                told = "the kernel ends while this wgmma is in flight: no wait covers it"
                raise self._failure(told, product, row)


def _places(rows: Array, some: Array) -> Array:
    """Where some rows are among others."""
    found: Array = np.searchsorted(rows, some)
    return found


def _poison(file: RegisterFile, group: Group) -> Array | None:
    if file.poison is None:
        return None
    found: Array = file.poison[group.rows]
    return found if found.any() else None
