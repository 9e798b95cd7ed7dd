"""The state of a run as data classes, which are the same in Python, as JSON and over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from replicast.client.updates import UpdateView
from replicast.storage.run_files import WorkerNote, absent_secs
from replicast.strictjson import described, reading
from replicast.tensorfiles import tensor_chunks
from replicast.update.audit_report import AuditReport
from replicast.update.edits import Array
from replicast.update.update import factor_to_json

_PLAIN = (
    "run",
    "time",
    "state",
    "sentence",
    "running",
    "size",
    "attempt",
    "journaled",
    "restarted",
    "problem",
)
PULLED = "pulled"
"""The entry of a file of pulled values that says what they are."""
_UPDATES = ("updates", "scheduled", "waiting", "refused")


@dataclass(frozen=True, slots=True)
class Brief:
    """The state of a run in short: cheap to read, also for many runs.

    Attributes:
        run: Its directory or address.
        state: training, waiting (running, not in a training loop), lost, finished, never started, …
        sentence: The same in plain words.
        running: Whether a worker was heard of lately.
        step: The last step that a worker has finished; None before the first note.
        workers: How many the job has.
        heard_at: When a worker was last heard of, in seconds since 1970.
        waits_for: Why no update is applied although the job trains, if that is so.
    """

    run: str
    state: str
    sentence: str
    running: bool
    step: int | None
    workers: int
    heard_at: float | None
    waits_for: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Brief:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: The fields do not describe it.
        """
        return described(cls, "state of a run", fields)


