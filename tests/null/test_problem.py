"""Products: names, shorthand, checks of sizes and formats, and the page's table of shorthand."""

import copy
import doctest
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from humming import dtypes, problem
from humming.errors import UnsupportedError
from humming.formats import ActivationSpec, WeightSpec
from humming.problem import LARGEST_SIZE, GemmProblem

SHORTHAND = {
    "w4a16": "int4_g128 x fp16",
    "w4a16 bf16": "int4_g128 x bf16",
    "w4a16 mxfp4": "mxfp4 x fp16",
    "w4a16 uint4_g64_zp": "uint4_g64_zp x fp16",
    "w3a16": "int3_g128 x fp16",
    "w8a16": "int8 x fp16",
    "w8a16 fp8": "fp8 x fp16",
    "w8a8": "int8 x int8",
    "w8a8 int8": "int8 x int8",
    "w8a8 fp8": "fp8 x fp8",
    "w8a8 mxfp8": "mxfp8 x mxfp8",
    "w4a8": "int4_g128 x int8",
    "w4a8 int8": "int4_g128 x int8",
    "w4a8 fp8": "int4_g128 x fp8",
    "w4afp8": "int4_g128 x fp8",
    "w4a4": "int4_g128 x int4",
    "w4a4 int4": "int4_g128 x int4",
    "w4a4 nvfp4": "nvfp4 x nvfp4",
    "w4a4 mxfp4": "mxfp4 x mxfp4",
    "e3m4": "float8e3m4 x float8e3m4",
    "e0m3": "float4e0m3_g16_se4m3_s2tensor x float4e0m3_nv16",
}


def _formats(text: str) -> tuple[WeightSpec, ActivationSpec]:
    weight, activation = text.split(" x ")
    return WeightSpec.parse(weight), ActivationSpec.parse(activation)


@pytest.mark.parametrize("short", SHORTHAND)
@pytest.mark.parametrize("change", [str, str.upper, "  {}\t".format, lambda s: s.replace(" ", "_")])
def test_shorthand(short: str, change: Any) -> None:
    parsed = GemmProblem.parse(change(short), 96, 224)
    assert (parsed.weight, parsed.activation) == _formats(SHORTHAND[short])
    assert (parsed.n, parsed.k) == (96, 224)


@pytest.mark.parametrize(
    "text",
    [
        "int4_g128 x bf16",
        "mxfp4 x fp8",
        "nvfp4 x nvfp4",
        "mxfp4 x mxfp8",
        "e3m4 x e3m4",
        "uint4_g64_zp x fp16",
        "fp8_block128 x fp8_g128",
    ],
)
@pytest.mark.parametrize("times", [" x ", " X ", "  x  ", "\N{MULTIPLICATION SIGN}"])
def test_products_of_formats(text: str, times: str) -> None:
    parsed = GemmProblem.parse(text.replace(" x ", times), 64, 64)
    assert (parsed.weight, parsed.activation) == _formats(text)


weights = st.sampled_from(["int4_g128", "uint4_g64_zp", "fp8_block128", "mxfp4", "nvfp4", "e3m4"])
activations = st.sampled_from(["fp16", "bf16", "int8", "int8_tensor", "fp8_g128", "mxfp8", "nvfp4"])


@given(weights, activations, st.sampled_from(["fp16", "bf16", "fp32"]))
def test_names_round_trip(weight: str, activation: str, out: str) -> None:
    made = GemmProblem(8, 16, *_formats(f"{weight} x {activation}"), dtypes.DataType.parse(out))
    assert GemmProblem.parse(made.name, 8, 16) == made
    assert made.name in str(made)
    assert "n=8, k=16" in str(made)


def test_name_is_readable() -> None:
    assert GemmProblem.parse("int4_g128 x bf16", 8, 8).name == "int4_g128 x bfloat16"
    assert GemmProblem.parse("w8a8 fp8 -> fp32", 8, 8).name == "fp8 x fp8 -> float32"
    assert GemmProblem.parse("w8a8 fp8 -> bf16", 8, 8).name == "fp8 x fp8"


@pytest.mark.parametrize(
    ("text", "out"),
    [
        ("int4_g128 x fp16", "float16"),
        ("int4_g128 x bf16", "bfloat16"),
        ("w8a8 int8", "bfloat16"),
        ("w4a16->fp32", "float32"),
        ("fp8 x fp8 -> half", "float16"),
    ],
)
def test_output_type(text: str, out: str) -> None:
    assert GemmProblem.parse(text, 8, 8).out_dtype == out


