"""Keep: the values that an update has overwritten become durable, so that it can be reverted.

    coordinator                               worker 0
    an update is applied ◄─────────────────── it has held what the update overwrites, while all stood
    WriteBefore ────────────────────────────► write the values beside the journal        in the background
    write where they are, or why they are not kept

Nobody waits for it but a checkpoint that holds the update: should the job end before, the next start applies
the update again to the same values, and keeps them then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from replicast.core.entries import Before, Committed
from replicast.core.operation import Ask, Job, Operation, Outcome, Record, Script
from replicast.core.order import Replica
from replicast.core.proposal import Content
from replicast.core.refusal import Refuse
from replicast.core.stage import Stage


class Keep(Operation):
    """Worker 0 holds what an update has overwritten.

    Args:
        record: The update's.
    """

    kind: ClassVar[str] = "keep"
    only_writes: ClassVar[bool] = True

    def __init__(self, id_: str, record: Committed) -> None:
        super().__init__(id_)
        self.record = record
        self.in_trial = True

    def is_applying(self, id_: str) -> bool:
        """As in `Operation`."""
        return self.record.id == id_

    def script(self, job: Job) -> Script:
        """The coordinator's side."""
        order = WriteBefore(self.record.sequence)
        try:
            content, problem = (yield Ask(order, (0,), None, "write the values before the update"))[0]
        except Refuse as error:  # those of an earlier attempt, which applied it too, do not count any more
            content, problem = None, str(error)
        yield Record(Before(self.record.sequence, self.record.id, content, problem))
        return Outcome(Stage.VERIFIED)


@dataclass(frozen=True, slots=True)
class WriteBefore:
    """Worker 0, in the background: write the values that an update has overwritten."""

    sequence: int
    in_background: ClassVar[bool] = True

    def perform(self, replica: Replica) -> tuple[Content, str]:
        """Nothing is changed."""
        return replica.write_before(self.sequence)
