"""Kernels of one's own by `simulate`, and `options` for every launch inside of it."""

import importlib
from typing import Any

import numpy as np
import pytest
import torch

import humming
from humming.errors import HummingError

simulator = importlib.import_module("humming.devices.simulator")
errors = importlib.import_module("humming.devices.simulator.errors")

SCALE = """
extern "C" __global__ void scale(const float* x, double* y, float by, unsigned char skip, long n) {
    long i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= skip && i < n) y[i] = by * x[i];
}
"""


@pytest.mark.parametrize("device", ["", "t4", "sim:b300", "zw810e"])
def test_a_source_with_arguments_of_many_types(device: str) -> None:
    rng = np.random.default_rng()
    x, y = torch.from_numpy(rng.standard_normal(70, np.float32)), np.zeros(70)
    simulator.simulate(SCALE, [x, y, 0.5, 3, 70], grid=(3, 1, 1), block=32, device=device)
    assert (y[3:] == x.numpy()[3:] * 0.5).all()
    assert (y[:3] == 0).all()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "scale has 5 parameters; 0 arguments are given"),
        ([np.zeros((8, 8), np.float32)[:, 0], np.zeros(8), 1.0, 0, 8], "argument 0 .* contiguous"),
        ([torch.zeros(8, 8).t(), np.zeros(8), 1.0, 0, 8], "argument 0 .* contiguous"),
        ([[1.0], np.zeros(8), 1.0, 0, 8], "argument 0 is a list"),
        ([np.zeros(8, np.float32), np.zeros(8), 1.0, 0.5, 8], "argument 3 is 0.5"),
    ],
)
def test_arguments_that_do_not_fit(arguments: list[Any], told: str) -> None:
    with pytest.raises(HummingError, match=told):
        simulator.simulate(SCALE, arguments)


def test_one_of_several_kernels() -> None:
    both = """
    extern "C" __global__ void one(int* y) { *y = 1; }
    extern "C" __global__ void two(int* y) { *y = 2; }
    """
    y = np.zeros(1, np.int32)
    with pytest.raises(HummingError, match=r"2 kernels: name one of (one, two|two, one)$"):
        simulator.simulate(both, [y], block=1)
    simulator.simulate(both, [y], block=1, kernel="two")
    assert y[0] == 2


@pytest.mark.parametrize(("call", "name"), [('printf("a")', "printf"), ("malloc(8)", "malloc")])
def test_functions_of_the_driver(call: str, name: str) -> None:
    source = f"""
    extern "C" __global__ void k(long* y) {{ *y = (long){call}; }}
    """
    with pytest.raises(errors.UnknownInstructionError, match=f"{name} is not simulated"):
        simulator.simulate(source, [np.zeros(1, np.int64)])


def test_options_hold_for_products() -> None:
    rng = torch.Generator().manual_seed(int(np.random.SeedSequence().entropy) % 2**31)
    weight = torch.randn(64, 64, generator=rng) / 8
    packed = humming.pack(humming.quantize(weight, "int4_g64"))
    x = torch.randn(2, 64, generator=rng).to(torch.float16)
    plain = humming.matmul(x, packed, device="sim:t4")
    with simulator.options(seed=3):
        assert (humming.matmul(x, packed, device="sim:t4") == plain).all()
        with (
            simulator.options(max_basic_blocks=1),
            pytest.raises(errors.DeadlockError, match="within 1 basic blocks"),
        ):
            humming.matmul(x, packed, device="sim:t4")
    assert (humming.matmul(x, packed, device="sim:t4") == plain).all()


@pytest.mark.parametrize("changes", [{"seed": -1}, {"limit": 3}, {"device": None}])
def test_options_that_mean_nothing(changes: dict[str, Any]) -> None:
    with pytest.raises(HummingError), simulator.options(**changes):
        pass


def test_what_the_package_offers() -> None:
    assert set(simulator.__all__) == {"Options", "SimulatorRuntime", "options", "simulate"}
    assert all(callable(getattr(simulator, name)) for name in simulator.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = simulator.nothing
