"""What the workers' notes tell of a job: whether it is running, how far it is, and when it changes.

A note has the time of its worker's machine, and the clock of this one may be another. So `see` decides
whether a job runs, and what time it is there:

    the last note looks recent                           it runs, at once: clocks rarely differ so much
    it looks old, or is from the future                  it runs if a note changes within `LISTEN_SECS`, and
                                                         from then on the difference of the clocks is known
    its processes were on this host and are gone,        it does not run, at once
    it is a day old, or the job has said how it ended

The times of the files would not do instead: a reader would have to write a file beside them to know the file
server's clock, and need not have the right to; and some file systems take the times from the writer's clock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from time import monotonic, sleep

from replicast.errors import FileDamaged, NotFound
from replicast.files import RunDir, RunPath, below
from replicast.processes import is_alive, is_on_this_host
from replicast.storage import run_files
from replicast.storage.claims import GROUPS
from replicast.storage.run_files import FILE as STATES
from replicast.update.schema import Schema

POLL_SECS = 0.1
MOST_RUNS = 500
_READ_NOTES_SECS = 1.0
LISTEN_SECS = run_files.ABSENT_SECS
"""A running worker writes a note every second, but worker 0 reads a large update in between."""
_TOO_OLD_SECS = 86_400.0


@dataclass(frozen=True, slots=True)
class SeenJob:
    """What the workers of a job last said, and what time it was then by their clock."""

    run: RunPath
    notes: list[run_files.WorkerNote]
    now: float

    @property
    def state(self) -> run_files.RunState:
        return run_files.read_state(self.run, self.notes, self.now)

    @property
    def running(self) -> bool:
        """Whether a worker has written a note lately, and not that it has ended."""
        return any(
            abs(self.now - note.time) <= run_files.ABSENT_SECS
            for note in self.notes
            if note.waiting_for != run_files.ENDED
        )


def see(run: RunDir) -> SeenJob:
    """Looks at a job. Blocks for at most `LISTEN_SECS`, and only if its notes look old or from the future."""
    path = below(run)  # Absolute: a process may change its working directory.
    return _reader_of(RunPath(path.root.absolute(), path.parts)).look()


class _NotesReader:
    """What this process knows of one job: how far its clock is behind, and the notes of a dead one."""

    def __init__(self, run: RunPath) -> None:
        self._run = run
        self._behind_secs = 0.0
        self._dead: list[run_files.WorkerNote] | None = None
        self._last: SeenJob | None = None
        self._lock = Lock()

    def look(self) -> SeenJob:
        # The threads of a page: one of them listens, and the others go on with what is known.
        last = self._last
        if not self._lock.acquire(blocking=last is None):
            return last if last is not None else self._seen()
        try:
            self._last = self._look()
            return self._last
        finally:
            self._lock.release()

    def _look(self) -> SeenJob:
        seen = self._seen()
        if seen.running or seen.notes == self._dead or self._is_surely_dead(seen):
            return seen
        listened = run_files.Watch(LISTEN_SECS, clock=lambda: monotonic())
        run_files.watch(lambda: run_files.read_worker_notes(self._run), listened, lambda secs: sleep(secs))
        if listened.moving:
            self._behind_secs = time.time() - max(note.time for note in listened.moving)
        seen = self._seen()
        self._dead = None if listened.moving else seen.notes
        return seen

    def _seen(self) -> SeenJob:
        return SeenJob(self._run, run_files.read_worker_notes(self._run), time.time() - self._behind_secs)

    def _is_surely_dead(self, seen: SeenJob) -> bool:
        def is_gone(note: run_files.WorkerNote) -> bool:
            """Whether its process was on this host, and has surely ended; or the note is too old."""
            process = {"host": note.host, "pid": note.pid, "machine": note.machine}
            is_dead = is_on_this_host(process) and is_alive(process) is False
            return is_dead or seen.now - note.time > _TOO_OLD_SECS

        if all(is_gone(note) for note in seen.notes if note.waiting_for != run_files.ENDED):
            return True
        return run_files.has_ended(self._run, seen.notes)


_reader_of = lru_cache(maxsize=1000)(_NotesReader)


def polls(run: RunDir, timeout_secs: float) -> Iterator[SeenJob]:
    """Looks at a job ten times a second until the time is up, and reads its notes once a second."""
    seen, read_at = see(run), monotonic()
    for number, _ in enumerate(ticks(timeout_secs, POLL_SECS)):
        if number and monotonic() - read_at >= _READ_NOTES_SECS:
            seen, read_at = see(run), monotonic()
        yield seen


def ticks(
    timeout_secs: float, every_secs: float, wait: Callable[[float], object] | None = None
) -> Iterator[bool]:
    """Waits between two looks at something; says whether the look is the last one, since the time is up.

    The first waits are short: a job that trains in short steps answers within milliseconds. `wait` may end
    earlier, when there is something to see.
    """
    ends, wait_secs = monotonic() + timeout_secs, every_secs / 64
    wait = sleep if wait is None else wait
    yield timeout_secs <= 0
    while (left := ends - monotonic()) > 0:
        wait(min(wait_secs, left))
        wait_secs = min(1.5 * wait_secs, every_secs)
        yield monotonic() >= ends


def described_run(run: RunDir) -> run_files.RunInfo | None:
    """The description of a run; None while its first workers start, or if they have failed to."""
    try:
        return run_files.read_run_info(run)
    except FileDamaged:
        if is_described(run) or not (below(run) / STATES).is_file():
            raise
        return None


def schema_of(run: RunDir) -> Schema:
    info = described_run(run)
    if info is None:
        raise NotFound(
            f"{see(run).state.sentence}. Its variables are known when its workers have met: ask again then."
        )
    return info.schema


def is_run(run: RunDir) -> bool:
    return (below(run) / STATES).is_file() or is_described(run)


def runs_below(root: RunPath) -> list[RunPath]:
    """The run at a path, or else the runs in the directory that it names: the newest ones first.

    Each is a path below this directory, so that no later access follows a link in its place either.
    """
    if is_run(root):
        return [root]
    found = []
    with contextlib.suppress(OSError):
        for path in root.iterdir():
            with contextlib.suppress(OSError):  # One that cannot be read hides no other.
                if not path.name.startswith(".") and path.is_dir() and is_run(path):
                    found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)[:MOST_RUNS]]


def is_described(run: RunDir) -> bool:
    """Whether a job has described its variables in this directory: it does when its workers have met."""
    return any((group / run_files.RUN_FILE).exists() for group in (below(run) / GROUPS).glob("*"))
