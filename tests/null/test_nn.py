"""QuantLinear on the CPU: how it is made, cast, moved, stored and loaded."""

import copy
import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import humming
from humming import QuantLinear
from humming.errors import UnsupportedError

N, K = 48, 136
FORMATS = ("int4_g32", "uint4_g64_zp", "int8", "float4e2m1_g16_se4m3_s2tensor", "mxfp4", "fp8")


def _linear(bias: bool = True, dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    return torch.nn.Linear(K, N, bias=bias, dtype=dtype)


@pytest.fixture(params=FORMATS)
def layer(request: pytest.FixtureRequest) -> QuantLinear:
    return QuantLinear.from_linear(_linear(), request.param)


def _bits(layer: torch.nn.Module) -> dict[str, tuple[torch.dtype, bytes]]:
    """Every tensor of a layer's state as dtype and bytes, which compare exactly."""
    return {
        name: (tensor.dtype, tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        for name, tensor in layer.state_dict().items()
    }


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_from_linear_is_quantize_and_pack(bias: bool) -> None:
    linear = _linear(bias)
    layer = QuantLinear.from_linear(linear, "int4_g32", method="mse")
    expected = humming.pack(humming.quantize(linear.weight, "int4_g32", method="mse"))
    assert layer.packed.equals(expected)
    assert (layer.in_features, layer.out_features) == (K, N)
    assert (layer.bias is not None) == bias
    if bias:
        assert torch.equal(layer.bias, linear.bias)
    assert not list(layer.parameters()), "nothing here is trained"


def test_default_format() -> None:
    assert QuantLinear.from_linear(torch.nn.Linear(256, 16)).weight_spec.name == "int4_g128"


def test_from_quantized_and_from_packed_agree() -> None:
    quantized = humming.quantize(torch.randn(N, K), "int4_g32")
    bias = torch.randn(N)
    one = QuantLinear.from_quantized(quantized, bias)
    other = QuantLinear.from_packed(humming.pack(quantized), bias)
    assert _bits(one) == _bits(other)


@pytest.mark.parametrize(
    ("activation", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_activation_decides_what_is_accepted(activation: str, dtype: torch.dtype) -> None:
    layer = QuantLinear.from_linear(_linear(), "int4_g32", activation).to("meta")
    assert layer.bias.dtype == dtype
    assert layer(torch.empty(2, K, dtype=dtype, device="meta")).dtype == dtype
    other = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}[dtype]
    with pytest.raises(UnsupportedError, match=f"{other}.*made for {dtype}"):
        layer(torch.empty(2, K, dtype=other, device="meta"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_result_follows_the_activations_whatever_the_bias(dtype: torch.dtype) -> None:
    layer = QuantLinear.from_linear(_linear(), "int4_g32").to("meta")
    assert layer.bias.dtype == torch.float32
    out = layer(torch.empty(2, 3, K, dtype=dtype, device="meta"))
    assert (out.shape, out.dtype) == ((2, 3, N), dtype)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QuantLinear.from_linear(torch.nn.Conv1d(3, 4, 1)), "Conv1d"),
        (lambda: QuantLinear.from_linear(_linear(), "int4_g32", "int8_tensor"), "known beforehand"),
        (lambda: QuantLinear.from_linear(_linear(), "int5_gg"), "int5_gg"),
        (
            lambda: QuantLinear(humming.pack(humming.quantize(_linear().weight, "int8"), 8)),
            r"packed for 16 bits.*activation='fp16'",
        ),
        (
            lambda: QuantLinear.from_quantized(
                humming.quantize(_linear().weight, "int8"), torch.randn(K)
            ),
            r"bias \[136\].*\[48\]",
        ),
        (
            lambda: QuantLinear.from_quantized(
                humming.quantize(_linear().weight, "int8"), torch.ones(N, dtype=torch.int32)
            ),
            "int32 bias",
        ),
    ],
    ids=["no-linear", "activation", "format", "operand", "bias-size", "bias-dtype"],
)
def test_refuses_to_make(make, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        make()


CASTS = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "float": lambda m: m.float(),
    "double": lambda m: m.double(),
    "to-dtype": lambda m: m.to(torch.bfloat16),
    "to-device-and-dtype": lambda m: m.to("cpu", torch.float16),
    "inside-a-model": lambda m: torch.nn.Sequential(m).half()[0],
}


@pytest.mark.parametrize("cast", CASTS)
def test_casting_changes_the_bias_alone(cast: str, layer: QuantLinear) -> None:
    before = _bits(layer)
    after = _bits(CASTS[cast](layer))
    assert after.pop("bias")[0] != before.pop("bias")[0] or cast == "float"
    assert after == before


def test_moving_moves_everything(layer: QuantLinear) -> None:
    moved = layer.to("meta", torch.float16)
    assert {tensor.device.type for tensor in moved.buffers()} == {"meta"}
    assert moved.bias.dtype == torch.float16
    assert moved.packed.spec == layer.weight_spec


def test_state_round_trip_is_exact(layer: QuantLinear) -> None:
    stored = io.BytesIO()
    torch.save(layer.state_dict(), stored)
    stored.seek(0)
    other = QuantLinear.from_linear(_linear(), layer.weight_spec)
    assert _bits(other) != _bits(layer)
    other.load_state_dict(torch.load(stored, weights_only=True))
    assert _bits(other) == _bits(layer)


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_state_round_trip_through_safetensors(
    assign: bool, layer: QuantLinear, tmp_path: Path
) -> None:
    save_file(torch.nn.Sequential(layer).state_dict(), tmp_path / "layer.safetensors")
    other = torch.nn.Sequential(QuantLinear.from_linear(_linear(), layer.weight_spec))
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"), assign=assign)
    assert _bits(other[0]) == _bits(layer)


def _state(format_: str, n: int = N, k: int = K) -> dict[str, torch.Tensor]:
    quantized = humming.quantize(torch.randn(n, k).abs(), format_)
    return QuantLinear.from_quantized(quantized, torch.randn(n)).state_dict()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        # The tensors have equal shapes and dtypes: only the description tells them apart.
        pytest.param(lambda: _state("uint4_g32"), r"uint4_g32.*int4_g32", id="format"),
        pytest.param(lambda: _state("int4_g32", N - 1), r"\[47, 136\].*\[48, 136\]", id="rows"),
        pytest.param(lambda: _state("int4_g32", N, K - 8), r"\[48, 128\]", id="columns"),
        pytest.param(
            lambda: {**_state("int4_g32"), "scales": torch.ones(3, 5, 16)},
            "scales of torch.float32",
            id="scale-dtype",
        ),
        pytest.param(
            lambda: {**_state("int4_g32"), "_extra_state": torch.zeros(3, dtype=torch.uint8)},
            "no description",
            id="no-description",
        ),
    ],
)
def test_state_that_does_not_fit_is_refused_and_changes_nothing(state, message: str) -> None:
    layer = QuantLinear.from_linear(_linear(), "int4_g32")
    before = _bits(layer)
    with pytest.raises(UnsupportedError, match=message):
        layer.load_state_dict(state())
    assert _bits(layer) == before


