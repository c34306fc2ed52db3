"""Plans of the mainloop of warpgroups, whatever the composer would choose."""

from collections.abc import Iterator

import numpy as np

from humming.capability import DeviceCapabilities
from humming.composer import KernelPlan, compose_as, m_range_of
from humming.errors import UnsupportedError
from humming.lowering import Lowering, enumerate_lowerings
from humming.problem import GemmProblem
from humming.tiles import TileConfig, fits, warpgroup_tile

FORMATS = (
    *("int4_g128", "int4_g128_sbf16", "uint4_g64_zp", "uint4_g32_fzp", "int4_g16_sfp32"),
    *("int8", "int8_g256", "mxfp4", "fp8", "nvfp4", "int3_g64", "mxfp6_e3m2", "int4_tensor"),
)
"""Weights with scales and zero points of every kind."""
QUANTIZED = (
    *("int4 x int8", "int8 x int8", "int8 x int8_asym", "uint4_zp x int8", "int4_g128 x int8"),
    *("int8_g128 x int8_g128", "int4_g32 x int8_g64", "uint3_g64_zp x int8_tensor"),
    *("fp8 x fp8", "fp8_block128 x fp8_g128", "mxfp4 x fp8", "int4_g128 x fp8", "mxfp8 x mxfp8"),
    *("float8e0m7_block64x32 x int8_tensor", "float4e0m3 x fp8"),
    *("float8e5m2 x fp8_tensor", "int3 x fp8_e5m2", "mxfp6_e3m2 x fp8", "uint4_g64_zp x fp8_g128"),
)
"""Products of quantized activations that warpgroups take as they are."""
CLUSTERS = (1, 2, 4)
# (warpgroups, row blocks, tokens of a tile, bricks of a stage, stages)
SHAPES = (
    *((1, 1, 8, 1, 2), (1, 1, 64, 2, 3), (2, 1, 16, 2, 4), (2, 1, 96, 1, 3), (1, 2, 32, 2, 2)),
    *((2, 2, 64, 1, 3), (3, 1, 32, 2, 2), (2, 1, 128, 2, 2), (2, 1, 256, 1, 2), (4, 1, 32, 4, 2)),
)


def lowerings(problem: GemmProblem, caps: DeviceCapabilities) -> list[Lowering]:
    """Those of warpgroups that a device's copy engine serves, with sums that kernels have."""
    found, _ = enumerate_lowerings(problem, caps)
    return [
        lowering
        for lowering in found
        if lowering.has_producer and lowering.mma.accumulator.bits == 32
    ]


def tiles(
    problem: GemmProblem, lowering: Lowering, caps: DeviceCapabilities, most_tokens: int = 256
) -> list[TileConfig]:
    """Tiles of every kind that fit, each whole and with K split."""
    made = [
        warpgroup_tile(*shape, split_k, cluster)
        for shape in SHAPES
        for split_k in (1, 2)
        for cluster in CLUSTERS
        if shape[2] <= most_tokens and shape[2] % (8 * cluster) == 0
    ]
    return [tile for tile in made if fits(tile, problem, lowering, caps)]


def plans(
    name: str,
    caps: DeviceCapabilities,
    size: tuple[int, int, int],
    rng: np.random.Generator,
    most_tokens: int = 256,
) -> Iterator[KernelPlan]:
    """A plan in a random tile for each lowering of a problem of size (m, n, k)."""
    m, n, k = size
    problem = GemmProblem.parse(name, n, k, bias=bool(rng.integers(2)))
    for lowering in lowerings(problem, caps):
        fitting = tiles(problem, lowering, caps, most_tokens)
        try:
            tile = fitting[int(rng.integers(len(fitting)))]
            yield compose_as(problem, caps, m_range_of(m), lowering, tile)
        except UnsupportedError as error:
            raise AssertionError(f"{lowering.name}: {error}") from error
