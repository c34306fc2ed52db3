"""The tensors of one module, checked as they are taken, and the weight that they make up."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from humming.checkpoints.decisions import Decision
from humming.checkpoints.tensors import TensorSource
from humming.dtypes import DataType, bfloat16, float8e4m3, float8e8m0, float16, float32
from humming.errors import CheckpointError, UnsupportedError
from humming.formats import WeightSpec
from humming.quantized import QuantizedWeight, as_bits, decode, pack_bits, unpack_bits

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Older torch has no dtype for exponents.
E8M0 = (torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8))
"""How ue8m0 scales are stored: as codes or as numbers."""

_SCALE_TYPES: dict[torch.dtype, DataType] = {
    torch.float16: float16,
    torch.bfloat16: bfloat16,
    torch.float32: float32,
    torch.float8_e4m3fn: float8e4m3,
    torch.uint8: float8e8m0,
}


class ModuleParts:
    """The tensors whose names are that of a module and a suffix.

    Args:
        tensors: where they are.
        module: its name.
        prefix: what names start with where that is not the module's name and a dot.

    Attributes:
        notes: what a reader of the result should know.
    """

    def __init__(self, tensors: TensorSource, module: str, prefix: str = "") -> None:
        self._tensors, self.module, self._prefix = tensors, module, prefix or f"{module}."
        self.notes: list[str] = []

    def has(self, part: str) -> bool:
        """Whether the module has a tensor of this suffix."""
        return self._name(part) in self._tensors

    def dtype(self, part: str) -> torch.dtype | None:
        """The dtype of a tensor, None where there is none."""
        return self._tensors.dtype(self._name(part)) if self.has(part) else None

    def take(
        self, part: str, dtypes: tuple[torch.dtype, ...], dims: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """A tensor, of one of some dtypes and some numbers of dimensions (any without).

        Raises:
            CheckpointError: it is missing, or another.
        """
        if not self.has(part):
            raise self.error(part, "is missing", "Give a checkpoint that is whole.")
        tensor = self._tensors.get(self._name(part))
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype) for dtype in dtypes)
            raise self.error(part, f"is {tensor.dtype}", f"The method stores {wanted} there.")
        if not tensor.numel():
            raise self.error(part, f"is empty: {list(tensor.shape)}", "Sizes are 1 or more.")
        if dims and tensor.ndim not in dims:
            wanted = " or ".join(map(str, dims))
            raise self.error(
                part, f"has the shape {list(tensor.shape)}", f"It has {wanted} dimensions."
            )
        return tensor

    def scalar(self, part: str) -> torch.Tensor:
        """The positive number that a tensor holds, float32 [1, 1]; equal numbers count as one."""
        found = self.take(part, FLOATS).flatten().to(torch.float32)
        if not found.numel() or not bool((found == found[0]).all()):
            raise self.error(
                part,
                f"holds {found.numel()} numbers that are not the same",
                "One for the whole matrix can be read; of which rows each is is not stored.",
            )
        if not bool(torch.isfinite(found[0])) or float(found[0]) <= 0:
            raise self.error(part, f"is {float(found[0])}", "A positive number can be read.")
        return found[:1].reshape(1, 1).clone()

    def bias(self, n: int) -> torch.Tensor | None:
        """The bias [N] of the module, if it has one."""
        if not self.has("bias"):
            return None
        bias = self.take("bias", FLOATS, (1,))
        if bias.shape != (n,):
            raise self.error(
                "bias", f"has the shape {list(bias.shape)}", f"The weight has {n} rows."
            )
        if not bool(torch.isfinite(bias).all()):
            raise self.error("bias", "holds NaN or infinity", "Give a checkpoint that is whole.")
        return bias

    def error(self, part: str, found: str, possible: str) -> CheckpointError:
        """An error about a tensor."""
        return CheckpointError(
            f"{self.where}: {self.module}: the tensor {self._name(part)} {found}. {possible}"
        )

    @property
    def where(self) -> str:
        """The file or folder of the tensors, for errors."""
        return self._tensors.where

    def note(self, text: str) -> None:
        """Keeps what a reader of the result should know."""
        if text not in self.notes:
            self.notes.append(text)

    def _name(self, part: str) -> str:
        return f"{self._prefix}{part}"


def readable_parts(
    tensors: TensorSource, module: str, decision: Decision, where: str, prefix: str = ""
) -> ModuleParts:
    """The tensors of a module that is to be read: how every reader begins.

    Raises:
        CheckpointError: the decision refuses the module, with its reason.
    """
    if decision.action == "refused":
        raise CheckpointError(f"{where}: {module} cannot be read: {decision.why}")
    return ModuleParts(tensors, module, prefix)


def as_matrix(scale: torch.Tensor) -> torch.Tensor:
    """A scale as a contiguous matrix: a number [1, 1], a vector one column."""
    if scale.ndim > 2 and scale.shape[2:].numel() == 1:
        scale = scale.flatten(1)
    if scale.ndim < 2:
        scale = scale.reshape(-1, 1)
    if scale.dtype == E8M0[1] and scale.dtype != torch.uint8:
        scale = scale.view(torch.uint8)
    return scale.contiguous()


def fit_scales(
    parts: ModuleParts, part: str, scales: torch.Tensor, wanted: WeightSpec, n: int, k: int
) -> tuple[WeightSpec, torch.Tensor]:
    """The format as the shape and dtype of the scales say, the wanted one where it fits.

    Raises:
        CheckpointError: no format fits.
    """
    scale_dtype = _SCALE_TYPES.get(scales.dtype)
    if scale_dtype is None:
        raise parts.error(part, f"is {scales.dtype}", "Scales have 8, 16 or 32 bits.")
    shape = tuple(scales.shape)
    wanted = replace(wanted, scale_dtype=scale_dtype)
    for spec in (wanted, *_others(wanted)):
        if len(shape) == 2 and spec.scale_shape(n, k) == shape:
            if spec != wanted:
                parts.note(
                    f"the configuration says {wanted}, but {part} is {list(shape)}, so that the "
                    f"weight is {spec}"
                )
            return spec, scales
    equal = shape[0] > 1 and shape[-1:] == (1,) and bool((scales == scales[0]).all())
    if equal:
        parts.note(f"the {shape[0]} numbers of {part} are the same, and read as one")
        spec = replace(wanted, granularity="tensor", group_size=0, block=(0, 0))
        return spec, scales[:1].clone()
    expected = list(wanted.scale_shape(n, k))
    raise parts.error(
        part,
        f"has the shape {list(shape)} for a weight [{n}, {k}]",
        f"{wanted} has scales {expected}; of which rows and columns others are is not stored.",
    )


def _others(wanted: WeightSpec) -> Iterator[WeightSpec]:
    """The formats that differ from a wanted one in what a scale covers, the likely ones first."""
    plain = replace(wanted, granularity="channel", group_size=0, block=(0, 0))
    if wanted.second_scale != "tensor":
        yield replace(plain, granularity="tensor")
    yield plain
    yield replace(plain, granularity="block", block=(128, 128))
    for size in (128, 64, 32, 16):
        yield replace(plain, granularity="group", group_size=size)


def weight_of(
    parts: ModuleParts,
    names: tuple[str, str],
    spec: WeightSpec,
    shape: tuple[int, int],
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    second_scale: torch.Tensor | None = None,
) -> QuantizedWeight:
    """A quantized weight whose numbers are all finite.

    A scale that is no number is an error, except over codes that all stand for 0: then it becomes
    0 (the smallest number where the type has no 0), which changes nothing else.

    Args:
        parts: the module.
        names: what the codes and the scales are called.
        spec, shape, codes, scales, zeros, second_scale: as in `QuantizedWeight`.

    Raises:
        CheckpointError: a number is not finite, or the tensors do not fit one another.
    """
    with refusals(parts):
        weight = QuantizedWeight(spec, shape, codes.contiguous(), scales, zeros, second_scale)
    return refuse_bad_numbers(parts, names, weight)


def refuse_bad_numbers(
    parts: ModuleParts, names: tuple[str, str], weight: QuantizedWeight
) -> QuantizedWeight:
    """A weight whose numbers are all finite, as `weight_of` makes it.

    Raises:
        CheckpointError: a number is not.
    """
    if weight.spec.dtype == float8e4m3:
        _refuse_nan_codes(parts, names[0], weight)
    return _without_nan_scales(parts, names[1], weight)


@contextmanager
def refusals(parts: ModuleParts) -> Iterator[None]:
    """Let a refused format or weight be an error of the checkpoint."""
    try:
        yield
    except UnsupportedError as error:
        raise CheckpointError(f"{parts.where}: {parts.module}: {error}") from error


def _refuse_nan_codes(parts: ModuleParts, part: str, weight: QuantizedWeight) -> None:
    nan = (weight.codes & 127) == 127
    if bool(nan.any()):
        row, column = (int(i) for i in nan.nonzero()[0])
        raise parts.error(
            part, f"is NaN at [{row}, {column}]", "Quantize the weight anew; it is damaged."
        )


def _without_nan_scales(parts: ModuleParts, part: str, weight: QuantizedWeight) -> QuantizedWeight:
    spec, (n, k) = weight.spec, weight.shape
    if spec.scale_dtype == float8e8m0:
        bad = weight.scales == 255
    else:
        bad = ~torch.isfinite(weight.scales.to(torch.float32))
    if spec.scale_dtype != float8e8m0 and (none := int((weight.scales.float() == 0).sum())):
        parts.note(f"{none} scales of {part} are 0, and so is what they scale")
    if not bool(bad.any()):
        return weight
    rows = {"tensor": n, "block": spec.block[0]}.get(spec.granularity, 1)
    spread = bad.repeat_interleave(rows, 0)[:n]
    spread = spread.repeat_interleave(spec.scale_group(k), 1)[:, :k]
    values = decode(weight.codes_unpacked(), spec.dtype, torch.float32)
    if weight.zeros is not None:
        zeros = weight.zeros.to(torch.float32).repeat_interleave(rows, 0)[:n]
        values = values - zeros.repeat_interleave(spec.scale_group(k), 1)[:, :k]
    if bool((spread & (values != 0)).any()):
        row, column = (int(i) for i in bad.nonzero()[0])
        raise parts.error(
            part,
            f"is no finite number at [{row}, {column}]",
            "Quantize the weight anew; it is damaged.",
        )
    count = int(bad.sum())
    parts.note(f"{count} scales of {part} are no finite numbers over zeros alone, and became 0")
    scales = weight.scales.clone()
    as_bits(scales)[bad] = 0
    return replace(weight, scales=scales)


def flip_sign_bits(codes: torch.Tensor, bits: int, k: int) -> torch.Tensor:
    """Packed codes with the upper bit of each inverted: what is raised by half the range, signed.

    Args:
        codes: uint8 [..., ceil(K * bits / 8)] as `QuantizedWeight` has them.
        bits: 1 to 8.
        k: number of codes of a row.
    """
    if 8 % bits or k * bits % 8:
        return pack_bits(unpack_bits(codes, bits, k) ^ (1 << (bits - 1)), bits)
    mask = sum(1 << (place + bits - 1) for place in range(0, 8, bits))
    return codes ^ mask


def reciprocal(parts: ModuleParts, part: str) -> torch.Tensor:
    """The reciprocal of a positive number, rounded to float32, [1, 1]."""
    found = 1 / parts.scalar(part).double()
    return found.to(torch.float32)
