"""Who compiles and runs for which device; the PPU compiler, with a stand-in for its nvcc."""

import sys
from pathlib import Path

import pytest

from humming.capability import DeviceCapabilities
from humming.errors import CompileError
from humming.plugins import PluginSet

INSTALLED = PluginSet.of_environment()
BUNDLED = [
    caps
    for caps in INSTALLED.registry.devices()
    if INSTALLED.registry.owner(caps.name) in ("nvidia", "thead_ppu")
]
SOURCE = '#include <humming/a.cuh>\nextern "C" __global__ void kernel() {}\n'
HEADERS = {"humming/a.cuh": "#pragma once\n", "humming/deep/b.cuh": "// deep\n"}

# Acts as the SDK's nvcc: answers --version, and compiles by writing what it was given.
NVCC = """#!{python}
import pathlib, sys
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print("PPU compiler driver\\nCuda compilation tools, release 12.9, V12.9.1")
    sys.exit()
folder = pathlib.Path(arguments[arguments.index("-I") + 1])
source = folder / arguments[-1]
if "#error" in source.read_text():
    print("error: told so", file=sys.stderr)
    sys.exit(2)
files = sorted(str(f.relative_to(folder)) for f in folder.rglob("*.cu*") if f.is_file())
output = pathlib.Path(arguments[arguments.index("-o") + 1])
output.write_text("|".join(files) + "|" + " ".join(arguments[:-5]))
print("warning: none of this is real", file=sys.stderr)
"""


@pytest.mark.parametrize("caps", BUNDLED, ids=lambda caps: caps.name)
def test_every_bundled_device_has_one_compiler(caps: DeviceCapabilities) -> None:
    expected = "nvrtc" if caps.vendor == "nvidia" else "ppu-nvcc"
    compiler = INSTALLED.compiler_for(caps)
    assert compiler.name == expected
    options = compiler.options(caps)
    assert not [option for option in options if "/" in option], "options are part of cache keys"


@pytest.mark.parametrize("caps", BUNDLED, ids=lambda caps: caps.name)
def test_every_bundled_device_has_a_runtime(caps: DeviceCapabilities) -> None:
    assert type(INSTALLED.runtime_for(caps)).__name__ == "CudaRuntime"


@pytest.fixture
def ppu() -> DeviceCapabilities:
    return INSTALLED.capabilities("zw810e")


@pytest.fixture
def sdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    nvcc = tmp_path / "CUDA_SDK" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(NVCC.format(python=sys.executable))
    nvcc.chmod(0o755)
    monkeypatch.setenv("PPU_SDK", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("sdk")
@pytest.mark.parametrize(("name", "arch"), [("zw810e", "80"), ("m890", "89")])
def test_ppu_kernels_are_compiled_by_the_sdk(name: str, arch: str) -> None:
    caps = INSTALLED.capabilities(name)
    compiler = INSTALLED.compiler_for(caps)
    assert compiler.version == (12, 9)
    image = compiler.compile(SOURCE, HEADERS, "kernel", caps)
    *files, options = image.data.decode().split("|")
    assert files == ["humming/a.cuh", "humming/deep/b.cuh", "kernel.cu"]
    assert f"-gencode=arch=compute_{arch},code=sm_{arch}" in options
    assert "-mllvm -ppu-mbar-yield-analysis=false" in options
    assert "-std=c++20" in options
    assert image.kind == "cubin"
    assert "none of this is real" in image.log


@pytest.mark.usefixtures("sdk")
def test_ppu_compile_error_holds_source_options_and_log(ppu: DeviceCapabilities) -> None:
    with pytest.raises(CompileError) as error:
        INSTALLED.compiler_for(ppu).compile("#error\n", {}, "kernel", ppu)
    assert error.value.source == "#error\n"
    assert "-cubin" in error.value.options
    assert "told so" in error.value.log
    assert "status 2" in str(error.value)


def test_without_sdk_the_message_says_what_is_missing(
    ppu: DeviceCapabilities, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PPU_SDK", raising=False)
    compiler = INSTALLED.compiler_for(ppu)
    for ask in (lambda: compiler.version, lambda: compiler.compile(SOURCE, {}, "kernel", ppu)):
        with pytest.raises(CompileError, match="PPU_SDK is not set"):
            ask()


def test_incomplete_sdk_names_the_file(
    ppu: DeviceCapabilities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPU_SDK", str(tmp_path))
    with pytest.raises(CompileError) as error:
        _ = INSTALLED.compiler_for(ppu).version
    assert str(tmp_path / "CUDA_SDK/bin/nvcc") in str(error.value)


def test_sdk_whose_nvcc_answers_nothing_is_refused(ppu: DeviceCapabilities, sdk: Path) -> None:
    (sdk / "CUDA_SDK/bin/nvcc").write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(CompileError, match="says no release"):
        _ = INSTALLED.compiler_for(ppu).version
