"""Follows the workers' notes while they play, moves the bar, and shows each act when it is complete."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console

from replicast.demo.acts import WORKERS, Act, Replicas
from replicast.demo.errands import Errand, RunningErrand, start
from replicast.demo.notes import Moment, Note, NoteReader, Progress, notes_path
from replicast.demo.screen import INDENT, Bar, print_command, print_heading, print_output, print_text

LOOK_SECS = 0.05
ERRAND_SECS = 10.0
"""How long an errand may go on when the workers have played to their end."""


class Audience:
    """Watches in a thread of its own while entered, because the supervisor needs the main one.

    Attributes:
        problems: What did not happen as the acts claim, so far.
    """

    def __init__(self, acts: Sequence[Act], notes_dir: Path, bar: Bar, console: Console) -> None:
        self.problems: list[str] = []
        self._acts = acts
        self._notes_dir = notes_dir
        self._bar = bar
        self._done = 0
        self._errand: tuple[Errand, RunningErrand] | None = None
        self._console = console
        self._readers = [NoteReader(notes_path(notes_dir, worker)) for worker in range(WORKERS)]
        self._replicas: dict[str, dict[int, Moment]] = {}
        self._expected = [(act, moment) for act in acts for moment in act.moments]
        self._error: BaseException | None = None
        self._workers_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="replicast-demo-audience", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._workers_ended.set()
        self._thread.join()
        if self._errand is not None:
            self._errand[1].stop()
        if self._error is not None and error is None:
            raise self._error

    @property
    def missing(self) -> list[str]:
        """The moments that were never reached by all workers."""
        return [moment for _, moment in self._expected]

    def look(self) -> None:
        """Takes in what is new."""
        for reader in self._readers:
            for note in reader.new():
                self._take(note)
        while self._expected and self._all_are_at(self._expected[0][1]) and self._errand_has_ended():
            self._reach(*self._expected[0])
            del self._expected[0]

    def _watch(self) -> None:
        try:
            while not self._workers_ended.wait(LOOK_SECS):
                self.look()
            self.look()
        except BaseException as error:  # Raised again where it is seen, when the workers have ended.
            self._error = error

    def _all_are_at(self, moment: str) -> bool:
        return len(self._replicas.get(moment, ())) == WORKERS

    def _errand_has_ended(self) -> bool:
        if self._errand is None:
            return True
        errand, running = self._errand
        code = running.exit_code(ERRAND_SECS if self._workers_ended.is_set() else 0.0)
        if code is None:
            return False
        self._errand = None
        print_output(running.output(), self._console)
        if code != 0:
            self.problems.append(f"`{errand.command}` ended with exit code {code}")
        if errand.then:
            self._bar.show(Progress(doing=errand.then, done=self._done, loss=None))
        return True

    def _take(self, note: Note) -> None:
        if isinstance(note, Moment):
            self._replicas.setdefault(note.name, {})[note.worker] = note
        else:
            self._done = note.done
            self._bar.show(note)

    def _reach(self, act: Act, moment: str) -> None:
        if moment == act.moments[0]:
            if act is not self._acts[0]:
                self._console.print()
            print_heading(act.title, self._console)
        print_text(act.tell(moment), self._console)
        replicas = self._replicas_so_far()
        errand = act.errand(moment, replicas, self._notes_dir)
        if errand is not None:
            print_text(errand.announcement, self._console)
            print_command(errand.command, self._console)
            self._errand = errand, start(errand, self._console.width - len(INDENT))
        if moment == act.moments[-1]:
            self.problems += act.show(replicas, self._console)

    def _replicas_so_far(self) -> Replicas:
        return {
            name: [workers[worker] for worker in range(WORKERS)]
            for name, workers in self._replicas.items()
            if self._all_are_at(name)
        }
