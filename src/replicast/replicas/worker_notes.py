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
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from replicast import import_environment
from replicast.errors import FileDamaged, JobFailed, ReplicastError, printable
from replicast.files import RunDir, below, write_quickly
from replicast.processes import this_machine
from replicast.replicas.inbox_reader import InboxReader
from replicast.replicas.job_checkpoints import numbers
from replicast.replicas.position import Position
from replicast.replicas.session import Session
from replicast.storage.claims import Fence, sees_group
from replicast.storage.run_files import ENDED, WorkerNote, append_metrics, sent_every_secs, write_worker_note
from replicast.strictjson import parse_object

# Notes of workers that do not see worker 0's run directory: they send them, and worker 0 writes them there.
#
# A note goes the way of all messages (`runtime/channel.py`): in order, with the rank of its sender, and
# only within this attempt of the job, because the service that carries it is worker 0's. A lost note is no
# loss, since the next one follows.
#
# What it costs worker 0: for each note, the thread that reads its sender's messages takes one key from the
# service, and a small file is written without sync: 1.5 ms of CPU time in all, measured with two workers.
# All workers together send at most 50 notes a second: less than a tenth of one core, for 100 workers (one
# note each per 2 s) and for 1,000 (one per 20 s). Only the last note of each worker is in memory.

SEES_SECS = 5.0
"""How long a shared file system may take to show the run directory before a worker sends its notes."""
_MAX_CHARS = 4096
_WRITE_SECS = 0.1
"""How long one look may take on worker 0: the same thread looks into the inbox."""
_END_SECS = 2.0
"""How long the end of a job may take for this. Workers that are left out seem silent instead of ended."""


