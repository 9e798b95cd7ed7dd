"""What others see of a worker in the run directory, and what they put there: notes, metrics, the inbox.

One thread per worker, so that the training thread never touches a file.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replicast import inbox
from replicast.auditfiles import audit_requests
from replicast.errors import ReplicastError, UpdateFailed, UpdatePending, UpdateRefused
from replicast.protocol import Member, Ticket
from replicast.replicas.recovery import numbers
from replicast.runfiles import ENDED, WorkerNote, append_metrics, write_worker_note
from replicast.update import Stage

logger = logging.getLogger("replicast")

LOOK_SECS = 0.2
NOTE_SECS = 1.0


class Housekeeping:
    """Writes this worker's note every second; on worker 0 also the metrics, and looks into the inbox.

    A full or missing disk is reported once and does not stop the training.

    Attributes:
        logs: The latest loss and metrics. Written by the training thread.
        training: Whether the training thread is inside `fit`. Written by the training thread.
    """

    def __init__(self, member: Member, run_dir: Path | None, attempt: int) -> None:
        self._member = member
        self._run_dir = run_dir
        self._attempt = attempt
        self._proposed: dict[Path, tuple[Ticket, tuple[Stage, str]]] = {}
        self._audits_wished: frozenset[str] = frozenset()
        self._last_metrics_step = -1
        self._complained = False
        self._waiting_for = ""
        self.logs: Mapping[str, Any] | None = None
        self.training = False

    def start(self) -> None:
        """Starts the thread, if there is a run directory."""
        if self._run_dir is not None:
            self._member.threads.start("housekeeping", self._run)

    def finish(self) -> None:
        """Writes the last word, when the thread has ended."""
        self.training = False
        self._waiting_for = ENDED
        if self._run_dir is not None:
            self._tend(self._run_dir, inbox_too=True)

    def say_ended(self) -> None:
        """The process ends, in whatever state: others need not wonder for ten seconds."""
        self._waiting_for, self.training = ENDED, False
        if self._run_dir is not None:
            self._with_files(self._write_note, self._run_dir)

    def _run(self) -> None:
        if self._run_dir is None:
            return
        noted = 0.0
        if self._member.channel.rank == 0:
            self._with_files(inbox.clean, self._run_dir)
        while not self._member.threads.stopping.wait(LOOK_SECS):
            now = time.monotonic()
            if now - noted >= NOTE_SECS:
                noted = now
                self._tend(self._run_dir, inbox_too=False)
            if self._member.channel.rank == 0:
                self._with_files(self._look_into_inbox, self._run_dir)

    def _tend(self, run_dir: Path, *, inbox_too: bool) -> None:
        self._with_files(self._write_note, run_dir)
        if self._member.channel.rank == 0:
            self._with_files(self._write_metrics, run_dir)
            if inbox_too:
                self._with_files(self._settle_inbox, run_dir)

    def _with_files(self, act: Any, run_dir: Path) -> None:
        try:
            act(run_dir)
        except OSError as error:
            if not self._complained:
                self._complained = True
                logger.warning("the run directory cannot be kept up to date: %s", error)

    def _write_note(self, run_dir: Path) -> None:
        write_worker_note(
            run_dir,
            WorkerNote(
                rank=self._member.channel.rank,
                pid=os.getpid(),
                host=socket.gethostname(),
                step=self._member.gate.step,
                attempt=self._attempt,
                time=time.time(),
                training=self.training,
                waiting_for=self._waiting_for,
            ),
        )

    def _write_metrics(self, run_dir: Path) -> None:
        step, logs = self._member.gate.step, self.logs
        if logs is None or step == self._last_metrics_step:
            return
        self._last_metrics_step = step
        append_metrics(run_dir, step, numbers(logs))

    def _look_into_inbox(self, run_dir: Path) -> None:
        # What is pushed while nobody trains waits for a training: it would come after the script's last look.
        for waiting in inbox.waiting(run_dir) if self.training else ():
            if waiting.path not in self._proposed:
                self._propose(run_dir, waiting.path)
        if self.training:
            self._look_for_audit_requests(run_dir)
        self._settle_inbox(run_dir)

    def _look_for_audit_requests(self, run_dir: Path) -> None:
        requests = frozenset(audit_requests(run_dir))
        # Once for each: it stays until a report answers it, and whoever makes the report looks for itself.
        if requests - self._audits_wished:
            self._member.wish("audit")
        self._audits_wished = requests

    def _propose(self, run_dir: Path, path: Path) -> None:
        try:
            taken = inbox.take(run_dir, path, self._member.limits.max_bytes)
        except UpdateRefused as error:
            inbox.refuse(run_dir, path, error)
            return
        if taken is not None:
            ticket = self._member.propose(taken.update, taken.at_step, taken.trial)
            self._proposed[path] = (ticket, (Stage.PROPOSED, ""))

    def _settle_inbox(self, run_dir: Path) -> None:
        """Says how far each proposal has come; one that is through leaves the inbox."""
        for path, (ticket, said) in list(self._proposed.items()):
            if ticket.done():
                self._leave_inbox(run_dir, path, ticket)
            elif said != _standing(ticket):
                self._proposed[path] = (ticket, _standing(ticket))
                self._note_stage(run_dir, ticket, waits_for=ticket.waits_for)

    def _note_stage(self, run_dir: Path, ticket: Ticket, **fields: Any) -> None:
        inbox.note_stage(
            run_dir, ticket.id, ticket.stage, step=ticket.step, taken_by=inbox.this_process(), **fields
        )

    def _leave_inbox(self, run_dir: Path, path: Path, ticket: Ticket) -> None:
        try:
            receipt = ticket.result(timeout=0)
        except UpdateRefused as error:
            inbox.refuse(run_dir, path, error)
        except UpdatePending:
            return  # the job has ended: what is not committed stays for the next one
        except UpdateFailed as error:
            logger.error("%s", error)
            self._note_stage(run_dir, ticket, reason=str(error))
            inbox.done(path)
        except ReplicastError:
            return
        else:
            # With the receipt: without a journal on disk, its author finds it nowhere else.
            self._note_stage(run_dir, ticket, receipt=receipt.to_json())
            inbox.done(path)
        del self._proposed[path]
        inbox.clean(run_dir)


def _standing(ticket: Ticket) -> tuple[Stage, str]:
    """What others are told of a proposal that is not settled."""
    return ticket.stage, ticket.waits_for
