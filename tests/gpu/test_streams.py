"""Products on streams, in threads, in CUDA graphs and on several devices."""

import threading

import pytest
import torch

import humming
from humming import runtime
from humming.problem import GemmProblem

pytestmark = pytest.mark.gpu

# Sizes of which few tiles cover few of a device's processors, so that plans split K.
SMALL_N, LARGE_K = 128, 8192


@pytest.fixture
def split(make):
    """A product whose plan splits K, so that it needs partial sums and counters."""
    product = make(16, SMALL_N, LARGE_K)
    problem = GemmProblem.parse("int4_g128 x bf16", SMALL_N, LARGE_K)
    plan = runtime.gemm_for(problem, 0).kernel(16).plan
    assert plan.tile.split_k > 1, "choose sizes for which the composer splits K"
    return product


def test_waits_for_what_its_stream_does_before(split) -> None:
    stream = torch.cuda.Stream()
    humming.matmul(split.x, split.weight)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        x = torch.zeros_like(split.x)
        torch.cuda._sleep(20_000_000)  # some milliseconds
        x.copy_(split.x)
        out = humming.matmul(x, split.weight)
        x.zero_()  # must not overtake the product
    stream.synchronize()
    split.check(out)


def test_products_follow_each_other_on_a_stream(make) -> None:
    # Each needs the one before; dependent launches must not start reading too early.
    product = make(8, 2048, 2048)
    scale = product.quantized.scales.double().mean().item() * 2048**0.5 * 4
    one_by_one = in_a_row = product.x
    for _ in range(20):
        one_by_one = humming.matmul(one_by_one, product.weight) / scale
        torch.cuda.synchronize()
    for _ in range(20):
        in_a_row = humming.matmul(in_a_row, product.weight) / scale
    assert one_by_one.isfinite().all()
    assert torch.equal(in_a_row, one_by_one)


@pytest.mark.parametrize(
    ("weight", "activation"), [("int4_g128", "bf16"), ("int8", "int8"), ("fp8", "fp8")]
)
@pytest.mark.parametrize("m", [1, 16, 300])
def test_products_follow_each_other_alone(weight: str, activation: str, m: int) -> None:
    """Each launch is a dependent one: of a product or of a quantization, none of torch between."""
    size = 2048
    dense = torch.randn(size, size, device="cuda") * size**-0.5
    packed = humming.pack(humming.quantize(dense, weight), activation=activation)
    first = torch.randn(m, size, device="cuda").bfloat16()

    def chain(wait: bool) -> torch.Tensor:
        x = first
        for _ in range(30):
            if activation != "bf16":
                x = humming.quantize_activation(x, activation)
                torch.cuda.synchronize() if wait else None
            x = humming.matmul(x, packed, out_dtype=torch.bfloat16)
            torch.cuda.synchronize() if wait else None
        return x

    one_by_one = chain(wait=True)
    assert one_by_one.isfinite().all()
    assert one_by_one.abs().max() > 0
    for _ in range(5):
        assert torch.equal(chain(wait=False), one_by_one)


def test_streams_side_by_side_do_not_disturb_each_other(split) -> None:
    expected = humming.matmul(split.x, split.weight)
    split.check(expected)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results: list[torch.Tensor] = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(humming.matmul(split.x, split.weight))
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


def test_threads_launch_at_the_same_time(make) -> None:
    products = [make(m, 256, 2048) for m in (1, 12, 30, 100)]
    failures: list[BaseException] = []

    def work(product) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    out = humming.matmul(product.x, product.weight)
                torch.cuda.current_stream().synchronize()
                product.check(out)
        except BaseException as failure:
            failures.append(failure)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(product,)) for product in products]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_thread_that_has_not_used_the_device_yet(split) -> None:
    expected = humming.matmul(split.x, split.weight)
    out = torch.empty_like(expected)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            humming.matmul(split.x, split.weight, out=out)
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not failures
    assert torch.equal(out, expected)


def _record(function) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Records a call after the warm-up on a side stream that torch asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    return graph, out


@pytest.mark.parametrize("m", [1, 16, 200])
def test_graph_replays_with_new_activations(m: int, make) -> None:
    product = make(m, SMALL_N, LARGE_K, bias=torch.bfloat16)
    x = product.x.clone()
    graph, out = _record(lambda: humming.matmul(x, product.weight, product.bias))
    for _ in range(5):
        x.normal_()
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        product.check(out, x)


def test_graph_is_recorded_without_warm_up(make) -> None:
    # The kernel is compiled and loaded while the graph is being recorded.
    product = make(24, 144, 4224, "int4_g64")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = humming.matmul(product.x, product.weight)
    graph.replay()
    torch.cuda.synchronize()
    product.check(out)


def test_graph_of_many_products_shares_its_memory(make) -> None:
    # What one product frees, the next may be given; each must be done with it by then.
    products = [make(16, SMALL_N, LARGE_K) for _ in range(12)]

    def model() -> torch.Tensor:
        return torch.stack([humming.matmul(p.x, p.weight) for p in products])

    expected = model()
    graph, out = _record(model)
    for _ in range(20):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
    for product, result in zip(products, expected, strict=True):
        product.check(result)


def test_graphs_and_eager_work_run_side_by_side(split) -> None:
    expected = humming.matmul(split.x, split.weight)
    recorded = [_record(lambda: humming.matmul(split.x, split.weight)) for _ in range(3)]
    streams = [torch.cuda.Stream() for _ in recorded]
    torch.cuda.synchronize()
    for _ in range(100):
        for (graph, _), stream in zip(recorded, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = humming.matmul(split.x, split.weight)
        torch.cuda.synchronize()
        assert torch.equal(eager, expected)
        assert all(torch.equal(out, expected) for _, out in recorded)


def test_branches_of_a_graph_run_side_by_side(split) -> None:
    expected = humming.matmul(split.x, split.weight)
    branches = [torch.cuda.Stream() for _ in range(3)]

    def fork() -> torch.Tensor:
        main = torch.cuda.current_stream()
        results = []
        for branch in branches:
            branch.wait_stream(main)
            with torch.cuda.stream(branch):
                results.append(humming.matmul(split.x, split.weight))
            main.wait_stream(branch)
        return torch.stack(results)

    graph, out = _record(fork)
    for _ in range(50):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(result, expected) for result in out)


def test_kernel_is_loaded_while_another_stream_records(make) -> None:
    recorded, other = make(16, SMALL_N, LARGE_K), make(16, 208, 4160, "int4_g32")
    humming.matmul(recorded.x, recorded.weight)
    torch.cuda.synchronize()
    graph, results = torch.cuda.CUDAGraph(), []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            results.append(humming.matmul(other.x, other.weight))
            torch.cuda.current_stream().synchronize()

    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        out = humming.matmul(recorded.x, recorded.weight)
    graph.replay()
    torch.cuda.synchronize()
    recorded.check(out)
    other.check(results[0])


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="one device is present"
)
def test_second_device_is_used_while_the_first_is_current(make) -> None:
    product = make(16, SMALL_N, LARGE_K, bias=torch.bfloat16, device="cuda:1")
    assert torch.cuda.current_device() == 0
    out = humming.matmul(product.x, product.weight, product.bias)
    assert (str(out.device), torch.cuda.current_device()) == ("cuda:1", 0)
    product.check(out)
    first = make(16, SMALL_N, LARGE_K, device="cuda:0")
    first.check(humming.matmul(first.x, first.weight))
    with torch.cuda.device(1):
        product.check(humming.matmul(product.x, product.weight, product.bias))
        first.check(humming.matmul(first.x, first.weight))
