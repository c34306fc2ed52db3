"""Times the quantization of activations beside torch's copy of as many bytes, on one card.

    python benchmarks/activations.py --output benchmarks/results/MYCARD_activations.json

For each format, M and K: CUDA-graph replays of `humming.quantize_activation`, and of `copy_` of a
buffer of half as many bytes as it reads and writes together (a copy reads and writes each), in
turns. Inputs rotate through copies that together exceed the L2 three times. Where nothing is fused,
the bits are compared with the reference first.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from timing import environment, save

import humming
from humming import reference
from humming.graphs import capture, copies_beyond_l2, time_graphs

FORMATS = "int8,int8_asym,int4,fp8,fp8_e5m2,fp8_g128,mxfp8,mxfp4,nvfp4,int8_tensor"
CALLS = 24
# More values than these are not compared: the reference takes many times their memory.
COMPARED = 1 << 21


def main() -> None:
    """Parse the command line, run the grid, write the JSON and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--m", default="1,16,256,4096,16384", help="tokens")
    parser.add_argument("--k", default="4096,8192,14336", help="values of a token")
    parser.add_argument("--formats", default=FORMATS, help="separated by commas")
    parser.add_argument("--fuse", default="none", help="none, silu_mul, gelu or gelu_tanh")
    parser.add_argument("--output", type=Path, help="file for the results as JSON")
    arguments = parser.parse_args()
    fuse = None if arguments.fuse == "none" else arguments.fuse
    rows = []
    print(f"{'format':>12} {'M':>6} {'K':>6} {'us':>8} {'copy':>8} {'of copy':>8} {'GB/s':>7}")
    for name in arguments.formats.split(","):
        for k in map(int, arguments.k.split(",")):
            for m in map(int, arguments.m.split(",")):
                row = measure(name.strip(), m, k, fuse)
                rows.append(row)
                print(
                    f"{row['format']:>12} {m:>6} {k:>6} {row['us']:>8.2f} {row['copy_us']:>8.2f}"
                    f" {row['of_copy']:>8.2f} {row['gb_per_s']:>7.0f}",
                    flush=True,
                )
    result = {"environment": environment(), "activations": rows}
    save(arguments.output, result)


def measure(name: str, m: int, k: int, fuse: str | None) -> dict[str, Any]:
    """One row of the results; `of_copy` is the share of copy bandwidth that is reached."""
    width = 2 * k if fuse == "silu_mul" else k
    x = torch.randn(m, width, device="cuda", dtype=torch.bfloat16)
    told: dict[str, torch.Tensor] = {}
    if humming.ActivationSpec.parse(name).granularity == "tensor":
        told["scale"] = torch.full((1,), 0.03, device="cuda")
    found = humming.quantize_activation(x, name, fuse=fuse, **told)
    if fuse is None and x.numel() <= COMPARED:
        expected = reference.quantize_activation(x, name, **told)
        if not torch.equal(found.codes, expected.codes):
            raise SystemExit(f"{name} of {m} x {k} differs from the reference")
    moved = x.nbytes + found.codes.nbytes + found.scales.nbytes
    inputs = [x] + [x.clone() for _ in range(min(CALLS, copies_beyond_l2(x.nbytes)) - 1)]
    half = torch.empty(-(-moved // 2), dtype=torch.uint8, device="cuda")
    sources = [half.clone() for _ in range(min(CALLS, copies_beyond_l2(half.nbytes)))]
    # Graphs keep what they write, so that each call has an output of its own, as the copies have.
    kept: list[Any] = []

    def quantize(index: int) -> None:
        kept.append(
            humming.quantize_activation(inputs[index % len(inputs)], name, fuse=fuse, **told)
        )

    targets = [torch.empty_like(half) for _ in sources]

    def copy(index: int) -> None:
        targets[index % len(targets)].copy_(sources[index % len(sources)])

    times = time_graphs(
        {"us": capture(quantize, CALLS), "copy_us": capture(copy, CALLS)}, calls=CALLS
    )
    return {
        "format": name,
        "fuse": fuse,
        "m": m,
        "k": k,
        "bytes": moved,
        **times,
        "of_copy": times["copy_us"] / times["us"],
        "gb_per_s": moved / times["us"] * 1e-3,
    }


if __name__ == "__main__":
    main()
