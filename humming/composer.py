"""From a problem and a device to a kernel plan.

`decide` says what can serve a problem on a device and why; `compose` turns the best lowering that
can be built into a `KernelPlan`; `plan` does so for names, and is what users call. Later stages
receive the plan and never look the device up again.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

from humming import plugins, tuned
from humming.capability import DeviceCapabilities
from humming.cost import CostModel, Estimate
from humming.decision import Decision, Missing, MRange, Ready
from humming.errors import UnsupportedError, check_type
from humming.hookspecs import PresentDevice
from humming.lowering import (
    Lowering,
    Rejection,
    activation_group,
    enumerate_lowerings,
    scale_step,
    weight_group,
)
from humming.overlap import Overlap, overlap_of
from humming.problem import GemmProblem, whole_number
from humming.registry import Registry
from humming.source import ENTRY, compose_source
from humming.tiles import (
    TileConfig,
    candidates,
    fits,
    holds_group,
    measurable,
    why_no_tile,
)
from humming.tuned import NO_RECORDS, Found, Records

M_RANGES: tuple[MRange, ...] = (
    (1, 8),
    (9, 16),
    (17, 32),
    (33, 64),
    (65, 128),
    (129, 256),
    (257, 512),
    (513, None),
)
"""The ranges of M, each with a plan of its own; None is without end."""

TUNED_RANGES: tuple[MRange, ...] = (*M_RANGES[:-1], (513, 1024), (1025, 2048), (2049, None))
"""The ranges that tuned records have entries for: the one without end in parts, since the cost
model does not tell its kernels apart well enough to be worth the compilation, but a clock does."""

Option = TypeVar("Option", Ready, Missing)

# Tokens at which plans of the range without end are ranked: a prefill that fills most devices.
_OPEN_RANGE_M = 1024
# With batch invariance one plan serves every M, so that sums are ordered alike: a decode batch's.
_BATCH_INVARIANT_RANGE: MRange = (33, 64)
# What one entry of a record serves then.
_ALL_TOKENS: MRange = (1, None)
# Of dozens of rejected rows an error names the first reasons; `humming explain` has them all.
_REASONS_TOLD = 4
# Tried in this order when a problem cannot be served, to name the nearest that can.
_NEAREST_ACTIVATIONS = ("bfloat16", "float16")
_NEAREST_PROBLEMS = ("int4_g128 x bfloat16", "int4_g128 x float16")


@dataclass(frozen=True)
class KernelPlan:
    """A composed kernel for one problem, device and range of M: all that later stages need.

    Attributes:
        problem: what is computed.
        device: name of the device's row.
        arch: the architecture to compile for.
        lowering, tile: how it is computed.
        m_range: tokens that the plan serves, (low, high); high None is without end.
        estimate: at the tokens the plan was asked for.
        entry: C symbol of the kernel.
        source: CUDA source.
        overlap: shared memory of a CTA, and when the next kernel's may start.
        pdl: whether the kernel may be launched with programmatic dependent launch.
        decision: how the plan came about.
    """

    problem: GemmProblem
    device: str
    arch: str
    lowering: Lowering
    tile: TileConfig
    m_range: MRange
    estimate: Estimate
    entry: str
    source: str
    overlap: Overlap
    pdl: bool
    decision: Decision

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.overlap.smem_bytes

    def grid(self, m: int) -> tuple[int, int, int]:
        """CTAs with `m` tokens: tiles along N in whole clusters, tiles along M, parts of K."""
        cluster = self.tile.cluster_n
        tiles_n = ceil(self.problem.n / (self.tile.block_n * cluster)) * cluster
        return tiles_n, ceil(m / self.tile.block_m), self.tile.split_k

    def workspace(self, m: int) -> tuple[int, int]:
        """What split K needs at `m` tokens: bytes of fp32 partial tiles, and number of counters;
        nothing where the parts are a cluster."""
        tiles_n, tiles_m, split_k = self.grid(m)
        if not self.tile.uses_workspace:
            return 0, 0
        tile_bytes = self.tile.block_n * self.tile.block_m * 4
        return split_k * tiles_n * tiles_m * tile_bytes, tiles_n * tiles_m

    @property
    def roundings(self) -> dict[str, Any]:
        """What `reference.error_bound` must know of a kernel, by its arguments' names."""
        tile, lowering = self.tile, self.lowering
        partial_k = lowering.partial_k(self.problem) or self.problem.k
        return {
            "split_k": tile.split_k * tile.warps_k,
            "operand_roundings": lowering.operand_roundings(self.problem),
            "short_k": min(partial_k, tile.warp_k) if lowering.mma.sum_bits else 0,
            "short_bits": lowering.mma.sum_bits or 0,
        }

    def explain(self, m: int | None = None) -> str:
        """Why this kernel, and what it is expected to take at `m` tokens."""
        if m is not None:
            m_range_of(m)  # refuses what is no number of tokens
        return self.decision.explain(self.estimate.m if m is None else m)


