"""Files of packed weights: exact round trips, mapped memory, and damage of every kind."""

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import humming
from humming import PackedWeight, QuantLinear
from humming.checkpoints.packed_reader import PackedFile
from humming.checkpoints.packed_writer import PackedWriter
from humming.errors import CheckpointError, UnsupportedError

N, K = 24, 136
FORMATS = (
    *("int4_g32", "uint3_g32_zp", "uint8_zp", "uint4_g64_fzp", "int8"),
    *("mxfp4", "nvfp4", "fp8_block128"),
)
NAME = "model.layers.0.mlp.up_proj"

fuzzed = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _weight(spec: str = "int4_g32", activation: str = "fp16") -> PackedWeight:
    return humming.pack(humming.quantize(torch.rand(N, K), spec), activation=activation)


def _layer() -> QuantLinear:
    """A layer with all that a layer can have."""
    return QuantLinear.from_quantized(
        humming.quantize(torch.randn(N, K), "nvfp4"),
        torch.randn(N).bfloat16(),
        activation="nvfp4",
        activation_scale=0.25,
        input_permutation=torch.randperm(K),
        input_scale=torch.rand(K).half(),
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, PackedWeight):
        return isinstance(other, PackedWeight) and one.equals(other)
    mine, theirs = one.state_dict(), other.state_dict()
    return (
        type(one) is type(other)
        and one.activation == other.activation
        and mine.keys() == theirs.keys()
        and all(
            mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name])
            for name in mine
        )
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "packed.safetensors"


