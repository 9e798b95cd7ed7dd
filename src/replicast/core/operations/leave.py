"""Leave: the job was told to exit. All workers save at one boundary, and exit together.

    coordinator                               every worker
    stop all
    nothing more is decided from here on
    Snapshot, write the checkpoint ─────────► unless a trial is in progress, whose state may be reverted
    Exit ───────────────────────────────────► the process exits; worker 0, which has the channel, exits last

Undecided proposals are left to the next start: they are in the inbox, the journal or the checkpoint.
"""

from __future__ import annotations

from typing import ClassVar

from replicast.core.messages import Order, Replica
from replicast.core.operation import (
    Ask,
    Boundary,
    EarlierSettled,
    EarlierStored,
    Go,
    Job,
    Operation,
    Outcome,
    Script,
)
from replicast.core.operations.save import TakeSnapshot, saved
from replicast.core.records import Refusal, Refuse, Stage


class Leave(Operation):
    """The job was told to exit."""

    kind: ClassVar[str] = "leave"

    def __init__(self, id_: str) -> None:
        super().__init__(id_)
        self.in_trial = True

    def script(self, job: Job) -> Script:
        """The coordinator's side."""
        self.step = yield Boundary()
        job.leaving = True
        refusal = Refusal("A trial is in progress: the job continues from the checkpoint before it")
        outcome = Outcome(Stage.VERIFIED, refusal)
        if job.trial is None:
            try:
                snapshots = yield Ask(
                    TakeSnapshot(self.id), None, job.timeouts.compute_secs, "take a snapshot"
                )
                outcome = yield from saved(job, snapshots)
            except Refuse as error:
                outcome = Outcome(Stage.VERIFIED, error.refusal)
        problem = outcome.result.problem if isinstance(outcome.result, Refusal) else ""
        yield Go(Exit(problem, self.asked_by))
        return outcome


class Exit(Order):
    """Worker, in the training thread: exit the process."""

    problem: str = ""
    asked_by: tuple[str, ...] = ()

    def perform(self, replica: Replica) -> None:
        replica.leave(self.problem, self.asked_by)


# Close: all scripts have ended a training; every proposal gets its outcome.
#
# all workers rest a function that its source has not proposed is refused: its source has ended a trial in
# progress is decided now, with the measurements so far operations that waited for the trial run updates
# scheduled for a later step stay in the journal for the next start values that updates have overwritten are
# durable before the job ends


class Close(Operation):
    """All workers rest at the end of a training."""

    kind: ClassVar[str] = "close"

    def __init__(self, id_: str) -> None:
        super().__init__(id_)
        self.in_trial = True

    def script(self, job: Job) -> Script:
        """The coordinator's side; the workers only rest."""
        job.refuse_functions_without_source()
        yield EarlierSettled()
        while job.trial is not None and job.trial.meeting is not None:
            job.trial.meeting.at_step = 0  # here, while all rest
            yield EarlierSettled()
        yield EarlierStored()
        yield Boundary()
        return Outcome(Stage.VERIFIED)
