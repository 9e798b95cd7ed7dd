"""How output looks: numbers and times in short, what files say made harmless, tables that fit 80 columns.

Nothing is interpreted as markup: names, notes and reasons were written by others. Without a terminal, output
is plain; no line is broken but the prose about updates, and none ends in spaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from replicast.cli import error_text, one_line
from replicast.codec import json_value
from replicast.core.entries import Stage
from replicast.errors import printable
from replicast.storage.journal import UpdateView
from replicast.update.edits import RESETS, Array, EditKind, Variable
from replicast.update.guard import EditView, Examination
from replicast.update.trial import Trial, TrialOutcome

_WIDEST = 120  # Longer lines are hard to read, however wide the terminal.
_UNLIMITED = 100_000
_WIDEST_REASON = 80  # What updates did, and why, is prose: broken also where no terminal says how wide it is.
_RANDOM_ID = re.compile(r"[0-9a-f]{32}")
_BEFORE_FACTOR = {EditKind.SCALE: "by ", EditKind.BLEND: "with weight "} | dict.fromkeys(RESETS, "to ")
_STYLES = dict.fromkeys(Stage, "yellow") | {
    Stage.COMMITTED: "cyan",
    Stage.APPLIED: "cyan",
    Stage.VERIFIED: "green",
    Stage.REFUSED: "red",
    Stage.FAILED: "bold red",
}


def short_id(update_id: str) -> str:
    """An id for a table: a random one by its first digits, which `show` and `withdraw` accept too."""
    return update_id[:8] if _RANDOM_ID.fullmatch(update_id) else printable(update_id)


def size(nbytes: int) -> str:
    if nbytes < 1000:
        return f"{nbytes} B"
    value, units = nbytes / 1000, ["kB", "MB", "GB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        del units[0]
    return f"{value:.1f} {units[0]}" if value < 99.95 else f"{value:.0f} {units[0]}"


def seconds(secs: float) -> str:
    """A duration with the digits that matter."""
    if abs(secs) < 0.0995:
        return f"{secs * 1000:.1f} ms"
    return f"{secs:.2f} s" if abs(secs) < 9.995 else f"{secs:.0f} s"


def when(moment: float) -> str:
    """A local time: the hour when it was today, else the day; empty when it is not known."""
    day, _, hour = date(moment).partition(" ")
    return hour if day == time.strftime("%Y-%m-%d") else day


def date(moment: float) -> str:
    """Local day and time; empty for 0, and for what no clock can show."""
    with contextlib.suppress(OverflowError, OSError, ValueError):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) if moment else ""
    return ""


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def shape(dimensions: tuple[int, ...]) -> str:
    return "×".join(map(str, dimensions)) if dimensions else "scalar"


def array_cells(name: str, array: Variable | Array) -> tuple[str, str, str, str]:
    return printable(name), shape(array.shape), str(array.dtype), size(array.nbytes)


def metrics(values: Mapping[str, float]) -> str:
    return "  ".join(f"{one_line(name)} {number(value)}" for name, value in values.items())


def digests(reported: Mapping[int, str]) -> str:
    """What the workers reported: one digest when it is the same on all."""
    if len(set(reported.values())) == 1:
        same = f"the same on {len(reported)} workers" if len(reported) > 1 else "on the only worker"
        return f"{printable(next(iter(reported.values())))}, {same}"
    return "; ".join(f"worker {rank}: {printable(digest)}" for rank, digest in sorted(reported.items()))


def counted(amount: int, thing: str) -> str:
    """A number of things: "1 worker", "2 workers"."""
    return f"{amount} {thing}" if amount == 1 else f"{amount} {thing}s"


def trial(asked: Trial) -> str:
    """What decides a trial: "50 steps, loss, at most 5 % worse"."""
    part = asked.max_increase
    words = f"at most {100 * part:g} % worse" if part > 0 else f"at least {-100 * part:g} % better"
    return one_line(f"{asked.steps} steps, {asked.metric}, {words if part else 'no worse'}")


def outcome(ended: TrialOutcome) -> str:
    reason = one_line(ended.reason)
    if ended.outcome == "kept":
        return f"kept at step {ended.step}: {reason}"
    back = "all replicas are back at their state before the update"
    return f"reverted at step {ended.step}: {back} ({reason})"


def no_updates(*, journaled: bool) -> str:
    kept = "no update has been committed yet"
    return kept if journaled else 'the job keeps no journal (durability="memory")'


def print_json(*objects: Any) -> None:
    """Each object in one line."""
    for one in objects:
        click.echo(json.dumps(json_value(one)))


class _WithoutPadding(Console):
    """Ends no line in spaces where it writes into a file or a pipe."""

    def print(self, *objects: Any, **how: Any) -> None:
        if self.is_terminal:
            super().print(*objects, **how)
            return
        with self.capture() as captured:
            super().print(*objects, **how)
        self.file.write("\n".join(line.rstrip() for line in captured.get().split("\n")))


def make_console(*, stderr: bool = False) -> Console:
    console = _WithoutPadding(stderr=stderr, highlight=False, markup=False, emoji=False)
    is_wide = not console.is_terminal and "COLUMNS" not in os.environ
    console.width = _UNLIMITED if is_wide else min(console.width, _WIDEST)
    return console


def is_live(console: Console) -> bool:
    """Whether a line of the console can be drawn over."""
    return console.is_terminal and not console.is_dumb_terminal


def make_table(*headings: str, rows: Iterable[Sequence[str | Text]] = ()) -> Table:
    """A table without lines. A heading that begins with > is of numbers, one with = of what is not broken."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in headings:
        table.add_column(heading.lstrip(">="), overflow="fold", no_wrap=heading.startswith((">", "=")))
        if heading.startswith(">"):
            table.columns[-1].justify = "right"
    for row in rows:
        table.add_row(*row)
    return table


