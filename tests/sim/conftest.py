"""Runs pieces of PTX in the simulator: fixtures for the tests of single instructions."""

import importlib
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from humming.hookspecs import Image

# Plugins are reached as a user's process reaches them, by the module of their entry point.
runtime = importlib.import_module("humming.devices.simulator.runtime")
launch_shape = importlib.import_module("humming.devices.simulator.launch_shape")

_REGISTER = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh random numbers, from a seed that a failing test prints."""
    seed = int(np.random.SeedSequence().entropy) % 2**32  # type: ignore[arg-type]
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def launch(
    text: str,
    buffers: Mapping[str, np.ndarray],
    *,
    scalars: tuple[int, ...] = (),
    block: int | tuple[int, int, int] = 32,
    grid: int | tuple[int, int, int] = 1,
    cluster: tuple[int, int, int] = (1, 1, 1),
    smem_bytes: int = 0,
    undefined: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """Runs the kernel `test` of a PTX text, whose parameters are addresses and 64-bit scalars."""
    simulator = runtime.SimulatorRuntime(launch_shape.Options(**options))
    for name, array in buffers.items():
        simulator.register(array.ctypes.data, array.nbytes, name, undefined=name in undefined)
    kernel = simulator.load(Image("ptx", text.encode()), "test", smem_bytes)
    values = [array.ctypes.data for array in buffers.values()]
    params = struct.pack(f"<{len(values) + len(scalars)}Q", *values, *scalars)
    block = block if isinstance(block, tuple) else (block, 1, 1)
    grid = grid if isinstance(grid, tuple) else (grid, 1, 1)
    kernel.launch(grid, block, params, cluster=cluster)
    return kernel


def kernel(body: str, parameters: int, declarations: str = "", target: str = "sm_100a") -> str:
    """A kernel `test` around a body; its parameters are `p0`, `p1`, ... of 64 bits."""
    params = ",\n".join(f"  .param .u64 p{i}" for i in range(parameters))
    return (
        f".version 9.4\n.target {target}\n.address_size 64\n{declarations}\n"
        f".visible .entry test(\n{params}\n)\n{{\n{body}\n  ret;\n}}\n"
    )


@pytest.fixture
def run_ptx() -> Callable[..., Any]:
    """`launch`, for tests that write their own kernels."""

    def run(
        body: str,
        buffers: Mapping[str, np.ndarray],
        *,
        declarations: str = "",
        scalars: tuple[int, ...] = (),
        target: str = "sm_100a",
        **options: Any,
    ) -> Any:
        text = kernel(body, len(buffers) + len(scalars), declarations, target=target)
        return launch(text, buffers, scalars=scalars, **options)

    return run


@pytest.fixture
def evaluate() -> Callable[..., list[np.ndarray]]:
    """Runs instructions on operands, one set of them for each thread.

    `evaluate(body, inputs, outputs)`: the body reads `%a0`, `%a1`, ... that hold the elements of
    the input arrays, and writes `%d0`, `%d1`, ..., which are returned as arrays of given types.
    """

    def run(
        body: str,
        inputs: list[np.ndarray],
        outputs: list[Any],
        declarations: str = "",
        target: str = "sm_100a",
        **options: Any,
    ) -> list[np.ndarray]:
        count = len(inputs[0]) if inputs else 32
        results = [np.zeros(count, dtype) for dtype in outputs]
        lines = ["  .reg .b64 %at, %base, %thread; .reg .b32 %t, %c, %n;"]
        lines += ["  mov.u32 %t, %tid.x; mov.u32 %c, %ctaid.x; mov.u32 %n, %ntid.x;"]
        lines += ["  mad.lo.u32 %t, %c, %n, %t; cvt.u64.u32 %thread, %t;"]
        names = [("a", i, a.dtype) for i, a in enumerate(inputs)]
        names += [("d", i, np.dtype(dtype)) for i, dtype in enumerate(outputs)]
        for letter, place, dtype in names:
            lines.append(f"  .reg .{_REGISTER[dtype.itemsize]} %{letter}{place};")
        for place, (letter, i, dtype) in enumerate(names):
            if letter == "a":
                lines.append(f"  ld.param.u64 %base, [p{place}];")
                lines.append(f"  mad.lo.u64 %at, %thread, {dtype.itemsize}, %base;")
                lines.append(f"  ld.global.b{8 * dtype.itemsize} %a{i}, [%at];")
        lines.append(body)
        for place, (letter, i, dtype) in enumerate(names):
            if letter == "d":
                lines.append(f"  ld.param.u64 %base, [p{place}];")
                lines.append(f"  mad.lo.u64 %at, %thread, {dtype.itemsize}, %base;")
                lines.append(f"  st.global.b{8 * dtype.itemsize} [%at], %d{i};")
        arrays = [np.ascontiguousarray(a) for a in inputs] + results
        assert count % 32 == 0
        launch(
            kernel("\n".join(lines), len(names), declarations, target),
            {f"buffer {i}": array for i, array in enumerate(arrays)},
            block=min(count, 128),
            grid=-(-count // 128),
            **options,
        )
        return results

    return run
