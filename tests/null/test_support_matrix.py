"""The support matrix of the docs is what the device matrix and the composer say."""

from pathlib import Path
from types import ModuleType

import pytest
from scripts import load_script

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return load_script("docs/support_matrix.py")


@pytest.fixture(scope="module")
def page(generator: ModuleType) -> str:
    made: str = generator.page()
    return made


def test_page_is_up_to_date(page: str) -> None:
    written = (DOCS / "support_matrix.md").read_text(encoding="utf-8")
    assert written == page, "run `python docs/support_matrix.py`"


def test_page_has_every_bundled_device(generator: ModuleType, page: str) -> None:
    rows = [line for line in page.splitlines() if line.startswith("| `")]
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
def test_page_tells_what_matters(beginning: str, cells: list[str], page: str) -> None:
    (row,) = (line for line in page.splitlines() if line.startswith(beginning))
    for cell in cells:
        assert f"| {cell} |" in row


@pytest.mark.parametrize(
    ("family", "pair", "cell"),
    [
        ("turing", "int4_g128 x bf16", "no"),
        ("ampere", "int8 x int8", "native s8"),
        ("ampere", "fp8 x fp8", "widened f16"),
        ("ada", "fp8 x fp8", "native e4m3"),
        ("hopper", "int4_g128 x bf16", "native bf16"),
        ("blackwell_ultra", "int8 x int8", "legacy s8"),
        ("blackwell_ultra", "nvfp4 x nvfp4", "widened legacy f16 → tcgen05"),
        ("ppu_v15", "int8 x int8", "native s8"),
    ],
)
def test_page_tells_what_pairs_become(family: str, pair: str, cell: str, page: str) -> None:
    table = page[page.index("| weights x activations |") :].splitlines()
    column = table[0].removesuffix(" |").split(" | ").index(f"`{family}`")
    (row,) = (line for line in table if line.startswith(f"| `{pair}` |"))
    assert row.removesuffix(" |").split(" | ")[column] == cell


def test_every_pair_that_does_not_run_has_a_reason(page: str) -> None:
    table = page[page.index("| weights x activations |") :].split("\n\n")
    families = [cell.strip(" |`") for cell in table[0].splitlines()[0].split(" | ")]
    reasons = next(part for part in table if part.startswith("- `"))
    for row in table[0].splitlines()[2:]:
        pair, *cells = row.removesuffix(" |").removeprefix("| ").split(" | ")
        for family, cell in zip(families[1:], cells, strict=True):
            lines = [line for line in reasons.splitlines() if line.startswith(f"- `{family}`: ")]
            told = any(pair in line or "every pair" in line for line in lines)
            assert told == (cell == "no"), (family, pair)


def test_devices_of_a_family_take_the_same_operands(generator: ModuleType) -> None:
    """Since the pairs are told by family."""
    of_family: dict[str, object] = {}
    for caps in generator.devices():
        rows = [(row.key, row.status, row.block_scale) for row in caps.mma]
        facts = (rows, caps.movers, caps.smem_per_block_bytes, caps.registers_per_sm)
        assert of_family.setdefault(caps.family, facts) == facts, caps.name
