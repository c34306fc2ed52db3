"""Special registers (PTX ISA 10)."""

from typing import Any

import numpy as np

from .groups import WARP, Array
from .launch_shape import Dim, Shape
from .program import SHARED_BASE

_SMEM_UNIT = 128
"""Shared memory is given to CTAs in multiples of so many bytes (PTX ISA 10.30)."""


def special_values(shape: Shape, ctas: list[Dim], grid: Dim, static_bytes: int) -> dict[str, Array]:
    """Values, uint64 [warps, 32], of those that do not change while a wave runs.

    Args:
        shape: of the wave.
        ctas: places of its CTAs in the grid; there may be fewer than the shape has.
        grid: CTAs of the grid in x, y and z.
        static_bytes: shared memory of the kernel's own variables.
    """
    specials: dict[str, Array] = {}
    row = np.arange(shape.ctas * shape.cta_warps)
    row_cta, row_warp = row // shape.cta_warps, row % shape.cta_warps
    ones = np.ones((len(row), WARP), np.uint64)

    def set_rows(name: str, values: Any) -> None:
        specials[name] = np.asarray(values, np.uint64).reshape(-1, 1) * ones

    thread = (row_warp[:, None] * WARP + np.arange(WARP)).astype(np.uint64)
    x, y, _ = (np.uint64(size) for size in shape.block)
    specials["%tid.x"] = thread % x
    specials["%tid.y"] = thread // x % y
    specials["%tid.z"] = thread // (x * y)
    place = np.array(ctas + [(0, 0, 0)] * (shape.ctas - len(ctas)), np.uint64)
    clusters = [-(-size // part) for size, part in zip(grid, shape.cluster, strict=True)]
    for axis, letter in enumerate("xyz"):
        own = place[row_cta, axis]
        part = np.uint64(shape.cluster[axis])
        set_rows(f"%ctaid.{letter}", own)
        set_rows(f"%cluster_ctaid.{letter}", own % part)
        set_rows(f"%clusterid.{letter}", own // part)
        set_rows(f"%ntid.{letter}", shape.block[axis])
        set_rows(f"%nctaid.{letter}", grid[axis])
        set_rows(f"%cluster_nctaid.{letter}", shape.cluster[axis])
        set_rows(f"%nclusterid.{letter}", clusters[axis])
    lane = np.arange(WARP, dtype=np.uint64)
    specials["%laneid"] = lane * ones
    below = (np.uint64(1) << lane) - np.uint64(1)
    own_bit = np.uint64(1) << lane
    everything = np.uint64(0xFFFFFFFF)
    for suffix, bits in (
        ("lt", below),
        ("le", below | own_bit),
        ("eq", own_bit),
        ("ge", everything & ~below),
        ("gt", everything & ~(below | own_bit)),
    ):
        specials[f"%lanemask_{suffix}"] = bits * ones
    set_rows("%warpid", row_warp)
    set_rows("%nwarpid", shape.cta_warps)
    set_rows("%smid", row_cta)
    set_rows("%nsmid", shape.ctas)
    set_rows("%gridid", 0)
    set_rows("%cluster_ctarank", row_cta % shape.cluster_size)
    set_rows("%cluster_nctarank", shape.cluster_size)
    set_rows("%is_explicit_cluster", int(shape.cluster_size > 1))
    set_rows("%dynamic_smem_size", shape.smem_bytes)
    used = -(-(static_bytes + shape.smem_bytes) // _SMEM_UNIT) * _SMEM_UNIT
    set_rows("%total_smem_size", used)
    # The system's part of shared memory lies ahead of the variables.
    set_rows("%aggr_smem_size", SHARED_BASE + used)
    set_rows("%reserved_smem_offset_begin", 0)
    set_rows("%reserved_smem_offset_end", SHARED_BASE)
    set_rows("%reserved_smem_offset_cap", SHARED_BASE)
    for number in (0, 1):
        set_rows(f"%reserved_smem_offset_{number}", 0)
    return specials
