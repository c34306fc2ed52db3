"""Runs the simulator's own tests on a card beside it, and compares memory bit for bit.

    python tests/sim/conformance.py --output benchmarks/results/CARD_conformance.json

Every kernel that the tests launch in the simulator is assembled by the driver and launched on the
card with the same inputs, in the memory that the simulator had registered; then so are composed
kernels of every weight format, for the card's own row and for rows of older architectures.

Sums of floating MMA may differ in bits, for their order is not the PTX ISA's, and by no more than
`accumulation.bound` of each instruction. What that comes to in the memory of a launch, the
simulator says itself: it runs it some more times, with sums moved to the ends of their bound, all
to one or at random. Composed products, also those of tests, are compared with exact ones, within
`reference.error_bound`.

The exit status is 0 if everything agrees, is within its bound, or differs as `known_differences`
says and in nothing else.
"""

import argparse
import copy
import dataclasses
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from card import CardError, CardHangError, CardProcess, Launch, Place, maps_in, tensor_maps
from composed_products import Exact
from known_differences import Memory, reason

from humming import reference

runtime = importlib.import_module("humming.devices.simulator.runtime")

FAILURES = ("differs", "beyond the bound", "card fault", "no end", "wrong product")
"""Outcomes that are no agreement."""

Judge = Callable[[int, Memory], str | None]
"""Says what is wrong with an allocation, of its address and memory; None for "not my matter"."""

_FLOATS = {"f64": np.uint64, "f32": np.uint32, "f16": np.uint16, "bf16": np.uint16}
_MMA = re.compile(
    r"\b(?:mma|wgmma|tcgen05)[.\w:]*\.(f32|f16)\.(?:f16|bf16|tf32|e\dm\d)\.(?:f16|bf16|tf32|e\dm\d)"
)
_NARROWS = re.compile(r"\bcvt\.\w+(?:\.\w+)*?\.(bf16|f16)(?:x2)?\.f32")


def kinds_of_sums(ptx: str) -> set[str]:
    """Types in which results of floating MMA may reach memory; none if the kernel has no such."""
    kinds = set(_MMA.findall(ptx))
    if re.search(r"mma[.\w]*\.f64\.f64\.f64\.f64", ptx):
        kinds.add("f64")
    # A descriptor says which, or not all types are named.
    if "tcgen05.mma" in ptx or re.search(r"wmma\.mma[.\w]*\.f(16|32)\.f(16|32)", ptx):
        kinds |= {"f32", "f16"}
    return kinds | set(_NARROWS.findall(ptx)) if kinds else set()


def number_of(ptx: str) -> int:
    """The number of the architecture that a module is for: 90 for sm_90a."""
    found = re.search(r"\.target\s+sm_(\d+)", ptx)
    return int(found[1]) if found else 0


