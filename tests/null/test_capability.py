"""Rows that check themselves, and the questions that capabilities answer."""

import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest

from humming.capability import INT32, Absence, DeviceCapabilities, MmaRow
from humming.dtypes import (
    DataType,
    bfloat16,
    float4e2m1,
    float8e3m4,
    float8e4m3,
    float8ue4m3,
    float16,
    float32,
    int8,
)
from humming.errors import PluginError, UnsupportedError

ROW: dict[str, Any] = {
    "instruction": "mma_sync",
    "shape": (16, 8, 16),
    "a": float16,
    "b": float16,
    "accumulator": float32,
    "rate_class": "f16",
    "rate": 2048.0,
    "source": "here",
}
DEVICE: dict[str, Any] = {
    "name": "card",
    "vendor": "someone",
    "family": "kind",
    "arch": "sm_80",
    "title": "A Card",
    "sms": 100,
    "smem_per_sm_bytes": 2000,
    "smem_per_block_bytes": 1000,
    "clock_mhz": 1000.0,
    "movers": ("cp_async", "plain"),
    "features": frozenset({"ldmatrix"}),
    "sources": {"sms": "counted"},
}


def row(**changes: Any) -> MmaRow:
    return MmaRow(**{**ROW, **changes})


def device(**changes: Any) -> DeviceCapabilities:
    return DeviceCapabilities(**{"mma": (row(),), **DEVICE, **changes})


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "name", "key"),
    [
        (
            row(a=bfloat16, b=bfloat16),
            "mma_sync m16n8k16 bf16 x bf16 -> f32",
            "mma_sync:m16n8k16:bfloat16:bfloat16:float32",
        ),
        (
            row(shape=(16, 8, 32), a=int8, b=int8, accumulator=INT32),
            "mma_sync m16n8k32 s8 x s8 -> s32",
            "mma_sync:m16n8k32:int8:int8:int32",
        ),
        (
            row(shape=(16, 8, 64), a=float4e2m1, b=float4e2m1, block_scale=((float8ue4m3, 16),)),
            "mma_sync m16n8k64 e2m1 x e2m1 -> f32 (ue4m3 per 16)",
            "mma_sync:m16n8k64:float4e2m1:float4e2m1:float32",
        ),
    ],
    ids=["bf16", "int8", "nvfp4"],
)
def test_row_has_a_name_and_a_key(made: MmaRow, name: str, key: str) -> None:
    assert (made.name, made.key) == (name, key)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("instruction", "MMA sync"),
        ("shape", (16, 0, 16)),
        ("m_values", (64,)),
        ("n_values", (16, 32)),
        ("k_values", (32,)),
        ("a_sites", ()),
        ("a_sites", ("register", "disk")),
        ("rate", 0.0),
        ("rate", -1.0),
        ("block_scale", ((float8ue4m3, 0),)),
    ],
)
def test_bad_row_names_itself_the_field_and_the_value(field: str, value: Any) -> None:
    with pytest.raises(PluginError) as error:
        row(**{field: value})
    assert field in str(error.value)
    assert repr(value) in str(error.value)


def test_row_is_not_both_legacy_and_emulated() -> None:
    with pytest.raises(PluginError, match="legacy"):
        row(legacy=True, emulated=True)


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        ({}, "native"),
        ({"legacy": True}, "legacy"),
        ({"emulated": True}, "emulated"),
        ({"undocumented": True}, "native, undocumented"),
    ],
    ids=str,
)
def test_row_says_its_status(flags: dict[str, bool], status: str) -> None:
    assert row(**flags).status == status


def test_sizes_default_to_the_shape() -> None:
    made = row()
    assert (made.m_values, made.n_values, made.k_values) == ((16,), (8,), (16,))


# -- the accumulator of integers -------------------------------------------------------------------


def test_int32_only_accumulates() -> None:
    assert INT32 == "s32" == INT32.ptx
    assert INT32 == "int32"
    assert int8 != INT32
    assert (INT32.min, INT32.max, INT32.bits) == (-(2.0**31), 2.0**31 - 1, 32)
    assert not INT32.is_narrow
    with pytest.raises(UnsupportedError):
        DataType.parse("int32")


# -- devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sms", 0),
        ("sms", -3),
        ("clock_mhz", -1.0),
        ("bandwidth_gbs", 0.0),
        ("movers", ()),
        ("movers", ("plain", "cp_async")),
        ("movers", ("plain", "teleport")),
        ("smem_per_block_bytes", 3000),
    ],
)
def test_bad_device_names_itself_the_field_and_the_value(field: str, value: Any) -> None:
    with pytest.raises(PluginError) as error:
        device(**{field: value})
    assert str(error.value).startswith("card: ")
    assert f"{field} = {value!r}" in str(error.value)


