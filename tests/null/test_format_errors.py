"""What quantizing costs is what formats.md says."""

import re
from pathlib import Path

import pytest
from scripts import load_script

from humming.formats import NAMED_ACTIVATIONS, NAMED_WEIGHTS, ActivationSpec, WeightSpec

DOCS = Path(__file__).parents[2] / "docs"


GENERATOR = load_script("docs/format_errors.py")
SECTION = (DOCS / "formats.md").read_text(encoding="utf-8").split(GENERATOR.BEGIN)[1]
WEIGHTS, ACTIVATIONS = (
    [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    for table in re.findall(r"(?:^\|.*\n)+", SECTION.split(GENERATOR.END)[0], re.MULTILINE)
)


def _percent(cell: str) -> float:
    return float(cell.removesuffix(" %")) / 100


@pytest.fixture(scope="module")
def values():
    return GENERATOR.sample()


@pytest.mark.parametrize("row", WEIGHTS, ids=lambda row: row[0].strip("`"))
def test_weights(row, values):
    name = row[0].strip("`")
    size = WeightSpec.parse(name).bits_per_weight(4096, 4096) / 8
    assert float(row[1]) == pytest.approx(size, rel=1e-3)
    assert GENERATOR.weight_error(name, values) == pytest.approx(_percent(row[2]), rel=0.02)


@pytest.mark.parametrize("row", ACTIVATIONS, ids=lambda row: row[0].strip("`"))
def test_activations(row, values):
    error = GENERATOR.activation_error(row[0].strip("`"), values)
    assert error == pytest.approx(_percent(row[1]), rel=0.02)


def test_every_named_format_is_there():
    told = {WeightSpec.parse(row[0].strip("`")) for row in WEIGHTS}
    assert told >= set(NAMED_WEIGHTS.values())
    told = {ActivationSpec.parse(row[0].strip("`")) for row in ACTIVATIONS}
    quantized = {spec for spec in NAMED_ACTIVATIONS.values() if spec.dtype.bits in (4, 8)}
    assert told >= quantized
