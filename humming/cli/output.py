"""What the commands print: tables for people, or one JSON object for programs.

Results go to stdout; progress and errors go to stderr, so that a pipe carries results only.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from humming.progress import listening

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

PIPE_WIDTH = 160
"""Columns of a table where stdout is no terminal and so has no width of its own."""


@dataclass(frozen=True, slots=True)
class Output:
    """Where a command's result goes.

    Attributes:
        as_json: print the result as one JSON object instead of as text.
    """

    as_json: bool

    def emit(self, payload: Mapping[str, Any], render: Callable[["Console"], None]) -> None:
        """Print a result: the payload as JSON, or what `render` draws."""
        if self.as_json:
            sys.stdout.write(to_json(payload) + "\n")
        else:
            render(console())

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[str], None]]:
        """A progress bar over `total` steps; yields a function that names and counts a step.

        A step that tells its own progress, as a simulated kernel does, gets a bar below when it
        takes long. Shown only on a terminal: in a log or a pipe a bar is noise.
        """
        if self.as_json or not sys.stderr.isatty():
            with listening(_Silence()):
                yield lambda step: None
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)

            begun = 0

            def step(name: str) -> None:
                nonlocal begun
                # What is under way is not done yet.
                bar.update(task, description=f"{what}: {name}", completed=begun)
                begun += 1

            with listening(_PartBar(bar)):
                yield step
            bar.update(task, completed=begun)


class _Silence:
    """A listener that shows nothing."""

    def show(self, what: str, done: int, total: int) -> None:
        """Nothing."""

    def hide(self) -> None:
        """Nothing."""


class _PartBar:
    """A bar for the progress of one step, as long as it is shown."""

    def __init__(self, bar: "Progress") -> None:
        self._bar = bar
        self._task: TaskID | None = None

    def show(self, what: str, done: int, total: int) -> None:
        """Draw it, first of all if it is new."""
        if self._task is None:
            self._task = self._bar.add_task(what, total=total)
        self._bar.update(self._task, description=what, completed=done, total=total)

    def hide(self) -> None:
        """Take it away."""
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None


def console() -> "Console":
    """A console on stdout that prints text as it is: no markup, no highlighting, no wrapping."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(markup=False, highlight=False, soft_wrap=True, width=width)


def print_table(
    target: "Console", title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    """Draw a table; cells may be anything that prints, None is shown as a dash."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text("-" if cell is None else str(cell)) for cell in row))
    target.print(table, soft_wrap=False)


def to_json(payload: Mapping[str, Any]) -> str:
    """A payload as JSON; numbers that JSON does not know (nan, inf) become null."""
    return json.dumps(_finite(payload), indent=2, allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_finite(item) for item in value]
    return value


def seconds(value: float) -> str:
    """A duration for people: 3.2 s, 41 ms, 250 us."""
    if value >= 1:
        return f"{value:.1f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.1f} ms"
    return f"{value * 1e6:.0f} us"
