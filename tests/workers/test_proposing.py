"""Under which ids workers propose, and how `sync` agrees on one: threads play the workers."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from replicast.errors import UpdateRefused
from replicast.runtime import Ticket
from replicast.replicas.proposing import Proposing, checked_worker
from replicast.replicas.syncing import sync
from replicast.update import Update
from tests.unit.protocol.twins import DEADLINE_SECS, Job, bias


def propose(proposing: Proposing, what: object) -> Ticket:
    return proposing.propose(what, source=None, at_step=None)  # type: ignore[arg-type]


def in_a_thread(proposing: Proposing, what: object) -> Ticket:
    tickets: list[Ticket] = []
    thread = threading.Thread(target=lambda: tickets.append(propose(proposing, what)))
    thread.start()
    thread.join(DEADLINE_SECS)
    return tickets[0]


def test_two_functions_of_a_thread_are_two_also_at_the_same_step() -> None:
    with Job(2) as job:
        proposing = Proposing(job.workers[1].member)
        tickets = [
            in_a_thread(proposing, lambda now, n=n: {"dense/bias": now["dense/bias"] + np.float32(n)})
            for n in (1, 10)
        ]
        # As another life of the job would give them: not by a count that begins anew.
        tickets.append(
            in_a_thread(
                Proposing(job.workers[1].member),
                lambda now: {"dense/bias": now["dense/bias"] + np.float32(100)},
            )
        )
        job.train(3)
        assert sorted(ticket.result(DEADLINE_SECS).sequence for ticket in tickets) == [1, 2, 3]
        assert job.workers[0].state.values["dense/bias"].tolist() == [111.0] * 3


def test_what_a_script_proposes_before_it_trains_has_the_same_id_after_a_restore() -> None:
    ids = []
    for restored in (0, 5):
        with Job(2) as job:
            for worker in job.workers:
                worker.member.gate.start_from(restored)
            # The thread that proposes is the one that comes to the boundaries.
            made = job.on_all(
                lambda worker, restored=restored: (
                    worker.member.arrive(restored),
                    propose(Proposing(worker.member), bias(1.0)).id,
                    worker.member.arrive(restored + 1),
                    propose(Proposing(worker.member), bias(1.0)).id,
                )
            )
            ids.append([made[1][1], made[1][3]])
    assert ids == [["worker-1-step-0-1", "worker-1-step-1-1"], ["worker-1-step-0-1", "worker-1-step-6-1"]]


def test_workers_whose_launchers_have_counted_differently_agree_on_one_sync() -> None:
    with Job(2) as job:
        job.workers[1].state.values["dense/bias"][:] = 7
        names = sorted(job.workers[0].state.values)
        receipts = job.on_all(lambda worker: sync(worker.member, 1, names, 1, attempt=worker.rank))
        assert [receipt.id for receipt in receipts] == ["sync-0-0-1"] * 2
        assert job.workers[0].state.values["dense/bias"].tolist() == [7.0] * 3
        assert job.on_all(lambda worker: sync(worker.member, 0, names, 2, attempt=worker.rank)) == [None] * 2
        assert not [key for key in job.store.values if "/agree/sync/1/" in key]


@pytest.mark.parametrize("source", [1.5, -1, 2, "1", None])
def test_a_source_that_is_no_worker_is_refused(source: object) -> None:
    with pytest.raises(UpdateRefused, match="There is no such worker"):
        checked_worker(source, 2)
    assert type(checked_worker(np.int64(1), 2)) is int


def test_an_update_that_was_labelled_does_the_same() -> None:
    update = Update(id="x", author="me").add("b", np.ones(2, np.float32))
    other = update.labelled("you", "why")
    assert (other.author, other.note, other.id) == ("you", "why", "x")
    assert other.content_digest() == update.content_digest()
    assert update.signed("nobody") is update
