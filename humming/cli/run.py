"""`humming run`: quantize, pack, plan, compile and multiply real or random matrices."""

import secrets
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from humming.cli.exits import CHECK_FAILED, status_of_all
from humming.cli.options import DEFAULT_DEVICE, AllowUndocumented, AsJson
from humming.cli.output import Output, print_table, seconds
from humming.cli.weights import MatrixSource, file_matrices, random_matrix
from humming.errors import HummingError, UnsupportedError

if TYPE_CHECKING:
    from rich.console import Console

    from humming.cli.execution import Outcome, Target


def run(
    matrices: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE::TENSOR", help="Tensors of safetensors files, or globs."),
    ] = None,
    random: Annotated[
        str | None, typer.Option(metavar="NxK", help="A random matrix instead of a tensor.")
    ] = None,
    weight: Annotated[str, typer.Option(metavar="FORMAT", help="Of the weights.")] = "int4_g128",
    activation: Annotated[str, typer.Option(metavar="FORMAT", help="Of the activations.")] = "fp16",
    m: Annotated[int, typer.Option("-m", min=0, max=1 << 24, help="Tokens.")] = 16,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"A row, or sim:ROW to simulate it on the CPU; {DEFAULT_DEVICE}.",
        ),
    ] = None,
    bias: Annotated[bool, typer.Option("--bias", help="Add a random bias.")] = False,
    out_dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="fp16, bf16 or fp32.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**62, help="Of all random values; by default a fresh one."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with a float64 reference; status 1 unless ok.")
    ] = False,
    allow_undocumented: AllowUndocumented = False,
    as_json: AsJson = False,
) -> None:
    """Quantize, pack, plan, compile and multiply, for each matrix.

    Without an accelerator the kernel runs in the simulator. The kernel of a named device that is
    not present is compiled but does not run: the packed weights are multiplied by reference
    arithmetic on the CPU. The output says what ran where.
    """
    from humming.cli.execution import Job, Outcome, choose_target
    from humming.problem import GemmProblem

    seed = secrets.randbits(31) if seed is None else seed
    sources, notes = _sources(matrices, random, seed)
    overrides: dict[str, Any] = {"bias": bias, "allow_undocumented": allow_undocumented}
    if out_dtype is not None:
        overrides["out_dtype"] = out_dtype

    def describe(n: int, k: int) -> GemmProblem:
        return GemmProblem.parse(f"{weight} x {activation}", n, k, **overrides)

    # The names are checked before anything is looked for or loaded.
    name = describe(*sources[0].shape).name
    job = Job(choose_target(device), describe, m, seed, check)
    out = Output(as_json)
    outcomes: list[Outcome] = []
    failures: dict[str, HummingError] = {}
    with out.progress("run", len(sources) * len(Job.STEPS)) as step:
        for source in sources:
            try:
                outcomes.append(job.do(source, step))
            except HummingError as error:
                if len(sources) == 1:
                    raise
                # One matrix that cannot be done must not cost what the others came to.
                failures[source.name] = error
    checks = [outcome.check for outcome in outcomes if outcome.check]
    passed = all(found.passed for found in checks)
    if check and m == 0:
        notes.append("there was nothing to check: products of no tokens have no outputs")
    payload = {
        "problem": name,
        "device": job.target.caps.name,
        "executed_on": job.target.executed_on,
        "kernel_executed": job.target.kernel_runs,
        "seed": seed,
        "notes": notes,
        "results": [outcome.to_dict() for outcome in outcomes],
        "failed": [
            {"name": failed, "type": type(error).__name__, "message": str(error)}
            for failed, error in failures.items()
        ],
        "passed": passed and not failures if checks or (check and failures) else None,
    }

    def render(console: "Console") -> None:
        if len(sources) == 1:
            _render_one(console, outcomes[0], seed)
        elif outcomes:
            _render_many(console, outcomes, seed)
        for failed, error in failures.items():
            console.print(f"{failed}: FAILED: {error}")
        for note in notes:
            console.print(f"note: {note}")
        if outcomes:
            console.print(f"executed on: {_execution(job.target, outcomes)}")

    out.emit(payload, render)
    if failures:
        raise typer.Exit(status_of_all(failures.values()))
    if not passed:
        raise typer.Exit(CHECK_FAILED)


def _sources(
    matrices: list[str] | None, random: str | None, seed: int
) -> tuple[list[MatrixSource], list[str]]:
    if bool(matrices) == (random is not None):
        raise UnsupportedError(
            "run",
            "it takes either tensors of files or a random matrix",
            "Give FILE.safetensors::TENSOR, or --random NxK.",
        )
    return file_matrices(matrices) if matrices else ([random_matrix(random or "", seed)], [])


def _execution(target: "Target", outcomes: "list[Outcome]") -> str:
    if target.kernel_runs:
        return target.executed_on
    size = sum(outcome.kernel_bytes for outcome in outcomes)
    cached = all(outcome.kernel_cached for outcome in outcomes)
    took = "cached" if cached else seconds(sum(outcome.kernel_seconds for outcome in outcomes))
    kernel = "kernel was" if len(outcomes) == 1 else "kernels were"
    return (
        f"{target.executed_on}; the {target.caps.name} {kernel} compiled "
        f"({size} bytes, {took}) but not executed"
    )


def _render_one(console: "Console", outcome: "Outcome", seed: int) -> None:
    console.print(f"{outcome.name}: {outcome.problem}, m={outcome.m}, seed {seed}")
    problem = outcome.problem
    told = {
        "quantize": f"{problem.weight.bits_per_weight(problem.n, problem.k):.2f} bits per weight",
        "plan": f"{outcome.lowering}; tile {outcome.tile}",
        "compile": f"{outcome.kernel_bytes} bytes by {outcome.kernel_compiler}"
        f"{', cached' if outcome.kernel_cached else ''}",
    }
    for step, took in outcome.steps.items():
        console.print(f"  {step:<9}{seconds(took):>9}  {told.get(step, '')}".rstrip())
    if check := outcome.check:
        why = f"{check.no_verdict}; " if check.no_verdict else ""
        console.print(
            f"check: {check.verdict}: {why}relative error {check.relative_error:.3e}, "
            f"bound {check.relative_bound:.3e}; worst output at {check.worst:.2f} of its bound"
        )


def _render_many(console: "Console", outcomes: "list[Outcome]", seed: int) -> None:
    cells = []
    for outcome in outcomes:
        check = outcome.check
        checked = (
            (
                f"{check.relative_error:.3e}",
                f"{check.relative_bound:.3e}",
                f"{check.worst:.2f}",
                check.verdict,
            )
            if check
            else (None, None, None, "not checked")
        )
        size = f"{outcome.problem.n}x{outcome.problem.k}"
        total = seconds(sum(outcome.steps.values()))
        cells.append((outcome.name, size, total, seconds(outcome.steps["run"]), *checked))
    columns = ("matrix", "N x K", "all steps", "run", "relative error", "bound", "worst", "check")
    title = f"{outcomes[0].problem.name}, m={outcomes[0].m}, seed {seed}"
    print_table(console, title, columns, cells)
    checks = [(outcome.name, outcome.check) for outcome in outcomes if outcome.check]
    for name, check in checks:
        if check.no_verdict:
            console.print(f"{name}: no verdict: {check.no_verdict}")
    verdicts = Counter(check.verdict for _, check in checks)
    if checks:
        others = [f"{count} {verdict}" for verdict, count in verdicts.items() if verdict != "ok"]
        console.print(f"check: {', '.join(others) or 'all ok'} of {len(checks)} matrices")