def m_ranges(
    problem: GemmProblem, caps: DeviceCapabilities, records: Records | None = None
) -> tuple[MRange, ...]:
    """The ranges of M that a problem has plans for on a device.

    They are `M_RANGES`, and the one without end is in parts where a record has an entry for one.
    """
    if problem.batch_invariant:
        return M_RANGES
    found = _records(caps, records).of(problem)
    parts = TUNED_RANGES[len(M_RANGES) - 1 :]
    return TUNED_RANGES if any(part in found for part in parts) else M_RANGES


def tuned_range(problem: GemmProblem, m_range: MRange) -> MRange:
    """The range whose entry in a record is heeded for a range of M: one for all of them where
    results must not depend on M."""
    return _ALL_TOKENS if problem.batch_invariant else m_range


def m_range_of(m: int, ranges: tuple[MRange, ...] = M_RANGES) -> MRange:
    """The range of M that serves `m` tokens, of some; no tokens are served by the first.

    Raises:
        UnsupportedError: m is negative.
    """
    m = whole_number("a plan", "m", m)
    if m < 0:
        raise UnsupportedError(f"m = {m}", "a number of tokens is not negative", "Use m >= 0.")
    return next(r for r in ranges if r[1] is None or m <= r[1])


def decide(
    problem: GemmProblem,
    caps: DeviceCapabilities,
    m_range: MRange,
    registry: Registry,
    m: int | None = None,
    records: Records | None = None,
) -> Decision:
    """All that can be said about a problem on a device, at `m` tokens or where ranges are ranked.

    The order depends on the range alone, so that a plan serves its whole range; with
    `batch_invariant` lowering and tile do not depend on it either. Of `records`, by default those
    of the device, an entry for the problem and range decides what comes first.
    """
    _check_range(m_range)
    ranked = _ranked_range(problem, m_range)
    at = ranked[1] or max(ranked[0], _OPEN_RANGE_M)
    lowerings, rejected = enumerate_lowerings(problem, caps)
    ready, missing, unfit = _options(problem, lowerings, caps, ranked, at, registry)
    if not ready:
        # Wider activations are worse than what is missing, and better than nothing.
        wider, rejected_too = enumerate_lowerings(problem, caps, widen=True)
        wider = tuple(lowering for lowering in wider if lowering not in lowerings)
        ready, missing_too, unfit_too = _options(problem, wider, caps, ranked, at, registry)
        if ready:
            missing, unfit, rejected = missing + missing_too, unfit + unfit_too, rejected_too
    decision = Decision(
        problem,
        caps,
        m_range,
        at,
        tuple(_ranked(ready)),
        tuple(_ranked(missing)),
        tuple(unfit),
        rejected,
    )
    found = _records(caps, records).of(problem)
    return (_heeding(decision, found) if found else decision).at(m)


def choices(decision: Decision) -> list[Ready]:
    """Every lowering that can be built with every tile that may be worth measuring, in the order of
    the cost model at the tokens of the decision."""
    problem, caps = decision.problem, decision.capabilities
    ranked = _ranked_range(problem, decision.m_range)
    options = []
    for lowering, _, _ in decision.ready:
        model = CostModel(problem, lowering, caps)
        options += [
            Ready(lowering, tile, model.estimate(decision.m, tile))
            for tile in measurable(problem, lowering, caps, ranked)
        ]
    return sorted(options, key=_rank)


