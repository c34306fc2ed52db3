"""The T-Head PPU plugin: the PPU SDK's compiler, and the CUDA driver that a PPU presents."""

from collections.abc import Iterable
from typing import Any

from humming.capability import DeviceCapabilities
from humming.hookspecs import Compiler, PresentDevice, Runtime, hookimpl

from ..matrix import rows_of
from ..nvidia.driver import present_devices

# PPU-ZW810E, ZW-M890P: the generation says nothing, since the driver reports capabilities of
# NVIDIA's.
_OWN_NAMES = ("PPU", "ZW")


@hookimpl
def humming_matrix() -> dict[str, Any]:
    return rows_of("thead")


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
