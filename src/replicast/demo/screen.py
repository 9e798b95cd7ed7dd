"""What the demo looks like: texts, the table of replicas, one progress bar; plain without a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from rich import box
from rich import progress as rich_progress
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from replicast.demo.acts import all_equal
from replicast.demo.notes import Moment, Progress

WIDEST = 96
"""Lines longer than this are hard to read, however wide the terminal."""
INDENT = "   "
"""In front of what another process prints."""
_SHORT_DIGEST = 8
_DOING_WIDTH, _BAR_WIDTH = 34, 22
"""Together they leave room at the right: the ^C that a terminal echoes must not begin a new line."""


class Bar(Protocol):
    """The progress bar."""

    def show(self, now: Progress) -> None:
        """Shows what is being done and how many steps are done."""


def make_console() -> Console:
    """The console for standard output, not too wide to read."""
    console = Console(highlight=False)
    return console if console.width <= WIDEST else Console(highlight=False, width=WIDEST)


def print_heading(title: str, console: Console) -> None:
    """A line that begins something."""
    console.print(Text(title, style="bold cyan"))


def print_text(markup: str, console: Console) -> None:
    """A paragraph."""
    console.print(markup)


def print_command(command: str, console: Console) -> None:
    """A command as people type it."""
    console.print(Text(f"{INDENT}$ {command}", style="bold"))


def print_output(output: str, console: Console) -> None:
    """What a command or a report says, as it is; lines that are too long go on below, indented alike."""
    for line in output.splitlines():
        said = line.lstrip(" ")
        indent = INDENT + " " * (len(line) - len(said))
        for part in Text(said).wrap(console, console.width - len(indent)) or [Text()]:
            part.rstrip()
            console.print(Text(indent) + part)


def print_replicas(
    replicas: Mapping[str, Sequence[Moment]], console: Console, *, explained: bool = False
) -> None:
    """The table: at each moment every worker's replica, and whether they are equal.

    Args:
        replicas: The rows.
        console: The screen.
        explained: Whether the audience knows already what a digest is.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, header_style="bold")
    if not explained:
        table.caption = "digest: computed from every bit of the weights; equal only when every bit is"
        table.caption_justify = "left"
    table.add_column("\nmoment", overflow="fold")
    for replica in next(iter(replicas.values())):
        table.add_column(f"worker {replica.worker}:\nweights sum", justify="right", overflow="fold")
        table.add_column("\ndigest", overflow="fold")
    table.add_column("\nequal?", overflow="fold")
    for moment, workers in replicas.items():
        table.add_row(moment, *_cells(workers))
    console.print(Padding(table, (1, 0)))


def short(digest: str) -> str:
    """As much of a digest as people compare by eye."""
    return digest[:_SHORT_DIGEST]


def _cells(workers: Sequence[Moment]) -> list[Text]:
    equal = all_equal(workers)
    style = "green" if equal else "red"
    cells = []
    for replica in workers:
        cells.append(Text(f"{replica.weights_sum:.4f}"))
        cells.append(Text(short(replica.digest), style=style))
    return [*cells, Text("yes" if equal else "NO", style=f"bold {style}")]


@contextlib.contextmanager
def progress_bar(steps: int, starting: str, console: Console) -> Iterator[Bar]:
    """One bar at the bottom of a terminal, gone in the end; elsewhere one line that says what begins."""
    animated = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
    if not animated:
        console.print(starting)
        yield _NoBar()
        return
    columns = (
        rich_progress.SpinnerColumn(),
        rich_progress.TextColumn("{task.description}", table_column=Column(width=_DOING_WIDTH)),
        rich_progress.BarColumn(bar_width=_BAR_WIDTH),
        rich_progress.TaskProgressColumn(),
        rich_progress.TimeElapsedColumn(),
    )
    with rich_progress.Progress(*columns, console=console, transient=True) as bar:
        yield _LiveBar(bar, steps, starting)


class _NoBar:
    def show(self, now: Progress) -> None:
        """Shows nothing."""


class _LiveBar:
    def __init__(self, bar: rich_progress.Progress, steps: int, starting: str) -> None:
        self._bar = bar
        self._steps = steps
        self._task = bar.add_task(starting, total=None)

    def show(self, now: Progress) -> None:
        """Shows what is being done and how many steps are done."""
        loss = "" if now.loss is None else f", loss {now.loss:.3f}"
        self._bar.update(
            self._task,
            description=f"{now.doing}{loss}",
            completed=min(now.done, self._steps),  # How long an act takes is known only about.
            total=self._steps,
        )
