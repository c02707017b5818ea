"""Output of commands: consoles, tables, progress and next steps.

On a terminal, tables have boxes and progress is a live bar. Elsewhere (a pipe, a file, a log) everything is plain text:
no colors, no box-drawing characters, no line breaks at 80 columns, and a line of progress every 30 seconds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import rich.table
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.segment import Segment
from rich.text import Text

T = TypeVar("T")

PIPE_COLUMNS = 10_000  # width of a pipe, unless the environment variable COLUMNS is set
LINE_INTERVAL = 30.0  # seconds between plain lines of progress
BYTES = "B"  # the unit of downloads
BAR_COLUMNS, OTHER_COLUMNS = (4, 40), 56  # least and greatest width of the bar, and the width of what is beside it


def make_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console for a stream: as rich makes it for a terminal, and for plain text of any width elsewhere."""
    console = Console(stderr=stderr, quiet=quiet)
    if not is_plain(console):
        return console
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdigit() and int(columns) else PIPE_COLUMNS
    return Console(stderr=stderr, quiet=quiet, color_system=None, force_terminal=False, width=width)


def message_console() -> Console:
    """A console for messages of the Python interface: stderr, or plain text below the cell in a notebook."""
    if in_notebook():
        return Console(force_jupyter=False, force_terminal=False, width=120)
    return make_console(stderr=True)


def in_notebook() -> bool:
    """Return whether the code runs in the kernel of a notebook. Nothing of IPython is imported for the answer."""
    return Console().is_jupyter


def is_plain(console: Console) -> bool:
    """Whether a console writes plain text: to a pipe or a file, or to a terminal without cursor movement."""
    return not (console.is_terminal or console.is_jupyter) or console.is_dumb_terminal


def is_first_rank() -> bool:
    """Whether this process prints: rank 0 under torchrun, and every process elsewhere."""
    return os.environ.get("RANK", "0") == "0"


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print text as it is: without markup, highlighting or line breaks."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def print_next_steps(*steps: str) -> None:
    """Print to stderr what can follow, one command or hint per line, on rank 0 only."""
    if steps and is_first_rank():
        print_line(make_console(stderr=True), "\n".join(["next:", *(f"  {step}" for step in steps)]))


class Table(rich.table.Table):
    """A table with boxes on a terminal, and with aligned columns of plain text elsewhere."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not is_plain(console):
            yield from super().__rich_console__(console, options)
            return
        for line in self._plain_lines(console):
            yield Segment(line)
            yield Segment.line()

    def _plain_lines(self, console: Console) -> Iterator[str]:
        columns = [
            [_plain_text(cell, console) for cell in (*([column.header] if self.show_header else []), *column.cells)]
            for column in self.columns
        ]
        widths = [max(map(len, column), default=0) for column in columns]
        yield from [_plain_text(self.title, console)] if self.title else []
        for row in zip(*columns, strict=True):
            yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        yield from [_plain_text(self.caption, console)] if self.caption else []


def _plain_text(cell: Any, console: Console) -> str:
    text = cell if isinstance(cell, Text) else console.render_str(str(cell))
    return " ".join(text.plain.split("\n"))


class ProgressBar:
    """Progress of a command with rate and remaining time: a bar on a terminal, a line every 30 seconds elsewhere.

    A command with several stages starts one after another; each has a line of its own.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self._clock = console, clock
        self._bars: Progress | None = None
        self._task = TaskID(0)
        self._description, self._unit, self._note = "", "", ""
        self._total: float | None = None
        self._first = self._completed = 0.0
        self._started = self._last_line = clock()

    def __enter__(self) -> ProgressBar:
        if not self.console.quiet and not is_plain(self.console):
            least, greatest = BAR_COLUMNS
            bar = BarColumn(max(least, min(greatest, self.console.width - OTHER_COLUMNS)))
            columns = (TextColumn("{task.description}"), bar, StatusColumn())
            self._bars = _open_bars(columns, self.console)
            self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def start(self, description: str, total: float | None, completed: float = 0, unit: str = "") -> None:
        """Begin a stage: `completed` of `total` was done before."""
        if self._bars is not None:
            if self._bars.tasks:
                self._bars.update(self._task, note="")
            self._task = self._bars.add_task(
                escape(description), total=total, completed=int(completed), unit=unit, note="", first=completed
            )
        self._description, self._total, self._unit, self._note = description, total, unit, ""
        self._first = self._completed = completed
        self._started = self._last_line = self._clock()

    def advance(self, count: float = 1) -> None:
        self.update(self._completed + count)

    def update(self, completed: float, note: str = "") -> None:
        """Show how much of the stage is done; a note replaces its remaining time."""
        self._completed, self._note = completed, note
        if self._bars is not None:
            self._bars.update(self._task, completed=completed, note=note)
        elif not self.console.quiet and completed != self._total and self._line_is_due():
            self._last_line = self._clock()
            print_line(self.console, self._plain_line())

    def print_above(self, text: str, console: Console) -> None:
        """Print a line of text with markup to another console; if both are terminals, above the bar."""
        target = self.console if self._bars is not None and not is_plain(console) else console
        target.print(text, highlight=False)

    def _line_is_due(self) -> bool:
        return self._clock() - self._last_line >= LINE_INTERVAL

    def _plain_line(self) -> str:
        elapsed = self._clock() - self._started
        rate = (self._completed - self._first) / elapsed if elapsed else None
        remaining = (self._total - self._completed) / rate if rate and self._total is not None else None
        words = describe_progress(self._completed, self._total, self._unit, rate, remaining, self._note)
        return f"{self._description}  {words}"


