"""Where tensors come from: files, indexes, mappings, and everything that is wrong with them."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from humming.checkpoints.tensors import INDEX, TensorSource, matrices
from humming.errors import CheckpointError

TENSORS = {
    "a.weight": torch.randn(4, 6),
    "a.scale": torch.randn(4, 1).to(torch.float8_e4m3fn),
    "b.qweight": torch.randint(-(1 << 31), (1 << 31) - 1, (3, 5), dtype=torch.int32),
    "norm.weight": torch.randn(6).to(torch.bfloat16),
}


def _sharded(folder: Path) -> Path:
    """A folder with two files and their index."""
    save_file(
        {"a.weight": TENSORS["a.weight"], "a.scale": TENSORS["a.scale"]}, folder / "1.safetensors"
    )
    rest = {name: TENSORS[name] for name in ("b.qweight", "norm.weight")}
    save_file(rest, folder / "2.safetensors")
    placed = {name: ("1" if name.startswith("a.") else "2") + ".safetensors" for name in TENSORS}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


def _same(source: TensorSource) -> None:
    assert sorted(source.names) == sorted(TENSORS)
    for name, expected in TENSORS.items():
        assert name in source
        assert source.shape(name) == tuple(expected.shape)
        assert source.dtype(name) == expected.dtype
        found = source.get(name)
        assert found.dtype == expected.dtype
        assert torch.equal(found.float(), expected.float())
    assert matrices(source) == ["a", "b"]


def test_the_same_tensors_from_everywhere(tmp_path: Path) -> None:
    _same(TensorSource(TENSORS))
    folder = _sharded(tmp_path)
    _same(TensorSource.open(folder))
    _same(TensorSource.open(folder / INDEX))
    (folder / INDEX).unlink()
    _same(TensorSource.open(folder))
    save_file(TENSORS, tmp_path / "whole.safetensors")
    _same(TensorSource.open(tmp_path / "whole.safetensors"))


def test_an_index_places_what_two_files_hold(tmp_path: Path) -> None:
    _sharded(tmp_path)
    save_file({"a.weight": torch.zeros(1), "more": torch.zeros(1)}, tmp_path / "2b.safetensors")
    _same(TensorSource.open(tmp_path))
    (tmp_path / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"'a\.weight' is in 1\.safetensors and in 2b"):
        TensorSource.open(tmp_path)


@pytest.mark.parametrize(
    ("index", "told"),
    [
        ("", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[]", "'weight_map'"),
        ('{"weight_map": []}', "'weight_map'"),
        ('{"weight_map": {}}', "'weight_map'"),
        ('{"weight_map": {"a": 1}}', "beside it"),
        ('{"weight_map": {"a": "../1.safetensors"}}', "beside it"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "beside it"),
        ('{"weight_map": {"a": "1.bin"}}', "beside it"),
        ('{"weight_map": {"a": "3.safetensors"}}', "3.safetensors cannot be read"),
        ('{"weight_map": {"c.weight": "1.safetensors"}}', "'c.weight' in 1.safetensors, which"),
        ('{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}', "'a' stands twice"),
        ('{"weight_map": {"a": "1.safetensors\\u0000"}}', "beside it"),
    ],
)
def test_an_index_that_lies(tmp_path: Path, index: str, told: str) -> None:
    (_sharded(tmp_path) / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=told):
        TensorSource.open(tmp_path)


def test_missing_tensors_and_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no tensors"):
        TensorSource.open(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        TensorSource.open(tmp_path / "none.safetensors")
    for source in (TensorSource(TENSORS), TensorSource.open(_sharded(tmp_path))):
        for ask in (source.get, source.shape, source.dtype):
            with pytest.raises(CheckpointError, match="no tensor 'c'"):
                ask("c")


WHOLE = save(TENSORS)


@given(st.integers(0, len(WHOLE) - 1))
def test_truncated_files(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "cut.safetensors"
    path.write_bytes(WHOLE[:length])
    with pytest.raises(CheckpointError, match="cannot be read as a safetensors file"):
        TensorSource.open(path)


@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_damaged_files_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, place: int, flipped: int
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "damaged.safetensors"
    data = bytearray(WHOLE)
    data[place] ^= flipped
    path.write_bytes(data)
    try:
        source = TensorSource.open(path)
        for name in source.names:
            source.get(name)
    except CheckpointError as error:
        told = str(error)
    else:
        told = str(path)
    assert str(path) in told
