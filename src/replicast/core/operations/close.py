"""Close: all scripts have ended a training; every proposal gets its outcome.

all workers rest
a function that its source has not proposed           is refused: its source has ended
a trial in progress                                   is decided now, with the measurements so far
operations that waited for the trial                  run
updates scheduled for a later step                    stay in the journal for the next start
values that updates have overwritten                  are durable before the job ends
"""

from __future__ import annotations

from typing import ClassVar

from replicast.core.operation import Boundary, EarlierSettled, EarlierStored, Job, Operation, Outcome, Script
from replicast.core.stage import Stage


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
