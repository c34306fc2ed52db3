"""What can serve a problem on a device, and what cannot and why: as data and as text.

A `Decision` is the composer's whole reasoning: every lowering that the device allows, which of
them can be built from components that exist, what each is expected to cost, and why everything
else was discarded.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from humming.capability import DeviceCapabilities
from humming.cost import Estimate, estimate
from humming.lowering import Lowering, Rejection
from humming.problem import GemmProblem
from humming.tiles import TileConfig
from humming.tuned import Found

MRange = tuple[int, int | None]
"""Tokens from low to high, both included; None is without end."""

# The model tells lowerings apart to about a twentieth: below that a lowering that exists is
# preferred to one that does not.
_RESOLUTION = 0.05


class Ready(NamedTuple):
    """A lowering whose components exist, with the best tile for it."""

    lowering: Lowering
    tile: TileConfig
    estimate: Estimate


class Missing(NamedTuple):
    """A lowering that the device allows but for which components do not exist yet."""

    lowering: Lowering
    estimate: Estimate
    components: tuple[str, ...]


@dataclass(frozen=True)
class Decision:
    """What can serve a problem on a device in a range of M, ranked, and what cannot and why.

    Attributes:
        problem, capabilities, m_range: what was asked.
        m: tokens at which the lowerings were ranked and that the estimates are for.
        ready: lowerings that can be built, best first.
        missing: lowerings that lack components, best first; never chosen.
        unfit: lowerings whose mainloop exists but has no tile for the problem, with the reason.
        rejected: every other discarded choice with its reason, nearest first.
        record: the entry of a tuned record that the best one was taken from; None where the cost
            model chose.
        record_notes: why entries for the problem and range were not heeded.
    """

    problem: GemmProblem
    capabilities: DeviceCapabilities
    m_range: MRange
    m: int
    ready: tuple[Ready, ...]
    missing: tuple[Missing, ...]
    unfit: tuple[Rejection, ...]
    rejected: tuple[Rejection, ...]
    record: Found | None = None
    record_notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> Ready | None:
        """The best lowering that can be built, None where nothing can."""
        return self.ready[0] if self.ready else None

    @property
    def preferred(self) -> Ready | Missing | None:
        """The best lowering, built or not; one that is not must be better than the model errs."""
        if not (self.ready and self.missing):
            return self.chosen or (self.missing[0] if self.missing else None)
        built, unbuilt = self.ready[0], self.missing[0]
        better = unbuilt.estimate.order_us < built.estimate.order_us * (1 - _RESOLUTION)
        return unbuilt if better else built

    def explain(self, m: int | None = None) -> str:
        """The decision as text, with estimates at `m` tokens (the ranked ones when None)."""
        return "\n".join(_explained(self.at(m)))

    def at(self, m: int | None) -> "Decision":
        """The same decision with its estimates made at `m` tokens; order and choice stay."""
        if m is None or m == self.m:
            return self
        problem, caps = self.problem, self.capabilities
        ready = (
            option._replace(estimate=estimate(problem, option.lowering, caps, m, option.tile))
            for option in self.ready
        )
        missing = (
            option._replace(estimate=estimate(problem, option.lowering, caps, m))
            for option in self.missing
        )
        return replace(self, m=m, ready=tuple(ready), missing=tuple(missing))

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the same sections as `explain`."""
        chosen, preferred = self.chosen, self.preferred
        record = self.record
        return {
            "problem": self.problem.name,
            "n": self.problem.n,
            "k": self.problem.k,
            "device": self.capabilities.name,
            "m_range": list(self.m_range),
            "m": self.m,
            "chosen": chosen.lowering.name if chosen else None,
            "chosen_by": "record" if record else "cost model",
            "record": record.entry.to_dict() | {"path": str(record.path)} if record else None,
            "record_notes": list(self.record_notes),
            "preferred": preferred.lowering.name if preferred else None,
            "ready": [
                {
                    **option.lowering.to_dict(),
                    "tile": asdict(option.tile),
                    "estimate": option.estimate.to_dict(),
                }
                for option in self.ready
            ],
            "missing": [
                {
                    **option.lowering.to_dict(),
                    "components": list(option.components),
                    "estimate": option.estimate.to_dict(),
                }
                for option in self.missing
            ],
            "rejected": [rejection._asdict() for rejection in (*self.unfit, *self.rejected)],
        }


# -- as text --------------------------------------------------------------------------------------


def _explained(decision: Decision) -> Iterator[str]:
    problem, caps = decision.problem, decision.capabilities
    low, high = decision.m_range
    span = f"{low} to {high}" if high else f"{low} and more"
    yield f"{problem} on {caps.name} at m = {decision.m} (one plan for m = {span})"
    yield from (f"  note: {quirk}" for quirk in caps.quirks)
    yield ""
    yield "Choice"
    yield from (f"  {line}" for line in _choice_lines(decision))
    leading = decision.chosen or decision.preferred
    if leading:
        yield ""
        yield f"Estimate of {leading.lowering.name}"
        yield from (f"  {line}" for line in _estimate_lines(decision, leading))
    sections = {
        "Alternatives": [_option_line(option) for option in decision.ready[1:]],
        "Not built yet": [
            f"{_option_line(option)}; lacks {', '.join(option.components)}"
            for option in _without_lesser_movers(decision.missing)
        ]
        + [_ROUGHER] * bool(decision.missing),
        "Rejected": _rejection_lines((*decision.unfit, *decision.rejected)),
    }
    for title, lines in sections.items():
        if lines:
            yield ""
            yield title
            yield from (f"  {line}" for line in lines)


