"""Tables of updates, of the edits of one, and of what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from replicast.cli import texts
from replicast.cli.tables import make_console, make_table
from replicast.client.examination import EditView, Examination
from replicast.client.updates import UpdateView
from replicast.core.records import Stage
from replicast.update.edits import FLOAT_DTYPES, RESETS, EditKind

_BEFORE_FACTOR = {EditKind.SCALE: "by ", EditKind.BLEND: "with weight "} | dict.fromkeys(RESETS, "to ")
_STYLES = dict.fromkeys(Stage, "yellow") | {
    Stage.COMMITTED: "cyan",
    Stage.APPLIED: "cyan",
    Stage.VERIFIED: "green",
    Stage.REFUSED: "red",
    Stage.FAILED: "bold red",
}


def updates_table(views: Iterable[UpdateView]) -> Table:
    """Committed updates, each with its author and note in a second line."""
    right, whole = ("#", "step", "size", "took"), ("#", "step", "stage", "size", "took", "when")
    table = make_table("#", "step", "stage", "what", "size", "took", "when", right=right, whole=whole)
    for view in views:
        took = 0.0 if view.receipt is None else view.receipt.propose_to_applied_secs
        table.add_row(
            str(view.sequence),
            str(view.step),
            stage_cell(view.stage),
            what_cell(view),
            texts.size(view.nbytes or 0),
            texts.seconds(took) if took else "",
            texts.when(view.committed_at or 0.0),
        )
    return table


def stage_cell(stage: Stage) -> Text:
    """A stage in its colour."""
    return Text(stage, style=_STYLES[stage])


def what_cell(view: UpdateView) -> Text:
    """What an update does in a few words; then its trial, and who proposed it and why."""
    cell = Text(texts.one_line(edits_text(view.edits)))
    if view.sequence is not None and not view.nbytes:
        cell = Text("not known: its entry is damaged", style="red")
    if view.reverts is not None:
        cell.append("\n" if cell else "")  # One that waits has no edits yet: the job makes them.
        cell.append(f"reverts update {view.reverts}", style="yellow")
    if view.reverted_by is not None:
        cell.append(f"\nreverted by update {view.reverted_by}", style="yellow")
    if view.receipt is not None and view.receipt.checkpoint:
        cell.append("\napplied to the checkpoint, by no worker", style="yellow")
    if view.outcome is not None:
        style = "green" if view.outcome.outcome == "kept" else "yellow"
        cell.append(f"\ntrial: {texts.outcome(view.outcome)}", style=style)
    elif view.trial is not None:
        cell.append(f"\non trial: {texts.trial(view.trial)}", style="cyan")
    who = ": ".join(texts.one_line(text) for text in (view.author, view.note) if text)
    return cell.append(f"\n{who}", style="dim") if who else cell


def edits_text(edits: Iterable[Mapping[str, Any]], most: int = 2) -> str:
    """Edits in a few words: "add dense/bias, scale optimizer/learning_rate (+3)"."""
    listed = list(edits)
    asked = [edit for edit in listed if edit.get("operation") not in RESETS]
    shown = [
        f"{str(edit.get('operation')).replace('_', ' ')} {edit.get('variable')}" for edit in asked[:most]
    ]
    more = f" (+{len(asked) - most})" if len(asked) > most else ""
    resets = len(listed) - len(asked)
    return ", ".join(shown) + more + (f", reset {resets} slots" if resets else "")


def edits_table(edits: Iterable[EditView], *, extremes: bool) -> Table:
    """What an update does, edit by edit."""
    numbers = ("min", "max", "norm") if extremes else ("size", "finite", "norm")
    right = ("size", "min", "max", "norm")
    table = make_table(
        "variable", "operation", "shape", "dtype", *numbers, right=right, whole=("dtype", *numbers)
    )
    for edit in edits:
        shape = "whole" if edit.shape is None else texts.shape(edit.shape)
        values = edit.values
        cells: list[str | Text] = [texts.size(edit.nbytes) if edit.nbytes else "", _finite_cell(edit)]
        if extremes:
            cells = (
                ["", ""] if values is None else [texts.number(values.minimum), texts.number(values.maximum)]
            )
        norm = texts.number(None if values is None else values.norm)
        table.add_row(texts.printable(edit.variable), _operation_text(edit), shape, edit.dtype, *cells, norm)
    return table


def print_examination(found: Examination) -> None:
    """The table of edits, and below it what is wrong, or may be."""
    console = make_console()
    console.print(edits_table(found.edits, extremes=False))
    print_problems(found)
    if not found.problems:
        counted = f"{texts.counted(len(found.edits), 'edit')}, {texts.size(found.nbytes)} of values."
        console.print(counted if found.warnings else f"{counted} Nothing is wrong with it.")


def print_problems(found: Examination) -> None:
    """Everything that is wrong, or may be, on standard error."""
    for problem in found.problems:
        click.echo(f"Refused: {texts.error(problem)}", err=True)
    for warning in found.warnings:
        click.echo(f"Warning: {texts.one_line(warning)}", err=True)


def _operation_text(edit: EditView) -> str:
    text = edit.operation.replace("_", " ")
    if edit.rows is not None or edit.rank is not None:
        return f"{text} ({edit.rows if edit.rows is not None else edit.rank})"
    if edit.factor is None:
        return text
    return f"{text} {_BEFORE_FACTOR.get(edit.operation, '')}{texts.number(edit.factor)}"


def _finite_cell(edit: EditView) -> Text:
    if edit.values is None or edit.dtype not in FLOAT_DTYPES:
        return Text("")
    wrong = edit.values.nonfinite
    return Text(f"{wrong} not", style="red") if wrong else Text("yes")
