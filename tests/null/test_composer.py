"""Decisions and plans: what must come out, for every device of the matrix.

`golden/decisions.yaml` records what is preferred and what is chosen. After a change that is meant,
write it again and review the difference:

    python tests/null/test_composer.py --update-golden

The outcomes that must never change are tested by themselves, so that no update can hide them.
"""

import dataclasses
import json
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from humming import plugins
from humming.capability import DeviceCapabilities
from humming.composer import M_RANGES, compose, decide, m_range_of, plan
from humming.decision import Decision
from humming.errors import UnsupportedError
from humming.formats import WeightSpec
from humming.layout import padded
from humming.lowering import (
    ACCUMULATOR,
    INSTRUCTION,
    K_MAJOR,
    OPERAND,
    enumerate_lowerings,
    weight_group,
)
from humming.problem import LARGEST_SIZE, GemmProblem
from humming.tiles import candidates
from humming.tuned import NO_RECORDS

GOLDEN = Path(__file__).parent / "golden" / "decisions.yaml"
PROBLEMS = (
    "w4a16",
    "w8a16",
    "w8a8 int8",
    "w8a8 fp8",
    "w4a8 int8",
    "mxfp4 x fp8",
    "nvfp4 x nvfp4",
    "mxfp4 x mxfp8",
    "w4a4 int4",
    "e3m4",
    "e3m4, undocumented allowed",
    "e0m3",
    "e0m3, undocumented allowed",
)
RECORDED_RANGES = (M_RANGES[0], M_RANGES[-1])
N = K = 8192


@cache
def devices() -> dict[str, DeviceCapabilities]:
    return {caps.name: caps for caps in plugins.registry().devices()}


DEVICES = sorted(devices())


def problem(text: str, n: int = N, k: int = K, **overrides) -> GemmProblem:
    name, _, allowed = text.partition(", ")
    return GemmProblem.parse(name, n, k, **{"allow_undocumented": bool(allowed), **overrides})


def decided(text, device, m=1, registry=None, **overrides) -> Decision:
    caps = device if isinstance(device, DeviceCapabilities) else devices()[device]
    registry = registry or plugins.registry()
    return decide(problem(text, **overrides), caps, m_range_of(m), registry, m)


class Parts:
    """A registry with every component, or with those of some slots missing."""

    def __init__(self, lacking=()):
        self._lacking = lacking

    def components(self, slot, serves):
        return () if slot in self._lacking or serves in self._lacking else ("component",)

    def devices(self):
        return list(devices().values())


# -- golden ---------------------------------------------------------------------------------------


def recorded(device: str) -> dict[str, dict[str, str]]:
    """What the golden file says of a device: problem -> range -> outcome in a line."""
    return {
        text: {
            f"m {low} to {high}" if high else f"m {low} on": outcome(text, device, (low, high))
            for low, high in RECORDED_RANGES
        }
        for text in PROBLEMS
    }


def outcome(text: str, device: str, m_range: tuple[int, int | None]) -> str:
    """What is preferred with its notes, and what is chosen where that is another or nothing."""
    caps, registry = devices()[device], plugins.registry()
    decision = decide(problem(text), caps, m_range, registry, records=NO_RECORDS)
    preferred, chosen = decision.preferred, decision.chosen
    if preferred is None:
        return "impossible"
    notes = f" ({'; '.join(preferred.lowering.notes)})" if preferred.lowering.notes else ""
    if chosen is preferred:
        return f"{chosen.lowering.name}{notes}"
    built = f"chosen {chosen.lowering.name}" if chosen else "nothing built"
    return f"{preferred.lowering.name}{notes}; {built}"


@cache
def golden() -> dict[str, dict[str, dict[str, str]]]:
    return yaml.safe_load(GOLDEN.read_text())


@pytest.mark.parametrize("device", DEVICES)
def test_decisions_are_as_reviewed(device):
    assert recorded(device) == golden()[device]


def test_golden_file_has_every_device_and_no_other():
    assert sorted(golden()) == DEVICES


# -- the four outcomes ----------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 64, 4096])
@pytest.mark.parametrize("device", ["b300", "gb300", "rubin"])
def test_int8_without_a_kind_of_its_own_is_legacy_mma_sync(device, m):
    decision = decided("w8a8 int8", device, m)
    best = decision.preferred.lowering
    assert (best.mma.instruction, best.mma.shape) == ("mma_sync", (16, 8, 32))
    assert best.notes[0] == "legacy"
    text = decision.explain()
    assert "tcgen05 s8 x s8: tcgen05 has kind i8 on sm_100a and sm_110a only" in text
    assert "legacy: tcgen05 m128n16k32 e4m3 x e4m3 -> f32 reaches" in text