def _heeding(decision: Decision, found: Mapping[MRange, Found]) -> Decision:
    """The decision with the kernel in front that a record names for its range, if it is possible;
    else a note why it is not."""
    problem, caps = decision.problem, decision.capabilities
    known = (_ALL_TOKENS,) if problem.batch_invariant else TUNED_RANGES
    notes = [
        f"an entry of {other.path} counts for nothing: its range of M is {list(m_range)}, and "
        f"the ones that entries serve are {', '.join(str(list(served)) for served in known)}"
        for m_range, other in found.items()
        if m_range not in known
    ]
    named = found.get(tuned_range(problem, decision.m_range))
    if named is None:
        return replace(decision, record_notes=tuple(notes))
    entry = named.entry
    option = next((o for o in decision.ready if o.lowering.name == entry.lowering), None)
    ranked = _ranked_range(problem, decision.m_range)
    packing = [(o.lowering.layout, o.lowering.packed_bits) for o in decision.ready]
    if option is None:
        why = f"{entry.lowering} cannot be built"
    elif (option.lowering.layout, option.lowering.packed_bits) != packing[0]:
        why = f"{entry.lowering} reads weights that are packed in another way"
    elif entry.tile not in measurable(problem, option.lowering, caps, ranked):
        why = f"{entry.lowering} has no tile {entry.tile} for it"
    else:
        model = CostModel(problem, option.lowering, caps)
        first = Ready(option.lowering, entry.tile, model.estimate(decision.m, entry.tile))
        others = (other for other in decision.ready if other is not option)
        ready = (first, *others)
        return replace(decision, ready=ready, record=named, record_notes=tuple(notes))
    notes.append(f"an entry of {named.path} is out of date: {why}")
    return replace(decision, record_notes=tuple(notes))


def _records(caps: DeviceCapabilities, records: Records | None) -> Records:
    return tuned.records_for(caps.name) if records is None else records


def _ranked_range(problem: GemmProblem, m_range: MRange) -> MRange:
    """The range that tiles are enumerated and ranked for: parts of the one without end are as it
    is, so that what no record has an entry for is the same kernel in all of them."""
    if problem.batch_invariant:
        return _BATCH_INVARIANT_RANGE
    return M_RANGES[-1] if m_range in TUNED_RANGES[len(M_RANGES) - 1 :] else m_range


def _options(
    problem: GemmProblem,
    lowerings: Iterable[Lowering],
    caps: DeviceCapabilities,
    ranked: MRange,
    at: int,
    registry: Registry,
) -> tuple[list[Ready], list[Missing], list[Rejection]]:
    """Lowerings that can be built, each with its best tile; that lack parts; that no tile fits."""
    ready: list[Ready] = []
    missing: list[Missing] = []
    unfit: list[Rejection] = []
    grouped = holds_group(weight_group(problem)) and holds_group(scale_step(problem))
    for lowering in lowerings:
        absent = _absent(problem, lowering, registry)
        model = CostModel(problem, lowering, caps)
        if not grouped and registry.components("mainloop", lowering.mainloop):
            # Whatever else it lacks: with it there would still be no tile.
            unfit.append(Rejection(lowering.name, why_no_tile(problem, caps)))
        elif absent:
            missing.append(Missing(lowering, model.estimate(at), absent))
        elif tiles := candidates(problem, lowering, caps, ranked):
            options = [Ready(lowering, tile, model.estimate(at, tile)) for tile in tiles]
            ready.append(min(options, key=_rank))
        else:
            unfit.append(Rejection(lowering.name, why_no_tile(problem, caps)))
    return ready, missing, unfit


def compose(
    problem: GemmProblem,
    caps: DeviceCapabilities,
    m_range: MRange,
    registry: Registry | None = None,
    m: int | None = None,
    records: Records | None = None,
) -> KernelPlan:
    """The plan of the best lowering that can be built; `m` is where its estimate is made.

    The best is what `records` have measured as such, by default those of the device, else what the
    cost model expects to be.

    Raises:
        UnsupportedError: nothing can be built for this problem on this device; the message names
            the nearest problem that can, and the devices that serve this one.
    """
    registry = registry or plugins.registry()
    decision = decide(problem, caps, m_range, registry, m, records)
    chosen = decision.chosen
    if chosen is None:
        raise unsupported(decision, registry)
    return _built(decision, chosen, registry)


