"""Activations quantized on the device: the reference's bits, streams, graphs and views."""

import pytest
import torch
from activation_checks import awkward, check, check_fused, given, halves

import humming
from humming.formats import ActivationSpec

pytestmark = pytest.mark.gpu

FORMATS = (
    *("int8", "int8_asym", "int8_tensor", "int8_tensor_asym", "int8_g128", "int8_sfp16", "int4"),
    *("int4_g128", "int8_g6", "int4_g48", "fp8", "fp8_tensor", "fp8_e5m2", "fp8_g128"),
    *("fp8_g32_sue8m0", "float8e3m4", "mxfp8", "mxfp4", "nvfp4", "float4e0m3_nv16"),
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True)
def _fresh_numbers() -> None:
    """Other random numbers in each run; a failure shows how to have the same again."""
    print(f"torch.manual_seed({torch.seed()})")


@pytest.mark.parametrize("m", [1, 3, 16, 200, 3000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, dtype: torch.dtype, m: int) -> None:
    spec = ActivationSpec.parse(name)
    for k in (int(torch.randint(1, 700, ())), 4096):
        x, told = awkward(m, k, dtype, "cuda"), given(spec, "cuda")
        check(humming.quantize_activation(x, spec, **told), x, **told)


@pytest.mark.parametrize("name", ["int8", "mxfp8", "nvfp4", "fp8_g128"])
@pytest.mark.parametrize("k", [8192, 14336, 32768, 65536, 70001])
def test_long_rows(name: str, k: int) -> None:
    x = awkward(17, k, torch.bfloat16, "cuda")
    check(humming.quantize_activation(x, name), x)


@pytest.mark.parametrize("name", ["int8_tensor", "fp8_tensor", "fp8_e5m2_tensor", "fp4_tensor"])
def test_every_code_and_the_halves_between(name: str) -> None:
    x, scale = halves(ActivationSpec.parse(name), torch.float32).cuda(), torch.ones(1).cuda()
    check(humming.quantize_activation(x, name, scale=scale), x, scale=scale)


@pytest.mark.parametrize("fuse", ["silu_mul", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("name", ["int8", "fp8_g128", "mxfp8", "nvfp4"])
def test_fused(name: str, fuse: str) -> None:
    for m, k in ((1, 301), (700, 4096)):
        x = torch.randn(m, k * (2 if fuse == "silu_mul" else 1), device="cuda").bfloat16()
        check_fused(humming.quantize_activation(x, name, fuse=fuse), x, fuse)


def test_no_tokens_harm_nothing() -> None:
    q = humming.quantize_activation(torch.empty(0, 64, device="cuda"), "fp8")
    assert q.codes.shape == (0, 64)
    x = torch.randn(4, 64, device="cuda")
    check(humming.quantize_activation(x, "fp8"), x)
    torch.cuda.synchronize()


@pytest.mark.parametrize("offset", range(9))
def test_offsets_that_break_alignment(offset: int) -> None:
    buffer = torch.randn(offset + 33 * 512, device="cuda").half()
    x = buffer[offset:].view(33, 512)
    for name in ("int8", "mxfp4"):
        check(humming.quantize_activation(x, name), x)


def test_waits_for_what_its_stream_does_before() -> None:
    source = torch.randn(64, 4096, device="cuda").half()
    humming.quantize_activation(source, "int8")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.zeros_like(source)
        torch.cuda._sleep(20_000_000)
        x.copy_(source)
        q = humming.quantize_activation(x, "int8")
        x.zero_()  # must not overtake
        torch.cuda.current_stream().synchronize()
    check(q, source)


def test_a_graph_is_replayed_with_other_values() -> None:
    x = torch.randn(16, 4096, device="cuda").half()
    humming.quantize_activation(x, "mxfp8")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = humming.quantize_activation(x, "mxfp8")
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        check(q, x)
