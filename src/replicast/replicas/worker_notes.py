"""A worker's files: its note and heartbeat for others, and on worker 0 metrics and the inbox of the run.

Threads of their own do this, so that no file keeps the training thread waiting: `run-files`, and `heartbeat`
for the file of a scheduler: a run directory on a file system that hangs must not make a worker look dead.

Who writes a worker's note, `workers/RANK.json`:

    into worker 0's directory                   the worker, if it sees that directory; else it sends its
                                                note to worker 0, which writes it
    into a directory that a launcher made       the worker: the launcher of its host reads it there
    anywhere else                               nobody

A note is sent the way of all messages (`channel.py`): in order, with the rank of its sender, and only within
this attempt of the job, because the service that carries it is worker 0's. If one is lost, the next follows.
At the end nobody writes for the others: how the job ended is in states.jsonl.

What it costs worker 0: for each note, the thread that reads its sender's messages takes one key from the
service, and a small file is written without sync: 1.5 ms of CPU time in all, measured with two workers. All
workers together send at most 50 notes a second: less than a tenth of one core, for 100 workers (one note each
per 2 s) and for 1,000 (one per 20 s). Only the last note of each worker is in memory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from replicast.codec import described, parse_object
from replicast.errors import FileDamaged, JobFailed, printable
from replicast.files import RunDir, below, write_quickly
from replicast.processes import Deadline, this_machine
from replicast.replicas.position import Position, Training
from replicast.replicas.proposals import FIRST_SECS, InboxReader
from replicast.replicas.replica import numbers
from replicast.replicas.session import Session
from replicast.storage.claims import Fence, sees_group
from replicast.storage.inbox import Arrivals
from replicast.storage.run_files import (
    ENDED,
    RATE,
    WORKERS,
    WorkerNote,
    append_metrics,
    read_worker_notes,
    sent_every_secs,
    write_worker_note,
)

logger = logging.getLogger("replicast")

OPERATIONS = "operations.json"  # The current operations, for `replicast status`.
LOOK_SECS = 0.2
_REST_SECS, _STOP_SECS = 0.002, 0.05
NOTE_SECS = 1.0
SEES_SECS = 5.0  # A shared file system may need so long to show the run directory; then notes are sent.
_WRITE_SECS = 0.1  # How long worker 0 writes the notes of others at a time: the same thread reads the inbox.
_LAST_SECS = 2.0  # How long the exit of a script that has raised waits for its last metrics.
_MOST_METRICS = 64
_IN_HEARTBEAT = ("time", "rank", "attempt", "step", "training", "stepped_at")
_LOOKS = 10
_RECORDED = ("step_secs", "own_secs", "memory_bytes")
_MOST_RECORDED, _READ_PER_SEC, _LINES = 32, 50, 1000
_OTHER = 1.3  # An own time that is so many times another one has changed.
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(eq=False, repr=False)
class RunFiles:
    """A full disk is reported once. If another group has taken over the run, this job stops."""

    session: Session
    run_dir: RunDir | None
    training: Training
    fence: Fence | None = None
    group: str | None = None  # whose directory this worker has not seen yet
    launcher_reads: bool = False
    may_save: Callable[[], bool] = lambda: True
    heartbeat: Path | None = None
    # How long this worker has waited for others inside of steps, in all; None where that is not measured.
    waited: Callable[[], float] | None = None

    def __post_init__(self) -> None:
        session = self.session
        self._operations: list[dict[str, Any]] = []
        self._warned: set[RunDir] = set()
        self.inbox = InboxReader(
            session.proposals, session.operations, session.attempt, self._warn, self.may_save
        )
        self._distant = DistantNotes(self._warn)
        self._fit: tuple[int, int] | None = None
        self._sends_every = sent_every_secs(session.size)
        spread = session.rank / session.size * self._sends_every  # They must not all come at once.
        self._sends_at = time.monotonic() + SEES_SECS + spread
        self._noting, self._reading = threading.Lock(), threading.Lock()
        self.waiting_for = ""
        self.logs: Mapping[str, Any] | None = None
        self._pace = Pace()
        self._thread: threading.Thread | None = None
        self._began = self._recorded = time.monotonic()
        self.on_note = self._distant.receive

    def start(self) -> None:
        """Starts the threads: if this worker or worker 0 has a run directory, or a scheduler wants a file."""
        if self.run_dir is not None or self.group:
            self._thread = self.session.threads.start("run-files", self._run)
        if self.heartbeat is not None:
            self.session.threads.start("heartbeat", self._beat)

    def take_first(self) -> None:
        """Before the attempt trains: what waits in the inbox is applied before its first step."""
        # Without it when a look hangs: the next look takes what waits.
        if self.session.rank == 0 and self._reading.acquire(timeout=FIRST_SECS):
            try:
                self._with_files(self.inbox.first)
            finally:
                self._reading.release()

    def finish(self, *, finished: bool = True) -> None:
        """Writes the last state, after the threads have stopped; `finished` if nobody has told it to end."""
        self.training.active = False
        self.waiting_for = ENDED
        self._write_last(self._write_note, self._write_operations)
        self._write_heartbeat(finished=finished)
        if self.session.rank == 0:
            self._write_last(self.inbox.take_outcomes, self.inbox.finish)
        if self.fence is not None:
            self.fence.release()

    def note_end(self) -> None:
        """Notes that the process exits, so that others need not wait ten seconds to conclude it."""
        self.waiting_for, self.training.active = ENDED, False
        if self._thread is not None:  # It writes the last metrics. They may be of a step that never ends.
            self._thread.join(_LAST_SECS)
        self._write_last(self._write_note)
        self._write_heartbeat()

    def _run(self) -> None:
        noted = 0.0
        is_first = self.session.rank == 0
        with contextlib.ExitStack() as stack:
            if is_first and self.run_dir is not None:
                self.inbox.arrivals = stack.enter_context(contextlib.closing(Arrivals(self.run_dir)))
            while not self._stopping_after_a_wait():
                now = time.monotonic()
                if now - noted >= NOTE_SECS:
                    noted = now
                    self._with_files(
                        self._write_note, self._write_metrics, self._write_operations, self._record_notes
                    )
                    if self.group and now >= self._sends_at:
                        self._sends_at = now + self._sends_every
                        self.session.send_note(json.dumps(self._note().to_json()))
                # `take_first` may read for long, and the notes tell others that this job runs.
                if is_first and self._reading.acquire(blocking=False):
                    try:
                        self._with_files(
                            self.inbox.take_outcomes,
                            self.inbox.settle,
                            self._distant.write,
                            lambda run_dir: self.inbox.look(run_dir, training=self.training.active),
                        )
                    finally:
                        self._reading.release()
            self._write_last(self._write_metrics)

    def _stopping_after_a_wait(self) -> bool:
        """Waits for a request or an outcome, or until it is time to look; says whether to stop."""
        stopping, arrivals = self.session.threads.stopping, self.inbox.arrivals
        if arrivals is None:
            return stopping.wait(LOOK_SECS)
        deadline = Deadline(LOOK_SECS)
        stopping.wait(_REST_SECS)  # However many requests arrive, the thread rests between two looks.
        while not stopping.is_set() and not deadline.has_passed() and not arrivals.wait(_STOP_SECS):
            pass  # Other files of the inbox, as the note that an author writes just before its update.
        return stopping.is_set()

    def _beat(self) -> None:
        while not self.session.threads.stopping.wait(NOTE_SECS):
            self._write_heartbeat()

    def _write_heartbeat(self, *, finished: bool = False) -> None:
        """Writes the file for a scheduler. It never stops training: whatever fails is logged once."""
        path = self.heartbeat
        if path is None:
            return
        try:
            note, metrics = self._note(), list(numbers(self.logs or {}).items())[:_MOST_METRICS]
            self._fit = done_and_left(self.training.position) or self._fit
            percent = remaining = None
            if self._fit is not None:
                done, left = (sum(self._fit), 0) if finished else self._fit
                percent = 100 * done // max(1, done + left)
                secs = note.step_secs if left else 0.0
                remaining = None if secs is None else round(left * secs)
            said = {
                **{name: getattr(note, name) for name in _IN_HEARTBEAT},
                "percent": percent,
                "remaining_secs": remaining,
                "metrics": {name: value if math.isfinite(value) else None for name, value in metrics},
            }
            write_quickly(path, json.dumps(said, allow_nan=False))
        except Exception as error:  # no space, or a metric of an unknown kind
            self._warn(path, "The heartbeat file cannot be written", error)

    def _write_last(self, *acts: Callable[[RunDir], None]) -> None:
        """Runs last writes in the training thread, which reaches no further boundary that could raise."""
        try:
            self._with_files(*acts)
        except JobFailed as error:
            logger.warning("%s", error)

    def _with_files(self, *acts: Callable[[RunDir], None]) -> None:
        """Runs each action if this worker writes; a disk error in one does not prevent the others."""
        run_dir = self.run_dir
        if run_dir is None:
            return
        # Whether it is worker 0's. A shared file system may show that after some seconds.
        if self.group is not None and sees_group(run_dir, self.group):
            self.group = None
        if self.group is not None and not self.launcher_reads:
            return
        problem = "the run directory cannot be kept up to date"
        for act in acts:
            try:
                if self.fence is not None:
                    self.fence.check()  # Before each: another group may have taken over meanwhile.
            except (FileDamaged, OSError) as error:
                # Until the disk is back, it is not known which group owns the run.
                self._warn(run_dir, problem, error)
                return
            try:
                act(run_dir)
            except OSError as error:
                self._warn(run_dir, problem, error)

    def _warn(self, path: RunDir, problem: str, error: Exception) -> None:
        if path not in self._warned:
            self._warned.add(path)
            logger.warning("%s: %s", problem, printable(error))

    def _write_note(self, run_dir: RunDir) -> None:
        write_worker_note(run_dir, self._note())

    def _note(self) -> WorkerNote:
        """This worker's note as it is now. Any thread."""
        now, step, training = time.time(), self.session.step, self.training.active
        waited = None if self.waited is None else self.waited()
        with self._noting:
            pace = self._pace.look(step, now, waited, training=training)
        return WorkerNote(
            rank=self.session.rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            machine=this_machine(),
            step=step,
            attempt=self.session.attempt,
            time=now,
            training=training,
            waiting_for=self.waiting_for,
            memory_bytes=memory_bytes(),
            **pace,
            **(progress(self.training.position) if training else {}),
        )

    def _write_metrics(self, run_dir: RunDir) -> None:
        """The metrics of every step since the last time. Readers thin them out."""
        if self.session.rank == 0:
            measures = self.session.replica.measures
            if measured := [one for one in measures.take() if one[2]]:
                if measures.rate is not None:  # The last line is what `status` tells.
                    measured[-1][2].setdefault(RATE, measures.rate)
                append_metrics(run_dir, *measured)

    def _record_notes(self, run_dir: RunDir) -> None:
        """Adds a line of what the workers' notes say to a file for charts: step time and memory by rank.

        The longer an attempt takes, the less often: no chart shows more, and the file stays small (5,500
        lines in a day, 9,000 in a month).
        """
        now = time.monotonic()
        pause = max(self.session.size / _READ_PER_SEC, (now - self._began) / _LINES)
        if self.session.rank == 0 and now - self._recorded >= pause:
            self._recorded = now
            notes = [one for one in read_worker_notes(run_dir) if one.attempt == self.session.attempt]
            told = {
                f"{name}/{note.rank}": value
                for note in notes[:_MOST_RECORDED]
                for name in _RECORDED
                if (value := getattr(note, name)) is not None
            }
            append_metrics(run_dir, (self.session.step, time.time(), told), file=WORKERS)

    def _write_operations(self, run_dir: RunDir) -> None:
        operations = [] if self.waiting_for == ENDED else self.session.operations()
        if self.session.rank == 0 and operations != self._operations:
            said = json.dumps({"step": self.session.step, "operations": operations})
            write_quickly(below(run_dir) / OPERATIONS, said)
            self._operations = operations


