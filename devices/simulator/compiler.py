"""Compiles composed sources with NVRTC to PTX, the form that the simulator executes."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from humming.capability import DeviceCapabilities
from humming.errors import CompileError
from humming.hookspecs import Image

_INSTALL = "Install it with `pip install cuda-bindings nvidia-cuda-nvrtc`."


class PtxCompiler:
    """The NVRTC of the environment; it stops at PTX, so no assembler looks at inline assembly.

    That is what lets it serve devices whose assembler is another vendor's: their instructions are
    text in the PTX, which the simulator knows.
    """

    name = "nvrtc-ptx"

    @property
    def version(self) -> tuple[int, int]:
        """(major, minor) of the NVRTC found; CompileError if there is none."""
        _, major, minor = _nvrtc().nvrtcVersion()
        return int(major), int(minor)

    def options(self, caps: DeviceCapabilities) -> tuple[str, ...]:
        """Returns the options that a kernel for `caps` is compiled with."""
        return (
            f"--gpu-architecture={_virtual(caps.arch)}",
            "--std=c++20",
            # Unmarked functions, constexpr ones above all, are device code.
            "--device-as-default-execution-space",
            "--minimal",
            # All headers come from memory: a file of the working directory must not leak in.
            "--no-source-include",
        )

    def compile(
        self, source: str, headers: Mapping[str, str], entry: str, caps: DeviceCapabilities
    ) -> Image:
        """Compiles a source to PTX.

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
                told = f"NVRTC cannot compile {entry} for {caps.arch}: {_error_text(error)}"
                raise CompileError(told, source, options, text)
            ptx = _read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
        finally:
            nvrtc.nvrtcDestroyProgram(program)
        return Image(kind="ptx", data=ptx.rstrip(b"\0"), log=text)


def _virtual(arch: str) -> str:
    """The virtual architecture of a real one: sm_90a -> compute_90a."""
    match = re.fullmatch(r"sm_(\d+[af]?)", arch)
    if match is None:
        raise CompileError(f"NVRTC compiles for architectures sm_XX, not {arch}")
    return f"compute_{match.group(1)}"


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # the library is opened by the first call, not by the import
    except (ImportError, RuntimeError, OSError) as error:
        raise CompileError(f"NVRTC cannot be used ({error}). {_INSTALL}") from error
    return nvrtc


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
