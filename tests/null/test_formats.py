"""Descriptions of weights and activations: names, extents, sizes, refusals, and their page."""

import copy
import dataclasses
import doctest
import itertools
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from humming import dtypes, formats
from humming.dtypes import NARROW, DataType
from humming.errors import UnsupportedError
from humming.formats import NAMED_ACTIVATIONS, NAMED_WEIGHTS, ActivationSpec, WeightSpec

PAGE = (Path(__file__).parents[2] / "docs/formats.md").read_text()
WEIGHT_DTYPES = [dtype for dtype in NARROW if dtype.kind != "ufloat"]
WIDE_SCALES = [dtypes.float16, dtypes.bfloat16, dtypes.float32]

# --- every description round-trips through its name ----------------------------------------------

sizes = st.one_of(st.sampled_from((16, 32, 64, 128)), st.integers(1, 10**6))


@st.composite
def weight_specs(draw: st.DrawFn) -> WeightSpec:
    dtype = draw(st.sampled_from(WEIGHT_DTYPES))
    granularity = draw(st.sampled_from(("tensor", "channel", "group", "block")))
    zero_points = ["none", "float"] if dtype.is_integer else ["none"]
    zero_points += ["integer"] if dtype.kind == "uint" else []
    zero_point = draw(st.sampled_from(zero_points))
    narrow_scales = [] if zero_point == "float" else [dtypes.float8e4m3, dtypes.float8e8m0]
    seconds = [second for second in ("none", "tensor", "channel") if second != granularity]
    return WeightSpec(
        dtype=dtype,
        granularity=granularity,
        group_size=draw(sizes) if granularity == "group" else 0,
        block=(draw(sizes), draw(sizes)) if granularity == "block" else (0, 0),
        scale_dtype=draw(st.sampled_from(WIDE_SCALES + narrow_scales)),
        zero_point=zero_point,
        second_scale=draw(st.sampled_from(seconds)),
    )


@st.composite
def activation_specs(draw: st.DrawFn) -> ActivationSpec:
    wide = draw(st.sampled_from((True, False, False, False, False)))
    if wide:
        dtype = draw(st.sampled_from((dtypes.float16, dtypes.bfloat16)))
        return ActivationSpec(dtype, "none")
    dtype = draw(st.sampled_from([dtype for dtype in NARROW if dtype.is_signed]))
    granularity = draw(st.sampled_from(("tensor", "token", "group", "block")))
    group_size, scales = 0, WIDE_SCALES
    if granularity == "group":
        group_size, scales = draw(sizes), [*WIDE_SCALES, dtypes.float8e8m0]
    elif granularity == "block":
        group_size = draw(st.sampled_from((16, 32)))
        scales = [dtypes.float8e8m0, dtypes.float8e4m3][: 1 if group_size == 32 else 2]
    return ActivationSpec(
        dtype=dtype,
        granularity=granularity,
        group_size=group_size,
        scale_dtype=draw(st.sampled_from(scales)),
        dynamic=granularity != "tensor" or draw(st.booleans()),
        symmetric=not dtype.is_integer or granularity == "block" or draw(st.booleans()),
    )


@given(weight_specs())
def test_weight_names_round_trip(spec: WeightSpec) -> None:
    assert WeightSpec.parse(spec.name) == spec
    assert WeightSpec.parse(spec.name.upper()) == spec
    assert str(spec) == spec.name


@given(activation_specs())
def test_activation_names_round_trip(spec: ActivationSpec) -> None:
    assert ActivationSpec.parse(spec.name) == spec
    assert ActivationSpec.parse(spec.name.upper()) == spec
    assert str(spec) == spec.name


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("int4_channel", "int4"),
        ("int4_g128_sfp16", "int4_g128"),
        ("e4m3_block128x128_sfp32", "fp8_block128"),
        ("float4e2m1_g64", "fp4_g64"),
        ("e2m1_g32_se8m0", "mxfp4"),
        ("mxfp8_e4m3", "mxfp8"),
        ("fp4_s2tensor_se4m3_g16", "nvfp4"),
    ],
)
def test_weights_print_the_shortest_name(name: str, printed: str) -> None:
    assert WeightSpec.parse(name).name == printed


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("bf16", "bfloat16"),
        ("int8_token_dynamic", "int8"),
        ("int8_tensor_static", "int8_tensor"),
        ("e4m3_mx32", "mxfp8"),
        ("mxfp8_e4m3", "mxfp8"),
        ("fp4_nv16", "nvfp4"),
    ],
)
def test_activations_print_the_shortest_name(name: str, printed: str) -> None:
    assert ActivationSpec.parse(name).name == printed


