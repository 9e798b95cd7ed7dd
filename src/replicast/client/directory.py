"""A run in a directory: what its files tell, and requests to its job through its inbox."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import islice
from typing import Any, cast

from msgspec import structs

from replicast.client.examination import Examination, examine, views_of
from replicast.client.inbox_author import (
    audit,
    checkpoint,
    examine_revert,
    pull,
    stop,
    submit,
    submit_revert,
    withdraw,
)
from replicast.client.metrics import Metrics, MetricsFile
from replicast.client.notes import POLL_SECS, SeenJob, described_run, running_beside, schema_of, see
from replicast.client.run import (
    Brief,
    CheckpointView,
    LastMetrics,
    Overview,
    Pushed,
    Restart,
    Run,
    RunOperation,
)
from replicast.client.update_views import (
    committed_views,
    damage_text,
    find,
    look,
    refused_views,
    waiting_views,
)
from replicast.errors import FileDamaged, NotFound, PayloadRemoved, UpdateRefused
from replicast.files import RunDir, RunPath, below, read_json
from replicast.storage.checkpoints import CheckpointStore
from replicast.storage.claims import group_numbers, read_claim
from replicast.storage.run_files import (
    WITHOUT_CALLBACK,
    JobState,
    RunInfo,
    RunState,
    changes,
    damage,
    last_audits,
    last_metrics,
    lines_from_the_end,
    read_state,
)
from replicast.storage.updates import Updates, UpdateView, load_update
from replicast.update.trial import Trial
from replicast.update.update import Update

_LAST = 5  # So many of the last updates, and of the last refusals, are in an overview.
_LAST_CHANGES = 50
_MAX_LOG_LINES = 10_000
_MAX_OPERATIONS_BYTES = 2**20
_MOST_RESTARTS = 50
_OPERATION = ("id", "kind", "stage", "step", "waits_for", "author", "note")


def _restarts(path: RunDir) -> tuple[Restart, ...]:
    """The last restarts, oldest first; without those whose claim cannot be read."""
    found = []
    for group in sorted(group_numbers(path))[1:][-_MOST_RESTARTS:]:
        with contextlib.suppress(FileDamaged):
            claim = read_claim(path, group)
            found.append(Restart(claim.attempt, claim.claimed_at))
    return tuple(found)


# Functions that have the parameters of the operation, after the run's directory.
DONE_BY: dict[str, Callable[..., Any]] = {
    "schema": schema_of,
    "look": look,
    "audits": last_audits,
    "audit": audit,
    "withdraw": withdraw,
    "pull": pull,
    "checkpoint": checkpoint,
    "stop": stop,
}


class DirectoryRun(Run):
    """A run in a directory."""

    path: RunPath
    poll_secs = POLL_SECS

    def __init__(self, path: RunDir) -> None:
        self.path = below(path)
        self.where = str(path)
        self._metrics = MetricsFile(self.path / "metrics.jsonl")

    def perform(self, operation: RunOperation, arguments: dict[str, Any]) -> Any:
        return DONE_BY[operation.name](self.path, **arguments)

    def brief(self) -> Brief:
        seen = see(self.path)
        now = read_state(self.path, seen.notes, seen.now)
        return self._brief(described_run(self.path), seen, now)

    def _brief(self, info: RunInfo | None, seen: SeenJob, now: RunState) -> Brief:
        notes = seen.notes
        beside = "" if now.state.is_running else running_beside(self.path, seen.now)
        waits = any(note.waiting_for == WITHOUT_CALLBACK for note in notes)
        return Brief(
            run=self.where,
            state=now.state,
            sentence=f"{now.sentence}. {beside}".rstrip(" ."),
            running=now.state.is_running,
            step=max((note.step for note in notes), default=None),
            workers=_size(info, now),
            heard_at=max((note.time for note in notes), default=None),
            waits_for=WITHOUT_CALLBACK if waits else "",
        )

    def status(self) -> Overview:
        seen = see(self.path)
        now = read_state(self.path, seen.notes, seen.now)
        info = described_run(self.path)
        # A former, larger job may have left notes of workers that this one does not have.
        seen = replace(seen, notes=[note for note in seen.notes if note.rank < _size(info, now)])
        brief, told = self._brief(info, seen, now), changes(self.path)
        updates = self._updates()
        problems = [text for text in (updates.pop("problem"), damage(self.path)) if text]
        return Overview(
            run=self.where,
            time=seen.now,
            state=brief.state,
            sentence=brief.sentence,
            running=brief.running,
            size=brief.workers,
            attempt=now.attempt if info is None else max(info.attempt, now.attempt),
            journaled=info is None or info.journaled,
            workers=tuple(seen.notes),
            metrics=cast("LastMetrics | None", last_metrics(self.path)),
            audit=next(iter(last_audits(self.path, 1)), None),
            operations=tuple(read_operations(self.path)) if brief.running else (),
            changes=tuple(asdict(one) for one in told[-_LAST_CHANGES:]),
            restarts=_restarts(self.path),
            restarted=sum(one.state is JobState.RESTARTING for one in told),
            problem="\n".join(problems),
            **updates,
        )

    def _updates(self) -> dict[str, Any]:
        """The updates of an overview; those in the inbox can be seen also when the journal is damaged."""
        try:
            journal = Updates(self.path)
            updates = committed_views(self.path, journal, _order(journal)[-_LAST:])
            known = journal.history.by_id.keys() | journal.history.scheduled.keys()
            waiting = waiting_views(self.path, known)
            refused = refused_views(self.path, journal, known | {view.id for view in waiting})
            return {
                "updates": tuple(updates),
                "scheduled": tuple(journal.scheduled()),
                "waiting": tuple(waiting),
                "refused": tuple(refused[-_LAST:]),
                "problem": damage_text(journal),
            }
        except FileDamaged as error:
            return {"waiting": tuple(waiting_views(self.path, ())), "problem": str(error)}

    def log(self, last: int | None = None) -> list[UpdateView]:
        journal = Updates(self.path)
        order = _order(journal)
        return committed_views(
            self.path, journal, order if last is None else order[max(0, len(order) - last) :]
        )

    def show(self, which: str | int, max_bytes: int | None = None) -> UpdateView:
        view = find(self.path, str(which), Updates(self.path))
        if max_bytes is not None and (view.nbytes or 0) > max_bytes:
            return view
        update = None
        try:
            if view.sequence is not None:
                update = load_update(self.path, view.sequence)
            elif view.path is not None:
                update = Update.load(view.path, max_bytes=max_bytes)
        except PayloadRemoved:  # Every checkpoint contains it.
            return view
        except (FileDamaged, UpdateRefused) as error:
            # That may be why it was refused; or the job has just taken it away.
            return view if view.sequence is None else structs.replace(view, damage=str(error))
        info = described_run(self.path)
        schema = None if info is None else info.schema
        if update is None:
            return view
        edits = tuple(edit.to_json() for edit in views_of(update.edits, schema))
        return structs.replace(view, edits=edits, detailed=True)

    def examine(self, update: Update) -> Examination:
        info = described_run(self.path)
        if info is None:
            seen = see(self.path)
            said = read_state(self.path, seen.notes, seen.now).sentence
            told = f"{said}. The job checks this when its workers have met and its variables are known"
            return structs.replace(examine(update, None), warnings=(told,))
        return examine(update, info.schema)

    def push(
        self,
        update: Update,
        at_step: int | None = None,
        trial: Trial | None = None,
        next_start: bool = False,
    ) -> Pushed:
        number, warning = submit(self.path, update, at_step, trial, next_start=next_start)
        return Pushed(self, update.id, number, warning)

    def revert(
        self,
        which: str | int,
        note: str = "",
        dry_run: bool = False,
        force: bool = False,
        next_start: bool = False,
        author: str = "",
    ) -> Pushed | Examination:
        if dry_run:
            return examine_revert(self.path, which, force=force)
        id_, warning = submit_revert(self.path, which, note, author, force=force, next_start=next_start)
        return Pushed(self, id_, warning=warning)

    def metrics(self, since: int | None = None, points: int = 2000) -> Metrics:
        return self._metrics.read(since, points)

    def checkpoints(self) -> list[CheckpointView]:
        found = []
        for one in CheckpointStore(self.path).list():
            patched_by = "" if one.parent is None else str(one.parent.get("update_id", "an update"))
            fields = {name: getattr(one, name) for name in CheckpointView.__struct_fields__[:-1]}
            found.append(CheckpointView(**fields, patched_by=patched_by))
        return found

    def log_lines(self, worker: int, lines: int = 200, attempt: int | None = None) -> list[str]:
        logs = self.path / "logs"
        if attempt is None:
            name = f"worker-{worker:d}.log"
            found = (path.name[8:] for path in logs.glob("attempt-*") if (path / name).exists())
            attempt = max(
                (int(number) for number in found if number.isascii() and number.isdigit()), default=0
            )
        path = logs / f"attempt-{attempt:d}" / f"worker-{worker:d}.log"
        if not path.is_file():
            raise NotFound(
                f"There is no log {path}: `replicast run` writes it, unless another --log-dir was given."
            )
        last = islice(lines_from_the_end(path), min(max(lines, 0), _MAX_LOG_LINES))
        return [line.decode(errors="replace") for line in last][::-1]


def _order(journal: Updates) -> list[int]:
    """The committed updates in the order in which they are applied: after a restart, not that of numbers."""
    return [record.sequence for record in journal.history.after(frozenset())]


def read_operations(run: RunDir) -> list[dict[str, Any]]:
    """The operations that the job has in progress, as worker 0 last wrote them down."""
    try:
        listed = read_json(below(run) / "operations.json", max_bytes=_MAX_OPERATIONS_BYTES).get("operations")
    except FileDamaged:  # Missing when nothing ever was; replaced without waiting for the disk.
        return []
    found = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    return [{name: one.get(name) for name in _OPERATION} for one in found]


def _size(info: RunInfo | None, now: RunState) -> int:
    if info is not None:
        return info.workers
    return 0 if now.change is None else now.change.workers
