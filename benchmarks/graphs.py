"""CUDA graphs of calls over buffers that together do not fit in L2.

Nothing here knows what is called: the benchmarks of this project and the processes that time other
libraries share it.
"""

from collections.abc import Callable
from typing import Any

import torch

CALLS = 48
L2_MULTIPLES = 3


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


def replay(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds that one replay takes."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end) * 1000)
