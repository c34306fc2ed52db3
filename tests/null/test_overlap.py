"""When kernels let the next one's CTAs start."""

from dataclasses import replace

import pytest
import torch

import humming
from humming import runtime
from humming.composer import compose, m_range_of
from humming.overlap import overlap_of
from humming.plugins import capabilities
from humming.problem import GemmProblem
from humming.tile_cost import resident_ctas

SMALL = {"block_n": 64, "warps_n": 4, "warps_k": 1, "num_stages": 2, "split_k": 1, "cluster_k": 1}


def _plan(n=8192, k=8192, m=1, device="h200", text="int4_g128 x bf16"):
    caps = capabilities(device)
    return caps, compose(GemmProblem.parse(text, n, k), caps, m_range_of(m), m=m)


@pytest.mark.parametrize("n", [64, 4096, 8192])
def test_a_grid_of_one_wave_has_its_sms_for_itself(n):
    caps, plan = _plan(n=n)
    assert plan.overlap.early_ctas == 0
    assert plan.smem_bytes <= caps.smem_per_block_bytes
    # One kilobyte of each CTA is the system's.
    assert 2 * (plan.smem_bytes + 1024) > caps.smem_per_sm_bytes


def test_a_grid_that_does_not_fill_the_room_of_all_sms_tells_late():
    caps, plan = _plan(n=57344)
    tile = replace(plan.tile, **SMALL)
    overlap = overlap_of(plan.problem, plan.lowering, caps, tile, 8)
    resident = resident_ctas(plan.problem, plan.lowering, caps, tile)
    assert resident > 1
    assert overlap.early_ctas == resident * caps.sms
    assert overlap.smem_bytes == tile.smem_bytes(plan.problem, plan.lowering)


def test_a_tile_that_fills_an_sm_tells_early_at_any_number_of_tokens():
    _, plan = _plan(m=4096)
    assert plan.overlap.early_ctas == 0
    assert plan.smem_bytes == plan.tile.smem_bytes(plan.problem, plan.lowering)


def test_ctas_that_cannot_keep_others_from_their_sm_tell_late():
    caps, plan = _plan(n=1024)
    tile = replace(plan.tile, **SMALL)
    arguments = plan.problem, plan.lowering, caps, tile, 8
    assert overlap_of(*arguments).early_ctas == 0
    for limit in (64 * 1024, None):
        less = replace(caps, smem_per_block_bytes=limit)
        overlap = overlap_of(plan.problem, plan.lowering, less, tile, 8)
        assert overlap.early_ctas is None
        assert overlap.smem_bytes == tile.smem_bytes(plan.problem, plan.lowering)


@pytest.mark.parametrize("text", ["0", "off", "1", ""])
def test_launches_that_overlap_can_be_turned_off(text, monkeypatch):
    monkeypatch.setenv("HUMMING_DEPENDENT_LAUNCH", text)
    launched = []

    class Device:
        workspaces = tensor_map = None

        def load(self, *_):
            return self

        def launch(self, *arguments, **_):
            launched.append(arguments[4])

    monkeypatch.setattr(runtime, "_device", lambda *_: Device())
    monkeypatch.setattr(runtime, "compile_plan", lambda plan: None)
    _, plan = _plan(n=64, k=128)
    weight = humming.pack(humming.quantize(torch.randn(64, 128), "int4_g128"))
    operands = runtime.Operands(weight.codes, weight.scales, None, None, None)
    out = torch.empty(1, 64).bfloat16()
    runtime.Kernel(plan, -1).launch(torch.ones(1, 128).bfloat16(), operands, out, 0)
    assert launched == [text in ("1", "")]


@pytest.mark.parametrize("device", ["t4", "a100", "l40s", "zw810e"])
def test_without_dependent_launch_nothing_is_told(device):
    _, plan = _plan(text="int4_g128 x fp16", device=device)
    assert plan.overlap.early_ctas is None
    assert plan.smem_bytes == plan.tile.smem_bytes(plan.problem, plan.lowering)
