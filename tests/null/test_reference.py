"""The oracle: exact numbers, one value at a time, and bounds that hold and can be broken."""

import math

import numpy as np
import pytest
import torch

from humming.dtypes import NARROW, DataType, bfloat16, float16, float32
from humming.errors import UnsupportedError
from humming.formats import NAMED_WEIGHTS, WeightSpec
from humming.problem import GemmProblem
from humming.quantized import SCALE_TENSOR_DTYPES, QuantizedWeight, decode_scales, pack_bits
from humming.quantizer import quantize
from humming.reference import (
    dequantize,
    error_bound,
    matmul,
    relative_bound,
    relative_error,
    unit_roundoff,
)

TENSOR_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
FORMATS = [
    *NAMED_WEIGHTS,
    *(f"{dtype}_g24" for dtype in NARROW if dtype.kind != "ufloat"),
    *("int4_tensor", "int8", "int4_block5x48", "fp8_block128", "fp8_block16_sbf16"),
    *("uint4_g32_zp", "uint8_tensor_zp", "uint3_block5x48_zp", "uint5_g32_fzp", "int4_g32_fzp"),
    *("int4_g32_s2channel", "fp4_g16_se4m3_s2channel", "fp8_block16_sfp32_s2tensor"),
]


def random_weight(name: str, n: int, k: int) -> QuantizedWeight:
    """Every code and any scale that is a number, whatever a quantizer would make of it."""
    spec = WeightSpec.parse(name)
    shape, dtype = spec.scale_shape(n, k), SCALE_TENSOR_DTYPES[spec.scale_dtype]
    codes = torch.randint(0, 2**spec.dtype.bits, (n, k), dtype=torch.uint8)
    if dtype == torch.uint8:
        scales = torch.randint(117, 137, shape, dtype=torch.uint8)
    else:
        scales = torch.randn(shape).to(dtype)
    zeros = {
        "none": None,
        "integer": torch.randint(0, 2**spec.dtype.bits, shape, dtype=torch.uint8),
        "float": (torch.randn(shape) * 4).to(dtype),
    }[spec.zero_point]
    second = {"none": None, "tensor": torch.rand(1, 1), "channel": torch.rand(n, 1)}
    packed = pack_bits(codes, spec.dtype.bits)
    return QuantizedWeight(spec, (n, k), packed, scales, zeros, second[spec.second_scale])


