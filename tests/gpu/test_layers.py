"""QuantLinear and torch.compile on the device."""

import pytest
import torch

import humming
from humming import QuantLinear
from humming.errors import UnsupportedError

pytestmark = pytest.mark.gpu

DTYPES = (torch.float16, torch.bfloat16)


def _layer(product, activation: str | None = None) -> QuantLinear:
    return QuantLinear.from_quantized(product.quantized, product.bias, activation=activation)


@pytest.mark.parametrize("shape", [(1,), (2, 7), (0, 4), (500,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward(dtype: torch.dtype, shape: tuple[int, ...], make) -> None:
    product = make(shape, 320, 512, dtype=dtype, bias=dtype)
    product.check(_layer(product)(product.x))


def test_from_linear_computes_what_its_quantized_weight_says(make) -> None:
    linear = torch.nn.Linear(512, 320, device="cuda", dtype=torch.bfloat16)
    layer = QuantLinear.from_linear(linear, "uint4_g32_zp", "bf16", method="mse")
    x = torch.randn(9, 512, device="cuda", dtype=torch.bfloat16)
    exact = humming.reference.matmul(x, humming.unpack(layer.packed), linear.bias)
    torch.testing.assert_close(layer(x).double(), exact, rtol=2**-8, atol=1e-3)


def test_from_linear_moves_to_the_device() -> None:
    layer = QuantLinear.from_linear(torch.nn.Linear(128, 64), device="cuda", activation="fp16")
    assert {tensor.device.type for tensor in layer.buffers()} == {"cuda"}
    assert layer(torch.randn(3, 128, device="cuda", dtype=torch.float16)).shape == (3, 64)


def test_bias_of_another_dtype_is_cast(make) -> None:
    product = make(5, 64, 128, bias=torch.float32)
    rounded = QuantLinear.from_quantized(product.quantized, product.bias.bfloat16())
    assert torch.equal(_layer(product)(product.x), rounded(product.x))


def test_packed_on_the_cpu_and_moved_is_the_same(make) -> None:
    product = make(17, 208, 320, "int4_g32")
    moved = QuantLinear.from_quantized(product.quantized, device="cpu").cuda()
    assert torch.equal(moved(product.x), _layer(product)(product.x))


def test_state_loads_into_a_layer_on_the_device(make) -> None:
    product, other = make(6, 64, 256), make(6, 64, 256)
    layer = _layer(other)
    layer.load_state_dict({k: v.cpu() for k, v in _layer(product).state_dict().items()})
    product.check(layer(product.x))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_model_is_one_graph_and_agrees(mode: str, make) -> None:
    first, second = make(16, 512, 4096), make(16, 4096, 512)
    model = torch.nn.Sequential(_layer(first), torch.nn.SiLU(), _layer(second)).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    with torch.inference_mode():
        for _ in range(4):
            x = torch.randn_like(first.x)
            expected, out = model(x), compiled(x).clone()
            torch.testing.assert_close(
                out, expected, rtol=2**-6, atol=2**-6 * expected.abs().max().item()
            )


def test_compiled_model_takes_any_number_of_tokens(make) -> None:
    product = make(8, 256, 1024)
    layer = _layer(product)
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=graphs, dynamic=True)
    with torch.inference_mode():
        for m in (2, 9, 65, 700):
            x = torch.randn(m, 1024, device="cuda", dtype=torch.bfloat16)
            assert torch.equal(compiled(x), layer(x))
    assert graphs.frame_count == 1


def test_compiled_function_of_a_packed_weight(make) -> None:
    product = make(8, 256, 1024, bias=torch.bfloat16)

    def function(x: torch.Tensor, weight: humming.PackedWeight, bias: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape[0], 256, device=x.device, dtype=torch.float32)
        return humming.matmul(x, weight, bias) + humming.matmul(x, weight, out=out)

    torch._dynamo.reset()
    with torch.inference_mode():
        compiled = torch.compile(function, fullgraph=True)
        arguments = (product.x, product.weight, product.bias)
        torch.testing.assert_close(compiled(*arguments), function(*arguments))


def test_backward_raises(make) -> None:
    product = make(4, 64, 128)
    x = product.x.requires_grad_()
    with pytest.raises(UnsupportedError, match="no_grad"):
        _layer(product)(x).sum().backward()