class StatusColumn(ProgressColumn):
    """Count, rate and remaining time of a stage, or its note."""

    def render(self, task: Task) -> Text:
        rate = task.finished_speed or task.speed
        if not rate and task.elapsed:
            rate = (task.completed - task.fields["first"]) / task.elapsed
        left = None if task.finished else task.time_remaining
        words = describe_progress(task.completed, task.total, task.fields["unit"], rate, left, task.fields["note"])
        return Text(words)


def describe_progress(
    completed: float, total: float | None, unit: str, rate: float | None, seconds_left: float | None, note: str = ""
) -> str:
    """A text such as "12/100  3.1 images/s  0:00:28 left"."""
    size = format_bytes if unit == BYTES else "{:.0f}".format
    words = [f"{size(completed)}/{size(total)}" if total is not None else size(completed)]
    if rate:
        words.append(format_rate(rate, unit))
    if note:
        words.append(note)
    elif seconds_left is not None and total is not None and completed < total:
        words.append(f"{timedelta(seconds=round(seconds_left))} left")
    return "  ".join(words)


def format_rate(rate: float, unit: str) -> str:
    if unit == BYTES:
        return f"{format_bytes(rate)}/s"
    if rate >= 0.1:
        return f"{rate:.3g} {unit}/s".replace(" /", "/")
    return f"{60 * rate:.2g} {unit}/min".replace(" /", "/")


def format_remaining(seconds: Sequence[float], count: float) -> str:
    """The time that `count` more jobs take, from the seconds of earlier ones."""
    return f"about {timedelta(seconds=round(sum(seconds) / len(seconds) * count))} left"


def format_bytes(count: float) -> str:
    """A size in GB or MB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def track(items: Sequence[T], description: str, console: Console, unit: str = "") -> Iterator[T]:
    """Iterate over items with a progress bar."""
    with ProgressBar(console) as bar:
        bar.start(description, len(items), unit=unit)
        for item in items:
            yield item
            bar.advance()


@contextmanager
def show_status(text: str, console: Console) -> Iterator[None]:
    """Show what is being done if it takes an unknown time: with the elapsed time on a terminal, elsewhere once."""
    if console.quiet or is_plain(console):
        print_line(console, f"{text} ...")
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description} ..."), TimeElapsedColumn())
    with _open_bars(columns, console, transient=True) as bars:
        bars.add_task(escape(text), total=None)
        yield


def _open_bars(columns: Sequence[ProgressColumn], console: Console, *, transient: bool = False) -> Progress:
    """Live bars. Only if stdout is a terminal too, its lines are shown above them; a pipe gets its lines directly."""
    return Progress(*columns, console=console, transient=transient, redirect_stdout=sys.stdout.isatty())
