"""Save: a checkpoint of one boundary.

    coordinator                               every worker
    at planned steps nobody waits: ◄───────── every worker takes its snapshot as it arrives, and goes on
    otherwise: stop all, Snapshot ──────────► copy the state on worker 0, digest it everywhere; go on
    all digests equal? otherwise an audit
    write the state and the entry: THE COMMIT of the checkpoint

With the state goes what was proposed before the boundary and is not committed: a script that starts again
from here does not come to those lines again. While a trial is under way nothing is saved: a planned
checkpoint is made when it is over.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

from replicast.core.entries import Saved
from replicast.core.operation import (
    AnyRequest,
    Boundary,
    Collect,
    EarlierSettled,
    Go,
    Job,
    Operation,
    Outcome,
    Record,
    Script,
)
from replicast.core.operations.audit import Audit
from replicast.core.order import Replica
from replicast.core.proposal import Content
from replicast.core.refusal import Refusal, Refuse
from replicast.core.stage import Stage

Snapshots = dict[int, tuple[str, Content, frozenset[int]] | None]


class Save(Operation):
    """A checkpoint that is planned for a step, or that somebody has asked for.

    Args:
        planned_step: The step at which every worker takes its snapshot by itself; None when somebody asks.
    """

    kind: ClassVar[str] = "save"

    def __init__(self, id_: str, planned_step: int | None = None) -> None:
        super().__init__(id_)
        self.step = planned_step

    def script(self, job: Job) -> Script:
        """The coordinator's side."""
        step, snapshots = self.step, Snapshots()
        if step is not None:
            snapshots = yield Collect(self.kind, step)
        elif self.tokens:  # all training threads rest in it: they cannot train to the end of a trial
            self.in_trial = True
            yield EarlierSettled()
        if step is None or None in snapshots.values():  # a trial was under way: its end comes first
            step = yield Boundary()
            if job.trial is not None:
                raise Refuse(f"The trial of {job.trial.id} is not over: what may be reverted is not saved")
            snapshots = yield Go(Snapshot(), resume=True)
        return (yield from saved(job, step, snapshots))


def saved(job: Job, step: int, snapshots: Snapshots) -> Generator[AnyRequest, Any, Outcome]:
    """The checkpoint is durable, if the state was the same on all workers."""
    first = snapshots[0]
    digests = {rank: one[0] for rank, one in snapshots.items() if one is not None}
    if first is None or len(set(digests.values())) > 1:
        job.open(Audit(job.new_id("audit")))
        return Outcome(Stage.FAILED, Refusal(f"The workers' states differ at step {step}: {digests}"))
    _, state, holds = first
    yield Record(Saved(step, job.attempt, holds, job.pending(), state))
    return Outcome(Stage.VERIFIED, step)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Worker, in the training thread: the digest of the state; on worker 0 also a copy of it."""

    in_background: ClassVar[bool] = False

    def perform(self, replica: Replica) -> tuple[str, Content, frozenset[int]] | None:
        """None while a trial is under way."""
        return None if replica.on_trial else replica.snapshot()
