"""Packing: the canonical form of a weight into bricks, the layout that kernels stream.

`humming.layout` defines the order, `docs/layout.md` draws it. A piece of the matrix is split into
bricks, the 1024 codes of each are put in order by one gather per bit plane with the same small
table, and neighbours are merged into words by shifts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
import torch

from humming import reference
from humming.dtypes import bfloat16
from humming.errors import UnsupportedError, check_type
from humming.formats import ActivationSpec, WeightSpec
from humming.layout import BRICK_K, BRICK_ROWS, LANES, OPERAND_BITS, brick_order, padded
from humming.lowering import packed_bits
from humming.places import place_of
from humming.problem import GemmProblem
from humming.quantized import (
    SCALE_TENSOR_DTYPES,
    QuantizedWeight,
    as_bits,
    check_parts,
    check_quantized,
    pack_bits,
    part_fault,
    same_bits,
    unpack_bits,
)

_BRICK_CODES = BRICK_ROWS * BRICK_K
_ALIGNMENT_BYTES = 16
# Codes handled at a time: few enough to bound memory, enough to keep a GPU busy.
_CHUNK_CODES = 1 << 22


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight in brick order, for every device; it checks itself.

    N and K are padded to N16 and K64, multiples of 16 and 64. Padding contributes nothing to a
    product: its codes decode to 0 (or to the zero point of their group), and the scales of rows
    and groups that are padding altogether are 0. Only a float zero point has no code; there the
    K padding of a group that holds weights too relies on the kernel, which reads activations
    beyond K as 0.

    Attributes:
        spec: the format.
        shape: (N, K) without padding.
        operand_bits: 16, 8 or 4, the width of the MMA operand that the order is made for.
        codes: int32 [N16 / 16, K64 / 64, 32 * c], c bits a code; see `humming.layout`.
        scales: in the scale dtype [N16 / 16, G, 16], G = ceil(K64 / g); per channel and for a
            whole tensor G = 1, blocks are spread over their rows.
        zeros: as the scales; uint8 for integer zero points, the scale dtype for floating ones.
        second_scale: float32 [1] per tensor, [N16] per channel, or None.

    All tensors are contiguous and start at a multiple of 16 bytes. Products read them ahead of what
    is before them on the stream; docs/composer.md ("Launches that overlap") says what a kernel that
    writes them must not do.

    Raises:
        UnsupportedError: a tensor has the wrong dtype, shape, device or alignment.
    """

    spec: WeightSpec
    shape: tuple[int, int]
    operand_bits: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    second_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_parts(self)
        n, k = self.shape
        if n < 1 or k < 1:
            raise UnsupportedError(
                f"a packed weight of shape [{n}, {k}]", "it is empty", "N and K are 1 or more."
            )
        if self.operand_bits not in OPERAND_BITS:
            raise UnsupportedError(
                f"a weight packed for operands of {self.operand_bits} bits",
                "bricks are defined for the operand widths of MMA instructions",
                "Choose 16, 8 or 4.",
            )
        spec, (n_padded, k_padded) = self.spec, padded(n, k)
        bands = n_padded // BRICK_ROWS
        scale_shape = (bands, _groups(spec, k), BRICK_ROWS)
        scale_dtype = SCALE_TENSOR_DTYPES[spec.scale_dtype]
        zero_dtype = {"none": None, "integer": torch.uint8, "float": scale_dtype}[spec.zero_point]
        second_shape = {"none": None, "tensor": (1,), "channel": (n_padded,)}[spec.second_scale]
        self._check("codes", (bands, k_padded // BRICK_K, LANES * spec.dtype.bits), torch.int32)
        self._check("scales", scale_shape, scale_dtype)
        self._check("zeros", scale_shape, zero_dtype)
        self._check("second_scale", second_shape, torch.float32 if second_shape else None)

    def _check(self, name: str, shape: tuple[int, ...] | None, dtype: torch.dtype | None) -> None:
        tensor, fault = getattr(self, name), part_fault(self, name, shape, dtype)
        if fault is None and tensor is not None and not _lies_straight(tensor):
            why = f"are not contiguous from a multiple of {_ALIGNMENT_BYTES} bytes on"
            fault = why, "Pass a clone() of them."
        if fault:
            asked = f"a packed weight {self.spec} of shape {list(self.shape)}"
            raise UnsupportedError(asked, f"its {name} {fault[0]}", fault[1])

    def to(self, device: torch.device | str) -> "PackedWeight":
        """The same weight on another device; the tensors are shared if it is there already.

        Raises:
            UnsupportedError: torch has no such device.
        """
        device = place_of(f"a packed weight {self.spec}", device)
        moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return PackedWeight(self.spec, self.shape, self.operand_bits, **moved)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that are present, by attribute name: what a checkpoint stores."""
        names = ("codes", "scales", "zeros", "second_scale")
        found = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def metadata(self) -> dict[str, str]:
        """What else a checkpoint stores, as strings; `from_tensors` reads it."""
        n, k = self.shape
        bits = str(self.operand_bits)
        return {"weight": self.spec.name, "n": str(n), "k": str(k), "operand_bits": bits}

    @classmethod
    def from_tensors(
        cls, metadata: Mapping[str, str], tensors: Mapping[str, torch.Tensor]
    ) -> "PackedWeight":
        """The inverse of `metadata` and `tensors`; tensors that lie askew are copied.

        Raises:
            UnsupportedError: an entry is missing, or the parts do not fit one another.
        """
        asked, how = "a packed weight", "Store what `metadata()` and `tensors()` return."
        check_type(asked, "its metadata", metadata, Mapping, how)
        check_type(asked, "its tensors", tensors, Mapping, how)
        for name, tensor in tensors.items():
            check_type(asked, f"its {name}", tensor, torch.Tensor, how)
        known = {"codes", "scales", "zeros", "second_scale"}
        missing = {"weight", "n", "k", "operand_bits"} - metadata.keys()
        missing |= {"codes", "scales"} - tensors.keys()
        if missing or tensors.keys() - known:
            why = f"{', '.join(sorted(missing))} missing" if missing else "more than its parts"
            raise UnsupportedError(f"{asked} from {', '.join(sorted(tensors))}", why, how)
        try:
            n, k, operand_bits = (int(metadata[name]) for name in ("n", "k", "operand_bits"))
        except ValueError as error:
            raise UnsupportedError(f"{asked} from {dict(metadata)}", str(error), how) from error
        placed = {
            name: tensor.clone(memory_format=torch.contiguous_format)
            if tensor.data_ptr() % _ALIGNMENT_BYTES or not tensor.is_contiguous()
            else tensor
            for name, tensor in tensors.items()
        }
        return cls(WeightSpec.parse(metadata["weight"]), (n, k), operand_bits, **placed)

    @cached_property
    def row_sums(self) -> torch.Tensor:
        """What a zero point of activations is multiplied with: float32 [N], computed once.

        The sum over K of the weights without second scale, and without their own scale where that
        does not change along K: so as kernels sum them.
        """
        if self.codes.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "sums of a weight's rows while a CUDA graph is recorded",
                "they would be computed in each replay",
                "Read weight.row_sums once before.",
            )
        plain = unpack(self)
        (n, k), spec = plain.shape, replace(self.spec, second_scale="none")
        rows_per_scale = spec.block[0] if spec.granularity == "block" else 1
        step = -(-max(1, _CHUNK_CODES // k) // rows_per_scale) * rows_per_scale
        sums = []
        for start in range(0, n, step):
            end = min(start + step, n)
            rows = slice(start // rows_per_scale, -(-end // rows_per_scale))
            rows = slice(0, 1) if spec.granularity == "tensor" else rows
            zeros = None if plain.zeros is None else plain.zeros[rows]
            part = QuantizedWeight(
                spec, (end - start, k), plain.codes[start:end], plain.scales[rows], zeros
            )
            values = reference.dequantize_codes(part)
            if spec.granularity in ("group", "block"):
                values = values * reference.dequantize_scales(part)
            sums.append(values.sum(1).to(torch.float32))
        return torch.cat(sums)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together, padding included."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def equals(self, other: "PackedWeight") -> bool:
        """Whether description and every bit of every tensor are the same, on any device."""
        check_packed(other, "a comparison of packed weights")
        mine, theirs = self.tensors(), other.tensors()
        return (
            self.metadata() == other.metadata()
            and mine.keys() == theirs.keys()
            and all(same_bits(tensor, theirs[name]) for name, tensor in mine.items())
        )


def _lies_straight(tensor: torch.Tensor) -> bool:
    """Whether kernels can read a tensor as it lies."""
    return tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT_BYTES == 0


def pack(
    weight: QuantizedWeight,
    operand_bits: int | None = None,
    device: torch.device | str | None = None,
    *,
    activation: ActivationSpec | str | None = None,
) -> PackedWeight:
    """Bring a quantized weight into brick order.

    Args:
        weight: canonical, on any device.
        operand_bits: 16, 8 or 4, the width of what kernels will dequantize it to, or a narrower
            one; by default what `activation` needs, 16 without one.
        device: where to pack and to leave the result; None for the weight's own.
        activation: the format of the activations that it will be multiplied with. One packed weight
            serves every device, also those that have to multiply in wider operands.

    Raises:
        UnsupportedError: another operand width, or both ways to give it.
    """
    check_quantized(weight, "pack")
    if activation is not None:
        if operand_bits is not None:
            raise UnsupportedError(
                f"pack with operand_bits={operand_bits} and activation={activation}",
                "the activations say the width",
                "Leave one of them away.",
            )
        problem = GemmProblem(
            *weight.shape, weight.spec, ActivationSpec.parse(activation), bfloat16
        )
        operand_bits = packed_bits(problem)
    operand_bits = 16 if operand_bits is None else operand_bits
    check_type("pack", "operand_bits", operand_bits, int, "Give 16, 8 or 4.")
    weight = weight if device is None else weight.to(device)
    (n, k), spec = weight.shape, weight.spec
    bits, (n_padded, k_padded) = spec.dtype.bits, padded(n, k)
    codes = torch.empty(
        (n_padded // BRICK_ROWS, k_padded // BRICK_K, LANES * bits),
        dtype=torch.int32,
        device=weight.codes.device,
    )
    for rows in _pieces(n, k_padded):
        matrix = _pad_codes(unpack_bits(weight.codes[rows], bits, k), weight, rows)
        codes[_bands(rows)] = _to_bricks(matrix, bits, operand_bits)
    scales = _pack_scales(weight.scales, spec, weight.shape)
    zeros = None if weight.zeros is None else _pack_scales(weight.zeros, spec, weight.shape)
    second = weight.second_scale
    if second is not None:
        second = second.flatten()
        if spec.second_scale == "channel":
            second = torch.nn.functional.pad(second, (0, n_padded - n))
        second = second.clone()
    packed = PackedWeight(spec, weight.shape, operand_bits, codes, scales, zeros, second)
    if activation is not None and not ActivationSpec.parse(activation).symmetric:
        packed.row_sums  # noqa: B018  (so that the first product finds them)
    return packed


def unpack(weight: PackedWeight) -> QuantizedWeight:
    """The canonical form of a packed weight, on its device; `unpack(pack(w))` equals `w`."""
    check_packed(weight, "unpack")
    (n, k), spec = weight.shape, weight.spec
    bits, k_padded = spec.dtype.bits, padded(n, k)[1]
    codes = torch.empty((n, -(-k * bits // 8)), dtype=torch.uint8, device=weight.codes.device)
    for rows in _pieces(n, k_padded):
        matrix = _from_bricks(weight.codes[_bands(rows)], bits, weight.operand_bits)
        codes[rows] = pack_bits(matrix[: rows.stop - rows.start, :k], bits)
    scales = _unpack_scales(weight.scales, spec, weight.shape)
    zeros = None if weight.zeros is None else _unpack_scales(weight.zeros, spec, weight.shape)
    second = weight.second_scale
    if second is not None:
        second = second[: n if spec.second_scale == "channel" else 1].unsqueeze(1).clone()
    return QuantizedWeight(spec, weight.shape, codes, scales, zeros, second)


def check_packed(weight: object, asked: str) -> None:
    """Refuse what is no packed weight, with what makes one of it.

    Raises:
        WrongTypeError: it is none.
    """
    how = "Pass a PackedWeight, as humming.pack returns."
    if isinstance(weight, QuantizedWeight):
        how = "Pack it first: humming.pack(weight)."
    elif isinstance(weight, torch.Tensor):
        how = "Quantize and pack it: humming.pack(humming.quantize(weight, 'int4_g128'))."
    elif hasattr(type(weight), "packed"):
        how = "Pass its packed weight, weight.packed, or call the layer itself."
    check_type(asked, "the weight", weight, PackedWeight, how)


def _pieces(n: int, k_padded: int) -> Iterator[slice]:
    """Slices of rows of bounded size that start with a brick."""
    step = max(1, _CHUNK_CODES // (BRICK_ROWS * k_padded)) * BRICK_ROWS
    yield from (slice(start, min(start + step, n)) for start in range(0, n, step))


def _bands(rows: slice) -> slice:
    """The bands of 16 rows that a piece fills."""
    return slice(rows.start // BRICK_ROWS, -(-rows.stop // BRICK_ROWS))


# --- codes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plane:
    """One bit plane: which bits of the codes it holds, which words of a brick, in what order.

    Attributes:
        code_bit, width: the field of each code.
        words: the words of the brick that are this plane's.
        source: int64 [1024]; of each field in memory order, its place row * 64 + k.
        target: the inverse; of each place in the brick, the number of its field.
    """

    code_bit: int
    width: int
    words: slice
    source: torch.Tensor
    target: torch.Tensor


@cache
def _brick_planes(code_bits: int, operand_bits: int, device: torch.device) -> tuple[_Plane, ...]:
    """The order of `humming.layout`, as gathers of fields of equal width."""
    order = brick_order(code_bits, operand_bits)
    place = (order.row * BRICK_K + order.k).ravel()
    found = []
    for code_bit, width, word, bit in order.planes:
        first = int(word.min())
        field = ((word - first) * 32 + bit).ravel() // width
        # Both are permutations of 0..1023, so sorting by one of them inverts it.
        source = torch.tensor(place[np.argsort(field)], device=device)
        target = torch.tensor(field[np.argsort(place)], device=device)
        words = slice(first, first + _BRICK_CODES * width // 32)
        found.append(_Plane(code_bit, width, words, source, target))
    return tuple(found)


def _to_bricks(matrix: torch.Tensor, code_bits: int, operand_bits: int) -> torch.Tensor:
    """uint8 codes [16 r, 64 c] to int32 words [r, c, 32 * code_bits]."""
    bands, columns = matrix.shape[0] // BRICK_ROWS, matrix.shape[1] // BRICK_K
    split = matrix.view(bands, BRICK_ROWS, columns, BRICK_K).transpose(1, 2)
    bricks = split.reshape(bands, columns, _BRICK_CODES)
    found = []
    for plane in _brick_planes(code_bits, operand_bits, matrix.device):
        fields = bricks
        if plane.width != code_bits:
            fields = (bricks >> plane.code_bit) & (2**plane.width - 1)
        ordered = fields.gather(2, plane.source.expand_as(fields))
        found.append(pack_bits(ordered, plane.width).view(torch.int32))
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def _from_bricks(words: torch.Tensor, code_bits: int, operand_bits: int) -> torch.Tensor:
    """The inverse of `_to_bricks`."""
    bands, columns = words.shape[:2]
    bricks = torch.zeros((), dtype=torch.uint8, device=words.device)
    for plane in _brick_planes(code_bits, operand_bits, words.device):
        packed = words[..., plane.words].contiguous().view(torch.uint8)
        fields = unpack_bits(packed, plane.width, _BRICK_CODES)
        bricks = bricks | (fields.gather(2, plane.target.expand_as(fields)) << plane.code_bit)
    split = bricks.view(bands, columns, BRICK_ROWS, BRICK_K).transpose(1, 2)
    return split.reshape(bands * BRICK_ROWS, columns * BRICK_K)


def _pad_codes(matrix: torch.Tensor, weight: QuantizedWeight, rows: slice) -> torch.Tensor:
    """Fill codes up to whole bricks, with such as decode to 0 or to their integer zero point."""
    count, k = matrix.shape
    n_padded, k_padded = padded(count, k)
    if (n_padded, k_padded) == (count, k):
        return matrix
    filled = torch.nn.functional.pad(matrix, (0, k_padded - k, 0, n_padded - count))
    if weight.zeros is not None and weight.spec.zero_point == "integer":
        # The last group reaches into the padding, where only its zero point stands for 0.
        group = _group_of(weight.spec, k)
        end = min(k_padded, -(-k // group) * group)
        row_of = torch.arange(rows.start, rows.stop, device=matrix.device)
        zero_row = row_of // _rows_per_scale(weight.spec, weight.shape[0])
        filled[:count, k:end] = weight.zeros[zero_row, -1:]
    return filled


# --- scales ------------------------------------------------------------------------------------


def _groups(spec: WeightSpec, k: int) -> int:
    """Scales along K, padding included."""
    return -(-padded(1, k)[1] // _group_of(spec, k))


def _group_of(spec: WeightSpec, k: int) -> int:
    """K values under a scale; a single scale covers the padding too."""
    k_padded = padded(1, k)[1]
    return k_padded if spec.granularity in ("tensor", "channel") else spec.scale_group(k)


def _pack_scales(scales: torch.Tensor, spec: WeightSpec, shape: tuple[int, int]) -> torch.Tensor:
    """Scales or zero points [rows, columns] to [N16 / 16, G, 16]; padding is 0."""
    n, k = shape
    bits = as_bits(scales)
    rows_per_scale = _rows_per_scale(spec, n)
    if rows_per_scale > 1:
        bits = bits.repeat_interleave(rows_per_scale, dim=0)[:n]
    missing = (0, _groups(spec, k) - bits.shape[1], 0, padded(n, k)[0] - n)
    filled = torch.nn.functional.pad(bits, missing)
    bands = filled.view(-1, BRICK_ROWS, filled.shape[1]).transpose(1, 2)
    return bands.clone(memory_format=torch.contiguous_format).view(scales.dtype)


def _unpack_scales(scales: torch.Tensor, spec: WeightSpec, shape: tuple[int, int]) -> torch.Tensor:
    """The inverse of `_pack_scales`."""
    n, k = shape
    columns = spec.scale_shape(n, k)[1]
    found = as_bits(scales).transpose(1, 2).reshape(-1, scales.shape[1])
    picked = found[:n][:: _rows_per_scale(spec, n), :columns]
    return picked.clone(memory_format=torch.contiguous_format).view(scales.dtype)


def _rows_per_scale(spec: WeightSpec, n: int) -> int:
    return {"tensor": n, "block": spec.block[0]}.get(spec.granularity, 1)
