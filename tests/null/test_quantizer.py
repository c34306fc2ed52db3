"""Quantizing: every code is the nearest, every scale follows its rule, odd inputs are decided."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import humming.quantizer
from humming.dtypes import NARROW, DataType
from humming.errors import UnsupportedError
from humming.formats import NAMED_WEIGHTS, WeightSpec
from humming.quantized import decode_scales
from humming.quantizer import quantize
from humming.reference import dequantize

SIGNED = [dtype for dtype in NARROW if dtype.is_signed]
UNSIGNED = [dtype for dtype in NARROW if dtype.kind == "uint"]
FORMATS = [
    *NAMED_WEIGHTS,
    *(f"{dtype}{scales}" for dtype in SIGNED for scales in ("_g32", "_g24_sue8m0")),
    *(f"{dtype}_g32_{zero}" for dtype in UNSIGNED for zero in ("zp", "fzp")),
    *(f"{dtype}" for dtype in UNSIGNED),
    "int4_g32_fzp",
    *("int4_tensor", "int4", "int4_g-1", "int4_block16", "int4_block5x48", "int4_block999"),
    *("uint4_tensor_zp", "uint4_zp", "uint4_block16_zp", "uint8_block5x48_fzp", "uint3_tensor_fzp"),
    *("fp8_tensor", "fp8", "fp8_block128", "fp8_block16_sbf16", "fp4_g16_se4m3", "fp4_sfp32"),
    *("int4_g128_sbf16", "int4_g32_sfp32", "uint8_g64_fzp_sbf16", "int8_tensor_s2channel"),
    *("int4_g32_s2channel", "fp4_g16_se4m3_s2channel", "fp8_block16_s2channel"),
    *("uint4_g32_zp_se4m3_s2tensor", "mxint4", "float4e0m3_g16_se4m3_s2tensor"),
]


def weight_for(spec: WeightSpec, n: int = 21, k: int = 100) -> torch.Tensor:
    """Normal numbers with a heavy tail, not negative where the format cannot hold these."""
    w = torch.randn(n, k) * torch.randn(n, 1).exp() * 0.1
    w[torch.rand(n, k) < 0.01] *= 10
    return w.abs() if spec.zero_point == "none" and not spec.dtype.is_signed else w


def spread(per_scale: torch.Tensor, spec: WeightSpec, n: int, k: int) -> torch.Tensor:
    """Scales or zero points for each weight, one at a time."""
    rows = {"tensor": n, "block": spec.block[0]}.get(spec.granularity, 1)
    group = spec.scale_group(k)
    numbers = per_scale.double().tolist()
    found = [[numbers[i // rows][j // group] for j in range(k)] for i in range(n)]
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("method", ["absmax", "mse"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_code_is_the_nearest(name: str, method: str) -> None:
    spec = WeightSpec.parse(name)
    w = weight_for(spec)
    quantized = quantize(w, spec, method=method)
    n, k = w.shape
    scales = spread(decode_scales(quantized.scales, spec.scale_dtype), spec, n, k)
    if quantized.second_scale is not None:
        scales = scales * quantized.second_scale.double()
    zeros = 0.0 if quantized.zeros is None else spread(quantized.zeros, spec, n, k)[..., None]
    numbers = torch.tensor(spec.dtype.decode_table()[np.isfinite(spec.dtype.decode_table())])
    choices = (numbers - zeros) * scales[..., None]
    best = (choices - w[..., None].double()).abs().amin(dim=-1)
    found = (dequantize(quantized) - w.double()).abs()
    # Steps are computed in float32: a tie may be decided either way.
    slack = 1e-6 * (scales.abs() * numbers.abs().max() + w.double().abs())
    if quantized.zeros is not None:
        slack = slack + 1e-6 * (scales * zeros[..., 0]).abs()
    if spec.zero_point == "integer":
        # Zero must be exact, so steps are rounded before the zero point is added: also a tie.
        slack = slack + 1e-5 * scales
    assert (found <= best + slack).all()


@pytest.mark.parametrize("name", FORMATS)
def test_search_never_adds_error(name: str) -> None:
    spec = WeightSpec.parse(name)
    w = weight_for(spec, n=16, k=192)
    errors = []
    for method in ("absmax", "mse"):
        error = (dequantize(quantize(w, spec, method=method)) - w.double()).square()
        grid = humming.quantizer._Grid.of(spec, *w.shape)
        errors.append(grid.reduce(error, "sum"))
    assert (errors[1] <= errors[0] * (1 + 1e-4) + 1e-12).all()


@pytest.mark.parametrize("name", ["int2_g64", "int3_g64", "int4_g128", "uint2_g64_fzp", "nvfp4"])
def test_search_reduces_error(name: str) -> None:
    w = torch.randn(64, 512)
    plain, searched = (
        float((dequantize(quantize(w, name, method=method)) - w.double()).square().mean())
        for method in ("absmax", "mse")
    )
    assert searched < 0.97 * plain


# --- the rules for scales ----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "largest"), [("int4_g32_sfp32", 7), ("fp4_g32_sfp32", 6)])
def test_symmetric_scale_is_the_largest_magnitude_over_the_largest_code(
    name: str, largest: int
) -> None:
    w = torch.randn(8, 96)
    scales = quantize(w, name).scales
    torch.testing.assert_close(scales, w.view(8, 3, 32).abs().amax(-1) / largest)


@pytest.mark.parametrize("bits", range(2, 9))
def test_absmax_leaves_the_lowest_code_unused(bits: int) -> None:
    # Also where the scale is rounded down.
    w = torch.randn(32, 64)
    w[:, 0] = -w.abs().amax(dim=1)
    for scale_dtype in ("float16", "bfloat16", "float32"):
        codes = quantize(w, f"int{bits}_g64", scale_dtype=scale_dtype).codes_unpacked()
        assert not (codes == 2 ** (bits - 1)).any()
        assert (codes[:, 0] == 2 ** (bits - 1) + 1).all()


def test_halves_of_the_last_step_are_clamped() -> None:
    # 127.5 steps would round to 128 and wrap to -128.
    w = torch.tensor([[1.0, -1.0, 127.5 / 127, -127.5 / 127]]).half()
    assert dequantize(quantize(w, "int8")).sign().tolist() == [[1, -1, 1, -1]]


def test_unlimited_search_may_use_the_whole_range() -> None:
    w = torch.tensor([[-8.0] + [7.0, 6.0, -5.0, 3.0] * 8])
    assert torch.equal(dequantize(quantize(w, "int4", method="mse")), w.double())


@pytest.mark.parametrize("name", ["mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8", "mxfp8_e5m2"])
def test_shared_exponents_follow_ocp(name: str) -> None:
    emax = {"mxfp4": 2, "mxfp6_e3m2": 4, "mxfp6_e2m3": 2, "mxfp8": 8, "mxfp8_e5m2": 15}[name]
    w = torch.randn(4, 256) * torch.exp2(torch.randint(-40, 40, (4, 1)).float())
    w[0, :32] = 0
    w[0, 5] = 8.0  # a power of two, where log2 in floating point might fall short
    w[1, :32] = 0
    w[1, 5] = math.nextafter(8.0, 0.0)
    scales = quantize(w, name).scales
    for row in range(4):
        for group in range(8):
            peak = float(w[row, 32 * group : 32 * group + 32].abs().max())
            exponent = math.frexp(peak)[1] - 1 - emax
            assert scales[row, group] == 127 + exponent
    assert scales[0, 0] == 127 + 3 - emax


@pytest.mark.parametrize(("bits", "emax"), [(2, 0), (4, 2), (8, 6)])
def test_shared_exponents_of_integers(bits: int, emax: int) -> None:
    # In units of its last place, as OCP's MXINT8: the largest power of two that fits.
    w = torch.randn(4, 64)
    scales = decode_scales(quantize(w, f"int{bits}_g32_sue8m0").scales, DataType.parse("ue8m0"))
    peaks = w.view(4, 2, 32).abs().amax(-1).double()
    assert torch.equal(scales, torch.exp2(torch.floor(torch.log2(peaks)) - emax))


def test_exponents_beyond_the_type_stay_finite() -> None:
    w = torch.tensor([[1e-45] * 32, [3e38] * 32])
    for name in ("mxfp4", "mxfp8_e5m2", "mxint4"):
        quantized = quantize(w, name)
        assert (quantized.scales < 255).all()
        assert torch.isfinite(dequantize(quantized)).all()


def test_nvfp4_scales() -> None:
    w = torch.randn(32, 64) * 3e-3
    w[3, 17] = 0.5
    quantized = quantize(w, "nvfp4")
    assert quantized.second_scale is not None
    torch.testing.assert_close(quantized.second_scale, torch.tensor([[0.5 / (448 * 6)]]))
    group_scales = quantized.scales.float()
    assert group_scales[3, 1] == 448
    assert float(group_scales.max()) == 448
    assert float(group_scales.min()) > 0
    assert float(dequantize(quantized)[3, 17]) == pytest.approx(0.5)


def test_second_scale_per_channel() -> None:
    w = torch.randn(8, 64) * torch.logspace(-6, 3, 8)[:, None]
    quantized = quantize(w, "fp4_g16_se4m3_s2channel")
    assert quantized.second_scale is not None
    torch.testing.assert_close(
        quantized.second_scale, w.abs().amax(dim=1, keepdim=True) / (448 * 6)
    )
    error = (dequantize(quantized) - w.double()).norm(dim=1) / w.double().norm(dim=1)
    assert (error < 0.15).all()  # each row as precise as the others, over nine orders of magnitude


# --- zero points -------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 8), st.sampled_from([-3.0, -0.4, 0.0, 0.4, 3.0]))
def test_zero_is_exact_with_integer_zero_points(bits: int, shift: float) -> None:
    w = torch.rand(6, 40) + shift
    w[:, ::7] = 0
    quantized = quantize(w, f"uint{bits}_g20_zp")
    assert quantized.zeros is not None
    assert int(quantized.zeros.max()) < 2**bits
    assert (dequantize(quantized)[:, ::7] == 0).all()


@pytest.mark.parametrize("bits", range(2, 9))
def test_integer_zero_points_lose_a_step_at_most(bits: int) -> None:
    w = torch.randn(16, 64) + torch.randn(16, 1)
    quantized = quantize(w, f"uint{bits}_g32_zp_sfp32")
    scales = quantized.scales.double().repeat_interleave(32, dim=1)
    assert ((dequantize(quantized) - w.double()).abs() <= scales * (1 + 1e-5)).all()


@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_float_zero_points_follow_the_range(bits: int, scale_dtype: str) -> None:
    w = torch.rand(16, 64) * 0.5 + torch.randn(16, 1)
    quantized = quantize(w, f"uint{bits}_g64_fzp", scale_dtype=scale_dtype)
    roundoff = 2.0 ** -(DataType.parse(scale_dtype).mantissa_bits + 1)
    # Half a step, and what rounding scale and zero point moves the range by.
    step = (w.amax(1) - w.amin(1)) / (2**bits - 1)
    allowed = 0.5 * step + 3 * roundoff * (w.abs().amax(1) + step * 2**bits)
    assert ((dequantize(quantized) - w.double()).abs() <= allowed[:, None] * 1.001).all()


@pytest.mark.parametrize("value", [10.0, -3e-4, 1e4, 5e-324, 1e-30])
@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16", "float32"])
def test_constant_groups_with_float_zero_points(value: float, scale_dtype: str) -> None:
    w = torch.full((2, 32), value, dtype=torch.float64)
    quantized = quantize(w, "uint4_g32_fzp", scale_dtype=scale_dtype)
    tiny = 2.0**-24 if scale_dtype == "float16" else 2.0**-126
    torch.testing.assert_close(dequantize(quantized), w, rtol=2e-2, atol=tiny)


def test_signed_zero_points() -> None:
    w = torch.rand(4, 64) + 1
    error = (dequantize(quantize(w, "int4_g32_fzp")) - w.double()).abs()
    assert float(error.max()) < 0.04


def test_one_bit_formats() -> None:
    w = torch.tensor([[-3.0, 1.0, -1.0, 0.0], [4.0, -1.0, 0.5, 2.5]])
    # int1 holds 0 and -1: its scale takes the sign that keeps the largest value.
    assert dequantize(quantize(w, "int1")).tolist() == [[-3, 0, 0, 0], [4, 0, 0, 4]]
    assert dequantize(quantize(w, "int1_sue8m0")).tolist() == [[-2, 0, 0, 0], [0, -1, 0, 0]]
    # uint1 with a float zero point holds any two numbers, e.g. a sign.
    signs = torch.tensor([[1.0, -1.0, -1.0, 1.0]]) * 0.25
    assert torch.equal(dequantize(quantize(signs, "uint1_fzp")), signs.double())


# --- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["absmax", "mse"])
@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zero(name: str, method: str) -> None:
    spec = WeightSpec.parse(name)
    w = weight_for(spec, n=32, k=192)
    w[:16, 96:] = 0  # rows, groups and blocks of nothing but zeros
    w[16:, :96] = -0.0
    for weight in (w, torch.zeros(32, 192), torch.full((32, 192), -0.0)):
        quantized = quantize(weight, spec, method=method)
        assert torch.isfinite(decode_scales(quantized.scales, spec.scale_dtype)).all()
        numbers = dequantize(quantized)
        assert torch.isfinite(numbers).all()
        if not weight.any():
            assert (numbers == 0).all()
            assert (quantized.codes_unpacked() & (2 ** (spec.dtype.bits - 1) - 1) == 0).all()
        elif spec.granularity == "group":
            group = spec.group_size
            whole = -(-96 // group) * group
            assert (numbers[:16, whole:] == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["int4_g32", "uint4_tensor_zp", "nvfp4", "fp8_block16"])
def test_values_that_are_no_numbers_are_named(name: str, dtype: torch.dtype, bad: float) -> None:
    w = torch.randn(20, 96).to(dtype)
    w[13, 71] = bad
    with pytest.raises(UnsupportedError, match=rf"{bad} at \[13, 71\].*finite"):
        quantize(w, name)


def test_negative_weights_in_unsigned_formats_are_named() -> None:
    w = torch.rand(8, 64)
    w[2, 3] = -0.25
    with pytest.raises(UnsupportedError, match=r"-0.25 at \[2, 3\].*uint4 without zero points"):
        quantize(w, "uint4_g32")


def test_scales_beyond_their_type_are_refused() -> None:
    w = torch.randn(4, 64)
    w[1, 40] = 1e6
    with pytest.raises(UnsupportedError, match=r"scale at \[1, 1\].*float16's 65504"):
        quantize(w, "int4_g32")
    with pytest.raises(UnsupportedError, match="float8e4m3's 448"):
        quantize(w, "fp4_g32_se4m3")
    assert dequantize(quantize(w, "int4_g32", scale_dtype="bf16"))[1, 40] == pytest.approx(
        1e6, 0.01
    )


def test_the_largest_scale_is_used() -> None:
    w = torch.full((1, 32), 7 * 65504.0)
    assert float(quantize(w, "int4_g32").scales) == 65504


@pytest.mark.parametrize("name", ["int4_g32", "uint4_g32_zp", "uint4_g32_fzp", "nvfp4", "fp8"])
def test_tiny_weights(name: str) -> None:
    # Scales below the smallest number of their type must not become 0: 0 / 0 is no code.
    for size in (1e-9, 1e-30, 1e-42):
        w = torch.randn(4, 64) * size
        w[0] = torch.randn(64)
        quantized = quantize(w, name)
        assert (decode_scales(quantized.scales, quantized.spec.scale_dtype) > 0).all()
        assert (dequantize(quantized)[1:].abs() <= 8 * max(size, 2.0**-24)).all()


@pytest.mark.parametrize(
    ("name", "size"),
    [("int4_g32", 1e-7), ("uint4_g32_zp", 1e-9), ("fp8_block32_sfp16", 1e-9), ("int8", 1e-42)],
)
def test_weights_below_every_scale_are_refused(name: str, size: float) -> None:
    w = torch.randn(4, 64) * size
    with pytest.raises(UnsupportedError, match=r"largest scale would be .*scale_dtype"):
        quantize(w, name)
    wide = quantize(w, name, scale_dtype="float32") if size > 1e-30 else None
    assert wide is None or torch.allclose(dequantize(wide).float(), w, atol=3 * size)


# --- shapes, strides, dtypes -------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_any_shape(data: st.DataObject) -> None:
    spec = WeightSpec.parse(data.draw(st.sampled_from(FORMATS)))
    n, k = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 150))
    w = torch.randn(n, k)
    w = w.abs() if spec.zero_point == "none" and not spec.dtype.is_signed else w
    quantized = quantize(w, spec)
    assert quantized.shape == (n, k)
    assert quantized.scales.shape == spec.scale_shape(n, k)
    if spec.dtype.bits >= 4 and spec.scale_dtype != "float8e8m0":
        # Coarse, but it would not hold for a wrong scale or a shifted row.
        relative = (dequantize(quantized) - w.double()).norm() / w.double().norm()
        assert relative < 0.35


@pytest.mark.parametrize(("n", "k"), [(448, 256), (576, 320), (2112, 64), (85, 192)])
def test_the_last_block_is_short(n: int, k: int) -> None:
    # 448 = 3.5 blocks of 128: row j belongs to block j // 128, not to one of 4 equal parts.
    rows = torch.exp2((torch.arange(n) // 128).float())
    w = torch.ones(n, k) * rows[:, None]
    quantized = quantize(w, "fp8_block128", scale_dtype="float32")
    assert quantized.scales.shape == (-(-n // 128), -(-k // 128))
    expected = torch.exp2(torch.arange(len(quantized.scales)).float()) / 448
    torch.testing.assert_close(
        quantized.scales, expected[:, None].expand_as(quantized.scales).contiguous()
    )
    torch.testing.assert_close(dequantize(quantized), w.double())


def test_the_last_group_is_short() -> None:
    w = torch.randn(4, 100)
    quantized = quantize(w, "int4_g32_sfp32")
    torch.testing.assert_close(quantized.scales[:, 3], w[:, 96:].abs().amax(1) / 7)


@pytest.mark.parametrize("name", ["int4_g32", "uint4_tensor_zp", "fp8_block16", "nvfp4", "int4"])
def test_chunks_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(70, 96)
    whole = {method: quantize(w, name, method=method) for method in ("absmax", "mse")}
    for chunk in (1, 96 * 5, 96 * 40):
        monkeypatch.setattr(humming.quantizer, "_CHUNK_VALUES", chunk)
        assert quantize(w, name).equals(whole["absmax"])
        if name != "uint4_tensor_zp":  # whose sum of errors depends on the order of summation
            assert quantize(w, name, method="mse").equals(whole["mse"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["int4_g32", "nvfp4", "mxfp4", "uint4_g32_fzp"])
def test_input_of_16_bits(name: str, dtype: torch.dtype) -> None:
    w = torch.randn(16, 96).to(dtype)
    assert quantize(w, name).equals(quantize(w.float(), name))


@pytest.mark.parametrize("name", ["int4_g32", "nvfp4", "mxfp4", "uint4_g32_fzp"])
def test_input_of_64_bits(name: str) -> None:
    w = torch.randn(64, 96)
    single, double = dequantize(quantize(w, name)), dequantize(quantize(w.double(), name))
    # Apart from ties, which the precision of a division may decide.
    assert float((single != double).double().mean()) < 0.02
    w = torch.randn(4, 32, dtype=torch.float64) * 1e-200
    w[0] = 1
    assert not dequantize(quantize(w, name)).isnan().any()


STRIDED = {
    "transposed": lambda w: w.T.contiguous().T,
    "columns of a wider matrix": lambda w: torch.cat([w, w], dim=1)[:, : w.shape[1]],
    "every other row": lambda w: w.repeat_interleave(2, dim=0)[::2],
    "offset by one": lambda w: torch.cat([w.new_zeros(1), w.flatten()])[1:].view(w.shape),
    "parameter": lambda w: torch.nn.Parameter(w),
}


@pytest.mark.parametrize("view", STRIDED)
@pytest.mark.parametrize(
    "name", ["int4_g32", "uint4_g32_zp", "fp8_block16", "nvfp4", "int8_tensor"]
)
def test_strides(name: str, view: str) -> None:
    w = torch.randn(24, 96).half()
    assert quantize(STRIDED[view](w), name).equals(quantize(w, name))


def test_one_row_with_wide_strides() -> None:
    w = torch.randn(1, 100)
    assert quantize(w.T.contiguous().T, "int4_g32").equals(quantize(w, "int4_g32"))


def test_the_weight_is_left_alone() -> None:
    w = torch.randn(8, 64, dtype=torch.float32)
    before = w.clone()
    for name in ("int4_g32", "uint4_g32_zp", "uint4_g32_fzp", "nvfp4", "mxfp4"):
        quantize(w, name, method="mse")
    assert torch.equal(w, before)


@pytest.mark.parametrize(
    ("weight", "spec", "options", "why"),
    [
        (torch.ones(4, 4, dtype=torch.int8), "int4", {}, "plain floats"),
        (torch.ones(4, 4).to(torch.float8_e4m3fn), "int4", {}, "plain floats"),
        (torch.ones(4), "int4", {}, "a matrix"),
        (torch.ones(2, 4, 4), "int4", {}, "a matrix"),
        (torch.ones(0, 4), "int4", {}, "a matrix"),
        (torch.ones(4, 0), "int4", {}, "a matrix"),
        (torch.ones(4, 4), "int4", {"method": "hqq"}, "absmax.*mse"),
        (torch.ones(4, 4), "int44", {}, "int4"),
        (torch.ones(4, 4), "int4", {"scale_dtype": "int8"}, "scales"),
    ],
    ids=lambda value: str(tuple(value.shape)) if isinstance(value, torch.Tensor) else None,
)
def test_requests_that_make_no_sense(weight, spec, options, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        quantize(weight, spec, **options)


def test_scale_dtype_is_part_of_the_result() -> None:
    quantized = quantize(torch.randn(4, 64), "int4_g32", scale_dtype=torch.bfloat16)
    assert quantized.spec == WeightSpec.parse("int4_g32_sbf16")
    assert quantized.scales.dtype == torch.bfloat16
