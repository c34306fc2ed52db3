"""Tuning: of the kernels that may serve a problem, the one that a clock finds to be the fastest.

For each range of M the cost model names the kernels that are worth the time; a `Measurer` makes
them, checks each against the reference, and times those that are right by successive halving: all
of them roughly, then the faster half with twice the replays, until a few are left for a thorough
measurement. Who measures is exchangeable, so that nothing here needs a card.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from typing import Any, Protocol

from humming import plugins, progress
from humming.capability import DeviceCapabilities
from humming.composer import (
    TUNED_RANGES,
    KernelPlan,
    choices,
    compose_each,
    decide,
    m_range_of,
    tuned_range,
    unsupported,
)
from humming.decision import Decision, MRange, Ready
from humming.errors import CompileError, UnsupportedError, WrongResultError
from humming.lowering import Rejection
from humming.problem import GemmProblem, whole_number
from humming.tiles import TileConfig
from humming.tuned import NO_RECORDS, Entry, ProblemKey

CANDIDATES = 24
"""Kernels that are measured of a range, by default."""
REPLAYS = 10
"""Replays of a thorough measurement."""
TOKENS = (1, *(high for _, high in TUNED_RANGES if high is not None), 4096)
"""Numbers of tokens that are tuned for by default: the most of each range, and one."""

# Replays of the first round, and how many kernels are measured thoroughly.
_FIRST_REPLAYS, _FINALISTS = 2, 3
# Of each kind of lowering so many cuts are measured, however slow the model expects them to be:
# between kinds it errs more than within them.
_PER_KIND = 2
# The model hardly tells pipelines of more or fewer stages apart, and nothing of clusters: another
# way to run the same cut comes behind so many other cuts.
_CUTS_BEFORE_VARIANT = 3
# The cost model's choice stays unless something is faster by more than a measurement varies.
_WORTH = 0.01


class Measurer(Protocol):
    """Makes, checks and times kernels of one problem."""

    def load(self, plans: Sequence[KernelPlan]) -> list[str]:
        """Make these kernels ready and forget others; of each why it cannot be had, or nothing."""

    def check(self, place: int, m: int) -> str:
        """Why the result of a loaded kernel is wrong at `m` tokens; nothing if it is right."""

    def time(self, places: Sequence[int], m: int, replays: int) -> list[float]:
        """Microseconds of loaded kernels at `m` tokens, which take turns."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A kernel and its measured microseconds by number of tokens."""

    option: Ready
    us: Mapping[int, float] = field(hash=False)

    @property
    def score(self) -> float:
        """The geometric mean of its times: what is to be small."""
        return exp(sum(log(us) for us in self.us.values()) / len(self.us))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        times = {str(m): us for m, us in self.us.items()}
        return {
            "lowering": self.option.lowering.name,
            "tile": str(self.option.tile),
            "us": times,
            "estimate_us": self.option.estimate.total_us,
        }


