"""Finds unordered accesses of two warps to the same shared memory, with vector clocks.

Each warp counts its releases (arrivals at barriers) and knows, for each other warp of its cluster,
up to which of that one's releases everything has happened before. A byte remembers the last write
and each warp's last read by these counts. An access is a race if the other one is not known to have
happened before. Warps run in step here, so this finds races that no schedule of ours would show.
"""

from typing import TYPE_CHECKING

import numpy as np

from .errors import RaceError
from .groups import Array, Group, Lanes
from .memory import fault

if TYPE_CHECKING:
    from .machine import Machine

GRANULE = 2


class RaceDetector:
    """Clocks of the warps of a machine, and of its shared memory in pieces of two bytes.

    Bytes are tracked in pairs: two warps that write neighbouring single bytes would be taken for
    a race, which no kernel of ours does.

    Args:
        machine: whose warps these are.
        readers: readers of memory beside the warps, whose counts follow those of the warps.
        columns: other counts that clocks have beside these.
    """

    def __init__(self, machine: "Machine", readers: int = 0, columns: int = 0) -> None:
        shape = machine.shape
        self._machine = machine
        self._width = shape.cluster_size * shape.cta_warps
        self._actor: Array = np.arange(machine.warps) % self._width
        self._cta = machine.row_cta
        self._cluster = np.arange(machine.warps) // self._width
        granules = len(machine.shared.memory.data) // GRANULE
        self._stride = self._width + readers
        self._clock: Array = np.zeros((machine.warps, self._stride + columns), np.int32)
        self._writer: Array = np.zeros(granules, np.int16)
        self._written: Array = np.zeros(granules, np.int32)
        self._read: Array = np.zeros((granules, self._stride), np.int32)
        self._own = (np.arange(machine.warps), self._actor)
        self.reset()

    def reset(self) -> None:
        """Nothing has happened."""
        self._clock[:] = 0
        self._clock[self._own] = 1
        self._written[:] = 0
        self._read[:] = 0

    # -- accesses -------------------------------------------------------------------------------

    def read(self, group: Group, offsets: Array, total: int) -> None:
        """Checks and notes loads of `total` bytes at offsets [n, 32]."""
        rows, places = self._places(group, offsets, total)
        self._check_writes(group, offsets, total, rows, places, "reads")
        actor = self._actor[rows]
        now = self._clock[rows, actor]
        flat = self._read.reshape(-1)
        flat[places * self._stride + actor] = now

    def write(self, group: Group, offsets: Array, total: int) -> None:
        """Checks and notes stores."""
        rows, places = self._places(group, offsets, total)
        self._check_writes(group, offsets, total, rows, places, "writes")
        self._check_reads(group, offsets, total, rows, places)
        actor = self._actor[rows]
        self._writer[places] = actor
        self._written[places] = self._clock[rows, actor]

    def check_overwrite(self, group: Group, offsets: Array, total: int) -> None:
        """Checks that asynchronous writes begin after all that others did to these bytes."""
        rows, places = self._places(group, offsets, total)
        self._check_writes(group, offsets, total, rows, places, "begins to overwrite")
        self._check_reads(group, offsets, total, rows, places)

    def write_as(self, rows: Array, offsets: Array, total: int) -> None:
        """Notes asynchronous writes that have become visible to the warps that waited for them."""
        offsets = np.repeat(offsets[:, None], 1, axis=1)
        width = max(1, total // GRANULE)
        places = (offsets // GRANULE + np.arange(width)).ravel()
        rows = np.repeat(rows, width)
        actor = self._actor[rows]
        self._writer[places] = actor
        self._written[places] = self._clock[rows, actor]

    def _places(self, group: Group, offsets: Array, total: int) -> tuple[Array, Array]:
        """Row of the warp, and piece of memory, of each piece that the threads touch."""
        active = group.mask
        width = max(1, total // GRANULE)
        rows = np.repeat(group.index, offsets.shape[1])
        flat = offsets.ravel()
        if active is not None:
            chosen = active.ravel()
            rows, flat = rows[chosen], flat[chosen]
        first = flat // GRANULE
        if width == 1:
            return rows, first
        places = (first[:, None] + np.arange(width)).ravel()
        return np.repeat(rows, width), places

    def _check_writes(
        self, group: Group, offsets: Array, total: int, rows: Array, places: Array, verb: str
    ) -> None:
        writer = self._writer[places]
        bad = self._written[places] > self._clock[rows, writer]
        if bad.any():
            place = int(np.flatnonzero(bad)[0])
            told = f"has written without a barrier in between ({{place}}), and warp {{own}} {verb}"
            self._fail(group, int(rows[place]), int(writer[place]), int(places[place]), told)

    def _check_reads(
        self, group: Group, offsets: Array, total: int, rows: Array, places: Array
    ) -> None:
        bad = self._read[places] > self._clock[rows, : self._stride]
        bad[np.arange(len(rows)), self._actor[rows]] = False
        if bad.any():
            place, reader = (int(v) for v in np.argwhere(bad)[0])
            told = "has read without a barrier in between ({place}), and warp {own} overwrites"
            self._fail(group, int(rows[place]), reader, int(places[place]), told)

    def _fail(self, group: Group, row: int, other: int, place: int, told: str) -> None:
        machine = self._machine
        offset = place * GRANULE % machine.shared.size
        lanes = np.zeros((len(group), 32), np.bool_)
        lanes[group.index == row] = True
        named = told.format(place=f"shared address {offset:#x}", own=machine.row_warp[row])
        raise fault(RaceError, f"{self._name(other)} {named}", group, lanes)

    def _name(self, actor: int) -> str:
        """Who an actor is, for messages."""
        return f"warp {actor % self._machine.shape.cta_warps}"

    # -- order ----------------------------------------------------------------------------------

    def meet_ctas(self, ctas: Lanes) -> None:
        """All warps of some CTAs have met: bool [CTAs]."""
        warps, width = self._machine.shape.cta_warps, self._width
        for cta in np.flatnonzero(ctas):
            rows = slice(int(cta) * warps, int(cta + 1) * warps)
            self._clock[rows] = self._clock[rows].max(axis=0)
            first = int(cta) * warps % width
            self._clock[np.arange(rows.start, rows.stop), np.arange(first, first + warps)] += 1

    def meet(self, arrived: Array, waiting: Array) -> None:
        """Some warps go on after all of those that arrived."""
        together = self._clock[arrived].max(axis=0)
        self._clock[waiting] = np.maximum(self._clock[waiting], together)
        self._tick(np.unique(arrived))

    def actor(self, row: int) -> int:
        """Place of a warp in what others of its cluster know."""
        return int(self._actor[row])

    def now(self, row: int) -> int:
        """The number of a warp's next release."""
        return int(self._clock[row, self._actor[row]])

    def known(self, row: int) -> Array:
        """Up to which release a warp knows each one of its cluster."""
        found: Array = self._clock[row].copy()
        return found

    def release(self, rows: Array) -> Array:
        """What some warps know, for others to acquire; what they do next is not part of it."""
        known: Array = self._clock[rows].max(axis=0)
        self._tick(rows)
        return known

    def acquire(self, rows: Array, known: Array) -> None:
        """Some warps learn what others have released."""
        self._clock[rows] = np.maximum(self._clock[rows], known)

    def _tick(self, rows: Array) -> None:
        self._clock[rows, self._actor[rows]] += 1
