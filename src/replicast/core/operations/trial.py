"""Trial: an update that is kept if a metric allows it, or reverted by every replica.

    coordinator                               every worker
    Prepare, stop all                         as for every update
    Measure ────────────────────────────────► the metric before
    write the record: THE COMMIT
    set the stop at its end
    BeginTrial, release ────────────────────► copy the state, apply the update, train on
      … most other operations wait; nothing is saved …
    all are stopped at its end
    Measure ────────────────────────────────► the metric since
    write the decision, once
    End, release ───────────────────────────► kept: drop the copy. Reverted: restore it. Report the digest

After a restart, a recorded decision is taken at its step, whatever is measured; without one, it decides anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import ClassVar

from msgspec.structs import replace

from replicast.core.entries import Committed, Decided
from replicast.core.messages import Order, Replica
from replicast.core.operation import Ask, Boundary, Go, JobView, Operation, Outcome, Part, Persist, Script
from replicast.core.operations.update import UpdateOperation, committed, prepared, verified
from replicast.core.records import Applied, JobEnds, Proposal, Refuse, Stage
from replicast.update.trial import Trial, TrialOutcome, judged
from replicast.update.trial import TrialVerdict as Kept


class TrialUpdate(UpdateOperation):
    """An update on trial."""

    kind: ClassVar[str] = "trial"

    def __init__(
        self,
        proposal: Proposal,
        record: Committed | None = None,
        decided: Decided | None = None,
        *,
        scheduled: bool = False,
        stored: bool = False,
    ) -> None:
        super().__init__(proposal, record, scheduled=scheduled, stored=stored)
        self.decided = decided

    def script(self, job: JobView) -> Script:
        yield from prepared(self, job)
        start = yield Boundary(self.at_step)
        return (yield from tried(self, job, self.update, start, self.record, self.decided))


def tried(
    operation: Operation,
    job: JobView,
    proposal: Proposal,
    start: int,
    record: Committed | None = None,
    decided: Decided | None = None,
) -> Part[Outcome]:
    """From the boundary where it is applied to the one where it is decided."""
    trial = proposal.trial
    if trial is None:
        raise JobEnds(f"{proposal.id} is not on trial")
    replayed = record is not None
    if record is None:
        before, _ = yield from _measured(job, trial)
        if before is None:
            raise Refuse(f"{trial.metric} was not measured before the trial")
        record = yield from committed(operation, job, proposal, start, before=before)
    ends = start + trial.steps if decided is None else decided.step
    job.trial, operation.must_run = operation, True
    job.promise(operation, ends)
    begun = yield Go(BeginTrial(record.id, record.digest, record.sequence))
    operation.stage = Stage.APPLIED
    operation.waits_for, operation.waits_until = f"the end of its trial at step {ends}", ends
    if replayed:
        operation.replays = (ends, inf if decided is None else decided.last + 0.5)
        job.replay(operation)
    end = yield Boundary(ends)
    if decided is None:
        decided = yield from _decided(job, trial, record, end)
    job.trial = None
    ended = yield Go(EndTrial(decided.kept, record.sequence))
    reports = {rank: replace(begun[rank], digest=ended[rank].digest) for rank in ended}
    return (yield from verified(job, record, proposal, start, reports, outcome_of(trial, record, decided)))


def under_way(operation: Operation) -> str:
    """Which trial is in progress, and until when, as text."""
    meeting = operation.meeting
    until = "" if meeting is None else f" runs until step {meeting.at_step}"
    return f"The trial of {operation.id}{until or ' ends here'}"


def outcome_of(trial: Trial, record: Committed, decided: Decided) -> TrialOutcome:
    """How a trial ended, for its author."""
    kept: Kept = "kept" if decided.kept else "reverted"
    return TrialOutcome(
        record.sequence, kept, decided.step, trial.metric, record.before, decided.during, decided.reason
    )


def _measured(job: JobView, trial: Trial) -> Part[tuple[float | None, int]]:
    """The mean over the workers, and the number of steps."""
    answers = yield Ask(Measure(trial), None, job.timeouts.compute_secs, "measure")
    return _mean(mean for mean, _ in answers.values()), min(steps for _, steps in answers.values())


def _decided(job: JobView, trial: Trial, record: Committed, end: int) -> Part[Decided]:
    """Decides the trial. The decision is durable before any worker acts on it."""
    during, steps = yield from _measured(job, trial)
    outcome = judged(trial, record.sequence, end, record.before, during, steps)
    last = job.history.next_sequence - 1
    kept = outcome.outcome == "kept"
    decided = Decided(record.sequence, kept, end, last, outcome.reason, outcome.during)
    try:
        yield Persist(decided)
    except Refuse as error:
        raise JobEnds(f"The outcome of the trial of {record.id} cannot be written: {error}") from None
    return decided


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


class Measure(Order):
    """Worker, in the training thread: the mean of the metric before or during the trial."""

    trial: Trial

    def perform(self, replica: Replica) -> tuple[float | None, int]:
        return replica.measure(self.trial)


class BeginTrial(Order):
    """Worker, in the training thread: copy the state, then apply the prepared update."""

    id: str
    digest: str
    sequence: int

    def perform(self, replica: Replica) -> Applied | Callable[[], Applied]:
        replica.keep_copy()
        return replica.apply(self.id, self.digest, self.sequence, keep=True)


class EndTrial(Order):
    """Worker, in the training thread: keep or revert the update; report the digest of the whole state."""

    kept: bool
    sequence: int

    def perform(self, replica: Replica) -> Applied:
        if not self.kept:
            replica.go_back()
            replica.drop_before(self.sequence)
        replica.drop_copy()
        return Applied(replica.digest())