@dataclass(frozen=True)
class TunedRange:
    """What tuning a problem in a range of M has found.

    Attributes:
        problem, m_range: what was tuned.
        chosen: the kernel to take.
        model: the cost model's choice; None if its result is wrong.
        timed: all that were timed, the fastest first; of the slower ones only rough times.
        wrong: kernels whose results are beyond their bounds, with what was found: defects.
        failed: kernels that could not be made, with the reason.
        complete: whether there was time for all rounds.
    """

    problem: GemmProblem
    m_range: MRange
    chosen: Timed
    model: Timed | None
    timed: tuple[Timed, ...]
    wrong: tuple[Rejection, ...]
    failed: tuple[Rejection, ...]
    complete: bool

    @property
    def gain(self) -> float | None:
        """How many times faster the kernel is than the cost model's choice."""
        return None if self.model is None else self.model.score / self.chosen.score

    def entry(self, circumstances: Mapping[str, Any]) -> Entry:
        """The entry of a record; `circumstances` are card, date and versions."""
        return Entry(
            key=ProblemKey.of(self.problem),
            m_range=self.m_range,
            lowering=self.chosen.option.lowering.name,
            tile=self.chosen.option.tile,
            us={m: round(us, 3) for m, us in self.chosen.us.items()},
            **circumstances,
        )


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        candidates: kernels of a range; None is every tile of every lowering.
        seconds: for everything; None is without end. It is looked at between rounds, so that a
            range that was begun has a result.
        clock: seconds that pass.
    """

    candidates: int | None = CANDIDATES
    seconds: float | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        if self.candidates is not None and self.candidates < 1:
            why = "nothing would be measured"
            how = "Give at least 1, or None for all."
            raise UnsupportedError(f"tune with {self.candidates} candidates", why, how)
        if self.seconds is not None and not self.seconds > 0:
            why = "that is no time"
            raise UnsupportedError(f"tune for {self.seconds} s", why, "Give more than 0.")


class Budget:
    """The time of an effort, shared out among the ranges that are still to be tuned."""

    def __init__(self, effort: Effort, ranges: int) -> None:
        self._clock, self._left = effort.clock, ranges
        self._end = None if effort.seconds is None else self._clock() + effort.seconds
        self._share_end: float | None = None

    def begin(self) -> bool:
        """Begin a range; False if no time is left for it."""
        left, self._left = max(1, self._left), self._left - 1
        if self._end is None:
            return True
        now = self._clock()
        self._share_end = now + (self._end - now) / left
        return now < self._end

    def skip(self, ranges: int) -> None:
        """Leave so many ranges out: their time is that of the others."""
        self._left -= ranges

    def is_spent(self) -> bool:
        """Whether the range under way has had its share."""
        return self._share_end is not None and self._clock() >= self._share_end


def ranges_of(problem: GemmProblem, tokens: Iterable[int]) -> dict[MRange, list[int]]:
    """The ranges that numbers of tokens fall into: each is tuned for those in it together.

    Raises:
        UnsupportedError: something is no number of tokens, or there is none.
    """
    found: dict[MRange, list[int]] = {}
    for m in sorted({whole_number("tune", "m", m) for m in tokens}):
        if m < 1:
            raise UnsupportedError(f"tune for m = {m}", "nothing is computed", "Use m >= 1.")
        found.setdefault(tuned_range(problem, m_range_of(m, TUNED_RANGES)), []).append(m)
    if not found:
        raise UnsupportedError("tune for no tokens", "nothing is computed", "Name some m >= 1.")
    return found


def tune(
    problem: GemmProblem,
    caps: DeviceCapabilities,
    tokens: Iterable[int],
    measurer: Measurer,
    effort: Effort,
    budget: Budget,
    announce: Callable[[str], None],
) -> Iterator[TunedRange]:
    """Tunes a problem on a device, range by range.

    Args:
        problem: what is to be fast.
        caps: the device that `measurer` measures on.
        tokens: numbers of tokens that count.
        measurer: of this very problem.
        effort, budget: how much is measured, and the time for it.
        announce: told of each range that begins.

    Raises:
        UnsupportedError: nothing can be built.
        CompileError: of what can be built, nothing can be made.
        WrongResultError: no kernel that was made is right.
    """
    for m_range, counted in ranges_of(problem, tokens).items():
        announce(f"{problem.n}x{problem.k} m={','.join(map(str, counted))}")
        if budget.begin():
            yield _tuned(problem, caps, (m_range, counted), measurer, effort, budget)


def checked_tokens(m_range: MRange, tokens: Sequence[int]) -> list[int]:
    """Numbers of tokens at which kernels of a range are checked: those that count, its least, and
    an odd one within it, for which no tile of M is full.

    >>> checked_tokens((33, 64), [64])
    [64, 33, 49]
    """
    low, high = m_range
    last = max(tokens) if high is None else high
    within = min((low + last) // 2 | 1, last)
    return list(dict.fromkeys((*tokens, low, within)))


def _tuned(
    problem: GemmProblem,
    caps: DeviceCapabilities,
    asked: tuple[MRange, list[int]],
    measurer: Measurer,
    effort: Effort,
    budget: Budget,
) -> TunedRange:
    m_range, tokens = asked
    registry = plugins.registry()
    decision = decide(problem, caps, m_range, registry, records=NO_RECORDS)
    if decision.chosen is None:
        raise unsupported(decision, registry)
    options = shortlist(decision, effort.candidates)
    plans = compose_each(decision, options, registry)
    failed, wrong, right = [], [], []
    with progress.watch("kernels checked") as told:
        for place, why in enumerate(measurer.load(plans)):
            told(place, len(plans))
            if why:
                failed.append(_refused(options[place], why))
                continue
            faults = (measurer.check(place, m) for m in checked_tokens(m_range, tokens))
            if fault := next(filter(None, faults), ""):
                wrong.append(_refused(options[place], fault))
            else:
                right.append(place)
    if not right:
        first = (wrong or failed)[0]
        what = (
            f"tune {problem} for m = {', '.join(map(str, tokens))}: none of {len(plans)} kernels "
            f"can be used: {first.what}: {first.reason}"
        )
        if not wrong:
            raise CompileError(f"{what}. `humming doctor` tries the compiler")
        how = "Report this; `humming run --check` shows results beside their bounds."
        raise WrongResultError(f"{what}. {how}")
    with progress.watch("kernels decided") as told:
        times, finalists = _halved(measurer, right, tokens, budget, told)
    timed = {place: Timed(options[place], us) for place, us in times.items()}
    model = timed.get(0)
    best = min((timed[place] for place in finalists), key=lambda one: one.score)
    if model is not None and model.score <= best.score * (1 + _WORTH):
        best = model
    return TunedRange(
        problem=problem,
        m_range=m_range,
        chosen=best,
        model=model,
        timed=tuple(sorted(timed.values(), key=lambda one: (one is not best, one.score))),
        wrong=tuple(wrong),
        failed=tuple(failed),
        complete=len(finalists) <= _FINALISTS + 1,
    )


def shortlist(decision: Decision, count: int | None) -> list[Ready]:
    """The kernels worth measuring: the cost model's choice, some of each kind of lowering, then
    those that it expects to be fastest, of many cuts rather than of one; all if `count` is None."""
    chosen = decision.chosen
    if chosen is None:
        return []
    # One packed weight must do for all.
    packing = chosen.lowering.layout, chosen.lowering.packed_bits
    cuts: dict[tuple[str, TileConfig], list[Ready]] = {}
    for option in choices(decision):
        if (option.lowering.layout, option.lowering.packed_bits) == packing:
            cut = _cut(option.tile)
            cuts.setdefault((option.lowering.name, cut), []).append(option)
    leading: dict[tuple[str, str], list[Ready]] = {}
    weighed: list[tuple[int, Ready]] = []
    for rank, variants in enumerate(map(_varied, cuts.values())):
        lowering = variants[0].lowering
        leading.setdefault((lowering.mma.name, lowering.scale_site), []).append(variants[0])
        weighed += [
            (rank + _CUTS_BEFORE_VARIANT * place, option) for place, option in enumerate(variants)
        ]
    leaders = (option for found in leading.values() for option in found[:_PER_KIND])
    others = (option for _, option in sorted(weighed, key=lambda pair: pair[0]))
    ordered = {
        (option.lowering.name, option.tile): option for option in (chosen, *leaders, *others)
    }
    return list(ordered.values())[:count]


def _cut(tile: TileConfig) -> TileConfig:
    """What tiles have in common that only differ in how they run."""
    return replace(tile, num_stages=2, cluster_n=1, cluster_k=1, epilogue_m=8)


def _varied(variants: list[Ready]) -> list[Ready]:
    """Ways to run one cut, so that other stages and other clusters than the first come by turns."""
    stages = list(dict.fromkeys(option.tile.num_stages for option in variants))
    return sorted(
        variants,
        key=lambda option: (
            stages.index(option.tile.num_stages)
            + option.tile.cluster_n.bit_length()
            + (option.tile.cluster_k > 1),
            -option.tile.cluster_n * option.tile.cluster_k,
        ),
    )


def _refused(option: Ready, why: str) -> Rejection:
    return Rejection(f"{option.lowering.name}, tile {option.tile}", why)


def _halved(
    measurer: Measurer,
    places: list[int],
    tokens: Sequence[int],
    budget: Budget,
    told: Callable[[int, int], None],
) -> tuple[dict[int, dict[int, float]], list[int]]:
    """Times by kernel and number of tokens, and the kernels of the last round.

    The cost model's choice, which is the first, stays to the end to be compared with.
    """
    times: dict[int, dict[int, float]] = {place: {} for place in places}
    replays = _FIRST_REPLAYS
    while True:
        last = len(places) <= _FINALISTS + 1
        told(len(times) - len(places), len(times))
        for m in tokens:
            measured = measurer.time(places, m, REPLAYS if last else replays)
            for place, us in zip(places, measured, strict=True):
                times[place][m] = us
        if last or budget.is_spent():
            return times, places
        ranked = sorted(places, key=lambda place: sum(log(us) for us in times[place].values()))
        kept = ranked[: max(_FINALISTS, len(ranked) // 2)]
        places = sorted({*kept, *(place for place in places if place == 0)})
        replays = min(2 * replays, REPLAYS)
