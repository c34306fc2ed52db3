"""Random products in every format, as kernels take them, and what they must come to.

Codes of activations are drawn, not quantized, so that each code of a type turns up.
"""

from dataclasses import dataclass, replace

import torch

import humming
from humming import reference
from humming.capability import DeviceCapabilities
from humming.composer import KernelPlan, compose, m_range_of
from humming.formats import ActivationSpec, WeightSpec
from humming.problem import GemmProblem
from humming.quantized import QuantizedWeight, decode, decode_scales, pack_bits
from humming.runtime import Operands, TokenScales

_ROW_BYTES = 16
# A normal number of that type, which times the largest code is no number beyond float16.
_E4M3_SCALE = 2.0**-6

CODES = (
    *(f"int{bits}" for bits in range(1, 9)),
    *(f"uint{bits}" for bits in range(1, 9)),
    *("float4e2m1", "float6e2m3", "float6e3m2", "float8e4m3", "float8e5m2", "float8e3m4"),
    *("float4e0m3", "float8e0m7", "float5e3m1", "float7e2m4", "float3e1m1"),
)
"""Types of weights: every integer, the floats with names, and some of the others."""
GRANULARITIES = ("_tensor", "", "_g16", "_g32", "_g64", "_g128", "_block128", "_block64x32")
SCALES = ("_sfp32", "_sfp16", "_sbf16", "_se4m3", "_sue8m0")
ACTIVATIONS = (
    *("fp16", "bf16", "int8", "int8_tensor", "int8_asym", "int8_g128"),
    *("int4", "int4_asym", "int4_g64"),
    *("fp8", "fp8_tensor", "fp8_g128", "float8e5m2", "mxfp8", "mxfp4", "nvfp4"),
)


def like(card: DeviceCapabilities, other: DeviceCapabilities) -> DeviceCapabilities:
    """A card with the means of another device: its kernels, compiled for the card."""
    return replace(
        card,
        movers=other.movers,
        mma=other.mma,
        features=other.features & card.features,
        smem_per_block_bytes=other.smem_per_block_bytes,
        sms=other.sms,
    )


@dataclass(frozen=True)
class Tokens:
    """Activations [m, k] as a kernel takes them.

    Attributes:
        x: float16 or bfloat16 [m, k], or the uint8 codes of rows that are padded with zeros.
        scales: what belongs to codes, else None.
        values: the numbers, float64 [m, k] (16-bit ones as they are).
        sizes: their magnitudes before zero points are subtracted, float64 [m, k].
    """

    x: torch.Tensor
    scales: TokenScales | None
    values: torch.Tensor
    sizes: torch.Tensor


