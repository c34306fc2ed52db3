"""`humming inspect`: what a quantized checkpoint is, module by module."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from humming.cli.exits import CHECK_FAILED
from humming.cli.options import AsJson
from humming.cli.output import Output, print_table
from humming.errors import CheckpointError

if TYPE_CHECKING:
    from rich.console import Console

    from humming.checkpoints.checkpoint import Checkpoint

_SHOWN_NOTES = 20


def inspect_checkpoint(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A folder, a safetensors, GGUF or JSON file."),
    ],
    module: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Only these modules, each on a line of its own."),
    ] = None,
    read: Annotated[
        bool, typer.Option("--read", help="Read the tensors too; status 1 if any cannot be.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show how a checkpoint is quantized and what becomes of each of its modules."""
    from humming.checkpoints.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(path)
    rows = [_decided(checkpoint, name) for name in _asked(checkpoint, module)]
    output = Output(as_json)
    failed = False
    if read:
        with output.progress("reading", len(rows)) as step:
            for row in rows:
                step(row["module"])
                failed |= not _read(checkpoint, row)
    payload = {
        "path": str(path),
        "configuration": checkpoint.where or None,
        "method": None if checkpoint.method is None else checkpoint.method.name,
        "notes": list(checkpoint.notes),
        "modules": rows,
    }
    output.emit(payload, lambda console: _draw(console, payload, bool(module)))
    if failed:
        raise typer.Exit(CHECK_FAILED)


def _asked(checkpoint: "Checkpoint", globs: Sequence[str] | None) -> Iterable[str]:
    """The modules that the globs take, or all; a name that no tensor has stands for itself."""
    known = checkpoint.modules()
    if not globs:
        return known
    found: dict[str, None] = {}
    for glob in globs:
        taken = [name for name in known if fnmatchcase(name, glob)]
        found |= dict.fromkeys(taken or [glob])
    return found


def _decided(checkpoint: "Checkpoint", module: str) -> dict[str, Any]:
    decision = checkpoint.decide(module)
    return {
        "module": module,
        "action": decision.action,
        "weight": decision.weight and decision.weight.name,
        "activation": decision.activation and decision.activation.name,
        "why": decision.why,
    }


def _read(checkpoint: "Checkpoint", row: dict[str, Any]) -> bool:
    """Adds what the tensors of a module say; returns whether they can be read."""
    from humming.quantized import QuantizedWeight

    try:
        linear = checkpoint.read(row["module"])
    except CheckpointError as error:
        row["error"] = str(error)
        return False
    weight = linear.weight
    quantized = isinstance(weight, QuantizedWeight)
    row["read"] = weight.spec.name if isinstance(weight, QuantizedWeight) else str(weight.dtype)
    row["shape"] = list(weight.shape)
    row["bits_per_weight"] = 8 * weight.nbytes / (weight.shape[0] * weight.shape[1])
    row["reordered"] = quantized and linear.input_permutation is not None
    row["notes"] = [note for note in linear.notes if note not in checkpoint.notes]
    return True


def _draw(console: "Console", payload: dict[str, Any], each: bool) -> None:
    console.print(f"{payload['path']}: {payload['method'] or 'no quantization method'}")
    if payload["configuration"]:
        console.print(f"configuration: {payload['configuration']}")
    for note in payload["notes"]:
        console.print(f"note: {note}")
    rows = payload["modules"]
    if not rows:
        console.print("It holds no tensors; --module NAME tells what becomes of a module.")
        return
    if each:
        columns = ["module", "action", "weight", "activation", "read", "why"]
        print_table(console, "", columns, [[row.get(key) for key in columns] for row in rows])
    else:
        _draw_groups(console, rows)
    told = [(row["module"], note) for row in rows for note in row.get("notes", ())]
    told += [(row["module"], row["error"]) for row in rows if "error" in row]
    for name, text in told[:_SHOWN_NOTES]:
        console.print(f"{name}: {text}")
    if len(told) > _SHOWN_NOTES:
        console.print(f"... and {len(told) - _SHOWN_NOTES} more; --json has all of them.")


def _draw_groups(console: "Console", rows: Sequence[dict[str, Any]]) -> None:
    """One line for all modules that are treated alike for one reason."""
    keys = ("action", "weight", "activation", "read", "why")
    groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for row in rows:
        groups[tuple(row.get(key) for key in keys)].append(row["module"])
    lines = [[len(names), *group, names[0]] for group, names in groups.items()]
    lines.sort(key=lambda line: -line[0])
    print_table(console, "", ["modules", *keys, "the first"], lines)
