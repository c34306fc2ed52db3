"""The parts of a PTX module, as the parser makes them and the decoder reads them."""

from dataclasses import dataclass, field

# Width in bits of each fundamental type, and of the packed ones that instructions name.
TYPE_BITS = {
    "pred": 1,
    "b8": 8,
    "u8": 8,
    "s8": 8,
    "b16": 16,
    "u16": 16,
    "s16": 16,
    "f16": 16,
    "bf16": 16,
    "b32": 32,
    "u32": 32,
    "s32": 32,
    "f32": 32,
    "f16x2": 32,
    "bf16x2": 32,
    "u16x2": 32,
    "s16x2": 32,
    "tf32": 32,
    "b64": 64,
    "u64": 64,
    "s64": 64,
    "f64": 64,
    "f32x2": 64,
    "b128": 128,
}


@dataclass(frozen=True, slots=True)
class Register:
    """A register of a function; `name` is unique in it, `type` is that of its declaration."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as `%tid.x`."""

    name: str


@dataclass(frozen=True, slots=True)
class Integer:
    """An integer immediate, of any sign."""

    value: int


@dataclass(frozen=True, slots=True)
class FloatBits:
    """A floating-point immediate by its bits, of 32 or 64 bits."""

    bits: int
    width: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """The name of a variable or function, with a byte offset.

    Attributes:
        shift: in an initial value, the bits of the address below those that are taken.
    """

    name: str
    offset: int = 0
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Label:
    """A place in the body: the index of the instruction that it stands before."""

    name: str
    index: int


@dataclass(frozen=True, slots=True)
class Address:
    """`[base + offset]`, or with `[base, {x, y}]` what follows the base in `extra`."""

    base: "Operand"
    offset: int = 0
    extra: tuple["Operand", ...] = ()


@dataclass(frozen=True, slots=True)
class Vector:
    """`{a, b, ...}`, or the parenthesized lists of a call."""

    items: tuple["Operand", ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """`first|second`: two results."""

    first: "Operand"
    second: "Operand"


@dataclass(frozen=True, slots=True)
class Not:
    """`!p`: a negated predicate."""

    operand: "Operand"


@dataclass(frozen=True, slots=True)
class Sink:
    """`_`: a result that nobody wants, or an operand that is left out."""


Operand = (
    Register | Special | Integer | FloatBits | Symbol | Label | Address | Vector | Pair | Not | Sink
)


@dataclass(frozen=True, slots=True)
class Guard:
    """`@p` or `@!p` in front of an instruction."""

    register: Register
    negated: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: with all its modifiers, `ld.global.v4.u32`.
        operands: in the order of the text.
        guard: its predicate, None if it has none.
        line: line of the text, counted from 1.
        text: the line itself, without indentation.
    """

    opcode: str
    operands: tuple[Operand, ...]
    guard: Guard | None
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable in a state space.

    Attributes:
        name: unique in its function, or in the module.
        space: global, const, shared, local or param.
        type: of its elements.
        align: in bytes.
        size_bytes: None for an array whose size the launch decides.
        values: initial elements, integers by their bits or symbols; the rest is zero.
        extern: declared here and defined elsewhere.
    """

    name: str
    space: str
    type: str
    align: int
    size_bytes: int | None
    values: tuple["int | Symbol", ...] = ()
    extern: bool = False


@dataclass(slots=True)
class Function:
    """A kernel or a device function.

    Attributes:
        name: as it is called.
        is_entry: whether it is a kernel.
        params, results: variables of the param space.
        registers: every register of the body, by name.
        variables: of the body: shared, local and param.
        body: instructions; labels in operands are indices into it.
        labels: index -> names of the labels there.
        limits: performance directives, `maxntid` -> (512, 1, 1).
    """

    name: str
    is_entry: bool
    params: tuple[Variable, ...] = ()
    results: tuple[Variable, ...] = ()
    registers: dict[str, Register] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    body: list[Instruction] = field(default_factory=list)
    labels: dict[int, list[str]] = field(default_factory=dict)
    limits: dict[str, tuple[int, ...]] = field(default_factory=dict)
    line: int = 0
    defined: bool = False


def listing(lines: list[str], line: int, around: int = 3) -> str:
    """The lines of a text around one, counted from 1, with their numbers, that one marked."""
    first = max(1, line - around)
    last = min(len(lines), line + around)
    return "\n".join(
        f"  {'>' if number == line else ' '} {number:5d} | {lines[number - 1].rstrip()}"
        for number in range(first, last + 1)
    )


@dataclass(slots=True)
class Module:
    """A PTX module.

    Attributes:
        version: (major, minor) of the PTX ISA.
        target: architecture, `sm_90a`.
        variables: of module scope, by name.
        functions: kernels and device functions, by name.
        lines: the text.
    """

    version: tuple[int, int] = (0, 0)
    target: str = ""
    address_bits: int = 64
    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def listing(self, line: int, around: int = 3) -> str:
        """The lines around one, with their numbers, that one marked."""
        return listing(self.lines, line, around)
