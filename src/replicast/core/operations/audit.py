"""Audit: who differs, where, by how much; and heal.

    coordinator                               every worker
    usually nobody waits: ◄───────────────── every worker reports one digest at one boundary, and goes on
    they differ, or somebody asks: stop all
    Examine ────────────────────────────────► the digest of each variable
    whose value counts: the majority's; otherwise that of checkpoint and journal; otherwise worker 0's
    Publish, Prepare ───────────────────────► that worker gives its values of what differs, all fetch them
    Compare ────────────────────────────────► how far each replica is from them
    "heal":  write, Apply ──────────────────► an update like any other, while all stand
             Examine ───────────────────────► are they equal now?
    Report, release ────────────────────────► the report; with "raise", every training thread raises it

A heal is recorded with `heals`, so that a restart applies it again, in the middle of a trial too.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from replicast.audits.agreement import groups_of, reference_first, reference_of
from replicast.core.operation import (
    AnyRequest,
    Ask,
    Boundary,
    Collect,
    EarlierSettled,
    Job,
    Operation,
    Outcome,
    Record,
    Script,
)
from replicast.core.operations.sync import Publish
from replicast.core.operations.update import Apply, Prepare, committed, discarded, payload_of, verified
from replicast.core.order import Replica
from replicast.core.proposal import Proposal
from replicast.core.refusal import Refusal, Refuse
from replicast.core.reports import Seen
from replicast.core.stage import Stage

Reports = dict[int, Seen]


@dataclass(frozen=True, slots=True)
class Difference:
    """A variable that is not the same on all workers.

    Attributes:
        groups: The workers with equal bits, the reference's group first.
        reference: The worker whose value counts.
        rule: Why its value does.
        deviations: How far the others are from it, by rank; what that is, the core does not know.
    """

    variable: str
    groups: tuple[tuple[int, ...], ...]
    reference: int
    rule: str
    deviations: Mapping[int, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit has found and done, the same on all workers.

    Attributes:
        number: Which audit of this attempt it is, from 1.
        step: Where.
        time: When, in seconds since 1970.
        found_at: The step at which it was first seen that replicas differ; `step` when they are equal.
        last_equal: The step of the last audit before that found them equal.
        outcome: "equal", "warned", "raised" or "healed".
        differences: What differs and must not.
        free: What may differ, and whether it does.
        healed: The sequence numbers of the updates that made the replicas equal again.
        digest_secs: How long the slowest worker took to digest its state.
        asked_by: The ids of the requests from outside the job that it answers.
    """

    number: int
    step: int
    time: float
    found_at: int
    last_equal: int | None
    outcome: str = "equal"
    differences: tuple[Difference, ...] = ()
    free: Mapping[str, bool] = field(default_factory=dict)
    healed: tuple[int, ...] = ()
    digest_secs: float = 0.0
    asked_by: tuple[str, ...] = ()


