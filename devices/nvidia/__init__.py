"""The NVIDIA plugin: NVRTC and the CUDA driver, for every device with an `sm_` architecture."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from humming.capability import DeviceCapabilities
from humming.components import Component
from humming.hookspecs import Compiler, PresentDevice, Runtime, hookimpl

from ..matrix import rows_of
from .components import COMPONENTS
from .driver import present_devices

# The first words of the names that NVIDIA's drivers give to NVIDIA's devices. Other vendors'
# CUDA-compatible devices answer through a CUDA driver too, and are their plugins' to claim.
_OWN_NAMES = ("NVIDIA", "Tesla", "GeForce", "Quadro", "TITAN", "GRID", "A100-")
_KERNELS = Path(__file__).parent / "kernels"


@hookimpl
def humming_matrix() -> dict[str, Any]:
    return rows_of("nvidia")


@hookimpl
def humming_components() -> Iterable[Component]:
    return COMPONENTS


@hookimpl
def humming_include_dirs() -> Iterable[Path]:
    return [_KERNELS] if _KERNELS.is_dir() else []


@hookimpl
def humming_probe() -> Iterable[PresentDevice]:
    return [d for d in present_devices() if d.driver_name.startswith(_OWN_NAMES)]


@hookimpl
def humming_compiler(device: DeviceCapabilities) -> Compiler | None:
    if not device.arch.startswith("sm_"):
        return None
    # Imported late: reading rows must not need a compiler.
    from .compiler import NvrtcCompiler

    return NvrtcCompiler()


@hookimpl
def humming_runtime(device: DeviceCapabilities) -> Runtime | None:
    if not device.arch.startswith("sm_"):
        return None
    # Imported late: it needs a driver and torch's streams.
    from .runtime import CudaRuntime

    return CudaRuntime()
