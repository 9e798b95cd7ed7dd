"""A run directory of two workers that train without end and do at once what they are asked for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from replicast.client import Overview, Pushed
from replicast.client.directory import DirectoryRun
from replicast.client.run import RunOperation
from replicast.core.entries import Stage
from replicast.errors import NoAnswer
from replicast.storage.inbox import InboxAnswer
from replicast.storage.run_files import WorkerNote, append_audit, append_metrics, write_worker_note
from replicast.update.audit_report import AuditReport
from replicast.update.update import Update
from tests.unit.played_job import LONG_AGO, PlayedJob, made_run
from tests.unit.test_audit import report


def equal_report(**fields: Any) -> AuditReport:
    """An audit that found all replicas equal."""
    return report(differences=(), declared=(), outcome="equal", healed=(), last_equal=None, **fields)


class PromptRun(DirectoryRun):
    """The run, and its job.

    Attributes:
        done: What was asked of the job, in order; reading leaves nothing here.
        authors: Who has asked for each of them; empty if nobody was named.
        step: Where the job is.
        running: Whether the job answers.
        reads: How often its status was read.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(made_run(path))
        self.job = PlayedJob(path)
        self.done: list[str] = []
        self.authors: list[str] = []
        self.step, self.running, self.reads, self._points = 100, True, 0, 0
        (path / "logs" / "attempt-0").mkdir(parents=True)
        for rank in range(2):
            (path / "logs" / "attempt-0" / f"worker-{rank}.log").write_text("a line\n")
        self.train(50)

    def train(self, steps: int) -> None:
        """Writes the metrics of further steps."""
        for _ in range(steps):
            append_metrics(self.path, (self._points, time.time(), {"loss": float("nan")}))
            self._points += 1

    def perform(self, operation: RunOperation, arguments: dict[str, Any]) -> Any:
        heard_at = time.time() - (0.0 if self.running else LONG_AGO)
        for rank in range(2):
            note = WorkerNote(rank, 100 + rank, "box", self.step, 0, heard_at, training=True, waiting_for="")
            write_worker_note(self.path, note)
        return super().perform(operation, arguments)

    def do_status(self) -> Overview:
        self.reads += 1
        return super().do_status()

    def do_push(self, update: Update, at_step: int | None, *more: Any, **named: Any) -> Pushed:
        pushed = super().do_push(update, at_step, *more, **named)
        return self._landed(pushed, update.author, at_step)

    def do_revert(self, *, author: str, **named: Any) -> Any:
        found = super().do_revert(author=author, **named)
        return self._landed(found, author) if isinstance(found, Pushed) else found

    def _landed(self, pushed: Pushed, author: str, at_step: int | None = None) -> Pushed:
        if pushed.number is None:
            self._note("push", author)
            self.job.step = self.step
            self.job.stops_at = None if at_step is None else Stage.SCHEDULED
            self.job.act_all()
        return pushed

    def _note(self, what: str, author: str) -> None:
        self.done.append(what)
        self.authors.append(author)

    def _ask(self, kind: str, timeout_secs: float, author: str = "", **asked: Any) -> Any:
        if not self.running:
            raise NoAnswer("The job is not running")
        self._note(kind, author)
        details, values = {}, None
        if kind == "audit":
            number = self.done.count("audit")
            found = equal_report(number=number, step=self.step, time=time.time(), workers=2, requests=())
            append_audit(self.path, found)
            details = found.to_json()
        if kind == "withdraw":
            self.job.withdraw_one(asked["name"])
        if kind == "pull":
            shape = asked["variable"].shape
            count = sum(stop - start for start, stop in asked["rows"])
            values = np.zeros((count, *shape[1:]) if count else shape, np.float32)
            details = {"digests": {"0": "d" * 32, "1": "d" * 32}}
        return InboxAnswer(Stage.VERIFIED, time.time(), self.step, details=details), values
