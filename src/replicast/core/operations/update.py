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
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import ClassVar

from replicast.core.entries import Committed, Payload, Receipt, Scheduled
from replicast.core.messages import Order, Replica
from replicast.core.operation import (
    Ask,
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
from replicast.core.records import Applied, Content, JobEnds, Proposal, Refuse, Stage
from replicast.update.trial import TrialOutcome


class UpdateOperation(Operation):
    """A proposed update, or one of the journal that is applied again."""

    kind: ClassVar[str] = "update"

    def __init__(
        self,
        proposal: Proposal,
        record: Committed | None = None,
        *,
        scheduled: bool = False,
        stored: bool = False,
    ) -> None:
        super().__init__(proposal.id, proposal)
        self.stored = stored or scheduled or record is not None
        self.update = proposal
        self.record = record
        self.scheduled = scheduled
        if record is not None:
            self.stage, self.step, self.must_run = Stage.COMMITTED, record.step, True
            self.replays, self.in_trial = (record.step, record.sequence), record.heals
            self.waits_until = record.step

    def script(self, job: JobView) -> Script:
        yield from prepared(self, job)
        step = yield Boundary(self.at_step)
        return (yield from applied(self, job, self.update, step, self.record))

    @property
    def at_step(self) -> int | None:
        """The step at which it must be applied, if that is not open."""
        return self.update.at_step if self.record is None else self.record.step


def prepared(update: UpdateOperation, job: JobView) -> Part[None]:
    """Afterwards every worker can apply it; its payload is durable, and so is its step if it has one."""
    proposal, secs = update.update, job.timeouts.prepare_secs
    content = proposal.content
    try:
        if update.stored:
            load = Load(proposal.id, proposal.digest)
            content = (yield Ask(load, (0,), secs, "load the update"))[0]
        prepare = Prepare(proposal.id, proposal.digest, content)
        yield Ask(prepare, None, secs, "prepare the update")
    except Refuse as error:
        if update.record is None:
            raise
        raise JobEnds(
            f"Update {update.record.sequence} of the journal cannot be applied again: {error}"
        ) from None
    if update.record is not None:
        return
    if not update.stored:
        yield Persist(payload_of(proposal))
        update.stored = True
    update.stage = Stage.PREPARED
    if proposal.at_step is not None and not update.scheduled:
        yield Reserve(proposal.at_step)
        yield Persist(Scheduled(proposal.id, proposal.digest, proposal.at_step, proposal.trial))
    if proposal.at_step is not None:
        update.stage, update.step = Stage.SCHEDULED, proposal.at_step
        update.waits_until = proposal.at_step


def made_here(operation: Operation, job: JobView, proposal: Proposal, step: int) -> Part[Committed]:
    """Prepares and commits an update that was created at the boundary where all are stopped."""
    try:
        yield from prepared_here(job, proposal)
        return (yield from committed(operation, job, proposal, step))
    except Refuse:
        yield from discarded(job, [proposal])
        raise


def prepared_here(job: JobView, proposal: Proposal) -> Part[None]:
    """Afterwards every worker can apply it, and its payload is durable."""
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
    operation: Operation, job: JobView, proposal: Proposal, step: int, record: Committed | None = None
) -> Part[Outcome]:
    """Commits, applies and verifies an update while all are stopped; a replay is committed already."""
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
    if len({(one.digest, one.trained) for one in reports.values()}) > 1:
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
    )
    with contextlib.suppress(Refuse):
        yield Persist(receipt)
    return Outcome(stage, receipt)


class Load(Order):
    """Worker 0, in the background: make a payload of the journal available to all workers."""

    id: str
    digest: str
    in_background: ClassVar[bool] = True

    def perform(self, replica: Replica) -> Content:
        return replica.load(self.id, self.digest)


class Prepare(Order):
    """Worker, in the background: fetch the bytes, and check that they can be applied."""

    id: str
    digest: str
    content: Content
    in_background: ClassVar[bool] = True

    def perform(self, replica: Replica) -> None:
        replica.prepare(self.id, self.digest, self.content)


class Discard(Order):
    """Worker, in the background: discard a prepared update."""

    ids: tuple[str, ...]
    in_background: ClassVar[bool] = True

    def perform(self, replica: Replica) -> None:
        for id_ in self.ids:
            replica.discard(id_)


class Apply(Order):
    """Worker, in the training thread: apply a prepared update; report the digest of what it touched."""

    id: str
    digest: str
    sequence: int
    keep: bool = False

    def perform(self, replica: Replica) -> Applied | Callable[[], Applied]:
        return replica.apply(self.id, self.digest, self.sequence, keep=self.keep)