@given(st.sampled_from((WeightSpec, ActivationSpec)), st.text(max_size=16))
def test_parsing_any_text_gives_a_format_or_the_error(
    kind: type[WeightSpec] | type[ActivationSpec], text: str
) -> None:
    try:
        spec = kind.parse(text)
    except UnsupportedError:
        return
    assert kind.parse(spec.name) == spec


def test_a_description_parses_to_itself() -> None:
    weight, activation = WeightSpec.parse("mxfp4"), ActivationSpec.parse("fp8")
    assert WeightSpec.parse(weight) is weight
    assert ActivationSpec.parse(activation) is activation


@pytest.mark.parametrize("spec", [WeightSpec.parse("nvfp4"), ActivationSpec.parse("int8")], ids=str)
def test_descriptions_are_values(spec: WeightSpec | ActivationSpec) -> None:
    for again in (copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert again == spec
        assert hash(again) == hash(spec)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.group_size = 64  # type: ignore[misc]


# --- what names mean -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("int4_g128", WeightSpec(dtypes.int4, "group", 128, scale_dtype=dtypes.float16)),
        ("uint4_g64_zp", WeightSpec(dtypes.uint4, "group", 64, zero_point="integer")),
        ("uint4_g64_fzp", WeightSpec(dtypes.uint4, "group", 64, zero_point="float")),
        ("int4_fzp", WeightSpec(dtypes.int4, "channel", zero_point="float")),
        ("int8", WeightSpec(dtypes.int8, "channel")),
        ("int4_channel", WeightSpec(dtypes.int4, "channel")),
        ("int4_g-1", WeightSpec(dtypes.int4, "channel")),
        ("int8_tensor", WeightSpec(dtypes.int8, "tensor")),
        ("fp8", WeightSpec(dtypes.float8e4m3, "channel", scale_dtype=dtypes.float32)),
        ("fp8_e5m2_tensor", WeightSpec(dtypes.float8e5m2, "tensor")),
        ("fp8_block128", WeightSpec(dtypes.float8e4m3, "block", block=(128, 128))),
        ("fp8_block64x128", WeightSpec(dtypes.float8e4m3, "block", block=(64, 128))),
        ("float8e3m4", WeightSpec(dtypes.float8e3m4, "channel")),
        ("e0m3_g16", WeightSpec(dtypes.float4e0m3, "group", 16)),
        (
            "int4_sbf16_g32_s2channel",
            WeightSpec(
                dtypes.int4, "group", 32, scale_dtype=dtypes.bfloat16, second_scale="channel"
            ),
        ),
        (
            "mxfp4",
            WeightSpec(dtypes.float4e2m1, "group", 32, scale_dtype=dtypes.float8e8m0),
        ),
        (
            "nvfp4",
            WeightSpec(
                dtypes.float4e2m1,
                "group",
                16,
                scale_dtype=dtypes.float8e4m3,
                second_scale="tensor",
            ),
        ),
    ],
)
def test_weight_name_means(name: str, expected: WeightSpec) -> None:
    assert WeightSpec.parse(name) == expected


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("mxfp4", "e2m1"),
        ("mxfp6_e3m2", "e3m2"),
        ("mxfp6_e2m3", "e2m3"),
        ("mxfp8", "e4m3"),
        ("mxfp8_e4m3", "e4m3"),
        ("mxfp8_e5m2", "e5m2"),
        ("mxint4", "int4"),
    ],
)
def test_mx_formats_have_powers_of_two_for_32_values(name: str, dtype: str) -> None:
    expected = WeightSpec(DataType.parse(dtype), "group", 32, scale_dtype=dtypes.float8e8m0)
    assert WeightSpec.parse(name) == expected
    if name in NAMED_ACTIVATIONS:
        activation = ActivationSpec.parse(name)
        assert (activation.dtype, activation.granularity) == (dtype, "block")
        assert (activation.group_size, activation.scale_dtype) == (32, "ue8m0")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fp16", ActivationSpec(dtypes.float16, "none")),
        ("bf16", ActivationSpec(dtypes.bfloat16, "none")),
        ("int8", ActivationSpec(dtypes.int8, "token")),
        ("int8_g-1", ActivationSpec(dtypes.int8, "token")),
        ("int8_tensor", ActivationSpec(dtypes.int8, "tensor", dynamic=False)),
        ("int8_tensor_static", ActivationSpec(dtypes.int8, "tensor", dynamic=False)),
        ("int8_tensor_dynamic", ActivationSpec(dtypes.int8, "tensor", dynamic=True)),
        ("int8_asym", ActivationSpec(dtypes.int8, "token", symmetric=False)),
        ("int4", ActivationSpec(dtypes.int4, "token")),
        ("fp8", ActivationSpec(dtypes.float8e4m3, "token", scale_dtype=dtypes.float32)),
        ("fp8_g128", ActivationSpec(dtypes.float8e4m3, "group", 128)),
        (
            "fp8_g128_sue8m0",
            ActivationSpec(dtypes.float8e4m3, "group", 128, scale_dtype=dtypes.float8e8m0),
        ),
        ("mxfp4", ActivationSpec(dtypes.float4e2m1, "block", 32, dtypes.float8e8m0)),
        ("nvfp4", ActivationSpec(dtypes.float4e2m1, "block", 16, dtypes.float8e4m3)),
        ("e0m3_nv16", ActivationSpec(dtypes.float4e0m3, "block", 16, dtypes.float8e4m3)),
    ],
)
def test_activation_name_means(name: str, expected: ActivationSpec) -> None:
    assert ActivationSpec.parse(name) == expected


