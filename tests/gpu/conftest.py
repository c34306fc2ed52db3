"""Products on the device with their float64 references and the bounds that these imply."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import humming
from humming import reference, runtime
from humming.dtypes import DataType
from humming.packing import PackedWeight
from humming.problem import GemmProblem
from humming.quantized import QuantizedWeight


@pytest.fixture(autouse=True)
def _fresh_numbers() -> None:
    """Other random numbers in each run; a failure shows how to have the same again."""
    print(f"torch.manual_seed({torch.seed()})")


@dataclass(frozen=True)
class Product:
    """A quantized weight on the device, packed, with activations and perhaps a bias."""

    x: torch.Tensor
    quantized: QuantizedWeight
    weight: PackedWeight
    bias: torch.Tensor | None

    def check(
        self, out: torch.Tensor, x: torch.Tensor | None = None, *, certain: bool = False
    ) -> None:
        """Fails if a number of `out`, computed of `x`, is further from the exact one than it may.

        Args:
            out: [..., N].
            x: [..., K], or None for the product's own.
            certain: whether the bound must hold for data in which nothing cancels, too.
        """
        x = self.x if x is None else x
        n, k = self.weight.shape
        activation = str(x.dtype).removeprefix("torch.")
        problem = GemmProblem(
            n, k, self.weight.spec, activation, DataType.parse(out.dtype), self.bias is not None
        )
        exact = reference.matmul(x, self.quantized, self.bias)
        assert out.shape == exact.shape
        if not out.numel():
            return
        m = out.numel() // n
        plan = runtime.gemm_for(problem, out.get_device()).kernel(m).plan
        bound = reference.error_bound(
            problem,
            x,
            self.quantized,
            self.bias,
            **plan.roundings,
            certain=certain,
        )
        excess = ((out.double() - exact).abs() / bound).nan_to_num(nan=torch.inf)
        worst = float(excess.max())
        where = [int(i) for i in torch.unravel_index(excess.argmax(), excess.shape)]
        assert worst <= 1, (
            f"{worst:.3g} times the bound at {where}; {plan.lowering.name}, {plan.tile}"
        )


MakeProduct = Callable[..., Product]


@pytest.fixture
def make() -> MakeProduct:
    """Makes random products: make(m, n, k, weight, dtype, bias, device)."""

    def made(
        m: int | tuple[int, ...],
        n: int,
        k: int,
        weight: str = "int4_g128",
        dtype: torch.dtype = torch.bfloat16,
        bias: torch.dtype | None = None,
        device: str = "cuda",
    ) -> Product:
        shape = (m,) if isinstance(m, int) else m
        matrix = torch.randn(n, k, device=device)
        quantized = humming.quantize(matrix, weight)
        return Product(
            x=torch.randn(*shape, k, device=device, dtype=dtype),
            quantized=quantized,
            weight=humming.pack(quantized),
            bias=None if bias is None else torch.randn(n, device=device, dtype=bias),
        )

    return made
