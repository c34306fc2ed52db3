"""How matrices lie in the registers of a warp, as reshapes (PTX ISA "Matrix Fragments").

With g = lane >> 2, t = lane & 3 and E elements in a 32-bit register, one rule holds for all types:
    A[r].e -> row g + 8 (r & 1), k E t + e + 4 E (r >> 1); A of 8 rows: row g, k E t + e
    B[r].e -> k E t + e + 4 E r, column g
    C[i]   -> row g + 8 (i >> 1), column 2 t + (i & 1)
"""

import numpy as np

from .groups import Array


def elements(registers: list[Array], bits: int, count: int) -> Array:
    """Codes [n, registers, 32, elements] of 32-bit registers [n, 32], each of `bits` bits.

    Args:
        registers: of one operand, all of the same shape.
        bits: width of an element in the register: 4, 8, 16 or 32.
        count: number of warps; constants are broadcast to it.
    """
    shape = (count, 32)
    stacked = np.stack([np.broadcast_to(r, shape) for r in registers], axis=1)
    if bits == 32:
        return stacked[..., None]
    if bits == 4:
        whole = np.ascontiguousarray(stacked).view(np.uint8).reshape(*stacked.shape, 4)
        return np.stack([whole & 15, whole >> 4], axis=-1).reshape(*stacked.shape, 8)
    part = np.uint8 if bits == 8 else np.uint16
    return np.ascontiguousarray(stacked).view(part).reshape(*stacked.shape, 32 // bits)


def a_matrix(codes: Array) -> Array:
    """A [n, M, K] of elements [n, registers, 32, E]; M is 8 for one register, else 16."""
    n, registers, _, per = codes.shape
    if registers == 1:
        return codes.reshape(n, 8, 4 * per)
    halves = codes.reshape(n, registers // 2, 2, 8, 4, per)
    return halves.transpose(0, 2, 3, 1, 4, 5).reshape(n, 16, registers // 2 * 4 * per)


def b_matrix(codes: Array) -> Array:
    """B [n, N, K], so transposed, of elements [n, registers, 32, E]; N is 8."""
    n, registers, _, per = codes.shape
    return codes.reshape(n, registers, 8, 4, per).transpose(0, 2, 1, 3, 4).reshape(n, 8, -1)


def c_matrix(values: Array) -> Array:
    """C [n, M, 8] of values [n, 2 or 4, 32]."""
    n, count, _ = values.shape
    rows = count // 2
    return values.reshape(n, rows, 2, 8, 4).transpose(0, 1, 3, 4, 2).reshape(n, 8 * rows, 8)


def c_registers(matrix: Array) -> Array:
    """The reverse of `c_matrix`: [n, 2 or 4, 32]."""
    n, m, _ = matrix.shape
    parts = matrix.reshape(n, m // 8, 8, 4, 2).transpose(0, 1, 4, 2, 3)
    return parts.reshape(n, m // 4, 32)