def test_only_e4m3_block_scales_have_a_second_scale() -> None:
    assert ActivationSpec.parse("nvfp4").second_scale == "tensor"
    for name in ("fp16", "fp8", "mxfp4", "e2m1_mx16"):
        assert ActivationSpec.parse(name).second_scale == "none"


def test_fields_without_meaning_do_not_tell_descriptions_apart() -> None:
    plain = ActivationSpec(dtypes.bfloat16, "none")
    assert not plain.dynamic
    assert ActivationSpec(dtypes.bfloat16, "none", 0, dtypes.float16, dynamic=True) == plain
    assert WeightSpec(dtypes.int4, "group", -1) == WeightSpec(dtypes.int4, "channel")


def test_fields_take_names() -> None:
    assert WeightSpec("u4", "group", 64, scale_dtype="half") == WeightSpec.parse("uint4_g64")  # type: ignore[arg-type]
    assert ActivationSpec("fp8", "token") == ActivationSpec.parse("fp8")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_default_scales_keep_their_precision(dtype: DataType) -> None:
    scale_dtype = WeightSpec(dtype, "channel").scale_dtype
    largest_weight = 0.02
    smallest_normal = 2.0 ** (1 - scale_dtype.exponent_bias)
    assert largest_weight / max(dtype.max, -dtype.min) > smallest_normal


# --- extents and sizes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "n", "k", "shape", "group"),
    [
        ("int8_tensor", 300, 500, (1, 1), 500),
        ("int8", 300, 500, (300, 1), 500),
        ("int4_g-1", 300, 500, (300, 1), 500),
        ("int4_g128", 300, 512, (300, 4), 128),
        ("int4_g128", 300, 513, (300, 5), 128),
        ("int4_g128", 300, 1, (300, 1), 128),
        ("fp8_block128", 257, 384, (3, 3), 128),
        ("fp8_block64x128", 257, 385, (5, 4), 128),
        ("mxfp4", 2880, 2880, (2880, 90), 32),
    ],
)
def test_scale_shape(name: str, n: int, k: int, shape: tuple[int, int], group: int) -> None:
    spec = WeightSpec.parse(name)
    assert spec.scale_shape(n, k) == shape
    assert spec.scale_group(k) == group


