"""Times products beside those of other libraries, each in a process of its own, on one card.

    python benchmarks/compare.py --output benchmarks/results/CARD_peers.json --seconds 500
    python benchmarks/compare.py --formats "fp8 x fp8" --shapes 8192x8192 --m 1,16 --output ...

For each weight and number of tokens the processes take turns, several rounds of graph replays each;
a figure is the median of all. What the output already has is kept and not measured again, and with
`--seconds` the run ends in time, so that a grid can be measured in pieces: repeat the command until
it says that nothing is missing. Libraries are installed from the wheels in `--wheels`; those that
are absent are told and left out. docs/benchmarks.md says how to get the wheels.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.processes import PATIENCE_S, SPECS, Process, install, process_of

ROOT = Path(__file__).parents[1]
SHAPES = (
    "8192x8192,4096x4096,28672x8192,8192x28672,10240x8192,57344x8192,8192x3584,"
    "7168x2048,2048x7168,1536x7168,24576x1536"
)
TOKENS = "1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192"
FORMATS = (
    "int4_g128 x bf16,fp8 x fp8,int4_g128_sbf16 x bf16,int4 x bf16,int8 x bf16,fp8 x bf16,"
    "mxfp4 x bf16,nvfp4 x bf16,int3_g128 x bf16,int2_g128 x bf16,int8 x int8,int4 x int8,"
    "int4 x fp8,mxfp4 x fp8,fp8_block128 x fp8_g128"
)
OURS, FLOOR, FLOOR_DEPENDENT = "ours", "floor", "floor dependent"
# The 16-bit product that a quantized one replaces; every other name is a library's own format.
BASELINES = ("cublas bf16", "cublas fp16")
# Rounding an output to bfloat16 costs 1.7e-3; fp8 products that sum in few bits, a few hundredths.
WRONG = 0.05
# Graphs of about 20 ms: many calls of short products, few of long ones.
GRAPH_US, MOST_CALLS, FEWEST_CALLS = 20_000, 48, 4
ROUGH_FLOPS_PER_US, ROUGH_BYTES_PER_US = 5e8, 4e6
ROUNDS, REPLAYS = 5, 3
SPARE_S = 8.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing; 0 if nothing is left, 1 if time ended before."""
    options = parse(arguments)
    results = Results.read(options.output, options.redo)
    weights = list(missing(options, results))
    total = sum(len(weight.tokens) for weight in weights)
    print(f"{total} rows of {len(weights)} weights are missing", flush=True)
    if not weights:
        return 0
    deadline = time.monotonic() + options.seconds
    options.logs.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(start(options), options.rounds, options.replays, deadline)
    try:
        results.begin(comparison.about())
        comparison.compile_ahead(ahead(options), weights)
        for weight in weights:
            for row in comparison.measure(weight):
                results.put(row)
                print(told(row), flush=True)
            results.save()
            if comparison.is_over:
                break
    finally:
        comparison.stop()
        results.save()
    left = sum(len(weight.tokens) for weight in missing(options, results, again=False))
    print(f"{left} rows are missing" if left else "nothing is missing", flush=True)
    return int(left > 0)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shapes", default=SHAPES, help="N x K of the weights")
    add("--formats", default=FORMATS, help="separated by commas")
    add("--m", default=TOKENS, help="tokens")
    add("--peers", default=",".join(SPECS), help="libraries to run, `ours` among them")
    add("--output", type=Path, required=True, help="JSON file; what it has is kept")
    add("--redo", action="store_true", help="measure again what the output has")
    add("--seconds", type=float, default=math.inf, help="end after so long, with what there is")
    add("--wheels", type=Path, default=ROOT / ".peers", help="where wheels of the peers lie")
    add("--work", type=Path, help="folder of what is installed and compiled [WHEELS/work]")
    add("--python", action="append", default=[], help="PEER=INTERPRETER, to run one by another")
    add("--rounds", type=int, default=ROUNDS, help="turns that every process takes")
    add("--replays", type=int, default=REPLAYS, help="timed replays in a turn")
    options = parser.parse_args(arguments)
    options.work = (options.work or options.wheels / "work").absolute()
    options.logs = options.work / "logs"
    return options


@dataclass(frozen=True)
class Weight:
    """A weight to be multiplied with some numbers of tokens."""

    n: int
    k: int
    format: str
    tokens: tuple[int, ...]

    @property
    def command(self) -> dict[str, Any]:
        """What a worker is told of it."""
        return {"n": self.n, "k": self.k, "format": self.format, "tokens": list(self.tokens)}


