"""The machine: executes the CTAs of a wave, all their warps in step for as long as they agree.

Each thread has its own place in the program. Threads at the same place run together, whichever
warps and CTAs they belong to; those that are earliest in the program's order run first, which
brings threads together again where their paths meet. A warp-wide instruction additionally waits
until all threads of its warp are there, as the PTX ISA demands, so the schedule decides about speed
and never about results. With a seed, the choice is random instead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .async_operations import Completions, CopyQueue
from .barriers import CtaBarriers, MemoryBarriers
from .calls import Calls
from .clusters import ClusterBarrier
from .decoder import STOP, Decoder, Step
from .errors import (
    DeadlockError,
    DivergenceError,
    SimulationError,
    UndefinedBehaviorError,
    Where,
)
from .groups import WARP, Array, Group, GroupCache, Lanes
from .memory import (
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_WINDOW,
    GlobalMemory,
    LocalMemory,
    ParamMemory,
    SharedMemory,
    fault,
)
from .program import Program
from .ptx_syntax import Register
from .races import RaceDetector
from .registers import RegisterFile

Dim = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Options:
    """How strictly and in which order kernels run.

    Attributes:
        seed: for a random schedule; None is a fixed one that is fast.
        races: whether unordered accesses of two warps to shared memory are errors.
        patience: blocks that threads run while others that could run are waiting.
        limit: blocks after which a wave is taken to be in an endless loop.
        wave_warps: about how many warps run at the same time.
    """

    seed: int | None = None
    races: bool = True
    patience: int = 256
    limit: int = 5_000_000
    wave_warps: int = 128


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a wave: CTAs that run at the same time, their threads, CTAs of a cluster."""

    ctas: int
    block: Dim
    cluster: Dim = (1, 1, 1)
    smem_bytes: int = 0

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def cta_warps(self) -> int:
        """Warps of a CTA."""
        return -(-self.threads // WARP)

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return self.cluster[0] * self.cluster[1] * self.cluster[2]


def bits_of_lanes(lanes: Lanes) -> Array:
    """uint32 [n] with a bit for each thread that is set in bool [n, 32]."""
    packed = np.packbits(lanes, axis=1, bitorder="little")
    return np.ascontiguousarray(packed).view("<u4")[:, 0]


class Resettable(Protocol):
    """A part of a machine with state of its own."""

    def reset(self) -> None:
        """Forgets everything, before a wave."""


class Machine:
    """State of a wave and the decoded kernel, for waves of one shape one after the other.

    Attributes:
        program: what runs.
        shape: of the wave.
        warps: number of warps in all.
        live: bool [warps, 32], the threads that exist and have not exited.
        row_cta, row_warp: int [warps], CTA of the wave and number in it, of each warp.
        memory, shared, local, params, frames: the state spaces.
        barriers, mbarriers: barriers of CTAs, barrier objects in shared memory.
        copies, completions: asynchronous operations under way.
        clock: blocks of instructions that have begun.
        progress: counts what may let waiting threads go on.
    """

    def __init__(
        self, program: Program, shape: Shape, memory: GlobalMemory, options: Options
    ) -> None:
        self.program, self.shape, self.memory, self.options = program, shape, memory, options
        self.warps = shape.ctas * shape.cta_warps
        row = np.arange(self.warps)
        self.row_cta: Array = row // shape.cta_warps
        self.row_warp: Array = row % shape.cta_warps
        thread = self.row_warp[:, None] * WARP + np.arange(WARP)
        self.exists: Lanes = thread < shape.threads
        self.live: Lanes = np.zeros((self.warps, WARP), np.bool_)
        self.group = GroupCache()
        self.clock = self.progress = 0
        self.ready: dict[int, Lanes] = {}
        self._since: dict[int, int] = {}
        self._stalled: dict[int, tuple[Lanes, Array | None]] = {}
        self.parked_at: Array = np.zeros((self.warps, WARP), np.int64)
        self._budget = self._rival = 0
        self._exhausted = -1
        self._timed_out_at = -1
        self._rng = np.random.default_rng(options.seed)
        self._random = options.seed is not None
        self._registers: dict[str, RegisterFile] = {}
        self._specials: dict[str, Array] = {}
        self._ctas: list[Dim] = []
        self._make_memory()
        self.barriers = CtaBarriers(self)
        self.mbarriers = MemoryBarriers(self)
        self.completions = Completions(self)
        self.copies = CopyQueue(self)
        self.cluster_barrier = ClusterBarrier(self)
        self.calls = Calls(self)
        # What has state of its own and forgets it between waves; others may be added.
        self.parts: list[Resettable] = [
            self.barriers,
            self.mbarriers,
            self.copies,
            self.completions,
            self.cluster_barrier,
            self.calls,
        ]
        self._decode()

    # -- building -------------------------------------------------------------------------------

    def _make_memory(self) -> None:
        program, shape = self.program, self.shape
        extents = sorted((start, start + size) for start, size in program.shared.values())
        if shape.smem_bytes:
            extents.append((program.dynamic_base, program.dynamic_base + shape.smem_bytes))
        self.shared = SharedMemory(shape.ctas, extents, self.row_cta, shape.cluster_size)
        self.races = RaceDetector(self) if self.options.races else None
        self.shared.races = self.races
        self.local = LocalMemory(self.warps, program.local_bytes)
        self.frames = LocalMemory(self.warps, program.frame_bytes, "call parameter")
        self.params = ParamMemory(program.param_bytes)
        self.globals: dict[str, int] = {}
        rank = (self.row_cta % shape.cluster_size).astype(np.uint64) << np.uint64(24)
        self._rank_bits: Array = np.broadcast_to(rank[:, None], (self.warps, WARP))

    def _decode(self) -> None:
        """Makes the list of steps: one for each instruction and one ahead of each leader."""
        program = self.program
        self.step_of: list[int] = []
        at = 0
        for index in range(len(program.instructions)):
            self.step_of.append(at)
            at += 2 if index in program.leaders else 1
        self.instruction_of: list[int] = []
        self.order: list[int] = []
        self.steps: list[Step | None] = []
        for index in range(len(program.instructions)):
            for _ in range(2 if index in program.leaders else 1):
                self.order.append(2 * program.order[index] + len(self.steps) - self.step_of[index])
                self.instruction_of.append(index)
                self.steps.append(None)

    def _step(self, pc: int) -> Step:
        """The step of an index, decoded when threads come to it for the first time."""
        step = self.steps[pc]
        if step is None:
            index = self.instruction_of[pc]
            leads = index in self.program.leaders and pc == self.step_of[index]
            if leads:
                step = self._leader(pc)
            else:
                step = Decoder(self, self.program.instructions[index], pc).decode()
            self.steps[pc] = step
        return step

    def register(self, register: Register) -> RegisterFile:
        """The register file of a register."""
        found = self._registers.get(register.name)
        if found is None:
            found = RegisterFile(register.name, register.type, self.warps)
            self._registers[register.name] = found
        return found

    def address_of(self, name: str) -> int | Callable[[], Array]:
        """Address of a variable in its own space, or for shared memory, uint64 [warps, 32] ones."""
        program = self.program
        if name in program.params:
            return program.params[name]
        if name in program.frames:
            return program.frames[name][0]
        if name in program.local:
            return program.local[name][0]
        if name in self.globals:
            return self.globals[name]
        if name in program.functions:
            return self.step_of[program.functions[name]]
        start = program.shared[name][0] if name in program.shared else program.dynamic_base
        addresses = self._rank_bits + np.uint64(start)
        return lambda: addresses

    def special(self, name: str) -> Callable[[], Array] | None:
        """Values [warps, 32] of a special register; None if it is not known."""
        if name in ("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo"):
            return lambda: np.full((self.warps, WARP), 32 * self.clock, np.uint64)
        if not self._specials:
            self._set_specials([(0, 0, 0)] * self.shape.ctas, (1, 1, 1))
        if name not in self._specials:
            return None
        return lambda: self._specials[name]

    # -- running --------------------------------------------------------------------------------

    def run(self, ctas: list[Dim], grid: Dim, params: bytes, globals_: dict[str, int]) -> None:
        """Runs CTAs of a grid from beginning to end.

        Args:
            ctas: their places in the grid, clusters together, at most as many as the shape has.
            grid: CTAs of the grid in x, y and z.
            params: bytes of the kernel's parameters.
            globals_: addresses of the module's variables.

        Raises:
            SimulationError: the kernel did what it must not do.
        """
        self._reset(ctas, grid, params, globals_)
        with np.errstate(all="ignore"):
            self.put(0, self.live)
            while True:
                pc = self._choose()
                if pc is None:
                    if not self.live.any():
                        self.barriers.finish()
                        return
                    self._unblock()
                else:
                    self._execute(pc)

    def _reset(self, ctas: list[Dim], grid: Dim, params: bytes, globals_: dict[str, int]) -> None:
        self._ctas = ctas
        present = self.row_cta < len(ctas)
        self.live = self.exists & present[:, None]
        self.globals = globals_
        self.params.memory.data[: len(params)] = np.frombuffer(params, np.uint8)
        for register in self._registers.values():
            register.reset()
        self.shared.reset()
        self.local.reset()
        self.frames.reset()
        self.ready, self._since, self._stalled = {}, {}, {}
        self.clock = self.progress = 0
        self._timed_out_at = self._exhausted = -1
        for part in self.parts:
            part.reset()
        if self.races is not None:
            self.races.reset()
        self._set_specials(ctas, grid)

    def _set_specials(self, ctas: list[Dim], grid: Dim) -> None:
        shape, specials = self.shape, self._specials
        ones = np.ones((self.warps, WARP), np.uint64)

        def set_rows(name: str, values: Any) -> None:
            specials[name] = np.asarray(values, np.uint64).reshape(-1, 1) * ones

        thread = (self.row_warp[:, None] * WARP + np.arange(WARP)).astype(np.uint64)
        x, y, _ = (np.uint64(size) for size in shape.block)
        specials["%tid.x"] = thread % x
        specials["%tid.y"] = thread // x % y
        specials["%tid.z"] = thread // (x * y)
        place = np.array(ctas + [(0, 0, 0)] * (shape.ctas - len(ctas)), np.uint64)
        clusters = [-(-size // part) for size, part in zip(grid, shape.cluster, strict=True)]
        for axis, letter in enumerate("xyz"):
            own = place[self.row_cta, axis]
            part = np.uint64(shape.cluster[axis])
            set_rows(f"%ctaid.{letter}", own)
            set_rows(f"%cluster_ctaid.{letter}", own % part)
            set_rows(f"%clusterid.{letter}", own // part)
            set_rows(f"%ntid.{letter}", shape.block[axis])
            set_rows(f"%nctaid.{letter}", grid[axis])
            set_rows(f"%cluster_nctaid.{letter}", shape.cluster[axis])
            set_rows(f"%nclusterid.{letter}", clusters[axis])
        lane = np.arange(WARP, dtype=np.uint64)
        specials["%laneid"] = lane * ones
        below = (np.uint64(1) << lane) - np.uint64(1)
        own_bit = np.uint64(1) << lane
        everything = np.uint64(0xFFFFFFFF)
        for suffix, bits in (
            ("lt", below),
            ("le", below | own_bit),
            ("eq", own_bit),
            ("ge", everything & ~below),
            ("gt", everything & ~(below | own_bit)),
        ):
            specials[f"%lanemask_{suffix}"] = bits * ones
        set_rows("%warpid", self.row_warp)
        set_rows("%nwarpid", shape.cta_warps)
        set_rows("%smid", self.row_cta)
        set_rows("%nsmid", shape.ctas)
        set_rows("%gridid", 0)
        set_rows("%cluster_ctarank", self.row_cta % shape.cluster_size)
        set_rows("%cluster_nctarank", shape.cluster_size)
        set_rows("%is_explicit_cluster", int(shape.cluster_size > 1))
        set_rows("%dynamic_smem_size", shape.smem_bytes)
        static = sum(size for _, size in self.program.shared.values())
        set_rows("%total_smem_size", static + shape.smem_bytes)

    def _execute(self, pc: int) -> None:
        """Runs the threads that are ready at a step until they stop or disagree."""
        lanes = self.ready.pop(pc)
        del self._since[pc]
        self._rival = min((self.order[other] for other in self.ready), default=1 << 60)
        self._budget = self.options.patience
        if self._random:
            lanes = self._some_warps(pc, lanes)
            self._budget, self._rival = int(self._rng.integers(1, 12)), -1
        group = self.group(lanes)
        steps = self.steps
        try:
            while True:
                step = steps[pc]
                if step is None:
                    step = self._step(pc)
                action = step(group)
                if action is None:
                    pc += 1
                elif action == STOP:
                    return
                else:
                    pc = action
        except SimulationError as error:
            if error.where is None:
                error.where = self.where(pc, error.thread)
            raise

    def _leader(self, pc: int) -> Step:
        """The step ahead of a block: lets others run where that brings threads together."""
        order = self.order[pc]

        def leader(group: Group) -> int | None:
            self.clock += 1
            self._budget -= 1
            if self._budget < 0:
                self._exhausted = pc
            elif order < self._rival or (self._random and self._budget):
                return None
            self.put(pc, group.lanes)
            return STOP

        return leader

    def put(self, pc: int, lanes: Lanes) -> None:
        """Makes threads ready to run at a step."""
        there = self.ready.get(pc)
        self.ready[pc] = lanes if there is None else there | lanes
        self._since.setdefault(pc, self.clock)
        self._rival = min(self._rival, self.order[pc])

    def park(self, pc: int, lanes: Lanes) -> None:
        """Notes, for reports, that threads wait at a step; whoever lets them go calls `put`."""
        self.parked_at[lanes] = pc

    def _choose(self) -> int | None:
        """The step to run next."""
        if self.clock > self.options.limit:
            self._fail_endless()
        if not self.ready:
            return None
        if self._random:
            if self._rng.random() < 0.1:
                self.completions.run_some(self._rng)
            return int(self._rng.choice(list(self.ready)))
        exhausted, self._exhausted = self._exhausted, -1
        if exhausted >= 0:
            # It went on for long: what it polls may depend on others, or on something in flight.
            others = [pc for pc in self.ready if pc != exhausted]
            if others:
                return min(others, key=lambda pc: (self._since[pc], self.order[pc]))
            self.completions.run_one()
        if len(self.ready) > 1:
            oldest = min(self.ready, key=lambda pc: (self._since[pc], self.order[pc]))
            if self.clock - self._since[oldest] > 2 * self.options.patience:
                return oldest
        return min(self.ready, key=self.order.__getitem__)

    def _some_warps(self, pc: int, lanes: Lanes) -> Lanes:
        """A random part of the warps; the others stay ready."""
        rows = np.flatnonzero(lanes.any(axis=1))
        chosen = rows[self._rng.random(len(rows)) < 0.5]
        if len(chosen) == 0:
            chosen = rows[self._rng.integers(len(rows), size=1)]
        some = np.zeros_like(lanes)
        some[chosen] = lanes[chosen]
        rest = lanes & ~some
        if rest.any():
            self.put(pc, rest)
        return some

    def shuffled(self, rows: Array) -> Array:
        """Rows in a random order that the seed decides."""
        return self._rng.permutation(rows)

    def yield_soon(self) -> None:
        """Lets others run at the next block: called where threads poll in vain."""
        self._budget = min(self._budget, 0)

    def branch(self, target: int, after: int, group: Group, taken: Lanes) -> int | None:
        """Where a group goes of which some threads take a branch."""
        wanted = group.mask
        if wanted is None:
            if taken.all():
                return target
            if not taken.any():
                return None
        else:
            taken = taken & wanted
            if not taken.any():
                return None
            if (taken == wanted).all():
                return target
        self.put(target, group.spread(taken))
        self.put(after, group.spread(~taken))
        return STOP

    def meet(self, group: Group, pc: int, whole: bool, opcode: str) -> bool:
        """Whether every warp of a group is complete at a step; if not, its threads wait there.

        Raises:
            DivergenceError: an exited thread can never come, and must.
        """
        assert group.mask is not None
        living = self.live[group.rows]
        if whole and not living.all():
            told = f"{opcode} needs all 32 threads of a warp, some of which have exited"
            raise fault(DivergenceError, told, group, group.mask)
        if (group.mask == living).all():
            return True
        self._stall(group, pc, None)
        return False

    def meet_members(self, group: Group, pc: int, masks: Array) -> bool:
        """`meet` for the threads that each thread names by a uint32 mask [n, 32], itself too.

        Raises:
            UndefinedBehaviorError: a thread is not in its own mask.
        """
        active = group.active()
        outside = (masks >> np.arange(WARP, dtype=np.uint32) & 1) == 0
        if (outside & active).any():
            told = "a thread executes this with a mask of which it is no member"
            raise fault(UndefinedBehaviorError, told, group, outside)
        present = bits_of_lanes(active)
        wanted = masks & bits_of_lanes(self.live[group.rows])[:, None]
        if not ((wanted & ~present[:, None]) != 0)[active].any():
            return True
        everyone = np.zeros(self.live.shape, np.uint32)
        everyone[group.rows] = masks
        self._stall(group, pc, everyone)
        return False

    def _stall(self, group: Group, pc: int, masks: Array | None) -> None:
        """Adds threads to those that wait for others of their warp at a step."""
        lanes, known = self._stalled.pop(pc, (None, None))
        together = group.lanes if lanes is None else lanes | group.lanes
        if masks is not None and known is not None:
            masks = np.where(group.lanes, masks, known)
        self._stalled[pc] = (together, masks)
        self.park(pc, together)
        self._free_stalled(pc)

    def _free_stalled(self, pc: int) -> None:
        """Lets those go on that are complete now."""
        lanes, masks = self._stalled[pc]
        if masks is None:
            free = lanes & (lanes == self.live).all(axis=1)[:, None]
        else:
            lacking = masks & (bits_of_lanes(self.live) & ~bits_of_lanes(lanes))[:, None]
            free = lanes & (lacking == 0)
        if not free.any():
            return
        self.put(pc, free)
        if (lanes & ~free).any():
            self._stalled[pc] = (lanes & ~free, masks)
        else:
            del self._stalled[pc]

    def exit(self, group: Group) -> int:
        """Ends threads."""
        self.live = self.live & ~group.lanes
        for pc in list(self._stalled):
            self._free_stalled(pc)
        gone = group.index[~self.live[group.rows].any(axis=1)]
        if len(gone):
            self.barriers.exited(gone)
        self.cluster_barrier.check()
        self.progress += 1
        return STOP

    # -- waiting --------------------------------------------------------------------------------

    def _unblock(self) -> None:
        """Called when no thread can run: delivers what is in flight, lets timed waits time out."""
        if self.completions.run_one():
            return
        if self._timed_out_at != self.progress and self.mbarriers.time_out():
            self._timed_out_at = self.progress
            return
        self._fail_deadlock()

    def _fail_deadlock(self) -> None:
        stalled = np.zeros_like(self.live)
        for lanes, _ in self._stalled.values():
            stalled |= lanes
        report = self._waiting_report()
        row, lane = np.argwhere(stalled if stalled.any() else self.live)[0]
        kind: type[SimulationError] = DeadlockError
        told = "no thread can go on"
        if stalled.any():
            kind, told = DivergenceError, "threads of a warp that must execute one instruction wait"
        pc = int(self.parked_at[row, lane])
        error = kind(f"{told}:\n{report}")
        error.where = self.where(pc, (int(row), int(lane)))
        raise error

    def _waiting_report(self) -> str:
        told: dict[str, list[str]] = {}
        for row in np.flatnonzero(self.live.any(axis=1)):
            lanes = self.live[row]
            for pc in np.unique(self.parked_at[row][lanes]):
                there = np.flatnonzero(lanes & (self.parked_at[row] == pc))
                inst = self.program.instructions[self.instruction_of[int(pc)]]
                reason = self.mbarriers.describe(int(row), int(there[0]))
                reason = reason or self.barriers.describe(int(row), int(there[0]))
                place = f"line {inst.line}: {inst.text}{f' ({reason})' if reason else ''}"
                who = f"CTA {self._ctas[self.row_cta[row]]} warp {self.row_warp[row]}"
                if len(there) < WARP:
                    who += f" lanes {', '.join(map(str, there))}"
                told.setdefault(place, []).append(who)
        lines = []
        for place, whos in told.items():
            more = f" and {len(whos) - 8} more" if len(whos) > 8 else ""
            lines.append(f"  {place}\n    waited at by {'; '.join(whos[:8])}{more}")
        return "\n".join(lines)

    def _fail_endless(self) -> None:
        pc = next(iter(self.ready), 0)
        row, lane = np.argwhere(self.ready.get(pc, self.live))[0]
        error = DeadlockError(f"the kernel did not end within {self.options.limit} blocks")
        error.where = self.where(pc, (int(row), int(lane)))
        raise error

    # -- reports --------------------------------------------------------------------------------

    def where(self, pc: int, thread: tuple[int, int] | None = None) -> Where:
        """The place of a step, and of a thread given by (warp row, lane)."""
        instruction = self.program.instructions[self.instruction_of[pc]]
        listing = self.program.module.listing(instruction.line)
        if thread is None:
            return Where(instruction.line, instruction.text, listing=listing)
        row, lane = thread
        cta = self._ctas[int(self.row_cta[row])]
        warp = int(self.row_warp[row])
        return Where(instruction.line, instruction.text, cta, warp, lane, listing)


WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW}
"""Where the generic addresses of a state space begin; those of other spaces are the same."""
