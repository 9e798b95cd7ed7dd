"""What is written down of a committed update: its record, and its receipt."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from replicast.edits import Edit
from replicast.trial import TrialOutcome
from replicast.update import Stage


@dataclass(frozen=True, slots=True)
class Record:
    """One committed update.

    Attributes:
        sequence: Its place in the order, from 1.
        id: The update's id.
        step: The boundary at which every worker applies it.
        sha256: Of the payload's file; empty in a journal without files.
        nbytes: The size of the payload's file.
        author: Who proposed it.
        note: Why.
        edits: A summary of each edit: operation, variable, shape of what is written.
        content_digest: Equal for updates that do the same.
        workers: How many workers the job had.
        attempt: Which start of the job it was.
        scheduled: Whether the author chose the step.
        committed_at: Seconds since 1970.
        trial: If it has to prove itself: the trial, and `before`, what its metric was when it was committed.
    """

    sequence: int
    id: str
    step: int
    sha256: str
    nbytes: int
    author: str
    note: str
    edits: tuple[Mapping[str, Any], ...]
    content_digest: str
    workers: int
    attempt: int
    scheduled: bool
    committed_at: float
    trial: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; `trial` only where there is one."""
        fields = asdict(self) | {"edits": [dict(edit) for edit in self.edits]}
        if self.trial is None:
            del fields["trial"]
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Record:
        """What `to_json` described.

        Raises:
            ValueError: It is no record.
        """
        with reading("record", fields):
            return cls(
                sequence=int(fields["sequence"]),
                id=str(fields["id"]),
                step=int(fields["step"]),
                sha256=str(fields["sha256"]),
                nbytes=int(fields["nbytes"]),
                author=str(fields["author"]),
                note=str(fields["note"]),
                edits=tuple(dict(edit) for edit in fields["edits"]),
                content_digest=str(fields["content_digest"]),
                workers=int(fields["workers"]),
                attempt=int(fields["attempt"]),
                scheduled=bool(fields["scheduled"]),
                committed_at=float(fields["committed_at"]),
                trial=None if fields.get("trial") is None else dict(fields["trial"]),
            )


@dataclass(frozen=True, slots=True)
class Receipt:
    """How a committed update ended.

    Attributes:
        sequence: Its place in the order.
        id: The update's id.
        step: The boundary at which it was applied.
        digests: What each worker reported of the touched variables, by rank.
        propose_to_applied_secs: From the proposal until the last worker had applied it.
        stall_secs: The longest that a training thread was held up.
        verified_at: Seconds since 1970.
        stage: Verified or failed.
        trial: How its trial ended, if it had one.
    """

    sequence: int
    id: str
    step: int
    digests: Mapping[int, str]
    propose_to_applied_secs: float
    stall_secs: float
    verified_at: float
    stage: Stage
    trial: TrialOutcome | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; ranks become text, as JSON's names are; `trial` where there is one."""
        fields = {
            "sequence": self.sequence,
            "id": self.id,
            "step": self.step,
            "digests": {str(rank): digest for rank, digest in self.digests.items()},
            "propose_to_applied_secs": self.propose_to_applied_secs,
            "stall_secs": self.stall_secs,
            "verified_at": self.verified_at,
            "stage": str(self.stage),
        }
        return fields if self.trial is None else fields | {"trial": self.trial.to_json()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Receipt:
        """What `to_json` described.

        Raises:
            ValueError: It is no receipt.
        """
        with reading("receipt", fields):
            return cls(
                sequence=int(fields["sequence"]),
                id=str(fields["id"]),
                step=int(fields["step"]),
                digests={int(rank): str(digest) for rank, digest in fields["digests"].items()},
                propose_to_applied_secs=float(fields["propose_to_applied_secs"]),
                stall_secs=float(fields["stall_secs"]),
                verified_at=float(fields["verified_at"]),
                stage=Stage(fields["stage"]),
                trial=None if fields.get("trial") is None else TrialOutcome.from_json(fields["trial"]),
            )


@dataclass(frozen=True, slots=True)
class StagedPayload:
    """An update that is kept safe and has no place in the order yet.

    Attributes:
        id: The update's id.
        path: Its file; None in a journal without files.
        sha256: Of the file; empty in a journal without files.
        nbytes: The size of the file.
    """

    id: str
    path: Path | None
    sha256: str
    nbytes: int


def summarized(edits: Iterable[Edit]) -> tuple[dict[str, Any], ...]:
    """What a record says of each edit: operation, variable, and the shape of what is written."""
    return tuple(_summary(edit) for edit in edits)


@contextlib.contextmanager
def reading(what: str, fields: Mapping[str, Any]) -> Iterator[None]:
    """Turns whatever is wrong with the fields of a JSON object into one ValueError that shows them."""
    try:
        yield
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"This describes no {what} ({error!r}). Received: {str(fields)[:200]}") from error


def _summary(edit: Edit) -> dict[str, Any]:
    arrays = edit.arrays
    if "a" in arrays:
        shape: list[int] | None = [arrays["a"].shape[0], arrays["b"].shape[1]]
    else:
        written = arrays.get("value", arrays.get("rows", arrays.get("indices")))
        # None: the whole variable, whatever its shape.
        shape = None if written is None else list(written.shape)
    return {"operation": str(edit.operation), "variable": edit.variable, "shape": shape}
