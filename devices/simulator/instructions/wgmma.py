"""Products of a warpgroup: `wgmma` (PTX ISA 9.7.15).

As for `mma`, products are exact, and all of an instruction are added to the accumulator in float64
and rounded once. Hopper's tensor cores keep fewer bits, above all for 8-bit floating-point types.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .. import fragments, sparsity
from ..accumulators import rounded
from ..decoder import STOP, Decoder, Step, instruction
from ..errors import BoundsError, UndefinedBehaviorError
from ..groups import WARP, Array, Group
from ..machine import Machine
from ..memory import fault
from ..operands import Source
from ..parts import part_of
from ..proxies import WARPGROUP
from ..ptx_syntax import Integer, Register, Vector
from ..ranges import Thread, begin_read, shared_bytes, undefined_in
from ..registers import RegisterFile
from ..shared_memory import PIECE
from ..warpgroups import Part, Product, Warpgroups
from ..wgmma_descriptors import START, layout_of
from .data import require_defined
from .matrix import operand_values
from .sparse_matrix import take_metadata

_WIDTHS = {
    "f16": 16,
    "bf16": 16,
    "tf32": 32,
    "e4m3": 8,
    "e5m2": 8,
    "s8": 8,
    "u8": 8,
    "b1": 1,
}
_FAMILIES = (("f16",), ("bf16",), ("tf32",), ("e4m3", "e5m2"), ("s8", "u8"), ("b1",))
_ROWS, _K_BYTES = 64, 32


@instruction("wgmma.fence.sync.aligned", together="warp")
def fence(d: Decoder) -> Step:
    """PTX ISA 9.7.15.7.1."""
    d.expect(0)
    return part_of(d.machine, Warpgroups).fence


@instruction("wgmma.commit_group.sync.aligned", together="warp")
def commit(d: Decoder) -> Step:
    """PTX ISA 9.7.15.7.2."""
    d.expect(0)
    return part_of(d.machine, Warpgroups).commit


@instruction("wgmma.wait_group.sync.aligned", together="warp")
def wait(d: Decoder) -> Step:
    """PTX ISA 9.7.15.7.3."""
    d.expect(1)
    allowed = d.operands[0]
    if not isinstance(allowed, Integer):
        d.refuse("the number of groups is a constant")
    warpgroups, count = part_of(d.machine, Warpgroups), allowed.value
    return lambda group: warpgroups.wait(group, count)


@dataclass(frozen=True, slots=True)
class _Form:
    """What the opcode and the constants of a product say.

    Attributes:
        n, k: of the shape.
        kind, a, b: types of D, A and B.
        saturates: whether integers are.
        signs: factors of A and B, 1 or -1.
        transposed: whether M is contiguous in A, and N in B.
        sparse: whether A has half of its elements, and metadata.
    """

    n: int
    k: int
    kind: str
    a: str
    b: str
    saturates: bool
    signs: tuple[int, int]
    transposed: tuple[bool, bool]
    sparse: bool


def _form(d: Decoder) -> _Form:
    modifiers = d.modifiers
    shape = next((m for m in modifiers.left if m.startswith("m64n")), "")
    n, _, k = shape.removeprefix("m64n").partition("k")
    modifiers.one_of(shape)
    saturates = modifiers.flag("satfinite")
    if modifiers.flag("and") != modifiers.flag("popc"):
        d.refuse("products of bits are .and.popc")
    kinds = list(modifiers.left)
    modifiers.left.clear()
    if len(kinds) != 3 or not n.isdigit() or not k.isdigit():
        d.refuse("wgmma has a shape and the types of D, A and B")
    kind, a, b = kinds
    sparse = ".sp." in d.opcode
    family = next((f for f in _FAMILIES if a in f and b in f), None)
    if sparse and family == ("b1",):
        family = None
    if family is None or int(k) * _WIDTHS[a] != 8 * _K_BYTES * (2 if sparse else 1):
        d.refuse(f"wgmma of {a} and {b} with K = {k}")
    integers = family[0] in ("s8", "b1")
    halves = family[0] in ("f16", "e4m3")
    if kind not in (("s32",) if integers else ("f16", "f32") if halves else ("f32",)):
        d.refuse(f"wgmma of {a} and {b} has no results of type {kind}")
    columns = int(n)
    step = 16 if integers and columns > 32 else 8
    shaped = 8 <= columns <= 256 and columns % step == 0
    if not shaped or (saturates and family[0] != "s8"):
        d.refuse(f"wgmma of {a} and {b} has no such shape or modifiers")
    first = 6 if sparse else 4
    signs, transposed = _constants(d, first, integers, family[0] in ("f16", "bf16"))
    return _Form(columns, int(k), kind, a, b, saturates, signs, transposed, sparse)


def _constants(
    d: Decoder, first: int, integers: bool, may_transpose: bool
) -> tuple[tuple[int, int], tuple[bool, bool]]:
    """The factors and transpositions, which begin at an operand."""
    in_registers = isinstance(d.operands[1], Vector)
    wanted = first if integers else first + 2
    if may_transpose:
        wanted += 1 if in_registers else 2
    d.expect(wanted)
    values = []
    for operand in d.operands[first:]:
        if not isinstance(operand, Integer):
            d.refuse("factors and transpositions of wgmma are constants")
        values.append(operand.value)
    signs = (1, 1) if integers else (values[0], values[1])
    turns = [0, *values[2:]] if in_registers else values[2:]
    turns = turns if may_transpose else [0, 0]
    if any(s not in (1, -1) for s in signs) or any(t not in (0, 1) for t in turns):
        d.refuse("factors of wgmma are 1 or -1, transpositions 0 or 1")
    return signs, (bool(turns[0]), bool(turns[1]))


@instruction("wgmma.mma_async.sync.aligned", "wgmma.mma_async.sp.sync.aligned", together="warp")
def product(d: Decoder) -> Step:
    """PTX ISA 9.7.15.5.2 and 9.7.15.6.3."""
    form = _form(d)
    machine, pc = d.machine, d.pc
    warpgroups = part_of(machine, Warpgroups)
    files = _files(d, 0)
    if len(files) != form.n // (4 if form.kind == "f16" else 2):
        d.refuse(f"an accumulator of {len(files)} registers for N = {form.n}")
    k_bytes = 2 * _K_BYTES if form.sparse else _K_BYTES
    right = _InMemory(d, 2, _Stored("B", form.n, form.b, form.transposed[1], k_bytes))
    left: _InRegisters | _InMemory
    if isinstance(d.operands[1], Vector):
        left = _InRegisters(d, warpgroups, form.a)
    else:
        left = _InMemory(d, 1, _Stored("A", _ROWS, form.a, form.transposed[0], _K_BYTES))
    metadata = _OfWarpgroups(d, warpgroups, form) if form.sparse else None
    scale = d.source(5 if form.sparse else 3, "pred")
    sign = float(form.signs[0] * form.signs[1])

    def run(group: Group) -> None:
        warpgroups.require_fence(group)
        adds = _of_warpgroups(group, scale, "scale-d").astype(np.bool_)
        wanted = np.repeat(adds, WARPGROUP)
        before, bad, known = warpgroups.accumulator_in(group, files, form.kind, wanted)
        if metadata is not None:
            metadata.place(group)
        pieces = [part.place(group) for part in (left, right)]
        parts = [
            _begin(machine, group, number, [p[number] for p in pieces if p is not None])
            for number in range(len(adds))
        ]
        a, bad_a = left.values(group, pieces[0])
        b, bad_b = right.values(group, pieces[1])
        if metadata is None:
            total = a @ b.transpose(0, 2, 1)
        else:
            columns = metadata.columns(group)
            total, a = sparsity.multiplied(a, b, columns), sparsity.dense(a, columns, form.k)
        if sign < 0:
            total = -total
        held = np.where(adds[:, None, None], before, 0.0)
        total = machine.sums.moved(total + held, a, b.transpose(0, 2, 1), held, form.kind, form.a)
        undefined = _undefined(adds, bad, bad_a, bad_b)
        if undefined is not None:
            undefined = np.broadcast_to(undefined, total.shape)
        matrix = rounded(total, form.kind, form.saturates)
        held_registers = left.held(group) + (metadata.held(group) if metadata else [])
        done = Product(pc, group.index, parts, held_registers)
        warpgroups.begin(group, done, files, form.kind, matrix, undefined, known)

    def step(group: Group) -> int | None:
        ready = warpgroups.gather(group, pc)
        if ready is None:
            return STOP
        run(ready)
        if ready is group:
            return None
        machine.put(pc + 1, ready.lanes)
        return STOP

    return step


def _files(d: Decoder, operand: int) -> list[RegisterFile]:
    items = d.items(operand)
    registers = [item for item in items if isinstance(item, Register)]
    if len(registers) != len(items) or any(d.machine.register(r).bits != 32 for r in registers):
        d.refuse("the operands of wgmma are registers of 32 bits")
    return [d.machine.register(register) for register in registers]


def _of_warpgroups(group: Group, source: Source, what: str) -> Array:
    """The value of an operand in each warpgroup, whose threads must agree about it."""
    values = np.broadcast_to(require_defined(source, group, what), (len(group), WARP))
    squares = values.reshape(-1, WARPGROUP * WARP)
    differs = squares != squares[:, :1]
    if differs.any():
        told = f"threads of a warpgroup disagree about {what}"
        raise fault(UndefinedBehaviorError, told, group, differs.reshape(-1, WARP))
    return np.ascontiguousarray(squares[:, 0])


def _begin(machine: Machine, group: Group, number: int, pieces: list[Array]) -> Part:
    """Begins the reads of a warpgroup: of pieces that its operands lie in."""
    rows = group.index[WARPGROUP * number : WARPGROUP * (number + 1)]
    used = np.unique(np.concatenate([p.reshape(-1) for p in pieces]))
    begin_read(machine, Thread(int(rows[0]), 0), rows, used)
    return Part(rows, used)


def _undefined(
    adds: Array, before: Array | None, left: Array | None, right: Array | None
) -> Array | None:
    """Undefined elements of D: rows, columns and elements that something undefined goes into."""
    found: Array | None = None
    if before is not None and adds.any():
        found = before & adds[:, None, None]
    for flags, axes in ((left, (slice(None), slice(None), None)), (right, (slice(None), None))):
        if flags is not None:
            lines = flags.any(axis=2)[axes]
            found = lines if found is None else found | lines
    return found if found is not None and found.any() else None


def _values(codes: Array, kind: str) -> Array:
    return codes.astype(np.float64) if kind == "b1" else operand_values(codes, kind)


class _Stored(NamedTuple):
    """A matrix in shared memory.

    Attributes:
        name: A or B.
        size: M or N.
        kind: type of its elements.
        transposed: whether M or N is contiguous.
        k_bytes: bytes of its elements along K.
    """

    name: str
    size: int
    kind: str
    transposed: bool
    k_bytes: int


class _InMemory:
    """An operand in shared memory, by its descriptor."""

    def __init__(self, d: Decoder, operand: int, stored: _Stored) -> None:
        self._machine = d.machine
        self._name, self._size, self._kind, self._transposed, self._k_bytes = stored
        self._descriptor = d.source(operand, "b64")
        self._k_pieces = self._k_bytes // (2 if self._transposed else PIECE)
        self._placers: dict[int, Callable[[Array], Array]] = {}

    def place(self, group: Group) -> Array:
        """Numbers of pieces of shared memory, of each warpgroup."""
        machine = self._machine
        found = _of_warpgroups(group, self._descriptor, f"the descriptor of {self._name}")
        starts = (found & START).astype(np.int64) * PIECE
        kinds = found & ~START
        if (kinds == kinds[0]).all():
            windows = self._placer(group, int(kinds[0]))(starts)
        else:
            each = [self._placer(group, int(k))(starts[i : i + 1]) for i, k in enumerate(kinds)]
            windows = np.concatenate(each)
        self._check(group, windows)
        ctas = machine.row_cta[group.index[::WARPGROUP]].astype(np.int64)
        shape = (-1,) + (1,) * (windows.ndim - 1)
        pieces: Array = (windows + (ctas * machine.shared.size).reshape(shape)) // PIECE
        return pieces

    def _placer(self, group: Group, bits: int) -> Callable[[Array], Array]:
        known = self._placers.get(bits)
        if known is None:
            try:
                layout = layout_of(bits, self._name)
                offsets = layout.offsets(self._size, self._k_pieces, self._transposed)
            except UndefinedBehaviorError as error:
                raise fault(UndefinedBehaviorError, error.what, group, group.active()) from error
            known = self._placers[bits] = lambda starts: layout.place(starts, offsets)
        return known

    def _check(self, group: Group, windows: Array) -> None:
        extents = self._machine.shared.extents
        least, most = int(windows.min()), int(windows.max())
        if any(start <= least and most + PIECE <= end for start, end in extents):
            return
        inside = np.zeros(windows.shape, np.bool_)
        for start, end in extents:
            inside |= (windows >= start) & (windows + PIECE <= end)
        if not inside.all():
            bad = np.argwhere(~inside)[0]
            lanes = np.zeros((len(group), WARP), np.bool_)
            lanes[WARPGROUP * int(bad[0])] = True
            at = int(windows[tuple(bad)])
            told = f"the matrix {self._name} of a wgmma, 16 bytes at shared address {at:#x}, lies "
            raise fault(BoundsError, told + "in no variable of the CTA", group, lanes)

    def values(self, group: Group, pieces: Array | None) -> tuple[Array, Array | None]:
        """float64 [warpgroups, size, K], and undefined elements."""
        assert pieces is not None
        values = _values(self._codes(shared_bytes(self._machine, pieces)), self._kind)
        undefined = undefined_in(self._machine, pieces)
        return values, self._codes(undefined) != 0 if undefined.any() else None

    def _codes(self, data: Array) -> Array:
        count = len(data)
        if self._transposed:
            codes = data.view(np.uint16).reshape(count, self._k_pieces, self._size)
            return np.ascontiguousarray(codes.transpose(0, 2, 1))
        rows = data.reshape(count, self._size, self._k_bytes)
        if self._kind == "b1":
            return np.unpackbits(rows, axis=-1, bitorder="little")
        return rows.view(f"u{_WIDTHS[self._kind] // 8}")

    def held(self, group: Group) -> list[tuple[RegisterFile, Array]]:
        """Registers that must not change."""
        return []


class _InRegisters:
    """Operand A in registers."""

    def __init__(self, d: Decoder, warpgroups: Warpgroups, kind: str) -> None:
        self._files, self._warpgroups, self._kind = _files(d, 1), warpgroups, kind
        if len(self._files) != 4:
            d.refuse("A has four registers")

    def place(self, group: Group) -> None:
        """It lies in no memory."""
        everywhere = np.ones((len(group), 1), np.bool_)
        for file in self._files:
            self._warpgroups.require_fenced(group, file, everywhere)

    def values(self, group: Group, pieces: Array | None) -> tuple[Array, Array | None]:
        """float64 [warpgroups, 64, K], and undefined elements."""
        codes = self._matrix(group, [file.data[group.rows] for file in self._files])
        bad = [file.poison for file in self._files]
        undefined = None
        if any(part is not None for part in bad):
            shape = (len(group), WARP)
            parts = [np.zeros(shape, np.uint32) if p is None else p[group.rows] for p in bad]
            if any(part.any() for part in parts):
                undefined = self._matrix(group, parts) != 0
        return _values(codes, self._kind), undefined

    def _matrix(self, group: Group, registers: list[Array]) -> Array:
        count = len(group)
        width = _WIDTHS[self._kind]
        elements = fragments.elements(registers, max(width, 8), count)
        if width == 1:
            elements = np.unpackbits(elements, axis=-1, bitorder="little")
        matrix = fragments.a_matrix(elements)
        return matrix.reshape(count // WARPGROUP, _ROWS, -1)

    def held(self, group: Group) -> list[tuple[RegisterFile, Array]]:
        """Registers that must not change, with what they hold."""
        return [(file, file.data[group.rows].copy()) for file in self._files]


class _OfWarpgroups:
    """Metadata of a sparse A, each warp having that of its own 16 rows (PTX ISA 9.7.15.6.2)."""

    def __init__(self, d: Decoder, warpgroups: Warpgroups, form: _Form) -> None:
        self._metadata = take_metadata(d, 3, form.k, _WIDTHS[form.a], ordered=False)
        (self._file,) = _files(d, 3)
        self._warpgroups = warpgroups

    def place(self, group: Group) -> None:
        """It lies in no memory."""
        self._warpgroups.require_fenced(group, self._file, np.ones((len(group), 1), np.bool_))

    def columns(self, group: Group) -> Array:
        """The column of each kept element, int64 [warpgroups, 64, K / 2]."""
        columns = self._metadata.columns(group)
        return columns.reshape(len(group) // WARPGROUP, _ROWS, -1)

    def held(self, group: Group) -> list[tuple[RegisterFile, Array]]:
        """The register, which must not change, with what it holds."""
        return [(self._file, self._file.data[group.rows].copy())]
