"""Tuning without a card: kernels have times that a test makes up, and a clock that it turns."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from humming import measurer, plugins, timing, tuned
from humming.composer import TUNED_RANGES, KernelPlan, choices, compose, decide, m_range_of
from humming.errors import CompileError, UnsupportedError, WrongResultError
from humming.problem import GemmProblem
from humming.tuned import NO_RECORDS, ProblemKey
from humming.tuner import (
    CANDIDATES,
    TOKENS,
    Budget,
    Effort,
    TunedRange,
    checked_tokens,
    ranges_of,
    shortlist,
    tune,
)

Shell = Any  # of conftest.py, which tests do not import
H200 = plugins.capabilities("h200")
PROBLEM = GemmProblem.parse("int4_g128 x bf16", 4096, 4096)
WHEN = {"card": "NVIDIA H200", "date": "2026-12-01", "versions": {"humming": "0.1.0"}}


class FakeMeasurer:
    """Kernels take what `us_of` says, and each replay moves the clock by a second."""

    def __init__(self, us_of: Callable[[KernelPlan, int], float] | None = None) -> None:
        self._seed = random.random()
        self.us_of = us_of or self.random_us
        self.now = 0.0
        self.plans: list[KernelPlan] = []
        self.rounds: list[tuple[int, int, int]] = []
        self.unmade: dict[int, str] = {}
        self.wrong: dict[tuple[int, int], str] = {}

    def random_us(self, plan: KernelPlan, m: int) -> float:
        """The same for the same kernel."""
        return random.Random(f"{self._seed} {plan.lowering.name} {plan.tile} {m}").uniform(5, 50)

    def load(self, plans: Sequence[KernelPlan]) -> list[str]:
        self.plans = list(plans)
        return [self.unmade.get(place, "") for place in range(len(plans))]

    def check(self, place: int, m: int) -> str:
        assert not self.unmade.get(place), "what was not made is not run"
        return self.wrong.get((place, m), "")

    def time(self, places: Sequence[int], m: int, replays: int) -> list[float]:
        bad = {place for place, _ in self.wrong} | set(self.unmade)
        assert not bad & set(places), "what is wrong is not timed"
        self.rounds.append((m, len(places), replays))
        self.now += replays
        return [self.us_of(self.plans[place], m) for place in places]


def tuned_by(
    fake: FakeMeasurer,
    tokens: Sequence[int] = (8,),
    problem: GemmProblem = PROBLEM,
    **effort: Any,
) -> list[TunedRange]:
    made = Effort(clock=lambda: fake.now, **effort)
    budget = Budget(made, len(ranges_of(problem, tokens)))
    return list(tune(problem, H200, tokens, fake, made, budget, lambda name: None))


# -- candidates -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "problem", ["int4_g128 x bf16", "int4 x int8", "fp8 x fp8", "mxfp4 x bf16"]
)
@pytest.mark.parametrize("m", [1, 64, 4096])
def test_candidates_are_the_models_best_of_every_kind(problem: str, m: int) -> None:
    asked = GemmProblem.parse(problem, 4096, 4096)
    m_range = m_range_of(m, TUNED_RANGES)
    decision = decide(asked, H200, m_range, plugins.registry(), records=NO_RECORDS)
    found = shortlist(decision, CANDIDATES)
    assert len(found) == len({(o.lowering, o.tile) for o in found}) == CANDIDATES
    assert found[0] == decision.chosen
    kinds = {(o.lowering.mma.name, o.lowering.scale_site) for o in decision.ready}
    assert {(o.lowering.mma.name, o.lowering.scale_site) for o in found} == kinds
    alike = {"num_stages": 2, "cluster_n": 1, "cluster_k": 1, "epilogue_m": 8}
    cuts = {(o.lowering.name, replace(o.tile, **alike)) for o in found}
    assert len(cuts) >= CANDIDATES // 3, "not all of them are the same cut in other pipelines"
    everything = shortlist(decision, None)
    assert everything[: len(found)] == found
    assert len(everything) == len(choices(decision))
    assert {o.lowering.packed_bits for o in everything} == {decision.chosen.lowering.packed_bits}


def test_some_candidates_are_in_clusters_where_the_device_has_them() -> None:
    def clusters(device: str) -> set[int]:
        caps = plugins.capabilities(device)
        decision = decide(PROBLEM, caps, (257, 512), plugins.registry(), records=NO_RECORDS)
        return {option.tile.cluster_n for option in shortlist(decision, CANDIDATES)}

    assert clusters("h200") == {1, 2, 4}
    assert clusters("a100") == {1}


def test_some_candidates_add_parts_of_k_in_clusters() -> None:
    """And others through a workspace; an A100 has no clusters."""

    def ways(device: str) -> set[bool]:
        caps = plugins.capabilities(device)
        decision = decide(PROBLEM, caps, (9, 16), plugins.registry(), records=NO_RECORDS)
        tiles = [option.tile for option in shortlist(decision, CANDIDATES)]
        return {tile.uses_workspace for tile in tiles if tile.split_k > 1}

    assert ways("h200") == {False, True}
    assert ways("a100") == {True}


def test_tokens_of_a_range_are_tuned_together() -> None:
    assert ranges_of(PROBLEM, [1024, 8, 1, 8, 600]) == {(1, 8): [1, 8], (513, 1024): [600, 1024]}
    assert set(ranges_of(PROBLEM, TOKENS)) == set(TUNED_RANGES)
    invariant = GemmProblem.parse("w4a16", 64, 64, batch_invariant=True)
    assert ranges_of(invariant, [1, 4096]) == {(1, None): [1, 4096]}


@pytest.mark.parametrize("tokens", [[], [0], [-1], ["x"]])
def test_wrong_numbers_of_tokens_are_refused(tokens: list[Any]) -> None:
    with pytest.raises(UnsupportedError):
        ranges_of(PROBLEM, tokens)


# -- the choice -----------------------------------------------------------------------------------


def test_the_fastest_of_all_is_found() -> None:
    fake = FakeMeasurer()
    (found,) = tuned_by(fake)
    times = [fake.us_of(plan, 8) for plan in fake.plans]
    assert found.chosen.us == {8: min(times)}
    assert found.model.us == {8: times[0]}
    assert found.gain == pytest.approx(times[0] / min(times))
    assert len(found.timed) == CANDIDATES
    assert found.timed[0] is found.chosen
    assert found.complete


def test_kernels_are_halved_and_the_last_measured_thoroughly() -> None:
    fake = FakeMeasurer(lambda plan, m: 1 + fake.plans.index(plan))
    tuned_by(fake)
    assert fake.rounds == [(8, 24, 2), (8, 12, 4), (8, 6, 8), (8, 3, 10)]


def test_the_models_choice_stays_to_the_end() -> None:
    fake = FakeMeasurer(lambda plan, m: 100 - fake.plans.index(plan))
    (found,) = tuned_by(fake)
    assert fake.rounds[-1] == (8, 4, 10)
    assert found.model.us == {8: 100}
    assert found.chosen.us == {8: 100 - 23}


def test_the_models_choice_stands_against_differences_of_a_measurement() -> None:
    fake = FakeMeasurer(lambda plan, m: 10.0 if plan is fake.plans[0] else 9.95)
    (found,) = tuned_by(fake)
    assert found.chosen is found.model
    assert found.gain == 1


def test_every_number_of_tokens_counts_alike() -> None:
    """Not the sum: a range's longest time would drown the others."""

    def us(plan: KernelPlan, m: int) -> float:
        place = fake.plans.index(plan)
        return {1: (10.0, 5.0, 11.0), 8: (1000.0, 1100.0, 900.0)}[m][min(place, 2)]

    fake = FakeMeasurer(us)
    (found,) = tuned_by(fake, (1, 8), candidates=3)
    assert found.chosen.us == {1: 5.0, 8: 1100.0}