@dataclass(frozen=True, slots=True)
class Restart:
    """A later start of a job.

    Attributes:
        attempt: Its number, as the launcher counts.
        at: When worker 0 took over the run, in seconds since 1970.
    """

    attempt: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A run at one moment: what its workers last said, its metrics, its last audit, and its updates.

    Attributes:
        run: Its directory or address.
        time: The moment, in seconds since 1970, by the clock of the job.
        state: As in `Brief`.
        sentence: As in `Brief`.
        running: Whether a worker was heard of lately.
        size: How many workers the job has.
        attempt: The current attempt of the job, or the last one.
        journaled: Whether the job keeps a journal.
        workers: What each worker last said.
        metrics: The last ones: `step`, `time`, `values`.
        audit: The last audit. It may be one of an earlier attempt.
        operations: What the job has in progress.
        updates: The last committed ones.
        scheduled: Those that wait for their step.
        waiting: Those that wait in the inbox.
        refused: The last ones that were refused.
        changes: What became of the job: the last lines of states.jsonl, as `storage.states.Change` has them.
        restarts: When the job was started again; the last ones, oldest first.
        restarted: How often the launcher has restarted the job.
        problem: What is wrong with the journal or states.jsonl: what damaged files said is missing above.
    """

    run: str
    time: float
    state: str
    sentence: str
    running: bool
    size: int
    attempt: int
    journaled: bool
    workers: tuple[WorkerNote, ...]
    metrics: Mapping[str, Any] | None
    audit: AuditReport | None
    operations: tuple[Mapping[str, Any], ...]
    updates: tuple[UpdateView, ...] = ()
    scheduled: tuple[UpdateView, ...] = ()
    waiting: tuple[UpdateView, ...] = ()
    refused: tuple[UpdateView, ...] = ()
    changes: tuple[Mapping[str, Any], ...] = ()
    restarts: tuple[Restart, ...] = ()
    restarted: int = 0
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        metrics = self.metrics
        if metrics is not None:
            values = {name: factor_to_json(value) for name, value in metrics["values"].items()}
            metrics = {**metrics, "values": values}
        return {
            **{one.name: getattr(self, one.name) for one in fields(self)},
            "workers": [note.to_json() | self._heard(note) for note in self.workers],
            "metrics": metrics,
            "audit": None if self.audit is None else self.audit.to_json(),
            "operations": [dict(one) for one in self.operations],
            "changes": [dict(one) for one in self.changes],
            "restarts": [asdict(one) for one in self.restarts],
            **{name: [view.to_json() for view in getattr(self, name)] for name in _UPDATES},
        }

    def _heard(self, note: WorkerNote) -> dict[str, Any]:
        silent = self.time - note.time
        return {"age_secs": silent, "absent": silent > absent_secs(self.size)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Overview:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: The fields do not describe a run.
        """
        with reading("run", fields):
            metrics, audit = fields["metrics"], fields["audit"]
            if metrics is not None:
                values = {str(name): float(value) for name, value in metrics["values"].items()}
                metrics = {**metrics, "values": values}
            known: dict[str, Any] = {name: fields[name] for name in _PLAIN}
            return cls(
                **known,
                workers=tuple(WorkerNote.from_json(note) for note in fields["workers"]),
                metrics=metrics,
                audit=None if audit is None else AuditReport.from_json(audit),
                operations=tuple(fields["operations"]),
                changes=tuple(fields["changes"]),
                restarts=tuple(described(Restart, "restart", one) for one in fields["restarts"]),
                updates=_views(fields["updates"]),
                scheduled=_views(fields["scheduled"]),
                waiting=_views(fields["waiting"]),
                refused=_views(fields["refused"]),
            )


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """A checkpoint of a run.

    Attributes:
        step: The boundary whose state it is.
        epoch: The epoch in which it was made.
        batch: The number of finished batches of that epoch.
        sequence: The last update of the journal that it contains; 0 for none.
        attempt: The attempt of the job that made it.
        created_at: Seconds since 1970.
        nbytes: The size of its state.
        state_digest: The digest of its state.
        metrics: The metrics at that step.
        patched_by: The id of the update that made it from another checkpoint; empty if none did.
    """

    step: int
    epoch: int
    batch: int
    sequence: int
    attempt: int
    created_at: float
    nbytes: int
    state_digest: str
    metrics: Mapping[str, float]
    patched_by: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        metrics = {name: factor_to_json(value) for name, value in self.metrics.items()}
        return asdict(self) | {"metrics": metrics}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> CheckpointView:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: The fields do not describe a checkpoint.
        """
        with reading("checkpoint", fields):
            metrics = {str(name): float(value) for name, value in fields["metrics"].items()}
            return described(cls, "checkpoint", {**fields, "metrics": metrics})


@dataclass(frozen=True, slots=True, eq=False)
class Pulled:
    """The values of one variable, or of some of its rows.

    Attributes:
        name: Its full name.
        step: The boundary whose values they are.
        digest: The digest of these values; of a running job, worker 0's.
        source: "job", or "checkpoint N" when none is running.
        array: The values.
        rows: The rows that were asked for; None for all.
        digests: Of these values on each worker of a running job, by rank: they differ if the replicas do.
    """

    name: str
    step: int
    digest: str
    source: str
    array: Array
    rows: tuple[int, ...] | None = None
    digests: Mapping[int, str] = field(default_factory=dict)

    @property
    def differing(self) -> tuple[int, ...]:
        """The workers whose values are not those of worker 0, which are the ones given here."""
        return tuple(sorted(rank for rank, digest in self.digests.items() if digest != self.digest))

    def to_json(self) -> dict[str, Any]:
        """Everything but the values."""
        return {
            "name": self.name,
            "step": self.step,
            "digest": self.digest,
            "source": self.source,
            "shape": list(np.shape(self.array)),
            "dtype": self.array.dtype.name,
            "rows": None if self.rows is None else list(self.rows),
            "digests": {str(rank): digest for rank, digest in self.digests.items()},
        }

    def file_chunks(self) -> Iterator[bytes | memoryview]:
        """The values as a safetensors file, piece by piece; its metadata has everything else."""
        return tensor_chunks({self.name: self.array}, {PULLED: json.dumps(self.to_json())})


def _views(listed: list[Mapping[str, Any]]) -> tuple[UpdateView, ...]:
    return tuple(map(UpdateView.from_json, listed))
