"""Decodes instructions into closures: once each, specialized by type and operands.

A module of `instructions/` registers a builder for an opcode, or a family of them:

    @instruction("popc")
    def popc(d: Decoder) -> Step:
        kind = d.modifiers.one_of("b32", "b64")
        d.expect(2)
        return d.elementwise(_count_bits, d.target(0, "u32"), d.source(1, kind))

The builder takes the modifiers that it knows; one that is left over is an error, as is an opcode
without a builder. It returns a `Step`, which the machine calls with a `Group` each time threads are
at the instruction. A step returns None to go on with the next instruction, the index of the step to
jump to, or `STOP` if it has put all threads of the group elsewhere.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from . import availability, operand_types
from .errors import PoisonError, UndefinedBehaviorError, UnknownInstructionError, Where
from .groups import Array, Group
from .memory import fault
from .operands import CLEAN, Modifiers, Source, Target, converted, smear
from .ptx_syntax import (
    TYPE_BITS,
    Address,
    FloatBits,
    Instruction,
    Integer,
    Not,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)
from .registers import STORAGE, RegisterFile, dtype_of

if TYPE_CHECKING:
    from .machine import Machine

Step = Callable[[Group], int | None]
Builder = Callable[["Decoder"], Step]

STOP: Final = -1
"""What a step returns whose threads do not go on together."""

_BUILDERS: dict[str, Builder] = {}
_TOGETHER: dict[str, str] = {}


def instruction(*opcodes: str, together: str = "") -> Callable[[Builder], Builder]:
    """Registers the builder of opcodes; the longest registered beginning of an opcode decides.

    Args:
        opcodes: `ld`, `cp.async.bulk`, with whole parts between the dots.
        together: "warp" if all threads of a warp execute it at once and none may have exited;
            "live" if all that have not exited do. The machine then brings them together first.
    """

    def register(builder: Builder) -> Builder:
        for opcode in opcodes:
            if opcode in _BUILDERS:
                raise ValueError(f"{opcode} has two builders")
            _BUILDERS[opcode] = builder
            _TOGETHER[opcode] = together
        return builder

    return register


def known_opcodes() -> list[str]:
    """The registered opcodes."""
    return sorted(_BUILDERS)


def require_agreement(group: Group, some: Array, others: Array) -> None:
    """Checks that threads of a warp agree at what is marked `.uni`.

    Args:
        group: who executes it.
        some, others: bool [n, 32], those who do something and those who do something else.

    Raises:
        UndefinedBehaviorError: a warp has both.
    """
    split = some.any(axis=1) & others.any(axis=1)
    if split.any():
        told = "threads of a warp disagree at an instruction that is marked uniform"
        raise fault(UndefinedBehaviorError, told, group, some & split[:, None])


class Decoder:
    """Decodes one instruction.

    Attributes:
        machine: the machine that it will run on.
        instruction: what is decoded.
        modifiers: what a builder has to take.
        pc: index of its step.
    """

    def __init__(self, machine: "Machine", inst: Instruction, pc: int) -> None:
        self.machine, self.instruction, self.pc = machine, inst, pc
        self.operands = inst.operands
        parts = inst.opcode.split(".")
        for count in range(len(parts), 0, -1):
            self.opcode = ".".join(parts[:count])
            if self.opcode in _BUILDERS:
                self.modifiers = Modifiers(parts[count:])
                return
        self.refuse("the simulator does not know this instruction")

    def decode(self) -> Step:
        """The step of the instruction, with its guard and the meeting of its threads.

        Raises:
            UnknownInstructionError: no builder, or one that does not know this form.
        """
        self.require(availability.refusal(self.instruction.opcode, len(self.operands), self.arch))
        device = self.machine.options.device
        if device is not None:
            self.require(availability.device_refusal(self.instruction.opcode, device))
        try:
            step = _BUILDERS[self.opcode](self)
        except KeyError as error:
            self.refuse(f"a modifier is missing: {error.args[0]}")
        except IndexError:
            self.refuse("an operand is missing")
        if self.modifiers.left:
            self.refuse(f"the modifiers .{', .'.join(self.modifiers.left)} are not known here")
        together = _TOGETHER[self.opcode]
        if together:
            step = self._together(step, together == "warp")
        return self._guarded(step) if self.instruction.guard is not None else step

    @property
    def arch(self) -> str:
        """The architecture that the module is for, `100a`."""
        return availability.target_of(self.machine.program.module.target)

    @property
    def in_loop(self) -> bool:
        """Whether threads may come to the instruction again."""
        return self.machine.instruction_of[self.pc] in self.machine.program.loops

    def require(self, reason: str) -> None:
        """Refuses the instruction if there is a reason."""
        if reason:
            self.refuse(reason)

    def refuse(self, what: str) -> NoReturn:
        """Raises UnknownInstructionError for this instruction."""
        inst = self.instruction
        listing = self.machine.program.module.listing(inst.line)
        raise UnknownInstructionError(what, Where(inst.line, inst.text, listing=listing))

    def expect(self, *counts: int) -> None:
        """Refuses the instruction unless it has one of these numbers of operands."""
        if len(self.operands) not in counts:
            wanted = " or ".join(map(str, counts))
            self.refuse(f"{self.opcode} with {len(self.operands)} operands; it has {wanted}")

    # -- operands -------------------------------------------------------------------------------

    def source(
        self, operand: int | Operand, kind: str, *, given: str = "", wider: bool = False
    ) -> Source:
        """An operand to read as values of a type.

        Args:
            operand: which.
            kind: the type that its values are computed in.
            given: the type that the instruction gives it, if that is another one.
            wider: whether a wider register is cut to its low bits, as in st and cvt.
        """
        operand = self.operands[operand] if isinstance(operand, int) else operand
        dtype = dtype_of(kind)
        if isinstance(operand, Register):
            self._require_type(operand, given or kind, wider)
            return self._register_source(self.machine.register(operand), dtype)
        if isinstance(operand, Special):
            self.require(availability.register_refusal(operand.name, self.arch))
            values = self.machine.special(operand.name)
            if values is None:
                self.refuse(f"the special register {operand.name} is not known")
            return converted(Source(lambda group: values()[group.rows], CLEAN, None), dtype)
        if isinstance(operand, (Integer, FloatBits)):
            value = self._constant(operand, kind)
            return Source(lambda group: value, CLEAN, dtype)
        if isinstance(operand, Symbol):
            return self._symbol_source(operand, dtype)
        if isinstance(operand, Not) and kind == "pred":
            inner = self.source(operand.operand, kind)
            return Source(lambda group: ~inner.read(group), inner.register, dtype)
        self.refuse(f"an operand of another kind is expected in place of {operand}")

    def _require_type(self, register: Register, kind: str, wider: bool) -> None:
        """Refuses a register that the assembler does not take for an operand of a type."""
        if any(
            isinstance(operand, Vector) and register in operand.items for operand in self.operands
        ):
            # In braces the size counts alone, but for single floating-point numbers.
            kind = f"b{TYPE_BITS[kind]}" if kind[0] in "us" or kind.endswith("x2") else kind
        reason = operand_types.refusal(kind, register.type, wider=wider)
        if reason:
            self.refuse(f"{register.name} does not fit {self.opcode}: {reason}")

    def _register_source(self, register: RegisterFile, dtype: Any) -> Source:
        if register.data.dtype == np.bool_:
            data = register.data
            return Source(lambda group: data[group.rows], register, dtype)
        width = np.dtype(dtype).itemsize
        if width == register.data.itemsize:
            view = register.data.view(dtype)
            return Source(lambda group: view[group.rows], register, dtype)
        data, narrow = register.data, STORAGE[8 * width]
        return Source(
            lambda group: data[group.rows].astype(narrow).view(dtype),
            register,
            dtype,
        )

    def _symbol_source(self, symbol: Symbol, dtype: Any) -> Source:
        """The address of a variable, in its own state space."""
        address = self.machine.address_of(symbol.name)
        if isinstance(address, int):
            value = np.array(address + symbol.offset, np.uint64).astype(dtype)[()]
            return Source(lambda group: value, CLEAN, dtype)
        offset = symbol.offset  # of a shared variable: it contains the rank of the CTA
        return Source(lambda group: (address()[group.rows] + offset).astype(dtype), CLEAN, dtype)

    def _constant(self, operand: Integer | FloatBits, kind: str) -> Any:
        dtype = dtype_of(kind)
        if kind == "pred":
            return np.True_ if isinstance(operand, Integer) and operand.value else np.False_
        bits = TYPE_BITS[kind]
        if isinstance(operand, FloatBits):
            raw = np.array(operand.bits, STORAGE[operand.width])
            if operand.width == 64 and kind == "f32":
                return raw.view(np.float64).astype(np.float32)[()]
            if operand.width != bits:
                self.refuse("a floating-point constant of another width")
            return raw.view(dtype)[()]
        if kind in ("f32", "f64", "f16") and operand.value:
            self.refuse("an integer constant where a floating-point number is expected")
        masked = operand.value & ((1 << bits) - 1)
        return np.array(masked, STORAGE[bits]).view(dtype)[()]

    def target(
        self, operand: int | Operand, kind: str, *, given: str = "", wider: bool = False
    ) -> Target:
        """A register to write values of a type to; arguments as those of `source`."""
        operand = self.operands[operand] if isinstance(operand, int) else operand
        dtype = dtype_of(kind)
        if isinstance(operand, Sink):
            return Target(None, dtype)
        if not isinstance(operand, Register):
            self.refuse(f"a register is expected in place of {operand}")
        self._require_type(operand, given or kind, wider)
        register = self.machine.register(operand)
        width = np.dtype(dtype).itemsize
        if register.data.dtype == np.bool_ or width == register.data.itemsize:
            return Target(register, dtype)
        wide = register.data.itemsize
        return Target(register, dtype, np.dtype(f"{'i' if kind[0] == 's' else 'u'}{wide}").type)

    def sources(
        self, operand: int | Operand, kind: str, *, given: str = "", wider: bool = False
    ) -> list[Source]:
        """The elements of a vector operand, or the one that is no vector."""
        items = self.items(operand)
        return [self.source(item, kind, given=given, wider=wider) for item in items]

    def targets(
        self, operand: int | Operand, kind: str, *, given: str = "", wider: bool = False
    ) -> list[Target]:
        """The same, to write to."""
        items = self.items(operand)
        return [self.target(item, kind, given=given, wider=wider) for item in items]

    def items(self, operand: int | Operand) -> tuple[Operand, ...]:
        """The elements of a vector operand, or the one that is no vector."""
        operand = self.operands[operand] if isinstance(operand, int) else operand
        return operand.items if isinstance(operand, Vector) else (operand,)

    def pair(self, operand: int) -> tuple[Operand, Operand]:
        """Both results of `d|p`; the second is `_` if there is one only."""
        found = self.operands[operand]
        return (found.first, found.second) if isinstance(found, Pair) else (found, Sink())

    def address(self, operand: int | Operand) -> Source:
        """The address (uint64) of `[base + offset]`; reading it requires that it is defined."""
        operand = self.operands[operand] if isinstance(operand, int) else operand
        if not isinstance(operand, Address):
            self.refuse(f"an address is expected in place of {operand}")
        base = operand.base
        width = 64
        if isinstance(base, Register):
            width = self.machine.register(base).bits
            if width not in (32, 64) or base.type[0] == "f":
                self.refuse(f"{base.name} is no register for an address")
        inner = self.source(base, f"u{width}")
        offset = np.uint64(operand.offset & (2**64 - 1))
        wrap = np.uint64(2**width - 1)

        def read(group: Group) -> Array:
            if inner.register.poison is not None:
                poison = inner.poison(group)
                if poison is not None:
                    raise fault(PoisonError, "the address is undefined", group, poison != 0)
            addresses = np.asarray(inner.read(group)).astype(np.uint64)
            if offset:
                addresses = addresses + offset
                if width == 32:
                    addresses &= wrap
            if addresses.ndim == 0:
                addresses = np.full((len(group), 32), addresses, np.uint64)
            return addresses

        return Source(read, CLEAN, np.uint64)

    # -- steps ----------------------------------------------------------------------------------

    def elementwise(
        self,
        function: Callable[..., Any],
        target: Target,
        *sources: Source,
        poison: Callable[..., Array | None] | None = None,
    ) -> Step:
        """A step that computes each thread's result of its own operands.

        Args:
            function: NumPy function of the operands' values.
            target: gets the result.
            sources: the operands.
            poison: (values of the operands, their poison with None for none) -> poison of the
                result; if left out, one undefined bit makes the whole result undefined.
        """
        registers = [s.register for s in sources if s.register is not CLEAN]
        reads = [s.read for s in sources]
        rule = poison or smear(target)

        def dirty(group: Group) -> None:
            values = [read(group) for read in reads]
            tainted = rule(values, [source.poison(group) for source in sources])
            target.put(group, function(*values), tainted)

        put = target.put
        if len(reads) == 1 and len(registers) == 1:
            (read,), (register,) = reads, registers

            def unary(group: Group) -> None:
                if register.poison is None:
                    put(group, function(read(group)))
                else:
                    dirty(group)

            return unary
        if len(reads) == 2 and len(registers) == 2:
            first, second = reads
            r0, r1 = registers

            def binary(group: Group) -> None:
                if r0.poison is None and r1.poison is None:
                    put(group, function(first(group), second(group)))
                else:
                    dirty(group)

            return binary

        def general(group: Group) -> None:
            for register in registers:
                if register.poison is not None:
                    dirty(group)
                    return
            put(group, function(*[read(group) for read in reads]))

        return general

    def _guarded(self, step: Step) -> Step:
        guard = self.instruction.guard
        assert guard is not None
        predicate = self.predicate(guard.register, guard.negated)
        machine, after = self.machine, self.pc + 1
        uniform = "uni" in self.instruction.opcode.split(".")

        def guarded(group: Group) -> int | None:
            chosen = predicate(group)
            if group.mask is not None:
                chosen = chosen & group.mask
            if uniform:
                require_agreement(group, chosen, group.active() & ~chosen)
            if not chosen.any():
                return None
            wanted = group.active()
            if (chosen == wanted).all():
                return step(group)
            lanes = group.spread(chosen)
            action = step(machine.group(lanes))
            if action is None:
                return None
            # The guarded threads went elsewhere; the others go on.
            if action != STOP:
                machine.put(action, lanes)
            machine.put(after, group.spread(~chosen))
            return STOP

        return guarded

    def predicate(self, register: Register, negated: bool) -> Callable[[Group], Array]:
        """Reads a predicate that decides what is executed, so it must be defined."""
        source = self.source(register, "pred")
        read, file = source.read, source.register

        def chosen(group: Group) -> Array:
            if file.poison is not None:
                poison = source.poison(group)
                if poison is not None:
                    told = f"the predicate {register.name} decides what runs, and is undefined"
                    raise fault(PoisonError, told, group, poison)
            found: Array = read(group)
            return ~found if negated else found

        return chosen

    def _together(self, step: Step, whole: bool) -> Step:
        machine, pc, text = self.machine, self.pc, self.opcode

        def together(group: Group) -> int | None:
            if group.mask is not None and not machine.meetings.whole_warps(group, pc, whole, text):
                return STOP
            return step(group)

        return together
