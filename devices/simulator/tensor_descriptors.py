"""Descriptors of `tcgen05`: where a matrix lies in shared memory, and what a product is.

Shared memory descriptor and instruction descriptor of PTX ISA 9.7.16.4, with the checks that the
hardware leaves out: a descriptor that the ISA gives no meaning is an error here.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .errors import AlignmentError, IllegalInstructionError, UndefinedBehaviorError
from .groups import Array
from .shared_memory import PIECE

# Code of the swizzle -> bytes of a row of its pattern.
_WIDTHS = {0: 16, 1: 128, 2: 128, 4: 64, 6: 32}
_WIDE_ATOMS = 1  # 128-byte rows whose atoms have 32 bytes


def field(value: int, first: int, last: int) -> int:
    """Bits first to last of a number."""
    return value >> first & ((1 << (last - first + 1)) - 1)


@dataclass(frozen=True, slots=True)
class SharedMatrix:
    """A shared memory descriptor (PTX ISA 9.7.16.4.1).

    Attributes:
        start: byte address in the window of the CTA.
        leading, stride: leading and stride dimension byte offset.
        absolute: whether `leading` is an address, where rows wrap around to.
        swizzle: code of the swizzling mode.
        base: row of 128 bytes at which the pattern of the swizzle begins (base offset).
    """

    start: int
    leading: int
    stride: int
    absolute: bool
    swizzle: int
    base: int = 0

    @classmethod
    def decode(cls, bits: int, name: str) -> "SharedMatrix":
        """Reads a descriptor.

        Raises:
            UndefinedBehaviorError: fields without a meaning.
            AlignmentError: a start that does not fit the swizzle.
        """
        swizzle = field(bits, 61, 63)
        if field(bits, 46, 48) != 1:
            told = f"bits 46 to 48 of the descriptor of {name} are not 0b001"
            raise UndefinedBehaviorError(told)
        if field(bits, 53, 60) or field(bits, 14, 15) or field(bits, 30, 31):
            raise UndefinedBehaviorError(f"reserved bits of the descriptor of {name} are set")
        if swizzle not in _WIDTHS:
            raise UndefinedBehaviorError(f"the descriptor of {name} has swizzling mode {swizzle}")
        base = field(bits, 49, 51)
        if base and not swizzle:
            told = f"the descriptor of {name} has a base offset, which no swizzle uses"
            raise UndefinedBehaviorError(told)
        start, leading, stride = (16 * field(bits, at, at + 13) for at in (0, 16, 32))
        width = _WIDTHS[swizzle]
        pattern = width * (4 if swizzle == _WIDE_ATOMS else 8)
        if swizzle and (start - 128 * base) % pattern >= width:
            told = f"the descriptor of {name} starts at {start:#x}, which is not in the first row"
            raise AlignmentError(f"{told} of its swizzling pattern of {pattern} bytes")
        return cls(start, leading, stride, bool(field(bits, 52, 52)), swizzle, base)

    @lru_cache(1024)  # noqa: B019
    def k_major(self, rows: int, chunks: int, name: str) -> Array:
        """Window offsets [rows, chunks] of the 16-byte chunks of a matrix whose rows lie along K.

        Raises:
            UndefinedBehaviorError: rows that leave their swizzling pattern, or a swizzle for
                which K-major matrices are not defined.
        """
        if self.swizzle == _WIDE_ATOMS:
            told = f"{name} is K-major, and 128-byte swizzling with atoms of 32 bytes"
            raise UndefinedBehaviorError(f"{told} is for MN-major matrices")
        row, chunk = np.arange(rows)[:, None], np.arange(chunks)[None]
        width = _WIDTHS[self.swizzle]
        across = row % 8 * width + row // 8 * self.stride
        if self.swizzle == 0:
            return self.start + across + chunk * self.leading
        along = self.start % width + chunk * PIECE
        inside = self.start + across + chunk * PIECE
        over = along >= width
        if over.any():
            if not self.absolute:
                told = f"a row of {name} takes {along.max() + PIECE} bytes of its swizzling"
                raise UndefinedBehaviorError(f"{told} pattern, which has {width}")
            inside = np.where(over, self.leading + across + along - width, inside)
        return self._swizzled(inside)

    @lru_cache(1024)  # noqa: B019
    def mn_major(self, depth: int, chunks: int) -> Array:
        """Window offsets [depth, chunks] of a matrix whose columns, of one K each, lie along MN."""
        k, chunk = np.arange(depth)[:, None], np.arange(chunks)[None]
        width = _WIDTHS[self.swizzle]
        group = 4 if self.swizzle == _WIDE_ATOMS else 8
        if self.swizzle == 0:
            found = k % 8 * 16 + k // 8 * self.leading + chunk * self.stride
            return self.start + found
        per = width // PIECE
        found = k % group * width + k // group * self.stride
        found = found + chunk // per * self.leading + chunk % per * PIECE
        return self._swizzled(self.start + found)

    def _swizzled(self, at: Array) -> Array:
        row = (at >> 7) - self.base
        if self.swizzle == _WIDE_ATOMS:
            return at ^ ((row & 3) << 5)
        mask = {2: 7, 4: 3, 6: 1}[self.swizzle]
        return at ^ ((row & mask) << 4)


_TYPES = {
    "f16": ("f16", "bf16"),
    "tf32": ("", "", "tf32"),
    "f8f6f4": ("e4m3", "e5m2", "e3m4", "e2m3", "e3m2", "e2m1"),
    "i8": ("u8", "s8"),
    "mxf8f6f4": ("e4m3", "e5m2", "e3m4", "e2m3", "e3m2", "e2m1"),
    "mxf4": ("", "e2m1"),
    "mxf4nvf4": ("e0m3", "e2m1"),
}
"""Element types by the kind of a product, in the order of their codes."""

_RESULTS = {
    "f16": ("f16", "f32"),
    "tf32": ("", "f32"),
    "f8f6f4": ("f16", "f32"),
    "i8": ("", "", "s32"),
}
UNDOCUMENTED = ("e3m4", "e0m3")
BLOCK_SCALED = ("mxf8f6f4", "mxf4", "mxf4nvf4")


@dataclass(frozen=True, slots=True)
class Product:
    """An instruction descriptor (PTX ISA 9.7.16.4.2), with what the opcode adds to it.

    Attributes:
        kind: as in the opcode.
        m, n, k: the shape, M and N of both CTAs of a pair.
        a, b, d: PTX types of the elements.
        negate_a, negate_b: whether elements are negated.
        a_along_m, b_along_n: whether operands are MN-major, which the ISA calls transposed.
        saturate: whether integer sums stop at the ends of their range.
        block: K values that share a scale; 0 without block scales.
        scale: PTX type of the scales.
        sfa_id, sfb_id: first byte of the scales in their words.
    """

    kind: str
    m: int
    n: int
    k: int
    a: str
    b: str
    d: str
    negate_a: bool = False
    negate_b: bool = False
    a_along_m: bool = False
    b_along_n: bool = False
    saturate: bool = False
    block: int = 0
    scale: str = ""
    sfa_id: int = 0
    sfb_id: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of K of a row, or of an element of 8 bits or more times K."""
        return self.k * self.element_bits // 8

    @property
    def element_bits(self) -> int:
        """Bits that an element takes in memory; those of 4 and 6 bits are padded to 8."""
        return {"f16": 16, "tf32": 32, "mxf4": 4, "mxf4nvf4": 4}.get(self.kind, 8)


