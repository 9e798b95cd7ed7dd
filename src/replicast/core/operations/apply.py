"""Update: every replica applies it at one boundary, or none does.

    coordinator                               every worker
    Load ───────────────────────────────────► worker 0: from the journal, if the payload is already there
    Prepare ────────────────────────────────► fetch the bytes, check them; refuse          in the background
    write the payload
    stop all ───────────────────────────────► stop at one boundary                         training threads
    write the record: THE COMMIT
    Apply, release ─────────────────────────► apply, continue, report the digest
    compare the digests, write the receipt

With `at_step`, all workers first agree to stop at that step, and that is recorded (`Scheduled`); no other
operation waits for it. A replay from the journal runs the same script without writing the record again.

Function: one worker computes the update from the live values, at the boundary where all apply it.

    stop all ───────────────────────────────► stop at one boundary                         training threads
    Compute ────────────────────────────────► the source runs the function; it may refuse
    Prepare, write the payload, …             as for every update

All workers may propose the same function under one id: it runs once, on its source. A function is code and
cannot be stored: until its result is committed, it exists only in the memory of its source.

Trial: the update is kept if a metric allows it, or reverted by every replica.

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

Revert: an update that undoes another one, agreed on, journaled and replayed like any other.

    coordinator                               workers
    can it be reverted?
    wait until it is applied, and the values before it are durable
    Invert ─────────────────────────────────► worker 0 makes the update from the journal
    Prepare, stop all                         as for every update
    is it reverted meanwhile?
    write the record, with the number of what it reverts: THE COMMIT
    Apply, release ─────────────────────────► as for every update

The job makes the update, and not its author: after a restart, updates may be applied again to other values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from math import inf
from typing import ClassVar

from msgspec import UNSET
from msgspec.structs import replace

from replicast.core.entries import (
    Before,
    Committed,
    Content,
    Decided,
    History,
    Payload,
    Proposal,
    Receipt,
    Scheduled,
    Stage,
)
from replicast.core.messages import Applied, JobEnds, Order, Refuse, Replica
from replicast.core.operation import (
    Ask,
    BeforeWritten,
    Boundary,
    Go,
    JobView,
    Operation,
    Outcome,
    Part,
    Persist,
    Reserve,
    Script,
)
from replicast.update.audit_report import agree
from replicast.update.trial import Trial, TrialOutcome, judged


class UpdateOperation(Operation):
    """A proposed update, or one of the journal that is applied again: then it has a record."""

    kind = "update"
    proposal: Proposal

    def __init__(
        self,
        proposal: Proposal,
        record: Committed | None = None,
        decided: Decided | None = None,
        *,
        scheduled: bool = False,
        stored: bool = False,
    ) -> None:
        super().__init__(proposal.id, proposal)
        self.stored = stored or scheduled or record is not None
        self.record = record
        self.decided = decided
        self.scheduled = scheduled
        if proposal.trial is not None:
            self.kind = "trial"
        if record is not None:
            self.stage, self.step, self.must_run = Stage.COMMITTED, record.step, True
            self.replays, self.in_trial = (record.step, record.sequence), record.heals
            self.waits_until = record.step

    def script(self, job: JobView) -> Script:
        yield from self.prepared(job)
        step = yield Boundary(self.proposal.at_step if self.record is None else self.record.step)
        return (yield from applied(self, job, self.proposal, step, self.record, self.decided))

    def prepared(self, job: JobView) -> Part[None]:
        """Afterwards every worker can apply it; its payload is written, and its step, if any, is durable."""
        proposal, secs = self.proposal, job.timeouts.prepare_secs
        content = proposal.content
        try:
            if self.stored:
                load = Load(proposal.id, proposal.digest)
                content = (yield Ask(load, (0,), secs, "load the update"))[0]
            prepare = Prepare(proposal.id, proposal.digest, content)
            yield Ask(prepare, None, secs, "prepare the update")
        except Refuse as error:
            if self.record is None:
                raise
            problem = f"Update {self.record.sequence} of the journal cannot be applied again: {error}"
            raise JobEnds(problem) from None
        if self.record is not None:
            return
        if not self.stored:
            yield Persist(payload_of(proposal))
            self.stored = True
        self.stage = Stage.PREPARED
        if proposal.at_step is None:
            return
        if not self.scheduled:
            yield Reserve(proposal.at_step)
            yield Persist(Scheduled(proposal.id, proposal.digest, proposal.at_step, proposal.trial))
        self.stage, self.step, self.waits_until = Stage.SCHEDULED, proposal.at_step, proposal.at_step


class Function(Operation):
    """A function that was proposed. It waits until its source is among those that propose it."""

    kind = "function"
    proposal: Proposal
    has_source = False

    def script(self, job: JobView) -> Script:
        function, times = self.proposal, job.timeouts
        if function.at_step is not None:
            yield Reserve(function.at_step)
            self.waits_until = function.at_step
        step = yield Boundary(function.at_step)
        source = 0 if function.source is None else function.source
        made = (yield Ask(Compute(self.id), (source,), times.compute_secs, "compute the update"))[source]
        update = replace(function, digest=made.digest, content=made.content, note=function.note or made.note)
        yield from prepared_here(job, update)
        return (yield from applied(self, job, update, step))


def prepared_here(job: JobView, proposal: Proposal) -> Part[None]:
    """Prepares an update that was made at the boundary where all are stopped; its payload is durable."""
    order = Prepare(proposal.id, proposal.digest, proposal.content)
    yield Ask(order, None, job.timeouts.prepare_secs, "prepare the update")
    yield Persist(payload_of(proposal))


def discarded(job: JobView, updates: list[Proposal]) -> Part[None]:
    """Discards updates that have no author, once they are not needed. A silent worker keeps them longer."""
    discard = Discard(tuple(one.id for one in updates))
    with contextlib.suppress(Refuse):
        yield Ask(discard, None, job.timeouts.answer_secs, "discard the values")


def payload_of(proposal: Proposal) -> Payload:
    return Payload(proposal.id, proposal.digest, proposal.content, proposal.author, proposal.note)


def applied(
    operation: Operation,
    job: JobView,
    proposal: Proposal,
    step: int,
    record: Committed | None = None,
    decided: Decided | None = None,
) -> Part[Outcome]:
    """Commits, applies and verifies an update while all are stopped; a replay is committed already."""
    if proposal.trial is not None:
        return (yield from tried(operation, job, proposal, proposal.trial, step, record, decided))
    record = record or (yield from committed(operation, job, proposal, step))
    reports = yield Go(Apply(record.id, record.digest, record.sequence, keep=True))
    return (yield from verified(job, record, proposal, step, reports))


def committed(
    operation: Operation,
    job: JobView,
    proposal: Proposal,
    step: int,
    *,
    before: float | None = None,
    heals: bool = False,
) -> Part[Committed]:
    """Writes the record. Once it is durable, nothing can fail."""
    record = Committed(
        sequence=job.history.next_sequence,
        id=proposal.id,
        digest=proposal.digest,
        step=step,
        attempt=job.attempt,
        trial=proposal.trial,
        before=before,
        heals=heals,
        workers=job.size,
        reverts=proposal.reverts,
    )
    yield Persist(record)
    operation.stage, operation.step = Stage.COMMITTED, step
    return record


def verified(
    job: JobView,
    record: Committed,
    proposal: Proposal,
    step: int,
    reports: dict[int, Applied],
    trial: TrialOutcome | None = None,
) -> Part[Outcome]:
    """Writes the receipt. The update is applied even if there is no space for the receipt."""
    goes_back = trial is not None and trial.outcome == "reverted"
    stage = Stage.REVERTED if goes_back else Stage.VERIFIED
    same_steps = len({one.trained for one in reports.values()}) == 1
    if not same_steps or not agree(one.digest for one in reports.values()):
        stage = Stage.FAILED
    if reports[0].keeps and not goes_back:
        job.keep_before(record)  # before anything else is waited for: a later checkpoint waits for it
    applied_at = max(one.applied_at for one in reports.values())
    receipt = Receipt(
        record.sequence,
        record.id,
        step,
        {rank: reports[rank].digest for rank in sorted(reports)},
        max(0.0, applied_at - proposal.proposed_at) if proposal.proposed_at else 0.0,
        max(one.stall_secs for one in reports.values()),
        applied_at,
        stage,
        trial,
        job.attempt,
        tuple(reports[rank].trained for rank in sorted(reports)),
        effects=reports[0].effects or UNSET,
    )
    with contextlib.suppress(Refuse):
        yield Persist(receipt)
    return Outcome(stage, receipt)


def tried(
    operation: Operation,
    job: JobView,
    proposal: Proposal,
    trial: Trial,
    start: int,
    record: Committed | None,
    decided: Decided | None,
) -> Part[Outcome]:
    """From the boundary where it is applied to the one where it is decided."""
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
        during, steps = yield from _measured(job, trial)
        kept, reason, during = judged(trial, record.before, during, steps)
        decided = Decided(record.sequence, kept, end, job.history.next_sequence - 1, reason, during)
        try:
            yield Persist(decided)  # before any worker acts on it
        except Refuse as error:
            raise JobEnds(f"The outcome of the trial of {record.id} cannot be written: {error}") from None
    job.trial = None
    ended = yield Go(EndTrial(decided.kept, record.sequence))
    reports = {rank: replace(begun[rank], digest=ended[rank].digest) for rank in ended}
    return (yield from verified(job, record, proposal, start, reports, outcome_of(trial, record, decided)))


def outcome_of(trial: Trial, record: Committed, decided: Decided) -> TrialOutcome:
    return TrialOutcome(
        record.sequence,
        "kept" if decided.kept else "reverted",
        decided.step,
        trial.metric,
        record.before,
        decided.during,
        decided.reason,
    )


def under_way(operation: Operation) -> str:
    """Which trial is in progress, and until when, as text."""
    meeting = operation.meeting
    until = "" if meeting is None else f" runs until step {meeting.at_step}"
    return f"The trial of {operation.id}{until or ' ends here'}"


def _measured(job: JobView, trial: Trial) -> Part[tuple[float | None, int]]:
    """The mean of the metric over the workers, and the number of steps."""
    answers = yield Ask(Measure(trial), None, job.timeouts.compute_secs, "measure")
    known = [mean for mean, _ in answers.values() if mean is not None]
    mean = sum(known) / len(known) if known else None
    return mean, min(steps for _, steps in answers.values())


class Revert(UpdateOperation):
    kind = "revert"

    def script(self, job: JobView) -> Script:
        sequence = self.proposal.reverts or 0
        check_revert(job, self.proposal)
        if self.proposal.content is None:
            yield BeforeWritten(job.history.committed[sequence].id)
            check_revert(job, self.proposal)  # its trial, which is played again, may have begun meanwhile
            order = Invert(self.id, sequence, self.proposal.forced)
            made = (yield Ask(order, (0,), job.timeouts.prepare_secs, "find what to undo"))[0]
            note = self.proposal.note or made.note
            self.proposal = replace(self.proposal, digest=made.digest, content=made.content, note=note)
        yield from self.prepared(job)
        step = yield Boundary()
        check_revert(job, self.proposal)
        return (yield from applied(self, job, self.proposal, step))


def check_revert(job: JobView, proposal: Proposal) -> None:
    """Raises `Refuse` if an update cannot be reverted now."""
    sequence = proposal.reverts or 0
    problem = why_not(job.history, sequence, forced=proposal.forced)
    if problem:
        raise Refuse(problem)
    step = job.replayed_at(sequence)
    if step is not None:
        raise Refuse(
            f"Update {sequence} is applied again at step {step}, after a restart: revert it after that step"
        )


def why_not(history: History, sequence: int, *, forced: bool = False) -> str:
    """Why an update cannot be reverted; empty if it can."""
    record, decided = history.committed.get(sequence), history.decided.get(sequence)
    if record is None:
        last = history.next_sequence - 1
        known = f"the journal has updates 1 to {last}" if last else "the journal has no update"
        return f"There is no update {sequence}: {known}"
    if record.heals:
        return f"Update {sequence} was made by an audit, to make the replicas equal: there is nothing to undo"
    if record.trial is not None and decided is None:
        return f"The trial of update {sequence} is not decided yet: it may be reverted by itself"
    if decided is not None and not decided.kept:
        return f"Update {sequence} failed its trial: all replicas went back to the state before it then"
    by = history.reverted_by(sequence)
    if by is not None and not forced:
        return f"Update {sequence} is reverted already, by update {by}. To revert it once more: force=True"
    return ""


# Keep: the values that an update has overwritten become durable, so that it can be reverted.
#
#     coordinator                               worker 0
#     an update is applied ◄─────────────────── it has held what the update overwrites, while all stood
#     WriteBefore ────────────────────────────► write the values beside the journal        in the background
#     write where they are, or why they are not kept
#
# Nobody waits for it but a checkpoint that holds the update: should the job end before, the next start
# applies the update again to the same values, and keeps them then.


class Keep(Operation):
    """Worker 0 holds what an update has overwritten."""

    kind = "keep"
    only_writes: ClassVar[bool] = True
    in_trial = True

    def __init__(self, id_: str, record: Committed) -> None:
        super().__init__(id_)
        self.record = record

    def is_applying(self, id_: str) -> bool:
        return self.record.id == id_

    def script(self, job: JobView) -> Script:
        order = WriteBefore(self.record.sequence)
        try:
            content, problem = (yield Ask(order, (0,), None, "write the values before the update"))[0]
        except Refuse as error:  # those of an earlier attempt, which applied it too, do not count any more
            content, problem = None, str(error)
        yield Persist(Before(self.record.sequence, self.record.id, content, problem=problem))
        return Outcome(Stage.VERIFIED)


# The workers' orders: what each does says the method of `Replica`.


class Load(Order):
    id: str
    digest: str
    in_background: ClassVar[bool] = True
    method: ClassVar[str] = "load"


class Prepare(Order):
    id: str
    digest: str
    content: Content
    in_background: ClassVar[bool] = True
    method: ClassVar[str] = "prepare"


class Discard(Order):
    ids: tuple[str, ...]
    in_background: ClassVar[bool] = True

    def perform(self, replica: Replica) -> None:
        for id_ in self.ids:
            replica.discard(id_)


class Compute(Order):
    id: str
    method: ClassVar[str] = "compute"


class Apply(Order):
    id: str
    digest: str
    sequence: int
    keep: bool = False
    method: ClassVar[str] = "apply"


class Measure(Order):
    trial: Trial
    method: ClassVar[str] = "measure"


class BeginTrial(Order):
    id: str
    digest: str
    sequence: int

    def perform(self, replica: Replica) -> Applied | Callable[[], Applied]:
        replica.keep_copy()
        return replica.apply(self.id, self.digest, self.sequence, keep=True)


class EndTrial(Order):
    """Keeps or reverts the update; reports the digest of the whole state."""

    kept: bool
    sequence: int

    def perform(self, replica: Replica) -> Applied:
        if not self.kept:
            replica.go_back()
            replica.drop_before(self.sequence)
        replica.drop_copy()
        return Applied(replica.digest())


class Invert(Order):
    id: str
    sequence: int
    forced: bool = False
    in_background: ClassVar[bool] = True
    method: ClassVar[str] = "invert"


class WriteBefore(Order):
    sequence: int
    in_background: ClassVar[bool] = True
    method: ClassVar[str] = "write_before"
