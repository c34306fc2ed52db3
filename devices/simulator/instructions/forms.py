"""Which combinations of modifiers there are: what the assembler takes, and NVRTC does not check.

Each function says what is wrong with a form, or returns "".
"""

_HALVES = ("f16", "bf16")
_PACKED_HALVES = ("f16x2", "bf16x2")
_FLOATS = ("f16", "bf16", "f32", "f64")
_BITS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}
_BYTES = ("e4m3", "e5m2")
_F8F6F4 = (*_BYTES, "e3m2", "e2m3", "e2m1")


# -- cvt (PTX ISA 9.7.9.21) -----------------------------------------------------------------------


def conversion(
    to: str, of: str, rounding: str, *, ftz: bool, sat: bool, finite: bool, relu: bool
) -> str:
    """What is wrong with a conversion between single values.

    Args:
        to, of: types of the result and the operand.
        rounding: rn, rni, ...; "" if none is given.
        ftz, sat, finite, relu: whether .ftz, .sat, .satfinite and .relu are.
    """
    if of == "tf32":
        return "there is no conversion from tf32"
    to_float, of_float = to in (*_FLOATS, "tf32"), of in _FLOATS
    if ftz and "f32" not in (to, of):
        return ".ftz is for conversions from or to f32"
    if ftz and not (to_float or of_float):
        return ".ftz is for floating-point types"
    wrong = _rounding_of(to, of, rounding)
    if wrong:
        return wrong
    if finite or relu:
        if of != "f32" or to not in (*_HALVES, "tf32"):
            return ".relu and .satfinite are for conversions from f32 to f16, bf16 or tf32"
        if rounding not in ("rn", "rz") and (relu or rounding != "rna"):
            return f".relu and .satfinite do not go with .{rounding}"
    if sat and (to == "tf32" or (to == "bf16" and of_float)):
        return f"there is no .sat to {to}"
    return ""


def _rounding_of(to: str, of: str, rounding: str) -> str:
    """What is wrong with the rounding."""
    to_float, of_float = to in (*_FLOATS, "tf32"), of in _FLOATS
    integral = ("rni", "rzi", "rmi", "rpi")
    plain = ("rn", "rz", "rm", "rp")
    if not to_float and not of_float:
        return f"a conversion of integers has no rounding .{rounding}" if rounding else ""
    if not to_float:
        wanted: tuple[str, ...] = integral
    elif not of_float:
        wanted = plain
    elif to == "tf32":
        wanted = ("rn", "rz", "rna")
    elif to == of:
        return _one_of(rounding, ("", *integral), to, of)
    elif {to, of} == set(_HALVES):
        return _one_of(rounding, ("", *plain), to, of)
    elif _BITS[to] > _BITS[of]:
        return _one_of(rounding, ("",), to, of)
    else:
        wanted = plain
    if not rounding:
        return f"cvt.{to}.{of} needs a rounding: {', '.join(f'.{w}' for w in wanted)}"
    return _one_of(rounding, wanted, to, of)


def _one_of(rounding: str, wanted: tuple[str, ...], to: str, of: str) -> str:
    if rounding in wanted:
        return ""
    given = f".{rounding}" if rounding else "without rounding"
    known = ", ".join(f".{w}" if w else "none" for w in wanted)
    return f"cvt.{to}.{of} {given}: its roundings are {known}"


def packed_conversion(
    to: str,
    of: str,
    rounding: str,
    *,
    ftz: bool,
    sat: bool,
    finite: bool,
    relu: bool,
    scaled: bool,
) -> str:
    """What is wrong with a conversion to two values in one register; see `conversion`."""
    name, inner = to.removesuffix("x2"), of.removesuffix("x2")
    if ftz or sat:
        return f"cvt to {to} has no {'.ftz' if ftz else '.sat'}"
    if name in _HALVES:
        if of == "f32":
            wanted: tuple[str, ...] = ("rn", "rz")
        else:
            wanted = ("rn",)
            if finite:
                return f"cvt.{to}.{of} has no .satfinite"
            if inner == "ue8m0" and (name != "bf16" or relu or scaled):
                return "ue8m0x2 is converted to bf16x2, without .relu and scales"
        if scaled and (name != "bf16" or of == "f32"):
            return "scaled conversions are to bf16x2 from narrow types, or to narrow types"
    elif name == "ue8m0":
        wanted = ("rz", "rp")
        if relu or scaled or of not in ("f32", "bf16x2"):
            return "cvt to ue8m0x2 is from f32 or bf16x2, without .relu and scales"
    else:
        wanted = ("rn",)
        if of not in ("f32", *_PACKED_HALVES):
            return f"a conversion from {of} to {to}"
        if not finite and name != "ue5m3":
            return f"cvt to {to} needs .satfinite"
    return _one_of(rounding, wanted, to, of)


