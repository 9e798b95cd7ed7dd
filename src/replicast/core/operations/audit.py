"""Audit: who differs, and where; and heal.

    coordinator                               every worker
    at planned steps nobody waits: ◄───────── every worker reports its digests as it arrives, and goes on
    they differ, or somebody asks: stop all
    Digest ─────────────────────────────────► the digest of each variable
    whose value counts: the majority's; otherwise that of checkpoint and journal; otherwise worker 0's
    "heal":  Publish ───────────────────────► that worker gives its values of what differs
             Prepare, write, Apply ─────────► an update like any other, while all stand
             Digest ────────────────────────► are they equal now?
    Report, release ────────────────────────► the report; with "raise", every training thread raises it

A heal is recorded with `heals`, so that a restart applies it again, in the middle of a trial too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from replicast.core.operation import (
    AnyRequest,
    Ask,
    Boundary,
    Collect,
    EarlierSettled,
    Go,
    Job,
    Operation,
    Outcome,
    Script,
)
from replicast.core.operations.sync import Digest, Publish, differing
from replicast.core.operations.update import Apply, made_here, verified
from replicast.core.order import Replica
from replicast.core.proposal import Proposal
from replicast.core.refusal import Refuse
from replicast.core.stage import Stage

Seen = dict[int, dict[str, str]]


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit has found, the same on all workers.

    Attributes:
        step: Where.
        references: For each variable that differs: the worker whose value counts.
        healed: The sequence numbers of the updates that made the replicas equal again.
        equal: Whether the replicas are equal now.
    """

    step: int
    references: dict[str, int] = field(default_factory=dict)
    healed: tuple[int, ...] = ()
    equal: bool = True


class Audit(Operation):
    """A comparison that is planned for a step, or that somebody has asked for.

    Args:
        policy: What becomes of replicas that differ: "heal", "raise" or "warn".
        planned_step: The step at which every worker reports its digests by itself; None when somebody asks.
    """

    kind: ClassVar[str] = "audit"

    def __init__(self, id_: str, policy: str = "heal", planned_step: int | None = None) -> None:
        super().__init__(id_)
        self.policy = policy
        self.step = planned_step
        self.in_trial = True

    def script(self, job: Job) -> Script:
        """The coordinator's side."""
        if self.step is not None:
            if not differing((yield Collect(self.kind, self.step)), 0):
                return Outcome(Stage.VERIFIED, AuditReport(self.step))
        elif self.tokens:
            yield EarlierSettled()
        step = yield Boundary()
        references = yield from self._compared(job)
        report = AuditReport(step, references, (), not references)
        if references and self.policy == "heal":
            healed = yield from self._healed(job, step, references)
            left = yield from self._compared(job)
            report = AuditReport(step, references, healed, not left)
        if not report.equal:
            yield Go(Report(report, self.policy != "warn"))
        return Outcome(Stage.VERIFIED if report.equal else Stage.FAILED, report)

    def _compared(self, job: Job) -> Generator[AnyRequest, Any, dict[str, int]]:
        """Whose value counts, of each variable that differs."""
        secs = job.timeouts.compute_secs
        seen: Seen = yield Ask(Digest(), None, secs, "compare its state")
        names = differing(seen, 0)
        if not names:
            return {}
        expected = (yield Ask(Expected(), (0,), secs, "read the journal"))[0]
        return {name: reference_of(name, seen, expected) for name in names}

    def _healed(
        self, job: Job, step: int, references: dict[str, int]
    ) -> Generator[AnyRequest, Any, tuple[int, ...]]:
        """One update for each worker whose values count."""
        healed = []
        for source in sorted(set(references.values())):
            names = tuple(name for name, rank in references.items() if rank == source)
            published = yield Ask(Publish(names), (source,), job.timeouts.compute_secs, "publish its values")
            update = Proposal(job.new_id("heal"), *published[source])
            try:
                record = yield from made_here(self, job, update, step, heals=True)
            except Refuse:  # no room for it: the report says that they still differ
                break
            reports = yield Ask(Apply(record.id, record.digest, record.sequence))
            yield from verified(job, record, step, reports)
            healed.append(record.sequence)
        return tuple(healed)


def reference_of(name: str, seen: Seen, expected: dict[str, str]) -> int:
    """The worker whose value of a variable counts."""
    votes = Counter(one[name] for one in seen.values())
    digest, most = votes.most_common(1)[0]
    if most * 2 <= len(seen):
        digest = expected.get(name, seen[0][name])
    return next((rank for rank in sorted(seen) if seen[rank][name] == digest), 0)


@dataclass(frozen=True, slots=True)
class Expected:
    """Worker 0, in the training thread: the digests that checkpoint and journal give."""

    in_background: ClassVar[bool] = False

    def perform(self, replica: Replica) -> dict[str, str]:
        """Only of what training does not change."""
        return replica.expected()


@dataclass(frozen=True, slots=True)
class Report:
    """Worker, in the training thread: what the audit has found."""

    report: AuditReport
    raises: bool
    in_background: ClassVar[bool] = False

    def perform(self, replica: Replica) -> None:
        """All workers have it before the first one raises: none of them has gone on."""
        replica.report(self.report, raises=self.raises)