@given(weight_specs(), st.integers(1, 300), st.integers(1, 300))
def test_sizes_are_what_counting_gives(spec: WeightSpec, n: int, k: int) -> None:
    heights = {"tensor": n, "channel": 1, "group": 1, "block": spec.block[0]}
    height, width = heights[spec.granularity], spec.scale_group(k)
    scales = {(row // height, column // width) for row in range(n) for column in range(k)}
    rows, columns = spec.scale_shape(n, k)
    assert scales == set(itertools.product(range(rows), range(columns)))
    bits = sum(8 for _ in range(n) for _ in range(0, k * spec.dtype.bits, 8))
    bits += len(scales) * spec.scale_dtype.bits
    bits += len(scales) * {"none": 0, "integer": 8, "float": spec.scale_dtype.bits}[spec.zero_point]
    bits += {"none": 0, "tensor": 32, "channel": 32 * n}[spec.second_scale]
    assert spec.bits_per_weight(n, k) == pytest.approx(bits / (n * k), rel=1e-12)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("itn4_g128", "no dtype and no known format.*Did you mean 'int4_g128'"),
        ("int4g128", "Did you mean 'int4_g128'"),
        ("mxfp5", "Did you mean 'mxfp"),
        ("mxfp6", "'mxfp6_e3m2'"),
        ("mxint8", "Did you mean 'mxint4'"),
        ("fp6_g32", "there are two of them.*'float6e3m2' or 'float6e2m3'"),
        ("float8_e4m3_g128", "infinities and ends at 240.*Did you mean 'float8e4m3'"),
        ("float8_e4m3fnuz_block128", "types whose negative zero is NaN"),
        ("nvpf4", "Did you mean 'nvfp4'"),
        ("", "no dtype and no known format.*Known are"),
        ("int4_g0", "group of 0 values is empty.*-1 for one scale per row"),
        ("int4_g-2", "group of -2 values is empty.*-1 for one scale per row"),
        ("int4_g", "part 'g' is unknown.*g128"),
        ("int4_gx", "part 'gx' is unknown"),
        ("int4_chanel", "part 'chanel' is unknown.*'channel'"),
        ("int4_g128_foo", "part 'foo' is unknown.*Known are"),
        ("int4__g128", "part '' is unknown"),
        ("int4_g32_g64", "'g64' gives granularity a second time"),
        ("int4_channel_tensor", "'tensor' gives granularity a second time"),
        ("int4_g128_zp", "integer zero points belong to unsigned weights.*Use uint4"),
        ("fp8_zp", "zero points belong to integer weights, not to float8e4m3"),
        ("fp4_g16_fzp", "zero points belong to integer weights, not to float4e2m1"),
        ("e0m3_g16_zp", "zero points belong to integer weights, not to float4e0m3"),
        ("uint4_g32_fzp_sue8m0", "float8e8m0 is too coarse.*float16, bfloat16 or float32"),
        ("mxfp4_g16", "mxfp4 says everything already.*'float4e2m1' and its parts"),
        ("mxfp8_channel", "mxfp8 says everything already"),
        ("nvfp4_zp", "nvfp4 says everything already"),
        ("fp8_block0", "block of .0, 0. is empty"),
        ("fp8_block128x0", "block of .128, 0. is empty"),
        ("bf16", "bfloat16 has more than 8 bits"),
        ("ue8m0", "float8e8m0 is a type for scales"),
        ("int4_g32_se5m2", "float8e5m2 is no type for scales.*Possible: float16"),
        ("int4_g32_sue4m3", "float8ue4m3 is no type for scales.*float8e4m3"),
        ("int4_tensor_s2tensor", "both scales would be per tensor"),
        ("int4_s2channel", "both scales would be per channel"),
        ("fp4_fzp", "float4e2m1 takes tensor, g128, block128, sbf16, s2tensor"),
        ("int4_g128_zp", "int4 takes tensor, g128, block128, fzp, sbf16, s2tensor"),
        ("fp4_zpp", "'zpp' is unknown. Known are tensor, channel, g128, block128, sbf16, s2tensor"),
        ("int4_token", "'token' is one of activation formats. int4 takes .*fzp"),
        ("uint4_asym", "'asym' is one of activation formats. uint4 takes .*, zp, fzp"),
        ("fp16_zp", "more than 8 bits. Use a type of 1 to 8 bits.$"),
    ],
)
def test_weight_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        WeightSpec.parse(name)
    assert caught.value.asked == f"weight format {name!r}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"granularity": "row"}, "'row' is no granularity.*Known are tensor"),
        ({"granularity": "groups"}, "Did you mean 'group'"),
        ({"granularity": "group"}, "group of 0 values is empty"),
        ({"granularity": "channel", "group_size": 32}, "group_size has no meaning with channel"),
        ({"granularity": "channel", "group_size": -1}, "group_size has no meaning with channel"),
        ({"granularity": "group", "group_size": 32.0}, "32.0 is no whole number"),
        ({"granularity": "group", "group_size": 32, "block": (1, 32)}, "block has no meaning"),
        ({"granularity": "block"}, "block of .0, 0. is empty"),
        ({"granularity": "block", "block": (128,)}, "a block is .rows"),
        ({"granularity": "block", "block": 128}, "a block is .rows"),
        ({"granularity": "block", "block": (128, "128")}, "'128' is no whole number"),
        ({"granularity": "tensor", "zero_point": "int"}, "'int' is no kind of zero point"),
        ({"granularity": "tensor", "second_scale": "group"}, "'group' is no second scale"),
        ({"granularity": "tensor", "scale_dtype": "fp9"}, "dtype 'fp9'"),
        ({"granularity": "tensor", "dtype": "int44"}, "dtype 'int44'.*Did you mean 'int4'"),
    ],
    ids=str,
)
def test_weight_fields_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        WeightSpec(**{"dtype": dtypes.uint4, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fp31", "no dtype and no known format"),
        ("bf61", "Did you mean 'bf16'"),
        ("nvpf4", "Did you mean 'nvfp4'"),
        ("mxint4", "Did you mean"),
        ("fp32", "at most 16 bits.*float16 or bfloat16"),
        ("bf16_token", "bfloat16 with token scales"),
        ("uint8", "activations have a sign"),
        ("ue8m0", "activations have a sign"),
        ("fp8_asym", "zero points belong to integer activations"),
        ("int4_mx32_asym", "zero points belong to integer activations without block scales"),
        ("int8_static", "scales per token cannot be known beforehand"),
        ("fp8_g128_static", "scales per group cannot be known beforehand"),
        ("int8_g0", "group of 0 values is empty"),
        ("int8_g-4", "group of -4 values is empty"),
        ("int8_sue8m0", "float8e8m0 scales do not go with granularity 'token'"),
        ("fp8_g32_se4m3", "float8e4m3 scales do not go with granularity 'group'"),
        ("int8_tokn", "part 'tokn' is unknown"),
        ("int8_static_dynamic", "'dynamic' gives dynamic a second time"),
        ("mxfp8_g128", "mxfp8 says everything already"),
        ("fp8_mx32_sfp16", "'sfp16' gives scale_dtype a second time"),
        ("fp8_g128_asym", "float8e4m3 takes tensor, g128, mx32, sbf16"),
        ("fp16_tensor", "Nothing can follow float16"),
        ("int8_zp", "'zp' is one of weight formats. int8 takes tensor, g128, mx32, asym, sbf16"),
        ("uint8_zp", "activations have a sign"),
    ],
)
def test_activation_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        ActivationSpec.parse(name)
    assert caught.value.asked == f"activation format {name!r}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"granularity": "row"}, "'row' is no granularity"),
        ({"granularity": "none"}, "int8 with none scales"),
        ({"granularity": "token", "group_size": 16}, "group_size has no meaning with token"),
        ({"granularity": "group", "group_size": "16"}, "'16' is no whole number"),
        (
            {"granularity": "block", "group_size": 64, "scale_dtype": dtypes.float8e8m0},
            "no instruction takes float8e8m0 scales of 64 values",
        ),
        (
            {"granularity": "block", "group_size": 32, "scale_dtype": dtypes.float8e4m3},
            "no instruction takes float8e4m3 scales of 32 values",
        ),
        ({"granularity": "block", "group_size": 32}, "no instruction takes float32 scales"),
    ],
    ids=str,
)
def test_activation_fields_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        ActivationSpec(dtypes.int8, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [WeightSpec, ActivationSpec])
def test_what_is_no_string_is_refused(kind: type[WeightSpec] | type[ActivationSpec]) -> None:
    with pytest.raises(UnsupportedError, match="it is no string"):
        kind.parse(None)  # type: ignore[arg-type]


