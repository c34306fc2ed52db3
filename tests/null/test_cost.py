"""The cost model: terms by hand, what is unknown, and the directions in which times must move."""

import itertools
from dataclasses import replace

import pytest

from humming import cost
from humming.capability import INT32, DeviceCapabilities, MmaRow
from humming.cost import device_tops, estimate, weight_bytes
from humming.dtypes import DataType
from humming.instruction_counts import PER_VALUE
from humming.lowering import enumerate_lowerings
from humming.problem import GemmProblem
from humming.tiles import TileConfig

FP16 = DataType.parse("float16")
N, K = 1024, 2048


def f16_row(**fields):
    fields = {"rate_class": "f16", "rate": 1000.0} | fields
    return MmaRow("mma_sync", (16, 8, 16), FP16, FP16, DataType.parse("float32"), **fields)


# Round figures: 10 SMs at 1 GHz, 1000 operations per SM and clock: 10^13 a second, 1 TB/s.
DEVICE = DeviceCapabilities(
    name="toy",
    vendor="v",
    family="f",
    arch="x_1",
    sms=10,
    clock_mhz=1000,
    bandwidth_gbs=1000,
    smem_per_sm_bytes=100 * 1024,
    smem_per_block_bytes=100 * 1024,
    max_threads_per_sm=2048,
    max_blocks_per_sm=16,
    movers=("bulk", "cp_async", "plain"),
    mma=(f16_row(),),
)
TILE = TileConfig(block_n=128, block_m=16, block_k=128, warps_n=4, warps_k=1, num_stages=3)


def lowering(problem, caps=DEVICE, **wanted):
    found, _ = enumerate_lowerings(problem, caps)
    return next(x for x in found if all(getattr(x, k) == v for k, v in wanted.items()))


def made(text="int4_g128 x fp16", m=16, caps=DEVICE, tile=TILE, n=N, k=K, **wanted):
    problem = GemmProblem.parse(text, n, k)
    return estimate(problem, lowering(problem, caps, **wanted), caps, m, tile)


# -- by hand --------------------------------------------------------------------------------------


def test_memory_is_bytes_over_bandwidth():
    got = made(m=16, mover="bulk", tile=None)
    weights = N * K / 2 + N * (K / 128) * 2
    activations, out = 16 * K * 2, 16 * N * 2
    assert got.memory_bytes == weights + activations + out
    again = (N / cost.IDEAL_BLOCK_N - 1) * activations / cost.L2_BANDWIDTH_RATIO
    bandwidth = 1e6 * cost.BANDWIDTH_EFFICIENCY
    assert got.memory_us == pytest.approx((got.memory_bytes + again) / bandwidth)


def test_mma_is_operations_over_rate_with_padded_tokens():
    got = made(m=17, tile=None)
    assert got.mma_ops == 2 * N * K * 24  # three token tiles of 8
    assert got.mma_tops == pytest.approx(10.0)
    assert got.mma_us == pytest.approx(got.mma_ops / 1e7 / cost.MMA_EFFICIENCY)


def test_dequantization_is_issue_slots_over_issue_rate():
    got = made("int4 x fp16", m=16, tile=None)
    values = N * K * cost.SLOTS_PER_INSTRUCTION * PER_VALUE["int4:float16"]
    instructions = 32 * (N / 16) * (K / 16) * (16 / 8)
    assert got.dequant_us == pytest.approx((values + instructions) / (128 * 10 * 1000))


def test_scales_in_operands_cost_by_weights_and_at_accumulators_by_tokens():
    few, many = 8, 512
    at = {
        (site, m): made(m=m, scale_site=site, tile=None).dequant_us
        for site in ("operand", "accumulator")
        for m in (few, many)
    }
    assert at["accumulator", few] < at["operand", few]
    assert at["accumulator", many] > at["operand", many]


def test_native_operands_need_no_dequantization():
    int8 = MmaRow(
        "mma_sync", (16, 8, 32), *[DataType.parse("int8")] * 2, INT32, rate_class="int8", rate=2e3
    )
    caps = replace(DEVICE, mma=(int8,))
    only_mma = made("int8 x int8", caps=caps, tile=None, m=8).dequant_us
    assert only_mma == pytest.approx(32 * (N / 16) * (K / 32) / (128 * 10 * 1000))
    assert made("int4 x int8", caps=caps, tile=None, m=8).dequant_us > 2 * only_mma


