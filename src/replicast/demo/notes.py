"""What a worker of the demo tells the runner: one JSON object per line, in a file of its own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replicast.audit import AuditReport


@dataclass(frozen=True, slots=True)
class Progress:
    """Worker 0 is at work.

    Attributes:
        doing: What, in a few words.
        done: How many training steps of the whole demo are behind it.
        loss: The mean loss of the epoch so far, over all workers; None when nothing is trained.
    """

    doing: str
    done: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class Moment:
    """One worker's replica at one moment of an act.

    Attributes:
        name: The moment, as the table names it.
        worker: Whose replica.
        weights_sum: The sum of all weights.
        digest: The digest of all weights.
        step: How many steps the model has been trained.
        process: The worker's process, by its id.
        audit: What an audit of all replicas found then, if one was made.
    """

    name: str
    worker: int
    weights_sum: float
    digest: str
    step: int
    process: int
    audit: AuditReport | None = None


Note = Progress | Moment
_KINDS: dict[str, type[Progress] | type[Moment]] = {"progress": Progress, "moment": Moment}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def notes_path(directory: Path, worker: int) -> Path:
    """The file of one worker's notes."""
    return directory / f"worker-{worker}.jsonl"


class NoteWriter:
    """Writes a worker's notes, each at once."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, note: Note) -> None:
        """Adds one note."""
        line = {"kind": _NAMES[type(note)], **_to_json(note)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class NoteReader:
    """Reads a worker's notes while they are being written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> Iterator[Note]:
        """The notes that were finished since the last call; none while the file is not there."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            finished, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(finished) + len(newline)
        for line in finished.splitlines():
            yield _from_json(json.loads(line))


def _to_json(note: Note) -> dict[str, Any]:
    if isinstance(note, Progress) or note.audit is None:
        return dataclasses.asdict(note)
    return {**dataclasses.asdict(dataclasses.replace(note, audit=None)), "audit": note.audit.to_json()}


def _from_json(fields: dict[str, Any]) -> Note:
    kind = _KINDS[fields.pop("kind")]
    if fields.get("audit") is not None:
        fields["audit"] = AuditReport.from_json(fields["audit"])
    return kind(**fields)
