"""The simulator plugin: executes the PTX of any device's kernels on the CPU, strictly.

It has no devices of its own: `sim:NAME` is the row NAME, whoever has it, run here.
"""

from humming.capability import DeviceCapabilities
from humming.hookspecs import Compiler, Runtime, hookimpl

PREFIX = "sim:"
"""What the names of simulated devices begin with."""


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
