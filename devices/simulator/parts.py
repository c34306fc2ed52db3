"""Parts of a machine that only some kernels need: they are added when one is first asked for."""

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from .machine import Machine


class Part(Protocol):
    """State of a machine, which is reset before a wave and checked behind it."""

    def __init__(self, machine: "Machine") -> None: ...

    def reset(self) -> None:
        """Forgets everything."""

    def finish(self) -> None:
        """Raises SimulationError if a wave left something behind that it must not."""


P = TypeVar("P", bound=Part)


def part_of(machine: "Machine", kind: type[P]) -> P:
    """The part of a machine of some type."""
    for part in machine.parts:
        if isinstance(part, kind):
            return part
    made = kind(machine)
    machine.parts.append(made)
    machine.at_end.append(made.finish)
    return made
