"""Activations quantized by kernels in the simulator, compared with the reference bit by bit."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from activation_checks import awkward, check, check_fused, given, halves

import humming
from humming import plugins
from humming.errors import UnsupportedError
from humming.formats import ActivationSpec

# No features of their own, none for 8 bits, for 8, for 4 and 8, another vendor's.
DEVICES = ("sim:t4", "sim:a100_80gb", "sim:h200", "sim:b200", "sim:rtx5090", "sim:m890")
FORMATS = (
    *("int8", "int8_asym", "int8_tensor", "int8_tensor_asym", "int8_g128", "int8_sfp16", "int4"),
    *("int4_g128", "int4_asym", "int8_g16_asym", "int8_g6", "int4_g48", "fp8", "fp8_tensor"),
    *("fp8_e5m2", "fp8_g128", "fp8_g128_sbf16", "fp8_g32_sue8m0", "float8e3m4", "fp4_tensor"),
    *("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4", "float4e0m3_nv16", "float8e5m2_g520"),
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True)
def _fresh_numbers(rng: np.random.Generator) -> Iterator[None]:
    """Other inputs in each run, and outputs that are full of NaN before they are written."""
    torch.manual_seed(int(rng.integers(2**31)))
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_what_is_not_written_would_be_seen() -> None:
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3, 40, dtype=torch.uint8).min() == 255
    assert torch.zeros(1).new_empty(5, dtype=torch.float8_e4m3fn).isnan().all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("device", DEVICES[::2])
def test_formats(name: str, device: str, rng: np.random.Generator) -> None:
    spec, dtype = ActivationSpec.parse(name), DTYPES[int(rng.integers(3))]
    m, k = int(rng.integers(1, 12)), int(rng.integers(1, 700))
    print(dtype, m, k)
    x, told = awkward(m, k, dtype), given(spec)
    check(humming.quantize_activation(x, spec, device=device, **told), x, **told)


@pytest.mark.parametrize("name", [caps.name for caps in plugins.registry().variants()])
def test_every_device(name: str, rng: np.random.Generator) -> None:
    caps = plugins.capabilities(name)
    version = plugins.compiler_for(caps).version
    if caps.min_compiler and version < caps.min_compiler:
        pytest.skip(f"{caps.arch} needs compiler {caps.min_compiler}, found {version}")
    spec = ActivationSpec.parse(str(rng.choice(FORMATS)))
    dtype = DTYPES[int(rng.integers(3))]
    m, k = int(rng.integers(1, 9)), int(rng.integers(1, 400))
    print(spec, dtype, m, k)
    x, told = awkward(m, k, dtype), given(spec)
    check(humming.quantize_activation(x, spec, device=name, **told), x, **told)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name",
    [
        *("int8_tensor", "int4_tensor", "int8_tensor_asym", "fp8_tensor", "fp8_e5m2_tensor"),
        *("float8e3m4_tensor", "fp4_tensor", "float4e0m3_tensor", "float8e6m1_tensor"),
    ],
)
def test_every_code_and_the_halves_between(name: str, device: str) -> None:
    spec = ActivationSpec.parse(name)
    told: dict[str, torch.Tensor] = {"scale": torch.ones(1)}
    if not spec.symmetric:
        told["zero"] = torch.zeros(1, dtype=torch.int8)
    x = halves(spec, torch.float32)
    x = torch.cat([x, torch.tensor([[torch.nan, torch.inf, -torch.inf]])], dim=1)
    check(humming.quantize_activation(x, spec, device=device, **told), x, **told)


@pytest.mark.parametrize("name", ["int8", "fp8_e5m2", "mxfp4", "nvfp4", "int8_asym"])
def test_extremes_of_the_input(name: str) -> None:
    largest, least = 3.4028235e38, 1e-45
    rows = [[largest, -largest, 1.0], [least, -least, 0.0], [1e-39, 0.0, 0.0], [1e38, least, -0.0]]
    x = torch.tensor(rows)
    check(humming.quantize_activation(x, name, device="sim:h200"), x)


@pytest.mark.parametrize("fuse", ["silu_mul", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("name", ["int8", "fp8_g128", "mxfp8", "nvfp4", "int8_asym"])
def test_fused(name: str, fuse: str, rng: np.random.Generator) -> None:
    k, dtype = int(rng.integers(1, 400)), DTYPES[int(rng.integers(3))]
    x = torch.randn(6, k * (2 if fuse == "silu_mul" else 1)) * 3
    x[0] = -x[0].abs() * 4
    x[1], x[2, 0], x[3, 0] = 0.0, torch.nan, -torch.inf
    x = x.to(dtype)
    device = str(rng.choice(DEVICES))
    print(k, dtype, device)
    check_fused(humming.quantize_activation(x, name, fuse=fuse, device=device), x, fuse)


# Ways for activations [m, k] to lie in memory that have gone wrong somewhere.
VIEWS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "left-half": lambda x: torch.cat([x, x + 1], dim=1)[:, : x.shape[1]],
    "rows-not-16-byte-aligned": lambda x: torch.cat([x, x[:, :1]], dim=1)[:, : x.shape[1]],
    "every-second-row": lambda x: x.repeat_interleave(2, dim=0)[::2],
    "every-second-column": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "offset-of-one": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    "one-row-repeated": lambda x: x[:1].expand(x.shape),
    "slice-of-three": lambda x: torch.stack([x + 1, x], dim=1)[:, 1],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("name", "k"), [("int8", 320), ("mxfp4", 96), ("fp8_g128", 264)])
def test_views(name: str, k: int, view: str) -> None:
    x = VIEWS[view](torch.randn(5, k).to(torch.bfloat16))
    check(humming.quantize_activation(x, name, device="sim:h200"), x)


@pytest.mark.parametrize("shape", [(40,), (2, 3, 40), (2, 1, 40)], ids=str)
def test_leading_dimensions_are_flattened(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    q = humming.quantize_activation(x, "int8", device="sim:a100_80gb")
    assert q.shape == (x.numel() // 40, 40)
    check(q, x.reshape(-1, 40))


@pytest.mark.parametrize("k", [1, 2, 15, 16, 17, 31, 33, 4095, 20000])
def test_sizes_at_edges(k: int) -> None:
    for name in ("int8", "nvfp4"):
        x = torch.randn(1, k).to(torch.float16)
        check(humming.quantize_activation(x, name, device="sim:h200"), x)


def test_rows_too_long_to_keep_are_read_again() -> None:
    x = torch.randn(1, 33000)
    check(humming.quantize_activation(x, "int8", device="sim:h200"), x)


def test_many_rows_take_more_steps_each() -> None:
    x = torch.randn(1200, 640).to(torch.bfloat16)
    q = humming.quantize_activation(x, "mxfp8", device="sim:t4")
    check(q, x)


def test_a_static_scale_is_kept_and_may_be_a_number() -> None:
    x = torch.randn(3, 50)
    q = humming.quantize_activation(x, "int8_tensor", scale=0.02, device="sim:h200")
    assert q.scales.tolist() == [[pytest.approx(0.02)]]
    check(q, x, scale=torch.tensor([0.02]))


def test_dequantize_multiplies_all_scales() -> None:
    x = torch.randn(3, 64)
    second = torch.tensor([0.01])
    q = humming.quantize_activation(x, "nvfp4", second_scale=second, device="sim:b200")
    assert ((q.dequantize() - x).abs() <= 0.2 * x.abs().max()).all()


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_the_operator_runs_in_a_graph_and_the_function_between_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HUMMING_SIMULATE", "h200")
    x = torch.randn(3, 40)
    operator = torch.compile(
        lambda t: torch.ops.humming.quantize_activation(t, "int8", "none", None, None, None)[0] + 0,
        backend="aot_eager",
        fullgraph=True,
    )
    function = torch.compile(lambda t: humming.quantize_activation(t * 1, "int8"), backend="eager")
    with torch.no_grad():
        q = function(x)
        assert torch.equal(operator(x)[:, :40], q.codes)
    check(q, x)


def test_a_device_elsewhere_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="sim:h200"):
        humming.quantize_activation(torch.zeros(2, 8), "int8", device="h200")
