"""How the names of formats are read: a dtype and parts that follow it, or a well-known name.

`uint4_g64_zp` is the dtype uint4 and the parts g64 and zp; `mxfp4` is a name of its own. What the
parts mean is said by whoever owns the format, as rows of `Part`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

from humming.dtypes import UNKNOWN_NAME, DataType, suggest
from humming.errors import UnsupportedError


class _Described(Protocol):
    @property
    def dtype(self) -> DataType: ...


_Spec = TypeVar("_Spec", bound=_Described)


class Part(NamedTuple):
    """One kind of part: its pattern, an example, and the fields that a match stands for."""

    pattern: str
    example: str
    read: Callable[["re.Match[str]"], dict[str, Any]]


def split_name(
    what: str, text: str, named: Mapping[str, _Spec], known: Sequence[str]
) -> tuple[_Spec | None, DataType, list[str]]:
    """The dtype at the head of a name and the parts after it; or else what has this very name.

    Args:
        what: what the name is of, for errors: "weight format".
        text: the name; case does not matter.
        named: the names that are not made of parts.
        known: names to suggest when this one is unknown, the usual ones first.

    Raises:
        UnsupportedError: no dtype and no known name starts it, or parts follow a known name.
    """
    if not isinstance(text, str):
        raise UnsupportedError(f"{what} {text!r}", "it is no string", "Give e.g. 'int8'.")
    name = text.strip().lower()
    words = name.split("_")
    refusal: UnsupportedError | None = None
    # The longest head first: dtypes such as fp8_e4m3 hold an underscore themselves.
    for length in range(len(words), 0, -1):
        head, parts = "_".join(words[:length]), words[length:]
        if head in named:
            if parts:
                raise UnsupportedError(
                    f"{what} {text!r}",
                    f"{head} says everything already, {'_'.join(parts)!r} would change it",
                    f"Use {head!r}, or spell the format out from its dtype on: "
                    f"{str(named[head].dtype)!r} and its parts.",
                )
            return named[head], named[head].dtype, []
        try:
            return None, DataType.parse(head), parts
        except UnsupportedError as error:
            # A reason of its own says more than that the rest of the name is unknown.
            if refusal is None or refusal.why == UNKNOWN_NAME:
                refusal = error
    if refusal is None or refusal.why == UNKNOWN_NAME:
        why = f"{words[0]!r}, which it starts with, is no dtype and no known format"
        raise UnsupportedError(f"{what} {text!r}", why, suggest(name, known))
    raise UnsupportedError(f"{what} {text!r}", refusal.why, refusal.possible)


def read_parts(what: str, text: str, parts: list[str], known: Sequence[Part]) -> dict[str, Any]:
    """The field values that the parts of a name stand for.

    Raises:
        UnsupportedError: a part is unknown, or gives a field that another part gave already.
    """
    values: dict[str, Any] = {}
    for part in parts:
        matches = ((re.fullmatch(row.pattern, part), row.read) for row in known)
        found = next((read(match) for match, read in matches if match), None)
        if found is None:
            examples = [row.example for row in known]
            why = f"its part {part!r} is unknown"
            raise UnsupportedError(f"{what} {text!r}", why, suggest(part, examples))
        twice = sorted(found.keys() & values.keys())
        if twice:
            raise UnsupportedError(
                f"{what} {text!r}",
                f"its part {part!r} gives {twice[0]} a second time",
                "Give each property once.",
            )
        values |= found
    return values


@contextmanager
def asked(what: str, text: str) -> Iterator[None]:
    """Let a refusal name the text that was given rather than the fields it stands for."""
    try:
        yield
    except UnsupportedError as error:
        raise UnsupportedError(f"{what} {text!r}", error.why, error.possible) from None
