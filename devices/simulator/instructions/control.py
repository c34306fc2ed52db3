"""Control flow and what has no effect on values (PTX ISA 9.7.12, 9.7.13.13, 9.7.19)."""

import numpy as np

from ..decoder import STOP, Decoder, Step, instruction, require_agreement
from ..errors import PoisonError, TrapError, UndefinedBehaviorError
from ..groups import Group
from ..memory import fault, window_of
from ..ptx_syntax import Integer, Label, Register, Symbol, Vector
from .data import require_defined

_SYSTEM_CALLS = {"vprintf": "printf", "malloc": "malloc", "free": "free"}
"""Functions of the driver, and what they are called in CUDA."""

_LINE_BYTES = 128
"""What `discard` is about."""


@instruction("bra")
def branch(d: Decoder) -> Step:
    """PTX ISA 9.7.12.3: threads with the predicate go to the label, the others on."""
    d.modifiers.flag("uni")
    d.expect(1)
    label = d.operands[0]
    if not isinstance(label, Label):
        d.refuse("a branch to something that is no label")
    target = d.machine.step_of[label.index]
    return lambda group: target


@instruction("brx.idx")
def branch_indexed(d: Decoder) -> Step:
    """PTX ISA 9.7.12.4: to a label of a table, by its number."""
    uniform = d.modifiers.flag("uni")
    d.expect(2)
    table = d.operands[1]
    if not isinstance(table, Vector):
        d.refuse("brx.idx needs a table of labels")
    machine = d.machine
    targets = [machine.step_of[item.index] for item in table.items if isinstance(item, Label)]
    index = d.source(0, "u32")

    def step(group: Group) -> int | None:
        undefined = index.poison(group)
        if undefined is not None:
            told = "the number of the branch is undefined"
            raise fault(PoisonError, told, group, undefined != 0)
        chosen = np.broadcast_to(index.read(group), (len(group), 32))
        bad = (chosen >= len(targets)) & group.active()
        if bad.any():
            told = f"the number of the branch is not among the {len(targets)} labels"
            raise fault(UndefinedBehaviorError, told, group, bad)
        used = np.unique(chosen[group.active()])
        if len(used) == 1:
            return targets[int(used[0])]
        active = group.active()
        for number in used:
            own = (chosen == number) & active
            if uniform:
                require_agreement(group, own, active & ~own)
            machine.put(targets[int(number)], group.spread(own))
        return STOP

    return step


@instruction("exit")
def end(d: Decoder) -> Step:
    """PTX ISA 9.7.12.7."""
    d.expect(0)
    return d.machine.exit


@instruction("ret")
def leave(d: Decoder) -> Step:
    """PTX ISA 9.7.12.6: back to the caller; ends the thread in a kernel."""
    d.modifiers.flag("uni")
    machine, program = d.machine, d.machine.program
    index = machine.instruction_of[d.pc]
    owner = max((start, name) for name, start in program.functions.items() if start <= index)[1]
    if owner == program.entry.name:
        return machine.exit
    return lambda group: machine.calls.leave(owner, group)


@instruction("call")
def call(d: Decoder) -> Step:
    """PTX ISA 9.7.12.5, of a function by its name."""
    d.modifiers.flag("uni")
    machine, program = d.machine, d.machine.program
    lists = [operand for operand in d.operands if isinstance(operand, Vector)]
    names = [operand for operand in d.operands if isinstance(operand, Symbol)]
    if isinstance(next((o for o in d.operands if not isinstance(o, Vector)), None), Register):
        return _indirect_call(d, lists)
    name = names[0].name
    position = d.operands.index(names[0])
    results = [o for o in lists if d.operands.index(o) < position]
    arguments = [o for o in lists if d.operands.index(o) > position]
    if name not in program.functions:
        if name in ("__assertfail", "__assert_fail"):
            return _assertion
        if name in _SYSTEM_CALLS:
            d.refuse(f"{_SYSTEM_CALLS[name]} is not simulated: a driver would provide {name}")
        d.refuse(f"the function {name} has no body")
    function = program.module.functions[name]
    given = [i.name for o in arguments for i in o.items if isinstance(i, Symbol)]
    wanted = [i.name for o in results for i in o.items if isinstance(i, Symbol)]
    if len(given) != len(function.params) or len(wanted) != len(function.results):
        d.refuse(f"{name} with another number of parameters or results than it has")
    incoming = list(zip(given, (f"{name}/{p.name}" for p in function.params), strict=True))
    outgoing = list(zip((f"{name}/{r.name}" for r in function.results), wanted, strict=True))
    start, after = machine.step_of[program.functions[name]], d.pc + 1
    return lambda group: machine.calls.enter(name, group, start, after, incoming, outgoing)


