"""Follows one update from the inbox to its receipt: what `replicast push --wait` does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from replicast import inbox
from replicast.cli.rundirs import is_running, not_running_text
from replicast.cli.standings import Standing, committed, of_note, refused
from replicast.cli.texts import one_line
from replicast.runfiles import WITHOUT_CALLBACK, WorkerNote, read_worker_notes
from replicast.update import Stage

LOOK_SECS = 0.1
_LOOK_AT_WORKERS_SECS = 1.0
_ENDS = (Stage.VERIFIED, Stage.REFUSED, Stage.FAILED, Stage.WITHDRAWN)


@dataclass(frozen=True, slots=True)
class Sight:
    """What is seen of an update and of its job.

    Attributes:
        standing: Where the update stands.
        notes: What the workers last said.
        now: When that was looked at, in seconds since 1970.
        waits_for: What the job has it wait for before it can be decided, in words; else empty.
    """

    standing: Standing
    notes: list[WorkerNote]
    now: float
    waits_for: str = ""

    @property
    def is_settled(self) -> bool:
        """Whether the update has come to its end."""
        return self.standing.stage in _ENDS

    def text(self, *, moving: bool) -> str:
        """The line that says where it stands.

        Args:
            moving: Whether to say also what changes all the time: the step that the job is at.
        """
        stage, step = self.standing.stage, self.standing.step
        text = str(stage)
        if stage is Stage.COMMITTED and step is not None:
            text += f" for step {step}"
            if moving and self.notes:
                text += f", the job is at {max(note.step for note in self.notes)}"
        waits_for = self.waits_for
        if any(note.waiting_for == WITHOUT_CALLBACK for note in self.notes):
            waits_for = WITHOUT_CALLBACK
        if waits_for and stage in (Stage.PROPOSED, Stage.STAGED):
            text += f" and waits for {one_line(waits_for)}"
        if not is_running(self.notes, self.now):
            said = not_running_text(self.notes, self.now) if moving else "The job is not running"
            text += f". {said}: its next start goes on with this"
        return text


def follow(
    run_dir: Path,
    update_id: str,
    timeout_secs: float,
    show: Callable[[Sight], None],
    pause: Callable[[float], None] = time.sleep,
) -> Sight:
    """Blocks until the update is settled, at most `timeout_secs`.

    Args:
        run_dir: The run directory.
        update_id: The update's id.
        timeout_secs: How long to wait.
        show: Told what is seen, each time.
        pause: Waits for so many seconds.

    Returns:
        What was seen last.
    """
    ends = time.monotonic() + timeout_secs
    notes, looked = read_worker_notes(run_dir), time.monotonic()
    while True:
        into_journal = False
        if time.monotonic() - looked >= _LOOK_AT_WORKERS_SECS:
            notes, looked = read_worker_notes(run_dir), time.monotonic()
            into_journal = not is_running(notes, time.time())  # It died before it could write the note.
        sight = _seen(run_dir, update_id, notes, into_journal=into_journal)
        show(sight)
        if sight.is_settled:
            return sight
        left = ends - time.monotonic()
        if left <= 0:
            # A note may be lost, a journal is not.
            return _seen(run_dir, update_id, notes, into_journal=True)
        pause(min(LOOK_SECS, left))


@contextlib.contextmanager
def line(console: Console, begin: str) -> Iterator[Callable[[Sight], None]]:
    """One live line on a terminal, gone in the end; elsewhere a line for each change."""
    if console.is_terminal and not console.is_dumb_terminal:
        with console.status(begin) as status:
            # As `Text`: a string would be searched for markup, and it holds what others have written.
            yield lambda sight: status.update(Text(sight.text(moving=True)))
        return
    last = ""

    def show(sight: Sight) -> None:
        nonlocal last
        text = sight.text(moving=False)
        if text != last and not sight.is_settled:  # How it ended is said in full afterwards.
            last = text
            console.print(text, markup=False, soft_wrap=True)

    yield show


def _seen(run_dir: Path, update_id: str, notes: list[WorkerNote], *, into_journal: bool) -> Sight:
    waits_for = str((inbox.stage_of(run_dir, update_id) or {}).get("waits_for", ""))
    return Sight(_look(run_dir, update_id, into_journal=into_journal), notes, time.time(), waits_for)


def _look(run_dir: Path, update_id: str, *, into_journal: bool) -> Standing:
    """Where it stands: by its note, which is cheap to read; by the journal when the note may be missing."""
    noted = of_note(run_dir, update_id)
    if noted is not None and noted.receipt is not None:
        return noted
    if into_journal or noted is None or noted.stage in _ENDS:
        waits = any(entry.id == update_id for entry in inbox.waiting(run_dir))
        said_no = [] if waits else [one for one in refused(run_dir) if one.id == update_id]
        written = said_no or [one for one in committed(run_dir) if one.id == update_id]
        if written:
            return written[-1]
    return noted if noted is not None else Standing(update_id, Stage.PROPOSED, time.time())
