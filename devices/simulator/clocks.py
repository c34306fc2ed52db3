"""Vector clocks: what has happened before what a warp does next, as far as anything promises it.

Each warp counts its releases and knows up to which release of each other warp of its cluster all
has happened before. A clock has three layers: what has happened before for the warp, what of that a
fence of the scope of the CTA or cluster covers, and what one of the device does (PTX ISA 8.9,
"release and acquire patterns": a relaxed store passes on only what a fence covers). What warps know
of other clusters is kept apart, since few ever learn of one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from .groups import Array, Lanes

if TYPE_CHECKING:
    from .machine import Machine

Counts = Mapping[int, Array]
_NONE: Counts = MappingProxyType({})

LAYERS = 3
_NEAR, _FAR = 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class Abroad:
    """What a warp knows of other clusters: for each, the counts of its warps.

    Attributes:
        known: has happened before.
        fenced: the part that a fence of the scope of the device covers.
        seen: has happened before what was read by relaxed loads; a fence makes it known. This has
            the own cluster, too, by the whole clock.
    """

    known: Counts = field(default_factory=lambda: _NONE)
    fenced: Counts = field(default_factory=lambda: _NONE)
    seen: Counts = field(default_factory=lambda: _NONE)

    def joined(self, other: "Abroad") -> "Abroad":
        """Both together."""
        if other is self or other is NOTHING:
            return self
        if self is NOTHING:
            return other
        return Abroad(
            joined(self.known, other.known),
            joined(self.fenced, other.fenced),
            joined(self.seen, other.seen),
        )


def joined(first: Counts, second: Counts) -> Counts:
    """What two know together."""
    if first is second or not second:
        return first
    found = dict(first)
    for cluster, counts in second.items():
        own = found.get(cluster)
        found[cluster] = counts if own is None else np.maximum(own, counts)
    return found


NOTHING = Abroad()


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What some warps of a cluster knew at a release, for others to acquire.

    Attributes:
        cluster: number of the cluster in the grid.
        counts: a clock with its layers.
        abroad: what they knew of other clusters.
    """

    cluster: int
    counts: Array
    abroad: Abroad = NOTHING

    def joined(self, other: "Known | None") -> "Known":
        """Both together; they are of one cluster."""
        if other is None:
            return self
        counts = np.maximum(self.counts, other.counts)
        return Known(self.cluster, counts, self.abroad.joined(other.abroad))


