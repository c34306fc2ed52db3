"""Composed kernels of every weight format, compared with exact products, here and on a card."""

import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from test_every_device import FORMATS

import humming
from humming import plugins, reference
from humming.composer import plan
from humming.problem import GemmProblem

OLDER_ROWS = ("t4", "a100")
"""Rows of sm_75 and sm_80, whose kernels any later card runs, too."""

_errors = importlib.import_module("humming.devices.simulator.errors")


class Case(NamedTuple):
    """A product: the row that its kernel is composed for, its problem, and tokens."""

    row: str
    problem: GemmProblem
    m: int

    @property
    def name(self) -> str:
        """For the report."""
        n, k = self.problem.n, self.problem.k
        return f"product of {self.problem.name} on {self.row}, {self.m} x {n} x {k}"


def rows_for(driver_name: str) -> list[str]:
    """The rows whose kernels a card is asked to run: older ones, and its own."""
    try:
        own = [plugins.registry().match(driver_name).name]
    except humming.HummingError:
        own = []  # a card that no row describes
    return [*OLDER_ROWS, *(row for row in own if row not in OLDER_ROWS)]


def cases(rows: list[str], rng: np.random.Generator) -> Iterator[Case]:
    """Every format on every row, with each activation that the row has, in random sizes."""
    for row in rows:
        caps = plugins.capabilities(f"sim:{row}")
        has_bf16 = any(mma.b == "bfloat16" for mma in caps.mma)
        for place, weight in enumerate(FORMATS):
            activations = ["float16", "bfloat16"] if has_bf16 else ["float16"]
            for activation in activations:
                spec = weight
                if spec.endswith("_fzp") and activation == "bfloat16":
                    spec += "_sbf16"
                # One of each two products has an output of float32, and one of each three a bias.
                out = "float32" if rng.integers(2) else activation
                n, k = int(rng.integers(8, 200)), 64 * int(rng.integers(2, 12))
                m = int(rng.choice([1, int(rng.integers(2, 17)), int(rng.integers(17, 80))]))
                bias = place % 3 == 0
                problem = GemmProblem.parse(f"{spec} x {activation} -> {out}", n, k, bias=bias)
                yield Case(row, problem, m)


class Exact:
    """The exact product, and how far a correct kernel's may lie from it; judges memory."""

    def __init__(
        self, address: int, dtype: torch.dtype, exact: torch.Tensor, bound: torch.Tensor
    ) -> None:
        self._address, self._dtype, self._exact, self._bound = address, dtype, exact, bound

    def wrong(self, data: np.ndarray) -> str | None:
        """What is wrong with the output in some bytes."""
        found = torch.frombuffer(bytearray(data.tobytes()), dtype=self._dtype)
        away = (found.reshape(self._exact.shape).double() - self._exact).abs()
        beyond = ~(away <= self._bound)
        if not beyond.any():
            return None
        row, column = (int(i) for i in beyond.nonzero()[0])
        return (
            f"{int(beyond.sum())} outputs beyond the bound, the first at [{row}, {column}]: off by "
            f"{float(away[row, column]):.3e}, allowed are {float(self._bound[row, column]):.3e}"
        )

    def __call__(self, address: int, memory: Any) -> str | None:
        """Judges the output of a launch; inputs have to be what they were."""
        if address != self._address:
            # Workspaces hold partial sums, whose bits are the card's own.
            same = np.array_equal(memory.before, memory.ours)
            return None if same else ""
        told = [
            f"{who}: {wrong}"
            for who, data in (("the simulator", memory.ours), ("the card", memory.theirs))
            if (wrong := self.wrong(data))
        ]
        return "; ".join(told)


def compare_products(comparison: Any, seed: int, only: int | None = None) -> None:
    """Multiplies random products in the simulator, and through `comparison` on its card."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    part, parts = comparison.shard
    for number, case in enumerate(cases(rows_for(comparison.card.name), rng)):
        if only is not None and number >= only:
            return
        if number % parts != part:
            continue
        comparison.begin(case.name)
        try:
            _multiply(comparison, case)
        except (humming.HummingError, _errors.SimulationError) as error:
            comparison.rows.append(
                {"test": case.name, "outcome": "wrong product", "error": str(error)}
            )
        finally:
            comparison.judge = None


def _multiply(comparison: Any, case: Case) -> None:
    problem, m = case.problem, case.m
    n, k = problem.n, problem.k
    weight = humming.quantize((torch.randn(n, k) + 0.3) * k**-0.5, problem.weight)
    x = torch.randn(m, k).to(getattr(torch, problem.activation.dtype.name))
    out_dtype = getattr(torch, problem.out_dtype.name)
    bias = torch.randn(n).to(out_dtype) if problem.bias else None
    composed = plan(problem, plugins.capabilities(f"sim:{case.row}"), m=m)
    bound = reference.error_bound(
        problem,
        x,
        weight,
        bias,
        **composed.roundings,
    )
    out = torch.empty(m, n, dtype=out_dtype)
    exact = reference.matmul(x, weight, bias)
    comparison.judge = Exact(out.data_ptr(), out_dtype, exact, bound)
    packed = humming.pack(weight, composed.lowering.operand_bits)
    humming.matmul(x, packed, bias, out_dtype=out_dtype, out=out, device=f"sim:{case.row}")
