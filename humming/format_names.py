"""How the names of formats are read: a dtype and parts that follow it, or a well-known name.

`uint4_g64_zp` is the dtype uint4 and the parts g64 and zp; `mxfp4` is a name of its own. What the
parts mean is said by whoever owns the format, as rows of `Part`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

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

    def fields(self, text: str) -> dict[str, Any]:
        """The fields that a text of this pattern stands for."""
        match = re.fullmatch(self.pattern, text)
        return self.read(match) if match else {}


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


@dataclass(frozen=True)
class Parts(Generic[_Spec]):
    """What may follow a dtype in the names of one kind of format.

    Attributes:
        what: the kind, for errors: "weight format".
        known: the parts there are.
        foreign: the other kind of format and its parts, which people confuse with these.
        make: the description of a dtype with the fields that are given.
    """

    what: str
    known: Sequence[Part]
    foreign: tuple[str, Sequence[Part]]
    make: Callable[[DataType, dict[str, Any]], _Spec]

    def read(self, text: str, dtype: DataType, parts: list[str]) -> _Spec:
        """The description that the dtype and the parts of a name stand for.

        Raises:
            UnsupportedError: a part is unknown, gives a field that another part gave already, or
                cannot follow this dtype; the message lists those that can.
        """
        asked = f"{self.what} {text!r}"
        rows = [_row(part, self.known) for part in parts]
        # A dtype that is no good alone has the reason that matters.
        self._make(asked, dtype, {}, [])
        values: dict[str, Any] = {}
        for part, row in zip(parts, rows, strict=True):
            if row is None:
                raise self._unknown(asked, part, dtype)
            found = row.fields(part)
            if twice := sorted(found.keys() & values.keys()):
                why = f"its part {part!r} gives {twice[0]} a second time"
                raise UnsupportedError(asked, why, "Give each property once.")
            values |= found
        return self._make(asked, dtype, values, [row for row in rows if row])

    def _make(
        self, asked: str, dtype: DataType, values: dict[str, Any], rows: Sequence[Part]
    ) -> _Spec:
        try:
            return self.make(dtype, values)
        except UnsupportedError as error:
            strange = any(self._made(row, dtype) is None for row in rows)
            possible = f"{error.possible} {self._told(dtype)}" if strange else error.possible
            # A refusal names the text that was given rather than the fields it stands for.
            raise UnsupportedError(asked, error.why, possible) from None

    def _unknown(self, asked: str, part: str, dtype: DataType) -> UnsupportedError:
        others, rows = self.foreign
        if _row(part, rows):
            why = f"its part {part!r} is one of {others}s"
            return UnsupportedError(asked, why, self._told(dtype))
        examples = [row.example for row in self.known if self._made(row, dtype)]
        return UnsupportedError(asked, f"its part {part!r} is unknown", suggest(part, examples))

    def _made(self, row: Part, dtype: DataType) -> _Spec | None:
        """The description of a dtype with one kind of part; None if that cannot follow it."""
        try:
            return self.make(dtype, row.fields(row.example))
        except UnsupportedError:
            return None

    def _told(self, dtype: DataType) -> str:
        """The parts that can follow a dtype and make a difference."""
        without = (None, self.make(dtype, {}))
        told = [row.example for row in self.known if self._made(row, dtype) not in without]
        return f"{dtype} takes {', '.join(told)}." if told else f"Nothing can follow {dtype}."


def _row(part: str, known: Sequence[Part]) -> Part | None:
    return next((row for row in known if re.fullmatch(row.pattern, part)), None)
