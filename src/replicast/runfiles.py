"""What a job tells about itself in its run directory: run.json, a note of each worker, metrics."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from replicast.errors import FileDamaged
from replicast.files import (
    json_bytes,
    make_durably,
    read_json,
    remove_leftovers,
    write_durably,
    write_quickly,
)
from replicast.parts import factor_to_json
from replicast.records import reading
from replicast.schema import Schema

FORMAT = 1
WITHOUT_CALLBACK = "a boundary: its fit has no replicas.callback()"
"""What a worker waits for whose model is trained without boundaries: updates wait with it."""
ENDED = "nothing: it has ended"
"""What a worker waits for that has come to its end."""
_PIECE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a run directory is about.

    Attributes:
        format: The version of the directory's format.
        schema: The state's variables.
        workers: How many workers the job has.
        attempt: Which start of the job wrote this.
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
            ValueError: It is none, or of a later format.
        """
        if fields.get("format") != FORMAT:
            raise ValueError(
                f"This version of replicast knows format {FORMAT} of a run. Use the one that wrote it. "
                f"Received: {fields.get('format')!r}"
            )
        with reading("run", fields):
            return cls(
                format=FORMAT,
                schema=Schema.from_json(fields["schema"]),
                workers=int(fields["workers"]),
                attempt=int(fields["attempt"]),
                created_at=float(fields["created_at"]),
                journaled=bool(fields.get("journaled", True)),
            )


@dataclass(frozen=True, slots=True)
class WorkerNote:
    """What a worker last said of itself.

    Attributes:
        rank: Its number in the job.
        pid: Its process.
        host: The machine it runs on.
        step: The last step that it has finished.
        attempt: Which start of the job it belongs to.
        time: When it said so, in seconds since 1970.
        training: Whether it is inside a training loop.
        waiting_for: What it waits for, in words; empty when for nothing.
    """

    rank: int
    pid: int
    host: str
    step: int
    attempt: int
    time: float
    training: bool
    waiting_for: str

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> WorkerNote:
        """What `to_json` described.

        Raises:
            ValueError: It is none.
        """
        with reading("worker", fields):
            return cls(
                rank=int(fields["rank"]),
                pid=int(fields["pid"]),
                host=str(fields["host"]),
                step=int(fields["step"]),
                attempt=int(fields["attempt"]),
                time=float(fields["time"]),
                training=bool(fields["training"]),
                waiting_for=str(fields["waiting_for"]),
            )


def clean_run(run_dir: Path) -> None:
    """Removes what writers that died left under temporary names. Only before a worker writes its first note.

    Raises:
        OSError: Something cannot be removed.
    """
    for directory in (Path(run_dir), Path(run_dir) / "workers"):
        remove_leftovers(directory, older_than_secs=0.0)


def write_run_info(run_dir: Path, info: RunInfo, check: Callable[[], None] = lambda: None) -> None:
    """Writes run.json, whole and durable. Only on the coordinator.

    Args:
        run_dir: The run directory.
        info: What to write.
        check: Raises when this process must not write into it any more.
    """
    check()
    make_durably(Path(run_dir))
    write_durably(Path(run_dir) / "run.json", [json_bytes(info.to_json())])


def read_run_info(run_dir: Path) -> RunInfo:
    """What a run directory is about.

    Raises:
        FileDamaged: It is no run directory, its job has not begun, or run.json is not what was written.
    """
    path = Path(run_dir) / "run.json"
    if not path.exists():
        raise FileDamaged(
            path, "it is not there. Is this a run directory, and has its job made its Replicas yet?"
        )
    try:
        return RunInfo.from_json(read_json(path))
    except ValueError as error:
        raise FileDamaged(path, str(error)) from error


def write_worker_note(run_dir: Path, note: WorkerNote) -> None:
    """Writes what a worker says of itself over what it said before. Does not wait for the disk."""
    directory = Path(run_dir) / "workers"
    make_durably(directory)
    write_quickly(directory / f"{note.rank}.json", json.dumps(note.to_json()))


def read_worker_notes(run_dir: Path) -> list[WorkerNote]:
    """What the workers last said, by rank. A note that a power cut has damaged is left out."""
    notes = []
    for path in (Path(run_dir) / "workers").glob("*.json"):
        if not path.name.startswith("."):
            with contextlib.suppress(FileDamaged, ValueError):
                notes.append(WorkerNote.from_json(read_json(path)))
    return sorted(notes, key=lambda note: note.rank)


def append_metrics(run_dir: Path, step: int, values: Mapping[str, float]) -> None:
    """Appends one line to metrics.jsonl. Only one process may, since it repairs a torn last line."""
    numbers = {name: factor_to_json(float(value)) for name, value in values.items()}
    line = json.dumps({"step": step, "time": time.time(), "values": numbers})
    append_line(Path(run_dir) / "metrics.jsonl", line)


def last_metrics(run_dir: Path) -> dict[str, Any] | None:
    """The last whole line of metrics.jsonl: `step`, `time` and `values`. Reads only the end of the file."""
    for line in lines_from_the_end(Path(run_dir) / "metrics.jsonl"):
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            found = json.loads(line)
            values = {str(name): float(value) for name, value in found["values"].items()}
            return {"step": int(found["step"]), "time": float(found["time"]), "values": values}
    return None


def append_line(path: Path, line: str) -> None:
    """Appends one line to a file, which is made if it is not there. Does not wait for the disk.

    Only one process may, since it repairs a torn last line.

    Raises:
        OSError: It cannot be written.
    """
    content = line.encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            content = b"\n" + content  # A writer that died left half a line: it must not take this one along.
        os.write(descriptor, content)
    finally:
        os.close(descriptor)


def lines_from_the_end(path: Path) -> Iterator[bytes]:
    """The whole lines of a file, the last one first. Reads no more of it than is asked for."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        place = file.seek(0, os.SEEK_END)
        rest = b""
        is_last = True
        while place > 0:
            length = min(_PIECE_BYTES, place)
            place -= length
            file.seek(place)
            begin, *lines = (file.read(length) + rest).split(b"\n")
            if is_last and lines:
                lines.pop()  # After the last line break comes nothing, or half a line.
                is_last = False
            yield from reversed(lines)
            rest = begin
        if not is_last:
            yield rest
