"""Products of quantized activations from Python: functions, layers, graphs, refusals."""

from typing import Any

import pytest
import torch

import humming
from humming import reference
from humming.errors import UnsupportedError

N, K = 70, 192
PAIRS = (
    ("int4_g64", "int8"),
    ("int8", "int8_asym"),
    ("uint4_g32_zp", "int8_asym"),
    ("fp8", "fp8"),
    ("fp8_block128", "fp8_g128"),
    ("mxfp4", "mxfp8"),
    ("nvfp4", "nvfp4"),
    ("int4", "int4"),
)


def weight_of(spec: str) -> humming.QuantizedWeight:
    return humming.quantize(torch.randn(N, K) * K**-0.5 + 0.01, spec)


def close(out: torch.Tensor, exact: torch.Tensor) -> bool:
    """Within the rounding to float16 or bfloat16 of sums that are exact or in float32."""
    limit = 2.0**-8 if out.dtype == torch.bfloat16 else 2.0**-11
    return bool(((out.double() - exact).abs() <= limit * exact.abs() + 1e-5).all())


@pytest.mark.parametrize(("spec", "activation"), PAIRS)
@pytest.mark.parametrize("device", ["sim:t4", "sim:h200"])
def test_x_is_quantized_on_the_way(spec: str, activation: str, device: str) -> None:
    weight = weight_of(spec)
    packed = humming.pack(weight, activation=activation)
    x, bias = torch.randn(2, 5, K, dtype=torch.float16), torch.randn(N, dtype=torch.float16)
    out = humming.matmul(x, packed, bias, activation=activation, device=device)
    quantized = humming.quantize_activation(x, activation, device=device)
    exact = quantized.dequantize() @ reference.dequantize(weight).T + bias.double()
    assert (out.shape, out.dtype) == ((2, 5, N), torch.float16)
    assert close(out.view(10, N), exact)
    again = humming.matmul(quantized, packed, bias, device=device)
    assert torch.equal(again, out.view(10, N))


def test_one_packed_weight_serves_every_device() -> None:
    packed = humming.pack(weight_of("fp8"), activation="fp8")
    x = humming.quantize_activation(torch.randn(3, K), "fp8")
    outs = [
        humming.matmul(x, packed, out_dtype=torch.float32, device=f"sim:{name}")
        for name in ("t4", "a100", "l40s", "h200", "rtx5090", "zw810e")
    ]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-5, atol=1e-5)


def test_no_tokens_and_an_output_of_ones_own() -> None:
    packed = humming.pack(weight_of("int8"), activation="int8")
    x = torch.randn(0, K, dtype=torch.bfloat16)
    assert humming.matmul(x, packed, activation="int8").shape == (0, N)
    x, out = torch.randn(4, K, dtype=torch.bfloat16), torch.empty(4, N, dtype=torch.float32)
    made = humming.matmul(x, packed, activation="int8", out=out)
    assert made is out
    assert torch.equal(out, humming.matmul(x, packed, activation="int8", out_dtype=torch.float32))


@pytest.mark.parametrize("activation", ["int8", "int8_asym", "fp8", "mxfp8"])
def test_layers_quantize_and_compile(activation: str) -> None:
    linear = torch.nn.Linear(K, N).half()
    layer = humming.QuantLinear.from_linear(linear, "int4_g64", activation=activation)
    x = torch.randn(3, K, dtype=torch.float16)
    with torch.no_grad():
        out = layer(x)
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(x), out)
        assert torch.equal(humming.matmul(x, layer.packed, linear.bias, activation=activation), out)


def test_a_layer_takes_another_ones_state() -> None:
    """What corrects for zero points of activations follows the weight that is loaded."""
    one, other = (
        humming.QuantLinear.from_linear(torch.nn.Linear(K, N).half(), "int8", "int8_asym")
        for _ in range(2)
    )
    x = torch.randn(3, K, dtype=torch.float16) + 2
    other.load_state_dict(one.state_dict())
    with torch.no_grad():
        assert torch.equal(other(x), one(x))
        assert one.to(torch.bfloat16).row_sums.dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda x, p, q: humming.matmul(x, p), "activation='int8'"),
        (lambda x, p, q: humming.matmul(x[:, :64], p, activation="int8"), "K differs"),
        (lambda x, p, q: humming.matmul(q, p, activation="fp8"), "quantized as int8 already"),
        (
            lambda x, p, q: humming.matmul(x, humming.pack(weight_of("int8")), activation="int8"),
            "8",
        ),
        (lambda x, p, q: humming.matmul(q, p, torch.randn(3)), "bias"),
        (lambda x, p, q: humming.matmul(x, p, activation="int8", out_dtype=torch.int8), "int8"),
        (lambda x, p, q: humming.matmul(x, p, activation="int9"), "int9"),
        (lambda x, p, q: humming.pack(weight_of("int8"), 8, activation="int8"), "Leave one"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, told: str) -> None:
    packed = humming.pack(weight_of("int8"), activation="int8")
    x = torch.randn(3, K, dtype=torch.float16)
    with pytest.raises(UnsupportedError, match=told):
        call(x, packed, humming.quantize_activation(x, "int8"))


def test_gradients_are_refused() -> None:
    packed = humming.pack(weight_of("int8"), activation="int8")
    x = torch.randn(3, K, dtype=torch.float16, requires_grad=True)
    with pytest.raises(UnsupportedError):
        humming.matmul(x, packed, activation="int8").sum().backward()


