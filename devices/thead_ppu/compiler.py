"""Compiles composed sources with the nvcc of the PPU SDK."""

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from humming.capability import DeviceCapabilities
from humming.errors import CompileError
from humming.hookspecs import Image

# The CUDA architecture that the SDK's nvcc takes for a generation of PPU.
_CUDA_ARCH = {"ppu_10": "80", "ppu_15": "89"}
_NVCC = "CUDA_SDK/bin/nvcc"
_TIMEOUT_S = 600


class PpuCompiler:
    """The nvcc that the PPU SDK brings, found through the variable PPU_SDK.

    NVRTC does not serve: its binaries do not run on a PPU, and the SDK's own run-time compiler is
    not public enough to be called from here.
    """

    name = "ppu-nvcc"

    @property
    def version(self) -> tuple[int, int]:
        """(major, minor) of the CUDA version that the SDK's nvcc stands for.

        Raises:
            CompileError: no SDK, or its nvcc does not run.
        """
        return _version(_nvcc())

    def options(self, caps: DeviceCapabilities) -> tuple[str, ...]:
        """The options for a PPU.

        Raises:
            CompileError: a generation that this plugin does not know.
        """
        arch = _CUDA_ARCH.get(caps.arch)
        if arch is None:
            known = ", ".join(_CUDA_ARCH)
            raise CompileError(f"{caps.name}: no nvcc architecture for {caps.arch}; known: {known}")
        return (
            "-cubin",
            "-std=c++20",
            f"-gencode=arch=compute_{arch},code=sm_{arch}",
            "--expt-relaxed-constexpr",
            # This analysis can loop forever on barrier addresses that are computed.
            "-mllvm",
            "-ppu-mbar-yield-analysis=false",
        )

    def compile(
        self, source: str, headers: Mapping[str, str], entry: str, caps: DeviceCapabilities
    ) -> Image:
        """Compile; see `humming.hookspecs.Compiler`."""
        nvcc, options = _nvcc(), self.options(caps)
        with tempfile.TemporaryDirectory(prefix="humming-ppu-") as folder:
            root = Path(folder)
            for name, text in {**headers, f"{entry}.cu": source}.items():
                file = root / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            output = root / f"{entry}.cubin"
            command = [str(nvcc), *options, "-I", folder, "-o", str(output), f"{entry}.cu"]
            done = _run(command, root, source, options)
            if done.returncode != 0 or not output.is_file():
                message = f"{entry}: the PPU SDK's nvcc ended with status {done.returncode}"
                raise CompileError(message, source, options, done.stdout + done.stderr)
            return Image("cubin", output.read_bytes(), done.stdout + done.stderr)


def _nvcc() -> Path:
    sdk = os.environ.get("PPU_SDK", "").strip()
    if not sdk:
        raise CompileError(
            "Compiling for a PPU needs the PPU SDK: the environment variable PPU_SDK is not set. "
            "Set it to the SDK's folder (usually /usr/local/PPU_SDK), which holds "
            f"{_NVCC}. Binaries of NVIDIA's compilers do not run on a PPU."
        )
    nvcc = Path(sdk) / _NVCC
    if not (nvcc.is_file() and os.access(nvcc, os.X_OK)):
        raise CompileError(
            f"Compiling for a PPU needs {nvcc}, which is no executable file. "
            "PPU_SDK must be the folder of a whole PPU SDK."
        )
    return nvcc


def _run(
    command: list[str], folder: Path, source: str = "", options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"the PPU SDK's nvcc did not run: {error}", source, options) from error


@lru_cache(maxsize=4)
def _version(nvcc: Path) -> tuple[int, int]:
    done = _run([str(nvcc), "--version"], nvcc.parent)
    release = re.search(r"release (\d+)\.(\d+)", done.stdout)
    if done.returncode != 0 or release is None:
        raise CompileError(f"{nvcc} --version says no release", log=done.stdout + done.stderr)
    return int(release[1]), int(release[2])
