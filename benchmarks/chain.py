"""Times the linear layers of decoders as chains, each product reading what the one before wrote.

    python benchmarks/chain.py --models llama-70b,llama-8b --m 1,8,16 --output results/chain.json

A layer is qkv, o, gate_up and down; attention, norms and activation functions are left out, and a
product reads the first values of what the one before wrote, so that each depends on the last. A
graph holds several layers, whose weights together exceed the L2 three times. Ours is launched
plainly and with dependent launch, cuBLAS in bfloat16 beside them in turns.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from timing import environment, save
from weight_rows import dequantized_rows

import humming
from humming import reference
from humming.compiler import compile_many
from humming.graphs import capture, copies_beyond_l2, time_graphs
from humming.problem import GemmProblem
from humming.runtime import Kernel, Operands

LAYERS = 8
CHECKED_ROWS = 128


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder layer: `qkv` are all heads' queries, keys and values."""

    hidden: int
    qkv: int
    intermediate: int

    @property
    def links(self) -> dict[str, tuple[int, int]]:
        """N x K of the products, in their order."""
        return {
            "qkv": (self.qkv, self.hidden),
            "o": (self.hidden, self.hidden),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }


MODELS = {
    "llama-70b": Decoder(hidden=8192, qkv=10240, intermediate=28672),
    "llama-8b": Decoder(hidden=4096, qkv=6144, intermediate=14336),
}


def main() -> None:
    """Parse the command line, time each model and M, print a line each and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--m", default="1,2,4,8,16,32,64,128,256", help="tokens")
    parser.add_argument("--formats", default="int4_g128 x bf16", help="separated by commas")
    parser.add_argument("--output", type=Path, help="file for the results as JSON")
    arguments = parser.parse_args()
    rows = []
    for model in arguments.models.split(","):
        for name in arguments.formats.split(","):
            chain = Chain(MODELS[model], name.strip())
            for m in map(int, arguments.m.split(",")):
                row = {"model": model, "format": name.strip(), "m": m, **chain.measure(m)}
                rows.append(row)
                print(
                    f"{model} {row['format']} M={m}: plain {row['plain_us']:.1f}, dependent "
                    f"{row['dependent_us']:.1f}, cuBLAS {row['cublas_us']:.1f} us a layer, "
                    f"error {row['relative_error']:.1e}",
                    flush=True,
                )
    result = {"environment": environment(), "chains": rows}
    save(arguments.output, result)


class Chain:
    """The weights of some layers of a decoder, quantized and dense."""

    def __init__(self, decoder: Decoder, name: str) -> None:
        self.links = decoder.links
        shapes = self.links.values()
        self.problems = [GemmProblem.parse(name, n, k) for n, k in shapes]
        if any(problem.activation.dtype != "bfloat16" for problem in self.problems):
            raise SystemExit(f"{name}: the outputs, bfloat16, are the next product's activations")
        dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5 for n, k in shapes]
        self.quantized = [
            humming.quantize(weight, problem.weight)
            for weight, problem in zip(dense, self.problems, strict=True)
        ]
        packed = [humming.pack(weight) for weight in self.quantized]
        self.packed = [packed] + [
            [weight.to("cpu").to("cuda") for weight in packed]
            for _ in range(copies_beyond_l2(sum(weight.nbytes for weight in packed)) - 1)
        ]
        self.dense = [dense] + [
            [weight.clone() for weight in dense]
            for _ in range(copies_beyond_l2(sum(2 * weight.numel() for weight in dense)) - 1)
        ]

    def measure(self, m: int) -> dict[str, Any]:
        """Microseconds a layer of m tokens, and the largest relative error of its products."""
        plans = [humming.plan(problem, m=m) for problem in self.problems]
        compiled = compile_many(plans)
        outputs = [torch.empty(m, n, device="cuda", dtype=torch.bfloat16) for n, _ in self.shapes]
        # What the first product of the first layer reads is what the last of the last layer wrote.
        outputs[-1].normal_()
        inputs = [first_values(outputs[i - 1], m, k) for i, (_, k) in enumerate(self.shapes)]

        def layer_of(pdl: bool) -> Callable[[int], None]:
            kernels = [
                Kernel(replace(plan, pdl=pdl and plan.pdl), 0, image)
                for plan, image in zip(plans, compiled, strict=True)
            ]

            def layer(index: int) -> None:
                stream = torch.cuda.current_stream().cuda_stream
                weights = self.packed[index % len(self.packed)]
                for kernel, x, w, out in zip(kernels, inputs, weights, outputs, strict=True):
                    operands = Operands(w.codes, w.scales, w.zeros, w.second_scale, None)
                    kernel.launch(x, operands, out, stream)

            return layer

        def cublas(index: int) -> None:
            weights = self.dense[index % len(self.dense)]
            for x, weight, out in zip(inputs, weights, outputs, strict=True):
                torch.mm(x, weight.t(), out=out)

        errors = self.errors(layer_of(pdl=True), inputs, outputs)
        graphs = {
            "plain_us": capture(layer_of(pdl=False), LAYERS),
            "dependent_us": capture(layer_of(pdl=True), LAYERS),
            "cublas_us": capture(cublas, LAYERS),
        }
        tiles = {name: str(plan.tile) for name, plan in zip(self.links, plans, strict=True)}
        times = time_graphs(graphs, LAYERS)
        return {**times, "relative_error": max(errors), "layers": LAYERS, "tiles": tiles}

    @property
    def shapes(self) -> list[tuple[int, int]]:
        return list(self.links.values())

    def errors(
        self,
        layer: Callable[[int], None],
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> list[float]:
        """The relative error of each product on some rows, given what it read."""
        # The first reads what the last overwrites.
        first = inputs[0].double()
        layer(0)
        read = [first, *(x.double() for x in inputs[1:])]
        rows = slice(0, CHECKED_ROWS)
        return [
            reference.relative_error(out[:, rows], x @ dequantized_rows(weight, rows).T)
            for x, out, weight in zip(read, outputs, self.quantized, strict=True)
        ]


def first_values(matrix: torch.Tensor, m: int, k: int) -> torch.Tensor:
    """The first m * k values of a contiguous matrix as one of k columns, without a copy."""
    return matrix.view(-1)[: m * k].view(m, k)


if __name__ == "__main__":
    main()