def test_a_kernel_that_is_wrong_or_not_made_does_not_win() -> None:
    fake = FakeMeasurer(lambda plan, m: 1 + fake.plans.index(plan))
    fake.wrong = {(0, 8): "3 of 9 outputs", (2, 1): "1 of 9 outputs"}
    fake.unmade = {1: "error: no such thing"}
    (found,) = tuned_by(fake, (1, 8))
    assert found.chosen.us == {1: 4, 8: 4}
    assert found.model is None
    assert found.gain is None
    assert [kernel.reason for kernel in found.wrong] == ["3 of 9 outputs", "1 of 9 outputs"]
    assert str(fake.plans[1].tile) in found.failed[0].what
    assert found.failed[0].reason == "error: no such thing"


def test_no_kernel_that_is_right_is_an_error() -> None:
    fake = FakeMeasurer()
    fake.wrong = {(place, 8): "all of it" for place in range(CANDIDATES)}
    with pytest.raises(WrongResultError, match=r"none of 24 kernels can be used: .*all of it"):
        tuned_by(fake)


def test_that_no_kernel_can_be_made_is_an_error_of_the_compiler() -> None:
    fake = FakeMeasurer()
    fake.unmade = dict.fromkeys(range(CANDIDATES), "out of registers")
    with pytest.raises(CompileError, match=r"none of 24 kernels can be used: .*out of registers"):
        tuned_by(fake)


