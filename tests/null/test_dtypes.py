"""Number formats: every code of every narrow type, rounding, limits, and names."""

import copy
import doctest
import pickle
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from humming import dtypes
from humming.dtypes import NARROW, WIDE, DataType
from humming.errors import UnsupportedError

SIGN_BIT = ("float", "sign_magnitude")


@pytest.fixture
def rng() -> np.random.Generator:
    seed = np.random.SeedSequence().entropy
    print("seed", seed)
    return np.random.default_rng(seed)


def _exact(exponent_bits: int, mantissa_bits: int, code: int) -> Fraction:
    """IEEE 754's formula for a code without special meaning, from its binary digits."""
    digits = f"{code:0{1 + exponent_bits + mantissa_bits}b}"
    sign = -1 if digits[0] == "1" else 1
    exponent = int(digits[1 : 1 + exponent_bits], 2)
    fraction = Fraction(int(digits[1 + exponent_bits :] or "0", 2), 2**mantissa_bits)
    bias = 2 ** (exponent_bits - 1) - 1
    if exponent == 0:
        return sign * fraction * Fraction(2) ** (1 - bias)
    return sign * (1 + fraction) * Fraction(2) ** (exponent - bias)


def _same(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal numbers, NaN where NaN is expected, and equal signs of zeros."""
    np.testing.assert_array_equal(actual, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(actual[numbers]), np.signbit(expected[numbers]))


# --- decoding: all codes against sources independent of the tables -------------------------------


@pytest.mark.parametrize("dtype", [d for d in NARROW if d.kind == "float"], ids=str)
def test_floats_follow_the_ieee_formula(dtype: DataType) -> None:
    table = dtype.decode_table()
    assert table.shape == (2**dtype.bits,)
    special = {"float8e4m3": {0x7F}, "float8e3m4": {0x7F}, "float8e5m2": {0x7C, 0x7D, 0x7E, 0x7F}}
    for code, value in enumerate(table):
        magnitude = code % 2 ** (dtype.bits - 1)
        if magnitude not in special.get(dtype.name, ()):
            assert Fraction(value) == _exact(dtype.exponent_bits, dtype.mantissa_bits, code)
            assert np.signbit(value) == (code != magnitude)
        elif dtype == "float8e5m2" and magnitude == 0x7C:
            assert value == (np.inf if code == magnitude else -np.inf)
        else:
            assert np.isnan(value)


def test_e5m2_is_the_upper_byte_of_a_half() -> None:
    halves = [struct.unpack("<e", bytes([0, code]))[0] for code in range(256)]
    _same(dtypes.float8e5m2.decode_table(), np.array(halves))


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"),
    [
        (dtypes.float8e4m3, torch.float8_e4m3fn),
        (dtypes.float8e5m2, torch.float8_e5m2),
        (dtypes.float8e8m0, torch.float8_e8m0fnu),
    ],
    ids=lambda value: str(value),
)
def test_all_codes_as_torch_reads_them(dtype: DataType, torch_dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    expected = codes.view(torch_dtype).to(torch.float32).double().numpy()
    # torch flushes the one subnormal float32, 2**-127, of ue8m0 on some processors.
    start = 1 if dtype == "ue8m0" else 0
    _same(dtype.decode_table()[start:], expected[start:])


def test_ue8m0_holds_powers_of_two() -> None:
    table = dtypes.float8e8m0.decode_table()
    assert [Fraction(v) for v in table[:255]] == [Fraction(2) ** (c - 127) for c in range(255)]
    assert np.isnan(table[255])


def test_ue4m3_is_e4m3_without_its_sign() -> None:
    table = dtypes.float8ue4m3.decode_table()
    _same(table[:128], dtypes.float8e4m3.decode_table()[:128])
    _same(table[128:], table[:128])


def test_e2m1_codes() -> None:
    positive = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    _same(dtypes.float4e2m1.decode_table(), np.concatenate([positive, -positive]))


@pytest.mark.parametrize("bits", range(2, 9))
def test_e0m_types_are_signed_magnitudes(bits: int) -> None:
    magnitudes = np.arange(2.0 ** (bits - 1))
    table = DataType.parse(f"float{bits}e0m{bits - 1}").decode_table()
    _same(table, np.concatenate([magnitudes, -magnitudes]))


@pytest.mark.parametrize("bits", range(1, 9))
def test_integers(bits: int) -> None:
    codes = np.arange(2**bits)
    _same(DataType.parse(f"uint{bits}").decode_table(), codes.astype(np.float64))
    # Two's complement: shift the code to the top of an int8 and let the machine extend the sign.
    signed = (codes << (8 - bits)).astype(np.uint8).view(np.int8) >> (8 - bits)
    _same(DataType.parse(f"int{bits}").decode_table(), signed.astype(np.float64))


def test_tables_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        dtypes.int4.decode_table()[0] = 1


@pytest.mark.parametrize(
    ("name", "largest", "lowest"),
    [
        ("e4m3", 448, -448),
        ("e5m2", 57344, -57344),
        ("e3m4", 30, -30),
        ("e2m1", 6, -6),
        ("e3m2", 28, -28),
        ("e2m3", 7.5, -7.5),
        ("e0m3", 7, -7),
        ("ue4m3", 448, 0),
        ("ue8m0", 2.0**127, 2.0**-127),
        ("int4", 7, -8),
        ("uint4", 15, 0),
        ("int1", 0, -1),
    ],
)
def test_limits(name: str, largest: float, lowest: float) -> None:
    dtype = DataType.parse(name)
    assert (dtype.max, dtype.min) == (largest, lowest)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_limits_of_wide_types(dtype: DataType) -> None:
    info = torch.finfo(getattr(torch, dtype.name))
    assert (dtype.max, dtype.min, dtype.bits) == (info.max, info.min, info.bits)
    assert 2.0**-dtype.mantissa_bits == info.eps
    assert 2.0 ** (1 - dtype.exponent_bias) == info.tiny


# --- encoding ------------------------------------------------------------------------------------


def _finite_codes(dtype: DataType) -> np.ndarray:
    codes = np.arange(2**dtype.bits)
    codes = codes[np.isfinite(dtype.decode_table())]
    # Bit 7 of ue4m3 is ignored when read and never written.
    return codes[codes < 128] if dtype == "ue4m3" else codes


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_number_has_its_own_code(dtype: DataType) -> None:
    codes = _finite_codes(dtype)
    np.testing.assert_array_equal(dtype.encode(dtype.decode_table()[codes]), codes)


def _nearest_by_search(dtype: DataType, value: float) -> int:
    """The right code, found by comparing exact distances to every finite number."""
    codes = [int(code) for code in _finite_codes(dtype)]
    if dtype.kind in SIGN_BIT:
        codes = [c for c in codes if (c >> (dtype.bits - 1)) == int(np.signbit(value))]
    table = dtype.decode_table()
    clamped = min(max(value, dtype.min), dtype.max)
    distances = {c: abs(Fraction(table[c]) - Fraction(clamped)) for c in codes}
    least = min(distances.values())
    nearest = [c for c, distance in distances.items() if distance == least]
    return nearest[0] if len(nearest) == 1 else next(c for c in nearest if c % 2 == 0)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_encode_finds_the_nearest(dtype: DataType, rng: np.random.Generator) -> None:
    table = dtype.decode_table()[_finite_codes(dtype)]
    spread = rng.choice(table, 60) * rng.uniform(0.4, 1.6, 60)
    noise = rng.normal(size=60) * min(dtype.max + 1, 300)
    values = np.concatenate([spread, noise, [0.0, -0.0, 1e300, -1e300, 5e-324, -5e-324]])
    expected = [_nearest_by_search(dtype, value) for value in values]
    np.testing.assert_array_equal(dtype.encode(values), expected)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_ties_go_to_the_even_code(dtype: DataType) -> None:
    table = dtype.decode_table()
    values = np.unique(table[_finite_codes(dtype)])
    ties = (values[:-1] + values[1:]) / 2
    codes = dtype.encode(ties)
    assert np.all(codes % 2 == 0)
    np.testing.assert_array_equal(codes, [_nearest_by_search(dtype, tie) for tie in ties])
    # A hair to either side of it there is no tie.
    chosen = [dtype.encode(np.nextafter(ties, side)) for side in (-np.inf, np.inf)]
    np.testing.assert_array_equal(table[chosen[0]], values[:-1])
    np.testing.assert_array_equal(table[chosen[1]], values[1:])


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"),
    [
        (dtypes.float8e4m3, torch.float8_e4m3fn),
        (dtypes.float8e5m2, torch.float8_e5m2),
    ],
    ids=lambda value: str(value),
)
def test_encode_agrees_with_torch(
    dtype: DataType, torch_dtype: torch.dtype, rng: np.random.Generator
) -> None:
    values = (rng.normal(size=20000) * 2.0 ** rng.integers(-12, 9, 20000)).astype(np.float32)
    values = np.clip(values, dtype.min, dtype.max)
    expected = torch.from_numpy(values).to(torch_dtype).view(torch.uint8).numpy()
    np.testing.assert_array_equal(dtype.encode(values), expected)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_encode_saturates(dtype: DataType) -> None:
    beyond = dtype.encode([np.inf, -np.inf, dtype.max * 4 + 1, -abs(dtype.min) * 4 - 1])
    table = dtype.decode_table()
    assert list(table[beyond]) == [dtype.max, dtype.min, dtype.max, dtype.min]


@pytest.mark.parametrize("dtype", [d for d in NARROW if d.specials == "none"], ids=str)
def test_nan_is_refused_where_there_is_none(dtype: DataType) -> None:
    assert dtype.nan_code is None
    assert np.isfinite(dtype.decode_table()).all()
    with pytest.raises(UnsupportedError, match=f"encode NaN as {dtype}.*Replace NaN first"):
        dtype.encode([0.0, np.nan])


@pytest.mark.parametrize("dtype", [d for d in NARROW if d.specials != "none"], ids=str)
def test_nan_has_its_code(dtype: DataType) -> None:
    codes = dtype.encode([[np.nan, 1.0], [-np.nan, np.inf]])
    assert codes[0, 0] == codes[1, 0] == dtype.nan_code
    assert np.isnan(dtype.decode_table()[dtype.nan_code])
    assert np.isfinite(dtype.decode_table()[codes[:, 1]]).all()


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_negative_zero(dtype: DataType) -> None:
    code = int(dtype.encode(-0.0))
    if dtype.kind in SIGN_BIT:
        assert code == 2 ** (dtype.bits - 1)
        tiny = dtype.encode(-1e-300)
        assert np.signbit(dtype.decode_table()[tiny]), "what rounds to zero keeps its sign"
    else:
        assert code == 0


def test_int8_rounds_half_to_even_and_does_not_wrap() -> None:
    values = [127.5, 128.0, -128.5, -129.0, 0.5, 1.5, -0.5, -1.5]
    expected = np.array([127, 127, -128, -128, 0, 2, 0, -2], dtype=np.int8)
    np.testing.assert_array_equal(dtypes.int8.encode(values).view(np.int8), expected)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3, 4)], ids=str)
def test_encode_keeps_the_shape(shape: tuple[int, ...]) -> None:
    codes = dtypes.float4e2m1.encode(np.ones(shape, dtype=np.float16))
    assert (codes.shape, codes.dtype) == (shape, np.uint8)
    np.testing.assert_array_equal(codes, np.full(shape, 2))


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_wide_types_have_no_tables(dtype: DataType) -> None:
    with pytest.raises(UnsupportedError, match="more than 8 bits"):
        dtype.decode_table()
    with pytest.raises(UnsupportedError, match="more than 8 bits"):
        dtype.encode([1.0])


# --- names ---------------------------------------------------------------------------------------


def test_types_that_there_are() -> None:
    names = [dtype.name for dtype in NARROW]
    expected = {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 9)}
    expected |= {f"float{1 + e + m}e{e}m{m}" for e in range(8) for m in range(8 - e) if e + m}
    expected |= {"float8e8m0", "float8ue4m3"}
    assert len(names) == len(set(names))
    assert set(names) == expected


@given(st.sampled_from((*NARROW, *WIDE)), st.sampled_from(("name", "ptx")), st.data())
def test_names_round_trip(dtype: DataType, attribute: str, data: st.DataObject) -> None:
    letters = getattr(dtype, attribute)
    text = "".join(data.draw(st.sampled_from((c, c.upper()))) for c in letters)
    assert DataType.parse(f" {text}\n") is DataType.parse(dtype.name)
    assert DataType.parse(text) == dtype == text


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("fp16", "float16"),
        ("half", "float16"),
        ("f16", "float16"),
        ("bf16", "bfloat16"),
        ("fp32", "float32"),
        ("float", "float32"),
        ("f32", "float32"),
        ("fp8", "float8e4m3"),
        ("fp4", "float4e2m1"),
        ("e4m3", "float8e4m3"),
        ("e5m2", "float8e5m2"),
        ("e2m1", "float4e2m1"),
        ("e3m4", "float8e3m4"),
        ("e0m3", "float4e0m3"),
        ("ue8m0", "float8e8m0"),
        ("e8m0", "float8e8m0"),
        ("ue4m3", "float8ue4m3"),
        ("s4", "int4"),
        ("u4", "uint4"),
        ("s8", "int8"),
        ("u8", "uint8"),
        ("fp8_e4m3", "float8e4m3"),
        ("fp8_e5m2", "float8e5m2"),
        ("F8_E4M3", "float8e4m3"),
        ("F8_E8M0", "float8e8m0"),
        ("float8_e4m3fn", "float8e4m3"),
        ("float8_e5m2", "float8e5m2"),
        ("float8_e8m0fnu", "float8e8m0"),
        ("float6_e2m3fn", "float6e2m3"),
        ("float6_e3m2fn", "float6e3m2"),
        ("float4_e2m1fn", "float4e2m1"),
        ("float4_e2m1fn_x2", "float4e2m1"),
        ("torch.float8_e4m3fn", "float8e4m3"),
        ("e2m5", "float8e2m5"),
    ],
)
def test_alias(alias: str, name: str) -> None:
    dtype = DataType.parse(alias)
    assert dtype.name == name
    assert dtype == alias


@pytest.mark.parametrize(
    ("torch_dtype", "name"),
    [
        (torch.float16, "float16"),
        (torch.bfloat16, "bfloat16"),
        (torch.float32, "float32"),
        (torch.int8, "int8"),
        (torch.uint8, "uint8"),
        (torch.uint4, "uint4"),
        (torch.float8_e4m3fn, "float8e4m3"),
        (torch.float8_e5m2, "float8e5m2"),
        (torch.float8_e8m0fnu, "float8e8m0"),
        (torch.float4_e2m1fn_x2, "float4e2m1"),
    ],
    ids=str,
)
def test_torch_types(torch_dtype: torch.dtype, name: str) -> None:
    assert DataType.parse(torch_dtype).name == name


def test_numpy_types() -> None:
    for source in (np.float16, np.dtype("float16")):
        assert DataType.parse(source) == "float16"
    assert DataType.parse(np.uint8) == "uint8"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("itn4", "'int4'"),
        ("int9", "'int8'"),
        ("bfoat16", "'bfloat16'"),
        ("fp9", "'fp8'"),
        ("e4m4", "'e4m3'|'e4m2'"),
        ("flaot8e4m3", "'float8e4m3'"),
        ("float8e2m1", "float"),
        ("fp6", "'float6e3m2' or 'float6e2m3'"),
        ("float8_e4m3", "infinities and ends at 240.*'float8e4m3'"),
        ("float8_e3m4", "infinities and ends at 15.5.*'float8e3m4'"),
        ("float8_e4m3fnuz", "negative zero is NaN"),
        ("float8_e5m2fn", "Did you mean"),
        ("float8_ue4m3fnu", "Did you mean"),
        ("zzz", "Known are"),
        ("", "Known are"),
        (None, "no number format"),
        (float, "no number format"),
        (torch.float64, "no number format"),
        (torch.int32, "no number format"),
    ],
    ids=repr,
)
def test_wrong_names_get_a_suggestion(wrong: object, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        DataType.parse(wrong)
    assert caught.value.asked.startswith("dtype ")
    assert caught.value.possible.endswith(("?", "."))


@given(st.text(max_size=12))
def test_parsing_any_text_gives_a_type_or_the_error(text: str) -> None:
    try:
        assert DataType.parse(text) == text
    except UnsupportedError:
        assert all(dtype != text for dtype in NARROW)


def test_equality_and_hash() -> None:
    assert dtypes.float8e4m3 == "fp8"
    assert dtypes.float8e4m3 != "fp4"
    assert dtypes.float8e4m3 != "no such type"
    assert dtypes.float8e4m3 != 8
    assert {dtypes.int4: 1}["int4"] == 1
    for again in (copy.deepcopy(dtypes.int4), pickle.loads(pickle.dumps(dtypes.int4))):
        assert again == dtypes.int4
        assert hash(again) == hash(dtypes.int4)
    assert (str(dtypes.int4), repr(dtypes.int4)) == ("int4", "DataType('int4')")


@pytest.mark.parametrize(
    "fields",
    [
        ("int4", "integer", 4, 0, 0, "none"),
        ("int9", "int", 9, 0, 0, "none"),
        ("int5", "int", 4, 0, 0, "none"),
        ("int4", "int", 4, 0, 0, "fn"),
        ("float8e4m3", "float", 8, 4, 3, "ieee"),
        ("float8e4m3", "float", 8, 4, 3, "sometimes"),
        ("float8e4m3", "float", 8, 5, 3, "fn"),
        ("float4e0m3", "float", 4, 0, 3, "none"),
        ("float9e4m4", "float", 9, 4, 4, "none"),
        ("float8ue5m3", "ufloat", 8, 5, 3, "fn"),
        ("float16", "float", 16, 8, 7, "ieee"),
        ("e4m3", "float", 8, 4, 3, "fn"),
    ],
    ids=lambda fields: "-".join(map(str, fields)),
)
def test_contradictory_fields_are_refused(fields: tuple[str, str, int, int, int, str]) -> None:
    with pytest.raises(UnsupportedError, match="DataType"):
        DataType(*fields)


@pytest.mark.parametrize("dtype", [*NARROW, *WIDE], ids=str)
def test_properties(dtype: DataType) -> None:
    assert dtype.is_integer == dtype.name.startswith(("int", "uint"))
    assert dtype.is_float != dtype.is_integer
    assert dtype.is_narrow == (dtype.bits <= 8)
    assert dtype.is_signed == (dtype.min < 0)
    assert dtype.exponent_bias == {0: 0, 8: 127}.get(
        dtype.exponent_bits, 2 ** (dtype.exponent_bits - 1) - 1
    )


def test_docstring_examples() -> None:
    assert doctest.testmod(dtypes).failed == 0
