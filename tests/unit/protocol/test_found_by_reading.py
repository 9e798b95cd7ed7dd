"""What reading the protocol has found, each in the fewest words that show it."""

from __future__ import annotations

import threading
import time

import pytest

from replicast.errors import ReplicasDiverged
from replicast.journal import MemoryJournal, Receipt
from replicast.protocol import Patience
from replicast.protocol.messages import Stage
from replicast.update import Update
from tests.unit.protocol.twins import DEADLINE_SECS, Job, Worker, bias, eventually


def test_pauses_leave_nothing_in_the_service_although_nobody_is_asked_anything() -> None:
    with Job(3) as job:
        for _ in range(20):
            job.on_all(lambda worker: worker.member.pause("drain"))
        # What the last pause has left is forgotten with the next; only worker 0 has paused without keys.
        eventually(lambda: len([key for key in job.store.values if "/log/" in key]) <= 2)
        eventually(lambda: len([key for key in job.store.values if "/proposal/" in key]) <= 4)


def test_a_coordinator_that_waits_for_an_answer_ends_with_its_worker() -> None:
    with Job(2, patience=Patience(answer_secs=60, stage_secs=60, decide_secs=60)) as job:
        channel = job.coordinator._rounds._channel
        asked = threading.Event()
        append = channel.append

        def append_noting(message: object) -> int:
            if isinstance(message, Stage):
                job.workers[0].member.channel.answer = lambda *_: None  # type: ignore[method-assign]
                asked.set()
            return append(message)

        channel.append = append_noting  # type: ignore[method-assign]
        ticket = job.workers[0].member.propose(bias(1.0))
        assert asked.wait(DEADLINE_SECS)
        threads = job.workers[0].member.threads
        threads.stop(DEADLINE_SECS)
        assert [thread.name for thread in threads._threads if thread.is_alive()] == []
        assert not ticket.done(), "it was not refused: a later life may be told of it"


class SlowReceipts(MemoryJournal):
    """The disk takes its time; a job that is dead writes nothing more."""

    def __init__(self) -> None:
        super().__init__()
        self.dead = False

    def write_receipt(self, receipt: Receipt) -> None:
        time.sleep(0.2)
        if not self.dead:
            super().write_receipt(receipt)


def test_what_a_pause_brought_forward_is_not_moved_again_by_the_next() -> None:
    journal = SlowReceipts()
    with Job(2, journal, durable=True) as job:
        member = job.workers[1].member
        member.propose(bias(1.0, id="first"))
        eventually(lambda: len(journal.records()) == 1)
        member.propose(Update(id="second").scale("dense/bias", 2.0), at_step=1)
        eventually(lambda: len(journal.records()) == 2)
        job.on_all(lambda worker: worker.member.pause("drain"))
        job.train(1)
        lived = list(job.workers[0].applied)
        journal.dead = True
    assert lived == [(0, "first"), (1, "second")]
    assert not journal.receipts(), "the job was meant to die before"
    with Job(2, journal, durable=True) as job:
        job.train(3)
        assert job.workers[0].applied == lived


def test_a_pause_that_an_audits_error_has_ended_does_not_keep_the_next_one() -> None:
    with Job(2) as job:
        paused, other = job.workers
        for worker in job.workers:
            worker.member.examiner.policy = "raise"
        job.on_all(lambda worker: worker.member.arrive(1))
        other.state.values["dense/bias"][0] = 7.0

        def ask_for_an_audit_and_stand() -> None:
            eventually(lambda: job.coordinator._pauses.there)
            other.member.wish("audit")
            other.member.send(lambda: None)
            other.member.gate.park(lambda: False, DEADLINE_SECS)

        def stand(worker: Worker) -> None:
            with pytest.raises(ReplicasDiverged):
                worker.member.pause("drain") if worker is paused else ask_for_an_audit_and_stand()

        job.on_all(stand)
        assert job.coordinator._pauses.there == {}
        for _ in range(2):  # they have paused a different number of times
            job.on_all(lambda worker: worker.member.pause("drain"))
