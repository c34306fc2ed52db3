"""`mma.sync` with block scales (PTX ISA 9.7.14.3, "Block Scaling for mma.sync").

With a sparse A, K is twice as much, and so are the columns that a scale is for.
"""

from typing import NamedTuple

import numpy as np

from .. import fragments, numerics, sparsity
from ..decoder import Decoder, Step, instruction
from ..errors import UndefinedBehaviorError
from ..groups import Array, Group
from ..memory import fault
from ..operands import Source
from .data import require_defined
from .matrix import operand_values, stacked
from .sparse_matrix import take_metadata

_KINDS = {
    # kind -> K, bits of an element in the register, scale vector sizes
    "mxf8f6f4": (32, 8, ("scale_vec::1X",)),
    "mxf4": (64, 4, ("scale_vec::2X",)),
    "mxf4nvf4": (64, 4, ("scale_vec::2X", "scale_vec::4X")),
}
_ELEMENTS = {8: ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1"), 4: ("e2m1",)}
_BYTE_IDS = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}
_SPARSE = "mma.sp::ordered_metadata"
_OPCODES = [
    f"{opcode}.sync.aligned.{shape}kind::{kind}"
    for kind, (k, _, _) in _KINDS.items()
    for opcode, columns in (("mma", k), (_SPARSE, 2 * k))
    for shape in ("", f"m16n8k{columns}.row.col.")
]
"""The kind may stand ahead of the shape or behind it."""


class _Scales(NamedTuple):
    """An operand's scales: a register, and which byte of which thread's is used."""

    register: Source
    byte_id: Source
    thread_id: Source
    threads: int

    def read(self, group: Group, count: int, rows: int) -> tuple[Array, Array]:
        """Codes [n, rows, count], and the rows [n, rows] of which one is undefined.

        Rows of A are in pairs of neighbouring threads, columns of B in one thread each.
        """
        byte = _same(self.byte_id, group, "the byte of the scales")
        thread = _same(self.thread_id, group, "the thread of the scales")
        if byte not in _BYTE_IDS[count] or thread >= self.threads:
            told = f"scales from byte {byte} of thread {thread}: possible for {count} of them are"
            told = f"{told} bytes {_BYTE_IDS[count]} and threads below {self.threads}"
            raise fault(UndefinedBehaviorError, told, group, group.active())
        row = np.arange(rows)
        lanes = 4 * (row % 8) + row // 8 + (2 if rows == 16 else 1) * thread
        part = slice(byte, byte + count)
        values = np.broadcast_to(self.register.read(group), (len(group), 32))[:, lanes]
        codes = np.ascontiguousarray(values).view(np.uint8).reshape(len(group), rows, 4)
        bad = self.register.poison(group)
        if bad is None:
            return codes[:, :, part], np.zeros((len(group), rows), np.bool_)
        marks = np.ascontiguousarray(bad[:, lanes]).view(np.uint8).reshape(len(group), rows, 4)
        return codes[:, :, part], marks[:, :, part].any(axis=2)


def _same(source: Source, group: Group, what: str) -> int:
    values = np.asarray(require_defined(source, group, what))
    if values.ndim and (values != values.flat[0]).any():
        raise fault(UndefinedBehaviorError, f"threads disagree about {what}", group, group.active())
    return int(values if values.ndim == 0 else values.flat[0])


