"""After the commit: every worker's digest is collected and compared, and the receipt is written."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from dataclasses import dataclass, replace

from replicast import faults
from replicast.journal import AnyJournal, Receipt, Record
from replicast.protocol.channel import Channel
from replicast.protocol.messages import Applied, Failed, Verified
from replicast.protocol.outcomes import diverged
from replicast.protocol.trying import settled_key
from replicast.trial import TrialOutcome
from replicast.update import Stage

LOOK_SECS = 0.5

logger = logging.getLogger("replicast")


@dataclass(frozen=True, slots=True)
class Committed:
    """An update that every worker will apply.

    Attributes:
        step: Where; a pause of the training may bring it forward, unless it is scheduled.
        has_receipt: An earlier life of the job has written its receipt, which stays: it says where the update
            was first applied.
    """

    record: Record
    content_digest: str
    proposed_at: float
    step: int
    scheduled: bool
    has_receipt: bool = False


class Verifier:
    """Collects the reports of updates that worker 0 has applied, one after the other. One thread of worker 0.

    It asks for nothing that worker 0 has not applied itself: while it waited for the reports of an update for
    a far step, all others would wait with it.

    There is no deadline: a boundary may be an evaluation away. A worker that dies ends the job, and this
    thread with it.
    """

    def __init__(self, channel: Channel, journal: AnyJournal, stopping: threading.Event) -> None:
        self._channel = channel
        self._journal = journal
        self._stopping = stopping
        self._queue: queue.SimpleQueue[Committed | int] = queue.SimpleQueue()
        channel.on_applied = self._queue.put
        self._outcomes: dict[str, Verified | Failed] = {}
        self._open: dict[int, Committed] = {}
        self._trials: dict[int, TrialOutcome] = {}
        self._changed = threading.Condition()

    def expect(self, committed: Committed) -> None:
        """Takes over an update. Called by the coordinator, before the workers hear of it."""
        with self._changed:
            self._open[committed.record.sequence] = committed
        if committed.record.trial is None:
            self._queue.put(committed)

    def on_trial(self, step: int) -> list[Committed]:
        """The updates whose trial, at this step, is under way or waits for another's end; in their order."""
        with self._changed:
            return self._on_trial(step)

    def decided(self, sequence: int, outcome: TrialOutcome) -> None:
        """The trial of an update is over. Called by the coordinator, before the workers hear of it."""
        with self._changed:
            self._trials[sequence] = outcome
            committed = self._open[sequence]
        self._queue.put(committed)

    def _on_trial(self, step: int) -> list[Committed]:
        found = [
            one
            for sequence, one in self._open.items()
            if one.record.trial is not None and sequence not in self._trials
        ]
        due = (one for one in found if one.step <= step or not one.scheduled)
        return sorted(due, key=lambda one: (one.step, one.record.sequence))

    def knows(self, record: Record, receipt: Receipt) -> None:
        """Takes over the outcome of an earlier life of the job."""
        self._outcomes[record.id] = Verified(record.content_digest, receipt.to_json())

    def repeat(self, id_: str, content_digest: str) -> bool:
        """Tells the outcome once more, if there is one: somebody proposed the same again."""
        outcome = self._outcomes.get(id_)
        match outcome:
            case Verified(_, receipt):
                self._channel.append(Verified(content_digest, receipt))
            case Failed():
                self._channel.append(replace(outcome, content_digest=content_digest))
        return outcome is not None

    def is_verified(self, id_: str) -> bool:
        """Whether an update was applied by all, and is told to have left all equal."""
        return isinstance(self._outcomes.get(id_), Verified)

    def meant_for_later(self, step: int) -> list[int]:
        """The sequence numbers of what is committed for a step after this one, by nobody's wish."""
        with self._changed:
            return [n for n, one in self._open.items() if one.step > step and not one.scheduled]

    def moved(self, sequence: int, step: int) -> None:
        """What was committed for later is applied at this step instead: its step does not change again."""
        with self._changed:
            one = self._open.get(sequence)
            if one is not None:
                self._open[sequence] = replace(one, step=step)

    def scheduled(self, id_: str) -> Committed | None:
        """An update that is committed for the step that its author chose, and not told yet."""
        with self._changed:
            found = (one for one in self._open.values() if one.record.id == id_ and one.scheduled)
            return next(found, None)

    def forget(self, sequence: int) -> None:
        """An update is withdrawn: nobody will report it."""
        with self._changed:
            self._open.pop(sequence, None)
            self._changed.notify_all()

    def step_of(self, id_: str) -> int | None:
        """The step for which an update is committed that is not told yet."""
        with self._changed:
            return next((one.step for one in self._open.values() if one.record.id == id_), None)

    def wait_until_told(self, step: int, timeout_secs: float) -> bool:
        """Blocks until every update that a pause at `step` has made due is told, at most `timeout_secs`."""

        def told() -> bool:
            due = [one for one in self._open.values() if one.step <= step or not one.scheduled]
            if self._on_trial(step):  # all others wait for its end
                due = [one for one in due if is_healing(one.record)]
            return not due or self._stopping.is_set()

        ends = time.monotonic() + timeout_secs
        with self._changed:
            while not told() and time.monotonic() < ends:
                self._changed.wait(min(LOOK_SECS, max(0.0, ends - time.monotonic())))
            return told()

    def run(self) -> None:
        """Until the threads are stopped."""
        waiting: dict[int, Committed] = {}
        applied: set[int] = set()
        while not self._stopping.is_set():
            for new in self._new(wait=not applied & waiting.keys()):
                if isinstance(new, int):
                    applied.add(new)
                else:
                    waiting[new.record.sequence] = new
            with self._changed:  # a pause may have brought some forward
                for sequence in waiting.keys() - self._open.keys():
                    del waiting[sequence]  # withdrawn
                due = [self._open[sequence] for sequence in applied & waiting.keys()]
            # Whoever is applied first is told first. What an audit heals is applied at once, also in a trial,
            # to whose end others may have to wait.
            due.sort(key=lambda one: (not is_healing(one.record), one.step, one.record.sequence))
            if due and self._verify(due[0]):
                sequence = due[0].record.sequence
                del waiting[sequence]
                applied.remove(sequence)

    def _new(self, *, wait: bool) -> list[Committed | int]:
        """What is committed, and the numbers of what worker 0 has applied, since the last time."""
        new: list[Committed | int] = []
        with contextlib.suppress(queue.Empty):
            if wait:
                new.append(self._queue.get(timeout=LOOK_SECS))
            while True:
                new.append(self._queue.get_nowait())
        return new

    def _verify(self, committed: Committed) -> bool:
        record = committed.record
        reports: dict[int, Applied] = {}
        for worker in range(self._channel.size):
            report = self._channel.applied_by(record.sequence, worker)
            if report is None:
                return False
            reports[worker] = report
        trial = self._trials.get(record.sequence)
        settled: dict[int, str] = {}
        for worker in range(self._channel.size) if trial is not None else ():
            said = self._channel.said(settled_key(record.sequence, worker), LOOK_SECS)
            if said is None:
                return False
            settled[worker] = said.digest
        self._tell(committed, reports, trial, settled)
        for worker in range(self._channel.size):
            self._channel.forget_applied(record.sequence, worker)
            if trial is not None:
                self._channel.forget_said(settled_key(record.sequence, worker))
        with self._changed:
            del self._open[record.sequence]
            self._changed.notify_all()
        return True

    def _tell(
        self,
        committed: Committed,
        reports: dict[int, Applied],
        trial: TrialOutcome | None,
        settled: dict[int, str],
    ) -> None:
        record = committed.record
        digests = {worker: report.digest for worker, report in reports.items()}
        after_trial = len(set(settled.values())) > 1 and len(set(digests.values())) == 1
        if after_trial:
            digests = settled
        together = len({report.trained for report in reports.values()}) == 1
        equal = together and len(set(digests.values())) == 1
        receipt = Receipt(
            sequence=record.sequence,
            id=record.id,
            step=max(report.step for report in reports.values()),
            digests=digests,
            propose_to_applied_secs=max(r.at for r in reports.values()) - committed.proposed_at,
            stall_secs=max(report.stall_secs for report in reports.values()),
            verified_at=time.time(),
            stage=Stage.VERIFIED if equal else Stage.FAILED,
            trial=trial,
        )
        faults.point("verify")
        try:
            if not committed.has_receipt:
                self._journal.write_receipt(receipt)
        except OSError as error:
            logger.warning("the receipt of update %d could not be written: %s", record.sequence, error)
        outcome: Verified | Failed
        if equal:
            outcome = Verified(committed.content_digest, receipt.to_json())
        else:
            by_name = {str(worker): digest for worker, digest in digests.items()}
            trained = {} if together else {str(w): report.trained for w, report in reports.items()}
            described = receipt.to_json()
            where = (record.id, committed.content_digest, receipt.step)
            outcome = Failed(*where, by_name, described, trained, after_trial)
            logger.error("%s", diverged(outcome))
        self._outcomes[record.id] = outcome
        self._channel.append(outcome)


def is_healing(record: Record) -> bool:
    """Whether it is an audit's, which made replicas equal again where all stood still, perhaps in a trial."""
    return record.author == "audit" and record.id.startswith("heal-")
