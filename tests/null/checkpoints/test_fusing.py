"""Layers that become one, and parts of layers: rows and columns are those of the whole, exactly."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import humming
from humming import ActivationSpec, QuantizedWeight
from humming.checkpoints.decisions import Linear
from humming.checkpoints.fusing import fuse
from humming.errors import CheckpointError, UnsupportedError
from humming.reference import dequantize

K = 256
FORMATS = (
    *("int4_g32", "uint4_g64_zp", "uint3_g32_fzp", "int8", "int8_tensor", "fp8_tensor", "mxfp4"),
    *("nvfp4", "fp8_block128", "fp8_block64x32", "float4e2m1_g16_se4m3_s2channel", "int5_tensor"),
)


def weight(spec: str, n: int = 128, k: int = K, size: float = 1.0) -> QuantizedWeight:
    return humming.quantize(torch.randn(n, k).add(0.2) * size, spec)


def linears(*weights: Any, **parts: Any) -> dict[str, Linear]:
    return {f"part{i}": Linear(weight, **parts) for i, weight in enumerate(weights)}


# --- layers that become one --------------------------------------------------------------------


@pytest.mark.parametrize("spec", FORMATS)
def test_rows_are_those_of_the_layers(spec: str) -> None:
    """Sizes differ, so that scales and second scales of whole tensors differ as well."""
    parts = [weight(spec, 128, K, 1.0), weight(spec, 64, K, 300.0), weight(spec, 64, K, 0.01)]
    fused = fuse(linears(*parts))
    assert isinstance(fused.weight, QuantizedWeight)
    assert torch.equal(dequantize(fused.weight), torch.cat([dequantize(part) for part in parts]))
    assert fused.weight.spec.dtype == parts[0].spec.dtype
    assert fused.weight.spec.scale_dtype == parts[0].spec.scale_dtype


@pytest.mark.parametrize("spec", ["fp8_tensor", "nvfp4"])
def test_what_is_the_same_stays_what_it_is(spec: str) -> None:
    one = weight(spec)
    fused = fuse(linears(one, one))
    assert fused.weight.spec == one.spec
    assert not fused.notes


def test_scales_of_a_tensor_join_those_of_rows() -> None:
    parts = weight("fp8_tensor"), weight("fp8", 40)
    fused = fuse(linears(*parts))
    assert fused.weight.spec.name == "fp8"
    assert torch.equal(dequantize(fused.weight), torch.cat([dequantize(part) for part in parts]))
    assert fused.notes == ("scales of whole tensors became scales of rows",)


@pytest.mark.parametrize("n", [192, 448, 100])
def test_blocks_that_straddle_layers_become_groups(n: int) -> None:
    """Gate and up of 192 rows in blocks of 128: the second block ends within the first layer."""
    parts = weight("fp8_block128", n, 320), weight("fp8_block128", n, 320, 100.0)
    fused = fuse(linears(*parts))
    assert fused.weight.spec.name == "fp8_g128"
    assert torch.equal(dequantize(fused.weight), torch.cat([dequantize(part) for part in parts]))
    aligned = fuse(linears(weight("fp8_block128", 256), weight("fp8_block128", n)))
    assert aligned.weight.spec.name == "fp8_block128", "only the last layer ends within a block"


def test_biases_and_notes() -> None:
    parts = linears(weight("int8", 32), weight("int8", 48), weight("int8", 16), notes=("of all",))
    parts["part0"] = replace(parts["part0"], bias=torch.randn(32).half())
    parts["part2"] = replace(parts["part2"], bias=torch.randn(16), notes=("of all", "of one"))
    fused = fuse(parts)
    expected = torch.cat([parts["part0"].bias, torch.zeros(48), parts["part2"].bias])
    assert torch.equal(fused.bias, expected)
    assert fused.notes == ("of all", "part2: of one")
    assert fuse(linears(weight("int8"), weight("int8"))).bias is None


def test_what_is_the_same_of_all_inputs_stays() -> None:
    inputs = {
        "input_permutation": torch.randperm(K),
        "input_scale": torch.rand(K),
        "activation": ActivationSpec.parse("fp8_tensor"),
        "activation_scale": torch.full((1, 1), 0.5),
    }
    fused = fuse(linears(weight("int4_g32"), weight("int4_g32"), **inputs))
    for name, value in inputs.items():
        found = getattr(fused, name)
        assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value


def test_plain_layers() -> None:
    parts = torch.randn(3, K), torch.randn(5, K)
    assert torch.equal(fuse(linears(*parts)).weight, torch.cat(parts))


_OTHER = weight("int4_g32")
_TWO_SCALES = weight("int8_tensor_s2channel")
_STATIC = {"activation": ActivationSpec.parse("fp8_tensor")}


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (Linear(_OTHER), Linear(weight("int4_g64")), "int4_g32 and int4_g64"),
        (Linear(_OTHER), Linear(weight("uint4_g32_zp")), "int4_g32 and uint4_g32_zp"),
        (Linear(_OTHER), Linear(weight("int4_g32_sbf16")), "int4_g32 and int4_g32_sbf16"),
        (Linear(_OTHER), Linear(torch.randn(4, K)), "int4_g32 and torch.float32"),
        (Linear(torch.randn(4, K).half()), Linear(torch.randn(4, K)), "float16 and torch.float32"),
        (Linear(_OTHER), Linear(weight("int4_g32", 8, 128)), "256 and 128 inputs"),
        (
            Linear(_TWO_SCALES),
            Linear(replace(_TWO_SCALES, scales=_TWO_SCALES.scales * 2)),
            "beside the second one",
        ),
        (Linear(_OTHER), Linear(_OTHER, **_STATIC), "16 bits and float8e4m3_tensor|fp8_tensor"),
        (
            Linear(_OTHER, input_permutation=torch.arange(K).flip(0)),
            Linear(_OTHER, input_permutation=torch.arange(K)),
            "different values of input_permutation",
        ),
        (Linear(_OTHER, input_scale=torch.ones(K)), Linear(_OTHER), "part0 has an input_scale"),
        (Linear(_OTHER), Linear(_OTHER, input_scale=torch.ones(K)), "part1 has an input_scale"),
        (
            Linear(_OTHER, **_STATIC, activation_scale=torch.full((1, 1), 0.5)),
            Linear(_OTHER, **_STATIC, activation_scale=torch.full((1, 1), 0.25)),
            "activation_scale, 0.5 and 0.25.*the larger one",
        ),
    ],
)
def test_what_does_not_fit_names_both(one: Linear, other: Linear, told: str) -> None:
    with pytest.raises(UnsupportedError, match=f"(?s)fusing part0.* part1.*({told})"):
        fuse({"part0": one, "part1": other})


def test_nothing_is_no_layer() -> None:
    with pytest.raises(UnsupportedError, match="Name one or more"):
        fuse({})


def _gptq(module: str, group: int, n: int = 16) -> dict[str, torch.Tensor]:
    return {
        f"{module}.qweight": torch.randint(-(1 << 31), 1 << 31, (K // 8, n)).to(torch.int32),
        f"{module}.qzeros": torch.full((K // group, n // 8), 0x77777777, dtype=torch.int32),
        f"{module}.scales": (torch.rand(K // group, n) + 0.1).half(),
    }


def test_from_a_checkpoint(tmp_path: Path) -> None:
    config = '{"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}'
    (tmp_path / "config.json").write_text(config)
    tensors = {**_gptq("q", 32), **_gptq("k", 32, 8), "r.weight": torch.randn(8, K)}
    save_file(tensors, tmp_path / "model.safetensors")
    fused = humming.load_linear(tmp_path, ["q", "k"])
    whole = [humming.load_linear(tmp_path, name).weight for name in ("q", "k")]
    assert torch.equal(dequantize(fused.weight), torch.cat([dequantize(part) for part in whole]))
    with pytest.raises(CheckpointError, match=rf"{tmp_path}: fusing q and r: they are int4_g32"):
        humming.load_linear(tmp_path, ["q", "r"])
    with pytest.raises(UnsupportedError, match="one is named twice"):
        humming.load_linear(tmp_path, ["q", "q"])
    with pytest.raises(CheckpointError, match="missing"):
        humming.load_linear(tmp_path, ("q", "missing"))


# --- parts of weights --------------------------------------------------------------------------


@given(data=st.data())
def test_slices_are_exact_or_refused(data: st.DataObject) -> None:
    spec = data.draw(st.sampled_from(FORMATS))
    n, k = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 200))
    whole = weight(spec, n, k)
    rows, columns = (
        tuple(
            sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True)))
        )
        for size in (n, k)
    )
    units = whole.scale_extent
    crossing = [
        first % unit != 0 and first // unit != (last - 1) // unit
        for (first, last), unit in zip((rows, columns), units, strict=True)
    ]
    if any(crossing):
        with pytest.raises(UnsupportedError, match="begins within a scale"):
            whole.slice(rows, columns)
        return
    part = whole.slice(n=rows, k=columns)
    assert part.spec == whole.spec
    assert torch.equal(dequantize(part), dequantize(whole)[slice(*rows), slice(*columns)])
    assert humming.unpack(humming.pack(part)).equals(part)


@pytest.mark.parametrize(
    ("n", "k", "told"),
    [
        ((0, 129), None, "Give places of 0 to 128"),
        ((5, 5), None, "empty or beyond"),
        ((-1, 5), None, "empty or beyond"),
        (None, (16, 64), "within a scale of 32 columns.*multiple of 32"),
        (3, None, "Pass two ints"),
        ((0.0, 2.0), None, "Pass two ints"),
    ],
)
def test_slices_that_cannot_be(n: Any, k: Any, told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        weight("int4_g32").slice(n, k)


def test_rows_share_the_memory_of_the_whole() -> None:
    whole = weight("int4_g32")
    part = whole.slice(n=(64, 128))
    assert part.codes.data_ptr() == whole.codes[64:].data_ptr()


# --- parts of layers ---------------------------------------------------------------------------


def product(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """What a layer computes, in float64."""
    rows = x.double()
    if linear.input_scale is not None:
        rows = rows * linear.input_scale.double()
    if linear.input_permutation is not None:
        rows = rows[:, linear.input_permutation]
    matrix = linear.weight
    if isinstance(matrix, QuantizedWeight):
        matrix = dequantize(matrix)
    out = rows @ matrix.double().T
    return out if linear.bias is None else out + linear.bias.double()


@pytest.mark.parametrize("spec", [*FORMATS, "plain"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_together_are_the_whole(world: int, spec: str) -> None:
    n = 512
    matrix = torch.randn(n, 512).half() if spec == "plain" else weight(spec, n, 512)
    linear = Linear(matrix, torch.randn(n), input_scale=torch.rand(512).half())
    x = torch.randn(3, 512)
    whole = product(linear, x)
    columns = [product(linear.shard(rank, world, "n"), x) for rank in range(world)]
    # float64 adds in another order for another number of rows.
    torch.testing.assert_close(torch.cat(columns, 1), whole, rtol=1e-12, atol=1e-12 * 512)
    rows = [
        product(linear.shard(rank, world, "k"), part)
        for rank, part in enumerate(x.chunk(world, dim=1))
    ]
    torch.testing.assert_close(sum(rows), whole, rtol=1e-12, atol=1e-12 * 512)


def _ordered_within(parts: int, k: int) -> torch.Tensor:
    """An order in act-order that keeps inputs within equal parts."""
    size = k // parts
    return torch.cat([torch.randperm(size) + i * size for i in torch.randperm(parts).tolist()])


@pytest.mark.parametrize("spec", ["int4_g64", "uint4_g32_zp", "int8", "int8_tensor"])
def test_act_order_goes_with_the_inputs(spec: str) -> None:
    """Groups come in any order, and those of a rank need not be next to one another."""
    order = _ordered_within(8, 512)
    if spec in ("int8", "int8_tensor"):
        order = torch.randperm(512)
    linear = Linear(weight(spec, 32, 512), torch.randn(32), input_permutation=order)
    x = torch.randn(3, 512)
    parts = [(linear.shard(rank, 2, "k"), part) for rank, part in enumerate(x.chunk(2, dim=1))]
    assert all(part.weight.shape == (32, 256) for part, _ in parts)
    summed = sum(product(part, inputs) for part, inputs in parts)
    torch.testing.assert_close(summed, product(linear, x), rtol=1e-12, atol=1e-12 * 512)
    assert [part.bias is None for part, _ in parts] == [False, True]
    column = linear.shard(1, 2, "n")
    assert torch.equal(column.input_permutation, order)
    layer = parts[1][0].to_module()
    assert layer.in_features == 256


def test_groups_that_ranks_would_share_are_refused() -> None:
    order = torch.arange(512).view(8, 64).t().flatten()
    linear = Linear(weight("int4_g64", 32, 512), input_permutation=order)
    told = r"part 1 of 2 along k.*act-order: of the 64 columns of group 0 32 belong.*along n"
    with pytest.raises(UnsupportedError, match=told):
        linear.shard(1, 2, "k")


@pytest.mark.parametrize(
    ("n", "k", "spec", "part", "told"),
    [
        (16, 27392, "int4_g128", (0, 4, "k"), "parts of 6848 columns cut scales that cover 128"),
        (16, 231 * 32, "int4_g32", (0, 2, "k"), "Possible numbers of parts: 1, 3, 7, 11, 21, 33"),
        (16, 108 * 32, "int4_g32", (0, 8, "k"), "Possible numbers of parts: 1, 2, 3, 4, 6, 9, 12"),
        (192, K, "fp8_block128", (0, 2, "n"), "parts of 96 rows cut scales that cover 128"),
        (100, K, "int8", (0, 3, "n"), "parts of 33.3333 rows are no whole ones.*: 1, 2, 4, 5, 10"),
        (16, K, "int8", (2, 2, "n"), "Give 0 to 1"),
        (16, K, "int8", (0, 0, "n"), "1 or more ranks"),
        (16, K, "int8", (0, 2, "m"), "Use n or k"),
    ],
)
def test_parts_that_there_are_not(n: int, k: int, spec: str, part: Any, told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        Linear(weight(spec, n, k)).shard(*part)


def test_parts_within_a_group() -> None:
    """Where a group is larger than the part of a rank, several ranks have the same scales."""
    linear = Linear(weight("int4_g128", 16, 256))
    parts = [linear.shard(rank, 8, "k").weight for rank in range(8)]
    assert torch.equal(
        torch.cat([dequantize(part) for part in parts], 1), dequantize(linear.weight)
    )