def test_overrides() -> None:
    parsed = GemmProblem.parse(
        "w4a16", 8, 8, bias=True, experts=4, out_dtype="fp32", batch_invariant=True
    )
    assert (parsed.bias, parsed.experts, parsed.batch_invariant) == (True, 4, True)
    assert parsed.out_dtype == dtypes.float32
    assert parsed.deterministic
    assert not parsed.fp16_accumulation
    assert not parsed.allow_undocumented


def test_an_override_outranks_the_text() -> None:
    parsed = GemmProblem.parse("w4a16 -> fp32", 8, 8, out_dtype="bf16")
    assert parsed.out_dtype == dtypes.bfloat16


def test_override_of_a_format_decides_the_output_type() -> None:
    parsed = GemmProblem.parse("w4a16", 8, 8, activation="bf16", weight="mxfp4")
    assert parsed.name == "mxfp4 x bfloat16"
    assert parsed.out_dtype == dtypes.bfloat16


def test_fields_take_names_and_numpy_sizes() -> None:
    made = GemmProblem(np.int64(8), np.int32(16), "mxfp4", "bf16", "half")  # type: ignore[arg-type]
    assert made == GemmProblem.parse("mxfp4 x bf16 -> fp16", 8, 16)
    assert type(made.n) is int


def test_problems_are_values() -> None:
    made = GemmProblem.parse("nvfp4 x nvfp4", 64, 64)
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert again == made
        assert hash(again) == hash(made)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w4a61", "neither 'WEIGHT x ACTIVATION' nor a known shorthand.*Did you mean 'w4a16'"),
        ("w9a8", "Did you mean"),
        ("w4a", "Did you mean 'w4a"),
        ("w4 a16", "Did you mean 'w4a16'"),
        ("", "Known are w4a16"),
        ("int4_g128 x", "neither"),
        ("int4_g128xbf16", "Did you mean 'int4_g128 x bf16'"),
        ("a x b x c", "neither"),
        ("int4_g128", "names weights but no activations.*'int4_g128 x bf16'"),
        ("mxfp4", "names weights but no activations.*'mxfp4 x fp8'"),
        ("w4a8 fp16", "fp16 has 16 bits, which neither side has"),
        ("w8a8 mxfp4", "mxfp4 has 4 bits, which neither side has"),
        ("w4a8 fp9", "weight format 'fp9'.*Did you mean"),
        ("w4a8 uint8", "activations have a sign"),
        ("itn4 x bf16", "weight format 'itn4'.*Did you mean 'int4'"),
        ("int4 x bf61", "activation format 'bf61'.*Did you mean 'bf16'"),
        ("w4a16 x bf16", "weight format 'w4a16'"),
        ("w4a16 -> int8", "output in int8.*Possible: float16, bfloat16, float32"),
        ("w4a16 -> fp31", "dtype 'fp31'"),
        (None, "it is no string"),
    ],
)
def test_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        GemmProblem.parse(text, 64, 64)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n=0: n is less than 1"),
        ({"k": -16}, "k=-16: k is less than 1"),
        ({"n": 16.0}, "n is no whole number"),
        ({"k": None}, "k is no whole number"),
        ({"experts": -1}, "experts is less than 0"),
        ({"n": LARGEST_SIZE + 1}, f"n={LARGEST_SIZE + 1}: n is beyond {LARGEST_SIZE}"),
        ({"k": 2**31}, f"k is beyond {LARGEST_SIZE}, and kernels count in 32 bits"),
        ({"k": 2**70}, "k is beyond"),
        ({"weight": WeightSpec("int4", "group", 2**31)}, "a scale's extent is beyond"),
        ({"weight": WeightSpec("int4", "block", block=(2**31, 16))}, "a scale's extent is beyond"),
        ({"activation": ActivationSpec("int8", "group", 2**31)}, "a scale's extent is beyond"),
        ({"biass": True}, "no such property.*Did you mean 'bias'"),
        ({"out_dtype": "fp8"}, "output in float8e4m3"),
    ],
    ids=str,
)
def test_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        GemmProblem.parse("w4a16", **{"n": 16, "k": 16, **fields})


@given(st.text(alphabet="w4a816 xfpint_g->bmv", max_size=14))
def test_parsing_any_text_gives_a_problem_or_the_error(text: str) -> None:
    try:
        parsed = GemmProblem.parse(text, 8, 8)
    except UnsupportedError:
        return
    assert GemmProblem.parse(parsed.name, 8, 8) == parsed


def test_page_lists_the_shorthand() -> None:
    page = (Path(__file__).parents[2] / "docs/formats.md").read_text()
    section = page.split("## Products\n", 1)[1]
    assert dict(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", section, re.MULTILINE)) == SHORTHAND


def test_docstring_examples() -> None:
    assert doctest.testmod(problem).failed == 0
