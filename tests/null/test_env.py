"""The environment variables: defaults, values, refusals, and the page that lists them."""

import os
import re
from pathlib import Path

import pytest

from humming import env
from humming.errors import UnsupportedError

ROOT = Path(__file__).parents[2]
FLAGS = {
    "HUMMING_STRICT_PLUGINS": (env.strict_plugins, True),
    "HUMMING_TRACE_PLUGINS": (env.trace_plugins, True),
    "HUMMING_DISABLE_CACHE": (env.cache_enabled, False),
}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in env.VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_flag_is_set_by(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, when_set = FLAGS[name]
    monkeypatch.setenv(name, text)
    assert read() is when_set


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("text", [None, "", "0", "false", "No", "off"])
def test_flag_is_not_set_by(name: str, text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    read, when_set = FLAGS[name]
    if text is not None:
        monkeypatch.setenv(name, text)
    assert read() is not when_set


@pytest.mark.parametrize("name", FLAGS)
def test_flag_that_is_neither_true_nor_false(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "perhaps")
    with pytest.raises(UnsupportedError, match=f"{name}=perhaps.*neither true nor false"):
        FLAGS[name][0]()


def test_cache_dir_is_the_users_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert env.cache_dir() == tmp_path / "humming"


def test_cache_dir_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HUMMING_CACHE_DIR", "kernels")
    assert env.cache_dir() == tmp_path / "kernels"
    assert not env.cache_dir().exists(), "asking for the folder must not make it"


def test_cache_dir_may_start_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HUMMING_CACHE_DIR", "~/kernels")
    assert env.cache_dir() == tmp_path / "kernels"


def test_compile_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= env.compile_jobs() <= (os.cpu_count() or 1)
    monkeypatch.setenv("HUMMING_COMPILE_JOBS", " 7 ")
    assert env.compile_jobs() == 7


@pytest.mark.parametrize("text", ["0", "-2", "2.5", "many", "²"])
def test_compile_jobs_refuses(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUMMING_COMPILE_JOBS", text)
    with pytest.raises(UnsupportedError, match="HUMMING_COMPILE_JOBS"):
        env.compile_jobs()


def test_every_variable_is_one_line() -> None:
    assert all(doc and "\n" not in doc for doc in env.VARIABLES.values())


def test_the_page_says_what_the_module_says() -> None:
    page = (ROOT / "docs/environment.md").read_text()
    rows = dict(re.findall(r"^\| `(HUMMING_\w+)` \| (.*) \|$", page, flags=re.MULTILINE))
    assert rows == env.VARIABLES
