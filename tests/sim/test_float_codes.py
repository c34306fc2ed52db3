"""Every code of float weights and of narrow scales through whole kernels, NaN and -0 included."""

import numpy as np
import pytest
import torch

import humming
from humming import plugins
from humming.composer import decide, m_range_of
from humming.dtypes import DataType
from humming.formats import WeightSpec
from humming.problem import GemmProblem
from humming.quantized import QuantizedWeight, pack_bits

# One device of each set of conversions: none, bfloat16, fp8.
DEVICES = ("t4", "a100", "h200", "zw810e")
FLOATS = (
    *("float3e1m1", "float4e2m1", "float5e3m1", "float6e2m3", "float6e3m2", "float7e2m4"),
    *("float8e4m3", "float8e5m2", "float8e3m4"),
)
ROWS = TOKENS = 16


def places(rng: np.random.Generator, k: int) -> torch.Tensor:
    """One value of K of each token, all in different pieces of K."""
    part = k // TOKENS
    return torch.from_numpy(part * np.arange(TOKENS) + rng.integers(0, part, TOKENS))


def product(
    device: str, problem: GemmProblem, weight: QuantizedWeight, columns: torch.Tensor
) -> torch.Tensor:
    """What one-hot tokens read of a weight: float64 [rows, tokens]."""
    x = torch.zeros(TOKENS, problem.k, dtype=getattr(torch, problem.activation.dtype.name))
    x[torch.arange(TOKENS), columns] = 1
    packed = humming.pack(weight)
    out = humming.matmul(x, packed, out_dtype=torch.float32, device=f"sim:{device}")
    return out.double().T


def served(device: str, problem: GemmProblem) -> bool:
    caps = plugins.capabilities(f"sim:{device}")
    return decide(problem, caps, m_range_of(TOKENS), plugins.registry()).chosen is not None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ["float16", "bfloat16"])
@pytest.mark.parametrize("code", FLOATS)
def test_every_code_of_a_weight(device: str, code: str, activation: str) -> None:
    rng = np.random.default_rng()
    spec, k = WeightSpec.parse(f"{code}_sfp32"), 256
    problem = GemmProblem.parse(f"{code}_sfp32 x {activation} -> float32", ROWS, k)
    if not served(device, problem):
        pytest.skip("the type does not fit the operands of the device")
    count = 1 << spec.dtype.bits
    table = torch.tensor(spec.dtype.decode_table())
    drawn = torch.from_numpy(rng.permutation(np.arange(ROWS * TOKENS) % count))
    drawn = drawn.reshape(ROWS, TOKENS)
    special = ~table.isfinite()
    finite = torch.where(special[drawn], 0, drawn)
    columns, scales = places(rng, k), torch.ones(ROWS, 1)
    for read in (finite, spoilt(rng, finite, special)):
        codes = torch.zeros(ROWS, k, dtype=torch.uint8)
        codes[:, columns] = read.to(torch.uint8)
        weight = QuantizedWeight(spec, (ROWS, k), pack_bits(codes, spec.dtype.bits), scales)
        found = product(device, problem, weight, columns)
        # In a row with NaN or infinity every token meets it, times zero or one.
        exact = torch.where(special[read].any(1, keepdim=True), torch.nan, table[read])
        alone = special[read]
        assert torch.equal(found.isnan() | alone, exact.isnan() | alone)
        assert torch.equal(found[~exact.isnan()], exact[~exact.isnan()])
        assert not found[alone].isfinite().any()


def spoilt(rng: np.random.Generator, codes: torch.Tensor, special: torch.Tensor) -> torch.Tensor:
    """Codes with one that is no number in some of the rows, and in others none."""
    codes = codes.clone()
    for row in range(0, ROWS, 3):
        if special.any():
            column = int(rng.integers(TOKENS))
            codes[row, column] = int(rng.choice(special.nonzero().flatten().numpy()))
    return codes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ["float16", "bfloat16"])
@pytest.mark.parametrize("spec", ["nvfp4", "mxfp4", "float8e4m3_g16_se4m3", "int4_g32_sue8m0"])
def test_every_code_of_a_scale(device: str, spec: str, activation: str) -> None:
    rng = np.random.default_rng()
    weight_spec = WeightSpec.parse(spec)
    k = 16 * weight_spec.group_size
    problem = GemmProblem.parse(f"{spec} x {activation} -> float32", ROWS, k)
    if not served(device, problem):
        pytest.skip("the device has no such operands")
    scale: DataType = weight_spec.scale_dtype
    table = torch.tensor(scale.decode_table())
    drawn = torch.from_numpy(rng.permutation(256).reshape(ROWS, 16).astype(np.uint8))
    columns = places(rng, k)
    codes = torch.zeros(ROWS, k, dtype=torch.uint8)
    value = 1.0 if weight_spec.dtype.is_float else -3.0
    codes[:, columns] = int(weight_spec.dtype.encode(value))
    packed = pack_bits(codes, weight_spec.dtype.bits)
    stored = drawn if scale == "float8e8m0" else drawn.view(torch.float8_e4m3fn)
    second = torch.ones(1, 1) if weight_spec.second_scale != "none" else None
    weight = QuantizedWeight(weight_spec, (ROWS, k), packed, stored, None, second)
    found = product(device, problem, weight, columns)
    exact = value * table[drawn.long()]
    broken = exact.isnan().any(1)
    assert found[broken].isnan().all()
    overflows = exact[~broken].abs() > torch.finfo(torch.float32).max
    assert torch.equal(found[~broken][~overflows], exact[~broken][~overflows])
