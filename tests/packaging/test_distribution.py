"""The package in each form that people install: wheel, sdist, editable, strict editable."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="Python 3.10 reads TOML with tomli only")

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, SETUPTOOLS = PYPROJECT["project"], PYPROJECT["tool"]["setuptools"]
SOURCE_FOLDERS = ("humming", "devices", "kernels")
FORMS = ("wheel", "sdist", "editable", "strict_editable")

# Runs in the environment under test, from a folder that is not the checkout.
PROBE = """
import importlib.metadata, importlib.resources, json, pathlib, sys
import humming
kernels = pathlib.Path(str(importlib.resources.files("humming.kernels")))
plugins = pathlib.Path(str(importlib.resources.files("humming.devices")))
from humming.plugins import registry
print(json.dumps({
    "file": humming.__file__,
    "version": importlib.metadata.version("humming-kernels"),
    "light": not {"torch", "numpy", "cuda"} & set(sys.modules),
    "entry_points": {e.name: e.load().__name__
                     for e in importlib.metadata.entry_points(group="humming.devices")},
    "kernels": sorted(str(p.relative_to(kernels)) for p in kernels.rglob("*.cuh")),
    "plugin_kernels": sorted(str(p.relative_to(plugins)) for p in plugins.rglob("*.cuh")),
    "rows": sorted(row.name for row in registry().devices()),
}))
"""


@dataclass(frozen=True)
class Installation:
    """An environment that holds humming in one form, and what the probe saw there."""

    bin: Path
    elsewhere: Path
    seen: dict[str, object]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return _run([str(self.bin / command[0]), *command[1:]], cwd=self.elsewhere)


def _run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_"))}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def _copy_of_the_source(target: Path) -> Path:
    """What a build reads, copied: builds write into their tree, and the checkout is not theirs."""
    target.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.py[co]", ".venv*")
    for folder in (*SOURCE_FOLDERS, "tests", "docs", "examples", "benchmarks", "changelog.d"):
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, target / folder, ignore=ignore)
    for file in ROOT.iterdir():
        if file.is_file() and file.suffix != ".pyc":
            shutil.copy(file, target)
    return target


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Paths of the sdist, the wheel built from the tree, and the wheel built from the sdist."""
    folder = tmp_path_factory.mktemp("built")
    source = _copy_of_the_source(folder / "source")
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w"]
    _run([*wheel, str(folder / "wheel"), str(source)], cwd=folder)
    sdist = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", str(folder)]
    _run([*sdist, str(source)], cwd=folder)
    (archive,) = folder.glob("*.tar.gz")
    _run([*wheel, str(folder / "from_sdist"), str(archive)], cwd=folder)
    (from_tree,) = (folder / "wheel").glob("*.whl")
    (from_sdist,) = (folder / "from_sdist").glob("*.whl")
    return {"source": source, "sdist_file": archive, "wheel": from_tree, "sdist": from_sdist}


def _environment_with_dependencies(folder: Path) -> Path:
    """A virtual environment that sees this one's packages, but not this one's humming.

    Links to the dependencies rather than installing them: it takes no network and no second torch.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    links = folder / "dependencies"
    links.mkdir()
    for site in (Path(p) for p in sys.path if p.endswith(("site-packages", "dist-packages"))):
        for entry in site.iterdir():
            ours = entry.name.startswith(("humming", "__editable__"))
            if not ours and entry.suffix != ".pth" and not (links / entry.name).exists():
                (links / entry.name).symlink_to(entry)
    (own_site,) = folder.glob("lib/python*/site-packages")
    (own_site / "dependencies.pth").write_text(f"{links}\n")
    return folder / "bin"


@pytest.fixture(scope="module", params=FORMS)
def installation(
    request: pytest.FixtureRequest, built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Installation:
    """humming installed in one form into a fresh environment."""
    form: str = request.param
    folder = tmp_path_factory.mktemp(form)
    bin_folder = _environment_with_dependencies(folder / "venv")
    pip = [sys.executable, "-m", "pip", "--python", str(bin_folder / "python")]
    install = [*pip, "install", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    if form in built:
        _run([*install, str(built[form])], cwd=folder)
    else:
        source = _copy_of_the_source(folder / "source")
        mode = ["--config-settings", "editable_mode=strict"] if form == "strict_editable" else []
        _run([*install, *mode, "-e", str(source)], cwd=folder)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    probe = _run([str(bin_folder / "python"), "-c", PROBE], cwd=elsewhere)
    return Installation(bin_folder, elsewhere, json.loads(probe.stdout))


def _headers(folder: str) -> list[str]:
    return sorted(str(p.relative_to(ROOT / folder)) for p in (ROOT / folder).rglob("*.cuh"))


def test_installed_package_is_the_one_under_test(installation: Installation) -> None:
    assert str(installation.elsewhere.parent) in str(installation.seen["file"])


def test_device_code_is_installed(installation: Installation) -> None:
    assert installation.seen["kernels"] == _headers("kernels")
    assert installation.seen["plugin_kernels"] == _headers("devices")
    assert installation.seen["kernels"], "no device code at all"


def test_bundled_plugins_come_through_the_entry_points(installation: Installation) -> None:
    assert installation.seen["entry_points"] == PROJECT["entry-points"]["humming.devices"]
    assert {"nvidia", "thead_ppu"} <= set(PROJECT["entry-points"]["humming.devices"])


def test_device_matrix_is_found_from_a_foreign_folder(installation: Installation) -> None:
    rows = installation.seen["rows"]
    assert isinstance(rows, list)
    assert {"t4", "h200", "rubin", "zw810e"} <= set(rows)


def test_command_line_works_from_a_foreign_folder(installation: Installation) -> None:
    listed = json.loads(installation.run("humming", "devices", "--all", "--json").stdout)
    assert sorted(row["name"] for row in listed["rows"]) == installation.seen["rows"]
    assert listed["broken_plugins"] == []
    version = installation.run("humming", "--version").stdout
    assert version.split() == ["humming", installation.seen["version"]]
    assert installation.run("python", "-m", "humming", "--version").stdout == version


@pytest.mark.parametrize("form", ["wheel", "sdist"])
def test_wheel_holds_humming_and_nothing_else(built: dict[str, Path], form: str) -> None:
    names = zipfile.ZipFile(built[form]).namelist()
    top_level = {name.split("/")[0] for name in names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"humming"}
    assert len(top_level) == 2
    assert "humming/device_matrix.yaml" in names
    assert "humming/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_wheel_from_the_sdist_is_the_wheel_from_the_tree(built: dict[str, Path]) -> None:
    def contents(wheel: Path) -> dict[str, int]:
        return {i.filename: i.CRC for i in zipfile.ZipFile(wheel).infolist() if i.file_size}

    assert contents(built["sdist"]) == contents(built["wheel"])


def test_sdist_brings_the_tests_and_the_documents(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist_file"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "docs/cli.md"}
    assert wanted <= names
    assert "tests/conftest.py" in names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_listed_packages_are_those_on_disk() -> None:
    on_disk = set()
    for package, folder in SETUPTOOLS["package-dir"].items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / folder).parts
            on_disk.add(".".join([package, *inner]))
    assert set(SETUPTOOLS["packages"]) == on_disk


def test_versions_agree() -> None:
    init = (ROOT / "humming/__init__.py").read_text()
    assert re.search(r'^__version__ = "(.+)"$', init, re.MULTILINE).group(1) == PROJECT["version"]


def test_license_is_shipped_and_named() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