class Audit(Operation):
    """A comparison that all workers have reported to, or that was requested.

    Args:
        policy: What happens to replicas that differ: "heal", "raise" or "warn"; empty for the job's policy.
        report: The number of the workers' report that it belongs to; 0 if it was requested.
    """

    kind: ClassVar[str] = "audit"

    def __init__(self, id_: str, policy: str = "", report: int = 0) -> None:
        super().__init__(id_)
        self.policy = policy
        self.report = report
        self.in_trial = True

    def script(self, job: Job) -> Script:
        """The coordinator's side."""
        if self.report:
            quiet = self._compared_quietly(job, (yield Collect(self.kind, self.report)))
            if quiet is not None:
                return quiet
        elif self.tokens:
            yield EarlierSettled()
        step = self.step = yield Boundary()
        policy = self.policy or job.audit_policy
        if policy == "raise" and job.resting_for() == "sync":
            policy = "warn"  # all workers are about to be made equal
        seen = yield Ask(Examine(), None, job.timeouts.compute_secs, "compare its state")
        report = replace(_report(job, step, seen), asked_by=self.asked_by)
        differences = yield from self._differences(job, seen)
        if differences:
            report = yield from self._looked_into(job, report, differences, seen, policy)
        else:
            job.audits.are_equal(step)
        if report.outcome == "raised":
            job.end_rest(self, Refusal("An audit found that the replicas differ"))
        if report.outcome == "raised" or not self.tokens:
            # Every worker has it before the first one raises, which may end the job: there is no deadline.
            yield Ask(Report(report, report.outcome == "raised"))
        equal = report.outcome in ("equal", "healed")
        return Outcome(Stage.VERIFIED if equal else Stage.FAILED, report)

    def _compared_quietly(self, job: Job, seen: Reports) -> Outcome | None:
        """What nobody has to stop for; None when the workers differ."""
        steps = {one.step for one in seen.values()}
        if len(steps) > 1:
            said = ", ".join(f"worker {rank}: step {one.step}" for rank, one in sorted(seen.items()))
            return Outcome(Stage.REFUSED, Refusal(f"The workers are audited at different steps ({said})"))
        step = steps.pop()
        if len({tuple(one.digests.values()) for one in seen.values()}) == 1:
            report = _report(job, step, seen)
            if job.audits.found_at is None:
                job.audits.are_equal(step)
            return Outcome(Stage.VERIFIED, report)
        if job.audits.last_equal is not None and step < job.audits.last_equal:
            return Outcome(Stage.VERIFIED)  # they were made equal since
        job.audits.differ(step)
        return None

    def _differences(self, job: Job, seen: Reports) -> Generator[AnyRequest, Any, tuple[Difference, ...]]:
        """What differs, and whose value of it counts."""
        names = tuple(seen[0].digests)
        groups = groups_of({rank: tuple(one.digests.values()) for rank, one in seen.items()}, names)
        if not groups:
            return ()
        order = Expected(tuple(groups))
        expected = (yield Ask(order, (0,), job.timeouts.compute_secs, "read the journal"))[0]
        found = []
        for name, of in groups.items():
            digest = expected.get(name)
            reference, rule = reference_of(of, lambda digest=digest: digest)  # type: ignore[misc]
            found.append(Difference(name, reference_first(of, reference), reference, rule))
        return tuple(found)

    def _looked_into(
        self,
        job: Job,
        report: AuditReport,
        differences: tuple[Difference, ...],
        seen: Reports,
        policy: str,
    ) -> Generator[AnyRequest, Any, AuditReport]:
        """How far the replicas are apart; with "heal" they are made equal."""
        outcomes = {"heal": "healed", "raise": "raised", "warn": "warned"}
        report = replace(report, found_at=job.audits.differ(report.step), differences=differences)
        updates: list[Proposal] = []
        try:
            yield from self._borrow(job, differences, updates)
            differences = yield from _compared(job, differences, updates)
        except Refuse:  # no room for the values: what differs is known all the same
            yield from discarded(job, updates)
            return replace(report, outcome="warned" if policy == "warn" else "raised")
        report = replace(report, differences=differences, outcome=outcomes[policy])
        if policy == "heal" and len({one.trained for one in seen.values()}) == 1:
            return (yield from self._healed(job, report, updates))
        yield from discarded(job, updates)
        # Workers that have not trained equally far cannot be healed: one of them has missed a boundary.
        return replace(report, outcome="raised") if policy == "heal" else report

    def _borrow(
        self, job: Job, differences: tuple[Difference, ...], updates: list[Proposal]
    ) -> Generator[AnyRequest, Any, None]:
        """Every worker fetches the values that count; `updates` grows by one per worker that has some."""
        for source in sorted({one.reference for one in differences}):
            mine = tuple(one for one in differences if one.reference == source)
            id_, names = job.new_id("heal"), tuple(one.variable for one in mine)
            publish = Publish(id_, names)
            secs = job.timeouts.compute_secs
            made = (yield Ask(publish, (source,), secs, "publish its values"))[source]
            updates.append(Proposal(id_, made.digest, made.content, author="audit", note=_note(mine)))
            prepare = Prepare(id_, made.digest, made.content)
            yield Ask(prepare, None, job.timeouts.prepare_secs, "fetch the values that count")

    def _healed(
        self, job: Job, report: AuditReport, updates: list[Proposal]
    ) -> Generator[AnyRequest, Any, AuditReport]:
        """What was fetched is committed like any update, and applied while all stand."""
        healed: list[int] = []
        for update in updates:
            try:
                yield Record(payload_of(update))
                record = yield from committed(self, job, update, report.step, heals=True)
            except Refuse:  # the disk is full: the report says that they still differ
                yield from discarded(job, updates[len(healed) :])
                return replace(report, outcome="raised", healed=tuple(healed))
            reports = yield Ask(Apply(record.id, record.digest, record.sequence))
            job.announce((yield from verified(job, record, update, report.step, reports)))
            healed.append(record.sequence)
        seen = yield Ask(Examine(), None, job.timeouts.compute_secs, "compare its state")
        if len({tuple(one.digests.values()) for one in seen.values()}) > 1:
            return replace(report, outcome="raised", healed=tuple(healed))
        job.audits.are_equal(report.step)
        return replace(report, healed=tuple(healed))


