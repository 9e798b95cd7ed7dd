"""Revert: an update that undoes another one. It is agreed on, journaled and replayed like any other.

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

from typing import ClassVar

from msgspec.structs import replace

from replicast.core.entries import Before, Committed, History
from replicast.core.messages import Order
from replicast.core.operation import (
    Ask,
    BeforeWritten,
    Boundary,
    JobView,
    Operation,
    Outcome,
    Persist,
    Script,
)
from replicast.core.operations.apply import UpdateOperation, applied
from replicast.core.records import Proposal, Refuse, Stage


class Revert(UpdateOperation):
    """An update that undoes another one."""

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


class Invert(Order):
    id: str
    sequence: int
    forced: bool = False
    in_background: ClassVar[bool] = True
    method: ClassVar[str] = "invert"


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


class WriteBefore(Order):
    sequence: int
    in_background: ClassVar[bool] = True
    method: ClassVar[str] = "write_before"
