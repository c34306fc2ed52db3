"""The main job, step by step: quantize, plan, pack, compile, multiply, compare.

Where the kernel cannot run because its device is not present, the packed weights are multiplied by
reference arithmetic on the CPU instead; a `Target` knows which, and every output says it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from humming import plugins
from humming.cli.weights import MatrixSource
from humming.compiler import compile_plan
from humming.composer import KernelPlan, compose, m_range_of, m_ranges
from humming.formats import ActivationSpec
from humming.problem import GemmProblem

if TYPE_CHECKING:
    import torch

    from humming.activations import QuantizedActivation
    from humming.capability import DeviceCapabilities
    from humming.packing import PackedWeight
    from humming.quantized import QuantizedWeight

_TIMED_CALLS = 20


@dataclass(frozen=True, slots=True)
class Target:
    """Where a product is computed.

    Attributes:
        caps: the row that the kernel is planned and compiled for.
        torch_device: where tensors live.
        why_not: why the kernel does not run; empty if it does.
    """

    caps: "DeviceCapabilities"
    torch_device: str
    why_not: str = ""

    @property
    def kernel_runs(self) -> bool:
        """Whether the composed kernel itself is executed."""
        return not self.why_not

    @property
    def on_accelerator(self) -> bool:
        """Whether the kernel runs on a device of its own."""
        return self.kernel_runs and self.torch_device != "cpu"

    @property
    def executed_on(self) -> str:
        """For people: the device, or the arithmetic that stands in for it and why."""
        if self.kernel_runs:
            return f"{self.caps.name} ({self.torch_device})"
        return f"reference arithmetic on the CPU ({self.why_not})"


def choose_target(device: str | None) -> Target:
    """The device of a name, or the present one: an accelerator, else what the CPU simulates.

    A named device that is neither is planned and compiled for; the CPU stands in for it.

    Raises:
        UnsupportedError: no row has this name.
        PluginError: the plugin that has it is broken.
    """
    from humming.runtime import runs_on_host

    present = [found for found in plugins.devices() if found.row and found.index >= 0]
    caps = plugins.capabilities(device)
    if runs_on_host(caps):
        return Target(caps, "cpu")
    fitting = [found for found in present if found.row == caps.name]
    if not fitting:
        seen = ", ".join(dict.fromkeys(found.row for found in present))
        why = f"present is {seen}, not {caps.name}" if seen else "no accelerator present"
        return Target(caps, "cpu", why)
    import torch

    if fitting[0].index >= torch.cuda.device_count():
        return Target(
            caps, "cpu", f"{caps.name} is present, but torch {torch.__version__} cannot use it"
        )
    return Target(caps, f"cuda:{fitting[0].index}")


@dataclass(frozen=True, slots=True)
class Check:
    """A result beside the float64 reference.

    Attributes:
        relative_error: norm of the error over the norm of the reference.
        relative_bound: what that cannot exceed if every output is within its bound.
        worst: largest ratio of an output's error to its bound; infinite where one is NaN.
        passed: whether every output has a finite bound and is within it.
        no_verdict: why nothing is proved, although no output is beyond its bound; else empty.
    """

    relative_error: float
    relative_bound: float
    worst: float
    passed: bool
    no_verdict: str = ""

    @property
    def verdict(self) -> str:
        """For people: ok, FAILED or no verdict."""
        return "ok" if self.passed else "no verdict" if self.no_verdict else "FAILED"


@dataclass(slots=True)
class Outcome:
    """What became of one matrix; `steps` holds the seconds of each step, in order."""

    name: str
    problem: GemmProblem
    m: int
    steps: dict[str, float] = field(default_factory=dict)
    lowering: str = ""
    tile: str = ""
    kernel_bytes: int = 0
    kernel_compiler: str = ""
    kernel_cached: bool = False
    kernel_seconds: float = 0.0
    check: Check | None = None  # None as well where there is nothing to compare

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "problem": self.problem.name,
            "n": self.problem.n,
            "k": self.problem.k,
            "m": self.m,
            "seconds": dict(self.steps),
            "kernel": {
                "lowering": self.lowering,
                "tile": self.tile,
                "bytes": self.kernel_bytes,
                "compiler": self.kernel_compiler,
                "seconds": self.kernel_seconds,
                "from_cache": self.kernel_cached,
            },
            "check": asdict(self.check) if self.check else None,
        }

    @contextmanager
    def timed(self, step: str, announce: Callable[[str], None]) -> Iterator[None]:
        """Measure a step and tell a progress bar that it begins."""
        announce(f"{self.name}: {step}")
        start = time.perf_counter()
        yield
        self.steps[step] = time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Job:
    """What is done with each matrix.

    Attributes:
        target: where.
        describe: (n, k) -> the problem.
        m: tokens.
        seed: of activations and bias.
        check: whether to compare with the float64 reference.
    """

    target: Target
    describe: Callable[[int, int], GemmProblem]
    m: int
    seed: int
    check: bool

    STEPS = ("plan", "load", "quantize", "pack", "compile", "run")

    def do(self, source: MatrixSource, announce: Callable[[str], None]) -> Outcome:
        """All steps with one matrix.

        Raises:
            UnsupportedError: the problem cannot be planned for the device, or the matrix not
                quantized so.
            CompileError: the kernel cannot be compiled.
        """
        from humming.packing import pack
        from humming.quantizer import quantize

        problem, caps = self.describe(*source.shape), self.target.caps
        outcome = Outcome(source.name, problem, self.m)
        with outcome.timed("plan", announce):
            plan = _plan(problem, caps, self.m)
        outcome.lowering, outcome.tile = plan.lowering.name, str(plan.tile)
        with outcome.timed("load", announce):
            weight = source.load().to(self.target.torch_device)
        with outcome.timed("quantize", announce):
            quantized = quantize(weight, problem.weight)
            self._wait()
        with outcome.timed("pack", announce):
            packed = pack(quantized, operand_bits=plan.lowering.packed_bits)
            self._wait()
        with outcome.timed("compile", announce):
            compiled = compile_plan(plan)
        outcome.kernel_bytes = len(compiled.image.data)
        outcome.kernel_compiler = compiled.compiler
        outcome.kernel_seconds, outcome.kernel_cached = compiled.seconds, compiled.from_cache
        x, bias = self._inputs(problem)
        announce(f"{source.name}: run")
        result, outcome.steps["run"] = self._multiply(x, packed, bias, problem)
        # No tokens have no outputs: that would pass whatever the kernel does.
        if self.check and self.m:
            outcome.check = _compare(result, plan, x, quantized, bias)
        return outcome

    def _inputs(
        self, problem: GemmProblem
    ) -> "tuple[torch.Tensor | QuantizedActivation, torch.Tensor | None]":
        """Normally distributed activations [m, k] and, if the problem has one, bias [n]."""
        import torch

        generator = torch.Generator().manual_seed(self.seed + 1)  # the weights have the seed itself
        x = torch.randn(self.m, problem.k, generator=generator)
        bias = torch.randn(problem.n, generator=generator) if problem.bias else None
        place = self.target.torch_device
        bias = None if bias is None else bias.to(place, _torch_dtype(problem.out_dtype.name))
        spec = problem.activation
        if not spec.dtype.is_narrow:
            return x.to(place, _torch_dtype(spec.dtype.name)), bias
        return self._quantized(x.to(place, torch.float16), spec), bias

    def _quantized(self, x: "torch.Tensor", spec: ActivationSpec) -> "QuantizedActivation":
        """Activations quantized where the product is computed."""
        from humming.activations import quantize_activation

        known: dict[str, Any] = {}
        if spec.granularity == "tensor":
            # What a calibration would find: the scale that covers these very activations.
            known["scale"] = float(x.abs().amax()) / spec.dtype.max if x.numel() else 1.0
            known |= {} if spec.symmetric else {"zero": 0}
        device = self.target.caps.name if self.target.kernel_runs else None
        if self.target.on_accelerator:
            device = None
        return quantize_activation(x, spec, device=device, **known)

    def _multiply(
        self,
        x: "torch.Tensor | QuantizedActivation",
        packed: "PackedWeight",
        bias: "torch.Tensor | None",
        problem: GemmProblem,
    ) -> "tuple[torch.Tensor, float]":
        """The product in the problem's output type, and the seconds that it takes."""
        if not self.target.kernel_runs:
            from humming import reference
            from humming.packing import unpack

            start = time.perf_counter()
            out = reference.matmul(_values(x), unpack(packed), bias, problem.out_dtype)
            return out, time.perf_counter() - start
        from humming.ops import matmul

        def call() -> "torch.Tensor":
            return matmul(
                x,
                packed,
                bias,
                out_dtype=_torch_dtype(problem.out_dtype.name),
                device=self.target.caps.name,
            )

        # On an accelerator the first call loads the kernel, and the time of the next ones counts;
        # a simulated kernel is timed as a curiosity, and once is enough.
        calls = _TIMED_CALLS if self.target.on_accelerator else 1
        if self.target.on_accelerator:
            call()
        self._wait()
        start = time.perf_counter()
        for _ in range(calls):
            out = call()
        self._wait()
        return out, (time.perf_counter() - start) / calls

    def _wait(self) -> None:
        if self.target.on_accelerator:
            import torch

            torch.cuda.synchronize(self.target.torch_device)


