"""From a problem and a device to a kernel plan.

`decide` says what can serve a problem on a device and why; `compose` turns the best lowering that
can be built into a `KernelPlan`; `plan` does so for names, and is what users call. Later stages
receive the plan and never look the device up again.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, TypeVar

from humming import plugins
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
from humming.problem import GemmProblem, whole_number
from humming.registry import Registry
from humming.source import ENTRY, compose_source
from humming.tiles import (
    TileConfig,
    candidates,
    fits,
    holds_group,
    why_no_tile,
)

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

Option = TypeVar("Option", Ready, Missing)

# Tokens at which plans of the range without end are ranked: a prefill that fills most devices.
_OPEN_RANGE_M = 1024
# With batch invariance one plan serves every M, so that sums are ordered alike: a decode batch's.
_BATCH_INVARIANT_RANGE: MRange = (33, 64)
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
        smem_bytes: dynamic shared memory of a CTA.
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
    smem_bytes: int
    pdl: bool
    decision: Decision

    def grid(self, m: int) -> tuple[int, int, int]:
        """CTAs with `m` tokens: tiles along N in whole clusters, tiles along M, parts of K."""
        cluster = self.tile.cluster_n
        tiles_n = ceil(self.problem.n / (self.tile.block_n * cluster)) * cluster
        return tiles_n, ceil(m / self.tile.block_m), self.tile.split_k

    def workspace(self, m: int) -> tuple[int, int]:
        """What split K needs at `m` tokens: bytes of fp32 partial tiles, and number of counters."""
        tiles_n, tiles_m, split_k = self.grid(m)
        if split_k == 1:
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
        }

    def explain(self, m: int | None = None) -> str:
        """Why this kernel, and what it is expected to take at `m` tokens."""
        if m is not None:
            m_range_of(m)  # refuses what is no number of tokens
        return self.decision.explain(self.estimate.m if m is None else m)


def m_range_of(m: int) -> MRange:
    """The range of M that serves `m` tokens; no tokens are served by the first.

    Raises:
        UnsupportedError: m is negative.
    """
    m = whole_number("a plan", "m", m)
    if m < 0:
        raise UnsupportedError(f"m = {m}", "a number of tokens is not negative", "Use m >= 0.")
    return next(r for r in M_RANGES if r[1] is None or m <= r[1])


def decide(
    problem: GemmProblem,
    caps: DeviceCapabilities,
    m_range: MRange,
    registry: Registry,
    m: int | None = None,
) -> Decision:
    """All that can be said about a problem on a device, at `m` tokens or where ranges are ranked.

    The order depends on the range alone, so that a plan serves its whole range; with
    `batch_invariant` lowering and tile do not depend on it either.
    """
    _check_range(m_range)
    ranked = _BATCH_INVARIANT_RANGE if problem.batch_invariant else m_range
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
    return decision.at(m)


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
) -> KernelPlan:
    """The plan of the best lowering that can be built; `m` is where its estimate is made.

    Raises:
        UnsupportedError: nothing can be built for this problem on this device; the message names
            the nearest problem that can, and the devices that serve this one.
    """
    registry = registry or plugins.registry()
    decision = decide(problem, caps, m_range, registry, m)
    chosen = decision.chosen
    if chosen is None:
        raise _unsupported(decision, registry)
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
    decision = decide(problem, caps, m_range, registry, m)
    absent = _absent(problem, lowering, registry)
    if absent or not fits(tile, problem, lowering, caps):
        why = f"it lacks {', '.join(absent)}" if absent else "the device does not hold the tile"
        how = "Choose among decide(...).ready and candidates(...)."
        raise UnsupportedError(f"{problem.name} by {lowering.name} in {tile}", why, how)
    at_m = CostModel(problem, lowering, caps).estimate(decision.m, tile)
    return _built(decision, Ready(lowering, tile, at_m), registry)


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
        smem_bytes=tile.smem_bytes(problem, lowering),
        pdl="griddepcontrol" in caps.features,
        decision=decision,
    )


def plan(
    problem: GemmProblem | str,
    device: DeviceCapabilities | PresentDevice | str | int | None = None,
    m: int = 1,
    n: int | None = None,
    k: int | None = None,
) -> KernelPlan:
    """The plan for `m` tokens of a problem on a device.

    Args:
        problem: a description, or its name with `n` and `k`.
        device: a row or its name, or a present device or its index; None is the accelerator that is
            present.
        m: tokens; the plan serves all of the range that they fall into.
        n, k: output and input features; they replace those of a description.

    Raises:
        UnsupportedError: a size is missing or wrong, the device is unknown, or nothing serves it.
    """
    problem = sized(problem, n, k)
    return compose(problem, plugins.capabilities(device), m_range_of(m), m=m)


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


def _unsupported(decision: Decision, registry: Registry) -> UnsupportedError:
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
