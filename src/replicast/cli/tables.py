"""How the commands about updates look: narrow tables that fit 80 columns, plain without a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from replicast.cli.examination import EditView, is_float
from replicast.cli.standings import Standing, what_text, words
from replicast.cli.texts import (
    number_text,
    one_line,
    outcome_text,
    printable,
    seconds_text,
    shape_text,
    size_text,
    trial_text,
    when_text,
)
from replicast.edits import RESETS, Operation
from replicast.records import Record
from replicast.update import Stage

WIDEST = 120
"""Lines longer than this are hard to read, however wide the terminal."""
STAGE_STYLES = {
    Stage.PROPOSED: "yellow",
    Stage.STAGED: "yellow",
    Stage.COMMITTED: "cyan",
    Stage.APPLIED: "cyan",
    Stage.VERIFIED: "green",
    Stage.REFUSED: "red",
    Stage.FAILED: "bold red",
    Stage.WITHDRAWN: "yellow",
}


def make_console() -> Console:
    """The console for standard output, not too wide to read."""
    console = Console(highlight=False, markup=False, emoji=False)
    return (
        console
        if console.width <= WIDEST
        else Console(highlight=False, markup=False, emoji=False, width=WIDEST)
    )


def make_table(*headings: str, right: Sequence[str] = (), whole: Sequence[str] = ()) -> Table:
    """A table without lines.

    Args:
        *headings: The columns.
        right: Those that hold numbers.
        whole: Those that must not be broken into two lines.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in headings:
        table.add_column(
            heading,
            justify="right" if heading in right else "left",
            overflow="fold",
            no_wrap=heading in whole,
        )
    return table


def stage_cell(standing: Standing) -> Text:
    """How far an update has come, in its colour. One that a trial has reverted is not called verified."""
    if standing.trial is not None and standing.trial.outcome == "reverted":
        return Text("reverted", style="yellow")
    return Text(str(standing.stage), style=STAGE_STYLES[standing.stage])


def updates_table(standings: Iterable[Standing], now: float) -> Table:
    """Committed updates, each with who wanted it and why in a second line."""
    whole = ("#", "step", "stage", "size", "took", "when")
    table = make_table(
        "#", "step", "stage", "what", "size", "took", "when", right=("#", "step", "size", "took"), whole=whole
    )
    for standing in standings:
        record, receipt = standing.record, standing.receipt
        if record is not None:
            table.add_row(
                str(record.sequence),
                str(standing.step),
                stage_cell(standing),
                _what_cell(standing, record),
                size_text(record.nbytes),
                "" if receipt is None else seconds_text(receipt.propose_to_applied_secs),
                when_text(record.committed_at, now),
            )
    return table


def edits_table(edits: Iterable[EditView], *, extremes: bool) -> Table:
    """What an update does, edit by edit.

    Args:
        edits: The edits.
        extremes: Whether to show the smallest and the largest value, or whether all are finite and the size.
    """
    numbers = ("min", "max", "norm") if extremes else ("size", "finite", "norm")
    numeric = ("size", "min", "max", "norm")
    table = make_table(
        "variable", "operation", "shape", "dtype", *numbers, right=numeric, whole=("dtype", *numbers)
    )
    for edit in edits:
        cells: list[str | Text] = [
            printable(edit.variable),
            _operation_text(edit),
            "whole" if edit.shape is None else shape_text(edit.shape),
            edit.dtype,
        ]
        values = edit.numbers
        if extremes:
            cells += (
                ["", ""] if values is None else [number_text(values.minimum), number_text(values.maximum)]
            )
        else:
            cells += [size_text(edit.nbytes) if edit.nbytes else "", _finite_cell(edit)]
        table.add_row(*cells, "" if values is None else number_text(values.norm))
    return table


def facts_table(facts: Iterable[tuple[str, str | Text]]) -> Table:
    """Names and values, one in a line."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, value if isinstance(value, Text) else Text(value))
    return table


def refusal_cell(standing: Standing) -> Text:
    """Why an update was refused, in one line."""
    if standing.refusal is None:
        return Text("")
    variable = f" ({standing.refusal.variable})" if standing.refusal.variable is not None else ""
    return Text(one_line(f"{standing.refusal.problem}{variable}"))


def _what_cell(standing: Standing, record: Record) -> Text:
    who = ": ".join(one_line(text) for text in (record.author, record.note) if text)
    cell = Text(one_line(what_text(record.edits)))
    if record.trial is not None:
        cell.append("\n")
        cell.append(one_line(_trial_cell_text(standing, record)), style=_trial_style(standing))
    return cell.append(f"\n{who}", style="dim") if who else cell


def _trial_cell_text(standing: Standing, record: Record) -> str:
    if standing.trial is not None:
        return f"trial: {outcome_text(standing.trial)}"
    return f"on trial: {trial_text(record.trial or {})}"


def _trial_style(standing: Standing) -> str:
    if standing.trial is None:
        return "cyan"
    return "green" if standing.trial.outcome == "kept" else "yellow"


def _operation_text(edit: EditView) -> str:
    text = words(str(edit.operation))
    if edit.rows is not None:
        return f"{text} ({edit.rows})"
    if edit.rank is not None:
        return f"{text} ({edit.rank})"
    if edit.factor is None:
        return text
    link = {Operation.SCALE: " by ", Operation.BLEND: " with weight "} | dict.fromkeys(RESETS, " to ")
    return f"{text}{link.get(edit.operation, ' ')}{number_text(edit.factor)}"


def _finite_cell(edit: EditView) -> Text:
    if edit.numbers is None or not is_float(edit.dtype):
        return Text("")
    wrong = edit.numbers.nonfinite
    return Text("yes") if not wrong else Text(f"{wrong} not", style="red")
