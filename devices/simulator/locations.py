"""What strong stores release and strong loads acquire, by the place in memory (PTX ISA 8.9).

A load that reads what another warp has stored or added to learns what that one's release says has
happened before: all of it for `.release`, for relaxed operations what a fence before them covers.
A relaxed load learns it behind its next fence. Between CTAs that share no cluster, only the scope
of the device counts.
"""

from typing import TYPE_CHECKING

import numpy as np

from .clocks import Known

if TYPE_CHECKING:
    from .proxies import ProxyRaces

RELEASES = ("release", "acq_rel")
ACQUIRES = ("acquire", "acq_rel")


Released = tuple[Known, Known]
"""What a store releases: inside of the cluster, and to all others."""


def released(races: "ProxyRaces", row: int, semantics: str, far: bool) -> Released | None:
    """What a strong store of a warp releases; None for nothing. Arguments as `Locations.wrote`."""
    rows = np.array([row])
    if semantics in RELEASES:
        near = races.release(rows)
        return near, near if far else races.release_relaxed(rows, True)
    if not races.any_fence:
        return None
    return races.release_relaxed(rows, False), races.release_relaxed(rows, True)


class _Record:
    """What the stores to a place have released: for the cluster alone, and for all others."""

    __slots__ = ("far", "near")

    def __init__(self) -> None:
        self.near: dict[int, Known] = {}
        self.far: dict[int, Known] = {}


class Locations:
    """Places that strong operations have written."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}

    def reset(self) -> None:
        """Nothing has been released."""
        self._records.clear()

    def wrote(self, races: "ProxyRaces", row: int, place: int, semantics: str, far: bool) -> None:
        """A warp has stored to a place.

        Args:
            races: the clocks.
            row: of the warp.
            place: by its address, or offset in shared memory.
            semantics: `relaxed`, `release`, ...
            far: whether the scope is more than the CTA or cluster.
        """
        self.put(place, released(races, row, semantics, far), adds=False)

    def put(self, place: int, known: Released | None, *, adds: bool) -> None:
        """A store to a place has released something, or nothing.

        Args:
            place: by its address, or offset in shared memory.
            known: what.
            adds: whether it was an atomic operation, which passes on what others released there.
        """
        if known is None:
            if not adds:
                self._records.pop(place, None)
            return
        record = self._records.get(place) if adds else None
        if record is None:
            record = self._records[place] = _Record()
        for known_at, new in zip((record.near, record.far), known, strict=True):
            known_at[new.cluster] = new.joined(known_at.get(new.cluster))

    def has_read(
        self, races: "ProxyRaces", row: int, place: int, semantics: str, far: bool
    ) -> None:
        """A warp has read a place; arguments as `wrote`."""
        record = self._records.get(place)
        if record is None:
            return
        rows = np.array([row])
        own = races.cluster(row)
        for cluster, known in list(record.far.items()):
            if cluster != own:
                acquires = semantics in ACQUIRES and far
                (races.acquire if acquires else races.acquire_relaxed)(rows, known)
        if own in record.near:
            acquires = semantics in ACQUIRES
            (races.acquire if acquires else races.acquire_relaxed)(rows, record.near[own])
