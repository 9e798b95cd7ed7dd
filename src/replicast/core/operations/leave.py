"""Leave: the job was told to exit. All workers save at one boundary, and exit together.

    coordinator                               every worker
    stop all
    nothing more is decided from here on
    Snapshot, write the checkpoint ─────────► unless a trial is in progress, whose state may be reverted
    Exit ───────────────────────────────────► the process exits; worker 0, which has the channel, exits last

Undecided proposals are left to the next start: they are in the inbox, the journal or the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from replicast.core.operation import Ask, Boundary, Go, Job, Operation, Outcome, Script
from replicast.core.operations.save import TakeSnapshot, saved
from replicast.core.order import Replica
from replicast.core.refusal import Refusal, Refuse
from replicast.core.stage import Stage


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


@dataclass(frozen=True, slots=True)
class Exit:
    """Worker, in the training thread: exit the process.

    Attributes:
        problem: Why the state is not saved; empty if it is.
        asked_by: The ids of the requests from outside that the process answers before it ends.
    """

    problem: str = ""
    asked_by: tuple[str, ...] = ()
    in_background: ClassVar[bool] = False

    def perform(self, replica: Replica) -> None:
        """The process exits after it has answered."""
        replica.leave(self.problem, self.asked_by)
