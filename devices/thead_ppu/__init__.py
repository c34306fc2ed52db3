"""The T-Head PPU plugin: the PPUs' matrix instructions, the PPU SDK's compiler, and the CUDA driver
that a PPU presents."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from humming.capability import DeviceCapabilities
from humming.components import Component
from humming.hookspecs import Compiler, PresentDevice, Runtime, hookimpl

from ..matrix import rows_of
from ..nvidia.driver import present_devices
from .components import COMPONENTS

# PPU-ZW810E, ZW-M890P: the generation says nothing, since the driver reports capabilities of
# NVIDIA's.
_OWN_NAMES = ("PPU", "ZW")
_KERNELS = Path(__file__).parent / "kernels"


@hookimpl
def humming_matrix() -> dict[str, Any]:
    return rows_of("thead")


@hookimpl
def humming_components() -> Iterable[Component]:
    return COMPONENTS


@hookimpl
def humming_include_dirs() -> Iterable[Path]:
    return [_KERNELS]


@hookimpl
def humming_probe() -> Iterable[PresentDevice]:
    return [d for d in present_devices() if d.driver_name.startswith(_OWN_NAMES)]


@hookimpl
def humming_compiler(device: DeviceCapabilities) -> Compiler | None:
    if not device.arch.startswith("ppu_"):
        return None
    from .compiler import PpuCompiler

    return PpuCompiler()


@hookimpl
def humming_runtime(device: DeviceCapabilities) -> Runtime | None:
    if not device.arch.startswith("ppu_"):
        return None
    # A PPU is driven through the CUDA driver API, by the driver that it brings.
    from ..nvidia.runtime import CudaRuntime

    return CudaRuntime()
