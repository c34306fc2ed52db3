"""Quantizing a model in place: which layers, what is left and why, and that results are theirs."""

import pytest
import torch
from torch import nn

import humming
from humming import QuantLinear, progress, quantize_model
from humming.errors import UnsupportedError, WrongTypeError

SIZE, WIDE, WORDS = 64, 96, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {"query": nn.Linear(SIZE, SIZE), "out": nn.Linear(SIZE, SIZE)}
        )
        self.mlp = nn.Sequential(
            nn.Linear(SIZE, WIDE), nn.GELU(), nn.Linear(WIDE, SIZE, bias=False)
        )
        self.gate = nn.Linear(SIZE, 2)


class Model(nn.Module):
    """Two blocks between an embedding and an output layer that may be tied to it."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, SIZE)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(SIZE, WORDS, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight


BLOCK_LAYERS = ("attention.query", "attention.out", "mlp.0", "mlp.2", "gate")
LAYERS = tuple(f"layers.{i}.{name}" for i in range(2) for name in BLOCK_LAYERS)


def _kinds(model: nn.Module) -> dict[str, type]:
    wanted = (nn.Linear, QuantLinear)
    return {name: type(m) for name, m in model.named_modules() if isinstance(m, wanted)}


def test_each_layer_is_quantized_as_by_itself() -> None:
    model = Model()
    linear = {name: model.get_submodule(name) for name in LAYERS}
    expected = {name: QuantLinear.from_linear(linear[name], "mxfp4") for name in LAYERS}
    report = quantize_model(model, "mxfp4")
    assert report.quantized == LAYERS
    assert report.skipped == {"lm_head": "'lm_head' is to be skipped"}
    for name in LAYERS:
        layer = model.get_submodule(name)
        assert layer.packed.equals(expected[name].packed)
        assert (layer.bias is None) == (linear[name].bias is None)
        if layer.bias is not None:
            assert torch.equal(layer.bias, linear[name].bias)


def test_tied_weight_is_left_and_told() -> None:
    model = Model(tied=True)
    report = quantize_model(model, "mxfp4", skip=())
    assert report.skipped == {"lm_head": "its weight is tied to embedding.weight"}
    assert model.lm_head.weight is model.embedding.weight
    assert "lm_head: its weight is tied to embedding.weight" in str(report)
    assert "10 linear layers quantized, 1 left" in str(report)


def test_output_layer_of_its_own_is_quantized_when_asked() -> None:
    model = Model(tied=False)
    assert "lm_head" in quantize_model(model, "int8", skip=()).quantized
    assert isinstance(model.lm_head, QuantLinear)


@pytest.mark.parametrize(
    ("only", "skip", "expected"),
    [
        (("mlp",), (), [n for n in LAYERS if ".mlp." in n]),
        (("layers.1",), ("gate",), [n for n in LAYERS if "s.1." in n and "gate" not in n]),
        (("layers.*.mlp.0",), (), [n for n in LAYERS if n.endswith("mlp.0")]),
        ((), ("layers.*.attention", "mlp.2", "lm_head"), [n for n in LAYERS if n[-1] in "0e"]),
        ((), ("gat", "ayers", "lm_head"), list(LAYERS)),
    ],
    ids=["component", "row", "star", "skip", "no-parts-of-components"],
)
def test_names(only: tuple[str, ...], skip: tuple[str, ...], expected: list[str]) -> None:
    model = Model(tied=False)
    report = quantize_model(model, "int4_g32", only=only, skip=skip)
    assert list(report.quantized) == expected
    kinds = _kinds(model)
    assert [name for name in kinds if kinds[name] is QuantLinear] == expected
    assert set(report.quantized) | set(report.skipped) == set(kinds)


def test_module_in_two_places_is_one_layer_in_both() -> None:
    model = Model(tied=False)
    model.again = model.layers[0].mlp
    model.layers[1].gate = model.layers[0].gate
    report = quantize_model(model, "int8")
    assert "layers.0.gate" in report.quantized
    assert "layers.1.gate" not in report.quantized
    assert model.layers[1].gate is model.layers[0].gate
    assert isinstance(model.again[0], QuantLinear)


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def _tie_two(model: Model) -> None:
    model.layers[0].attention["out"].weight = model.layers[1].attention["query"].weight


def _hook(model: Model) -> None:
    model.layers[0].attention["out"].register_forward_pre_hook(lambda *_: None)


def _normalize(model: Model) -> None:
    nn.utils.parametrizations.weight_norm(model.layers[0].attention["out"])


def _subclass(model: Model) -> None:
    model.layers[0].attention["out"] = Scaled(SIZE, SIZE)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_tie_two, "tied to layers.1.attention.query.weight"),
        (_hook, "it has hooks"),
        (_normalize, "it is a ParametrizedLinear"),
        (_subclass, "it is a Scaled"),
    ],
)
def test_what_a_replacement_would_change_is_left(change, reason: str) -> None:
    model = Model()
    change(model)
    before = model.layers[0].attention["out"]
    report = quantize_model(model, "int8")
    assert reason in report.skipped["layers.0.attention.out"]
    assert model.layers[0].attention["out"] is before


def _unfit(model: Model) -> Model:
    """No weight below 0, but for one layer."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.abs_()
    model.layers[1].mlp[0].weight.data.neg_()
    return model


def test_layer_that_the_format_cannot_hold_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"the layer layers\.1\.mlp\.0: .*negative"):
        quantize_model(_unfit(Model()), "uint4_g32")