class DistantNotes:
    """Worker 0: writes the notes that others send. A bad one is ignored, and reported once per worker."""

    def __init__(self, warn: Callable[[RunDir, str, Exception], None]) -> None:
        self._warn = warn
        self._lock = threading.Lock()
        self._received: dict[int, tuple[float, str]] = {}

    def receive(self, rank: int, text: str) -> None:
        """Keeps a note until it is written, in place of an older one. Called by the thread that reads it."""
        with self._lock:
            self._received[rank] = time.time(), text

    def write(self, run_dir: RunDir, secs: float = _WRITE_SECS) -> None:
        """Writes what has arrived, one note at least, and others for `secs`, the oldest first."""
        deadline = Deadline(secs)
        while True:
            with self._lock:
                if not self._received:
                    return
                rank = next(iter(self._received))
                received_at, text = self._received.pop(rank)
            try:
                write_worker_note(run_dir, _by_this_clock(rank, received_at, text))
            except ValueError as error:
                path = below(run_dir) / "workers" / f"{rank}.json"
                self._warn(path, f"a note of worker {rank} is not valid and is ignored", error)
            if deadline.has_passed():
                return


def _by_this_clock(rank: int, received_at: float, text: str) -> WorkerNote:
    """A note as worker 0 writes it: the clocks of two hosts may differ, an age does not."""
    note = described(WorkerNote, "worker", parse_object(text))

    def here(moment: float | None) -> float | None:
        age = None if moment is None else note.time - moment
        return None if age is None else min(received_at, max(0.0, received_at - age))

    stepped_at, own_since = here(note.stepped_at), here(note.own_since)
    return replace(note, rank=rank, time=received_at, stepped_at=stepped_at, own_since=own_since)