def _report(job: Job, step: int, seen: Reports) -> AuditReport:
    """Of an audit that has found nothing yet."""
    free = {name: len({one.free[name] for one in seen.values()}) > 1 for name in seen[0].free}
    return AuditReport(
        job.audits.next_number(),
        step,
        max(one.time for one in seen.values()),
        step,
        job.audits.last_equal,
        free=free,
        digest_secs=max(one.secs for one in seen.values()),
    )


def _compared(
    job: Job, differences: tuple[Difference, ...], updates: list[Proposal]
) -> Generator[AnyRequest, Any, tuple[Difference, ...]]:
    """How far each worker is from the values that count."""
    found: dict[int, dict[str, Any]] = {rank: {} for rank in range(job.size)}
    sources = sorted({one.reference for one in differences})
    for source, update in zip(sources, updates, strict=True):
        names = tuple(one.variable for one in differences if one.reference == source)
        order = Compare(update.id, update.digest, names)
        answers = yield Ask(order, None, job.timeouts.compute_secs, "compare its values")
        for rank, deviations in answers.items():
            found[rank].update(deviations)
    return tuple(
        replace(
            one,
            deviations={
                rank: found[rank][one.variable]
                for group in one.groups[1:]
                for rank in group
                if one.variable in found[rank]
            },
        )
        for one in differences
    )


def _note(differences: tuple[Difference, ...]) -> str:
    """What an update heals, in words."""
    names = ", ".join(one.variable for one in differences[:5])
    more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
    return f"heal: {names}{more} as on worker {differences[0].reference} ({differences[0].rule})"


@dataclass(frozen=True, slots=True)
class Examine:
    """Worker, in the training thread: the digest of each variable."""

    in_background: ClassVar[bool] = False

    def perform(self, replica: Replica) -> Seen:
        """Nothing is changed."""
        return replica.examine()


@dataclass(frozen=True, slots=True)
class Expected:
    """Worker 0, in the training thread: the digests that checkpoint and journal give."""

    names: tuple[str, ...]
    in_background: ClassVar[bool] = False

    def perform(self, replica: Replica) -> dict[str, str]:
        """Only of what training does not change."""
        return replica.expected(self.names)


@dataclass(frozen=True, slots=True)
class Compare:
    """Worker, in the training thread: how far its values are from those of a prepared update."""

    id: str
    digest: str
    names: tuple[str, ...]
    in_background: ClassVar[bool] = False

    def perform(self, replica: Replica) -> Mapping[str, Any]:
        """Nothing is changed."""
        return replica.deviations(self.id, self.digest, self.names)


@dataclass(frozen=True, slots=True)
class Report:
    """Worker, in the training thread: what the audit has found."""

    report: AuditReport
    raises: bool
    in_background: ClassVar[bool] = False

    def perform(self, replica: Replica) -> None:
        """It is raised when the training thread goes on."""
        replica.report(self.report, raises=self.raises)
