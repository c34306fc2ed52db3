"""What a tile costs: the time of the busiest SM, from what its CTAs copy, issue and multiply.

The model ranks the tiles of the warp-level mainloop and, with other constants, of warpgroups. The
former's constants were fitted to 5100 timings of
int4_g128 x bfloat16 kernels on an H200 (eight shapes, 1 to 1024 tokens; docs/benchmarks.md says
how): the tile that it picks is on average 3 % slower than the fastest one timed, and its times are
right within 10 %. Rates of other devices come from their rows.
"""

from dataclasses import dataclass
from math import ceil, sqrt

from humming.capability import DeviceCapabilities
from humming.instruction_counts import token_scales, token_values, weight_scales, weight_values
from humming.layout import LANES
from humming.lowering import ACCUMULATOR, OPERAND, Lowering, scale_step, weight_group
from humming.problem import GemmProblem
from humming.tiles import TileConfig

# Launch and epilogue; with dependent launch most of it is hidden (60 timings of 1 and 16 tokens).
FIXED_US, FIXED_DEPENDENT_US = 2.5, 0.3
# Barrier and latencies of one pipeline stage.
STAGE_US = 0.05
# Of the time that the first stages of all CTAs take to arrive, what passes before the first one is
# multiplied. Fewer and smaller stages begin sooner.
FILL_SHARE = 0.9
# A reduction over split K: a barrier through memory; and bytes of partial sums, which are written,
# read and waited for, at a third of the memory's bandwidth.
SPLIT_K_US, PARTIALS_SHARE = 1.15, 0.33
# The same in the shared memory of a pair of CTAs: two barriers, and reading far away (the mean of
# 18 timings at 16 and 64 tokens, whose spread is as large).
CLUSTER_K_US, CLUSTER_BYTES_PER_CLOCK = 1.3, 25.0
# Share of the bandwidth that copies reach; an SM gets more where others are idle.
BANDWIDTH_SHARE, LEAST_ACTIVE = 0.96, 0.3
# Copies through registers hold fewer bytes under way: 23 us where asynchronous ones took 18.
MOVER_SHARE = {"plain": 0.65}
# Copies under way must cover this latency.
LATENCY_US = 1.15
# What an SM draws from L2.
L2_BYTES_PER_CLOCK = 56.0
# Schedulers of an SM, each issuing a warp instruction a clock.
SCHEDULERS = 4
# Slots of an instruction of `instruction_counts`: 0.9 for a value of int4 that takes 1.375.
SLOTS_PER_INSTRUCTION = 0.65
# Warp instructions: per stage and warp, per 512 bytes copied, per ldmatrix of 8 x 32 values, and
# to scale the sums of a 16 x 8 tile by scales that are 16-bit floats.
STAGE_INSTRUCTIONS, COPY_INSTRUCTIONS, LDMATRIX_SLOTS, SCALE_TILE_SLOTS = 76.0, 3.65, 4.4, 7.5
# Of these the ones that load and convert a pair of scales.
PLAIN_SCALE_INSTRUCTIONS = 4.0
# Of two terms the shorter one shows in part behind the longer: MMA and issue, both and copies.
ISSUE_MMA_LOSS, MEMORY_LOSS = 0.68, 0.11
# Of warpgroups, whose MMA runs beside the warps, fitted to 215 timings on an H200: int4_g128_sbf16
# x bfloat16, 8 x 8 bits, int4 x int8 and mxfp4 x fp8 at N = K = 8192 and others, 16 to 4096 tokens
# (the tiles picked are on average 4 % slower than the fastest ones timed, the times right within
# 12 %).
# What shows of the shorter term where a scheduler has one warp, the share of the rate that products
# reach (less with codes that are operands as they are: 8 bits of either come from shared memory),
# barriers and the first copies, and warp instructions per stage and warp and per 16 x 16 fragment,
# which is made or read; they stand for latencies too.
ASYNCHRONOUS_LOSS, WARPGROUP_US = 0.74, 2.95
ASYNCHRONOUS_RATE_SHARE, STORED_RATE_SHARE = 0.91, 0.7
WARPGROUP_STAGE_INSTRUCTIONS, FRAGMENT_INSTRUCTIONS, READ_INSTRUCTIONS = 5.0, 21.0, 6.0
# Sums that are scaled into others, per value and lane; results that leave through shared memory.
FLUSH_SLOTS, STORED_BYTES_PER_CLOCK = 1.7, 200.0
# A warpgroup alone has no other to multiply while it waits for barriers and fragments.
SINGLE_WARPGROUP = 1.2
# A scheduler with few warps waits; a warp with several row blocks waits less.
WAITING, ROW_BLOCK_RELIEF = 0.64, 0.34
# Shared memory of each CTA that the system takes.
RESERVED_SMEM_BYTES = 1024
# Registers beside accumulators, per thread and per row block; what exceeds the file is spilled.
OTHER_REGISTERS, ROW_BLOCK_REGISTERS, SPILL_MARGIN, SPILL_LOSS = 56, 8, 100, 0.003


