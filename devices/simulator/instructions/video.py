"""Video instructions on bytes and halves of registers (PTX ISA 9.7.18 "Video Instructions").

The SIMD forms with their default selectors and all parts of the result; others are refused.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..decoder import Decoder, Step, instruction
from ..groups import Array

_OPERATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "vadd": np.add,
    "vsub": np.subtract,
    "vabsdiff": lambda a, b: np.abs(a - b),
    "vmin": np.minimum,
    "vmax": np.maximum,
}
_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_TYPES = ("u32", "s32")


def _parts(values: Any, kind: str, bits: int) -> Array:
    """Parts of registers [..., parts], extended by the sign of the type of the operand."""
    raw = np.ascontiguousarray(np.atleast_1d(values)).view(np.uint32)
    letter = "i" if kind == "s32" else "u"
    found: Array = raw.view(np.dtype(f"{letter}{bits // 8}"))
    return found.reshape(*raw.shape, 32 // bits).astype(np.int64)


def _joined(parts: Array, bits: int) -> Array:
    """The low bits of parts, in one register."""
    codes = (parts & (1 << bits) - 1).astype(np.uint64)
    shifts = (np.arange(32 // bits) * bits).astype(np.uint64)
    found: Array = (codes << shifts).sum(axis=-1).astype(np.uint32)
    return found


@instruction(*(f"{name}{parts}" for name in (*_OPERATIONS, "vset") for parts in (2, 4)))
def simd(d: Decoder) -> Step:
    """PTX ISA 9.7.18.5-6: part by part; with .add, the sum of all results and c."""
    bits = 32 // int(d.opcode[-1])
    name = d.opcode[:-1]
    compares = name == "vset"
    modifiers = d.modifiers
    if compares:
        result = "u32"
        kinds = [modifiers.one_of(*_TYPES), modifiers.one_of(*_TYPES)]
        function = _COMPARISONS[modifiers.one_of(*_COMPARISONS)]
        saturates = False
    else:
        result = modifiers.one_of(*_TYPES)
        kinds = [modifiers.one_of(*_TYPES), modifiers.one_of(*_TYPES)]
        function = _OPERATIONS[name]
        saturates = modifiers.flag("sat")
    adds = modifiers.flag("add")
    d.expect(4)
    if saturates and adds:
        d.refuse(f"{d.opcode} has .sat or .add")
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if result == "s32" else (0, (1 << bits) - 1)

    def combined(a: Any, b: Any, c: Any) -> Array:
        found = function(_parts(a, kinds[0], bits), _parts(b, kinds[1], bits)).astype(np.int64)
        if adds:
            total = found.sum(axis=-1) + np.asarray(c).astype(np.int64)
            return (total & 0xFFFFFFFF).astype(np.uint32)
        return _joined(np.clip(found, low, high) if saturates else found, bits)

    sources = [d.source(place, "u32") for place in (1, 2, 3)]
    return d.elementwise(combined, d.target(0, "u32"), *sources)