@dataclass
class Results:
    """The rows of a JSON file, kept across runs."""

    path: Path
    rows: dict[tuple[int, int, str, int], dict[str, Any]] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    again: bool = False

    @classmethod
    def read(cls, path: Path, again: bool = False) -> "Results":
        """What the file has; nothing if there is none."""
        found = cls(path, again=again)
        if path.exists():
            stored = json.loads(path.read_text())
            found.environment, found.runs = stored["environment"], stored["runs"]
            for row in stored["peers"]:
                found.rows[key(row)] = row
        return found

    def begin(self, about: dict[str, Any]) -> None:
        """Begin a run with what it is measured with, which must be the same card."""
        if self.environment and self.environment["card"] != about["card"]:
            raise SystemExit(
                f"{self.path} is of a {self.environment['card']}, and this is a {about['card']}: "
                "give another --output"
            )
        self.environment = about
        self.runs.append(about)

    def put(self, row: dict[str, Any]) -> None:
        """Add or replace a row of the run."""
        self.rows[key(row)] = {**row, "run": len(self.runs) - 1}

    def save(self) -> None:
        """Write all; the file is whole at any time."""
        if not self.runs:
            return
        stored = {
            "environment": self.environment,
            "runs": self.runs,
            "peers": [self.rows[name] for name in sorted(self.rows)],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(stored, indent=1) + "\n")
        os.replace(draft, self.path)


def key(row: dict[str, Any]) -> tuple[int, int, str, int]:
    """What a row is found by."""
    return row["n"], row["k"], row["format"], row["m"]


def missing(
    options: argparse.Namespace, results: Results, again: bool | None = None
) -> Iterator[Weight]:
    """The weights and tokens that were asked for and are not there, or all if `again`."""
    again = results.again if again is None else again
    tokens = [int(m) for m in options.m.split(",")]
    for shape in options.shapes.split(","):
        n, k = (int(size) for size in shape.split("x"))
        for name in options.formats.split(","):
            name = " ".join(name.split())
            left = tuple(m for m in tokens if again or (n, k, name, m) not in results.rows)
            if left:
                yield Weight(n, k, name, left)


def start(options: argparse.Namespace) -> list[Process]:
    """The processes of all peers that could import their library; others are told."""
    started = []
    asked = list(processes(options, options.peers.split(",")))
    # Importing takes each of them seconds.
    with ThreadPoolExecutor(len(asked)) as pool:
        told_by = list(pool.map(Process.start, asked))
    for process, about in zip(asked, told_by, strict=True):
        if "failed" in about:
            print(f"{process.name} is left out: {about['failed']}", flush=True)
            process.stop()
        else:
            started.append(process)
    if all(process.name != OURS for process in started):
        raise SystemExit(f"no comparison without {OURS}; its messages are in {options.logs}")
    return started


def ahead(options: argparse.Namespace) -> list[Process]:
    """Further processes of the peers that can compile ahead."""
    names = [name for name in options.peers.split(",") if SPECS[name].compiles_ahead]
    return list(processes(options, names))


def processes(options: argparse.Namespace, names: Iterable[str]) -> Iterator[Process]:
    """Processes by name, with what they need installed."""
    pythons = dict(named.split("=", 1) for named in options.python)
    for name in names:
        spec, python = SPECS[name], pythons.get(name, sys.executable)
        installed = install(spec, options.wheels, options.work / "installed", python)
        log = (options.logs / f"{name}.log").open("a")
        yield process_of(spec, installed, options.work / "caches", python, log)


