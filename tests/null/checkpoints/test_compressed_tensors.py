"""Tensors of compressed-tensors: packed by hand, and by the package itself where it is there."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from humming.checkpoints.compressed_tensors import CompressedTensors
from humming.checkpoints.decisions import Linear
from humming.checkpoints.tensors import TensorSource
from humming.errors import CheckpointError
from humming.quantized import QuantizedWeight
from humming.reference import dequantize

MODULE = "model.layers.0.mlp.up_proj"
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def config(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> Any:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    groups = {"group_0": group}
    return {"quant_method": "compressed-tensors", "config_groups": groups, **more}


def read(of: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Linear:
    method = CompressedTensors(of, "config.json")
    source = TensorSource({f"{MODULE}.{name}": tensor for name, tensor in tensors.items()})
    return method.read(MODULE, method.decide(MODULE), source)


def numbers(linear: Linear) -> np.ndarray:
    assert isinstance(linear.weight, QuantizedWeight)
    return dequantize(linear.weight).numpy()


def words(codes: np.ndarray, bits: int, dense: bool = True) -> torch.Tensor:
    """Rows of codes in 32-bit words, bit by bit."""
    rows = []
    for row in codes:
        if dense:
            whole = sum(int(code) << bits * i for i, code in enumerate(row))
            count = math.ceil(len(row) * bits / 32)
            rows.append([whole >> 32 * i & 0xFFFFFFFF for i in range(count)])
        else:
            per = 32 // bits
            rows.append(
                [
                    sum(int(code) << bits * i for i, code in enumerate(row[at : at + per]))
                    for at in range(0, len(row), per)
                ]
            )
    return torch.from_numpy(np.array(rows, dtype=np.uint32).view(np.int32))


def bf16(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.uniform(0.01, 1, shape)).to(torch.bfloat16)


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "gaps"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_words(bits: int, symmetric: bool, dense: bool) -> None:
    # Sizes at which the two layouts of a width that does not divide 32 take different room.
    n, k, group = 40, 192, 64
    rng = np.random.default_rng(bits)
    half = 1 << (bits - 1)
    codes = rng.integers(0, 2 * half, (n, k))
    zeros = rng.integers(0, 2 * half, (n, k // group))
    scales = bf16(rng, n, k // group)
    tensors = {
        "weight_packed": words(codes, bits, dense),
        "weight_scale": scales,
        "weight_shape": torch.tensor([n, k]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros.T, bits, dense).T.contiguous()
    weights = {
        "num_bits": bits,
        "type": "int",
        "strategy": "group",
        "group_size": group,
        "symmetric": symmetric,
    }
    linear = read(config(weights, format="pack-quantized"), tensors)
    zero = zeros if not symmetric else np.full_like(zeros, half)
    expected = (codes - zero.repeat(group, 1)) * scales.double().numpy().repeat(group, 1)
    np.testing.assert_array_equal(numbers(linear), expected)
    assert linear.notes == ()
    assert linear.activation is None


@pytest.mark.parametrize("k", [100, 97])
@pytest.mark.parametrize("bits", [3, 4])
def test_rows_that_do_not_fill_their_words(bits: int, k: int) -> None:
    rng = np.random.default_rng(k)
    codes = rng.integers(0, 1 << bits, (6, k))
    scales = bf16(rng, 6, 1)
    packed = words(codes, bits)
    packed[:, -1] |= -(1 << 31)  # what fills a word is not said
    tensors = {
        "weight_packed": packed if bits * k % 32 else words(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([6, k]),
    }
    weights = {"num_bits": bits, "strategy": "channel"}
    expected = (codes - (1 << bits - 1)) * scales.double().numpy()
    np.testing.assert_array_equal(numbers(read(config(weights), tensors)), expected)


def test_columns_in_the_order_of_activations() -> None:
    rng = np.random.default_rng(1)
    n, k, group = 4, 64, 16
    codes = rng.integers(0, 16, (n, k))
    order = rng.permutation(k)
    groups = np.arange(k)[order] // group
    scales = bf16(rng, n, k // group)
    tensors = {
        "weight_packed": words(codes, 4),
        "weight_scale": scales,
        "weight_shape": torch.tensor([n, k]),
        "weight_g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    weights = {"num_bits": 4, "strategy": "group", "group_size": group, "actorder": "group"}
    linear = read(config(weights), tensors)
    assert linear.input_permutation is not None
    x = rng.normal(size=k)
    expected = ((codes - 8) * scales.double().numpy()[:, groups]) @ x
    found = numbers(linear) @ x[linear.input_permutation.numpy()]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    tensors["weight_g_idx"][0] = 99
    with pytest.raises(CheckpointError, match="weight_g_idx"):
        read(config(weights), tensors)


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zeros"])
def test_integers_in_bytes(strategy: str, symmetric: bool) -> None:
    rng = np.random.default_rng(2)
    n, k = 6, 96
    shape = {"tensor": (1,), "channel": (n, 1), "group": (n, 3)}[strategy]
    codes = rng.integers(-128, 128, (n, k))
    scales = bf16(rng, *shape)
    tensors = {"weight": torch.from_numpy(codes.astype(np.int8)), "weight_scale": scales}
    zeros = rng.integers(-128, 128, shape)
    if not symmetric:
        tensors["weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8))
    weights = {"num_bits": 8, "strategy": strategy, "symmetric": symmetric}
    if strategy == "group":
        weights["group_size"] = 32
    inputs = {"num_bits": 8, "strategy": "token", "dynamic": True}
    linear = read(config(weights, inputs), tensors)

    def spread(values: np.ndarray) -> np.ndarray:
        rows = values.reshape(shape[0], -1)
        return np.broadcast_to(rows.repeat(k // rows.shape[1], 1), (n, k))

    zero = 0 if symmetric else spread(zeros)
    expected = (codes - zero) * spread(scales.double().numpy())
    np.testing.assert_array_equal(numbers(linear), expected)
    assert str(linear.activation) == "int8"


@pytest.mark.parametrize("static", [False, True], ids=["weights", "activations"])
def test_nvfp4(static: bool) -> None:
    rng = np.random.default_rng(3)
    n, k = 5, 64
    codes = rng.integers(0, 16, (n, k))
    scales = torch.from_numpy(rng.uniform(0.01, 400, (n, k // 16))).to(torch.float8_e4m3fn)
    divisor = torch.tensor([rng.uniform(100, 9000)], dtype=torch.float32)
    tensors = {
        "weight_packed": torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)),
        "weight_scale": scales,
        "weight_global_scale": divisor,
    }
    args = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    inputs = {**args, "dynamic": "local"} if static else None
    of = config(args, inputs, format="nvfp4-pack-quantized")
    if static:
        with pytest.raises(CheckpointError, match="input_global_scale"):
            read(of, tensors)
        tensors["input_global_scale"] = torch.tensor([8.0])
    linear = read(of, tensors)
    signed = np.array([*E2M1, *(-value for value in E2M1)])[codes]
    expected = signed * scales.double().numpy().repeat(16, 1) / float(divisor)
    # The reciprocal of the divisor is rounded to float32.
    np.testing.assert_allclose(numbers(linear), expected, rtol=2.0**-24)
    assert (linear.activation_scale is not None) == static
    if static:
        assert linear.activation_scale.tolist() == [[0.125]]  # type: ignore[union-attr]
        assert str(linear.activation) == "nvfp4"


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_microscaled(bits: int) -> None:
    rng = np.random.default_rng(bits)
    n, k = 5, 96
    codes = rng.integers(0, 1 << bits, (n, k))
    if bits == 8:
        codes[codes & 127 == 127] = 0
    scales = rng.integers(0, 255, (n, 3)).astype(np.uint8)
    packed = []
    for row in codes:
        whole = sum(int(code) << bits * i for i, code in enumerate(row))
        packed.append(list(whole.to_bytes(k * bits // 8, "little")))
    stored = torch.tensor(packed, dtype=torch.uint8)
    tensors = {"weight_packed": stored, "weight_scale": torch.from_numpy(scales)}
    if bits == 8:
        tensors["weight"] = tensors.pop("weight_packed").view(torch.float8_e4m3fn)
    weights = {"num_bits": bits, "type": "float", "strategy": "group", "group_size": 32}
    linear = read(config({**weights, "scale_dtype": "torch.uint8"}), tensors)
    exponent_bits, mantissa_bits, bias = {4: (2, 1, 1), 6: (2, 3, 1), 8: (4, 3, 7)}[bits]

    def number(code: int) -> float:
        sign = -1 if code >> (bits - 1) else 1
        exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
        mantissa = (code & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
        return sign * 2.0 ** (max(exponent, 1) - bias) * (mantissa + (exponent > 0))

    values = np.vectorize(number)(codes)
    expected = values * np.exp2(scales.astype(np.float64) - 127).repeat(32, 1)
    np.testing.assert_array_equal(numbers(linear), expected)


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_floats_in_bytes(strategy: str) -> None:
    rng = np.random.default_rng(5)
    n, k = 200, 320
    weight = torch.from_numpy(rng.normal(size=(n, k)) * 40).to(torch.float8_e4m3fn)
    shape = {"tensor": (1,), "channel": (n, 1), "block": (2, 3)}[strategy]
    scales = bf16(rng, *shape)
    args: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": strategy}
    if strategy == "block":
        args["block_structure"] = [128, 128]
    inputs = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    tensors = {"weight": weight, "weight_scale": scales, "input_scale": torch.tensor([0.5])}
    linear = read(config(args, inputs), tensors)
    spread = scales.double().numpy().reshape(shape[0], -1)
    if strategy == "block":
        spread = spread.repeat(128, 0)[:n].repeat(128, 1)[:, :k]
    np.testing.assert_array_equal(numbers(linear), weight.double().numpy() * spread)
    assert linear.activation_scale.tolist() == [[0.5]]  # type: ignore[union-attr]


# -- where the configuration is wrong, or the tensors are -----------------------------------------


def int4(rng: np.random.Generator) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": words(rng.integers(0, 16, (8, 64)), 4),
        "weight_scale": bf16(rng, 8, 2),
        "weight_shape": torch.tensor([8, 64]),
    }


def test_tensors_decide() -> None:
    rng = np.random.default_rng(6)
    weights = {"num_bits": 4, "strategy": "group", "group_size": 16}
    linear = read(config(weights), int4(rng))
    assert isinstance(linear.weight, QuantizedWeight)
    assert linear.weight.spec.group_size == 32
    assert any("int4_g16" in note for note in linear.notes)
    ignored = read(config({**weights, "group_size": 32}, ignore=[MODULE]), int4(rng))
    assert isinstance(ignored.weight, QuantizedWeight)
    assert any("leaves it alone" in note for note in ignored.notes)
    plain = read(config(weights), {"weight": torch.zeros(3, 5, dtype=torch.bfloat16)})
    assert isinstance(plain.weight, torch.Tensor)
    assert any("not quantized" in note for note in plain.notes)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"weight_scale": None}, "weight_scale is missing"),
        ({"weight_scale": torch.zeros(8, 3, dtype=torch.bfloat16)}, "weight_scale has the shape"),
        ({"weight_scale": torch.zeros(8, 2, dtype=torch.float64)}, "torch.float64"),
        ({"weight_shape": torch.tensor([9, 64])}, "weight_shape says 9 rows"),
        ({"weight_shape": torch.tensor([8, -64])}, "weight_shape is"),
        ({"weight_shape": torch.tensor([8, 2**40])}, "weight_shape is"),
        ({"weight_shape": torch.tensor([8, 6400])}, "words for 6400 values"),
        ({"weight_packed": torch.zeros(0, 8, dtype=torch.int32)}, "is empty"),
        ({"weight_packed": torch.zeros(8, 8, dtype=torch.int64)}, "torch.int64"),
        ({"bias": torch.zeros(7)}, "bias has the shape"),
        ({"weight_scale": torch.full((8, 2), torch.nan, dtype=torch.bfloat16)}, "no finite number"),
    ],
)
def test_damaged_tensors(change: dict[str, torch.Tensor | None], told: str) -> None:
    tensors = {**int4(np.random.default_rng(7)), **change}
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32}
    with pytest.raises(CheckpointError, match=told) as error:
        read(config(weights), given)
    assert MODULE in str(error.value)


def test_scales_that_are_no_numbers_over_zeros() -> None:
    codes = torch.zeros(1, 16, dtype=torch.uint8)
    codes[0, 8:] = 0x21
    scales = torch.tensor([[torch.nan, 2.0]]).to(torch.float8_e4m3fn)
    tensors = {
        "weight_packed": codes,
        "weight_scale": scales,
        "weight_global_scale": torch.tensor([2.0]),
    }
    args = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    linear = read(config(args), tensors)
    assert numbers(linear).tolist() == [[0.0] * 16 + [0.5, 1.0] * 8]
    assert any("became 0" in note for note in linear.notes)
    codes[0, 3] = 0x10
    with pytest.raises(CheckpointError, match=r"weight_scale is no finite number at \[0, 0\]"):
        read(config(args), tensors)


# -- by the package itself ------------------------------------------------------------------------

SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"int{bits}{'' if symmetric else '_zp'}": (
            "pack-quantized",
            {
                "num_bits": bits,
                "type": "int",
                "strategy": "group",
                "group_size": 32,
                "symmetric": symmetric,
            },
        )
        for bits in (2, 3, 4, 5, 8)
        for symmetric in (True, False)
    },
    "int8_channel": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    ),
    "fp8_channel": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "group",
            "group_size": 32,
            "symmetric": True,
            "scale_dtype": "torch.uint8",
        },
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            "symmetric": True,
            "scale_dtype": "torch.float8_e4m3fn",
        },
    ),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_against_the_package(name: str) -> None:
    package = pytest.importorskip(
        "compressed_tensors", reason="the package compressed-tensors is not installed"
    )
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    assert package
    stored, args = SCHEMES[name]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args), format=stored)
    torch.manual_seed(9)
    n, k = 24, 96
    weight = torch.randn(n, k)
    group = args.get("group_size", k)
    most = weight.reshape(n, -1, group).abs().amax(-1)
    state = {"weight": weight}
    if args["type"] == "int":
        half = 1 << (args["num_bits"] - 1)
        state["weight_scale"] = most / (half - 0.5)
        if not args["symmetric"]:
            state["weight_zero_point"] = torch.randint(-half, half, most.shape, dtype=torch.int8)
    elif name == "fp8_channel":
        state["weight_scale"] = most / 448
    elif name == "mxfp4":
        state["weight_scale"] = torch.exp2(torch.ceil(torch.log2(most / 6)))
    else:
        state["weight_global_scale"] = 448 * 6 / weight.abs().max().reshape(1)
        scale = most / 6 * state["weight_global_scale"]
        state["weight_scale"] = scale.to(torch.float8_e4m3fn).float()
    compressor = BaseCompressor.get_value_from_registry(stored)
    compressed = compressor.compress(dict(state), scheme)
    expected = compressor.decompress(dict(compressed), scheme)["weight"].double().numpy()
    linear = read(config(args, format=stored), compressed)
    # The package multiplies in float32; for nvfp4 it rounds scale and product to bfloat16.
    bound = 2.0**-8 if name == "nvfp4" else 2.0**-22
    spread = 0 if name == "nvfp4" else np.abs(expected).max()
    np.testing.assert_allclose(numbers(linear), expected, rtol=bound, atol=bound * spread)
    assert linear.notes == () or name == "nvfp4"
