"""Runs the simulator's own tests on a card beside it, and compares memory bit for bit.

    python tests/sim/conformance.py --output benchmarks/results/CARD_conformance.json

Every kernel that the tests launch in the simulator, single instructions and composed kernels alike,
is assembled by the driver and launched on the card with the same inputs, in the memory that the
simulator had registered. What the card's assembler rejects is counted as such. Sums of floating MMA
may differ in bits: their additions are not ordered by the PTX ISA; their differences are recorded.
"""

import argparse
import ctypes
import datetime
import importlib
import importlib.metadata
import json
import re
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

ROOT = Path(__file__).parents[2]
runtime = importlib.import_module("humming.devices.simulator.runtime")
_PTX_VERSION, _GUARD_BYTES = "9.0", 4096


# Tests whose results may differ, by what their launches do.
EXPLAINED = {
    r"test_special_registers": "which SM runs a CTA, and when, is the hardware's choice",
    r"test_half_to_float32|test_tf32_drops|test_packed_halves": "NaN payloads only: the PTX ISA "
    "leaves open which NaN these operations return for one",
    r"test_dynamic_shared_memory_is_aligned": "the address at which shared memory begins",
    r"test_atomic_operations": "the order in which threads reach one address, hence who sees what",
}


class CardError(Exception):
    """The driver refused something; `assembled` tells whether the PTX had been accepted."""

    def __init__(self, told: str, assembled: bool) -> None:
        super().__init__(told)
        self.assembled = assembled


