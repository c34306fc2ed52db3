"""`wmma`: products of a warp whose fragments are opaque (PTX ISA 9.7.14.4).

Which thread holds which elements is nobody's business, so it is simple here: the elements of a
matrix, row by row, go to the threads in equal parts. Registers beyond those hold zeros.
"""

from typing import Any

import numpy as np

from .. import numerics
from ..decoder import Decoder, Step, instruction
from ..errors import UndefinedBehaviorError
from ..groups import Array, Group
from ..memory import fault
from .data import require_defined
from .matrix import operand_values, stacked
from .memory import Access

_SHAPES = {
    # type of A and B -> shapes
    "f16": ("m16n16k16", "m8n32k16", "m32n8k16"),
    "bf16": ("m16n16k16", "m8n32k16", "m32n8k16"),
    "tf32": ("m16n16k8",),
    "f64": ("m8n8k4",),
    "s8": ("m16n16k16", "m8n32k16", "m32n8k16"),
    "u8": ("m16n16k16", "m8n32k16", "m32n8k16"),
}
_ACCUMULATORS = {
    "f16": ("f16", "f32"),
    "bf16": ("f32",),
    "tf32": ("f32",),
    "f64": ("f64",),
    "s8": ("s32",),
    "u8": ("s32",),
}
_WIDTHS = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "s32": 32, "f64": 64, "s8": 8, "u8": 8}
_ALL_SHAPES = sorted({shape for shapes in _SHAPES.values() for shape in shapes})


def _sides(shape: str) -> tuple[int, int, int]:
    m, _, rest = shape[1:].partition("n")
    n, _, k = rest.partition("k")
    return int(m), int(n), int(k)


def _extent(which: str, shape: str) -> tuple[int, int]:
    """Rows and columns of a matrix."""
    m, n, k = _sides(shape)
    return {"a": (m, k), "b": (k, n), "c": (m, n), "d": (m, n)}[which]


