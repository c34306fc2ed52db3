"""Which registers an operand of some type may be (PTX ISA 6.2, 9.4), as the assembler decides it.

A type of bits agrees with every type of its size, an integer with integers of either sign, and a
floating-point type with itself and with bits.
"""

from .ptx_syntax import TYPE_BITS

_FLOATS = ("f16", "f32", "f64")
_BITS = {16: "b16", 32: "b32", 64: "b64", 128: "b128"}


def refusal(kind: str, declared: str, *, wider: bool = False) -> str:
    """What is wrong with a register as an operand; empty if nothing is.

    Args:
        kind: type of the operand.
        declared: type of the register.
        wider: whether it may be wider than the operand, as in ld, st and cvt.
    """
    size, own = TYPE_BITS[kind], TYPE_BITS[declared]
    if (kind == "pred") != (declared == "pred"):
        return f"it is .{declared}, and .{kind} is expected"
    if own < size or (own > size and not wider):
        told = "" if not wider else ", or a wider one,"
        return f"it is .{declared}, and a register of {size} bits{told} is expected"
    if kind == "pred" or (kind[0] == "b" and not kind.startswith("bf16")):
        return ""
    if kind[0] in "us" and not kind.endswith("x2"):
        return f"it is .{declared}, and .{kind} is expected" if declared in _FLOATS else ""
    if declared == _BITS[own] or declared == kind:
        return ""
    return f"it is .{declared}, and .{kind} or .{_BITS[own]} is expected"
