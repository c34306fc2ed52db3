"""Exit status of the commands, by whose turn it is to act."""

from collections.abc import Iterable

from humming.errors import CompileError, HummingError, PluginError, WrongResultError

SUCCESS = 0
CHECK_FAILED = 1
"""`run --check`: a result exceeds its bound, or has none; `tune`: a kernel's result does.

It goes before other failures, of which a wrong result is the worst.
"""
USAGE = 2
"""The request is wrong or not supported; the text says what is possible."""
ENVIRONMENT = 3
"""A compiler, a driver or a plugin is missing or broken; `humming doctor` says what to do."""
DEFECT = 70
"""A defect of humming itself, printed with its traceback."""
INTERRUPTED = 130
"""Ctrl-C; what was done so far is kept where the command says so."""
PIPE_CLOSED = 141
"""Nobody reads the output any more (`| head`): the status of what SIGPIPE ends."""


def status_of(error: HummingError) -> int:
    """The exit status for an error that humming raised on purpose."""
    if isinstance(error, WrongResultError):
        return CHECK_FAILED
    if isinstance(error, (CompileError, PluginError)):
        return ENVIRONMENT
    return USAGE


def status_of_all(errors: Iterable[HummingError]) -> int:
    """The exit status for one error or more: a defect's first, then what only this machine has."""
    statuses = {status_of(error) for error in errors}
    return next(found for found in (CHECK_FAILED, ENVIRONMENT, USAGE) if found in statuses)
