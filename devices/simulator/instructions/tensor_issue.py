"""Who issues operations of the tensor pipe: single threads, whose operands are numbers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..decoder import Decoder
from ..errors import SimulationError, UndefinedBehaviorError
from ..groups import Group
from ..machine import Machine
from ..memory import fault
from ..operands import Source
from .data import require_defined


@dataclass(frozen=True, slots=True)
class Issuer:
    """A thread that issues an operation: its place in the group, row, lane and CTA."""

    place: int
    row: int
    lane: int
    cta: int


def issuers(machine: Machine, group: Group, opcode: str) -> Iterator[Issuer]:
    """The threads that issue an operation, one of a warp.

    Raises:
        UndefinedBehaviorError: several of a warp, which would each start the whole operation.
    """
    active = group.active()
    several = active.sum(axis=1) > 1
    if several.any():
        told = f"{int(active.sum(axis=1).max())} threads of a warp issue {opcode}, which starts"
        bad = active & several[:, None]
        raise fault(UndefinedBehaviorError, f"{told} the whole operation for each", group, bad)
    for place, row in enumerate(group.index.tolist()):
        lane = int(active[place].argmax())
        yield Issuer(place, row, lane, int(machine.row_cta[row]))


class Operands:
    """Operands of an instruction that one thread of a warp executes."""

    def __init__(self, d: Decoder) -> None:
        self._d = d

    def number(self, place: int, kind: str, what: str) -> Callable[[Group, Issuer], int]:
        """Reads an integer operand."""
        return self.reader(self._d.source(place, kind), what)

    def address(self, place: int) -> Callable[[Group, Issuer], int]:
        """Reads an address in tensor memory."""
        return self.reader(self._d.address(place), "the address in tensor memory")

    @staticmethod
    def reader(source: Source, what: str) -> Callable[[Group, Issuer], int]:
        """Reads the issuing thread's value of an operand, which must be defined."""

        def read(group: Group, issuer: Issuer) -> int:
            values = np.asarray(require_defined(source, group, what))
            return int(values if values.ndim == 0 else values[issuer.place, issuer.lane])

        return read


class Located:
    """A context in which errors get the thread that issues an operation: (row, lane)."""

    def __init__(self, thread: tuple[int, int]) -> None:
        self._thread = thread

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, SimulationError) and error.thread is None:
            error.thread = self._thread
