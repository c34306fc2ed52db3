"""The example of a third-party plugin, built, installed and found like a stranger's."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "humming-acme"
LIST_DEVICES = """
import json, humming
present = humming.devices()
print(json.dumps({
    "rows": [device.row for device in present],
    "plugins": [device.plugin for device in present],
    "notes": [device.notes for device in present],
    "problems": [str(problem) for problem in present.problems],
    "arch": humming.capabilities("acme_x1").arch,
    "vendor": humming.capabilities().vendor if present else None,
}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example installed into it, from a wheel, offline."""
    root = tmp_path_factory.mktemp("acme")
    # Builds write into their tree, and the checkout is not theirs.
    source = shutil.copytree(EXAMPLE, root / "source")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(root)]
    _run([*pip, *build, str(source)])
    (wheel,) = root.glob("humming_acme-*.whl")
    assert "humming_acme/matrix.yaml" in zipfile.ZipFile(wheel).namelist()
    _run([*pip, "install", "--no-deps", "--no-index", "--target", str(root / "site"), str(wheel)])
    return root / "site"


def _run(command: list[str], **variables: str) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _listed(installed: Path, cards: Path) -> dict[str, Any]:
    variables = {"PYTHONPATH": str(installed), "ACME_SYSFS": str(cards)}
    told: dict[str, Any] = json.loads(_run([sys.executable, "-c", LIST_DEVICES], **variables))
    return told


def _card(folder: Path, name: str = "ACME X1", units: str = "96") -> None:
    folder.mkdir(parents=True)
    for file, content in (("name", name), ("units", units), ("memory_bytes", "64000000000")):
        (folder / file).write_text(content + "\n")


def test_present_device_is_found(installed: Path, tmp_path: Path) -> None:
    _card(tmp_path / "0")
    told = _listed(installed, tmp_path)
    acme = [
        row for row, plugin in zip(told["rows"], told["plugins"], strict=True) if plugin == "acme"
    ]
    assert acme == ["acme_x1"]
    assert told["problems"] == []
    assert told["arch"] == "sm_80"


def test_row_is_there_without_the_device(installed: Path, tmp_path: Path) -> None:
    told = _listed(installed, tmp_path / "nothing")
    assert "acme" not in told["plugins"]
    assert told["arch"] == "sm_80"


def test_disagreement_is_told(installed: Path, tmp_path: Path) -> None:
    _card(tmp_path / "0", units="48")
    assert "sms = 48" in str(_listed(installed, tmp_path)["notes"])


def test_broken_card_breaks_nothing_else(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    told = _listed(installed, tmp_path)
    assert "acme" not in told["plugins"]
    (problem,) = told["problems"]
    assert "plugin acme (humming-acme 0.1.0): humming_probe: FileNotFoundError" in problem


@pytest.mark.parametrize("file", ["src/humming_acme/__init__.py", "src/humming_acme/matrix.yaml"])
def test_readme_lists_the_files(file: str) -> None:
    assert (EXAMPLE / file).is_file()
    assert file in (EXAMPLE / "README.md").read_text()


def test_example_passes_the_conformance_kit(installed: Path, tmp_path: Path) -> None:
    tests = shutil.copytree(EXAMPLE / "tests", tmp_path / "tests")
    _run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        PYTHONPATH=str(installed),
        ACME_SYSFS=str(tmp_path / "nothing"),
    )
