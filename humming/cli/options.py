"""Options that several commands share, each spelled and explained once."""

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_DEVICE = "by default the present accelerator, else the simulated device of HUMMING_SIMULATE"

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")
]
DeviceName = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help=f"A row; {DEFAULT_DEVICE}."),
]
ProblemName = Annotated[
    str,
    typer.Argument(metavar="PROBLEM", help="'WEIGHT x ACTIVATION' or shorthand: w4a16, w8a8 fp8."),
]
AllowUndocumented = Annotated[
    bool,
    typer.Option(
        "--allow-undocumented",
        help="Admit instructions that no vendor document names; the plan marks them.",
    ),
]
BatchInvariant = Annotated[
    bool,
    typer.Option("--batch-invariant", help="Results do not depend on the number of tokens."),
]
Fp16Accumulation = Annotated[
    bool, typer.Option("--fp16-accumulation", help="Sums in float16 are permitted.")
]
Shapes = Annotated[
    str | None, typer.Option(metavar="NxK,...", help="Several matrices instead of -n and -k.")
]
Model = Annotated[
    Path | None, typer.Option(help="The linear layers of a model: its folder or config.json.")
]
