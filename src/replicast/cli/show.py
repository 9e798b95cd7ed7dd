"""`replicast show`: everything about one update."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from replicast.cli.rundirs import run_argument

if TYPE_CHECKING:
    from rich.text import Text

    from replicast.cli.examination import EditView
    from replicast.cli.standings import Standing
    from replicast.update import Update


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

    Exit code: 0; 1 when there is no such update or its file is damaged; 2 when RUN is not a run directory.
    """  # noqa: D301 - click wants a real backspace
    standing = the_one(run, which)
    if as_json:
        described = standing.to_json()
        described["edits"] = [edit.to_json() for edit in edits_of(run, standing)]
        click.echo(json.dumps(described))
        return
    from replicast.cli.tables import edits_table, make_console

    console = make_console()
    print_facts(standing)
    edits = edits_of(run, standing)  # After the facts, since it fails when the file is damaged.
    if edits:
        console.print()
        console.print(edits_table(edits, extremes=True))


def the_one(run: Path, which: str) -> Standing:
    """The update that is meant.

    Raises:
        Refused: There is none, or several may be meant.
    """
    from replicast.cli import Refused
    from replicast.cli.standings import matching
    from replicast.cli.texts import printable

    found = matching(run, which)
    if len(found) == 1:
        return found[0]
    if not found:
        raise Refused(
            f"There is no update {printable(which)} in {run}. `replicast status` and `log` list them."
        )
    listed = ", ".join(printable(one.id) for one in found[:5])
    raise Refused(f"{printable(which)} may be {len(found)} updates: {listed}. Give more of the id.")


def edits_of(run: Path, standing: Standing) -> list[EditView]:
    """The edits with their numbers; none when the update's file is gone or was refused as no update.

    Raises:
        FileDamaged: The payload in the journal is not what was written.
    """
    from replicast.cli.examination import variable_of, view_of
    from replicast.runfiles import read_run_info

    update = _update_of(run, standing)
    schema = read_run_info(run).schema
    return [] if update is None else [view_of(edit, variable_of(edit, schema)) for edit in update.edits]


def print_facts(standing: Standing) -> None:
    """Who, what, when and how it went."""
    from replicast.cli.tables import facts_table, make_console, stage_cell
    from replicast.cli.texts import (
        full_time_text,
        one_line,
        outcome_text,
        printable,
        seconds_text,
        size_text,
        trial_text,
    )

    facts: list[tuple[str, str | Text]] = [
        ("update", printable(standing.id)),
        ("stage", stage_cell(standing)),
    ]
    record, receipt = standing.record, standing.receipt
    if record is not None:
        chosen = ", chosen by its author" if record.scheduled else ""
        facts += [
            ("number", str(record.sequence)),
            ("step", f"{standing.step}{chosen}"),
            ("author", one_line(record.author)),
            ("note", one_line(record.note)),
            ("committed", f"{full_time_text(record.committed_at)}, attempt {record.attempt}"),
            ("payload", f"{size_text(record.nbytes)}, sha256 {printable(record.sha256)}"),
        ]
        if record.trial is not None:
            facts.append(("trial", one_line(trial_text(record.trial))))
    elif standing.step is not None:
        facts.append(("step", str(standing.step)))
    if record is None and standing.at:
        facts.append(("since", full_time_text(standing.at)))
    if standing.path is not None:
        facts.append(("file", printable(str(standing.path))))
    if receipt is not None:
        equal = "equal" if len(set(receipt.digests.values())) == 1 else "NOT EQUAL"
        facts += [
            (f"worker {rank}", f"{printable(digest)}") for rank, digest in sorted(receipt.digests.items())
        ]
        facts += [
            ("digests", equal),
            (
                "took",
                f"{seconds_text(receipt.propose_to_applied_secs)} from the proposal until all applied it",
            ),
            ("stall", f"{seconds_text(receipt.stall_secs)} that training stood still"),
        ]
    if standing.trial is not None:
        facts.append(("outcome", one_line(outcome_text(standing.trial))))
    if standing.refusal is not None:
        labelled = standing.refusal.to_json()
        facts += [(name, one_line(str(value))) for name, value in labelled.items() if value is not None]
    if standing.reason:
        facts.append(("reason", one_line(standing.reason)))
    make_console().print(facts_table([(name, value) for name, value in facts if value]))


def _update_of(run: Path, standing: Standing) -> Update | None:
    from replicast.errors import UpdateRefused
    from replicast.journal import Journal
    from replicast.update import Update

    if standing.record is not None:
        return Journal(run).load(standing.record.sequence)
    if standing.path is None:
        return None
    try:
        return Update.load(standing.path)
    except UpdateRefused:  # That may be why it was refused; or the job has just taken it away.
        return None
