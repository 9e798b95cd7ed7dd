"""Whether a job is alive, by progress seen.

The clocks of two machines differ, by seconds or by hours, so the age of a note tells nothing to a reader
elsewhere. But every worker replaces its note each second, with another time in it. So:

    a note has changed while this reader watched        its worker has run meanwhile: alive
    all workers have noted that they have ended         not alive
    nothing has changed for `SILENT_SECS`               not alive: it has died, is stopped or is cut off
    none of these yet                                   not known: watch on

Only this process's monotonic clock counts, and times in notes are never compared with it.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence

from replicast.config import ANY, shortened
from replicast.errors import ClusterError
from replicast.files import RunDir
from replicast.processes import is_alive, is_on_this_host
from replicast.storage.claims import RELEASED, Claim, group_directory, last_claim
from replicast.storage.run_files import ENDED, WorkerNote, read_worker_notes
from replicast.strictjson import json_bytes

# Ten notes, and the time after which TensorFlow takes a worker without heartbeats for dead.
SILENT_SECS = 10.0
_LOOK_SECS = 0.1


class Watch:
    """What one reader has seen of a job's notes. Give every reading to `look`, several in `silent_secs`."""

    def __init__(self, silent_secs: float = SILENT_SECS, clock: Callable[[], float] = time.monotonic) -> None:
        self._silent_secs = silent_secs
        self._clock = clock
        self._began: float | None = None
        self._seen: dict[int, tuple[WorkerNote, float | None]] = {}
        self.moving: list[WorkerNote] = []

    @property
    def secs(self) -> float:
        return 0.0 if self._began is None else self._clock() - self._began

    def look(self, notes: Sequence[WorkerNote]) -> bool | None:
        """Takes a reading of the notes; returns whether the job is alive, None while that is not known."""
        now, is_first = self._clock(), self._began is None
        self._began = now if self._began is None else self._began
        for note in notes:
            before, changed = self._seen.get(note.rank, (None, None))
            if note != before:  # A note that was not there before was written meanwhile.
                self._seen[note.rank] = (note, None if is_first else now)
            elif changed is not None and now - changed > self._silent_secs:
                self._seen[note.rank] = (note, None)
        running = [note for note in notes if note.waiting_for != ENDED]
        self.moving = [note for note in running if self._seen[note.rank][1] is not None]
        if self.moving:
            return True
        if notes and not running:
            return False
        return None if self.secs < self._silent_secs else False


def watch(
    read: Callable[[], Sequence[WorkerNote]],
    watched: Watch | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Watch:
    """Reads the notes until it is known whether the job is alive, at most `silent_secs` of the watch."""
    watched = Watch() if watched is None else watched
    while watched.look(read()) is None:
        sleep(_LOOK_SECS)
    return watched


def check_free(
    run_dir: RunDir,
    take_over: str = "",
    tell: Callable[[str], None] = lambda line: None,
    watched: Watch | None = None,
) -> str:
    """Checks that no job is running in this directory, before another one claims it.

    On this host the process of its worker 0 counts, at once. On another host its note counts: blocks until it
    changes, at most `SILENT_SECS`. Not the notes of the other workers: they outlive worker 0 by some seconds,
    in which the job cannot be saved, and a scheduler may start it again already.
    """
    claim = last_claim(run_dir)
    if claim is None or (group_directory(run_dir, claim.group) / RELEASED).exists():
        return ""
    process = claim.process
    pid, host = process.get("pid"), shortened(repr(process.get("host")))
    if is_on_this_host(process):
        if pid != os.getpid() and is_alive(process):
            raise ClusterError(
                f"A job is running in {run_dir}: process {pid} on this host",
                remedy="Stop it first, or choose another run directory",
            )
        return ""
    # By the process: all `Replicas` of a script have the same one, and each has a directory with claims.
    job = hashlib.sha256(json_bytes(dict(process))).hexdigest()
    if take_over not in (ANY, job):
        tell(f"watching for {SILENT_SECS:.0f} s whether the job of host {host} in {run_dir} still runs")
        seen = watch(lambda: _notes_of_first(run_dir, claim), watched)
        if seen.moving:
            raise ClusterError(
                f"A job is running in {run_dir}: worker 0, process {pid} on host {host}, has written a note "
                f"while it was watched for {seen.secs:.1f} s, and is at step {seen.moving[0].step}",
                remedy="Stop it first (replicast stop), or choose another run directory. To take over the "
                "directory all the same, which ends that job: replicast run --take-over, or "
                "REPLICAST_TAKE_OVER=1 in the environment of a job without `replicast run`",
            )
    return job


def _notes_of_first(run_dir: RunDir, claim: Claim) -> list[WorkerNote]:
    """The note of worker 0; not what an earlier group has said last: the one that claims may be starting."""
    own = claim.process.get("pid"), claim.attempt
    notes = read_worker_notes(run_dir, "0")
    return [note for note in notes if note.waiting_for != ENDED or (note.pid, note.attempt) == own]
