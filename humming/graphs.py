"""CUDA graphs of calls over buffers that together do not fit in L2.

Times are microseconds per call; a call is one of several that a graph replays one after the other,
each told its number, so that it can take another copy of the weights. Of this package nothing is
imported here, so that processes in which another one has its name can load the file.
"""

import statistics
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch

CALLS = 48
"""Calls of a graph: so many that the launch of the graph itself does not show."""
REPLAYS = 10
"""Replays of which the median counts."""
L2_MULTIPLES = 3
"""How many times the L2 all copies of a buffer exceed."""

Name = TypeVar("Name", bound=Hashable)
_EVENT: Any = torch.cuda.Event  # untyped


def copies_beyond_l2(bytes_per_copy: int, device_index: int = 0) -> int:
    """How many copies of a buffer together exceed the L2 three times (at least two)."""
    l2_bytes = torch.cuda.get_device_properties(device_index).L2_cache_size
    return max(2, -(-L2_MULTIPLES * l2_bytes // bytes_per_copy))


def capture(call: Callable[[int], Any], calls: int = CALLS) -> torch.cuda.CUDAGraph:
    """A graph of `calls` calls on the current device; call number i is told i."""
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
    start, end = (_EVENT(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end) * 1000)


def time_graphs(
    graphs: Mapping[Name, torch.cuda.CUDAGraph], calls: int = CALLS, replays: int = REPLAYS
) -> dict[Name, float]:
    """Median microseconds per call of each graph; the graphs take turns."""
    times: dict[Name, list[float]] = {name: [] for name in graphs}
    for _ in range(replays):
        for name, graph in graphs.items():
            times[name].append(replay(graph) / calls)
    return {name: statistics.median(values) for name, values in times.items()}
