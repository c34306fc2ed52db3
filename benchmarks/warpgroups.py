"""Times explicit tiles of warpgroups beside cuBLAS and the composer's choices, on one card.

    python benchmarks/warpgroups.py --m 64,256,1024 --output results/warpgroups.json
    python benchmarks/warpgroups.py --m 4096 --tiles "2,2,128,2,3,1; 2,1,256,1,4,1"

A tile is named by warpgroups, blocks of 64 rows of each, tokens, bricks of 64 values of K of a
stage, stages, parts of K, CTAs of a cluster that have neighbouring rows; with `k` behind it, the
parts of K are a cluster. Without `--tiles` all that might be the fastest are tried. The composer's
choices stand beside them, those with parts of K in clusters too, and its estimates, so that its
constants can be fitted. Times are those of CUDA-graph replays over weights that together exceed the
L2 three times, in turns with cuBLAS in the activations' type, and in 8-bit floats where they are
those.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from timing import environment, save

import humming
from humming import reference
from humming.capability import DeviceCapabilities
from humming.compiler import compile_many
from humming.composer import KernelPlan, compose_as, decide, m_range_of
from humming.graphs import capture, copies_beyond_l2, time_graphs
from humming.lowering import Lowering, enumerate_lowerings
from humming.plugins import capabilities, registry
from humming.problem import GemmProblem
from humming.runtime import Kernel, Operands, TokenScales
from humming.tiles import TileConfig, fits, in_memory_of_cluster, warpgroup_tile

# Graphs that take turns; each holds memory of its own.
TOGETHER = 16


def main() -> None:
    """Parse the command line, time everything, print a line each and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="8192x8192", help="N x K of the weight")
    parser.add_argument("--m", default="64,128,256,1024,4096", help="tokens")
    parser.add_argument("--formats", default="int4_g128 x bf16", help="separated by commas")
    parser.add_argument("--tiles", help="separated by semicolons; see above")
    parser.add_argument("--output", type=Path, help="file for the results as JSON")
    arguments = parser.parse_args()
    n, k = (int(size) for size in arguments.shape.split("x"))
    named = [tile_of(text) for text in (arguments.tiles or "").split(";") if text.strip()]
    rows = []
    for name in arguments.formats.split(","):
        problem = GemmProblem.parse(name.strip(), n, k)
        operands = WeightCopies(problem)
        for m in map(int, arguments.m.split(",")):
            for row in measure(operands, m, named):
                rows.append(row)
    result = {"environment": environment(), "warpgroups": rows}
    save(arguments.output, result)


def tile_of(text: str) -> TileConfig:
    """The tile that `--tiles` names so."""
    tile = warpgroup_tile(*(int(number) for number in text.strip().rstrip("k").split(",")))
    return in_memory_of_cluster(tile) if text.strip().endswith("k") else tile


class WeightCopies:
    """A weight, packed and dense, each in several copies."""

    def __init__(self, problem: GemmProblem) -> None:
        n, k = problem.n, problem.k
        self.problem = problem
        self.dtype = torch.float16 if problem.activation.dtype == "float16" else torch.bfloat16
        dense = torch.randn(n, k, device="cuda", dtype=self.dtype) * k**-0.5
        self.quantized = humming.quantize(dense, problem.weight)
        packed = humming.pack(self.quantized, activation=problem.activation)
        copies = [packed.to("cpu").to("cuda") for _ in range(copies_beyond_l2(packed.nbytes))]
        self.packed = [Operands(w.codes, w.scales, w.zeros, w.second_scale, None) for w in copies]
        self.dense = [dense.clone() for _ in range(copies_beyond_l2(2 * n * k))]


def measure(operands: WeightCopies, m: int, named: list[TileConfig]) -> Iterator[dict[str, Any]]:
    """A row for each kernel at `m` tokens, the fastest first."""
    problem = operands.problem
    x = torch.randn(m, problem.k, device="cuda", dtype=operands.dtype)
    spec, values, scales, tokens = problem.activation, x, None, x
    if spec.dtype.is_narrow:
        quantized = humming.quantize_activation(x, spec)
        values, tokens = quantized.dequantize(), quantized.codes
        scales = TokenScales(quantized.scales, quantized.zeros, quantized.second_scale)
    exact = reference.matmul(values, operands.quantized)
    plans = list(plans_of(problem, capabilities(), m, named))
    print(f"{problem.name}, {problem.n} x {problem.k}, M = {m}: {len(plans)} kernels", flush=True)
    kernels = [
        Kernel(plan, 0, compiled) for plan, compiled in zip(plans, compile_many(plans), strict=True)
    ]
    found, dense = [], operands.dense
    for first in range(0, len(kernels), TOGETHER):
        group = kernels[first : first + TOGETHER]
        calls = [call_of(kernel, operands, tokens, scales) for kernel in group]
        errors = [float(reference.relative_error(call(0), exact)) for call in calls]
        graphs = {str(i): capture(call) for i, call in enumerate(calls)}
        graphs["cublas"] = capture(lambda i: torch.mm(x, dense[i % len(dense)].t()))
        if spec.dtype == "float8e4m3":
            graphs["cublas_fp8"] = capture(narrow_product(x, dense))
        times = time_graphs(graphs)
        for i, kernel in enumerate(group):
            row = row_of(kernel.plan, m, times[str(i)], times["cublas"], errors[i])
            found.append(row | {"cublas_fp8_us": times.get("cublas_fp8")})
    for row in sorted(found, key=lambda row: float(row["us"])):
        print(
            f"{row['us']:8.2f} us {row['tflops']:6.1f} TFLOPS, cuBLAS {row['cublas_us']:8.2f} "
            f"{row['cublas_fp8_us'] or 0:8.2f}, "
            f"estimate {row['estimate_us']:8.2f}, error {row['relative_error']:.1e}: "
            f"{row['tile']}, {row['lowering']}",
            flush=True,
        )
        yield row


