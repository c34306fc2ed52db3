"""Rows, components and headers of several plugins put together; order decides nothing."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from humming.components import SHARED, Component
from humming.errors import PluginError, UnsupportedError
from humming.matrix import read_matrix
from humming.registry import Contribution, Registry, kernels_dir

FAMILY: dict[str, Any] = {
    "title": "Kind",
    "vendor": "someone",
    "arch": "sm_80",
    "movers": ["cp_async", "plain"],
    "features": ["ldmatrix"],
    "smem_per_block_kib": 99,
    "rates": {"mma_sync": {"f16": 2048, "int8": 4096}},
    "mma": ["sync"],
    "quirks": ["whistles"],
    "source": "the family's sheet",
}
ROWS: list[dict[str, Any]] = [
    {"shape": [16, 8, 16], "a": "f16", "b": "f16", "accumulator": "f32", "rate": "f16"},
    {"shape": [16, 8, 32], "a": "int8", "b": "int8", "accumulator": "int32", "rate": "int8"},
]
HOME: dict[str, Any] = {
    "features": {"ldmatrix": {"means": "loads", "source": "a sheet"}},
    "mma_sets": {
        "sync": {
            "instruction": "mma_sync",
            "a_sites": ["register"],
            "source": "a sheet",
            "rows": ROWS,
        }
    },
    "families": {"kind": FAMILY},
}
CARD: dict[str, Any] = {
    "title": "Card",
    "family": "kind",
    "sms": 10,
    "clock_mhz": 1000,
    "source": "the card's sheet",
}


def part(plugin: str, matrix: dict[str, Any] | None = None, **others: Any) -> Contribution:
    checked = None if matrix is None else read_matrix(matrix, f"{plugin}.yaml")
    return Contribution(plugin, checked, **others)


def home(**devices: Any) -> Contribution:
    return part("home", HOME | {"devices": devices})


def guest(plugin: str = "guest", **devices: Any) -> Contribution:
    return part(plugin, {"devices": devices})


def one(**changes: Any) -> Any:
    """The capabilities of one row in the family above."""
    return Registry([home(card=CARD | changes)]).device("card")


# -- rows ------------------------------------------------------------------------------------------


def test_a_device_is_its_row_over_its_family() -> None:
    caps = one(vendor="another", quirks=["hums"], smem_per_block_kib=48)
    assert (caps.vendor, caps.arch, caps.family) == ("another", "sm_80", "kind")
    assert caps.smem_per_block_bytes == 48 * 1024
    assert caps.quirks == ("whistles", "hums")
    assert [row.rate for row in caps.mma] == [2048, 4096]
    assert caps.sources["sms"] == "the card's sheet"
    assert caps.sources["rates"] == "the family's sheet"
    assert "l2_bytes" not in caps.sources


def test_rates_are_replaced_class_by_class() -> None:
    caps = one(rates={"mma_sync": {"f16": 512}})
    assert [row.rate for row in caps.mma] == [512, 4096]
    assert caps.sources["rates"] == "the card's sheet"


def test_a_rate_of_null_is_unknown() -> None:
    assert [row.rate for row in one(rates={"mma_sync": {"f16": None}}).mma] == [None, 4096]


def test_a_figure_for_the_whole_device_gives_the_rate() -> None:
    caps = one(peak_tops={"mma_sync": {"int8": 20}})
    assert caps.mma[1].rate == pytest.approx(20e12 / (10 * 1000e6))
    assert caps.peak_tops(caps.mma[1]) == 20
    unclocked = one(peak_tops={"mma_sync": {"int8": 20}}, clock_mhz=None)
    assert unclocked.mma[1].rate is None
    assert unclocked.peak_tops(unclocked.mma[1]) == 20


def test_emulated_rows_have_no_rate() -> None:
    uses = [{"set": "sync", "emulated": True}]
    matrix = HOME | {"families": {"kind": FAMILY | {"mma": uses}}, "devices": {"card": CARD}}
    caps = Registry([part("home", matrix)]).device("card")
    assert [row.rate for row in caps.mma] == [None, None]


def test_like_takes_over_all_but_the_names() -> None:
    card = CARD | {"l2_mib": 4, "aliases": ["c"], "driver_names": ["Card"], "quirks": ["hums"]}
    twin = {"title": "Twin", "like": "card", "sms": 20, "source": "the twin's sheet"}
    caps = Registry([home(card=card, twin=twin, third=twin | {"like": "twin"})]).device("third")
    assert (caps.sms, caps.l2_bytes, caps.clock_mhz) == (20, 4 * 2**20, 1000)
    assert caps.driver_names == ()
    assert caps.quirks == ("whistles", "hums")
    assert (caps.sources["sms"], caps.sources["l2_bytes"]) == (
        "the twin's sheet",
        "the card's sheet",
    )


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ({"card": CARD | {"family": "knd"}}, "family = 'knd' is not among families. Did you mean"),
        ({"card": CARD | {"rates": {"mma_sync": {"f15": 1}}}}, "Did you mean 'mma_sync.f16'"),
        ({"card": CARD | {"peak_tops": {"wgmma": {"f16": 1}}}}, "'wgmma.f16', which is no"),
        (
            {"card": {"title": "C", "like": "crd", "source": "a sheet"}},
            "like = 'crd' is not among devices",
        ),
        (
            {
                "card": {"title": "C", "like": "twin", "source": "a sheet"},
                "twin": {"title": "T", "like": "card", "source": "a sheet"},
            },
            "leads in a circle",
        ),
        ({"card": CARD | {"smem_per_block_kib": 500, "smem_per_sm_kib": 2}}, "more than an SM"),
    ],
    ids=["family", "rate-class", "instruction", "like", "circle", "shared-memory"],
)
def test_bad_reference_breaks_its_row_alone(rows: dict[str, Any], told: str) -> None:
    registry = Registry([home(good=CARD, **rows)])
    assert registry.device("good").sms == 10
    with pytest.raises(PluginError) as error:
        registry.device("card")
    assert told in str(error.value)
    assert "card" in str(error.value)
    assert error.value in registry.errors()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"mma": ["synk"]}, "mma = 'synk' is not among mma_sets. Did you mean 'sync'"),
        ({"mma": ["sync", "sync"]}, "mma_sync m16n8k16 f16 x f16 -> f32 twice"),
        ({"features": ["ldmatrx"]}, "features = 'ldmatrx' is not among features. Did you mean"),
    ],
    ids=["set", "row-twice", "feature"],
)
def test_bad_family_breaks_its_devices(change: dict[str, Any], told: str) -> None:
    matrix = HOME | {
        "families": {"kind": FAMILY, "odd": FAMILY | change},
        "devices": {"card": CARD, "odd_card": CARD | {"family": "odd"}},
    }
    registry = Registry([part("home", matrix)])
    assert registry.device("card")
    with pytest.raises(PluginError) as error:
        registry.device("odd_card")
    assert told in str(error.value)


# -- several plugins -------------------------------------------------------------------------------


def test_a_row_may_use_the_families_of_others() -> None:
    registry = Registry([guest(theirs=CARD), home(card=CARD)])
    assert registry.device("theirs").arch == "sm_80"
    assert registry.owner("theirs") == "guest"
    assert [caps.name for caps in registry.devices()] == ["card", "theirs"]


def test_own_names_come_before_those_of_others() -> None:
    other = HOME | {"families": {"kind": FAMILY | {"arch": "sm_99"}}, "devices": {"x": CARD}}
    registry = Registry([home(card=CARD), part("other", other)])
    assert registry.device("card").arch == "sm_80"
    assert registry.device("x").arch == "sm_99"


def test_a_name_of_two_others_is_ambiguous() -> None:
    other = HOME | {"devices": {}}
    registry = Registry([home(card=CARD), part("other", other), guest(theirs=CARD)])
    with pytest.raises(PluginError, match="is ambiguous: the plugins home and other have it"):
        registry.device("theirs")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_duplicate_device_names_both_plugins(order: tuple[int, int]) -> None:
    parts = [home(card=CARD, good=CARD), guest(card=CARD, fine=CARD)]
    registry = Registry([parts[i] for i in order])
    with pytest.raises(PluginError, match="'card' is claimed by the plugins guest and home"):
        registry.device("card")
    assert [caps.name for caps in registry.devices()] == ["fine", "good"]
    assert len(registry.errors()) == 1


def test_alias_of_one_and_name_of_another_clash() -> None:
    registry = Registry([home(card=CARD | {"aliases": ["x1"]}), guest(x1=CARD)])
    with pytest.raises(PluginError, match="'x1' is claimed by the plugins guest and home"):
        registry.device("x1")
    assert registry.device("card")


def test_devices_of_a_broken_plugin_raise_its_error() -> None:
    problem = PluginError("plugin guest: it fell over")
    registry = Registry([home(card=CARD), guest(theirs=CARD)], {"guest": problem})
    assert [caps.name for caps in registry.devices()] == ["card"]
    with pytest.raises(PluginError, match="fell over"):
        registry.device("theirs")


def test_devices_that_never_arrived_raise_the_error_of_their_plugin() -> None:
    problem = PluginError("plugin guest: it fell over")
    registry = Registry([home(card=CARD)], {"guest": problem}, lost={"theirs": "guest"})
    for name in ("theirs", "guest_x1"):
        with pytest.raises(PluginError, match="fell over"):
            registry.device(name)
    with pytest.raises(UnsupportedError, match="Broken plugins: guest"):
        registry.device("unheard_of")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("crad", "Did you mean 'card'"),
        ("zzz", "Known are c, card."),
        ("cuda:0", "Leave the device out for the one that is present"),
        ("zzz", "`humming devices --all` lists the rows"),
    ],
    ids=["near", "far", "place", "list"],
)
def test_unknown_device_suggests(asked: str, told: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        Registry([home(card=CARD | {"aliases": ["c"]})]).device(asked)
    assert told in str(error.value)


def test_names_are_read_in_any_case() -> None:
    registry = Registry([home(card=CARD | {"aliases": ["c"]})])
    assert registry.device(" CARD ") is registry.device("C") is registry.device("card")


# -- driver names ----------------------------------------------------------------------------------

DRIVERS = {
    "exact": CARD | {"driver_names": ["Card 1"]},
    "longer": CARD | {"driver_names": ["Card 10"]},
    "pattern": CARD | {"driver_patterns": ["Card 1\\d+ .*", "Card 1"]},
}


@pytest.mark.parametrize(
    ("driver_name", "row"),
    [("Card 1", "exact"), ("Card 10", "longer"), ("Card 12 Max", "pattern")],
)
def test_driver_name_leads_to_its_row(driver_name: str, row: str) -> None:
    assert Registry([home(**DRIVERS)]).match(driver_name).name == row


@pytest.mark.parametrize("driver_name", ["Card", "Card 11", "card 1", "A Card 1", "Card 1e"])
def test_unknown_driver_name_is_not_guessed(driver_name: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        Registry([home(**DRIVERS)]).match(driver_name)
    assert f"driver_names: [{driver_name}]" in str(error.value)


def test_unknown_driver_name_shows_the_nearest() -> None:
    with pytest.raises(UnsupportedError, match=r"nearest known names are 'Card 10' \(longer\)"):
        Registry([home(**DRIVERS)]).match("Card 10e")


@pytest.mark.parametrize("order", list(itertools.permutations(range(2))))
def test_driver_name_of_two_rows_is_refused(order: tuple[int, int]) -> None:
    row = CARD | {"driver_names": ["Card"]}
    parts = [home(card=row), guest(theirs=row)]
    with pytest.raises(PluginError) as error:
        Registry([parts[i] for i in order]).match("Card")
    assert "card of plugin home" in str(error.value)
    assert "theirs of plugin guest" in str(error.value)


# -- headers and components ------------------------------------------------------------------------


def folder(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("#pragma once\n")
    return root


def test_headers_of_the_host_come_first(tmp_path: Path) -> None:
    own = folder(tmp_path / "own", "acme/load.cuh")
    registry = Registry([part("acme", include_dirs=(own,))])
    assert registry.include_dirs == (kernels_dir(), own)
    assert registry.headers["humming/acme/load.cuh"] == own / "acme/load.cuh"
    assert "humming/contracts.cuh" in registry.headers


def test_header_of_two_plugins_breaks_both(tmp_path: Path) -> None:
    first, second = (folder(tmp_path / name, "x/load.cuh") for name in ("first", "second"))
    registry = Registry(
        [
            part("one", {"devices": {"a": CARD}}, include_dirs=(first,)),
            part("two", {"devices": {"b": CARD}}, include_dirs=(second,)),
            home(card=CARD),
        ]
    )
    assert [caps.name for caps in registry.devices()] == ["card"]
    for name in ("a", "b"):
        with pytest.raises(PluginError) as error:
            registry.device(name)
        assert "<humming/x/load.cuh>" in str(error.value)
        assert str(first) in str(error.value)
        assert str(second) in str(error.value)
    assert "humming/x/load.cuh" not in registry.headers


def test_header_of_the_host_cannot_be_replaced(tmp_path: Path) -> None:
    mine = folder(tmp_path, "contracts.cuh")
    registry = Registry([part("acme", include_dirs=(mine,))])
    assert "contracts.cuh" in str(registry.problems["acme"])
    assert registry.headers["humming/contracts.cuh"] == kernels_dir() / "contracts.cuh"


@pytest.fixture
def acme_header(tmp_path: Path) -> Path:
    return folder(tmp_path / "acme", "acme/mma.cuh")


ACME = Component("mma", "acme_mma:m1n1k1:int8:int8:int32", "humming/acme/mma.cuh", "acme::Mma")


def test_components_are_found_by_what_they_serve(acme_header: Path) -> None:
    registry = Registry([part("acme", components=(ACME,), include_dirs=(acme_header,))])
    assert registry.components("mma", ACME.serves) == (ACME,)
    assert registry.components("dequant", ACME.serves) == ()
    for shared in SHARED:
        assert registry.components(shared.slot, shared.serves) == (shared,)


def test_component_without_its_header_is_refused() -> None:
    registry = Registry([part("acme", components=(ACME,))])
    assert "no include folder has humming/acme/mma.cuh" in str(registry.problems["acme"])
    assert registry.components("mma", ACME.serves) == ()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_component_of_two_plugins_breaks_both(acme_header: Path, order: tuple[int, int]) -> None:
    parts = [
        part("acme", components=(ACME,), include_dirs=(acme_header,)),
        part("copycat", components=(ACME,)),
    ]
    registry = Registry([parts[i] for i in order])
    assert set(registry.problems) == {"acme", "copycat"}
    assert registry.components("mma", ACME.serves) == ()


def test_component_given_twice_breaks_its_plugin(acme_header: Path) -> None:
    registry = Registry([part("acme", components=(ACME, ACME), include_dirs=(acme_header,))])
    assert "acme and acme both have a component" in str(registry.problems["acme"])


def test_shared_component_cannot_be_replaced(acme_header: Path) -> None:
    shared = SHARED[0]
    again = Component(shared.slot, shared.serves, ACME.header, ACME.struct)
    registry = Registry([part("acme", components=(again,), include_dirs=(acme_header,))])
    assert "acme" in registry.problems
    assert registry.components(shared.slot, shared.serves) == (shared,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("slot", "mna"),
        ("serves", ""),
        ("header", "mma.cuh"),
        ("header", "humming/../mma.cuh"),
        ("header", "humming/mma.h"),
        ("struct", "3Mma"),
    ],
)
def test_bad_component_names_field_and_value(field: str, value: str) -> None:
    fields = {"slot": "mma", "serves": "key", "header": "humming/a.cuh", "struct": "A"}
    with pytest.raises(PluginError) as error:
        Component(**fields | {field: value})
    assert f"{field} = {value!r}" in str(error.value)


def test_headers_of_shared_components_exist() -> None:
    headers = Registry([]).headers
    assert not [component for component in SHARED if component.header not in headers]
