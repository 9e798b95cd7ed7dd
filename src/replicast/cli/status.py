"""`replicast status`: the workers of a run, its metrics, what is under way, its updates and what waits."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from replicast.audits.report import AuditReport
from replicast.cli import Failed, texts
from replicast.cli.log import no_updates_text
from replicast.cli.rundirs import ABSENT_SECS, is_running, not_running_text, run_argument, running_beside
from replicast.cli.tables import is_live, make_console, make_table
from replicast.cli.update_views import (
    UpdateView,
    committed_views,
    damage_text,
    refused_views,
    scheduled_views,
    stage_cell,
    updates_table,
    waiting_views,
    what_cell,
)
from replicast.core.stage import Stage
from replicast.errors import FileDamaged
from replicast.files import read_json
from replicast.storage.auditfiles import last_audits
from replicast.storage.runfiles import ENDED, WorkerNote, last_metrics, read_run_info, read_worker_notes
from replicast.storage.updates import Updates
from replicast.update.parts import factor_to_json

WATCH_SECS = 1.0
_LAST = 5  # So many of the last updates, and of the last refusals, are shown.
_MAX_OPERATIONS_BYTES = 2**20
_OPERATION = ("id", "kind", "stage", "step", "waits_for", "author", "note")
_AUDIT_STYLES = {"equal": "green", "healed": "yellow"}


@click.command()
@run_argument
@click.option("--json", "as_json", is_flag=True, help="As one JSON object; with --watch one per line.")
@click.option("--watch", is_flag=True, help="Look again every second, until Ctrl-C.")
def status(run: Path, as_json: bool, watch: bool) -> None:
    """Show the workers, the metrics and the updates of a run.

    \b
    Examples:
      replicast status runs/first
      replicast status runs/first --watch
      replicast status runs/first --json | jq .workers[].step

    Exit code: 0, also when the job is not running; 1 when a file of the run is damaged, which is named after
    everything else is shown; 2 when RUN is not a run directory.
    """  # noqa: D301 - click wants a real backspace
    with contextlib.suppress(KeyboardInterrupt):  # The way to end --watch.
        if watch and not as_json and is_live(make_console()):
            _watch(run)
        while True:
            seen = look_at(run)
            if as_json:
                click.echo(json.dumps(seen.to_json()))
            else:
                make_console().print(_rendered(seen))
            if not watch and seen.problem:
                raise Failed("\n".join(texts.printable(line) for line in seen.problem.split("\n")))
            if not watch:
                return
            time.sleep(WATCH_SECS)


@dataclass(frozen=True, slots=True)
class Overview:
    """A run at one moment: what its workers last said, its metrics, its last audit, and its updates."""

    run: Path
    size: int
    workers: list[WorkerNote]
    metrics: Mapping[str, Any] | None
    audit: AuditReport | None
    operations: list[dict[str, Any]]
    updates: list[UpdateView]
    scheduled: list[UpdateView]
    waiting: list[UpdateView]
    refused: list[UpdateView]
    problem: str = ""
    """What is wrong with the journal: what its damaged files said is missing above."""

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        now, metrics = time.time(), self.metrics
        if metrics is not None:
            values = {name: factor_to_json(value) for name, value in metrics["values"].items()}
            metrics = {**metrics, "values": values}
        return {
            "run": str(self.run),
            "time": now,
            "running": is_running(self.workers),
            "size": self.size,
            "workers": [note.to_json() | {"age_secs": now - note.time} for note in self.workers],
            "metrics": metrics,
            "audit": None if self.audit is None else self.audit.to_json(),
            "operations": self.operations,
            "problem": self.problem,
            **{
                name: [view.to_json() for view in getattr(self, name)]
                for name in ("updates", "scheduled", "waiting", "refused")
            },
        }


def look_at(run: Path) -> Overview:
    """Looks at a run.

    Raises:
        FileDamaged: A file of the run cannot be trusted.
    """
    size = read_run_info(run).workers
    # A former, larger job may have left notes of workers that this one does not have.
    notes = [note for note in read_worker_notes(run) if note.rank < size]
    updates, scheduled, waiting, refused = [], [], waiting_views(run, ()), []
    problem = ""
    try:
        journal = Updates(run)
        updates = committed_views(run, journal, sorted(journal.committed)[-_LAST:])
        known = {record.id for record, _ in journal.committed.values()} | set(journal.scheduled)
        scheduled, waiting = scheduled_views(journal), waiting_views(run, known)
        refused = refused_views(run, journal, known | {view.id for view in waiting})[-_LAST:]
        problem = damage_text(journal)
    except FileDamaged as error:  # The rest of the run can be seen all the same.
        problem = str(error)
    audit = next(iter(last_audits(run, 1)), None)
    operations = read_operations(run) if is_running(notes) else []
    metrics = last_metrics(run)
    return Overview(
        run, size, notes, metrics, audit, operations, updates, scheduled, waiting, refused, problem
    )


def read_operations(run: Path) -> list[dict[str, Any]]:
    """The operations that the job has in progress, as worker 0 last wrote them down."""
    try:
        listed = read_json(run / "operations.json", max_bytes=_MAX_OPERATIONS_BYTES).get("operations")
    except FileDamaged:  # Missing when nothing ever was; replaced without waiting for the disk.
        return []
    found = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    return [{name: one.get(name) for name in _OPERATION} for one in found]


def _watch(run: Path) -> None:
    # Drawn by this thread alone: nothing is left behind after Ctrl-C.
    with Live(console=make_console(), auto_refresh=False) as live:
        while True:
            live.update(_rendered(look_at(run)), refresh=True)
            time.sleep(WATCH_SECS)


def _rendered(seen: Overview) -> RenderableType:
    """The overview for a screen of 80 columns."""
    parts: list[RenderableType] = [_head(seen), _workers_table(seen)]
    now = time.time()
    if seen.metrics is not None:
        ago = f"  (step {seen.metrics['step']}, {texts.age(now - seen.metrics['time'])} ago)"
        parts.append(Text(f"\n{texts.metrics(seen.metrics['values'])}").append(ago, style="dim"))
    if seen.audit is not None:
        line = Text(texts.one_line(seen.audit), style=_AUDIT_STYLES.get(seen.audit.outcome, "red"))
        parts.append(line.append(f"  ({texts.age(now - seen.audit.time)} ago)", style="dim"))
    under_way = [one for one in seen.operations if one["stage"] != Stage.SCHEDULED]
    if under_way:
        parts += [_title("under way"), _operations_table(under_way)]
    if seen.updates:
        parts += [_title(f"last {texts.counted(len(seen.updates), 'update')}"), updates_table(seen.updates)]
    else:
        parts.append(_title(no_updates_text(seen.run)))
    for title, views in (("scheduled", seen.scheduled), ("in the inbox", seen.waiting)):
        if views:
            parts += [_title(f"{len(views)} {title}"), _pending_table(views)]
    if seen.refused:
        parts += [_title("refused"), _refused_table(seen.refused)]
    return Group(*parts)


def _head(seen: Overview) -> Text:
    head = Text(f"{texts.printable(seen.run)}: {texts.counted(seen.size, 'worker')}", style="bold")
    if not is_running(seen.workers):
        said = f"{not_running_text(seen.workers)}. {running_beside(seen.run)}".rstrip()
        return head.append(f"\n{said}", style="red")
    doing = (
        "training" if any(note.training for note in seen.workers) else "running, not inside a training loop"
    )
    return head.append(f", {doing}, step {max(note.step for note in seen.workers)}")


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _workers_table(seen: Overview) -> Table:
    table = make_table("worker", "process", "host", "step", "attempt", "last note", right=("worker", "step"))
    notes = {note.rank: note for note in seen.workers}
    for rank in range(seen.size):
        note = notes.get(rank)
        if note is None:
            table.add_row(str(rank), "", "", "", "", Text("never seen", style="red"))
        else:
            cells = str(note.pid), texts.one_line(note.host), str(note.step), str(note.attempt)
            table.add_row(str(rank), *cells, _last_note_cell(note))
    return table


def _last_note_cell(note: WorkerNote) -> Text:
    age = time.time() - note.time
    if note.waiting_for == ENDED:
        return Text(f"exited {texts.age(age)} ago", style="dim")
    absent = Text(f"not seen for {texts.age(age)}", style="red")
    cell = absent if age > ABSENT_SECS else Text(f"{texts.age(age)} ago")
    if note.waiting_for:
        cell.append(f", waits for {texts.one_line(note.waiting_for)}", style="yellow")
    return cell


def _operations_table(operations: list[dict[str, Any]]) -> Table:
    table = make_table("what", "stage", "step", "waits for", "who", right=("step",), whole=("stage", "step"))
    for one in operations:
        said = {name: "" if value is None else texts.one_line(value) for name, value in one.items()}
        who = ": ".join(said[name] for name in ("author", "note") if said[name])
        what = f"{said['kind']} {texts.short_id(said['id'])}".strip()
        table.add_row(what, said["stage"], said["step"], said["waits_for"], Text(who, style="dim"))
    return table


def _pending_table(views: list[UpdateView]) -> Table:
    right, whole = ("step", "size"), ("stage", "step", "size", "since")
    table = make_table("id", "stage", "step", "what", "size", "since", right=right, whole=whole)
    for view in views:
        step, since = "" if view.step is None else str(view.step), ""
        if view.at:
            since = f"{texts.age(time.time() - view.at)} ago"
        what = what_cell(view)
        if view.waits_for:
            what.append(f"waits for {texts.one_line(view.waits_for)}", style="yellow")
        cells = stage_cell(view.stage), step, what, texts.size(view.nbytes or 0), since
        table.add_row(texts.short_id(view.id), *cells)
    return table


def _refused_table(views: list[UpdateView]) -> Table:
    table = make_table("id", "why", "when", whole=("when",))
    for view in views:
        why = "" if view.refusal is None else view.refusal.problem
        if view.refusal is not None and view.refusal.variable is not None:
            why += f" ({view.refusal.variable})"
        table.add_row(texts.short_id(view.id), texts.one_line(why), texts.when(view.at))
    return table
