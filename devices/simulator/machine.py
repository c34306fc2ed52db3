"""The machine: executes the CTAs of a wave, all their warps in step for as long as they agree.

Each thread has its own place in the program. Threads at the same place run together, whichever
warps and CTAs they belong to; those that are earliest in the program's order run first, which
brings threads together again where their paths meet. A warp-wide instruction additionally waits
until all threads of its warp are there, as the PTX ISA demands, so the schedule decides about speed
and never about results. With a seed, the choice is random instead.
"""

import math
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from . import reports
from .accumulation import Sums
from .async_operations import Completions, CopyQueue
from .barriers import CtaBarriers, MemoryBarriers
from .calls import Calls
from .clusters import ClusterBarrier
from .decoder import STOP, Decoder, Step
from .errors import PoisonError, SimulationError, Where
from .global_memory import GlobalMemory
from .groups import WARP, Array, Group, GroupCache, Lanes
from .launch_shape import Dim, Options, Shape
from .locations import Locations
from .meetings import Meetings
from .memory import SHARED_WINDOW, LocalMemory, ParamMemory
from .origins import origins
from .polling import PollWatch
from .program import Program
from .proxies import ProxyRaces
from .ptx_syntax import Register
from .registers import RegisterFile
from .schedule import Schedule
from .shared_memory import SharedMemory
from .special_registers import special_values


class Resettable(Protocol):
    """A part of a machine with state of its own."""

    def reset(self) -> None:
        """Forgets everything, before a wave."""