def test_layer_that_the_format_cannot_hold_is_skipped_when_asked() -> None:
    model = _unfit(Model())
    report = quantize_model(model, "uint4_g32", unsupported="skip")
    assert "negative" in report.skipped["layers.1.mlp.0"]
    assert report.quantized == tuple(name for name in LAYERS if name != "layers.1.mlp.0")
    assert type(model.layers[1].mlp[0]) is nn.Linear


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((nn.Linear(4, 4),), UnsupportedError, "QuantLinear.from_linear"),
        ((nn.Linear(4, 4).weight,), WrongTypeError, "Parameter"),
        ((Model(), "int5_gg"), UnsupportedError, "int5_gg"),
        ((Model(), "int8", "int8_tensor"), UnsupportedError, "known beforehand"),
        ((Model(), None), UnsupportedError, "no string"),
    ],
    ids=["a-layer", "a-tensor", "format", "activation", "no-format"],
)
def test_refuses(arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quantize_model(*arguments)


@pytest.mark.parametrize(
    "options",
    [
        {"skip": "lm_head"},
        {"only": ("mlp", 3)},
        {"skip": ("",)},
        {"unsupported": "no"},
        {"only": ("gat",)},
        {"skip": None},
        {"method": "nearest", "unsupported": "skip"},
        {"device": "sim:t4"},
        {"device": 3.5},
    ],
    ids=str,
)
def test_refuses_options_and_changes_nothing(options: dict) -> None:
    model = Model()
    before = _kinds(model)
    with pytest.raises(UnsupportedError, match=next(iter(options))):
        quantize_model(model, **options)
    assert _kinds(model) == before


def test_activations_that_no_layer_takes_are_no_fault_of_a_layer() -> None:
    with pytest.raises(UnsupportedError, match="known beforehand"):
        quantize_model(Model(), "int8", "int8_tensor", unsupported="skip")


def test_name_that_skips_nothing_is_told() -> None:
    model = Model(tied=False)
    report = quantize_model(model, "int8", skip=("embedding", "gate", "mpl.*"))
    assert report.notes == tuple(
        f"skip: {entry!r} names no linear layer" for entry in ("embedding", "mpl.*")
    )
    assert "'mpl.*' names no linear layer" in str(report)
    del model.lm_head
    assert quantize_model(model, "int8").notes == ()


@pytest.mark.parametrize("norm_first", [False, True])
def test_layers_whose_weight_others_look_at_are_called(norm_first: bool) -> None:
    """torch's encoders multiply by the weights of their layers themselves where they can."""
    layer = nn.TransformerEncoderLayer(SIZE, 2, WIDE, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    report = quantize_model(model, "int8_g32")
    assert report.quantized == tuple(f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2))
    called = []
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            module.forward = lambda x, name=name, n=module.out_features: (
                called.append(name) or x.new_zeros(*x.shape[:-1], n)
            )
    with torch.no_grad():
        assert model(torch.ones(1, 3, SIZE)).shape == (1, 3, SIZE)
    assert called == list(report.quantized)


def test_weight_tells_what_modules_cast_to() -> None:
    model = Model(tied=False).to(torch.bfloat16)
    quantize_model(model, "int8")
    layer = model.layers[0].gate
    weight = layer.weight
    assert (weight.shape, weight.device.type) == ((2, SIZE), "cpu")
    assert weight.dtype == torch.bfloat16
    assert model.half().layers[0].gate.weight.dtype == torch.float16
    assert not isinstance(weight, torch.Tensor)
    assert not hasattr(weight, "data")
    assert "weight" not in layer.state_dict()


@pytest.mark.parametrize(
    "read",
    [
        lambda weight: weight.data,
        lambda weight: weight.float(),
        lambda weight: weight @ torch.ones(SIZE),
        lambda weight: nn.functional.linear(torch.ones(SIZE), weight),
    ],
)
def test_weight_that_is_read_names_its_layer(read) -> None:
    model = Model(tied=False)
    quantize_model(model, "int8")
    with pytest.raises(UnsupportedError, match=r"weight of layers\.1\.gate.*packed.*`skip`"):
        read(model.layers[1].gate.weight)


def test_dtype_of_packed_tensors_is_not_made_up() -> None:
    packed = humming.pack(humming.quantize(torch.ones(SIZE, SIZE), "int8"))
    layer = QuantLinear(packed)
    with pytest.raises(UnsupportedError, match=r"dtype of the weight.*Cast the layer"):
        layer.weight.dtype  # noqa: B018
    assert layer.to(torch.float16).weight.dtype == torch.float16
    assert QuantLinear(packed, activation="bf16").half().weight.dtype == torch.bfloat16


def test_activations_and_mode_are_passed_on() -> None:
    model = Model().eval()
    quantize_model(model, "int8", "int8")
    layer = model.layers[0].gate
    assert layer.activation_spec.name == "int8"
    assert not layer.training
    assert not any(isinstance(p, nn.Linear) for p in model.layers.modules())


def test_method_is_passed_on() -> None:
    model = Model()
    linear = model.layers[0].gate
    quantize_model(model, "int4_g32", method="mse")
    expected = humming.pack(humming.quantize(linear.weight, "int4_g32", method="mse"))
    assert model.layers[0].gate.packed.equals(expected)


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, int, int]] = []

    class Listener:
        def show(self, *told) -> None:
            shown.append(told)

        def hide(self) -> None:
            pass

    monkeypatch.setattr(progress, "PATIENCE_S", -1.0)
    monkeypatch.setattr(progress, "_REFRESH_S", 0.0)
    with progress.listening(Listener()):
        quantize_model(Model(), "int8")
    assert shown[-1] == ("quantizing to int8", len(LAYERS), len(LAYERS))
