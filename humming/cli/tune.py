"""`humming tune`: measures on the present card which kernels are the fastest, and records them."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from humming.cli.exits import CHECK_FAILED, INTERRUPTED, status_of_all
from humming.cli.options import (
    AllowUndocumented,
    AsJson,
    BatchInvariant,
    Fp16Accumulation,
    Model,
    ProblemName,
    Shapes,
)
from humming.cli.output import Output, print_table
from humming.cli.shapes import parse_tokens, wanted_shapes
from humming.errors import HummingError, UnsupportedError, WrongResultError

if TYPE_CHECKING:
    from rich.console import Console

    from humming.capability import DeviceCapabilities
    from humming.problem import GemmProblem
    from humming.tuner import Budget, Effort, TunedRange


def tune_kernels(
    problem: ProblemName,
    n: Annotated[int | None, typer.Option("-n", "--n", help="Out features.")] = None,
    k: Annotated[int | None, typer.Option("-k", "--k", help="In features.")] = None,
    shapes: Shapes = None,
    model: Model = None,
    m: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--m",
            metavar="M,...",
            help="Tokens that count; by default one, and the most of each range.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The row of a present card; by default the first one."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The record to write; by default the user's own."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="For everything, shared out among the ranges of M.")
    ] = None,
    candidates: Annotated[
        int | None, typer.Option(min=1, help="Kernels to measure of each range of M (24).")
    ] = None,
    all_tiles: Annotated[
        bool, typer.Option("--all-tiles", help="Measure every tile of every lowering.")
    ] = False,
    batch_invariant: BatchInvariant = False,
    fp16_accumulation: Fp16Accumulation = False,
    allow_undocumented: AllowUndocumented = False,
    as_json: AsJson = False,
) -> None:
    """Measure which kernels are the fastest on the present card, and record them.

    Each is held to the reference first. Ctrl-C keeps what was measured.
    """
    from humming import tuned
    from humming.problem import GemmProblem
    from humming.tuner import CANDIDATES, TOKENS, Effort

    wanted, notes = wanted_shapes("tune", n, k, shapes, model)
    if all_tiles and candidates is not None:
        raise UnsupportedError(
            f"tune with --all-tiles and --candidates {candidates}",
            "the one measures everything, the other so many kernels",
            "Give one of them.",
        )
    demands = {
        "batch_invariant": batch_invariant,
        "fp16_accumulation": fp16_accumulation,
        "allow_undocumented": allow_undocumented,
    }
    problems = [GemmProblem.parse(problem, shape.n, shape.k, **demands) for shape in wanted]
    tokens = TOKENS if m is None else parse_tokens("tune", m)
    effort = Effort(None if all_tiles else candidates or CANDIDATES, seconds)
    caps, index = _card(device)
    record = output or tuned.user_record(caps.name)
    tuned.kept_entries(record, caps.name)  # refuses a file that could not be written in the end
    job = _Job(caps, index, problems, tokens, effort, record)
    out = Output(as_json)
    with out.progress("tune", job.ranges) as step:
        job.run(step)
    notes += _notes(job)
    payload = {
        "device": caps.name,
        **job.circumstances,
        "record": str(record),
        "notes": notes,
        "interrupted": job.interrupted,
        "ranges": [_described(found) for found in job.found],
        "failed": [
            {"name": name, "type": type(error).__name__, "message": str(error)}
            for name, error in job.failures.items()
        ],
    }
    out.emit(payload, lambda console: _render(console, job, notes))
    if job.interrupted:
        raise typer.Exit(INTERRUPTED)
    if any(found.wrong for found in job.found):
        raise typer.Exit(CHECK_FAILED)
    if job.failures:
        raise typer.Exit(status_of_all(job.failures.values()))


class _Job:
    """Several problems on one card, and what became of them.

    Attributes:
        found: the ranges that were tuned; each is in the record as soon as it is here.
        failures: the error of each problem that could not be tuned, by its size, or of a range of
            one by size and tokens.
        interrupted: whether someone pressed Ctrl-C.
    """

    def __init__(
        self,
        caps: "DeviceCapabilities",
        index: int,
        problems: "list[GemmProblem]",
        tokens: tuple[int, ...],
        effort: "Effort",
        record: Path,
    ) -> None:
        from humming import timing
        from humming.tuner import ranges_of

        self.caps, self._index, self.problems = caps, index, problems
        self._tokens, self._effort, self.record = tokens, effort, record
        self.circumstances = timing.circumstances(caps, index)
        self.ranges = sum(len(ranges_of(problem, tokens)) for problem in problems)
        self.found: list[TunedRange] = []
        self.failures: dict[str, HummingError] = {}
        self.interrupted = False

    def run(self, step: Any) -> None:
        """Tune, record after each range, stop where someone interrupts."""
        from humming.tuner import Budget

        budget = Budget(self._effort, self.ranges)
        try:
            for problem in self.problems:
                self._tune(problem, budget, step)
        except KeyboardInterrupt:
            self.interrupted = True

    def _tune(self, problem: "GemmProblem", budget: "Budget", step: Any) -> None:
        from humming import measurer, tuned
        from humming.tuner import ranges_of, tune

        name = f"{problem.n}x{problem.k}"
        left = list(ranges_of(problem, self._tokens).values())
        try:
            on_card = measurer.CardMeasurer(problem, self.caps, self._index)
            while left:
                tokens = left.pop(0)
                try:
                    for found in tune(
                        problem, self.caps, tokens, on_card, self._effort, budget, step
                    ):
                        entry = found.entry(self.circumstances)
                        tuned.merge_record(self.record, self.caps.name, [entry])
                        self.found.append(found)
                except WrongResultError as error:
                    # Other ranges have other kernels.
                    self._failed(f"{name} m={','.join(map(str, tokens))}", error)
        except HummingError as error:
            self._failed(name, error)
            budget.skip(len(left))

    def _failed(self, name: str, error: HummingError) -> None:
        """What cannot be tuned must not cost what the others came to, where there are others."""
        alone = len(self.problems) == 1 and not (self.found or self.failures)
        if self.ranges == 1 or (alone and not isinstance(error, WrongResultError)):
            raise error
        self.failures[name] = error


def _card(device: str | None) -> "tuple[DeviceCapabilities, int]":
    """The card to measure on, and its index."""
    from humming.cli.execution import choose_target

    target = choose_target(device)
    if target.on_accelerator:
        return target.caps, int(target.torch_device.partition(":")[2])
    why = "its kernels would run in the simulator, whose times say nothing of a card's"
    if not target.kernel_runs:
        why = target.why_not
    elif device is None:
        why = f"no accelerator is present: {why}"
    raise UnsupportedError(
        f"tune for {target.caps.name}",
        why,
        "Run it where the card is, and copy the record or name it in HUMMING_RECORDS; "
        "`humming explain` shows what the cost model chooses.",
    )


def _notes(job: _Job) -> Iterator[str]:
    from humming import env, tuned

    left_out = job.ranges - len(job.found)
    if left_out and not job.failures:
        why = "interrupted" if job.interrupted else "out of time"
        yield f"{left_out} of {job.ranges} ranges of M left out: {why}"
    rough = sum(not found.complete for found in job.found)
    if rough:
        yield f"{rough} ranges were measured roughly, for lack of time; give more --seconds"
    if env.records() is None:
        yield "HUMMING_RECORDS=off: nothing here heeds records"
        return
    known = tuned.records_for(job.caps.name)
    heeded = [known.of(found.problem).get(found.m_range) for found in job.found]
    before = {first.path for first in heeded if first} - {job.record.absolute()}
    yield from (f"{path} goes before it" for path in sorted(before))
    if None in heeded:
        yield f"to use it, set HUMMING_RECORDS={job.record}"


def _described(found: "TunedRange") -> dict[str, Any]:
    return {
        "problem": found.problem.name,
        "n": found.problem.n,
        "k": found.problem.k,
        "m_range": list(found.m_range),
        "m": list(found.chosen.us),
        "chosen": found.chosen.to_dict(),
        "model": found.model.to_dict() if found.model else None,
        "gain": found.gain,
        "timed": [timed.to_dict() for timed in found.timed],
        "wrong": [kernel._asdict() for kernel in found.wrong],
        "failed": [kernel._asdict() for kernel in found.failed],
        "complete": found.complete,
    }


def _render(console: "Console", job: _Job, notes: list[str]) -> None:
    cells = [
        (
            f"{found.problem.n}x{found.problem.k}",
            ", ".join(map(str, found.chosen.us)),
            f"{found.chosen.option.lowering.name}; {found.chosen.option.tile}",
            _times(found.chosen.us),
            "the same" if found.chosen is found.model else _other(found),
            _times(found.model.us) if found.model else None,
            f"{found.gain:.2f}x" if found.gain else None,
            len(found.timed),
        )
        for found in job.found
    ]
    columns = ("N x K", "M", "chosen", "us", "cost model's choice", "its us", "gain", "timed")
    title = f"{job.problems[0].name} on {job.circumstances['card']}"
    if cells:
        print_table(console, title, columns, cells)
    for found in job.found:
        size = f"{found.problem.n}x{found.problem.k}, m = {', '.join(map(str, found.chosen.us))}"
        for kernel in found.wrong:
            console.print(f"WRONG: {size}: {kernel.what}: {kernel.reason}; please report it")
        for kernel in found.failed:
            console.print(f"not made: {size}: {kernel.what}: {kernel.reason}")
    for name, error in job.failures.items():
        console.print(f"{name}: FAILED: {error}")
    for note in notes:
        console.print(f"note: {note}")
    if job.found:
        console.print(f"recorded in {job.record}")


def _times(us: Any) -> str:
    return ", ".join(f"{time:.2f}" for time in us.values())


def _other(found: "TunedRange") -> str:
    if found.model is None:
        return "wrong or not made"
    option, chosen = found.model.option, found.chosen.option
    same = option.lowering.name == chosen.lowering.name
    return str(option.tile) if same else f"{option.lowering.name}; {option.tile}"
