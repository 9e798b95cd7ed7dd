"""`replicast show`: everything about one update."""

from __future__ import annotations

import json

import click
from rich.text import Text

from replicast.cli import Failed, texts
from replicast.cli.arguments import run_argument
from replicast.cli.tables import facts_table, make_console
from replicast.cli.update_tables import edits_table, edits_text, stage_cell
from replicast.client import Run
from replicast.client.updates import UpdateView
from replicast.core.entries import Receipt


@click.command()
@run_argument
@click.argument("which", metavar="NUMBER|ID")
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def show(run: Run, which: str, as_json: bool) -> None:
    """Show everything about one update.

    By its number in the journal, or by its id or the beginning of it; also one that waits or was refused.

    \b
    Examples:
      replicast show runs/first 12
      replicast show runs/first 3f2a91c4 --json

    Damaged files of the journal are named; they hide nothing else.

    Exit code: 0; 1 when there is no such update or its file is damaged; 2 when RUN is not a run directory.
    """
    view, problem = run.show(which), run.status().problem
    if problem:
        click.echo(texts.printable_lines(problem), err=True)
    if as_json:
        click.echo(json.dumps(view.to_json()))
    else:
        console = make_console()
        console.print(facts_table(_facts(view)))
        if view.details:
            console.print()
            console.print(edits_table(view.details, extremes=True))
    if view.damage:
        raise Failed(texts.printable(view.damage))


def _facts(view: UpdateView) -> list[tuple[str, str | Text]]:
    """Who, what, when and how it went; those that are not known are empty."""
    step = "" if view.step is None else str(view.step)
    edits = "" if view.sequence is not None else edits_text(view.edits, most=100)
    committed, payload = "", ""
    if view.sequence is not None:
        committed = f"{texts.date(view.committed_at or 0)}, attempt {view.attempt}"
        payload = f"{texts.size(view.nbytes or 0)}, sha256 {texts.printable(view.sha256)}"
    facts: list[tuple[str, str | Text]] = [
        ("update", texts.printable(view.id)),
        ("stage", stage_cell(view.stage)),
        ("number", "" if view.sequence is None else str(view.sequence)),
        ("step", f"{step}, chosen by its author" if view.scheduled else step),
        ("author", texts.one_line(view.author)),
        ("note", texts.one_line(view.note)),
        ("reverts", "" if view.reverts is None else f"update {view.reverts}"),
        ("reverted", "" if view.reverted_by is None else f"by update {view.reverted_by}"),
        ("edits", texts.one_line(edits)),
        ("trial", "" if view.trial is None else texts.trial(view.trial)),
        ("since", texts.date(view.at) if view.at and view.sequence is None else ""),
        ("committed", committed),
        ("payload", payload),
        ("waits for", texts.one_line(view.waits_for)),
        ("file", texts.printable(view.path or "")),
    ]
    for receipt in view.receipts:
        facts += _receipt_facts(receipt)
    facts.append(("outcome", "" if view.outcome is None else texts.outcome(view.outcome)))
    if view.refusal is not None:
        told = view.refusal.to_json().items()
        facts += [(name, texts.one_line(value)) for name, value in told if value is not None]
    return [*facts, ("reason", texts.one_line(view.reason))]


def _receipt_facts(receipt: Receipt) -> list[tuple[str, str | Text]]:
    if receipt.checkpoint:
        where = f"the checkpoint {texts.printable(receipt.checkpoint)} of step {receipt.step}"
        return [
            ("applied", f"to {where}, while no job ran: by no worker"),
            ("digest", ", ".join(map(texts.printable, receipt.digests.values()))),
        ]
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
