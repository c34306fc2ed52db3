"""Kernels of warpgroups as machine code: registers suffice, fragments stay while they are read."""

import re
from pathlib import Path

import in_flight
import pytest

from humming.compiler import CompiledKernel, compile_many
from humming.composer import KernelPlan, compose, compose_as, decide
from humming.lowering import activation_group
from humming.plugins import capabilities, compiler_for, registry
from humming.problem import GemmProblem
from humming.tiles import fits, warpgroup_tile

PROBLEMS = (
    *("int4_g128 x bf16", "int4_g128_sbf16 x bf16", "uint4_g64_zp x fp16", "uint5_g32_fzp x fp16"),
    *("int8_g128 x bf16", "fp8 x bf16", "mxfp4 x bf16", "nvfp4 x bf16", "mxfp6_e3m2 x bf16"),
    *("int4 x int8", "int4_g128 x int8", "int8 x int8", "int8_g128 x int8_g128"),
    *("fp8 x fp8", "fp8_block128 x fp8_g128", "int4_g128 x fp8", "mxfp4 x fp8", "mxfp8 x mxfp8"),
)
RANGES = ((33, 64), (129, 256), (513, None))
# Few registers a thread, or products that wait for those of other warps.
TILES = ((4, 1, 32, 4, 2), (2, 1, 192, 2, 3), (2, 2, 128, 2, 3), (3, 1, 32, 2, 2))


@pytest.fixture(scope="module")
def kernels() -> list[tuple[KernelPlan, CompiledKernel]]:
    """What is chosen for the problems on a device with warpgroups, and unusual tiles."""
    caps = capabilities("h200")
    if caps.min_compiler and compiler_for(caps).version < caps.min_compiler:
        pytest.skip("the compiler is too old")
    plans = []
    for place, text in enumerate(PROBLEMS):
        problem = GemmProblem.parse(text, 8192, 8192)
        m_range = RANGES[place % len(RANGES)]
        plans.append(compose(problem, caps, m_range))
        ready = decide(problem, caps, m_range, registry()).ready
        lowering = next(option.lowering for option in ready if option.lowering.has_producer)
        tile = warpgroup_tile(*TILES[place % len(TILES)])
        if fits(tile, problem, lowering, caps):
            plans.append(compose_as(problem, caps, m_range, lowering, tile))
    return list(zip(plans, compile_many(plans, cache=False), strict=True))


def test_nothing_spills_and_no_product_waits_for_registers(
    kernels: list[tuple[KernelPlan, CompiledKernel]],
) -> None:
    for plan, compiled in kernels:
        told = f"{plan.problem.name}, {plan.lowering.name}, {plan.tile}: {compiled.log}"
        assert "serialized" not in compiled.log, told
        # Scales of tokens that stages do not hold are loaded ahead, more than there is room for.
        scattered = activation_group(plan.problem) and not plan.tile.stages_token_scales(
            plan.problem, plan.lowering
        )
        for spilled in re.findall(r"(\d+) bytes spill", compiled.log):
            assert int(spilled) <= (512 if scattered else 64), told


def test_fragments_stay_while_they_are_read(
    kernels: list[tuple[KernelPlan, CompiledKernel]], tmp_path: Path
) -> None:
    tool = in_flight.disassembler()
    if tool is None:
        pytest.skip("there is no nvdisasm")
    checked = 0
    for plan, compiled in kernels:
        if plan.lowering.has_producer:
            cubin = tmp_path / "kernel.cubin"
            cubin.write_bytes(compiled.image.data)
            found = in_flight.overwritten(cubin, tool)
            assert not found, f"{plan.problem.name}, {plan.lowering.name}, {plan.tile}: {found}"
            checked += 1
    assert checked > len(PROBLEMS)
