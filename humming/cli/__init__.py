"""The command line, `humming`: see docs/cli.md.

Exit status: 0 success; 1 a check failed; 2 the request is wrong or not supported; 3 the environment
is at fault (a compiler, a driver, a plugin); 70 a defect of humming itself, with a traceback.
"""

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from humming import __version__
from humming.cli.compile import compile_kernels
from humming.cli.devices import list_devices, show_capabilities
from humming.cli.doctor import examine
from humming.cli.exits import DEFECT, SUCCESS, status_of
from humming.cli.explain import explain
from humming.cli.output import print_error, to_json
from humming.cli.run import run
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
app.command("compile")(compile_kernels)
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
        app(words, prog_name="humming")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else SUCCESS
    except HummingError as error:
        if "--json" in words:
            sys.stdout.write(to_json({"error": _described(error)}) + "\n")
        print_error(error)
        return status_of(error)
    except Exception:
        traceback.print_exc()
        return DEFECT
    return SUCCESS


def _described(error: HummingError) -> dict[str, str]:
    described = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, UnsupportedError):
        described |= {"asked": error.asked, "why": error.why, "possible": error.possible}
    return described
