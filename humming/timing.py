"""What kernels are timed with, and under which circumstances; `humming.graphs` times them."""

import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from humming import plugins
from humming.capability import DeviceCapabilities
from humming.compiler import identity, version_of


def circumstances(caps: DeviceCapabilities, device_index: int = 0) -> dict[str, Any]:
    """The card, versions and date that belong to every result."""
    compiler = plugins.compiler_for(caps)
    (name, _), (major, minor) = identity(compiler, caps), version_of(compiler, caps)
    try:
        own = version("humming-kernels")
    except PackageNotFoundError:
        own = "unknown"
    return {
        "card": torch.cuda.get_device_name(device_index),
        "date": datetime.date.today().isoformat(),
        "versions": {"humming": own, "torch": str(torch.__version__), name: f"{major}.{minor}"},
    }