def test_the_cost_of_legacy_int8_is_shown():
    decision = decided("w8a8 int8", "b300", 4096)
    fp8 = decided("w8a8 fp8", "b300", 4096)
    slow, fast = decision.preferred.estimate, fp8.preferred.estimate
    assert slow.total_us > 8 * fast.total_us
    assert f"total {slow.total_us:.1f} us, bound by MMA" in decision.explain()
    assert "29 times this rate" in decision.explain()


def test_int8_with_a_kind_of_its_own_uses_it():
    best = decided("w8a8 int8", "b200", 4096).preferred.lowering
    assert (best.mma.instruction, best.notes) == ("tcgen05", ())


@pytest.mark.parametrize("m", [1, 4096])
@pytest.mark.parametrize("text", ["e3m4", "e0m3"])
@pytest.mark.parametrize("device", ["b200", "b300", "rtx5090", "rtx_pro_6000", "gb10"])
def test_hidden_formats_are_native_only_where_opted_in(device, text, m):
    hidden = problem(text).weight.dtype
    refused = decided(text, device, m)
    assert all(x.lowering.operand != hidden for x in (*refused.ready, *refused.missing))
    assert "undocumented; used only with allow_undocumented=True" in refused.explain()
    allowed = decided(f"{text}, undocumented allowed", device, m).preferred.lowering
    assert allowed.operand == allowed.activation_operand == hidden
    assert "undocumented" in allowed.notes


@pytest.mark.parametrize("consent", ["", ", undocumented allowed"], ids=["asked", "opted-in"])
@pytest.mark.parametrize("text", ["e3m4", "e0m3"])
def test_hidden_formats_are_never_native_on_rubin(text, consent):
    decision = decided(text + consent, "rubin", 64)
    hidden = problem(text).weight.dtype
    assert all(x.lowering.operand != hidden for x in (*decision.ready, *decision.missing))
    assert decision.preferred.lowering.operand == "float16"
    reason = f"{hidden.ptx.upper()} operands raise an illegal instruction on sm_107"
    assert f"tcgen05 {hidden.ptx} x {hidden.ptx}: {reason}" in decision.explain()


@pytest.mark.parametrize("m", [1, 64, 4096])
@pytest.mark.parametrize(
    ("device", "instruction"),
    [
        ("b200", "tcgen05"),
        ("gb200", "tcgen05"),
        ("b300", "tcgen05"),
        ("rubin", "tcgen05"),
        ("rtx5090", "mma_sync_block_scaled"),
        ("rtx_pro_6000", "mma_sync_block_scaled"),
        ("gb10", "mma_sync_block_scaled"),
    ],
)
def test_nvfp4_is_block_scaled_where_an_instruction_is(device, instruction, m):
    best = decided("nvfp4 x nvfp4", device, m).preferred.lowering
    assert (best.mainloop, best.scale_site) == (instruction, INSTRUCTION)
    assert best.operand == best.activation_operand == "float4e2m1"
    assert (best.layout == K_MAJOR) == (instruction == "tcgen05")


@pytest.mark.parametrize("m", [1, 4096])
@pytest.mark.parametrize("device", ["h100", "h20", "a100_80gb", "l40s", "t4", "zw810e", "m890"])
def test_nvfp4_is_dequantized_to_a_wider_operand_elsewhere(device, m):
    best = decided("nvfp4 x nvfp4", device, m).preferred.lowering
    assert best.scale_site in (ACCUMULATOR, OPERAND)  # products with e4m3 scales are exact
    assert best.operand.bits > 4
    assert f"activations widened from float4e2m1 to {best.activation_operand}" in best.notes


