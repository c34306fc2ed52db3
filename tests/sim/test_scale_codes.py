"""Every code of narrow scale types through a kernel, exactly."""

import numpy as np
import pytest
import torch

import humming
from humming import reference
from humming.formats import WeightSpec
from humming.quantized import QuantizedWeight, pack_bits


def product_of_scales(spec: str, scales: torch.Tensor, group: int) -> tuple[torch.Tensor, ...]:
    """What a kernel makes of [16, G] scales: column g is theirs of group g, and the exact one."""
    n, groups = scales.shape
    k = groups * group
    codes = pack_bits(torch.ones(n, k, dtype=torch.uint8), 4)
    weight = QuantizedWeight(WeightSpec.parse(spec), (n, k), codes, scales)
    x = torch.zeros(groups, k, dtype=torch.float16)
    x[torch.arange(groups), torch.arange(groups) * group] = 1
    out = humming.matmul(x, humming.pack(weight), out_dtype=torch.float32)
    return out, reference.matmul(x, weight)


def test_all_e4m3_scales() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0  # NaN: below, since it spreads over its row
    scales = codes.view(torch.float8_e4m3fn).view(16, 16)
    out, exact = product_of_scales("int4_g16_se4m3", scales, 16)
    assert torch.equal(out.double(), exact)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_e4m3_scales_give_nan(code: int) -> None:
    scales = torch.full((16, 4), 0x38, dtype=torch.uint8)  # 1.0
    scales[3, 2] = code
    out, _ = product_of_scales("int4_g16_se4m3", scales.view(torch.float8_e4m3fn), 16)
    assert out[2, 3].isnan()
    assert out[:, [0, 1, 2, 4, 15]].eq(1).logical_or(out[:, [0, 1, 2, 4, 15]].eq(0)).all()


def test_ue8m0_scales_from_end_to_end() -> None:
    codes = np.array([0, 1, 2, 103, 126, 127, 128, 129, 200, 252, 253, 254], np.uint8)
    scales = torch.from_numpy(np.resize(codes, (16, 12)))
    out, exact = product_of_scales("mxint4", scales, 32)
    assert torch.equal(out.double(), exact)
    scales[5, 7] = 255
    out, _ = product_of_scales("mxint4", scales, 32)
    assert out[7, 5].isnan()