class Pace:
    """The mean time of the last steps. Looked at about once a second, by one thread at a time.

    In synchronous training the steps of all workers take as long as those of the slowest. What tells who that
    is: the time of a step without waiting for others inside of it, its own time.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, float | None]] = deque(maxlen=_LOOKS)
        self._step_secs: float | None = None
        self._stepped_at: float | None = None
        self._own_secs: float | None = None
        self._own_since: float | None = None
        self._level = 0.0  # The own time since then, roughly.

    def look(self, step: int, now: float, waited: float | None = None, *, training: bool) -> dict[str, Any]:
        """The fields of a note about the last steps: their times, and when the last one ended, roughly."""
        if not training or (self._seen and step < self._seen[-1][1]):  # A restored state is an earlier step.
            self._seen.clear()
        if training and (not self._seen or step != self._seen[-1][1]):
            self._stepped_at = now if self._seen else self._stepped_at
            self._seen.append((now, step, waited))
        if len(self._seen) > 1:
            (first_at, first, first_waited), (last_at, last, last_waited) = self._seen[0], self._seen[-1]
            self._step_secs = max(0.0, last_at - first_at) / (last - first)
            if first_waited is not None and last_waited is not None and len(self._seen) >= _LOOKS // 2:
                own = max(0.0, self._step_secs - (last_waited - first_waited) / (last - first))
                if self._own_since is None or not self._level / _OTHER <= own <= self._level * _OTHER:
                    self._level, self._own_since = own, now
                self._own_secs = own
        return {
            "step_secs": self._step_secs,
            "stepped_at": self._stepped_at,
            "own_secs": self._own_secs,
            "own_since": self._own_since,
        }


def done_and_left(position: Position) -> tuple[int, int] | None:
    """The steps of the current `fit` that are done and those that are left; None if that is not known."""
    fit = position.fits[-1] if position.inside == "fit" and position.fits else None
    if fit is None or fit.batches is None:
        return None
    total = fit.epochs * fit.batches
    done = min(total, position.epoch * fit.batches + position.batch)
    return done, total - done


def progress(position: Position) -> dict[str, Any]:
    """The fields of a note that say where in its epochs a training is, as far as that is known."""
    if position.inside != "fit" or not position.fits:
        return {"epoch": position.epoch}
    epochs, known = position.fits[-1].epochs, done_and_left(position)
    left = {} if known is None else {"steps_left": known[1]}
    return {"epoch": min(position.epoch, epochs - 1), "epochs": epochs, **left}


def memory_bytes() -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None
