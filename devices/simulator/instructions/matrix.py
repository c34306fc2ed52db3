"""Matrices of a warp: ldmatrix, stmatrix, movmatrix and mma.sync (PTX ISA 9.7.14.5).

`mma`: products are exact. All products of an instruction and the accumulator are summed in float64
and rounded once, to nearest, to the type of the result. Devices add in an order and with a number
of bits that is not documented, so results agree with theirs within the bound of that accumulation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import fragments, numerics, sparsity
from ..decoder import Decoder, Step, instruction
from ..groups import Array, Group
from ..memory import SHARED_WINDOW
from ..operands import Source
from . import forms

# -- loads and stores of 8 x 8 matrices -----------------------------------------------------------


def _addresses(d: Decoder, operand: int, generic: bool) -> Callable[[Group], Array]:
    source = d.address(operand)
    window = np.uint64(SHARED_WINDOW)
    return (lambda group: source.read(group) - window) if generic else source.read


def _rows_to_registers(rows: Array, transposed: bool) -> Array:
    """16-bit matrices: rows [n, 8 x, 16 bytes] as registers [n, x, 32]."""
    n, count, _ = rows.shape
    if not transposed:
        return np.ascontiguousarray(rows).view(np.uint32).reshape(n, count // 8, 32)
    values = np.ascontiguousarray(rows).view(np.uint16).reshape(n, count // 8, 8, 8)
    flipped = np.ascontiguousarray(values.transpose(0, 1, 3, 2))
    return flipped.view(np.uint32).reshape(n, count // 8, 32)


def _registers_to_rows(registers: Array, transposed: bool) -> Array:
    """The reverse."""
    n, count, _ = registers.shape
    rows = np.ascontiguousarray(registers.reshape(n, count, 8, 4))
    if transposed:
        values = rows.view(np.uint16).reshape(n, count, 8, 8).transpose(0, 1, 3, 2)
        rows = np.ascontiguousarray(values)
    return rows.view(np.uint8).reshape(n, 8 * count, 16)


def _unpack_4(rows: Array) -> Array:
    """8 bytes of two 4-bit values each as 16 bytes, the lower one first."""
    packed = rows[..., :8]
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*rows.shape[:-1], 16)


def _unpack_6(rows: Array) -> Array:
    """12 bytes of 6-bit values as 16 bytes."""
    triples = rows[..., :12].reshape(*rows.shape[:-1], 4, 3).astype(np.uint32)
    word = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
    parts = [(word >> shift & 63).astype(np.uint8) for shift in (0, 6, 12, 18)]
    return np.stack(parts, axis=-1).reshape(*rows.shape[:-1], 16)


def _unpack_s4(rows: Array) -> Array:
    """8 bytes of two signed 4-bit values each as 16 signed bytes."""
    wide = _unpack_4(rows)
    return np.where(wide & 8, wide | 0xF0, wide)


_UNPACK: dict[str, Callable[[Array], Array]] = {
    "b4x16_p64": _unpack_4,
    "b6x16_p32": _unpack_6,
    "s4": _unpack_s4,
}


@instruction("ldmatrix.sync.aligned", together="warp")
def load_matrix(d: Decoder) -> Step:
    """PTX ISA 9.7.14.5.15."""
    modifiers = d.modifiers
    shape = modifiers.one_of("m8n8", "m8n16", "m16n16")
    number = int(modifiers.one_of("x1", "x2", "x4")[1:])
    transposed = modifiers.flag("trans")
    generic = modifiers.one_of("shared", "shared::cta", default="") == ""
    kind = modifiers.one_of("b16", "b8", "b8x16", "s8")
    packed = modifiers.one_of("b6x16_p32", "b4x16_p64", "s4", default="")
    d.expect(2)
    wrong = forms.matrix_load(shape, transposed, kind, packed)
    if wrong:
        d.refuse(wrong)
    targets = d.targets(0, "b32")
    if shape == "m16n16":
        return _load_16(d, number, packed, generic, targets)
    if len(targets) != number:
        d.refuse(f"ldmatrix.x{number} writes {number} registers")
    addresses = _addresses(d, 1, generic)
    shared = d.machine.shared
    row_bytes = 8 if packed == "s4" else 16
    # Threads beyond the rows that are asked for name no row: they repeat the others' here.
    used = np.arange(32) % (8 * number)
    unpack = _UNPACK.get(packed)

    def step(group: Group) -> None:
        at = addresses(group)[:, used]
        values, bad = shared.load(group, at, 8, row_bytes // 8)

        def registers(words: Array) -> Array:
            rows = np.ascontiguousarray(words).view(np.uint8).reshape(len(group), 32, row_bytes)
            rows = rows[:, : 8 * number]
            return _rows_to_registers(unpack(rows) if unpack else rows, transposed)

        result = registers(values)
        poison = None if bad is None else registers(bad)
        for place, target in enumerate(targets):
            part = None if poison is None else poison[:, place]
            target.put(group, result[:, place], None if part is None or not part.any() else part)

    return step


def _load_16(d: Decoder, number: int, packed: str, generic: bool, targets: Any) -> Step:
    """`.m16n16.trans.b8`: 16 rows of 16 bytes; a thread gets bytes of a column."""
    if number == 4 or len(targets) != 2 * number:
        d.refuse("ldmatrix.m16n16 writes two registers for each of one or two matrices")
    addresses = _addresses(d, 1, generic)
    shared = d.machine.shared
    used = np.arange(32) % (16 * number)
    unpack = _UNPACK.get(packed)

    def step(group: Group) -> None:
        at = addresses(group)[:, used]
        values, bad = shared.load(group, at, 8, 2)

        def registers(words: Array) -> Array:
            rows = np.ascontiguousarray(words).view(np.uint8).reshape(len(group), 32, 16)
            rows = rows[:, : 16 * number]
            rows = unpack(rows) if unpack else rows
            # (matrix, row half, t, row bit, column half, g) -> register row half, lane 4 g + t,
            # byte row bit + 2 column half
            parts = rows.reshape(len(group), number, 2, 4, 2, 2, 8)
            order = np.ascontiguousarray(parts.transpose(0, 1, 2, 6, 3, 5, 4))
            return (
                order.view(np.uint8).reshape(len(group), 2 * number, 32, 4).view(np.uint32)[..., 0]
            )

        result = registers(values)
        poison = None if bad is None else registers(bad)
        for place, target in enumerate(targets):
            target.put(group, result[:, place], None if poison is None else poison[:, place])

    return step


@instruction("stmatrix.sync.aligned", together="warp")
def store_matrix(d: Decoder) -> Step:
    """PTX ISA 9.7.14.5.16."""
    modifiers = d.modifiers
    shape = modifiers.one_of("m8n8", "m16n8")
    number = int(modifiers.one_of("x1", "x2", "x4")[1:])
    transposed = modifiers.flag("trans")
    generic = modifiers.one_of("shared", "shared::cta", default="") == ""
    kind = modifiers.one_of("b16", "b8")
    d.expect(2)
    if (shape == "m8n8") != (kind == "b16") or (shape == "m16n8" and not transposed):
        d.refuse("these shape and types of stmatrix do not go together")
    addresses = _addresses(d, 0, generic)
    sources = d.sources(1, "b32")
    if len(sources) != number:
        d.refuse(f"stmatrix.x{number} reads {number} registers")
    machine = d.machine
    rows_of = _registers_to_rows if shape == "m8n8" else _bytes_to_rows

    def step(group: Group) -> None:
        values, bad = stacked(sources, group)
        at = addresses(group)[:, : 8 * number]
        _store_rows(
            machine.shared,
            group,
            at,
            rows_of(values, transposed),
            None if bad is None else rows_of(bad, transposed),
        )

    return step


def _bytes_to_rows(registers: Array, transposed: bool) -> Array:
    """`.m16n8.trans.b8`: registers [n, x, 32] of 4 bytes as rows [n, 8 x, 16 bytes].

    The matrix has 16 rows and 8 columns; what is stored are its columns.
    """
    n, count, _ = registers.shape
    # Byte 2 h + b of lane 4 g + t is row 2 t + b + 8 h of column g... as mma holds C in bytes.
    parts = np.ascontiguousarray(registers).view(np.uint8).reshape(n, count, 8, 4, 2, 2)
    return np.ascontiguousarray(parts.transpose(0, 1, 2, 4, 3, 5)).reshape(n, 8 * count, 16)


def _store_rows(shared: Any, group: Group, at: Array, rows: Array, poison: Array | None) -> None:
    """Writes 16-byte rows [n, rows, 16] at addresses [n, rows]: the lanes that name rows."""
    count = at.shape[1]
    lanes = np.zeros(group.lanes.shape, np.bool_)
    lanes[group.index, :count] = True
    part = Group(lanes)
    width = 32 - count
    padded = np.pad(at, ((0, 0), (0, width)), mode="edge")
    words = np.ascontiguousarray(rows).view(np.uint64)
    bad = None if poison is None else np.ascontiguousarray(poison).view(np.uint64)
    fill = ((0, 0), (0, width), (0, 0))
    shared.store(
        part, padded, np.pad(words, fill), None if bad is None else np.pad(bad, fill), 8, 2
    )


@instruction("movmatrix.sync.aligned", together="warp")
def transpose_matrix(d: Decoder) -> Step:
    """PTX ISA 9.7.14.5.17."""
    for part in ("m8n8", "trans", "b16"):
        d.modifiers.one_of(part)
    d.expect(2)
    target, source = d.target(0, "b32"), d.source(1, "b32")

    def step(group: Group) -> None:
        values, bad = stacked([source], group)

        def flipped(registers: Array) -> Array:
            return _rows_to_registers(_registers_to_rows(registers, False), True)[:, 0]

        target.put(group, flipped(values), None if bad is None else flipped(bad))

    return step


def stacked(sources: list[Source], group: Group) -> tuple[Array, Array | None]:
    """Values of several registers [n, registers, 32], and their undefined bits."""
    shape = (len(group), 32)
    values = np.stack([np.broadcast_to(s.read(group), shape) for s in sources], axis=1)
    bad = [s.poison(group) for s in sources]
    if all(part is None for part in bad):
        return values, None
    zeros = np.zeros(shape, np.dtype(f"u{values.dtype.itemsize}"))
    return values, np.stack([zeros if part is None else part for part in bad], axis=1)


# -- products -------------------------------------------------------------------------------------

_INTEGER = {"s8": 8, "u8": 8, "s4": 4, "u4": 4}
_FLOAT = {
    "f16": 16,
    "bf16": 16,
    "tf32": 32,
    "e4m3": 8,
    "e5m2": 8,
    "e3m2": 8,
    "e2m3": 8,
    "e2m1": 8,
}


def operand_values(codes: Array, kind: str, packed_fp4: bool = False) -> Array:
    """float64 values of element codes of an mma operand.

    Args:
        codes: unsigned integers of the element's width in the register.
        kind: PTX type.
        packed_fp4: whether e2m1 has 4 bits to itself, and not bits 5:2 of a byte.
    """
    if kind in _INTEGER:
        bits = _INTEGER[kind]
        values = codes.astype(np.float64)
        if kind[0] == "s":
            values = np.where(codes >> (bits - 1), values - float(1 << bits), values)
        return values
    if kind == "tf32":
        return numerics.decode(np.ascontiguousarray(codes), "tf32")
    if kind == "e2m1" and not packed_fp4:
        codes = codes >> 2
    table = numerics.decode_table(kind)
    return table.take(codes & (len(table) - 1))


@instruction("mma.sync.aligned", together="warp")
def multiply_accumulate(d: Decoder) -> Step:
    """PTX ISA 9.7.14.5.14."""
    modifiers = d.modifiers
    shape = modifiers.one_of(
        *(f"m16n8k{k}" for k in (4, 8, 16, 32, 64, 128, 256)),
        *(f"m8n8k{k}" for k in (4, 16, 32, 128)),
    )
    modifiers.one_of("row")
    modifiers.one_of("col")
    f8f6f4 = modifiers.flag("kind::f8f6f4")
    saturates = modifiers.flag("satfinite")
    if "block_scale" in modifiers.left:
        d.refuse("mma with block scales is not supported here")
    if "f64" in modifiers.left:
        modifiers.flag("rn")
    bitwise, popc = modifiers.one_of("xor", "and", default=""), modifiers.flag("popc")
    kinds = list(modifiers.left)
    modifiers.left.clear()
    wrong = forms.product(
        shape, kinds, f8f6f4=f8f6f4, saturates=saturates, bitwise=bitwise != "", popc=popc
    )
    if wrong:
        d.refuse(wrong)
    d.expect(4)
    if kinds[0] == "f64":
        form = Form(shape, kinds, saturates)
        return _product_of_doubles(d, form.m, form.k)
    return product_step(d, Form(shape, kinds, saturates, bitwise))


def _product_of_doubles(d: Decoder, m: int, k: int) -> Step:
    """Products of float64, by the rule of the others with one element in each register.

    Every product is added with one rounding, in the order of k; the hardware's order is its own.
    """
    a, b = (d.sources(place, "f64", given="b64") for place in (1, 2))
    c = d.sources(3, "f64")
    results = d.targets(0, "f64")
    wanted = (m * k // 32, k // 4, m // 4)
    if (len(a), len(b), len(c)) != wanted or len(results) != len(c):
        d.refuse(f"mma of this shape has {wanted} registers for A, B and C")

    def step(group: Group) -> None:
        values = [stacked(part, group) for part in (a, b, c)]
        left = fragments.a_matrix(values[0][0][..., None])
        right = fragments.b_matrix(values[1][0][..., None])
        total = fragments.c_matrix(values[2][0])
        for place in range(k):
            total = numerics.fma_f64(left[:, :, place, None], right[:, None, :, place], total)
        before = fragments.c_matrix(values[2][0])
        total = d.machine.sums.moved(total, left, right.transpose(0, 2, 1), before, "f64", "f64")
        found = numerics.canonical_f64(fragments.c_registers(total))
        wild = np.zeros(total.shape, np.bool_)
        if values[0][1] is not None:
            lines = (fragments.a_matrix(values[0][1][..., None]) != 0).any(axis=2)
            wild = wild | lines[:, :, None]
        if values[1][1] is not None:
            lines = (fragments.b_matrix(values[1][1][..., None]) != 0).any(axis=2)
            wild = wild | lines[:, None, :]
        if values[2][1] is not None:
            wild = wild | (fragments.c_matrix(values[2][1]) != 0)
        bits = np.where(fragments.c_registers(wild), np.uint64(2**64 - 1), np.uint64(0))
        for place, target in enumerate(results):
            part = bits[:, place]
            target.put(group, found[:, place], part if part.any() else None)

    return step


@dataclass(frozen=True, slots=True)
class Form:
    """What the opcode of a product says.

    Attributes:
        shape: m16n8k16.
        kinds: types of D, A, B and C.
        saturates: whether integers are.
        bitwise: xor or and for products of bits.
    """

    shape: str
    kinds: list[str]
    saturates: bool
    bitwise: str = ""

    @property
    def m(self) -> int:
        """Rows of A."""
        return 16 if self.shape.startswith("m16") else 8

    @property
    def k(self) -> int:
        """Columns of A."""
        return int(self.shape.partition("k")[2])

    @property
    def width(self) -> int:
        """Bits of an element of A or B in registers."""
        return 1 if self.bitwise else _INTEGER.get(self.kinds[1]) or _FLOAT[self.kinds[1]]

    def multiplied(self, a: Array, b: Array, columns: Array | None) -> Array:
        """A B, float64 [n, M, N], of codes of A [n, M, K] and of B [n, N, K].

        Args:
            a, b: the codes.
            columns: of the elements that A has, if it is sparse.
        """
        if self.bitwise:
            return _bit_product(self.bitwise, a, b)
        left, right = operand_values(a, self.kinds[1]), operand_values(b, self.kinds[2])
        if columns is not None:
            return sparsity.multiplied(left, right, columns)
        found: Array = left @ right.transpose(0, 2, 1)
        return found


def _bit_product(operation: str, a: Array, b: Array) -> Array:
    """Counts of ones in a xor b or a and b, of bits as elements."""
    left, right = a.astype(np.float64), b.astype(np.float64).transpose(0, 2, 1)
    both: Array = left @ right
    if operation == "and":
        return both
    found: Array = left.sum(-1, keepdims=True) + right.sum(-2, keepdims=True) - 2 * both
    return found


def _bits(registers: list[Any], count: int) -> Array:
    """Elements of one bit: [n, registers, 32, 32]."""
    stacked_ = np.stack([np.broadcast_to(r, (count, 32)) for r in registers], axis=1)
    raw = np.ascontiguousarray(stacked_).view(np.uint8).reshape(*stacked_.shape, 4)
    return np.unpackbits(raw, axis=-1, bitorder="little")


def product_step(d: Decoder, form: Form, metadata: sparsity.Metadata | None = None) -> Step:
    """The step of an mma, whose A is sparse if it has metadata."""
    m, k, width, kinds = form.m, form.k, form.width, form.kinds
    half = kinds[0] == "f16"
    stored = "b32" if half else {"f32": "f32", "s32": "s32"}[kinds[0]]
    sums = d.machine.sums
    a, b = d.sources(1, "b32"), d.sources(2, "b32")
    c, results = d.sources(3, stored), d.targets(0, stored)
    of_a = m * k * width // (1024 if metadata is None else 2048)
    wanted = (of_a, 8 * k * width // 1024, m // (8 if half else 4))
    if (len(a), len(b), len(c)) != wanted or len(results) != len(c) or kinds[0] != kinds[3]:
        d.refuse(f"mma of this shape has {wanted} registers for A, B and C")
    split = _bits if width == 1 else lambda r, n: fragments.elements(r, width, n)

    def step(group: Group) -> None:
        n = len(group)
        left = fragments.a_matrix(split([s.read(group) for s in a], n))
        right = fragments.b_matrix(split([s.read(group) for s in b], n))
        columns = None if metadata is None else metadata.columns(group)
        total = form.multiplied(left, right, columns)
        before, bad = stacked(c, group)
        if half:
            wide = np.ascontiguousarray(before).view(np.uint16).reshape(n, len(c), 32, 2)
            held = numerics.decode_table("f16").take(wide)
            matrix = held.transpose(0, 1, 3, 2).reshape(n, 2 * len(c), 32)
        else:
            matrix = before
        matrix = fragments.c_matrix(matrix.astype(np.float64))
        total = total + matrix
        if kinds[0] != "s32" and d.machine.options.sums:
            left, right = operand_values(left, kinds[1]), operand_values(right, kinds[2])
            if columns is not None:
                left = sparsity.dense(left, columns, k)
            total = sums.moved(total, left, right.transpose(0, 2, 1), matrix, kinds[0], kinds[1])
        values = fragments.c_registers(total)
        undefined = _undefined(group, a, b, width, split, bad, m, half)
        for place, target in enumerate(results):
            part = None if undefined is None else undefined[:, place]
            target.put(group, finished(values, place), part)

    def finished(values: Array, place: int) -> Array:
        if half:
            pair = values.reshape(len(values), -1, 2, 32)[:, place]
            codes = numerics.encode(np.ascontiguousarray(pair.transpose(0, 2, 1)), "f16")
            return codes.astype(np.uint16).view(np.uint32)[..., 0]
        if kinds[0] == "f32":
            return numerics.canonical_f32(values[:, place].astype(np.float32))
        whole = values[:, place].astype(np.int64)
        if form.saturates:
            return np.clip(whole, -(2**31), 2**31 - 1).astype(np.int32)
        return whole.astype(np.int32)

    return step


def _undefined(
    group: Group,
    a: list[Source],
    b: list[Source],
    width: int,
    split: Callable[[list[Any], int], Array],
    bad_c: Array | None,
    m: int,
    half: bool,
) -> Array | None:
    """Undefined bits of D: of rows, columns and elements that have something undefined."""
    n = len(group)
    bad_a, bad_b = ([s.poison(group) for s in part] for part in (a, b))
    if bad_c is None and all(part is None for part in (*bad_a, *bad_b)):
        return None
    zeros = np.zeros((n, 32), np.uint32)
    found = np.zeros((n, m, 8), np.bool_)
    for parts, view, axis in ((bad_a, fragments.a_matrix, 2), (bad_b, fragments.b_matrix, 1)):
        if any(part is not None for part in parts):
            codes = view(split([zeros if part is None else part for part in parts], n)) != 0
            line = codes.any(axis=2)
            found |= line[:, :, None] if axis == 2 else line[:, None, :]
    flags = fragments.c_registers(found)
    if half:
        pairs = flags.reshape(n, -1, 2, 32)
        bits = np.where(pairs[:, :, 0], np.uint32(0xFFFF), 0) | np.where(
            pairs[:, :, 1], np.uint32(0xFFFF0000), 0
        )
    else:
        bits = np.where(flags, np.uint32(0xFFFFFFFF), np.uint32(0))
    if bad_c is not None:
        bits = bits | np.where(bad_c != 0, np.uint32(0xFFFFFFFF), np.uint32(0))
    return bits if bits.any() else None
