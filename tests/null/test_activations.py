"""Quantizing activations without a kernel: the reference's rules, refusals, plans and sources."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import humming
from humming import activations, plugins, reference
from humming.activations import QuantizedActivation
from humming.dtypes import DataType
from humming.errors import UnsupportedError
from humming.formats import ActivationSpec
from humming.quantize_kernel import compose_quantize, encoder_of, plan_quantize
from humming.quantized import decode_scales, encode, unpack_bits

DYNAMIC = (
    *("int8", "int8_asym", "int4", "int4_g128", "int8_g16_asym", "fp8", "fp8_e5m2", "fp8_g128"),
    *("float8e3m4", "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4", "float4e0m3_nv16", "fp8_g32_sbf16"),
)


def _dequantized(x: torch.Tensor, name: str, **arguments: torch.Tensor) -> torch.Tensor:
    spec = ActivationSpec.parse(name)
    parts = reference.quantize_activation(x, spec, **arguments)
    second = arguments.get("second_scale")
    return reference.dequantize_activation(spec, x.shape[-1], *parts, second)


# --- the rules ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DYNAMIC)
def test_values_come_back_within_half_a_step(name: str) -> None:
    spec = ActivationSpec.parse(name)
    x = torch.randn(7, 300) * 10.0 ** torch.empty(7, 1).uniform_(-3, 3)
    error = (_dequantized(x, name) - x.double()).abs()
    scales = reference.quantize_activation(x, spec).scales
    factor = decode_scales(scales, spec.scale_dtype)
    factor = factor[:, torch.arange(300) // (spec.group_size or 300)]
    table = torch.tensor(spec.dtype.decode_table())
    finite = table[table.isfinite()].sort().values
    widest = finite.diff().max()  # of all steps between codes
    # What a saturating scale cuts off of the top of its range: less than a factor of two.
    cut = factor * spec.dtype.max if spec.scale_dtype.bits == 8 else 0.0
    assert (error <= 0.502 * widest * factor + cut).all()


@pytest.mark.parametrize(("name", "largest"), [("int8", 127), ("int4", 7), ("fp8", 448)])
def test_the_largest_magnitude_becomes_the_largest_code(name: str, largest: float) -> None:
    x = torch.tensor([[1.0, -3.0, 0.5]])
    parts = reference.quantize_activation(x, name)
    assert parts.scales.item() == torch.tensor(3.0).div(largest).item()
    assert _dequantized(x, name)[0, 1] == pytest.approx(-3.0)


def test_numbers_that_codes_hold_are_kept() -> None:
    x = torch.arange(-127.0, 128.0)[None]
    assert torch.equal(_dequantized(x, "int8"), x.double())
    asymmetric = torch.arange(0.0, 256.0)[None]
    parts = reference.quantize_activation(asymmetric, "int8_asym")
    assert (parts.scales.item(), parts.zeros.item()) == (1.0, -128)  # type: ignore[union-attr]
    assert torch.equal(_dequantized(asymmetric, "int8_asym"), asymmetric.double())


def test_symmetric_integers_leave_the_lowest_out() -> None:
    x = torch.tensor([[-1.0, 1.0, 0.99999]], dtype=torch.float16)
    codes = reference.quantize_activation(x, "int8").codes.view(torch.int8)
    assert codes.tolist() == [[-127, 127, 127]]


def test_mx_scales_are_those_of_weights() -> None:
    x = torch.randn(5, 96) * 100
    for name in ("mxfp8", "mxfp4"):
        weight = humming.quantize(x, name)
        parts = reference.quantize_activation(x, name)
        assert torch.equal(parts.scales, weight.scales)
        assert torch.equal(parts.codes, weight.codes)


@pytest.mark.parametrize("name", DYNAMIC)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_stay_zero_under_a_finite_scale(name: str, zero: float) -> None:
    parts = reference.quantize_activation(torch.full((2, 40), zero), name)
    scales = decode_scales(parts.scales, ActivationSpec.parse(name).scale_dtype)
    assert (scales == 1).all()
    assert (_dequantized(torch.full((2, 40), zero), name) == 0).all()


@pytest.mark.parametrize("name", DYNAMIC)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_shows_in_its_scale_alone(name: str, value: float) -> None:
    x = torch.randn(3, 40)
    x[1, 3] = value
    numbers = _dequantized(x, name)
    group = min(ActivationSpec.parse(name).group_size or 40, 40)
    assert numbers[1, :group].isnan().all()
    assert numbers[1, group:].isfinite().all()
    assert numbers[[0, 2]].isfinite().all()
    spec = ActivationSpec.parse(name)
    codes = unpack_bits(reference.quantize_activation(x, name).codes, spec.dtype.bits, 40)
    assert (codes[1, :group] == 0).all()


def test_a_tiny_block_does_not_divide_by_zero() -> None:
    x = torch.full((1, 16), 1e-30)
    parts = reference.quantize_activation(x, "nvfp4")
    assert parts.scales.float().item() == 2.0**-9
    assert (_dequantized(x, "nvfp4") == 0).all()


def test_a_static_scale_saturates() -> None:
    x = torch.tensor([[math.inf, -1e9, math.nan, 0.5]])
    scale = torch.tensor([0.5])
    codes = reference.quantize_activation(x, "int8_tensor", scale=scale).codes
    assert codes.view(torch.int8).tolist() == [[127, -127, 0, 1]]
    assert reference.quantize_activation(x, "fp8_tensor", scale=scale).codes.tolist() == [
        [0x7E, 0xFE, 0x7F, 0x38]
    ]


X = torch.zeros(4, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize("scale", [0.0, -2.0, math.nan, math.inf])
def test_a_static_scale_is_positive(scale: float) -> None:
    with pytest.raises(UnsupportedError, match="Pass a positive number"):
        reference.quantize_activation(X, "fp8_tensor", scale=torch.tensor([scale]))


def test_scales_found_at_run_time_may_be_nan() -> None:
    assert _made(scales=torch.full((3, 1), math.nan)).dequantize().isnan().all()


# --- the value ------------------------------------------------------------------------------------


def _made(spec: str = "int8", **changes: object) -> QuantizedActivation:
    fields: dict[str, object] = {
        "spec": ActivationSpec.parse(spec),
        "shape": (3, 20),
        "codes": torch.zeros(3, 32, dtype=torch.uint8)[:, :20],
        "scales": torch.ones(3, 1),
    }
    return QuantizedActivation(**{**fields, **changes})  # type: ignore[arg-type]


def test_activations_check_themselves() -> None:
    made = _made()
    assert made.dequantize().shape == (3, 20)
    assert made.codes_row_bytes == 32
    assert made.to("meta").codes.stride() == (32, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codes": torch.zeros(3, 20, dtype=torch.uint8)}, r"strides \[20, 1\].*multiple of 16"),
        ({"codes": torch.zeros(3, 19, dtype=torch.uint8)}, r"uint8 \[3, 20\]"),
        ({"scales": torch.ones(3)}, r"float32 \[3\].*float32 \[3, 1\]"),
        ({"scales": torch.ones(3, 1).half()}, "float16"),
        ({"scales": torch.ones(3, 2)[:, :1]}, "not contiguous"),
        ({"zeros": torch.zeros(3, 1, dtype=torch.int8)}, "the format has none"),
        ({"second_scale": torch.ones(1)}, "the format has none"),
        ({"spec": ActivationSpec.parse("int8_asym")}, "zeros are missing"),
        ({"spec": ActivationSpec.parse("bf16")}, "no codes"),
        ({"shape": (3, 0)}, "empty"),
        (
            {"spec": ActivationSpec.parse("int8_tensor"), "scales": torch.full((1, 1), -0.5)},
            "its scale is -0.5",
        ),
    ],
)
def test_refuses_parts_that_do_not_fit(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        _made(**changes)


# --- requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "spec", "arguments", "message"),
    [
        (X, "bf16", {}, "no codes"),
        (X, "mxfp6_e3m2", {}, "6 bits are not stored"),
        (X, "float4e3m0", {}, "no mantissa"),
        (X, "int8_tensor_dynamic", {}, "read once.*int8_tensor"),
        (X, "int4_g5", {}, "even group size"),
        (X, "int8_g32_asym_sue8m0", {}, "powers of two"),
        (X, "int8_tensor_asym", {"scale": 1.0, "zero": 128}, "-128 to 127"),
        (X, "int9", {}, "int9"),
        (X, "int8_tensor", {}, "none is given"),
        (X, "int8", {"scale": torch.ones(1)}, "found from the activations"),
        (X, "int8_tensor_asym", {"scale": 1.0}, "zero point is missing"),
        (X, "int8_tensor", {"scale": 1.0, "zero": 1}, "no zero point"),
        (X, "int8_tensor", {"scale": torch.ones(2)}, r"scale of torch.float32 \[2\]"),
        (X, "int8", {"second_scale": torch.ones(1)}, "no second scale"),
        (X, "nvfp4", {"second_scale": torch.ones(2)}, r"float32 \[1\]"),
        *(
            (X, "int8_tensor", {"scale": scale}, "its scale is .*Pass a positive number")
            for wrong in (0.0, -1.5, math.nan, math.inf, 1e-60, 1e60)
            for scale in (wrong, torch.tensor([wrong]))
        ),
        (X, "int8_tensor_sfp16", {"scale": torch.tensor([1e-9])}, "its scale is 0.0"),
        (X, "nvfp4", {"second_scale": torch.zeros(1)}, "its second scale is 0.0"),
        (X, "int8", {"fuse": "relu"}, "'silu_mul', 'gelu', 'gelu_tanh'"),
        (X[:, :63], "int8", {"fuse": "silu_mul"}, "two halves"),
        (X.double(), "int8", {}, "float32, float16, bfloat16"),
        (X[:, :0], "int8", {}, "K above 0"),
        (torch.zeros((), dtype=torch.float16), "int8", {}, "no last dimension"),
    ],
)
def test_refuses(x: torch.Tensor, spec: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        humming.quantize_activation(x, spec, **arguments)  # type: ignore[arg-type]


def test_tensors_on_the_cpu_need_a_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "devices", lambda: plugins.PresentDevices([], []))
    monkeypatch.setattr(activations, "_quantizations", {})
    with pytest.raises(UnsupportedError, match=r"CPU.*simulates.*humming\.reference"):
        humming.quantize_activation(X, "int8")


def test_no_backward() -> None:
    x = torch.randn(2, 0, 8, requires_grad=True)
    q = humming.quantize_activation(x, "int8")
    with pytest.raises(UnsupportedError, match="rounding has no gradient"):
        q.scales.sum().backward()


@pytest.mark.parametrize("shape", [(0, 40), (3, 0, 40)], ids=str)
def test_no_tokens_give_an_empty_result(shape: tuple[int, ...]) -> None:
    q = humming.quantize_activation(torch.zeros(shape), "fp8_g128")
    assert (q.shape, q.codes.shape, q.scales.shape) == ((0, 40), (0, 40), (0, 1))


@pytest.mark.parametrize("name", ["int8", "nvfp4", "int8_g16_asym", "int8_tensor"])
def test_the_operator_has_a_fake(name: str) -> None:
    with FakeTensorMode():
        x = torch.empty(2, 3, 40, dtype=torch.bfloat16)
        scale = torch.empty(1, 1) if name == "int8_tensor" else None
        codes, scales, zeros = torch.ops.humming.quantize_activation(
            x, name, "none", scale, None, None
        )
    spec = ActivationSpec.parse(name)
    assert codes.shape == (6, 32 if spec.dtype.bits == 4 else 48)
    columns = math.ceil(40 / spec.group_size) if spec.group_size else 1
    assert tuple(scales.shape) == ((0, 0) if scale is not None else (6, columns))
    assert (zeros.numel() > 0) == (not spec.symmetric)


# --- plans and sources ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*DYNAMIC, "int8_tensor", "int8_g48", "int4_g6", "fp8_g4096"])
@pytest.mark.parametrize("k", [1, 7, 40, 576, 4096, 14336, 65536, 100003])
def test_pieces_cover_each_row_once(name: str, k: int) -> None:
    caps = plugins.capabilities("h200")
    for m in (1, 4, 16384):
        plan = plan_quantize(
            ActivationSpec.parse(name), DataType.parse("float16"), "none", k, m, caps
        )
        config = plan.config
        assert (plan.pieces - 1) * plan.piece < plan.k_padded <= plan.row_bytes * 8
        longest = max(plan.piece, plan.k_padded - (plan.pieces - 1) * plan.piece)
        held = 8 * config.item_threads * config.steps
        assert longest <= held or not config.resident
        if config.scale_of != "kItem":
            assert plan.pieces * held >= plan.k_padded
        rows = config.threads // config.item_threads
        assert plan.grid(m)[0] * rows >= m > (plan.grid(m)[0] - 1) * rows


def test_more_pieces_than_a_launch_has_are_refused() -> None:
    spec, half = ActivationSpec.parse("int8_g6"), DataType.parse("float16")
    with pytest.raises(UnsupportedError, match="larger groups"):
        plan_quantize(spec, half, "none", 6 * 70000, 1, plugins.capabilities("h200"))


@pytest.mark.parametrize(
    ("device", "dtype", "struct"),
    [
        ("t4", "float8e4m3", "EncodeFloat<4, 3, 126, 127>"),
        ("h200", "float8e4m3", "EncodeE4m3Pairs"),
        ("h200", "float4e2m1", "EncodeE2m1"),
        ("b200", "float4e2m1", "EncodeE2m1Pairs"),
        ("b200", "int8", "EncodeInt<8>"),
    ],
)
def test_the_encoder_follows_from_what_a_device_has(device: str, dtype: str, struct: str) -> None:
    caps, registry = plugins.capabilities(device), plugins.registry()
    assert encoder_of(DataType.parse(dtype), caps, registry).struct == f"humming::{struct}"


def test_a_source_is_the_same_each_time_and_waits_only_where_it_can() -> None:
    spec, half = ActivationSpec.parse("fp8"), DataType.parse("float16")
    for device, waits in (("h200", "true"), ("l40s", "false")):
        caps = plugins.capabilities(device)
        config = plan_quantize(spec, half, "none", 4096, 16, caps).config
        source = compose_quantize(config, caps, plugins.registry())
        assert source == compose_quantize(config, caps, plugins.registry())
        assert f"kDependentLaunch = {waits};" in source


def test_encode_of_the_reference_is_that_of_the_types() -> None:
    values = torch.randn(2000) * 10.0 ** torch.empty(2000).uniform_(-6, 4)
    for name in ("float8e4m3", "float4e2m1", "float8e5m2", "int8"):
        dtype = DataType.parse(name)
        assert encode(values, dtype).tolist() == dtype.encode(values.numpy()).tolist()
