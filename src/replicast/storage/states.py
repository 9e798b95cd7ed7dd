"""What becomes of a job: `states.jsonl` in the run directory, one line per change, never rewritten.

    starting ──► (training, as the workers' notes tell) ──► finished | failed | stopped
       ▲                                                        │
       └──────────────────── restarting ◄───────────────────────┘

The launcher writes; without a launcher, worker 0 does. A job that is killed with its launcher writes nothing:
then the notes of its workers are old, and the process that wrote the last line is gone.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import islice
from typing import Any

from replicast.files import RunDir, below
from replicast.processes import is_alive, is_on_this_host, this_process
from replicast.storage.runfiles import ENDED, WorkerNote, append_line, lines_from_the_end, sent_every_secs
from replicast.strictjson import described, parse_json

FILE = "states.jsonl"
ABSENT_SECS = 10.0
"""A worker writes a note every second; after this long without one it counts as not running."""
_START_SECS = 600.0
"""How long a start may take before it counts as lost, if its process cannot be looked at from here."""
_MAX_TEXT, _MAX_LINES = 2000, 20
_MOST_CHANGES = 10_000


class State(StrEnum):
    """How a run is. Training, waiting, ending, lost and never started are found out, not written."""

    STARTING = "starting"
    TRAINING = "training"
    WAITING = "waiting"
    RESTARTING = "restarting"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    ENDING = "ending"
    LOST = "lost"
    NEVER_STARTED = "never started"

    @property
    def is_running(self) -> bool:
        """Whether there is a job that can train, or will be again."""
        return self in (State.STARTING, State.TRAINING, State.WAITING, State.RESTARTING)

    @property
    def is_over(self) -> bool:
        """Whether the job has said how it ended."""
        return self in (State.FINISHED, State.FAILED, State.STOPPED)


@dataclass(frozen=True, slots=True)
class Change:
    """A line of the file: the job has come to this state.

    Attributes:
        state: The state.
        attempt: The attempt of the job that begins, runs or has ended.
        time: Seconds since 1970.
        by: Who wrote it: "launcher" or "worker 0".
        process: The process of the writer, as `this_process` gives it.
        workers: How many workers the job has; 0 if unknown.
        step: The last step, if known.
        worker: The worker that failed first.
        reason: Why: the exception, the signal, or who has stopped it.
        last_lines: The end of the log of the worker that failed.
    """

    state: State
    attempt: int
    time: float = 0.0
    by: str = "launcher"
    process: dict[str, Any] = field(default_factory=dict)
    workers: int = 0
    step: int | None = None
    worker: int | None = None
    reason: str = ""
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunState:
    """How a run is now.

    Attributes:
        state: The state.
        sentence: The same in plain words.
        attempt: The current attempt, or the last one.
        change: The last line of the file, if there is one.
    """

    state: State
    sentence: str
    attempt: int
    change: Change | None


def write_change(run_dir: RunDir, change: Change) -> None:
    """Appends a line. Only for one process at a time.

    Raises:
        OSError: It cannot be written.
    """
    stamped = replace(
        change,
        time=change.time or time.time(),
        process=change.process or this_process(),
        reason=change.reason[:_MAX_TEXT],
        last_lines=tuple(line[:_MAX_TEXT] for line in change.last_lines[-_MAX_LINES:]),
    )
    append_line(below(run_dir) / FILE, json.dumps(asdict(stamped)))


def changes(run_dir: RunDir, last: int = _MOST_CHANGES) -> list[Change]:
    """The last changes of the run, the oldest first; damaged lines are skipped."""
    return list(islice(_from_the_end(run_dir), last))[::-1]


def read_state(run_dir: RunDir, notes: Sequence[WorkerNote], now: float | None = None) -> RunState:
    """How a run is, by its last change and by what its workers last said.

    Args:
        run_dir: The run directory.
        notes: What the workers last said.
        now: The time by the clock of the workers. Default: by the clock of this host.
    """
    now = time.time() if now is None else now
    change = next(_from_the_end(run_dir), None)
    heard = [note for note in notes if change is None or note.time >= change.time or _is_same(note, change)]
    attempt = max([0 if change is None else change.attempt, *(note.attempt for note in heard)])
    state = _state(change, heard, now)
    return RunState(state, _sentence(state, change, heard, attempt, now), attempt, change)


def has_ended(run_dir: RunDir, notes: Sequence[WorkerNote]) -> bool:
    """Whether the job has said how it ended, and no worker has written a note since."""
    change = next(_from_the_end(run_dir), None)
    return change is not None and change.state.is_over and not _newer(notes, change)


def damage(run_dir: RunDir) -> str:
    """One line: how much of the file is damaged and skipped; empty if nothing is."""
    lines = islice(lines_from_the_end(below(run_dir) / FILE), _MOST_CHANGES)
    count = sum(_change_in(line) is None for line in lines)
    if not count:
        return ""
    lines_are = "1 line is" if count == 1 else f"{count} lines are"
    return f"{FILE} is damaged: {lines_are} not readable and left out"


def _from_the_end(run_dir: RunDir) -> Iterator[Change]:
    changes = map(_change_in, lines_from_the_end(below(run_dir) / FILE))
    return (change for change in changes if change is not None)


def _change_in(line: bytes) -> Change | None:
    """The change that a line describes; None if it is damaged."""
    with contextlib.suppress(ValueError):
        fields = parse_json(line)
        if isinstance(fields, dict):
            return described(Change, "change of a run's state", fields)
    return None


def _is_same(note: WorkerNote, change: Change) -> bool:
    return note.attempt == change.attempt


def _newer(notes: Sequence[WorkerNote], change: Change) -> list[WorkerNote]:
    return [note for note in notes if note.attempt > change.attempt or note.time > change.time]


def _state(change: Change | None, heard: Sequence[WorkerNote], now: float) -> State:
    running = [note for note in heard if note.waiting_for != ENDED and abs(now - note.time) <= ABSENT_SECS]
    if change is not None and change.state.is_over:
        running = _newer(running, change)
        if not running:  # A note that was written just before the end is not news.
            return change.state
    if running:
        return State.TRAINING if any(note.training for note in running) else State.WAITING
    if change is None:
        if not heard:
            return State.NEVER_STARTED
        return State.FINISHED if all(note.waiting_for == ENDED for note in heard) else State.LOST
    said = [note for note in heard if note.attempt == change.attempt and note.time > change.time]
    if change.state.is_over or not _may_live(change, now):
        return State.LOST
    if not said:
        return change.state
    ended = [note for note in said if note.waiting_for == ENDED]
    return State.ENDING if len(ended) == len(said) else State.WAITING  # a silent worker; its launcher decides


def _may_live(change: Change, now: float) -> bool:
    """Whether the process that wrote a change may be alive."""
    alive = is_alive(change.process) if is_on_this_host(change.process) else None
    return now - change.time <= _START_SECS if alive is None else alive


def _sentence(
    state: State, change: Change | None, heard: Sequence[WorkerNote], attempt: int, now: float
) -> str:
    step = max((note.step for note in heard), default=None)
    if change is not None and change.step is not None and state.is_over:
        step = change.step
    at = "" if step is None else f" at step {step}"
    tries = f", attempt {attempt}" if attempt else ""
    reason = "" if change is None or not change.reason else f": {change.reason}"
    who = "" if change is None or change.worker is None else f" (worker {change.worker})"
    ago = "" if change is None else f", {age(now - change.time)} ago"
    match state:
        case State.NEVER_STARTED:
            return "No worker has been heard of yet"
        case State.STARTING:
            return f"Starting{tries}: no worker has been heard of yet{ago.replace(' ago', '')}"
        case State.RESTARTING:
            return f"Restarting{tries}{who}{reason}"
        case State.TRAINING:
            return f"Training{at}{tries}"
        case State.WAITING:
            silent = min((now - note.time for note in heard), default=0.0)
            if silent > ABSENT_SECS:
                return f"Running{at}{tries}: no worker has been heard of for {age(silent)}"
            return f"Running{at}{tries}, not inside a training loop"
        case State.ENDING:
            return f"Ending{at}{tries}: the workers have exited, or are about to"
        case State.FINISHED:
            return f"Finished{at}{ago}"
        case State.FAILED:
            return f"Failed{at}{tries}{who}{reason}{ago}"
        case State.STOPPED:
            return f"Stopped{at}{reason.replace(':', ' by', 1)}{ago}"
        case State.LOST:
            silent = max((note.time for note in heard), default=0.0 if change is None else change.time)
            return f"Not running: last heard of {age(now - silent)} ago{at}{tries}; it did not say why"


def absent_secs(workers: int) -> float:
    """After how long without a note one worker of a job of this size counts as silent."""
    return max(ABSENT_SECS, 3 * sent_every_secs(workers))


def age(secs: float) -> str:
    """How long ago, roughly."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if secs >= 2 * length:
            return f"{secs / length:.0f} {unit}"
    return f"{max(0.0, secs):.0f} s"