def compose_as(
    problem: GemmProblem,
    caps: DeviceCapabilities,
    m_range: MRange,
    lowering: Lowering,
    tile: TileConfig,
    registry: Registry | None = None,
    m: int | None = None,
) -> KernelPlan:
    """The plan of a lowering and a tile that the caller has chosen, for measurements and tests.

    Raises:
        UnsupportedError: the lowering lacks a component, or the tile does not fit it.
    """
    registry = registry or plugins.registry()
    decision = decide(problem, caps, m_range, registry, m, NO_RECORDS)
    absent = _absent(problem, lowering, registry)
    if absent or not fits(tile, problem, lowering, caps):
        why = f"it lacks {', '.join(absent)}" if absent else "the device does not hold the tile"
        how = "Choose among decide(...).ready and candidates(...)."
        raise UnsupportedError(f"{problem.name} by {lowering.name} in {tile}", why, how)
    at_m = CostModel(problem, lowering, caps).estimate(decision.m, tile)
    return _built(decision, Ready(lowering, tile, at_m), registry)


def compose_each(
    decision: Decision, options: Iterable[Ready], registry: Registry | None = None
) -> list[KernelPlan]:
    """The plans of several of the `choices` of a decision, to measure them."""
    registry = registry or plugins.registry()
    return [_built(decision, option, registry) for option in options]


def _built(decision: Decision, chosen: Ready, registry: Registry) -> KernelPlan:
    problem, caps = decision.problem, decision.capabilities
    lowering, tile, at_m = chosen
    components = {
        needed.slot: registry.serving(needed.slot, needed.serves, needed.typed, caps)[0]
        for needed in lowering.requirements(problem)
    }
    return KernelPlan(
        problem=problem,
        device=caps.name,
        arch=caps.arch,
        lowering=lowering,
        tile=tile,
        m_range=decision.m_range,
        estimate=at_m,
        entry=ENTRY,
        source=compose_source(problem, lowering, tile, components, caps),
        overlap=overlap_of(problem, lowering, caps, tile, decision.m_range[1]),
        pdl="griddepcontrol" in caps.features,
        decision=decision,
    )


def plan(
    problem: GemmProblem | str,
    device: DeviceCapabilities | PresentDevice | str | int | None = None,
    m: int = 1,
    n: int | None = None,
    k: int | None = None,
    records: Path | str | None = None,
) -> KernelPlan:
    """The plan for `m` tokens of a problem on a device.

    Args:
        problem: a description, or its name with `n` and `k`.
        device: a row or its name, or a present device or its index; None is the accelerator that is
            present.
        m: tokens; the plan serves all of the range that they fall into.
        n, k: output and input features; they replace those of a description.
        records: a tuned record, or a folder with one per device, that goes before those of the
            environment, the user's and the shipped ones.

    Raises:
        UnsupportedError: a size is missing or wrong, the device is unknown, or nothing serves it;
            or `records` names no record.
    """
    problem, caps = sized(problem, n, k), plugins.capabilities(device)
    known = tuned.records_for(caps.name, records)
    m_range = m_range_of(m, m_ranges(problem, caps, known))
    return compose(problem, caps, m_range, m=m, records=known)


def sized(problem: GemmProblem | str, n: int | None, k: int | None) -> GemmProblem:
    """A problem of these sizes: of a name that needs both, or a description that has its own.

    Raises:
        UnsupportedError: a size is missing or wrong, or the name is unknown.
    """
    if isinstance(problem, str):
        if n is None or k is None:
            why = "a name does not say how large the weight is"
            raise UnsupportedError(f"the problem {problem!r}", why, "Pass n and k as well.")
        return GemmProblem.parse(problem, n, k)
    how = "Give a GemmProblem, or a name such as 'int4_g128 x bf16' with n and k."
    check_type("a plan", "the problem", problem, GemmProblem, how)
    if n is None and k is None:
        return problem
    return replace(problem, n=problem.n if n is None else n, k=problem.k if k is None else k)


# -- ranking --------------------------------------------------------------------------------------


def _check_range(m_range: MRange) -> None:
    low, high = m_range
    if low < 1 or (high is not None and high < low):
        raise UnsupportedError(
            f"m_range {m_range}",
            "a range of tokens is (low, high) with 1 <= low <= high, or high None",
            "Use one of humming.composer.M_RANGES.",
        )


