"""The cost model: microseconds of a lowering at a batch size, term by term.

Four terms. Memory: bytes over bandwidth, with what every CTA reads again served by L2. MMA:
operations over the row's rate. Dequantization: issue slots of dequantizing, scaling and converting
over the SM's issue rate. Overhead: launch, pipeline stages and the reduction of split K. The kernel
overlaps the first three, so the longest counts whole and the others in part; work comes in tiles,
so an SM that waits for the last wave stretches all three.

A figure that is not public makes its term unknown, and the estimate says which. Lowerings of such
a device are ordered with stand-ins, that is by their bytes and operations.

The constants stand below, each with its source; those of tiles are in `tile_cost`, which is used
where a tile is known.
"""

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from humming.capability import DeviceCapabilities, MmaRow
from humming.instruction_counts import token_values, weight_values
from humming.lowering import Lowering, activation_group
from humming.problem import GemmProblem
from humming.tile_cost import Rates, tile_cost
from humming.tiles import TileConfig

# -- constants ------------------------------------------------------------------------------------

# Bulk copies of 112 MB sustain 4.5 to 4.7 of 4.8 TB/s (measured on an H200, plain and dependent).
BANDWIDTH_EFFICIENCY = 0.96
# Share of that bandwidth per mover. Bulk copies are the measured floor; 16-byte loads into
# registers took 12.4 to 15.5 us where bulk copies take 9.2; cp.async is taken to lie between.
MOVER_EFFICIENCY = {"tma": 1.0, "bulk": 1.0, "cp_async": 0.9, "plain": 0.65}
# What every CTA reads again comes from L2, at about twice the memory's bandwidth on data-centre
# parts: cuBLAS bf16 at 767 TFLOPS on an H200 reads 9 TB/s and more with tiles of 128 x 256.
L2_BANDWIDTH_RATIO = 2.0
# A kernel that reads 2 MB takes 2.3 us in a graph of plain launches, 0.4 of it for the bytes; with
# dependent launch 0.75 (H200).
LAUNCH_US = 1.9
DEPENDENT_LAUNCH_US = 0.4
# Reduction and store of a kernel that also computes, at best. No more than a tile is charged
# (`tile_cost`), so that what is not built yet is not taken to be slower than what is.
EPILOGUE_US = 0.1
# Tensor memory must be allocated, filled and read back; a warpgroup must be formed. Estimates that
# keep the plain instruction where nothing is gained.
MAINLOOP_US = {"wgmma": 0.3, "tcgen05": 1.0}
# Large products reach three quarters of the dense rate (cuBLAS bf16 on an H200: 767 of 989 TFLOPS).
MMA_EFFICIENCY = 0.78
# A row without a rate of its own is taken at a share of the fastest row of its rate class, and the
# estimate says so. mma.sync on an H100 reaches 0.63 of what wgmma does (arXiv 2402.13499, from
# memory); for legacy rows nothing is public but int8 on a B300, 1/29 of its relative's.
UNRATED_SHARE = 0.6
UNRATED_LEGACY_SHARE = 0.125
# How much of the shorter term shows beside the longer. Memory and dequantization: at M = 1 on an
# H200, 4.5 us of the one under 9.2 us of the other made 3 us of difference. MMA and
# dequantization: warps that issue both wait for themselves, asynchronous MMA runs beside them.
MEMORY_MMA_LOSS = 0.1
MEMORY_DEQUANT_LOSS = 0.5
MMA_DEQUANT_LOSS = {"wgmma": 0.2, "tcgen05": 0.1}
MMA_DEQUANT_LOSS_OF_WARPS = 0.5
# Warp instructions that an SM issues per clock, one per scheduler; every family known has four.
ISSUE_PER_CLOCK = 4.0
LANES = 32
# Issue slots of an instruction of `instruction_counts`: two in three are integer operations, which
# have half the rate.
SLOTS_PER_INSTRUCTION = 1.6
# One fp32 fma per accumulator and group; int32 accumulators are converted first, at quarter rate.
ACCUMULATOR_SCALE_SLOTS = 1.0
INTEGER_CONVERSION_SLOTS = 4.0
# An accumulator in tensor memory is loaded before it is scaled.
ACCUMULATOR_LOAD_SLOTS = {"tcgen05": 1.0}
# Rows and tokens that a tile is taken to hold where no tile of the mainloop is known yet.
IDEAL_BLOCK_N = 128
IDEAL_BLOCK_M = 128
# Stand-ins for figures that are not public, only to order the lowerings of one device: bandwidth,
# operations per SM and clock of 16-bit operands (doubled per halving of the width), SMs and clock.
STAND_IN_BANDWIDTH_GBS = 2000.0
STAND_IN_RATE = 1024.0
STAND_IN_SMS = 100
STAND_IN_CLOCK_MHZ = 1500.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a lowering is expected to take at `m` tokens, in microseconds; None where unknown.

    Attributes:
        m: tokens.
        memory_us: bytes over bandwidth.
        mma_us: operations over rate.
        dequant_us: issue slots of dequantization, scaling and conversion over the issue rate.
        overhead_us: launch, pipeline stages, split-K reduction.
        utilization: share of the SMs that work, over all waves of tiles (1 where no tile is given).
        total_us: the whole; None where a term is unknown.
        order_us: the whole with stand-ins for what is unknown: orders the lowerings of one device
            and means nothing else.
        memory_bytes: bytes that memory serves.
        mma_ops: operations, padding included.
        mma_tops: rate that they were divided by, 10^12 operations per second; None where unknown.
        unknown: figures that are not public, as "bandwidth".
        assumed: figures that were derived from others of the device, and how.
    """

    m: int
    memory_us: float | None
    mma_us: float | None
    dequant_us: float | None
    overhead_us: float
    utilization: float
    total_us: float | None
    order_us: float
    memory_bytes: float
    mma_ops: float
    mma_tops: float | None
    unknown: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def terms(self) -> dict[str, float | None]:
        """The four terms by name."""
        return {
            "memory": self.memory_us,
            "MMA": self.mma_us,
            "dequantization": self.dequant_us,
            "overhead": self.overhead_us,
        }

    @property
    def bound(self) -> str:
        """The longest term: memory, MMA, dequantization or overhead; "unknown" without a total."""
        known = {name: time for name, time in self.terms.items() if time is not None}
        return "unknown" if self.total_us is None else max(known, key=lambda name: known[name])

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"bound": self.bound}


class CostModel:
    """The costs of one lowering of a problem on a device, for any number of tokens and any tile."""

    def __init__(self, problem: GemmProblem, lowering: Lowering, caps: DeviceCapabilities) -> None:
        self._problem, self._lowering, self._caps = problem, lowering, caps
        self._weight_bytes = weight_bytes(problem)
        self._tops, self._assumed = device_tops(caps, lowering.mma)
        self._clocks_per_us = (caps.sms or STAND_IN_SMS) * (caps.clock_mhz or STAND_IN_CLOCK_MHZ)
        self._stand_in_tops = _stand_in_tops(caps, lowering.mma, self._clocks_per_us)
        figures = {
            "bandwidth": caps.bandwidth_gbs,
            f"rate of {lowering.mma.name}": self._tops,
            "SM count": caps.sms,
            "clock": caps.clock_mhz,
        }
        self._unknown = tuple(name for name, value in figures.items() if not value)
        self._widest_n = max(lowering.mma.n_values)
        self._value_slots = SLOTS_PER_INSTRUCTION * weight_values(problem, lowering, caps)
        self._token_slots = SLOTS_PER_INSTRUCTION * token_values(problem, lowering, caps)
        self._sum_slots = _sum_slots(problem, lowering)

    def estimate(self, m: int, tile: TileConfig | None = None) -> Estimate:
        """Time at `m` tokens (>= 0), with a tile, or with an ideal one when None."""
        problem, lowering, caps = self._problem, self._lowering, self._caps
        cut = _cut(problem, lowering, m, tile)
        once, again = self._bytes(m, cut)
        ops = 2.0 * problem.n * problem.k * cut.padded_m
        tops = self._tops or self._stand_in_tops
        bandwidth = (caps.bandwidth_gbs or STAND_IN_BANDWIDTH_GBS) * 1e3  # bytes per us
        if tile and m:
            sms = caps.sms or STAND_IN_SMS
            rates = Rates(bandwidth, self._clocks_per_us / sms, sms, tops * 1e6)
            cost = tile_cost(problem, lowering, caps, rates, m, tile)
            memory_us, mma_us, dequant_us = cost.memory_us, cost.mma_us, cost.issue_us
            overhead_us, utilization = cost.overhead_us, cost.utilization
            order_us = cost.total_us
        else:
            bandwidth *= BANDWIDTH_EFFICIENCY * MOVER_EFFICIENCY.get(lowering.mover, 1.0)
            memory_us = (once + again / L2_BANDWIDTH_RATIO) / bandwidth
            mma_us = ops / (tops * 1e6 * MMA_EFFICIENCY)
            dequant_us = self._slots(cut) / (LANES * ISSUE_PER_CLOCK * self._clocks_per_us)
            overhead_us = DEPENDENT_LAUNCH_US if "griddepcontrol" in caps.features else LAUNCH_US
            overhead_us += EPILOGUE_US + MAINLOOP_US.get(lowering.mainloop, 0.0)
            utilization = 1.0
            order_us = overhead_us + _overlapped(memory_us, mma_us, dequant_us, lowering.mainloop)
        return Estimate(
            m=m,
            memory_us=memory_us if caps.bandwidth_gbs else None,
            mma_us=None if self._tops is None else mma_us,
            dequant_us=dequant_us if caps.sms and caps.clock_mhz else None,
            overhead_us=overhead_us,
            utilization=utilization,
            total_us=None if self._unknown else order_us,
            order_us=order_us,
            memory_bytes=once,
            mma_ops=ops,
            mma_tops=self._tops,
            unknown=self._unknown,
            assumed=self._assumed,
        )

    def _bytes(self, m: int, cut: "_Cut") -> tuple[float, float]:
        """Bytes that memory serves once, and those that L2 serves again."""
        problem, activation = self._problem, self._problem.activation
        n, k = problem.n, problem.k
        weights = self._weight_bytes * (min(problem.experts, m) if problem.experts else 1)
        activations = m * k * activation.dtype.bits / 8
        if activation.granularity != "none":
            group = activation_group(problem) or k
            activations += m * (k / group) * activation.scale_dtype.bits / 8
        out = m * n * problem.out_dtype.bits / 8
        again = (cut.tiles_n - 1) * activations + max(0, cut.tiles_m - 1) * weights
        return weights + activations + out, again

    def _slots(self, cut: "_Cut") -> float:
        """Issue slots, summed over lanes, of everything but copies."""
        problem, row = self._problem, self._lowering.mma
        n, k = problem.n, problem.k
        slots = self._value_slots * n * k * cut.tiles_m + self._sum_slots * n * cut.padded_m
        slots += self._token_slots * cut.padded_m * k * cut.tiles_n
        # The instructions themselves take a slot each, so a short K costs.
        rows, step, depth = row.shape
        tokens = max(step, min(self._widest_n, cut.block_m))
        return slots + LANES * ceil(n / rows) * ceil(k / depth) * cut.padded_m / tokens


def estimate(
    problem: GemmProblem,
    lowering: Lowering,
    caps: DeviceCapabilities,
    m: int,
    tile: TileConfig | None = None,
) -> Estimate:
    """Time of a lowering at `m` tokens (>= 0), with a tile, or with an ideal one when None."""
    return CostModel(problem, lowering, caps).estimate(m, tile)


def device_tops(caps: DeviceCapabilities, row: MmaRow) -> tuple[float | None, tuple[str, ...]]:
    """10^12 operations per second of a row, and how that was derived where it is not stated."""
    tops = caps.peak_tops(row)
    if tops is not None:
        return tops, ()
    rated = [
        (relative_tops, relative)
        for relative in caps.mma
        if relative.rate_class == row.rate_class and (relative_tops := caps.peak_tops(relative))
    ]
    if not rated:
        return None, ()
    fastest, relative = max(rated, key=lambda pair: pair[0])
    share = UNRATED_LEGACY_SHARE if row.legacy else UNRATED_SHARE
    told = f"{row.instruction} at {share:g} of the {row.rate_class} rate of {relative.instruction}"
    return fastest * share, (told,)


def _stand_in_tops(caps: DeviceCapabilities, row: MmaRow, clocks_per_us: float) -> float:
    """A rate to order by where none is public for the whole device.

    That of the row at the stand-in clock, or the device's best as narrower operands raise it.
    """
    if row.rate:
        return row.rate * clocks_per_us * 1e-6
    widths = [(tops * _width(other)) for other in caps.mma if (tops := caps.peak_tops(other))]
    best = max(widths, default=STAND_IN_RATE * 16 * clocks_per_us * 1e-6)
    return best / _width(row) * (UNRATED_LEGACY_SHARE if row.legacy else 1.0)


def _width(row: MmaRow) -> int:
    return max(row.a.bits, row.b.bits)


def weight_bytes(problem: GemmProblem) -> float:
    """Bytes of one packed weight: codes, scales, zero points and second-level scales."""
    weight, n, k = problem.weight, problem.n, problem.k
    rows, columns = weight.scale_shape(n, k)
    per_scale = weight.scale_dtype.bits / 8
    per_zero = {"none": 0.0, "integer": 1.0, "float": per_scale}[weight.zero_point]
    second = {"none": 0, "tensor": 4, "channel": 4 * n}[weight.second_scale]
    return n * k * weight.dtype.bits / 8 + rows * columns * (per_scale + per_zero) + second


def _sum_slots(problem: GemmProblem, lowering: Lowering) -> float:
    """Issue slots per output for the scales of all groups of K, summed over lanes."""
    step = lowering.partial_k(problem)
    if not step:
        return 0.0
    slots = ACCUMULATOR_SCALE_SLOTS + ACCUMULATOR_LOAD_SLOTS.get(lowering.mainloop, 0.0)
    slots += INTEGER_CONVERSION_SLOTS if lowering.mma.a.is_integer else 0.0
    return slots * problem.k / step


def _overlapped(memory_us: float, mma_us: float, dequant_us: float, mainloop: str) -> float:
    """The longest term, and of the others what does not hide behind it."""
    mma_dequant = MMA_DEQUANT_LOSS.get(mainloop, MMA_DEQUANT_LOSS_OF_WARPS)
    if memory_us >= max(mma_us, dequant_us):
        return memory_us + MEMORY_MMA_LOSS * mma_us + MEMORY_DEQUANT_LOSS * dequant_us
    if mma_us >= dequant_us:
        return mma_us + MEMORY_MMA_LOSS * memory_us + mma_dequant * dequant_us
    return dequant_us + MEMORY_DEQUANT_LOSS * memory_us + mma_dequant * mma_us


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a product is cut into tiles."""

    tiles_n: int
    tiles_m: int
    padded_m: int
    block_m: int


def _cut(problem: GemmProblem, lowering: Lowering, m: int, tile: TileConfig | None) -> _Cut:
    if tile:
        block_n, block_m = tile.block_n, tile.block_m
    else:
        block_n = IDEAL_BLOCK_N
        step = lowering.mma.shape[1]
        block_m = max(step, min(IDEAL_BLOCK_M, ceil(m / step) * step))
    tiles_m = ceil(m / block_m)
    return _Cut(ceil(problem.n / block_n), tiles_m, tiles_m * block_m, block_m)
