"""Quantizing weights: scales and zero points per tensor, row, group or block, then codes.

Scales and zero points are rounded to the types that store them before codes are computed, so codes
are nearest to what will be read back. How a scale is found (`absmax`):

- symmetric: the largest magnitude over the largest code value: 7 for int4, 6 for float4e2m1. So
  integers use the restricted range -7..7; -8 occurs only where the scale comes out smaller, by
  `mse` or by rounding to ue8m0 or e4m3.
- `int1` holds 0 and -1 only: its scale is the negated value of largest magnitude, so it may be
  negative (with ue8m0 scales only negative weights can be kept). For a sign per weight use
  `uint1` with a float zero point.
- unsigned without zero points: the same, but a negative weight is an error.
- integer zero points: the range from the lowest to the highest value, widened to hold 0, over the
  number of steps; zero is always represented exactly.
- float zero points: the range is not widened. It is kept wide enough for the zero point's own
  rounding to stay a fraction of the weights' magnitude.
- ue8m0: the power of two that the OCP Microscaling specification 1.0 (section 6.3) gives,
  floor(log2(largest magnitude)) - floor(log2(largest code value)); the top of the range saturates.
- second scale: takes the largest magnitude of the tensor or row, so that the largest scale below
  it is the largest float8e4m3 (nvfp4: amax / (448 * 6)), or 1 for other scale types; with zero
  points twice that, as values of both signs may lie under one scale.

`mse` also tries smaller and larger scales, and keeps for each the one of least squared error.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from humming.dtypes import DataType, float8e4m3, float8e8m0
from humming.errors import UnsupportedError, check_type
from humming.formats import WeightSpec
from humming.quantized import (
    SCALE_TENSOR_DTYPES,
    QuantizedWeight,
    as_bits,
    decode,
    decode_scales,
    encode,
    pack_bits,
)

METHODS = ("absmax", "mse")
# Values converted at a time: enough to keep a GPU busy, 16 MB in float32.
_CHUNK_VALUES = 1 << 22
_SMALLEST_NORMAL = 2.0**-126
# How many of the least steps of their type the largest of all scales must have, to be any good.
_LEAST_STEPS = 8


def quantize(
    weight: torch.Tensor,
    spec: WeightSpec | str,
    *,
    method: str = "absmax",
    scale_dtype: DataType | torch.dtype | str | None = None,
) -> QuantizedWeight:
    """Quantize a weight by rounding to nearest, on its own device and in bounded extra memory.

    Args:
        weight: float16, bfloat16, float32 or float64 [N, K], any strides, no NaN or infinity.
        spec: the format, or its name.
        method: `absmax` takes scales from the largest magnitudes, `mse` searches around these for
            the least squared error.
        scale_dtype: replaces the spec's.

    Raises:
        UnsupportedError: not a matrix of floats; a weight is NaN, infinite, or negative in an
            unsigned format without zero points; a scale is beyond its type, or all are below it.
    """
    spec = WeightSpec.parse(spec)
    if scale_dtype is not None:
        spec = replace(spec, scale_dtype=DataType.parse(scale_dtype))
    _check_request(weight, method)
    source = _Source(weight.detach(), _Grid.of(spec, *weight.shape))
    second = _second_scale(source, spec)
    source = replace(source, second=second)
    low, high = source.extremes()
    if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
        source.refuse(torch.isfinite, "a weight must be a finite number")
    if not spec.dtype.is_signed and spec.zero_point == "none" and bool((low < 0).any()):
        why = f"{spec.dtype} without zero points holds no negative number"
        source.refuse(lambda values: values >= 0, why)
    rule = _Rule(spec, low, high)
    rule.check_range()
    chosen = rule.candidate(1.0)
    if method == "mse":
        chosen = _least_squares(source, rule, chosen)
    n, k = weight.shape
    codes = torch.empty((n, -(-k * spec.dtype.bits // 8)), dtype=torch.uint8, device=weight.device)
    for rows, values in source.pieces():
        codes[rows] = pack_bits(chosen.codes(values, source.grid, rows), spec.dtype.bits)
    return QuantizedWeight(spec, (n, k), codes, chosen.scales, chosen.zeros, second)


def check_method(method: object) -> None:
    """Refuse a way to find scales that there is not.

    Raises:
        UnsupportedError: it is none of `METHODS`.
    """
    if method not in METHODS:
        raise UnsupportedError(
            f"quantize by method={method!r}",
            "there is no such method",
            f"Possible: {', '.join(METHODS)}.",
        )


def _check_request(weight: torch.Tensor, method: str) -> None:
    how = "Pass a tensor [N, K], such as the weight of a layer; torch.as_tensor makes one."
    check_type("quantize", "the weight", weight, torch.Tensor, how)
    check_method(method)
    found = f"quantize a {weight.dtype} tensor of shape {list(weight.shape)}"
    if weight.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise UnsupportedError(
            found, "it does not hold plain floats", "Pass float16, bfloat16, float32 or float64."
        )
    if weight.layout != torch.strided or weight.is_meta:
        raise UnsupportedError(found, "not every value is there", "Pass a dense tensor with data.")
    if weight.ndim != 2 or not weight.numel():
        raise UnsupportedError(
            found, "a weight is a matrix [N, K] of one value or more", "Pass one matrix at a time."
        )


@dataclass(frozen=True)
class _Grid:
    """Which scale covers which values: one per `rows` rows and `group` values along K."""

    n: int
    k: int
    rows: int
    group: int

    @classmethod
    def of(cls, spec: WeightSpec, n: int, k: int) -> "_Grid":
        rows = {"tensor": n, "block": min(spec.block[0], n)}.get(spec.granularity, 1)
        # A group longer than a row covers the row.
        return cls(n, k, rows, min(spec.scale_group(k), k))

    @property
    def shape(self) -> tuple[int, int]:
        return -(-self.n // self.rows), -(-self.k // self.group)

    def pieces(self) -> Iterator[slice]:
        """Slices of rows of bounded size: whole rows of scales, or parts of a single one."""
        step = max(1, _CHUNK_VALUES // self.k)
        if step >= self.rows:
            step -= step % self.rows
        for band in range(0, self.n, max(step, self.rows)):
            end = min(band + max(step, self.rows), self.n)
            yield from (slice(start, min(start + step, end)) for start in range(band, end, step))

    def scale_rows(self, rows: slice) -> slice:
        """The rows of scales that cover a piece."""
        return slice(rows.start // self.rows, -(-rows.stop // self.rows))

    def reduce(self, values: torch.Tensor, operation: str) -> torch.Tensor:
        """`amin`, `amax` or `sum` of a piece [rows, k] under each of its scales."""
        fill = {"amin": math.inf, "amax": -math.inf, "sum": 0.0}[operation]
        span = min(self.rows, len(values))
        missing = (0, -self.k % self.group, 0, -len(values) % span)
        if any(missing):
            values = torch.nn.functional.pad(values, missing, value=fill)
        columns = values.shape[1] // self.group
        tiles = values.reshape(-1, span, columns, self.group)
        reduced: torch.Tensor = getattr(tiles, operation)(dim=(1, 3))
        return reduced

    def expand(self, scales: torch.Tensor, rows: slice) -> torch.Tensor:
        """Numbers per scale, spread over the values of a piece: [rows, k]."""
        count = rows.stop - rows.start
        mine = scales[self.scale_rows(rows)][:, None, :, None]
        spread = mine.expand(-1, min(self.rows, count), -1, self.group)
        return spread.flatten(2).flatten(0, 1)[:count, : self.k]


@dataclass(frozen=True)
class _Source:
    """The weight, read in pieces of a working precision and divided by the second scale."""

    weight: torch.Tensor
    grid: _Grid
    second: torch.Tensor | None = None

    @property
    def precision(self) -> torch.dtype:
        return torch.float64 if self.weight.dtype == torch.float64 else torch.float32

    def pieces(self) -> Iterator[tuple[slice, torch.Tensor]]:
        for rows in self.grid.pieces():
            values = self.weight[rows].to(self.precision, memory_format=torch.contiguous_format)
            yield rows, values if self.second is None else values / self._rows_of(self.second, rows)

    def squared(self, errors: torch.Tensor, rows: slice) -> torch.Tensor:
        """The squares of a piece's errors, in units of the weight; `errors` is overwritten."""
        if self.second is not None:
            errors *= self._rows_of(self.second, rows)
        return errors.square_()

    @staticmethod
    def _rows_of(second: torch.Tensor, rows: slice) -> torch.Tensor:
        return second[rows] if len(second) > 1 else second

    def extremes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Lowest and highest value under each scale; NaN where there is one."""
        low = torch.full(self.grid.shape, math.inf, dtype=self.precision, device=self.weight.device)
        high = -low
        for rows, values in self.pieces():
            mine = self.grid.scale_rows(rows)
            low[mine] = torch.minimum(low[mine], self.grid.reduce(values, "amin"))
            high[mine] = torch.maximum(high[mine], self.grid.reduce(values, "amax"))
        return low, high

    def refuse(self, is_good: Callable[[torch.Tensor], torch.Tensor], why: str) -> None:
        """Raise with the index of the first weight that is not good."""
        for rows in self.grid.pieces():
            bad = ~is_good(self.weight[rows])
            if bool(bad.any()):
                row, column = (int(index) for index in bad.nonzero()[0])
                value = float(self.weight[rows][row, column])
                raise UnsupportedError(
                    f"quantize a weight that is {value} at [{rows.start + row}, {column}]",
                    why,
                    "Repair the weight, or choose a format that holds it.",
                )


def _second_scale(source: _Source, spec: WeightSpec) -> torch.Tensor | None:
    """float32 [1, 1] or [N, 1], or None: the largest magnitude in units of what follows it."""
    if spec.second_scale == "none":
        return None
    peaks = torch.cat([values.abs().amax(dim=1, keepdim=True) for _, values in source.pieces()])
    if spec.second_scale == "tensor":
        peaks = peaks.amax(dim=0, keepdim=True)
    largest = spec.scale_dtype.max if spec.scale_dtype == float8e4m3 else 1.0
    sides = 1.0 if spec.zero_point == "none" else 2.0
    second = (sides * peaks / (largest * _steps(spec))).to(torch.float32)
    # A zero tensor has no magnitude; one that is not finite is reported later, by its index.
    return torch.where(torch.isfinite(second) & (second > 0), second.clamp(_SMALLEST_NORMAL), 1.0)


def _smallest(dtype: DataType) -> float:
    """The least positive number of a type."""
    return float(2.0 ** (1 - dtype.exponent_bias - dtype.mantissa_bits))


def _steps(spec: WeightSpec) -> float:
    """What a range is divided by to get its scale: a code value, or a number of steps."""
    if spec.zero_point != "none":
        return spec.dtype.max - spec.dtype.min
    return spec.dtype.max or 1.0  # int1 has no positive value


@dataclass(frozen=True)
class _Choice:
    """Scales and zero points as stored; `factor` is the numbers that the scales stand for."""

    dtype: DataType
    scales: torch.Tensor
    zeros: torch.Tensor | None
    factor: torch.Tensor

    def codes(self, values: torch.Tensor, grid: _Grid, rows: slice) -> torch.Tensor:
        """uint8 codes of a piece, one to a byte."""
        steps = values / grid.expand(self.factor, rows)
        if self.zeros is not None:
            if self.zeros.dtype == torch.uint8:
                steps.round_()  # so that a weight of 0 becomes the zero point itself
            steps += grid.expand(self.zeros.to(steps.dtype), rows)
        return encode(steps, self.dtype)

    def errors(self, source: _Source) -> torch.Tensor:
        """Sum of squared errors under each scale."""
        grid, total = source.grid, torch.zeros_like(self.factor)
        for rows, values in source.pieces():
            found = decode(self.codes(values, grid, rows), self.dtype, values.dtype)
            if self.zeros is not None:
                found -= grid.expand(self.zeros.to(found.dtype), rows)
            found *= grid.expand(self.factor, rows)
            found -= values
            total[grid.scale_rows(rows)] += grid.reduce(source.squared(found, rows), "sum")
        return total

    def replaced(self, mask: torch.Tensor, other: "_Choice") -> "_Choice":
        """This choice, with the other's scales where the mask is set."""

        def pick(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
            return torch.where(mask, as_bits(theirs), as_bits(mine)).view(mine.dtype)

        zeros = None
        if self.zeros is not None and other.zeros is not None:
            zeros = pick(self.zeros, other.zeros)
        factor = torch.where(mask, other.factor, self.factor)
        return _Choice(self.dtype, pick(self.scales, other.scales), zeros, factor)


@dataclass(frozen=True)
class _Rule:
    """From the lowest and highest value under each scale to scales and zero points."""

    spec: WeightSpec
    low: torch.Tensor
    high: torch.Tensor

    def candidate(self, shrink: float) -> _Choice:
        """The scales for a range of `shrink` times the full one."""
        dtype = self.spec.dtype
        span, low = self._range(shrink)
        scales, factor = self._stored(span)
        if self.spec.zero_point == "none":
            return _Choice(dtype, scales, None, factor)
        if self.spec.zero_point == "integer":
            zeros = (-low / factor).round_().clamp_(0, dtype.max).to(torch.uint8)
        else:
            exact = torch.where(span == 0, 0.0, dtype.min - low / factor)
            zeros = exact.to(scales.dtype)
        return _Choice(dtype, scales, zeros, factor)

    def check_range(self) -> None:
        """Refuse scales that their type cannot hold."""
        scale_dtype = self.spec.scale_dtype
        # What exceeds the largest number by less than half a unit in the last place rounds to it.
        limit = scale_dtype.max * (1 + 2.0 ** -(scale_dtype.mantissa_bits + 2))
        wanted = (self._range(1.0)[0] / _steps(self.spec)).abs()
        beyond = wanted > limit
        largest = float(wanted.max())
        # Rows of nearly zeros beside others lose nothing that counts; a weight of them is lost. A
        # float zero point holds what is constant, whatever the scale.
        least = _smallest(scale_dtype) * (_LEAST_STEPS if scale_dtype.bits >= 16 else 0.5)
        if 0 < largest < least and self.spec.zero_point != "float":
            raise UnsupportedError(
                f"quantize to {self.spec}",
                f"the largest scale would be {largest:.2g}, and {scale_dtype} ends at "
                f"{_smallest(scale_dtype):.2g}",
                "Use another scale_dtype, e.g. 'float32' or 'bfloat16', or a second scale.",
            )
        if bool(beyond.any()):
            row, column = (int(index) for index in beyond.nonzero()[0])
            raise UnsupportedError(
                f"quantize to {self.spec}",
                f"the scale at [{row}, {column}] would be beyond {scale_dtype}'s {scale_dtype.max}",
                "Use a wider scale_dtype, e.g. 'float32', or a format with a second scale.",
            )

    def _range(self, shrink: float) -> tuple[torch.Tensor, torch.Tensor]:
        """What the codes have to span, and its lowest number."""
        low, high = self.low, self.high
        peak = torch.maximum(-low, high)
        if self.spec.zero_point == "integer":
            low, high = low.clamp(max=0) * shrink, high.clamp(min=0) * shrink
            return high - low, low
        if self.spec.zero_point == "float":
            # A zero point of many times the range loses more to rounding than a finer step gains.
            finest = peak * _steps(self.spec) * 2.0 ** -(self.spec.scale_dtype.mantissa_bits + 1)
            span = (high - low) * shrink
            return torch.maximum(span, finest), (low + high - span) / 2
        if self.spec.dtype.max == 0:  # int1
            negative_only = self.spec.scale_dtype == float8e8m0
            peak = -low.clamp(max=0) if negative_only else torch.where(-low >= high, peak, -peak)
        return peak * shrink, low

    def _stored(self, span: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales for ranges, rounded to their type: as stored, and as numbers."""
        scale_dtype, steps = self.spec.scale_dtype, _steps(self.spec)
        if scale_dtype == float8e8m0:
            exponent = torch.frexp(span).exponent - math.frexp(steps)[1]
            codes = (exponent + scale_dtype.exponent_bias).clamp_(0, 254)
            scales = torch.where(span == 0, scale_dtype.exponent_bias, codes).to(torch.uint8)
        else:
            smallest = max(_SMALLEST_NORMAL, _smallest(scale_dtype))
            size = (span.abs() / steps).clamp_(smallest, scale_dtype.max)
            sized = torch.where(span == 0, 1.0, torch.copysign(size, span))
            scales = sized.to(SCALE_TENSOR_DTYPES[scale_dtype])
        return scales, decode_scales(scales, scale_dtype).to(span.dtype)


def _least_squares(source: _Source, rule: _Rule, best: _Choice) -> _Choice:
    """Of the scales around the given ones, those of least squared error; ties keep the first."""
    least = best.errors(source)
    for shrink in _shrinks(rule.spec):
        trial = rule.candidate(shrink)
        errors = trial.errors(source)
        better = errors < least
        best, least = best.replaced(better, trial), torch.where(better, errors, least)
    return best


def _shrinks(spec: WeightSpec) -> tuple[float, ...]:
    """The ranges that the search tries, in units of the full one."""
    if spec.scale_dtype == float8e8m0:
        return 2.0, 0.5
    # Finer than the steps between scales themselves makes no sense.
    per_unit = 16 if spec.scale_dtype == float8e4m3 else 40
    lowest = 0.2 if spec.dtype.bits <= 3 else 0.5
    # Numbers of floats lie apart unevenly: with a larger scale more values may fall close to one,
    # e.g. when the largest becomes 4 instead of 6 in float4e2m1.
    highest = 1.5 if spec.dtype.is_float else 1.0
    ladder = range(math.ceil(lowest * per_unit), math.floor(highest * per_unit) + 1)
    return tuple(rung / per_unit for rung in ladder if rung != per_unit)
