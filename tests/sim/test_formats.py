"""Weights x activations x scales x devices, sampled: every kernel against the float64 reference."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from products import ACTIVATIONS, CODES, GRANULARITIES, SCALES, random_product

import humming
from humming import plugins
from humming.composer import decide, m_range_of
from humming.problem import GemmProblem
from humming.runtime import Kernel

# One device of each set of warp-level instructions.
DEVICES = ("t4", "a100_80gb", "l40s", "h200", "rtx5090", "zw810e", "m890")


@st.composite
def products(draw: st.DrawFn) -> tuple[str, str, int, int, int, bool, str]:
    """Device, formats and sizes of a product."""
    code = draw(st.sampled_from(CODES))
    weight = code + draw(st.sampled_from(GRANULARITIES)) + draw(st.sampled_from(SCALES))
    if code.startswith("uint") and draw(st.booleans()):
        weight += "_zp"
    if draw(st.integers(0, 3)) == 0:
        weight += "_s2tensor" if "_tensor" not in weight else "_s2channel"
    activation = draw(st.sampled_from(ACTIVATIONS))
    sizes = draw(st.integers(1, 40)), draw(st.integers(1, 100)), draw(st.integers(1, 300))
    out = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    device = draw(st.sampled_from(DEVICES))
    return device, f"{weight} x {activation} -> {out}", *sizes, draw(st.booleans()), out


def check(device: str, name: str, m: int, n: int, k: int, bias: bool) -> bool:
    """Whether the device has a kernel, which then must be right."""
    caps = plugins.capabilities(f"sim:{device}")
    problem = GemmProblem.parse(name, n, k, bias=bias)
    if decide(problem, caps, m_range_of(m), plugins.registry()).chosen is None:
        return False
    product = random_product(problem, caps, m)
    out = torch.full((m, n), torch.nan, dtype=getattr(torch, problem.out_dtype.name))
    tokens = product.tokens
    Kernel(product.plan, -1).launch(tokens.x, product.operands, out, 0, tokens.scales)
    assert product.excess(out) <= 0, (product.plan.lowering.name, product.plan.tile)
    return True


# Each example compiles a kernel, so that shrinking a failing one would take longer than it saves.
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@given(products())
@example(("t4", "int4 x int8 -> float32", 7, 40, 200, True, "float32"))
@example(("rtx5090", "mxfp4 x mxfp4 -> float32", 9, 33, 100, False, "float32"))
def test_random_products(drawn: tuple[str, str, int, int, int, bool, str]) -> None:
    device, name, m, n, k, bias, _ = drawn
    check(device, name, m, n, k, bias)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_on_every_kind_of_device(device: str, activation: str) -> None:
    if (device, activation) == ("t4", "bf16"):
        with pytest.raises(humming.UnsupportedError):
            humming.plan("int4 x bf16", device, n=64, k=64)
        return
    assert check(device, f"int4_g128 x {activation}", 5, 48, 260, bias=True)
