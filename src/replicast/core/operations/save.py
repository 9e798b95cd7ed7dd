"""Save: a checkpoint of one boundary.

    coordinator                               every worker
    planned, without a stop: ◄─────────────── takes its snapshot at one boundary, and continues
    one is missing? refused
    otherwise: stop all, Snapshot ──────────► copy the state on worker 0, digest it on all; continue
    all digests equal? otherwise an audit
    wait until the payloads of earlier proposals are durable
    write the state: THE COMMIT of the checkpoint

The checkpoint includes uncommitted proposals made before the boundary: a script restarted from here does not
run those lines again. Nothing is saved during a trial: a checkpoint that is due then is made after it. If an
update was applied between the workers' snapshots, they are taken again.
"""

from __future__ import annotations

from collections.abc import Callable

from replicast.core.entries import Saved
from replicast.core.messages import Order, Replica
from replicast.core.operation import (
    Boundary,
    Collect,
    EarlierSettled,
    EarlierStored,
    Go,
    JobView,
    Operation,
    Outcome,
    Part,
    Persist,
    Script,
)
from replicast.core.operations.update import under_way
from replicast.core.records import Refusal, Refuse, ReportId, Snapshot, Stage

Snapshots = dict[int, Snapshot | None]


class Save(Operation):
    """A checkpoint for which every worker has taken a snapshot, or that was requested."""

    kind = "save"

    def __init__(self, id_: str, report: ReportId | None = None) -> None:
        super().__init__(id_)
        self.report = report

    def script(self, job: JobView) -> Script:
        snapshots = Snapshots()
        if self.report is not None:
            snapshots = yield Collect(self.report)
            if _is_skipped(snapshots):  # also if the other snapshots are of different states
                return Outcome(Stage.VERIFIED)
        elif self.tokens:  # all training threads rest in it: they cannot train to the end of a trial
            self.in_trial = True
            yield EarlierSettled()
        if not _are_of_one_state(snapshots):
            self.step = yield Boundary()
            if job.trial is not None:
                raise Refuse(f"{under_way(job.trial)}: its state may be reverted, so it is not saved")
            again = any(one is not None for one in snapshots.values())
            due = not self.tokens and not self.asked_by  # somebody waits for what was asked for
            snapshots = yield Go(TakeSnapshot(self.id, due=due, again=again), resume=True)
        return (yield from saved(job, snapshots))


def _is_skipped(snapshots: Snapshots) -> bool:
    """Whether worker 0 has taken no copy, because it is still writing an earlier one."""
    first = snapshots[0]
    return first is not None and first.details is None


def _are_of_one_state(snapshots: Snapshots) -> bool:
    """Whether all workers have taken a snapshot, with the same updates in it.

    A worker that has taken its snapshot may wait at that boundary. If an update is then applied there,
    workers that arrive later take theirs with it. During a trial there are no snapshots.
    """
    taken = [one for one in snapshots.values() if one is not None]
    return 0 < len(taken) == len(snapshots) and len({one.holds for one in taken}) == 1


def saved(job: JobView, snapshots: Snapshots) -> Part[Outcome]:
    """Writes the checkpoint, if the state was the same on all workers."""
    taken = {rank: one for rank, one in snapshots.items() if one is not None}
    if _is_skipped(snapshots):
        return Outcome(Stage.VERIFIED)
    first = taken[0]
    differing = tuple(rank for rank, one in sorted(taken.items()) if one.digest != first.digest)
    if differing:
        job.request_audit()
        problem = f"Worker {differing[0]} differs from worker 0 at step {first.step}"
        return Outcome(Stage.FAILED, Refusal(problem, differing, {"step": first.step}))
    yield EarlierStored()
    state = tuple(taken[rank].details for rank in sorted(taken))
    yield Persist(Saved(first.step, job.attempt, first.holds, job.pending(), state))
    return Outcome(Stage.VERIFIED, first.step)


class TakeSnapshot(Order):
    id: str
    due: bool = False
    again: bool = False

    def perform(self, replica: Replica) -> Snapshot | Callable[[], Snapshot] | None:
        return None if replica.on_trial else replica.snapshot(self.id, due=self.due, again=self.again)
