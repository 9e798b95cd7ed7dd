"""Sync: every replica becomes equal to that of one worker. All training threads rest in it.

coordinator                               every worker
Digest ─────────────────────────────────► the digest of each variable
all equal? then there is nothing to do
Publish ────────────────────────────────► the source publishes its values of what differs
Prepare ────────────────────────────────► fetch the bytes, check them                  in the background
write the payload and the record: THE COMMIT
Apply, release ─────────────────────────► assign, report the digest, continue
"""

from __future__ import annotations

from replicast.core.messages import Order, Replica
from replicast.core.operation import Ask, Boundary, EarlierSettled, Go, JobView, Operation, Outcome, Script
from replicast.core.operations.update import (
    Apply,
    committed,
    discarded,
    prepared_here,
    under_way,
    verified,
)
from replicast.core.records import Proposal, Published, Refuse, Stage


class Sync(Operation):
    """All workers have called `sync`."""

    kind = "sync"
    in_trial = True

    def __init__(self, id_: str, source: int, *names: str) -> None:
        super().__init__(id_)
        self.source = source
        self.names = names

    def script(self, job: JobView) -> Script:
        yield EarlierSettled()
        step = yield Boundary()
        if job.trial is not None:
            raise Refuse(f"{under_way(job.trial)}: train until it is over, then call sync")
        seen = yield Ask(Digest(self.names), None, job.timeouts.compute_secs, "compare its state")
        of_source = seen[self.source]
        names = tuple(
            name for name in of_source if any(one[name] != of_source[name] for one in seen.values())
        )
        if not names:
            return Outcome(Stage.VERIFIED)
        source = (self.source,)
        publish = Publish(self.id, names)
        made = (yield Ask(publish, source, job.timeouts.compute_secs, "publish its values"))[self.source]
        note = f"sync with worker {self.source}"
        update = Proposal(self.id, made.digest, made.content, author="sync", note=note)
        try:
            yield from prepared_here(job, update)
            record = yield from committed(self, job, update, step)
        except Refuse:
            yield from discarded(job, [update])
            raise
        reports = yield Go(Apply(record.id, record.digest, record.sequence))
        job.audits.are_equal(step)
        outcome = yield from verified(job, record, update, step, reports)
        job.announce(outcome)
        return outcome


class Digest(Order):
    names: tuple[str, ...] = ()

    def perform(self, replica: Replica) -> dict[str, str]:
        return replica.digests(self.names)


class Publish(Order):
    id: str
    names: tuple[str, ...]

    def perform(self, replica: Replica) -> Published:
        return replica.publish(self.id, self.names)


class Barrier(Operation):
    """All training threads wait for each other at one line of the script, which the arguments tell apart.

    Every earlier proposal has its outcome when they continue.
    """

    kind = "meet"
    in_trial = True

    def __init__(self, id_: str, *place: object) -> None:
        super().__init__(id_)

    def script(self, job: JobView) -> Script:
        yield EarlierSettled()
        yield Boundary()
        return Outcome(Stage.VERIFIED)
