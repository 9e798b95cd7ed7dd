"""The files in which a job describes itself in its run directory: run.json, worker notes, metrics."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from replicast.errors import FileDamaged
from replicast.files import (
    RunDir,
    RunPath,
    below,
    make_durably,
    open_plain,
    read_json,
    read_sealed,
    remove_leftovers,
    write_all,
    write_durably,
    write_quickly,
)
from replicast.storage.fence import Fence
from replicast.storage.groups import GROUPS, group_directory, group_numbers, last_claim
from replicast.strictjson import described, parse_json, sealed
from replicast.update.parts import factor_to_json
from replicast.update.schema import Schema

FORMAT = 2
RUN_FILE = "run.json"
WITHOUT_CALLBACK = "a boundary: its fit has no replicas.callback()"
"""What a worker waits for while its model is trained without boundaries. Updates wait too."""
ENDED = "nothing: it has ended"
"""What a worker waits for after it has ended."""
_SENT_SECS, _MOST_SENT_PER_SEC = 2.0, 50
_PIECE_BYTES = 64 * 1024
_MAX_LINE_BYTES = 4 * 2**20
_MAX_BACK_BYTES = 256 * 2**20
_MAX_NOTE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The description of a run.

    Attributes:
        format: The version of the directory's format.
        schema: The state's variables.
        workers: The number of workers of the job.
        attempt: The attempt of the job that wrote this.
        created_at: Seconds since 1970.
        journaled: Whether the job keeps a journal.
    """

    format: int
    schema: Schema
    workers: int
    attempt: int
    created_at: float
    journaled: bool = True

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {
            "format": self.format,
            "schema": self.schema.to_json(),
            "workers": self.workers,
            "attempt": self.attempt,
            "created_at": self.created_at,
            **({} if self.journaled else {"journaled": False}),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> RunInfo:
        """What `to_json` described.

        Raises:
            ValueError: It is not a description of a run, or has another format.
        """
        if fields.get("format") != FORMAT:
            raise ValueError(
                f"This version of replicast reads format {FORMAT} of a run. Use the version that wrote it. "
                f"Received: {fields.get('format')!r}"
            )
        return described(cls, "run", fields)


@dataclass(frozen=True, slots=True)
class WorkerNote:
    """The latest status of a worker.

    Attributes:
        rank: Its rank in the job.
        pid: Its process.
        host: The machine it runs on.
        step: The last step that it has finished.
        attempt: The attempt of the job that it belongs to.
        time: When it wrote this, in seconds since 1970; when worker 0 received it, if worker 0 wrote this.
        training: Whether it is inside a training loop.
        waiting_for: What it waits for, in words; empty if it does not wait.
        epoch: The epoch in which it is, from 0; so far as this is known, like all that follows.
        epochs: How many epochs its training has.
        steps_left: How many steps its training still has.
        step_secs: The mean time of the last steps.
        stepped_at: When it finished the last step, roughly, in seconds since 1970.
        memory_bytes: The resident memory of its process.
        machine: As `processes.this_machine`.
    """

    rank: int
    pid: int
    host: str
    step: int
    attempt: int
    time: float
    training: bool
    waiting_for: str
    epoch: int | None = None
    epochs: int | None = None
    steps_left: int | None = None
    step_secs: float | None = None
    stepped_at: float | None = None
    memory_bytes: int | None = None
    machine: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> WorkerNote:
        """What `to_json` described.

        Raises:
            ValueError: It is not a worker's note.
        """
        return described(cls, "worker", fields)


def sent_every_secs(workers: int) -> float:
    """How often a worker of a job of this size sends its note to worker 0, if worker 0 writes it.

    The more workers, the less often each: all together at most `_MOST_SENT_PER_SEC`.
    """
    return max(_SENT_SECS, workers / _MOST_SENT_PER_SEC)


def clean_run(run_dir: RunDir) -> None:
    """Removes temporary files of writers that died. Only before a worker writes its first note.

    Raises:
        OSError: Something cannot be removed.
    """
    for directory in (run_dir, below(run_dir) / "workers"):
        remove_leftovers(directory, older_than_secs=0.0)


def write_run_info(fence: Fence, info: RunInfo) -> None:
    """Writes run.json of a group, atomically and durably. Only on the coordinator.

    Raises:
        JobFailed: Another group has taken over the run.
        OSError: It cannot be written.
    """
    write_durably(fence.directory / RUN_FILE, [sealed(info.to_json())])
    fence.check()


def read_run_info(run_dir: RunDir) -> RunInfo:
    """Reads the description of a run that the last group has written.

    Raises:
        FileDamaged: It is not a run directory, its job has not begun, or run.json is damaged.
    """
    claim = last_claim(run_dir)
    for group in (
        [] if claim is None else [number for number in group_numbers(run_dir) if number <= claim.group]
    ):
        path = group_directory(run_dir, group) / RUN_FILE
        if path.exists():
            try:
                return RunInfo.from_json(read_sealed(path))
            except ValueError as error:
                raise FileDamaged(path, str(error)) from error
    raise FileDamaged(
        below(run_dir) / GROUPS,
        f"no group has a {RUN_FILE}. Is this a run directory, and is its job still starting?",
    )


def write_worker_note(run_dir: RunDir, note: WorkerNote) -> None:
    """Replaces the note of a worker. Does not sync."""
    directory = below(run_dir) / "workers"
    make_durably(directory)
    write_quickly(directory / f"{note.rank}.json", json.dumps(note.to_json()))


def read_worker_notes(run_dir: RunDir, which: str = "*") -> list[WorkerNote]:
    """The latest notes of the workers, by rank. Damaged notes and those of another rank are skipped."""
    notes = []
    for path in (below(run_dir) / "workers").glob(f"{which}.json"):
        with contextlib.suppress(FileDamaged, ValueError):
            note = WorkerNote.from_json(read_json(path, max_bytes=_MAX_NOTE_BYTES))
            if path.name == f"{note.rank}.json":
                notes.append(note)
    return sorted(notes, key=lambda note: note.rank)


def append_metrics(run_dir: RunDir, step: int, values: Mapping[str, float]) -> None:
    """Appends one line to metrics.jsonl. Only for one process, since it repairs a torn last line."""
    numbers = {name: factor_to_json(float(value)) for name, value in values.items()}
    line = json.dumps({"step": step, "time": time.time(), "values": numbers})
    append_line(below(run_dir) / "metrics.jsonl", line)


def last_metrics(run_dir: RunDir) -> dict[str, Any] | None:
    """The last complete line of metrics.jsonl: `step`, `time`, `values`. Reads only the end of the file."""
    for line in lines_from_the_end(below(run_dir) / "metrics.jsonl"):
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            found = parse_json(line)
            values = {str(name): float(value) for name, value in found["values"].items()}
            return {"step": int(found["step"]), "time": float(found["time"]), "values": values}
    return None


def append_line(path: RunPath, line: str) -> None:
    """Appends one line to a file, and creates the file if needed. Does not sync.

    Only for one process, since it repairs a torn last line.

    Raises:
        OSError: It cannot be written, or is not a regular file.
    """
    content = line.encode() + b"\n"
    descriptor = path.open(os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            content = b"\n" + content  # A writer that died left half a line: it must not corrupt this one.
        write_all(descriptor, content)
    finally:
        os.close(descriptor)


def lines_from_the_end(path: RunPath) -> Iterator[bytes]:
    """The complete lines of a file, the last one first. Reads only as much as is consumed.

    Lines longer than `_MAX_LINE_BYTES` are skipped, and at most `_MAX_BACK_BYTES` are searched. Anything but
    a regular file has no lines.
    """
    try:
        descriptor = open_plain(path)
    except OSError:
        return
    with os.fdopen(descriptor, "rb") as file:
        place = file.seek(0, os.SEEK_END)
        least = max(0, place - _MAX_BACK_BYTES)
        line = _LineFromTheEnd()
        is_last = True
        while place > least:
            length = min(_PIECE_BYTES, place)
            place -= length
            file.seek(place)
            *earlier, end = file.read(length).split(b"\n")
            line.prepend(end)
            for piece in reversed(earlier):
                if not is_last and (found := line.taken()) is not None:
                    yield found
                is_last = False  # After the last newline there is nothing, or half a line.
                line = _LineFromTheEnd()
                line.prepend(piece)
        if place == 0 and not is_last and (found := line.taken()) is not None:
            yield found


class _LineFromTheEnd:
    """A line whose end is read first. It is dropped once it is too long."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._nbytes = 0

    def prepend(self, piece: bytes) -> None:
        self._nbytes += len(piece)
        if self._nbytes > _MAX_LINE_BYTES:
            self._pieces.clear()
        else:
            self._pieces.append(piece)

    def taken(self) -> bytes | None:
        return None if self._nbytes > _MAX_LINE_BYTES else b"".join(reversed(self._pieces))
