"""Matrices of `wgmma` as the PTX ISA lays them out, written down a second time for the tests."""

from dataclasses import dataclass

import numpy as np

from humming import dtypes

BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "b1": 1}
SPANS = {"none": 0, "32B": 32, "64B": 64, "128B": 128}
MODES = {"none": 0, "128B": 1, "64B": 2, "32B": 3}


def random_codes(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> np.ndarray:
    """Codes of finite elements; for b1 one bit to each entry."""
    if kind == "b1":
        return rng.integers(0, 2, shape, dtype=np.uint8)
    if kind in ("s8", "u8"):
        return rng.integers(0, 256, shape, dtype=np.uint8)
    if kind in ("e4m3", "e5m2"):
        codes = rng.integers(0, 256, shape, dtype=np.uint8)
        limit = 0x7E if kind == "e4m3" else 0x7B
        return np.where((codes & 0x7F) > limit, codes & 0x80 | 0x30, codes)
    values = rng.standard_normal(shape).astype(np.float32)
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    return (bits >> 16).astype(np.uint16) if kind == "bf16" else bits


def values_of(codes: np.ndarray, kind: str) -> np.ndarray:
    """float64 values of codes."""
    if kind in ("b1", "u8"):
        return codes.astype(np.float64)
    if kind == "s8":
        return codes.view(np.int8).astype(np.float64)
    if kind == "f16":
        return codes.view(np.float16).astype(np.float64)
    if kind == "bf16":
        return (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if kind == "tf32":
        return (codes & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    return dtypes.DataType.parse(kind).decode_table()[codes]


def packed(codes: np.ndarray, kind: str) -> np.ndarray:
    """Bytes [rows, row bytes] of codes [rows, columns]."""
    if kind == "b1":
        return np.packbits(codes, axis=1, bitorder="little")
    return np.ascontiguousarray(codes).view(np.uint8).reshape(len(codes), -1)


@dataclass(frozen=True)
class Stored:
    """A matrix in shared memory: its bytes, and a descriptor without the start address."""

    image: np.ndarray
    descriptor: int
    step: int  # bytes from one wgmma to the next in the direction of K


def descriptor(layout: str, leading: int, stride: int, base: int = 0) -> int:
    return MODES[layout] << 62 | base << 49 | (stride >> 4) << 32 | (leading >> 4) << 16


def turned(piece: int, row: int, span: int) -> int:
    """Where piece `piece` of a row of `span` bytes lies in it."""
    return piece ^ ((row * span // 128) % (span // 16))


def k_major(rows: np.ndarray, layout: str, pad: int = 0) -> Stored:
    """A matrix whose rows are contiguous along K: bytes [rows, K bytes].

    Args:
        rows: without a swizzle 32 bytes in a row, or 64, else as many as the swizzle spans.
        layout: of the descriptor.
        pad: what the byte offsets are larger than they need be.
    """
    count, width = rows.shape
    span = SPANS[layout]
    if span:
        assert width == span
        group = 8 * span + (pad and 1024)
        image = np.zeros(-(-count // 8) * group, np.uint8)
        for r in range(count):
            for c in range(span // 16):
                at = r // 8 * group + r % 8 * span + 16 * turned(c, r % 8, span)
                image[at : at + 16] = rows[r, 16 * c : 16 * c + 16]
        return Stored(image, descriptor(layout, 16, group), 32)
    assert width in (32, 64)
    leading = -(-count // 8) * (128 + pad)
    image = np.zeros(width // 16 * leading, np.uint8)
    for r in range(count):
        for c in range(width // 16):
            at = r // 8 * (128 + pad) + r % 8 * 16 + c * leading
            image[at : at + 16] = rows[r, 16 * c : 16 * c + 16]
    return Stored(image, descriptor(layout, leading, 128 + pad), 0)


def mn_major(columns: np.ndarray, layout: str, pad: int = 0) -> Stored:
    """A matrix whose columns are contiguous along M or N: bytes [K, 2 * size]."""
    k_count, width = columns.shape
    pieces = width // 16
    span = SPANS[layout]
    if span:
        per = span // 16
        atom = 8 * span
        stride = -(-pieces // per) * (atom + (pad and 1024))
        leading = atom + (pad and 1024)
        image = np.zeros(k_count // 8 * stride, np.uint8)
        for k in range(k_count):
            for c in range(pieces):
                at = k // 8 * stride + c // per * leading + k % 8 * span
                at += 16 * turned(c % per, k % 8, span)
                image[at : at + 16] = columns[k, 16 * c : 16 * c + 16]
        return Stored(image, descriptor(layout, leading, stride), 0)
    stride, leading = 128 + pad, pieces * (128 + pad)
    image = np.zeros(k_count // 8 * leading, np.uint8)
    for k in range(k_count):
        for c in range(pieces):
            at = c * stride + k // 8 * leading + k % 8 * 16
            image[at : at + 16] = columns[k, 16 * c : 16 * c + 16]
    return Stored(image, descriptor(layout, leading, stride), 0)


def fragment_a(rows: np.ndarray) -> np.ndarray:
    """Registers of A, uint32 [128 threads, 4], of bytes [64, 32]."""
    found = np.zeros((128, 4), np.uint32)
    words = np.ascontiguousarray(rows).view(np.uint32)
    for thread in range(128):
        w, lane = divmod(thread, 32)
        g, t = lane >> 2, lane & 3
        for r in range(4):
            # k = E t + e + 4 E (r >> 1), with E elements in a register: word t + 4 (r >> 1)
            found[thread, r] = words[16 * w + g + 8 * (r & 1), t + 4 * (r >> 1)]
    return found


def accumulator(registers: np.ndarray, half: bool) -> np.ndarray:
    """The matrix [64, N] that registers [128 threads, registers] hold."""
    values = registers.view(np.float16) if half else registers
    n = 2 * values.shape[1]
    found = np.zeros((64, n), values.dtype)
    for thread in range(128):
        w, lane = divmod(thread, 32)
        g, t = lane >> 2, lane & 3
        for i in range(values.shape[1]):
            row, column = 16 * w + g + 8 * ((i >> 1) & 1), 8 * (i >> 2) + 2 * t + (i & 1)
            found[row, column] = values[thread, i]
    return found
