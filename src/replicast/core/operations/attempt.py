"""What every attempt does: begin, save, meet, close at the end of a training, leave when told to exit."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from replicast.core.entries import Saved, Stage, Started
from replicast.core.messages import JobEnds, Order, Refusal, Refuse, Replica, Snapshot
from replicast.core.operation import (
    Ask,
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
from replicast.core.operations.apply import under_way
from replicast.update.audit_report import agree

Snapshots = dict[int, Snapshot | None]


class Begin(Operation):
    """All workers are about to train: the work that earlier attempts left is resumed before the first step.

        all workers rest, with the state of a checkpoint or from scratch
        each committed update that the state does not hold    its stop is set; it is applied again at its step
        each scheduled update                                 its stop is set; it is committed there
        each pending proposal of the checkpoint               is proposed again: the script does not repeat it
        then the proposals of this attempt, and training begins

    A replayed update runs the same script as every update (`apply.py`), but its record is not written again.
    It gets a receipt of this attempt.
    """

    kind = "begin"
    in_trial = True

    def script(self, job: JobView) -> Script:
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


class Save(Operation):
    """A checkpoint of one boundary, for which every worker has taken a snapshot, or that was requested.

        coordinator                               every worker
        planned, without a stop: ◄─────────────── takes its snapshot at one boundary, and continues
        one is missing? refused
        otherwise: stop all, Snapshot ──────────► copy the state on worker 0, digest it on all; continue
        all digests equal? otherwise an audit
        wait until the payloads of earlier proposals are durable
        write the state; the commit of the checkpoint is the rename of its directory

    The checkpoint includes uncommitted proposals made before the boundary: a script restarted from here
    does not run those lines again. Nothing is saved during a trial: a checkpoint that is due then is made
    after it. If an update was applied between the workers' snapshots, they are taken again.
    """

    kind = "save"

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
    differing = tuple(rank for rank, one in sorted(taken.items()) if not agree((one.digest, first.digest)))
    if differing:
        job.request_audit()
        has_unequal_devices = "," in taken[differing[0]].digest
        differs = "is not equal on all its devices" if has_unequal_devices else "differs from worker 0"
        problem = f"Worker {differing[0]} {differs} at step {first.step}"
        return Outcome(Stage.FAILED, Refusal(problem, differing, {"step": first.step}))
    yield EarlierStored()
    state = tuple(taken[rank].details for rank in sorted(taken))
    yield Persist(Saved(first.step, job.attempt, first.holds, job.pending(), state))
    return Outcome(Stage.VERIFIED, first.step)


class Barrier(Operation):
    """All training threads wait for each other at one line of the script, which the arguments tell apart.

    Every earlier proposal has its outcome when they continue.
    """

    kind = "meet"
    in_trial = True

    def script(self, job: JobView) -> Script:
        yield EarlierSettled()
        yield Boundary()
        return Outcome(Stage.VERIFIED)


class Close(Operation):
    """All workers rest at the end of a training: every proposal gets its outcome.

    a function that its source has not proposed     is refused: its source has ended
    a trial in progress                             is decided now, with the measurements so far
    operations that waited for the trial            run
    updates scheduled for a later step              stay in the journal for the next start
    values that updates have overwritten            are durable before the job ends
    """

    kind = "close"
    in_trial = True

    def script(self, job: JobView) -> Script:
        job.refuse_functions_without_source()
        yield EarlierSettled()
        while job.trial is not None and job.trial.meeting is not None:
            job.trial.meeting.at_step = 0  # here, while all rest
            yield EarlierSettled()
        yield EarlierStored()
        yield Boundary()
        return Outcome(Stage.VERIFIED)


class Leave(Operation):
    """The job was told to exit: all workers save at one boundary, and exit together.

        coordinator                               every worker
        stop all
        nothing more is decided from here on
        Snapshot, write the checkpoint ─────────► unless a trial is in progress: its state may be reverted
        Exit ───────────────────────────────────► the process exits; worker 0, which has the channel, last

    Undecided proposals are left to the next start: they are in the inbox, the journal or the checkpoint.
    """

    kind = "leave"
    in_trial = True

    def script(self, job: JobView) -> Script:
        self.step = yield Boundary()
        job.leaving = True
        refusal = Refusal("A trial is in progress: the job continues from the checkpoint before it")
        outcome = Outcome(Stage.VERIFIED, refusal)
        if job.trial is None:
            try:
                order = TakeSnapshot(self.id)
                snapshots = yield Ask(order, None, job.timeouts.compute_secs, "take a snapshot")
                outcome = yield from saved(job, snapshots)
            except Refuse as error:
                outcome = Outcome(Stage.VERIFIED, error.refusal)
        problem = outcome.result.problem if isinstance(outcome.result, Refusal) else ""
        yield Go(Exit(problem, self.asked_by))
        return outcome


class TakeSnapshot(Order):
    id: str
    due: bool = False
    again: bool = False

    def perform(self, replica: Replica) -> Snapshot | Callable[[], Snapshot] | None:
        return None if replica.on_trial else replica.snapshot(self.id, due=self.due, again=self.again)


class Exit(Order):
    problem: str = ""
    asked_by: tuple[str, ...] = ()
    method: ClassVar[str] = "leave"