@dataclass(frozen=True, slots=True)
class TileCost:
    """Microseconds of the busiest SM, and of the whole launch.

    Attributes:
        memory_us: copies from memory and L2.
        mma_us: matrix instructions.
        issue_us: the issue slots of all instructions.
        overhead_us: launch, stages, reduction.
        utilization: share of the SMs' time that has work, over all waves of CTAs.
        total_us: the launch.
    """

    memory_us: float
    mma_us: float
    issue_us: float
    overhead_us: float
    utilization: float
    total_us: float


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device moves and computes, public or stood in for.

    Attributes:
        bytes_per_us: memory bandwidth.
        clocks_per_us: SM clock in MHz.
        sms: number of SMs.
        ops_per_us: of the lowering's matrix instruction, on all SMs.
    """

    bytes_per_us: float
    clocks_per_us: float
    sms: int
    ops_per_us: float


def tile_cost(
    problem: GemmProblem,
    lowering: Lowering,
    caps: DeviceCapabilities,
    rates: Rates,
    m: int,
    tile: TileConfig,
) -> TileCost:
    """The cost of computing `m` tokens (> 0) with a tile."""
    tiles_n, tiles_m = ceil(problem.n / tile.block_n), ceil(m / tile.block_m)
    ctas = tiles_n * tiles_m * tile.split_k
    stages = ceil(ceil(problem.k / tile.block_k) / tile.split_k)
    stage_bytes = tile.stage_bytes(problem, lowering)
    resident = resident_ctas(problem, lowering, caps, tile)
    waves = max(1.0, ceil(ctas / rates.sms))
    together = min(resident, waves)  # CTAs that the busiest SM runs at a time
    active = min(1.0, ctas / rates.sms)

    x_bytes = tile.block_m * tile.block_k * problem.activation.dtype.bits // 8
    share = rates.bytes_per_us / rates.sms * BANDWIDTH_SHARE / sqrt(max(active, LEAST_ACTIVE))
    in_flight = together * (tile.num_stages - 1) * stage_bytes / LATENCY_US
    drawn = min(share, in_flight) * MOVER_SHARE.get(lowering.mover, 1.0)
    memory_us = (stage_bytes - x_bytes) / drawn
    # Boxes come from L2 beside those from memory: multicast, which halves them, gains nothing.
    if not lowering.has_producer:
        memory_us += x_bytes / (L2_BYTES_PER_CLOCK * rates.clocks_per_us)
    memory_us *= waves * stages

    warps = tile.threads / LANES
    stage_slots = _warpgroup_stage_slots if lowering.has_producer else _stage_slots
    issue = stage_slots(problem, lowering, caps, tile, stage_bytes)
    issue_us = waves * stages * issue / (SCHEDULERS * rates.clocks_per_us)
    ops = 2.0 * tile.block_n * tile.block_m * tile.block_k * stages
    mma_us = waves * ops / (rates.ops_per_us / rates.sms)
    if lowering.has_producer:
        as_stored = _as_stored(problem, lowering, caps)
        mma_us /= STORED_RATE_SHARE if as_stored else ASYNCHRONOUS_RATE_SHARE

    per_scheduler = min(together * warps / SCHEDULERS, 16.0)
    row_blocks = tile.block_n // 16 // tile.warps_n
    waiting = WAITING / (per_scheduler * (1 + ROW_BLOCK_RELIEF * (row_blocks - 1)))
    if lowering.has_producer:
        issue_us *= 1 + waiting
        loss = ASYNCHRONOUS_LOSS / max(1.0, together * tile.warps_n / SCHEDULERS)
        compute_us = max(issue_us, mma_us) + loss * min(issue_us, mma_us)
    else:
        compute_us = max(issue_us, mma_us) + ISSUE_MMA_LOSS * min(issue_us, mma_us)
        compute_us *= 1 + waiting

    overhead_us = FIXED_DEPENDENT_US if "griddepcontrol" in caps.features else FIXED_US
    if not lowering.has_producer:
        overhead_us += STAGE_US * stages * ceil(waves / together)
        ahead = (tile.num_stages - 1) * stage_bytes * min(ctas, rates.sms)
        overhead_us += FILL_SHARE * ahead / rates.bytes_per_us
    else:
        stored = 4.0 * tile.block_n * tile.block_m * ceil(waves / together)
        overhead_us += WARPGROUP_US + stored / (STORED_BYTES_PER_CLOCK * rates.clocks_per_us)
    if tile.cluster_k > 1:
        read = 4.0 * tile.block_n * tile.block_m
        overhead_us += CLUSTER_K_US + read / (CLUSTER_BYTES_PER_CLOCK * rates.clocks_per_us)
    elif tile.split_k > 1:
        partials = 8.0 * tile.split_k * problem.n * tiles_m * tile.block_m
        overhead_us += SPLIT_K_US + partials / (rates.bytes_per_us * PARTIALS_SHARE)
    hidden = MEMORY_LOSS * min(memory_us, compute_us)
    busy_us = max(memory_us, compute_us) + hidden
    busy_us *= SINGLE_WARPGROUP if lowering.has_producer and tile.warps_n == 4 else 1.0
    total_us = overhead_us + busy_us
    utilization = ctas / (waves * rates.sms)
    return TileCost(memory_us, mma_us, issue_us, overhead_us, utilization, total_us)


def _stage_slots(
    problem: GemmProblem,
    lowering: Lowering,
    caps: DeviceCapabilities,
    tile: TileConfig,
    stage_bytes: int,
) -> float:
    """Issue slots of one stage of one CTA, all warps together."""
    values = tile.block_n * tile.block_k
    converting, changes = _converting(problem, lowering, caps, tile)
    slots = 0.0
    if lowering.partial_k(problem):
        slots += SCALE_TILE_SLOTS * _scaled_sums(problem, lowering, tile) / (16 * 8)
    if lowering.scale_site == ACCUMULATOR:
        converting -= PLAIN_SCALE_INSTRUCTIONS * changes
    slots += SLOTS_PER_INSTRUCTION * converting
    slots += STAGE_INSTRUCTIONS * tile.threads / LANES
    slots += COPY_INSTRUCTIONS * stage_bytes / 512
    rows, tokens, depth = lowering.mma.shape
    slots += values / (rows * depth) * tile.block_m / tokens  # a slot for each MMA
    slots += LDMATRIX_SLOTS * tile.warps_n * tile.block_m * tile.block_k / (8 * 32)
    over = tile.accumulators(problem, lowering) + SPILL_MARGIN - min(255, 65536 // tile.threads)
    return slots * (1 + SPILL_LOSS * max(0, over))


def _warpgroup_stage_slots(
    problem: GemmProblem,
    lowering: Lowering,
    caps: DeviceCapabilities,
    tile: TileConfig,
    _stage_bytes: int,
) -> float:
    """Issue slots of one stage of one CTA of warpgroups; copies and MMA take none of theirs."""
    values = tile.block_n * tile.block_k
    slots = SLOTS_PER_INSTRUCTION * _converting(problem, lowering, caps, tile)[0]
    as_stored = _as_stored(problem, lowering, caps)
    fragment = READ_INSTRUCTIONS if as_stored else FRAGMENT_INSTRUCTIONS
    slots += fragment * values / (16 * lowering.mma.shape[2])
    slots += WARPGROUP_STAGE_INSTRUCTIONS * tile.warps_n
    if lowering.partial_k(problem):
        slots += FLUSH_SLOTS * _scaled_sums(problem, lowering, tile) / LANES
    return slots


def _as_stored(problem: GemmProblem, lowering: Lowering, caps: DeviceCapabilities) -> bool:
    """Whether codes of weights are operands as they are."""
    return weight_values(problem, lowering, caps) == 0


def _converting(
    problem: GemmProblem, lowering: Lowering, caps: DeviceCapabilities, tile: TileConfig
) -> tuple[float, float]:
    """Instructions of a stage that convert codes and scales, and how often weights' scales change.

    The changes are those of all row blocks; there are none without groups.
    """
    values = tile.block_n * tile.block_k
    tokens = tile.warps_n * tile.block_m * tile.block_k
    group, step = weight_group(problem), min(scale_step(problem) or tile.warp_k, tile.warp_k)
    changes = values / (16 * min(group, tile.warp_k)) if group else 0.0
    counted = weight_values(problem, lowering, caps) * values / LANES
    counted += token_values(problem, lowering, caps) * tokens / LANES
    counted += weight_scales(problem, lowering, caps) * changes
    if lowering.scale_site == ACCUMULATOR:
        sums = _scaled_sums(problem, lowering, tile)
        counted += token_scales(problem, lowering, caps) * sums / (16 * 8)
    elif lowering.scale_site == OPERAND:
        counted += token_scales(problem, lowering, caps) * tokens / step / 8
    return counted, changes


def _scaled_sums(problem: GemmProblem, lowering: Lowering, tile: TileConfig) -> float:
    """Partial sums of a stage that are scaled into accumulators."""
    step = min(lowering.partial_k(problem), tile.warp_k)
    return tile.block_n * tile.block_k / step * tile.block_m


def resident_ctas(
    problem: GemmProblem, lowering: Lowering, caps: DeviceCapabilities, tile: TileConfig
) -> int:
    """CTAs of a tile that an SM holds at once, by the limits that are known."""
    row_blocks = tile.block_n // 16 // tile.warps_n
    registers = (
        tile.accumulators(problem, lowering) + OTHER_REGISTERS + ROW_BLOCK_REGISTERS * row_blocks
    )
    if tile.dealt_registers(caps.registers_per_sm or 65536)[1]:
        return 1  # what is dealt out is the whole file
    limits = [(caps.registers_per_sm or 65536) // (min(registers, 255) * tile.threads)]
    if caps.max_blocks_per_sm:
        limits.append(caps.max_blocks_per_sm)
    if caps.smem_per_sm_bytes:
        of_cta = tile.smem_bytes(problem, lowering) + RESERVED_SMEM_BYTES
        limits.append(caps.smem_per_sm_bytes // of_cta)
    if caps.max_threads_per_sm:
        limits.append(caps.max_threads_per_sm // tile.threads)
    return max(1, min(limits))
