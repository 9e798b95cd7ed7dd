"""`replicast status`: the workers of a run, its metrics, what is under way, its updates and what waits."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from replicast.cli import Failed, texts
from replicast.cli.arguments import run_argument
from replicast.cli.tables import is_live, make_console, make_table
from replicast.cli.update_tables import stage_cell, updates_table, what_cell
from replicast.client import Run
from replicast.client.updates import UpdateView
from replicast.client.views import Overview
from replicast.core.records import Stage
from replicast.storage.run_files import ENDED, State, WorkerNote, absent_secs, age

WATCH_SECS = 1.0
_STATE_STYLES = {
    State.FAILED: "red",
    State.LOST: "red",
    State.NEVER_STARTED: "yellow",
    State.STARTING: "yellow",
    State.RESTARTING: "yellow",
    State.STOPPED: "yellow",
    State.ENDING: "yellow",
}
_AUDIT_STYLES = {"equal": "green", "healed": "yellow"}


@click.command()
@run_argument
@click.option("--json", "as_json", is_flag=True, help="As one JSON object; with --watch one per line.")
@click.option("--watch", is_flag=True, help="Look again every second, until Ctrl-C.")
def status(run: Run, as_json: bool, watch: bool) -> None:
    """Show the workers, the metrics and the updates of a run.

    \b
    Examples:
      replicast status runs/first
      replicast status runs/first --watch
      replicast status runs/first --json | jq .workers[].step

    Exit code: 0 while the job starts, trains, restarts or ends, and when it has finished or was stopped; 1
    when it has failed, was lost without a word, or a file of the run is damaged, which is named after
    everything else is shown; 2 when RUN is not a run directory.
    """
    with contextlib.suppress(KeyboardInterrupt):  # The way to end --watch.
        if watch and not as_json and is_live(make_console()):
            _watch(run)
        while True:
            seen = run.status()
            if as_json:
                click.echo(json.dumps(seen.to_json()))
            else:
                make_console().print(_rendered(seen))
            if not watch and seen.problem:
                raise Failed(texts.printable_lines(seen.problem))
            if not watch:
                sys.exit(1 if seen.state in (State.FAILED, State.LOST) else 0)
            time.sleep(WATCH_SECS)


def _watch(run: Run) -> None:
    # Drawn by this thread alone: nothing is left behind after Ctrl-C.
    with Live(console=make_console(), auto_refresh=False) as live:
        while True:
            live.update(_rendered(run.status()), refresh=True)
            time.sleep(WATCH_SECS)


def _rendered(seen: Overview) -> RenderableType:
    """The overview for a screen of 80 columns."""
    parts: list[RenderableType] = [_head(seen), _workers_table(seen)]
    now = seen.time
    if seen.metrics is not None:
        ago = f"  (step {seen.metrics['step']}, {age(now - seen.metrics['time'])} ago)"
        parts.append(Text(f"\n{texts.metrics(seen.metrics['values'])}").append(ago, style="dim"))
    if seen.audit is not None:
        line = Text(texts.one_line(seen.audit), style=_AUDIT_STYLES.get(seen.audit.outcome, "red"))
        attempt = seen.audit.attempt
        earlier = "" if attempt in (None, seen.attempt) else f", in attempt {attempt}: none since the restart"
        parts.append(line.append(f"  ({age(now - seen.audit.time)} ago{earlier})", style="dim"))
    under_way = [one for one in seen.operations if one["stage"] != Stage.SCHEDULED]
    if under_way:
        parts += [_title("under way"), _operations_table(under_way)]
    if seen.updates:
        parts += [_title(f"last {texts.counted(len(seen.updates), 'update')}"), updates_table(seen.updates)]
    else:
        parts.append(_title(texts.no_updates(journaled=seen.journaled)))
    for title, views in (("scheduled", seen.scheduled), ("in the inbox", seen.waiting)):
        if views:
            waits = "" if seen.running else ", for the next start that trains"
            parts += [_title(f"{len(views)} {title}{waits}"), _pending_table(views, now)]
    if seen.refused:
        parts += [_title("refused"), _refused_table(seen.refused)]
    return Group(*parts)


def _head(seen: Overview) -> Text:
    head = Text(texts.printable(seen.sentence), style=f"bold {_STATE_STYLES.get(State(seen.state), 'green')}")
    head.append(f"\n{texts.printable(seen.run)}: {texts.counted(seen.size, 'worker')}", style="bold")
    if seen.state == State.FAILED and seen.changes:
        for line in seen.changes[-1]["last_lines"]:
            head.append(f"\n  {texts.one_line(line)}", style="dim")
    return head


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
            table.add_row(str(rank), *cells, _last_note_cell(note, seen))
    return table


def _last_note_cell(note: WorkerNote, seen: Overview) -> Text:
    silent = seen.time - note.time
    if note.attempt < seen.attempt:
        return Text("no note in this attempt yet", style="dim")
    if note.waiting_for == ENDED:
        return Text(f"exited {age(silent)} ago", style="dim")
    absent = Text(f"not seen for {age(silent)}", style="red")
    cell = absent if silent > absent_secs(seen.size) else Text(f"{age(silent)} ago")
    if note.waiting_for:
        cell.append(f", waits for {texts.one_line(note.waiting_for)}", style="yellow")
    return cell


def _operations_table(operations: list[Mapping[str, Any]]) -> Table:
    table = make_table("what", "stage", "step", "waits for", "who", right=("step",), whole=("stage", "step"))
    for one in operations:
        said = {name: "" if value is None else texts.one_line(value) for name, value in one.items()}
        who = ": ".join(said[name] for name in ("author", "note") if said[name])
        what = f"{said['kind']} {texts.short_id(said['id'])}".strip()
        table.add_row(what, said["stage"], said["step"], said["waits_for"], Text(who, style="dim"))
    return table


def _pending_table(views: Sequence[UpdateView], now: float) -> Table:
    right, whole = ("step", "size"), ("stage", "step", "size", "since")
    table = make_table("id", "stage", "step", "what", "size", "since", right=right, whole=whole)
    for view in views:
        step, since = "" if view.step is None else str(view.step), ""
        if view.at:
            since = f"{age(now - view.at)} ago"
        what = what_cell(view)
        if view.waits_for:
            what.append("\n" if what else "")
            what.append(f"waits for {texts.one_line(view.waits_for)}", style="yellow")
        cells = stage_cell(view.stage), step, what, texts.size(view.nbytes or 0), since
        table.add_row(texts.short_id(view.id), *cells)
    return table


def _refused_table(views: Sequence[UpdateView]) -> Table:
    table = make_table("id", "why", "when", whole=("when",))
    for view in views:
        why = "" if view.refusal is None else view.refusal.problem
        if view.refusal is not None and view.refusal.variable is not None:
            why += f" ({view.refusal.variable})"
        table.add_row(texts.short_id(view.id), texts.one_line(why), texts.when(view.at))
    return table