def plans_of(
    problem: GemmProblem, caps: DeviceCapabilities, m: int, named: list[TileConfig]
) -> Iterator[KernelPlan]:
    """The best plan of each lowering by the composer, and explicit tiles of warpgroups."""
    m_range = m_range_of(m)
    ready = decide(problem, caps, m_range, registry()).ready
    chosen = [(lowering, tile) for lowering, tile, _ in ready]
    chosen += [
        (lowering, in_memory_of_cluster(tile))
        for lowering, tile in chosen
        if tile.split_k > 1 and fits(in_memory_of_cluster(tile), problem, lowering, caps)
    ]
    lowerings = [
        lowering
        for lowering in enumerate_lowerings(problem, caps)[0]
        if lowering.has_producer and lowering.mma.accumulator.bits == 32
    ]
    explicit = [
        (lowering, tile)
        for lowering in lowerings
        for tile in (named or likely_tiles(problem, lowering, caps, m))
        if fits(tile, problem, lowering, caps)
    ]
    for lowering, tile in dict.fromkeys([*chosen, *explicit]):
        yield compose_as(problem, caps, m_range, lowering, tile, m=m)


def likely_tiles(
    problem: GemmProblem, lowering: Lowering, caps: DeviceCapabilities, m: int
) -> Iterator[TileConfig]:
    """Tiles that leave few SMs idle and waste few tokens, with the deepest pipeline that fits."""
    sms = caps.sms or 1
    for warpgroups, row_blocks in ((1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (4, 1)):
        for block_m in (8, 16, 32, 64, 96, 128, 192, 256):
            if not m <= block_m < 2 * m and not 64 <= block_m < m:
                continue
            for bricks in (1, 2) if lowering.operand_bits == 16 else (2, 4):
                for split_k, cluster in ((1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 2)):
                    if block_m % (8 * cluster) or (cluster > 1 and block_m < 64):
                        continue
                    shape = (warpgroups, row_blocks, block_m, bricks)
                    tile = warpgroup_tile(*shape, 2, split_k)
                    ctas = -(-problem.n // tile.block_n) * -(-m // block_m)
                    if ctas * split_k < sms // 3 or (split_k > 1 and ctas * split_k > 2.1 * sms):
                        continue
                    deep = [
                        tile
                        for stages in (10, 8, 6, 5, 4, 3)
                        if fits(
                            tile := warpgroup_tile(*shape, stages, split_k, cluster),
                            problem,
                            lowering,
                            caps,
                        )
                    ]
                    yield from deep[:1]
                    if split_k > 1:
                        clustered = map(in_memory_of_cluster, deep)
                        fitting = (t for t in clustered if fits(t, problem, lowering, caps))
                        yield from islice(fitting, 1)
                    # Two CTAs an SM.
                    half = (caps.smem_per_sm_bytes or 0) // 2 - 1024
                    yield from [t for t in deep[1:] if t.smem_bytes(problem, lowering) <= half][:1]


def call_of(
    kernel: Kernel, operands: WeightCopies, x: torch.Tensor, scales: TokenScales | None
) -> Callable[[int], torch.Tensor]:
    """What enqueues product number i, each with another copy of the weight."""
    out = torch.empty(x.shape[0], operands.problem.n, device="cuda", dtype=operands.dtype)
    packed = operands.packed

    def call(i: int) -> torch.Tensor:
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch(x, packed[i % len(packed)], out, stream, scales)
        return out

    return call


def narrow_product(x: torch.Tensor, dense: list[torch.Tensor]) -> Callable[[int], torch.Tensor]:
    """cuBLAS in 8-bit floats with a scale a tensor."""
    one = torch.ones((), device="cuda")
    tokens = x.to(torch.float8_e4m3fn)
    weights = [weight.to(torch.float8_e4m3fn) for weight in dense + dense]

    def call(i: int) -> torch.Tensor:
        weight = weights[i % len(weights)].t()
        return torch._scaled_mm(tokens, weight, one, one, out_dtype=x.dtype, use_fast_accum=True)

    return call


def row_of(
    plan: KernelPlan, m: int, us: float, cublas_us: float, relative_error: float
) -> dict[str, Any]:
    """What is recorded of a kernel."""
    problem = plan.problem
    return {
        "format": problem.name,
        "n": problem.n,
        "k": problem.k,
        "m": m,
        "us": us,
        "tflops": 2e-6 * m * problem.n * problem.k / us,
        "cublas_us": cublas_us,
        "relative_error": relative_error,
        "estimate_us": plan.estimate.total_us,
        "estimate": plan.estimate.to_dict(),
        "lowering": plan.lowering.name,
        "tile": str(plan.tile),
        "config": asdict(plan.tile),
    }


if __name__ == "__main__":
    main()
