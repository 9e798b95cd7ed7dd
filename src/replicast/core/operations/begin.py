"""Begin: the work that earlier attempts left is resumed before the first step.

    all workers rest, with the state of a checkpoint or from scratch
    each committed update that the state does not hold    its stop is set; it is applied again at its step
    each scheduled update                                 its stop is set; it is committed there
    each pending proposal of the checkpoint               is proposed again: the script does not repeat it
    then the proposals of this attempt, and training begins

A replayed update runs the same script as every update (`update.py`), but its record is not written again. It
gets a receipt of this attempt.
"""

from __future__ import annotations

from typing import ClassVar

from replicast.core.entries import Started
from replicast.core.operation import Boundary, EarlierSettled, Job, Operation, Outcome, Persist, Script
from replicast.core.records import JobEnds, Refuse, Stage


class Begin(Operation):
    """All workers are about to train."""

    kind: ClassVar[str] = "begin"

    def __init__(self, id_: str) -> None:
        super().__init__(id_)
        self.in_trial = True

    def script(self, job: Job) -> Script:
        """The coordinator's side; the workers only rest."""
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
