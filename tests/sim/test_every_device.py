"""Every row of the matrix, simulated: products of random formats and sizes."""

import numpy as np
import pytest
import torch

import humming
from humming import plugins, reference
from humming.composer import plan
from humming.problem import GemmProblem

FORMATS = (
    "int4_g128",
    "int4_g32",
    "int4",
    "int4_tensor",
    "int4_block128",
    "int4_g64_sfp32_s2channel",
    "mxint4",
    "uint4_g32_zp",
    "uint4_zp",
    "uint4_g64_fzp",
    "int4_g16_se4m3_s2tensor",
)


@pytest.mark.parametrize("name", [caps.name for caps in plugins.registry().variants()])
def test_a_product_of_every_simulated_device(name: str, rng: np.random.Generator) -> None:
    caps = plugins.capabilities(name)
    version = plugins.compiler_for(caps).version
    if caps.min_compiler and version < caps.min_compiler:
        pytest.skip(f"{caps.arch} needs compiler {caps.min_compiler}, found {version}")
    torch.manual_seed(int(rng.integers(2**31)))
    activation = "float16"
    if any(row.b == "bfloat16" for row in caps.mma) and rng.integers(2):
        activation = "bfloat16"
    spec = str(rng.choice(FORMATS))
    if spec.endswith("_fzp") and activation == "bfloat16":
        spec += "_sbf16"  # a float zero point is subtracted in the operand's type
    m, n, k = int(rng.integers(1, 70)), int(rng.integers(1, 150)), int(rng.integers(128, 700))
    out_dtype = str(rng.choice(["float32", activation]))
    print(name, spec, activation, out_dtype, m, n, k)

    problem = GemmProblem.parse(f"{spec} x {activation} -> {out_dtype}", n, k, bias=True)
    weight = humming.quantize((torch.randn(n, k) + 0.3) * k**-0.5, problem.weight)
    x = torch.randn(m, k).to(getattr(torch, activation))
    bias = torch.randn(n).to(getattr(torch, out_dtype))
    out = humming.matmul(
        x, humming.pack(weight), bias, out_dtype=getattr(torch, out_dtype), device=name
    )
    composed = plan(problem, caps, m=m)
    bound = reference.error_bound(
        problem,
        x,
        weight,
        bias,
        **composed.roundings,
    )
    assert ((out.double() - reference.matmul(x, weight, bias)).abs() <= bound).all()
