"""How a kernel cuts a product: tiles, warps, pipeline stages, parts of K.

A tile is what one CTA computes: `block_n` rows of weights times `block_m` tokens, in pipeline
stages of `block_k` values of K. Weights are the MMA's A operand, so rows come in sixteens and
tokens in eights, and small batches waste nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from humming.capability import DeviceCapabilities
from humming.errors import UnsupportedError
from humming.layout import BRICK_K, BRICK_ROWS, LANES
from humming.lowering import (
    EPILOGUE,
    LONGEST_STAGE_K,
    Lowering,
    activation_group,
    scale_step,
    weight_group,
)
from humming.problem import GemmProblem

# Rows of activations lie 16 bytes further apart than they are long, which spreads ldmatrix over
# the banks of shared memory (kXPitch in kernels/mainloop/mma_sync.cuh).
X_ROW_PADDING_BYTES = 16
# Boxes of activations have rows of this many bytes and begin at multiples of 8 of them, and so do
# stages (kBoxBytes and kStageSize in kernels/mainloop/stages.cuh).
BOX_ROW_BYTES, STAGE_ALIGN_BYTES = 128, 1024
# What a box begins at in shared memory, and how many elements a row of it holds at most, of which
# sizes.
BOX_ALIGN_BYTES, MOST_BOX_ELEMENTS, BOX_ELEMENT_BYTES = 128, 256, (1, 2, 4, 8)
# CTAs of a cluster that mainloops with a producer are written for.
CLUSTERS = (1, 2, 4)
# CTAs of a cluster on every device that has clusters (CUDA programming guide,
# "Thread Block Clusters").
MOST_CLUSTER = 8
# Two barriers of a stage.
BARRIER_BYTES = 16
# The warpgroup that a producer belongs to.
PRODUCER_WARPS = 4
# Rows of staged results lie 4 floats further apart (kPitch in kernels/epilogue/tile.cuh).
OUT_ROW_PADDING = 4
# Of staged results of warpgroups, at most: less than stages that suit such tiles.
EPILOGUE_BYTES = 144 * 1024
# Accumulators of a thread; more would spill beside fragments and addresses.
MAX_ACCUMULATORS = 128
# The same of warpgroups, whose fragments are two at a time and whose tokens are no registers.
MAX_WARPGROUP_ACCUMULATORS, WARPGROUP_REGISTERS, TOKEN_SCALE_REGISTERS = 192, 40, 24
# Threads of a CTA that multiply.
MAX_THREADS = 512
# Warps of a warpgroup, and the token tiles that its instruction is written for
# (kernels/ptx/wgmma.cuh).
WARPGROUP_WARPS = 4
WARPGROUP_TOKENS = (8, 16, 32, 64, 96, 128, 192, 256)
# Registers of a thread of the producer, where many are left and where few are; most of another.
LARGE_PRODUCER_REGISTERS, PRODUCER_REGISTERS, MAX_DEALT_REGISTERS = 40, 24, 240
# Registers that a thread of a large CTA has beside its accumulators.
OTHER_REGISTERS = 56
# Sixteen-byte pieces that a mover through registers may hold for a thread.
MAX_PIECES_IN_REGISTERS = 12
# Each part of K must run the pipeline long enough to be worth a reduction.
MIN_STAGES_PER_SPLIT = 2
# Bricks of 64 values of K that a pipeline stage may hold.
_BRICKS = tuple(1 << i for i in range((LONGEST_STAGE_K // BRICK_K).bit_length()))


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One way to cut a product.

    Attributes:
        block_n: rows of weights of a CTA, a multiple of 16 * warps_n.
        block_m: tokens of a CTA, a multiple of 8 and of those of one MMA.
        block_k: K values of a pipeline stage, a multiple of 64 * warps_k.
        warps_n, warps_k: warps along the rows, and along K within a stage.
        num_stages: pipeline stages in shared memory, at least 2.
        split_k: CTAs that share a tile, each with a part of K.
        epilogue_m: tokens that the epilogue stages at a time, a divisor of block_m.
        producer_warps: warps beside those that multiply, of a mainloop that has a producer.
        cluster_n: CTAs of a cluster, which have neighbouring rows and share the tokens' copies.
        cluster_k: split_k where the CTAs that share a tile are a cluster and add their sums through
            its shared memory, 1 where they do so through a workspace.
    """

    block_n: int
    block_m: int
    block_k: int
    warps_n: int
    warps_k: int
    num_stages: int
    split_k: int = 1
    epilogue_m: int = 8
    producer_warps: int = 0
    cluster_n: int = 1
    cluster_k: int = 1

    def __post_init__(self) -> None:
        rules = (
            (self.block_n % (BRICK_ROWS * self.warps_n) == 0, "block_n % (16 * warps_n) == 0"),
            (self.block_m % 8 == 0 and self.block_m > 0, "block_m is a positive multiple of 8"),
            (self.block_k % (BRICK_K * self.warps_k) == 0, "block_k % (64 * warps_k) == 0"),
            (self.num_stages >= 2, "num_stages >= 2"),
            (self.split_k >= 1, "split_k >= 1"),
            (self.block_m % self.epilogue_m == 0, "epilogue_m divides block_m"),
            (self.cluster_n in CLUSTERS, f"cluster_n is one of {CLUSTERS}"),
            (self.block_m % (8 * self.cluster_n) == 0, "block_m % (8 * cluster_n) == 0"),
            (self.cluster_k in (1, self.split_k), "cluster_k is 1 or split_k"),
            (
                self.cluster_n * self.cluster_k <= MOST_CLUSTER,
                f"cluster_n * cluster_k <= {MOST_CLUSTER}",
            ),
            (self.cluster_k == 1 or self.epilogue_m == self.block_m, "clusters stage whole tiles"),
        )
        for holds, rule in rules:
            if not holds:
                raise UnsupportedError(f"tile {self}", f"it breaks {rule}", "Change its sizes.")

    def __str__(self) -> str:
        producer = f" + {self.producer_warps}" if self.producer_warps else ""
        cluster = f", clusters of {self.cluster_n}" if self.cluster_n > 1 else ""
        cluster += " in clusters" if self.cluster_k > 1 else ""
        return (
            f"{self.block_n}x{self.block_m}x{self.block_k}, warps {self.warps_n}x{self.warps_k}"
            f"{producer}, {self.num_stages} stages, split K {self.split_k}{cluster}"
        )

    @property
    def uses_workspace(self) -> bool:
        """Whether CTAs add their sums through memory."""
        return self.split_k > self.cluster_k

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return LANES * (self.warps_n * self.warps_k + self.producer_warps)

    def dealt_registers(self, file: int) -> tuple[int, int]:
        """Registers of a thread of the producer and of the others, dealt out of a register file of
        an SM; zeros where all have enough as they are."""
        warpgroups = self.warps_n * self.warps_k // WARPGROUP_WARPS
        if not self.producer_warps or warpgroups == 1:
            return 0, 0
        # Counts are multiples of 8, at the start too.
        threads = LANES * WARPGROUP_WARPS
        first = file // (threads * (warpgroups + 1)) // 8 * 8
        producer = LARGE_PRODUCER_REGISTERS if warpgroups == 2 else PRODUCER_REGISTERS
        others = (first * (warpgroups + 1) - producer) // warpgroups // 8 * 8
        return producer, min(others, MAX_DEALT_REGISTERS)

    @property
    def warp_k(self) -> int:
        """K values of a stage that one warp multiplies."""
        return self.block_k // self.warps_k

    def groups(self, problem: GemmProblem) -> int:
        """Groups of weights that one stage touches."""
        group = weight_group(problem)
        return max(1, self.block_k // group) if group else 1

    def staged_bytes(self, problem: GemmProblem, lowering: Lowering) -> tuple[int, int]:
        """Bytes of a scale and of a zero point that are brought with the codes; 0 if none are."""
        weight = problem.weight
        scale_bytes = weight.scale_dtype.bits // 8
        zero_bytes = {"none": 0, "integer": 1, "float": scale_bytes}[weight.zero_point]
        staged = weight_group(problem) and lowering.scale_site != EPILOGUE
        return scale_bytes if staged else 0, zero_bytes

    def box_bricks(self, problem: GemmProblem) -> int:
        """Bricks of K that one box of codes brings; a stage has a whole number of boxes."""
        brick_bytes = BRICK_ROWS * BRICK_K * problem.weight.dtype.bits // 8
        bricks = self.block_k // BRICK_K
        while bricks % 2 == 0 and bricks * brick_bytes > 8 * MOST_BOX_ELEMENTS:
            bricks //= 2
        return bricks

    def stages_token_scales(self, problem: GemmProblem, lowering: Lowering) -> bool:
        """Whether stages hold scales of groups of tokens: words, which threads copy."""
        words = problem.activation.scale_dtype.bits == 32
        return lowering.has_producer and words and activation_group(problem) > 0

    def token_scale_bytes(self, problem: GemmProblem, lowering: Lowering) -> int:
        """Bytes of the scales of groups of tokens in a stage."""
        if not self.stages_token_scales(problem, lowering):
            return 0
        return 4 * self.block_m * max(1, self.block_k // activation_group(problem))

    def stage_bytes(self, problem: GemmProblem, lowering: Lowering) -> int:
        """Shared memory of one pipeline stage: codes, scales, zero points, activations."""
        value_bytes = [
            -(-self.block_n * self.groups(problem) * size // BOX_ALIGN_BYTES) * BOX_ALIGN_BYTES
            for size in self.staged_bytes(problem, lowering)
        ]
        weight_bytes = self.block_n * self.block_k * problem.weight.dtype.bits // 8
        weight_bytes += sum(value_bytes)
        x_row_bytes = self.block_k * problem.activation.dtype.bits // 8
        if not lowering.has_producer:
            return weight_bytes + self.block_m * (x_row_bytes + X_ROW_PADDING_BYTES)
        boxes = -(-x_row_bytes // BOX_ROW_BYTES) * BOX_ROW_BYTES * self.block_m
        total = boxes + weight_bytes + self.token_scale_bytes(problem, lowering)
        return -(-total // STAGE_ALIGN_BYTES) * STAGE_ALIGN_BYTES

    def smem_bytes(self, problem: GemmProblem, lowering: Lowering) -> int:
        """Dynamic shared memory of a CTA: the pipeline, or the epilogue that follows it."""
        epilogue = 4 * self.warps_k * self.epilogue_m * (self.block_n + OUT_ROW_PADDING)
        barriers = self.num_stages * BARRIER_BYTES if lowering.has_producer else 0
        return max(self.num_stages * self.stage_bytes(problem, lowering), epilogue) + barriers

    def accumulators(self, problem: GemmProblem, lowering: Lowering) -> int:
        """Registers of a thread that hold sums; partial sums of groups double them."""
        sums = self.block_n // self.warps_n * self.block_m // LANES
        if lowering.mma.accumulator.bits == 16:
            return sums * 3 // 2
        if not lowering.partial_k(problem):
            return sums
        # Warpgroups sum the groups of one row block after the other.
        blocks = self.block_n // self.warps_n // BRICK_ROWS if lowering.has_producer else 1
        return sums + sums // blocks


def candidates(
    problem: GemmProblem,
    lowering: Lowering,
    caps: DeviceCapabilities,
    m_range: tuple[int, int | None],
) -> list[TileConfig]:
    """The tiles that fit a lowering on a device, for M in a range; empty where none does.

    Pairs of parts of K are clusters: they add faster than through a workspace (docs/benchmarks.md).
    Larger clusters leave SMs idle wherever they do not divide those of a GPC.
    """
    found = []
    for tile in _tiles(problem, lowering, m_range):
        pair = in_memory_of_cluster(tile) if tile.split_k == 2 else tile
        found += [t for t in (pair, tile) if fits(t, problem, lowering, caps)][:1]
    return found


def measurable(
    problem: GemmProblem,
    lowering: Lowering,
    caps: DeviceCapabilities,
    m_range: tuple[int, int | None],
) -> list[TileConfig]:
    """The candidates, and others with or without clusters, whose worth only a clock tells."""
    found = []
    for tile in _tiles(problem, lowering, m_range):
        tiles_n = -(-problem.n // tile.block_n)
        along_n = [
            replace(tile, cluster_n=cluster)
            for cluster in CLUSTERS
            if cluster <= tiles_n and tile.block_m % (8 * cluster) == 0
        ]
        found += along_n
        found += [
            in_memory_of_cluster(tile)
            for tile in along_n
            if tile.split_k > 1 and tile.cluster_n * tile.split_k <= MOST_CLUSTER
        ]
    return [tile for tile in dict.fromkeys(found) if fits(tile, problem, lowering, caps)]


def in_memory_of_cluster(tile: TileConfig) -> TileConfig:
    """The same tile, its parts of K a cluster."""
    return replace(tile, cluster_k=tile.split_k, epilogue_m=tile.block_m)


def why_no_tile(problem: GemmProblem, caps: DeviceCapabilities) -> str:
    """Why `candidates` are none, as a clause."""
    group = weight_group(problem)
    group = scale_step(problem) if holds_group(group) else group
    if not holds_group(group):
        told = f"a scale per {group} values of K fits no tile"
        return f"{told}; groups of 16, 32 or a multiple of {BRICK_K} values do"
    limit, registers = caps.smem_per_block_bytes, caps.registers_per_sm
    return f"no tile fits into {limit} bytes of shared memory and {registers} registers"


def holds_group(group: int) -> bool:
    """Whether some tile has room for scales per `group` values of K; 0 is one scale for all."""
    return any(_divide_k(BRICK_K * bricks, BRICK_K * bricks, group) for bricks in _BRICKS)


def _tiles(
    problem: GemmProblem, lowering: Lowering, m_range: tuple[int, int | None]
) -> Iterator[TileConfig]:
    """Tiles of a mainloop, whether they fit or not."""
    shapes = _warpgroup_shapes if lowering.has_producer else _shapes
    return shapes(problem, lowering, m_range)


def _shapes(
    problem: GemmProblem, lowering: Lowering, m_range: tuple[int, int | None]
) -> Iterator[TileConfig]:
    through_registers = lowering.mover == "plain"
    # A range without end has tokens enough to fill a device, and no end to its partial sums.
    splits = (1,) if problem.batch_invariant or m_range[1] is None else (1, 2, 4, 8)
    step = lowering.mma.shape[1]
    for block_m in _block_m(m_range, step):
        for warps_n, row_blocks in ((4, 1), (4, 2), (8, 1), (8, 2), (16, 1), (4, 4)):
            for warps_k in (1,) if problem.batch_invariant else (1, 2, 4):
                for bricks in _BRICKS:
                    for num_stages in (2,) if through_registers else (3, 4, 6):
                        for split_k in splits:
                            if bricks % warps_k == 0:
                                yield TileConfig(
                                    block_n=BRICK_ROWS * warps_n * row_blocks,
                                    block_m=block_m,
                                    block_k=BRICK_K * bricks,
                                    warps_n=warps_n,
                                    warps_k=warps_k,
                                    num_stages=num_stages,
                                    split_k=split_k,
                                    epilogue_m=max(min(block_m, 16), step),
                                )


def _warpgroup_shapes(
    problem: GemmProblem, lowering: Lowering, m_range: tuple[int, int | None]
) -> Iterator[TileConfig]:
    """Tiles of warpgroups, each of 64 rows or twice that."""
    splits = (1,) if problem.batch_invariant or m_range[1] is None else (1, 2, 4, 8)
    for block_m in _warpgroup_block_m(m_range, lowering.mma.n_values):
        for warpgroups, row_blocks in ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1)):
            # Rows of boxes of 8-bit activations hold two bricks.
            for bricks in (1, 2) if lowering.operand_bits == 16 else (2, 4):
                for num_stages in (8, 6, 5, 4, 3):
                    for split_k in splits:
                        yield warpgroup_tile(
                            warpgroups, row_blocks, block_m, bricks, num_stages, split_k
                        )


def warpgroup_tile(
    warpgroups: int,
    row_blocks: int,
    block_m: int,
    bricks: int,
    num_stages: int,
    split_k: int = 1,
    cluster_n: int = 1,
) -> TileConfig:
    """A tile of warpgroups that each have `row_blocks` x 64 rows, in stages of `bricks` x 64 K."""
    warps_n = WARPGROUP_WARPS * warpgroups
    block_n = BRICK_ROWS * warps_n * row_blocks
    return TileConfig(
        block_n=block_n,
        block_m=block_m,
        block_k=BRICK_K * bricks,
        warps_n=warps_n,
        warps_k=1,
        num_stages=num_stages,
        split_k=split_k,
        epilogue_m=_epilogue_m(block_m, block_n),
        producer_warps=PRODUCER_WARPS,
        cluster_n=cluster_n,
    )


def _epilogue_m(block_m: int, block_n: int) -> int:
    """Tokens that warpgroups stage at a time: all, or an equal part that takes bytes enough.

    Each pass waits twice for all warps, and has code of its own, which takes long to assemble.
    """
    row_bytes = 4 * (block_n + OUT_ROW_PADDING)
    parts = (block_m // count for count in range(1, block_m // 8 + 1) if block_m % (8 * count) == 0)
    return next(part for part in parts if part * row_bytes <= EPILOGUE_BYTES or part == 8)


def box_element_bytes(row_bytes: int) -> int:
    """Bytes of an element of the map whose boxes have rows of so many bytes."""
    return next(size for size in BOX_ELEMENT_BYTES if row_bytes <= size * MOST_BOX_ELEMENTS)


def _warpgroup_block_m(
    m_range: tuple[int, int | None], instruction: tuple[int, ...]
) -> tuple[int, ...]:
    """Token tiles of an instruction that suit a range: the one that holds it all, or several."""
    high, sizes = m_range[1], [size for size in WARPGROUP_TOKENS if size in instruction]
    if high is None or high > 64:
        return tuple(size for size in sizes if size >= 64)
    return tuple(size for size in sizes if high <= size)[:1]


def _block_m(m_range: tuple[int, int | None], step: int) -> tuple[int, ...]:
    """Token tiles that suit a range: the one that holds it all, or several where it has no end.

    They hold whole MMAs, of `step` tokens each.
    """
    high = m_range[1]
    sizes = [size for size in (8, 16, 32, 64, 128) if size % step == 0]
    if high is None or high > 64:
        return tuple(size for size in sizes if size >= 64)
    return tuple(size for size in sizes if high <= size)[:1]


def fits(
    tile: TileConfig, problem: GemmProblem, lowering: Lowering, caps: DeviceCapabilities
) -> bool:
    """Whether a tile's parts divide one another as the kernel needs it, and the device holds it."""
    group, step = weight_group(problem), scale_step(problem)
    stage = tile.stage_bytes(problem, lowering)
    boxes = lowering.has_producer
    part_k = BRICK_K if boxes else tile.warp_k
    file = caps.registers_per_sm or 65536
    registers = tile.dealt_registers(file)[1] or min(255, file // tile.threads)
    most_sums, others = MAX_ACCUMULATORS, OTHER_REGISTERS
    if boxes:
        most_sums, others = MAX_WARPGROUP_ACCUMULATORS, WARPGROUP_REGISTERS
        scattered = activation_group(problem) and not tile.stages_token_scales(problem, lowering)
        others += TOKEN_SCALE_REGISTERS if scattered else 0
    return (
        LANES * tile.warps_n * tile.warps_k <= MAX_THREADS
        and _divide_k(tile.block_k, part_k, group)
        and _divide_k(tile.block_k, part_k, step)
        and step % lowering.step_k == 0
        and tile.accumulators(problem, lowering) <= min(most_sums, registers - others)
        and tile.smem_bytes(problem, lowering) <= (caps.smem_per_block_bytes or 48 * 1024)
        and (tile.cluster_n == 1 or (boxes and {"clusters", "multicast"} <= set(caps.features)))
        and (tile.cluster_k == 1 or "clusters" in caps.features)
        and (not boxes or tile.block_k * problem.activation.dtype.bits // 8 % BOX_ROW_BYTES == 0)
        and (lowering.mover != "plain" or stage / 16 / tile.threads <= MAX_PIECES_IN_REGISTERS)
        and (tile.split_k == 1 or _stages(problem, tile) >= MIN_STAGES_PER_SPLIT * tile.split_k)
    )


def _stages(problem: GemmProblem, tile: TileConfig) -> int:
    return -(-problem.k // tile.block_k)


def _divide_k(block_k: int, warp_k: int, group: int) -> bool:
    """Whether groups of K end where stages, warps' parts of stages and MMA steps of 16 do."""
    if group == 0:
        return True
    aligned = all(part % group == 0 or group % part == 0 for part in (block_k, warp_k))
    return aligned and group % 16 == 0
