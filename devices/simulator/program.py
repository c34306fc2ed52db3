"""Links a kernel: one list of instructions, where variables lie, and the order of its blocks.

The order decides which threads run first when they are at different instructions. It puts every
loop in one piece and ahead of what follows it, so that running the earliest ones brings threads
together again at the first place that all of them pass, whatever the control flow looks like.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from humming.errors import HummingError

from .ptx_syntax import (
    Address,
    Function,
    Instruction,
    Label,
    Module,
    Not,
    Operand,
    Pair,
    Register,
    Symbol,
    Variable,
    Vector,
)

# The first bytes of a CTA's window belong to the system on newer devices; address 0 is invalid.
SHARED_BASE = 1024
_GAP_BYTES = 32
_ENDS = ("ret", "exit", "trap")


@dataclass(slots=True, eq=False)
class Program:
    """A kernel with the device functions that it calls.

    Attributes:
        module: what it comes from.
        entry: the kernel.
        instructions: of all functions; labels are indices into it.
        functions: function name -> index of its first instruction.
        registers: every register that is used, by name.
        leaders: indices of instructions that threads can come to from elsewhere.
        order: for each instruction, its place in the order of execution.
        loops: indices of instructions that threads may come to again.
        shared: variable -> (address in the window, size) without the one of dynamic size.
        dynamic: the extern shared variables, which all begin at the same address.
        local, frames: variable -> (offset, size), in local memory, and of parameters of calls.
        params: parameter of the kernel -> offset.
        globals: the variables of the module that are used.
    """

    module: Module
    entry: Function
    instructions: list[Instruction] = field(default_factory=list)
    functions: dict[str, int] = field(default_factory=dict)
    registers: dict[str, Register] = field(default_factory=dict)
    leaders: set[int] = field(default_factory=set)
    order: list[int] = field(default_factory=list)
    loops: set[int] = field(default_factory=set)
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)
    shared_end: int = SHARED_BASE
    dynamic: list[str] = field(default_factory=list)
    dynamic_base: int = SHARED_BASE
    local: dict[str, tuple[int, int]] = field(default_factory=dict)
    local_bytes: int = 0
    frames: dict[str, tuple[int, int]] = field(default_factory=dict)
    frame_bytes: int = 0
    params: dict[str, int] = field(default_factory=dict)
    param_bytes: int = 0
    globals: list[Variable] = field(default_factory=list)

    @property
    def polls(self) -> bool:
        """Whether threads may wait for what others write to global memory."""
        return any(_may_poll(self.instructions[index].opcode) for index in self.loops)

    @property
    def params_begin_at(self) -> list[int]:
        """Offsets of the kernel's parameters."""
        return list(self.params.values())


def link(module: Module, entry: str) -> Program:
    """Links a kernel of a module.

    Raises:
        HummingError: the module has no such kernel.
    """
    function = module.functions.get(entry)
    if function is None or not function.is_entry:
        known = ", ".join(f.name for f in module.functions.values() if f.is_entry)
        raise HummingError(f"the PTX module has no kernel {entry}; it has {known or 'none'}")
    program = Program(module, function)
    callees = _reachable(module, function)
    for part in callees:
        _append(program, part)
    _place_variables(program, callees)
    _order_blocks(program, callees)
    return program


def _reachable(module: Module, entry: Function) -> list[Function]:
    """The kernel and all functions that it calls or names, callers first."""
    found = {entry.name: entry}
    pending = [entry]
    while pending:
        for name in _symbols(pending.pop().body):
            # Also functions whose address is taken: an indirect call may lead there.
            callee = module.functions.get(name)
            if callee is not None and callee.defined and callee.name not in found:
                found[callee.name] = callee
                pending.append(callee)
    return list(found.values())


