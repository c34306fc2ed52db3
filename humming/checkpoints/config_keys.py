"""Reading the keys of a quantization config one by one, so that none passes unread."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from humming.errors import CheckpointError

_Value = TypeVar("_Value")
_MISSING = object()


class ConfigKeys:
    """The keys of a mapping, each of which has to be taken before `finish`.

    Args:
        values: what a JSON file holds.
        where: the file and the place in it, for errors.

    Raises:
        CheckpointError: the values are no mapping.
    """

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, Mapping):
            raise CheckpointError(
                f"{where}: {_shown(values)} stands where keys and values are expected"
            )
        self._values, self.where = dict(values), where
        self._taken: set[str] = set()

    def __contains__(self, key: object) -> bool:
        return self._values.get(key) is not None

    def take(
        self, key: str, kind: type[_Value] | tuple[type[_Value], ...], default: Any = _MISSING
    ) -> Any:
        """The value of a key; the default where it is absent or null.

        Raises:
            CheckpointError: it is of another type, or absent without a default.
        """
        self._taken.add(key)
        value = self._values.get(key)
        if value is None:
            if default is _MISSING:
                raise CheckpointError(f"{self.where}: {key!r} is missing")
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise CheckpointError(f"{self.where}: {key!r} is {_shown(value)}, no {expected}")
        return value

    def one_of(self, key: str, allowed: tuple[str, ...], default: Any = _MISSING) -> Any:
        """A string among some, in lower case.

        Raises:
            CheckpointError: it is another.
        """
        value = self.take(key, str, default)
        if isinstance(value, str) and value.lower() in allowed:
            return value.lower()
        if value is default:
            return value
        raise CheckpointError(
            f"{self.where}: {key!r} is {_shown(value)}; possible: {', '.join(allowed)}"
        )

    def strings(self, *keys: str) -> tuple[str, ...]:
        """The strings of lists that may be absent or null, one list after the other.

        Raises:
            CheckpointError: a value is no list of strings.
        """
        found: list[str] = []
        for key in keys:
            value = self.take(key, (list, tuple), ())
            if not all(isinstance(entry, str) for entry in value):
                raise CheckpointError(f"{self.where}: {key!r} holds more than strings")
            found += value
        return tuple(found)

    def empty(self, *keys: str, because: str) -> None:
        """Refuse keys that hold anything.

        Raises:
            CheckpointError: with the reason.
        """
        for key in keys:
            self._taken.add(key)
            if self._values.get(key) not in (None, False, "", [], {}):
                raise CheckpointError(
                    f"{self.where}: {key!r} is {_shown(self._values[key])}: {because}"
                )

    def ignore(self, *keys: str) -> None:
        """Pass over keys that change nothing in the weights."""
        self._taken.update(keys)

    def finish(self) -> None:
        """Refuse every key that was not taken.

        Raises:
            CheckpointError: with the nearest known key.
        """
        unknown = sorted(str(key) for key in self._values.keys() - self._taken)
        if unknown:
            near = get_close_matches(unknown[0], self._taken, n=1)
            hint = f"; did you mean {near[0]!r}" if near else ""
            raise CheckpointError(
                f"{self.where}: the key {unknown[0]!r} is unknown, and may change the weights{hint}"
            )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
