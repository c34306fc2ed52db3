"""`humming pack`: a quantized checkpoint as one file of packed weights."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from humming.cli.options import AsJson
from humming.cli.output import Output, print_table
from humming.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from rich.console import Console

    from humming.checkpoints.model import Model


def pack_checkpoint(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A folder, a safetensors or GGUF file.")
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="The *.safetensors file to write."),
    ],
    activation: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What layers quantize activations to, or bf16; by default what PATH wants.",
        ),
    ] = None,
    scale_dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Round scales to float16 or bfloat16."),
    ] = None,
    skip_refused: Annotated[
        bool, typer.Option("--skip-refused", help="Leave out modules that cannot be read.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Pack a checkpoint once, for every device: all its layers and other tensors in one file."""
    from humming.checkpoints.model import load_model

    model = load_model(path, activation=activation, scale_dtype=scale_dtype)
    _check_apart(path, output)
    if not model.layers and not model.skipped:
        raise UnsupportedError(
            f"packing {path}",
            "no layer of it is quantized" + "".join(f"; {note}" for note in model.notes),
            "Quantize the model first, with humming.quantize_model, or in transformers with "
            "HummingConfig(weight='int4_g128') and save_pretrained.",
        )
    if model.skipped and not skip_refused:
        name, why = next(iter(model.skipped.items()))
        raise CheckpointError(
            f"{path}: {len(model.skipped)} modules cannot be read; the first is {name}: {why}. "
            "--skip-refused leaves them out"
        )
    shown = Output(as_json)
    with shown.progress("packing", len(model.layers) + len(model.tensors)) as step:
        formats = _write(model, output, step)
    payload = {
        "path": str(path),
        "output": str(output),
        "bytes": output.stat().st_size,
        "layers": len(model.layers),
        "formats": formats,
        "tensors": len(model.tensors),
        "skipped": dict(model.skipped),
        "notes": list(model.notes),
        "layer_notes": {name: list(notes) for name, notes in model.layer_notes.items()},
    }
    shown.emit(payload, lambda console: _draw(console, payload))


def _check_apart(path: Path, output: Path) -> None:
    """Refuse to write among the tensors of the checkpoint, which are found by their suffix."""
    # An index is the folder's whose files it names; a single file may have others beside it.
    folder = path if path.is_dir() else path.parent if path.suffix == ".json" else None
    same = output.exists() and output.samefile(path)
    if same or (folder is not None and output.resolve().parent == folder.resolve()):
        raise UnsupportedError(
            f"packing {path} into {output}",
            "it would be taken for tensors of the checkpoint",
            "Name a file in another folder.",
        )


def _write(model: "Model", output: Path, step: Any) -> dict[str, int]:
    """Writes all; returns how many layers there are of each pair of formats."""
    from humming.checkpoints.packed_writer import PackedWriter
    from humming.nn import QuantLinear

    formats: Counter[str] = Counter()
    # A layer of a checkpoint may turn out to be plain.
    plain = [f"{name}.{part}" for name in model.layers for part in ("weight", "bias")]
    with PackedWriter(output, model.layers, [*model.tensors, *plain]) as writer:
        for name in model.layers:
            step(name)
            layer = model.layers[name]
            if isinstance(layer, QuantLinear):
                writer.add(name, layer)
                formats[f"{layer.weight_spec} x {layer.activation or '16 bits'}"] += 1
            else:
                for part, tensor in layer.state_dict().items():
                    writer.add_tensor(f"{name}.{part}", tensor)
                formats["not quantized"] += 1
        for name, tensor in model.tensors.items():
            step(name)
            writer.add_tensor(name, tensor)
    return dict(formats)


def _draw(console: "Console", payload: dict[str, Any]) -> None:
    console.print(
        f"{payload['output']}: {payload['layers']} layers and {payload['tensors']} other tensors, "
        f"{payload['bytes']} bytes"
    )
    print_table(console, "", ["format", "layers"], list(payload["formats"].items()))
    for note in payload["notes"]:
        console.print(f"note: {note}")
    for name, notes in payload["layer_notes"].items():
        for note in notes:
            console.print(f"note: {name}: {note}")
    for name, why in payload["skipped"].items():
        console.print(f"left out: {name}: {why}")
