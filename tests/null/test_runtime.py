"""Launches without a device: what a kernel is handed, which workspace, and what is loaded when."""

import re
import struct
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from humming import plugins, runtime
from humming.compiler import CompiledKernel
from humming.composer import M_RANGES, KernelPlan, compose
from humming.errors import UnsupportedError
from humming.hookspecs import Image, MappedMatrix
from humming.problem import GemmProblem
from humming.runtime import Gemm, Kernel, Operands, Workspaces

PROBLEM = GemmProblem.parse("int4_g128 x bf16", 4000, 4096)
POINTERS = [
    *("x", "x_scales", "x_zeros", "x_second"),
    *("codes", "scales", "zeros", "second_scale", "row_sums", "bias"),
    *("out", "partials", "counters"),
]
FIELDS = [*POINTERS, "x_stride", "out_stride", "m", "n", "k", "x_groups", "early"]


@dataclass
class FakeRuntime:
    """Records what it is asked for; memory is a counter of addresses."""

    loads: list[str] = field(default_factory=list)
    launches: list[tuple[Any, ...]] = field(default_factory=list)
    allocated: list[tuple[int, int]] = field(default_factory=list)
    mapped: list[MappedMatrix] = field(default_factory=list)
    failures: int = 0

    def load(self, image: Image, entry: str, smem_bytes: int, device_index: int) -> "FakeRuntime":
        self.loads.append(entry)
        return self

    def launch(self, *arguments: Any) -> None:
        self.launches.append(arguments)

    def tensor_map(self, matrix: MappedMatrix) -> bytes:
        self.mapped.append(matrix)
        return struct.pack("<q120x", matrix.address)

    def allocate(self, size_bytes: int, device_index: int = 0) -> int:
        if self.failures:
            self.failures -= 1
            raise MemoryError
        address = 1 << 40 if not self.allocated else sum(self.allocated[-1])
        self.allocated.append((address, size_bytes))
        return address


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """A runtime in the place of every device's, and tables that are as empty as at the start."""
    made = FakeRuntime()
    monkeypatch.setattr(plugins, "runtime_for", lambda caps: made)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for table in ("_devices", "_gemms"):
        monkeypatch.setattr(runtime, table, {})
    return made


def _compiled(key: str = "0" * 64) -> CompiledKernel:
    return CompiledKernel(Image("cubin", b""), "entry", key, "nvrtc 13.0", 0.0, False)


def _plan(split_k: int = 1, m_range: tuple[int, int | None] = M_RANGES[1]) -> KernelPlan:
    plan = compose(PROBLEM, plugins.capabilities("h200"), m_range)
    return replace(plan, tile=replace(plan.tile, split_k=split_k, cluster_k=1))


def _tensors(m: int) -> tuple[torch.Tensor, Operands, torch.Tensor]:
    x = torch.empty(m, PROBLEM.k + 8, dtype=torch.bfloat16)[:, : PROBLEM.k]
    operands = Operands(*(torch.empty(8) for _ in range(5)))
    return x, operands, torch.empty(m, PROBLEM.n + 16, dtype=torch.bfloat16)[:, : PROBLEM.n]


def _params(launch: tuple[Any, ...]) -> dict[str, int]:
    return dict(zip(FIELDS, struct.unpack("<15q5i4x", launch[2]), strict=True))


def test_fields_are_those_of_the_kernels() -> None:
    text = plugins.registry().headers["humming/params.cuh"].read_text()
    body = re.search(r"struct GemmParams \{(.*?)\};", text, re.DOTALL)
    found = re.findall(r"^ *([\w ]+?\*?) (\w+);", body.group(1), re.MULTILINE)
    assert [name for _, name in found] == FIELDS
    kinds = Counter("q" if "*" in kind or kind == "long long" else kind for kind, _ in found)
    assert kinds == {"q": 15, "int": 5}


