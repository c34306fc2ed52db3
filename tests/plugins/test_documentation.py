"""The plugin guide describes every hook with its arguments and every key, and its examples hold."""

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from humming import hookspecs, matrix
from humming.capability import A_SITES, MOVERS
from humming.components import SLOTS
from humming.plugins import PluginSet

GUIDE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")
HOOKS = {name: getattr(hookspecs, name) for name in dir(hookspecs) if name.startswith("humming_")}


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, flags=re.DOTALL)


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_is_documented_with_its_arguments(hook: str) -> None:
    arguments = ", ".join(inspect.signature(HOOKS[hook]).parameters)
    assert f"### `{hook}({arguments})`" in GUIDE


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_has_a_contract_and_types(hook: str) -> None:
    assert HOOKS[hook].__doc__
    assert inspect.signature(HOOKS[hook]).return_annotation is not inspect.Signature.empty


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_has_tests(hook: str) -> None:
    tests = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    assert f'"{hook}"' in tests


def test_guide_names_no_hook_that_is_not_there() -> None:
    named = set(re.findall(r"\bhumming_[a-z_]+\b", GUIDE)) - {"humming_acme"}
    assert named <= set(HOOKS)


@pytest.mark.parametrize(
    "key",
    sorted(
        {*matrix.DEVICE_KEYS, *matrix.FAMILY_KEYS, *matrix.ROW_KEYS, *matrix.USE_KEYS}
        | {*MOVERS, *A_SITES, *SLOTS}
    ),
)
def test_key_is_documented(key: str) -> None:
    assert f"`{key}`" in GUIDE


def test_guide_lists_no_key_that_is_not_there() -> None:
    tables = re.findall(r"^\| (`\w+`[^|]*) \|", GUIDE, flags=re.MULTILINE)
    listed = {key for cell in tables for key in re.findall(r"`(\w+)`", cell)}
    known = {*matrix.DEVICE_KEYS, *matrix.FAMILY_KEYS, *matrix.ROW_KEYS, "instruction"}
    assert listed <= known


def test_row_of_the_guide_is_that_of_the_example() -> None:
    example = Path(__file__).parents[2] / "examples/humming-acme/src/humming_acme/matrix.yaml"
    (row,) = _blocks("yaml")
    assert yaml.safe_load(row) == yaml.safe_load(example.read_text())
    assert matrix.read_matrix(yaml.safe_load(row), "the guide").devices


@pytest.mark.parametrize("code", _blocks("python"), ids=lambda code: code.splitlines()[-1].strip())
def test_python_of_the_guide_is_python(code: str) -> None:
    assert ast.parse(code).body


def test_plugin_of_the_guide_is_a_plugin() -> None:
    code = next(block for block in _blocks("python") if "humming_probe" in block)
    names: dict[str, Any] = {"__file__": str(Path("/nowhere/plugin.py"))}
    exec(code, names)
    guest = type("Guest", (), {k: staticmethod(v) for k, v in names.items() if k in HOOKS})
    problems = PluginSet.of_modules(acme=guest).devices().problems
    assert [problem.hook for problem in problems] == ["humming_matrix"], "only its file is missing"
