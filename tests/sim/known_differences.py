"""Where a card may give other bits than the simulator, and why: what differs, to the word.

Each entry looks at the memory of a launch and says whether everything that differs is what its
reason is about. A test that is named here and differs in anything else is reported as unexplained.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Memory(NamedTuple):
    """An allocation: its bytes before a launch, and after it in the simulator and on the card."""

    before: np.ndarray
    ours: np.ndarray
    theirs: np.ndarray

    def differing(self, kind: type) -> tuple[np.ndarray, np.ndarray]:
        """The differing elements of both, of an unsigned type."""
        size = len(self.ours) // np.dtype(kind).itemsize * np.dtype(kind).itemsize
        a, b = self.ours[:size].view(kind), self.theirs[:size].view(kind)
        if not np.array_equal(self.ours[size:], self.theirs[size:]):
            raise ValueError("bytes behind the last element differ")
        return a[a != b], b[a != b]


class Known(NamedTuple):
    """A known difference.

    Attributes:
        test: pattern of the names of tests.
        allowed: whether all that differs is of this kind, of (memories, name of the test).
        why: the reason.
    """

    test: str
    allowed: Callable[[Sequence[Memory], str], bool]
    why: str


_NANS = {"f16": (np.uint16, 0x7C00), "bf16": (np.uint16, 0x7F80), "f32": (np.uint32, 0x7F800000)}


def only_nans(kind: str) -> Callable[[Sequence[Memory], str], bool]:
    """What differs are elements of a type that are NaN in both."""
    storage, infinity = _NANS[kind]
    size_mask = storage(np.iinfo(storage).max >> 1)

    def allowed(memories: Sequence[Memory], test: str) -> bool:
        pairs = [m.differing(storage) for m in memories]
        return all(((part & size_mask) > infinity).all() for pair in pairs for part in pair)

    return allowed


def approximately(relative: float, absolute: float) -> Callable[[Sequence[Memory], str], bool]:
    """float32 elements that are close, or NaN in both: approximations with an error."""

    def allowed(memories: Sequence[Memory], test: str) -> bool:
        for memory in memories:
            ours, theirs = (
                part.view(np.float32).astype(np.float64) for part in memory.differing(np.uint32)
            )
            with np.errstate(invalid="ignore"):
                near = np.abs(ours - theirs) <= relative * np.abs(ours) + absolute
            if not (near | (np.isnan(ours) & np.isnan(theirs))).all():
                return False
        return True

    return allowed


def _system_memory_and_time(memories: Sequence[Memory], test: str) -> bool:
    """Eight words: sizes and offsets of shared memory that fit each other, and two of the time."""
    (out,) = (m for m in memories if not np.array_equal(m.ours, m.theirs))
    whole, used, begin, end, _, _, cap, first = out.theirs.view(np.uint32).tolist()
    _, least, *_ = out.ours.view(np.uint32).tolist()
    return used >= least and whole >= used and begin <= first <= end <= max(end, cap)


def _start_of_shared_memory(memories: Sequence[Memory], test: str) -> bool:
    """The first word: an address that is aligned to the 128 bytes that are declared."""
    (out,) = (m for m in memories if not np.array_equal(m.ours, m.theirs))
    ours, theirs = out.ours.view(np.uint32), out.theirs.view(np.uint32)
    return bool(theirs[0] % 128 == 0 and (ours[1:] == theirs[1:]).all())


def _number_of_the_warp(memories: Sequence[Memory], test: str) -> bool:
    """The second of four words of each thread: one number for the threads of a warp."""
    (out,) = (m for m in memories if not np.array_equal(m.ours, m.theirs))
    ours, theirs = (part.view(np.uint32).reshape(-1, 48, 4) for part in (out.ours, out.theirs))
    others = [0, 2, 3]
    if (ours[..., others] != theirs[..., others]).any():
        return False
    first, second = theirs[:, :32, 1], theirs[:, 32:, 1]
    alike = (first == first[:, :1]).all() and (second == second[:, :1]).all()
    return bool(alike and (first[:, 0] != second[:, 0]).all())


def in_some_order(start: int, end: int, steps: Iterable[tuple[int, int]]) -> bool:
    """Whether steps (old value, new value) can all be taken one after the other.

    They are the edges of a graph of values; an order is a path through each of them once, which
    there is if it is connected and every value is left as often as it is come to, but for the
    first and the last one (Euler).
    """
    edges = list(steps)
    balance: dict[int, int] = defaultdict(int)
    near: dict[int, set[int]] = defaultdict(set)
    for old, new in [*edges, (end, start)]:
        balance[old] += 1
        balance[new] -= 1
        near[old].add(new)
        near[new].add(old)
    if any(balance.values()):
        return False
    reached, pending = {start}, [start]
    while pending:
        fresh = near[pending.pop()] - reached
        reached |= fresh
        pending += fresh
    return set(near) <= reached


def _atomics_in_some_order(memories: Sequence[Memory], test: str) -> bool:
    """Each thread saw a value that another one has left, and all took a turn."""
    from test_memory import scalar_rounds

    operation = test.partition("[")[2].partition("-")[0]
    data = next(m for m in memories if len(m.before) == 512)
    cell = next(m for m in memories if len(m.before) == 4)
    given = data.before.view(np.uint32).reshape(64, 2).tolist()
    seen = data.theirs.view(np.uint32).reshape(64, 2)
    if seen[:, 1].tolist() != [w for _, w in given]:
        return False
    olds = seen[:, 0].tolist()
    news = [
        scalar_rounds(operation, old, [v], [w]) for old, (v, w) in zip(olds, given, strict=True)
    ]
    end = int(cell.theirs.view(np.uint32)[0])
    return in_some_order(7, end, zip(olds, news, strict=True))


_OPEN_NAN = (
    "a NaN of another payload: the PTX ISA leaves open which NaN {what} returns (9.7.9.21, 9.7.4)"
)
KNOWN = (
    Known(
        r"test_half_to_float32_is_exact$", only_nans("f32"), _OPEN_NAN.format(what="a widening cvt")
    ),
    Known(r"test_tf32_drops_13_bits", only_nans("f32"), _OPEN_NAN.format(what="cvt to tf32")),
    *(
        Known(
            rf"test_packed_halves_are_two_of_one\[{kind}\]",
            only_nans(kind),
            _OPEN_NAN.format(what="neg"),
        )
        for kind in ("f16", "bf16")
    ),
    Known(
        r"test_dynamic_shared_memory_is_aligned_as_declared_and_no_better",
        _start_of_shared_memory,
        "the address at which shared memory begins is the assembler's choice",
    ),
    Known(
        r"test_special_registers_say_who_runs",
        _number_of_the_warp,
        "%warpid is a place in the SM and not in the CTA (PTX ISA 10.4)",
    ),
    Known(
        r"test_functions_of_one_operand\[tanh\]",
        approximately(2.0**-10, 0),
        "tanh.approx is off by up to 2^-10.987 (PTX ISA 9.7.3.22)",
    ),
    Known(
        r"test_functions_of_one_operand\[(sin|cos|ex2|lg2|rsqrt|rcp|sqrt)\]",
        approximately(2.0**-22, 2.0**-20),
        "approximations, with the errors of PTX ISA 9.7.3.13-21",
    ),
    Known(
        r"test_functions_at_their_ends$",
        approximately(2.0**-22, 2.0**-20),
        "approximations, with the errors of PTX ISA 9.7.3.13-21; where they are exact, they are",
    ),
    Known(
        r"test_activations.py::test_fused\[",
        approximately(2.0**-20, 0),
        "scales of what exponentials came to, which are approximations (PTX ISA 9.7.3.22)",
    ),
    Known(
        r"test_special_registers_of_memory_and_time",
        _system_memory_and_time,
        "the system's part of shared memory, and the time, are the card's own (PTX ISA 10.22-33)",
    ),
    Known(
        r"test_atomic_operations\[",
        _atomics_in_some_order,
        "threads reach an address in an order of the card's own; what they saw fits one",
    ),
)


def reason(test: str, memories: Sequence[Memory]) -> str:
    """Why a launch of a test may differ as it does; "" if nothing explains it."""
    for known in KNOWN:
        if re.search(known.test, test):
            try:
                if known.allowed(memories, test):
                    return known.why
            except ValueError:
                continue
    return ""
