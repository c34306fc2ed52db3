"""The support matrix of the docs is what the device matrix says."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("support_matrix", DOCS / "support_matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_up_to_date(generator: ModuleType) -> None:
    written = (DOCS / "support_matrix.md").read_text(encoding="utf-8")
    assert written == generator.page(), "run `python docs/support_matrix.py`"


def test_page_has_every_bundled_device(generator: ModuleType) -> None:
    rows = [line for line in generator.page().splitlines() if line.startswith("| `")]
    for caps in generator.devices():
        (row,) = (line for line in rows if line.startswith(f"| `{caps.name}` | {caps.title} "))
        assert f"| {caps.arch} |" in row


@pytest.mark.parametrize(
    ("beginning", "cells"),
    [
        ("| `b300` |", ["2250", "154", "14000"]),
        ("| `blackwell_ultra` | mma_sync |", ["◐", "○"]),
        ("| `ada` | mma_sync |", ["●"]),
        ("| `blackwell_dc` | tcgen05 |", ["? (ue8m0/32)", "● (ue8m0/32)"]),
    ],
)
def test_page_tells_what_matters(beginning: str, cells: list[str], generator: ModuleType) -> None:
    (row,) = (line for line in generator.page().splitlines() if line.startswith(beginning))
    for cell in cells:
        assert f"| {cell} |" in row
