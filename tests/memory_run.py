"""A run in memory: the twin of `DirectoryRun`, for tests of what stands on `replicast.client.Run`.

run = MemoryRun(schema, directory)
run.push(Update().add("dense/bias", delta)).result()      # lands at once, on both workers
assert run.done == ["push"]
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from replicast.client import (
    Brief,
    CheckpointView,
    Metrics,
    Overview,
    Pulled,
    Pushed,
    Run,
    Series,
    UpdateView,
)
from replicast.core.entries import Receipt
from replicast.core.records import Stage
from replicast.errors import NoAnswer, NotFound, RequestRefused, UpdateIdInUse, UpdateRefused
from replicast.storage.run_files import WorkerNote
from replicast.update.audit_report import AuditReport
from replicast.update.schema import Schema, planned
from replicast.update.trial import Trial
from replicast.update.update import Update, edit_to_json
from tests.unit.test_audit import report

_WORKERS = 2


def equal_report(**fields: Any) -> AuditReport:
    """An audit that found all replicas equal."""
    return report(differences=(), declared=(), outcome="equal", healed=(), last_equal=None, **fields)


class MemoryRun(Run):
    """A run of two workers that train without end and do at once what they are asked for.

    Args:
        schema: The variables of its state.
        directory: Where files on their way in may lie.

    Attributes:
        done: What was asked of the job, in order; reading leaves nothing here.
        authors: Who has asked for each of them; empty if nobody was named.
        step: Where the job is.
        running: Whether the job answers.
        steps: Of the points of its loss.
        reads: How often its status was read.
    """

    poll_secs = 0.01

    def __init__(self, schema: Schema, directory: Path) -> None:
        self.where = str(directory)
        self.done: list[str] = []
        self.authors: list[str] = []
        self.step = 100
        self.running = True
        self.steps = 50
        self.reads = 0
        self._schema = schema
        self._views: dict[str, UpdateView] = {}
        self._updates: dict[str, Update] = {}
        self._numbers = itertools.count(1)
        self._audits: list[AuditReport] = []

    def do_brief(self) -> Brief:
        state = "training" if self.running else "lost"
        return Brief(self.where, state, f"{state}, step {self.step}", self.running, self.step, 2, time.time())

    def do_status(self) -> Overview:
        self.reads += 1
        brief, now = self.brief(), time.time()
        notes = (WorkerNote(rank, 1, "box", self.step, 0, now, self.running, "") for rank in range(_WORKERS))
        return Overview(
            run=self.where,
            time=now,
            state=brief.state,
            sentence=brief.sentence,
            running=brief.running,
            size=_WORKERS,
            attempt=0,
            journaled=True,
            workers=tuple(notes),
            metrics={"step": self.step, "time": now, "values": {"loss": float("nan")}},
            audit=self._audits[-1] if self._audits else None,
            operations=(),
            updates=tuple(self.log(5)),
            scheduled=tuple(view for view in self._views.values() if view.stage is Stage.SCHEDULED),
        )

    def do_schema(self) -> Schema:
        return self._schema

    def do_log(self, last: int | None) -> list[UpdateView]:
        found = [view for view in self._views.values() if view.sequence is not None]
        return found if last is None else found[-last:]

    def do_show(self, which: str | int, **_: Any) -> UpdateView:
        for view in self._views.values():
            if str(which) in (view.id, str(view.sequence)):
                return view
        raise NotFound(f"There is no update {which}.")

    def do_look(self, update_id: str, **_: Any) -> UpdateView:
        return self._views.get(update_id, UpdateView(id=update_id, stage=Stage.PROPOSED))

    def do_audits(self, last: int) -> list[AuditReport]:
        return self._audits[-last:]

    def do_audit(self, author: str, **_: Any) -> AuditReport:
        self._ask("audit", author)
        number, now = len(self._audits) + 1, time.time()
        found = equal_report(number=number, step=self.step, time=now, workers=_WORKERS, requests=())
        self._audits.append(found)
        return found

    def do_push(self, update: Update, at_step: int | None, trial: Trial | None, next_start: bool) -> Pushed:
        plan, known = planned(update, self._schema), self._updates.get(update.id)
        if known is not None:
            if known.content_digest() != update.content_digest():
                raise UpdateIdInUse("Another update with this id is in the journal", received=update.id)
            return Pushed(self, update.id, self._views[update.id].sequence)
        if not self.running and not next_start:
            raise UpdateRefused("The job is not running")
        self._ask("push", update.author)
        now, number, step = time.time(), next(self._numbers), self.step if at_step is None else at_step
        digests, is_later = dict.fromkeys(range(_WORKERS), "a" * 32), step > self.step
        receipt = Receipt(number, update.id, step, digests, 0.1, 0.001, now, Stage.VERIFIED)
        self._updates[update.id] = update
        self._views[update.id] = UpdateView(
            id=update.id,
            stage=Stage.SCHEDULED if is_later else Stage.VERIFIED,
            at=now,
            step=step,
            nbytes=update.nbytes,
            sequence=None if is_later else number,
            author=update.author,
            note=update.note,
            edits=tuple(edit_to_json(edit, lambda name, _array: name) for edit in plan.edits),
            trial=trial,
            receipts=() if is_later else (receipt,),
        )
        return Pushed(self, update.id)

    def do_withdraw(self, update_id: str) -> UpdateView:
        view = self.show(update_id)
        if view.stage is not Stage.SCHEDULED:
            raise UpdateRefused(f"It is too late: the update is {view.stage}")
        self._ask("withdraw")
        self._views[view.id] = replace(view, stage=Stage.WITHDRAWN)
        return self._views[view.id]

    def do_revert(
        self, which: str | int, note: str, dry_run: bool, next_start: bool, author: str, **_: Any
    ) -> Any:
        inverse = Update(note=note, author=author)
        for edit in self._updates[self.show(which).id].edits:
            inverse = inverse.add(edit.variable, -edit.arrays["value"])
        return self.examine(inverse) if dry_run else self.push(inverse, next_start=next_start)

    def do_pull(self, name: str, rows: tuple[int, ...] | None, max_bytes: int | None, **_: Any) -> Pulled:
        variable = self._schema.resolve(name)
        if max_bytes is not None and rows is None and variable.nbytes > max_bytes:
            raise RequestRefused(f"These are too many values of {variable.name}")
        self._ask("pull")
        if rows is not None and (not variable.shape or any(row >= variable.shape[0] for row in rows)):
            raise UpdateRefused("There is no such row", variable=variable.name)
        whole = np.zeros(variable.shape, np.float32)
        chosen = whole if rows is None else whole[list(rows)]
        return Pulled(variable.name, self.step, "d" * 32, "job", chosen, rows)

    def do_checkpoint(self, author: str, **_: Any) -> int:
        self._ask("checkpoint", author)
        return self.step

    def do_stop(self, author: str, **_: Any) -> int:
        self._ask("stop", author)
        return self.step

    def do_metrics(self, since: int | None, points: int) -> Metrics:
        steps = np.arange(min(since or 0, self.steps), self.steps)
        times = steps.astype(np.float64)
        series = Series(steps, times, np.reciprocal(times + 1.0)).decimated(points)
        return Metrics({"loss": series} if len(series) else {}, self.steps, since)

    def do_checkpoints(self) -> list[CheckpointView]:
        return []

    def do_log_lines(self, worker: int, attempt: int | None, **_: Any) -> list[str]:
        if worker >= _WORKERS or attempt not in (None, 0):
            raise NotFound(f"There is no log of worker {worker}")
        return ["a line"]

    def _ask(self, what: str, author: str = "") -> None:
        if not self.running:
            raise NoAnswer("The job is not running")
        self.done.append(what)
        self.authors.append(author)
