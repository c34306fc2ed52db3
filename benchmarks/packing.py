"""How long packing takes: `python benchmarks/packing.py`, or `time_packing` from another script."""

import argparse
import json
import time
from statistics import median
from typing import Any

import torch

from humming.packing import pack, unpack
from humming.quantizer import quantize


def time_packing(
    n: int = 8192,
    k: int = 8192,
    weight: str = "int4_g128",
    operand_bits: int = 16,
    device: str | None = None,
    repetitions: int = 5,
) -> dict[str, Any]:
    """Median milliseconds to quantize, pack and unpack a random float16 weight [n, k].

    Wall time from call to result: the device is idle before and after. The first, untimed call
    loads kernels and tables.

    Args:
        n: output features.
        k: input features.
        weight: name of a weight format.
        operand_bits: the operand width to pack for.
        device: a torch device; None for the accelerator if there is one, else the CPU.
        repetitions: timed calls of each kind.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    w = torch.randn(n, k, device=where).half()
    quantized = quantize(w, weight)
    packed = pack(quantized, operand_bits)

    def milliseconds(work: Any) -> float:
        times = []
        for _ in range(repetitions + 1):
            _synchronize(where)
            start = time.perf_counter()
            work()
            _synchronize(where)
            times.append(1e3 * (time.perf_counter() - start))
        return median(times[1:])

    return {
        "n": n,
        "k": k,
        "weight": weight,
        "operand_bits": operand_bits,
        "device": str(where),
        "packed_bytes": packed.nbytes,
        "quantize_ms": milliseconds(lambda: quantize(w, weight)),
        "pack_ms": milliseconds(lambda: pack(quantized, operand_bits)),
        "unpack_ms": milliseconds(lambda: unpack(packed)),
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Print one JSON line per format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=8192)
    parser.add_argument("-k", type=int, default=8192)
    parser.add_argument("--device")
    parser.add_argument(
        "weights", nargs="*", default=["int4_g128", "uint4_g128_zp", "int3_g128", "fp8_block128"]
    )
    given = parser.parse_args()
    for weight in given.weights:
        print(json.dumps(time_packing(given.n, given.k, weight, device=given.device)), flush=True)


if __name__ == "__main__":
    main()