def test_kernel_is_handed_addresses_strides_and_sizes(fake: FakeRuntime) -> None:
    plan = _plan()
    x, operands, out = _tensors(11)
    Kernel(plan, 0, _compiled()).launch(x, operands, out, 77)
    (launch,) = fake.launches
    assert launch[:2] == (plan.grid(11), (plan.tile.threads, 1, 1))
    assert launch[3:] == (77, plan.pdl)
    assert _params(launch) == {
        "x": x.data_ptr(),
        "x_scales": 0,
        "x_zeros": 0,
        "x_second": 0,
        "codes": operands.codes.data_ptr(),
        "scales": operands.scales.data_ptr(),
        "zeros": operands.zeros.data_ptr(),
        "second_scale": operands.second_scale.data_ptr(),
        "row_sums": 0,
        "bias": operands.bias.data_ptr(),
        "out": out.data_ptr(),
        "partials": 0,
        "counters": 0,
        "x_stride": 2 * (PROBLEM.k + 8),
        "out_stride": PROBLEM.n + 16,
        "m": 11,
        "n": PROBLEM.n,
        "k": PROBLEM.k,
        "x_groups": 0,
        "early": 1,
    }


def test_layers_that_share_a_kernel_map_weights_once_and_tokens_once(fake: FakeRuntime) -> None:
    kernel = Kernel(_plan(m_range=M_RANGES[4]), 0, _compiled())
    assert kernel.plan.lowering.has_producer
    layers = [Operands(*(torch.empty(8) for _ in range(5))) for _ in range(300)]
    tokens = [_tensors(64)[0] for _ in range(3)]
    out = _tensors(64)[2]
    for _ in range(2):
        for operands in layers:
            for x in tokens:
                kernel.launch(x, operands, out, 0)
    staged = [kernel.plan.tile.staged_bytes(PROBLEM, kernel.plan.lowering)[0] > 0, True]
    assert len(fake.mapped) == len(layers) * sum(staged) + len(tokens)
    # One behind the other: tokens, codes, scales, and zeros that are none.
    *_, launch = fake.launches
    maps = [launch[2][-size:][:8] for size in (512, 384, 256, 128)]
    addresses = [struct.unpack("<q", part)[0] for part in maps]
    last = layers[-1]
    assert addresses[:2] == [tokens[-1].data_ptr(), last.codes.data_ptr()]
    assert addresses[2] == (last.scales.data_ptr() if staged[0] else 0)
    assert addresses[3] == 0


def test_absent_operands_are_null(fake: FakeRuntime) -> None:
    x, operands, out = _tensors(1)
    operands = operands._replace(zeros=None, second_scale=None, bias=None)
    Kernel(_plan(), 0, _compiled()).launch(x, operands, out, 0)
    params = _params(fake.launches[0])
    assert [params[name] for name in ("zeros", "second_scale", "bias")] == [0, 0, 0]


def test_tokens_beyond_a_launch_are_refused(fake: FakeRuntime) -> None:
    kernel = Kernel(_plan(), 0, _compiled())
    _, operands, out = _tensors(1)
    x = torch.empty(1, PROBLEM.k, dtype=torch.bfloat16).expand(16 * 65535 + 1, -1)
    with pytest.raises(UnsupportedError, match=r"1048561 tokens.*at most 1048560"):
        kernel.launch(x, operands, out, 0)
    kernel.launch(x[1:], operands, out, 0)
    assert fake.launches[0][0][1] == 65535


def test_tiles_that_no_launch_can_number_are_refused(fake: FakeRuntime) -> None:
    plan = _plan()
    rows = (1 << 16) * plan.tile.block_n
    kernel = Kernel(replace(plan, problem=replace(PROBLEM, n=rows)), 0, _compiled())
    _, operands, out = _tensors(1)
    x = torch.empty(1, PROBLEM.k, dtype=torch.bfloat16).expand(16 * 32767 + 1, -1)
    with pytest.raises(UnsupportedError, match=r"524273 tokens.*at most 524272"):
        kernel.launch(x, operands, out, 0)
    kernel.launch(x[1:], operands, out, 0)
    tiles_n, tiles_m, _ = fake.launches[0][0]
    assert tiles_n * tiles_m < 1 << 31 <= tiles_n * (tiles_m + 1)


