"""Workers' reports of what they did at a boundary, as sent between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, order=True)
class ReportId:
    """Which planned save or audit a report belongs to: the same on all workers.

    Attributes:
        kind: "save" or "audit".
        step: The boundary at which it is made.
        count: Which one of its kind it is at that boundary, from 1.
    """

    kind: str
    step: int
    count: int = 1

    def __str__(self) -> str:
        return f"{self.kind}-step-{self.step}" + (f"-{self.count}" if self.count > 1 else "")


@dataclass(frozen=True, slots=True)
class Applied:
    """A worker has applied an update.

    Attributes:
        digest: The digest of the variables that the update touched.
        applied_at: When, in seconds since 1970.
        stall_secs: How long the training thread was stopped.
        trained: How far this worker has trained, in a unit that all workers count alike.
        keeps: On worker 0: whether it holds values that the update has overwritten, for a revert.
    """

    digest: str
    applied_at: float = 0.0
    stall_secs: float = 0.0
    trained: int = 0
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """One worker's digests in an audit.

    Attributes:
        step: The step at which they were computed.
        digests: Of each variable that must be equal on all workers; in a planned audit, one of all of them.
        free: Of each variable that may differ.
        secs: How long it took to compute them.
        trained: How far this worker has trained, in a unit that all workers count alike.
        time: When, in seconds since 1970.
    """

    step: int
    digests: Mapping[str, str]
    free: Mapping[str, str] = field(default_factory=dict)
    secs: float = 0.0
    trained: int = 0
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One worker's contribution to a checkpoint.

    Attributes:
        step: The step of the state.
        digest: The digest of all variables that must be equal on all workers.
        holds: The sequence numbers of the updates that its state contains.
        details: What is written with the checkpoint; None on worker 0 if it skips this one.
    """

    step: int
    digest: str
    holds: frozenset[int]
    details: Any
