"""Accumulators of `wgmma` in flight: values that their registers will have once a wait covers them.

Until then the registers are undefined. Compilers copy registers where they like, also these, so
each one holds a token of its own beside being undefined: wherever `mov` has carried a token to, the
value is delivered.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import numerics
from .groups import Array
from .registers import RegisterFile

_FIRST, _NUMBERS = 0x400000, 0x3FFFFF
_ONES = np.uint32(0xFFFFFFFF)


@dataclass(slots=True, eq=False)
class Accumulator:
    """The accumulator of one `wgmma`, and of those before that it has added to.

    Attributes:
        number: its tokens are this in bits 31:8 and the register's place in bits 7:0.
        rows: the warps, four for each warpgroup, in order.
        files: the registers.
        kind: PTX type of the values.
        matrix: float64 [warpgroups, 64, N], values that the type has.
        undefined: bool of the same shape, or None.
        product: the last `wgmma` of it.
        gone: bool [rows], where another accumulator has taken over, or it has been delivered.
    """

    number: int
    rows: Array
    files: list[RegisterFile]
    kind: str
    matrix: Array
    undefined: Array | None
    product: object
    gone: Array = field(init=False)
    _registers: tuple[Array, Array | None] | None = None

    def __post_init__(self) -> None:
        self.gone = np.zeros(len(self.rows), np.bool_)

    def token(self, place: int) -> Any:
        """What a register of it holds, uint32."""
        return np.uint32(self.number << 8 | place)

    def change(self, matrix: Array, undefined: Array | None, product: object) -> None:
        """Another `wgmma` has added to it."""
        self.matrix, self.undefined, self.product = matrix, undefined, product
        self._registers = None

    def registers(self) -> tuple[Array, Array | None]:
        """Bits that the registers will have, uint32 [registers, rows, 32], and undefined ones."""
        if self._registers is None:
            undefined = (
                None if self.undefined is None else flags_to_registers(self.undefined, self.kind)
            )
            self._registers = to_registers(self.matrix, self.kind), undefined
        return self._registers


def number_of(count: int) -> int:
    """A number for the accumulator that is made after so many others."""
    return _FIRST + count % _NUMBERS


def _by_register(matrix: Array) -> Array:
    """[warpgroups, 64, N] as [N / 2 registers, rows, 32].

    D[i] is row 16 warp + g + 8 ((i >> 1) & 1), column 8 (i >> 2) + 2 t + (i & 1).
    """
    groups, _, n = matrix.shape
    parts = matrix.reshape(groups, 4, 2, 8, n // 8, 4, 2)
    ordered = parts.transpose(4, 2, 6, 0, 1, 3, 5)
    return np.ascontiguousarray(ordered).reshape(n // 2, 4 * groups, 32)


def _by_element(registers: Array) -> Array:
    """The reverse."""
    count, rows, _ = registers.shape
    parts = registers.reshape(count // 4, 2, 2, rows // 4, 4, 8, 4)
    return parts.transpose(3, 4, 1, 5, 0, 6, 2).reshape(rows // 4, 64, 2 * count)


def to_registers(matrix: Array, kind: str) -> Array:
    """Registers, uint32 [registers, rows, 32], of values [warpgroups, 64, N] of a type."""
    values = _by_register(matrix)
    if kind == "f32":
        return numerics.canonical_f32(values.astype(np.float32)).view(np.uint32)
    if kind == "s32":
        return values.astype(np.int64).astype(np.int32).view(np.uint32)
    halves = numerics.encode(values, "f16").astype(np.uint32)
    pairs = halves.reshape(-1, 2, *halves.shape[1:])
    found: Array = pairs[:, 0] | pairs[:, 1] << np.uint32(16)
    return found


def from_registers(registers: Array, kind: str) -> Array:
    """The reverse: float64 [warpgroups, 64, N]."""
    if kind == "f32":
        return _by_element(registers.view(np.float32)).astype(np.float64)
    if kind == "s32":
        return _by_element(registers.view(np.int32)).astype(np.float64)
    halves = np.stack([registers & np.uint32(0xFFFF), registers >> np.uint32(16)], axis=1)
    codes = halves.reshape(-1, *registers.shape[1:])
    return numerics.decode_table("f16").take(_by_element(codes))


def flags_to_registers(flags: Array, kind: str) -> Array:
    """Undefined bits of registers, of undefined elements [warpgroups, 64, N]."""
    values = _by_register(flags)
    if kind != "f16":
        return np.where(values, _ONES, np.uint32(0))
    pairs = values.reshape(-1, 2, *values.shape[1:])
    low, high = np.uint32(0xFFFF), np.uint32(0xFFFF0000)
    found: Array = np.where(pairs[:, 0], low, 0) | np.where(pairs[:, 1], high, 0)
    return found.astype(np.uint32)


def flags_from_registers(undefined: Array, kind: str) -> Array:
    """Undefined elements, of undefined bits of registers."""
    if kind != "f16":
        return _by_element(undefined != 0)
    halves = np.stack([undefined & np.uint32(0xFFFF), undefined >> np.uint32(16)], axis=1)
    return _by_element(halves.reshape(-1, *undefined.shape[1:]) != 0)


def rounded(total: Array, kind: str, saturates: bool) -> Array:
    """Exact sums as values of the accumulator's type, still float64."""
    if kind == "f32":
        return total.astype(np.float32).astype(np.float64)
    if kind == "f16":
        return numerics.decode_table("f16").take(numerics.encode(total, "f16").astype(np.int64))
    if saturates:
        return np.clip(total, -(2.0**31), 2.0**31 - 1)
    return total.astype(np.int64).astype(np.int32).astype(np.float64)