# --- the page ------------------------------------------------------------------------------------


def _table(title: str) -> list[list[str]]:
    """The cells of the first table below a heading of the page, without their backquotes."""
    section = PAGE.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    lines = re.findall(r"^\| (.*) \|$", section, flags=re.MULTILINE)
    return [[cell.strip("`") for cell in line.split(" | ")] for line in lines[1:]]


def _values(dtype: DataType) -> str:
    """What the codes of a type stand for, in a few words."""
    codes = {"int": "two's complement", "sign_magnitude": "sign and magnitude"}.get(dtype.kind)
    if dtype.kind != "float":
        limits = f"{dtype.min:g} to {dtype.max:g}"
        return f"{codes}, {limits}" if codes else limits
    specials = {"none": "", "fn": ", NaN", "ieee": ", infinity, NaN"}[dtype.specials]
    return f"up to ±{dtype.max:g}{specials}"


def _scale_extent(spec: WeightSpec | ActivationSpec) -> str:
    if spec.granularity == "block" and isinstance(spec, WeightSpec):
        return f"block of {spec.block[0]} x {spec.block[1]}"
    if spec.granularity in ("group", "block"):
        return f"group of {spec.group_size}"
    return {"channel": "row", "none": "none"}.get(spec.granularity, spec.granularity)


