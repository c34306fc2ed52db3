"""Every header of device code compiles alone, for every architecture that has what it needs."""

import re

import pytest

from humming import plugins
from humming.capability import DeviceCapabilities
from humming.compiler import compile_source
from humming.errors import CompileError

HEADERS = plugins.registry().headers


def _by_arch() -> dict[str, DeviceCapabilities]:
    """One device of each architecture that the NVRTC found here knows, or its simulation."""
    registry = plugins.registry()
    rows = [row for row in registry.devices() if row.arch.startswith("sm_")]
    rows += [row for row in registry.variants() if not row.arch.startswith("sm_")]
    version = plugins.compiler_for(rows[0]).version
    return {row.arch: row for row in rows if (row.min_compiler or (0, 0)) <= version}


ARCHS = _by_arch()


def _needs(text: str, caps: DeviceCapabilities) -> set[str]:
    """The features, movers and instructions that a header's `Needs:` line names."""
    line = re.search(r"^// Needs:(.*)", text, re.MULTILINE)
    words = set(re.findall(r"\w+", line.group(1))) if line else set()
    return words & caps.vocabulary


def _cases() -> list[tuple[str, str]]:
    return [
        (name, arch)
        for name, path in HEADERS.items()
        for arch, caps in ARCHS.items()
        if all(caps.supports(need) for need in _needs(path.read_text(), caps))
    ]


def test_every_header_has_an_architecture() -> None:
    assert {name for name, _ in _cases()} == set(HEADERS)
    assert any(arch == "sm_75" for _, arch in _cases())


@pytest.mark.parametrize(("header", "arch"), _cases())
def test_header_compiles_alone(header: str, arch: str) -> None:
    # Twice, because a header without `#pragma once` would define things twice.
    source = f"#include <{header}>\n#include <{header}>\n"
    source += 'extern "C" __global__ void alone() {}\n'
    kernel = compile_source(source, "alone", ARCHS[arch], cache=False)
    assert "warning" not in kernel.log


def test_header_that_needs_another_one_would_fail() -> None:
    # What the test above would see of a header that uses humming::u32 without including it.
    source = "namespace humming { u32 word; }\n" + 'extern "C" __global__ void alone() {}\n'
    with pytest.raises(CompileError, match='identifier "u32" is undefined'):
        compile_source(source, "alone", ARCHS["sm_80"], cache=False)