@pytest.mark.parametrize("k", [64, K - 16, K + 1, 2 * K])
def test_a_layer_refuses_another_k(k: int) -> None:
    layer = humming.QuantLinear.from_linear(torch.nn.Linear(K, N).half(), "int8", "int8")
    with pytest.raises(UnsupportedError, match=f"not K = {K}"):
        layer(torch.randn(4, k, dtype=torch.float16))


def test_a_strided_bias_is_refused_and_a_layer_copies_it() -> None:
    strided = torch.arange(2 * N, dtype=torch.float16)[::2]
    weight = weight_of("int8")
    packed = humming.pack(weight, activation="int8")
    x = torch.randn(3, K, dtype=torch.float16)
    with pytest.raises(UnsupportedError, match="contiguous"):
        humming.matmul(x, packed, strided, activation="int8")
    layer = humming.QuantLinear(packed, strided, activation="int8")
    exact = humming.matmul(x, packed, strided.contiguous(), activation="int8")
    assert torch.equal(layer(x), exact)


@pytest.mark.parametrize("activation", ["int8", "mxfp8"])
def test_a_product_is_traced(activation: str) -> None:
    packed = humming.pack(weight_of("int4_g64"), activation=activation)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return humming.matmul(x * 2, packed, activation=activation) + 1

    x = torch.randn(3, K, dtype=torch.float16)
    assert torch.equal(torch.compile(twice, fullgraph=True, backend="eager")(x), twice(x))


@pytest.mark.parametrize("exponent", [118, -100])
@pytest.mark.parametrize(("spec", "activation"), [("mxfp4", "mxfp8"), ("mxfp4", "mxfp4")])
@pytest.mark.parametrize("device", ["sim:a100", "sim:rtx5090"])
def test_scales_near_the_ends_of_float(
    device: str, spec: str, activation: str, exponent: int
) -> None:
    """Powers of two that dequantization leaves out must not make scales leave float's range."""
    weight = humming.quantize(torch.randn(N, K) * 2.0**exponent, spec)
    packed = humming.pack(weight, activation=activation)
    x = humming.quantize_activation(torch.randn(3, K) * 2.0**-10, activation, device=device)
    out = humming.matmul(x, packed, out_dtype=torch.float32, device=device).double()
    exact = x.dequantize() @ reference.dequantize(weight).T
    assert ((out - exact).abs() <= 1e-5 * exact.abs().mean()).all()


@pytest.mark.parametrize("spec", ["int4", "int4_g64", "int8"])
@pytest.mark.parametrize("device", ["sim:h200", "sim:a100"])
def test_zero_points_of_activations_that_are_widened(spec: str, device: str) -> None:
    weight = weight_of(spec)
    packed = humming.pack(weight, activation="int4_asym")
    x = humming.quantize_activation(torch.rand(5, K) + 1, "int4_asym", device=device)
    out = humming.matmul(x, packed, out_dtype=torch.float32, device=device).double()
    exact = x.dequantize() @ reference.dequantize(weight).T
    assert (out - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.parametrize(
    "spec", ["uint4_g32_zp", "int8", "int8_tensor", "int8_block64x64_s2tensor"]
)
def test_sums_of_rows_do_not_depend_on_how_they_are_cut(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = weight_of(spec)
    whole = humming.pack(weight).row_sums
    monkeypatch.setattr("humming.packing._CHUNK_CODES", 3 * K)
    assert torch.equal(humming.pack(weight).row_sums, whole)
    assert whole.shape == (N,)


def test_rows_that_kernels_would_read_beyond_are_refused() -> None:
    spec = humming.ActivationSpec.parse("fp8")
    codes, scales = torch.zeros(1, 20, dtype=torch.uint8), torch.ones(1, 1)
    with pytest.raises(UnsupportedError, match="the last one as well"):
        humming.QuantizedActivation(spec, (1, 20), codes, scales)
    wide = torch.zeros(1, 32, dtype=torch.uint8)
    humming.QuantizedActivation(spec, (1, 20), wide[:, :20], scales)
    codes = torch.zeros(3, 20, dtype=torch.uint8)
    parts = (torch.ones(3, 1), None, None, *(torch.zeros(1) for _ in range(2)), None, None)
    with pytest.raises(UnsupportedError, match="pieces of 16 bytes"):
        torch.ops.humming.matmul_quantized(
            codes, *parts, None, None, "fp8", "fp8", 16, 20, torch.float16
        )


def test_integer_sums_leave_room_for_zero_points() -> None:
    def sums(activation: str, k: int) -> str:
        chosen = humming.plan(f"int8 x {activation}", "a100", n=64, k=k)
        return chosen.lowering.mma.accumulator.name

    assert sums("int8", 100_000) == "int32"
    assert sums("int8_asym", 60_000) == "int32"
    assert sums("int8_asym", 100_000) == "float32"


@pytest.mark.parametrize("exponent", [120, -120])
def test_scales_of_tokens_near_the_ends_of_float(exponent: int) -> None:
    """Times the powers of two that operands leave out they would be beyond; the results are not."""
    problem = humming.GemmProblem.parse("fp8 x fp8 -> float32", 16, 64)
    weight = humming.quantize(torch.randn(16, 64) * 2.0 ** (-exponent // 6), problem.weight)
    x = (torch.randn(3, 64) * 2.0**exponent).bfloat16()
    quantized = humming.quantize_activation(x, "fp8", device="sim:t4")
    packed = humming.pack(weight, activation="fp8")
    found = humming.matmul(quantized, packed, device="sim:t4", out_dtype=torch.float32)
    exact = quantized.dequantize().double() @ reference.dequantize(weight).T
    assert found.isfinite().all()
    assert ((found.double() - exact).abs() <= 1e-3 * exact.abs().amax()).all()
