"""`mma.sync.m8n8k4` of f16: four products of 8 x 8 x 4 in a warp (PTX ISA 9.7.14.5.1).

The product q is that of threads 4 q to 4 q + 3 and of those 16 further, which hold the upper half
of its rows and columns: 4 of A or B each, along rows or columns, and of C and D 8 elements.
"""

from typing import Any

import numpy as np

from .. import numerics
from ..decoder import Decoder, Step, instruction
from ..groups import Array, Group
from .matrix import multiply_accumulate, stacked

_LANE = np.arange(32)
_QUARTER, _THREAD, _UPPER = _LANE % 16 // 4, _LANE % 4, 4 * (_LANE // 16)
# Places of the elements of each lane [32, elements], in each of the four products.
_OPERAND = np.arange(4)[None]
_LINE = (_THREAD + _UPPER)[:, None] + 0 * _OPERAND
_INNER = _OPERAND + 0 * _LINE
_BY_4 = _THREAD[:, None] + 0 * _OPERAND
_ACROSS = _OPERAND + _UPPER[:, None]
_I = np.arange(8)[None]
_ROW_F16 = (_THREAD + _UPPER)[:, None] + 0 * _I
_COLUMN_F16 = _I + 0 * _ROW_F16
_ROW_F32 = (_LANE[:, None] & 1) + (_I & 2) + _UPPER[:, None]
_COLUMN_F32 = (_I & 4) + (_LANE[:, None] & 2) + (_I & 1)
_Q = _QUARTER[:, None]


@instruction("mma.sync.aligned.m8n8k4", together="warp")
def multiply_quarters(d: Decoder) -> Step:
    """PTX ISA 9.7.14.5.1; of f64 it is one product, as of the other shapes."""
    if "f64" in d.modifiers.left:
        d.modifiers.left.insert(0, "m8n8k4")
        return multiply_accumulate(d)
    orders = [part for part in d.modifiers.left if part in ("row", "col")]
    kinds = [part for part in d.modifiers.left if part not in ("row", "col")]
    d.modifiers.left.clear()
    if len(orders) != 2 or len(kinds) != 4 or kinds[1:3] != ["f16", "f16"]:
        d.refuse("mma.m8n8k4 has the orders of A and B and the types D.f16.f16.C, or f64")
    to, held = kinds[0], kinds[3]
    if (to, held) not in (("f16", "f16"), ("f32", "f32"), ("f32", "f16")):
        d.refuse(f"mma.m8n8k4 of D in {to} and C in {held}")
    d.expect(4)
    a, b = d.sources(1, "b32"), d.sources(2, "b32")
    c = d.sources(3, "f32" if held == "f32" else "b32")
    targets = d.targets(0, "f32" if to == "f32" else "b32")
    sizes = {"f16": 4, "f32": 8}
    if (len(a), len(b), len(c), len(targets)) != (2, 2, sizes[held], sizes[to]):
        d.refuse("A and B have 2 registers; C and D have 4 of f16 or 8 of f32")
    # A row of A, and a column of B, in a thread; or one of each in each of its elements.
    at_a = (_LINE, _INNER) if orders[0] == "row" else (_ACROSS, _BY_4)
    at_b = (_LINE, _INNER) if orders[1] == "col" else (_ACROSS, _BY_4)
    sums = d.machine.sums

    def matrix(elements: Array, at: Any, shape: tuple[int, int]) -> Array:
        """[n, 4, *shape] of elements [n, 32, k]."""
        found = np.zeros((len(elements), 4, *shape), elements.dtype)
        found[:, _Q, at[0], at[1]] = elements
        return found

    def halves(registers: Array) -> Array:
        """Codes [n, 32, elements] of registers [n, registers, 32]."""
        n, count, _ = registers.shape
        split = np.ascontiguousarray(registers).view(np.uint16).reshape(n, count, 32, 2)
        return split.transpose(0, 2, 1, 3).reshape(n, 32, 2 * count)

    def accumulator(registers: Array, kind: str) -> tuple[Array, Any]:
        if kind == "f16":
            return halves(registers), (_ROW_F16, _COLUMN_F16)
        return registers.transpose(0, 2, 1), (_ROW_F32, _COLUMN_F32)

    def step(group: Group) -> None:
        (of_a, bad_a), (of_b, bad_b), (of_c, bad_c) = (stacked(s, group) for s in (a, b, c))
        table = numerics.decode_table("f16")
        left = matrix(table.take(halves(of_a)), at_a, (8, 4))
        right = matrix(table.take(halves(of_b)), at_b, (8, 4)).transpose(0, 1, 3, 2)
        codes, at_c = accumulator(of_c, held)
        values = table.take(codes) if held == "f16" else codes.astype(np.float64)
        before = matrix(values, at_c, (8, 8))
        total = sums.moved(left @ right + before, left, right, before, to, "f16")
        wild = np.zeros(total.shape, np.bool_)
        if bad_a is not None:
            wild |= matrix(halves(bad_a) != 0, at_a, (8, 4)).any(axis=3)[..., None]
        if bad_b is not None:
            wild |= matrix(halves(bad_b) != 0, at_b, (8, 4)).any(axis=3)[:, :, None]
        if bad_c is not None:
            marks, _ = accumulator(bad_c, held)
            wild |= matrix(marks != 0, at_c, (8, 8))
        _put(group, total, wild)

    def _put(group: Group, total: Array, wild: Array) -> None:
        row, column = (_ROW_F16, _COLUMN_F16) if to == "f16" else (_ROW_F32, _COLUMN_F32)
        found, bad = total[:, _Q, row, column], wild[:, _Q, row, column]
        if to == "f32":
            for place, target in enumerate(targets):
                values = numerics.canonical_f32(found[..., place].astype(np.float32))
                marks = np.where(bad[..., place], np.uint32(0xFFFFFFFF), np.uint32(0))
                target.put(group, values, marks if marks.any() else None)
            return
        codes = numerics.encode(np.ascontiguousarray(found), "f16").astype(np.uint16)
        words = np.ascontiguousarray(codes).view(np.uint32)
        undefined = np.where(bad, np.uint16(0xFFFF), np.uint16(0))
        undefined = np.ascontiguousarray(undefined).view(np.uint32)
        for place, target in enumerate(targets):
            marks = undefined[..., place]
            target.put(group, words[..., place], marks if marks.any() else None)

    return step
