"""Barriers: those of a CTA (`bar`, `barrier`) and barrier objects in shared memory (`mbarrier`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .clocks import Known
from .decoder import STOP
from .errors import BarrierError, RaceError, UndefinedBehaviorError
from .groups import Array, Group, Lanes
from .meetings import Waiting
from .memory import fault
from .operands import Target

if TYPE_CHECKING:
    from .machine import Machine

BARRIERS = 16
MOST_BYTES = (1 << 20) - 1
"""The number of bytes that an mbarrier lacks is at most this, and at least minus this."""


@dataclass(slots=True)
class _Phase:
    """A barrier of a CTA that some threads have reached."""

    number: int
    expected: int
    counted: bool  # whether the instruction says how many threads, or it is all of the CTA
    reduction: str = ""  # of `bar.red`; empty for `bar.sync` and `bar.arrive`
    arrived: int = 0
    known: Known | None = None  # what has happened before the arrivals
    # (step, row, lane) of the last arrival, for reports.
    last: tuple[int, int, int] = (0, 0, 0)
    waiting: list[tuple[int, Lanes, Target | None]] = field(default_factory=list)
    votes: list[Array] = field(default_factory=list)


class CtaBarriers:
    """The 16 barriers of each CTA (PTX ISA "bar, barrier").

    Attributes:
        meetings: how many of them have been completed.
    """

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self._phases: dict[tuple[int, int], _Phase] = {}
        self._has_exited: set[int] = set()
        self.meetings = 0

    def reset(self) -> None:
        """No thread is at a barrier."""
        self._phases.clear()
        self._has_exited.clear()

    def arrive(
        self,
        group: Group,
        pc: int,
        number: int,
        count: int | None,
        *,
        waits: bool = True,
        votes: Array | None = None,
        reduction: str = "",
        target: Target | None = None,
        places: Sequence[Waiting] = (),
    ) -> int | None:
        """Counts threads in, and lets them wait.

        Args:
            group: who arrives.
            pc: the step of the instruction.
            number: which barrier, 0 to 15.
            count: threads that take part, a multiple of 32; None for all of the CTA.
            waits: whether they wait, as in `bar.sync`, or not, as in `bar.arrive`.
            votes: bool [n, 32], what `bar.red` combines.
            reduction: `popc`, `and` or `or`.
            target: what gets the result of `bar.red`.
            places: where the threads wait, if not all of them do at `pc` with this target.

        Returns:
            What the step returns.
        """
        machine = self._machine
        shape = machine.shape
        if not 0 <= number < BARRIERS:
            raise fault(BarrierError, f"there is no barrier {number}", group, group.active())
        if count is not None and (count <= 0 or count % 32 or count > 32 * shape.cta_warps):
            told = f"{count} threads cannot meet at a barrier: a multiple of 32 is needed, at most"
            raise fault(BarrierError, f"{told} {32 * shape.cta_warps}", group, group.active())
        ctas = machine.row_cta[group.index]
        if not self._phases and count is None and waits and votes is None and not places:
            arrived = np.bincount(ctas, minlength=shape.ctas)
            whole = (arrived == 0) | (arrived == shape.cta_warps)
            if whole.all() and (group.mask is None or self._all_exist(group)):
                self._met()
                machine.mbarriers.publish(group.index)
                if machine.races is not None:
                    machine.races.meet_ctas(arrived != 0)
                return None
        machine.mbarriers.publish(group.index)
        for cta in np.unique(ctas):
            own = ctas == cta
            phase = self._phase(group, int(cta), number, count, own, reduction)
            self._arrive(group, pc, phase, own)
            lanes = group.spread(np.broadcast_to(own[:, None], (len(group), 32)))
            for at, there, result in places or [(pc, lanes, target)]:
                if waits and (there & lanes).any():
                    phase.waiting.append((at, there & lanes, result if votes is not None else None))
                    machine.park(at, there & lanes)
            if votes is not None:
                phase.votes.append(votes[group.active() & own[:, None]])
            if phase.arrived == phase.expected:
                del self._phases[int(cta), number]
                self._release(phase)
        return STOP if waits else None

    def _met(self) -> None:
        self.meetings += 1
        self._machine.progress += 1

    def _all_exist(self, group: Group) -> bool:
        return np.array_equal(group.active(), self._machine.exists[group.rows])

    def _phase(
        self,
        group: Group,
        cta: int,
        number: int,
        count: int | None,
        own: Lanes,
        reduction: str,
    ) -> _Phase:
        """The barrier at which threads of a group, those of `own` [n], arrive."""
        if count is None and cta in self._has_exited:
            told = f"barrier {number} waits for all warps of the CTA, one of which has exited"
            raise fault(BarrierError, told, group, group.active() & own[:, None])
        expected = 32 * self._machine.shape.cta_warps if count is None else count
        phase = self._phases.setdefault(
            (cta, number), _Phase(number, expected, count is not None, reduction)
        )
        if (phase.expected, phase.counted) != (expected, count is not None):
            told = f"barrier {number} is used with {expected} and with {phase.expected} threads"
            raise fault(BarrierError, told, group, group.active() & own[:, None])
        if phase.reduction != reduction:
            first, other = (
                f"bar.red.{r}" if r else "bar.sync or bar.arrive"
                for r in (phase.reduction, reduction)
            )
            told = f"{other} at barrier {number}, at which others have arrived by {first}"
            raise fault(BarrierError, told, group, group.active() & own[:, None])
        return phase

    def _arrive(self, group: Group, pc: int, phase: _Phase, own: Lanes) -> None:
        rows = group.index[own]
        phase.arrived += 32 * len(rows)
        phase.last = (pc, int(rows[-1]), int(group.active()[own][-1].argmax()))
        if self._machine.races is not None:
            phase.known = self._machine.races.release(rows).joined(phase.known)
        if phase.arrived > phase.expected:
            told = f"{phase.arrived} threads arrive at barrier {phase.number}, which is for"
            told += f" {phase.expected}"
            raise fault(BarrierError, told, group, group.active() & own[:, None])

    def _release(self, phase: _Phase) -> None:
        machine = self._machine
        self._met()
        waiting = np.zeros_like(machine.live)
        for pc, lanes, target in phase.waiting:
            waiting |= lanes
            if target is not None:
                target.put(machine.group(lanes), _combined(phase))
            machine.put(pc + 1, lanes)
        rows = np.flatnonzero(waiting.any(axis=1))
        if machine.races is not None and phase.known is not None and len(rows):
            machine.races.acquire(rows, phase.known)

    def exited(self, rows: Array) -> None:
        """Notes that all threads of some warps have ended.

        Raises:
            BarrierError: others of the CTA wait for them.
        """
        machine = self._machine
        for row in rows:
            cta = int(machine.row_cta[row])
            self._has_exited.add(cta)
            for (at, number), phase in self._phases.items():
                if at == cta and not phase.counted:
                    error = BarrierError(
                        f"warp {machine.row_warp[row]} exits, while others of its CTA wait for it "
                        f"at barrier {number}"
                    )
                    pc, lanes, _ = phase.waiting[0]
                    waiting_row, lane = np.argwhere(lanes)[0]
                    error.where = machine.where(pc, (int(waiting_row), int(lane)))
                    raise error

    def finish(self) -> None:
        """Checks, when all threads have ended, that no arrival was left over.

        Raises:
            BarrierError: threads arrived at a barrier that was never completed.
        """
        for (_, number), phase in self._phases.items():
            told = f"the kernel ends with {phase.arrived} of {phase.expected} threads at barrier"
            error = BarrierError(f"{told} {number}")
            pc, row, lane = phase.last
            error.where = self._machine.where(pc, (row, lane))
            raise error

    def describe(self, row: int, lane: int) -> str:
        """What a waiting thread waits for; empty if it waits for something else."""
        for (_, number), phase in self._phases.items():
            if any(lanes[row, lane] for _, lanes, _ in phase.waiting):
                return f"barrier {number} has {phase.arrived} of {phase.expected} threads"
        return ""


def _combined(phase: _Phase) -> Any:
    votes = np.concatenate(phase.votes)
    if phase.reduction == "popc":
        return np.uint32(votes.sum())
    return votes.all() if phase.reduction == "and" else votes.any()


@dataclass(slots=True)
class _Object:
    """A barrier object: arrivals and bytes that its current phase still lacks."""

    expected: int
    pending: int
    bytes: int = 0
    phase: int = 0
    # What has happened before the arrivals of this phase, and before those of completed ones.
    gathered: Known | None = None
    passed: Known | None = None
    # The warp that made it, and the number of its next release then.
    row: int = 0
    made: int = 0


class MemoryBarriers:
    """The mbarrier objects in shared memory (PTX ISA "mbarrier"), by their offset in it."""

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self._objects: dict[int, _Object] = {}
        self._waiting: dict[int, list[tuple[int, Lanes]]] = {}
        self._expired: Lanes = np.zeros_like(machine.live)
        # Objects whose warp has neither fenced nor met others since it made them.
        self._fresh: dict[int, int] = {}

    def reset(self) -> None:
        """There are no objects."""
        self._objects.clear()
        self._fresh.clear()
        self._waiting.clear()
        self._expired[:] = False

    def initialize(self, group: Group, offsets: Array, counts: Array) -> None:
        """`mbarrier.init`: makes objects at offsets [n, 32] that expect so many arrivals."""
        for offset, count, lanes in self._each(group, offsets, counts):
            if not 1 <= count < 1 << 20:
                told = f"an mbarrier cannot expect {count} arrivals"
                raise fault(BarrierError, self._at(told, offset), group, lanes)
            if offset in self._objects or lanes.sum() > 1:
                told = "an mbarrier is initialized again without mbarrier.inval in between"
                raise fault(BarrierError, self._at(told, offset), group, lanes)
            machine = self._machine
            row = int(group.index[lanes.any(axis=1)][0])
            made = 0 if machine.races is None else machine.races.now(row)
            part = machine.group(group.spread(lanes))
            at = offsets[lanes.any(axis=1)]
            machine.shared.check_settled(part, at, 8, "an mbarrier in")
            if machine.races is not None:
                machine.races.write(part, at, 8)
            self._objects[offset] = _Object(count, count, row=row, made=made)
            self._fresh[offset] = row
            machine.shared.protect(offset)

    def invalidate(self, group: Group, offsets: Array) -> None:
        """`mbarrier.inval`: the memory may be used for something else."""
        for offset, _, lanes in self._each(group, offsets, np.uint32(0)):
            self._get(group, offset, lanes)
            if self._waiting.get(offset):
                told = "an mbarrier is invalidated while threads wait on it"
                raise fault(BarrierError, self._at(told, offset), group, lanes)
            del self._objects[offset]
            self._fresh.pop(offset, None)
            self._machine.shared.unprotect(offset)

    def publish(self, rows: Array) -> None:
        """Warps execute what makes their new objects visible to asynchronous operations.

        That is `fence.mbarrier_init`, `fence.proxy.async` or a barrier.
        """
        if self._fresh:
            gone = set(rows.tolist())
            self._fresh = {o: row for o, row in self._fresh.items() if row not in gone}

    def require_ready(self, offset: int, row: int, lane: int) -> None:
        """Checks that an asynchronous operation of a thread may use an object.

        Raises:
            RaceError: nothing orders its initialization before, or makes it visible.
        """
        found = self._objects.get(offset)
        races = self._machine.races
        if found is None or races is None:
            return
        told = ""
        if not races.has_seen(np.array([row]), found.row, found.made).all():
            told = self._unordered(found)
        elif self._fresh.get(offset) == row:
            told = "the mbarrier is used by an asynchronous operation, and neither "
            told += "fence.mbarrier_init nor fence.proxy.async nor a barrier lies behind its "
            told += "mbarrier.init"
        if told:
            error = RaceError(told)
            error.thread = (row, lane)
            raise error

    def _unordered(self, found: _Object) -> str:
        warp = self._machine.row_warp[found.row]
        return f"warp {warp} has initialized this mbarrier without a barrier in between"

    def expect(self, group: Group, offsets: Array, sizes: Array) -> None:
        """`expect_tx`: the current phase needs so many more bytes, from each thread."""
        for offset, size, lanes in self._each(group, offsets, sizes):
            found = self._get(group, offset, lanes)
            found.bytes += size * int(lanes.sum())
            if abs(found.bytes) > MOST_BYTES:
                told = f"an mbarrier cannot count {found.bytes} bytes, {MOST_BYTES} is the most"
                raise fault(BarrierError, self._at(told, offset), group, lanes)
            self._complete(offset, found)

    def arrive(
        self,
        group: Group,
        offsets: Array,
        counts: Any,
        *,
        drop: bool = False,
        relaxed: bool = False,
        completes: bool = True,
    ) -> Array:
        """Counts arrivals.

        Args:
            group: who arrives.
            offsets: of the objects, [n, 32].
            counts: arrivals of each thread.
            drop: whether later phases expect so many less.
            relaxed: whether they order nothing but what a fence covers.
            completes: whether they may complete the phase.

        Returns:
            The states of the phases before them, uint64 [n, 32].
        """
        states = np.zeros((len(group), 32), np.uint64)
        races = self._machine.races
        for offset, count, lanes in self._each(group, offsets, counts):
            found = self._get(group, offset, lanes)
            states[lanes] = (found.phase << 32) | found.pending
            known = None
            if races is not None:
                rows = group.index[lanes.any(axis=1)]
                if not relaxed:
                    races.note_remote(rows, np.full(len(rows), offset))
                known = races.release_relaxed(rows, False) if relaxed else races.release(rows)
            left = int(lanes.sum())
            if drop:
                found.expected -= count * left
            while left:
                if found.pending == 0:
                    told = "more arrivals at an mbarrier than it expects, while bytes are missing"
                    raise fault(BarrierError, self._at(told, offset), group, lanes)
                if not 0 < count <= found.pending:
                    told = f"an arrival that counts {count} at an mbarrier at which {found.pending}"
                    raise fault(BarrierError, self._at(f"{told} are pending", offset), group, lanes)
                part = min(left, found.pending // count)
                if not completes and part * count == found.pending and not found.bytes:
                    told = "an arrival with .noComplete completes the phase of the mbarrier"
                    raise fault(BarrierError, self._at(told, offset), group, lanes)
                if known is not None:
                    found.gathered = known.joined(found.gathered)
                found.pending -= part * count
                left -= part
                self._complete(offset, found)
            self._machine.progress += 1
        return states

    def phase(self, offset: int) -> int | None:
        """Number of the current phase of the object at an offset; None if there is none."""
        found = self._objects.get(offset)
        return None if found is None else found.phase

    def complete_bytes(self, offset: int, size: int, clock: Known | None = None) -> None:
        """`complete_tx`: bytes have arrived; for asynchronous operations.

        Args:
            offset: of the object.
            size: number of bytes.
            clock: what those who wait for the phase learn, for the race detector.

        Raises:
            BarrierError: there is no object at this offset, or it expects less.
        """
        found = self._objects.get(offset)
        if found is None:
            told = "an asynchronous operation completes on memory that is no mbarrier"
            raise BarrierError(self._at(told, offset))
        found.bytes -= size
        if found.bytes < -MOST_BYTES or (found.bytes < 0 and not found.pending):
            told = f"{size} bytes complete at an mbarrier, {-found.bytes} more than it expects"
            raise BarrierError(self._at(told, offset))
        if clock is not None:
            found.gathered = clock.joined(found.gathered)
        self._machine.progress += 1
        self._complete(offset, found)

    def arrive_late(self, offset: int, count: int, row: int | None = None) -> None:
        """An arrival by an asynchronous operation, on behalf of a warp if one is given."""
        found = self._objects.get(offset)
        if found is None:
            told = "an asynchronous operation arrives on memory that is no mbarrier"
            raise BarrierError(self._at(told, offset))
        races = self._machine.races
        if races is not None and row is not None:
            found.gathered = races.release(np.array([row])).joined(found.gathered)
        if found.pending < count:
            told = "an asynchronous operation arrives where nothing is pending"
            raise BarrierError(self._at(told, offset))
        found.pending -= count
        self._machine.progress += 1
        self._complete(offset, found)

    def raise_pending(self, group: Group, offsets: Array) -> None:
        """One more arrival is pending in this phase for each thread (`cp.async` without noinc)."""
        for offset, _, lanes in self._each(group, offsets, np.uint32(0)):
            self._get(group, offset, lanes).pending += int(lanes.sum())

    def completed(
        self,
        group: Group,
        offsets: Array,
        parity: Array | None,
        states: Any,
        *,
        relaxed: bool = False,
    ) -> Lanes:
        """Which threads find the phase complete that they ask for, by parity or by state."""
        done = np.zeros((len(group), 32), np.bool_)
        races = self._machine.races
        asked = np.broadcast_to(np.asarray(states if parity is None else parity), done.shape)
        for offset, _, lanes in self._each(group, offsets, np.uint32(0)):
            found = self._get(group, offset, lanes)
            if parity is None:
                phases = (asked >> np.uint64(32)).astype(np.int64)
                stale = lanes & (phases != found.phase) & (phases != found.phase - 1)
                if stale.any():
                    told = f"a state of phase {int(phases[stale][0])} of an mbarrier that is in "
                    told += f"phase {found.phase}: it must be of this phase or the one before"
                    raise fault(UndefinedBehaviorError, told, group, stale)
                done |= lanes & (phases != found.phase)
            else:
                if (wrong := lanes & (asked > 1)).any():
                    told = f"the parity {int(asked[wrong][0])} of a phase: it is 0 or 1"
                    raise fault(UndefinedBehaviorError, told, group, wrong)
                done |= lanes & ((asked & 1) != (found.phase & 1))
            over = (done & lanes).any(axis=1)
            if races is not None and found.passed is not None and over.any():
                acquire = races.acquire_relaxed if relaxed else races.acquire
                acquire(group.index[over], found.passed)
        return done

    def wait(self, group: Group, pc: int, offsets: Array, lanes: Lanes) -> Lanes:
        """Lets threads [n, 32] of a group wait at `try_wait`; returns those that have timed out."""
        expired: Lanes = self._expired[group.rows] & lanes
        self._expired &= ~group.spread(expired)
        for offset, _, own in self._each(group, offsets, np.uint32(0)):
            parked = own & lanes & ~expired
            if parked.any():
                spread = group.spread(parked)
                self._waiting.setdefault(offset, []).append((pc, spread))
                self._machine.park(pc, spread)
        return expired

    def time_out(self) -> bool:
        """Lets all waiting threads go on as if their time was up; False if there are none."""
        if not self._waiting:
            return False
        waiting, self._waiting = self._waiting, {}
        for parties in waiting.values():
            for pc, lanes in parties:
                self._expired |= lanes
                self._machine.put(pc, lanes)
        return True

    def at(self, offset: int) -> bool:
        """Whether there is an object at an offset."""
        return offset in self._objects

    def describe(self, row: int, lane: int) -> str:
        """What a waiting thread waits for; empty if it waits for something else."""
        for offset, parties in self._waiting.items():
            if any(lanes[row, lane] for _, lanes in parties):
                found = self._objects[offset]
                shared = self._machine.shared
                place = shared.describe(offset % shared.size)
                told = f"the mbarrier at {place} lacks {found.pending} of {found.expected}"
                return f"{told} arrivals and {found.bytes} bytes in phase {found.phase}"
        return ""

    def _at(self, told: str, offset: int) -> str:
        """A message with the place of an object."""
        shared = self._machine.shared
        return f"{told} ({shared.describe(offset % shared.size)})"

    def _complete(self, offset: int, found: _Object) -> None:
        if found.pending or found.bytes:
            return
        found.phase += 1
        if found.gathered is not None:
            found.passed = found.gathered.joined(found.passed)
            found.gathered = None
        found.pending = found.expected
        self._machine.progress += 1
        for pc, lanes in self._waiting.pop(offset, ()):
            self._machine.put(pc, lanes)

    def _get(self, group: Group, offset: int, lanes: Lanes) -> _Object:
        found = self._objects.get(offset)
        if found is None:
            told = self._at("this memory holds no initialized mbarrier", offset)
            raise fault(BarrierError, told, group, lanes)
        races = self._machine.races
        if races is not None:
            rows = lanes.any(axis=1)
            unseen = ~races.has_seen(group.index[rows], found.row, found.made)
            if unseen.any():
                late = np.zeros_like(lanes)
                late[np.flatnonzero(rows)[unseen]] = True
                raise fault(RaceError, self._unordered(found), group, lanes & late)
        return found

    @staticmethod
    def _each(group: Group, offsets: Array, values: Any) -> Iterator[tuple[int, int, Lanes]]:
        """(offset, value, threads) for each different pair, of the active threads."""
        active = group.active()
        values = np.broadcast_to(np.asarray(values), offsets.shape)
        pairs = np.stack([offsets[active], values[active].astype(np.int64)])
        for offset, value in np.unique(pairs, axis=1).T:
            yield int(offset), int(value), active & (offsets == offset) & (values == value)
