"""What a job writes about itself into its run directory, and whether it is alive, judged by that."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import islice, pairwise
from statistics import fmean
from typing import Annotated, Any, Self, TypeVar

import msgspec
from msgspec.structs import replace

from replicast import files
from replicast.codec import (
    View,
    check_format,
    described,
    json_bytes,
    json_line,
    json_value,
    parse_object,
    sealed_json,
)
from replicast.config import ANY, shortened
from replicast.errors import ClusterError, FileDamaged
from replicast.files import RunDir, RunPath, below
from replicast.processes import is_alive, is_on_this_host, this_process
from replicast.storage import claims
from replicast.storage.claims import Fence
from replicast.update.audit_report import AuditReport
from replicast.update.schema import Schema
from replicast.update.update import MAX_TEXT

_Record = TypeVar("_Record")

FORMAT = 2
RUN_FILE = "run.json"
RATE = "learning_rate"  # in metrics.jsonl, where it has changed
METRICS, EVALUATIONS, WORKERS = "metrics.jsonl", "evaluations.jsonl", "workers.jsonl"
# What a worker waits for while its model is trained without boundaries. Updates wait too.
WITHOUT_CALLBACK = "a boundary: its fit has no replicas.callback()"
ENDED = "nothing: it has ended"  # What a worker waits for after it has ended.
_SENT_SECS, _MOST_SENT_PER_SEC = 2.0, 50  # By each worker; by all together, the more the less often each.
_PIECE_BYTES = 64 * 1024
MAX_METRICS_STEP = 2**62  # Sums and differences of two fit into 64 bits.
_AROUND_BYTES = 64 * 1024  # of metrics on each side of an update: some hundred lines
_MOST_AROUND, _MOST_SAMPLED = 20, 20  # metrics of an update, and steps on each side of it
_MOST_AT_A_STEP = 5  # lines
_NEAR_BYTES = 16 * 1024  # A list of updates looks at 200 places, so few lines may be parsed at each.
_MAX_LINE_BYTES = 4 * 2**20
_MAX_BACK_BYTES = 256 * 2**20
_MAX_NOTE_BYTES, _MAX_ANNOTATION_BYTES = 64 * 1024, 128 * 1024


class RunInfo(View, frozen=True):
    format: int
    schema: Schema
    workers: int
    attempt: int
    created_at: float
    journaled: bool = True

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        check_format(FORMAT, "a run", fields)
        return described(cls, "run", fields)


# Anybody may write a note: a larger number could not become a float for the charts.
Whole = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]


class WorkerNote(View, frozen=True):
    rank: Whole
    pid: Whole
    host: str
    step: Whole
    attempt: Whole
    time: float
    training: bool
    waiting_for: str
    epoch: Whole | None = None
    epochs: Whole | None = None
    steps_left: Whole | None = None
    step_secs: float | None = None
    stepped_at: float | None = None
    memory_bytes: Whole | None = None
    machine: str = ""
    own_secs: float | None = None  # Of a step, without waiting for others; None where it is not measured.
    own_since: float | None = None  # Since when it takes about so long.


def sent_every_secs(workers: int) -> float:
    """How often a worker of a job of this size sends its note to worker 0, if worker 0 writes it."""
    return max(_SENT_SECS, workers / _MOST_SENT_PER_SEC)


def clean_run(run_dir: RunDir) -> None:
    """Removes temporary files of writers that died. Only before a worker writes its first note."""
    for directory in (run_dir, below(run_dir) / "workers"):
        files.remove_leftovers(directory, older_than_secs=0.0)


def write_run_info(fence: Fence, info: RunInfo) -> None:
    files.write_durably(fence.directory / RUN_FILE, [sealed_json(info.to_json())])
    fence.check()


def read_run_info(run_dir: RunDir) -> RunInfo:
    claim = claims.last_claim(run_dir)
    for group in claims.group_numbers(run_dir):
        path = claims.group_directory(run_dir, group) / RUN_FILE
        if claim is not None and group <= claim.group and path.exists():
            try:
                return RunInfo.from_json(files.read_json(path, is_sealed=True))
            except ValueError as error:
                raise FileDamaged(path, str(error)) from error
    raise FileDamaged(
        below(run_dir) / claims.GROUPS,
        f"no group has a {RUN_FILE}. Is this a run directory, and is its job still starting?",
    )


def write_worker_note(run_dir: RunDir, note: WorkerNote) -> None:
    directory = below(run_dir) / "workers"
    files.make_durably(directory)
    files.write_quickly(directory / f"{note.rank}.json", json.dumps(note.to_json()))


def read_worker_notes(run_dir: RunDir, which: str = "*") -> list[WorkerNote]:
    """The latest notes of the workers, by rank. Damaged notes and those of another rank are skipped."""
    notes = []
    for path in (below(run_dir) / "workers").glob(f"{which}.json"):
        with contextlib.suppress(OSError, ValueError):
            note = _decoded(WorkerNote, files.read_small(path, max_bytes=_MAX_NOTE_BYTES))
            if path.name == f"{note.rank}.json":
                notes.append(note)
    return sorted(notes, key=lambda note: note.rank)


def _decoded(kind: type[_Record], content: bytes) -> _Record:
    try:
        return msgspec.json.decode(content, type=kind)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def append_metrics(
    run_dir: RunDir,
    *measured: tuple[int, float, Mapping[str, float], *tuple[Sequence[str], ...]],
    file: str = METRICS,
) -> None:
    """Appends a line for each: step, time, values, and the names of those that are of the epoch so far."""
    rows = list[dict[str, Any]]()
    for step, at, values, *running in measured:  # Seven digits tell a float32, and microseconds a step.
        numbers = {name: json_value(float(f"{value:.7g}")) for name, value in values.items()}
        rows.append({"step": step, "time": round(at, 6), "values": numbers})
        if any(running):
            rows[-1]["running"] = running[0]
    append_line(below(run_dir) / file, b"\n".join(map(json_line, rows)))


def last_metrics(run_dir: RunDir) -> dict[str, Any] | None:
    """The metrics of the last step. A validation after it has a line of its own, which is included."""
    found: dict[str, Any] | None = None
    for one in islice(measured_in(run_dir, METRICS), _MOST_AT_A_STEP):
        if found is not None and one["step"] != found["step"]:
            break
        found = one if found is None else one | {"values": one["values"] | found["values"]}
    return found


def measured_in(run_dir: RunDir, file: str) -> Iterator[dict[str, Any]]:
    """What was measured, the last one first; damaged lines are left out."""
    for one in _readable(lines_from_the_end(below(run_dir) / file), METRICS_LINE.decode):
        values = {name: one.number(name) for name in one.values}
        yield {"step": one.step, "time": one.time, "values": values, "running": list(one.running)}


# A metric around an update: what it was in the steps before and after it, and how much it varied there, so
# that an effect can be told from noise.


class Sample(View, frozen=True):
    mean: float
    spread: float  # the standard deviation
    steps: int

    def __str__(self) -> str:
        return f"{self.mean:.4g} ± {self.spread:.2g} ({self.steps} step{'' if self.steps == 1 else 's'})"


class Around(View, frozen=True):
    metric: str
    before: Sample
    after: Sample

    def __str__(self) -> str:
        return f"{self.metric} {self.before} → {self.after}"


_INFINITE = {"inf": math.inf, "-inf": -math.inf}


class MetricsLine(msgspec.Struct, gc=False):
    step: Annotated[int, msgspec.Meta(ge=0, lt=MAX_METRICS_STEP)]
    time: float
    values: dict[str, float | str]
    running: tuple[str, ...] = ()  # Metrics of the epoch so far, such as an AUC.

    def number(self, metric: str) -> float:
        """A value as `append_metrics` wrote it; NaN for any other text."""
        value = self.values[metric]
        return value if isinstance(value, float) else _INFINITE.get(value, math.nan)


METRICS_LINE = msgspec.json.Decoder(MetricsLine)


def metrics_around(run_dir: RunDir, step: int, at: float) -> tuple[Around, ...]:
    """The metrics in the steps before and after one that ended about this time, the loss first.

    Without those that were not measured on both sides, or are of the epoch so far. The place is found by the
    times of the lines, which only grow; steps are repeated after a restart. So little is read, however long
    the file is.
    """
    try:
        descriptor = files.open_plain(below(run_dir) / METRICS)
    except OSError:
        return ()
    with os.fdopen(descriptor, "rb"):
        low, high = places_of(descriptor, at)
        start = max(0, low - _AROUND_BYTES)
        content = os.pread(descriptor, high - start + _AROUND_BYTES, start)
        complete = content.split(b"\n")[start != 0 : -1]
        lines = list(_readable(complete, METRICS_LINE.decode))
    ends = [place for place, (one, next_) in enumerate(pairwise(lines), 1) if one.step <= step < next_.step]
    if not ends:
        return ()
    place = min(ends, key=lambda place: abs(lines[place].time - at))
    before, after = list(_growing(reversed(lines[:place]), -1)), list(_growing(lines[place:], 1))
    sides = before + after
    running = {RATE, *(name for one in sides for name in one.running)}
    names = dict.fromkeys(name for one in sides for name in one.values if name not in running)
    found = []
    for metric in sorted(names, key="loss".__ne__)[:_MOST_AROUND]:
        samples = []
        for side in (before, after):
            measured = (one.number(metric) for one in side if metric in one.values)
            values = list(islice(measured, _MOST_SAMPLED))
            mean = fmean(values) if values else math.nan
            spread = math.sqrt(fmean((value - mean) * (value - mean) for value in values or [mean]))
            samples.append(Sample(mean, spread, len(values)))
        if all(one.steps for one in samples):
            found.append(Around(metric, *samples))
    return tuple(found)


def places_of(descriptor: int, at: float) -> tuple[int, int]:
    """Two places in a file of metrics, near each other; the lines of a moment begin between them."""
    low, high = 0, os.fstat(descriptor).st_size
    while high - low > _NEAR_BYTES:
        middle = (low + high) // 2
        complete = os.pread(descriptor, _PIECE_BYTES, middle).split(b"\n")[1:-1]
        there = next(_readable(complete, METRICS_LINE.decode), None)
        if there is not None and there.time < at:
            low = middle
        else:
            high = middle
    return low, high


def _readable(lines: Iterable[bytes], decode: Callable[[bytes], _Record]) -> Iterator[_Record]:
    """What lines of a file say; damaged ones are skipped."""
    for line in lines:
        with contextlib.suppress(ValueError, AttributeError, RecursionError):
            yield decode(line)


def _growing(lines: Iterable[MetricsLine], sign: int) -> Iterator[MetricsLine]:
    """The first lines, as long as their steps grow, or fall: what follows is of another attempt."""
    last: int | None = None
    for one in lines:
        if last is not None and sign * (one.step - last) < 0:
            return
        last = one.step
        yield one


# What people have noted about a run, or about one of its updates, also after its end. No job reads it.

ANNOTATIONS, _OF_RUN = "annotations", "_run"  # No id of an update begins so.
Tag = Annotated[str, msgspec.Meta(min_length=1, max_length=50)]
Tags = Annotated[tuple[Tag, ...], msgspec.Meta(max_length=20)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class Annotation(View, frozen=True):
    """A note and tags: who wrote them last, and when, in seconds since 1970; 0 if nobody has."""

    note: Text = ""
    tags: Tags = ()
    author: Text = ""
    time: float = 0.0

    def __str__(self) -> str:
        return " ".join([*(f"#{tag}" for tag in self.tags), *([self.note] if self.note else [])])


def write_annotation(run_dir: RunDir, update_id: str | None, annotation: Annotation) -> None:
    """Replaces the one of an update, or of the run."""
    directory = below(run_dir) / ANNOTATIONS
    files.make_durably(directory)
    files.remove_leftovers(directory)
    name = f"{_OF_RUN if update_id is None else update_id}.json"
    files.write_durably(directory / name, [json_bytes(annotation.to_json())])


def read_annotations(run_dir: RunDir, ids: Sequence[str | None]) -> list[Annotation]:
    """Those of updates, or of the run (None); an empty one where there is none or its file is damaged."""
    found, present = [], dict[str, RunPath]()
    with contextlib.suppress(OSError):  # A link, or a directory that this user may not read.
        present = {path.name: path for path in (below(run_dir) / ANNOTATIONS).glob("*.json")} if ids else {}
    for update_id in ids:
        found.append(Annotation())
        if path := present.get(f"{_OF_RUN if update_id is None else update_id}.json"):
            with contextlib.suppress(OSError, ValueError):
                found[-1] = _decoded(Annotation, files.read_small(path, max_bytes=_MAX_ANNOTATION_BYTES))
    return found


def append_line(path: RunPath, line: bytes) -> None:
    """Appends one line or several. Does not sync. Only for one process: it repairs a torn last line."""
    content = line + b"\n"
    descriptor = path.open(os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            content = b"\n" + content  # A writer that died left half a line: it must not corrupt this one.
        files.write_all(descriptor, content)
    finally:
        os.close(descriptor)


def lines_from_the_end(path: RunPath) -> Iterator[bytes]:
    """The complete lines of a file, the last one first. Reads only as much as is consumed, and has limits."""
    try:
        descriptor = files.open_plain(path)
    except OSError:
        return
    with os.fdopen(descriptor, "rb") as file:
        place = file.seek(0, os.SEEK_END)
        least = max(0, place - _MAX_BACK_BYTES)
        # After the last newline there is nothing, or half a line: what follows the next newline is skipped.
        rest, skips = b"", True
        while place > least:
            length = min(_PIECE_BYTES, place)
            place -= length
            file.seek(place)
            rest, *lines = (file.read(length) + rest).split(b"\n")
            for line in reversed(lines):
                if not skips:
                    yield line
                skips = False
            if len(rest) > _MAX_LINE_BYTES:
                rest, skips = b"", True
        if place == 0 and not skips:
            yield rest


def append_audit(run_dir: RunDir, report: AuditReport) -> None:
    append_line(below(run_dir) / "audits.jsonl", json.dumps(report.to_json()).encode())


def last_audits(run_dir: RunDir, last: int) -> list[AuditReport]:
    """The last reports, oldest first. Reads only the end of the file."""
    lines = lines_from_the_end(below(run_dir) / "audits.jsonl")
    reports = _readable(lines, lambda line: AuditReport.from_json(parse_object(line)))
    return [report for _, report in zip(range(last), reports, strict=False)][::-1]  # `last` may be huge.


# What becomes of a job: `states.jsonl` in the run directory, one line per change, never rewritten.
#
#     starting ──► (training, as the workers' notes tell) ──► finished | failed | stopped
#        ▲                                                        │
#        └──────────────────── restarting ◄───────────────────────┘
#
# The launcher writes; without a launcher, worker 0 does. A job that is killed with its launcher writes
# nothing: then the notes of its workers are old, and the process that wrote the last line is gone.

FILE = "states.jsonl"
# A worker writes a note every second; after this long without one it counts as not running.
ABSENT_SECS = 10.0
# How long a start may take before it counts as lost, if its process cannot be looked at from here.
_START_SECS = 600.0
_MAX_TEXT, _MAX_LINES = 2000, 20
_MOST_CHANGES = 10_000


class JobState(StrEnum):
    """The state of a run. Training, waiting, ending, lost and never started are concluded, not written."""

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
        return self in (JobState.STARTING, JobState.TRAINING, JobState.WAITING, JobState.RESTARTING)

    @property
    def is_over(self) -> bool:
        return self in (JobState.FINISHED, JobState.FAILED, JobState.STOPPED)


class Change(View, frozen=True):
    state: JobState
    attempt: int
    time: float = 0.0
    by: str = "launcher"
    process: Mapping[str, Any] = {}
    workers: int = 0
    step: int | None = None
    worker: int | None = None
    reason: str = ""
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunState:
    state: JobState
    sentence: str
    attempt: int
    change: Change | None


def write_change(run_dir: RunDir, change: Change) -> None:
    stamped = replace(
        change,
        time=change.time or time.time(),
        process=change.process or this_process(),
        reason=change.reason[:_MAX_TEXT],
        last_lines=tuple(line[:_MAX_TEXT] for line in change.last_lines[-_MAX_LINES:]),
    )
    append_line(below(run_dir) / FILE, json_line(stamped))


def changes(run_dir: RunDir) -> list[Change]:
    return list(islice(_changes(run_dir), _MOST_CHANGES))[::-1]


def _changes(run_dir: RunDir) -> Iterator[Change]:
    """The last one first."""
    return _readable(lines_from_the_end(below(run_dir) / FILE), partial(_decoded, Change))


def read_state(run_dir: RunDir, notes: Sequence[WorkerNote], now: float | None = None) -> RunState:
    """The state of a run, by its last change and the last notes of its workers."""
    now = time.time() if now is None else now
    change = next(_changes(run_dir), None)
    heard = [
        note for note in notes if change is None or note.time >= change.time or note.attempt == change.attempt
    ]
    attempt = max([0 if change is None else change.attempt, *(note.attempt for note in heard)])
    state = _state(change, heard, now)
    return RunState(state, _sentence(state, change, heard, attempt, now), attempt, change)


def has_ended(run_dir: RunDir, notes: Sequence[WorkerNote]) -> bool:
    """Whether the job has said how it ended, and no worker has written a note since."""
    change = next(_changes(run_dir), None)
    return change is not None and change.state.is_over and not _newer(notes, change)


def _newer(notes: Sequence[WorkerNote], change: Change) -> list[WorkerNote]:
    return [note for note in notes if note.attempt > change.attempt or note.time > change.time]


def _state(change: Change | None, heard: Sequence[WorkerNote], now: float) -> JobState:
    running = [note for note in heard if note.waiting_for != ENDED and abs(now - note.time) <= ABSENT_SECS]
    if change is not None and change.state.is_over:
        running = _newer(running, change)
        if not running:  # A note that was written just before the end is not news.
            return change.state
    if running:
        return JobState.TRAINING if any(note.training for note in running) else JobState.WAITING
    if change is None:
        if not heard:
            return JobState.NEVER_STARTED
        return JobState.FINISHED if all(note.waiting_for == ENDED for note in heard) else JobState.LOST
    said = [note for note in heard if note.attempt == change.attempt and note.time > change.time]
    alive = is_alive(change.process) if is_on_this_host(change.process) else None
    if change.state.is_over or not (now - change.time <= _START_SECS if alive is None else alive):
        return JobState.LOST
    if not said:
        return change.state
    ended = [note for note in said if note.waiting_for == ENDED]
    # Waiting: a worker is silent, and its launcher decides.
    return JobState.ENDING if len(ended) == len(said) else JobState.WAITING


def _sentence(
    state: JobState, change: Change | None, heard: Sequence[WorkerNote], attempt: int, now: float
) -> str:
    step = max((note.step for note in heard), default=None)
    if change is not None and change.step is not None and state.is_over:
        step = change.step
    at = "" if step is None else f" at step {step}"
    tries = f", attempt {attempt}" if attempt else ""
    reason = "" if change is None or not change.reason else f": {change.reason}"
    who = "" if change is None or change.worker is None else f" (worker {change.worker})"
    ago = "" if change is None else f", {age(now - change.time)} ago"
    silent = now - max((note.time for note in heard), default=now if change is None else change.time)
    running = f"Running{at}{tries}, not inside a training loop"
    if heard and silent > ABSENT_SECS:
        running = f"Running{at}{tries}: no worker has been heard from for {age(silent)}"
    return {
        JobState.NEVER_STARTED: "No worker has been heard from yet",
        JobState.STARTING: f"Starting{tries}: no worker has been heard from yet{ago.replace(' ago', '')}",
        JobState.RESTARTING: f"Restarting{tries}{who}{reason}",
        JobState.TRAINING: f"Training{at}{tries}",
        JobState.WAITING: running,
        JobState.ENDING: f"Ending{at}{tries}: the workers have exited, or are about to",
        JobState.FINISHED: f"Finished{at}{ago}",
        JobState.FAILED: f"Failed{at}{tries}{who}{reason}{ago}",
        JobState.STOPPED: f"Stopped{at}{reason.replace(':', ' by', 1)}{ago}",
        JobState.LOST: f"Not running: last heard from {age(silent)} ago{at}{tries}; it did not say why",
    }[state]


def absent_secs(workers: int) -> float:
    return max(ABSENT_SECS, 3 * sent_every_secs(workers))


def age(secs: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if secs >= 2 * length:
            return f"{secs / length:.0f} {unit}"
    return f"{max(0.0, secs):.0f} s"


# Whether a job is alive, by progress seen.
#
# The clocks of two machines differ, by seconds or by hours, so the age of a note tells nothing to a reader
# elsewhere. But every worker replaces its note each second, with another time in it. So:
#
#     a note has changed while this reader watched        its worker has run meanwhile: alive
#     all workers have noted that they have ended         not alive
#     nothing has changed for `SILENT_SECS`               not alive: it has died, is stopped or is cut off
#     none of these yet                                   not known: watch on
#
# Only this process's monotonic clock counts, and times in notes are never compared with it.

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

    def until_known(
        self, read: Callable[[], Sequence[WorkerNote]], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Reads the notes until it is known whether the job is alive, at most `silent_secs`."""
        while self.look(read()) is None:
            sleep(_LOOK_SECS)


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
    claim = claims.last_claim(run_dir)
    if claim is None or (claims.group_directory(run_dir, claim.group) / claims.RELEASED).exists():
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
        own = pid, claim.attempt

        def notes() -> list[WorkerNote]:  # Not what an earlier group said last: this one may be starting.
            first = read_worker_notes(run_dir, "0")
            return [note for note in first if note.waiting_for != ENDED or (note.pid, note.attempt) == own]

        seen = Watch() if watched is None else watched
        seen.until_known(notes)
        if seen.moving:
            raise ClusterError(
                f"A job is running in {run_dir}: worker 0, process {shortened(repr(pid))} on host {host}, "
                f"has written a note while it was watched for {seen.secs:.1f} s, and is at step "
                f"{seen.moving[0].step}",
                remedy="Stop it first (replicast stop), or choose another run directory. To take over the "
                "directory all the same, which ends that job: REPLICAST_TAKE_OVER=1 in the environment",
            )
    return job
