"""A worker's files in the run directory: notes and metrics for others, and the inbox that others write to.

One thread per worker does this, so that the training thread never touches a file.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from replicast import import_environment
from replicast.core.entries import Receipt
from replicast.core.messages import Tell
from replicast.core.stage import Stage
from replicast.errors import (
    FileDamaged,
    JobFailed,
    ReplicastError,
    UpdateRefused,
)
from replicast.files import write_quickly
from replicast.processes import this_process
from replicast.replicas.checkpoint_writer import numbers
from replicast.replicas.pace import Pace, memory_bytes, progress
from replicast.replicas.position import Position
from replicast.replicas.requests import Requests
from replicast.runtime import Session
from replicast.runtime.ticket import diverged, refused
from replicast.storage import inbox
from replicast.storage.entry_files import fields_of
from replicast.storage.fence import Fence
from replicast.storage.groups import sees_group
from replicast.storage.runfiles import ENDED, WorkerNote, append_metrics, write_worker_note

logger = logging.getLogger("replicast")

OPERATIONS = "operations.json"
"""The current operations, for `replicast status`."""
LOOK_SECS = 0.2
NOTE_SECS = 1.0
ASIDE_SECS = 10.0
"""How long an update is set aside after a disk error, so that others need not wait for it."""


class RunFiles:
    """Writes this worker's note every second; on worker 0 also the metrics, and looks into the inbox.

    A worker of another host may not see the run directory: it then writes nothing, and creates none. A full
    or missing disk is reported once and does not stop training. If another group has taken over the
    run, this job stops: the inbox then belongs to that group.

    Args:
        session: This worker's part in the job.
        run_dir: The run directory, if there is one.
        attempt: The number of this attempt of the job.
        fence: On worker 0: checks that no other group has taken over the run.
        group: On other workers, the group that worker 0 writes for. None if the run directory is known to be
            this worker's to write to.

    Attributes:
        logs: The latest loss and metrics. Set by the training thread.
        training: Whether the training thread is inside `fit`. Set by the training thread.
        waiting_for: What this worker waits for, in words; empty otherwise. Set by the training thread.
        requests: On worker 0: requests from outside the job.
        position: Tells the position of the training in its data.
    """

    def __init__(
        self,
        session: Session,
        run_dir: Path | None,
        attempt: int,
        fence: Fence | None = None,
        group: str | None = None,
    ) -> None:
        self._session = session
        self._unseen_group = group
        self._fence = fence
        self._run_dir = run_dir
        self._attempt = attempt
        self._proposed: dict[str, Path] = {}
        self._noted: dict[Path, tuple[Any, ...]] = {}
        self._outcomes: queue.SimpleQueue[tuple[str, Tell]] = queue.SimpleQueue()
        self._unsettled: dict[str, Tell] = {}
        self._withdrawals = 0
        self._environment_noted = False
        self._operations: list[dict[str, Any]] = []
        self._last_metrics_step = -1
        self._aside: dict[Path, float] = {}
        self._warned: set[Path] = set()
        self.requests = Requests(session, attempt)
        self.waiting_for = ""
        self.logs: Mapping[str, Any] | None = None
        self.training = False
        self.position: Callable[[], Position | None] = lambda: None
        self._pace = Pace()
        session.on_inbox = lambda ticket, tell: self._outcomes.put((ticket, tell))

    def start(self) -> None:
        """Starts the thread, if there is a run directory."""
        if self._run_dir is not None:
            self._session.threads.start("run-files", self._run)

    def finish(self) -> None:
        """Writes the last state, after the thread has stopped."""
        self.training = False
        self.waiting_for = ENDED
        self._aside.clear()  # a last try
        self._write_last(self._write_note, self._write_metrics, self._settle_inbox, self._write_operations)
        if self._session.rank == 0:
            self._write_last(self.requests.finish)
        if self._fence is not None:
            self._fence.release()

    def note_end(self) -> None:
        """Notes that the process exits, so that others need not wait ten seconds to conclude it."""
        self.waiting_for, self.training = ENDED, False
        self._write_last(self._write_note)

    def _run(self) -> None:
        if self._run_dir is None:
            return
        noted = 0.0
        is_first = self._session.rank == 0
        if is_first:
            self._with_files(self._run_dir, inbox.clean)
        while not self._session.threads.stopping.wait(LOOK_SECS):
            now = time.monotonic()
            if now - noted >= NOTE_SECS:
                noted = now
                self._with_files(
                    self._run_dir,
                    self._note_environment,
                    self._write_note,
                    self._write_metrics,
                    self._write_operations,
                )
            if is_first:
                self._with_files(
                    self._run_dir,
                    self._look_into_inbox,
                    lambda run_dir: self.requests.look(run_dir, training=self.training),
                    self._look_for_withdrawals,
                    self._settle_inbox,
                )

    def _write_last(self, *acts: Callable[[Path], None]) -> None:
        """Runs last writes in the training thread, which reaches no further boundary that could raise."""
        try:
            if self._run_dir is not None:
                self._with_files(self._run_dir, *acts)
        except JobFailed as error:
            logger.warning("%s", error)

    def _with_files(self, run_dir: Path, *acts: Callable[[Path], None]) -> None:
        """Runs each action; a disk error in one does not prevent the others.

        Raises:
            JobFailed: Another group has taken over the run; nothing was done.
        """
        if not self._sees_directory(run_dir):
            return
        problem = "the run directory cannot be kept up to date"
        try:
            if self._fence is not None:
                self._fence.check()
        except FileDamaged as error:  # Until the disk is back, it is not known which group owns the run.
            self._warn(run_dir, problem, error)
            return
        for act in acts:
            try:
                act(run_dir)
            except OSError as error:
                self._warn(run_dir, problem, error)

    def _sees_directory(self, run_dir: Path) -> bool:
        """Whether the run directory is worker 0's. A shared file system may show that after some seconds."""
        if self._unseen_group is not None and sees_group(run_dir, self._unseen_group):
            self._unseen_group = None
        return self._unseen_group is None

    def _warn(self, path: Path, problem: str, error: Exception) -> None:
        """Warns about a path, once."""
        if path not in self._warned:
            self._warned.add(path)
            logger.warning("%s: %s", problem, error)

    def _note_environment(self, run_dir: Path) -> None:
        """Notes what the script has changed in its environment, before the first note says that it runs."""
        if self._environment_noted:
            return
        self._environment_noted = True
        late = import_environment.without_effect()
        if late:
            logger.warning(
                "This worker was a standby and had imported TensorFlow before the script set %s: too late "
                "for the imports. Set it in the environment of `replicast run`",
                ", ".join(late),
            )
        path = import_environment.path_in(run_dir, self._session.rank)
        path.parent.mkdir(exist_ok=True)
        write_quickly(path, import_environment.to_text(self._attempt))

    def _write_note(self, run_dir: Path) -> None:
        now, step, training = time.time(), self._session.step, self.training
        write_worker_note(
            run_dir,
            WorkerNote(
                rank=self._session.rank,
                pid=os.getpid(),
                host=socket.gethostname(),
                step=step,
                attempt=self._attempt,
                time=now,
                training=training,
                waiting_for=self.waiting_for,
                memory_bytes=memory_bytes(),
                **self._pace.look(step, now, training=training),
                **progress(self.position(), training=training),
            ),
        )

    def _write_metrics(self, run_dir: Path) -> None:
        step, logs = self._session.step, self.logs
        if self._session.rank != 0 or logs is None or step == self._last_metrics_step:
            return
        self._last_metrics_step = step
        append_metrics(run_dir, step, numbers(logs))

    def _write_operations(self, run_dir: Path) -> None:
        operations = [] if self.waiting_for == ENDED else self._session.operations()
        if self._session.rank == 0 and operations != self._operations:
            said = json.dumps({"step": self._session.step, "operations": operations})
            write_quickly(run_dir / OPERATIONS, said)
            self._operations = operations

    # The inbox: worker 0.

    def _look_into_inbox(self, run_dir: Path) -> None:
        # Updates pushed while no training runs stay in the inbox until one does: the script may be over.
        ends = time.monotonic() + NOTE_SECS / 2  # The rest is for next time: this thread also writes notes.
        known = set(self._proposed.values())
        for waiting in inbox.waiting(run_dir) if self.training else ():
            if waiting.path not in known:
                self._with_entry(waiting.path, self._propose, run_dir)
            if time.monotonic() > ends:
                return

    def _with_entry(self, path: Path, act: Callable[[Path, Path], None], run_dir: Path) -> None:
        """Processes one update of the inbox; sets it aside for a while after a disk error.

        A full disk may have space again, so the update is retried; not often, since a refusal is fsynced. Any
        other error is caused by the update itself: it is refused, and the job continues.
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
                logger.exception("%s refused: unexpected error while processing it", path)
                inbox.refuse(run_dir, path, error)
        except OSError as error:
            self._aside[path] = time.monotonic() + ASIDE_SECS
            self._warn(path, f"{path} stays in the inbox and will be retried after the others", error)

    def _propose(self, run_dir: Path, path: Path) -> None:
        try:
            # Identifies this file: the same update may be submitted again after a refusal.
            status = path.stat()
            ticket = f"{path.name}@{status.st_ino}-{status.st_mtime_ns}"
            taken = inbox.take(run_dir, path, self._session.limits.max_bytes)
            if taken is not None:
                self._propose_taken(ticket, taken)
                self._proposed[ticket] = path
        except FileNotFoundError:
            return  # withdrawn just now
        except (UpdateRefused, FileDamaged) as error:
            inbox.refuse(run_dir, path, error, durably=False)

    def _propose_taken(self, ticket: str, taken: inbox.Submitted) -> None:
        proposals = self._session.proposals
        if taken.reverts is None:
            proposals.propose_from_outside(ticket, taken.update, taken.at_step, taken.trial)
        else:
            proposals.revert_from_outside(ticket, taken.update, taken.reverts, forced=taken.forced)

    def _settle_inbox(self, run_dir: Path) -> None:
        """Notes the stage of each proposal, and removes settled ones from the inbox."""
        while not self._outcomes.empty():
            ticket, tell = self._outcomes.get()
            if ticket in self._proposed:
                self._unsettled[ticket] = tell
        settled = False
        for ticket in list(self._unsettled):
            path = self._proposed[ticket]
            self._with_entry(path, partial(self._settle, ticket), run_dir)
            settled = True
        if settled:
            inbox.clean(run_dir)
        self._note_stages(run_dir)

    def _note_stages(self, run_dir: Path) -> None:
        under_way = {one["id"]: one for one in self._session.operations()} if self._proposed else {}
        for path in self._proposed.values():
            one = under_way.get(path.name.removesuffix(".safetensors"))
            names = ("stage", "step", "waits_for", "trial_until")
            standing = None if one is None else tuple(one[name] for name in names)
            if one is not None and standing is not None and self._noted.get(path) != standing:
                self._noted[path] = standing
                waits = {name: one[name] for name in ("waits_for", "trial_until")}
                self._note(run_dir, one["id"], Stage(one["stage"]), one["step"], **waits)

    def _note(self, run_dir: Path, id_: str, stage: Stage, step: int | None, **fields: Any) -> None:
        inbox.note_stage(run_dir, id_, stage, step=step, taken_by=this_process(), **fields)

    def _settle(self, ticket: str, run_dir: Path, path: Path) -> None:
        tell = self._unsettled[ticket]
        match tell.stage, tell.outcome:
            case ((Stage.VERIFIED | Stage.REVERTED), Receipt()):
                # The note includes the receipt: without a journal on disk, its author finds it nowhere else.
                receipt = fields_of(tell.outcome)
                self._note(run_dir, tell.id, tell.stage, tell.step, receipt=receipt)
                inbox.done(path)
            case Stage.FAILED, Receipt():
                error = diverged(tell.outcome)
                logger.error("%s", error)
                self._note(run_dir, tell.id, tell.stage, tell.step, reason=str(error))
                inbox.done(path)
            case Stage.WITHDRAWN, _:
                inbox.note_stage(run_dir, tell.id, Stage.WITHDRAWN)
                inbox.done(path)
            case _:
                known = tell.outcome is not None
                said = (
                    refused(tell.outcome) if known else UpdateRefused("It was refused in an earlier attempt")
                )
                inbox.refuse(run_dir, path, said)
        del self._unsettled[ticket], self._proposed[ticket]
        self._noted.pop(path, None)

    def _look_for_withdrawals(self, run_dir: Path) -> None:
        for update_id in inbox.take_withdrawals(run_dir) if self.training else ():
            self._withdrawals += 1
            self._session.proposals.withdraw_from_outside(
                f"withdraw-{update_id}-{self._withdrawals}", update_id
            )