_ROUGHER = "(estimated without tiles: comparable with one another, roughly with what is built)"


def _choice_lines(decision: Decision) -> Iterator[str]:
    chosen, preferred, unfit = decision.chosen, decision.preferred, decision.unfit
    if chosen:
        yield chosen.lowering.name
        yield f"tile: {chosen.tile}"
        record = decision.record
        how = record.entry.told(decision.m) if record else "by the cost model"
        yield f"chosen: {how}"
        yield from (f"note: {note}" for note in decision.record_notes)
        yield from (f"note: {note}" for note in chosen.lowering.notes)
    elif unfit:
        yield f"none: {unfit[0].reason}"
    elif preferred:
        yield "none: no lowering can be built yet"
    else:
        yield "none: the device has no instruction for it"
    if preferred and preferred is not chosen:
        yield f"preferred, but not built yet: {preferred.lowering.name}"
        yield from (f"  note: {note}" for note in preferred.lowering.notes)


def _estimate_lines(decision: Decision, option: Ready | Missing) -> Iterator[str]:
    caps, made, lowering = decision.capabilities, option.estimate, option.lowering
    native = lowering.operand == decision.problem.weight.dtype
    figures = {
        "memory": f"{made.memory_bytes / 1e6:.1f} MB at {_known(caps.bandwidth_gbs)} GB/s",
        "MMA": f"{made.mma_ops / 1e9:.1f} Gop at {_known(made.mma_tops)} Top/s"
        + (f" ({row_rate})" if (row_rate := _rate(caps, lowering)) else ""),
        "dequantization": f"{'native' if native else 'to'} {lowering.operand}, "
        f"scales in {lowering.scale_site}",
        "overhead": "launch, pipeline stages, reduction",
    }
    bound = "" if made.total_us is None else f", bound by {made.bound}"
    yield f"total {_time(made.total_us)}{bound}"
    for name, time in made.terms.items():
        yield f"{name:<15}{_time(time):>10}  {figures[name]}"
    if made.utilization < 1:
        yield f"{made.utilization:.0%} of the SMs have work, over all waves of tiles"
    yield from (f"{figure} not public" for figure in made.unknown)
    yield from (f"assumed: {how}" for how in made.assumed)
    if lowering.mma.legacy:
        yield from _legacy_lines(caps, option)


def _legacy_lines(caps: DeviceCapabilities, option: Ready | Missing) -> Iterator[str]:
    """What a legacy instruction costs against the device's best of the same operand width."""
    row, made = option.lowering.mma, option.estimate
    rivals = [
        (tops, rival)
        for rival in caps.mma
        if rival.a.bits == row.a.bits and rival.b.bits == row.b.bits
        if not (rival.legacy or rival.emulated or rival.undocumented or rival.block_scale)
        if (tops := caps.peak_tops(rival))
    ]
    if not rivals:
        return
    tops, rival = max(rivals, key=lambda pair: pair[0])
    told = f"legacy: {rival.name} reaches {_known(tops)} Top/s"
    if made.mma_us is None or made.mma_tops is None:
        yield told
        return
    faster_us = made.mma_us * made.mma_tops / tops
    yield f"{told}, {tops / made.mma_tops:.0f} times this rate: MMA in {_time(faster_us)}"


def _rate(caps: DeviceCapabilities, lowering: Lowering) -> str:
    if lowering.mma.rate and caps.sms and caps.clock_mhz:
        rate, clock = _known(lowering.mma.rate), _known(caps.clock_mhz)
        return f"{rate} per SM and clock, {caps.sms} SMs, {clock} MHz"
    return ""


def _option_line(option: Ready | Missing) -> str:
    notes = f" ({'; '.join(option.lowering.notes)})" if option.lowering.notes else ""
    return f"{_time(option.estimate.total_us):>10}  {option.lowering.name}{notes}"


def _without_lesser_movers(options: tuple[Missing, ...]) -> Iterator[Missing]:
    """Of lowerings that differ in their mover alone, the best: the others say nothing new."""
    seen = set()
    for option in options:
        alike = (option.lowering.mma.name, option.lowering.scale_site)
        if alike not in seen:
            seen.add(alike)
            yield option


def _rejection_lines(rejected: tuple[Rejection, ...]) -> list[str]:
    """One line per reason and instruction family, with the first of the choices it concerns."""
    groups: dict[tuple[str, str], list[str]] = {}
    for what, reason in rejected:
        groups.setdefault((what.split()[0], reason), []).append(what)
    return [
        f"{whats[0]}{f' and {len(whats) - 1} more' if len(whats) > 1 else ''}: {reason}"
        for (_, reason), whats in groups.items()
    ]


def _time(time_us: float | None) -> str:
    return "unknown" if time_us is None else f"{time_us:.1f} us"


def _known(figure: float | None) -> str:
    return "?" if figure is None else f"{figure:.1f}".removesuffix(".0")