def _indirect_call(d: Decoder, lists: list[Vector]) -> Step:
    """A call of the function whose address a register holds, one or several at once."""
    machine, program = d.machine, d.machine.program
    place = next(p for p, o in enumerate(d.operands) if not isinstance(o, Vector))

    def names(behind: bool) -> list[str]:
        found = [o for o in lists if (d.operands.index(o) > place) == behind]
        return [item.name for o in found for item in o.items if isinstance(item, Symbol)]

    results, given = names(False), names(True)
    target, after = d.source(place, "u64"), d.pc + 1
    starts = {
        machine.step_of[first]: name
        for name, first in program.functions.items()
        if name != program.entry.name
    }

    def enter(start: int, group: Group) -> int:
        name = starts.get(start, "")
        function = program.module.functions.get(name)
        if function is None:
            told = f"a call of the address {start:#x}, which is that of no function"
            raise fault(UndefinedBehaviorError, told, group, group.active())
        if (len(given), len(results)) != (len(function.params), len(function.results)):
            told = f"{name} has other parameters or results than this call of it"
            raise fault(UndefinedBehaviorError, told, group, group.active())
        incoming = list(zip(given, (f"{name}/{p.name}" for p in function.params), strict=True))
        outgoing = list(zip((f"{name}/{r.name}" for r in function.results), results, strict=True))
        return machine.calls.enter(name, group, start, after, incoming, outgoing)

    def step(group: Group) -> int | None:
        addresses = np.broadcast_to(
            require_defined(target, group, "the address of the function"), (len(group), 32)
        )
        different = np.unique(addresses[group.active()])
        if len(different) == 1:
            return enter(int(different[0]), group)
        for address in different.tolist():
            part = machine.group(group.spread(addresses == address))
            machine.put(enter(address, part), part.lanes)
        return STOP

    return step


def _assertion(group: Group) -> int | None:
    raise fault(TrapError, "an assertion of the kernel fails", group, group.active())


@instruction("trap", "brkpt")
def trap(d: Decoder) -> Step:
    """PTX ISA 9.7.19.3 and .1."""
    told = f"the kernel executes {d.opcode}"

    def step(group: Group) -> int | None:
        raise fault(TrapError, told, group, group.active())

    return step


@instruction("nanosleep")
def sleep(d: Decoder) -> Step:
    """PTX ISA 9.7.19.6: lets others run."""
    d.modifiers.one_of("u32")
    d.expect(1)
    d.source(0, "u32")
    machine = d.machine

    def step(group: Group) -> int | None:
        machine.schedule.yield_soon()
        return None

    return step


@instruction("griddepcontrol")
def grid_dependency(d: Decoder) -> Step:
    """PTX ISA 9.7.13.13: grids run one after the other here; what must be waited for is checked."""
    waits = d.modifiers.one_of("launch_dependents", "wait") == "wait"
    d.expect(0)
    memory = d.machine.memory
    if not waits:
        return nothing

    def step(group: Group) -> None:
        if memory.order is not None:
            memory.order.wait(group)

    return step


@instruction("pmevent")
def performance_event(d: Decoder) -> Step:
    """PTX ISA 9.7.19.2."""
    d.modifiers.ignore("mask")
    return nothing


def nothing(group: Group) -> int | None:
    """The step of an instruction that changes nothing here."""
    return None


@instruction("membar", "fence")
def fence(d: Decoder) -> Step:
    """PTX ISA 9.7.13.4: values are sequentially consistent here, and what a fence promises is not.

    A fence of one thread counts for its warp.
    """
    for_objects = d.modifiers.flag("mbarrier_init")
    far = bool({"gpu", "sys", "gl"} & set(d.modifiers.left))
    d.modifiers.ignore("sc", "acq_rel", "acquire", "release", "cta", "cluster", "gpu", "sys", "gl")
    d.modifiers.ignore_prefixes("sync_restrict::")
    if "proxy" in d.modifiers.left:
        return _proxy_fence(d)
    machine = d.machine

    def step(group: Group) -> None:
        if for_objects:
            machine.mbarriers.publish(group.index)
        elif machine.races is not None:
            machine.races.fence(group.index, far)

    return step


def _proxy_fence(d: Decoder) -> Step:
    d.modifiers.flag("proxy")
    d.modifiers.ignore("alias", "async", "global", "shared::cta", "shared::cluster")
    d.modifiers.ignore_prefixes("async", "tensormap")
    return nothing


@instruction("discard")
def discard(d: Decoder) -> Step:
    """PTX ISA 9.7.9.17: 128 bytes of global memory become undefined."""
    space = d.modifiers.one_of("global", default="")
    d.modifiers.one_of("L2")
    d.expect(2)
    if d.operands[1] != Integer(_LINE_BYTES):
        d.refuse("discard is of 128 bytes")
    addresses, machine = d.address(0), d.machine

    def step(group: Group) -> int | None:
        at = addresses.read(group)
        if space == "" and (window_of(at)[group.active()] != 0).any():
            told = "discard of memory that is not global"
            raise fault(UndefinedBehaviorError, told, group, window_of(at) != 0)
        machine.memory.locate(group, at, _LINE_BYTES, True)
        for address in np.unique(at[group.active()]).tolist():
            machine.memory.discard(int(address), _LINE_BYTES)
        return None

    return step


@instruction("prefetch", "prefetchu", "applypriority")
def hint(d: Decoder) -> Step:
    """PTX ISA 9.7.9.14-17: hints to caches, of which only the address is checked."""
    d.modifiers.ignore("global", "local", "L1", "L2")
    d.modifiers.ignore_prefixes("L2::", "L1::", "tensormap", "const", "param")
    addresses = d.address(0)

    def step(group: Group) -> None:
        addresses.read(group)

    return step
