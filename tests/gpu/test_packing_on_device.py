"""Quantizing and packing on the accelerator: the same bits as on the CPU, and back."""

import pytest
import torch

from humming.packing import pack, unpack
from humming.quantizer import quantize
from humming.reference import dequantize, matmul

pytestmark = pytest.mark.gpu

FORMATS = [
    *(f"int{bits}_g32" for bits in range(1, 9)),
    *(f"uint{bits}_g32_zp" for bits in range(1, 9)),
    *("uint4_g48_fzp", "int4_tensor", "int8", "int4_block5x48", "fp8_block128", "fp8_tensor"),
    *("mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8", "mxint4", "nvfp4", "float8e3m4"),
    *("float4e0m3_g16", "int4_g32_s2channel", "fp4_g16_se4m3_s2channel"),
]


@pytest.mark.parametrize("operand_bits", [16, 8, 4])
@pytest.mark.parametrize("name", FORMATS)
def test_round_trip(name: str, operand_bits: int) -> None:
    for n, k in [(1, 1), (37, 203), (128, 576)]:
        weight = quantize(torch.randn(n, k), name)
        on_device = weight.to("cuda")
        packed = pack(on_device, operand_bits)
        assert packed.codes.is_cuda
        assert packed.equals(pack(weight, operand_bits))
        assert packed.equals(pack(weight, operand_bits, device="cuda"))
        assert unpack(packed).equals(weight)
        assert all(tensor.data_ptr() % 16 == 0 for tensor in packed.tensors().values())
        assert packed.to("cpu").equals(packed)


@pytest.mark.parametrize("method", ["absmax", "mse"])
@pytest.mark.parametrize("name", FORMATS)
def test_quantized_as_on_the_cpu(name: str, method: str) -> None:
    w = torch.randn(70, 200).half()
    here, there = quantize(w, name, method=method), quantize(w.cuda(), name, method=method)
    assert there.codes.is_cuda
    assert there.shape == here.shape
    if method == "absmax":
        # The last bit of a division may differ, and rarely a scale or code that is rounded from it.
        same = dequantize(here).isclose(dequantize(there).cpu(), rtol=1e-5, atol=0)
        assert float(same.double().mean()) > 0.98
    error = [(dequantize(q).cpu() - w.double()).norm() for q in (here, there)]
    assert float(error[1]) == pytest.approx(float(error[0]), rel=1e-2)


@pytest.mark.parametrize("name", ["int4_g32", "uint4_g32_zp", "uint4_g48_fzp", "nvfp4"])
def test_zeros_stay_zero(name: str) -> None:
    numbers = dequantize(quantize(torch.zeros(20, 100, device="cuda").half(), name))
    assert not numbers.any()


@pytest.mark.parametrize("name", ["int4_g32", "uint4_g32_zp", "nvfp4", "mxfp4"])
def test_the_reference_is_the_same(name: str) -> None:
    weight, x = quantize(torch.randn(48, 200), name), torch.randn(5, 200).bfloat16()
    there = matmul(x.cuda(), weight.to("cuda"))
    torch.testing.assert_close(there.cpu(), matmul(x, weight), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["int4_g128", "int3_g128"])
def test_a_large_weight_takes_little_more_memory_than_itself(name: str) -> None:
    weight = quantize(torch.randn(8192, 8192, device="cuda").half(), name)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    packed = pack(weight)
    extra = torch.cuda.max_memory_allocated() - before - packed.nbytes
    assert extra < 128 << 20
    assert unpack(packed).equals(weight)
