"""A worker's files in the run directory: notes and metrics for others, and the inbox that others write to.

One thread per worker does this, so that the training thread never touches a file.

Who writes a worker's note, `workers/RANK.json`:

    into worker 0's directory                   the worker, if it sees that directory; else it sends its
                                                note to worker 0, which writes it (`distant_notes.py`)
    into a directory that a launcher made       the worker: the launcher of its host reads it there
    anywhere else                               nobody
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from replicast import import_environment
from replicast.errors import FileDamaged, JobFailed, ReplicastError, printable
from replicast.files import RunDir, below, write_quickly
from replicast.processes import this_machine
from replicast.replicas.checkpoint_writer import numbers
from replicast.replicas.distant_notes import DistantNotes, NoteSender
from replicast.replicas.inbox import Inbox
from replicast.replicas.pace import Pace, memory_bytes, progress
from replicast.replicas.position import Position
from replicast.replicas.requests import Requests
from replicast.runtime import Session
from replicast.storage import inbox
from replicast.storage.fence import Fence
from replicast.storage.groups import sees_group
from replicast.storage.runfiles import ENDED, WorkerNote, append_metrics, write_worker_note

logger = logging.getLogger("replicast")

OPERATIONS = "operations.json"
"""The current operations, for `replicast status`."""
LOOK_SECS = 0.2
NOTE_SECS = 1.0


class RunFiles:
    """Writes this worker's note every second; on worker 0 also the metrics, and looks into the inbox.

    A worker of another host may not see worker 0's run directory: it then sends its note to worker 0. A full
    or missing disk is reported once and does not stop training. If another group has taken over the
    run, this job stops: the inbox then belongs to that group.

    Args:
        session: This worker's part in the job.
        run_dir: The run directory, if there is one.
        attempt: The number of this attempt of the job.
        fence: On worker 0: checks that no other group has taken over the run.
        group: On other workers: the group whose claim is in worker 0's run directory; empty without one.
        launcher_reads: Whether the launcher of this host made the run directory, and reads the note there.

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
        run_dir: RunDir | None,
        attempt: int,
        fence: Fence | None = None,
        group: str | None = None,
        *,
        launcher_reads: bool = False,
    ) -> None:
        self._session = session
        self._unseen_group = group
        self._launcher_reads = launcher_reads
        self._fence = fence
        self._run_dir = run_dir
        self._attempt = attempt
        self._operations: list[dict[str, Any]] = []
        self._last_metrics_step = -1
        self._warned: set[RunDir] = set()
        self._inbox = Inbox(session, self._warn)
        self._distant = DistantNotes(attempt, self._warn)
        self._sender = NoteSender(session, self._note)
        self._noting = threading.Lock()
        self.requests = Requests(session, attempt)
        self.waiting_for = ""
        self.logs: Mapping[str, Any] | None = None
        self.training = False
        self.position: Callable[[], Position | None] = lambda: None
        self._pace = Pace()
        session.on_note = self._distant.receive

    def start(self) -> None:
        """Starts the thread, if this worker or worker 0 has a run directory."""
        # Before the first note: once that says that the job trains, the launcher starts standby processes.
        import_environment.note_changes()
        late = import_environment.without_effect()
        if late:
            logger.warning(
                "This worker was a standby and had imported TensorFlow before the script set %s: too late "
                "for the imports. Set it in the environment of `replicast run`",
                ", ".join(late),
            )
        if self._run_dir is not None or self._unseen_group:
            self._session.threads.start("run-files", self._run)

    def send_last(self) -> None:
        """Sends the last note, if worker 0 writes for this worker. Before all meet for the last time."""
        if self._unseen_group and not self._sees_directory():
            self._sender.send()

    def finish(self) -> None:
        """Writes the last state, after the thread has stopped."""
        self.training = False
        self.waiting_for = ENDED
        self._write_last(
            self._write_note,
            self._write_metrics,
            self._inbox.take_outcomes,
            self._inbox.settle_last,
            self._write_operations,
        )
        if self._session.rank == 0:
            self._write_last(self.requests.finish)
            if not self._job_has_failed():
                self._write_last(self._distant.end)
        if self._fence is not None:
            self._fence.release()

    def note_end(self) -> None:
        """Notes that the process exits, so that others need not wait ten seconds to conclude it."""
        self.waiting_for, self.training = ENDED, False
        self._write_last(self._write_note)

    def _run(self) -> None:
        noted = 0.0
        is_first = self._session.rank == 0
        if is_first:
            self._with_files(inbox.clean)
        while not self._session.threads.stopping.wait(LOOK_SECS):
            now = time.monotonic()
            if now - noted >= NOTE_SECS:
                noted = now
                self._with_files(self._write_note, self._write_metrics, self._write_operations)
                self._send_note()
            if is_first:
                self._with_files(
                    self._distant.write,
                    lambda run_dir: self._inbox.propose(run_dir) if self.training else None,
                    lambda run_dir: self.requests.look(run_dir, training=self.training),
                    lambda run_dir: self._inbox.withdraw(run_dir) if self.training else None,
                    self._inbox.take_outcomes,
                    self._inbox.settle,
                )

    def _write_last(self, *acts: Callable[[RunDir], None]) -> None:
        """Runs last writes in the training thread, which reaches no further boundary that could raise."""
        try:
            self._with_files(*acts)
        except JobFailed as error:
            logger.warning("%s", error)

    def _with_files(self, *acts: Callable[[RunDir], None]) -> None:
        """Runs each action if this worker writes; a disk error in one does not prevent the others.

        Raises:
            JobFailed: Another group has taken over the run; nothing more was done.
        """
        run_dir = self._run_dir
        if run_dir is None or not (self._sees_directory() or self._launcher_reads):
            return
        problem = "the run directory cannot be kept up to date"
        for act in acts:
            try:
                if self._fence is not None:
                    self._fence.check()  # Before each: another group may have taken over meanwhile.
            except FileDamaged as error:  # Until the disk is back, it is not known which group owns the run.
                self._warn(run_dir, problem, error)
                return
            try:
                act(run_dir)
            except OSError as error:
                self._warn(run_dir, problem, error)

    def _sees_directory(self) -> bool:
        """Whether the run directory is worker 0's. A shared file system may show that after some seconds."""
        group, run_dir = self._unseen_group, self._run_dir
        if group is not None and run_dir is not None and sees_group(run_dir, group):
            self._unseen_group = None
            self._sender.stop()
        return self._unseen_group is None

    def _send_note(self) -> None:
        if self._unseen_group:
            self._sender.look()

    def _job_has_failed(self) -> bool:
        try:
            self._session.check()
        except ReplicastError:
            return True
        return False

    def _warn(self, path: RunDir, problem: str, error: Exception) -> None:
        """Warns about a path, once."""
        if path not in self._warned:
            self._warned.add(path)
            logger.warning("%s: %s", problem, printable(error))

    def _write_note(self, run_dir: RunDir) -> None:
        write_worker_note(run_dir, self._note())

    def _note(self) -> WorkerNote:
        """This worker's note as it is now. Any thread."""
        now, step, training = time.time(), self._session.step, self.training
        with self._noting:
            pace = self._pace.look(step, now, training=training)
        return WorkerNote(
            rank=self._session.rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            machine=this_machine(),
            step=step,
            attempt=self._attempt,
            time=now,
            training=training,
            waiting_for=self.waiting_for,
            memory_bytes=memory_bytes(),
            **pace,
            **progress(self.position(), training=training),
        )

    def _write_metrics(self, run_dir: RunDir) -> None:
        step, logs = self._session.step, self.logs
        if self._session.rank != 0 or logs is None or step == self._last_metrics_step:
            return
        self._last_metrics_step = step
        append_metrics(run_dir, step, numbers(logs))

    def _write_operations(self, run_dir: RunDir) -> None:
        operations = [] if self.waiting_for == ENDED else self._session.operations()
        if self._session.rank == 0 and operations != self._operations:
            said = json.dumps({"step": self._session.step, "operations": operations})
            write_quickly(below(run_dir) / OPERATIONS, said)
            self._operations = operations
