"""Progress of work that this machine does itself and that may take long, such as simulating.

Who does the work tells a `Watch` how far it is. Once that has taken longer than a moment, someone
shows it: whoever called `listening`, such as a command with its bar, or else one line on stderr, if
that is a terminal. In a log or a pipe nothing is shown.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TextIO

PATIENCE_S = 2.0
"""How long work takes before its progress is shown."""
_REFRESH_S = 0.2


class Listener(Protocol):
    """Shows the progress of one piece of work at a time."""

    def show(self, what: str, done: int, total: int) -> None:
        """So many parts of all are done."""

    def hide(self) -> None:
        """The work has ended, well or not."""


class TerminalLine:
    """One line of a terminal that is overwritten, and gone in the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, what: str, done: int, total: int) -> None:
        """Write the line anew."""
        self._stream.write(f"\r\x1b[K{what}: {done} of {total} ({100 * done // max(1, total)} %)")
        self._stream.flush()

    def hide(self) -> None:
        """Clear it."""
        self._stream.write("\r\x1b[K")
        self._stream.flush()


_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Within this context a listener is told about work that takes long."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class Watch:
    """Told how far a piece of work is, tells a listener once it takes long.

    Args:
        what: is being done.
        listener: who shows it; None if nobody does.
        clock: seconds.
    """

    def __init__(
        self, what: str, listener: Listener | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._listener, self._clock = what, listener, clock
        self._next = clock() + PATIENCE_S
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        """So many parts of all are done."""
        if self._listener is None:
            return
        now = self._clock()
        if now >= self._next:
            self._next, self._shown = now + _REFRESH_S, True
            self._listener.show(self._what, done, total)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown and self._listener is not None:
            self._listener.hide()


def watch(what: str) -> Watch:
    """A watch whose listener is the present one, or a line on stderr if that is a terminal."""
    listener = _listener.get()
    if listener is None and sys.stderr is not None and sys.stderr.isatty():
        listener = TerminalLine(sys.stderr)
    return Watch(what, listener)
