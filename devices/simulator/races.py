"""Finds unordered accesses of two warps to the same shared memory, with vector clocks.

A byte remembers the last write and each warp's last read by the counts of `Clocks`. An access is a
race if the other one is not known to have happened before. Warps run in step here, so this finds
races that no schedule of ours would show. Strong accesses (atomic, volatile, relaxed, acquire,
release) don't race with each other, and do with plain ones.
"""

from typing import TYPE_CHECKING

import numpy as np

from .clocks import Clocks
from .errors import RaceError
from .groups import Array, Group
from .memory import fault

if TYPE_CHECKING:
    from .machine import Machine

GRANULE = 2


class RaceDetector(Clocks):
    """Clocks of the warps of a machine, and of its shared memory in pieces of two bytes.

    Bytes are tracked in pairs: two warps that access neighbouring single bytes at different times
    would be taken for a race, which no kernel of ours does.

    Args:
        machine: whose warps these are.
        readers: readers of memory beside the warps, whose counts follow those of the warps.
        columns: other counts that clocks have beside these.
    """

    def __init__(self, machine: "Machine", readers: int = 0, columns: int = 0) -> None:
        super().__init__(machine, readers + columns)
        size = len(machine.shared.memory.data)
        granules = size // GRANULE
        self._stride = self._width + readers
        self._writer: Array = np.zeros(granules, np.int16)
        self._written: Array = np.zeros(granules, np.int32)
        self._read: Array = np.zeros((granules, self._stride), np.int32)
        # Who claims a place within one instruction; without meaning between instructions.
        self._claims: Array = np.zeros(size, np.int16)
        # Each warp's last access to the shared memory of other CTAs, by these.
        self._remote: Array = np.zeros((machine.shape.ctas, self._width), np.int32)
        # The same as `_read` of strong reads and writes; made by the first one.
        self._strong: tuple[Array, Array] | None = None
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._written[:] = 0
        self._read[:] = 0
        self._remote[:] = 0
        self._strong = None

    # -- accesses -------------------------------------------------------------------------------

    def read(self, group: Group, offsets: Array, total: int) -> None:
        """Checks and notes loads of `total` bytes at offsets [n, 32]."""
        rows, places = self._places(group, offsets, total)
        self._check_writes(group, rows, places, "reads")
        if self._strong is not None:
            self._check_counts(group, rows, places, self._strong[1], "written", "reads")
        actor = self._actor[rows]
        now = self._clock[rows, actor]
        flat = self._read.reshape(-1)
        flat[places * self._stride + actor] = now

    def write(self, group: Group, offsets: Array, total: int) -> None:
        """Checks and notes stores."""
        rows, places = self._places(group, offsets, total)
        self._check_overwrite(group, offsets, total, rows, places, "writes")
        actor = self._actor[rows]
        self._writer[places] = actor
        self._written[places] = self._clock[rows, actor]

    def check_overwrite(self, group: Group, offsets: Array, total: int) -> None:
        """Checks that asynchronous writes begin after all that others did to these bytes."""
        rows, places = self._places(group, offsets, total)
        self._check_overwrite(group, offsets, total, rows, places, "begins to overwrite")

    def write_as(self, rows: Array, offsets: Array, total: int) -> None:
        """Notes asynchronous writes that have become visible to the warps that waited for them."""
        offsets = np.repeat(offsets[:, None], 1, axis=1)
        width = max(1, total // GRANULE)
        places = (offsets // GRANULE + np.arange(width)).ravel()
        rows = np.repeat(rows, width)
        actor = self._actor[rows]
        self._writer[places] = actor
        self._written[places] = self._clock[rows, actor]

    def strong(
        self, group: Group, offsets: Array, total: int, *, reads: bool, writes: bool
    ) -> None:
        """Checks and notes strong accesses, which race with plain ones only."""
        rows, places = self._places(group, offsets, total)
        verb = "writes" if writes else "reads"
        self._check_writes(group, rows, places, verb)
        if writes:
            self._check_counts(group, rows, places, self._read, "read", verb)
        if self._strong is None:
            self._strong = np.zeros_like(self._read), np.zeros_like(self._read)
        actor = self._actor[rows]
        now = self._clock[rows, actor]
        for marks, done in zip(self._strong, (reads, writes), strict=True):
            if done:
                marks.reshape(-1)[places * self._stride + actor] = now

    def note_remote(self, rows: Array, offsets: Array) -> None:
        """Notes accesses of warps to offsets, of which those in other CTAs must outlive them."""
        machine = self._machine
        ctas = offsets // machine.shared.size
        away = ctas != machine.row_cta[rows]
        if away.any():
            rows = rows[away]
            actor = self._actor[rows]
            self._remote[ctas[away], actor] = self._clock[rows, actor]

    def check_end(self, cta: int) -> None:
        """Checks that a CTA of the wave ends after all that others do in its shared memory.

        Raises:
            RaceError: none of its warps knows that an access is over.
        """
        machine = self._machine
        known = self._clock[machine.row_cta == cta, : self._width].max(axis=0)
        late = np.flatnonzero(self._remote[cta] > known)
        if len(late):
            rank, warp = divmod(int(late[0]), machine.shape.cta_warps)
            told = f"the CTA ends, and nothing orders its end behind an access of warp {warp} of "
            raise RaceError(f"{told}CTA {rank} of the cluster to its shared memory")

    # -- checks ---------------------------------------------------------------------------------

    def _places(self, group: Group, offsets: Array, total: int) -> tuple[Array, Array]:
        """Row of the warp, and piece of memory, of each piece that the threads touch."""
        active = group.mask
        width = max(1, total // GRANULE)
        rows = np.repeat(group.index, offsets.shape[1])
        flat = offsets.ravel()
        if active is not None:
            chosen = active.ravel()
            rows, flat = rows[chosen], flat[chosen]
        if self._machine.shape.cluster_size > 1:
            self.note_remote(rows, flat)
        first = flat // GRANULE
        if width == 1:
            return rows, first
        places = (first[:, None] + np.arange(width)).ravel()
        return np.repeat(rows, width), places

    def _check_overwrite(
        self, group: Group, offsets: Array, total: int, rows: Array, places: Array, verb: str
    ) -> None:
        self._check_writes(group, rows, places, verb)
        self._check_counts(group, rows, places, self._read, "read", verb)
        if self._strong is not None:
            for marks, done in zip(self._strong, ("read", "written"), strict=True):
                self._check_counts(group, rows, places, marks, done, verb)
        self._check_together(group, offsets, total, rows, places, verb)

    def _check_together(
        self, group: Group, offsets: Array, total: int, rows: Array, places: Array, verb: str
    ) -> None:
        """Checks that no two warps write the same bytes by this very instruction."""
        if total < GRANULE:
            places = offsets.ravel() if group.mask is None else offsets[group.mask]
        actor = self._actor[rows]
        self._claims[places] = actor
        bad = self._claims[places] != actor
        if bad.any():
            place = int(np.flatnonzero(bad)[0])
            other = int(self._claims[places[place]])
            at = int(places[place]) // (GRANULE if total < GRANULE else 1)
            told = f"{verb} the same place with no barrier in between ({{place}}) as warp {{own}}"
            self._fail(group, int(rows[place]), other, at, told)

    def _check_writes(self, group: Group, rows: Array, places: Array, verb: str) -> None:
        writer = self._writer[places]
        bad = self._written[places] > self._clock[rows, writer]
        if bad.any():
            place = int(np.flatnonzero(bad)[0])
            told = f"has written without a barrier in between ({{place}}), and warp {{own}} {verb}"
            self._fail(group, int(rows[place]), int(writer[place]), int(places[place]), told)

    def _check_counts(
        self, group: Group, rows: Array, places: Array, marks: Array, done: str, verb: str
    ) -> None:
        """Checks against what every other warp has done, by its counts."""
        bad = marks[places] > self._clock[rows, : self._stride]
        bad[np.arange(len(rows)), self._actor[rows]] = False
        if bad.any():
            place, other = (int(v) for v in np.argwhere(bad)[0])
            verb = "overwrites" if (done, verb) == ("read", "writes") else verb
            told = f"has {done} without a barrier in between ({{place}}), and warp {{own}} {verb}"
            self._fail(group, int(rows[place]), other, int(places[place]), told)

    def _fail(self, group: Group, row: int, other: int, place: int, told: str) -> None:
        machine = self._machine
        offset = place * GRANULE % machine.shared.size
        lanes = np.zeros((len(group), 32), np.bool_)
        lanes[group.index == row] = True
        named = told.format(place=machine.shared.describe(offset), own=machine.row_warp[row])
        raise fault(RaceError, f"{self._name(other)} {named}", group, lanes)

    def name_of(self, actor: int) -> str:
        """Who an actor is, for messages."""
        return self._name(actor)

    def _name(self, actor: int) -> str:
        return f"warp {actor % self._machine.shape.cta_warps}"
