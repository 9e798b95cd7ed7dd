"""Immutable records: what the state machines and the runtime exchange, many times per step."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec

from replicast.codec import Record
from replicast.update.audit_report import ComparedRows
from replicast.update.effect import Effect
from replicast.update.trial import Trial

# Why an operation was refused: a record that is sent between processes, and the exception for it.


class Refusal(Record):
    """Why nothing was changed."""

    problem: str
    workers: tuple[int, ...] = ()
    details: Mapping[str, Any] | None = None


class Refuse(Exception):  # noqa: N818 - read as a sentence: raise Refuse("...")
    """Raised by a script or an order to refuse the operation. Nothing has changed."""

    def __init__(
        self, problem: str, workers: tuple[int, ...] = (), details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(problem)
        self.refusal = Refusal(problem, workers, details)


class JobEnds(Exception):  # noqa: N818 - read as a sentence: raise JobEnds("...")
    """Raised by a script that can be neither carried out nor refused: every worker must exit."""


# The stage of an operation: one enum for tickets, `status`, the command line and the journal.


class Stage(StrEnum):
    """The stages of an operation, in order. It never goes back."""

    PROPOSED = "proposed"  # the coordinator has it
    PREPARED = "prepared"  # every worker holds its bytes and has checked them; nothing has changed
    SCHEDULED = "scheduled"  # durable, and every worker will stop at its step; it can still be withdrawn
    COMMITTED = "committed"  # the record is durable: it will be applied, after a restart if necessary
    APPLIED = "applied"  # every worker has applied it; a trial is in progress
    VERIFIED = "verified"  # every worker reported the same digest
    REVERTED = "reverted"  # its trial failed: every replica is back at the state before it
    WITHDRAWN = "withdrawn"  # withdrawn before it was committed; nothing has changed
    REFUSED = "refused"  # not accepted; nothing has changed
    FAILED = "failed"  # committed, and the workers' digests differ

    @property
    def is_final(self) -> bool:
        return self in _FINAL


_FINAL = frozenset({Stage.VERIFIED, Stage.REVERTED, Stage.WITHDRAWN, Stage.REFUSED, Stage.FAILED})


# Proposals of changes to all replicas.

Content: TypeAlias = Any  # where the bytes of an update are: hashable, and opaque to the core


class Proposal(Record):
    """An update, a function that will compute one, or the number of an update to revert."""

    id: str
    digest: str
    content: Content = None
    at_step: int | None = None
    trial: Trial | None = None
    source: int | None = None
    author: str = ""
    note: str = ""
    proposed_at: float = 0.0
    reverts: int | None = None
    forced: bool = False


class Published(Record):
    """An update that a worker has created at a boundary, and that all workers can fetch."""

    digest: str
    content: Content
    note: str = ""


class Pending(Record):
    """An uncommitted proposal in a checkpoint, made before its boundary."""

    proposal: Proposal
    tickets: tuple[str, ...]


# Workers' reports of what they did at a boundary, as sent between processes.


class ReportId(Record, order=True):
    """Which planned save or audit a report belongs to: the same on all workers."""

    kind: str
    step: int
    count: int = 1

    def __str__(self) -> str:
        return f"{self.kind}-step-{self.step}" + (f"-{self.count}" if self.count > 1 else "")


class Applied(Record):
    """A worker has applied an update."""

    digest: str
    applied_at: float = 0.0
    stall_secs: float = 0.0
    trained: int = 0
    keeps: bool = False
    effects: tuple[Effect, ...] = ()


class SeenDigests(Record):
    """One worker's digests in an audit."""

    step: int
    digests: Mapping[str, str]
    free: Mapping[str, str] = msgspec.field(default_factory=dict)
    secs: float = 0.0
    trained: int = 0
    time: float = 0.0
    partly: tuple[ComparedRows, ...] = ()
    devices: tuple[str, ...] = ()  # of its replicas, if it has several


class Snapshot(Record):
    """One worker's contribution to a checkpoint."""

    step: int
    digest: str
    holds: frozenset[int]
    details: Any