def random_tokens(spec: ActivationSpec, m: int, k: int, device: str = "cpu") -> Tokens:
    """Activations of a format, of either sign."""
    dtype = spec.dtype
    if not dtype.is_narrow:
        x = torch.randn(m, k, device=device).to(getattr(torch, dtype.name))
        return Tokens(x, None, x, x.double().abs())
    codes = torch.randint(0, 1 << dtype.bits, (m, k), dtype=torch.uint8, device=device)
    numbers = decode(codes, dtype)
    codes = torch.where(numbers.isfinite(), codes, 1)
    raw = pack_bits(codes, dtype.bits)
    pitch = -(-raw.shape[1] // _ROW_BYTES) * _ROW_BYTES
    rows = torch.zeros(m, pitch, dtype=torch.uint8, device=device)
    rows[:, : raw.shape[1]] = raw
    size = spec.group_size if spec.granularity in ("group", "block") else k
    shape = (1, 1) if spec.granularity == "tensor" else (m, -(-k // size))
    if spec.scale_dtype == "float8e8m0":
        scales = torch.randint(117, 138, shape, dtype=torch.uint8, device=device)
    else:
        drawn = torch.rand(shape, device=device) + 0.05
        torch_dtype = {"float8e4m3": torch.float8_e4m3fn}.get(spec.scale_dtype.name)
        scales = drawn.to(torch_dtype or getattr(torch, spec.scale_dtype.name))
    factor = decode_scales(scales, spec.scale_dtype).repeat_interleave(size, 1)[:, :k]
    second = zeros = None
    if spec.second_scale == "tensor":
        second = torch.rand(1, device=device) + 0.5
        factor = factor * second.double()
    values = decode(codes, dtype)
    sizes = values.abs()
    if not spec.symmetric:
        lowest, highest = int(dtype.min), int(dtype.max)
        zeros = torch.randint(lowest, highest + 1, shape, dtype=torch.int8, device=device)
        values, sizes = values - zeros.double(), sizes + zeros.double().abs()
    tokens = TokenScales(scales, zeros, second)
    return Tokens(rows[:, : raw.shape[1]], tokens, values * factor, sizes * factor)


def random_weight(spec: WeightSpec, n: int, k: int, device: str = "cpu") -> QuantizedWeight:
    """A quantized weight with an offset, so that zero points matter."""
    dense = torch.randn(n, k, device=device) + 0.3 * torch.rand(n, 1, device=device)
    if spec.dtype.kind == "uint" and spec.zero_point == "none":
        dense = dense.abs()
    size = k**-0.5
    if spec.scale_dtype == "float8e4m3" and spec.second_scale == "none":
        # Its scales have few exponents: weights are as large as such scales can make them.
        size = max(size, spec.dtype.max * _E4M3_SCALE)
    return humming.quantize(dense * size, spec)


def operands_of(plan: KernelPlan, weight: QuantizedWeight, bias: torch.Tensor | None) -> Operands:
    """The weight packed for a plan."""
    packed = humming.pack(weight, operand_bits=plan.lowering.packed_bits)
    return Operands(packed.codes, packed.scales, packed.zeros, packed.second_scale, bias)


def row_sums(plan: KernelPlan, weight: QuantizedWeight) -> torch.Tensor:
    """What tokens with zero points are corrected with, as `TokenScales` says."""
    values = reference.dequantize(weight)
    if weight.second_scale is not None:
        values = values / weight.second_scale.double()
    if plan.lowering.scale_site == "epilogue":
        values = values / reference.dequantize_scales(weight)
    return values.sum(1).float()


@dataclass(frozen=True)
class Product:
    """A problem with random operands, its plan for a device, and its exact result.

    Attributes:
        exact, bound: float64 [m, n].
    """

    plan: KernelPlan
    tokens: Tokens
    operands: Operands
    exact: torch.Tensor
    bound: torch.Tensor

    def excess(self, out: torch.Tensor) -> float:
        """By how much the worst output exceeds its bound; negative where none does."""
        error = (out.double() - self.exact).abs()
        # An output that may overflow has an infinite bound; NaN is within none.
        over = torch.where(error <= self.bound, -1.0, error - self.bound)
        return float(torch.nan_to_num(over, nan=torch.inf).max())


def random_product(
    problem: GemmProblem, caps: DeviceCapabilities, m: int, device: str = "cpu"
) -> Product:
    """A product of a problem, planned for a device; raises as `compose` does."""
    return product_of(compose(problem, caps, m_range_of(m)), m, device)


def product_of(plan: KernelPlan, m: int, device: str = "cpu") -> Product:
    """Random operands for a plan."""
    problem = plan.problem
    weight = random_weight(problem.weight, problem.n, problem.k, device)
    tokens = random_tokens(problem.activation, m, problem.k, device)
    out_dtype = getattr(torch, problem.out_dtype.name)
    bias = torch.randn(problem.n, device=device).to(out_dtype) if problem.bias else None
    if tokens.scales and tokens.scales.zeros is not None:
        scales = tokens.scales._replace(row_sums=row_sums(plan, weight))
        tokens = Tokens(tokens.x, scales, tokens.values, tokens.sizes)
    elif not problem.activation.dtype.is_narrow:
        # Rows that begin at multiples of 16 bytes are what kernels are given.
        x = torch.nn.functional.pad(tokens.x, (0, -problem.k % 8))
        tokens = Tokens(x, None, tokens.values, tokens.sizes)
    bound = reference.error_bound(
        problem,
        tokens.values,
        weight,
        bias,
        **(plan.roundings if device != "cpu" else plan.roundings | {"short_k": 0}),
        x_sizes=tokens.sizes,
        # Products of either sign, which the tighter bound asks for.
        certain=False,
    )
    exact = reference.matmul(tokens.values, weight, bias)
    return Product(plan, tokens, operands_of(plan, weight, bias), exact, bound)
