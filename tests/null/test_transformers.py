"""transformers on humming: which layers become quantized ones, from which files, and what is told.

Nothing is multiplied here: layers are compared with those that humming makes by itself.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_writers import compress

import humming
from humming import QuantLinear
from humming.errors import CheckpointError, UnsupportedError

transformers = pytest.importorskip("transformers")
ours = pytest.importorskip("humming.integrations.transformers", exc_type=ImportError)
HummingConfig, enable = ours.HummingConfig, ours.enable

BLOCK = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _model(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    config = transformers.LlamaConfig(**{**SIZES, "attention_bias": True, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def _load(path: Path, *what: Any, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, *what, **options)


def _layers(model: Any) -> dict[str, QuantLinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}


def _same(one: QuantLinear, other: QuantLinear) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return (
        mine.keys() == theirs.keys()
        and one.activation_spec == other.activation_spec
        and all(
            tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name])
            for name, tensor in mine.items()
        )
    )


@pytest.fixture
def plain(tmp_path: Path) -> tuple[Path, Any]:
    """A model that is not quantized, and its folder."""
    model = _model()
    model.save_pretrained(tmp_path / "plain")
    return tmp_path / "plain", model


# -- quantized while it is loaded -----------------------------------------------------------------


@pytest.mark.parametrize("formats", [("mxfp4", None), ("int4_g64", None), ("int8", "int8")])
def test_is_quantized_while_it_is_loaded(formats: tuple, plain: tuple[Path, Any]) -> None:
    path, model = plain
    loaded, told = _load(
        path, quantization_config=HummingConfig(*formats), output_loading_info=True
    )
    assert not any(told.values()), told
    layers = _layers(loaded)
    assert len(layers) == 2 * len(BLOCK)
    for name, layer in layers.items():
        assert _same(layer, QuantLinear.from_linear(model.get_submodule(name), *formats))
    assert loaded.hf_quantizer.report.quantized == tuple(layers)
    assert loaded.hf_quantizer.report.skipped == {"lm_head": "'lm_head' is to be skipped"}
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert not any(parameter.is_meta for parameter in loaded.parameters())
    assert loaded.config.quantization_config.weight == humming.WeightSpec.parse(formats[0]).name


def test_tied_output_layer_stays_tied(tmp_path: Path) -> None:
    _model(tie_word_embeddings=True).save_pretrained(tmp_path)
    loaded = _load(tmp_path, quantization_config=HummingConfig("mxfp4", skip=()))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    why = loaded.hf_quantizer.report.skipped["lm_head"]
    assert why == "its weight is tied to model.embed_tokens.weight"


def test_names_are_passed_on(plain: tuple[Path, Any]) -> None:
    config = HummingConfig("int8", only=("mlp", "lm_head"), skip=("layers.1",))
    layers = _layers(_load(plain[0], quantization_config=config))
    assert set(layers) == {"lm_head", *(f"model.layers.0.mlp.{name}" for name in BLOCK[4:])}


def test_parts_of_a_name_are_loaded_too(plain: tuple[Path, Any]) -> None:
    """An encoder from the file of a whole model, whose names begin with another word."""
    config = HummingConfig("mxfp4")
    loaded = transformers.AutoModel.from_pretrained(plain[0], quantization_config=config)
    assert len(_layers(loaded)) == 2 * len(BLOCK)


def test_layer_that_the_format_cannot_hold(tmp_path: Path) -> None:
    model = _model()
    for name in _linear_names(model):
        model.get_submodule(name).weight.data.abs_()
    name = "model.layers.1.mlp.up_proj"
    model.get_submodule(name).weight.data.neg_()
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=rf"the layer {name}: .*negative"):
        _load(tmp_path, quantization_config=HummingConfig("uint4_g32"))
    loaded = _load(tmp_path, quantization_config=HummingConfig("uint4_g32", unsupported="skip"))
    assert "negative" in loaded.hf_quantizer.report.skipped[name]
    assert torch.equal(loaded.get_submodule(name).weight, model.get_submodule(name).weight)
    assert len(_layers(loaded)) == 2 * len(BLOCK) - 1


def _linear_names(model: Any) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization_config": HummingConfig()}, "does not say to which format"),
        ({"dtype": torch.float32}, "dtype=torch.bfloat16"),
        ({"device_map": {"model": "cpu", "lm_head": "disk"}}, "cpu, disk"),
        ({"quantization_config": HummingConfig("uint4_g64_fzp")}, "uint4_g64_fzp x bfloat16"),
    ],
    ids=["no-format", "dtype", "disk", "no-product"],
)
def test_what_cannot_run_is_refused_on_loading(
    options: dict, message: str, plain: tuple[Path, Any]
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        _load(plain[0], **{"quantization_config": HummingConfig("mxfp4"), **options})


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}], ids=str)
def test_device_map(device_map: Any, plain: tuple[Path, Any], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    placed = {"device_map": device_map, "max_memory": {"cpu": 1 << 30}}
    loaded = _load(plain[0], quantization_config=HummingConfig("mxfp4"), **placed)
    loaded.save_pretrained(tmp_path / "saved")
    for model in (loaded, _load(tmp_path / "saved", **placed)):
        assert len(_layers(model)) == 2 * len(BLOCK)
        assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}


def test_room_is_reserved_by_the_size_of_packed_weights(plain: tuple[Path, Any]) -> None:
    """What a device map is made from, before anything is read."""
    seen = {}

    def see(quantizer: Any, weight_conversions: list[Any], model: Any = None) -> Any:
        made = update(quantizer, weight_conversions, model)
        seen.update({name: of.shape for name, of in quantizer._model.named_buffers()})
        return made

    _load(plain[0], quantization_config=HummingConfig("mxfp4")).save_pretrained(plain[0] / "saved")
    update = ours.HummingHfQuantizer.update_weight_conversions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours.HummingHfQuantizer, "update_weight_conversions", see)
        model = _load(plain[0] / "saved")
    for name, layer in _layers(model).items():
        (size,) = seen[f"{name}.place"]
        assert size == sum(of.nbytes for of in layer.state_dict().values())


# -- checkpoints of other methods -----------------------------------------------------------------


def _compressed(folder: Path, preset: str, **changes: Any) -> None:
    model = _model(**changes)
    compressor = compress(model, preset, ignore=("lm_head",))
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


@pytest.mark.parametrize("preset", ["W4A16", "W8A8", "FP8", "FP8_BLOCK", "NVFP4", "MXFP4A16"])
def test_checkpoint_of_compressed_tensors(preset: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    _compressed(tmp_path, preset)
    with enable():
        loaded, told = _load(tmp_path, output_loading_info=True)
    assert not any(told.values()), told
    layers = _layers(loaded)
    assert len(layers) == 2 * len(BLOCK)
    for name, layer in layers.items():
        expected = humming.load_linear(tmp_path, name).to_module().to(torch.bfloat16)
        assert _same(layer, expected)
    assert loaded.hf_quantizer.report.skipped == {
        "lm_head": "it is not quantized in the checkpoint"
    }


def test_checkpoint_of_auto_round(tmp_path: Path) -> None:
    packer = pytest.importorskip("auto_round_extension.torch.qlinear_torch_zp")
    model = _model(torch.float16)
    state = {n: t for n, t in model.state_dict().items() if not n.endswith("proj.weight")}
    for name in _linear_names(model):
        if name == "lm_head":
            continue
        layer = model.get_submodule(name)
        scales = layer.weight.data.float().unflatten(1, (-1, 32)).abs().amax(-1) / 7
        packed = packer.QuantLinear(4, 32, layer.in_features, layer.out_features, bias=False)
        packed.pack(layer, scales, 8, device="cpu")
        state |= {f"{name}.{part}": tensor for part, tensor in packed.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=state)
    described = json.loads((tmp_path / "config.json").read_text())
    described["quantization_config"] = {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "data_type": "int",
    }
    (tmp_path / "config.json").write_text(json.dumps(described))
    with enable("auto-round"):
        loaded, told = _load(tmp_path, output_loading_info=True)
    assert not any(told.values()), told
    layers = _layers(loaded)
    assert len(layers) == 2 * len(BLOCK)
    for name, layer in layers.items():
        assert _same(layer, humming.load_linear(tmp_path, name).to_module())


def test_exports_of_auto_round_hold_the_same_numbers(tmp_path: Path) -> None:
    """One model, rounded by AutoRound, in the layouts of four methods."""
    auto_round = pytest.importorskip("auto_round")
    tokenizers = pytest.importorskip("tokenizers")
    model = _model(torch.float16, attention_bias=False)
    model.save_pretrained(tmp_path / "plain")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="b")
    words.save_pretrained(tmp_path / "plain")
    numbers: dict[str, torch.Tensor] = {}
    for layout in ("auto_round", "auto_gptq", "auto_awq", "llm_compressor"):
        path = tmp_path / layout
        how = {"scheme": "W4A16", "group_size": 32, "iters": 0, "disable_opt_rtn": True}
        rounding = auto_round.AutoRound(_load(tmp_path / "plain"), words, **how)
        rounding.quantize_and_save(str(path), format=layout)
        (stored,) = {config.parent for config in path.rglob("config.json")}
        with enable():
            loaded, told = _load(stored, output_loading_info=True)
        assert not any(told.values()), told
        layers = _layers(loaded)
        assert len(layers) == 2 * len(BLOCK)
        for name, layer in layers.items():
            read = humming.reference.dequantize(humming.unpack(layer.packed))
            assert torch.equal(numbers.setdefault(name, read), read), layout
            difference = read - model.get_submodule(name).weight
            assert difference.norm() < 0.2 * read.norm()


def test_base_model_from_the_file_of_a_whole_one(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    _compressed(tmp_path, "W4A16")
    with enable():
        loaded = transformers.AutoModel.from_pretrained(tmp_path)
    assert set(_layers(loaded)) == {
        f"layers.{i}.{'self_attn' if name in BLOCK[:4] else 'mlp'}.{name}"
        for i in range(2)
        for name in BLOCK
    }


def test_layer_that_is_placed_by_itself_keeps_its_hook(tmp_path: Path) -> None:
    """On several devices accelerate moves the inputs of each entry of the map."""
    pytest.importorskip("compressed_tensors")
    hooks = pytest.importorskip("accelerate.hooks")
    model = _model()
    compressor = compress(model, "W4A16")
    model.save_pretrained(tmp_path)
    compressor.update_config(str(tmp_path))
    # Two spellings of a device count as two.
    places = {"model": "cpu", "lm_head": torch.device("cpu")}
    with enable():
        loaded = _load(tmp_path, device_map=places)
    assert isinstance(loaded.lm_head, QuantLinear)
    assert isinstance(loaded.lm_head._hf_hook, hooks.AlignDevicesHook)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_and_notes_of_a_checkpoint(value: float, tmp_path: Path) -> None:
    """A bias of zeros that the model does not expect is none; what a layer contradicts is told."""
    from safetensors.torch import load_file, save_file

    pytest.importorskip("compressed_tensors")
    _compressed(tmp_path, "W8A8")
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj"
    tensors = load_file(file)
    tensors[f"{name}.bias"] = torch.full((tensors[f"{name}.weight"].shape[0],), value)
    tensors[f"{name}.checksum"] = torch.zeros(3)
    save_file(tensors, file, {"format": "pt"})
    with enable():
        loaded = _load(tmp_path)
    bias = loaded.get_submodule(name).bias
    assert (bias is None) if value == 0 else bool((bias == value).all())
    notes = loaded.hf_quantizer.report.notes
    assert f"{name}: the tensor {name}.checksum is not used" in notes
    assert any("it has one, the model none" in note for note in notes) == (value != 0)


def test_layer_of_another_size_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    _compressed(tmp_path, "W4A16")
    path = tmp_path / "config.json"
    described = json.loads(path.read_text())
    described["intermediate_size"] = 384
    path.write_text(json.dumps(described))
    with enable(), pytest.raises(CheckpointError, match=r"\[128, 256\].*\[128, 384\]"):
        _load(tmp_path)


def test_experts_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    config = transformers.MixtralConfig(**SIZES, num_local_experts=2)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
        tmp_path
    )
    from safetensors.torch import load_file, save_file

    state = load_file(tmp_path / "model.safetensors")
    for name in [name for name in state if ".experts." in name]:
        weight = state.pop(name)
        module = name.removesuffix(".weight")
        state[f"{module}.weight"] = weight.to(torch.float8_e4m3fn)
        state[f"{module}.weight_scale"] = torch.ones(len(weight), 1, dtype=torch.bfloat16)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    described = json.loads((tmp_path / "config.json").read_text())
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    group = {"targets": ["re:.*experts.*"], "weights": weights, "input_activations": None}
    described["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }
    (tmp_path / "config.json").write_text(json.dumps(described))
    with enable(), pytest.raises(UnsupportedError, match=r"experts.*linear layer of its own"):
        _load(tmp_path)


# -- saved, and loaded again ----------------------------------------------------------------------


def _saved_again(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    loaded, told = _load(folder, output_loading_info=True)
    assert not any(told.values()), told
    return loaded


@pytest.mark.parametrize("formats", [("mxfp4", None), ("uint4_g32_zp", "bf16"), ("int8", "int8")])
def test_saved_model_is_the_same(formats: tuple, plain: tuple[Path, Any], tmp_path: Path) -> None:
    model = _load(plain[0], quantization_config=HummingConfig(*formats))
    again = _saved_again(model, tmp_path / "saved")
    before, after = _layers(model), _layers(again)
    assert before.keys() == after.keys()
    assert all(_same(before[name], after[name]) for name in before)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])


@pytest.mark.parametrize("preset", ["W4A16", "FP8", "NVFP4"])
def test_saved_model_of_another_method_is_the_same(preset: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    _compressed(tmp_path / "compressed", preset)
    with enable():
        model = _load(tmp_path / "compressed")
    again = _saved_again(model, tmp_path / "saved")
    before, after = _layers(model), _layers(again)
    assert before.keys() == after.keys()
    assert all(_same(before[name], after[name]) for name in before)


def test_damaged_saved_model_is_refused(plain: tuple[Path, Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    _load(plain[0], quantization_config=HummingConfig("mxfp4")).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.0.mlp.up_proj.scales"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj.*scales"):
        _load(tmp_path)


def test_dequantized_model_has_the_same_weights(plain: tuple[Path, Any]) -> None:
    model = _load(plain[0], quantization_config=HummingConfig("nvfp4"))
    packed = {name: layer.packed for name, layer in _layers(model).items()}
    dense = model.dequantize()
    assert not _layers(dense)
    for name, weight in packed.items():
        exact = humming.reference.dequantize(humming.unpack(weight), torch.bfloat16)
        assert torch.equal(dense.get_submodule(name).weight, exact)


# -- what transformers knows of it ----------------------------------------------------------------


def test_other_methods_are_taken_over_and_given_back() -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    before = dict(AUTO_QUANTIZER_MAPPING)
    with enable("gptq"):
        assert AUTO_QUANTIZER_MAPPING["gptq"] is ours.HummingHfQuantizer
        assert AUTO_QUANTIZER_MAPPING["awq"] is before["awq"]
    assert before == AUTO_QUANTIZER_MAPPING
    undo = enable()
    assert set(ours.OTHER_METHODS) <= {
        name for name, of in AUTO_QUANTIZER_MAPPING.items() if of is ours.HummingHfQuantizer
    }
    undo.close()
    assert before == AUTO_QUANTIZER_MAPPING


@pytest.mark.parametrize("method", ours.OTHER_METHODS)
def test_methods_that_are_taken_over_are_read(method: str) -> None:
    from humming.checkpoints.methods import METHODS

    assert any(reader.recognizes({"quant_method": method}) for reader in METHODS)


def test_unknown_method_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="aqlm"):
        enable("aqlm")


@pytest.mark.parametrize("version", ["4.57.6", "5.8.1", "6.0.0.dev0"])
def test_other_versions_are_refused(version: str) -> None:
    from humming.integrations.transformers_api import check_version

    with pytest.raises(ImportError, match=rf"5\.9 or later, before 6.*{version}"):
        check_version(version)


def test_absent_library_is_said_so() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\nimport humming.integrations.transformers\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: humming.integrations.transformers needs transformers" in done.stderr
