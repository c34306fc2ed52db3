"""Scales in 16 bits: how far weights move, and what has no room there."""

import pytest
import torch

from humming.checkpoints.rounding import round_scales
from humming.errors import UnsupportedError
from humming.formats import WeightSpec
from humming.quantized import QuantizedWeight, pack_bits
from humming.reference import dequantize


def a_weight(name: str, scale: float = 0.01) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(1)
    spec, (n, k) = WeightSpec.parse(name), (16, 128)
    codes = torch.randint(0, 1 << spec.dtype.bits, (n, k), dtype=torch.uint8, generator=generator)
    shape = spec.scale_shape(n, k)
    scales = scale * (0.5 + torch.rand(shape, generator=generator))
    zeros = None
    if spec.zero_point == "float":
        zeros = 15 * torch.rand(shape, generator=generator)
    return QuantizedWeight(spec, (n, k), pack_bits(codes, spec.dtype.bits), scales, zeros)


@pytest.mark.parametrize(("dtype", "bits"), [("float16", 11), ("bfloat16", 8)])
@pytest.mark.parametrize("name", ["int4_g32_sfp32", "uint4_g32_fzp_sfp32"])
def test_rounding(name: str, dtype: str, bits: int) -> None:
    weight = a_weight(name)
    rounded = round_scales(weight, dtype)
    assert torch.equal(rounded.codes, weight.codes)
    assert rounded.spec.scale_dtype == dtype
    # A scale moves its code, a zero point the product of both, by half a unit each.
    codes = weight.codes_unpacked().double()
    if weight.spec.dtype.is_signed:
        codes = 8 * torch.ones_like(codes)
    scales = weight.scales.double().repeat_interleave(32, 1)
    zeros = 0 if weight.zeros is None else weight.zeros.double().repeat_interleave(32, 1)
    bound = 2.0**-bits * scales * (codes + 1.01 * zeros)
    assert bool(((dequantize(rounded) - dequantize(weight)).abs() <= bound).all())


def test_what_has_no_room() -> None:
    with pytest.raises(UnsupportedError, match="exceed its range"):
        round_scales(a_weight("int4_g32_sfp32", scale=1e-9))
    with pytest.raises(UnsupportedError, match="exceed its range"):
        round_scales(a_weight("int4_g32_sfp32", scale=1e9))
    assert round_scales(a_weight("int4_g32_sfp32", scale=1e9), "bfloat16").scales.isfinite().all()
    with pytest.raises(UnsupportedError, match="16 bits"):
        round_scales(a_weight("int4_g32_sfp32"), "float32")