class Clocks:
    """The clocks of the warps of a machine.

    Args:
        machine: whose warps these are.
        columns: counts that a layer has beside those of the warps.

    Attributes:
        first_cluster: number in the grid of the first cluster of the wave.
        any_fence: whether any warp has executed a fence.
    """

    def __init__(self, machine: "Machine", columns: int) -> None:
        shape = machine.shape
        self._machine = machine
        self._width = shape.cluster_size * shape.cta_warps
        self._actor: Array = np.arange(machine.warps) % self._width
        self._cluster: Array = np.arange(machine.warps) // self._width
        self._columns = self._width + columns
        self._clock: Array = np.zeros((machine.warps, LAYERS * self._columns), np.int32)
        self._own = (np.arange(machine.warps), self._actor)
        self._abroad: list[Abroad] = []
        self._any_abroad = False
        self.first_cluster = 0
        self.any_fence = False

    def reset(self) -> None:
        """Nothing has happened."""
        self._clock[:] = 0
        self._clock[self._own] = 1
        self._abroad = [NOTHING] * len(self._clock)
        self._any_abroad = False
        self.any_fence = False

    # -- what warps know ------------------------------------------------------------------------

    def actor(self, row: int) -> int:
        """Place of a warp in what others of its cluster know."""
        return int(self._actor[row])

    def cluster(self, row: int) -> int:
        """Number of a warp's cluster in the grid."""
        return self.first_cluster + int(self._cluster[row])

    def now(self, row: int) -> int:
        """The number of a warp's next release."""
        return int(self._clock[row, self._actor[row]])

    def known(self, row: int) -> Array:
        """Up to which release a warp knows each one of its cluster."""
        found: Array = self._clock[row, : self._columns].copy()
        return found

    def clusters(self, rows: Array) -> Array:
        """The same of several warps."""
        found: Array = self.first_cluster + self._cluster[rows]
        return found

    def stamps(self, rows: Array, actor_bits: int, count_bits: int) -> Array:
        """Cluster, place in it and number of the next release of warps, as one number each."""
        actors = self._actor[rows]
        counts = self._clock[rows, actors].astype(np.int64)
        found: Array = self.clusters(rows) << (actor_bits + count_bits) | actors << count_bits
        return found | counts

    def knows(self, rows: Array, actors: Array, counts: Array) -> Lanes:
        """Whether warps know that releases of others of their clusters have happened."""
        found: Lanes = self._clock[rows, actors] >= counts
        return found

    def has_seen(self, rows: Array, row: int, count: int) -> Lanes:
        """Which warps know that a warp's release of a number, and all before, has happened."""
        found: Lanes = self._clock[rows, self._actor[row]] >= count
        return found

    def known_of(self, row: int, cluster: int) -> Array | None:
        """The same of the warps of another cluster; None if it knows nothing of it."""
        return self._abroad[row].known.get(cluster)

    # -- order ----------------------------------------------------------------------------------

    def meet_ctas(self, ctas: Lanes) -> None:
        """All warps of some CTAs have met: bool [CTAs]."""
        warps = self._machine.shape.cta_warps
        clocks = self._clock.reshape(-1, warps, self._clock.shape[1])
        clocks[ctas] = clocks[ctas].max(axis=1, keepdims=True)
        rows = np.flatnonzero(np.repeat(ctas, warps))
        if self._any_abroad:
            for part in rows.reshape(-1, warps):
                self._learn(part, self._abroad_of(part))
        self._tick(rows)

    def release(self, rows: Array) -> Known:
        """What some warps know, for others to acquire; what they do next is not part of it."""
        counts: Array = self._clock[rows].max(axis=0)
        self._tick(rows)
        return Known(self.cluster(int(rows[0])), counts, self._abroad_of(rows))

    def release_relaxed(self, rows: Array, far: bool) -> Known:
        """The part of it that a fence covers, which is all that relaxed operations pass on."""
        layers = self._clock[rows].max(axis=0).reshape(LAYERS, -1)
        covered = layers[_FAR if far else _NEAR]
        counts = np.concatenate([covered, covered, layers[_FAR]])
        self._tick(rows)
        abroad = self._abroad_of(rows)
        if abroad is not NOTHING:
            abroad = Abroad(abroad.fenced, abroad.fenced)
        return Known(self.cluster(int(rows[0])), counts, abroad)

    def acquire(self, rows: Array, known: Known) -> None:
        """Some warps of one cluster learn what others have released."""
        own = self.cluster(int(rows[0]))
        abroad = known.abroad
        if known.cluster == own:
            self._clock[rows] = np.maximum(self._clock[rows], known.counts)
        else:
            # What they have only seen is theirs until they execute a fence.
            mine = Abroad({known.cluster: known.counts[: self._width]})
            abroad = Abroad(abroad.known, abroad.fenced).joined(mine)
        if abroad is NOTHING:
            return
        back = abroad.known.get(own)
        if back is not None:
            part = self._clock[rows, : self._width]
            self._clock[rows, : self._width] = np.maximum(part, back)
        self._learn(rows, abroad)

    def acquire_relaxed(self, rows: Array, known: Known) -> None:
        """The same by relaxed loads: they know it behind their next fence."""
        own = self.cluster(int(rows[0]))
        counts = dict(known.abroad.known)
        # Of the own cluster the whole clock is kept, with what fences cover.
        back = counts.pop(own, None)
        if known.cluster != own:
            counts = dict(joined(counts, {known.cluster: known.counts[: self._width]}))
        elif back is None:
            counts[own] = known.counts
        if back is not None:
            whole = np.zeros_like(known.counts) if known.cluster != own else known.counts.copy()
            whole[: self._width] = np.maximum(whole[: self._width], back)
            counts[own] = whole
        self._learn(rows, Abroad(seen=counts))

    def fence(self, rows: Array, far: bool) -> None:
        """Warps execute a fence, `far` if its scope is more than the CTA or cluster."""
        self.any_fence = True
        if self._any_abroad:
            for row in rows.tolist():
                self._take_seen(row, far)
        layers = self._clock.reshape(-1, LAYERS, self._columns)
        for layer in (_NEAR, _FAR) if far else (_NEAR,):
            layers[rows, layer] = np.maximum(layers[rows, layer], layers[rows, 0])
        self._tick(rows)

    def _take_seen(self, row: int, far: bool) -> None:
        """Makes known what relaxed loads have seen; near fences order inside of the cluster."""
        abroad, own = self._abroad[row], self.cluster(row)
        seen = dict(abroad.seen)
        mine = seen.pop(own, None)
        if mine is not None:
            self._clock[row] = np.maximum(self._clock[row], mine)
        if far:
            known = joined(abroad.known, seen)
            self._abroad[row] = Abroad(known, known)
        else:
            self._abroad[row] = Abroad(abroad.known, abroad.fenced, seen)

    def _abroad_of(self, rows: Iterable[int]) -> Abroad:
        found = NOTHING
        if self._any_abroad:
            for row in rows:
                found = found.joined(self._abroad[row])
        return found

    def _learn(self, rows: Iterable[int], abroad: Abroad) -> None:
        if abroad is NOTHING:
            return
        self._any_abroad = True
        for row in rows:
            self._abroad[row] = self._abroad[row].joined(abroad)

    def _tick(self, rows: Array) -> None:
        self._clock[rows, self._actor[rows]] += 1
