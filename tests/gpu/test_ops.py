"""`humming.matmul` on the device against float64: formats, sizes, strides, alignment, edges."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import humming
from humming.errors import UnsupportedError

pytestmark = pytest.mark.gpu

# Each lies at or beside an edge of a range of M, a token tile or a warp.
TOKENS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 32, 33, 64, 65, 127, 128, 129, 300, 1025)
FORMATS = (
    "int4_g32",
    "int4_g64",
    "int4_g128",
    "int4_channel",
    "int4_g128_sbf16",
    "uint4_g32_zp",
    "uint4_g128_zp",
    "uint4_channel_zp",
)
DTYPES = (torch.float16, torch.bfloat16)
FLOATS = (*DTYPES, torch.float32)


@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens(m: int, dtype: torch.dtype, make) -> None:
    product = make(m, 512, 1024, dtype=dtype)
    product.check(humming.matmul(product.x, product.weight))


@pytest.mark.parametrize("m", [1, 24, 200])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight", FORMATS)
def test_formats(weight: str, dtype: torch.dtype, m: int, make) -> None:
    product = make(m, 320, 768, weight, dtype, bias=dtype)
    product.check(humming.matmul(product.x, product.weight, product.bias))


@pytest.mark.parametrize("m", [1, 5, 100])
@pytest.mark.parametrize("n", [1, 7, 16, 64, 100, 232, 448, 576, 1001])
def test_outputs(n: int, m: int, make) -> None:
    product = make(m, n, 256, "int4_g32", bias=torch.bfloat16)
    product.check(humming.matmul(product.x, product.weight, product.bias))


@pytest.mark.parametrize("k", [1, 7, 8, 24, 63, 64, 65, 136, 200, 328, 464, 576, 1531, 1536, 2880])
def test_inputs(k: int, make) -> None:
    for m in (1, 20):
        product = make(m, 128, k, "int4_g32")
        product.check(humming.matmul(product.x, product.weight))


@pytest.mark.parametrize("weight", ["int4_g128", "uint4_g128_zp"])
@pytest.mark.parametrize(("n", "k"), [(576, 576), (1536, 576), (576, 1536), (192, 576)])
def test_sizes_that_no_tile_divides(n: int, k: int, weight: str, make) -> None:
    for m in (1, 16, 77):
        product = make(m, n, k, weight)
        product.check(humming.matmul(product.x, product.weight))


@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_types(dtype: torch.dtype, out_dtype: torch.dtype, biased: bool, make) -> None:
    for m in (3, 150):
        product = make(m, 264, 512, dtype=dtype, bias=out_dtype if biased else None)
        out = humming.matmul(product.x, product.weight, product.bias, out_dtype=out_dtype)
        assert out.dtype == out_dtype
        product.check(out)


def test_a_large_product_like_those_of_a_model(make) -> None:
    for m in (1, 16, 512):
        product = make(m, 8192, 8192)
        product.check(humming.matmul(product.x, product.weight))


@pytest.mark.parametrize("m", [0, (0, 3), (2, 0, 3)], ids=str)
def test_no_tokens_give_an_empty_result_and_harm_nothing(m: int | tuple[int, ...], make) -> None:
    product = make(m, 64, 128)
    out = humming.matmul(product.x, product.weight, out_dtype=torch.float32)
    assert out.shape == (*product.x.shape[:-1], 64)
    assert (out.dtype, out.device) == (torch.float32, product.x.device)
    torch.cuda.synchronize()
    following = make(4, 64, 128)
    following.check(humming.matmul(following.x, following.weight))


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 1, 5)], ids=str)
def test_leading_dimensions(shape: tuple[int, ...], make) -> None:
    product = make(shape, 96, 256, bias=torch.bfloat16)
    product.check(humming.matmul(product.x, product.weight, product.bias))


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


# Ways for activations [m, k] to lie in memory that have gone wrong somewhere.
VIEWS = {
    "transposed": lambda m, k: _randn(k, m).t(),
    "left-half": lambda m, k: _randn(m, 2 * k)[:, :k],
    "right-half": lambda m, k: _randn(m, 2 * k)[:, k:],
    "rows-not-16-byte-aligned": lambda m, k: _randn(m, k + 1)[:, :k],
    "every-second-row": lambda m, k: _randn(2 * m, k)[::2],
    "every-second-column": lambda m, k: _randn(m, 2 * k)[:, ::2],
    "offset-of-one": lambda m, k: _randn(m * k + 1)[1:].view(m, k),
    "offset-of-eight": lambda m, k: _randn(m * k + 8)[8:].view(m, k),
    "one-row-repeated": lambda m, k: _randn(1, k).expand(m, k),
    "three-dimensional-slice": lambda m, k: _randn(m, 4, k)[:, 1],
    "three-dimensional-transposed": lambda m, k: _randn(k, 3, m).permute(2, 1, 0),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("m", [1, 6, 130])
def test_activations_of_any_strides(view: str, m: int, make) -> None:
    product = make(m, 128, 256)
    x = VIEWS[view](m, 256)
    product.check(humming.matmul(x, product.weight), x)


def test_bias_at_any_address(make) -> None:
    product = make(5, 131, 256, bias=torch.bfloat16)
    askew = torch.empty(132, device="cuda", dtype=torch.bfloat16)[1:].copy_(product.bias)
    product.check(humming.matmul(product.x, product.weight, askew))


@pytest.mark.parametrize("n", [128, 131])
@pytest.mark.parametrize("m", [1, 9, 130])
def test_out_is_written_and_nothing_beside_it(m: int, n: int, make) -> None:
    product = make(m, n, 256)
    guarded = torch.full((m + 2, n + 32), torch.nan, device="cuda", dtype=torch.float32)
    out = guarded[1:-1, 16:-16]
    assert humming.matmul(product.x, product.weight, out=out) is out
    product.check(out)
    assert int(guarded.isnan().sum()) == guarded.numel() - out.numel()


def test_activations_beyond_the_last_row_and_column_are_not_used(make) -> None:
    product = make(3, 128, 264, "int4_g32")
    surroundings = torch.full((5, 264 + 16), torch.nan, device="cuda", dtype=torch.bfloat16)
    x = surroundings[1:-1, 8:-8].copy_(product.x)
    product.check(humming.matmul(x, product.weight))


def test_values_that_are_no_numbers_stay_in_their_rows(make) -> None:
    product = make(20, 128, 256)
    x = product.x.clone()
    x[3, 5], x[7, 200] = torch.nan, torch.inf
    out = humming.matmul(x, product.weight)
    assert out[3].isnan().all()
    assert not out[7].isfinite().any()
    sound = [row for row in range(20) if row not in (3, 7)]
    product.check(out[sound], x[sound])


@pytest.mark.parametrize("data", ["one-large-channel", "all-positive", "tiny", "zero-rows"])
def test_activations_unlike_normal_ones(data: str, make) -> None:
    for m in (2, 40, 600):
        product = make(m, 256, 1024)
        x = product.x.clone()
        if data == "one-large-channel":
            x[:, 17] *= 100
        elif data == "all-positive":
            x.abs_()
        elif data == "tiny":
            x *= 1e-30
        else:
            x[::2] = 0
        out = humming.matmul(x, product.weight)
        product.check(out, x, certain=True)
        if data == "zero-rows":
            assert not out[::2].any()


def test_half_precision_overflows_to_infinity_and_not_to_nan(make) -> None:
    product = make(4, 64, 512, dtype=torch.float16)
    x = torch.full_like(product.x, 60000.0)
    out = humming.matmul(x, product.weight)
    exact = x.double() @ humming.reference.dequantize(product.quantized).T
    assert not out.isnan().any()
    assert out[exact.abs() > 2 * 65504].isinf().all()


def test_results_repeat_bit_for_bit(make) -> None:
    for m in (1, 16, 100, 500):
        product = make(m, 512, 4096)
        first = humming.matmul(product.x, product.weight)
        for _ in range(50):
            assert torch.equal(humming.matmul(product.x, product.weight), first)


def test_refuses_tensors_elsewhere_and_works_after_it(make) -> None:
    product = make(4, 64, 128)
    with pytest.raises(UnsupportedError, match="activations on cpu with the weight on cuda:0"):
        humming.matmul(product.x.cpu(), product.weight)
    product.check(humming.matmul(product.x, product.weight))


def test_operator_checks_a_packed_weight_that_comes_in_parts(make) -> None:
    product, other = make(4, 64, 128), make(4, 48, 128)
    weight = product.weight
    parts = (weight.scales, None, None, None, "int4_g128", 64, 128, torch.bfloat16)
    torch.ops.humming.matmul(product.x, weight.codes, *parts)
    with pytest.raises(UnsupportedError, match="codes"):
        torch.ops.humming.matmul(product.x, other.weight.codes, *parts)


def test_operator_and_function_agree(make) -> None:
    product = make(20, 128, 256, "uint4_g32_zp", bias=torch.bfloat16)
    weight = product.weight
    parts = (weight.codes, weight.scales, weight.zeros, None, product.bias)
    out = torch.ops.humming.matmul(product.x, *parts, "uint4_g32_zp", 128, 256, torch.bfloat16)
    assert torch.equal(out, humming.matmul(product.x, weight, product.bias))


def test_modes_of_torch_see_the_operator(make) -> None:
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen: list[str] = []
    product = make(4, 64, 128)
    with Watch():
        humming.matmul(product.x, product.weight)
    assert "humming.matmul.default" in seen


def test_operators_keep_torchs_rules(make) -> None:
    product = make(4, 64, 128, bias=torch.bfloat16)
    weight = product.weight
    parts = (weight.codes, weight.scales, None, None, product.bias, "int4_g128", 64, 128)
    torch.library.opcheck(torch.ops.humming.matmul.default, (product.x, *parts, torch.bfloat16))
    out = torch.empty(4, 64, device="cuda", dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.humming.matmul_out.default, (product.x, *parts), {"out": out})