def _append(program: Program, function: Function) -> None:
    """Appends the body of a function, with its own registers and variables and absolute labels."""
    start = len(program.instructions)
    program.functions[function.name] = start
    prefix = "" if function is program.entry else f"{function.name}/"

    def linked(operand: Operand) -> Operand:
        if isinstance(operand, Register):
            register = Register(prefix + operand.name, operand.type)
            program.registers[register.name] = register
            return register
        if isinstance(operand, Label):
            return Label(operand.name, operand.index + start)
        if isinstance(operand, Symbol) and operand.name in function.variables:
            return Symbol(prefix + operand.name, operand.offset)
        if isinstance(operand, Address):
            extra = tuple(map(linked, operand.extra))
            return Address(linked(operand.base), operand.offset, extra)
        if isinstance(operand, Vector):
            return Vector(tuple(map(linked, operand.items)))
        if isinstance(operand, Pair):
            return Pair(linked(operand.first), linked(operand.second))
        if isinstance(operand, Not):
            return Not(linked(operand.operand))
        return operand

    for instruction in function.body:
        guard = instruction.guard
        if guard is not None:
            register = linked(guard.register)
            assert isinstance(register, Register)
            guard = replace(guard, register=register)
        operands = tuple(map(linked, instruction.operands))
        program.instructions.append(replace(instruction, operands=operands, guard=guard))
    if not function.body or function.body[-1].opcode.split(".")[0] not in (*_ENDS, "bra"):
        # A body may end without `ret`.
        end = Instruction("ret", (), None, function.line, "(end of the body)")
        program.instructions.append(end)


# -- variables ------------------------------------------------------------------------------------


