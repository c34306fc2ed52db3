"""What `cp.reduce.async.bulk` and `red.async` do with memory, many elements at once."""

from collections.abc import Callable
from typing import Any

import numpy as np

from . import numerics
from .groups import Array

FLOATS = {"f16": np.uint16, "bf16": np.uint16, "f32": np.float32, "f64": np.float64}
INTEGERS = {
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
    "b32": np.uint32,
    "b64": np.uint64,
}

_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "inc": lambda old, new: np.where(old >= new, 0, old + 1),
    "dec": lambda old, new: np.where((old == 0) | (old > new), new, old - 1),
}
OPERATIONS = tuple(_OPERATIONS)
"""Names of the operations."""
_FLOAT_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "min": np.fmin,
    "max": np.fmax,
}


def allowed(operation: str, kind: str) -> bool:
    """Whether the PTX ISA has an operation for a type."""
    if kind in FLOATS:
        return operation == "add" or (operation in ("min", "max") and kind in ("f16", "bf16"))
    if operation in ("and", "or", "xor"):
        return kind in ("b32", "b64")
    if operation in ("inc", "dec"):
        return kind == "u32"
    return kind in ("u32", "s32", "u64", "s64")


def reduced(operation: str, kind: str, old: Array, new: Array) -> Array:
    """Bytes (uint8, contiguous) of `old` combined with `new` element by element.

    Args:
        operation: one of `OPERATIONS`.
        kind: PTX type of the elements.
        old, new: bytes of the elements, of the same shape.
    """
    if kind in INTEGERS:
        dtype = INTEGERS[kind]
        values = _OPERATIONS[operation](old.view(dtype), new.view(dtype)).astype(dtype)
        return np.ascontiguousarray(values).view(np.uint8)
    function = _FLOAT_OPERATIONS[operation]
    if kind in ("f32", "f64"):
        values = function(old.view(FLOATS[kind]), new.view(FLOATS[kind]))
        return np.ascontiguousarray(values).view(np.uint8)
    left, right = (numerics.decode(part.view(np.uint16), kind) for part in (old, new))
    codes = numerics.encode(function(left, right), kind).astype(np.uint16)
    return np.ascontiguousarray(codes).view(np.uint8)
