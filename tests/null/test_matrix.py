"""The format of a device matrix: a wrong field is named with row, value and a way out."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from humming.capability import INT32
from humming.errors import PluginError
from humming.matrix import read_matrix
from humming.registry import load_yaml

ORIGIN = "cards.yaml"
MATRIX: dict[str, Any] = {
    "schema": 1,
    "sources": {"sheet": "the card's data sheet"},
    "features": {"ldmatrix": {"means": "loads fragments", "source": "sheet"}},
    "mma_sets": {
        "sync": {
            "instruction": "mma_sync",
            "a_sites": ["register"],
            "source": "sheet",
            "rows": [
                {
                    "shape": [16, 8, 32],
                    "a": ["int8", "uint8"],
                    "b": ["int8", "uint8"],
                    "accumulator": "int32",
                    "rate": "int8",
                },
                {
                    "shape": [16, 8, 64],
                    "a": "e2m1",
                    "b": "e2m1",
                    "accumulator": "f32",
                    "rate": "fp4",
                    "n": [8, "16:64:16"],
                    "block_scale": [["ue4m3", 16]],
                    "min_compiler": [13, 1],
                    "undocumented": True,
                    "note": "mind the gap",
                    "source": "sheet (page 4)",
                },
            ],
        }
    },
    "families": {
        "kind": {
            "title": "Kind",
            "vendor": "someone",
            "arch": "sm_80",
            "movers": ["cp_async", "plain"],
            "features": ["ldmatrix"],
            "smem_per_sm_kib": 100,
            "smem_per_block_kib": 99,
            "max_threads_per_sm": 2048,
            "rates": {"mma_sync": {"int8": 4096, "fp4": None}},
            "mma": ["sync"],
            "absent": [
                {"instruction": "*", "operands": ["e3m4"], "why": "it traps", "source": "sheet"}
            ],
            "min_compiler": [12, 8],
            "source": {"*": "sheet", "rates": ["sheet", "measured by us"]},
        }
    },
    "devices": {
        "card": {
            "title": "Card",
            "family": "kind",
            "aliases": ["c1"],
            "driver_names": ["Some Card"],
            "driver_patterns": ["Some Card .*"],
            "sms": 10,
            "l2_mib": 5.5,
            "memory_mib": 1000,
            "bandwidth_gbs": 100.5,
            "clock_mhz": None,
            "peak_tops": {"mma_sync": {"fp4": 3}},
            "source": "sheet",
        }
    },
}


def read(data: Any = MATRIX) -> Any:
    return read_matrix(data, ORIGIN)


def changed(path: str, value: Any) -> dict[str, Any]:
    """The matrix with one value replaced, or removed if it is Ellipsis."""
    data = copy.deepcopy(MATRIX)
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("/"))
    place: Any = data
    for parent in parents:
        place = place[parent]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return data


# -- what is read ----------------------------------------------------------------------------------


def test_lists_of_types_stand_for_every_pair() -> None:
    integers = [row for row in read().mma_sets["sync"] if row.accumulator == INT32]
    pairs = {(row.a.name, row.b.name) for row in integers}
    assert pairs == {(a, b) for a in ("int8", "uint8") for b in ("int8", "uint8")}


def test_rows_take_over_what_the_set_says() -> None:
    first, *_, last = read().mma_sets["sync"]
    assert (first.instruction, first.a_sites, first.source) == (
        "mma_sync",
        ("register",),
        "the card's data sheet",
    )
    assert last.source == "the card's data sheet (page 4)"
    assert (last.undocumented, last.min_compiler, last.note) == (True, (13, 1), "mind the gap")
    assert last.n_values == (8, 16, 32, 48, 64)
    assert last.block_scale[0][0] == "ue4m3"


def test_units_become_bytes_and_null_stays_none() -> None:
    figures = read().devices["card"].figures
    assert figures == {
        "sms": 10,
        "l2_bytes": 5767168,
        "memory_bytes": 1000 * 2**20,
        "bandwidth_gbs": 100.5,
        "clock_mhz": None,
    }
    assert read().families["kind"].figures["smem_per_block_bytes"] == 99 * 1024


def test_sources_are_looked_up_and_free_text_is_kept() -> None:
    sources = read().families["kind"].sources
    assert sources == {
        "*": "the card's data sheet",
        "rates": "the card's data sheet; measured by us",
    }


def test_a_family_changes_the_rows_of_a_set() -> None:
    uses = [{"set": "sync", "emulated": True, "note": "slow", "min_compiler": None}]
    family = read(changed("families/kind/mma", uses)).families["kind"]
    (use,) = family.mma
    rows = use.apply(read().mma_sets["sync"])
    assert {row.note for row in rows} == {"slow"}
    assert all(row.emulated for row in rows)
    assert {row.min_compiler for row in rows} == {None}


def test_a_matrix_may_hold_devices_only() -> None:
    assert read({"devices": MATRIX["devices"] | {}, "sources": MATRIX["sources"]}).families == {}


# -- what is refused -------------------------------------------------------------------------------

BAD = {
    "no mapping": ("families/kind", 7, "families.kind: expected a mapping of fields, got 7"),
    "version": ("schema", 2, "schema = 2 is not 1"),
    "unknown section": ("device", {}, "unknown field 'device'. Did you mean 'devices'"),
    "unknown device field": (
        "devices/card/bandwith_gbs",
        3,
        "devices.card: unknown field 'bandwith_gbs'. Did you mean 'bandwidth_gbs'",
    ),
    "unknown family field": ("families/kind/archs", "x", "Did you mean 'arch'"),
    "unknown row field": ("mma_sets/sync/rows/0/shapes", 1, "Did you mean 'shape'"),
    "unknown use field": ("families/kind/mma", [{"set": "sync", "legcy": True}], "'legacy'"),
    "bad name": ("devices/Card X", {}, "'Card X' is not made of lower-case letters"),
    "no title": ("devices/card/title", ..., "devices.card: title = missing is not a text"),
    "empty text": ("families/kind/arch", "", "arch = '' is not a text"),
    "no family": ("devices/card/family", ..., "must be given, or `like`"),
    "family and like": ("devices/card/like", "card", "must be given, or `like`"),
    "negative number": ("devices/card/sms", -1, "sms = -1 is not a positive number or null"),
    "zero": ("devices/card/bandwidth_gbs", 0, "bandwidth_gbs = 0 is not a positive number"),
    "text for a number": ("devices/card/sms", "ten", "sms = 'ten' is not a positive number"),
    "truth for a number": ("devices/card/sms", True, "sms = True is not a positive number"),
    "not a number": ("devices/card/clock_mhz", float("nan"), "clock_mhz = nan is not"),
    "fraction of an SM": ("devices/card/sms", 1.5, "sms = 1.5 is not a whole number"),
    "two units": ("devices/card/memory_gb", 1, "gives memory_bytes a second time"),
    "flag": ("mma_sets/sync/legacy", "yes", "legacy = 'yes' is neither true nor false"),
    "list": ("devices/card/driver_names", "Some Card", "is not a list of texts"),
    "twice": ("devices/card/driver_names", ["A", "A"], "holds 'A' twice"),
    "pattern": ("devices/card/driver_patterns", ["("], "no regular expression"),
    "compiler": ("families/kind/min_compiler", 12.8, "is not a version such as [13, 1]"),
    "mover": ("families/kind/movers", ["cp_asinc"], "Did you mean 'cp_async'"),
    "order of movers": ("families/kind/movers", ["plain", "cp_async"], "in this order"),
    "no movers": ("families/kind/movers", [], "movers = [] must be some of"),
    "type": ("mma_sets/sync/rows/0/a", "int9", "a = 'int9' is not a known type"),
    "no type": ("mma_sets/sync/rows/0/b", ..., "b = missing is not the name of a type"),
    "accumulator": ("mma_sets/sync/rows/0/accumulator", "f23", "is not a known type"),
    "shape": ("mma_sets/sync/rows/0/shape", [16, 8], "shape = [16, 8] is not a shape [M, N, K]"),
    "sizes": ("mma_sets/sync/rows/1/n", ["8-64"], "neither a size nor a range"),
    "sizes without the shape's": ("mma_sets/sync/rows/1/n", [16], "n_values = (16,) must contain"),
    "scale": ("mma_sets/sync/rows/1/block_scale", [["ue4m3"]], "is not a list of pairs"),
    "scale type": ("mma_sets/sync/rows/1/block_scale", [["ue9m3", 16]], "is not a known type"),
    "site": ("mma_sets/sync/a_sites", ["registers"], "Did you mean 'register'"),
    "no rate class": ("mma_sets/sync/rows/0/rate", ..., "rate = missing is not a text"),
    "no rows": ("mma_sets/sync/rows", [], "rows = [] is not a list of rows"),
    "rates": ("families/kind/rates", {"mma_sync": 3}, "is not a mapping {instruction:"),
    "rate": ("families/kind/rates/mma_sync/int8", -3, "rates.mma_sync: int8 = -3 is not"),
    "no mma": ("families/kind/mma", [], "mma = [] is not a list of names"),
    "absence": ("families/kind/absent/0/why", ..., "why = missing is not a text"),
    "no source": ("devices/card/source", ..., "must say where the row comes from"),
    "unknown source": ("devices/card/source", "shet", "Did you mean 'sheet'"),
    "unknown source with remark": ("devices/card/source", "shet (p. 4)", "Did you mean 'sheet'"),
    "source of nothing": ("devices/card/source", {"*": "sheet", "sm": "sheet"}, "mean 'sms'"),
    "number without a source": (
        "devices/card/source",
        {"sms": "sheet", "peak_tops": "sheet", "bandwidth_gbs": "sheet", "l2_mib": "sheet"},
        "memory_mib = 1000 has no source",
    ),
    "source that is no text": ("devices/card/source", [3], "is not a text, a list of texts"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_matrix_is_refused(case: str) -> None:
    path, value, expected = BAD[case]
    with pytest.raises(PluginError) as error:
        read(changed(path, value))
    assert str(error.value).startswith(ORIGIN)
    assert expected in str(error.value)


def test_no_mapping_at_all() -> None:
    with pytest.raises(
        PluginError, match=r"cards\.yaml: expected a mapping of fields, got 'hello'"
    ):
        read("hello")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda row: row.update(aliases=["card"]), "have the same name 'card'"),
        (lambda row: row.update(aliases=["c1"]), "have the same name 'c1'"),
        (lambda row: row.update(driver_names=["Some Card"]), "same driver name 'Some Card'"),
    ],
    ids=["alias-is-a-name", "alias-twice", "driver-name-twice"],
)
def test_rows_do_not_share_names(change: Callable[[dict[str, Any]], None], told: str) -> None:
    data = copy.deepcopy(MATRIX)
    data["devices"]["other"] = {"title": "Other", "like": "card", "source": "sheet"}
    change(data["devices"]["other"])
    with pytest.raises(PluginError) as error:
        read(data)
    assert told in str(error.value)
    assert "devices.other" in str(error.value)
    assert "devices.card" in str(error.value)


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("devices:\n  a: {sms: 1}\n  a: {sms: 2}\n", "has 'a' twice"),
        ("devices: {a: 1, b: [}\n", "expected"),
        ("devices: !!python/object:os.system {}\n", "could not determine a constructor"),
    ],
    ids=["key-twice", "no-yaml", "code"],
)
def test_bad_file_is_named(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "cards.yaml"
    file.write_text(text)
    with pytest.raises(PluginError) as error:
        load_yaml(file)
    assert str(file) in str(error.value)
    assert told in str(error.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"nowhere\.yaml"):
        load_yaml(tmp_path / "nowhere.yaml")