@pytest.mark.parametrize(
    "text",
    [
        "int4_g128 x fp16",
        "uint4_g64_zp x fp16",
        "int3 x fp16",
        "nvfp4 x fp16",
        "fp8_block128 x fp16",
    ],
)
def test_weight_bytes_agree_with_the_formats_own_count(text):
    problem = GemmProblem.parse(text, N, K)
    assert weight_bytes(problem) == pytest.approx(
        problem.weight.bits_per_weight(N, K) * N * K / 8, rel=1e-12
    )


@pytest.mark.parametrize("tile", [TILE, None], ids=["tile", "ideal"])
def test_launch_is_cheaper_where_grids_may_overlap(tile):
    dependent = replace(DEVICE, features=frozenset({"griddepcontrol"}))
    assert made(tile=tile, caps=dependent).overhead_us < made(tile=tile).overhead_us


def test_utilization_counts_whole_waves():
    # 8 tiles on 10 SMs, and 16 on 10: two waves that fill 0.8 of the SMs as well.
    assert made(m=16).utilization == pytest.approx(0.8)
    assert made(m=32).utilization == pytest.approx(0.8)
    assert made(m=16, tile=replace(TILE, split_k=4)).utilization == pytest.approx(0.8)
    assert made(m=16, tile=None).utilization == 1


# -- directions -----------------------------------------------------------------------------------


def test_better_movers_take_less_time():
    times = [made(mover=mover, tile=None).total_us for mover in DEVICE.movers]
    assert times == sorted(times)
    assert len(set(times)) == 3


def test_more_tokens_never_take_less_time():
    times = [made(m=m).total_us for m in (1, 8, 16, 17, 64, 256, 1024, 4096)]
    assert times == sorted(times)


def test_a_lower_rate_of_the_device_is_what_counts():
    slow = replace(DEVICE, mma=(f16_row(rate=250.0),))
    assert made(m=4096, caps=slow).mma_us == pytest.approx(4 * made(m=4096).mma_us)


def test_no_tokens_cost_no_more_than_a_launch_and_the_weights():
    got = made(m=0)
    assert got.mma_us == 0
    assert got.total_us > 0


# -- what nothing public says ---------------------------------------------------------------------

FIGURES = {"bandwidth": "bandwidth_gbs", "SM count": "sms", "clock": "clock_mhz"}


@pytest.mark.parametrize("tile", [TILE, None], ids=["tile", "ideal"])
@pytest.mark.parametrize(
    "lacking",
    [c for size in (1, 2, 3) for c in itertools.combinations(FIGURES, size)],
    ids="-".join,
)
def test_missing_figures_make_terms_unknown_and_are_named(lacking, tile):
    caps = replace(DEVICE, **{FIGURES[name]: None for name in lacking})
    got = made(caps=caps, tile=tile)
    assert set(lacking) <= set(got.unknown)
    assert got.total_us is None
    assert got.bound == "unknown"
    assert (got.memory_us is None) == ("bandwidth" in lacking)
    assert (got.dequant_us is None) == bool({"SM count", "clock"} & set(lacking))
    assert got.order_us > 0


def test_a_device_of_which_nothing_is_known_is_still_ordered():
    caps = DeviceCapabilities(
        name="x", vendor="v", family="f", arch="x", movers=("plain",), mma=(f16_row(rate=None),)
    )
    few, many = made(caps=caps, m=8), made(caps=caps, m=4096)
    assert few.total_us is many.total_us is None
    assert few.order_us < many.order_us
    assert any("rate of mma_sync" in name for name in few.unknown)


def test_a_whole_devices_figure_wins_over_rates():
    caps = replace(DEVICE, peak_tops_by_class={"mma_sync.f16": 3.0})
    assert made(caps=caps).mma_tops == 3.0


@pytest.mark.parametrize(
    ("legacy", "share"), [(False, cost.UNRATED_SHARE), (True, cost.UNRATED_LEGACY_SHARE)]
)
def test_a_row_without_rate_is_derived_from_its_class_and_says_so(legacy, share):
    unrated = f16_row(rate=None, legacy=legacy)
    fast = replace(f16_row(rate=4000.0), instruction="wgmma")
    caps = replace(DEVICE, mma=(fast, unrated))
    tops, assumed = device_tops(caps, unrated)
    assert tops == pytest.approx(40 * share)
    assert assumed == (f"mma_sync at {share:g} of the f16 rate of wgmma",)
    assert device_tops(caps, fast) == (40, ())
    assert device_tops(replace(DEVICE, mma=(unrated,)), unrated) == (None, ())


def test_estimates_are_plain_values():
    as_dict = made().to_dict()
    assert as_dict["bound"] in ("memory", "MMA", "dequantization", "overhead")
    assert as_dict["total_us"] == made().total_us