@instruction(*_OPCODES, together="warp")
def multiply_scaled(d: Decoder) -> Step:
    """PTX ISA 9.7.14.5.14 and 9.7.14.6.3: D = (A * scales of A) (B * scales of B) + C."""
    modifiers = d.modifiers
    kind = d.opcode.partition("kind::")[2]
    kept, bits, sizes = _KINDS[kind]
    sparse = d.opcode.startswith(_SPARSE)
    k = 2 * kept if sparse else kept
    if not modifiers.flag("block_scale"):
        d.refuse(f"kind::{kind} has block scales")
    default = sizes[0] if len(sizes) == 1 else None
    count = int(modifiers.one_of(*sizes, default=default)[-2])
    modifiers.ignore(f"m16n8k{k}", "row", "col")
    types = list(modifiers.left)
    modifiers.left.clear()
    elements = _ELEMENTS[bits]
    scales = ("ue4m3", "ue8m0") if count == 4 else ("ue8m0",)
    if len(types) != 5 or types[0] != "f32" or types[3] != "f32" or types[4] not in scales:
        d.refuse(f"kind::{kind} with these scales has the types f32.A.B.f32.{' or '.join(scales)}")
    if types[1] not in elements or types[2] not in elements:
        d.refuse(f"kind::{kind} multiplies {', '.join(elements)}")
    d.expect(10 if sparse else 8)
    metadata = take_metadata(d, 4, k, bits, ordered=True) if sparse else None
    a, b, c = d.sources(1, "b32"), d.sources(2, "b32"), d.sources(3, "f32")
    targets = d.targets(0, "f32")
    of_b = 4 if sparse else 2
    if (len(targets), len(a), len(b), len(c)) != (4, 4, of_b, 4):
        d.refuse(f"D, A, B and C have 4, 4, {of_b} and 4 registers")
    scales_a, scales_b = (_scales(d, len(d.operands) - at, n) for at, n in ((4, 2), (2, 4)))
    table, sums = numerics.decode_table(types[4]), d.machine.sums
    mask = 0x7F if types[4] == "ue4m3" else 0xFF

    def operand(
        registers: list[Source], scale: _Scales, name: str, rows: int, group: Group
    ) -> tuple[Array, Array]:
        """float64 [n, rows, elements] with the scales, and the undefined rows."""
        view = fragments.a_matrix if rows == 16 else fragments.b_matrix
        raw, bad = stacked(registers, group)
        values = operand_values(view(_elements(raw, bits)), name, packed_fp4=bits == 4)
        codes, undefined = scale.read(group, count, rows)
        if bad is not None:
            undefined = undefined | (view(_elements(bad, bits)) != 0).any(axis=2)
        each = np.repeat(table.take(codes & mask), values.shape[2] // count, axis=2)
        return values * each, undefined

    def step(group: Group) -> None:
        left, bad_a = operand(a, scales_a, types[1], 16, group)
        right, bad_b = operand(b, scales_b, types[2], 8, group)
        before, bad_c = stacked(c, group)
        matrix = fragments.c_matrix(before.astype(np.float64))
        if metadata is None:
            total = left @ right.transpose(0, 2, 1)
        else:
            columns = metadata.columns(group)
            total = sparsity.multiplied(left, right, columns)
            left = sparsity.dense(left, columns, k)
        right = right.transpose(0, 2, 1)
        total = sums.moved(total + matrix, left, right, matrix, "f32", types[1])
        values = fragments.c_registers(total)
        flags = fragments.c_registers(bad_a[:, :, None] | bad_b[:, None, :])
        if bad_c is not None:
            flags = flags | (bad_c != 0)
        poison = np.where(flags, np.uint32(0xFFFFFFFF), np.uint32(0))
        for place, target in enumerate(targets):
            result = numerics.canonical_f32(values[:, place].astype(np.float32))
            bad = poison[:, place]
            target.put(group, result, bad if bad.any() else None)

    return step


def _elements(registers: Array, bits: int) -> Array:
    """Codes [n, registers, 32, elements]."""
    return fragments.elements(list(registers.transpose(1, 0, 2)), bits, len(registers))


def _scales(d: Decoder, place: int, threads: int) -> _Scales:
    registers, ids = d.sources(place, "b32"), d.sources(place + 1, "u16")
    if len(registers) != 1 or len(ids) != 2:
        d.refuse("scales are one register, with the numbers of a byte and a thread")
    return _Scales(registers[0], ids[0], ids[1], threads)
