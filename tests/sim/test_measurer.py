"""What a measurer holds kernels to, with kernels that the simulator runs."""

import random
from dataclasses import replace

import pytest
import torch

from humming import plugins
from humming.composer import KernelPlan, compose_each, decide
from humming.errors import CompileError
from humming.measurer import CardMeasurer
from humming.problem import GemmProblem
from humming.runtime import Kernel
from humming.tuned import NO_RECORDS
from humming.tuner import shortlist


def plans_of(problem: GemmProblem, device: str, m_range: tuple[int, int | None], count: int):
    caps = plugins.capabilities(device)
    decision = decide(problem, caps, m_range, plugins.registry(), records=NO_RECORDS)
    return compose_each(decision, random.sample(shortlist(decision, None), count))


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("int4_g128 x bf16", "sim:h200"),
        ("int4 x int8", "sim:h200"),
        ("fp8 x fp8", "sim:h200"),
        ("uint4_g64_zp x int8_asym", "sim:a100"),
        ("int8 x int8_tensor", "sim:t4"),
        ("fp8_block128 x fp8_g128", "sim:h200"),
        ("uint4 x fp16", "sim:t4"),
    ],
)
def test_kernels_that_are_right_pass(text: str, device: str) -> None:
    print(f"torch.manual_seed({torch.seed()})")
    problem = GemmProblem.parse(text, 72, 264)
    measurer = CardMeasurer(problem, plugins.capabilities(device), -1)
    plans = plans_of(problem, device, (1, 8), 3)
    print([f"{plan.lowering.name}; {plan.tile}" for plan in plans])
    assert measurer.load(plans) == ["", "", ""]
    assert [measurer.check(place, 3) for place in range(3)] == ["", "", ""]


@pytest.mark.parametrize("wrong", ["nothing written", "one output", "other scale"])
def test_a_kernel_that_is_wrong_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"torch.manual_seed({torch.seed()})")
    launch = Kernel.launch

    def faulty(self, x, operands, out, stream, tokens=None):
        if wrong == "nothing written":
            return
        launch(self, x, operands, out, stream, tokens)
        if wrong == "one output":
            out[-1, -1] += 1
        else:
            out *= 1.1

    monkeypatch.setattr(Kernel, "launch", faulty)
    problem = GemmProblem.parse("int4_g128 x bf16", 64, 128)
    measurer = CardMeasurer(problem, plugins.capabilities("sim:a100"), -1)
    measurer.load(plans_of(problem, "sim:a100", (1, 8), 1))
    told = measurer.check(0, 5)
    assert "of 320 outputs compared at m = 5 lie beyond their bounds" in told
    assert told.startswith("1 of") is (wrong == "one output")


def test_of_many_tokens_the_last_is_always_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Kernel.launch

    def faulty(self, x, operands, out, stream, tokens=None):
        launch(self, x, operands, out, stream, tokens)
        out[-1] += 1

    monkeypatch.setattr(Kernel, "launch", faulty)
    monkeypatch.setattr("humming.measurer._COMPARED_TOKENS", 2)
    problem = GemmProblem.parse("int4_g128 x bf16", 64, 128)
    measurer = CardMeasurer(problem, plugins.capabilities("sim:a100"), -1)
    measurer.load(plans_of(problem, "sim:a100", (33, 64), 1))
    assert measurer.check(0, 41).startswith("64 of 128 outputs compared at m = 41")


def test_a_kernel_that_cannot_be_compiled_does_not_cost_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from humming import compiler, measurer

    compiled = compiler.compile_plan

    def refusing(plan: KernelPlan, **kwargs: object) -> object:
        if plan is plans[1]:
            raise CompileError("too much", log="line 1\nline 2")
        return compiled(plan, **kwargs)

    monkeypatch.setattr(compiler, "compile_plan", refusing)
    monkeypatch.setattr(measurer, "compile_plan", refusing)
    problem = GemmProblem.parse("int4_g128 x bf16", 64, 128)
    plans = plans_of(problem, "sim:a100", (1, 8), 3)
    found = CardMeasurer(problem, plugins.capabilities("sim:a100"), -1)
    assert found.load(plans) == ["", "too much", ""]
    assert found.check(2, 1) == ""


def test_graphs_are_recorded_once_and_rotate_through_the_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from humming import measurer

    problem = GemmProblem.parse("int4_g128 x bf16", 64, 128)
    found = CardMeasurer(problem, plugins.capabilities("sim:a100"), -1)
    weights = found._weights
    monkeypatch.setattr(
        found, "_weights", replace(weights, copies=[measurer._clone(weights.copies[0])] * 3)
    )
    recorded, launched, replayed = [], [], []
    launch = Kernel.launch

    def launching(self, x, operands, out, stream, tokens=None):
        launched.append(self.plan)
        launch(self, x, operands, out, stream, tokens)

    def capturing(call, calls):
        recorded.append(calls)
        call(calls - 1)
        return len(recorded)

    def timing(graphs, calls, replays):
        replayed.append((list(graphs.values()), calls, replays))
        return {place: 1.0 + place for place in graphs}

    monkeypatch.setattr(Kernel, "launch", launching)
    monkeypatch.setattr(measurer, "capture", capturing)
    monkeypatch.setattr(measurer, "time_graphs", timing)
    plans = plans_of(problem, "sim:a100", (1, 8), 3)
    found.load(plans)
    assert found.time([0, 2], 2, 5) == [1.0, 3.0]
    assert found.time([2], 2, 7) == [3.0]
    (calls,) = set(recorded)
    assert 3 <= calls <= measurer.CALLS
    assert launched == [plans[0], plans[2]]
    assert replayed == [([1, 2], calls, 5), ([2], calls, 7)]
    found.load(plans[:1])
    assert found.time([0], 2, 1) == [1.0]
    assert len(recorded) == 3, "graphs of other kernels are forgotten"
