"""Mappings whose values are read when they are asked for."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from humming.errors import CheckpointError

T = TypeVar("T")


class Lazy(Mapping[str, T]):
    """Names, each with a value that is made anew whenever it is asked for, and kept nowhere.

    Args:
        names: the keys.
        read: makes the value of a name.
        what: what errors call a name.
        lacking: why names that might be asked for have no value.
    """

    def __init__(
        self,
        names: Iterable[str],
        read: Callable[[str], T],
        what: str,
        lacking: Mapping[str, str] | None = None,
    ) -> None:
        self._names, self._read, self._what = dict.fromkeys(names), read, what
        self._lacking = lacking or {}

    def __getitem__(self, name: str) -> T:
        if name not in self._names:
            why = self._lacking.get(name)
            told = "is not there" if why is None else f"cannot be read: {why}"
            raise UnknownNameError(f"{self._what} {name!r} {told}")
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class UnknownNameError(CheckpointError, KeyError):
    """A checkpoint has nothing of this name; a KeyError to those who ask with `get`."""

    __str__ = CheckpointError.__str__