def weight_row(name: str) -> list[str]:
    """What the page must say about a weight format."""
    spec = WeightSpec.parse(name)
    return [
        name,
        spec.dtype.name,
        _values(spec.dtype),
        _scale_extent(spec),
        spec.scale_dtype.name,
        spec.zero_point,
        spec.second_scale,
        f"{spec.bits_per_weight(4096, 4096) / 8:.6g}",
    ]


def activation_row(name: str) -> list[str]:
    """What the page must say about an activation format."""
    spec = ActivationSpec.parse(name)
    scaled = spec.granularity != "none"
    return [
        name,
        spec.dtype.name,
        _scale_extent(spec),
        spec.scale_dtype.name if scaled else "none",
        ("at run time" if spec.dynamic else "beforehand") if scaled else "none",
        "none" if spec.symmetric else "yes",
        spec.second_scale,
    ]


def dtype_row(dtype: DataType) -> list[str]:
    """What the page must say about a number format of at most 8 bits."""
    table = dtype.decode_table()
    smallest = min(value for value in table if value > 0)
    specials = {"none": "all codes are numbers", "ieee": "0x7C infinity, 0x7D to 0x7F NaN"}
    return [
        dtype.name,
        dtype.ptx,
        f"{dtype.max:g}" if dtype.max < 1e6 else f"2^{dtype.exponent_bias}",
        f"{smallest:g}" if smallest > 0.01 else f"2^{np.log2(smallest):g}",
        specials.get(dtype.specials, f"0x{dtype.nan_code or 0:02X} NaN"),
    ]


DOCUMENTED_DTYPES = [
    dtypes.float4e2m1,
    dtypes.float4e0m3,
    dtypes.float6e3m2,
    dtypes.float6e2m3,
    dtypes.float8e4m3,
    dtypes.float8e5m2,
    dtypes.float8e3m4,
    dtypes.float8ue4m3,
    dtypes.float8e8m0,
]


def test_page_lists_the_named_weights() -> None:
    rows = {row[0]: row for row in _table("Weights")}
    assert set(NAMED_WEIGHTS) <= set(rows)
    for name, row in rows.items():
        assert row == weight_row(name)


def test_page_lists_the_named_activations() -> None:
    rows = {row[0]: row for row in _table("Activations")}
    assert set(NAMED_ACTIVATIONS) <= set(rows)
    for name, row in rows.items():
        assert row == activation_row(name)


def test_page_lists_the_floats() -> None:
    rows = _table("Number formats")
    assert rows == [dtype_row(dtype) for dtype in DOCUMENTED_DTYPES]
    module_floats = {
        value
        for value in vars(dtypes).values()
        if isinstance(value, DataType) and value.is_narrow and value.is_float
    }
    assert module_floats == set(DOCUMENTED_DTYPES)


def test_docstring_examples() -> None:
    assert doctest.testmod(formats).failed == 0
