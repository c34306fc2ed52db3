"""Every code type x activation x scale on the present card, by the means of several devices."""

from itertools import count

import pytest
import torch
from products import ACTIVATIONS, CODES, GRANULARITIES, SCALES, like, product_of

import humming
from humming.capability import DeviceCapabilities
from humming.compiler import compile_many
from humming.composer import KernelPlan, compose, decide, m_range_of
from humming.formats import WeightSpec
from humming.plugins import capabilities, registry
from humming.problem import GemmProblem
from humming.quantized import QuantizedWeight, pack_bits
from humming.runtime import Kernel

pytestmark = pytest.mark.gpu

DEVICES = ("t4", "a100_80gb", "rtx4090", "present")
TOKENS = (1, 7, 16, 33, 100, 200, 300, 600)
SHAPES = ((256, 512), (208, 1088), (40, 72), (1, 200), (576, 1536), (130, 4096))


def caps_of(name: str) -> DeviceCapabilities:
    card = capabilities()
    return card if name == "present" else like(card, capabilities(name))


def run(plan: KernelPlan, kernel: Kernel, m: int) -> float:
    """By how much a random product exceeds its bound, in a poisoned output with guards."""
    product = product_of(plan, m, "cuda")
    dtype = getattr(torch, plan.problem.out_dtype.name)
    guarded = torch.full((m + 2, plan.problem.n), torch.nan, device="cuda", dtype=dtype)
    tokens, stream = product.tokens, torch.cuda.current_stream().cuda_stream
    kernel.launch(tokens.x, product.operands, guarded[1:-1], stream, tokens.scales)
    torch.cuda.synchronize()
    assert guarded[0].isnan().all(), "wrote before the output"
    assert guarded[-1].isnan().all(), "wrote behind the output"
    return product.excess(guarded[1:-1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_format(device: str, activation: str) -> None:
    caps = caps_of(device)
    if not any(row.b in ("bfloat16",) for row in caps.mma) and activation == "bf16":
        pytest.skip("has no bfloat16")
    # Which scales, sizes and tokens a code type meets differs from one activation to the next.
    turn = count(ACTIVATIONS.index(activation) * 5 + DEVICES.index(device) * 3)
    plans: list[tuple[KernelPlan, int]] = []
    for code in CODES:
        for _ in range(2):
            place = next(turn)
            name = code + GRANULARITIES[place % 8] + SCALES[place % 5]
            if code.startswith("uint") and place % 2:
                name += "_zp"
            if place % 3 == 0:
                name += "_s2channel" if "_tensor" in name else "_s2tensor"
            (n, k), m = SHAPES[place % 6], TOKENS[place % 8]
            out = ("float32", "bfloat16", "float16")[place % 3]
            problem = GemmProblem.parse(f"{name} x {activation} -> {out}", n, k, bias=place % 2 > 0)
            if decide(problem, caps, m_range_of(m), registry()).chosen:
                plans.append((compose(problem, caps, m_range_of(m)), m))
    assert len(plans) > len(CODES)
    worst = {}
    compiled = compile_many([plan for plan, _ in plans])
    for (plan, m), made in zip(plans, compiled, strict=True):
        excess = run(plan, Kernel(plan, 0, made), m)
        if not excess <= 0:
            worst[f"{plan.problem} m={m} {plan.lowering.name} {plan.tile}"] = excess
    assert not worst


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("activation", ["float16", "bfloat16"])
def test_every_code_is_exact(code: str, activation: str) -> None:
    """An identity of activations reads every code of a type back, times a scale of one."""
    spec = WeightSpec.parse(f"{code}_sfp32")
    bits, k = spec.dtype.bits, 256
    codes = (torch.arange(16)[:, None] * 16 + torch.arange(k)) % (1 << bits)
    numbers = torch.tensor(spec.dtype.decode_table())[codes]
    codes = torch.where(numbers.isfinite(), codes, 0)  # NaN and infinity spread over their row
    weight = QuantizedWeight(
        spec, (16, k), pack_bits(codes.to(torch.uint8), bits), torch.ones(16, 1)
    ).to("cuda")
    problem = GemmProblem.parse(f"{code}_sfp32 x {activation} -> float32", 16, k)
    if not decide(problem, capabilities(), (1, 8), registry()).chosen:
        pytest.skip("the type does not fit the operand")
    x = torch.eye(k, device="cuda", dtype=getattr(torch, activation))
    out = humming.matmul(x, humming.pack(weight), out_dtype=torch.float32)
    exact = torch.tensor(spec.dtype.decode_table())[codes].T
    assert torch.equal(out.double().cpu(), exact)
