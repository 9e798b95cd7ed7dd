"""Meet: all training threads wait for each other at one line of the script. Nothing else happens."""

from __future__ import annotations

from typing import ClassVar

from replicast.core.operation import Boundary, EarlierSettled, Job, Operation, Outcome, Script
from replicast.core.stage import Stage


class Meet(Operation):
    """All workers rest; every earlier proposal has its outcome when they continue."""

    kind: ClassVar[str] = "meet"

    def __init__(self, id_: str) -> None:
        super().__init__(id_)
        self.in_trial = True

    def script(self, job: Job) -> Script:
        """The coordinator's side; the workers only rest."""
        yield EarlierSettled()
        yield Boundary()
        return Outcome(Stage.VERIFIED)
