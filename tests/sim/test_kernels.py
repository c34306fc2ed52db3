"""Composed kernels, as NVRTC compiles them for T4, A100 and H200, against a float64 reference."""

import importlib
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_every_device import FORMATS

import humming
from humming import plugins, reference
from humming.cache import include_closure
from humming.capability import DeviceCapabilities
from humming.hookspecs import Image
from humming.mapped import tokens_matrix, weight_matrices
from humming.problem import GemmProblem

compiler = importlib.import_module("humming.devices.simulator.compiler")
launch_shape = importlib.import_module("humming.devices.simulator.launch_shape")
runtime = importlib.import_module("humming.devices.simulator.runtime")
errors = importlib.import_module("humming.devices.simulator.errors")

DEVICES = ("t4", "a100", "h200")
TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_PARAMS = struct.Struct("<15q5i4x")


def compiled(source: str, entry: str, caps: DeviceCapabilities) -> str:
    """The PTX of a composed source."""
    headers = include_closure(source, plugins.registry().headers)
    text: str = compiler.PtxCompiler().compile(source, headers, entry, caps).data.decode()
    return text


class Product:
    """A random product on a simulated device.

    Attributes:
        plan: what was composed.
        x, weight, packed, bias, out: its tensors; `out` counts as undefined until it is written.
    """

    def __init__(self, problem: str, device: str, m: int, n: int, k: int, **options: Any) -> None:
        self.problem = GemmProblem.parse(problem, n, k)
        self.plan = humming.plan(self.problem, device, m=m)
        self.m, self.n, self.k = m, n, k
        dtype = TORCH[self.problem.activation.dtype.name]
        self.x = torch.randn(m, k).to(dtype)
        self.weight = humming.quantize(torch.randn(n, k), self.problem.weight)
        self.packed = humming.pack(self.weight, self.plan.lowering.operand_bits)
        self.out = torch.full((m, n), float("nan"), dtype=TORCH[self.problem.out_dtype.name])
        self.runtime = runtime.SimulatorRuntime(launch_shape.Options(**options))
        self.edit: Callable[[str], str] = lambda text: text

    def ptx(self) -> str:
        """The kernel as it runs, with the edit that a test plants a fault by."""
        plan = self.plan
        return self.edit(compiled(plan.source, plan.entry, plan.decision.capabilities))

    def run(self) -> torch.Tensor:
        """Compiles for the device and runs; returns the result."""
        self.prepare()()
        return self.out

    def prepare(self) -> Callable[[], None]:
        """Compiles and loads; returns what launches the kernel."""
        plan, memory = self.plan, self.runtime
        kernel = memory.load(Image("ptx", self.ptx().encode()), plan.entry, plan.smem_bytes)
        packed = self.packed
        constant = (self.x, packed.codes, packed.scales, packed.zeros, packed.second_scale)
        buffers = [
            runtime.Buffer(t.data_ptr(), t.numel() * t.element_size(), "an input")
            for t in constant
            if t is not None
        ]
        size = self.out.numel() * self.out.element_size()
        buffers.append(runtime.Buffer(self.out.data_ptr(), size, "the output", undefined=True))
        grid, tile = plan.grid(self.m), plan.tile
        partials = counters = 0
        if tile.split_k > 1:
            tiles = grid[0] * grid[1]
            partials = memory.allocate(4 * tile.block_n * tile.block_m * tile.split_k * tiles)
            counters = memory.allocate(4 * tiles)
        x, *weight = [0 if t is None else t.data_ptr() for t in constant]
        strides = (self.x.stride(0) * self.x.element_size(), self.out.stride(0))
        # No scales of tokens, sums of rows or bias.
        params = _PARAMS.pack(
            x, 0, 0, 0, *weight, 0, 0, self.out.data_ptr(), partials, counters, *strides,
            self.m, self.n, self.k, 0, 0,
        )  # fmt: skip
        if plan.lowering.has_producer:
            tokens = (x, strides[0], self.m, self.k, self.x.element_size())
            matrices = (tokens_matrix(plan, *tokens), *weight_matrices(plan, *weight[:3]))
            params = params.ljust(-(-len(params) // 64) * 64, b"\0")
            params += b"".join(bytes(128) if a is None else memory.tensor_map(a) for a in matrices)
        return lambda: kernel.launch(grid, (tile.threads, 1, 1), params, buffers=buffers)

    def check(self) -> None:
        """The result lies within the bound that its format and accumulation imply."""
        result = self.run().double()
        exact = reference.matmul(self.x, self.weight)
        # Scales that are multiplied into the operands are rounded with them.
        bound = reference.error_bound(
            self.problem,
            self.x,
            self.weight,
            **self.plan.roundings,
        )
        assert (result - exact).abs().le(bound).all()


def problems(device: str) -> list[str]:
    supported = ["int4_g128 x fp16", "int4_g64 x fp16", "int4_channel x fp16"]
    return supported + (["int4_g128 x bf16"] if device != "t4" else [])


CASES = [(device, problem) for device in DEVICES for problem in problems(device)]


@pytest.mark.parametrize(
    ("device", "problem"), CASES, ids=["-".join(c).replace(" ", "") for c in CASES]
)
@pytest.mark.parametrize("m", [1, 37])
def test_product(device: str, problem: str, m: int, rng: np.random.Generator) -> None:
    torch.manual_seed(int(rng.integers(2**31)))
    n, k = int(rng.integers(40, 260)), 8 * int(rng.integers(20, 80))
    print(n, k)
    Product(problem, device, m, n, k).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("repetition", [1, 2])
def test_product_in_a_random_schedule(
    device: str, repetition: int, rng: np.random.Generator
) -> None:
    """Any format and shape, and warps that run in any order, and wait where they may."""
    seed = int(rng.integers(2**31))
    torch.manual_seed(seed)
    formats = [f for f in FORMATS if not f.endswith("_fzp")]
    problem = f"{rng.choice(formats)} x fp16"
    if device != "t4" and rng.integers(2):
        problem = problem.replace("fp16", "bf16")
    m, n, k = (int(rng.integers(*ends)) for ends in ((1, 40), (8, 150), (2, 12)))
    print(problem, m, n, 64 * k, seed)
    Product(problem, device, m, n, 64 * k, seed=seed).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sums", [-1.0, 1.0])
def test_products_may_be_as_wrong_as_tensor_cores(device: str, sums: float) -> None:
    """With every sum at the end of its bound, the bound of the product holds."""
    torch.manual_seed(4)
    Product("int4_g128 x fp16", device, 5, 64, 768, sums=sums).check()


def test_the_order_of_warps_does_not_change_a_bit() -> None:
    torch.manual_seed(7)
    product = Product("int4_g128 x fp16", "a100", 9, 96, 768)
    first = product.run().clone()
    product.runtime = runtime.SimulatorRuntime(launch_shape.Options(seed=11))
    assert torch.equal(product.run(), first)


def test_a_missing_barrier_is_found() -> None:
    """The mainloop without the barrier that keeps warps from each other's stages."""
    product = Product("int4_g128 x fp16", "a100", 9, 64, 2048)
    assert product.ptx().count("bar.sync") >= 2
    product.edit = lambda text: text.replace("bar.sync", "// bar.sync", 1)
    with pytest.raises(errors.RaceError):
        product.run()


def test_a_wait_for_too_few_groups_is_found() -> None:
    product = Product("int4_g128 x fp16", "a100", 9, 64, 2048)
    wait = next(line for line in product.ptx().splitlines() if "cp.async.wait_group" in line)
    product.edit = lambda text: text.replace(wait.strip(), "cp.async.wait_group 7;", 1)
    with pytest.raises(errors.AsyncHazardError, match="may still write"):
        product.run()


@pytest.mark.parametrize("which", [0, 1])
def test_a_missing_fence_between_ctas_is_found(which: int) -> None:
    """Split-K: a fence ahead of the count of CTAs, and one behind it."""
    product = Product("int4_g128 x fp16", "a100", 9, 64, 4096)
    assert product.plan.tile.split_k > 1
    product.check()

    def edit(text: str) -> str:
        fences = [match.span() for match in re.finditer(r"membar\.gl;", text)]
        start, end = fences[which]
        return text[:start] + text[end:]

    product.edit = edit
    with pytest.raises(errors.RaceError, match="another CTA has written"):
        product.run()


def test_an_output_that_is_too_small_is_found() -> None:
    product = Product("int4_g128 x fp16", "a100", 9, 64, 256)
    whole = product.out
    product.out = whole[:8]
    with pytest.raises(errors.BoundsError, match="the output, which has 1024 bytes"):
        product.run()


def test_a_large_tile_runs_in_seconds(record_property: Callable[[str, Any], None]) -> None:
    """128 x 128 x 256; the time is recorded, not judged."""
    import time

    product = Product("int4_g128 x fp16", "a100", 128, 128, 256)
    start = time.perf_counter()
    product.check()
    record_property("seconds", time.perf_counter() - start)
