"""A run at one moment: what `replicast status` shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from replicast.audit import AuditReport
from replicast.auditfiles import last_audits
from replicast.cli.auditing import audit_line
from replicast.cli.rundirs import ABSENT_SECS, is_running, not_running_text, running_beside
from replicast.cli.standings import Standing, committed, refused, waiting
from replicast.cli.tables import make_table, refusal_cell, stage_cell, updates_table
from replicast.cli.texts import (
    age_text,
    counted,
    no_updates_text,
    number_text,
    one_line,
    printable,
    short_id,
    size_text,
    when_text,
)
from replicast.parts import factor_to_json
from replicast.runfiles import WorkerNote, last_metrics, read_run_info, read_worker_notes

LAST = 5
"""So many of the last updates, and of the last refusals, are shown."""


@dataclass(frozen=True, slots=True)
class Overview:
    """A run at one moment.

    Attributes:
        run: The run directory.
        workers: How many workers the job has.
        notes: What they last said, by rank.
        metrics: The last line of metrics, if there is one.
        updates: The last committed updates.
        waiting: What waits in the inbox.
        refused: What was refused last.
        audit: The last audit, if there was one.
        journaled: Whether the job keeps a journal.
        now: When it was looked at, in seconds since 1970.
    """

    run: Path
    workers: int
    notes: tuple[WorkerNote, ...]
    metrics: Mapping[str, Any] | None
    updates: tuple[Standing, ...]
    waiting: tuple[Standing, ...]
    refused: tuple[Standing, ...]
    audit: AuditReport | None
    journaled: bool
    now: float

    @property
    def is_running(self) -> bool:
        """Whether a worker has said something lately."""
        return is_running(list(self.notes), self.now)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        metrics = None
        if self.metrics is not None:
            values = {name: factor_to_json(value) for name, value in self.metrics["values"].items()}
            metrics = {"step": self.metrics["step"], "time": self.metrics["time"], "values": values}
        return {
            "run": str(self.run),
            "time": self.now,
            "running": self.is_running,
            "size": self.workers,
            "workers": [note.to_json() | {"age_secs": self.now - note.time} for note in self.notes],
            "metrics": metrics,
            "audit": None if self.audit is None else self.audit.to_json(),
            "updates": [standing.to_json() for standing in self.updates],
            "waiting": [standing.to_json() for standing in self.waiting],
            "refused": [standing.to_json() for standing in self.refused],
        }


def look(run: Path, now: float) -> Overview:
    """Looks at a run.

    Raises:
        FileDamaged: A file of the run cannot be trusted.
    """
    info = read_run_info(run)
    updates = committed(run)
    return Overview(
        run=run,
        workers=info.workers,
        # A former, larger job may have left notes of workers that this one does not have.
        notes=tuple(note for note in read_worker_notes(run) if note.rank < info.workers),
        metrics=last_metrics(run),
        updates=tuple(updates[-LAST:]),
        waiting=tuple(waiting(run, [standing.id for standing in updates])),
        refused=tuple(refused(run)[-LAST:]),
        audit=next(iter(last_audits(run, 1)), None),
        journaled=info.journaled,
        now=now,
    )


def rendered(seen: Overview) -> RenderableType:
    """The overview for a screen of 80 columns."""
    parts: list[RenderableType] = [_head(seen), _workers_table(seen)]
    if seen.metrics is not None:
        parts.append(_metrics_line(seen.metrics, seen.now))
    if seen.audit is not None:
        parts.append(audit_line(seen.audit, seen.now))
    if seen.updates:
        parts += [
            _title(f"last {counted(len(seen.updates), 'update')}"),
            updates_table(seen.updates, seen.now),
        ]
    else:
        parts.append(_title(no_updates_text(journaled=seen.journaled)))
    if seen.waiting:
        parts += [_title(f"{len(seen.waiting)} in the inbox"), _waiting_table(seen)]
    if seen.refused:
        parts += [_title("refused"), _refused_table(seen)]
    return Group(*parts)


def _head(seen: Overview) -> Text:
    head = Text(f"{printable(str(seen.run))}: {counted(seen.workers, 'worker')}", style="bold")
    if not seen.is_running:
        said = (
            f"{not_running_text(list(seen.notes), seen.now)}. {running_beside(seen.run, seen.now)}".rstrip()
        )
        return head.append(f"\n{said}", style="red")
    doing = "training" if any(note.training for note in seen.notes) else "running, not inside a training loop"
    return head.append(f", {doing}, step {max(note.step for note in seen.notes)}")


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _workers_table(seen: Overview) -> Table:
    table = make_table("worker", "process", "host", "step", "attempt", "last word", right=("worker", "step"))
    notes = {note.rank: note for note in seen.notes}
    for rank in range(seen.workers):
        note = notes.get(rank)
        if note is None:
            table.add_row(str(rank), "", "", "", "", Text("never seen", style="red"))
            continue
        age = seen.now - note.time
        if age > ABSENT_SECS:
            word = Text(f"not seen for {age_text(age)}", style="red")
        else:
            word = Text(f"{age_text(age)} ago")
        if note.waiting_for:
            word.append(f", waits for {one_line(note.waiting_for)}", style="yellow")
        table.add_row(str(rank), str(note.pid), one_line(note.host), str(note.step), str(note.attempt), word)
    return table


def _metrics_line(metrics: Mapping[str, Any], now: float) -> Text:
    values = "  ".join(f"{one_line(name)} {number_text(value)}" for name, value in metrics["values"].items())
    return Text(f"\n{values}").append(
        f"  (step {metrics['step']}, {age_text(now - metrics['time'])} ago)", style="dim"
    )


def _waiting_table(seen: Overview) -> Table:
    table = make_table("id", "stage", "size", "waits for", right=("size",), whole=("stage", "size"))
    for one in seen.waiting:
        size = "" if one.nbytes is None else size_text(one.nbytes)
        table.add_row(short_id(one.id), stage_cell(one), size, age_text(seen.now - one.at))
    return table


def _refused_table(seen: Overview) -> Table:
    table = make_table("id", "why", "when", whole=("when",))
    for one in seen.refused:
        table.add_row(printable(short_id(one.id)), refusal_cell(one), when_text(one.at, seen.now))
    return table
