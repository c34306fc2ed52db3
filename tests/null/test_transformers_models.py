"""Models of many kinds on humming: parts of transformers that touch weights they do not own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import humming
from humming import QuantLinear
from humming.errors import UnsupportedError

transformers = pytest.importorskip("transformers")
ours = pytest.importorskip("humming.integrations.transformers", exc_type=ImportError)
HummingConfig = ours.HummingConfig

LLAMA = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
T5 = {"vocab_size": 128, "d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 1, "num_heads": 2}
ENCODER = {**LLAMA, "conv_dim": (32,), "conv_kernel": (3,), "conv_stride": (2,)}
ENCODER |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
MAMBA = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 128, "state_size": 8}
# Each initializes, in what holds a layer, the weight or the bias of that layer.
MODELS = {
    "t5": ("AutoModelForSeq2SeqLM", "T5Config", T5),
    "gated": ("AutoModelForSeq2SeqLM", "MT5Config", {**T5, "feed_forward_proj": "gated-gelu"}),
    "wav2vec2": ("AutoModelForCTC", "Wav2Vec2Config", ENCODER),
    "mamba": ("AutoModelForCausalLM", "MambaConfig", MAMBA),
}


def _random(model: Any) -> Any:
    """Biases are zero in a new model, as they would be if none were loaded."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def _llama(**changes: Any) -> Any:
    config = transformers.LlamaConfig(**{**LLAMA, **changes})
    return _random(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))


def _load(path: Path, *formats: str, **options: Any) -> Any:
    how = options.pop("how", {})
    if formats:
        options["quantization_config"] = HummingConfig(*formats, **how)
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options)


def _layers(model: Any) -> dict[str, QuantLinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}


def _change(folder: Path, change: Any) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("kind", MODELS)
def test_what_initializes_parts_leaves_layers_alone(kind: str, tmp_path: Path) -> None:
    auto, config, sizes = MODELS[kind]
    make = getattr(transformers, auto)
    model = _random(make.from_config(getattr(transformers, config)(**sizes), dtype=torch.bfloat16))
    model.save_pretrained(tmp_path / "plain")
    loaded = make.from_pretrained(
        tmp_path / "plain", quantization_config=HummingConfig("int8_g32", skip=())
    )
    loaded.save_pretrained(tmp_path / "packed")
    again = make.from_pretrained(tmp_path / "packed")
    assert _layers(loaded)
    for found in (loaded, again):
        assert _layers(found).keys() == _layers(loaded).keys()
        for name, layer in _layers(found).items():
            linear = model.get_submodule(name)
            expected = QuantLinear.from_linear(linear, "int8_g32")
            assert layer.packed.equals(expected.packed)
            assert linear.bias is None or torch.equal(layer.bias, linear.bias)


def test_sums_of_rows_are_those_of_the_weight(tmp_path: Path) -> None:
    """transformers takes buffers that are not stored for what it has to fill."""
    _llama().save_pretrained(tmp_path)
    for layer in _layers(_load(tmp_path, "int8", "int8_asym")).values():
        assert torch.equal(layer.row_sums, layer.packed.row_sums)


def test_bias_that_is_not_stored_is_initialized(tmp_path: Path) -> None:
    _llama(attention_bias=True).save_pretrained(tmp_path)
    name = "model.layers.0.self_attn.q_proj"
    _change(tmp_path, lambda state: state.pop(f"{name}.bias"))
    loaded = _load(tmp_path, "int8_g32")
    assert not loaded.get_submodule(name).bias.any()
    assert loaded.get_submodule(name.replace("q_proj", "k_proj")).bias.any()


def test_weight_that_is_not_stored_is_told(tmp_path: Path) -> None:
    _llama().save_pretrained(tmp_path)
    name = "model.layers.0.mlp.up_proj"
    _change(tmp_path, lambda state: state.pop(f"{name}.weight"))
    loaded = _load(tmp_path, "int8_g32")
    report = loaded.hf_quantizer.report
    assert report.skipped[name] == "the checkpoint has no weight for it"
    assert name not in report.quantized
    assert type(loaded.get_submodule(name)) is torch.nn.Linear


def test_weight_of_another_size_is_left_to_transformers(tmp_path: Path) -> None:
    _llama().save_pretrained(tmp_path)
    name = "model.layers.0.mlp.up_proj"
    _change(tmp_path, lambda state: state.update({f"{name}.weight": torch.ones(8, 64)}))
    with pytest.raises(RuntimeError, match="size"):
        _load(tmp_path, "int8_g32")
    loaded = _load(tmp_path, "int8_g32", ignore_mismatched_sizes=True)
    assert "[8, 64]" in loaded.hf_quantizer.report.skipped[name]
    assert type(loaded.get_submodule(name)) is torch.nn.Linear
    assert not loaded.get_submodule(name).weight.is_meta


def test_part_of_a_model_is_loaded_whatever_the_names(tmp_path: Path) -> None:
    """Names that were chosen for a whole model need not be those of a part."""
    _llama().save_pretrained(tmp_path / "plain")
    how = {"only": ("model.layers.0.mlp", "lm_head"), "skip": ("down_proj",)}
    _load(tmp_path / "plain", "int8_g32", how=how).save_pretrained(tmp_path / "packed")
    part = transformers.AutoModel.from_pretrained(tmp_path / "packed")
    assert set(_layers(part)) == {"layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"}
    (note,) = part.hf_quantizer.report.notes
    assert note.startswith("1 quantized layers of the checkpoint are none of the model's; ")
    assert "lm_head" in note


@pytest.mark.parametrize("what", ["only", "skip"])
@pytest.mark.parametrize("names", ["mlp", b"mlp", 3, ("",), (3,)], ids=str)
def test_names_are_no_letters(what: str, names: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"{what}=.*no sequence of names.*tuple"):
        HummingConfig("int8", **{what: names})


def test_name_that_skips_nothing_is_told(tmp_path: Path) -> None:
    _llama().save_pretrained(tmp_path)
    loaded = _load(tmp_path, "int8_g32", how={"skip": ("lm_head", "mpl")})
    assert loaded.hf_quantizer.report.notes == ("skip: 'mpl' names no linear layer",)
    assert "'mpl' names no linear layer" in str(loaded.hf_quantizer.report)


def test_unknown_method_is_refused_at_once() -> None:
    with pytest.raises(UnsupportedError, match=r"method='nearest'.*absmax"):
        HummingConfig("int8", method="nearest", unsupported="skip")


def test_module_that_reads_the_weight_itself_is_named() -> None:
    config = transformers.MambaConfig(**MAMBA)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    humming.quantize_model(model, "int8_g32")
    mixer = model.backbone.layers[0].mixer
    with pytest.raises(UnsupportedError, match=r"backbone\.layers\.0\.mixer\.dt_proj.*skip"):
        mixer.dt_proj.weight @ torch.ones(1)


def test_activations_that_no_layer_takes_are_refused_at_once() -> None:
    with pytest.raises(UnsupportedError, match="known beforehand"):
        HummingConfig("int8", "int8_tensor")


def test_unknown_key_of_a_configuration_tells_those_there_are() -> None:
    with pytest.raises(UnsupportedError, match=r"wght.*weight, activation, only"):
        HummingConfig.from_dict({"quant_method": "humming", "wght": "int8"})


@pytest.mark.parametrize("place", ["cuda", 0, "cuda:1"])
def test_absent_card_is_refused(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _llama().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=r"no CUDA device.*'cpu'"):
        _load(tmp_path, "int8", device_map={"": place})