# -- mma.sync (PTX ISA 9.7.14.5.14) ---------------------------------------------------------------

_SHAPES: dict[str, tuple[str, ...]] = {
    "f16": ("m16n8k8", "m16n8k16"),
    "bf16": ("m16n8k8", "m16n8k16"),
    "tf32": ("m16n8k4", "m16n8k8"),
    "8-bit float": ("m16n8k16", "m16n8k32"),
    "f8f6f4": ("m16n8k32",),
    "8-bit integer": ("m8n8k16", "m16n8k16", "m16n8k32"),
    "4-bit integer": ("m8n8k32", "m16n8k32", "m16n8k64"),
    "b1": ("m8n8k128", "m16n8k128", "m16n8k256"),
    "f64": ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"),
}
_FAMILIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # types of A and B, and of the accumulator
    "f16": (("f16",), ("f16", "f32")),
    "bf16": (("bf16",), ("f32",)),
    "tf32": (("tf32",), ("f32",)),
    "8-bit float": (_BYTES, ("f16", "f32")),
    "f8f6f4": (_F8F6F4, ("f16", "f32")),
    "8-bit integer": (("s8", "u8"), ("s32",)),
    "4-bit integer": (("s4", "u4"), ("s32",)),
    "b1": (("b1",), ("s32",)),
    "f64": (("f64",), ("f64",)),
}


_SPARSE_SHAPES: dict[str, tuple[str, ...]] = {
    # PTX ISA 9.7.14.6.3
    "f16": ("m16n8k16", "m16n8k32"),
    "bf16": ("m16n8k16", "m16n8k32"),
    "tf32": ("m16n8k8", "m16n8k16"),
    "8-bit float": ("m16n8k64",),
    "f8f6f4": ("m16n8k64",),
    "8-bit integer": ("m16n8k32", "m16n8k64"),
    "4-bit integer": ("m16n8k64", "m16n8k128"),
}


def sparse_product(
    shape: str, types: list[str], *, f8f6f4: bool, saturates: bool, ordered: bool
) -> str:
    """What is wrong with an `mma.sp`; `ordered` is whether it is `mma.sp::ordered_metadata`."""
    wrong = product(shape, types, f8f6f4=f8f6f4, saturates=saturates, sparse=True)
    narrow = len(types) == 4 and types[1] in _F8F6F4
    if not wrong and narrow and not ordered and (f8f6f4 or types[0] == "f16"):
        told = f"mma.sp.{shape}.{'.'.join(types)}"
        return f"{told}: .kind::f8f6f4 and sums in f16 are for mma.sp::ordered_metadata"
    return wrong


def product(
    shape: str,
    types: list[str],
    *,
    f8f6f4: bool,
    saturates: bool,
    bitwise: bool = False,
    popc: bool = False,
    sparse: bool = False,
) -> str:
    """What is wrong with an `mma.sync`.

    Args:
        shape: m16n8k16.
        types: of D, A, B and C.
        f8f6f4: whether .kind::f8f6f4 is given.
        saturates: whether .satfinite is.
        bitwise, popc: whether .xor or .and, and .popc are.
        sparse: whether it is an `mma.sp`.
    """
    shapes = _SPARSE_SHAPES if sparse else _SHAPES
    told = f"{'mma.sp' if sparse else 'mma'}.{shape}.{'.'.join(types)}"
    if len(types) != 4:
        return "mma has the types of D, A, B and C"
    d, a, b, c = types
    names = [
        name
        for name, (elements, _) in _FAMILIES.items()
        if a in elements and b in elements and (name == "f8f6f4") == f8f6f4 and name in shapes
    ]
    if not names:
        if not f8f6f4 and {a, b} <= set(_F8F6F4):
            return f"{told} needs .kind::f8f6f4"
        return f"{told}: there is no product of {a} and {b}"
    family = names[0]
    accumulators = _FAMILIES[family][1]
    if d not in accumulators or c != d:
        both = " or ".join(accumulators)
        return f"{told}: C and D are both {both}"
    if shape not in shapes[family]:
        return f"{told}: the shapes for {a} and {b} are {', '.join(shapes[family])}"
    if saturates and not family.endswith("integer"):
        return f"{told}: .satfinite is for integers of 8 and 4 bits"
    if (family == "b1") != bitwise or bitwise != popc:
        return f"{told}: .xor.popc and .and.popc are for b1, which needs one"
    return ""


