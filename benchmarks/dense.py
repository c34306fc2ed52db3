"""Times dense products beside cuBLAS and beside the floor, on one card in one run.

    python benchmarks/dense.py --shapes 8192x8192,4096x4096 --m 1,8,16 --output results/dense.json

For each shape, format and M: CUDA-graph replays of `humming.matmul`, of torch's product in bfloat16
or, where activations are float16, in that (cuBLAS), and of a kernel that only reads the same bytes,
in turns. Quantized activations are quantized before; `activations.py` times that. Weights rotate
through copies that together exceed the L2 three times. The relative error against a float64
reference of the dequantized weight stands beside each time. Compile time of each kernel, packing
time and host time per call are in the same file.
"""

import argparse
import json
import secrets
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from packing import time_packing
from timing import Floor, environment, save

import humming
from humming import reference
from humming.compiler import compile_plan
from humming.composer import M_RANGES, compose
from humming.graphs import capture, copies_beyond_l2, time_graphs
from humming.plugins import capabilities
from humming.problem import GemmProblem

SHAPES = "4096x4096,8192x8192,7168x2048,2048x7168,28672x8192,8192x28672,10240x8192"
HOST_CALLS = 300


def main() -> None:
    """Parse the command line, run the grid, write the JSON and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=SHAPES, help="N x K of the weights")
    parser.add_argument("--m", default="1,2,4,8,16,32,64,128,256,1024", help="tokens")
    parser.add_argument("--formats", default="int4_g128 x bf16", help="separated by commas")
    parser.add_argument("--output", type=Path, help="file for the results as JSON")
    arguments = parser.parse_args()
    tokens = [int(m) for m in arguments.m.split(",")]
    floor, rows = Floor(), []
    header = f"{'N x K':>13} {'format':>20} {'M':>5} {'us':>8} {'cuBLAS':>8} {'x':>6} {'floor':>7}"
    print(header, f"{'dep.':>7} {'of floor':>8} {'error':>8}")
    for shape in arguments.shapes.split(","):
        n, k = (int(size) for size in shape.split("x"))
        for name in arguments.formats.split(","):
            for row in measure(GemmProblem.parse(name.strip(), n, k), tokens, floor):
                rows.append(row)
                print(
                    f"{n:>6}x{k:<6} {row['format']:>20} {row['m']:>5} {row['us']:>8.2f}"
                    f" {row['cublas_us']:>8.2f} {row['over_cublas']:>6.2f} {row['floor_us']:>7.2f}"
                    f" {row['floor_dependent_us']:>7.2f} {row['of_floor']:>8.2f}"
                    f" {row['relative_error']:>8.1e}",
                    flush=True,
                )
    result = {
        "environment": environment(),
        "compile": compile_times(GemmProblem.parse("int4_g128 x bf16", 8192, 8192)),
        "packing": packing_time(8192, 8192),
        "host": host_time(4096, 4096),
        "dense": rows,
    }
    print(json.dumps({key: result[key] for key in ("compile", "packing", "host")}, indent=1))
    save(arguments.output, result)


def measure(problem: GemmProblem, tokens: list[int], floor: Floor) -> list[dict[str, Any]]:
    """One row per M for one shape and format."""
    n, k = problem.n, problem.k
    dtype = torch.float16 if problem.activation.dtype == "float16" else torch.bfloat16
    dense = torch.randn(n, k, device="cuda", dtype=dtype) * k**-0.5
    quantized = humming.quantize(dense, problem.weight)
    packed = humming.pack(quantized, activation=problem.activation)
    nbytes = packed.nbytes
    weights = [packed] + [clone(packed) for _ in range(copies_beyond_l2(nbytes) - 1)]
    plain = [dense] + [dense.clone() for _ in range(copies_beyond_l2(2 * n * k) - 1)]
    read = [torch.empty(nbytes, dtype=torch.uint8, device="cuda").random_(0, 256) for _ in weights]
    operands = Operands(problem, quantized, weights, plain, read, floor)
    return [operands.measure(m, dtype) for m in tokens]


@dataclass(frozen=True)
class Operands:
    """The weights of one shape and format, each in several copies, and what reads them."""

    problem: GemmProblem
    quantized: humming.QuantizedWeight
    weights: list[humming.PackedWeight]
    plain: list[torch.Tensor]
    read: list[torch.Tensor]
    floor: Floor

    def measure(self, m: int, dtype: torch.dtype) -> dict[str, Any]:
        """The row of one number of tokens."""
        weights, plain, read, floor = self.weights, self.plain, self.read, self.floor
        x = torch.randn(m, self.problem.k, device="cuda", dtype=dtype)
        spec, tokens, values = self.problem.activation, x, x
        if spec.dtype.is_narrow:
            tokens = humming.quantize_activation(x, spec)
            values = tokens.dequantize()

        def multiply(i: int) -> torch.Tensor:
            return humming.matmul(tokens, weights[i % len(weights)], out_dtype=dtype)

        out = multiply(0)
        expected = reference.matmul(values, self.quantized)
        times = time_graphs(
            {
                "us": capture(multiply),
                "cublas_us": capture(lambda i: torch.mm(x, plain[i % len(plain)].t())),
                "floor_us": capture(lambda i: floor.read(read[i % len(read)], False)),
                "floor_dependent_us": capture(lambda i: floor.read(read[i % len(read)], True)),
            }
        )
        return {
            "n": self.problem.n,
            "k": self.problem.k,
            "format": self.problem.name,
            "m": m,
            **times,
            "over_cublas": times["cublas_us"] / times["us"],
            "of_floor": times["us"] / times["floor_us"],
            "relative_error": float(reference.relative_error(out, expected)),
            "lowering": humming.plan(self.problem, m=m).lowering.name,
            "tile": str(humming.plan(self.problem, m=m).tile),
        }


def clone(packed: humming.PackedWeight) -> humming.PackedWeight:
    """A copy of a packed weight in memory of its own."""
    return packed.to("cpu").to("cuda")


def compile_times(problem: GemmProblem) -> list[dict[str, Any]]:
    """Seconds that each kernel of a problem takes to compile, on one core and without a cache."""
    caps, found = capabilities(), []
    for m_range in M_RANGES:
        plan = compose(problem, caps, m_range)
        # A name of its own, because the compiler keeps a cache too.
        entry = f"{plan.entry}_{secrets.token_hex(4)}"
        source = plan.source.replace(plan.entry, entry)
        kernel = compile_plan(replace(plan, entry=entry, source=source), cache=False)
        found.append({"m_range": m_range, "tile": str(plan.tile), "seconds": kernel.seconds})
    return found


def packing_time(n: int, k: int) -> dict[str, Any]:
    """Milliseconds to pack an int4_g128 weight on the card, median of ten."""
    weight = "int4_g128"
    times = time_packing(n, k, weight, device="cuda", repetitions=10)
    return {"n": n, "k": k, "format": weight, "ms": times["pack_ms"]}


def host_time(n: int, k: int) -> dict[str, Any]:
    """Microseconds of host time per eager call at M = 1, of ours and of torch's linear layer.

    A layer that quantizes its activations launches two kernels in a call.
    """
    linear = torch.nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(1, k, device="cuda", dtype=torch.bfloat16)
    layers = {
        "quant_linear_us": humming.QuantLinear.from_linear(linear, "int4_g128"),
        "quant_linear_int8_us": humming.QuantLinear.from_linear(linear, "int8", "int8"),
        "quant_linear_fp8_us": humming.QuantLinear.from_linear(linear, "fp8", "fp8"),
        "torch_linear_us": linear,
    }
    with torch.inference_mode():
        return {"n": n, "k": k, "m": 1, **{name: _host_us(f, x) for name, f in layers.items()}}


def _host_us(layer: torch.nn.Module, x: torch.Tensor) -> float:
    """The median of 20 runs of calls, the card idle before each."""
    layer(x)  # composes and loads kernels
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS // 20):
            layer(x)
        times.append((time.perf_counter() - start) / (HOST_CALLS // 20) * 1e6)
    return statistics.median(times)


if __name__ == "__main__":
    main()
