"""`humming compile`: kernels ahead of time, for any device of the matrix, without having it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from humming.cli.options import AllowUndocumented, AsJson, Model, ProblemName, Shapes
from humming.cli.output import Output, print_table, seconds
from humming.cli.shapes import parse_tokens, wanted_shapes
from humming.errors import UnsupportedError

if TYPE_CHECKING:
    from rich.console import Console


def compile_kernels(
    problem: ProblemName,
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            metavar="NAME",
            help="A row, once or several times; by default the present accelerator.",
        ),
    ] = None,
    n: Annotated[int | None, typer.Option("-n", help="Out features.")] = None,
    k: Annotated[int | None, typer.Option("-k", help="In features.")] = None,
    shapes: Shapes = None,
    model: Model = None,
    m: Annotated[
        list[str] | None,
        typer.Option("-m", metavar="M,...", help="Tokens to be ready for; by default any."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Fill this folder, not the cache; HUMMING_CACHE_DIR=DIR."),
    ] = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove other kernels from the --output, not records.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Compilations at a time; by default every processor.")
    ] = None,
    bias: Annotated[bool, typer.Option("--bias", help="Layers that add a bias.")] = False,
    allow_undocumented: AllowUndocumented = False,
    as_json: AsJson = False,
) -> None:
    """Compile the kernels of a problem into the cache or a folder."""
    from humming import compiler, plugins
    from humming.cache import KernelCache
    from humming.problem import GemmProblem

    if clean and output is None:
        raise UnsupportedError(
            "compile --clean",
            "the cache holds the kernels of everything that this user runs",
            "Name a folder with --output.",
        )
    if output is not None and output.exists() and not output.is_dir():
        raise UnsupportedError(
            f"compile into {output}", "it is no folder", "Name one; it is made if it is absent."
        )
    tokens = [number for text in m or () for number in parse_tokens("compile", text)]
    wanted, notes = wanted_shapes("compile", n, k, shapes, model)
    targets = [plugins.capabilities(name) for name in device or _present()]
    out = Output(as_json)
    rows: list[dict[str, Any]] = []
    with out.progress("compile", len(targets) * len(wanted)) as step:
        for caps in targets:
            for shape in wanted:
                step(f"{shape.n}x{shape.k} for {caps.name}")
                layer = GemmProblem.parse(
                    problem, shape.n, shape.k, bias=bias, allow_undocumented=allow_undocumented
                )
                made = compiler.compile(layer, caps, m=tokens or None, directory=output, jobs=jobs)
                rows += [
                    {
                        "device": caps.name,
                        "name": shape.name,
                        "n": shape.n,
                        "k": shape.k,
                        "key": kernel.key,
                        "compiler": kernel.compiler,
                        "bytes": len(kernel.image.data),
                        "seconds": kernel.seconds,
                        "from_cache": kernel.from_cache,
                    }
                    for kernel in made
                ]
    # What was compiled but not kept would be compiled again where it is needed.
    kept = KernelCache(output)
    lost = sum(kept.load(row["key"]) is None for row in rows)
    if lost:
        raise UnsupportedError(
            f"compile into {kept.directory}",
            f"{lost} of {len(rows)} kernels were compiled but could not be kept there",
            "Give a folder that can be written, and leave HUMMING_DISABLE_CACHE unset.",
        )
    others = kept.others(row["key"] for row in rows) if output else []
    if others and clean:
        for path in others:
            path.unlink(missing_ok=True)
        notes.append(f"{len(others)} other kernels were removed")
    elif others:
        notes.append(f"{len(others)} other kernels were there before; --clean removes such")
    payload = {"problem": problem, "folder": str(kept.directory), "notes": notes, "kernels": rows}
    out.emit(payload, lambda console: _render(console, payload))


def _present() -> list[str]:
    """The row of the first accelerator; kernels for the simulator are nothing to prepare."""
    from humming import plugins

    rows = [found.row for found in plugins.devices() if found.row and found.index >= 0]
    if not rows:
        raise UnsupportedError(
            "compile without --device",
            "no accelerator is present",
            "Name one or several: --device h200 --device a100; `humming devices --all` lists them.",
        )
    return rows[:1]


def _render(console: "Console", payload: dict[str, Any]) -> None:
    layers: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for kernel in payload["kernels"]:
        key = (kernel["device"], f"{kernel['n']}x{kernel['k']}", kernel["name"])
        layers.setdefault(key, []).append(kernel)
    cells = [
        (
            *layer,
            len(kernels),
            sum(not kernel["from_cache"] for kernel in kernels),
            sum(kernel["bytes"] for kernel in kernels),
            seconds(sum(kernel["seconds"] for kernel in kernels)),
        )
        for layer, kernels in layers.items()
    ]
    columns = ("device", "N x K", "layers", "kernels", "compiled", "bytes", "time")
    print_table(console, payload["problem"], columns, cells)
    for note in payload["notes"]:
        console.print(f"note: {note}")
    distinct = len({kernel["key"] for kernel in payload["kernels"]})
    console.print(f"{distinct} distinct kernels in {payload['folder']}")
