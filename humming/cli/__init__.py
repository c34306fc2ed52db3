"""The command line, `humming`: see docs/cli.md.

Exit status: 0 success; 1 a check failed; 2 the request is wrong or not supported; 3 the environment
is at fault (a compiler, a driver, a plugin); 70 a defect of humming itself, with a traceback;
141 nobody reads the output any more.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from humming import __version__
from humming.cli.compile import compile_kernels
from humming.cli.devices import list_devices, show_capabilities
from humming.cli.doctor import examine
from humming.cli.exits import DEFECT, ENVIRONMENT, PIPE_CLOSED, SUCCESS, status_of
from humming.cli.explain import explain
from humming.cli.inspect import inspect_checkpoint
from humming.cli.output import to_json
from humming.cli.pack import pack_checkpoint
from humming.cli.run import run
from humming.cli.tune import tune_kernels
from humming.errors import HummingError, UnsupportedError

__all__ = ["app", "main"]

app = typer.Typer(
    name="humming",
    help="Quantized matrix products, composed at run time for the device at hand.",
    epilog="Exit status: 0 success, 1 a check failed, 2 wrong or unsupported request, "
    "3 a compiler, driver or plugin is at fault (try `humming doctor`).",
    no_args_is_help=True,
    add_completion=False,
    # Errors are ours to print: main() tells those that humming raises on purpose from defects.
    pretty_exceptions_enable=False,
    # Plain help loads faster than a drawn one and reads the same in a pipe.
    rich_markup_mode=None,
)

app.command("devices")(list_devices)
app.command("capabilities")(show_capabilities)
app.command("explain")(explain)
app.command("run")(run)
app.command("inspect")(inspect_checkpoint)
app.command("pack")(pack_checkpoint)
app.command("compile")(compile_kernels)
app.command("tune")(tune_kernels)
app.command("doctor")(examine)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"humming {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        arguments: the words after `humming`; by default those of the process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _run(words)
        # What is still buffered would be written when nothing can be said about it any more.
        sys.stdout.flush()
    except BrokenPipeError:
        _leave_the_pipe()
        return PIPE_CLOSED
    return status


def _run(words: list[str]) -> int:
    try:
        app(words, prog_name="humming")
    except SystemExit as end:
        # How typer and rich answer a pipe that nobody reads, with the status of a failed check.
        if isinstance(end.__context__, BrokenPipeError):
            raise end.__context__ from None
        return end.code if isinstance(end.code, int) else SUCCESS
    except HummingError as error:
        return _failed(error, str(error), status_of(error), words)
    except ImportError as error:
        # A package that humming needs is missing or broken; one of humming's own is a defect.
        if (error.name or "humming").split(".")[0] == "humming":
            return _failed(error, str(error), DEFECT, words)
        told = f"{error}. `humming doctor` says what is missing."
        return _failed(error, told, ENVIRONMENT, words)
    except Exception as error:
        told = str(error) or type(error).__name__
        # torch's is known by its name: loading torch to compare types would take seconds.
        if type(error).__name__ in ("MemoryError", "OutOfMemoryError"):
            return _failed(error, f"out of memory: {told}", ENVIRONMENT, words)
        return _failed(error, told, DEFECT, words)
    return SUCCESS


def _failed(error: Exception, told: str, status: int, words: Sequence[str]) -> int:
    """Say on stderr, and as JSON where that is wanted, why a command failed."""
    if status == DEFECT:
        traceback.print_exception(error)
    described = {"type": type(error).__name__, "message": told}
    if isinstance(error, UnsupportedError):
        described |= {"asked": error.asked, "why": error.why, "possible": error.possible}
    if "--json" in words:
        sys.stdout.write(to_json({"error": described}) + "\n")
    if status != DEFECT:
        sys.stderr.write(f"error: {told}\n")
    return status


def _leave_the_pipe() -> None:
    """Let what is still buffered go nowhere, lest the interpreter complain when it flushes."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
