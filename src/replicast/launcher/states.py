"""The launcher records what becomes of the job, so that a crash can be told from success later."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from replicast.config import TOLD_TO_END
from replicast.errors import printable
from replicast.launcher.failure import exception_in, traceback_in
from replicast.launcher.group import GroupEnd
from replicast.launcher.report import short_path
from replicast.launcher.screen import Screen
from replicast.launcher.worker import WorkerExit
from replicast.paths import RunDir, below

if TYPE_CHECKING:
    from replicast.storage.updates import Description


class States:
    """The states of one job. The launcher of worker 0 writes; those of other hosts write nothing."""

    def __init__(self, run_dir: RunDir, screen: Screen, workers: int, *, writes: bool) -> None:
        self._run_dir = run_dir
        self._workers = workers
        self._screen = screen
        self._writes = writes

    def starting(self, attempt: int) -> None:
        """The first attempt of this launcher begins."""
        self._write("starting", attempt)

    def restarting(self, attempt: int, end: GroupEnd) -> None:
        """Another attempt begins because of how the last one ended."""
        failure = end.first_failure
        self._write("restarting", attempt, failure, "" if failure is None else why(failure))

    def ended(self, attempt: int, end: GroupEnd, exit_code: int, step: int | None) -> None:
        """The job is over."""
        failure = end.first_failure
        if exit_code == 0:
            self._write("finished", attempt, step=step)
        elif end.interrupted_by is not None:
            name = "Ctrl-C" if end.interrupted_by is signal.SIGINT else end.interrupted_by.name
            self._write("stopped", attempt, reason=name, step=step)
        elif failure is not None and failure.code == TOLD_TO_END:
            self._write("stopped", attempt, reason=self._told_by(attempt, failure), step=step)
        else:
            reason = "workers could not be killed" if failure is None else why(failure)
            self._write("failed", attempt, failure, reason, step)

    def _told_by(self, attempt: int, first: WorkerExit) -> str:
        from replicast.storage.requests import stopped_by  # Imports numpy: not at start-up.

        told = stopped_by(self._run_dir, attempt)
        return f"SIGTERM to worker {first.rank}" if told is None else told.author

    def _write(
        self,
        state: str,
        attempt: int,
        failure: WorkerExit | None = None,
        reason: str = "",
        step: int | None = None,
    ) -> None:
        if not self._writes:
            return
        from replicast.storage.run_files import Change, State, write_change  # Imports numpy: not at start-up.

        change = Change(
            State(state),
            attempt,
            workers=self._workers,
            step=step,
            worker=None if failure is None else failure.rank,
            reason=reason,
            last_lines=() if failure is None else last_lines(failure),
        )
        try:
            write_change(self._run_dir, change)
        except OSError as error:
            self._screen.tell(f"replicast: the state of the job cannot be written ({error.strerror})")


def why(failure: WorkerExit) -> str:
    """Why a worker failed, in a line: its exception, or how its process ended."""
    if failure.lost:
        return f"host {failure.host} was lost: {failure.lost}"
    if failure.host:
        return f"{failure.reason or failure.how} on {failure.host}"
    return exception_of(failure) or failure.how


def exception_of(failure: WorkerExit) -> str:
    """The exception that ended a worker of this host; empty without one."""
    return exception_in(traceback_in(failure.log)) if failure.code > 0 and not failure.frozen else ""


def last_lines(failure: WorkerExit) -> tuple[str, ...]:
    """What to show of the output of a worker that failed."""
    return failure.tail if failure.host else tuple(traceback_in(failure.log)) or failure.tail


def what_is_taken_over(run_dir: RunDir) -> str:
    """One line: what a start finds in a run directory that was used before; empty if nothing."""
    if not (below(run_dir) / "groups").is_dir():
        return ""
    try:
        found = _contents(run_dir)
    except OSError as error:  # This line is a courtesy: the workers say what they cannot read.
        found = [f"a file that cannot be read ({error})"]
    return f"replicast: {short_path(run_dir)} was used before; it has {'; '.join(found)}" if found else ""


def _contents(run_dir: RunDir) -> list[str]:
    from replicast.errors import FileDamaged
    from replicast.storage import inbox  # These import numpy: not for a new run.
    from replicast.storage.checkpoints import CheckpointStore
    from replicast.storage.updates import Updates, describe

    found = []
    try:
        last = CheckpointStore(run_dir).last()
        if last is not None:
            found.append(f"a checkpoint of step {last.step}")
        journal = Updates(run_dir)
        found += _counted(len(journal.committed), "in the journal")
        found += _counted(len(journal.scheduled), "scheduled")
    except FileDamaged as error:
        found.append(f"a damaged file ({error})")
    waiting = inbox.waiting(run_dir)
    shown = ", ".join(_waiting(one.id, describe(one.path)) for one in waiting[:3]) + (
        ", …" if len(waiting) > 3 else ""
    )
    found += [f"{one}: {shown}" for one in _counted(len(waiting), "waiting in the inbox, for its first step")]
    return found


def _waiting(update_id: str, told: Description | None) -> str:
    """An update by the beginning of its id, and what it does."""
    text = update_id[:8] + ("" if told is None else f" ({told.words})")
    return printable(text)


def _counted(count: int, where: str) -> list[str]:
    return [f"{count} update{'s' if count > 1 else ''} {where}"] if count else []
