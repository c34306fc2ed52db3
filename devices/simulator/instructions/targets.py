"""Which architectures know an instruction: NVRTC does not check inline assembly, ptxas would."""

import re

from ..decoder import Decoder
from ..machine import Machine


def target_of(machine: Machine) -> str:
    """The architecture of the module without its prefix: `100a` for sm_100a."""
    match = re.search(r"sm_(\d+[af]?)", machine.program.module.target)
    return match.group(1) if match else ""


def target_number(machine: Machine) -> int:
    """Its number: 100 for sm_100a."""
    return int(target_of(machine).rstrip("af") or 0)


def require_target(d: Decoder, *targets: str) -> None:
    """Refuses an instruction that the assembler does not take for the module's architecture.

    Args:
        d: at the instruction.
        targets: architectures that have it, `100a`.
    """
    found = target_of(d.machine)
    if found not in targets:
        known = ", ".join(f"sm_{target}" for target in targets)
        d.refuse(f"the assembler does not take this for sm_{found}; it does for {known}")
