"""Runs kernels that are not composed here, from their source to the result."""

import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from humming import env, plugins
from humming.errors import HummingError
from humming.hookspecs import Buffer, Image

from .compiler import PtxCompiler
from .launch_shape import Dim, Options
from .program import Program
from .ptx_parser import parse
from .ptx_syntax import TYPE_BITS
from .runtime import SimulatorRuntime

_IS_PTX = re.compile(r"^\s*\.version\b", re.MULTILINE)
_FLOATS = {"f32": "<f", "f64": "<d"}


def simulate(
    source: str,
    arguments: Sequence[Any],
    *,
    grid: int | Dim = 1,
    block: int | Dim = 32,
    cluster: int | Dim = 1,
    smem_bytes: int = 0,
    kernel: str = "",
    device: str = "",
) -> None:
    """Runs a kernel on the CPU, on the memory of its arguments.

    Args:
        source: PTX, or CUDA that includes nothing.
        arguments: for each parameter a NumPy array or CPU tensor, whose address is passed and which
            the kernel may read and write; or a number.
        grid, block, cluster: numbers of CTAs, threads, CTAs of a cluster, in x or in x, y and z.
        smem_bytes: dynamic shared memory of each CTA.
        kernel: its name; may be left out if the source has one kernel.
        device: name of the device; by default the one of HUMMING_SIMULATE.

    Raises:
        SimulationError: the kernel did what it must not do.
        CompileError: the CUDA source does not compile.
        HummingError: what is asked for cannot be launched.
    """
    caps = plugins.capabilities((device or env.simulated_device()).removeprefix("sim:"))
    text = source
    if not _IS_PTX.search(source):
        image = PtxCompiler().compile(source, {}, kernel or "kernel", caps)
        text = image.data.decode()
    names = [function.name for function in parse(text).functions.values() if function.is_entry]
    if not kernel and len(names) != 1:
        told = f"the source has {len(names)} kernels"
        raise HummingError(f"{told}: name one of {', '.join(names)}" if names else f"{told} to run")
    runtime = SimulatorRuntime(Options(device=replace(caps, name=f"sim:{caps.name}")))
    loaded = runtime.load(Image("ptx", text.encode()), kernel or names[0], smem_bytes)
    params, buffers = _passed(loaded.program, arguments)
    loaded.launch(_dim(grid), _dim(block), params, cluster=_dim(cluster), buffers=buffers)


def _dim(size: int | Dim) -> Dim:
    return (size, 1, 1) if isinstance(size, int) else size


def _passed(program: Program, arguments: Sequence[Any]) -> tuple[bytes, list[Buffer]]:
    """The bytes of a kernel's parameters, and the memory that they point to."""
    wanted = program.entry.params
    if len(wanted) != len(arguments):
        told = f"{program.entry.name} has {len(wanted)} parameters"
        raise HummingError(f"{told}; {len(arguments)} arguments are given")
    data, buffers = bytearray(program.param_bytes), []
    for number, (parameter, argument) in enumerate(zip(wanted, arguments, strict=True)):
        kind, at = parameter.type, program.params[parameter.name]
        if isinstance(argument, (int, float)) and parameter.size_bytes == TYPE_BITS[kind] // 8:
            data[at : at + TYPE_BITS[kind] // 8] = _bytes_of(argument, kind, number)
            continue
        buffer = _buffer(argument, number)
        buffers.append(buffer)
        data[at : at + 8] = struct.pack("<Q", buffer.address)
    return bytes(data), buffers


def _bytes_of(value: float, kind: str, number: int) -> bytes:
    if kind in _FLOATS:
        return struct.pack(_FLOATS[kind], value)
    if isinstance(value, float):
        raise HummingError(f"argument {number} is {value!r}, and its parameter is .{kind}")
    bits = TYPE_BITS[kind]
    return (value & ((1 << bits) - 1)).to_bytes(bits // 8, "little")


def _buffer(argument: Any, number: int) -> Buffer:
    """The memory of an array or tensor."""
    name = f"argument {number}"
    if hasattr(argument, "data_ptr"):
        if argument.device.type != "cpu" or not argument.is_contiguous():
            raise HummingError(f"{name} is a tensor that is not contiguous memory of the CPU")
        return Buffer(argument.data_ptr(), argument.nbytes, name)
    if hasattr(argument, "ctypes"):
        if not argument.flags.c_contiguous:
            raise HummingError(f"{name} is an array that is not contiguous")
        return Buffer(argument.ctypes.data, argument.nbytes, name)
    told = "a NumPy array, a CPU tensor, or a number where its parameter is one"
    raise HummingError(f"{name} is a {type(argument).__name__}; it may be {told}")
