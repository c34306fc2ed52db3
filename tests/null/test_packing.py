"""Packing: the order of every code, exact round trips, and padding that contributes nothing."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import humming.packing
from humming.dtypes import NARROW
from humming.errors import UnsupportedError
from humming.formats import NAMED_WEIGHTS, WeightSpec
from humming.packing import PackedWeight, pack, unpack
from humming.quantized import (
    SCALE_TENSOR_DTYPES,
    QuantizedWeight,
    decode_scales,
    pack_bits,
    same_bits,
)
from humming.reference import dequantize

OPERANDS = (16, 8, 4)
FORMATS = [
    *NAMED_WEIGHTS,
    *(f"{dtype}_g32" for dtype in NARROW if dtype.kind != "ufloat"),
    *("int4_g128", "int4_g48_sbf16", "int4_g1", "int3_g100_sfp32", "int4_tensor", "int8"),
    *("fp8_block128", "fp8_block16_sbf16", "int4_block5x48", "int4_block999", "fp8_tensor"),
    *("uint4_g32_zp", "uint4_g48_zp", "uint4_zp", "uint8_tensor_zp", "uint3_block5x48_zp"),
    *("uint4_g32_fzp", "uint5_g48_fzp_sbf16", "uint2_fzp_sfp32", "uint4_block16_fzp"),
    *("int4_g32_s2channel", "fp4_g16_se4m3_s2channel", "fp8_block16_sfp32_s2tensor"),
]


def random_weight(name: str, n: int, k: int) -> QuantizedWeight:
    """Every code, and every bit pattern of scales: packing moves bits and interprets none."""
    spec = WeightSpec.parse(name)
    shape, dtype = spec.scale_shape(n, k), SCALE_TENSOR_DTYPES[spec.scale_dtype]

    def random_bits(dtype: torch.dtype) -> torch.Tensor:
        size = torch.empty((), dtype=dtype).element_size()
        return torch.randint(0, 256, (*shape, size), dtype=torch.uint8).view(dtype).squeeze(-1)

    zeros = {
        "none": None,
        "integer": torch.randint(0, 2**spec.dtype.bits, shape, dtype=torch.uint8),
        "float": random_bits(dtype),
    }[spec.zero_point]
    second = {"none": None, "tensor": torch.rand(1, 1), "channel": torch.rand(n, 1)}
    codes = pack_bits(
        torch.randint(0, 2**spec.dtype.bits, (n, k), dtype=torch.uint8), spec.dtype.bits
    )
    scales = random_bits(dtype)
    return QuantizedWeight(spec, (n, k), codes, scales, zeros, second[spec.second_scale])


# --- the order, value by value -----------------------------------------------------------------


def brick_codes(words: np.ndarray, code_bits: int, operand_bits: int) -> np.ndarray:
    """The codes [16, 64] of a brick, found one at a time by the rules of docs/layout.md.

    Rows and K follow the PTX ISA (matrix fragments of mma.m16n8k16, k32 and k64): register r,
    element e of A is row g + 8 (r & 1), k = E t + e + 4 E (r >> 1).
    """
    codes = np.full((16, 64), -1)
    elements = 32 // operand_bits
    for lane in range(32):
        group, thread = lane >> 2, lane & 3
        for value in range(32):
            register, element = value // elements, value % elements
            step, part = register // 4, register % 4
            row = group + 8 * (part & 1)
            k = 8 * elements * step + elements * thread + element + 4 * elements * (part >> 1)
            code, code_bit, plane_start = 0, 0, 0
            for width in (8, 4, 2, 1):
                if not code_bits & width:
                    continue
                slot = max(operand_bits, width)
                place, spot = divmod(value, 32 // slot)
                word, above = divmod(place, slot // width)
                run, inside = divmod(word, 4)  # a lane reads 16 bytes at once, or the plane
                size = min(width, 4)
                at = 32 * (plane_start + 4 * run) + size * lane + inside
                bits = (int(words[at]) & 0xFFFFFFFF) >> (width * above + slot * spot)
                code |= (bits & (2**width - 1)) << code_bit
                code_bit += width
                plane_start += width
            codes[row, k] = code
    return codes


@pytest.mark.parametrize("operand_bits", OPERANDS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_each_value_of_each_lane(bits: int, operand_bits: int) -> None:
    weight = random_weight(f"uint{bits}", 32, 192)
    packed = pack(weight, operand_bits)
    assert packed.codes.shape == (2, 3, 32 * bits)
    codes = weight.codes_unpacked().numpy()
    for band in range(2):
        for column in range(3):
            found = brick_codes(packed.codes[band, column].numpy(), bits, operand_bits)
            expected = codes[16 * band : 16 * band + 16, 64 * column : 64 * column + 64]
            np.testing.assert_array_equal(found, expected)


def test_a_word_of_four_bit_codes_for_16_bit_operands() -> None:
    # The case that matters most, by hand: lane 5 (g = 1, t = 1) holds in its first word the four
    # registers of the first k16 step, low halves first, as docs/layout.md draws it.
    codes = torch.zeros(16, 64, dtype=torch.uint8)
    places = [(1, 2), (9, 2), (1, 10), (9, 10), (1, 3), (9, 3), (1, 11), (9, 11)]
    for nibble, (row, k) in enumerate(places):
        codes[row, k] = nibble + 1
    scales = torch.ones(16, 1).half()
    weight = QuantizedWeight(WeightSpec.parse("int4"), (16, 64), pack_bits(codes, 4), scales)
    words = pack(weight, 16).codes[0, 0].view(32, 4)  # [lane, word]
    assert int(words[5, 0]) & 0xFFFFFFFF == 0x87654321
    words[5, 0] = 0
    assert not words.any()


# --- padding -----------------------------------------------------------------------------------


def padded_numbers(packed: PackedWeight) -> torch.Tensor:
    """The weight [N16, K64] as a kernel would see it, padding included."""
    spec, codes = packed.spec, packed.codes.numpy()
    bits = spec.dtype.bits
    bands, columns = codes.shape[:2]
    rows = [
        np.hstack([brick_codes(codes[band, c], bits, packed.operand_bits) for c in range(columns)])
        for band in range(bands)
    ]
    numbers = torch.tensor(spec.dtype.decode_table()[np.vstack(rows)])
    groups = packed.scales.shape[1]
    group = {"group": spec.group_size, "block": spec.block[1]}.get(spec.granularity, 64 * columns)

    def per_value(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.double().transpose(1, 2).reshape(16 * bands, groups)
        return flat.repeat_interleave(group, dim=1)[:, : 64 * columns]

    if packed.zeros is not None:
        numbers = numbers - per_value(packed.zeros)
    numbers = numbers * per_value(decode_scales(packed.scales, spec.scale_dtype))
    if packed.second_scale is not None:
        numbers = numbers * packed.second_scale.double()[:, None]
    return numbers


@pytest.mark.parametrize(("n", "k"), [(1, 1), (21, 100), (16, 64), (40, 200)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_padding_contributes_nothing(name: str, n: int, k: int) -> None:
    weight = random_weight(name, n, k)
    if weight.spec.scale_dtype != "float8e8m0":  # plain numbers, to compare them exactly
        scales = torch.randint(1, 9, weight.scales.shape).to(weight.scales.dtype)
        zeros = weight.zeros
        if zeros is not None and weight.spec.zero_point == "float":
            zeros = torch.randint(-4, 9, zeros.shape).to(zeros.dtype)
        weight = QuantizedWeight(
            weight.spec, weight.shape, weight.codes, scales, zeros, weight.second_scale
        )
    else:
        weight.scales.clamp_(max=254)
    found = padded_numbers(pack(weight))
    assert found.shape == (-(-n // 16) * 16, -(-k // 64) * 64)
    np.testing.assert_array_equal(found[:n, :k].numpy(), dequantize(weight).numpy())
    if weight.spec.zero_point == "float":
        # No code stands for 0 there; the kernel reads activations beyond K as 0.
        group = weight.spec.scale_group(k)
        first = -(-k // group) * group if weight.spec.granularity in ("group", "block") else 1 << 30
        assert (found[:, first:] == 0).all()
    else:
        assert (found[:, k:] == 0).all()
    assert (found[n:] == 0).all()


@pytest.mark.parametrize("name", ["int4_g64", "uint4_g64_zp", "uint4_g64_fzp", "nvfp4", "int8"])
def test_padding_of_scales_is_zero(name: str) -> None:
    packed = pack(random_weight(name, 21, 100))
    for tensor in (packed.scales, packed.zeros):
        if tensor is not None:
            flat = tensor.view(torch.uint8).view(2, -1, 16, tensor.element_size())
            assert not flat[1, :, 5:].any()


# --- round trips -------------------------------------------------------------------------------


@pytest.mark.parametrize("operand_bits", OPERANDS)
@pytest.mark.parametrize("name", FORMATS)
def test_round_trip(name: str, operand_bits: int) -> None:
    for n, k in [(1, 1), (37, 203), (16, 64), (64, 256)]:
        weight = random_weight(name, n, k)
        packed = pack(weight, operand_bits)
        assert unpack(packed).equals(weight)
        for tensor in packed.tensors().values():
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 16 == 0


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_round_trip_of_any_shape(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FORMATS))
    n, k = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 300))
    weight = random_weight(name, n, k)
    assert unpack(pack(weight, data.draw(st.sampled_from(OPERANDS)))).equals(weight)


@pytest.mark.parametrize(
    ("n", "k"),
    [(464, 232), (232, 464), (928, 64), (1408, 704), (64, 2880), (2112, 64), (64, 10944), (1, 896)],
)
def test_sizes_of_real_models(n: int, k: int) -> None:
    for name in ("mxfp4", "int4_g128", "uint3_g32_zp"):
        weight = random_weight(name, n, k)
        assert unpack(pack(weight)).equals(weight)


@pytest.mark.parametrize("name", ["int4_g32", "uint5_g48_zp", "nvfp4", "fp8_block16"])
def test_chunks_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(name, 150, 200)
    whole = pack(weight)
    for chunk in (1, 16 * 256, 5 * 16 * 256):
        monkeypatch.setattr(humming.packing, "_CHUNK_CODES", chunk)
        assert pack(weight).equals(whole)
        assert unpack(whole).equals(weight)


def test_a_square_of_zero_points_is_not_transposed() -> None:
    # N = G: a transposed tensor would fit too.
    n, group = 64, 32
    weight = random_weight("uint4_g32_zp", n, n * group)
    index = torch.arange(n)
    zeros = ((index[:, None] * 7 + index * 3) % 16).to(torch.uint8)
    weight = QuantizedWeight(weight.spec, weight.shape, weight.codes, weight.scales, zeros)
    packed = pack(weight)
    assert packed.zeros is not None
    for row, column in [(0, 1), (1, 0), (63, 5), (17, 62)]:
        assert packed.zeros[row // 16, column, row % 16] == (row * 7 + column * 3) % 16
    assert same_bits(unpack(packed).zeros, zeros)


def test_scales_may_have_any_strides() -> None:
    weight = random_weight("uint4_g32_zp", 40, 160)
    assert weight.zeros is not None
    strided = QuantizedWeight(
        weight.spec,
        weight.shape,
        weight.codes,
        weight.scales.T.contiguous().T,
        torch.cat([weight.zeros, weight.zeros], dim=1)[:, :5],
    )
    assert pack(strided).equals(pack(weight))


def test_the_operand_width_changes_the_order_alone() -> None:
    weight = random_weight("int4_g32", 32, 128)
    packed = {bits: pack(weight, bits) for bits in OPERANDS}
    assert not torch.equal(packed[16].codes, packed[8].codes)
    assert not torch.equal(packed[8].codes, packed[4].codes)
    assert same_bits(packed[16].scales, packed[4].scales)
    assert not packed[16].equals(packed[8])


# --- the container -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_stored_and_read_again(name: str) -> None:
    packed = pack(random_weight(name, 21, 100), 8)
    read = PackedWeight.from_tensors(packed.metadata(), packed.tensors())
    assert read.equals(packed)
    assert read.nbytes == packed.nbytes == sum(t.nbytes for t in packed.tensors().values())
    assert packed.to("cpu").equals(packed)


def test_tensors_of_a_file_may_lie_askew() -> None:
    packed = pack(random_weight("int4_g32", 16, 64))
    askew = {}
    for name, tensor in packed.tensors().items():
        buffer = torch.empty(tensor.nbytes + 8, dtype=torch.uint8)
        askew[name] = buffer[8:].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        assert askew[name].data_ptr() % 16 == 8
    with pytest.raises(UnsupportedError, match="multiple of 16 bytes"):
        PackedWeight(packed.spec, packed.shape, 16, **askew)
    assert PackedWeight.from_tensors(packed.metadata(), askew).equals(packed)


@pytest.mark.parametrize(
    ("name", "part", "change"),
    [
        ("int4_g32", "codes", lambda t: t.flatten()),
        ("int4_g32", "codes", lambda t: t.view(torch.uint8)),
        ("int4_g32", "scales", lambda t: t.transpose(1, 2)),
        ("int4_g32", "scales", lambda t: t.float()),
        ("int4_g32", "scales", lambda t: None),
        ("int4_g32", "scales", lambda t: t.to("meta")),
        ("int4_g32", "scales", lambda t: t.transpose(0, 2).contiguous().transpose(0, 2)),
        ("int4_g32", "zeros", lambda t: torch.zeros(2, 4, 16)),
        ("uint4_g32_zp", "zeros", lambda t: None),
        ("nvfp4", "second_scale", lambda t: t.view(1, 1)),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name: str, part: str, change) -> None:
    packed = pack(random_weight(name, 32, 128))
    parts = {**packed.tensors(), part: change(packed.tensors().get(part))}
    with pytest.raises(UnsupportedError, match=f"its {part} are"):
        PackedWeight(packed.spec, packed.shape, 16, **parts)


def test_operand_widths_are_checked() -> None:
    weight = random_weight("int4_g32", 16, 64)
    with pytest.raises(UnsupportedError, match="16, 8 or 4"):
        pack(weight, 32)
    packed = pack(weight)
    with pytest.raises(UnsupportedError, match="16, 8 or 4"):
        PackedWeight(packed.spec, packed.shape, 2, packed.codes, packed.scales)
    with pytest.raises(UnsupportedError, match="empty"):
        PackedWeight(packed.spec, (0, 64), 16, packed.codes, packed.scales)


def test_missing_parts_of_a_file_are_named() -> None:
    packed = pack(random_weight("int4_g32", 16, 64))
    metadata, tensors = packed.metadata(), packed.tensors()
    with pytest.raises(UnsupportedError, match="operand_bits"):
        PackedWeight.from_tensors(
            {key: value for key, value in metadata.items() if key != "operand_bits"}, tensors
        )
    with pytest.raises(UnsupportedError, match="scales"):
        PackedWeight.from_tensors(metadata, {"codes": tensors["codes"]})
    with pytest.raises(UnsupportedError, match="g_idx"):
        PackedWeight.from_tensors(metadata, {**tensors, "g_idx": tensors["codes"]})
