"""The kernel cache: what a key depends on, and entries that survive processes, damage and races."""

import multiprocessing
import os
import stat
import time
from pathlib import Path

import pytest

from humming.cache import (
    CacheEntry,
    KernelCache,
    include_closure,
    kernel_key,
    kernel_recipe,
    key_version,
)
from humming.errors import CompileError

RECIPE = "ab" * 32
KEY = kernel_key(RECIPE, (13, 0))


def _entry(key: str = KEY, data: bytes = b"\x7fELF\n\x00image") -> CacheEntry:
    return CacheEntry(key, "kernel_1", "cubin", data, "ptxas info\nUsed 40 registers")


@pytest.fixture
def headers(tmp_path: Path) -> dict[str, Path]:
    """a includes b and d, b includes c and a."""
    texts = {
        "a.cuh": "#pragma once\n#include <humming/b.cuh>\n#include <humming/deep/d.cuh>  // why\n",
        "b.cuh": "#include <humming/c.cuh>\n#include <humming/a.cuh>\n",
        "c.cuh": "int c;\n",
        "deep/d.cuh": "int d;\n",
        "unused.cuh": "int unused;\n",
    }
    found = {}
    for name, text in texts.items():
        path = found[f"humming/{name}"] = tmp_path / name.replace("/", "_")
        path.write_text(text)
    return found


def test_closure_follows_includes_and_circles(headers: dict[str, Path]) -> None:
    closure = include_closure("#include <humming/a.cuh>\nint x;\n", headers)
    assert list(closure) == [
        "humming/a.cuh",
        "humming/b.cuh",
        "humming/c.cuh",
        "humming/deep/d.cuh",
    ]
    assert closure["humming/c.cuh"] == "int c;\n"


@pytest.mark.parametrize(
    "line",
    [
        '#include "humming/a.cuh"',
        "#include <cuda_fp16.h>",
        "  #include <humming/a.cuh>",
        "# include <humming/a.cuh>",
        "#include<humming/a.cuh>",
        "#include <humming/a.cuh> int x;",
        "#include HEADER",
        "#include_next <humming/a.cuh>",
        "%:include <humming/a.cuh>",
    ],
)
def test_other_spellings_are_errors_that_say_where(line: str, headers: dict[str, Path]) -> None:
    headers["humming/c.cuh"].write_text(f"int x;\n\n{line}\n")
    with pytest.raises(CompileError, match=r"humming/c\.cuh:3: .*#include <humming/PATH>"):
        include_closure("#include <humming/b.cuh>\n", headers)


@pytest.mark.parametrize("name", ["humming/cc.cuh", "humming/../a.cuh", "humming/deep"])
def test_unknown_header_says_who_asked(name: str, headers: dict[str, Path]) -> None:
    with pytest.raises(CompileError, match=rf"kernel_1\.cu:2: <{name}> is in no include folder"):
        include_closure(f"\n#include <{name}>\n", headers, name="kernel_1.cu")


BASE = {
    "source": "int x;",
    "headers": {"humming/a.cuh": "int a;"},
    "entry": "kernel_1",
    "compiler": "nvrtc",
    "options": ("--std=c++20", "--gpu-architecture=sm_80"),
}


@pytest.mark.parametrize(
    "change",
    [
        {"source": "int y;"},
        {"headers": {"humming/a.cuh": "int b;"}},
        {"headers": {"humming/b.cuh": "int a;"}},
        {"headers": {}},
        {"entry": "kernel_2"},
        {"compiler": "other"},
        {"options": ("--std=c++20", "--gpu-architecture=sm_90a")},
        {"options": ("--std=c++20--gpu-architecture=sm_80",)},
        {"options": (*BASE["options"], "-lineinfo")},
    ],
    ids=str,
)
def test_recipe_depends_on(change: dict) -> None:
    assert kernel_recipe(**BASE) != kernel_recipe(**{**BASE, **change})


def test_key_names_recipe_and_version() -> None:
    keys = {kernel_key(RECIPE, version) for version in [(13, 0), (13, 1), (1, 30), (130, 0)]}
    assert len(keys) == 4
    assert all(key.startswith(RECIPE) for key in keys)
    assert key_version(kernel_key(RECIPE, (13, 10))) == (13, 10)


def test_recipe_is_the_same_on_every_host() -> None:
    two = {"humming/a.cuh": "int a;", "humming/b.cuh": ""}
    reordered = dict(reversed(two.items()))
    assert kernel_recipe(**BASE | {"headers": two}) == kernel_recipe(
        **BASE | {"headers": reordered}
    )
    # A literal guards against anything of this machine or version of Python entering the key.
    literal = "70c23515017059dc8f34f75726eec5c3abee1859e6118307107792964b52f907"
    assert kernel_recipe(**BASE) == literal


