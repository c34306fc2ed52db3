"""Tensor maps of the simulator: what `cuTensorMapEncodeTiled` makes for a device's copy engine.

With `corners`, what `cuTensorMapEncodeIm2col` makes.

The 128 bytes that the driver makes are opaque, and so are these: a kernel passes them on, and the
simulator decodes them where a copy uses them. A host that runs kernels here encodes its maps by
`TensorMap(...).encode()`, whose rules are those of the driver (CUDA driver API, "Tensor Map Object
Management").
"""

import math
import struct
import zlib
from dataclasses import dataclass, replace

from humming.errors import HummingError

from .swizzles import OF_TENSOR_MAP, Swizzle

BYTES = 128
ALIGN = 64
"""Size of a map, and what its address must be a multiple of."""
_MAGIC = b"hummingT"
_LAYOUT = "<8s7BxQ5I4Q5H5B6h"
_CORNERS = {3: 1 << 15, 4: 1 << 7, 5: 1 << 4}
"""What corners of bounding boxes must lie below, by the number of dimensions (PTX ISA 5.5.4.1)."""
_SWIZZLES = len(OF_TENSOR_MAP)


@dataclass(frozen=True, slots=True)
class ElementType:
    """An element type of tensor maps.

    Attributes:
        name: in lower case, as `CUtensorMapDataType` has it.
        bits: width in global memory.
        kind: PTX type for reductions; "" if there are none.
        packed: elements and bytes of a group that takes 16 bytes in shared memory; (0, 0) if
            elements are as dense there as in global memory.
    """

    name: str
    bits: int
    kind: str = ""
    packed: tuple[int, int] = (0, 0)
    is_float: bool = False
    flushes: bool = False


