"""What the simulator reports: each kind of fault is a class, and says where it happened."""

from dataclasses import dataclass

from humming.errors import HummingError


@dataclass(frozen=True, slots=True)
class Where:
    """The place of a fault.

    Attributes:
        line: line of the PTX text, counted from 1.
        text: the instruction there.
        cta: (x, y, z) of the CTA; None before anything runs.
        warp, lane: number of the warp in its CTA and of the thread in its warp.
        listing: the lines around it, the one at fault marked.
    """

    line: int
    text: str
    cta: tuple[int, int, int] | None = None
    warp: int | None = None
    lane: int | None = None
    listing: str = ""

    def __str__(self) -> str:
        thread = ""
        if self.cta is not None:
            thread = f", CTA {self.cta}"
            thread += "" if self.warp is None else f", warp {self.warp}"
            thread += "" if self.lane is None else f", lane {self.lane}"
        return f"PTX line {self.line}{thread}: {self.text}"


class SimulationError(HummingError):
    """A kernel did what it must not do.

    Attributes:
        what: the fault, as a sentence without a full stop.
        where: its place, None if it has none.
        thread: (row of the warp in the machine, lane), for the machine to make `where` of.
    """

    def __init__(self, what: str, where: Where | None = None) -> None:
        super().__init__(what, where)
        self.what, self.where = what, where
        self.thread: tuple[int, int] | None = None

    def __str__(self) -> str:
        if self.where is None:
            return self.what
        listing = f"\n{self.where.listing}" if self.where.listing else ""
        return f"{self.what}\n  at {self.where}{listing}"


class PtxSyntaxError(SimulationError):
    """The text is no PTX that the front end knows."""


class UnknownInstructionError(SimulationError):
    """An instruction, or a form of it, that the simulator does not execute."""


class PoisonError(SimulationError):
    """An undefined value decides an address, a branch, or what is stored to global memory."""


class BoundsError(SimulationError):
    """An access that does not lie inside one allocation, or writes to what is read-only."""


class AlignmentError(SimulationError):
    """An address that is no multiple of the size of the access."""


class AsyncHazardError(SimulationError):
    """An access to memory that an asynchronous operation may still be using."""


class RaceError(SimulationError):
    """Two warps access the same byte of shared memory, one writes, and nothing orders them."""


class BarrierError(SimulationError):
    """A barrier is used against its rules: counts, exited warps, an uninitialized object."""


class DivergenceError(SimulationError):
    """Threads that must execute an instruction together do not."""


class DeadlockError(SimulationError):
    """No thread can go on; the message lists what each of them waits for."""


class TrapError(SimulationError):
    """The kernel executed `trap` or a failing assertion."""


class TensorMemoryError(SimulationError):
    """Tensor memory is used that is not allocated, or allocated against its rules."""


class IllegalInstructionError(SimulationError):
    """An encoding that the simulated device does not execute."""


class UndefinedBehaviorError(SimulationError):
    """Operands for which the PTX ISA defines no result."""
