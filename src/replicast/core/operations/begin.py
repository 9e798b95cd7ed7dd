"""Begin: what earlier attempts have left is taken up before the first step.

    all workers rest, with the state of a checkpoint or from scratch
    each committed update that the state does not hold    its stop is put up; it is applied again at its step
    each scheduled update                                 its stop is put up; it is committed there
    each pending proposal of the checkpoint               is proposed again: the script does not repeat it
    then what was proposed in this attempt meanwhile, and training begins

An update of the journal takes the way of every update (`update.py`), without being written again, and leaves
a receipt of this attempt.
"""

from __future__ import annotations

from typing import ClassVar

from replicast.core.entries import Started
from replicast.core.operation import Boundary, EarlierSettled, Job, Operation, Outcome, Record, Script
from replicast.core.refusal import JobEnds, Refuse
from replicast.core.stage import Stage


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
                yield Record(Started(job.attempt, from_step))
            except Refuse as error:
                raise JobEnds(
                    f"It cannot be written down that later checkpoints are given up: {error}"
                ) from None
        job.take_up_journal()
        yield EarlierSettled()
        yield Boundary()
        return Outcome(Stage.VERIFIED)
