"""Notes of workers that do not see worker 0's run directory: they send them, and worker 0 writes them there.

A note goes the way of all messages (`runtime/channel.py`): in order, with the rank of its sender, and only
within this attempt of the job, because the service that carries it is worker 0's. A lost note is no loss,
since the next one follows.

What it costs worker 0: for each note, the thread that reads its sender's messages takes one key from the
service, and a small file is written without sync: 1.5 ms of CPU time in all, measured with two workers. All
workers together send at most 50 notes a second: less than a tenth of one core, for 100 workers (one note each
per 2 s) and for 1,000 (one per 20 s). Only the last note of each worker is in memory.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from replicast.files import RunDir, below
from replicast.runtime import Session
from replicast.storage.runfiles import ENDED, WorkerNote, sent_every_secs, write_worker_note
from replicast.strictjson import parse_object

SEES_SECS = 5.0
"""How long a shared file system may take to show the run directory before a worker sends its notes."""
_MAX_CHARS = 4096
_WRITE_SECS = 0.1
"""How long one look may take on worker 0: the same thread looks into the inbox."""
_END_SECS = 2.0
"""How long the end of a job may take for this. Workers that are left out seem silent instead of ended."""


class NoteSender:
    """Sends this worker's notes to worker 0, as long as this worker cannot write them itself.

    Args:
        session: This worker's part in the job.
        note: Makes the note as it is now.
    """

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
    """Worker 0: writes the notes that other workers send. A bad one is ignored, and reported once per worker.

    Args:
        attempt: The number of this attempt of the job.
        warn: Warns about a path, once: the path, what does not work, and the error.
    """

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
        """Writes what has arrived, one note at least, and others for `secs`; the longest waiting come first.

        Raises:
            OSError: A note cannot be written. It is lost.
        """
        ends = time.monotonic() + secs
        while (received := self._take()) is not None:
            self._write(run_dir, *received)
            if time.monotonic() >= ends:
                return

    def end(self, run_dir: RunDir) -> None:
        """Marks the notes as those of workers that have ended. At a normal end, when all have met.

        Raises:
            OSError: A note cannot be written.
        """
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
        """The note as worker 0 writes it: with the sender's rank, and with times of worker 0's clock.

        Raises:
            ValueError: It is not a note of this attempt.
        """
        if len(text) > _MAX_CHARS:
            raise ValueError(f"it is longer than {_MAX_CHARS} characters")
        note = WorkerNote.from_json(parse_object(text))
        if note.attempt != self._attempt:
            raise ValueError(f"it is of attempt {note.attempt}, and this is attempt {self._attempt}")
        stepped_at = note.stepped_at
        if stepped_at is not None:  # The clocks of two hosts may differ, an age does not.
            stepped_at = min(received_at, max(0.0, received_at - (note.time - stepped_at)))
        return replace(note, rank=rank, time=received_at, stepped_at=stepped_at)
