"""The simulator plugin: executes the PTX of any device's kernels on the CPU, strictly.

It has no devices of its own: `sim:NAME` is the row NAME, whoever has it, run here.

`simulate` runs a kernel of one's own; `options` changes how kernels run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from humming import env
from humming.capability import DeviceCapabilities
from humming.hookspecs import Compiler, PresentDevice, Runtime, hookimpl

if TYPE_CHECKING:
    from .launch_shape import Options, options
    from .own_kernels import simulate
    from .runtime import SimulatorRuntime

__all__ = ["Options", "SimulatorRuntime", "options", "simulate"]

PREFIX = "sim:"
"""What the names of simulated devices begin with."""


_PUBLIC = {
    "Options": "launch_shape",
    "SimulatorRuntime": "runtime",
    "options": "launch_shape",
    "simulate": "own_kernels",
}


def __getattr__(name: str) -> Any:
    # Imported late: reading rows must not need NumPy or a compiler.
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)


@hookimpl
def humming_variants(devices: Sequence[DeviceCapabilities]) -> Iterator[DeviceCapabilities]:
    for row in devices:
        yield replace(row, name=PREFIX + row.name, title=f"{row.title or row.name}, simulated")


@hookimpl
def humming_probe() -> list[PresentDevice]:
    # A row and its simulation mean the same here: there is nothing else that the CPU could be.
    row = env.simulated_device().lower().removeprefix(PREFIX).strip()
    # -1 is the host, as torch numbers the device of CPU tensors.
    return [PresentDevice(index=-1, driver_name="CPU", row=PREFIX + row)]


@hookimpl
def humming_compiler(device: DeviceCapabilities) -> Compiler | None:
    if not device.name.startswith(PREFIX):
        return None
    # Imported late: reading rows must not need a compiler.
    from .compiler import PtxCompiler

    return PtxCompiler()


@hookimpl
def humming_runtime(device: DeviceCapabilities) -> Runtime | None:
    if not device.name.startswith(PREFIX):
        return None
    # Imported late: it needs NumPy, and decodes every instruction.
    from .launch_shape import Options
    from .runtime import SimulatorRuntime

    return SimulatorRuntime(Options(device=device))