def test_nothing_can_be_changed() -> None:
    made = device()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.sms = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        made.sources["sms"] = "guessed"  # type: ignore[index]


def test_changing_what_it_was_made_of_changes_nothing() -> None:
    sources = {"sms": "counted"}
    made = device(sources=sources)
    sources["sms"] = "guessed"
    assert made.sources["sms"] == "counted"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))])
def test_copies_are_equal(copied: Any) -> None:
    made = device(peak_tops_by_class={"mma_sync.f16": 3.0})
    again = copied(made)
    assert again == made
    assert hash(again) == hash(made)
    assert again.peak_tops(made.mma[0]) == 3.0


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("ldmatrix", True),
        ("cp_async", True),
        ("mma_sync", True),
        ("fp16", True),
        ("tma", False),
        ("wgmma", False),
        ("fp8", False),
        ("int8", False),
    ],
)
def test_supports(what: str, expected: bool) -> None:
    assert device(vocabulary=frozenset({"ldmatrix", "wgmma"})).supports(what) is expected


def test_supports_refuses_a_misspelling() -> None:
    made = device(vocabulary=frozenset({"griddepcontrol"}))
    with pytest.raises(UnsupportedError, match="Did you mean 'griddepcontrol'"):
        made.supports("griddepcontrl")


def test_formats_leave_out_emulated_and_undocumented_types() -> None:
    made = device(
        mma=(
            row(),
            row(a=bfloat16, b=bfloat16),
            row(a=float8e4m3, b=float8e4m3, emulated=True),
            row(a=float8e3m4, b=float8e3m4, undocumented=True),
        )
    )
    assert made.formats() == ["bfloat16", "float16"]
    assert made.formats(undocumented=True) == ["bfloat16", "float16", "float8e3m4"]
    assert not made.supports("e3m4")


def test_instructions_keep_the_order_of_the_rows() -> None:
    made = device(mma=(row(instruction="wgmma"), row(), row(a=bfloat16, b=bfloat16)))
    assert made.instructions == ("wgmma", "mma_sync")


@pytest.mark.parametrize(
    ("operand", "instruction", "expected"),
    [
        (int8, "tcgen05", "no kind i8"),
        (int8, "mma_sync", None),
        (int8, None, "no kind i8"),
        (float8e3m4, "tcgen05", "illegal instruction"),
        (float16, None, None),
    ],
)
def test_why_absent(operand: DataType, instruction: str | None, expected: str | None) -> None:
    made = device(
        absent=(
            Absence("tcgen05", (int8,), "no kind i8"),
            Absence("*", (float8e3m4,), "illegal instruction"),
        )
    )
    assert made.why_absent(operand, instruction) == expected


@pytest.mark.parametrize(
    ("changes", "rate", "expected"),
    [
        ({}, 2048.0, 2048.0 * 100 * 1000 * 1e-6),
        ({"peak_tops_by_class": {"mma_sync.f16": 7.0}}, 2048.0, 7.0),
        ({"peak_tops_by_class": {"mma_sync.f16": 7.0}, "clock_mhz": None}, None, 7.0),
        ({"clock_mhz": None}, 2048.0, None),
        ({"sms": None}, 2048.0, None),
        ({}, None, None),
    ],
    ids=["rate", "figure-wins", "figure-alone", "no-clock", "no-sms", "no-rate"],
)
def test_peak_tops(changes: dict[str, Any], rate: float | None, expected: float | None) -> None:
    assert device(**changes).peak_tops(row(rate=rate)) == pytest.approx(expected)


def test_dictionary_is_json_and_complete() -> None:
    made = device(absent=(Absence("*", (int8,), "no"),))
    told = json.loads(json.dumps(made.to_dict()))
    fields = {f.name for f in dataclasses.fields(made)} - {"vocabulary"}
    assert set(told) == fields
    assert told["features"] == ["ldmatrix"]
    assert told["mma"][0]["a"] == "float16"
    assert told["mma"][0]["name"] == made.mma[0].name
    assert told["absent"][0]["operands"] == ["int8"]


def test_repr_tells_what_matters_and_no_more() -> None:
    told = repr(device(bandwidth_gbs=900.0, memory_bytes=24 * 10**9))
    assert told == (
        "DeviceCapabilities(card: A Card, sm_80, 100 SMs, 900 GB/s, 24 GB, mma_sync, "
        "cp_async copies)"
    )
    assert repr(row()) == "MmaRow(mma_sync m16n8k16 f16 x f16 -> f32, native)"