def print_table(*headings: str, rows: Iterable[Sequence[str | Text]]) -> None:
    make_console().print(make_table(*headings, rows=rows))


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
def progress_bar(doing: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, removed afterwards; elsewhere nothing is shown."""
    console = make_console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn()
    with Progress(*columns, console=console, transient=True, disable=not is_live(console)) as bar:
        task = bar.add_task(printable(doing), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def updates_table(views: Sequence[UpdateView]) -> Table:
    """Updates in any stage, by number or id; each with what became of it, and by whom it is."""
    took = [0.0 if view.receipt is None else view.receipt.propose_to_applied_secs for view in views]
    table = make_table("#", ">step", "=stage", ">size", *([">took"] if any(took) else []), "=when", "what")
    table.columns[-1].max_width = _WIDEST_REASON
    for view, secs in zip(views, took, strict=True):
        name = short_id(view.id) if view.sequence is None else str(view.sequence)
        step, at = "" if view.step is None else str(view.step), view.committed_at or view.at
        numbers = [size(view.nbytes) if view.nbytes else ""]
        numbers += [seconds(secs) if secs else ""] if any(took) else []
        table.add_row(name, step, stage_cell(view.stage), *numbers, when(at), what_cell(view))
    return table


def stage_cell(stage: Stage) -> Text:
    return Text(stage, style=_STYLES[stage])


def what_cell(view: UpdateView) -> Text:
    """What an update does in a few words; then what became of it, and who proposed it and why."""
    cell = Text(one_line(view.words()))
    if view.sequence is not None and not view.nbytes:
        cell = Text("not known: its entry is damaged", style="red")
    if view.reverts is not None:
        cell.append("\n" if cell else "")  # One that waits has no edits yet: the job makes them.
        cell.append(f"reverts update {view.reverts}", style="yellow")
    if view.reverted_by is not None:
        cell.append(f"\nreverted by update {view.reverted_by}", style="yellow")
    if view.outcome is not None:
        style = "green" if view.outcome.outcome == "kept" else "yellow"
        cell.append(f"\ntrial: {outcome(view.outcome)}", style=style)
    elif view.trial is not None:
        cell.append(f"\non trial: {trial(view.trial)}", style="cyan")
    if view.around is not None:
        cell.append(f"\n{one_line(view.around)}")
    refusal, withdrawn = view.refusal, f"withdrawn by {view.withdrawn_by}" if view.withdrawn_by else ""
    variable = "" if refusal is None or refusal.variable is None else f" ({refusal.variable})"
    problem = "" if refusal is None else f"{refusal.problem}{variable}"
    waits = f"waits for {view.waits_for}" if view.waits_for else ""
    reason = "" if refusal is not None or view.sequence is not None else view.reason
    for why in filter(None, (waits, problem, ": ".join(filter(None, (withdrawn, reason))))):
        cell.append("\n" if cell else "").append(one_line(why), style="yellow")
    who = ": ".join(one_line(text) for text in (view.author, view.note) if text)
    for line in filter(None, (who, one_line(view.annotation))):
        cell.append(f"\n{line}", style="dim")
    return cell


def edits_table(edits: Iterable[EditView]) -> Table:
    table = make_table("variable", "operation", "shape", "=dtype", ">min", ">max", ">norm")
    for edit in edits:
        values, operation = edit.values, Text(edit.operation.replace("_", " "))
        if edit.rows is not None or edit.rank is not None:
            operation.append(f" ({edit.rows if edit.rows is not None else edit.rank})")
        elif edit.factor is not None:
            operation.append(f" {_BEFORE_FACTOR.get(edit.operation, '')}{number(edit.factor)}")
        if values is not None and values.nonfinite:
            operation.append(f"\n{values.nonfinite} not finite", style="red")
        told = [] if values is None else [values.minimum, values.maximum, values.norm]
        whole = "whole" if edit.shape is None else shape(edit.shape)
        table.add_row(printable(edit.variable), operation, whole, edit.dtype, *map(number, told))
    return table


def print_examination(found: Examination) -> int:
    """The table of edits, and below it what is wrong, or may be. Returns the exit code."""
    console = make_console()
    console.print(edits_table(found.edits))
    print_problems(found)
    if not found.problems:
        total = f"{counted(len(found.edits), 'edit')}, {size(found.nbytes)} of values."
        console.print(total if found.warnings else f"{total} No problems found.")
    for note in found.notes:
        click.echo(one_line(note))
    return 1 if found.problems else 0


def print_problems(found: Examination) -> int:
    """Everything that is wrong, or may be, on standard error. Returns the exit code."""
    for problem in found.problems:
        click.echo(f"Refused: {error_text(problem)}", err=True)
    for warning in found.warnings:
        click.echo(f"Warning: {one_line(warning)}", err=True)
    return 1 if found.problems else 0