def _rank(option: Ready | Missing) -> tuple[bool, float, int, int]:
    """Known totals first, then time; in a tie fewer notes, narrower operands, the row's order."""
    return (
        option.estimate.total_us is None,
        option.estimate.order_us,
        len(option.lowering.notes),
        option.lowering.operand.bits,
    )


def _ranked(options: list[Option]) -> list[Option]:
    """Best first. Of lowerings that differ in the mover alone, the device's order of movers rules.

    Lowerings come in that order, and the first of each kind stands for all of it.
    """
    leaders: dict[tuple[str, str], tuple[bool, float, int, int]] = {}
    for option in options:
        leaders.setdefault(_kind(option), _rank(option))
    return sorted(options, key=lambda option: leaders[_kind(option)])


def _kind(option: Ready | Missing) -> tuple[str, str]:
    return option.lowering.mma.name, option.lowering.scale_site


def _absent(problem: GemmProblem, lowering: Lowering, registry: Registry) -> tuple[str, ...]:
    return tuple(
        str(needed)
        for needed in lowering.requirements(problem)
        if not registry.components(needed.slot, needed.serves)
    )


# -- what to say when nothing can be built --------------------------------------------------------


def unsupported(decision: Decision, registry: Registry) -> UnsupportedError:
    """What to say of a decision in which nothing can be built."""
    problem, caps = decision.problem, decision.capabilities
    unfit = list(dict.fromkeys(rejection.reason for rejection in decision.unfit))
    if decision.missing:
        best = decision.missing[0]
        lacking = f"the best lowering, {best.lowering.name}, lacks {', '.join(best.components)}"
        why = "; ".join([*unfit, lacking])
    elif unfit:
        why = "; ".join(unfit)
    else:
        reasons = list(dict.fromkeys(rejection.reason for rejection in decision.rejected))
        told = [*reasons[:_REASONS_TOLD], *(["..."] if len(reasons) > _REASONS_TOLD else [])]
        why = "no instruction of the device computes it: " + "; ".join(told)
    nearest = next(_ready_neighbours(decision, registry), None)
    possible = [f"On {caps.name}, {nearest} is possible."] if nearest else []
    able = [
        other.name
        for other in registry.devices()
        if other.name != caps.name and _buildable(problem, other, decision.m_range, registry)
    ]
    possible.append(f"Devices that run {problem.name}: {', '.join(able) or 'none yet'}.")
    return UnsupportedError(f"{problem.name} on {caps.name}", why, " ".join(possible))


def _ready_neighbours(decision: Decision, registry: Registry) -> Iterator[str]:
    """Names of problems close to this one that can be built on its device, nearest first."""
    problem = decision.problem
    weight = _with_held_group(problem).weight.name
    names = [f"{weight} x {name}" for name in (problem.activation.name, *_NEAREST_ACTIVATIONS)]
    for name in (*names, *_NEAREST_PROBLEMS):
        other = GemmProblem.parse(name, problem.n, problem.k)
        if _buildable(other, decision.capabilities, decision.m_range, registry):
            yield other.name


def _with_held_group(problem: GemmProblem) -> GemmProblem:
    """The problem with the nearest groups of K that tiles hold."""
    group, of_tokens = weight_group(problem), activation_group(problem)
    if not holds_group(of_tokens):
        held = next((size for size in range(of_tokens, 0, -1) if holds_group(size)), 16)
        problem = replace(problem, activation=replace(problem.activation, group_size=held))
    if holds_group(group):
        return problem
    held = next((size for size in range(group, 0, -1) if holds_group(size)), 16)
    weight = problem.weight
    if weight.granularity == "block":
        return replace(problem, weight=replace(weight, block=(weight.block[0], held)))
    return replace(problem, weight=replace(weight, group_size=held))


def _buildable(
    problem: GemmProblem, caps: DeviceCapabilities, m_range: MRange, registry: Registry
) -> bool:
    """Whether `decide` would find a lowering that is ready, without ranking any."""
    lowerings, _ = enumerate_lowerings(problem, caps, widen=True)
    return any(
        candidates(problem, lowering, caps, m_range)
        for lowering in lowerings
        if not _absent(problem, lowering, registry)
    )
