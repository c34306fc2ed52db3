"""Powers of two that kernels leave out of scaled operands come back, at the ends of every range."""

import numpy as np
import pytest
import torch

import humming
from humming import plugins, reference
from humming.compiler import compile_plan
from humming.composer import KernelPlan, compose_each, decide, m_range_of
from humming.problem import GemmProblem
from humming.quantized import SCALE_TENSOR_DTYPES, QuantizedWeight, pack_bits
from humming.runtime import Kernel, Operands, current_stream
from humming.tuned import NO_RECORDS

IN_HALVES = "fp8_g32_se4m3 x fp16"
PRODUCTS = (
    *("mxfp4 x bf16", "mxfp6_e2m3 x bf16", "mxint4 x bf16", "uint4_g32_zp_sue8m0 x bf16"),
    *("float3e1m1_g32_sue8m0 x bf16", IN_HALVES),
)
CASES = [
    *((name, device) for name in PRODUCTS for device in ("a100", "h200", "zw810", "m890")),
    (IN_HALVES, "t4"),  # which has no bfloat16
]
# The least and the largest of a type, those around 1, and of signed types their opposites.
SCALES = {
    "float8e8m0": (0, 1, 2, 3, 126, 127, 128, 251, 252, 253, 254),
    "float8e4m3": (0x00, 0x01, 0x07, 0x08, 0x38, 0x7D, 0x7E, 0x81, 0xFE),
}
# By which tokens are multiplied, so that every product is a normal float32 for one of them.
TOKENS = {"bfloat16": (2.0**-20, 1.0, 2.0**20), "float16": (2.0**-8, 1.0, 2.0**8)}
ROWS, GROUP, GROUPS = 256, 32, 16


def plans_of(problem: GemmProblem, device: str) -> list[KernelPlan]:
    """The best of each mainloop that leaves something out."""
    caps = plugins.capabilities(f"sim:{device}")
    decision = decide(problem, caps, m_range_of(GROUPS), plugins.registry(), records=NO_RECORDS)
    found = [option for option in decision.ready if option.lowering.scale_left_out(problem)]
    best = {option.lowering.mainloop: option for option in reversed(found)}
    return compose_each(decision, best.values())


def extreme(problem: GemmProblem, rng: np.random.Generator) -> tuple[QuantizedWeight, torch.Tensor]:
    """A weight that has every code under every one of the scales, and where: [tokens] of K."""
    spec, k = problem.weight, problem.k
    table = spec.dtype.decode_table()
    known = np.flatnonzero(np.isfinite(table))
    codes = rng.choice(known, (ROWS, k))
    columns = np.arange(GROUPS) * GROUP + rng.integers(0, GROUP, GROUPS)
    pairs = [(code, scale) for scale in SCALES[spec.scale_dtype.name] for code in known]
    # The same code and scale more than once where there is room.
    drawn = np.resize(rng.permutation(pairs), (ROWS * GROUPS, 2)).reshape(ROWS, GROUPS, 2)
    assert len(pairs) <= ROWS * GROUPS
    codes[:, columns] = drawn[..., 0]
    scales = torch.from_numpy(drawn[..., 1].astype(np.uint8))
    zeros = None
    if spec.zero_point != "none":
        zeros = torch.from_numpy(rng.integers(0, 16, (ROWS, GROUPS)).astype(np.uint8))
    packed = pack_bits(torch.from_numpy(codes.astype(np.uint8)), spec.dtype.bits)
    stored = scales.view(SCALE_TENSOR_DTYPES[spec.scale_dtype])
    return QuantizedWeight(spec, (ROWS, k), packed, stored, zeros), torch.from_numpy(columns)


@pytest.mark.parametrize(("name", "device"), CASES)
def test_extremes(name: str, device: str, rng: np.random.Generator) -> None:
    problem = GemmProblem.parse(f"{name} -> float32", ROWS, GROUP * GROUPS)
    dtype = getattr(torch, problem.activation.dtype.name)
    weight, columns = extreme(problem, rng)
    plans = plans_of(problem, device)
    assert plans
    for plan in plans:
        print(plan.lowering.name, plan.tile)
        kernel = Kernel(plan, -1, compile_plan(plan))
        packed = humming.pack(weight, operand_bits=plan.lowering.packed_bits)
        operands = Operands(packed.codes, packed.scales, packed.zeros, packed.second_scale, None)
        left, judged = plan.lowering.scale_left_out(problem), torch.zeros(GROUPS, ROWS, dtype=bool)
        for value in TOKENS[problem.activation.dtype.name]:
            x = torch.zeros(GROUPS, problem.k, dtype=dtype)
            x[torch.arange(GROUPS), columns] = value
            out = torch.full((GROUPS, ROWS), torch.nan)
            kernel.launch(x, operands, out, current_stream(-1), None)
            judged |= compared(out.double(), reference.matmul(x, weight), left)
        assert judged.all()


def compared(found: torch.Tensor, exact: torch.Tensor, left: int) -> torch.Tensor:
    """Where an output had to be exact, having failed if one is not."""
    limits = torch.finfo(torch.float32)
    assert left
    beyond = exact.abs() > limits.max
    assert torch.equal(found[beyond], exact[beyond].sign() * torch.inf)
    # Sums are smaller by what is left out, and round where that is no normal number.
    subnormal = exact.abs() < limits.tiny * 2**left
    least = limits.tiny * limits.eps
    assert ((found - exact).abs()[subnormal] <= least * 2**left).all()
    certain = ~beyond & ~subnormal
    assert torch.equal(found[certain], exact[certain])
    return certain | (exact == 0)
