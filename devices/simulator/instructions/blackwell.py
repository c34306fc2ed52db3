"""What Blackwell adds outside of its matrix instructions, and no other module has."""

import numpy as np

from ..decoder import Decoder, Step, instruction
from ..errors import UndefinedBehaviorError
from ..groups import Group
from ..memory import fault
from .data import require_defined
from .memory import shared_addresses

_WORD = 8


@instruction("st.bulk")
def store_bulk(d: Decoder) -> Step:
    """PTX ISA 9.7.9.13 "st.bulk": zeros in shared memory, so many bytes for each thread."""
    d.modifiers.ignore("weak")
    space = d.modifiers.one_of("shared::cta", "shared", default="")
    d.expect(2, 3)
    addresses, size = shared_addresses(d, 0, space == ""), d.source(1, "b64")
    if len(d.operands) == 3:
        value = np.asarray(d.source(2, "u32").read(Group(np.zeros((1, 32), np.bool_))))
        if value.ndim or value:
            d.refuse("st.bulk writes zeros")
    machine = d.machine

    def step(group: Group) -> None:
        active = group.active()
        sizes = np.broadcast_to(require_defined(size, group, "the size"), active.shape)
        odd = (sizes % _WORD != 0) & active
        if odd.any():
            told = f"st.bulk of a size that is no multiple of {_WORD} bytes"
            raise fault(UndefinedBehaviorError, told, group, odd)
        at = addresses(group)
        for place, lane in np.argwhere(active):
            row, start = int(group.index[place]), at[place, lane]
            words = np.arange(int(sizes[place, lane]) // _WORD, dtype=np.uint64) * _WORD + start
            for first in range(0, len(words), 32):
                part = words[first : first + 32]
                lanes = np.zeros_like(machine.live)
                lanes[row, : len(part)] = True
                padded = np.pad(part, (0, 32 - len(part)), mode="edge")[None]
                zeros = np.zeros((1, 32), np.uint64)
                machine.shared.store(machine.group(lanes), padded, zeros, None, _WORD)

    return step


@instruction("cvt.rs")
def convert_stochastic(d: Decoder) -> Step:
    """PTX ISA 9.7.9.21, stochastic rounding: not executed."""
    d.refuse("which of its random bits cvt.rs adds to which operand is not known to the simulator")