@pytest.mark.parametrize("pointer", ["x", "codes", "scales", "zeros"])
def test_misaligned_operands_are_refused(pointer: str, fake: FakeRuntime) -> None:
    x, operands, out = _tensors(1)
    askew = torch.empty(32)[1:]
    if pointer == "x":
        x = askew.view(torch.bfloat16)[:8].unsqueeze(0)
    else:
        operands = operands._replace(**{pointer: askew})
    with pytest.raises(UnsupportedError, match="16 bytes"):
        Kernel(_plan(), 0, _compiled()).launch(x, operands, out, 0)
    assert not fake.launches


def test_eager_launches_of_a_stream_share_a_workspace(fake: FakeRuntime) -> None:
    plan = _plan(split_k=4)
    kernel = Kernel(plan, 0, _compiled())
    x, operands, out = _tensors(16)
    for stream in (5, 5, 6):
        kernel.launch(x, operands, out, stream)
    first, second, other = map(_params, fake.launches)
    assert (first["partials"], first["counters"]) == (second["partials"], second["counters"])
    assert {first["partials"], first["counters"]}.isdisjoint({other["partials"], other["counters"]})
    sizes = dict(fake.allocated)
    partials_bytes, counters = plan.workspace(16)
    assert sizes[first["partials"]] >= partials_bytes
    assert sizes[first["counters"]] >= 4 * counters


