"""The worker that times DeepGEMM: fp8 with scales of 128 values and of 128 x 128 blocks.

It compiles at run time with nvcc of the folder CUDA_HOME, or of the PATH, or of /usr/local/cuda.
Where there is none, it is told to use NVRTC with the headers of NVIDIA's Python packages; its
authors call the code of that slower. Its other fp8 product for Hopper, with scales of 128 values on
both sides, writes float32 sums to be added to: not the product that is timed here.
"""

import importlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import worker
from cublas import quantize
from graphs import copies_beyond_l2

BLOCK = 128
# Beside fp8 with one scale per row and token too: the finer scales do no less work.
FORMATS = ("fp8_block128 x fp8_g128", "fp8 x fp8")


class DeepGemm(worker.Peer):
    """fp8 by fp8, as one ordinary launch and as a dependent one."""

    distributions = ("torch", "sgl-deep-gemm", "apache-tvm-ffi")

    def __init__(self) -> None:
        self._compiler = find_compiler()
        self._library: Any = importlib.import_module("deep_gemm")
        self._codes: list[torch.Tensor] = []

    def details(self) -> dict[str, Any]:
        return {"compiler": self._compiler}

    def load(self, name: str, n: int, k: int, tokens: list[int]) -> None:
        if name not in FORMATS:
            raise worker.NoSuchFormatError(f"no format of its own for {name}")
        dense = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
        codes, self._scales, values = quantize(dense, "block", rows=BLOCK)
        self._sampled = worker.SampledWeight.of(n, values)
        self._codes = [codes] + [codes.clone() for _ in range(copies_beyond_l2(n * k) - 1)]

    def drop(self) -> None:
        self._codes = []

    def products(self, m: int) -> dict[str, Callable[[], worker.Product]]:
        return {
            "deepgemm": lambda: self._product(m, False),
            "deepgemm dependent": lambda: self._product(m, True),
        }

    def _product(self, m: int, dependent: bool) -> worker.Product:
        library, weights = self._library, self._codes
        n, k = weights[0].shape
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        codes, scales, values = quantize(x, "block", rows=1)
        tokens = worker.sample_tokens(m).tolist()
        sampled = torch.cat([values(slice(token, token + 1)) for token in tokens])
        # In the layout that its kernel reads; otherwise each call would transpose them first.
        ready = library.utils.layout.get_mn_major_tma_aligned_tensor(scales)
        if not isinstance(ready, torch.Tensor):
            ready = torch.from_dlpack(ready)
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)

        def multiply(i: int) -> torch.Tensor:
            library.set_pdl(dependent)
            library.fp8_gemm_nt((codes, ready), (weights[i % len(weights)], self._scales), out)
            return out

        return worker.Product(multiply, sampled, self._sampled, "128-value and 128x128 scales")


def find_compiler() -> str:
    """The compiler that the library will use; sets its environment where it would find none."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = Path(named) / "bin" / "nvcc" if named else Path(shutil.which("nvcc") or "nvcc")
    for nvcc in (found, Path("/usr/local/cuda/bin/nvcc")):
        if nvcc.is_file():
            os.environ["CUDA_HOME"] = str(nvcc.parents[1])
            return str(nvcc)
    for entry in sys.path:
        packages = Path(entry) / "nvidia" / "cu13"
        if (packages / "include" / "cuda_bf16.h").is_file():
            nvcc = packages / "bin" / "nvcc"
            os.environ["CUDA_HOME"] = str(packages)
            if nvcc.is_file():
                return str(nvcc)
            os.environ["DG_JIT_USE_NVRTC"] = "1"
            return f"NVRTC with {packages}"
    raise FileNotFoundError(
        "neither nvcc (CUDA_HOME, PATH, /usr/local/cuda) nor CUDA headers of nvidia/cu13 packages"
    )


if __name__ == "__main__":
    worker.main(DeepGemm)
