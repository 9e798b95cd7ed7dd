"""An uncommitted update can be withdrawn; then no worker applies it in any attempt."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from replicast.core.entries import Stage
from replicast.storage.claims import Fence
from replicast.storage.journal import FileJournal, MemoryJournal
from replicast.transport import Parcel
from replicast.update.update import Update
from tests.threads import DEADLINE_SECS, Job, eventually
from tests.unit.runtime.playing import bias, bias_of, refusal, scheduled


class SlowJournal(MemoryJournal):
    """Loads payloads when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.is_loading, self.may_load = threading.Event(), threading.Event()
        self.may_load.set()

    def load(self, id_: str, digest: str) -> Update:
        self.is_loading.set()
        self.may_load.wait(DEADLINE_SECS)
        return super().load(id_, digest)


def test_what_is_withdrawn_while_it_is_loaded_from_the_journal_leaves_no_bytes_behind() -> None:
    journal = SlowJournal()
    with Job(2, journal) as job:
        scheduled(job.workers[0].propose(bias(1.0, id="later"), at_step=8))
    journal.is_loading.clear()
    journal.may_load.clear()
    with job.next_attempt() as again:
        assert journal.is_loading.wait(DEADLINE_SECS)
        ticket = again.withdraw("later")
        eventually(lambda: ticket in again.outcomes)
        again.train(2)
        journal.may_load.set()
        again.workers[1].propose(bias(2.0, id="next"))
        again.train(6)
        assert [bias_of(worker) for worker in again.workers] == [2.0, 2.0]
        eventually(lambda: not again.files())


def test_a_later_start_does_not_apply_what_was_withdrawn_and_can_withdraw_too(tmp_path: Path) -> None:
    with Job(2, FileJournal(tmp_path, Fence(tmp_path, attempt=0))) as job:
        tickets = [
            scheduled(job.workers[0].propose(bias(10.0**n, id=f"number-{n}"), at_step=8 + n))
            for n in range(3)
        ]
        job.withdraw("number-1")
        refusal(tickets[1])
    with job.next_attempt(journal=FileJournal(tmp_path, Fence(tmp_path, attempt=1))) as again:
        again.train(3)
        waiting = again.workers[1].propose(bias(100.0, id="number-2"), at_step=10)
        again.withdraw("number-2")
        refusal(waiting)
        again.train(10)
        assert [bias_of(worker) for worker in again.workers] == [1.0, 1.0]
        assert again.journal.history().withdrawn == {"number-1", "number-2"}


def test_a_worker_that_is_late_does_not_wait_for_the_bytes_of_a_withdrawn_update() -> None:
    with Job(2) as job:
        quick, late = job.workers
        goes_on, prepared, asked_for = threading.Event(), list[str](), list[str]()
        prepare_quick, prepare_late = (worker.session.replica.prepare for worker in job.workers)
        receive = late.transport.receive

        def noting_quick(id_: str, *more: Any) -> None:
            prepare_quick(id_, *more)
            prepared.append(id_)

        def noting_late(id_: str, *more: Any) -> None:
            prepare_late(id_, *more)
            if id_ == "first":
                goes_on.wait(DEADLINE_SECS)

        def receiving(parcel: Parcel, *more: Any) -> Any:
            asked_for.append(parcel.id)
            return receive(parcel, *more)

        quick.session.replica.prepare, late.session.replica.prepare = noting_quick, noting_late
        late.transport.receive = receiving  # type: ignore[method-assign]
        first = quick.propose(bias(1.0, id="first"))
        for worker in (quick, late):  # that of worker 1 shows that it has heard of the end of the other one
            ticket = worker.propose(bias(10.0, id=f"of-{worker.rank}"))
            eventually(lambda id_=f"of-{worker.rank}": id_ in prepared)
            job.withdraw(f"of-{worker.rank}")
            eventually(lambda ticket=ticket: ticket.stage is Stage.WITHDRAWN)
        goes_on.set()
        last = quick.propose(bias(100.0, id="last"))
        job.train(4)
        first.result(DEADLINE_SECS)
        last.result(DEADLINE_SECS)
        assert len([id_ for id_ in asked_for if "-0-" in id_]) == 2, asked_for
        assert [bias_of(one) for one in job.workers] == [101.0, 101.0]
