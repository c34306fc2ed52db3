"""Comparison and selection (PTX ISA 9.7.6 and, for half precision, 9.7.7)."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import numerics
from ..decoder import Decoder, Step, instruction
from ..groups import Array, Group
from ..ptx_syntax import Sink
from . import floating, poison

_INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64", "b16", "b32", "b64")
_ORDERED: dict[str, Callable[..., Any]] = {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    # With an unordered pair, these are true.
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
}
_INTEGER: dict[str, Callable[..., Any]] = {
    **{name: _ORDERED[name] for name in ("eq", "lt", "le", "gt", "ge")},
    "ne": np.not_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_COMBINE: dict[str, Callable[..., Any]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _comparison(d: Decoder) -> tuple[Callable[..., Any], str]:
    """The comparison that an opcode names, of operands as they are stored, and their type."""
    name = d.modifiers.one_of(*_ORDERED, "lo", "ls", "hi", "hs")
    flushes = d.modifiers.flag("ftz")
    kind = d.modifiers.left[-1] if d.modifiers.left else ""
    if kind in _INTEGERS:
        d.modifiers.left.pop()
        return _INTEGER[name], kind
    if kind not in floating.FLOATS:
        d.refuse(f"a comparison of {kind or 'nothing'}")
    d.modifiers.left.pop()
    compare = _ORDERED[name]
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):

        def halves(a: Any, b: Any) -> Array:
            found: Array = compare(floating.expand(a, kind), floating.expand(b, kind))
            return found

        return halves, kind
    if flushes and kind == "f32":
        return lambda a, b: compare(numerics.flush(a), numerics.flush(b)), kind
    return compare, kind


@instruction("setp")
def set_predicate(d: Decoder) -> Step:
    """PTX ISA 9.7.6.2: one predicate, or it and its negation, combined with a third one."""
    combine = d.modifiers.one_of(*_COMBINE, default="")
    compare, kind = _comparison(d)
    d.expect(4 if combine else 3)
    stored = floating.storage(kind)
    first, second = d.pair(0)
    sources = [d.source(place, stored, given=kind) for place in (1, 2)]
    if kind.endswith("x2"):
        return _packed_predicates(d, compare, kind, combine)
    target = d.target(first, "pred")
    if not combine and isinstance(second, Sink):
        return d.elementwise(compare, target, *sources)
    other = d.target(second, "pred")
    third = d.source(3, "pred") if combine else None
    function = _COMBINE.get(combine)
    rule = {"and": poison.bitwise_and, "or": poison.bitwise_or}.get(combine, poison.bitwise)

    def step(group: Group) -> None:
        result = np.asarray(compare(sources[0].read(group), sources[1].read(group)))
        bad: Array | None = None
        for source in sources:
            part = source.poison(group)
            if part is not None:
                bad = part != 0 if bad is None else bad | (part != 0)
        inverse, inverse_bad = ~result, bad
        if third is not None and function is not None:
            value, undefined = third.read(group), third.poison(group)
            if bad is not None or undefined is not None:
                inverse_bad = rule([inverse, value], [bad, undefined])
                bad = rule([result, value], [bad, undefined])
            result, inverse = function(result, value), function(inverse, value)
        target.put(group, result, bad)
        other.put(group, inverse, inverse_bad)

    return step


def _packed_predicates(d: Decoder, compare: Any, kind: str, combine: str) -> Step:
    """Two predicates of two pairs: the first of the lower halves, the second of the upper."""
    targets = [d.target(operand, "pred") for operand in d.pair(0)]
    stored = floating.storage(kind)
    sources = [d.source(place, stored, given=kind) for place in (1, 2)]
    third = d.source(3, "pred") if combine else None

    def step(group: Group) -> None:
        result = compare(sources[0].read(group), sources[1].read(group))
        result = np.broadcast_to(result.reshape(-1, 32, 2), (len(group), 32, 2))
        bad = poison.halves([s.read(group) for s in sources], [s.poison(group) for s in sources])
        halves = np.ascontiguousarray(np.broadcast_to(bad, (len(group), 32))).view(np.uint16)
        halves = halves.reshape(len(group), 32, 2) != 0
        for place, target in enumerate(targets):
            value, undefined = result[..., place], halves[..., place]
            if third is not None:
                value = _COMBINE[combine](value, third.read(group))
                part = third.poison(group)
                undefined = undefined if part is None else undefined | part
            target.put(group, value, undefined if undefined.any() else None)

    return step


@instruction("set")
def set_value(d: Decoder) -> Step:
    """PTX ISA 9.7.6.1: all ones, or 1.0, where the comparison holds."""
    combine = d.modifiers.one_of(*_COMBINE, default="")
    name_parts = [p for p in d.modifiers.left if p in ("u32", "s32", "f32", "f16", "bf16")]
    compare, kind = _comparison(d)
    stored = floating.storage(kind)
    if kind.endswith("x2"):
        result = d.modifiers.one_of("f16x2", "bf16x2", "u32", "s32", default=kind)
    else:
        result = d.modifiers.one_of("u16", "u32", "s32", "f32", "f16", "bf16", default="")
    if not result or (not name_parts and not kind.endswith("x2")):
        d.refuse("set without a type of its result")
    d.expect(4 if combine else 3)
    sources = [d.source(place, stored, given=kind) for place in (1, 2)]
    if combine:
        sources.append(d.source(3, "pred"))
    ones: Any = {
        "f32": np.float32(1.0),
        "f16": np.uint16(0x3C00),
        "bf16": np.uint16(0x3F80),
        "f16x2": np.uint16(0x3C00),
        "bf16x2": np.uint16(0x3F80),
        "u16": np.uint16(0xFFFF),
    }.get(result, np.uint16(0xFFFF) if kind.endswith("x2") else np.uint32(0xFFFFFFFF))
    written = {"s32": "u32", "u16": "b16"}.get(result, floating.storage(result))
    target = d.target(0, written, given=result)

    def function(a: Any, b: Any, *rest: Any) -> Array:
        holds = np.asarray(compare(a, b))
        if rest:
            third = np.repeat(rest[0], 2, axis=-1) if kind.endswith("x2") else rest[0]
            holds = _COMBINE[combine](holds, third)
        values = np.where(holds, ones, type(ones)(0))
        return values.view(np.uint32) if kind.endswith("x2") else values

    return d.elementwise(function, target, *sources)


@instruction("selp")
def select(d: Decoder) -> Step:
    """PTX ISA 9.7.6.3: a where the predicate holds, else b."""
    kind = d.modifiers.one_of(
        "b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64"
    )
    d.expect(4)
    sources = [d.source(1, kind), d.source(2, kind), d.source(3, "pred")]
    return d.elementwise(
        lambda a, b, p: np.where(p, a, b), d.target(0, kind), *sources, poison=poison.select
    )


@instruction("slct")
def select_by_sign(d: Decoder) -> Step:
    """PTX ISA 9.7.6.4: a where c is not negative, else b."""
    flushes = d.modifiers.flag("ftz")
    kinds = list(d.modifiers.left)
    if len(kinds) != 2 or kinds[1] not in ("s32", "f32"):
        d.refuse("slct has the type of its operands and s32 or f32")
    d.modifiers.left.clear()
    d.expect(4)
    sources = [d.source(1, kinds[0]), d.source(2, kinds[0]), d.source(3, kinds[1])]

    def function(a: Any, b: Any, c: Any) -> Array:
        return np.where((numerics.flush(c) if flushes else c) >= 0, a, b)

    return d.elementwise(function, d.target(0, kinds[0]), *sources)
