"""Rules for which bits of a result are undefined, where that is not all of them.

A rule gets the values of the operands and their undefined bits, None for none, and returns those of
the result. They are used only when something is undefined, so they need not be fast.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..groups import Array

Rule = Callable[[list[Any], list[Array | None]], Array | None]


def filled(values: Sequence[Any], poisons: Sequence[Array | None]) -> list[Array]:
    """The undefined bits as arrays of one shape, zeros where there are none."""
    shape = np.broadcast_shapes(
        *(np.shape(v) for v in values), *(np.shape(p) for p in poisons if p is not None)
    )
    found = []
    for value, poison in zip(values, poisons, strict=True):
        kind = np.asarray(value).dtype
        kind = kind if kind == np.bool_ else np.dtype(f"u{kind.itemsize}")
        part = np.zeros((), kind) if poison is None else poison
        found.append(np.broadcast_to(part, shape))
    return found


def bitwise_and(values: list[Any], poisons: list[Array | None]) -> Array:
    """A defined zero makes the bit of the result defined."""
    (a, b), (pa, pb) = values, filled(values, poisons)
    return (pa | pb) & ~(~a & ~pa) & ~(~b & ~pb)


def bitwise_or(values: list[Any], poisons: list[Array | None]) -> Array:
    """A defined one makes the bit of the result defined."""
    (a, b), (pa, pb) = values, filled(values, poisons)
    return (pa | pb) & ~(a & ~pa) & ~(b & ~pb)


def bitwise(values: list[Any], poisons: list[Array | None]) -> Array:
    """Bits that come of an undefined bit in the same place."""
    found: Array = filled(values, poisons)[0]
    for other in filled(values, poisons)[1:]:
        found = found | other
    return found


def three_inputs(function: Callable[..., Array]) -> Rule:
    """For bitwise functions: bits that change if any undefined bits of the operands do."""

    def rule(values: list[Any], poisons: list[Array | None]) -> Array:
        masks = filled(values, poisons)
        result = function(*values)
        found = np.zeros_like(masks[0])
        for subset in range(1, 1 << len(masks)):
            flipped = [
                value ^ mask if subset >> place & 1 else value
                for place, (value, mask) in enumerate(zip(values, masks, strict=True))
            ]
            found = found | (function(*flipped) ^ result)
        return found

    return rule


def moved(function: Callable[..., Any], data: int = 1) -> Rule:
    """For functions that move bits of the first operands, as the others say.

    Args:
        function: of all operands.
        data: how many operands are moved; if another one is undefined, the result is.
    """

    def rule(values: list[Any], poisons: list[Array | None]) -> Array:
        masks = filled(values, poisons)
        kinds = [np.asarray(value).dtype for value in values]
        parts = [m.view(k) for m, k in zip(map(np.ascontiguousarray, masks), kinds, strict=True)]
        result = np.asarray(function(*parts[:data], *values[data:]))
        if result.dtype != np.bool_:
            result = result.view(np.dtype(f"u{result.dtype.itemsize}"))
        wild = np.zeros(result.shape, np.bool_)
        for mask in masks[data:]:
            wild = wild | (mask != 0)
        ones = np.True_ if result.dtype == np.bool_ else np.iinfo(result.dtype).max
        return np.where(wild, np.array(ones, result.dtype), result)

    return rule


def select(values: list[Any], poisons: list[Array | None]) -> Array:
    """For `selp`: operands a, b and the predicate."""
    masks = filled(values, poisons)
    chosen: Array = np.where(values[2], masks[0], masks[1])
    ones = np.True_ if chosen.dtype == np.bool_ else np.iinfo(chosen.dtype).max
    return np.where(masks[2] != 0, np.array(ones, chosen.dtype), chosen)


def halves(values: list[Any], poisons: list[Array | None]) -> Array:
    """For pairs of 16-bit values: an undefined bit makes its half of the result undefined."""
    found = np.ascontiguousarray(bitwise(values, poisons))
    parts = found.view(np.uint16)
    return np.where(parts != 0, np.uint16(0xFFFF), np.uint16(0)).view(np.uint32)
