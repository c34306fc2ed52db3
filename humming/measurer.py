"""Kernels of one problem on a card: compiled together, held to the reference, timed in turns.

Weights rotate through copies that together exceed the L2 three times, as those of a model's layers
do; activations, which the layer before has just written, do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from humming import reference
from humming.activations import quantize_activation
from humming.capability import DeviceCapabilities
from humming.compiler import CompiledKernel, compile_many, compile_plan
from humming.composer import KernelPlan
from humming.errors import CompileError, HummingError
from humming.graphs import CALLS, capture, copies_beyond_l2, time_graphs
from humming.packing import pack
from humming.problem import GemmProblem
from humming.quantized import QuantizedWeight
from humming.quantizer import quantize
from humming.runtime import Kernel, Operands, TokenScales, current_stream
from humming.tuner import Measurer

# Tokens of a product that are compared with the reference: those of several tiles.
_COMPARED_TOKENS = 256
# A graph takes about so long: many calls of short kernels, few of long ones.
_GRAPH_US = 4000.0
_ROW_VALUES = 8  # of activations, which kernels read in pieces of 16 bytes


class CardMeasurer(Measurer):
    """Measures kernels of a problem on a card, with random operands.

    Args:
        problem: what the kernels compute.
        caps: the card's row.
        device_index: of the card, as torch counts; on the host, -1, kernels are only checked.
    """

    def __init__(self, problem: GemmProblem, caps: DeviceCapabilities, device_index: int) -> None:
        self._caps, self._index = caps, device_index
        self._weights = _Weights.random(problem, device_index)
        self._plans: list[KernelPlan] = []
        self._kernels: list[Kernel | None] = []
        self._products: dict[int, _Product] = {}
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}

    def load(self, plans: Sequence[KernelPlan]) -> list[str]:
        """Compile in parallel, and load."""
        self._graphs.clear()
        self._products.clear()
        self._plans, self._kernels = list(plans), []
        told = []
        for plan, compiled in zip(plans, _compiled(plans), strict=True):
            try:
                if isinstance(compiled, CompileError):
                    raise compiled
                self._kernels.append(Kernel(plan, self._index, compiled))
                told.append("")
            except HummingError as error:
                self._kernels.append(None)
                told.append(str(error).partition("\n")[0])
        return told

    def check(self, place: int, m: int) -> str:
        """Compare a product with the reference; see `error_bound` for what may differ."""
        with torch.cuda.device(self._index):
            product = self._product(m)
            # What is not written must not pass as what another kernel left there.
            product.out.fill_(torch.nan)
            self._launch(place, product, 0)
            self._wait(self._plans[place], m)
            return product.fault(self._plans[place])

    def time(self, places: Sequence[int], m: int, replays: int) -> list[float]:
        """Replay graphs in turns; they are recorded once."""
        with torch.cuda.device(self._index):
            product, calls = self._product(m), self._calls(m)
            for place in places:
                if (place, m) not in self._graphs:
                    call = partial(self._launch, place, product)
                    self._graphs[place, m] = capture(call, calls)
            graphs = {place: self._graphs[place, m] for place in places}
            times = time_graphs(graphs, calls, replays)
        return [times[place] for place in places]

    def _launch(self, place: int, product: "_Product", i: int) -> None:
        kernel, copies = self._kernels[place], self._weights.copies
        if kernel is not None:
            stream = current_stream(self._index)
            kernel.launch(product.x, copies[i % len(copies)], product.out, stream, product.tokens)

    def _wait(self, plan: KernelPlan, m: int) -> None:
        if self._index < 0:
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            # Nothing runs on the device any more; whoever reads this should know what did it.
            told = f"{plan.lowering.name}, tile {plan.tile}, of {plan.problem} at m = {m}"
            raise RuntimeError(f"{told} broke the device: {error}") from error

    def _calls(self, m: int) -> int:
        """Calls of a graph, by what the cost model expects of the first kernel."""
        estimate = self._plans[0].decision.at(m).ready[0].estimate.order_us
        return max(len(self._weights.copies), min(CALLS, int(_GRAPH_US / estimate)))

    def _product(self, m: int) -> "_Product":
        if m not in self._products:
            self._products[m] = _Product(self._weights, m, self._caps)
        return self._products[m]


@dataclass(frozen=True)
class _Weights:
    """A random weight, packed in several copies, with all that goes with it.

    Attributes:
        row_sums: what zero points of activations are multiplied with, if there are any.
    """

    problem: GemmProblem
    quantized: QuantizedWeight
    copies: list[Operands]
    row_sums: torch.Tensor | None
    out_dtype: torch.dtype

    @classmethod
    def random(cls, problem: GemmProblem, device_index: int) -> "_Weights":
        place = torch.device("cuda", device_index) if device_index >= 0 else torch.device("cpu")
        n, k = problem.n, problem.k
        dense = torch.randn(n, k, device=place) * k**-0.5
        if problem.weight.dtype.kind == "uint" and problem.weight.zero_point == "none":
            dense = dense.abs()
        quantized = quantize(dense, problem.weight)
        packed = pack(quantized, activation=problem.activation)
        out_dtype: torch.dtype = getattr(torch, problem.out_dtype.name)
        bias = torch.randn(n, device=place).to(out_dtype) if problem.bias else None
        first = Operands(packed.codes, packed.scales, packed.zeros, packed.second_scale, bias)
        copies = copies_beyond_l2(packed.nbytes, device_index) if device_index >= 0 else 1
        operands = [first, *(_clone(first) for _ in range(copies - 1))]
        row_sums = None if problem.activation.symmetric else packed.row_sums
        return cls(problem, quantized, operands, row_sums, out_dtype)


class _Product:
    """Random activations of a number of tokens, and what some of them must come to.

    Attributes:
        x, tokens, out: as `Kernel.launch` takes them.
    """

    def __init__(self, weights: _Weights, m: int, caps: DeviceCapabilities) -> None:
        problem, place = weights.problem, weights.quantized.codes.device
        spec, k = problem.activation, problem.k
        values = torch.randn(m, k, device=place)
        # The last token among them: what is behind it is cut off.
        others = torch.randperm(m - 1, device=place)[: _COMPARED_TOKENS - 1]
        some = torch.cat([others, others.new_tensor([m - 1])]).sort().values
        self._weights, self._some = weights, some
        self.tokens: TokenScales | None = None
        self._sizes: torch.Tensor | None = None
        if spec.dtype.is_narrow:
            known: dict[str, Any] = {}
            if spec.granularity == "tensor":
                # What a calibration would find: the scale that covers these very activations.
                known["scale"] = float(values.abs().amax()) / spec.dtype.max
                known |= {} if spec.symmetric else {"zero": 0}
            known |= {} if place.type == "cuda" else {"device": caps.name}
            quantized = quantize_activation(values, spec, **known)
            parts = quantized.scales, quantized.zeros, quantized.second_scale
            self.x, self.tokens = quantized.codes, TokenScales(*parts, weights.row_sums)
            self._values = quantized.dequantize()[some]
            self._sizes = quantized.magnitudes()[some]
        else:
            x = values.to(getattr(torch, spec.dtype.name))
            self.x = torch.nn.functional.pad(x, (0, -k % _ROW_VALUES))
            self._values = x[some]
        self.out = torch.empty(m, problem.n, device=place, dtype=weights.out_dtype)
        bias = weights.copies[0].bias
        self._exact = reference.matmul(self._values, weights.quantized, bias)
        self._bounds: dict[tuple[tuple[str, int], ...], torch.Tensor] = {}

    def fault(self, plan: KernelPlan) -> str:
        """Why `out` is not what a kernel must come to; nothing if it is."""
        error = (self.out[self._some].double() - self._exact).abs()
        within = error <= self._bound(plan)
        if bool(within.all()):
            return ""
        return (
            f"{int((~within).sum())} of {within.numel()} outputs compared at m = "
            f"{self.out.shape[0]} lie beyond their bounds or are not written"
        )

    def _bound(self, plan: KernelPlan) -> torch.Tensor:
        weights, roundings = self._weights, plan.roundings
        key = tuple(sorted(roundings.items()))
        if key not in self._bounds:
            self._bounds[key] = reference.error_bound(
                plan.problem,
                self._values,
                weights.quantized,
                weights.copies[0].bias,
                **roundings,
                x_sizes=self._sizes,
                # Numbers of either sign, which the tighter bound asks for.
                certain=False,
            )
        return self._bounds[key]


def _compiled(plans: Sequence[KernelPlan]) -> list[CompiledKernel | CompileError]:
    """What the compiler made of each plan, in parallel."""
    try:
        return list(compile_many(plans))
    except CompileError:
        # What was made is cached, or made again to find what cannot be.
        return [_compiled_alone(plan) for plan in plans]


def _compiled_alone(plan: KernelPlan) -> CompiledKernel | CompileError:
    try:
        return compile_plan(plan)
    except CompileError as error:
        return error


def _clone(operands: Operands) -> Operands:
    return Operands(*(None if tensor is None else tensor.clone() for tensor in operands))  # type: ignore[arg-type]
