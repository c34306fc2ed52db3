"""What the bundled plugins find behind a CUDA driver, and what they leave to others."""

import sys
from types import ModuleType

import pytest
from cuda_driver import Card, FakeDriver, Result

from humming.errors import UnsupportedError
from humming.plugins import PluginSet


@pytest.fixture
def bundled() -> PluginSet:
    """The bundled plugins in a set of their own, so that nothing is remembered between tests."""
    installed = PluginSet.of_environment().manager
    names = ("nvidia", "thead_ppu")
    return PluginSet.of_modules(**{name: installed.get_plugin(name) for name in names})


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The driver that the plugins find; a test puts its cards in."""
    driver, bindings = FakeDriver(), ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    return driver


H200 = Card("NVIDIA H200", sms=132, l2_bytes=60 * 2**20, memory_bytes=150_000_000_000)


class DynamicLibNotFoundError(RuntimeError):
    """As cuda.pathfinder's."""


@pytest.mark.parametrize(
    "init",
    [
        Result.CUDA_ERROR_NO_DEVICE,
        Result.CUDA_ERROR_STUB_LIBRARY,
        RuntimeError("Failed to dlopen libcuda.so.1"),
        DynamicLibNotFoundError("libcuda.so"),
        OSError("libcuda.so: cannot open shared object file"),
    ],
    ids=lambda value: value.name if isinstance(value, Result) else type(value).__name__,
)
def test_no_driver_or_device_is_nothing_present(
    init: Result | Exception, show: FakeDriver, bundled: PluginSet
) -> None:
    show.init = init
    present = bundled.devices()
    assert list(present) == []
    assert present.problems == ()
    with pytest.raises(UnsupportedError, match="--device h200"):
        bundled.capabilities()


def test_driver_that_fails_is_shown(show: FakeDriver, bundled: PluginSet) -> None:
    show.init = Result.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
    present = bundled.devices()
    assert list(present) == []
    assert len(present.problems) == 2
    for problem in present.problems:
        assert "humming_probe" in str(problem)
        assert "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)" in str(problem)
    with pytest.raises(UnsupportedError, match="CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"):
        bundled.capabilities()
    # Rows need no driver.
    assert bundled.capabilities("h200").sms == 132


