"""The canonical form: bits side by side, codes as numbers, and tensors that fit the format."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from humming.dtypes import NARROW, DataType
from humming.errors import UnsupportedError
from humming.formats import WeightSpec
from humming.quantized import (
    SCALE_TENSOR_DTYPES,
    QuantizedWeight,
    decode,
    decode_scales,
    encode,
    pack_bits,
    same_bits,
    unpack_bits,
)
from humming.quantizer import quantize

BITS = range(1, 9)


def codes_of(n: int, k: int, bits: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)


def empty_weight(spec: WeightSpec, n: int, k: int) -> dict[str, torch.Tensor | None]:
    """Tensors of the right dtypes and shapes."""
    shape, dtype = spec.scale_shape(n, k), SCALE_TENSOR_DTYPES[spec.scale_dtype]
    zeros = {"none": None, "integer": torch.uint8, "float": dtype}[spec.zero_point]
    second = {"none": None, "tensor": (1, 1), "channel": (n, 1)}[spec.second_scale]
    return {
        "codes": pack_bits(codes_of(n, k, spec.dtype.bits), spec.dtype.bits),
        "scales": torch.ones(shape).to(dtype),
        "zeros": None if zeros is None else torch.ones(shape).to(zeros),
        "second_scale": None if second is None else torch.ones(second),
    }


# --- bits --------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 75))
def test_codes_lie_side_by_side_little_endian(bits: int, n: int, k: int) -> None:
    codes = codes_of(n, k, bits)
    packed = pack_bits(codes, bits)
    for row, stored in zip(codes.tolist(), packed.numpy(), strict=True):
        number = sum(code << (bits * place) for place, code in enumerate(row))
        assert stored.tobytes() == number.to_bytes(-(-k * bits // 8), "little")
    assert torch.equal(unpack_bits(packed, bits, k), codes)


@pytest.mark.parametrize("bits", BITS)
def test_bits_of_views(bits: int) -> None:
    codes = codes_of(24, 10, bits).t()
    assert not codes.is_contiguous()
    assert torch.equal(unpack_bits(pack_bits(codes, bits), bits, 24), codes)


@pytest.mark.parametrize("k", [32, 64, 96, 128])
def test_three_bits_straddle_words(k: int) -> None:
    # Three words hold 32 codes; ten to a word would be another, wasteful layout.
    assert pack_bits(codes_of(32, k, 3), 3).shape == (32, k * 3 // 8)


# --- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_rounding_is_that_of_the_type(dtype: DataType, precision: torch.dtype) -> None:
    table = np.sort(dtype.decode_table()[np.isfinite(dtype.decode_table())])
    midpoints = (table[1:] + table[:-1]) / 2
    near = [np.nextafter(midpoints.astype(np.float32), side) for side in (-np.inf, np.inf)]
    spread = np.random.default_rng().normal(size=2000) * min(dtype.max or 1.0, 1e30)
    outside = np.array([np.inf, -np.inf, 0.0, -0.0, -1e-8, 1e30, -1e30])
    values = np.concatenate([table, midpoints, *near, spread, outside]).astype(np.float32)
    found = encode(torch.tensor(values, dtype=precision), dtype)
    assert found.dtype == torch.uint8
    np.testing.assert_array_equal(found.numpy(), dtype.encode(values))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_numbers_are_those_of_the_table(dtype: DataType) -> None:
    codes = torch.arange(2**dtype.bits).to(torch.uint8)
    np.testing.assert_array_equal(decode(codes, dtype).numpy(), dtype.decode_table())


@pytest.mark.parametrize("name", ["float8e4m3", "float8e8m0"])
def test_every_byte_of_a_narrow_scale(name: str) -> None:
    dtype, codes = DataType.parse(name), torch.arange(256).to(torch.uint8)
    scales = codes.view(SCALE_TENSOR_DTYPES[dtype])
    np.testing.assert_array_equal(decode_scales(scales, dtype).numpy(), dtype.decode_table())


# --- the container -----------------------------------------------------------------------------

SPECS = [
    "int4_g128",
    "int3_g32",
    "uint4_g64_zp",
    "uint4_g64_fzp",
    "int8_tensor",
    "int8",
    "fp8_block128",
    "fp8_block16x48",
    "mxfp4",
    "nvfp4",
    "int4_g32_s2channel",
]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (19, 130), (48, 256)], ids=["1x1", "19x130", "48x256"]
)
def test_size_is_what_the_format_says(name: str, n: int, k: int) -> None:
    spec = WeightSpec.parse(name)
    weight = QuantizedWeight(spec, (n, k), **empty_weight(spec, n, k))
    assert weight.nbytes * 8 == pytest.approx(spec.bits_per_weight(n, k) * n * k)
    assert weight.codes_unpacked().shape == (n, k)
    assert weight.to("cpu").equals(weight)


def test_equality_is_of_every_bit() -> None:
    spec = WeightSpec.parse("uint4_g64_fzp")
    parts = empty_weight(spec, 4, 130)
    weight = QuantizedWeight(spec, (4, 130), **parts)
    for name, tensor in parts.items():
        if tensor is not None:
            changed = tensor.clone()
            changed.view(torch.uint8)[-1, -1] ^= 1
            other = QuantizedWeight(spec, (4, 130), **{**parts, name: changed})
            assert not weight.equals(other)
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(None, torch.tensor([0.0]))


@pytest.mark.parametrize(
    ("name", "part", "change"),
    [
        # Scales cut along K but not the weight, or the other way round: groups are never guessed.
        ("int4_g128", "scales", lambda t: t.repeat(1, 8)),
        ("int4_g128", "scales", lambda t: t[:, :1]),
        ("int4_g128", "scales", lambda t: t.T),
        ("int4_g128", "scales", lambda t: t.float()),
        ("mxfp4", "scales", lambda t: t.view(torch.int8)),
        ("int4_g128", "codes", lambda t: t[:, 1:]),
        ("int4_g128", "codes", lambda t: t.to(torch.int32)),
        ("int4_g128", "codes", lambda t: t.T.contiguous().T),
        ("uint4_g64_zp", "zeros", lambda t: None),
        ("uint4_g64_zp", "zeros", lambda t: t.half()),
        ("int4_g128", "zeros", lambda t: torch.zeros(32, 2)),
        ("nvfp4", "second_scale", lambda t: t.reshape(())),
        ("nvfp4", "second_scale", lambda t: None),
        ("int8_tensor", "scales", lambda t: t.reshape(())),
        ("int4_g128", "scales", lambda t: t.to("meta")),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name: str, part: str, change) -> None:
    spec = WeightSpec.parse(name)
    parts = empty_weight(spec, 32, 256)
    parts[part] = change(parts[part])
    with pytest.raises(UnsupportedError, match=f"its {part} are"):
        QuantizedWeight(spec, (32, 256), **parts)


def test_empty_weights_are_refused() -> None:
    spec = WeightSpec.parse("int4")
    with pytest.raises(UnsupportedError, match="empty"):
        QuantizedWeight(spec, (0, 8), **empty_weight(spec, 1, 8))


def test_zero_points_are_codes():
    weight = quantize(torch.randn(16, 64), "uint4_g32_zp")
    zeros = weight.zeros.clone()
    zeros[3, 1] = 16
    with pytest.raises(UnsupportedError, match="reach 16, which is no 4-bit code"):
        QuantizedWeight(weight.spec, weight.shape, weight.codes, weight.scales, zeros)
    zeros[3, 1] = 15
    QuantizedWeight(weight.spec, weight.shape, weight.codes, weight.scales, zeros)