def test_round_trip_is_exact(path: Path) -> None:
    layers = {f"weights.{spec}": _weight(spec) for spec in FORMATS}
    layers |= {"layer": _layer(), "plain": QuantLinear(_weight(), activation="bf16")}
    layers |= {'"quoted"\n\\ünï': QuantLinear(_weight("int8", "int8_asym"), activation="int8_asym")}
    tensors = {
        "embed.weight": torch.randn(7, 3).bfloat16(),
        "scalar": torch.tensor(2.5),
        "flags": torch.tensor([True, False, True]),
        "bytes": torch.randn(5).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
        "strided": torch.randn(6, 4).t(),
    }
    humming.save_packed(layers, path, tensors)
    found = humming.load_packed(path)
    assert found.keys() == layers.keys()
    assert all(_same(layers[name], found[name]) for name in layers)
    others = PackedFile(path).tensors
    assert set(others) == set(tensors)
    for name, tensor in tensors.items():
        assert (others[name].dtype, others[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(others[name], tensor)
    assert os.listdir(path.parent) == [path.name]


def test_what_is_asked_for_is_mapped_and_nothing_else(path: Path) -> None:
    """Odd sizes are between the layers; all tensors that kernels read still begin where they must,
    so that none is copied."""
    layers = {str(i): QuantLinear(_weight("nvfp4"), torch.randn(N)) for i in range(3)}
    humming.save_packed(layers, path, {"odd": torch.zeros(7, dtype=torch.uint8)})
    with safe_open(path, "pt") as file:
        places = {name: file.get_tensor(name).data_ptr() for name in file.keys()}  # noqa: SIM118
    assert all(place % 16 == 0 for name, place in places.items() if name.endswith("codes"))
    file = PackedFile(path)
    one, again = file.layers["1"], file.layers["1"]
    assert one is not again
    assert one.codes.data_ptr() == again.codes.data_ptr(), "both are the mapped file"


def test_a_file_is_packed_once_for_every_device(path: Path) -> None:
    humming.save_packed({NAME: _weight()}, path)
    moved = humming.load_packed(path, "meta")[NAME]
    assert moved.codes.is_meta
    assert moved.spec == _weight().spec


def test_any_reader_of_safetensors_can_open_it(path: Path) -> None:
    humming.save_packed({NAME: _layer()}, path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert (metadata["format"], metadata["humming_packed"]) == ("pt", "1")
    described = json.loads(metadata["humming_layers"])
    parts = "codes scales second_scale bias input_permutation input_scale activation_scale"
    packed = _layer().packed.metadata()
    assert described == {NAME: {**packed, "activation": "nvfp4", "parts": parts}}


# --- writing -----------------------------------------------------------------------------------


@fuzzed
@given(names=st.sets(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=5))
def test_every_name_fits_the_header(names: set[str], path: Path) -> None:
    layer = _layer()
    layers = {f"layer {name}": layer for name in names}
    tensors = {f"tensor {name}": torch.ones(1, 2, 3, 4) for name in names}
    humming.save_packed(layers, path, tensors)
    assert set(PackedFile(path).layers) == set(layers)
    assert set(PackedFile(path).tensors) == set(tensors)


@pytest.mark.parametrize(
    ("save", "told"),
    [
        (lambda path: humming.save_packed({"a": torch.zeros(2)}, path), "Pack it with humming"),
        (lambda path: humming.save_packed({1: _weight()}, path), "a name is of type int"),
        (lambda path: humming.save_packed([_weight()], path), "the layers is of type list"),
        (lambda path: humming.save_packed({}, path.with_suffix(".bin")), "End its name"),
        (lambda path: humming.save_packed({}, path, {"a": 1}), "it is of type int"),
        (lambda path: humming.save_packed({"\ud800": _weight()}, path), "no Unicode text"),
        (
            lambda path: humming.save_packed({}, path, {"a": torch.zeros(2, dtype=torch.cfloat)}),
            "complex64",
        ),
        (lambda path: humming.save_packed({}, path, {"a": torch.zeros(2, device="meta")}), "meta"),
        (
            lambda path: humming.save_packed({"a": _weight()}, path, {"a.codes": torch.zeros(4)}),
            "another has this name",
        ),
        (
            lambda path: humming.save_packed({"a": _weight()}, path, {"a.bias": torch.zeros(4)}),
            "read as the bias of the layer 'a'",
        ),
    ],
)
def test_refuses_to_write_and_leaves_nothing(save: Any, told: str, path: Path) -> None:
    with pytest.raises(UnsupportedError, match=told):
        save(path)
    assert not os.listdir(path.parent)


def test_a_file_that_was_there_stays_when_writing_fails(path: Path) -> None:
    humming.save_packed({NAME: _weight()}, path)
    before = path.read_bytes()

    def interrupted() -> None:
        with PackedWriter(path, [NAME], []) as writer:
            writer.add(NAME, _weight())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_names_that_were_not_announced_may_not_fit(path: Path) -> None:
    def write() -> None:
        with PackedWriter(path, [], []) as writer:
            for index in range(20):
                writer.add_tensor(f"{index}" * 40, torch.zeros(4))

    with pytest.raises(UnsupportedError, match="name all that is saved"):
        write()
    assert not os.listdir(path.parent)


# --- damage ------------------------------------------------------------------------------------


def _tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def _described(metadata: dict[str, str], **changed: Any) -> dict[str, str]:
    layers = json.loads(metadata["humming_layers"])
    layers[NAME] |= changed
    layers[NAME] = {key: value for key, value in layers[NAME].items() if value != "drop"}
    return _with_layers(metadata, json.dumps(layers))


def _with_layers(metadata: dict[str, str], text: str) -> dict[str, str]:
    crc = f"{zlib.crc32(text.encode()):08x}"
    return {**metadata, "humming_layers": text, "humming_layers_crc32": crc}


DAMAGE: dict[str, tuple[Any, str]] = {
    "no-metadata": (lambda t, m: (t, {}), "holds no packed weights"),
    "version": (lambda t, m: (t, {**m, "humming_packed": "2"}), "version '2'; 1 is read"),
    "damaged": (
        lambda t, m: (t, {**m, "humming_layers": m["humming_layers"].replace("g32", "g33")}),
        "checksum",
    ),
    "no-checksum": (
        lambda t, m: (t, {k: v for k, v in m.items() if "crc" not in k}),
        "checksum",
    ),
    "no-layers": (lambda t, m: (t, _with_layers(m, "[")), "are no JSON"),
    "deep": (lambda t, m: (t, _with_layers(m, "[" * 100_000)), "are no JSON"),
    "list": (lambda t, m: (t, _with_layers(m, "[1]")), "no object"),
    "number": (lambda t, m: (t, _with_layers(m, '{"a": 1}')), "describe 'a' by 1"),
    "key": (lambda t, m: (t, _described(m, colour="red")), "colour"),
    "lacking": (lambda t, m: (t, _described(m, n="drop")), "possible: texts for"),
    "integer": (lambda t, m: (t, _described(m, n=24)), "'n': 24"),
    "format": (lambda t, m: (t, _described(m, weight="int4_h32")), "int4_h32"),
    "other-format": (lambda t, m: (t, _described(m, weight="int8_g32")), "its codes are"),
    "huge": (lambda t, m: (t, _described(m, n="9" * 30)), "its codes are"),
    "long": (lambda t, m: (t, _described(m, n="9" * 9000)), "digits"),
    "negative": (lambda t, m: (t, _described(m, k="-1")), "empty"),
    "bits": (lambda t, m: (t, _described(m, operand_bits="7")), "operands of 7 bits"),
    "activation": (lambda t, m: (t, _described(m, activation="int9x")), "int9x"),
    "operand": (
        lambda t, m: (t, _described(m, activation="int8")),
        r"packed for 16-bit operands: activations int8 are multiplied by one packed for 8 bits",
    ),
    "alone": (lambda t, m: (t, _described(m, activation="drop")), "described as a weight alone"),
    "no-codes": (
        lambda t, m: ({k: v for k, v in t.items() if "codes" not in k}, m),
        "codes is missing; its parts are codes, scales, bias",
    ),
    "shape": (
        lambda t, m: ({**t, f"{NAME}.codes": t[f"{NAME}.codes"][:1].clone()}, m),
        "its codes are torch.int32",
    ),
    "dtype": (
        lambda t, m: ({**t, f"{NAME}.scales": t[f"{NAME}.scales"].float()}, m),
        "its scales are torch.float32",
    ),
    "unlisted": (
        lambda t, m: ({**t, f"{NAME}.zeros": t[f"{NAME}.scales"]}, m),
        "zeros is there, but not in its description",
    ),
    "zeros": (
        lambda t, m: (
            {**t, f"{NAME}.zeros": t[f"{NAME}.scales"]},
            _described(m, parts="codes scales bias zeros"),
        ),
        "has none",
    ),
    "part": (lambda t, m: (t, _described(m, parts="codes scales bias colour")), "'colour'"),
    "bias": (lambda t, m: ({**t, f"{NAME}.bias": torch.ones(3)}, m), r"bias \[3\]"),
    "permutation": (
        lambda t, m: (
            {**t, f"{NAME}.input_permutation": torch.zeros(K).long()},
            _described(m, parts="codes scales bias input_permutation"),
        ),
        "each of them once",
    ),
    "static": (
        lambda t, m: (
            {**t, f"{NAME}.activation_scale": torch.ones(1)},
            _described(m, parts="codes scales bias activation_scale"),
        ),
        "of 16 bits",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_names_file_and_layer(kind: str, path: Path) -> None:
    layer = QuantLinear(_weight(), torch.randn(N))
    humming.save_packed({NAME: layer}, path)
    change, told = DAMAGE[kind]
    tensors, metadata = change(*_tensors(path))
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors, path, metadata)
    with pytest.raises(CheckpointError, match=told) as raised:
        humming.load_packed(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("spec", FORMATS)
def test_scales_that_are_no_numbers_are_refused(spec: str, path: Path) -> None:
    humming.save_packed({NAME: _weight(spec)}, path)
    tensors, metadata = _tensors(path)
    scales = tensors[f"{NAME}.scales"] = tensors[f"{NAME}.scales"].clone()
    one_byte = scales.element_size() == 1
    scales.view(torch.uint8 if one_byte else scales.dtype)[0, 0, 3] = 255 if one_byte else torch.nan
    save_file(tensors, path, metadata)
    with pytest.raises(CheckpointError, match=rf"{NAME}.scales.*\[0, 0, 3\]"):
        humming.load_packed(path)


@pytest.mark.parametrize(
    ("spec", "part", "value"),
    [
        ("uint3_g32_zp", "zeros", 8),
        ("uint4_g64_fzp", "zeros", float("inf")),
        ("nvfp4", "second_scale", float("nan")),
    ],
)
def test_other_numbers_that_are_none_are_refused(
    spec: str, part: str, value: float, path: Path
) -> None:
    humming.save_packed({NAME: _weight(spec)}, path)
    tensors, metadata = _tensors(path)
    changed = tensors[f"{NAME}.{part}"] = tensors[f"{NAME}.{part}"].clone()
    changed.view(-1)[0] = value
    save_file(tensors, path, metadata)
    with pytest.raises(CheckpointError, match=f"{NAME}.{part}"):
        humming.load_packed(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "packed.safetensors"
    layers = {NAME: _layer(), "other": _weight("uint3_g32_zp")}
    humming.save_packed(layers, path, {"norm": torch.ones(3)})
    return path


def _header_end(data: bytes) -> int:
    """Where the header ends that says something; spaces follow."""
    (room,) = struct.unpack("<Q", data[:8])
    return 8 + len(data[8 : 8 + room].rstrip())


@fuzzed
@given(data=st.data())
def test_truncated_files_are_refused(data: st.DataObject, whole: Path, path: Path) -> None:
    bytes_ = whole.read_bytes()
    path.write_bytes(bytes_[: data.draw(st.integers(0, len(bytes_) - 1))])
    with pytest.raises(CheckpointError, match=r"packed\.safetensors"):
        humming.load_packed(path)


@fuzzed
@given(data=st.data())
def test_flipped_bits_of_the_header_are_errors_or_change_nothing(
    data: st.DataObject, whole: Path, path: Path
) -> None:
    bytes_ = bytearray(whole.read_bytes())
    place = data.draw(st.integers(0, _header_end(bytes_) - 1))
    bytes_[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(bytes_)
    expected = humming.load_packed(whole)
    try:
        found = humming.load_packed(path)
    except CheckpointError as error:
        told = str(error)
    else:
        told = path.name
        assert found.keys() == expected.keys()
        assert all(_same(expected[name], found[name]) for name in expected)
    assert path.name in told


_DTYPES = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32)


@fuzzed
@given(data=st.data())
def test_tensors_of_any_other_kind_are_refused(
    data: st.DataObject, whole: Path, path: Path
) -> None:
    tensors, metadata = _tensors(whole)
    parts = sorted(name for name in tensors if name != "norm")
    name = data.draw(st.sampled_from(parts))
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
    made = torch.ones(shape, dtype=data.draw(st.sampled_from(_DTYPES)))
    assume((made.dtype, made.shape) != (tensors[name].dtype, tensors[name].shape))
    # A single number is one in any shape.
    assume(not (name.endswith("activation_scale") and made.numel() == 1))
    whole_of = humming.load_packed(whole)
    save_file({**{n: t.clone() for n, t in tensors.items()}, name: made}, path, metadata)
    layer = NAME if name.startswith(NAME) else "other"
    with pytest.raises(CheckpointError, match=rf"packed\.safetensors: {layer}"):
        humming.load_packed(path)
    other = ({*whole_of} - {layer}).pop()
    assert _same(PackedFile(path).layers[other], whole_of[other])


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 64, b"{}", struct.pack("<Q", 2)])
def test_other_files_are_refused(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read as a safetensors file"):
        humming.load_packed(path)
    assert not PackedFile.recognizes(path)


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    for path, told in ((tmp_path, "holds no tensors"), (tmp_path / "none", "does not exist")):
        with pytest.raises(CheckpointError, match=told):
            humming.load_packed(path)
        assert not PackedFile.recognizes(path)


def test_a_folder_with_no_other_file_is_the_file(path: Path) -> None:
    humming.save_packed({NAME: _weight()}, path)
    (path.parent / "config.json").write_text("{}")
    assert humming.load_packed(path.parent).keys() == {NAME}
    assert humming.load_model(path.parent).layers.keys() == {NAME}
    for place in (path, path.parent):
        with pytest.raises(CheckpointError, match="holds packed weights; possible"):
            humming.load_linear(place, NAME)


def test_names_that_are_not_there(whole: Path) -> None:
    file = PackedFile(whole)
    assert "missing" not in file.layers
    assert file.layers.get("missing") is None
    with pytest.raises(
        CheckpointError, match=r"packed.safetensors: the layer 'missing' is not there"
    ):
        file.layers["missing"]