class NoteSender:
    """Sends this worker's notes to worker 0, as long as this worker cannot write them itself."""

    def __init__(self, session: Session, note: Callable[[], WorkerNote]) -> None:
        self._session = session
        self._note = note
        self._every_secs = sent_every_secs(session.size)
        spread = session.rank / session.size * self._every_secs  # They must not all come at once.
        self._due = time.monotonic() + SEES_SECS + spread
        self._sends = False

    def look(self) -> None:
        """Sends a note if one is due. Returns at once. For the thread `run-files`."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._every_secs
            self.send()

    def send(self) -> None:
        """Sends a note now. Returns at once. Any thread."""
        self._sends = True
        self._session.send_note(json.dumps(self._note().to_json()))

    def stop(self) -> None:
        """This worker sees the run directory by now: worker 0 must not write notes for it any more."""
        if self._sends:
            self._sends = False
            self._session.send_note("")


class DistantNotes:
    """Worker 0: writes the notes that others send. A bad one is ignored, and reported once per worker."""

    def __init__(self, attempt: int, warn: Callable[[RunDir, str, Exception], None]) -> None:
        self._attempt = attempt
        self._warn = warn
        self._lock = threading.Lock()
        self._received: dict[int, tuple[float, str]] = {}
        self._notes: dict[int, WorkerNote] = {}
        self._ended = False

    def receive(self, rank: int, text: str) -> None:
        """Keeps a note until it is written, in place of an older one. Called by the thread that reads it."""
        with self._lock:
            self._received[rank] = time.time(), str(text)[: _MAX_CHARS + 1]

    def write(self, run_dir: RunDir, secs: float = _WRITE_SECS) -> None:
        """Writes what has arrived, one note at least, and others for `secs`, the oldest first."""
        ends = time.monotonic() + secs
        while (received := self._take()) is not None:
            self._write(run_dir, *received)
            if time.monotonic() >= ends:
                return

    def end(self, run_dir: RunDir) -> None:
        """Marks the notes as those of workers that have ended. At a normal end, when all have met."""
        self._ended = True
        self.write(run_dir, _END_SECS / 2)
        ends = time.monotonic() + _END_SECS / 2
        for note in list(self._notes.values()):
            write_worker_note(run_dir, self._as_written(replace(note, time=time.time())))
            if time.monotonic() > ends:
                return

    def _take(self) -> tuple[int, float, str] | None:
        """The note that has waited longest: its sender, when it arrived, its text."""
        with self._lock:
            rank = next(iter(self._received), None)
            return None if rank is None else (rank, *self._received.pop(rank))

    def _write(self, run_dir: RunDir, rank: int, received_at: float, text: str) -> None:
        if not text:
            self._notes.pop(rank, None)
            return
        try:
            note = self._checked(rank, received_at, text)
        except ValueError as error:
            path = below(run_dir) / "workers" / f"{rank}.json"
            self._warn(path, f"a note of worker {rank} is not valid and is ignored", error)
            return
        self._notes[rank] = note
        write_worker_note(run_dir, self._as_written(note))

    def _as_written(self, note: WorkerNote) -> WorkerNote:
        return replace(note, training=False, waiting_for=ENDED) if self._ended else note

    def _checked(self, rank: int, received_at: float, text: str) -> WorkerNote:
        """The note as worker 0 writes it: with the sender's rank, and with times of worker 0's clock."""
        if len(text) > _MAX_CHARS:
            raise ValueError(f"it is longer than {_MAX_CHARS} characters")
        note = WorkerNote.from_json(parse_object(text))
        if note.attempt != self._attempt:
            raise ValueError(f"it is of attempt {note.attempt}, and this is attempt {self._attempt}")
        stepped_at = note.stepped_at
        if stepped_at is not None:  # The clocks of two hosts may differ, an age does not.
            stepped_at = min(received_at, max(0.0, received_at - (note.time - stepped_at)))
        return replace(note, rank=rank, time=received_at, stepped_at=stepped_at)


# How fast a worker trains, how far it has to go, and its memory: for its note.

_LOOKS = 10
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Pace:
    """The mean time of the last steps. Looked at about once a second, by one thread at a time."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=_LOOKS)
        self._step_secs: float | None = None
        self._stepped_at: float | None = None

    def look(self, step: int, now: float, *, training: bool) -> dict[str, Any]:
        """The fields of a note: the mean time of a step, and when the last one was finished, roughly."""
        if not training or (self._seen and step < self._seen[-1][1]):  # A restored state is an earlier step.
            self._seen.clear()
        if training and (not self._seen or step != self._seen[-1][1]):
            self._stepped_at = now if self._seen else self._stepped_at
            self._seen.append((now, step))
        if len(self._seen) > 1:
            (first_at, first), (last_at, last) = self._seen[0], self._seen[-1]
            self._step_secs = max(0.0, last_at - first_at) / (last - first)
        return {"step_secs": self._step_secs, "stepped_at": self._stepped_at}


def done_and_left(position: Position | None) -> tuple[int, int] | None:
    """The steps of the current `fit` that are done and those that are left; None if that is not known."""
    if position is None or position.inside != "fit" or not position.fits:
        return None
    fit = position.fits[-1]
    if fit.batches is None:
        return None
    total = fit.epochs * fit.batches
    done = min(total, position.epoch * fit.batches + position.batch)
    return done, total - done


def progress(position: Position | None, *, training: bool) -> dict[str, Any]:
    """The fields of a note that say where in its epochs a training is, as far as that is known."""
    if not training or position is None:
        return {}
    if position.inside != "fit" or not position.fits:
        return {"epoch": position.epoch}
    epochs, known = position.fits[-1].epochs, done_and_left(position)
    left = {} if known is None else {"steps_left": known[1]}
    return {"epoch": min(position.epoch, epochs - 1), "epochs": epochs, **left}