def test_recorded_launches_never_share_counters(
    fake: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _plan(split_k=4)
    kernel = Kernel(plan, 0, _compiled())
    x, operands, out = _tensors(16)
    kernel.launch(x, operands, out, 5)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(3):
        kernel.launch(x, operands, out, 5)
    eager, *recorded = map(_params, fake.launches)
    counters = sorted(launch["counters"] for launch in recorded)
    room = 4 * plan.workspace(16)[1]
    assert all(b - a >= room for a, b in pairwise(counters))
    assert eager["counters"] not in counters
    assert eager["partials"] not in {launch["partials"] for launch in recorded}
    assert all(launch["partials"] for launch in recorded)


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < sum(other) and other[0] < sum(one)


def test_workspace_grows_and_leaves_what_may_be_in_use(fake: FakeRuntime) -> None:
    spaces = Workspaces(fake.allocate)
    small = spaces.of_stream(1, 1000, 10)
    assert spaces.of_stream(1, 5 << 20, 10)[1] == small[1], "only what is too small grows"
    assert spaces.of_stream(1, 1000, 10)[0] != small[0], "and stays"
    large = spaces.of_stream(1, 5 << 20, 100_000)
    sizes = dict(fake.allocated)
    assert sizes[large[0]] >= 5 << 20
    assert sizes[large[1]] >= 400_000
    blocks = fake.allocated
    assert not any(_overlap(a, b) for i, a in enumerate(blocks) for b in blocks[:i])


def test_arena_of_graphs_hands_out_separate_lines_and_refills(fake: FakeRuntime) -> None:
    spaces = Workspaces(fake.allocate)
    wanted = [1, 33, 5, 1 << 17, 1 << 17, 3, 1 << 20]
    given = [(spaces.of_graph(count), 4 * count) for count in wanted]
    assert not any(_overlap(a, b) for i, a in enumerate(given) for b in given[:i])
    assert all(address % 128 == 0 for address, _ in given)
    inside = [
        any(at <= a and a + size <= at + room for at, room in fake.allocated) for a, size in given
    ]
    assert all(inside)


def test_memory_that_torch_keeps_is_asked_back(
    fake: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append(True))
    kernel = Kernel(_plan(split_k=2), 0, _compiled())
    fake.failures = 1
    kernel.launch(*_tensors(1), 0)
    assert asked == [True]
    fake.failures = 2
    with pytest.raises(MemoryError):
        kernel.launch(*_tensors(1), 1)


def test_equal_kernels_are_loaded_once_a_device(fake: FakeRuntime) -> None:
    for device_index in (0, 0, 1):
        Kernel(_plan(), device_index, _compiled("a" * 64))
    Kernel(_plan(), 0, _compiled("b" * 64))
    assert len(fake.loads) == 3


@pytest.fixture
def gemm(fake: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> Gemm:
    """The table of a problem on an H200, whose kernels are not really compiled."""
    ask = plugins.capabilities
    monkeypatch.setattr(plugins, "capabilities", lambda d: ask("h200" if d == 0 else d))
    monkeypatch.setattr(
        runtime, "compile_many", lambda plans: [_compiled(str(p.m_range)) for p in plans]
    )
    return runtime.gemm_for(PROBLEM, 0)


@pytest.mark.parametrize(
    ("m", "place"), [(1, 0), (8, 0), (9, 1), (16, 1), (17, 2), (128, 4), (129, 5), (10**6, 7)]
)
def test_tokens_find_the_kernel_of_their_range(m: int, place: int, gemm: Gemm) -> None:
    kernel = gemm.kernel(m)
    assert kernel.plan.m_range == M_RANGES[place]
    assert gemm.kernel(m) is kernel


def test_kernels_are_made_when_needed_or_ahead(gemm: Gemm, fake: FakeRuntime) -> None:
    assert not fake.loads
    gemm.prepare([1, 3, 100])
    assert len(fake.loads) == 2
    gemm.prepare()
    assert len(fake.loads) == len(M_RANGES)
    gemm.kernel(1), gemm.kernel(1000)
    assert len(fake.loads) == len(M_RANGES)


def test_table_of_a_problem_is_made_once(gemm: Gemm) -> None:
    assert runtime.gemm_for(replace(PROBLEM), 0) is gemm
    assert runtime.gemm_for(replace(PROBLEM, bias=True), 0) is not gemm


def _seen(how: str) -> list[bool]:
    """What `is_watched` says of a tensor while someone looks at operators in a way."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[bool] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, call: Any, _types: Any, args: Any = (), kwargs: Any = None):
            return call(*args, **(kwargs or {}))

    class Dispatches(TorchDispatchMode):
        def __torch_dispatch__(self, call: Any, _types: Any, args: Any = (), kwargs: Any = None):
            return call(*args, **(kwargs or {}))

    def look(x: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        seen.append(runtime.is_watched(x, *others))
        return x + 1

    x, learned = torch.ones(2, 3), torch.ones(2, 3, requires_grad=True)
    if how == "nothing":
        look(x, None, x)
    elif how == "no grad":
        with torch.no_grad():
            look(learned, learned)
    elif how == "grad":
        look(learned)
        look(x, None, learned)
    elif how == "trace":
        torch.jit.trace(look, x, check_trace=False)
    elif how == "make_fx":
        torch.fx.experimental.proxy_tensor.make_fx(look)(x)
    elif how == "vmap":
        torch.vmap(look)(x)
    elif how == "functionalize":
        torch.func.functionalize(look)(x)
    elif how == "subclass":
        look(x.as_subclass(type("Mine", (torch.Tensor,), {})))
    elif how == "parameter":
        look(torch.nn.Parameter(x, requires_grad=False))
    elif how == "default device":
        with torch.device("cpu"):
            look(x)
    else:
        with {"function mode": Functions, "dispatch mode": Dispatches}[how]():
            look(x)
    return seen


@pytest.mark.parametrize("how", ["nothing", "no grad", "parameter", "default device"])
def test_operators_that_nobody_looks_at(how: str) -> None:
    assert _seen(how) == [False]


@pytest.mark.parametrize(
    "how",
    [
        *("grad", "trace", "make_fx", "vmap", "functionalize"),
        *("subclass", "function mode", "dispatch mode"),
    ],
)
def test_operators_that_someone_looks_at(how: str) -> None:
    seen = _seen(how)
    assert seen
    assert all(seen)
