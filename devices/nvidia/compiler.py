"""Compiles composed sources with NVRTC: in memory, without a toolkit and without a GPU."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from humming.capability import DeviceCapabilities
from humming.errors import CompileError
from humming.hookspecs import Image

_INSTALL = (
    "Install it with `pip install nvidia-cuda-nvrtc` (CUDA 13) or `pip install "
    "nvidia-cuda-nvrtc-cu12` (CUDA 12), of the major version of the installed cuda-bindings."
)


class NvrtcCompiler:
    """The NVRTC of the environment, called through cuda-bindings.

    It makes cubins, never PTX: a driver older than the compiler could not translate its PTX.
    Any NVRTC from 12.9 on serves; what an older one lacks is gated by `min_compiler` in the matrix.
    """

    name = "nvrtc"

    @property
    def version(self) -> tuple[int, int]:
        """(major, minor) of the NVRTC found; CompileError if there is none."""
        return _version()

    def options(self, caps: DeviceCapabilities) -> tuple[str, ...]:
        """Returns the options that a kernel for `caps` is compiled with."""
        return (
            f"--gpu-architecture={caps.arch}",
            "--std=c++20",
            # Unmarked functions, constexpr ones above all, are device code.
            "--device-as-default-execution-space",
            # Leaves out texture, surface and device-runtime declarations, which nobody here uses.
            "--minimal",
            # All headers come from memory: a file of the working directory must not leak in.
            "--no-source-include",
            # Registers and spills go into the log.
            "--ptxas-options=-v",
        )

    def compile(
        self, source: str, headers: Mapping[str, str], entry: str, caps: DeviceCapabilities
    ) -> Image:
        """Compiles a source to a cubin.

        Args:
            source: CUDA source that includes nothing but names in `headers`.
            headers: text of each header by include name, such as "humming/params.cuh".
            entry: the `extern "C"` kernel in it; it names the program in the compiler's messages.
            caps: the device; its `arch` is what is compiled for.

        Raises:
            CompileError: no NVRTC, an architecture unknown to it, or an error in the source.
        """
        nvrtc = _nvrtc()
        options = self.options(caps)
        self._check_arch(caps.arch, source, options)
        error, program = nvrtc.nvrtcCreateProgram(
            source.encode(),
            f"{entry}.cu".encode(),
            len(headers),
            [text.encode() for text in headers.values()],
            [name.encode() for name in headers],
        )
        _check(error, "nvrtcCreateProgram")
        try:
            arguments = [option.encode() for option in options]
            (error,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
            log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            text = log.rstrip(b"\0").decode(errors="replace")
            if int(error) != 0:
                reason = _error_text(error)
                raise CompileError(
                    f"NVRTC {_dotted(_version())} cannot compile {entry} for {caps.arch}: {reason}",
                    source,
                    options,
                    text,
                )
            cubin = _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        finally:
            nvrtc.nvrtcDestroyProgram(program)
        return Image(kind="cubin", data=cubin, log=text)

    def _check_arch(self, arch: str, source: str, options: tuple[str, ...]) -> None:
        match = re.fullmatch(r"sm_(\d+)[af]?", arch)
        if match is None:
            raise CompileError(f"NVRTC compiles for architectures sm_XX, not {arch}")
        known = _architectures()
        if int(match.group(1)) not in known:
            raise CompileError(
                f"NVRTC {_dotted(_version())} does not know {arch}; it knows "
                f"{', '.join(f'sm_{number}' for number in known)}. Install a newer one.",
                source,
                options,
            )


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CompileError(
            f"NVRTC is reached through cuda-bindings, which cannot be imported ({error}). "
            "Install it with `pip install cuda-bindings`."
        ) from error
    try:
        nvrtc.nvrtcVersion()  # the library is opened by the first call, not by the import
    except (RuntimeError, OSError) as error:
        told = " ".join(str(error).split())
        raise CompileError(f"libnvrtc was not found ({told}). {_INSTALL}") from error
    return nvrtc


@cache
def _version() -> tuple[int, int]:
    _, major, minor = _nvrtc().nvrtcVersion()
    return int(major), int(minor)


@cache
def _architectures() -> tuple[int, ...]:
    error, numbers = _nvrtc().nvrtcGetSupportedArchs()
    _check(error, "nvrtcGetSupportedArchs")
    return tuple(int(number) for number in numbers)


def _read(get_size: Any, get_data: Any, program: Any) -> bytes:
    error, size = get_size(program)
    _check(error, get_size.__name__)
    data = bytearray(size)
    (error,) = get_data(program, data)
    _check(error, get_data.__name__)
    return bytes(data)


def _check(error: Any, call: str) -> None:
    if int(error) != 0:
        raise CompileError(f"{call} failed: {_error_text(error)}")


def _error_text(error: Any) -> str:
    _, text = _nvrtc().nvrtcGetErrorString(error)
    return text.decode() if isinstance(text, bytes) else str(text)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
