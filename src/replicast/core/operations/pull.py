"""Pull: the live values of one variable, or of some rows of it, at one boundary.

    coordinator                               every worker
    stop all
    TakeRows, release ──────────────────────► digest the rows; worker 0 also copies them; go on
    all digests equal? the answer says so
    the end of the operation ───────────────► worker 0 writes the copy that was asked for   in the background

Nothing is changed, so it may happen in a trial.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from replicast.codec import Record
from replicast.core.messages import Order
from replicast.core.operation import Boundary, Go, JobView, Operation, Outcome, Script
from replicast.core.records import Stage
from replicast.update.audit_report import agree

Ranges = tuple[tuple[int, int], ...]


class PulledRows(Record):
    """What was pulled."""

    name: str
    rows: Ranges
    step: int
    digests: Mapping[int, str]

    @property
    def equal(self) -> bool:
        """Whether all workers have the same values."""
        return agree(self.digests.values())


class Pull(Operation):
    """Somebody outside the job wants to see values."""

    kind = "pull"
    in_trial = True

    def __init__(self, id_: str, name: str, rows: Ranges = ()) -> None:
        super().__init__(id_)
        self.name = name
        self.rows = rows

    def script(self, job: JobView) -> Script:
        step = self.step = yield Boundary()
        digests = yield Go(TakeRows(self.id, self.name, self.rows))
        pulled = PulledRows(self.name, self.rows, step, digests)
        return Outcome(Stage.VERIFIED if pulled.equal else Stage.FAILED, pulled)


class TakeRows(Order):
    id: str
    name: str
    rows: Ranges
    method: ClassVar[str] = "pull"