@cache
def _plan(problem: GemmProblem, caps: "DeviceCapabilities", m: int) -> KernelPlan:
    # A model has few shapes and many matrices.
    m_range = m_range_of(m, m_ranges(problem, caps))
    return compose(problem, caps, m_range, m=max(m, 1))


def _torch_dtype(name: str) -> "torch.dtype":
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _values(x: "torch.Tensor | QuantizedActivation") -> "torch.Tensor":
    """What is multiplied, as numbers."""
    import torch

    return x if isinstance(x, torch.Tensor) else x.dequantize()


def _compare(
    result: "torch.Tensor",
    plan: KernelPlan,
    x: "torch.Tensor | QuantizedActivation",
    quantized: "QuantizedWeight",
    bias: "torch.Tensor | None",
) -> Check:
    import torch

    from humming import reference

    values = _values(x)
    exact = reference.matmul(values, quantized, bias)
    bound = reference.error_bound(
        plan.problem,
        values,
        quantized,
        bias,
        **plan.roundings,
        x_sizes=None if isinstance(x, torch.Tensor) else x.magnitudes(),
        # The inputs are of either sign, which the tighter bound asks for.
        certain=False,
    )
    error = (result.to(torch.float64) - exact).abs()
    within = error <= bound
    ratio = torch.where(within & (bound == 0), 0.0, error / bound).nan_to_num(torch.inf, torch.inf)
    unbounded = bound.isinf()
    ratio = torch.where(within & unbounded, 0.0, ratio)
    no_verdict = ""
    if bool(within.all()) and bool(unbounded.any()):
        out = plan.problem.out_dtype
        no_verdict = (
            f"{int(unbounded.sum())} of {bound.numel()} outputs have no bound, "
            f"since they may exceed {out}'s {out.max:g}"
        )
    return Check(
        relative_error=reference.relative_error(result, exact),
        relative_bound=reference.relative_bound(bound, exact),
        worst=float(ratio.max()) if ratio.numel() else 0.0,
        passed=bool(within.all()) and not no_verdict,
        no_verdict=no_verdict,
    )