def _aligned(offset: int, align: int) -> int:
    return -(-offset // align) * align


def _place_variables(program: Program, functions: list[Function]) -> None:
    for parameter in program.entry.params:
        offset = _aligned(program.param_bytes, parameter.align)
        program.params[parameter.name] = offset
        program.param_bytes = offset + (parameter.size_bytes or 0)
    owned = {p.name for p in program.entry.params}
    used = set(_symbols(program.instructions))
    for function in functions:
        prefix = "" if function is program.entry else f"{function.name}/"
        for variable in function.variables.values():
            name = prefix + variable.name
            if function is not program.entry or variable.name not in owned:
                _place(program, replace(variable, name=name))
    pending = sorted(used & set(program.module.variables))
    seen = set(pending)
    while pending:
        variable = program.module.variables[pending.pop()]
        if variable.space in ("global", "const"):
            program.globals.append(variable)
            pointed = {v.name for v in variable.values if isinstance(v, Symbol)}
            pending += sorted(pointed & set(program.module.variables) - seen)
            seen |= pointed
        else:
            _place(program, variable)
    aligns = [program.module.variables[name].align for name in program.dynamic]
    align = max(aligns, default=1)
    # Aligned as it is declared and not by chance more than that.
    base = _aligned(program.shared_end, align)
    program.dynamic_base = base if base // align % 2 or not aligns else base + align


def _place(program: Program, variable: Variable) -> None:
    size = variable.size_bytes
    if variable.space == "shared":
        if size is None:
            program.dynamic.append(variable.name)
            return
        address = _aligned(program.shared_end, variable.align)
        program.shared[variable.name] = (address, size)
        program.shared_end = address + size + _GAP_BYTES
    elif variable.space == "local":
        offset = _aligned(program.local_bytes, max(variable.align, 16))
        program.local[variable.name] = (offset, size or 0)
        program.local_bytes = offset + (size or 0)
    elif variable.space == "param":
        offset = _aligned(program.frame_bytes, max(variable.align, 16))
        program.frames[variable.name] = (offset, size or 0)
        program.frame_bytes = offset + (size or 0)
    else:
        program.globals.append(variable)


def _symbols(instructions: Iterable[Instruction]) -> Iterator[str]:
    pending: list[Operand] = [o for i in instructions for o in i.operands]
    while pending:
        operand = pending.pop()
        if isinstance(operand, Symbol):
            yield operand.name
        elif isinstance(operand, Address):
            pending += [operand.base, *operand.extra]
        elif isinstance(operand, Vector):
            pending += operand.items
        elif isinstance(operand, Pair):
            pending += [operand.first, operand.second]


_STRONG = {"volatile", "relaxed", "acquire", "acq_rel", "mmio"}


def _may_poll(opcode: str) -> bool:
    parts = opcode.split(".")
    shared = any(part.startswith("shared") for part in parts)
    return not shared and (parts[0] == "atom" or (parts[0] == "ld" and bool(_STRONG & {*parts})))


# -- blocks ---------------------------------------------------------------------------------------


def targets_of(instruction: Instruction) -> list[int]:
    """Indices that a branch may go to; nothing for other instructions."""
    if instruction.opcode.split(".")[0] not in ("bra", "brx"):
        return []
    operands = list(instruction.operands)
    operands += [item for o in operands if isinstance(o, Vector) for item in o.items]
    return [operand.index for operand in operands if isinstance(operand, Label)]


def successors(program: Program, index: int) -> list[int]:
    """Indices of the instructions that can follow one, in the same function."""
    instruction = program.instructions[index]
    name = instruction.opcode.split(".")[0]
    found = targets_of(instruction)
    falls = name not in (*_ENDS, "bra", "brx") or instruction.guard is not None
    if falls and index + 1 < len(program.instructions):
        found = [*found, index + 1]
    return found


def _order_blocks(program: Program, functions: list[Function]) -> None:
    count = len(program.instructions)
    starts = set(program.functions.values())
    for index, instruction in enumerate(program.instructions):
        name = instruction.opcode.split(".")[0]
        starts.update(targets_of(instruction))
        if name in ("bra", "brx", "call", *_ENDS) and index + 1 < count:
            starts.add(index + 1)
    program.leaders = starts
    blocks = sorted(starts)
    ends = dict(zip(blocks, [*blocks[1:], count], strict=True))
    follow = {block: successors(program, ends[block] - 1) for block in blocks}
    for component in _components(blocks, follow):
        if len(component) > 1 or component[0] in follow[component[0]]:
            for block in component:
                program.loops.update(range(block, ends[block]))
    # Callees first: the threads in one are to come back before others leave the call behind.
    program.order = [0] * count
    place = 0
    entries = [program.functions[function.name] for function in reversed(functions)]
    bounds = [*sorted(program.functions.values()), count]
    for entry in entries:
        end = bounds[bounds.index(entry) + 1]
        own = [block for block in blocks if entry <= block < end]
        inside = {b: [s for s in follow[b] if entry <= s < end] for b in own}
        for block in _in_order(own, inside, entry):
            for index in range(block, ends[block]):
                program.order[index] = place
                place += 1


def _in_order(nodes: list[int], edges: dict[int, list[int]], entry: int) -> list[int]:
    """A topological order in which each loop, nested ones too, is in one piece."""
    ordered: list[int] = []
    allowed = set(nodes)
    for component in _components(nodes, {n: [s for s in edges[n] if s in allowed] for n in nodes}):
        if len(component) == 1:
            ordered += component
            continue
        inside = set(component)
        entered = {s for n in nodes if n not in inside for s in edges[n] if s in inside}
        head = entry if entry in inside else min(entered or inside)
        # Without the edges back to its head the loop falls apart into what is nested in it.
        cut = {n: [s for s in edges[n] if s in inside and s != head] for n in component}
        ordered += _in_order(sorted(component), cut, head)
    return ordered


def _components(nodes: list[int], edges: dict[int, list[int]]) -> list[list[int]]:
    """Strongly connected components, those that are reached first in front (Tarjan)."""
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[list[int]] = []
    for root in nodes:
        if root in number:
            continue
        work = [(root, iter(edges[root]))]
        number[root] = low[root] = len(number)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, rest = work[-1]
            child = next(rest, None)
            if child is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == number[node]:
                    component = []
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        component.append(member)
                        if member == node:
                            break
                    found.append(component)
            elif child not in number:
                number[child] = low[child] = len(number)
                stack.append(child)
                on_stack.add(child)
                work.append((child, iter(edges[child])))
            elif child in on_stack:
                low[node] = min(low[node], number[child])
    return found[::-1]
