"""What stands beside the times of benchmarks: a floor, and the card, versions and date.

How they time is in `humming.graphs`. Nothing here asserts.
"""

import importlib.metadata
import json
import struct
from pathlib import Path
from typing import Any

import torch

from humming import plugins
from humming.compiler import compile_source
from humming.hookspecs import Kernel
from humming.timing import circumstances

FLOOR_SMEM_BYTES = 6 * 16384


class Floor:
    """A kernel that only reads: what no kernel that reads the same bytes can beat."""

    def __init__(self) -> None:
        caps = plugins.capabilities()
        source = (Path(__file__).parent / "floor.cu").read_text()
        compiled = compile_source(source, "floor_read", caps, cache=False)
        runtime = plugins.runtime_for(caps)
        self._kernel: Kernel = runtime.load(compiled.image, "floor_read", FLOOR_SMEM_BYTES, 0)
        self._sms = caps.sms or torch.cuda.get_device_properties(0).multi_processor_count

    def read(self, buffer: torch.Tensor, dependent: bool) -> None:
        """Enqueue one read of a buffer on torch's current stream."""
        size = buffer.numel() * buffer.element_size() // 16 * 16
        params = struct.pack("<3q", buffer.data_ptr(), size, int(dependent))
        stream = torch.cuda.current_stream().cuda_stream
        self._kernel.launch((self._sms, 1, 1), (128, 1, 1), params, stream, pdl=dependent)


def environment() -> dict[str, Any]:
    """The card, versions and date that belong to every result."""
    versions = {}
    for name in ("torch", "cuda-bindings", "nvidia-cuda-nvrtc", "humming-kernels", "triton"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    caps = plugins.capabilities()
    compiler = plugins.compiler_for(caps)
    known = circumstances(caps)
    return {
        "card": known["card"],
        "device": caps.name,
        "compiler": f"{compiler.name} {compiler.version[0]}.{compiler.version[1]}",
        "versions": versions,
        "date": known["date"],
    }


def save(path: Path | None, result: dict[str, Any]) -> None:
    """Write a result as JSON, if a file is named."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