TYPES = (
    ElementType("uint8", 8),
    ElementType("uint16", 16),
    ElementType("uint32", 32, "u32"),
    ElementType("int32", 32, "s32"),
    ElementType("uint64", 64, "u64"),
    ElementType("int64", 64, "s64"),
    ElementType("float16", 16, "f16", is_float=True),
    ElementType("float32", 32, "f32", is_float=True),
    ElementType("float64", 64, "f64", is_float=True),
    ElementType("bfloat16", 16, "bf16", is_float=True),
    ElementType("float32_ftz", 32, "f32", is_float=True, flushes=True),
    ElementType("tfloat32", 32, is_float=True),
    ElementType("tfloat32_ftz", 32, is_float=True, flushes=True),
    ElementType("16u4_align8b", 4),
    ElementType("16u4_align16b", 4, packed=(16, 8)),
    ElementType("16u6_align16b", 6, packed=(16, 12)),
)
"""By the number that `CUtensorMapDataType` has for it."""
_NAMES = [each.name for each in TYPES]


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor in global memory and the box of it that one copy moves.

    Dimensions are in the driver's order, the innermost, which is contiguous, first.

    Attributes:
        dtype: name of one of `TYPES`.
        address: of the tensor in global memory.
        dims: elements of each dimension, 1 to 5 of them.
        strides: bytes from one element to the next, of each dimension but the first.
        box: elements of each dimension that a copy traverses.
        element_strides: steps in which it does that; () for 1.
        swizzle: number that `CUtensorMapSwizzle` has for the mode, 0 to 4.
        interleave: 0; the layouts 1 and 2 are not simulated.
        fill: 0 for zeros where the box lies outside of the tensor, 1 for NaN.
        corners: of a map of the mode im2col, the lower and the upper corner of the bounding box in
            each of the dimensions W, H and D that there are. Its `box` is channels per pixel and
            pixels per column.
    """

    dtype: str
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] = ()
    swizzle: int = 0
    interleave: int = 0
    fill: int = 0
    corners: tuple[tuple[int, int], ...] = ()

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    @property
    def element(self) -> ElementType:
        """The type of the elements."""
        return TYPES[_NAMES.index(self.dtype)]

    @property
    def swizzling(self) -> Swizzle:
        """The swizzle of shared memory."""
        return OF_TENSOR_MAP[self.swizzle]

    @property
    def needs_sm_100(self) -> bool:
        """Whether the drivers of older architectures refuse it, as that of an H200 does."""
        return self.element.bits < 8 or self.swizzle > 3

    @property
    def not_simulated(self) -> str:
        """Why copies by it are not executed, although there are such maps; empty if they are."""
        if _SWIZZLES <= self.swizzle <= 6:
            return f"tensor maps with the swizzle {self.swizzle} are not simulated"
        if self.interleave:
            return f"tensor maps with the interleave {self.interleave} are not simulated"
        if self.dtype.startswith("tfloat32"):
            return "the rounding of tensor maps of type tfloat32 is not simulated"
        if 0 < self.swizzle < _SWIZZLES and self.row_bytes < self.swizzling.span_bytes:
            return (
                f"rows of {self.row_bytes} bytes in the swizzle {self.swizzling.name} are not "
                "simulated: how they lie in shared memory is not documented"
            )
        return ""

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements of each dimension that a copy moves; channels and pixels of im2col."""
        if self.corners:
            return self.box
        steps = self.element_strides or (1,) * self.rank
        rest = [math.ceil(b / s) for b, s in zip(self.box[1:], steps[1:], strict=True)]
        return (self.box[0], *rest)

    @property
    def bounding_box(self) -> list[tuple[int, int]]:
        """Of im2col: first and last base of a filter in W, H and D (PTX ISA 5.5.4.1)."""
        sizes = zip(self.corners, self.dims[1:-1], strict=False)
        return [(lower, size - 1 + upper) for (lower, upper), size in sizes]

    @property
    def row_bytes(self) -> int:
        """Bytes in shared memory of a row of the box."""
        if self.element.packed[0]:
            return self.box[0] // self.element.packed[0] * 16
        return self.box[0] * self.element.bits // 8

    @property
    def box_bytes(self) -> int:
        """Bytes in shared memory of the box; what a copy completes at its barrier object."""
        return self.row_bytes * math.prod(self.counts[1:])

    def check(self) -> None:
        """Checks the rules of the driver.

        Raises:
            HummingError: one is broken.
        """
        for broken, rule in self._rules():
            if broken:
                raise HummingError(f"a tensor map cannot have {rule}; it is {self}")

    def _rules(self) -> list[tuple[bool, str]]:
        if self.dtype not in _NAMES:
            return [(True, f"elements of type {self.dtype!r}, only {', '.join(_NAMES)}")]
        rank, element = self.rank, self.element
        boxed = len(self.box) + (rank - 2 if self.corners else 0)
        sizes = (len(self.strides) + 1, boxed, len(self.element_strides) or rank)
        if self.corners and (not 3 <= rank <= 5 or len(self.corners) != rank - 2):
            return [(True, f"{rank} dimensions and {len(self.corners)} pairs of corners")]
        limit = _CORNERS.get(rank, 0)
        if not 1 <= rank <= 5 or set(sizes) != {rank}:
            return [(True, f"{rank} dimensions and {sizes} entries for their attributes")]
        wide = 32 if element.packed[0] else 16
        inner_bits = self.box[0] * element.bits
        several = {"16u4_align8b": 2}.get(self.dtype, 128 if element.packed[0] else 1)
        return [
            (self.address % wide != 0 or self.address <= 0, f"an address not aligned to {wide}"),
            (any(not 1 <= d <= 1 << 32 for d in self.dims), "dimensions not in 1 to 2^32"),
            (self.dims[0] % several != 0, f"an inner dimension that is no multiple of {several}"),
            (
                any(s % wide or not 0 <= s < 1 << 40 for s in self.strides),
                f"strides that are no multiples of {wide} below 2^40",
            ),
            (
                not 1 <= self.box[0] <= 256
                or any(not 1 <= b <= (1024 if self.corners else 256) for b in self.box[1:]),
                "a box with dimensions not in 1 to 256, or more than 1024 pixels of a column",
            ),
            (
                any(not -limit <= c < limit for pair in self.corners for c in pair),
                f"corners not in {-limit} to {limit - 1}",
            ),
            (any(first > last for first, last in self.bounding_box), "an empty bounding box"),
            (
                bool(self.corners) and element.packed[0] > 0,
                f"elements of type {self.dtype} in the mode im2col",
            ),
            (any(not 1 <= s <= 8 for s in self.element_strides), "element strides not in 1 to 8"),
            (
                not element.packed[0] and inner_bits % 128 != 0,
                "a box whose inner dimension is no multiple of 16 bytes",
            ),
            (bool(element.packed[0]) and self.box[0] != 128, "a packed box that is not 128 wide"),
            (not 0 <= self.swizzle <= 6, f"the swizzle {self.swizzle}"),
            (self.swizzle >= _SWIZZLES, f"the swizzle {self.swizzle}, which is not simulated"),
            (self.interleave != 0, f"the interleave {self.interleave}, which is not simulated"),
            (
                0 < self.swizzle < _SWIZZLES and self.row_bytes > self.swizzling.span_bytes,
                "a box whose inner dimension is longer than the span of the swizzle",
            ),
            (
                bool(element.packed[0]) and self.swizzle in (1, 2),
                f"the swizzle {self.swizzle} for {self.dtype}",
            ),
            (self.fill not in (0, 1), f"the fill {self.fill}"),
            (
                self.fill == 1 and not element.is_float,
                f"NaN to fill elements of type {self.dtype}",
            ),
        ]

    def encode(self) -> bytes:
        """The 128 bytes that a kernel gets, in a parameter of its own or in global memory.

        Raises:
            HummingError: a rule of the driver is broken.
        """
        self.check()
        return self.encode_unchecked()

    def encode_unchecked(self) -> bytes:
        """The same for a map whose fields are being replaced."""
        rank = self.rank

        def padded(values: tuple[int, ...], length: int, rest: int) -> list[int]:
            return [*values, *[rest] * (length - len(values))]

        data = struct.pack(
            _LAYOUT,
            _MAGIC,
            _NAMES.index(self.dtype),
            rank,
            self.swizzle,
            self.interleave,
            self.fill,
            bool(self.element_strides),
            len(self.corners),
            self.address,
            *padded(tuple(d - 1 for d in self.dims), 5, 0),
            *padded(self.strides, 4, 0),
            *padded(self.box, 5, 0),
            *padded(self.element_strides, 5, 0),
            *padded(tuple(c for pair in self.corners for c in pair), 6, 0),
        )
        data = data.ljust(BYTES - 4, b"\0")
        return data + struct.pack("<I", zlib.crc32(data))

    def replaced(self, field: str, value: int, ordinal: int = 0) -> "TensorMap":
        """A map with one field changed, as `tensormap.replace` does; it is checked when it is used.

        Args:
            field: as the PTX ISA names it.
            value: the new value.
            ordinal: which dimension, for fields that have one.

        Raises:
            HummingError: no such field or dimension.
        """

        if self.corners:
            raise HummingError("tensormap.replace.tile of a map of the mode im2col")

        def changed(values: tuple[int, ...]) -> tuple[int, ...]:
            if ordinal >= len(values):
                raise HummingError(f"the tensor map has no {field} {ordinal}")
            return (*values[:ordinal], value, *values[ordinal + 1 :])

        if field == "global_address":
            return replace(self, address=value)
        if field == "global_dim":
            return replace(self, dims=changed(self.dims))
        if field == "global_stride":
            return replace(self, strides=changed(self.strides))
        if field == "box_dim":
            return replace(self, box=changed(self.box))
        if field == "element_stride":
            steps = self.element_strides or (1,) * self.rank
            return replace(self, element_strides=changed(steps))
        if field == "rank":
            return self._with_rank(value + 1)
        if field == "elemtype":
            return replace(self, dtype=_element_of_ptx(value))
        if field == "swizzle_mode" and value <= 3:
            return replace(self, swizzle=value)
        if field == "interleave_layout":
            return replace(self, interleave=value)
        if field == "fill_mode":
            return replace(self, fill=value)
        raise HummingError(f"tensormap.replace of {field} by {value} is not simulated")

    def _with_rank(self, rank: int) -> "TensorMap":
        def sized(values: tuple[int, ...], length: int) -> tuple[int, ...]:
            return (*values, *[1] * length)[:length]

        return replace(
            self,
            dims=sized(self.dims, rank),
            strides=sized(self.strides, rank - 1),
            box=sized(self.box, rank),
            element_strides=sized(self.element_strides, rank) if self.element_strides else (),
        )


