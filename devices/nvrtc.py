"""NVRTC, called through cuda-bindings: in memory, without a toolkit and without a GPU."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from humming.errors import CompileError

_INSTALL = (
    "Install it with `pip install nvidia-cuda-nvrtc` (CUDA 13) or `pip install "
    "nvidia-cuda-nvrtc-cu12` (CUDA 12), of the major version of the installed cuda-bindings."
)

SHARED_OPTIONS = (
    "--std=c++20",
    # Unmarked functions, constexpr ones above all, are device code.
    "--device-as-default-execution-space",
    # Leaves out texture, surface and device-runtime declarations, which nobody here uses.
    "--minimal",
    # All headers come from memory: a file of the working directory must not leak in.
    "--no-source-include",
)
"""Options of every compilation."""


@cache
def version() -> tuple[int, int]:
    """(major, minor) of the NVRTC found; CompileError if there is none."""
    _, major, minor = library().nvrtcVersion()
    return int(major), int(minor)


@cache
def architectures() -> tuple[int, ...]:
    """The architectures that the NVRTC found knows: 75 for sm_75 and so on."""
    error, numbers = library().nvrtcGetSupportedArchs()
    _check(error, "nvrtcGetSupportedArchs")
    return tuple(int(number) for number in numbers)


def compile_program(
    source: str,
    headers: Mapping[str, str],
    entry: str,
    arch: str,
    options: tuple[str, ...],
    output: str,
) -> tuple[bytes, str]:
    """Compiles a source.

    Args:
        source: CUDA source that includes nothing but names in `headers`.
        headers: text of each header by include name, such as "humming/params.cuh".
        entry: the `extern "C"` kernel in it; it names the program in the compiler's messages.
        arch: what `options` compile for, as `sm_XX` with or without a letter.
        options: all options.
        output: "CUBIN" or "PTX".

    Returns:
        The image, and what the compiler said.

    Raises:
        CompileError: no NVRTC, an architecture unknown to it, or an error in the source.
    """
    nvrtc = library()
    _check_arch(arch, source, options)
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
            told = f"NVRTC {dotted(version())} cannot compile {entry} for {arch}"
            raise CompileError(f"{told}: {_error_text(error)}", source, options, text)
        get_size = getattr(nvrtc, f"nvrtcGet{output}Size")
        return _read(get_size, getattr(nvrtc, f"nvrtcGet{output}"), program), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@cache
def library() -> Any:
    """The bindings of NVRTC; CompileError says what to install where they or it are missing."""
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


def dotted(found: tuple[int, int]) -> str:
    """A version as people write it."""
    return f"{found[0]}.{found[1]}"


def _check_arch(arch: str, source: str, options: tuple[str, ...]) -> None:
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if match is None:
        raise CompileError(f"NVRTC compiles for architectures sm_XX, not {arch}")
    known = architectures()
    if int(match.group(1)) not in known:
        raise CompileError(
            f"NVRTC {dotted(version())} does not know {arch}; it knows "
            f"{', '.join(f'sm_{number}' for number in known)}. Install a newer one.",
            source,
            options,
        )


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
    _, text = library().nvrtcGetErrorString(error)
    return text.decode() if isinstance(text, bytes) else str(text)
