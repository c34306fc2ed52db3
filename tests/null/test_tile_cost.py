"""The cost of tiles: the busiest SM's terms by hand, and the directions times must move in."""

from dataclasses import replace

import pytest

from humming import tile_cost as model
from humming.capability import DeviceCapabilities, MmaRow
from humming.dtypes import DataType
from humming.lowering import enumerate_lowerings
from humming.problem import GemmProblem
from humming.tile_cost import Rates, tile_cost
from humming.tiles import TileConfig

FP16 = DataType.parse("float16")
# 10 SMs at 1 GHz, 1000 operations per SM and clock, 1 TB/s.
RATES = Rates(bytes_per_us=1e6, clocks_per_us=1000, sms=10, ops_per_us=1e7)
DEVICE = DeviceCapabilities(
    name="toy",
    vendor="v",
    family="f",
    arch="x_1",
    sms=10,
    smem_per_sm_bytes=164 * 1024,
    smem_per_block_bytes=163 * 1024,
    registers_per_sm=65536,
    max_threads_per_sm=2048,
    max_blocks_per_sm=16,
    movers=("cp_async", "plain"),
    mma=(MmaRow("mma_sync", (16, 8, 16), FP16, FP16, DataType.parse("float32"), rate=1000.0),),
)
TILE = TileConfig(block_n=128, block_m=16, block_k=128, warps_n=4, warps_k=1, num_stages=4)


def made(n=1280, k=2048, m=16, tile=TILE, spec="int4_g128", caps=DEVICE, **wanted):
    problem = GemmProblem.parse(f"{spec} x fp16", n, k)
    wanted = {"mover": "cp_async"} | wanted
    lowering = next(
        x
        for x in enumerate_lowerings(problem, caps)[0]
        if all(getattr(x, name) == value for name, value in wanted.items())
    )
    return tile_cost(problem, lowering, caps, RATES, m, tile)


def test_mma_is_the_operations_of_the_busiest_sm_over_its_rate():
    # 10 tiles on 10 SMs; then 11, so that one SM has two.
    assert made().mma_us == pytest.approx(2 * 128 * 16 * 2048 / 1e6)
    assert made(n=1408).mma_us == pytest.approx(2 * made().mma_us)


def test_memory_is_what_copies_deliver():
    stage = 128 * 64 + 128 * 2 + 16 * 16  # codes, scales, row padding
    x = 16 * 128 * 2
    draw = min(1e5 * model.BANDWIDTH_SHARE, 3 * (stage + x) / model.LATENCY_US)
    expected = 16 * (stage / draw + x / (model.L2_BYTES_PER_CLOCK * 1000))
    assert made().memory_us == pytest.approx(expected)


def test_idle_sms_leave_more_bandwidth_to_the_others():
    deep = replace(TILE, num_stages=12)
    assert made(n=128, tile=deep).memory_us < made(n=1280, tile=deep).memory_us


def test_each_term_shows_in_the_total():
    got = made()
    assert got.total_us > got.overhead_us + max(got.memory_us, got.mma_us, got.issue_us)
    assert got.utilization == 1
    assert made(n=640).utilization == pytest.approx(0.5)


def test_a_tail_of_k_costs_its_whole_stage():
    assert made(k=2048 + 64).mma_us == pytest.approx(made(k=2048 + 128).mma_us)


def test_more_stages_hide_latency_until_the_bandwidth_is_reached():
    times = [made(tile=replace(TILE, num_stages=s)).memory_us for s in (2, 3, 4, 6, 8)]
    assert times[0] > times[1] > times[2]
    assert times == sorted(times, reverse=True)


def test_split_k_pays_for_its_reduction_by_the_tokens():
    halves = replace(TILE, split_k=2)
    assert made(tile=halves).overhead_us > made(tile=halves, n=640).overhead_us
    assert made(tile=halves, n=640, k=8192).total_us < made(n=640, k=8192).total_us


def test_copies_through_registers_are_slower():
    assert made(mover="plain").memory_us > made().memory_us


def test_scales_in_operands_pay_by_weights_and_in_accumulators_by_tokens():
    def ratio(block_m):
        tile = replace(TILE, block_m=block_m)
        operand = made(m=block_m, tile=tile, scale_site="operand").issue_us
        return operand / made(m=block_m, tile=tile, scale_site="accumulator").issue_us

    assert ratio(8) > 1 > ratio(128)


def test_only_tiles_that_overflow_the_registers_pay_for_spilling(monkeypatch):
    roomy = replace(TILE, block_m=64, block_n=256, warps_n=16, epilogue_m=16)
    tight = replace(roomy, block_m=128, block_n=512)
    with_spills = [made(m=128, tile=tile).issue_us for tile in (TILE, roomy, tight)]
    monkeypatch.setattr(model, "SPILL_LOSS", 0.0)
    without = [made(m=128, tile=tile).issue_us for tile in (TILE, roomy, tight)]
    assert with_spills[0] == without[0]
    assert with_spills[1] < 1.2 * without[1]
    assert with_spills[2] > 1.2 * without[2]


def test_a_device_without_limits_still_has_a_cost():
    bare = replace(
        DEVICE,
        smem_per_sm_bytes=None,
        registers_per_sm=None,
        max_threads_per_sm=None,
        max_blocks_per_sm=None,
    )
    assert made(caps=bare).total_us > 0