@dataclass
class Comparison:
    """Processes that take turns.

    Attributes:
        running: the processes, started.
        rounds: turns of each process for a row.
        replays: timed replays of each graph in a turn.
        deadline: when to stop, by `time.monotonic()`.
    """

    running: list[Process]
    rounds: int
    replays: int
    deadline: float
    is_over: bool = False
    _ahead: list[Process] = field(default_factory=list)
    _longest_load_s: float = 0.0

    def about(self) -> dict[str, Any]:
        """Card, versions and date, and what is known of each library."""
        hellos = {process.name: dict(process.hello) for process in self.running}
        environment: dict[str, Any] = hellos[OURS].pop("environment")
        return {**environment, "peers": hellos}

    def compile_ahead(self, helpers: list[Process], weights: list[Weight]) -> None:
        """Have helpers compile the kernels of all weights in their order, beside what follows."""
        running = {process.name for process in self.running}
        for process in helpers:
            if process.name in running and "failed" not in process.start():
                self._ahead.append(process)
                # The first is about to be compiled by the process that needs it.
                for weight in weights[1:]:
                    process.tell({"do": "compile", **weight.command})

    def measure(self, weight: Weight) -> Iterator[dict[str, Any]]:
        """The rows of one weight, as long as there is time."""
        if self._lacks(self._longest_load_s):
            return
        begun = time.monotonic()
        failed = self._load(weight)
        self._longest_load_s = max(self._longest_load_s, time.monotonic() - begun)
        longest_row_s = 0.0
        for m in weight.tokens:
            if self._lacks(longest_row_s):
                return
            begun = time.monotonic()
            row = self._row(weight, m, failed)
            if time.monotonic() > self.deadline:
                # Whoever was waited for no longer would be missing from the row for good.
                self.is_over = True
                return
            yield row
            longest_row_s = max(longest_row_s, 2 * (time.monotonic() - begun))

    def _lacks(self, seconds: float) -> bool:
        left = self.deadline - time.monotonic()
        self.is_over = left < seconds + SPARE_S
        for process in self.running:
            process.patience_s = min(PATIENCE_S, left)
        return self.is_over

    def _load(self, weight: Weight) -> dict[str, str]:
        """Have all load a weight; why those that did not will take no part."""
        self._takes_part = []
        failed = {}
        for process in self.running:
            if not process.is_running:
                process.start()
            process.tell({"do": "load", **weight.command})
        for process in self.running:
            answer = process.hear()
            if "failed" in answer:
                failed[process.name] = answer["failed"]
                self._drop_if_broken(process, answer["failed"])
            elif "absent" not in answer:
                self._takes_part.append(process)
        return failed

    def _row(self, weight: Weight, m: int, failed: dict[str, str]) -> dict[str, Any]:
        calls = calls_of(weight.n, weight.k, m)
        products: dict[str, dict[str, Any]] = {}
        failed = dict(failed)
        taking = []
        for process in self._takes_part:
            answer = process.ask({"do": "capture", "m": m, "calls": calls})
            if "failed" in answer:
                failed[process.name] = answer["failed"]
                self._drop_if_broken(process, answer["failed"])
                continue
            taking.append(process)
            products |= answer["products"]
        times: dict[str, list[float]] = {}
        for turn in range(self.rounds):
            for process in taking if turn % 2 == 0 else taking[::-1]:
                if not process.is_running:
                    continue
                answer = process.ask({"do": "replay", "replays": self.replays})
                if "failed" in answer:
                    failed[process.name] = answer["failed"]
                    self._drop_if_broken(process, answer["failed"])
                for name, found in answer.get("us", {}).items():
                    times.setdefault(name, []).extend(found)
        self._takes_part = [process for process in self._takes_part if process.is_running]
        return row_of(weight, m, calls, products, times, failed)

    @staticmethod
    def _drop_if_broken(process: Process, why: str) -> None:
        # A fault on the device leaves a process unable to do anything else.
        if "CUDA error" in why or "CUDA_ERROR" in why:
            process.stop()

    def stop(self) -> None:
        """End all processes."""
        for process in (*self._ahead, *self.running):
            process.stop()


def calls_of(n: int, k: int, m: int) -> int:
    """How many calls a graph has, the same for all libraries."""
    rough_us = 2 * m * n * k / ROUGH_FLOPS_PER_US + 2 * n * k / ROUGH_BYTES_PER_US
    return max(FEWEST_CALLS, min(MOST_CALLS, int(GRAPH_US / rough_us)))


def row_of(
    weight: Weight,
    m: int,
    calls: int,
    products: dict[str, dict[str, Any]],
    times: dict[str, list[float]],
    failed: dict[str, str],
) -> dict[str, Any]:
    """What is recorded of one weight and number of tokens."""
    us, errors, notes, failed = {}, {}, {}, dict(failed)
    for name, product in products.items():
        if "failed" in product:
            failed[name] = product["failed"]
        elif not product["relative_error"] <= WRONG:
            failed[name] = f"relative error {product['relative_error']:.2g}"
        elif times.get(name):
            us[name] = statistics.median(times[name])
            if name not in (FLOOR, FLOOR_DEPENDENT):
                errors[name] = product["relative_error"]
            if product["note"]:
                notes[name] = product["note"]
    row = {"n": weight.n, "k": weight.k, "format": weight.format, "m": m, "calls": calls}
    row |= {"us": us, "relative_error": errors, "notes": notes}
    row["spread"] = {name: (max(times[name]) - min(times[name])) / us[name] for name in us}
    if failed:
        row["failed"] = failed
    return row | ratios(us)


def ratios(us: dict[str, float]) -> dict[str, Any]:
    """Ours beside the 16-bit product, the fastest of the others' own formats, and the floor."""
    found: dict[str, Any] = {}
    ours = us.get(OURS)
    if ours is None:
        return found
    dense = [us[name] for name in BASELINES if name in us]
    if dense:
        found["over_cublas"] = min(dense) / ours
    others = [name for name in us if name not in (OURS, FLOOR, FLOOR_DEPENDENT, *BASELINES)]
    if others:
        best = min(others, key=lambda name: us[name])
        found |= {"best_peer": best, "over_best_peer": us[best] / ours}
    if FLOOR_DEPENDENT in us:
        found["of_floor"] = us[FLOOR_DEPENDENT] / ours
    return found


def told(row: dict[str, Any]) -> str:
    """A row in a line."""
    times = ", ".join(f"{name} {us:.2f}" for name, us in row["us"].items())
    ratio = "".join(
        f"  {row[name]:.2f}x {text}"
        for name, text in (("over_cublas", "cuBLAS"), ("over_best_peer", "best peer"))
        if name in row
    )
    failed = "".join(f"\n    {name}: {why}" for name, why in row.get("failed", {}).items())
    return f"{row['n']}x{row['k']} {row['format']} M={row['m']}: {times}{ratio}{failed}"


if __name__ == "__main__":
    raise SystemExit(main())
