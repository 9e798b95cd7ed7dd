"""How an attempt begins and ends: begin, close at the end of a training, leave when told to exit."""

from __future__ import annotations

from replicast.core.entries import Started
from replicast.core.messages import Order, Replica
from replicast.core.operation import (
    Ask,
    Boundary,
    EarlierSettled,
    EarlierStored,
    Go,
    JobView,
    Operation,
    Outcome,
    Persist,
    Script,
)
from replicast.core.operations.save import TakeSnapshot, saved
from replicast.core.records import JobEnds, Refusal, Refuse, Stage


class Begin(Operation):
    """All workers are about to train: the work that earlier attempts left is resumed before the first step.

        all workers rest, with the state of a checkpoint or from scratch
        each committed update that the state does not hold    its stop is set; it is applied again at its step
        each scheduled update                                 its stop is set; it is committed there
        each pending proposal of the checkpoint               is proposed again: the script does not repeat it
        then the proposals of this attempt, and training begins

    A replayed update runs the same script as every update (`update.py`), but its record is not written again.
    It gets a receipt of this attempt.
    """

    kind = "begin"
    in_trial = True

    def script(self, job: JobView) -> Script:
        from_step = None if job.start is None else job.start.step
        if from_step != max(job.history.checkpoints, default=None):
            try:
                yield Persist(Started(job.attempt, from_step))
            except Refuse as error:
                raise JobEnds(
                    f"The entry that invalidates later checkpoints cannot be written: {error}"
                ) from None
        job.take_up_journal()
        yield EarlierSettled()
        yield Boundary()
        return Outcome(Stage.VERIFIED)


class Close(Operation):
    """All workers rest at the end of a training: every proposal gets its outcome.

    a function that its source has not proposed     is refused: its source has ended
    a trial in progress                             is decided now, with the measurements so far
    operations that waited for the trial            run
    updates scheduled for a later step              stay in the journal for the next start
    values that updates have overwritten            are durable before the job ends
    """

    kind = "close"
    in_trial = True

    def script(self, job: JobView) -> Script:
        job.refuse_functions_without_source()
        yield EarlierSettled()
        while job.trial is not None and job.trial.meeting is not None:
            job.trial.meeting.at_step = 0  # here, while all rest
            yield EarlierSettled()
        yield EarlierStored()
        yield Boundary()
        return Outcome(Stage.VERIFIED)


class Leave(Operation):
    """The job was told to exit: all workers save at one boundary, and exit together.

        coordinator                               every worker
        stop all
        nothing more is decided from here on
        Snapshot, write the checkpoint ─────────► unless a trial is in progress: its state may be reverted
        Exit ───────────────────────────────────► the process exits; worker 0, which has the channel, last

    Undecided proposals are left to the next start: they are in the inbox, the journal or the checkpoint.
    """

    kind = "leave"
    in_trial = True

    def script(self, job: JobView) -> Script:
        self.step = yield Boundary()
        job.leaving = True
        refusal = Refusal("A trial is in progress: the job continues from the checkpoint before it")
        outcome = Outcome(Stage.VERIFIED, refusal)
        if job.trial is None:
            try:
                order = TakeSnapshot(self.id)
                snapshots = yield Ask(order, None, job.timeouts.compute_secs, "take a snapshot")
                outcome = yield from saved(job, snapshots)
            except Refuse as error:
                outcome = Outcome(Stage.VERIFIED, error.refusal)
        problem = outcome.result.problem if isinstance(outcome.result, Refusal) else ""
        yield Go(Exit(problem, self.asked_by))
        return outcome


class Exit(Order):
    problem: str = ""
    asked_by: tuple[str, ...] = ()

    def perform(self, replica: Replica) -> None:
        replica.leave(self.problem, self.asked_by)
