"""How output looks: narrow tables that fit 80 columns, plain without a terminal, never with markup."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from replicast.cli import texts

_WIDEST = 120  # Longer lines are hard to read, however wide the terminal.
_UNLIMITED = 100_000
_REFRESH_SECS = 0.1


def make_console(*, stderr: bool = False) -> Console:
    """The console for standard output, or for standard error."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    is_wide = (
        not console.is_terminal and "COLUMNS" not in os.environ
    )  # No name is broken in a pipe or a file.
    console.width = _UNLIMITED if is_wide else min(console.width, _WIDEST)
    return console


def is_live(console: Console) -> bool:
    """Whether a line of the console can be drawn over."""
    return console.is_terminal and not console.is_dumb_terminal


def make_table(*headings: str, right: Sequence[str] = (), whole: Sequence[str] = ()) -> Table:
    """A table without lines."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in headings:
        table.add_column(name, overflow="fold", no_wrap=name in whole)
        if name in right:
            table.columns[-1].justify = "right"
    return table


def facts_table(facts: Iterable[tuple[str, str | Text]]) -> Table:
    """Names and values, one per line; those without a value are left out."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        if value:
            table.add_row(name, value)
    return table


@contextlib.contextmanager
def progress_bar(doing: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal, removed afterwards; None where there is no terminal."""
    console = make_console(stderr=True)
    if not is_live(console):
        yield None
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn()
    # Drawn by this thread alone: nothing is left behind after Ctrl-C.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task, drawn = bar.add_task(texts.printable(doing), total=None), 0.0

        def progress(done: int, total: int) -> None:
            nonlocal drawn
            now = time.monotonic()
            if now - drawn >= _REFRESH_SECS or done == total:
                drawn = now
                bar.update(task, completed=done, total=total, refresh=True)

        yield progress