def decode_plain(bits: int, kind: str, target: int) -> Product:
    """Reads the descriptor of a product without block scales.

    Args:
        bits: the descriptor.
        kind: f16, tf32, f8f6f4 or i8.
        target: number of the architecture, 100 for sm_100a.

    Raises:
        UndefinedBehaviorError: fields without a meaning there.
    """
    _require_zero(bits, kind, (6, 6), (23, 23))
    if field(bits, 2, 2):
        raise UndefinedBehaviorError("the instruction descriptor says sparse, the opcode does not")
    doubled = field(bits, 29, 29)
    if doubled and (target != 107 or kind != "f8f6f4"):
        told = "bit 29 of the instruction descriptor doubles K of f8f6f4 on sm_107 and is reserved"
        raise UndefinedBehaviorError(f"{told} elsewhere, where a device computes nonsense silently")
    saturate = bool(field(bits, 3, 3))
    negate = bool(field(bits, 13, 13)), bool(field(bits, 14, 14))
    if kind == "i8" and any(negate):
        raise UndefinedBehaviorError("integer operands cannot be negated")
    if saturate and kind != "i8":
        raise UndefinedBehaviorError(f"products of kind {kind} do not saturate")
    depth = {"f16": 16, "tf32": 8}.get(kind, 32) * (2 if doubled else 1)
    return Product(
        kind,
        16 * field(bits, 24, 28),
        8 * field(bits, 17, 22),
        depth,
        _named(_TYPES[kind], field(bits, 7, 9), "A"),
        _named(_TYPES[kind], field(bits, 10, 12), "B"),
        _named(_RESULTS[kind], field(bits, 4, 5), "D"),
        *negate,
        bool(field(bits, 15, 15)),
        bool(field(bits, 16, 16)),
        saturate,
    )


