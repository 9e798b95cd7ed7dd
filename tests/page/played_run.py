"""A run directory in which a job of two workers is played: notes, metrics, audits, what is pushed lands."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np

from replicast.core.entries import Stage
from replicast.storage import inbox
from replicast.storage.inbox import InboxAnswer
from replicast.storage.run_files import (
    ENDED,
    FORMAT,
    RATE,
    RunInfo,
    WorkerNote,
    append_audit,
    append_metrics,
    write_run_info,
    write_worker_note,
)
from replicast.update.audit_report import AuditReport
from replicast.update.schema import Schema
from replicast.update.trial import TrialOutcome
from tests.page.prompt_run import equal_report
from tests.unit.played_job import SCHEMA, PlayedJob

WORKERS = 2


class PlayedRun:
    """Plays a job in a thread until it is killed or ends.

    Args:
        path: The run directory.
        every_secs: How long a moment is: one look into the inbox, `steps` steps.
        steps: How many steps a moment has.

    Attributes:
        tables: The values of variables that may be pulled, by name.
    """

    def __init__(self, path: Path, every_secs: float = 0.1, steps: int = 1) -> None:
        self.path = path
        self.step = 0
        self.attempt = 0
        self.tables: dict[str, np.ndarray] = {}
        self.slow_worker: int | None = None
        self._every_secs = every_secs
        self._steps = steps
        self._audits = 0
        self._acts: Iterator[None] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Starts an attempt of the job, and lets it train."""
        self.prepare()
        self.play()

    def play(self) -> None:
        """Lets the job train."""
        self._stop.clear()
        self.moment()
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._thread.start()

    def prepare(self) -> None:
        """Begins an attempt of the job, which trains when `moment` is called."""
        self.job = PlayedJob(self.path, self.attempt)
        self.describe(SCHEMA)

    def describe(self, schema: Schema) -> None:
        """Says what the variables of the job are."""
        self.job.schema = schema
        write_run_info(self.job.fence, RunInfo(FORMAT, schema, WORKERS, self.attempt, time.time()))

    def kill(self, silent_secs: float = 0.0) -> None:
        """Ends the job without a word; as if that was some seconds ago."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(120)
        if silent_secs:
            self.write_notes(time.time() - silent_secs)
        self.attempt += 1

    def end(self) -> None:
        """Ends the job as one that is done."""
        self.kill()
        self.write_notes(time.time(), ENDED)

    def moment(self) -> None:
        """Some steps, and what was asked for."""
        for _ in range(self._steps):
            self.step += 1
            loss = 0.25 + 1.9 * math.exp(-self.step / 160) + 0.05 * math.sin(self.step / 3)
            values = {"loss": loss, "accuracy": 1 - loss / 2.4, "val_loss": loss * 1.08 + 0.02}
            append_metrics(self.path, (self.step, time.time(), values | {RATE: 0.0005}))
        self._take()
        for path in inbox.requests(self.path):
            request = inbox.read_request(path)
            answer = partial(InboxAnswer, Stage.VERIFIED, time.time(), self.step)
            if request.kind == "pull" and request.name in self.tables:
                table = self.tables[request.name]
                rows = np.concatenate([table[slice(*one)] for one in request.rows]) if request.rows else table
                digests = dict.fromkeys("01", "d" * 32)
                inbox.answer(self.path, request.id, answer(details={"digests": digests}), rows)
            else:
                inbox.answer(self.path, request.id, answer(details=self.audit(request.id).to_json()))
        if self.step % 100 == 0:
            self.audit()
        self.write_notes(time.time())

    def audit(self, *ids: str) -> AuditReport:
        """An audit, which may answer requests."""
        self._audits += 1
        now = time.time()
        report = equal_report(
            number=self._audits, step=self.step, time=now, workers=WORKERS, variables=6, requests=ids
        )
        append_audit(self.path, report)
        return report

    def write_notes(self, now: float, waiting_for: str = "") -> None:
        for rank in range(WORKERS):
            slow = rank == self.slow_worker
            note = WorkerNote(
                rank, 4100 + rank, f"gpu-{rank + 1}", self.step, self.attempt, now,
                training=not waiting_for, waiting_for=waiting_for, epochs=None if waiting_for else 10,
                epoch=None if waiting_for else min(9, self.step // 200),
                steps_left=max(0, 2000 - self.step), step_secs=0.081, stepped_at=now,
                memory_bytes=(412 + 31 * rank) * 10**6, own_secs=0.08 if slow else 0.031, own_since=now - 240,
            )  # fmt: skip
            write_worker_note(self.path, note)

    def _take(self) -> None:
        """Takes what is in the inbox, one stage further with each moment."""
        waiting = inbox.waiting(self.path)
        if self._acts is None and waiting:
            self.job.step = self.step
            trial = inbox.read(waiting[0].path).trial
            why = "loss was 0.412 before the update and 0.398 in the trial; the limit was at most 0.4326"
            kept = TrialOutcome(1, "kept", self.step + 50, "loss", 0.412, 0.398, why)
            self.job.outcome = None if trial is None else kept
            self._acts = self.job.take()
        if self._acts is not None and next(self._acts, "over") == "over":
            self._acts = None

    def _play(self) -> None:
        while not self._stop.wait(self._every_secs):
            self.moment()
