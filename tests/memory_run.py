"""A run in memory: the twin of `DirectoryRun`, for tests of what stands on `replicast.client.Run`.

run = MemoryRun(schema, directory)
run.push(Update().add("dense/bias", delta)).result()      # lands at once, on both workers
assert run.done == ["push"]
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from replicast.client import (
    Brief,
    CheckpointView,
    Examination,
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
        self.lines = {0: ["a line"], 1: ["another line"]}
        self.steps = 50
        self.reads = 0
        self._schema = schema
        self._views: dict[str, UpdateView] = {}
        self._updates: dict[str, Update] = {}
        self._numbers = itertools.count(1)
        self._audits: list[AuditReport] = []

    def brief(self) -> Brief:
        state = "training" if self.running else "lost"
        return Brief(self.where, state, f"{state}, step {self.step}", self.running, self.step, 2, time.time())

    def status(self) -> Overview:
        self.reads += 1
        brief, now = self.brief(), time.time()
        notes = tuple(
            WorkerNote(rank, 1, "box", self.step, 0, now, self.running, "") for rank in range(_WORKERS)
        )
        return Overview(
            run=self.where,
            time=now,
            state=brief.state,
            sentence=brief.sentence,
            running=brief.running,
            size=_WORKERS,
            attempt=0,
            journaled=True,
            workers=notes,
            metrics={"step": self.step, "time": now, "values": {"loss": float("nan")}},
            audit=self._audits[-1] if self._audits else None,
            operations=(),
            updates=tuple(self.log(5)),
            scheduled=tuple(view for view in self._views.values() if view.stage is Stage.SCHEDULED),
        )

    def schema(self) -> Schema:
        return self._schema

    def log(self, last: int | None = None) -> list[UpdateView]:
        found = [view for view in self._views.values() if view.sequence is not None]
        return found if last is None else found[-last:]

    def show(self, which: str | int, max_bytes: int | None = None) -> UpdateView:
        given = str(which)
        found = [view for view in self._views.values() if given in (view.id, str(view.sequence))]
        found = found or [view for view in self._views.values() if given and view.id.startswith(given)]
        if len(found) != 1:
            raise NotFound(f"There is no update {given}.")
        return found[0]

    def look(self, update_id: str, thoroughly: bool = False) -> UpdateView:
        return self._views.get(update_id, UpdateView(id=update_id, stage=Stage.PROPOSED))

    def audits(self, last: int = 10) -> list[AuditReport]:
        return self._audits[-last:]

    def audit(self, timeout: float = 300.0, author: str = "") -> AuditReport:
        self._ask("audit", author)
        number, now = len(self._audits) + 1, time.time()
        found = equal_report(number=number, step=self.step, time=now, workers=_WORKERS, requests=())
        self._audits.append(found)
        return found

    def push(
        self,
        update: Update,
        at_step: int | None = None,
        trial: Trial | None = None,
        next_start: bool = False,
    ) -> Pushed:
        plan = planned(update, self._schema)
        known = self._updates.get(update.id)
        if known is not None:
            if known.content_digest() != update.content_digest():
                raise UpdateIdInUse("Another update with this id is in the journal", received=update.id)
            return Pushed(self, update.id, self._views[update.id].sequence)
        if not self.running and not next_start:
            raise UpdateRefused("The job is not running")
        self.done.append("push")
        self.authors.append(update.author)
        number, step = next(self._numbers), self.step if at_step is None else at_step
        receipt = Receipt(
            number, update.id, step, {0: "a" * 32, 1: "a" * 32}, 0.1, 0.001, time.time(), Stage.VERIFIED
        )
        is_later = at_step is not None and at_step > self.step
        self._updates[update.id] = update
        self._views[update.id] = UpdateView(
            id=update.id,
            stage=Stage.SCHEDULED if is_later else Stage.VERIFIED,
            at=time.time(),
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

    def withdraw(self, update_id: str) -> UpdateView:
        view = self.show(update_id)
        if view.stage is not Stage.SCHEDULED:
            raise UpdateRefused(f"It is too late: the update is {view.stage}")
        self._ask("withdraw")
        self._views[view.id] = replace(view, stage=Stage.WITHDRAWN)
        return self._views[view.id]

    def revert(
        self,
        which: str | int,
        note: str = "",
        dry_run: bool = False,
        force: bool = False,
        next_start: bool = False,
        author: str = "",
    ) -> Pushed | Examination:
        view = self.show(which)
        edits = self._updates[view.id].edits
        inverse = Update(note=note, author=author)
        for edit in edits:
            inverse = inverse.add(edit.variable, -edit.arrays["value"])
        return self.examine(inverse) if dry_run else self.push(inverse, next_start=next_start)

    def pull(
        self,
        name: str,
        rows: Sequence[int] | None = None,
        timeout: float = 300.0,
        max_bytes: int | None = None,
    ) -> Pulled:
        variable = self._schema.resolve(name)
        if max_bytes is not None and rows is None and variable.nbytes > max_bytes:
            raise RequestRefused(f"These are too many values of {variable.name}")
        self._ask("pull")
        whole = np.zeros(variable.shape, np.float32)
        if rows is not None and (not variable.shape or any(row >= variable.shape[0] for row in rows)):
            raise UpdateRefused("There is no such row", variable=variable.name)
        chosen = whole if rows is None else whole[list(rows)]
        return Pulled(
            variable.name, self.step, "d" * 32, "job", chosen, None if rows is None else tuple(rows)
        )

    def checkpoint(self, timeout: float = 300.0, author: str = "") -> int:
        self._ask("checkpoint", author)
        return self.step

    def stop(self, timeout: float = 300.0, author: str = "") -> int:
        self._ask("stop", author)
        return self.step

    def metrics(self, since: int | None = None, points: int = 2000) -> Metrics:
        steps = np.arange(min(since or 0, self.steps), self.steps)
        times = steps.astype(np.float64)
        series = Series(steps, times, np.reciprocal(times + 1.0)).decimated(points)
        return Metrics({"loss": series} if len(series) else {}, self.steps, since)

    def checkpoints(self) -> list[CheckpointView]:
        return []

    def log_lines(self, worker: int, lines: int = 200, attempt: int | None = None) -> list[str]:
        if worker not in self.lines or attempt not in (None, 0):
            raise NotFound(f"There is no log of worker {worker}")
        return self.lines[worker][-lines:]

    def _ask(self, what: str, author: str = "") -> None:
        if not self.running:
            raise NoAnswer("The job is not running")
        self.done.append(what)
        self.authors.append(author)
