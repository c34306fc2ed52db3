"""Tiles: what a stage of one holds."""

import pytest

from humming.problem import GemmProblem
from humming.tiles import warpgroup_tile


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("block_k", [64, 128, 256])
def test_boxes_of_codes_divide_a_stage(bits: int, block_k: int) -> None:
    """And their rows have at most 256 elements of 8 bytes."""
    problem = GemmProblem.parse(f"int{bits} x int8", 256, 1024)
    tile = warpgroup_tile(1, 1, 64, block_k // 64, 2, 1)
    bricks = tile.box_bricks(problem)
    assert block_k // 64 % bricks == 0
    assert bricks * 128 * bits <= 256 * 8
