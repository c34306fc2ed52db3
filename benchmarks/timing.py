"""How benchmarks time: CUDA-graph replays over buffers that do not fit in L2, beside a floor.

Nothing here asserts. Times are microseconds per call; a call is one of `calls` that a graph
replays one after the other, each on another copy of the weights.
"""

import datetime
import importlib.metadata
import statistics
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from humming import plugins
from humming.compiler import compile_source
from humming.hookspecs import Kernel

CALLS = 48
REPLAYS = 10
L2_MULTIPLES = 3
FLOOR_SMEM_BYTES = 6 * 16384


def copies_beyond_l2(bytes_per_copy: int) -> int:
    """How many copies of a buffer together exceed the L2 three times (at least two)."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, -(-L2_MULTIPLES * l2_bytes // bytes_per_copy))


def capture(call: Callable[[int], Any], calls: int = CALLS) -> torch.cuda.CUDAGraph:
    """A graph of `calls` calls; call number i is told i."""
    call(0)  # compiles, loads and warms up outside of the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            call(index)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def time_graphs(graphs: dict[str, torch.cuda.CUDAGraph], calls: int = CALLS) -> dict[str, float]:
    """Median microseconds per call of each graph; the graphs take turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(REPLAYS):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1000 / calls)
    return {name: statistics.median(values) for name, values in times.items()}


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
    return {
        "card": torch.cuda.get_device_name(0),
        "device": caps.name,
        "compiler": f"{compiler.name} {compiler.version[0]}.{compiler.version[1]}",
        "versions": versions,
        "date": datetime.date.today().isoformat(),
    }