def test_directories_are_private_however_they_come_about(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "new")
    cache.load_or_build(KEY, _entry)
    for directory in (cache.directory, cache.directory / "locks"):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_round_trip_in_a_private_directory(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "new")
    assert cache.load(KEY) is None
    cache.store(_entry())
    assert cache.load(KEY) == _entry()
    assert stat.S_IMODE(cache.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(cache.path(KEY).stat().st_mode) == 0o600
    assert [path.name for path in cache.directory.iterdir()] == [f"{KEY}.kernel"]


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        pytest.param((13, 0), (13, 0), id="its-own"),
        pytest.param((13, 1), (13, 10), id="newest-of-the-newer"),
        pytest.param((13, 10), (13, 10), id="newest"),
        pytest.param((13, 11), None, id="updated"),
        pytest.param((12, 9), None, id="other-major"),
        pytest.param(None, (14, 0), id="no-compiler"),
    ],
)
def test_kernels_of_newer_compilers_serve(
    installed: tuple[int, int] | None, found: tuple[int, int] | None, tmp_path: Path
) -> None:
    cache = KernelCache(tmp_path)
    assert cache.find(RECIPE, installed) is None
    for version in [(13, 0), (13, 2), (13, 10), (14, 0)]:
        cache.store(_entry(kernel_key(RECIPE, version)))
    cache.store(_entry(kernel_key("cd" * 32, (13, 11))))
    (cache.directory / f"{RECIPE}-old.kernel").write_bytes(b"somebody else's")
    entry = cache.find(RECIPE, installed)
    assert (entry and key_version(entry.key)) == found


def test_damaged_kernel_of_a_newer_compiler_leaves_the_next(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    for version in [(13, 2), (13, 3)]:
        cache.store(_entry(kernel_key(RECIPE, version)))
    cache.path(kernel_key(RECIPE, (13, 3))).write_bytes(b"")
    entry = cache.find(RECIPE, (13, 0))
    assert entry
    assert key_version(entry.key) == (13, 2)


def test_default_directory_is_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUMMING_CACHE_DIR", str(tmp_path))
    assert KernelCache().directory == KernelCache(tmp_path).directory


def _flip(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda raw: b"", id="empty"),
        pytest.param(lambda raw: raw[: len(raw) // 2], id="cut"),
        pytest.param(lambda raw: raw + b"x", id="longer"),
        pytest.param(lambda raw: _flip(raw, 3), id="magic"),
        pytest.param(lambda raw: _flip(raw, 30), id="checksum"),
        pytest.param(lambda raw: _flip(raw, 100), id="header"),
        pytest.param(lambda raw: _flip(raw, -1), id="image"),
        pytest.param(lambda raw: _entry("cd" * 32 + "-13.0").to_bytes(), id="other-kernel"),
    ],
)
def test_damaged_entry_is_reported_and_built_again(
    damage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = KernelCache(tmp_path)
    cache.store(_entry())
    cache.path(KEY).write_bytes(damage(cache.path(KEY).read_bytes()))
    assert cache.load(KEY) is None
    assert cache.load_or_build(KEY, _entry) == (_entry(), False)
    assert cache.load(KEY) == _entry()
    assert caplog.text.count("cannot be used") == 1
    assert cache.load_or_build(KEY, pytest.fail) == (_entry(), True)


def test_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)

    def build() -> CacheEntry:
        raise CompileError("no")

    with pytest.raises(CompileError):
        cache.load_or_build(KEY, build)
    assert not list(cache.directory.glob("*.kernel")) + list(cache.directory.glob(".kernel-*"))
    assert cache.load_or_build(KEY, _entry) == (_entry(), False)


def test_interrupted_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = KernelCache(tmp_path)

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.store(_entry())
    assert not list(cache.directory.iterdir())


def test_directory_that_cannot_be_written_costs_a_warning_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # A file where the directory should be stops root too, whom permissions would not.
    (tmp_path / "kernels").write_text("")
    cache = KernelCache(tmp_path)
    with caplog.at_level("WARNING"):
        for _ in range(2):  # each of which meets it at the lock and at the file
            assert cache.load_or_build(KEY, _entry) == (_entry(), False)
    assert caplog.text.count("HUMMING_CACHE_DIR") == 1


def _build_slowly(root: str, log: str, start: "multiprocessing.synchronize.Event") -> None:
    def build() -> CacheEntry:
        with open(log, "a") as file:
            file.write("built\n")
        time.sleep(0.3)
        return _entry()

    start.wait()
    entry, _ = KernelCache(Path(root)).load_or_build(KEY, build)
    assert entry == _entry()


def test_processes_that_ask_at_the_same_time_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, log = context.Event(), tmp_path / "log"
    workers = [
        context.Process(target=_build_slowly, args=(str(tmp_path), str(log), start))
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    start.set()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert log.read_text() == "built\n"
