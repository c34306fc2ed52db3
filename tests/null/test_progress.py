"""What is shown of work that takes long: when, where and how far it is."""

import io
import sys
from typing import Any

import pytest
import torch

import humming
from humming import progress
from humming.cli.output import Output


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Told:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def show(self, what: str, done: int, total: int) -> None:
        self.shown.append((what, done, total))

    def hide(self) -> None:
        self.shown.append("hidden")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nothing_is_shown_of_what_is_over_soon() -> None:
    clock, told = Clock(), Told()
    with progress.Watch("a kernel", told, clock) as watch:
        watch(0, 8)
        clock.now += 1.9
        watch(7, 8)
    assert told.shown == []


def test_what_takes_long_is_shown_until_it_ends() -> None:
    clock, told = Clock(), Told()

    def work() -> None:
        with progress.Watch("a kernel", told, clock) as watch:
            watch(0, 8)
            clock.now += 2
            watch(3, 8)
            clock.now += 0.01
            watch(4, 8)  # too soon after the last one
            clock.now += 0.5
            watch(5, 8)
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert told.shown == [("a kernel", 3, 8), ("a kernel", 5, 8), "hidden"]


def test_a_terminal_gets_one_line_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    with progress.watch("h200") as watch:
        watch(3, 8)
    assert terminal.getvalue() == "\r\x1b[Kh200: 3 of 8 (37 %)\r\x1b[K"


def test_a_pipe_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    with progress.watch("h200") as watch:
        watch(3, 8)
    assert pipe.getvalue() == ""


def product(m: int = 3) -> torch.Tensor:
    torch.manual_seed(1)
    weight = humming.quantize(torch.randn(48, 128), "int4_g64")
    return humming.matmul(torch.randn(m, 128).half(), humming.pack(weight), device="sim:a100")


def test_a_simulated_product_tells_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    monkeypatch.setattr(progress, "_REFRESH_S", 0.0)
    told = Told()
    with progress.listening(told):
        product(70)
    assert told.shown.pop() == "hidden"
    names, done, totals = zip(*told.shown, strict=True)
    assert set(names) == {"sim:a100_80gb, CTAs"}
    assert len(set(totals)) == 1
    assert list(done) == sorted(done)
    assert done[-1] == totals[0] >= 1


def test_python_on_a_terminal_shows_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    product()
    assert terminal.getvalue() == ""  # it was over soon
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    product()
    assert "sim:a100_80gb, CTAs: " in terminal.getvalue()


def test_a_command_draws_both_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own counts the steps that are over, and the kernel's stands below."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    with Output(as_json=False).progress("run", 2) as step:
        step("pack")
        step("run")
        with progress.watch("h200") as watch:
            watch(3, 8)
            bar = progress._listener.get()._bar  # type: ignore[union-attr]
            rows = [(t.description, t.completed, t.total) for t in bar.tasks]
            assert rows == [("run: run", 1, 2), ("h200", 3, 8)]
            bar.refresh()
        assert [t.description for t in bar.tasks] == ["run: run"]
    drawn = terminal.getvalue()
    assert "h200" in drawn
    assert "3/8" in drawn


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "pipe"])
def test_a_command_that_draws_nothing_shows_no_line_either(
    monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    stream = Terminal() if as_json else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    with Output(as_json).progress("run", 1) as step:
        step("run")
        with progress.watch("h200") as watch:
            watch(3, 8)
    assert stream.getvalue() == ""
