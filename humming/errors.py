"""The errors of humming: what was asked, why not, and what is possible."""

import logging
from threading import Lock


class HummingError(Exception):
    """Root of every error that humming raises on purpose."""


class UnsupportedError(HummingError, ValueError):
    """A request that cannot be served: an unknown name, a bad shape, a device that lacks something.

    Args:
        asked: what the caller asked for.
        why: why that is not possible.
        possible: what is possible instead, as a sentence.
    """

    def __init__(self, asked: str, why: str, possible: str) -> None:
        super().__init__(asked, why, possible)
        self.asked, self.why, self.possible = asked, why, possible

    def __str__(self) -> str:
        return f"{self.asked}: {self.why}. {self.possible}"


class WrongTypeError(UnsupportedError, TypeError):
    """An argument of another kind than is asked for; a TypeError to those who catch these."""


def check_type(
    asked: str, name: str, value: object, kinds: type | tuple[type, ...], possible: str
) -> None:
    """Refuse a value that is of none of some types.

    Raises:
        WrongTypeError: with the three parts of an `UnsupportedError`; `name` is the value's.
    """
    if not isinstance(value, kinds):
        raise WrongTypeError(asked, f"{name} is of type {type(value).__name__}", possible)


class CompileError(HummingError):
    """The compiler refused a composed source, or no compiler is usable.

    Attributes:
        source: the composed source, empty when it did not come so far.
        options: the options given to the compiler.
        log: what the compiler said.
    """

    def __init__(
        self, message: str, source: str = "", options: tuple[str, ...] = (), log: str = ""
    ) -> None:
        super().__init__(message)
        self.source, self.options, self.log = source, options, log

    def __str__(self) -> str:
        parts = [str(self.args[0])]
        if self.options:
            parts.append("options: " + " ".join(self.options))
        if self.log:
            parts.append(self.log.strip())
        return "\n".join(parts)


class WrongResultError(HummingError):
    """No kernel computes what the reference does: a defect, of humming or of the device."""


class PluginError(HummingError):
    """A device plugin is broken; the message names plugin, distribution and hook."""


class CheckpointError(HummingError):
    """A checkpoint cannot be read; the message names file, module and tensor."""


_WARNED: set[str] = set()
_WARNING = Lock()


def warn_once(log: logging.Logger, text: str) -> None:
    """Log a warning the first time in a process: of files that are asked for again and again."""
    with _WARNING:
        known = text in _WARNED
        _WARNED.add(text)
    if not known:
        log.warning("%s", text)