def _registers(which: str, shape: str, kind: str) -> int:
    """Registers of a fragment; those of f16 in A and B have room for each element twice."""
    rows, columns = _extent(which, shape)
    bits = rows * columns * _WIDTHS[kind] // 32
    if kind == "f16" and which in ("a", "b"):
        return 8
    return max(1, bits // (64 if kind == "f64" else 32))


def _register_type(kind: str) -> str:
    return "b64" if kind == "f64" else "b32"


def _unpacked(registers: Array, kind: str, count: int) -> Array:
    """Codes [n, 32, elements] of registers [n, registers, 32]."""
    bits = _WIDTHS[kind]
    raw = np.ascontiguousarray(registers.transpose(0, 2, 1))
    found: Array = raw.view(np.dtype(f"u{bits // 8}"))[..., :count]
    return found


def _packed(codes: Array, kind: str, registers: int) -> Array:
    """The reverse: [n, registers, 32]."""
    wide = np.dtype("u8") if kind == "f64" else np.dtype("u4")
    room = registers * wide.itemsize // codes.dtype.itemsize
    padded = np.zeros((*codes.shape[:2], room), codes.dtype)
    padded[..., : codes.shape[2]] = codes
    return padded.view(wide).transpose(0, 2, 1)


class _Memory:
    """The operands [address], stride of a load or store."""

    def __init__(self, d: Decoder, which: str, address: int) -> None:
        self._access = Access(d)
        if self._access.space not in ("", "global", "shared", "shared::cta"):
            d.refuse(f"{d.opcode} in {self._access.space} memory")
        order = d.modifiers.one_of("row", "col")
        shape = d.modifiers.one_of(*_ALL_SHAPES)
        self.kind = d.modifiers.one_of(*_WIDTHS)
        families = [k for k in _SHAPES if shape in _SHAPES[k]]
        fits = [k for k in families if self.kind in ((k,) if which in "ab" else _ACCUMULATORS[k])]
        if not fits:
            d.refuse(f"{d.opcode} of {shape} and {self.kind}")
        self.rows, self.columns = _extent(which, shape)
        self.registers = _registers(which, shape, self.kind)
        self._by_row = order == "row"
        self._start = d.address(address)
        d.expect(2, 3)
        self._stride = d.source(2, "u32") if len(d.operands) == 3 else None
        self.per_lane = self.rows * self.columns // 32

    def places(self, group: Group) -> list[Array]:
        """Addresses [n, 32] of the elements of each lane, one array for each of them."""
        start = self._same(group, self._start.read(group), "the address of the matrix")
        inner = self.columns if self._by_row else self.rows
        stride: Any = np.uint64(inner)
        if self._stride is not None:
            given = require_defined(self._stride, group, "the stride of the matrix")
            stride = self._same(group, np.asarray(given).astype(np.uint64), "the stride")
        size = np.uint64(_WIDTHS[self.kind] // 8)
        found = []
        for place in range(self.per_lane):
            element = np.arange(32, dtype=np.uint64) * np.uint64(self.per_lane) + np.uint64(place)
            row, column = element // np.uint64(self.columns), element % np.uint64(self.columns)
            outer, within = (row, column) if self._by_row else (column, row)
            found.append(start + (outer * stride + within) * size)
        return found

    @staticmethod
    def _same(group: Group, values: Any, what: str) -> Array:
        values = np.broadcast_to(values, (len(group), 32))
        other = values != values[:, :1]
        if other.any():
            told = f"threads of a warp disagree about {what}"
            raise fault(UndefinedBehaviorError, told, group, other)
        return values

    def load(self, group: Group, addresses: Array) -> tuple[Array, Array | None]:
        return self._access.load(group, addresses, _WIDTHS[self.kind] // 8)

    def store(self, group: Group, addresses: Array, values: Array, bad: Array | None) -> None:
        self._access.store(group, addresses, values, bad, _WIDTHS[self.kind] // 8)


@instruction(*(f"wmma.load.{which}.sync.aligned" for which in "abc"), together="warp")
def load(d: Decoder) -> Step:
    """PTX ISA 9.7.14.4.3."""
    memory = _Memory(d, d.opcode.split(".")[2], 1)
    targets = d.targets(0, _register_type(memory.kind))
    if len(targets) != memory.registers:
        d.refuse(f"this fragment has {memory.registers} registers")

    def step(group: Group) -> None:
        loaded = [memory.load(group, addresses) for addresses in memory.places(group)]
        values = np.stack([part for part, _ in loaded], axis=-1)
        bad = None
        if any(part is not None for _, part in loaded):
            none = np.zeros(values.shape[:2], values.dtype)
            bad = np.stack([none if part is None else part for _, part in loaded], axis=-1)
            bad = _packed(bad, memory.kind, memory.registers)
        packed = _packed(values, memory.kind, memory.registers)
        for place, target in enumerate(targets):
            marks = None if bad is None else bad[:, place]
            target.put(
                group, packed[:, place], marks if marks is not None and marks.any() else None
            )

    return step


@instruction("wmma.store.d.sync.aligned", together="warp")
def store(d: Decoder) -> Step:
    """PTX ISA 9.7.14.4.4."""
    memory = _Memory(d, "d", 0)
    sources = d.sources(1, _register_type(memory.kind))
    if len(sources) != memory.registers:
        d.refuse(f"this fragment has {memory.registers} registers")

    def step(group: Group) -> None:
        registers, bad = stacked(sources, group)
        values = _unpacked(registers, memory.kind, memory.per_lane)
        marks = None if bad is None else _unpacked(bad, memory.kind, memory.per_lane)
        for place, addresses in enumerate(memory.places(group)):
            part = None if marks is None else np.ascontiguousarray(marks[..., place])
            part = part if part is not None and part.any() else None
            memory.store(group, addresses, np.ascontiguousarray(values[..., place]), part)

    return step


@instruction("wmma.mma.sync.aligned", together="warp")
def multiply(d: Decoder) -> Step:
    """PTX ISA 9.7.14.4.5: D = A B + C, summed up as `mma.sync` is."""
    modifiers = d.modifiers
    for _ in range(2):
        modifiers.one_of("row", "col")
    shape = modifiers.one_of(*_ALL_SHAPES)
    saturates = modifiers.flag("satfinite")
    if "f64" in modifiers.left:
        modifiers.flag("rn")
    kinds = list(modifiers.left)
    modifiers.left.clear()
    if len(kinds) == 2:  # of f16, only D and C are told
        kinds = [kinds[0], "f16", "f16", kinds[1]]
    if len(kinds) != 4 or kinds[1] != kinds[2] or shape not in _SHAPES.get(kinds[1], ()):
        d.refuse(f"wmma.mma.{shape} of {'.'.join(kinds)}")
    to, of, _, held = kinds
    known = _ACCUMULATORS[of]
    if to not in known or held not in known or (saturates and to != "s32"):
        d.refuse(f"wmma.mma.{shape} of {'.'.join(kinds)}")
    d.expect(4)
    whole = {"a": of, "b": of, "c": held, "d": to}
    operands = {
        which: d.sources(place, _register_type(whole[which]))
        for place, which in enumerate("abc", 1)
    }
    targets = d.targets(0, _register_type(to))
    sizes = {which: _registers(which, shape, kind) for which, kind in whole.items()}
    if len(targets) != sizes["d"] or any(len(operands[w]) != sizes[w] for w in "abc"):
        d.refuse(f"the fragments have {sizes} registers")
    sums = d.machine.sums

    def matrix(which: str, group: Group) -> tuple[Array, Array]:
        """Codes [n, rows, columns], and which are undefined."""
        rows, columns = _extent(which, shape)
        registers, bad = stacked(operands[which], group)
        count = rows * columns // 32
        codes = _unpacked(registers, whole[which], count).reshape(-1, rows, columns)
        if bad is None:
            return codes, np.zeros(codes.shape, np.bool_)
        return codes, _unpacked(bad, whole[which], count).reshape(codes.shape) != 0

    def step(group: Group) -> None:
        (a, bad_a), (b, bad_b), (c, bad_c) = (matrix(which, group) for which in "abc")
        left, right, before = (_values(*each) for each in ((a, of), (b, of), (c, held)))
        total = left @ right + before
        total = sums.moved(total, left, right, before, to, of)
        codes = _codes(total, to, saturates)
        wild = bad_a.any(axis=2)[:, :, None] | bad_b.any(axis=1)[:, None, :] | bad_c
        ones = codes.dtype.type(np.iinfo(codes.dtype).max)
        marks = np.where(wild, ones, codes.dtype.type(0))
        parts = [_packed(x.reshape(len(x), 32, -1), to, sizes["d"]) for x in (codes, marks)]
        for place, target in enumerate(targets):
            bad = parts[1][:, place]
            target.put(group, parts[0][:, place], bad if bad.any() else None)

    return step


def _values(codes: Array, kind: str) -> Array:
    """float64 values of elements."""
    codes = np.ascontiguousarray(codes)
    if kind == "f64":
        return codes.view(np.float64)
    if kind == "s32":
        return codes.view(np.int32).astype(np.float64)
    if kind == "f32":
        return codes.view(np.float32).astype(np.float64)
    return operand_values(codes, kind)


def _codes(total: Array, kind: str, saturates: bool) -> Array:
    """Elements of a type of sums, as unsigned integers."""
    if kind == "f64":
        return numerics.canonical_f64(total).view(np.uint64)
    if kind == "f32":
        return numerics.canonical_f32(total.astype(np.float32)).view(np.uint32)
    if kind == "f16":
        return numerics.encode(total, "f16").astype(np.uint16)
    whole = total.astype(np.int64)
    if saturates:
        whole = np.clip(whole, -(2**31), 2**31 - 1)
    return whole.astype(np.int32).view(np.uint32)
