"""The oracle: quantized numbers, products in float64, and how far a kernel may differ.

Everything here is plain torch, slow and obvious; no kernel and no packed layout is involved.
"""

import math
from typing import NamedTuple

import torch

from humming.dtypes import DataType, float8e4m3, float8e8m0, float16
from humming.errors import UnsupportedError, check_type
from humming.formats import ActivationSpec
from humming.problem import GemmProblem
from humming.quantized import (
    SCALE_TENSOR_DTYPES,
    QuantizedWeight,
    check_known_scale,
    check_quantized,
    decode,
    decode_scales,
    encode,
    pack_bits,
    unpack_bits,
)

# Tensor cores cut off the bits that do not fit; rounding them would halve the unit roundoff.
_ACCUMULATION_ROUNDOFF = 2.0**-23
_HALF_ACCUMULATION_ROUNDOFF = 2.0**-10
# Products that 8-bit floats add at once.
_SHORT_STEP = 32
# Higham and Mary's constant: an output of n roundings then exceeds their bound with a chance of at
# most 2 n exp(-32), one in a thousand million for n = 2**15.
_LIKELY = 8.0


def dequantize(weight: QuantizedWeight, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The weight [N, K] as numbers: (decode(code) - zero) * scale * second_scale.

    Computed in float64 and rounded once to `dtype`.
    """
    check_quantized(weight, "dequantize")
    check_type("dequantize", "the dtype", dtype, torch.dtype, "Give e.g. torch.float64.")
    return (dequantize_codes(weight) * _scales(weight)).to(dtype)


def matmul(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    out_dtype: DataType | torch.dtype | str | None = None,
) -> torch.Tensor:
    """x @ W.T + bias, in float64.

    Args:
        x: activations [..., K] of any floating dtype.
        weight: quantized [N, K].
        bias: [N], or None.
        out_dtype: what to round the result to; float64 if None.

    Returns:
        [..., N].
    """
    _check_operands(x, weight, bias)
    out = x.to(torch.float64) @ dequantize(weight).T
    if bias is not None:
        out = out + bias.to(torch.float64)
    return out if out_dtype is None else out.to(_output_dtype(out_dtype))


def unit_roundoff(dtype: DataType) -> float:
    """The largest relative error of rounding to nearest: 2**-p with p significant bits.

    2**-11 for float16 (10 stored bits and the implied one), 2**-8 for bfloat16, 2**-24 for float32.
    """
    return float(2.0 ** -(dtype.mantissa_bits + 1))


def error_bound(
    problem: GemmProblem,
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    split_k: int = 1,
    operand_roundings: int = 0,
    folded_offset: bool = False,
    short_k: int = 0,
    short_bits: int = 13,
    x_sizes: torch.Tensor | None = None,
    certain: bool = True,
) -> torch.Tensor:
    """How far each output of a correct kernel may lie from `matmul` without a bug.

    With y the exact result, S = |x| |W|.T + |bias|, and the kernel multiplying 16-bit operands
    whose products are exact in float32 (at most 11 + 11 significant bits):

        |out - y| <= e + u_out (|y| + e) + h_out,    e = (gamma_n(u_acc) + gamma_r(u_op)) S + h

    - gamma_n(u) = n u / (1 - n u) bounds n successive roundings, in whatever order they happen
      (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed. 2002, lemma 3.1 and
      section 3.1).
    - n = K + ceil(K / 4) + split_k + 4: an addition per product, and two per MMA of at least 8
      values for aligning and normalizing its sum; the partial sums of a split K; the
      multiplications by the scales and the addition of the bias.
    - u_acc = 2**-23, not 2**-24, since tensor cores truncate (Fasi, Higham, Mikaitis, Pranesh,
      Numerical behavior of NVIDIA tensor cores, PeerJ CS 7:e330, 2021); 2**-10 where the problem
      permits float16 accumulation.
    - r = `operand_roundings`, u_op = `unit_roundoff` of the operands' type: the activations', or
      that of float zero points where those are narrow.
    - u_out = `unit_roundoff` of the output type and h_out half its smallest subnormal; h is what
      subnormal operands lose. Where y may exceed the largest number of the output type the
      bound is infinite.

    Of 8-bit floats tensor cores keep b = 13 bits behind the largest of the 32 products of a step
    and the sum before, and truncate the rest; `short_k` values of K are summed so, in s steps. To e
    comes gamma_{short_k + s}(2**-b) S.

    With `certain=False`, gamma_n is replaced by its probabilistic counterpart
    exp(l sqrt(n) u + n u**2 / (1 - u)) - 1 with l = 8 (Higham and Mary, A new approach to
    probabilistic rounding error analysis, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4). It
    grows with sqrt(K) and finds smaller bugs, but presumes errors that are as often up as down:
    use it on data of either sign, not on sums in which nothing cancels. What short sums lose is
    then bounded by Hoeffding's inequality with the same l, l 2**-b sqrt(33 (2 s - 1) Q) with Q the
    sum of the squares of all products: each of 33 addends of a step is off by less than 2**-b of
    the largest, whose square is at most that of the step's products and of the sum before, and that
    is taken at four times its mean, on average 2 (s - 1) products' squares.

    Args:
        problem: its weight, out_dtype, activation and fp16_accumulation are read.
        x: the very activations given to the kernel, [..., K]: float16 or bfloat16, or, for
            quantized ones, the numbers that their codes and scales stand for, in float64.
        weight: quantized [N, K].
        bias: [N], or None.
        split_k: in how many parts K is summed up separately.
        operand_roundings: how often a weight is rounded to the operand's type: 0 where the codes
            (less their zero point) are the operand, 1 where they are multiplied by the scale
            first, 2 where the scale is also rounded to that type before.
        folded_offset: a zero point, or the offset that makes signed codes unsigned, is
            subtracted after the product; S then holds |code| + |offset| instead of |code - offset|.
        short_k: values of K whose sums keep few bits, before they are added to others in float32;
            0 if there are none.
        short_bits: b, how many bits they keep (`MmaRow.sum_bits`).
        x_sizes: what stands for |x| in S where the zero points of activations are subtracted
            after the product: (|code| + |zero point|) times the scale, float64 [..., K].
        certain: False for the probabilistic bound.

    Returns:
        float64 [..., N], not negative.

    Raises:
        UnsupportedError: the activations have another dtype, or the parts do not fit.
    """
    _check_bounded(problem, x, weight)
    exact = matmul(x, weight, bias)
    sizes = x.to(torch.float64).abs() if x_sizes is None else x_sizes
    total = sizes @ _magnitudes(weight, folded_offset).T
    if bias is not None:
        total = total + bias.to(torch.float64).abs()
    k, operand = weight.shape[1], problem.activation.dtype
    if operand.is_narrow:
        # Only float zero points round an operand there, to the type that they have themselves.
        operand = weight.spec.scale_dtype
    half = problem.fp16_accumulation
    roundoff = _HALF_ACCUMULATION_ROUNDOFF if half else _ACCUMULATION_ROUNDOFF
    relative = _gamma(k + math.ceil(k / 4) + split_k + 4, roundoff, certain)
    relative += _gamma(operand_roundings, unit_roundoff(operand), True)
    error = torch.where(total == 0, 0.0, relative * total)
    if short_k:
        steps = math.ceil(short_k / _SHORT_STEP)
        if certain:
            error = error + _gamma(short_k + steps, 2.0**-short_bits, True) * total
        else:
            squares = x.to(torch.float64).square() @ dequantize(weight).square().T
            addends = (_SHORT_STEP + 1) * (2 * steps - 1)
            error = error + _LIKELY * 2.0**-short_bits * (addends * squares).sqrt()
    if operand_roundings:
        largest_code = dequantize_codes(weight).abs().amax().clamp(min=1.0)
        lost = operand_roundings * _half_subnormal(operand) * largest_code
        error = error + lost * sizes.sum(dim=-1, keepdim=True)
    out = problem.out_dtype
    bound = error + unit_roundoff(out) * (exact.abs() + error) + _half_subnormal(out)
    overflows = exact.abs() + bound > out.max
    if half:
        overflows |= total > float16.max
    return torch.where(overflows, math.inf, bound)


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """The Frobenius norm of `out - exact` over that of `exact`; 0 where both are zero."""
    distance = (out.to(torch.float64) - exact.to(torch.float64)).norm()
    return _ratio(float(distance), float(exact.to(torch.float64).norm()))


def relative_bound(bound: torch.Tensor, exact: torch.Tensor) -> float:
    """What `relative_error` cannot exceed where `error_bound` holds for each output."""
    return _ratio(float(bound.norm()), float(exact.to(torch.float64).norm()))


# -- activations ----------------------------------------------------------------------------------

_SMALLEST_WITH_RECIPROCAL = 2.0**-126


class ActivationParts(NamedTuple):
    """What activations are quantized to; the tensors are those of a `QuantizedActivation`."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None


def quantize_activation(
    x: torch.Tensor,
    spec: ActivationSpec | str,
    *,
    scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
    second_scale: torch.Tensor | None = None,
    fuse: str | None = None,
) -> ActivationParts:
    """What `humming.quantize_activation` must give, bit by bit, where nothing is fused.

    Every step is one float32 operation, rounded to the nearest; each line of the code below is one
    or two of them. What is fused is computed in float64 and rounded to float32.

    Args:
        x: float16, bfloat16 or float32 [..., K], or [..., 2K] for `silu_mul`.
        spec, scale, zero, second_scale, fuse: as for `humming.quantize_activation`.

    Returns:
        codes uint8 [m, ceil(K * bits / 8)], scales and zeros [m, groups] or [1, 1].
    """
    # On the CPU, which divides: on accelerators torch divides by a number by multiplying with its
    # reciprocal, which rounds twice.
    known = (t.cpu() if isinstance(t, torch.Tensor) else t for t in (scale, zero, second_scale))
    values = fused(x.cpu(), fuse)
    values = values.reshape(-1, values.shape[-1]).contiguous()
    found = _quantized_activation(values, ActivationSpec.parse(spec), *known)
    return ActivationParts(*(None if t is None else t.to(x.device) for t in found))  # type: ignore[arg-type]


def _quantized_activation(
    values: torch.Tensor,
    spec: ActivationSpec,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    second_scale: torch.Tensor | None,
) -> ActivationParts:
    """`quantize_activation` of float32 [m, K]."""
    m, k = values.shape
    if spec.granularity == "tensor":
        scales = torch.as_tensor(scale).reshape(1, 1).to(SCALE_TENSOR_DTYPES[spec.scale_dtype])
        check_known_scale(f"quantizing activations to {spec}", "scale", scales)
        zeros = None if zero is None else zero.reshape(1, 1)
        units = values * (1 / scales.to(torch.float32))
        wanted = units if zeros is None else _shifted(units, zeros.to(torch.float32))
        wanted = torch.where(wanted.isnan(), 0 if zeros is None else zeros.float(), wanted)
        codes = _activation_codes(wanted, spec)
        if spec.dtype.nan_code is not None:
            codes[units.isnan()] = spec.dtype.nan_code
        return ActivationParts(pack_bits(codes, spec.dtype.bits), scales, zeros)
    group = spec.group_size or k
    groups = -(-k // group)
    grouped = torch.nn.functional.pad(values, (0, -k % group)).reshape(m, groups, group)
    magnitude = grouped.abs().amax(dim=2)
    finite = magnitude.isfinite()
    low, high = grouped.amin(dim=2).clamp(max=0), grouped.amax(dim=2).clamp(min=0)
    scales, factor = _activation_scales(magnitude, low, high, spec, second_scale)
    units = grouped * factor[:, :, None]
    zeros = None
    if not spec.symmetric:
        raw = (spec.dtype.min - (low * factor).round()).clamp(spec.dtype.min, spec.dtype.max)
        zero_points = torch.where(finite & (magnitude > 0), raw, 0.0)
        zeros = zero_points.to(torch.int8)
        units = _shifted(units, zero_points[:, :, None])
    codes = _activation_codes(torch.where(units.isnan(), 0.0, units), spec)
    codes = torch.where(finite[:, :, None], codes, 0).reshape(m, groups * group)[:, :k]
    return ActivationParts(pack_bits(codes, spec.dtype.bits), scales, zeros)


def dequantize_activation(
    spec: ActivationSpec,
    k: int,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    second_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The activations [m, k] that codes stand for: (decode(code) - zero) * scale * second_scale.

    In float64. The tensors are those of a `QuantizedActivation`.
    """
    numbers = decode(unpack_bits(codes, spec.dtype.bits, k), spec.dtype)
    column = torch.arange(k, device=codes.device) // (spec.group_size or k)
    if zeros is not None:
        numbers = numbers - zeros.to(torch.float64)[:, column]
    numbers = numbers * decode_scales(scales, spec.scale_dtype)[:, column]
    return numbers if second_scale is None else numbers * second_scale.to(torch.float64)


def fused(x: torch.Tensor, fuse: str | None) -> torch.Tensor:
    """x in float32 after an activation function, computed in float64; of None, x itself."""
    if fuse is None:
        return x.to(torch.float32)
    exact = x.to(torch.float64)
    if fuse == "silu_mul":
        gate, factor = exact.chunk(2, dim=-1)
        exact = gate / (1 + torch.exp(-gate)) * factor
    elif fuse == "gelu":
        exact = exact / 2 * torch.special.erfc(exact / -math.sqrt(2))
    else:
        inner = math.sqrt(2 / math.pi) * (exact + 0.044715 * exact**3)
        exact = exact / (1 + torch.exp(-2 * inner))
    return exact.to(torch.float32)


def _activation_scales(
    magnitude: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    spec: ActivationSpec,
    second_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales as stored, and the float32 factors that values are multiplied with."""
    scale_dtype, largest = spec.scale_dtype, spec.dtype.max
    finite = magnitude.isfinite()
    if scale_dtype == float8e8m0:
        exponent = torch.frexp(magnitude).exponent - math.frexp(largest)[1]
        stored = (exponent + scale_dtype.exponent_bias).clamp(0, 254)
        stored = torch.where(magnitude == 0, scale_dtype.exponent_bias, stored)
        stored = torch.where(finite, stored, 255).to(torch.uint8)
        return stored, 1 / decode(stored, scale_dtype, torch.float32)
    second = torch.ones(1) if second_scale is None else second_scale.to(torch.float32)
    second = second.to(magnitude.device)
    if scale_dtype == float8e4m3:
        size = magnitude * (1 / (largest * second))
    elif spec.symmetric:
        size = magnitude / largest
    else:
        steps = largest - spec.dtype.min
        size = high / steps - low / steps
    subnormal = 2.0 ** (1 - scale_dtype.exponent_bias - scale_dtype.mantissa_bits)
    size = size.clamp(max(_SMALLEST_WITH_RECIPROCAL, subnormal), scale_dtype.max)
    size = torch.where(magnitude == 0, 1.0, size)
    stored = torch.where(finite, size, math.nan).to(SCALE_TENSOR_DTYPES[scale_dtype])
    number = stored.to(torch.float32)
    if scale_dtype == float8e4m3:
        number = (number * second).clamp(min=_SMALLEST_WITH_RECIPROCAL)
    return stored, 1 / number


def _shifted(units: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Codes around zero points, not yet cut to their range."""
    return units.round() + zeros


def _activation_codes(units: torch.Tensor, spec: ActivationSpec) -> torch.Tensor:
    """Codes of numbers, saturating; symmetric integers leave their lowest number out."""
    if spec.dtype.is_integer and spec.symmetric:
        units = units.clamp(-spec.dtype.max, spec.dtype.max)
    return encode(units, spec.dtype)


# -- parts -----------------------------------------------------------------------------------------


def _ratio(part: float, whole: float) -> float:
    if part == 0.0:
        return 0.0
    return part / whole if whole else math.inf


def dequantize_codes(weight: QuantizedWeight) -> torch.Tensor:
    """Each weight without its scales, decode(code) - zero: float64 [N, K]."""
    codes = decode(weight.codes_unpacked(), weight.spec.dtype)
    return codes if weight.zeros is None else codes - _per_value(weight, weight.zeros)


def dequantize_scales(weight: QuantizedWeight) -> torch.Tensor:
    """The scale of each weight without the second one, float64 [N, K]."""
    return _per_value(weight, decode_scales(weight.scales, weight.spec.scale_dtype))


def _scales(weight: QuantizedWeight) -> torch.Tensor:
    """The factor of each weight, [N, K]."""
    scales = dequantize_scales(weight)
    if weight.second_scale is None:
        return scales
    return scales * weight.second_scale.to(torch.float64)


def _per_value(weight: QuantizedWeight, per_scale: torch.Tensor) -> torch.Tensor:
    """Scales or zero points [rows, columns], repeated for each weight that they cover: [N, K]."""
    (n, k), spec = weight.shape, weight.spec
    rows_per_scale = {"tensor": n, "block": spec.block[0]}.get(spec.granularity, 1)
    row_of = torch.arange(n, device=per_scale.device) // rows_per_scale
    column_of = torch.arange(k, device=per_scale.device) // spec.scale_group(k)
    return per_scale.to(torch.float64)[row_of][:, column_of]


def _magnitudes(weight: QuantizedWeight, folded_offset: bool) -> torch.Tensor:
    """|W|, or the larger magnitudes that are summed where an offset is subtracted afterwards."""
    spec = weight.spec
    codes = decode(weight.codes_unpacked(), spec.dtype)
    if folded_offset and weight.zeros is not None:
        sizes = codes.abs() + _per_value(weight, weight.zeros).abs()
    elif folded_offset and spec.dtype.is_integer and spec.dtype.is_signed:
        offset = 2.0 ** (spec.dtype.bits - 1)
        sizes = codes + 2 * offset  # the code made unsigned, plus the offset
    else:
        sizes = dequantize_codes(weight).abs()
    return sizes * _scales(weight).abs()


def _gamma(roundings: int, roundoff: float, certain: bool) -> float:
    """Bound on the relative effect of successive roundings; infinite where theory gives none."""
    if certain:
        product = roundings * roundoff
        return product / (1 - product) if product < 1 else math.inf
    exponent = _LIKELY * math.sqrt(roundings) * roundoff + roundings * roundoff**2 / (1 - roundoff)
    return math.expm1(exponent)


def _half_subnormal(dtype: DataType) -> float:
    """What rounding to nearest may lose of a number below the normal range."""
    return float(2.0 ** -(dtype.exponent_bias + dtype.mantissa_bits))


def _output_dtype(out_dtype: DataType | torch.dtype | str) -> torch.dtype:
    parsed = DataType.parse(out_dtype)
    if parsed.is_narrow:
        raise UnsupportedError(
            f"a product rounded to {parsed}",
            "products are not quantized again",
            "Possible: float16, bfloat16, float32, or None for float64.",
        )
    return SCALE_TENSOR_DTYPES[parsed]


def _check_operands(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
    check_quantized(weight, "a product")
    check_type("a product", "x", x, torch.Tensor, "Pass a tensor of activations [..., K].")
    n, k = weight.shape
    if bias is not None:
        check_type("a product", "the bias", bias, torch.Tensor, f"Pass a tensor [{n}], or None.")
        if bias.shape != (n,):
            raise UnsupportedError(
                f"a product of a weight {[n, k]} with a bias {list(bias.shape)}",
                "a bias is one number for each output",
                f"Pass a bias [{n}].",
            )
    if x.ndim < 1 or x.shape[-1] != k or not x.is_floating_point():
        raise UnsupportedError(
            f"a product of {x.dtype} activations {list(x.shape)} and a weight {list(weight.shape)}",
            f"activations are floats [..., {k}]",
            "Pass the activations that go with this weight.",
        )


def _check_bounded(problem: GemmProblem, x: torch.Tensor, weight: QuantizedWeight) -> None:
    how = "Pass the GemmProblem that the kernel computes."
    check_type("an error bound", "the problem", problem, GemmProblem, how)
    _check_operands(x, weight, None)
    if (problem.n, problem.k) != weight.shape:
        raise UnsupportedError(
            f"an error bound of {problem.name}, n={problem.n}, k={problem.k}",
            f"the weight has shape {list(weight.shape)}",
            "Pass the weight of this problem.",
        )
    given = problem.activation.dtype
    if x.dtype != (torch.float64 if given.is_narrow else getattr(torch, given.name)):
        wanted = "the numbers of the codes, in float64" if given.is_narrow else str(given)
        raise UnsupportedError(
            f"an error bound of {problem.name} with {x.dtype} activations",
            "the bound is that for the activations which the kernel gets",
            f"Pass {wanted}.",
        )
