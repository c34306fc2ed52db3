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
from humming.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from rich.console import Console

    from humming.checkpoints.checkpoint import Checkpoint
    from humming.checkpoints.packed_reader import PackedFile

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
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Tell what multiplies each on this device, and how fast; reads."
        ),
    ] = None,
    m: Annotated[int, typer.Option("-m", min=1, help="Tokens of the products of --device.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Show how a checkpoint is quantized and what becomes of each of its modules."""
    from humming.checkpoints.checkpoint import Checkpoint
    from humming.checkpoints.packed_reader import PackedFile

    products = None if device is None else Products(device, m)
    if PackedFile.recognizes(path):
        _inspect_packed(PackedFile(path), module, products, Output(as_json))
        return
    checkpoint = Checkpoint.open(path)
    rows = [_decided(checkpoint, name) for name in _asked(checkpoint, module)]
    output = Output(as_json)
    failed = False
    if (read or products) and checkpoint.tensors is not None:
        with output.progress("reading", len(rows)) as step:
            for row in rows:
                step(row["module"])
                failed |= not _read(checkpoint, row, products)
    payload = {
        "path": str(path),
        "device": products and products.device,
        "configuration": checkpoint.where or None,
        "method": None if checkpoint.method is None else checkpoint.method.name,
        "notes": [*checkpoint.notes, *_without_sizes(checkpoint, products)],
        "modules": rows,
    }
    output.emit(payload, lambda console: _draw(console, payload, bool(module)))
    if failed:
        raise typer.Exit(CHECK_FAILED)


class Products:
    """What multiplies layers on a device.

    Args:
        device: the name of a row.
        m: tokens.

    Raises:
        UnsupportedError: there is no such device.
    """

    def __init__(self, device: str, m: int) -> None:
        from humming import plugins

        self.device, self._m = plugins.capabilities(device).name, m
        self._found: dict[tuple[Any, ...], dict[str, Any]] = {}

    def of(self, weight: str, activation: str | None, n: int, k: int, bias: bool) -> dict[str, Any]:
        """The instruction and the estimate of a layer, or why there is none."""
        key = weight, activation, n, k, bias
        if key not in self._found:
            self._found[key] = self._plan(*key)
        return self._found[key]

    def _plan(
        self, weight: str, activation: str | None, n: int, k: int, bias: bool
    ) -> dict[str, Any]:
        from humming.composer import plan
        from humming.problem import GemmProblem

        refusals = []
        # 16-bit activations are those of the model; devices without bfloat16 take the other.
        for name in (activation,) if activation else ("bf16", "fp16"):
            problem = GemmProblem.parse(f"{weight} x {name}", n, k, bias=bias)
            try:
                found = plan(problem, self.device, m=self._m)
            except UnsupportedError as error:
                refusals.append(str(error))
                continue
            made = found.estimate
            return {
                "runs": f"{name}: {found.lowering.name}",
                "m": self._m,
                "us": made.total_us,
                "bound": made.bound,
            }
        return {"runs": None, "m": self._m, "us": None, "bound": None, "refusal": refusals[0]}


def _without_sizes(checkpoint: "Checkpoint", products: Products | None) -> tuple[str, ...]:
    if products is None or checkpoint.tensors is not None:
        return ()
    return (
        "what multiplies layers depends on their sizes, which are those of tensors; there are "
        f"none here. `humming explain WEIGHT --device {products.device} -n N -k K` tells it",
    )


def _asked(checkpoint: "Checkpoint", globs: Sequence[str] | None) -> Iterable[str]:
    """The modules that the globs take, or all; a name that no tensor has stands for itself."""
    return _matching(checkpoint.modules(), globs, str(checkpoint.path))


def _matching(known: Sequence[str], globs: Sequence[str] | None, where: str) -> Iterable[str]:
    if not globs:
        return known
    found: dict[str, None] = {}
    for glob in globs:
        taken = [name for name in known if fnmatchcase(name, glob)]
        # Configurations have rules for names of which there are no tensors here.
        if known and not taken and any(sign in glob for sign in "*?["):
            raise CheckpointError(
                f"{where}: no module is called {glob!r}; possible: {', '.join(known[:3])}, ..."
            )
        found |= dict.fromkeys(taken or [glob])
    return found


def _inspect_packed(
    file: "PackedFile", globs: Sequence[str] | None, products: Products | None, output: Output
) -> None:
    """Show the layers of a file of packed weights."""
    rows = []
    for name in _matching(tuple(file.layers), globs, str(file.path)):
        if name not in file.layers:
            raise CheckpointError(
                f"{file.path} has no layer {name!r}; possible: {', '.join([*file.layers][:3])}, ..."
            )
        told = file.described(name)
        n, k, size = int(told["n"]), int(told["k"]), file.stored_bytes(name)
        row = {
            "module": name,
            "action": "packed",
            "weight": told["weight"],
            "activation": told.get("activation"),
            "shape": [n, k],
            "bytes": size,
            "bits_per_weight": 8 * size / (n * k),
            "why": f"for operands of {told['operand_bits']} bits",
        }
        if products is not None:
            bias = "bias" in told["parts"].split()
            row |= products.of(row["weight"], row["activation"], n, k, bias)
        rows.append(row)
    payload = {
        "path": str(file.path),
        "device": products and products.device,
        "configuration": None,
        "method": "packed weights",
        "notes": [f"{len(file.tensors)} other tensors are in the file"],
        "modules": rows,
    }
    output.emit(payload, lambda console: _draw(console, payload, bool(globs)))


def _decided(checkpoint: "Checkpoint", module: str) -> dict[str, Any]:
    decision = checkpoint.decide(module)
    return {
        "module": module,
        "action": decision.action,
        "weight": decision.weight and decision.weight.name,
        "activation": decision.activation and decision.activation.name,
        "why": decision.why,
    }


def _read(checkpoint: "Checkpoint", row: dict[str, Any], products: Products | None) -> bool:
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
    row["bytes"] = weight.nbytes
    row["bits_per_weight"] = 8 * weight.nbytes / (weight.shape[0] * weight.shape[1])
    row["reordered"] = quantized and linear.input_permutation is not None
    row["notes"] = list(checkpoint.notes_of(linear))
    if products is not None and isinstance(weight, QuantizedWeight):
        activation = None if linear.activation is None else linear.activation.name
        row |= products.of(weight.spec.name, activation, *weight.shape, linear.bias is not None)
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
    if payload["device"]:
        _draw_products(console, payload["device"], rows)
    told = [(row["module"], note) for row in rows for note in row.get("notes", ())]
    told += [
        (row["module"], row[key]) for key in ("error", "refusal") for row in rows if key in row
    ]
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


def _draw_products(console: "Console", device: str, rows: Sequence[dict[str, Any]]) -> None:
    """One line for all modules of the same size that run in the same way."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if "runs" in row:
            n, k = row["shape"]
            weight = row.get("read") or row["weight"]
            groups[weight, f"{n}x{k}", row["runs"], row["us"], row["bound"]].append(row)
    lines = [
        [
            *(len(found), weight, size, sum(row["bytes"] for row in found), runs or "no kernel"),
            *("unknown" if us is None else f"{us:.1f}", bound, found[0]["module"]),
        ]
        for (weight, size, runs, us, bound), found in groups.items()
    ]
    m = next((row["m"] for row in rows if "m" in row), 1)
    titles = ["layers", "weight", "N x K", "bytes", "activations: instruction", "us", "bound by"]
    print_table(console, f"on {device}, {m} tokens, estimated", [*titles, "the first"], lines)