# -- ldmatrix and stmatrix (PTX ISA 9.7.14.5.15-16) -----------------------------------------------


def matrix_load(shape: str, transposed: bool, kind: str, packed: str) -> str:
    """What is wrong with an `ldmatrix`: its shape, .trans and the types in registers and memory."""
    told = (
        f"ldmatrix.{shape}{'.trans' if transposed else ''}.{'.'.join(filter(None, (kind, packed)))}"
    )
    unpacks = kind == "b8x16" and packed in ("b4x16_p64", "b6x16_p32")
    if shape == "m8n8":
        return "" if (kind, packed) == ("b16", "") else f"{told}: m8n8 has .b16"
    if shape == "m8n16":
        if transposed:
            return f"{told}: m8n16 has no .trans"
        if not unpacks and (kind, packed) != ("s8", "s4"):
            return f"{told}: m8n16 has .b8x16.b4x16_p64, .b8x16.b6x16_p32 or .s8.s4"
        return ""
    if not transposed:
        return f"{told}: m16n16 needs .trans"
    if not unpacks and (kind, packed) != ("b8", ""):
        return f"{told}: m16n16 has .b8, .b8x16.b4x16_p64 or .b8x16.b6x16_p32"
    return ""


# -- atom and red (PTX ISA 9.7.13.11-12) ----------------------------------------------------------

_INTEGERS = ("u32", "u64", "s32", "s64")
_ATOMICS: dict[str, tuple[str, ...]] = {
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
    "cas": ("b16", "b32", "b64", "b128"),
    "exch": ("b32", "b64", "b128"),
    "add": ("u32", "u64", "s32", "f32", "f64", *_HALVES, *_PACKED_HALVES),
    "inc": ("u32",),
    "dec": ("u32",),
    "min": (*_INTEGERS, *_HALVES, *_PACKED_HALVES),
    "max": (*_INTEGERS, *_HALVES, *_PACKED_HALVES),
}


def atomic(opcode: str, operation: str, kind: str, count: int, space: str, noftz: bool) -> str:
    """What is wrong with an `atom` or `red`: its operation, type, vector, space and .noftz."""
    told = f"{opcode}.{operation}.{kind}"
    if opcode == "red" and operation in ("exch", "cas"):
        return f"{told}: red has no .{operation}"
    if kind not in _ATOMICS[operation]:
        return f"{told}: .{operation} is for {', '.join(_ATOMICS[operation])}"
    half = kind in (*_HALVES, *_PACKED_HALVES)
    if half != noftz:
        return f"{told} {'needs' if half else 'has no'} .noftz"
    if count == 1:
        return f"{told} is for vectors" if half and operation != "add" else ""
    if space.startswith("shared"):
        return f"{told}: vectors are in global memory"
    sizes = (2, 4, 8) if kind in _HALVES else (2, 4) if half or kind == "f32" else ()
    return "" if count in sizes else f"{told}: there is no vector of {count}"


# -- memory order (PTX ISA 8.3, 9.7.9.8-11) -------------------------------------------------------

_ORDERS = {
    "ld": ("weak", "volatile", "relaxed", "acquire"),
    "ldu": (),
    "st": ("weak", "volatile", "relaxed", "release"),
    "atom": ("relaxed", "acquire", "release", "acq_rel"),
    "red": ("relaxed", "release"),
}


def order(opcode: str, orders: list[str], scopes: list[str], mmio: bool) -> str:
    """What is wrong with the memory order of an access: what it synchronizes, and with whom."""
    told = ".".join([opcode, *orders, *scopes])
    if len(orders) > 1 or len(scopes) > 1:
        return f"{told} has several orders or scopes"
    sem, scope = (orders or [""])[0], (scopes or [""])[0]
    if sem and sem not in _ORDERS[opcode]:
        return f"{told}: {opcode} has no .{sem}"
    if mmio and (opcode not in ("ld", "st") or (sem, scope) != ("relaxed", "sys")):
        return f"{told}: .mmio is for ld and st with .relaxed.sys"
    if opcode in ("ld", "st"):
        ordered = sem in ("relaxed", "acquire", "release")
        if ordered and not scope:
            return f"{told} needs a scope"
        if scope and not ordered:
            return f"{told}: a scope needs .relaxed, .acquire or .release"
    return ""
