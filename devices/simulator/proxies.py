"""Order between the generic and the async proxy, and of what asynchronous operations access.

Bulk copies and `wgmma` access shared memory through the async proxy. What threads have written by
ordinary stores is theirs only behind a `fence.proxy.async` that lies between the two in the order
of events (PTX ISA 8.6 "Proxies", 9.7.9.25.2, 9.7.15.4). The clocks of the race detector therefore
have more columns than warps:

    warps         the last release of each warp that is known
    warpgroups    the last reads of shared memory by each one's `wgmma` that are known to be over
    fenced        the last release of each warp whose stores to shared memory a proxy fence covers
    fenced        the same of global memory
    objects       the last phase of each barrier object whose asynchronous writes are known
"""

from typing import TYPE_CHECKING

import numpy as np

from .clocks import LAYERS, Known
from .errors import AsyncHazardError, RaceError, SimulationError
from .groups import Array
from .races import GRANULE, RaceDetector
from .shared_memory import PIECE

if TYPE_CHECKING:
    from .machine import Machine

WARPGROUP = 4
"""Warps of a warpgroup."""
_OBJECTS = 64
_PER_PIECE = PIECE // GRANULE


class ProxyRaces(RaceDetector):
    """A race detector that knows about asynchronous operations and proxy fences.

    Barrier objects share columns if a cluster has more of them than there are columns: then less
    is found, and nothing that is right is taken for wrong.
    """

    def __init__(self, machine: "Machine") -> None:
        warps = machine.shape.cluster_size * machine.shape.cta_warps
        self._groups = machine.shape.cluster_size * -(-machine.shape.cta_warps // WARPGROUP)
        self._cta_groups = -(-machine.shape.cta_warps // WARPGROUP)
        self._objects: dict[int, int] = {}
        self._counts: dict[tuple[int, int], int] = {}
        super().__init__(machine, self._groups, 2 * warps + _OBJECTS)
        self._fenced = slice(self._stride, self._stride + warps)
        self._fenced_global = slice(self._stride + warps, self._stride + 2 * warps)
        self._first_object = self._stride + 2 * warps

    def reset(self) -> None:
        super().reset()
        self._objects.clear()
        self._counts.clear()

    # -- events ---------------------------------------------------------------------------------

    def fence_proxies(self, rows: Array, *, shared: bool, globally: bool) -> None:
        """Warps execute a proxy fence: it covers all that has happened before for them."""
        known = self._clock[rows, : self._width]
        for columns, covered in ((self._fenced, shared), (self._fenced_global, globally)):
            if covered:
                self._clock[rows, columns] = np.maximum(self._clock[rows, columns], known)
        self._tick(rows)

    def fenced_globally(self, row: int) -> Array:
        """Up to which release the stores of each warp to global memory are visible to proxies."""
        found: Array = self._clock[row, self._fenced_global]
        return found

    def note_read(self, row: int, pieces: Array) -> None:
        """An asynchronous read of pieces of shared memory is over, which a warp waited for."""
        actor = self._actor[row]
        self._read.reshape(-1, _PER_PIECE, self._stride)[pieces, :, actor] = self._clock[row, actor]

    def note_group_read(self, row: int, pieces: Array) -> int:
        """The same for the `wgmma` of the warpgroup of a warp; returns the number of the event."""
        column = self._group_column(row)
        event = self._next(int(self._cluster[row]), column)
        self._read.reshape(-1, _PER_PIECE, self._stride)[pieces, :, column] = event
        return event

    def learn_group_read(self, rows: Array, event: int) -> None:
        """Warps of a warpgroup have waited for reads of its `wgmma`."""
        column = self._group_column(int(rows[0]))
        self._clock[rows, column] = np.maximum(self._clock[rows, column], event)

    def note_write(self, cluster: int, barrier: int, pieces: Array) -> Known:
        """An asynchronous write has completed at a barrier object.

        Args:
            cluster: number of the cluster in the wave.
            barrier: offset of the object in shared memory.
            pieces: numbers of the pieces of 16 bytes.

        Returns:
            What those who wait for the object learn.
        """
        column = self._object_column(barrier)
        event = self._next(cluster, column)
        self._writer.reshape(-1, _PER_PIECE)[pieces] = column
        self._written.reshape(-1, _PER_PIECE)[pieces] = event
        counts: Array = np.zeros((LAYERS, self._columns), np.int32)
        counts[:, column] = event
        return Known(self.first_cluster + cluster, counts.reshape(-1))

    def _group_column(self, row: int) -> int:
        warp = int(self._actor[row])
        cta, inner = divmod(warp, self._machine.shape.cta_warps)
        return self._width + cta * self._cta_groups + inner // WARPGROUP

    def _object_column(self, barrier: int) -> int:
        number = self._objects.setdefault(barrier, len(self._objects))
        return self._first_object + number % _OBJECTS

    def _next(self, cluster: int, column: int) -> int:
        self._counts[cluster, column] = event = self._counts.get((cluster, column), 0) + 1
        return event

    # -- checks ---------------------------------------------------------------------------------

    def check_async(self, rows: Array, lane: int, pieces: Array, writing: bool) -> None:
        """Checks an operation of the async proxy that warps begin together.

        Args:
            rows: the warps, of one CTA.
            lane: which thread to name.
            pieces: numbers of the pieces of shared memory that it accesses.
            writing: whether it writes them.

        Raises:
            RaceError: nothing orders it behind another warp's access.
            AsyncHazardError: no proxy fence lies behind a store.
        """
        known = self._clock[rows].min(axis=0)
        writer = self._writer.reshape(-1, _PER_PIECE)[pieces]
        written = self._written.reshape(-1, _PER_PIECE)[pieces]
        verb = "writes" if writing else "reads"
        if (bad := written > known[writer]).any():
            at, granule = (int(v) for v in np.argwhere(bad)[0])
            told = _unordered(self._name(int(writer[at, granule])), verb)
            raise self._at(RaceError, told, rows, lane, int(pieces[at]))
        by_warps = writer < self._width
        fenced = known[self._fenced][np.where(by_warps, writer, 0)]
        if (bad := by_warps & (written > fenced)).any():
            at, granule = (int(v) for v in np.argwhere(bad)[0])
            told = _unfenced(self._name(int(writer[at, granule])), verb)
            raise self._at(AsyncHazardError, told, rows, lane, int(pieces[at]))
        if self._strong is not None:
            marks = self._strong[1].reshape(-1, _PER_PIECE, self._stride)[pieces]
            self._check_strong_writes(marks, known, rows, lane, pieces, verb)
        if not writing:
            return
        for counts in (self._read, *(self._strong or ())[:1]):
            read = counts.reshape(-1, _PER_PIECE, self._stride)[pieces]
            if (bad := read > known[: self._stride]).any():
                at, _, reader = (int(v) for v in np.argwhere(bad)[0])
                told = f"{self._name(reader)} has read without a barrier that an asynchronous "
                told += "operation, which writes there, begins behind"
                raise self._at(RaceError, told, rows, lane, int(pieces[at]))

    def _check_strong_writes(
        self, marks: Array, known: Array, rows: Array, lane: int, pieces: Array, verb: str
    ) -> None:
        """The same of strong stores and atomic operations, of which each warp's last one counts."""
        marks = marks[..., : self._width]
        for kind, limit, told in (
            (RaceError, known[: self._width], _unordered),
            (AsyncHazardError, known[self._fenced], _unfenced),
        ):
            if (bad := marks > limit).any():
                at, _, writer = (int(v) for v in np.argwhere(bad)[0])
                raise self._at(kind, told(self._name(writer), verb), rows, lane, int(pieces[at]))

    def _name(self, actor: int) -> str:
        if actor < self._width:
            return f"warp {actor % self._machine.shape.cta_warps}"
        if actor < self._stride:
            return f"the wgmma of warpgroup {(actor - self._width) % self._cta_groups}"
        return "an asynchronous copy"

    def _at(
        self, kind: type[SimulationError], told: str, rows: Array, lane: int, piece: int
    ) -> SimulationError:
        offset = piece * PIECE % self._machine.shared.size
        error = kind(f"{told} (shared address {offset:#x})")
        error.thread = (int(rows[0]), lane)
        return error


def _unordered(name: str, verb: str) -> str:
    told = f"{name} has written without a barrier that an asynchronous operation, which {verb} "
    return f"{told}there, begins behind"


def _unfenced(name: str, verb: str) -> str:
    told = f"an asynchronous operation {verb} what {name} has written, and no fence.proxy.async"
    return f"{told} lies in between"
