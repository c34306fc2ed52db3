"""Matrix instructions of T-Head PPUs (t-head/actlize, `mma_ppu0010.hpp` and `mma_ppu0015.hpp`).

They multiply tiles of 16 x 16. `ppu.mma` (PPU0010) has the registers of A in the order row, half
of K, and D in columns at a stride of 4; `ppu.tc02.mma` (PPU0015) is two of NVIDIA's m16n8 products
side by side.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .. import fragments, numerics
from ..accumulation import Sums
from ..decoder import Decoder, Step, instruction
from ..errors import UndefinedBehaviorError
from ..groups import Array, Group
from ..memory import fault
from ..operands import Source
from .data import require_defined
from .matrix import operand_values, stacked

_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "s8": 8, "u8": 8, "e4m3": 8, "e5m2": 8}
_V1 = {
    # shape -> types D.A.B.C
    "m16n16k16": ("f32.f16.f16.f32", "f32.bf16.bf16.f32", "f16.f16.f16.f16"),
    "m16n16k8": ("f32.tf32.tf32.f32",),
    "m16n16k32": ("s32.s8.s8.s32", "s32.u8.u8.s32"),
}
_FP8 = ("e4m3", "e5m2")
_ONES = 0x7F7F7F7F
_V15 = {
    "m16n16k16": _V1["m16n16k16"],
    "m16n16k8": ("f32.tf32.tf32.f32", "f32.f32.f32.f32"),
    "m16n16k32": (
        *_V1["m16n16k32"],
        *(f"{d}.{a}.{b}.{d}" for d in ("f32", "f16") for a in _FP8 for b in _FP8),
    ),
}


@dataclass(frozen=True, slots=True)
class _Order:
    """How a generation orders the registers of a product.

    Attributes:
        a, b, d: matrices [n, 16, K], [n, 16, K] and [n, 16, 16] from registers, and registers of D.
    """

    a: Callable[[Array], Array]
    b: Callable[[Array], Array]
    d: Callable[[Array], Array]
    registers: Callable[[Array], Array]


def _b_tiles(codes: Array) -> Array:
    """B [n, 16, K] of registers that are two tiles of 8 columns."""
    return np.concatenate([fragments.b_matrix(codes[:, :2]), fragments.b_matrix(codes[:, 2:])], 1)


def _a_swapped(codes: Array) -> Array:
    return fragments.a_matrix(codes[:, [0, 2, 1, 3]])


def _d_strided(values: Array) -> Array:
    """D[i] is row g + 8 (i >> 2), column t + 4 (i & 3)."""
    parts = values.reshape(len(values), 2, 4, 8, 4)
    return parts.transpose(0, 1, 3, 2, 4).reshape(len(values), 16, 16)


def _strided_registers(matrix: Array) -> Array:
    parts = matrix.reshape(len(matrix), 2, 8, 4, 4).transpose(0, 1, 3, 2, 4)
    return parts.reshape(len(matrix), 8, 32)


def _d_tiles(values: Array) -> Array:
    halves = [fragments.c_matrix(values[:, :4]), fragments.c_matrix(values[:, 4:])]
    return np.concatenate(halves, axis=2)


def _tile_registers(matrix: Array) -> Array:
    halves = [fragments.c_registers(matrix[:, :, :8]), fragments.c_registers(matrix[:, :, 8:])]
    return np.concatenate(halves, axis=1)


_PPU0010 = _Order(_a_swapped, _b_tiles, _d_strided, _strided_registers)
_PPU0015 = _Order(fragments.a_matrix, _b_tiles, _d_tiles, _tile_registers)


@instruction("ppu.mma.sync.aligned", together="warp")
def multiply(d: Decoder) -> Step:
    """PPU0010 (ZW810, ZW810E)."""
    if "m8n16k16" in d.modifiers.left:
        d.refuse("in which order ppu.mma m8n16k16 has its registers is not known")
    return _multiply(d, _V1, _PPU0010)


@instruction("ppu.tc02.mma.sync.aligned", together="warp")
def multiply_tc02(d: Decoder) -> Step:
    """PPU0015 (ZW-M890)."""
    return _multiply(d, _V15, _PPU0015)


def _multiply(d: Decoder, known: dict[str, tuple[str, ...]], order: _Order) -> Step:
    modifiers = d.modifiers
    shape = modifiers.one_of(*known)
    modifiers.one_of("row")
    modifiers.one_of("col")
    types = ".".join(modifiers.left)
    if types not in known[shape]:
        d.refuse(f"{d.opcode} {shape} has the types {', '.join(known[shape])}")
    modifiers.left.clear()
    result, a_type, b_type, _ = types.split(".")
    d.expect(4)
    if result == "f16" and order is _PPU0010:
        d.refuse("in which order ppu.mma has halves in the registers of D is not known")
    stored = {"f16": "b32", "f32": "f32", "s32": "s32"}[result]
    a, b, c = d.sources(1, "b32"), d.sources(2, "b32"), d.sources(3, stored)
    targets = d.targets(0, stored)
    size = 4 if result == "f16" else 8
    if (len(targets), len(a), len(b), len(c)) != (size, 4, 4, size):
        d.refuse(f"D, A, B and C have {size}, 4, 4 and {size} registers")
    bits = _BITS[a_type]

    def matrix(registers: list[Source], name: str, view: Callable[[Array], Array]) -> _Matrix:
        return _Matrix(registers, name, bits, view)

    left, right = matrix(a, a_type, order.a), matrix(b, b_type, order.b)
    sums = d.machine.sums

    def step(group: Group) -> None:
        before, bad = stacked(c, group)
        if result == "f16":
            before = _of_halves(before)
            bad = None if bad is None else _marks_of_halves(bad)
        values, flags = _sums(group, order, left, right, before, bad, result, sums)
        for place, target in enumerate(targets):
            target.put(group, *_finished(values, flags, place, result))

    return step


@dataclass(frozen=True, slots=True)
class _Matrix:
    """An operand: registers, the type and width of its elements, and their order."""

    registers: list[Source]
    name: str
    bits: int
    view: Callable[[Array], Array]

    def values(self, group: Group) -> Array:
        """float64 [n, rows, K]."""
        raw, _ = stacked(self.registers, group)
        codes = self.view(fragments.elements(list(raw.transpose(1, 0, 2)), self.bits, len(raw)))
        if self.name == "f4":
            return operand_values(codes, "e2m1", packed_fp4=True)
        if self.name == "f32":
            return np.ascontiguousarray(codes).view(np.float32).astype(np.float64)
        return operand_values(codes, self.name)

    def undefined(self, group: Group) -> Array:
        """bool [n, rows]: which have something undefined."""
        _, bad = stacked(self.registers, group)
        if bad is None:
            return np.zeros((len(group), 16), np.bool_)
        marks = self.view(fragments.elements(list(bad.transpose(1, 0, 2)), self.bits, len(bad)))
        found: Array = (marks != 0).any(axis=2)
        return found


def _sums(
    group: Group,
    order: _Order,
    a: _Matrix,
    b: _Matrix,
    c: Array,
    bad_c: Array | None,
    kind: str,
    sums: Sums,
) -> tuple[Array, Array]:
    """float64 registers [n, 8, 32] of A B + C, and which are undefined."""
    left, right = a.values(group), b.values(group).transpose(0, 2, 1)
    held = order.d(c.astype(np.float64))
    total = sums.moved(left @ right + held, left, right, held, kind, a.name)
    undefined = a.undefined(group)[:, :, None] | b.undefined(group)[:, None, :]
    if bad_c is not None:
        undefined = undefined | order.d(bad_c != 0)
    return order.registers(total), order.registers(undefined)


def _of_halves(registers: Array) -> Array:
    """float64 [n, 8, 32] of registers [n, 4, 32] with two halves each."""
    n, count, _ = registers.shape
    pairs = np.ascontiguousarray(registers).view(np.uint16).reshape(n, count, 32, 2)
    return numerics.decode_table("f16").take(pairs).transpose(0, 1, 3, 2).reshape(n, 2 * count, 32)


def _marks_of_halves(registers: Array) -> Array:
    n, count, _ = registers.shape
    pairs = np.ascontiguousarray(registers).view(np.uint16).reshape(n, count, 32, 2)
    return pairs.transpose(0, 1, 3, 2).reshape(n, 2 * count, 32)


def _finished(values: Array, flags: Array, place: int, kind: str) -> tuple[Array, Array | None]:
    """A register of D and its undefined bits."""
    if kind == "f16":
        pair = np.ascontiguousarray(values[:, 2 * place : 2 * place + 2].transpose(0, 2, 1))
        codes = numerics.encode(pair, "f16").astype(np.uint16).view(np.uint32)[..., 0]
        low, high = flags[:, 2 * place], flags[:, 2 * place + 1]
        bad = np.where(low, np.uint32(0xFFFF), 0) | np.where(high, np.uint32(0xFFFF0000), 0)
        return codes, bad.astype(np.uint32) if bad.any() else None
    marks: Array = np.where(flags[:, place], np.uint32(0xFFFFFFFF), np.uint32(0))
    poison = marks if marks.any() else None
    if kind == "f32":
        return numerics.canonical_f32(values[:, place].astype(np.float32)), poison
    return values[:, place].astype(np.int64).astype(np.int32), poison


@instruction("ppu.tc02.mma.mx.sync.aligned", together="warp")
def multiply_scaled(d: Decoder) -> Step:
    """m16n16k64 of MXFP4 (PPU0015), executed with scales of 1 only.

    Which threads and bytes hold the scales of which rows is not known. Where all of them are 1,
    it does not matter.
    """
    for part in ("m16n16k64", "row", "col"):
        d.modifiers.one_of(part)
    if d.modifiers.left != ["f32", "f4", "f4", "f32"]:
        d.refuse("ppu.tc02.mma.mx has the types f32.f4.f4.f32")
    d.modifiers.left.clear()
    d.expect(8)
    a, b, c = d.sources(1, "b32"), d.sources(2, "b32"), d.sources(3, "f32")
    targets = d.targets(0, "f32")
    if (len(targets), len(a), len(b), len(c)) != (8, 4, 4, 8):
        d.refuse("D, A, B and C have 8, 4, 4 and 8 registers")
    scales = [*d.sources(4, "b32"), d.source(5, "b32"), d.source(6, "b32")]
    order = _PPU0015
    left, right = _Matrix(a, "f4", 4, order.a), _Matrix(b, "f4", 4, order.b)
    sums = d.machine.sums

    def step(group: Group) -> None:
        codes = [require_defined(scale, group, "a scale") for scale in scales]
        ones = [np.broadcast_to(np.asarray(code) == _ONES, (len(group), 32)) for code in codes]
        other = ~np.logical_and.reduce(ones) & group.active()
        if other.any():
            told = "which rows the scales of ppu.tc02.mma.mx are for is not known: all must be 1"
            raise fault(UndefinedBehaviorError, f"{told} (0x7f7f7f7f) here", group, other)
        before, bad = stacked(c, group)
        values, flags = _sums(group, order, left, right, before, bad, "f32", sums)
        for place, target in enumerate(targets):
            target.put(group, *_finished(values, flags, place, "f32"))

    return step


@instruction("ppu.cp.async.aiu")
def copy_tensor(d: Decoder) -> Step:
    """The asynchronous tensor copy: not executed."""
    d.refuse("the operands of ppu.cp.async.aiu and its tensor descriptor are not known")


@instruction("ppu.ldmatrix")
def load_matrix(d: Decoder) -> Step:
    """The swizzled ldmatrix: not executed."""
    d.refuse("the swizzle of ppu.ldmatrix and the meaning of its offsets are not known")
