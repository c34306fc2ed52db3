"""Holds the cost model against recorded timings of tiles; needs no card.

    python benchmarks/tile_model.py
    python benchmarks/tile_model.py --record humming/records/h200.json

For each format, shape and number of tokens of `results/h200_tiles.json`: the fastest tile that was
timed, the model's choice among those, and what the composer chooses among all, without records.
`--record` writes an entry of a tuned record where the composer's choice was slower than the fastest
one, or was not timed. Large batches are held against cuBLAS beside them, as a card that is hot runs
at another clock; of those an entry needs more of a lead.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from humming import plugins
from humming.capability import DeviceCapabilities
from humming.composer import TUNED_RANGES, compose
from humming.cost import CostModel
from humming.lowering import Lowering, enumerate_lowerings
from humming.problem import GemmProblem
from humming.tiles import TileConfig, measurable
from humming.tuned import Entry, ProblemKey, Records, merge_record

TIMINGS = Path(__file__).parent / "results" / "h200_tiles.json"
# From so many tokens on times are held against cuBLAS.
LARGE_M = 1024
# What an entry must gain, and what it must in large batches, whose times differ by that anyway.
LEAD, LARGE_LEAD = 1.02, 1.1


@dataclass(frozen=True)
class Timing:
    """One tile's time.

    Attributes:
        problem, m, lowering, tile: what was timed.
        us: measured.
        compared: the same, of a card on which cuBLAS takes what it took beside the fastest.
    """

    problem: GemmProblem
    m: int
    lowering: Lowering
    tile: TileConfig
    us: float
    compared: float

    @property
    def estimate(self) -> float:
        """What the model expects, in microseconds."""
        return _model(self.problem, self.lowering.name).estimate(self.m, self.tile).order_us


def main() -> None:
    """Print a line for each group of timings and the means; write a record if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, help="the record to write entries into")
    arguments = parser.parse_args()
    recorded = json.loads(TIMINGS.read_text())
    about = recorded["environment"]
    compiler, _, version = about["compiler"].partition(" ")
    versions = {"torch": about["versions"]["torch"], compiler: version}
    losses, entries = [], []
    for timings in groups(recorded["tiles"]):
        best = min(timings, key=lambda timing: timing.compared)
        picked = min(timings, key=lambda timing: timing.estimate)
        told = f"{best.problem.weight.name} x {best.problem.activation.name}, M = {best.m}"
        print(f"{told:42} {best.us:8.2f} us {best.tile}", end="")
        if len({timing.tile for timing in timings}) > 1:
            losses.append(picked.compared / best.compared)
            print(f"; of {len(timings)} picked {losses[-1]:.2f}", end="")
        print()
        if found := better_than_chosen(timings):
            entries.append(
                Entry(
                    ProblemKey.of(found.problem),
                    _range(found.m),
                    found.lowering.name,
                    found.tile,
                    {found.m: found.us},
                    about["card"],
                    about["date"],
                    versions,
                )
            )
    mean, worst = statistics.geometric_mean(losses), max(losses)
    print(f"picked are {mean:.3f} of the fastest on average, {worst:.2f} at worst")
    if arguments.record:
        merge_record(arguments.record, about["device"], entries)
        print(f"{len(entries)} entries in {arguments.record}")


def groups(rows: list[dict[str, Any]]) -> Iterator[list[Timing]]:
    """The timings of one problem and number of tokens each, in the rows' order."""
    found: dict[tuple[str, int, int, int], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["format"], row["n"], row["k"], row["m"]), []).append(row)
    for (name, n, k, m), members in found.items():
        problem = GemmProblem.parse(name, n, k)
        lowerings = {lowering.name: lowering for lowering in _lowerings(problem)}
        beside = min((row["cublas_us"] for row in members if row["cublas_us"]), default=None)
        yield [
            Timing(
                problem,
                m,
                lowerings[row["lowering"]],
                TileConfig(**row["tile"]),
                row["us"],
                row["us"] * (beside / row["cublas_us"] if beside and m >= LARGE_M else 1.0),
            )
            for row in members
            if row["lowering"] in lowerings
        ]


def better_than_chosen(timings: list[Timing]) -> Timing | None:
    """The fastest of those that a record may name, if the composer's choice is none of them or was
    slower."""
    problem, m = timings[0].problem, timings[0].m
    possible = [t for t in timings if t.tile in measurable(problem, t.lowering, _caps(), _range(m))]
    if not possible:
        return None
    best = min(possible, key=lambda timing: timing.compared)
    m_range = _range(m) if m < LARGE_M else (TUNED_RANGES[-3][0], None)
    plan = compose(problem, _caps(), m_range, m=m, records=Records([]))
    chosen = [t for t in timings if (t.lowering.name, t.tile) == (plan.lowering.name, plan.tile)]
    lead = LARGE_LEAD if m >= LARGE_M else LEAD
    if chosen and min(t.compared for t in chosen) < lead * best.compared:
        return None
    return best


def _range(m: int) -> tuple[int, int | None]:
    return next(r for r in TUNED_RANGES if r[1] is None or m <= r[1])


@cache
def _caps() -> DeviceCapabilities:
    return plugins.capabilities(json.loads(TIMINGS.read_text())["environment"]["device"])


@cache
def _lowerings(problem: GemmProblem) -> list[Lowering]:
    return enumerate_lowerings(problem, _caps())[0]


@cache
def _model(problem: GemmProblem, lowering: str) -> CostModel:
    found = next(known for known in _lowerings(problem) if known.name == lowering)
    return CostModel(problem, found, _caps())


if __name__ == "__main__":
    main()