class Beat:
    """Tells, a few times a second, how many CTAs of a launch have ended."""

    _PERIOD_S = 0.1

    def __init__(self, progress: Callable[[int, int], None], total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self._next = time.monotonic()

    def __call__(self, machine: "Machine") -> None:
        """Called while a wave runs."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._PERIOD_S
            lives = machine.live.any(axis=1)
            running = len(np.unique(machine.row_cta[lives]))
            self._progress(self._done + len(machine.ctas) - running, self._total)

    def wave_has_ended(self, ctas: int) -> None:
        """Called after each wave."""
        self._done += ctas
        self._progress(self._done, self._total)


class Machine:
    """State of a wave and the decoded kernel, for waves of one shape one after the other.

    Attributes:
        program: what runs.
        shape: of the wave.
        warps: number of warps in all.
        live: bool [warps, 32], the threads that exist and have not exited.
        row_cta, row_warp: int [warps], CTA of the wave and number in it, of each warp.
        memory, shared, local, params, frames: the state spaces.
        locations: what strong operations on shared memory have released.
        sums: of tensor cores, by how much they may lie off.
        schedule: which threads run next.
        meetings: where threads of a warp wait for each other.
        barriers, mbarriers: barriers of CTAs, barrier objects in shared memory.
        copies, completions: asynchronous operations under way.
        watch: looks for polling that never ends.
        parts: what has state of its own, to be reset between waves; others may add to it.
        undefined_loads: step -> the first address at which it has read undefined memory.
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
        self.sums = Sums(options.sums, options.sums_seed)
        self.progress = 0
        self.parked_at: Array = np.zeros((self.warps, WARP), np.int64)
        self._timed_out_at = -1
        self.undefined_loads: dict[int, int] = {}
        self._registers: dict[str, RegisterFile] = {}
        self._specials: dict[str, Array] = {}
        self.ctas: list[Dim] = []
        self._number_steps()
        self.schedule = Schedule(options, self.order)
        self._make_memory()
        self.barriers = CtaBarriers(self)
        self.mbarriers = MemoryBarriers(self)
        self.completions = Completions(self)
        self.copies = CopyQueue(self)
        self.cluster_barrier = ClusterBarrier(self)
        self.meetings = Meetings(self)
        self.calls = Calls(self)
        self.watch = PollWatch(self)
        self.parts: list[Resettable] = [
            self.schedule,
            self.meetings,
            self.barriers,
            self.mbarriers,
            self.copies,
            self.completions,
            self.cluster_barrier,
            self.calls,
            self.watch,
        ]
        # What is checked when all threads of a wave have ended.
        self.at_end: list[Callable[[], None]] = [self.barriers.finish]

    # -- building -------------------------------------------------------------------------------

    def _make_memory(self) -> None:
        program, shape = self.program, self.shape
        placed = sorted(
            (start, start + size, name) for name, (start, size) in program.shared.items()
        )
        if shape.smem_bytes:
            end = program.dynamic_base + shape.smem_bytes
            name = program.dynamic[0] if program.dynamic else "dynamic shared memory"
            placed.append((program.dynamic_base, end, name))
        extents = [(start, end) for start, end, _ in placed]
        self.shared = SharedMemory(shape.ctas, extents, self.row_cta, shape.cluster_size)
        self.shared.names = [name for _, _, name in placed]
        self.races = ProxyRaces(self) if self.options.races else None
        self.shared.races = self.races
        self.locations = Locations()
        self.local = LocalMemory(self.warps, program.local_bytes)
        self.frames = LocalMemory(self.warps, program.frame_bytes, "call parameter")
        self.params = ParamMemory(program.param_bytes)
        self.globals: dict[str, int] = {}
        self._static_bytes = sum(size for _, size in program.shared.values())
        rank = (self.row_cta % shape.cluster_size).astype(np.uint64) << np.uint64(24)
        self._rank_bits: Array = np.broadcast_to(rank[:, None], (self.warps, WARP))

    def _number_steps(self) -> None:
        """Makes room for the steps: one for each instruction and one ahead of each leader."""
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

    def decode_all(self) -> None:
        """Decodes what has not been decoded yet.

        Raises:
            UnknownInstructionError: an instruction that is not known.
        """
        for pc, step in enumerate(self.steps):
            if step is None:
                self._step(pc)

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

    def register_files(self) -> Iterable[RegisterFile]:
        """All registers that have been used."""
        return self._registers.values()

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

    def constants(self) -> list[tuple[int, int]]:
        """Where the variables of constant memory begin and end."""
        found = [v for v in self.program.globals if v.space == "const"]
        places = ((self.globals[v.name], v.size_bytes or 0) for v in found)
        return [(start, start + size) for start, size in places]

    def special(self, name: str) -> Callable[[], Array] | None:
        """Values [warps, 32] of a special register; None if it is not known."""
        if name in ("%clock", "%clock64", "%globaltimer", "%globaltimer_lo"):
            return lambda: self._time(0)
        if name in ("%clock_hi", "%globaltimer_hi"):
            return lambda: self._time(32)
        if not self._specials:
            self._specials = special_values(self.shape, [], (1, 1, 1), self._static_bytes)
        if name not in self._specials:
            return None
        return lambda: self._specials[name]

    def _time(self, shift: int) -> Array:
        self.watch.clocks_read += 1
        return np.full((self.warps, WARP), 32 * self.schedule.clock >> shift, np.uint64)

    # -- running --------------------------------------------------------------------------------

    def run(
        self,
        ctas: list[Dim],
        grid: Dim,
        params: bytes,
        globals_: dict[str, int],
        first: int = 0,
        beat: "Beat | None" = None,
    ) -> None:
        """Runs CTAs of a grid from beginning to end.

        Args:
            ctas: their places in the grid, clusters together, at most as many as the shape has.
            grid: CTAs of the grid in x, y and z.
            params: bytes of the kernel's parameters.
            globals_: addresses of the module's variables.
            first: how many CTAs of the launch have run before.
            beat: is called again and again.

        Raises:
            SimulationError: the kernel did what it must not do.
        """
        self._reset(ctas, grid, params, globals_)
        if self.races is not None:
            self.races.first_cluster = first // self.shape.cluster_size
        if self.memory.order is not None:
            self.memory.order.begin_wave(self)
        with np.errstate(all="ignore"):
            self.put(0, self.live)
            while True:
                if self.watch.finds_no_end() and not self._time_out():
                    raise reports.polling(self, math.prod(grid) - first - len(ctas))
                pc = self.schedule.choose(self.completions.run)
                if pc is not None:
                    if self.schedule.clock > self.options.max_basic_blocks:
                        raise reports.endless(self, pc)
                    self._execute(pc)
                    if beat is not None:
                        beat(self)
                elif self.live.any():
                    self._unblock()
                else:
                    for check in self.at_end:
                        check()
                    return

    def _reset(self, ctas: list[Dim], grid: Dim, params: bytes, globals_: dict[str, int]) -> None:
        self.ctas = ctas
        present = self.row_cta < len(ctas)
        self.live = self.exists & present[:, None]
        self.globals = globals_
        self.params.memory.data[: len(params)] = np.frombuffer(params, np.uint8)
        for register in self._registers.values():
            register.reset()
        self.shared.reset()
        self.locations.reset()
        self.local.reset()
        self.frames.reset()
        self.progress, self._timed_out_at = 0, -1
        self.undefined_loads.clear()
        for part in self.parts:
            part.reset()
        if self.races is not None:
            self.races.reset()
        self._specials = special_values(self.shape, ctas, grid, self._static_bytes)

    def _execute(self, pc: int) -> None:
        """Runs the threads that are ready at a step until they stop or disagree."""
        group = self.group(self.schedule.take(pc))
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
                # Who is to blame is not always known; these threads are at the instruction.
                thread = error.thread or group.first(group.active())
                error.where = reports.where(self, pc, thread)
                if isinstance(error, PoisonError):
                    error.what += origins(self, pc, thread)
            raise

    def _leader(self, pc: int) -> Step:
        """The step ahead of a block: lets others run where that brings threads together."""
        goes_on, ran = self.schedule.goes_on, self.watch.ran

        def leader(group: Group) -> int | None:
            if goes_on(pc):
                ran(group.lanes)
                return None
            self.put(pc, group.lanes)
            return STOP

        return leader

    # -- what steps call ------------------------------------------------------------------------

    def put(self, pc: int, lanes: Lanes) -> None:
        """Makes threads, bool [warps, 32], ready to run at a step."""
        self.schedule.put(pc, lanes)

    def park(self, pc: int, lanes: Lanes) -> None:
        """Notes, for reports, that threads wait at a step; whoever lets them go calls `put`."""
        self.parked_at[lanes] = pc

    def polled(self, group: Group, pc: int, addresses: Array, yields: bool) -> None:
        """Threads have loaded something in a loop.

        Args:
            group: who.
            pc: the step of the load.
            addresses: that it has read, uint64 [n, 32].
            yields: whether it may wait for others, which should run soon.
        """
        if yields:
            self.schedule.yield_soon()
        self.watch.note(group, pc, addresses)

    def place_of(self, opcode: str, address: int) -> str:
        """An address of an instruction, with what lies there, for messages."""
        parts = opcode.split(".")
        if any(part.startswith("shared") for part in parts):
            return self.shared.describe(address)
        if any(part in ("local", "param", "param::entry", "param::func") for part in parts):
            return f"{hex(address)} in local memory or parameters"
        if address >> 56 == SHARED_WINDOW >> 56:
            return self.shared.describe(address & (SHARED_WINDOW - 1))
        return self.memory.describe(address)

    def changes(self) -> tuple[int, ...]:
        """Counts that stay the same as long as threads get nothing from each other.

        Meetings at barriers of CTAs are not among them: they may belong to a loop that polls.
        """
        spaces = (self.memory, self.shared, self.local, self.frames)
        return (
            self.progress - self.barriers.meetings,
            self.watch.clocks_read,
            *(space.memory.changes for space in spaces),
        )

    def exit(self, group: Group) -> int:
        """Ends threads."""
        self.live = self.live & ~group.lanes
        self.meetings.check()
        gone = group.index[~self.live[group.rows].any(axis=1)]
        if len(gone):
            self.barriers.exited(gone)
            self._end_ctas(np.unique(self.row_cta[gone]))
        self.cluster_barrier.check()
        self.progress += 1
        return STOP

    def _end_ctas(self, ctas: Array) -> None:
        """Notes which of some CTAs have no threads any more."""
        for cta in ctas:
            if not self.live[self.row_cta == cta].any():
                self.shared.ended[cta] = True
                if self.races is not None and self.shape.cluster_size > 1:
                    self.races.check_end(int(cta))

    def where(self, pc: int, thread: tuple[int, int] | None = None) -> Where:
        """The place of a step, and of a thread given by (warp row, lane), for errors."""
        return reports.where(self, pc, thread)

    def _unblock(self) -> None:
        """Called when no thread can run: delivers what is in flight, lets timed waits time out."""
        if self.completions.run_one():
            return
        if not self._time_out():
            raise reports.deadlock(self)

    def _time_out(self) -> bool:
        """Lets timed waits time out, once until something happens; False if nobody goes on."""
        if self._timed_out_at == self.progress or not self.mbarriers.time_out():
            return False
        self._timed_out_at = self.progress
        return True