def memory_bytes() -> int | None:
    """The resident memory of this process; None where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None


logger = logging.getLogger("replicast")

OPERATIONS = "operations.json"
"""The current operations, for `replicast status`."""
LOOK_SECS = 0.2
NOTE_SECS = 1.0
HEARTBEAT_SECS = 1.0
_MOST_METRICS = 64


class RunFiles:
    """Writes this worker's note every second; on worker 0 also the metrics, and looks into the inbox.

    A worker of another host may not see worker 0's run directory: it then sends its note to worker 0. A full
    or missing disk is reported once and does not stop training. If another group has taken over the
    run, this job stops: the inbox then belongs to that group.
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
        may_save: Callable[[], bool] = lambda: True,
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
        self.inbox = InboxReader(session, attempt, self._warn, may_save)
        self._distant = DistantNotes(attempt, self._warn)
        self._sender = NoteSender(session, self._note)
        self._noting = threading.Lock()
        self.waiting_for = ""
        self.logs: Mapping[str, Any] | None = None
        self.training = False
        self.position: Callable[[], Position | None] = lambda: None
        self._pace = Pace()
        self.on_note = self._distant.receive

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
            self._write_operations,
        )
        if self._session.rank == 0:
            self._write_last(self.inbox.take_outcomes, self.inbox.finish)
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
        while not self._session.threads.stopping.wait(LOOK_SECS):
            now = time.monotonic()
            if now - noted >= NOTE_SECS:
                noted = now
                self._with_files(self._write_note, self._write_metrics, self._write_operations)
                self._send_note()
            if is_first:
                self._with_files(
                    self._distant.write,
                    lambda run_dir: self.inbox.look(run_dir, training=self.training),
                    self.inbox.take_outcomes,
                    self.inbox.settle,
                )

    def _write_last(self, *acts: Callable[[RunDir], None]) -> None:
        """Runs last writes in the training thread, which reaches no further boundary that could raise."""
        try:
            self._with_files(*acts)
        except JobFailed as error:
            logger.warning("%s", error)

    def _with_files(self, *acts: Callable[[RunDir], None]) -> None:
        """Runs each action if this worker writes; a disk error in one does not prevent the others."""
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


class Heartbeat:
    """Progress for a scheduler: a file that a thread writes every second. Off by default.

    A thread of its own: a run directory on a file system that hangs must not make a worker look dead. It
    never stops training: whatever fails is logged once.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        rank: int,
        attempt: int,
        step: Callable[[], int],
        training: Callable[[], bool],
        position: Callable[[], Position | None],
        metrics: Callable[[], Mapping[str, float]],
    ) -> None:
        self._path = path
        self._rank, self._attempt = rank, attempt
        self._step, self._training, self._position, self._metrics = step, training, position, metrics
        self._pace = Pace()
        self._known: tuple[int, int] | None = None
        self._finished = False
        self._stopping = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        if self._path is not None:
            self._thread.start()

    def stop(self, *, finished: bool) -> None:
        """Writes the file once more and ends the thread. A second call does nothing."""
        if self._stopping.is_set() or not self._thread.is_alive():
            return
        self._finished = finished
        self._stopping.set()
        self._thread.join(_END_SECS)

    def _run(self) -> None:
        ends = False
        while not ends:
            ends = self._stopping.wait(HEARTBEAT_SECS)
            try:
                if self._path is not None:
                    write_quickly(self._path, json.dumps(self._look(), allow_nan=False))
            except Exception as error:  # no space, or a metric of an unknown kind
                if not self._warned:
                    logger.warning("The heartbeat file cannot be written: %s", printable(error))
                self._warned = True

    def _look(self) -> dict[str, Any]:
        now, step, training = time.time(), self._step(), self._training()
        pace = self._pace.look(step, now, training=training)
        self._known = done_and_left(self._position()) or self._known
        percent = remaining = None
        if self._known is not None:
            done, left = (sum(self._known), 0) if self._finished else self._known
            percent = 100 * done // max(1, done + left)
            step_secs = pace["step_secs"]
            remaining = 0 if left == 0 else None if step_secs is None else round(left * step_secs)
        metrics = list(self._metrics().items())[:_MOST_METRICS]
        return {
            "time": now,
            "rank": self._rank,
            "attempt": self._attempt,
            "step": step,
            "training": training,
            "stepped_at": pace["stepped_at"],
            "percent": percent,
            "remaining_secs": remaining,
            "metrics": {name: value if math.isfinite(value) else None for name, value in metrics},
        }