def decode_scaled(bits: int, kind: str, size: str, target: int) -> Product:
    """Reads the descriptor of a product with block scales.

    Args:
        bits: the descriptor.
        kind: mxf8f6f4, mxf4 or mxf4nvf4.
        size: how the opcode gives the size of the blocks: `block16`, `scale_vec::2X`, ...; "" for
            the default.
        target: number of the architecture.

    Raises:
        UndefinedBehaviorError: fields without a meaning there.
    """
    four = kind != "mxf8f6f4"
    _require_zero(bits, kind, (0, 1), (6, 6), (24, 26), *([(12, 12), (15, 16)] if four else []))
    if field(bits, 2, 2):
        raise UndefinedBehaviorError("the instruction descriptor says sparse, the opcode does not")
    depth = _scaled_depth(bits, kind, target)
    block = _block(kind, size)
    scale = "ue8m0" if field(bits, 23, 23) else "ue4m3"
    if scale == "ue4m3" and (kind != "mxf4nvf4" or block != 16):
        told = f"products of kind {kind} with blocks of {block} have ue8m0 scales, not ue4m3"
        raise UndefinedBehaviorError(told)
    a = _named(_TYPES[kind], field(bits, 7, 9), "A")
    b = _named(_TYPES[kind], field(bits, 10, 11 if four else 12), "B")
    if "e0m3" in (a, b) and block != 16:
        raise IllegalInstructionError("e0m3 operands go with blocks of 16 only")
    sfa, sfb = field(bits, 29, 30), field(bits, 4, 5)
    allowed = _scale_ids(depth // block, depth)
    for name, found in (("A", sfa), ("B", sfb)):
        if found not in allowed:
            told = f"the scales of {name} have the data id {found}; possible here are"
            raise UndefinedBehaviorError(f"{told} {', '.join(map(str, allowed))}")
    return Product(
        kind,
        128 * field(bits, 27, 28),
        8 * field(bits, 17, 22),
        depth,
        a,
        b,
        "f32",
        bool(field(bits, 13, 13)),
        bool(field(bits, 14, 14)),
        bool(field(bits, 15, 15)),
        bool(field(bits, 16, 16)),
        block=block,
        scale=scale,
        sfa_id=sfa,
        sfb_id=sfb,
    )


def _scaled_depth(bits: int, kind: str, target: int) -> int:
    high, low = field(bits, 31, 31), field(bits, 3, 3)
    if kind == "mxf8f6f4":
        if low or (high and target != 107):
            told = "K of mxf8f6f4 is 32, or 64 on sm_107 by bit 31 of the instruction descriptor"
            raise UndefinedBehaviorError(told)
        return 64 if high else 32
    if low and (target != 107 or high or kind != "mxf4nvf4"):
        told = "bit 3 of the instruction descriptor makes K of mxf4nvf4 128 on sm_107 and is"
        raise UndefinedBehaviorError(f"{told} reserved elsewhere")
    if high and target not in (103, 107):
        raise UndefinedBehaviorError("K 96 (bit 31 of the instruction descriptor) is for sm_103")
    return 96 if high else 128 if low else 64


def _block(kind: str, size: str) -> int:
    """K values that share a scale. `scale_vec` counts scales of K 32 or 64."""
    sizes = {
        "mxf8f6f4": {"": 32, "block32": 32, "scale_vec::1X": 32},
        "mxf4": {"": 32, "block32": 32, "scale_vec::2X": 32},
        "mxf4nvf4": {"block32": 32, "scale_vec::2X": 32, "block16": 16, "scale_vec::4X": 16},
    }[kind]
    if size not in sizes:
        told = f"kind {kind} cannot have .{size}" if size else f"kind {kind} needs a block size"
        raise UndefinedBehaviorError(f"{told}; possible: {', '.join(s for s in sizes if s)}")
    return sizes[size]


def _scale_ids(count: int, depth: int) -> tuple[int, ...]:
    """Bytes of a word at which so many scales may begin."""
    if depth == 96:
        return (0, 1, 2, 3) if count == 3 else (0, 2)
    return {1: (0, 1, 2, 3), 2: (0, 2)}.get(count, (0,))


def _named(names: tuple[str, ...], code: int, operand: str) -> str:
    name = names[code] if code < len(names) else ""
    if not name:
        raise UndefinedBehaviorError(f"{code} is no type of {operand} in this kind of product")
    return name


def _require_zero(bits: int, kind: str, *fields: tuple[int, int]) -> None:
    for first, last in fields:
        if field(bits, first, last):
            place = f"bit {first}" if first == last else f"bits {first} to {last}"
            told = f"{place} of the instruction descriptor must be 0 for kind {kind}"
            raise UndefinedBehaviorError(told)
