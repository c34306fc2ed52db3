"""When a kernel may let the next one's CTAs start: beside its own, and without crowding them.

With programmatic dependent launch the CTAs of the next kernel start once all of a grid have told
that they may. There they copy the first weights, which no kernel before has to write, and wait for
this grid to end only then. The earlier that is told the better, unless the scheduler crowds them:
it puts them where there is room, and idle SMs have room for two, which end last (on an H200 that
costs 5 of 12 us). So it is told early where an SM holds one CTA, which a grid of no more CTAs than
SMs takes enough shared memory for, and where a grid fills all SMs as often as they have room.
"""

from dataclasses import dataclass
from math import ceil

from humming.capability import DeviceCapabilities
from humming.lowering import Lowering
from humming.problem import GemmProblem
from humming.tile_cost import RESERVED_SMEM_BYTES, resident_ctas
from humming.tiles import TileConfig


@dataclass(frozen=True, slots=True)
class Overlap:
    """How the launches of a kernel overlap those after them.

    Attributes:
        smem_bytes: dynamic shared memory of a CTA.
        early_ctas: from so many CTAs on the next kernel's may start at once; None for never, so
            that they start when this one's tiles are summed.
    """

    smem_bytes: int
    early_ctas: int | None = None


def overlap_of(
    problem: GemmProblem,
    lowering: Lowering,
    caps: DeviceCapabilities,
    tile: TileConfig,
    high: int | None,
) -> Overlap:
    """The overlap of a kernel that computes up to `high` tokens."""
    smem_bytes, sms = tile.smem_bytes(problem, lowering), caps.sms
    if "griddepcontrol" not in caps.features or not sms or not caps.smem_per_sm_bytes:
        return Overlap(smem_bytes)
    resident = resident_ctas(problem, lowering, caps, tile)
    columns = ceil(problem.n / (tile.block_n * tile.cluster_n)) * tile.cluster_n
    if high is None or high > tile.block_m or columns * tile.split_k > sms:
        return Overlap(smem_bytes, 0 if resident == 1 else resident * sms)
    alone = caps.smem_per_sm_bytes // 2 - RESERVED_SMEM_BYTES + 1
    if resident > 1 and alone > (caps.smem_per_block_bytes or 0):
        return Overlap(smem_bytes)  # a CTA cannot keep others from its SM
    return Overlap(smem_bytes if resident == 1 else max(smem_bytes, alone), 0)
