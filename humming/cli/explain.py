"""`humming explain`: why a problem is computed the way it is on a device."""

from typing import Annotated

import typer

from humming.cli.options import AllowUndocumented, AsJson, DeviceName, ProblemName
from humming.cli.output import Output


def explain(
    problem: ProblemName,
    device: DeviceName = None,
    n: Annotated[int, typer.Option("-n", help="Out features.")] = 8192,
    k: Annotated[int, typer.Option("-k", help="In features.")] = 8192,
    m: Annotated[int, typer.Option("-m", help="Tokens.")] = 16,
    allow_undocumented: AllowUndocumented = False,
    as_json: AsJson = False,
) -> None:
    """Show the choice for a problem on a device, its estimate, and every rejected lowering."""
    from humming import plugins
    from humming.composer import decide, m_range_of
    from humming.problem import GemmProblem

    asked = GemmProblem.parse(problem, n, k, allow_undocumented=allow_undocumented)
    caps = plugins.capabilities(device)
    decision = decide(asked, caps, m_range_of(m), plugins.registry(), m)
    Output(as_json).emit(decision.to_dict(), lambda console: console.print(decision.explain()))
