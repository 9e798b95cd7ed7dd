"""`replicast show`: everything about one update."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.text import Text

from replicast.cli import texts
from replicast.cli.examination import EditView, edits_table, views_of
from replicast.cli.rundirs import run_argument
from replicast.cli.tables import facts_table, make_console
from replicast.cli.update_views import UpdateView, damage_text, edits_text, find, stage_cell
from replicast.core.entries import Receipt
from replicast.errors import FileDamaged, PayloadRemoved
from replicast.storage.runfiles import read_run_info
from replicast.storage.updates import Updates, load_update
from replicast.update.update import Update


@click.command()
@run_argument
@click.argument("which", metavar="NUMBER|ID")
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def show(run: Path, which: str, as_json: bool) -> None:
    """Show everything about one update.

    By its number in the journal, or by its id or the beginning of it; also one that waits or was refused.

    \b
    Examples:
      replicast show runs/first 12
      replicast show runs/first 3f2a91c4 --json

    Damaged files of the journal are named; they hide nothing else.

    Exit code: 0; 1 when there is no such update or its file is damaged; 2 when RUN is not a run directory.
    """  # noqa: D301 - click wants a real backspace
    journal = Updates(run)
    view = find(run, which, journal)
    if journal.damaged:
        click.echo(damage_text(journal), err=True)
    if as_json:
        click.echo(json.dumps(view.to_json() | {"edits": [edit.to_json() for edit in _edits(run, view)]}))
        return
    console = make_console()
    console.print(facts_table(_facts(view)))
    edits = _edits(run, view)  # After the facts, since it fails when the file is damaged.
    if edits:
        console.print()
        console.print(edits_table(edits, extremes=True))


def _facts(view: UpdateView) -> list[tuple[str, str | Text]]:
    """Who, what, when and how it went; those that are not known are empty."""
    update, journaled, refusal = view.committed, view.journaled, view.refusal
    step = "" if view.step is None else str(view.step)
    facts: list[tuple[str, str | Text]] = [
        ("update", texts.printable(view.id)),
        ("stage", stage_cell(view.stage)),
    ]
    if journaled is not None:
        chosen = update is None or update.scheduled
        trial = journaled.trial
        facts += [
            ("number", "" if update is None else str(update.sequence)),
            ("step", f"{step}, chosen by its author" if chosen else step),
            ("author", texts.one_line(journaled.author)),
            ("note", texts.one_line(journaled.note)),
            ("edits", "" if update is not None else texts.one_line(edits_text(journaled.edits, most=100))),
            ("trial", "" if trial is None else texts.trial(trial)),
        ]
    else:
        facts += [("step", step), ("since", texts.date(view.at))]
    if update is not None:
        facts += [
            ("committed", f"{texts.date(update.committed_at)}, attempt {update.attempt}"),
            ("payload", f"{texts.size(update.nbytes)}, sha256 {texts.printable(update.sha256)}"),
        ]
    facts += [("waits for", texts.one_line(view.waits_for)), ("file", texts.printable(view.path or ""))]
    for receipt in view.receipts:
        facts += _receipt_facts(receipt)
    if view.outcome is not None:
        facts.append(("outcome", texts.outcome(view.outcome)))
    if refusal is not None:
        facts += [
            (name, texts.one_line(value)) for name, value in refusal.to_json().items() if value is not None
        ]
    return [*facts, ("reason", texts.one_line(view.reason))]


def _receipt_facts(receipt: Receipt) -> list[tuple[str, str | Text]]:
    equal = "equal" if len(set(receipt.digests.values())) == 1 else "NOT EQUAL"
    digests = sorted(receipt.digests.items())
    took = texts.seconds(receipt.propose_to_applied_secs)
    return [
        ("applied", f"at step {receipt.step}, attempt {receipt.attempt}: {receipt.stage}"),
        *((f"worker {rank}", texts.printable(digest)) for rank, digest in digests),
        ("digests", equal),
        ("took", f"{took} from the proposal until all applied it" if receipt.propose_to_applied_secs else ""),
        ("stall", f"training stood still for {texts.seconds(receipt.stall_secs)}"),
    ]


def _edits(run: Path, view: UpdateView) -> list[EditView]:
    """The edits with their values; none when the update's file is gone or was refused as no update.

    Raises:
        FileDamaged: The payload in the journal is not what was written.
    """
    update = _update(run, view)
    return [] if update is None else views_of(update.edits, read_run_info(run).schema)


def _update(run: Path, view: UpdateView) -> Update | None:
    if view.committed is not None:
        try:
            return load_update(run, view.committed.sequence)
        except PayloadRemoved:  # Every checkpoint contains it.
            return None
    try:
        return None if view.path is None else Update.load(view.path)
    except FileDamaged:  # That may be why it was refused; or the job has just taken it away.
        return None