class Card:
    """The first CUDA device, with a context that is made anew after a fault."""

    def __init__(self) -> None:
        self._ok(driver.cuInit(0))
        self._device = self._ok(driver.cuDeviceGet(0))
        major, minor = (
            self._ok(driver.cuDeviceGetAttribute(attribute, self._device))
            for attribute in (
                driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        self.name = self._ok(driver.cuDeviceGetName(256, self._device)).split(b"\0")[0].decode()
        self.target = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
        self._enter()

    def _enter(self) -> None:
        self._ok(driver.cuCtxSetCurrent(self._ok(driver.cuDevicePrimaryCtxRetain(self._device))))

    @staticmethod
    def _ok(result: tuple[Any, ...], assembled: bool = True) -> Any:
        if int(result[0]) != 0:
            _, name = driver.cuGetErrorName(result[0])
            raise CardError(name.decode(), assembled)
        return result[1] if len(result) > 1 else None

    def run(
        self, text: str, entry: str, smem_bytes: int, places: list[Any], launch: tuple[Any, ...]
    ) -> list[np.ndarray]:
        """Launches a kernel on copies of host memory, and returns the memory after it.

        Args:
            places: (address, bytes before) of each allocation.
            launch: grid, block, parameters and cluster.
        """
        grid, block, params, cluster = launch
        text = re.sub(r"\.version\s+[\d.]+", f".version {_PTX_VERSION}", text)
        text = re.sub(r"\.target\s+\w+", f".target {self.target}", text)
        module = self._ok(driver.cuModuleLoadData(text.encode() + b"\0"), assembled=False)
        held = []
        try:
            function = self._ok(driver.cuModuleGetFunction(module, entry.encode()))
            attributes = driver.CUfunction_attribute
            if smem_bytes:
                limit = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._ok(driver.cuFuncSetAttribute(function, limit, smem_bytes))
            for address, before in places:
                # The same offset within 256 bytes, so that alignment is what it was.
                base = self._ok(driver.cuMemAlloc(len(before) + 256 + _GUARD_BYTES))
                held.append((base, int(base) + address % 256))
                self._ok(driver.cuMemcpyHtoD(held[-1][1], before, len(before)))
            data = _moved(params, places, [at for _, at in held])
            self._launch(function, grid, block, data, cluster, smem_bytes)
            after = []
            for (_, before), (_, at) in zip(places, held, strict=True):
                found = np.empty(len(before), np.uint8)
                self._ok(driver.cuMemcpyDtoH(found, at, len(before)))
                after.append(found)
            return after
        except CardError:
            driver.cuDevicePrimaryCtxReset(self._device)
            self._enter()
            held = []
            raise
        finally:
            for base, _ in held:
                driver.cuMemFree(base)
            driver.cuModuleUnload(module)

    def _launch(
        self, function: Any, grid: Any, block: Any, data: bytes, cluster: Any, smem_bytes: int
    ) -> None:
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = smem_bytes
        if cluster != (1, 1, 1):
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dims = attribute.value.clusterDim
            dims.x, dims.y, dims.z = cluster
            config.attrs, config.numAttrs = [attribute], 1
        buffer = ctypes.create_string_buffer(data, len(data))
        sizes = driver.cuFuncGetParamInfo
        pointers, index = [], 0
        while True:
            error, offset, _ = sizes(function, index)
            if int(error) != 0:
                break
            pointers.append(ctypes.addressof(buffer) + offset)
            index += 1
        array = (ctypes.c_void_p * max(1, len(pointers)))(*pointers)
        self._ok(driver.cuLaunchKernelEx(config, function, ctypes.addressof(array), 0))
        self._ok(driver.cuCtxSynchronize())


def _moved(params: bytes, places: list[Any], homes: list[int]) -> bytes:
    """Parameters with every address of an allocation replaced by that of its copy."""
    data = bytearray(params)
    for at in range(0, len(data) - 7, 8):
        (value,) = struct.unpack_from("<Q", data, at)
        for (address, before), home in zip(places, homes, strict=True):
            if address <= value < address + max(1, len(before)):
                struct.pack_into("<Q", data, at, home + value - address)
    return bytes(data)


class Comparison:
    """A pytest plugin that repeats the simulator's launches on a card."""

    def __init__(self) -> None:
        self.card = Card()
        self.rows: list[dict[str, Any]] = []
        self._test = ""
        self._install()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Remember whose launches follow."""
        self._test = item.nodeid

    def _install(self) -> None:
        load, launch = runtime.SimulatorRuntime.load, runtime.SimulatedKernel.launch
        comparison = self

        def remembering_load(self: Any, image: Any, entry: str, *more: Any) -> Any:
            kernel = load(self, image, entry, *more)
            kernel.ptx = image.data.decode().rstrip("\0")
            return kernel

        def comparing_launch(
            self: Any, grid: Any, block: Any, params: Any, *more: Any, **named: Any
        ) -> None:
            buffers = named.get("buffers", ())
            known = {(a.base, a.size_bytes) for a in self._memory._allocations if a.size_bytes}
            known |= {(b[0], b[1]) for b in buffers if b[1]}
            places = [(at, self._memory.read(at, size)) for at, size in sorted(known)]
            launch(self, grid, block, params, *more, **named)
            settings = (grid, block, bytes(params), named.get("cluster", (1, 1, 1)))
            comparison.compare(self, places, settings)

        runtime.SimulatorRuntime.load = remembering_load
        runtime.SimulatedKernel.launch = comparing_launch

    def compare(self, kernel: Any, places: list[Any], launch: tuple[Any, ...]) -> None:
        """Repeat one launch on the card and record what differs."""
        entry, row = kernel.program.entry.name, {"test": self._test, "differing_bytes": 0}
        self.rows.append(row)
        if ".tensor." in kernel.ptx:
            row["outcome"] = "not comparable: tensor maps are the simulator's own"
            return
        simulated = [kernel._memory.read(at, len(before)) for at, before in places]
        try:
            found = self.card.run(kernel.ptx, entry, kernel.smem_bytes, places, launch)
        except CardError as error:
            refused = "PTX" in str(error) and not error.assembled
            row["outcome"] = "rejected by the assembler" if refused else "card fault"
            row["error"] = str(error)
            return
        differing = [
            (ours, theirs)
            for ours, theirs in zip(simulated, found, strict=True)
            if not np.array_equal(ours, theirs)
        ]
        row["differing_bytes"] = int(sum((a != b).sum() for a, b in differing))
        is_sum = re.search(r"mma[.\w:]*\.(f32|f16)\.", kernel.ptx) is not None
        if differing:
            row["outcome"] = "sums differ in bits" if is_sum else "differs"
            row["examples"] = [word for pair in differing for word in _examples(*pair)][:4]
            row["largest_difference"] = max(_distance(a, b) for a, b in differing)
        else:
            row["outcome"] = "equal"


def _examples(ours: np.ndarray, theirs: np.ndarray) -> list[dict[str, str]]:
    """The first differing 32-bit words."""
    size = len(ours) // 4 * 4
    a, b = ours[:size].view(np.uint32), theirs[:size].view(np.uint32)
    places = np.flatnonzero(a != b)[:4]
    return [
        {"word": str(at), "simulator": f"{a[at]:#010x}", "card": f"{b[at]:#010x}"} for at in places
    ]


def _distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference of two memories taken as floats, over the largest float."""
    found = []
    for kind in (np.float32, np.float16):
        size = len(ours) // np.dtype(kind).itemsize * np.dtype(kind).itemsize
        with np.errstate(all="ignore"):
            a, b = (x[:size].view(kind).astype(np.float64) for x in (ours, theirs))
            largest = np.nanmax(np.abs(a), initial=0.0)
            found.append(float(np.nanmax(np.abs(a - b), initial=0.0) / largest) if largest else 1.0)
    return min(found)


def main() -> None:
    """Run the tests and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("tests", nargs="*", default=[str(Path(__file__).parent)])
    arguments = parser.parse_args()
    comparison = Comparison()
    status = pytest.main(["-q", "-p", "no:cacheprovider", *arguments.tests], plugins=[comparison])
    outcomes = Counter(row["outcome"] for row in comparison.rows)
    print(f"{comparison.card.name}: {len(comparison.rows)} launches, {dict(outcomes)}")
    for row in comparison.rows:
        if row["outcome"] in ("differs", "card fault"):
            print(row)
    if arguments.output:
        kept = [explained(row) for row in comparison.rows if row["outcome"] != "equal"]
        report = {
            "environment": environment(comparison.card.name),
            "target": comparison.card.target,
            "launches": len(comparison.rows),
            "outcomes": dict(outcomes),
            "unexplained": [row for row in kept if row.get("explanation") == ""],
            "not_equal": kept,
            "tests_status": int(status),
        }
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


def explained(row: dict[str, Any]) -> dict[str, Any]:
    """A row with why it may differ, empty where nothing is known."""
    if row["outcome"] not in ("differs", "card fault"):
        return row
    reasons = (why for pattern, why in EXPLAINED.items() if re.search(pattern, row["test"]))
    return row | {"explanation": next(reasons, "")}


def environment(card: str) -> dict[str, Any]:
    """What belongs to every recorded result."""
    names = ("torch", "numpy", "cuda-bindings")
    nvrtc = importlib.import_module("humming.devices.nvrtc")
    return {
        "card": card,
        "compiler": f"nvrtc {nvrtc.dotted(nvrtc.version())}",
        "versions": {name: importlib.metadata.version(name) for name in names},
        "date": datetime.date.today().isoformat(),
    }


if __name__ == "__main__":
    main()
