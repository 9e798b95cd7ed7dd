"""Audit: compares the replicas, and heals those that differ.

    coordinator                               every worker
    planned, without a stop: ◄─────────────── reports one digest at one boundary, and continues
    they differ, or it was requested: stop all
    Examine ────────────────────────────────► the digest of each variable
    the reference: the majority; otherwise checkpoint and journal; otherwise worker 0
    Publish, Prepare ───────────────────────► the reference publishes what differs, all fetch it
    Compare ────────────────────────────────► how far each replica deviates
    "heal":  write, Apply ──────────────────► an ordinary update, while all are stopped
             Examine ───────────────────────► are they equal now?
    Report, release ────────────────────────► the report; with "raise", every training thread raises it

A heal is recorded with `heals`, so that a restart applies it again, even in the middle of a trial. A worker
that dies within a heal ends the job. The next attempt starts from the checkpoint, or from scratch, and
applies again the heals that have their record.

Sync: every replica becomes equal to that of one worker. All training threads rest in it.

    coordinator                               every worker
    Digest ─────────────────────────────────► the digest of each variable
    all equal? then there is nothing to do
    Publish ────────────────────────────────► the source publishes its values of what differs
    Prepare ────────────────────────────────► fetch the bytes, check them                  in the background
    write the payload and the record: THE COMMIT
    Apply, release ─────────────────────────► assign, report the digest, continue

Pull: the live values of one variable, or of some rows of it, at one boundary.

    coordinator                               every worker
    stop all
    TakeRows, release ──────────────────────► digest the rows; worker 0 also copies them; go on
    all digests equal? the answer says so
    the end of the operation ───────────────► worker 0 writes the copy that was asked for   in the background

Nothing is changed, so it may happen in a trial.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from msgspec.structs import replace

from replicast.codec import Record
from replicast.core.entries import Proposal, Stage
from replicast.core.messages import Order, Refusal, Refuse, SeenDigests
from replicast.core.operation import (
    Ask,
    Boundary,
    Collect,
    EarlierSettled,
    Go,
    JobView,
    Operation,
    Outcome,
    Part,
    Persist,
    Script,
)
from replicast.core.operations.apply import (
    Apply,
    Prepare,
    committed,
    discarded,
    payload_of,
    prepared_here,
    under_way,
    verified,
)
from replicast.update.audit_report import (
    AuditOutcome,
    AuditReport,
    Declared,
    Difference,
    agree,
    difference_of,
    groups_of,
)

Reports = dict[int, SeenDigests]
Ranges = tuple[tuple[int, int], ...]


class Audit(Operation):
    """A comparison that all workers have reported to, or that was requested."""

    kind = "audit"
    in_trial = True

    def script(self, job: JobView) -> Script:
        if self.report is not None:
            step, seen = self.report.step, (yield Collect(self.report))
            if _all_agree(seen):
                report = _report(job, step, seen)
                if job.audits.found_at is None:
                    job.audits.are_equal(step, partly=frozenset(one.variable for one in report.partly))
                return Outcome(Stage.VERIFIED, report)
            if job.audits.last_equal is not None and step < job.audits.last_equal:
                return Outcome(Stage.VERIFIED)  # they were made equal since
            job.audits.differ(step)
        elif self.tokens:
            yield EarlierSettled()
        step = self.step = yield Boundary()
        (policy,) = self.arguments or (job.audit_policy,)
        if policy == "raise" and job.resting_for() == "sync":
            policy = "warn"  # all workers are about to be made equal
        seen = yield Ask(Examine(), None, job.timeouts.compute_secs, "compare its state")
        report = replace(_report(job, step, seen), requests=self.asked_by)
        differences = yield from self._differences(job, seen)
        if differences:
            report = yield from self._looked_into(job, report, differences, seen, policy)
        else:
            job.audits.are_equal(step)
        if report.outcome == "raised":
            job.end_rest(self, Refusal("An audit found that the replicas differ"))
        if report.outcome == "raised" or not self.tokens:
            # Every worker has it before the first one raises, which may end the job: there is no deadline.
            yield Ask(DeliverReport(report, report.outcome == "raised"))
        equal = report.outcome in ("equal", "healed")
        return Outcome(Stage.VERIFIED if equal else Stage.FAILED, report)

    def _differences(self, job: JobView, seen: Reports) -> Part[tuple[Difference, ...]]:
        devices = {rank: one.devices for rank, one in seen.items()}
        groups = groups_of({rank: one.digests for rank, one in seen.items()}, devices)
        if not groups:
            return ()
        order = Expected(tuple(groups))
        expected = (yield Ask(order, (0,), job.timeouts.compute_secs, "read the journal"))[0]
        return tuple(difference_of(name, of, expected.get(name)) for name, of in groups.items())

    def _looked_into(
        self,
        job: JobView,
        report: AuditReport,
        differences: tuple[Difference, ...],
        seen: Reports,
        policy: str,
    ) -> Part[AuditReport]:
        """Measures the deviations; with "heal", makes the replicas equal."""
        outcomes: dict[str, AuditOutcome] = {"heal": "healed", "raise": "raised", "warn": "warned"}
        report = replace(
            report,
            found_at=job.audits.differ(report.step),
            last_equal=job.audits.last_equal_in(one.variable for one in differences),
            differences=differences,
        )
        updates: list[Proposal] = []
        try:
            differences = yield from self._measured(job, differences, updates)
        except Refuse:  # not enough space for the values: the differences are reported without deviations
            yield from discarded(job, updates)
            return replace(report, outcome="warned" if policy == "warn" else "raised")
        report = replace(report, differences=differences, outcome=outcomes[policy])
        if policy == "heal" and len({one.trained for one in seen.values()}) == 1:
            return (yield from self._healed(job, report, updates))
        yield from discarded(job, updates)
        # Workers that have trained different numbers of steps cannot be healed: one missed a boundary.
        return replace(report, outcome="raised") if policy == "heal" else report

    def _measured(
        self, job: JobView, differences: tuple[Difference, ...], updates: list[Proposal]
    ) -> Part[tuple[Difference, ...]]:
        """How far each worker deviates from the reference values, which every worker fetches.

        Adds one update to `updates` per reference worker.
        """
        by_source: dict[int, list[Difference]] = {}
        for one in sorted(differences, key=lambda one: one.reference):
            by_source.setdefault(one.reference, []).append(one)
        secs = job.timeouts.compute_secs
        for source, mine in by_source.items():
            id_, names = job.new_id("heal"), tuple(one.variable for one in mine)
            publish = Publish(id_, names, tuple(one.device for one in mine if one.device))
            made = (yield Ask(publish, (source,), secs, "publish its values"))[source]
            updates.append(Proposal(id_, made.digest, made.content, author="audit", note=_note(mine)))
            prepare = Prepare(id_, made.digest, made.content)
            yield Ask(prepare, None, job.timeouts.prepare_secs, "fetch the reference values")
        found: dict[str, Difference] = {}
        for update, mine in zip(updates, by_source.values(), strict=True):
            order = Compare(update.id, update.digest, tuple(one.variable for one in mine))
            far = yield Ask(order, None, secs, "compare its values")
            for one in mine:
                ranks = [rank for rank in one.minority if one.variable in far[rank]]
                differing = {rank: far[rank][one.variable] for rank in ranks}
                found[one.variable] = replace(one, differing=differing)
        return tuple(found[one.variable] for one in differences)

    def _healed(self, job: JobView, report: AuditReport, updates: list[Proposal]) -> Part[AuditReport]:
        """Commits the fetched values as updates, and applies them while all are stopped."""
        healed: list[int] = []
        for update in updates:
            try:
                yield Persist(payload_of(update))
                record = yield from committed(self, job, update, report.step, heals=True)
            except Refuse:  # the disk is full: the report says that they still differ
                yield from discarded(job, updates[len(healed) :])
                return replace(report, outcome="raised", healed=tuple(healed))
            reports = yield Ask(Apply(record.id, record.digest, record.sequence))
            job.announce((yield from verified(job, record, update, report.step, reports)))
            healed.append(record.sequence)
        seen = yield Ask(Examine(), None, job.timeouts.compute_secs, "compare its state")
        if not _all_agree(seen):
            return replace(report, outcome="raised", healed=tuple(healed))
        job.audits.are_equal(report.step)
        return replace(report, healed=tuple(healed))


def _all_agree(seen: Reports) -> bool:
    return agree(" ".join(one.digests.values()) for one in seen.values())


def _report(job: JobView, step: int, seen: Reports) -> AuditReport:
    job.audits.count += 1
    return AuditReport(
        job.audits.count,
        step,
        max(one.time for one in seen.values()),
        step,
        job.audits.last_equal,
        declared=tuple(
            Declared(name, not agree(one.free[name] for one in seen.values())) for name in seen[0].free
        ),
        partly=seen[0].partly,
        digest_secs=max(one.secs for one in seen.values()),
        workers=job.size,
        attempt=job.attempt,
    )


def _note(differences: list[Difference]) -> str:
    names = ", ".join(one.variable for one in differences[:5])
    more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
    return f"heal: {names}{more} as on worker {differences[0].reference} ({differences[0].rule})"


class Sync(Operation):
    kind = "sync"
    in_trial = True

    def script(self, job: JobView) -> Script:
        source, *asked = self.arguments
        yield EarlierSettled()
        step = yield Boundary()
        if job.trial is not None:
            raise Refuse(f"{under_way(job.trial)}: train until it is over, then call sync")
        seen = yield Ask(Digest(tuple(asked)), None, job.timeouts.compute_secs, "compare its state")
        names = tuple(name for name in seen[source] if not agree(one[name] for one in seen.values()))
        if not names:
            return Outcome(Stage.VERIFIED)
        publish = Publish(self.id, names)
        made = (yield Ask(publish, (source,), job.timeouts.compute_secs, "publish its values"))[source]
        note = f"sync with worker {source}"
        update = Proposal(self.id, made.digest, made.content, author="sync", note=note)
        try:
            yield from prepared_here(job, update)
            record = yield from committed(self, job, update, step)
        except Refuse:
            yield from discarded(job, [update])
            raise
        reports = yield Go(Apply(record.id, record.digest, record.sequence))
        job.audits.are_equal(step)
        outcome = yield from verified(job, record, update, step, reports)
        job.announce(outcome)
        return outcome


class PulledRows(Record):
    name: str
    rows: Ranges
    step: int
    digests: Mapping[int, str]

    @property
    def equal(self) -> bool:
        return agree(self.digests.values())


class Pull(Operation):
    """Somebody outside the job wants to see values."""

    kind = "pull"
    in_trial = True

    def script(self, job: JobView) -> Script:
        take = TakeRows(self.id, *self.arguments)
        step = self.step = yield Boundary()
        digests = yield Go(take)
        pulled = PulledRows(take.name, take.rows, step, digests)
        return Outcome(Stage.VERIFIED if pulled.equal else Stage.FAILED, pulled)


class Digest(Order):
    names: tuple[str, ...] = ()
    method: ClassVar[str] = "digests"


class Publish(Order):
    id: str
    names: tuple[str, ...]
    devices: tuple[str, ...] = ()
    method: ClassVar[str] = "publish"


class Examine(Order):
    method: ClassVar[str] = "examine"


class Expected(Order):
    names: tuple[str, ...]
    method: ClassVar[str] = "expected"


class Compare(Order):
    id: str
    digest: str
    names: tuple[str, ...]
    method: ClassVar[str] = "deviations"


class DeliverReport(Order):
    report: AuditReport
    raises: bool
    method: ClassVar[str] = "report"


class TakeRows(Order):
    id: str
    name: str
    rows: Ranges = ()
    method: ClassVar[str] = "pull"
