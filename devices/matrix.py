"""The rows of `device_matrix.yaml`, which the bundled plugins share out among them."""

from functools import cache
from pathlib import Path
from typing import Any

from humming.registry import load_yaml

# Beside this package in a checkout and in an installation alike.
_MATRIX = Path(__file__).parent.parent / "device_matrix.yaml"


@cache
def rows_of(vendor: str) -> dict[str, Any]:
    """The matrix with the families and devices of one vendor, and all that rows refer to."""
    matrix = load_yaml(_MATRIX)
    families = {n: row for n, row in matrix["families"].items() if row["vendor"] == vendor}
    devices = {n: row for n, row in matrix["devices"].items() if _family(matrix, n) in families}
    used = {
        use if isinstance(use, str) else use["set"]
        for row in families.values()
        for use in row["mma"]
    }
    features = {name for row in families.values() for name in row["features"]}
    return {
        **matrix,
        "origin": str(_MATRIX),
        "features": {n: row for n, row in matrix["features"].items() if n in features},
        "mma_sets": {n: row for n, row in matrix["mma_sets"].items() if n in used},
        "families": families,
        "devices": devices,
    }


def _family(matrix: dict[str, Any], device: str) -> str:
    row = matrix["devices"][device]
    family: str = row["family"] if "family" in row else _family(matrix, row["like"])
    return family