@pytest.mark.parametrize(
    ("movers", "best"),
    [
        (("tma", "bulk", "cp_async", "plain"), "tma"),
        (("bulk", "cp_async", "plain"), "bulk"),
        (("cp_async", "plain"), "cp_async"),
        (("plain",), "plain"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value,
)
@pytest.mark.parametrize(("device", "m"), [("h200", 1), ("a100_80gb", 4096), ("zw810e", 1)])
def test_the_best_mover_of_the_device_is_taken(device, movers, best, m):
    caps = dataclasses.replace(devices()[device], movers=movers)
    decision = decided("w4a16", caps, m, registry=Parts())
    assert decision.chosen.lowering.mover == best


def test_a_better_mover_that_does_not_exist_is_named_and_the_next_one_taken():
    decision = decided("w4a16", "h200", registry=Parts(lacking=("tma", "bulk")))
    assert decision.chosen.lowering.mover == "cp_async"
    assert ("mover tma",) in [option.components for option in decision.missing]


# -- decisions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 16, 4096])
def test_h20_reckons_with_its_own_reduced_rate(m):
    h20, h200 = (decided("w8a8 fp8", name, m, registry=Parts()) for name in ("h20", "h200"))
    for decision in (h20, h200):
        assert decision.chosen.lowering.mainloop == "wgmma"
    same_work = h20.chosen.estimate.mma_ops == h200.chosen.estimate.mma_ops
    slower = h20.chosen.estimate.mma_us / h200.chosen.estimate.mma_us
    assert not same_work or slower > 5
    text = h20.explain()
    assert "2048 per SM and clock, 78 SMs" in text
    assert "a quarter of the tensor rate of its family" in text


def test_lowerings_that_lack_components_are_never_chosen():
    decision = decided("w4a16", "h200", registry=Parts(lacking=("dequant",)))
    assert decision.chosen is None
    assert decision.preferred is decision.missing[0]
    assert all("dequant int:float16" in option.components for option in decision.missing)


def test_what_exists_is_preferred_within_the_models_resolution():
    decision = decided("w4a16", "a100_80gb", registry=Parts(lacking=("cp_async",)))
    built, unbuilt = decision.ready[0], decision.missing[0]

    def with_unbuilt_at(share):
        order_us = built.estimate.order_us * share
        estimate = dataclasses.replace(unbuilt.estimate, order_us=order_us)
        missing = (unbuilt._replace(estimate=estimate),)
        return dataclasses.replace(decision, missing=missing).preferred

    assert with_unbuilt_at(0.97) is built
    assert with_unbuilt_at(0.90) is not built


@pytest.mark.parametrize("text", ["int4_g128 x fp16", "fp8 x fp8", "nvfp4 x nvfp4"])
@pytest.mark.parametrize("device", ["h200", "rtx5090", "rubin", "m890"])
def test_ranking_is_by_time_but_for_lesser_movers(device, text):
    options = decided(text, device, m=64, registry=Parts(lacking=("mma",))).missing
    best_mover = devices()[device].movers[0]
    leading = [x.estimate for x in options if x.lowering.mover == best_mover]
    assert leading == sorted(leading, key=lambda e: (e.total_us is None, e.order_us))


def test_order_depends_on_the_range_alone():
    names = {tuple(r.lowering.name for r in decided("w4a16", "h200", m).ready) for m in (9, 16)}
    assert len(names) == 1
    tiles = {decided("w4a16", "h200", m).chosen.tile for m in (9, 12, 16)}
    assert len(tiles) == 1


@pytest.mark.parametrize("device", ["h200", "t4"])
def test_batch_invariance_is_one_kernel_for_every_m(device):
    plans = {
        (made.lowering, made.tile, made.source)
        for m in (1, 9, 64, 4096)
        for made in [plan(problem("w4a16", batch_invariant=True), device, m)]
    }
    assert len(plans) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_every_rejection_and_absence_has_a_reason(device):
    for text in ("w4a16", "w8a8 fp8", "nvfp4 x nvfp4"):
        decision = decided(text, device)
        assert all(what and reason for what, reason in decision.rejected)
        accounted = {what for what, _ in decision.rejected}
        accounted |= {x.lowering.mma.name for x in (*decision.ready, *decision.missing)}
        assert {row.name for row in devices()[device].mma} <= accounted


def test_estimates_follow_m_and_the_choice_does_not():
    decision = decided("w4a16", "h200", 4096)
    more = decision.at(8192)
    assert more.chosen.tile == decision.chosen.tile
    assert more.chosen.estimate.total_us > 1.8 * decision.chosen.estimate.total_us
    assert "at m = 8192" in decision.explain(8192)


def test_explanation_has_its_sections():
    text = decided("w4a16", "h200", 16).explain()
    titles = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert titles[0].startswith("int4_g128 x float16, n=8192, k=8192 on h200 at m = 16")
    assert titles[1] == "Choice"
    assert titles[2].startswith("Estimate of ")
    assert titles[3:] == ["Alternatives", "Not built yet", "Rejected"]
    for term in ("memory", "MMA", "dequantization", "overhead"):
        assert any(line.split()[:1] == [term] for line in text.splitlines())


def test_figures_that_are_not_public_are_said():
    text = decided("w4a16", "zw810e").explain()
    assert "bandwidth not public" in text
    assert "total unknown" in text


@pytest.mark.parametrize("device", ["h200", "zw810e", "b300"])
def test_decisions_are_json(device):
    read = json.loads(json.dumps(decided("w4a16", device).to_dict()))
    assert read["device"] == device
    assert read["chosen"] == read["ready"][0]["name"]
    assert {"mma", "mover", "tile", "estimate"} <= read["ready"][0].keys()


# -- plans ----------------------------------------------------------------------------------------


def test_ranges_cover_every_m_once():
    assert M_RANGES[0][0] == 1
    assert M_RANGES[-1][1] is None
    assert all(low == before + 1 for (_, before), (low, _) in pairwise(M_RANGES))
    assert m_range_of(0) == M_RANGES[0]
    for low, high in M_RANGES:
        assert m_range_of(low) == m_range_of(high or 10**6) == (low, high)


@pytest.mark.parametrize("device", ["t4", "a100", "h200", "b300", "rtx5090"])
def test_composing_twice_gives_the_same_source(device):
    first, second = (plan(problem("w4a16"), device, m=16) for _ in range(2))
    assert first.source == second.source
    assert first.entry in first.source
    assert (first.device, first.arch) == (first.decision.capabilities.name, first.arch)


@pytest.mark.parametrize("m_range", M_RANGES, ids=str)
@pytest.mark.parametrize("text", ["int4_g32", "int4", "uint4_g128_zp"])
@pytest.mark.parametrize("device", ["t4", "a100_80gb", "l4", "h200", "rtx5090"])
def test_every_class_of_tuning_gives_a_kernel_that_fits(device, text, m_range):
    caps = devices()[device]
    asked = problem(f"{text} x fp16", n=448, k=1536)
    made = compose(asked, caps, m_range)
    assert made.smem_bytes >= made.tile.smem_bytes(asked, made.lowering)
    assert made.smem_bytes <= caps.smem_per_block_bytes
    assert made.tile.block_m >= 8
    assert made.m_range == m_range


def test_grid_and_workspace():
    made = plan(problem("w4a16", n=1000), "h200", m=5000)
    tile = dataclasses.replace(made.tile, block_n=256, block_m=64, split_k=1)
    whole = dataclasses.replace(made, tile=tile)
    assert whole.grid(130) == (4, 3, 1)
    assert whole.workspace(130) == (0, 0)
    split = dataclasses.replace(made, tile=dataclasses.replace(tile, split_k=4))
    assert split.grid(130) == (4, 3, 4)
    assert split.workspace(130) == (4 * 4 * 3 * 256 * 64 * 4, 12)
    assert split.workspace(0) == (0, 0)


@pytest.mark.parametrize("m_range", M_RANGES, ids=str)
def test_what_kernels_count_in_32_bits_fits_at_the_largest_sizes(m_range):
    weight = WeightSpec("int4", "group", LARGEST_SIZE)
    largest = GemmProblem(LARGEST_SIZE, LARGEST_SIZE, weight, "fp16", "fp16")
    lowerings, _ = enumerate_lowerings(largest, devices()["a100_80gb"])
    tiles = [t for low in lowerings for t in candidates(largest, low, devices()["t4"], m_range)]
    assert tiles
    for tile in tiles:
        # Rows and stages are rounded up to tiles; the number of groups, by adding a group first.
        assert largest.n + tile.block_n < 2**31
        assert largest.k + tile.block_k < 2**31
    assert padded(1, largest.k)[1] + weight_group(largest) - 1 < 2**31


def test_plan_takes_names_descriptions_and_rows():
    by_name = plan("int4_g128 x bf16", "h200", m=3, n=512, k=1024)
    described = plan(GemmProblem.parse("int4_g128 x bf16", 512, 1024), devices()["h200"], m=3)
    assert by_name == described
    assert by_name.estimate.m == 3
    resized = plan(described.problem, "h200", m=3, n=1024)
    assert (resized.problem.n, resized.problem.k) == (1024, 1024)


def test_dependent_launch_where_the_device_has_it():
    assert plan(problem("w4a16"), "h200").pdl
    assert not plan(problem("w4a16"), "a100").pdl


# -- errors ---------------------------------------------------------------------------------------


def test_what_cannot_be_built_names_what_can():
    asked = problem("w8a8 int8")
    with pytest.raises(UnsupportedError) as raised:
        compose(
            asked,
            devices()["b300"],
            (1, 8),
            registry=Parts(lacking=("int:int8", "widened", "widened:shared")),
        )
    error = raised.value
    assert error.asked == "int8 x int8 on b300"
    assert "lacks dequant int:int8" in error.why
    assert "On b300, int8 x bfloat16 is possible." in error.possible
    assert "Devices that run int8 x int8: none yet." in error.possible


def _refusal(text, device):
    with pytest.raises(UnsupportedError) as raised:
        plan(problem(text, 96, 200), device)
    return raised.value


@pytest.mark.parametrize("device", ["t4", "a100_80gb", "h200", "b300"])
@pytest.mark.parametrize(
    ("weight", "nearest"),
    [
        ("int4_g48", "int4_g32"),
        ("uint4_g96_zp", "uint4_g64_zp"),
        ("int4_g1040", "int4_g1024"),
        ("int4_block64x48", "int4_block64x32"),
    ],
)
def test_groups_that_fit_no_tile_are_the_first_reason(device, weight, nearest):
    error = _refusal(f"{weight} x fp16", device)
    group = weight_group(problem(f"{weight} x fp16"))
    told = f"a scale per {group} values of K fits no tile; groups of 16, 32 or a multiple of 64"
    assert error.why.startswith(told)
    assert f"On {device}, {nearest} x float16 is possible." in error.possible
    text = decided(f"{weight} x fp16", device).explain()
    assert f"\n  none: {told}" in text
    assert text.partition("Rejected\n")[2].partition("\n")[0].partition(": ")[2].startswith(told)


@pytest.mark.parametrize("device", ["t4", "h200"])
@pytest.mark.parametrize("group", [7, 8, 24])
def test_groups_that_the_instructions_step_over_are_the_first_reason(device, group):
    error = _refusal(f"int4_g{group} x fp16", device)
    why = f"a scale per {group} values of K does not divide into the 16 of an MMA step"
    assert error.why.startswith(f"no instruction of the device computes it: {why}")
    assert "int4_g16 x float16 is possible" in error.possible


def test_what_needs_consent_comes_before_types_that_do_not_fit():
    decision = decided("e3m4", "b200")
    reasons = [rejection.reason for rejection in decision.rejected]
    asking = [place for place, reason in enumerate(reasons) if "used only with" in reason]
    inexact = [place for place, reason in enumerate(reasons) if "not exact" in reason]
    assert any("allow_undocumented" in reasons[place] for place in asking)
    assert max(asking) < min(inexact)


@pytest.mark.parametrize("group", [*range(1, 200), 256, 320, 500, 512, 960, 1000, 1024, 4096])
def test_the_groups_that_are_said_to_fit_are_those_with_a_plan(group):
    decision = decided(f"int4_g{group} x fp16", "a100_80gb", n=64, k=300)
    assert bool(decision.ready) == (group in (16, 32) or group % 64 == 0)


def test_a_device_too_small_for_any_tile_is_told_so():
    caps = dataclasses.replace(devices()["t4"], smem_per_block_bytes=1024)
    with pytest.raises(UnsupportedError, match="on t4: no tile fits into 1024"):
        compose(problem("w4a16"), caps, (1, 8))


def test_devices_that_could_are_named():
    caps = dataclasses.replace(devices()["t4"], mma=())
    with pytest.raises(UnsupportedError, match="no instruction of the device") as raised:
        compose(problem("w4a16"), caps, (1, 8))
    assert "h200" in raised.value.possible


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: plan("w4a16", "h200"), "Pass n and k"),
        (lambda: plan("w4a16", "h200", n=64), "Pass n and k"),
        (lambda: plan("w4a16", "h2000", n=64, k=64), "h200"),
        (lambda: plan("w4a16", "h200", m=-1, n=64, k=64), "m >= 0"),
        (lambda: plan(problem("w4a16"), "h200", n=0), "n=0"),
        (lambda: compose(problem("w4a16"), devices()["h200"], (9, 8)), "M_RANGES"),
        (lambda: compose(problem("w4a16"), devices()["h200"], (0, 8)), "M_RANGES"),
    ],
)
def test_wrong_questions_get_an_answer(call, told):
    with pytest.raises(UnsupportedError, match=told):
        call()


@pytest.mark.parametrize("activation", ["mxfp6_e3m2", "int7", "int3"])
def test_activations_of_odd_widths_lack_a_component(activation):
    reason = r"lacks .*a reader of \d-bit activations \(4, 8 and 16 bits have one\)"
    with pytest.raises(UnsupportedError, match=reason):
        plan(f"int4 x {activation}", "a100", n=256, k=512)


def write_golden() -> None:
    head = (
        "# preferred and chosen lowerings; written by tests/null/test_composer.py --update-golden\n"
    )
    text = yaml.safe_dump({name: recorded(name) for name in DEVICES}, sort_keys=False, width=1000)
    GOLDEN.write_text(head + text)


if __name__ == "__main__" and "--update-golden" in sys.argv:
    write_golden()