@pytest.mark.parametrize("name", FORMATS)
def test_each_weight(name: str) -> None:
    n, k = 13, 100
    weight = random_weight(name, n, k)
    spec, numbers = weight.spec, dequantize(weight)
    assert numbers.dtype == torch.float64
    table = spec.dtype.decode_table()
    scales = decode_scales(weight.scales, spec.scale_dtype).tolist()
    zeros = None if weight.zeros is None else weight.zeros.double().tolist()
    bits, stored = spec.dtype.bits, weight.codes.numpy()
    for i in range(n):
        row = int.from_bytes(stored[i].tobytes(), "little")
        for j in range(k):
            at = {
                "tensor": (0, 0),
                "channel": (i, 0),
                "group": (i, j // (spec.group_size or 1)),
                "block": (i // (spec.block[0] or 1), j // (spec.block[1] or 1)),
            }[spec.granularity]
            value = table[(row >> (j * bits)) & (2**bits - 1)]
            if zeros is not None:
                value -= zeros[at[0]][at[1]]
            value *= scales[at[0]][at[1]]
            if weight.second_scale is not None:
                value *= float(weight.second_scale[i if spec.second_scale == "channel" else 0])
            np.testing.assert_equal(float(numbers[i, j]), float(value))


def test_every_fp4_code_under_every_shared_exponent() -> None:
    # Exponent byte 0 is 2**-127, a subnormal of float32 and bfloat16, and no exception here.
    codes = torch.arange(16, dtype=torch.uint8).repeat(255, 2)
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    weight = QuantizedWeight(WeightSpec.parse("mxfp4"), (255, 32), pack_bits(codes, 4), scales)
    fp4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    expected = torch.cat([fp4, -fp4]) * torch.exp2(scales.double() - 127)
    assert torch.equal(dequantize(weight)[:, :16], expected)
    assert torch.equal(dequantize(weight, torch.float32)[:, :16], expected.float())


def test_every_e4m3_scale() -> None:
    # All 256 bytes with codes that are 1.0: subnormal scales, NaN and the sign are kept.
    scales = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)[:, None]
    codes = torch.full((256, 16), 2, dtype=torch.uint8)
    second = torch.ones(1, 1)
    weight = QuantizedWeight(
        WeightSpec.parse("nvfp4"), (256, 16), pack_bits(codes, 4), scales, None, second
    )
    found = dequantize(weight)[:, 0].numpy()
    np.testing.assert_array_equal(found, DataType.parse("e4m3").decode_table())
    assert found[1] == 2.0**-9
    assert math.copysign(1, found[0x80]) == -1


def test_smallest_and_largest_scales_side_by_side() -> None:
    scales = torch.tensor([[2.0**-9, 2.0**-6, 0.015625, 1.0, 448.0]]).to(torch.float8_e4m3fn)
    codes = torch.full((1, 80), 7, dtype=torch.uint8)
    weight = QuantizedWeight(
        WeightSpec.parse("nvfp4"), (1, 80), pack_bits(codes, 4), scales, None, torch.ones(1, 1)
    )
    assert dequantize(weight)[0, ::16].tolist() == [6 * 2.0**-9, 6 / 64, 6 / 64, 6.0, 6 * 448.0]


def test_rows_of_short_blocks() -> None:
    # 448 rows are 3.5 blocks: row j reads scale row j // 128, never row j // 112.
    weight = quantize(torch.ones(448, 256), "fp8_block128_sfp32")
    scales = torch.exp2(torch.arange(4.0))[:, None].expand(4, 2).contiguous()
    found = dequantize(
        QuantizedWeight(weight.spec, weight.shape, weight.codes, scales / 448, None, None)
    )
    torch.testing.assert_close(found[:, 0], torch.exp2(torch.arange(448) // 128).double())


# --- products ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int4_g32", "uint4_g32_zp", "nvfp4"])
@pytest.mark.parametrize("batch", [(), (0,), (3,), (2, 0), (2, 3)], ids=str)
def test_product(name: str, batch: tuple[int, ...]) -> None:
    weight = random_weight(name, 9, 70)
    x, bias = torch.randn(*batch, 70).bfloat16(), torch.randn(9).bfloat16()
    out = matmul(x, weight, bias)
    assert out.dtype == torch.float64
    assert out.shape == (*batch, 9)
    expected = torch.einsum("...k,nk->...n", x.double(), dequantize(weight)) + bias.double()
    torch.testing.assert_close(out, expected)
    assert matmul(x, weight, out_dtype="bf16").dtype == torch.bfloat16
    assert torch.equal(matmul(x, weight, bias, torch.float16), out.half())


def test_activations_that_do_not_fit_are_refused() -> None:
    weight = random_weight("int4_g32", 4, 64)
    for x in (torch.randn(2, 63), torch.ones(2, 64, dtype=torch.int8), torch.tensor(1.0)):
        with pytest.raises(UnsupportedError, match="floats"):
            matmul(x, weight)
    with pytest.raises(UnsupportedError, match="not quantized again"):
        matmul(torch.randn(2, 64), weight, out_dtype="fp8")


# --- bounds ------------------------------------------------------------------------------------


def test_unit_roundoff() -> None:
    assert unit_roundoff(float16) == 2.0**-11 == torch.finfo(torch.float16).eps / 2
    assert unit_roundoff(bfloat16) == 2.0**-8 == torch.finfo(torch.bfloat16).eps / 2
    assert unit_roundoff(float32) == 2.0**-24 == torch.finfo(torch.float32).eps / 2


def problem_of(weight: QuantizedWeight, activation: str, out: str, **demands) -> GemmProblem:
    n, k = weight.shape
    return GemmProblem(n, k, weight.spec, activation, out, **demands)


def kernel(
    x: torch.Tensor, weight: QuantizedWeight, out: str, split_k: int, bias: torch.Tensor
) -> torch.Tensor:
    """What a kernel does, on the CPU: exact products, float32 sums one after another."""
    products = x.float()[:, None, :] * dequantize(weight, torch.float32)[None]
    total = bias.float().expand(len(x), -1)
    for part in products.split(-(-products.shape[-1] // split_k), dim=-1):
        partial = torch.zeros(products.shape[:2])
        for k in range(part.shape[-1]):
            partial = partial + part[..., k]
        total = total + partial
    return total.to(TENSOR_DTYPES[out])


@pytest.mark.parametrize("certain", [True, False], ids=["certain", "likely"])
@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("out", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("activation", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["int4_g32_sfp32", "uint4_g32_zp", "mxfp4"])
def test_a_correct_kernel_stays_within_the_bound(
    name: str, activation: str, out: str, split_k: int, certain: bool
) -> None:
    weight = quantize(torch.randn(16, 200) / 16, name)
    x = torch.randn(5, 200).to(TENSOR_DTYPES[activation])
    bias = torch.randn(16).to(x.dtype)
    problem = problem_of(weight, activation, out)
    bound = error_bound(problem, x, weight, bias, split_k=split_k, certain=certain)
    exact = matmul(x, weight, bias)
    found = kernel(x, weight, out, split_k, bias)
    assert bound.shape == exact.shape
    assert ((found.double() - exact).abs() <= bound).all()
    assert relative_error(found, exact) <= relative_bound(bound, exact)
    # And a bound worth having: one wrong weight, or one rounding too many, exceeds it.
    if out == "float32":
        assert ((found.to(torch.bfloat16).double() - exact).abs() > bound).any()
    codes = weight.codes.clone()
    codes[3, 7] ^= 0x44
    wrong = QuantizedWeight(
        weight.spec, weight.shape, codes, weight.scales, weight.zeros, weight.second_scale
    )
    assert ((kernel(x, wrong, out, split_k, bias).double() - exact).abs() > bound).any()


@pytest.mark.parametrize("activation", ["float16", "bfloat16"])
@pytest.mark.parametrize("roundings", [1, 2])
def test_weights_rounded_to_the_operand(activation: str, roundings: int) -> None:
    dtype = TENSOR_DTYPES[activation]
    weight = quantize(torch.randn(16, 200) / 16, "int4_g32_sfp32")
    scales = weight.scales.to(dtype).float() if roundings == 2 else weight.scales
    scaled = QuantizedWeight(weight.spec, weight.shape, weight.codes, scales)
    operand = dequantize(scaled, torch.float32).to(dtype)
    x = torch.randn(5, 200).to(dtype)
    found = (x.float() @ operand.float().T).double()
    exact = matmul(x, weight)
    problem = problem_of(weight, activation, "float32")
    bound = error_bound(problem, x, weight, operand_roundings=roundings)
    assert ((found - exact).abs() <= bound).all()
    assert ((found - exact).abs() > error_bound(problem, x, weight)).any()


def truncated(x: torch.Tensor, weight: QuantizedWeight, step: int, together: int) -> torch.Tensor:
    """A product whose sums of `step` addends keep 13 bits, and run over `together` values of K."""
    products = x.double()[:, None, :] * dequantize(weight)[None]
    total = torch.zeros(products.shape[:2], dtype=torch.float64)
    for first in range(0, products.shape[2], together):
        partial = torch.zeros_like(total)
        for at in range(first, min(first + together, products.shape[2]), step):
            addends = torch.cat([products[:, :, at : at + step], partial[:, :, None]], dim=2)
            exponent = torch.frexp(addends.abs().amax(2).clamp(min=1e-300)).exponent - 1
            unit = torch.exp2((exponent - 13).double())[:, :, None]
            partial = ((addends / unit).trunc() * unit).sum(2)
        total += partial
    return total


@pytest.mark.parametrize("together", [128, 512])
@pytest.mark.parametrize("certain", [True, False])
def test_sums_that_keep_few_bits(certain: bool, together: int) -> None:
    weight = quantize(torch.randn(24, 512), "fp8")
    numbers = torch.randn(6, 512).to(torch.float8_e4m3fn).double()
    problem = GemmProblem.parse("fp8 x fp8 -> float32", *weight.shape)
    found, exact = truncated(numbers, weight, 32, together), matmul(numbers, weight)
    bound = error_bound(problem, numbers, weight, short_k=together, certain=certain)
    error = (found - exact).abs()
    assert (error <= bound).all()
    if not certain:
        # Sums that are precise would not be off so far, and a step of K left out would be farther.
        assert (error > error_bound(problem, numbers, weight, certain=False)).any()
        missing = exact - numbers[:, :32] @ dequantize(weight)[:, :32].T
        assert ((missing - exact).abs() > bound).float().mean() > 0.5


@pytest.mark.parametrize("name", ["int4_g32", "uint4_g32_zp", "uint4_g32_fzp"])
def test_folded_offsets_sum_larger_numbers(name: str) -> None:
    weight = quantize(torch.randn(16, 96) / 16, name)
    x = torch.randn(5, 96).half()
    problem = problem_of(weight, "float16", "float32")
    plain = error_bound(problem, x, weight)
    folded = error_bound(problem, x, weight, folded_offset=True)
    # |code| + |offset| is at least |code - offset|, and far more of a small difference.
    assert (folded >= plain).all()
    assert float(folded.mean()) > 2 * float(plain.mean())


def test_the_bound_grows_with_k_as_stated() -> None:
    for k in (64, 1024):
        weight = quantize(torch.ones(1, k), "int4_sfp32")
        x = torch.ones(1, k).half()
        bound = error_bound(problem_of(weight, "float16", "float32"), x, weight)
        # Sums of ones: S = |y| = k. All other terms are far below.
        n = k + k // 4 + 5
        assert float(bound) == pytest.approx(k * (n * 2.0**-23 + 2.0**-24), rel=1e-2)


def test_infinite_where_the_output_may_overflow() -> None:
    # Scales of 548 occur in real checkpoints; infinity is then right in float16, NaN is not.
    weight = random_weight("int4", 1, 64)
    scales = torch.full_like(weight.scales, 548)
    codes = torch.full_like(weight.codes, 0x77)
    weight = QuantizedWeight(weight.spec, weight.shape, codes, scales)
    x = torch.ones(2, 64).half()
    x[1, 1:] = 0
    assert matmul(x, weight, out_dtype="fp16")[:, 0].tolist() == [math.inf, 548 * 7]
    bound = error_bound(problem_of(weight, "float16", "float16"), x, weight)
    assert torch.isinf(bound)[:, 0].tolist() == [True, False]
    bound = error_bound(problem_of(weight, "float16", "bfloat16"), x, weight)
    assert torch.isfinite(bound).all()


def test_float16_accumulation_is_allowed_for() -> None:
    weight = quantize(torch.randn(8, 128) / 16, "int4_g32")
    x = torch.randn(3, 128).half()
    exact, total = matmul(x, weight), torch.zeros(3, 8).half()
    for k in range(128):
        total = total + x[:, k : k + 1] * dequantize(weight, torch.float16)[:, k]
    demanding = problem_of(weight, "float16", "float16")
    lenient = problem_of(weight, "float16", "float16", fp16_accumulation=True)
    assert ((total.double() - exact).abs() > error_bound(demanding, x, weight)).any()
    bound = error_bound(lenient, x, weight, operand_roundings=1)
    assert ((total.double() - exact).abs() <= bound).all()


def test_no_activations_and_zero_activations() -> None:
    weight = quantize(torch.randn(8, 64), "int4_g32")
    problem = problem_of(weight, "bfloat16", "bfloat16")
    assert error_bound(problem, torch.zeros(0, 64).bfloat16(), weight).shape == (0, 8)
    bound = error_bound(problem, torch.zeros(2, 64).bfloat16(), weight, operand_roundings=1)
    assert (bound < 1e-38).all()
    assert relative_error(torch.zeros(0, 8), torch.zeros(0, 8)) == 0.0
    assert relative_error(torch.zeros(2, 8), torch.zeros(2, 8)) == 0.0
    assert relative_error(torch.ones(2, 8), torch.zeros(2, 8)) == math.inf


def test_relative_error_is_that_of_norms() -> None:
    exact = torch.tensor([[3.0, 4.0]])
    assert relative_error(torch.tensor([[3.0, 4.5]]), exact) == pytest.approx(0.1)
    assert relative_bound(torch.tensor([[0.3, 0.4]]), exact) == pytest.approx(0.1)
    assert math.isnan(relative_error(torch.tensor([[math.nan, 4.0]]), exact))


def test_bounds_are_refused_where_none_is_known() -> None:
    weight = quantize(torch.randn(8, 64), "int4_g32")
    x = torch.randn(2, 64).half()
    with pytest.raises(UnsupportedError, match="numbers of the codes, in float64"):
        error_bound(problem_of(weight, "int8", "float16"), x, weight)
    with pytest.raises(UnsupportedError, match="float16 activations"):
        error_bound(problem_of(weight, "bfloat16", "float16"), x, weight)
    with pytest.raises(UnsupportedError, match=r"shape \[8, 64\]"):
        error_bound(GemmProblem(8, 128, "int4_g32", "float16", "float16"), x, weight)