@pytest.mark.parametrize("m_range", [*TUNED_RANGES, (1, None)])
def test_kernels_are_checked_at_both_ends_of_a_range_and_within(m_range: Any) -> None:
    low, high = m_range
    last = high or low + random.randrange(3, 5000)
    checked = checked_tokens(m_range, [last])
    assert checked[0] == last
    assert low in checked
    assert all(low <= m <= last for m in checked)
    assert any(low < m < last and m % 2 for m in checked)


def test_a_kernel_that_is_wrong_at_a_ragged_number_of_tokens_does_not_win() -> None:
    fake = FakeMeasurer(lambda plan, m: 1 + fake.plans.index(plan))
    fake.wrong = {(0, 33): "the least", (1, 49): "within"}
    (found,) = tuned_by(fake, (64,))
    assert [kernel.reason for kernel in found.wrong] == ["the least", "within"]
    assert found.chosen.us == {64: 3}
    assert {m for m, _, _ in fake.rounds} == {64}, "what is checked besides is not timed"


def test_what_nothing_serves_is_an_error() -> None:
    problem = GemmProblem.parse("int4_g48 x bf16", 96, 96)
    with pytest.raises(UnsupportedError, match="int4_g48 x bfloat16 on h200"):
        tuned_by(FakeMeasurer(), problem=problem)


