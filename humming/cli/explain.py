"""`humming explain`: why a problem is computed the way it is on a device."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from humming.cli.options import (
    AllowUndocumented,
    AsJson,
    BatchInvariant,
    DeviceName,
    Fp16Accumulation,
    ProblemName,
)
from humming.cli.output import Output

if TYPE_CHECKING:
    from rich.console import Console


def explain(
    problem: ProblemName,
    device: DeviceName = None,
    n: Annotated[int, typer.Option("-n", help="Out features.")] = 8192,
    k: Annotated[int, typer.Option("-k", help="In features.")] = 8192,
    m: Annotated[int, typer.Option("-m", help="Tokens.")] = 16,
    records: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A tuned record, or a folder of them, to go first."),
    ] = None,
    batch_invariant: BatchInvariant = False,
    fp16_accumulation: Fp16Accumulation = False,
    allow_undocumented: AllowUndocumented = False,
    as_json: AsJson = False,
) -> None:
    """Show the choice for a problem on a device, its estimate, and every rejected lowering."""
    from humming import plugins, tuned
    from humming.composer import decide, m_range_of, m_ranges, unsupported
    from humming.problem import GemmProblem

    asked = GemmProblem.parse(
        problem,
        n,
        k,
        batch_invariant=batch_invariant,
        fp16_accumulation=fp16_accumulation,
        allow_undocumented=allow_undocumented,
    )
    caps = plugins.capabilities(device)
    known = tuned.records_for(caps.name, records)
    m_range = m_range_of(m, m_ranges(asked, caps, known))
    registry = plugins.registry()
    decision = decide(asked, caps, m_range, registry, m, known)
    payload = decision.to_dict()
    payload["possible"] = None if decision.chosen else unsupported(decision, registry).possible

    def render(console: "Console") -> None:
        console.print(decision.explain())
        if payload["possible"]:
            console.print(f"\nPossible\n  {payload['possible']}")

    Output(as_json).emit(payload, render)
