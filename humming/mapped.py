"""What a copy engine reads by tensor maps: the matrices of a plan whose kernel has a producer.

The parameters of the kernel end with a map each of activations, codes, scales and zero points; what
it does not stage is left out as zeros. `MappedGemmParams` of `kernels/params.cuh` is their layout.
"""

from math import ceil

from humming.composer import KernelPlan
from humming.hookspecs import MappedMatrix
from humming.layout import BRICK_K, BRICK_ROWS
from humming.lowering import weight_group
from humming.tiles import BOX_ROW_BYTES, box_element_bytes

PARAMS_ALIGN_BYTES = 64
"""Where maps begin in the parameters."""


def tokens_matrix(
    plan: KernelPlan, address: int, pitch_bytes: int, m: int, columns: int, element_bytes: int
) -> MappedMatrix:
    """Activations [m, columns], which arrive in boxes of 128 bytes of each token of a tile.

    Args:
        plan: of a kernel that has a producer.
        address, pitch_bytes: of the first row, and from one to the next if there are several.
        m, columns, element_bytes: size and elements, of which quantized ones hold one or two.
    """
    if m == 1:  # the step to a next row may be anything
        pitch_bytes = ceil(columns * element_bytes / 16) * 16
    box_columns = BOX_ROW_BYTES // element_bytes
    box_rows = plan.tile.block_m // plan.tile.cluster_n  # each CTA of a cluster brings a share
    return MappedMatrix(
        address, pitch_bytes, m, columns, element_bytes, box_rows, box_columns, True
    )


def weight_matrices(
    plan: KernelPlan, codes: int, scales: int, zeros: int
) -> tuple[MappedMatrix | None, MappedMatrix | None, MappedMatrix | None]:
    """Codes, scales and zero points at addresses: a row of each matrix is a block of 16 rows."""
    problem, tile = plan.problem, plan.tile
    rows, bricks = ceil(problem.n / BRICK_ROWS), ceil(problem.k / BRICK_K)
    group = weight_group(problem)
    groups = ceil(bricks * BRICK_K / group) if group else 1
    scale_bytes, zero_bytes = tile.staged_bytes(problem, plan.lowering)
    brick_bytes = BRICK_ROWS * BRICK_K * problem.weight.dtype.bits // 8

    def matrix(address: int, row_bytes: int, box_bytes: int) -> MappedMatrix | None:
        if not box_bytes:
            return None
        size = box_element_bytes(box_bytes)
        box_rows = tile.block_n // BRICK_ROWS
        return MappedMatrix(
            address, row_bytes, rows, row_bytes // size, size, box_rows, box_bytes // size, False
        )

    def per_group(address: int, value_bytes: int) -> MappedMatrix | None:
        values = BRICK_ROWS * value_bytes
        return matrix(address, groups * values, tile.groups(problem) * values)

    return (
        matrix(codes, bricks * brick_bytes, tile.box_bricks(problem) * brick_bytes),
        per_group(scales, scale_bytes),
        per_group(zeros, zero_bytes),
    )