@pytest.mark.parametrize("problem", ["int4 x int8", "fp8 x fp8", "int4_g128 x bf16"])
def test_what_was_found_is_what_the_composer_takes(
    problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = GemmProblem.parse(problem, 4096, 4096)
    monkeypatch.setenv("HUMMING_RECORDS", str(tmp_path))
    for found in tuned_by(FakeMeasurer(), TOKENS, asked):
        tuned.merge_record(tmp_path / "h200.json", "h200", [found.entry(WHEN)])
        plan = compose(asked, H200, found.m_range)
        assert (plan.lowering, plan.tile) == found.chosen.option[:2]
    tuned.forget()


# -- time -----------------------------------------------------------------------------------------


def test_a_budget_ends_rounds_early_and_leaves_ranges_out() -> None:
    fake = FakeMeasurer()
    found = tuned_by(fake, (8, 16, 32, 64), seconds=6)
    # A first round takes 2 s, a share is 1.5 s: three ranges, measured roughly, and no time more.
    assert [one.m_range for one in found] == [(1, 8), (9, 16), (17, 32)]
    assert not any(one.complete for one in found)
    assert fake.rounds == [(8, 24, 2), (16, 24, 2), (32, 24, 2)]


def test_the_time_of_ranges_that_are_left_out_is_that_of_the_others() -> None:
    now = [0.0]
    budget = Budget(Effort(seconds=60, clock=lambda: now[0]), 6)
    assert budget.begin()
    now[0] = 9.0
    assert not budget.is_spent()
    now[0] = 10.0
    assert budget.is_spent()
    budget.skip(3)
    assert budget.begin()
    now[0] = 34.0
    assert not budget.is_spent()
    now[0] = 35.0
    assert budget.is_spent(), "half of what was left, for two ranges"


def test_with_time_enough_nothing_is_cut() -> None:
    found = tuned_by(FakeMeasurer(), (8, 16), seconds=60)
    assert all(one.complete for one in found)


@pytest.mark.parametrize(
    "effort", [{"candidates": 0}, {"seconds": 0}, {"seconds": -1.0}, {"seconds": float("nan")}]
)
def test_an_effort_of_nothing_is_refused(effort: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        Effort(**effort)


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def card(humming: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> "type[FakeMeasurer]":
    """What looks like a machine with an H200; returns the class of its measurers."""
    present = plugins.PresentDevice(0, "NVIDIA H200", "h200", plugin="nvidia")
    monkeypatch.setattr(plugins, "devices", lambda: plugins.PresentDevices([present], []))
    monkeypatch.setattr(plugins.installed(), "_seen", None)  # what was present before
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(timing, "circumstances", lambda caps, index: WHEN)
    monkeypatch.setenv("HUMMING_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("HUMMING_RECORDS")

    class Card(FakeMeasurer):
        made: list["Card"] = []  # noqa: RUF012

        def __init__(self, problem: GemmProblem, caps: Any, index: int) -> None:
            super().__init__()
            assert (caps.name, index) == ("h200", 0)
            self.problem = problem
            Card.made.append(self)

    monkeypatch.setattr(measurer, "CardMeasurer", Card)
    return Card


SMALL = ("tune", "int4_g128 x bf16", "--n", "512", "--k", "1024", "--m", "1,16,600")


def test_tune_records_what_is_fastest(humming: Shell, card: Any, tmp_path: Path) -> None:
    told = humming.json(*SMALL)
    assert told["card"] == "NVIDIA H200"
    assert [found["m_range"] for found in told["ranges"]] == [[1, 8], [9, 16], [513, 1024]]
    path = tmp_path / "records" / "h200.json"
    assert told["record"] == str(path)
    kept = tuned.kept_entries(path, "h200")
    assert [m_range for _, m_range in kept] == [(1, 8), (9, 16), (513, 1024)]
    problem = GemmProblem.parse("int4_g128 x bf16", 512, 1024)
    for found in told["ranges"]:
        plan = compose(problem, H200, tuple(found["m_range"]))
        assert plan.decision.record.entry == kept[ProblemKey.of(problem), plan.m_range]
        assert plan.lowering.name == found["chosen"]["lowering"]
        assert found["gain"] >= 1 / 1.01


def test_tune_prints_a_table(humming: Shell, card: Any, tmp_path: Path) -> None:
    assert humming(*SMALL) == 0
    for text in ("int4_g128 x bfloat16 on NVIDIA H200", "512x1024", "gain", "cost model's choice"):
        assert text in humming.out
    assert humming.out.endswith(f"recorded in {tmp_path}/records/h200.json\n")


def test_tune_writes_where_it_is_told(humming: Shell, card: Any, tmp_path: Path) -> None:
    path = tmp_path / "fleet" / "h200.json"
    told = humming.json(*SMALL, "--output", str(path))
    assert len(tuned.kept_entries(path, "h200")) == 3
    assert told["notes"] == [f"to use it, set HUMMING_RECORDS={path}"]


def test_tune_says_what_goes_before_its_record(
    humming: Shell, card: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = tmp_path / "fleet.json"
    humming.json(*SMALL, "--output", str(fleet))
    monkeypatch.setenv("HUMMING_RECORDS", str(fleet))
    assert humming.json(*SMALL)["notes"] == [f"{fleet} goes before it"]
    assert humming.json(*SMALL, "--output", str(fleet))["notes"] == []
    monkeypatch.setenv("HUMMING_RECORDS", "off")
    assert humming.json(*SMALL)["notes"] == ["HUMMING_RECORDS=off: nothing here heeds records"]


def test_tune_takes_a_model(humming: Shell, card: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    told = humming.json("tune", "int4 x int8", "--model", str(tmp_path), "-m", "1")
    sizes_found = {(found["n"], found["k"]) for found in told["ranges"]}
    assert sizes_found == {(128, 128), (384, 128), (256, 128), (512, 128), (128, 256)}


def test_tune_measures_as_many_as_it_is_told(humming: Shell, card: Any) -> None:
    few = humming.json(*SMALL, "--candidates", "5")["ranges"]
    assert {len(found["timed"]) for found in few} == {5}
    every = humming.json(*SMALL, "--all-tiles")["ranges"]
    problem = GemmProblem.parse("int4_g128 x bf16", 512, 1024)
    decision = decide(problem, H200, (1, 8), plugins.registry(), records=NO_RECORDS)
    assert len(every[0]["timed"]) == len(choices(decision))


def test_an_interruption_keeps_what_was_measured(
    humming: Shell, card: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: FakeMeasurer, places: Sequence[int], m: int, replays: int) -> list[float]:
        if m == 600:
            raise KeyboardInterrupt
        return FakeMeasurer.time(self, places, m, replays)

    monkeypatch.setattr(card, "time", interrupted)
    told = humming.json(*SMALL, status=130)
    assert told["interrupted"] is True
    assert len(told["ranges"]) == 2
    assert told["notes"] == ["1 of 3 ranges of M left out: interrupted"]
    assert len(tuned.kept_entries(tmp_path / "records" / "h200.json", "h200")) == 2


def test_a_wrong_kernel_is_told_and_is_a_failed_check(
    humming: Shell, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(self: FakeMeasurer, place: int, m: int) -> str:
        return "7 of 9 outputs" if (place, m) == (1, 16) else ""

    monkeypatch.setattr(card, "check", check)
    # What is wrong is not to be timed, which the measurer of these tests knows of `wrong` alone.
    assert humming(*SMALL) == 1
    assert "WRONG: 512x1024, m = 16: " in humming.out
    assert "7 of 9 outputs; please report it" in humming.out


def test_of_several_layers_one_that_cannot_be_tuned_does_not_cost_the_others(
    humming: Shell, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(self: Any, plans: Sequence[KernelPlan]) -> list[str]:
        if self.problem.n == 64:
            raise CompileError("no compiler")
        return FakeMeasurer.load(self, plans)

    monkeypatch.setattr(card, "load", load)
    words = ("tune", "w4a16", "--shapes", "64x128,128x128", "-m", "1")
    told = humming.json(*words, status=3)
    assert [found["n"] for found in told["ranges"]] == [128]
    assert told["failed"] == [{"name": "64x128", "type": "CompileError", "message": "no compiler"}]
    assert humming(*words) == 3
    assert "64x128: FAILED: no compiler" in humming.out


def test_a_range_without_a_right_kernel_is_a_failed_check_and_does_not_cost_the_others(
    humming: Shell, card: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def check(self: FakeMeasurer, place: int, m: int) -> str:
        return "7 of 9 outputs" if m == 16 else ""

    monkeypatch.setattr(card, "check", check)
    told = humming.json(*SMALL, status=1)
    assert [found["m_range"] for found in told["ranges"]] == [[1, 8], [513, 1024]]
    (failed,) = told["failed"]
    assert (failed["name"], failed["type"]) == ("512x1024 m=16", "WrongResultError")
    assert len(tuned.kept_entries(tmp_path / "records" / "h200.json", "h200")) == 2
    assert humming(*SMALL) == 1
    assert "512x1024 m=16: FAILED: " in humming.out
    alone = humming.json(*SMALL[:-1], "16", status=1)["error"]
    assert alone["type"] == "WrongResultError"


def test_a_layer_that_fails_leaves_its_time_to_the_others(
    humming: Shell, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipped: list[int] = []
    skip = Budget.skip
    monkeypatch.setattr(
        Budget, "skip", lambda self, ranges: skipped.append(ranges) or skip(self, ranges)
    )

    def load(self: Any, plans: Sequence[KernelPlan]) -> list[str]:
        if self.problem.n == 64:
            raise CompileError("no compiler")
        return FakeMeasurer.load(self, plans)

    monkeypatch.setattr(card, "load", load)
    words = ("tune", "w4a16", "--shapes", "64x128,128x128", "-m", "1,16,64", "--seconds", "60")
    assert len(humming.json(*words, status=3)["ranges"]) == 3
    assert skipped == [2]


def test_a_record_that_cannot_be_kept_is_refused_before_anything_is_measured(
    humming: Shell, card: Any, tmp_path: Path
) -> None:
    path = tmp_path / "h20.json"
    tuned.merge_record(path, "h20", [])
    error = humming.json(*SMALL, "--output", str(path), status=2)["error"]
    assert error["why"] == "it is one of h20, not of h200"
    assert not card.made


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "no accelerator is present"),
        (("--device", "sim:h200"), "simulator"),
        (("--device", "h200"), "no accelerator present"),
    ],
    ids=["nothing", "simulator", "absent"],
)
def test_tune_without_a_card_says_why_not(words: tuple[str, ...], why: str, humming: Shell) -> None:
    error = humming.json(*SMALL, *words, status=2)["error"]
    assert why in error["why"], error
    assert "HUMMING_RECORDS" in error["possible"]


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (("tune", "int99 x bf16", "--n", "64", "--k", "64"), "int99"),
        (("tune", "w4a16", "--n", "64"), "tune"),
        (("tune", "w4a16"), "tune"),
        (("tune", "w4a16", "-n", "64", "-k", "64", "-m", "1,x"), "'1,x'"),
        ((*SMALL, "--all-tiles", "--candidates", "3"), "--all-tiles and --candidates 3"),
    ],
    ids=["unknown-problem", "one-size", "no-size", "no-number", "all-and-some"],
)
def test_wrong_requests_are_refused_without_a_card_too(
    words: tuple[str, ...], asked: str, humming: Shell
) -> None:
    assert asked in humming.json(*words, status=2)["error"]["asked"]
