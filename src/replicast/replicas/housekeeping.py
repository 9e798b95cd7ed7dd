"""What others see of a worker in the run directory, and what they put there: notes, metrics, the inbox.

One thread per worker, so that the training thread never touches a file.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from replicast import inbox
from replicast.auditfiles import audit_requests
from replicast.errors import (
    FileDamaged,
    JobFailed,
    ReplicastError,
    UpdateFailed,
    UpdatePending,
    UpdateRefused,
    refusal_of,
)
from replicast.fence import Fence
from replicast.processes import this_process
from replicast.protocol import Member, Ticket
from replicast.protocol.messages import WITHDRAWN
from replicast.replicas.recovery import numbers
from replicast.runfiles import ENDED, WorkerNote, append_metrics, write_worker_note
from replicast.update import Stage

logger = logging.getLogger("replicast")

LOOK_SECS = 0.2
NOTE_SECS = 1.0
ASIDE_SECS = 10.0
"""How long an update is left alone that the disk would not let go its way: others must not wait for it."""


class Housekeeping:
    """Writes this worker's note every second; on worker 0 also the metrics, and looks into the inbox.

    A full or missing disk is reported once and does not stop the training. That another group has taken the
    run does: what lies in the inbox is for that one.

    Args:
        member: This worker's part in the updates.
        run_dir: Where files go, if anywhere.
        attempt: Which life of the job this is.
        fence: On worker 0: whether what this group writes still counts.

    Attributes:
        logs: The latest loss and metrics. Written by the training thread.
        training: Whether the training thread is inside `fit`. Written by the training thread.
        waiting_for: What this worker waits for, in words; else empty. Written by the training thread.
    """

    def __init__(
        self, member: Member, run_dir: Path | None, attempt: int, fence: Fence | None = None
    ) -> None:
        self._member = member
        self._fence = fence
        self._run_dir = run_dir
        self._attempt = attempt
        self._proposed: dict[Path, tuple[Ticket, tuple[Stage, str]]] = {}
        self._audits_wished: frozenset[str] = frozenset()
        self._last_metrics_step = -1
        self._aside: dict[Path, float] = {}
        self._complained: set[Path] = set()
        self.waiting_for = ""
        self.logs: Mapping[str, Any] | None = None
        self.training = False

    def start(self) -> None:
        """Starts the thread, if there is a run directory."""
        if self._run_dir is not None:
            self._member.threads.start("housekeeping", self._run)

    def finish(self) -> None:
        """Writes the last word, when the thread has ended."""
        self.training = False
        self.waiting_for = ENDED
        self._aside.clear()  # a last try
        self._say_last(partial(self._tend, inbox_too=True))
        if self._fence is not None:
            self._fence.release()

    def say_ended(self) -> None:
        """The process ends, in whatever state: others need not wonder for ten seconds."""
        self.waiting_for, self.training = ENDED, False
        self._say_last(lambda run_dir: self._with_files(run_dir, self._write_note))

    def _run(self) -> None:
        if self._run_dir is None:
            return
        noted = 0.0
        is_first = self._member.channel.rank == 0
        if is_first:
            self._with_files(self._run_dir, inbox.clean)
        while not self._member.threads.stopping.wait(LOOK_SECS):
            now = time.monotonic()
            if now - noted >= NOTE_SECS:
                noted = now
                self._tend(self._run_dir, inbox_too=False)
            if is_first:
                looks = self._look_into_inbox, self._look_for_audit_requests, self._look_for_withdrawals
                self._with_files(self._run_dir, *looks, self._settle_inbox)

    def _tend(self, run_dir: Path, *, inbox_too: bool) -> None:
        settling = [self._settle_inbox] if inbox_too else []
        self._with_files(run_dir, self._write_note, self._write_metrics, *settling)

    def _say_last(self, act: Callable[[Path], None]) -> None:
        """For the training thread, which comes to no boundary any more that could raise."""
        try:
            if self._run_dir is not None:
                act(self._run_dir)
        except JobFailed as error:
            logger.warning("%s", error)

    def _with_files(self, run_dir: Path, *acts: Callable[[Path], None]) -> None:
        """Does each of them, as far as the disk lets it.

        Raises:
            JobFailed: Another group has taken the run: nothing was done.
        """
        try:
            if self._fence is not None:
                self._fence.check()
        except FileDamaged as error:  # Nobody knows whose the run is until the disk is back.
            self._complain(run_dir, "the run directory cannot be kept up to date", error)
            return
        for act in acts:
            try:
                act(run_dir)
            except OSError as error:
                self._complain(run_dir, "the run directory cannot be kept up to date", error)

    def _complain(self, path: Path, problem: str, error: Exception) -> None:
        """Says what is wrong with a path, once."""
        if path not in self._complained:
            self._complained.add(path)
            logger.warning("%s: %s", problem, error)

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
                waiting_for=self.waiting_for,
            ),
        )

    def _write_metrics(self, run_dir: Path) -> None:
        step, logs = self._member.gate.step, self.logs
        if self._member.channel.rank != 0 or logs is None or step == self._last_metrics_step:
            return
        self._last_metrics_step = step
        append_metrics(run_dir, step, numbers(logs))

    def _look_into_inbox(self, run_dir: Path) -> None:
        # What is pushed while nobody trains waits for a training: it would come after the script's last look.
        ends = (
            time.monotonic() + NOTE_SECS / 2
        )  # The rest comes next time: this thread also writes the notes.
        for waiting in inbox.waiting(run_dir) if self.training else ():
            if waiting.path not in self._proposed:
                self._with_entry(waiting.path, self._propose, run_dir)
            if time.monotonic() > ends:
                return

    def _with_entry(self, path: Path, act: Callable[[Path, Path], None], run_dir: Path) -> None:
        """Does something with one update of the inbox; sets it aside for a while if the disk does not let it.

        A full disk may have room again, so it is tried again; now and then, since a refusal is fsynced. Any
        other error is the entry's own: it is refused, and the job goes on.
        """
        if time.monotonic() < self._aside.get(path, 0.0):
            return
        self._aside.pop(path, None)
        try:
            try:
                act(run_dir, path)
            except (OSError, ReplicastError):
                raise
            except Exception as error:
                logger.exception("%s is refused: handling it caused an unexpected error", path)
                inbox.refuse(run_dir, path, refusal_of(error))
                self._proposed.pop(path, None)
        except OSError as error:
            self._aside[path] = time.monotonic() + ASIDE_SECS
            self._complain(path, f"{path} stays in the inbox, others are taken before it", error)

    def _look_for_audit_requests(self, run_dir: Path) -> None:
        if not self.training:
            return
        requests = frozenset(audit_requests(run_dir))
        # Once for each: it stays until a report answers it, and whoever makes the report looks for itself.
        if requests - self._audits_wished:
            self._member.wish("audit")
        self._audits_wished = requests

    def _look_for_withdrawals(self, run_dir: Path) -> None:
        for update_id in inbox.take_withdrawals(run_dir) if self.training else ():
            self._member.withdraw(update_id)

    def _propose(self, run_dir: Path, path: Path) -> None:
        try:
            taken = inbox.take(run_dir, path, self._member.limits.max_bytes)
        except UpdateRefused as error:
            inbox.refuse(run_dir, path, error, durably=False)
            return
        if taken is not None:
            ticket = self._member.propose(taken.update, taken.at_step, taken.trial)
            self._proposed[path] = (ticket, (Stage.PROPOSED, ""))

    def _settle_inbox(self, run_dir: Path) -> None:
        """Says how far each proposal has come; one that is through leaves the inbox."""
        before = len(self._proposed)
        for path in list(self._proposed):
            self._with_entry(path, self._settle, run_dir)
        if len(self._proposed) < before:
            inbox.clean(run_dir)

    def _settle(self, run_dir: Path, path: Path) -> None:
        ticket, said = self._proposed[path]
        if ticket.done():
            self._leave_inbox(run_dir, path, ticket)
        elif said != (standing := _standing(ticket)):
            self._note_stage(run_dir, ticket, waits_for=ticket.waits_for)
            self._proposed[path] = (ticket, standing)

    def _note_stage(self, run_dir: Path, ticket: Ticket, **fields: Any) -> None:
        inbox.note_stage(
            run_dir, ticket.id, ticket.stage, step=ticket.step, taken_by=this_process(), **fields
        )

    def _leave_inbox(self, run_dir: Path, path: Path, ticket: Ticket) -> None:
        try:
            receipt = ticket.result(timeout=0)
        except UpdateRefused as error:
            if error.problem == WITHDRAWN:
                inbox.note_stage(run_dir, ticket.id, Stage.WITHDRAWN)
                inbox.done(path)
            else:
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


def _standing(ticket: Ticket) -> tuple[Stage, str]:
    """What others are told of a proposal that is not settled."""
    return ticket.stage, ticket.waits_for