def numbers(data: np.ndarray, kind: str) -> np.ndarray:
    """float64 values of memory of a type."""
    size = len(data) // np.dtype(_FLOATS[kind]).itemsize * np.dtype(_FLOATS[kind]).itemsize
    if kind == "bf16":
        wide = data[:size].view(np.uint16).astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32).astype(np.float64)
    dtype = {"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind]
    return data[:size].view(dtype).astype(np.float64)


_ENDS = ((-1.0, None), (1.0, None), *((1.0, seed) for seed in range(4)))
"""How sums are moved: by which share of their bound, and the seed of random directions."""


def share_of_bound(memory: Memory, ends: Sequence[np.ndarray], kind: str) -> float:
    """The largest difference from the simulator over what its moved sums allow: 1 is the bound."""
    with np.errstate(all="ignore"):
        ours, theirs = numbers(memory.ours, kind), numbers(memory.theirs, kind)
        reach = np.max([np.abs(numbers(end, kind) - ours) for end in ends], axis=0)
        same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
        away = np.where(same, 0.0, np.abs(theirs - ours))
        # Nothing allowed is infinitely beyond; what is no number here agrees with no number.
        share = np.where(away == 0, 0.0, away / reach)
    return float(np.max(np.where(np.isnan(share), np.inf, share), initial=0.0))


class Comparison:
    """A pytest plugin that repeats the simulator's launches on a card.

    Attributes:
        rows: what is known of each launch.
        shard: which of how many parts of the tests and products to run.
        judge: decides about the memory of the next launches in place of moved sums.
    """

    def __init__(self, card: Any, shard: tuple[int, int] = (0, 1)) -> None:
        self.card, self.shard = card, shard
        self.rows: list[dict[str, Any]] = []
        self.judge: Judge | None = None
        self.test = ""
        self._unsettled: list[tuple[dict[str, Any], list[Place], list[Memory]]] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the part of the tests that is to be run."""
        part, parts = self.shard
        items[:] = items[part::parts]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Remember whose launches follow."""
        self.begin(item.nodeid)

    def begin(self, name: str) -> None:
        """The launches that follow are those of a test or product."""
        self.test = name
        self._unsettled.clear()

    def __enter__(self) -> "Comparison":
        """From now on, launches are repeated on the card."""
        load, launch = runtime.SimulatorRuntime.load, runtime.SimulatedKernel.launch
        self._load, self._launch = load, launch
        comparison = self

        def remembering_load(self: Any, image: Any, entry: str, *more: Any) -> Any:
            kernel = load(self, image, entry, *more)
            kernel.ptx = image.data.decode().rstrip("\0")
            return kernel

        def comparing_launch(
            self: Any, grid: Any, block: Any, params: Any, *more: Any, **named: Any
        ) -> None:
            places = places_of(self, named.get("buffers", ()))
            launch(self, grid, block, params, *more, **named)
            settings = Launch(
                grid,
                block,
                bytes(params),
                named.get("cluster", (1, 1, 1)),
                self.smem_bytes,
                tuple(self.program.params_begin_at),
            )
            comparison.compare(self, places, settings, named.get("buffers", ()))

        self._bound = reference.error_bound

        def settling_bound(*arguments: Any, **named: Any) -> torch.Tensor:
            bound = self._bound(*arguments, **named)
            self._settle(bound, *arguments, **named)
            return bound

        runtime.SimulatorRuntime.load = remembering_load
        runtime.SimulatedKernel.launch = comparing_launch
        reference.error_bound = settling_bound
        return self

    def __exit__(self, *_: Any) -> None:
        runtime.SimulatorRuntime.load = self._load
        runtime.SimulatedKernel.launch = self._launch
        reference.error_bound = self._bound

    def _settle(
        self,
        bound: torch.Tensor,
        problem: Any,
        x: torch.Tensor,
        weight: Any,
        bias: torch.Tensor | None = None,
        **_: Any,
    ) -> None:
        """A test asks how far its product may lie from the exact one: so may the card's."""
        dtype = getattr(torch, problem.out_dtype.name)
        exact = reference.matmul(x, weight, bias)
        size = bound.numel() * dtype.itemsize
        for row, places, memories in self._unsettled:
            kept = [m for m in memories if np.array_equal(m.before, m.ours)]
            if any(not np.array_equal(m.before, m.theirs) for m in kept):
                continue  # the card has written an input
            for (address, _), memory in zip(places, memories, strict=True):
                changed = not np.array_equal(memory.before, memory.ours)
                judge = Exact(address, dtype, exact, bound)
                # A workspace of partial sums may be as large as the product.
                if changed and len(memory.ours) == size and judge.wrong(memory.ours) is None:
                    wrong = judge.wrong(memory.theirs)
                    row["outcome"] = "wrong product" if wrong else "right product"
                    row |= {"error": wrong} if wrong else {}
        self._unsettled.clear()

    def compare(
        self, kernel: Any, places: list[Place], launch: Launch, buffers: Sequence[Any]
    ) -> None:
        """Repeat one launch on the card and record what differs."""
        row: dict[str, Any] = {"test": self.test}
        self.rows.append(row)
        if launch.smem_bytes > self.card.most_smem_bytes:
            row["outcome"] = "needs more than the card has"
            return
        simulated = [kernel._memory.read(at, len(before)) for at, before in places]
        try:
            found = self.card.run(kernel.ptx, kernel.program.entry.name, places, launch)
        except CardHangError as error:
            row |= {"outcome": "no end", "error": str(error)}
            return
        except CardError as error:
            # The driver makes no tensor map that only newer architectures have.
            newer = number_of(kernel.ptx) > number_of(f".target {self.card.target}")
            refused = not error.assembled and (newer or "PTX" in str(error))
            row["outcome"] = "rejected by the assembler" if refused else "card fault"
            row["error"] = str(error)
            return
        except Exception as error:  # of this script or its card: a failure, and no reason to stop
            row |= {"outcome": "card fault", "error": repr(error)}
            return
        memories = [
            Memory(before, *without_maps(before, ours, theirs))
            for (_, before), ours, theirs in zip(places, simulated, found, strict=True)
        ]
        row |= self._outcome(kernel, places, launch, buffers, memories)
        if self.judge is None and row["outcome"].endswith("the bound"):
            self._unsettled.append((row, places, memories))

    def _outcome(
        self,
        kernel: Any,
        places: list[Place],
        launch: Launch,
        buffers: Sequence[Any],
        memories: list[Memory],
    ) -> dict[str, Any]:
        if self.judge is not None:
            judged = [self.judge(at, m) for (at, _), m in zip(places, memories, strict=True)]
            wrong = [told for told in judged if told]
            if wrong:
                return {"outcome": "wrong product", "error": "; ".join(wrong)}
            memories = [m for m, told in zip(memories, judged, strict=True) if told is None]
        differing = [m for m in memories if not np.array_equal(m.ours, m.theirs)]
        if not differing:
            return {"outcome": "equal" if self.judge is None else "right product"}
        row: dict[str, Any] = {
            "differing_bytes": int(sum((m.ours != m.theirs).sum() for m in differing))
        }
        why = reason(self.test, memories)
        if why:
            return row | {"outcome": "known difference", "explanation": why}
        row["examples"] = [word for m in differing for word in _examples(m.ours, m.theirs)][:4]
        kinds = kinds_of_sums(kernel.ptx)
        if not kinds or self.judge is not None:
            return row | {"outcome": "differs"}
        ends: list[list[np.ndarray]] = []
        for by, seed in _ENDS:
            ends.append(self._moved(kernel, places, launch, buffers, by, seed))
            shares = [
                min(share_of_bound(m, [end[place] for end in ends], kind) for kind in kinds)
                for place, m in enumerate(memories)
                if not np.array_equal(m.ours, m.theirs)
            ]
            row["share_of_the_bound"] = max(shares)
            if len(ends) > 1 and row["share_of_the_bound"] <= 1:
                break  # what random directions add is not needed
        within = row["share_of_the_bound"] <= 1
        return row | {"outcome": "within the bound" if within else "beyond the bound"}

    def _moved(
        self,
        kernel: Any,
        places: list[Place],
        launch: Launch,
        buffers: Sequence[Any],
        by: float,
        seed: int | None,
    ) -> list[np.ndarray]:
        """Memory after the launch in the simulator, with sums moved by a share of their bound."""
        memory = kernel._memory
        after = [memory.read(at, len(before)) for at, before in places]
        moved = copy.copy(kernel)
        moved.options = dataclasses.replace(kernel.options, sums=by, sums_seed=seed)
        moved._machines = {}
        try:
            for at, before in places:
                memory.write(at, before.tobytes())
            more = {"buffers": buffers} if buffers else {}
            self._launch(
                moved, launch.grid, launch.block, launch.params, cluster=launch.cluster, **more
            )
            return [memory.read(at, len(before)) for at, before in places]
        finally:
            for (at, _), data in zip(places, after, strict=True):
                memory.write(at, data.tobytes())


def places_of(kernel: Any, buffers: Sequence[Any]) -> list[Place]:
    """The memory that a launch may access, but for the module's own variables."""
    memory = kernel._memory
    own = {a.base for a in memory._allocations if a.name.startswith("the variable ")}
    known = {(a.base, a.size_bytes) for a in memory._allocations if a.size_bytes}
    known |= {(b.address, b.size_bytes) for b in buffers if b.size_bytes}
    return [(at, memory.read(at, size)) for at, size in sorted(known) if at not in own]


def without_maps(
    before: np.ndarray, ours: np.ndarray, theirs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Memory after a launch without its tensor maps, whose bytes are of the simulator's making."""
    ours, theirs = ours.copy(), theirs.copy()
    for at, _ in [*maps_in(before.tobytes()), *maps_in(ours.tobytes())]:
        ours[at : at + tensor_maps.BYTES] = theirs[at : at + tensor_maps.BYTES] = 0
    return ours, theirs


def _examples(ours: np.ndarray, theirs: np.ndarray) -> list[dict[str, str]]:
    """The first differing 32-bit words."""
    size = len(ours) // 4 * 4
    a, b = ours[:size].view(np.uint32), theirs[:size].view(np.uint32)
    places = np.flatnonzero(a != b)[:4]
    return [
        {"word": str(at), "simulator": f"{a[at]:#010x}", "card": f"{b[at]:#010x}"} for at in places
    ]


def report(comparison: Comparison, tests_status: int, seconds: float) -> dict[str, Any]:
    """What is kept of a run."""
    rows = comparison.rows
    shares = [row["share_of_the_bound"] for row in rows if row["outcome"] == "within the bound"]
    rejected: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row["outcome"] == "rejected by the assembler":
            rejected[row["test"].partition("::")[0].rpartition("/")[2]].append(row["test"])
    return {
        "environment": environment(comparison.card),
        "target": comparison.card.target,
        "seconds": round(seconds),
        "launches": len(rows),
        "outcomes": dict(sorted(Counter(row["outcome"] for row in rows).items())),
        "largest_share_of_a_bound": max(shares, default=None),
        "tests_status": tests_status,
        "failures": [row for row in rows if row["outcome"] in FAILURES],
        "rejected_by_test_file": dict(sorted(rejected.items())),
        "known_differences": [row for row in rows if row["outcome"] == "known difference"],
        "within_the_bound": [
            {name: row[name] for name in ("test", "share_of_the_bound")}
            for row in rows
            if row["outcome"] == "within the bound"
        ],
        "products": [row for row in rows if "product" in row["outcome"]],
    }


def status_of(found: dict[str, Any]) -> int:
    """The exit status of a run: 0 if there is no failure and something was compared."""
    agreed = sum(found["outcomes"].get(name, 0) for name in ("equal", "right product"))
    return int(bool(found["failures"]) or found["tests_status"] != 0 or not agreed)


def environment(card: Any) -> dict[str, Any]:
    """What belongs to every recorded result."""
    names = ("torch", "numpy", "cuda-bindings")
    nvrtc = importlib.import_module("humming.devices.nvrtc")
    return {
        "card": card.name,
        "driver": card.driver_version,
        "compiler": f"nvrtc {nvrtc.dotted(nvrtc.version())}",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in names},
        "date": datetime.date.today().isoformat(),
    }


def main(arguments: Sequence[str] | None = None, card: Any = None) -> int:
    """Run the tests and the products, write the report, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="where to write the report")
    parser.add_argument("--seed", type=int, default=0, help="of the composed products")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0 is by the cores")
    parser.add_argument("--shard", default="0/1", help=argparse.SUPPRESS)
    parser.add_argument("--no-products", action="store_true", help="run the tests only")
    parser.add_argument("tests", nargs="*", default=[str(Path(__file__).parent)])
    options = parser.parse_args(arguments)
    start = time.monotonic()
    jobs = 1 if card is not None else options.jobs or max(1, min(8, (os.cpu_count() or 1) // 2))
    if jobs > 1 and options.shard == "0/1":
        comparison, status = in_parallel(jobs, options)
        return finish(comparison, status, time.monotonic() - start, options.output)
    part, _, parts = options.shard.partition("/")
    comparison = Comparison(card or CardProcess(), (int(part), int(parts)))
    with comparison:
        quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        # The tests of this script compare launches themselves, and products of every format follow.
        for test in ("test_conformance.py", "test_formats.py"):
            quiet += ["--ignore", str(Path(__file__).with_name(test))]
        # Options of the environment are for the run of whoever called this, such as "-n 2".
        outer = os.environ.pop("PYTEST_ADDOPTS", None)
        try:
            status = int(pytest.main([*quiet, *options.tests], plugins=[comparison]))
        finally:
            if outer is not None:
                os.environ["PYTEST_ADDOPTS"] = outer
        if not options.no_products:
            from composed_products import compare_products

            compare_products(comparison, options.seed)
    if options.shard != "0/1":
        card = comparison.card
        about = {"name": card.name, "driver_version": card.driver_version, "target": card.target}
        options.output.write_text(
            json.dumps({"rows": comparison.rows, "status": status, "card": about})
        )
        return 0
    return finish(comparison, status, time.monotonic() - start, options.output)


def in_parallel(jobs: int, options: argparse.Namespace) -> tuple[Comparison, int]:
    """Runs the parts of everything in processes of their own, and joins what they found."""
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    own = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), threads)
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"{part}.json" for part in range(jobs)]
        processes = []
        for part, output in enumerate(outputs):
            command = [sys.executable, __file__, "--shard", f"{part}/{jobs}"]
            command += ["--output", str(output), "--seed", str(options.seed), *options.tests]
            command += ["--no-products"] if options.no_products else []
            processes.append(subprocess.Popen(command, env=os.environ | own))
        for process in processes:
            process.wait()
        return joined([json.loads(o.read_text()) if o.exists() else None for o in outputs])


def joined(parts: Sequence[dict[str, Any] | None]) -> tuple[Comparison, int]:
    """What several processes found; one that has left nothing behind is a failure."""
    whole = [part for part in parts if part is not None]
    about = whole[0]["card"] if whole else {"name": "", "driver_version": 0, "target": ""}
    comparison = Comparison(argparse.Namespace(**about))
    comparison.rows = [row for part in whole for row in part["rows"]]
    statuses = [
        part["status"] for part in whole if part["status"] != pytest.ExitCode.NO_TESTS_COLLECTED
    ]
    lost = [1] if len(whole) < len(parts) else []
    return comparison, int(max([*statuses, *lost], default=0))


def finish(comparison: Comparison, status: int, seconds: float, output: Path | None) -> int:
    """Writes and prints the report; returns the exit status."""
    found = report(comparison, status, seconds)
    if output:
        output.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{comparison.card.name}: {len(comparison.rows)} launches, {found['outcomes']}")
    for row in found["failures"]:
        print(row)
    return status_of(found)


if __name__ == "__main__":
    sys.exit(main())