def test_state_without_description_is_refused_by_strict_loading() -> None:
    state = _state("int4_g32")
    del state["_extra_state"]
    with pytest.raises(RuntimeError, match="_extra_state"):
        QuantLinear.from_linear(_linear(), "int4_g32").load_state_dict(state)


def test_refused_state_names_the_layer() -> None:
    model = torch.nn.ModuleDict({"proj": QuantLinear.from_linear(_linear(), "int4_g32")})
    state = {f"proj.{name}": tensor for name, tensor in _state("int8").items()}
    with pytest.raises(UnsupportedError, match="state of proj with weight int8"):
        model.load_state_dict(state)


def test_is_copied_and_saved_whole(layer: QuantLinear) -> None:
    assert _bits(copy.deepcopy(layer)) == _bits(layer)
    stored = io.BytesIO()
    torch.save(layer, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    assert _bits(loaded) == _bits(layer)
    assert loaded.weight_spec == layer.weight_spec


def test_repr_tells_sizes_and_format() -> None:
    layer = QuantLinear.from_linear(_linear(bias=False), "int4_g32")
    assert repr(layer) == (
        "QuantLinear(in_features=136, out_features=48, bias=False, weight=int4_g32)"
    )


def test_compiles_into_one_graph() -> None:
    targets: list[str] = []

    def keep(module: torch.fx.GraphModule, _: object) -> object:
        targets.extend(str(node.target) for node in module.graph.nodes)
        return module.forward

    torch._dynamo.reset()
    layers = [QuantLinear.from_linear(torch.nn.Linear(K, K), name) for name in ("int4_g32", "int8")]
    model = torch.nn.Sequential(*layers, torch.nn.ReLU()).to("meta")
    with torch.no_grad():
        torch.compile(model, backend=keep, fullgraph=True)(
            torch.empty(4, K, dtype=torch.bfloat16, device="meta")
        )
    assert targets.count("humming.matmul.default") == 2


def test_is_exported_as_one_operator() -> None:
    layer = QuantLinear.from_linear(_linear(), "int4_g32", "bf16").to("meta")
    x = torch.empty(4, K, dtype=torch.bfloat16, device="meta")
    with torch.no_grad():
        exported = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("m")},))
    targets = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert targets == ["humming.matmul.default"]