def test_missing_bindings_are_shown(bundled: PluginSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert "cuda-bindings is not usable" in str(bundled.devices().problems[0])


def test_present_device_has_its_row_and_live_figures(show: FakeDriver, bundled: PluginSet) -> None:
    show.cards = [H200]
    (device,) = bundled.devices()
    assert (device.row, device.plugin, device.index) == ("h200", "nvidia", 0)
    assert (device.sms, device.l2_bytes) == (132, 60 * 2**20)
    assert device.notes == ()
    assert bundled.capabilities().name == "h200"
    assert bundled.capabilities(device).name == "h200"


@pytest.mark.parametrize(
    ("driver_name", "plugin", "row"),
    [
        ("NVIDIA H20", "nvidia", "h20"),
        ("NVIDIA H200", "nvidia", "h200"),
        ("NVIDIA H20-3e", "nvidia", "h20_3e"),
        ("Tesla T4", "nvidia", "t4"),
        ("GeForce RTX 2080 Ti", "nvidia", "rtx2080ti"),
        ("A100-SXM4-40GB", "nvidia", "a100_40gb"),
        ("PPU-ZW810E", "thead_ppu", "zw810e"),
        ("ZW-M890P", "thead_ppu", "m890"),
    ],
)
def test_each_device_is_claimed_by_its_vendor_alone(
    driver_name: str, plugin: str, row: str, show: FakeDriver, bundled: PluginSet
) -> None:
    show.cards = [Card(driver_name)]
    assert [(d.plugin, d.row) for d in bundled.devices()] == [(plugin, row)]


def test_card_of_a_third_party_is_claimed_by_nobody(show: FakeDriver, bundled: PluginSet) -> None:
    show.cards = [Card("ACME X1")]
    assert list(bundled.devices()) == []


@pytest.mark.parametrize("driver_name", ["NVIDIA H20-4x", "PPU-ZW610"])
def test_unknown_device_says_which_row_could_be_added(
    driver_name: str, show: FakeDriver, bundled: PluginSet
) -> None:
    show.cards = [Card(driver_name)]
    (device,) = bundled.devices()
    assert device.row == ""
    assert f"driver_names: [{driver_name}]" in device.notes[0]
    for asked in (None, 0, device):
        with pytest.raises(UnsupportedError) as error:
            bundled.capabilities(asked)
        assert "no row" in str(error.value)
        assert f"driver_names: [{driver_name}]" in str(error.value)


@pytest.mark.parametrize(
    ("card", "told"),
    [
        (Card("NVIDIA H200", sms=66), "the driver reports sms = 66, the row h200 says 132"),
        (Card("NVIDIA H200", l2_bytes=50 * 2**20), "l2_bytes = 52428800"),
        (Card("NVIDIA H200", memory_bytes=80 * 10**9), "memory_bytes = 80000000000"),
        (Card("PPU-ZW810E", sms=64, memory_bytes=98304 * 2**20), "says 20"),
    ],
    ids=["sms", "l2", "memory", "ppu"],
)
def test_disagreement_between_driver_and_row_is_told(
    card: Card, told: str, show: FakeDriver, bundled: PluginSet
) -> None:
    show.cards = [card]
    (device,) = bundled.devices()
    assert any(told in note for note in device.notes)


def test_rounding_is_no_disagreement(show: FakeDriver, bundled: PluginSet) -> None:
    show.cards = [Card("NVIDIA H200", sms=132, memory_bytes=141 * 10**9 + 9 * 10**9)]
    assert bundled.devices()[0].notes == ()


def test_attributes_that_a_driver_does_not_know_are_left_open(
    show: FakeDriver, bundled: PluginSet
) -> None:
    show.cards, show.unknown_attributes = [Card("PPU-ZW810E", sms=64)], True
    (device,) = bundled.devices()
    assert (device.sms, device.l2_bytes) == (None, None)


def test_devices_keep_the_indices_of_the_driver(show: FakeDriver, bundled: PluginSet) -> None:
    show.cards = [Card("PPU-ZW810E"), H200, Card("Tesla T4")]
    assert {d.index: d.row for d in bundled.devices()} == {0: "zw810e", 1: "h200", 2: "t4"}
    assert bundled.capabilities(2).name == "t4"
    assert bundled.capabilities().name == "zw810e"
    with pytest.raises(UnsupportedError, match="Present are 0, 1, 2"):
        bundled.capabilities(7)


def test_default_is_the_first_device_that_somebody_claims(
    show: FakeDriver, bundled: PluginSet
) -> None:
    show.cards = [Card("ACME X1"), H200]
    assert bundled.capabilities().name == "h200"


@pytest.fixture
def simulator() -> PluginSet:
    """The rows and the simulator, in a set of their own."""
    installed = PluginSet.of_environment().manager
    names = ("nvidia", "simulator")
    return PluginSet.of_modules(**{name: installed.get_plugin(name) for name in names})


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("t4", "t4"),
        ("sim:t4", "t4"),
        (" SIM:B300 ", "b300"),
        ("a100", "a100_80gb"),
        ("sim:a100", "a100_80gb"),
        ("", "a100_80gb"),
    ],
)
def test_simulated_device_is_named_as_a_row_or_as_its_simulation(
    text: str, row: str, simulator: PluginSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUMMING_SIMULATE", text)
    assert simulator.capabilities(-1).name == f"sim:{row}"


def test_simulated_device_without_a_row_names_the_variable(
    simulator: PluginSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUMMING_SIMULATE", "sim:h30")
    with pytest.raises(UnsupportedError, match=r"HUMMING_SIMULATE=sim:h30.*sim:h20"):
        simulator.capabilities(-1)