_PTX_TYPES = (
    *("uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "float32"),
    *("float32_ftz", "float64", "bfloat16", "tfloat32", "tfloat32_ftz"),
    *("16u4_align8b", "16u4_align16b", "16u6_align16b"),
)
"""By the number that `tensormap.replace.elemtype` has for it."""


def _element_of_ptx(number: int) -> str:
    if not 0 <= number < len(_PTX_TYPES):
        raise HummingError(f"there is no element type {number} of tensor maps")
    return _PTX_TYPES[number]


def decode(data: bytes) -> TensorMap:
    """The map that 128 bytes stand for, not checked.

    Raises:
        HummingError: they are none that `TensorMap.encode` made.
    """
    if len(data) != BYTES or data[:8] != _MAGIC or zlib.crc32(data[:-4]) != _crc(data):
        raise HummingError(
            "these 128 bytes are no tensor map of the simulator; the host makes one by TensorMap"
        )
    fields = struct.unpack_from(_LAYOUT, data)
    number, rank, swizzle, interleave, fill, stepped, cornered, address = fields[1:9]
    dims, strides = fields[9:14], fields[14:18]
    box, steps, corners = fields[18:23], fields[23:28], fields[28:34]
    return TensorMap(
        TYPES[number].name,
        address,
        tuple(d + 1 for d in dims[:rank]),
        tuple(strides[: rank - 1]),
        tuple(box[: 2 if cornered else rank]),
        tuple(steps[:rank]) if stepped else (),
        swizzle,
        interleave,
        fill,
        tuple(zip(corners[::2], corners[1::2], strict=True))[:cornered],
    )


def _crc(data: bytes) -> int:
    found: int = struct.unpack("<I", data[-4:])[0]
    return found
