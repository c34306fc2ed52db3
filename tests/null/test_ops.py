"""The operators without a device: what they refuse, and how they look to torch's compilers."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import humming
from humming import ops, plugins
from humming.errors import UnsupportedError
from humming.packing import PackedWeight
from humming.quantized import same_bits

N, K = 48, 136


@pytest.fixture
def weight() -> PackedWeight:
    return humming.pack(humming.quantize(torch.randn(N, K), "int4_g32"))


@pytest.fixture
def fake_weight(weight: PackedWeight) -> PackedWeight:
    """The weight on the meta device, on which operators compute shapes alone."""
    return weight.to("meta")


def _x(*shape: int, dtype: torch.dtype = torch.bfloat16, **options: object) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", **options)


@pytest.mark.parametrize("shape", [(5, K), (K,), (2, 3, K), (0, K), (4, 0, K)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_result_has_the_shape_and_dtype_of_the_activations(
    shape: tuple[int, ...], dtype: torch.dtype, fake_weight: PackedWeight
) -> None:
    out = humming.matmul(_x(*shape, dtype=dtype), fake_weight)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((*shape[:-1], N), dtype, True)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_out_dtype(out_dtype: torch.dtype, fake_weight: PackedWeight) -> None:
    bias = _x(N, dtype=out_dtype)
    assert humming.matmul(_x(5, K), fake_weight, bias, out_dtype=out_dtype).dtype == out_dtype
    out = _x(5, N, dtype=out_dtype)
    assert humming.matmul(_x(5, K), fake_weight, bias, out=out) is out


def _call(weight: PackedWeight, x: torch.Tensor, **arguments: object) -> None:
    humming.matmul(x, weight, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("x", "arguments", "message"),
    [
        pytest.param(_x(5, K + 8), {}, r"\[5, 144\].*K = 136", id="k"),
        pytest.param(_x(5), {}, r"\[5\].*K = 136", id="vector"),
        pytest.param(_x(), {}, r"K = 136", id="scalar"),
        pytest.param(
            _x(5, K, dtype=torch.float32), {}, "float32.*float16 or bfloat16.*model.to", id="x-fp32"
        ),
        pytest.param(_x(5, K, dtype=torch.int8), {}, "int8 activations", id="x-int8"),
        pytest.param(_x(5, K), {"out_dtype": torch.float64}, "float64", id="out-fp64"),
        pytest.param(_x(5, K), {"bias": _x(N + 1)}, r"bias \[49\].*\[48\]", id="bias-size"),
        pytest.param(_x(5, K), {"bias": _x(1, N)}, r"bias \[1, 48\]", id="bias-matrix"),
        pytest.param(
            _x(5, K),
            {"bias": _x(N, dtype=torch.float32)},
            r"float32.*bias\.to\(torch\.bfloat16\)",
            id="bias-dtype",
        ),
        pytest.param(_x(5, K), {"bias": _x(2 * N)[::2]}, "stride", id="bias-stride"),
        pytest.param(
            _x(5, K), {"bias": torch.empty(N, dtype=torch.bfloat16)}, "cpu", id="bias-device"
        ),
        pytest.param(_x(5, K), {"out": _x(5, N + 1)}, r"out \[5, 49\]", id="out-size"),
        pytest.param(_x(5, K), {"out": _x(N, 5).t()}, r"strides \[1, 5\]", id="out-transposed"),
        pytest.param(_x(2, 3, K), {"out": _x(2, 6, N)[:, ::2]}, "strides", id="out-scattered"),
        pytest.param(
            _x(5, K),
            {"out": _x(5, N), "out_dtype": torch.float32},
            "out is torch.bfloat16",
            id="out-dtype",
        ),
        pytest.param(
            _x(5, K, requires_grad=True), {"out": _x(5, N)}, "no backward", id="out-autograd"
        ),
    ],
)
def test_refuses(
    x: torch.Tensor, arguments: dict[str, object], message: str, fake_weight: PackedWeight
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        _call(fake_weight, x, **arguments)


def test_rows_of_out_may_be_apart(fake_weight: PackedWeight) -> None:
    out = _x(5, 2 * N)[:, :N]
    assert humming.matmul(_x(5, K), fake_weight, out=out) is out


def _parts(weight: PackedWeight) -> dict[str, torch.Tensor]:
    """Activations, a bias and the tensors of a weight, of which out may be a view."""
    bias = torch.randn(N, dtype=torch.bfloat16)
    return {"x": torch.randn(1, K, dtype=torch.bfloat16), "bias": bias, **weight.tensors()}


@pytest.mark.parametrize("device", [None, "sim:t4"])
@pytest.mark.parametrize("name", ["x", "bias", "codes", "scales", "zeros", "second_scale"])
def test_out_in_memory_that_is_read_is_refused(name: str, device: str | None) -> None:
    weight = humming.pack(humming.quantize(torch.randn(N, K), "uint4_g32_zp_s2channel"))
    parts = _parts(weight)
    x, bias = parts["x"], parts["bias"]
    kept = parts[name].clone()
    out = parts[name].view(torch.bfloat16).flatten()[-N:].unsqueeze(0)
    with pytest.raises(UnsupportedError, match=f"shares memory with {name}.*of its own"):
        humming.matmul(x, weight, bias, out=out, device=device)
    assert same_bits(parts[name], kept), "nothing was written"


@pytest.mark.parametrize("shift", [0, 2, N, K - 8, K - 1])
def test_out_in_columns_that_are_read_is_refused(weight: PackedWeight, shift: int) -> None:
    buffer = torch.randn(5, K + N, dtype=torch.bfloat16)
    x, out = buffer[:, :K], buffer[:, shift : shift + N]
    with pytest.raises(UnsupportedError, match="shares memory with x"):
        humming.matmul(x, weight, out=out)
    with pytest.raises(UnsupportedError, match="shares memory with x"):
        humming.matmul(x[1:], weight, out=out[:-1])


@pytest.mark.parametrize("x_first", [True, False])
def test_out_beside_the_activations_of_one_buffer_is_fine(
    weight: PackedWeight, x_first: bool
) -> None:
    buffer = torch.randn(5, K + N, dtype=torch.bfloat16)
    x, out = (buffer[:, :K], buffer[:, K:]) if x_first else (buffer[:, N:], buffer[:, :N])
    kept, expected = x.clone(), humming.matmul(x.clone(), weight, device="sim:a100_80gb")
    humming.matmul(x, weight, out=out, device="sim:a100_80gb")
    assert torch.equal(out, expected)
    assert torch.equal(x, kept)


def test_without_out_no_memory_is_compared(
    weight: PackedWeight, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compared(*_: object) -> None:
        raise AssertionError("costs time in each call")

    monkeypatch.setattr(ops, "_check_apart", compared)
    humming.matmul(torch.randn(2, K, dtype=torch.bfloat16), weight)


def test_weight_elsewhere_is_refused(weight: PackedWeight) -> None:
    with pytest.raises(UnsupportedError, match="activations on meta with the weight on cpu"):
        humming.matmul(_x(5, K), weight)


def test_weight_for_other_operands_is_refused() -> None:
    packed = humming.pack(humming.quantize(torch.randn(N, K), "int4_g32"), operand_bits=8)
    with pytest.raises(UnsupportedError, match=r"8-bit operands.*activation='int8'"):
        humming.matmul(torch.empty(5, K, dtype=torch.bfloat16), packed)


def test_tensors_on_the_cpu_need_a_simulator(
    weight: PackedWeight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "devices", lambda: plugins.PresentDevices([], []))
    monkeypatch.setattr(ops, "_products", {})
    x = torch.empty(5, K, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"CPU.*simulates.*humming\.reference"):
        humming.matmul(x, weight)
    with pytest.raises(UnsupportedError, match="CPU"):
        humming.matmul(x, weight, out=torch.empty(5, N, dtype=torch.bfloat16))


def test_backward_raises(fake_weight: PackedWeight) -> None:
    out = humming.matmul(_x(5, K, requires_grad=True), fake_weight)
    with pytest.raises(UnsupportedError, match=r"backward.*no_grad"):
        out.sum().backward()


def _graphs_of(function, *arguments: object) -> list[torch.fx.Graph]:
    """What torch.compile makes of a function without graph breaks, run on fake tensors."""
    graphs: list[torch.fx.Graph] = []

    def keep(module: torch.fx.GraphModule, _: object) -> object:
        graphs.append(module.graph)
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=keep, fullgraph=True)
    for argument in arguments:
        compiled(argument)
    return graphs


def _operators(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if "humming" in str(node.target)]


def test_compiles_into_one_graph(fake_weight: PackedWeight) -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return humming.matmul(x * 2, fake_weight, out_dtype=torch.float32) + 1

    (graph,) = _graphs_of(layer, _x(5, K))
    assert _operators(graph) == ["humming.matmul.default"]


def test_compiles_into_one_graph_with_out(fake_weight: PackedWeight) -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape[0], N, dtype=x.dtype, device=x.device)
        return humming.matmul(x, fake_weight, out=out) + 1

    with torch.no_grad():
        (graph,) = _graphs_of(layer, _x(5, K))
    assert _operators(graph) == ["humming.matmul_out.default"]


def test_one_graph_serves_any_number_of_tokens(fake_weight: PackedWeight) -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return humming.matmul(x, fake_weight)

    inputs = [_x(m, K) for m in (2, 5, 64, 1000)]
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 0)
    assert len(_graphs_of(layer, *inputs)) == 1


def test_formats_of_equal_tensors_are_told_apart_in_graphs() -> None:
    matrix = torch.randn(N, K)
    formats = ("int4_g32", "float4e2m1_g32")
    weights = [humming.pack(humming.quantize(matrix, name)).to("meta") for name in formats]
    names = [weight.spec.name for weight in weights]
    x = _x(5, K)
    graphs = _graphs_of(lambda weight: humming.matmul(x, weight), *weights)
    found = [arg for graph in graphs for node in graph.nodes for arg in node.args if arg in names]
    assert found == names


def test_works_under_a_mode_of_fake_tensors(weight: PackedWeight) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = torch.empty(5, K, dtype=torch.float16)
        out = humming.matmul(x, weight)
    assert out.shape == (5, N)
    assert out.fake_mode is mode


def test_a_named_device_refuses_what_the_default_one_does(weight: PackedWeight) -> None:
    x = torch.randn(3, K).bfloat16()
    out = torch.empty(3, N, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="Leave out_dtype away"):
        humming.matmul(x, weight, out=out, out_dtype=torch.float32, device="sim:h200")
    bias = torch.zeros(N, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"autograd.*no_grad"):
        humming.matmul(x, weight, bias, device="sim:h200")
    with pytest.raises(UnsupportedError, match="name sim:h200"):
        humming.matmul(x, weight, device="h200")


def test_overlapping_rows_of_an_output_are_refused(weight: PackedWeight) -> None:
    x = torch.randn(3, K).bfloat16()
    out = torch.empty(1, N, dtype=torch.bfloat16).expand(3, N)
    with pytest.raises(UnsupportedError, match="rows are scattered"):
        humming.matmul(x, weight, out=out)


def test_operands_are_checked_each_time(weight: PackedWeight) -> None:
    x = torch.randn(3, K).bfloat16()
    parts = (weight.codes, weight.scales, None, None, None)
    call = torch.ops.humming.matmul
    call(x, *parts, "int4_g32", N, K, torch.bfloat16)
    with pytest.raises(UnsupportedError):
        call(x, weight.codes.float(), *parts[1:], "int4_g32", N, K, torch.bfloat16)
    with pytest.raises(UnsupportedError):
        call(x, weight.codes, weight.scales.float(), *parts[2:], "int4_g32", N, K, torch.bfloat16)
