"""The worker that times this project, and the floor: a kernel that only reads the same bytes."""

from collections.abc import Callable
from typing import Any

import torch
import worker
from graphs import copies_beyond_l2
from timing import Floor, environment
from weight_rows import dequantized_rows

import humming
from humming.compiler import compile_many
from humming.problem import GemmProblem


class Ours(worker.Peer):
    """Weights and activations in a format of the same name."""

    def __init__(self) -> None:
        self._floor = Floor()

    def versions(self) -> dict[str, str]:
        versions: dict[str, str] = environment()["versions"]
        return versions

    def details(self) -> dict[str, Any]:
        return {"environment": environment()}

    def load(self, name: str, n: int, k: int, tokens: list[int]) -> None:
        self._problem = problem = GemmProblem.parse(name, n, k)
        # Kernels in parallel; matmul then finds them in the cache.
        compile_many([humming.plan(problem, m=m) for m in tokens])
        is_half = problem.activation.dtype == "float16"
        self._dtype = torch.float16 if is_half else torch.bfloat16
        dense = torch.randn(n, k, device="cuda", dtype=self._dtype) * k**-0.5
        quantized = humming.quantize(dense, problem.weight)
        self._sampled = worker.SampledWeight.of(n, lambda rows: dequantized_rows(quantized, rows))
        packed = humming.pack(quantized, activation=problem.activation)
        copies = copies_beyond_l2(packed.nbytes)
        self._weights = [packed] + [packed.to("cpu").to("cuda") for _ in range(copies - 1)]
        sizes = [packed.nbytes] * copies
        self._read = [torch.randint(0, 256, (b,), dtype=torch.uint8, device="cuda") for b in sizes]

    def drop(self) -> None:
        self._weights, self._read = [], []

    def products(self, m: int) -> dict[str, Callable[[], worker.Product]]:
        problem, weights, read = self._problem, self._weights, self._read
        x = torch.randn(m, problem.k, device="cuda", dtype=self._dtype)
        at = worker.sample_tokens(m).cuda()
        operand: Any = x
        values = x[at].double()
        if problem.activation.dtype.is_narrow:
            operand = humming.quantize_activation(x, problem.activation)
            values = operand.dequantize()[at].double()
        plan = humming.plan(problem, m=m)

        def multiply(i: int) -> torch.Tensor:
            return humming.matmul(operand, weights[i % len(weights)], out_dtype=self._dtype)

        # What the floor reads is no product: it answers with the right one, so that no error shows.
        out = multiply(0)

        def reading(dependent: bool) -> Callable[[], worker.Product]:
            def call(i: int) -> torch.Tensor:
                self._floor.read(read[i % len(read)], dependent)
                return out

            return lambda: worker.Product(call, values, self._sampled)

        note = f"{plan.tile}; {plan.lowering.name}"
        return {
            "ours": lambda: worker.Product(multiply, values, self._sampled, note),
            "floor": reading(False),
            "floor dependent": reading(True),
        }


if __name__ == "__main__":
    worker.main(Ours)
